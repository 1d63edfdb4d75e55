"""`pgtk parity`: one step under two configurations, of ours, TRL or verl: where they part, and
which option explains it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pgtoolkit.comparison.parity_ours import OurSide
from pgtoolkit.comparison.parity_read import StepValues, trl_convention, verl_convention
from pgtoolkit.comparison.parity_run import run
from pgtoolkit.comparison.parity_step import QUANTITIES, RecordedStep, recorded_step
from pgtoolkit.comparison.parity_switches import (
    OF_ROLLOUT,
    Explained,
    Side,
    TheirSide,
    differences,
    explain,
)
from pgtoolkit.comparison.parity_theirs import micro_batches
from pgtoolkit.comparison.tokens import (
    OF_THE_LOSS,
    RunToRepeat,
    composed,
    refuse_no_rollouts,
)
from pgtoolkit.config.overrides import overrides_to_read
from pgtoolkit.config.rules.executed import imports
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.config.their_values import FORMULA
from pgtoolkit.config.trainer_keys import OVERRIDE, Theirs
from pgtoolkit.config.translate import Translation
from pgtoolkit.config.translate_file import read
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import is_run
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import key_of, plural, say, shell_path, text

_OF_A_STEP = (*OF_THE_LOSS, "advantage")
"""Groups of which overrides beside recorded rollouts make a second configuration."""

_KEYS_OF_A_STEP = tuple(f"rollout.{name}" for name in OF_ROLLOUT)

_NOTED = ("loss_type=", "actor_rollout_ref.actor.policy_loss.loss_mode=", "algorithm.filter_groups")
"""Keys of which `pgtk translate` says that they are not quite the same, where one step does not
show it: how its sentences begin."""

_GROUP_SIZE = {"TRL": "num_generations", "verl": "actor_rollout_ref.rollout.n"}
"""Trainer -> its key of the completions of a prompt."""

_RECORDED_REFERENCE = ("kl=k3", "kl.coefficient=0.1", "kl.reference=recorded")
"""What has the reference's log-probs read with recorded rollouts."""

_ADVANTAGES_AS_MADE = 1e-4
"""How far the advantages that are made anew may lie from the run's, relative to the largest."""


@dataclass(frozen=True)
class Parity:
    """Two sides on a step.

    apart: as `differences` returns it. losses: of each side, which a trainer may have logged.
    """

    title: str
    facts: list[str]
    sides: tuple[Side, Side]
    apart: dict[str, tuple[float, float]]
    explained: Explained
    tolerance: float
    cuts: list[str]
    losses: list[float]

    @property
    def agree(self) -> bool:
        return all(relative <= self.tolerance for _, relative in self.apart.values())

    def how(self, quantity: str) -> str:
        """Return "read, not run" for a quantity that our reading of a framework gives."""
        theirs = [side for side in self.sides if isinstance(side, TheirSide)]
        if not theirs or math.isnan(self.apart[quantity][0]):
            return ""
        return "" if all(quantity in side.ran for side in theirs) else "read, not run"


def parity(
    words: Sequence[str], number: int | None, tolerance: float, pythons: Sequence[Path] = ()
) -> Parity:
    """Return the sides that the words of the command name, on the step of the run that is last.

    words: files of TRL or verl, run directories, and overrides, which make another configuration of
        the run. With one configuration, the other is the run's own.
    number: of the step; None for that of `pgtk tokens`.
    pythons: of environments in which their own functions are called: one for each file of theirs,
        or one for all.
    Raises ConfigError, and what the repeated step raises.
    """
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in words if word not in overrides]
    if not paths:
        raise ConfigError("pgtk parity needs a run, or recorded rollouts (got none)")
    target = paths.pop()
    run_dir = target if is_run(target) else None
    of_run: list[str] = []
    if run_dir is None:
        refuse_no_rollouts("pgtk parity", target)
        of_run = [o for o in overrides if key_of(o).split(".")[0] not in _OF_A_STEP]
        overrides = [override for override in overrides if override not in of_run]
        of_run = [*overrides_to_read(str(target)), *of_run]
    _refuse_without_effect(overrides)
    jobs = [[], overrides] if overrides else [[]]
    (_, config), *others = composed(run_dir, of_run, jobs)
    sides: list[Side] = [side_of(path) for path in paths]
    sides += [OurSide(other, " ".join(typed)) for typed, other in others]
    if pythons and not any(isinstance(side, TheirSide) for side in sides):
        raise ConfigError(
            f"--python={pythons[0]} needs a file of TRL or verl (got configurations of ours)"
        )
    if not 1 <= len(sides) <= 2:
        raise ConfigError(
            f"pgtk parity needs one or two configurations beside a run (got {len(sides)}). Use "
            f"pgtk parity grpo.yaml {shell_path(target)}."
        )
    temperatures = {1.0, config.rollout.temperature, *map(_temperature, sides)}
    configs = [side.config for side in sides if isinstance(side, OurSide)]
    for line in imports(config, *configs):
        say(f"note: {line}", error=True)
    repeated = config
    if run_dir is None and config.kl.kind == "none" and any(map(_reads_reference, sides)):
        (_, repeated), *_ = composed(None, [*of_run, *_RECORDED_REFERENCE], [[]])
    number, made, facts = RunToRepeat(run_dir, repeated).step(number, sorted(temperatures))
    step = recorded_step(made)
    if config.kl.target is not None:  # the coefficient moves
        coefficient = made.metrics.get("kl_coefficient", config.kl.coefficient)
        config = with_values(config, {"kl.coefficient": coefficient})
    ours = OurSide(config, "the run" if run_dir else "a run on them")
    sides = [*sides, ours][:2]
    if step.has_rewards and not _makes_the_advantages(step, ours):
        step = replace(step, has_rewards=False)
        facts.append(
            "Advantages are the run's on both sides: the step has parts of groups or of a batch, "
            "from which they cannot be made anew."
        )
    for side in sides:
        if isinstance(side, TheirSide):
            facts += [*side.notes, *_on_groups(side, step), *_on_the_cut(side, len(step.attempts))]
            facts += [] if run_dir else _on_the_size(side, len(step.attempts))
    for place, side in enumerate(sides):
        if isinstance(side, TheirSide) and pythons:
            sides[place] = run(step, side, pythons[min(place, len(pythons) - 1)])
    documents = plural(len(step.attempts), "document")
    tokens = plural(sum(step.lengths), "trained token")
    title = f"step {number} of {target.resolve().name}: {documents}, {tokens}"
    return compared(step, (sides[0], sides[1]), tolerance, title, facts, len(made.pieces))


def _refuse_without_effect(overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides that change none of the compared quantities."""
    for override in overrides:
        key = key_of(override)
        if key.split(".")[0] not in _OF_A_STEP and key not in _KEYS_OF_A_STEP:
            raise ConfigError(
                f"pgtk parity {override} needs keys of {', '.join(_OF_A_STEP)}, or "
                f"{', '.join(_KEYS_OF_A_STEP)} (got {key}). Others change no number of a step that "
                "is there."
            )


def compared(
    step: RecordedStep,
    sides: tuple[Side, Side],
    tolerance: float,
    title: str,
    facts: list[str],
    pieces: int,
) -> Parity:
    """Return two sides on a step. pieces: the micro-batches that we cut it into."""
    numbers = [side.numbers(step) for side in sides]
    if not any(made["gradient"].any() for made in numbers):
        facts.append(
            "The gradient is 0 on both sides, so this step shows few of the differences that there "
            "may be. Take another one with --step."
        )
    cuts = []
    for side in sides:
        cut = _micro_batches(pieces)
        if isinstance(side, TheirSide):
            parts = micro_batches(side.convention, range(len(step.attempts)))
            ranks = plural(side.convention.ranks, "rank")
            cut = f"{_micro_batches(len(parts))} of all ranks, {ranks}"
            if side.convention.documents is None:
                cut = f"micro-batches of a size that was not read, {ranks}"
        cuts.append(cut)
    return Parity(
        title,
        facts,
        sides,
        differences(*numbers),
        explain(step, sides, tolerance),
        tolerance,
        cuts,
        [float(made["loss"]) for made in numbers],
    )


def _on_groups(side: TheirSide, step: RecordedStep) -> Iterator[str]:
    """Yield a sentence where the groups of the step are of another size than theirs."""
    name = _GROUP_SIZE[side.trainer.partition(" ")[0]]
    size = side.values.get(name)
    sizes = sorted({len(members) for members in step.members})
    if step.has_rewards and isinstance(size, int) and sizes != [size]:
        in_words = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        yield (
            f"{side.trainer} makes advantages of {plural(size, 'completion')} of a prompt "
            f"({name}). The groups of this step have {in_words}, of which both sides make them."
        )


def _on_the_size(side: TheirSide, documents: int) -> Iterator[str]:
    """Yield a sentence where a step of recorded rollouts has another number of documents than
    theirs, whose logged loss is then of others."""
    size = side.values.documents if isinstance(side.values, StepValues) else None
    if size is not None and size != documents:
        yield (
            f"{side.trainer}'s step has {plural(size, 'document')} by this file, and this one "
            f"{documents}: for theirs type accumulation.docs_per_step={size}."
        )


def _on_the_cut(side: TheirSide, documents: int) -> Iterator[str]:
    """Yield sentences on micro-batches that change a number, where they may not be theirs."""
    convention = side.convention
    if convention.generated and documents > convention.generated:
        yield (
            f"{side.trainer} counts tokens by generated batch, of {convention.generated} documents "
            "that follow each other here."
        )
    size = convention.documents or documents
    if not convention.depends_on_cut or documents <= size:
        return
    yield (
        f"{side.trainer} counts tokens by micro-batch. Here these are cut with the completions of "
        "a prompt beside each other; it shuffles them first, and another cut gives other numbers."
    )
    if documents % (size * convention.ranks):
        yield (
            f"{side.trainer} has whole micro-batches of {plural(size, 'document')} on "
            f"{plural(convention.ranks, 'rank')}; this step's {documents} are no multiple."
        )


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def _temperature(side: Side) -> float:
    if isinstance(side, OurSide):
        return side.config.rollout.temperature
    return side.convention.temperature


def _reads_reference(side: Side) -> bool:
    if isinstance(side, OurSide):
        return side.config.kl.kind != "none"
    return side.convention.kl_coefficient > 0


def _makes_the_advantages(step: RecordedStep, ours: OurSide) -> bool:
    made = ours.numbers(step)["advantages"]
    size = max(float(step.advantages.abs().max()), 1e-6)
    return float((made - step.advantages).abs().max()) <= _ADVANTAGES_AS_MADE * size


def side_of(path: Path) -> Side:
    """Return a run's configuration, or that in a file of TRL or verl."""
    if is_run(path):
        return OurSide(saved_config(path), shell_path(path))
    theirs = read(path)
    trainer = theirs.table.content["trainer"]
    values = StepValues(theirs)
    convention = {"TRL": trl_convention, "verl": verl_convention}[trainer](values)
    assumed = [*theirs.assumed, *theirs.unread, values.note]
    translation = Translation(theirs)
    keys = {
        key: _taken_from(key, text(value), row, values)
        for key, (value, row) in translation.typed.items()
        if row is not None
    }
    translation.check()
    typed = translation.overrides
    as_ours: Config | None = translation.composed.config
    assert as_ours is not None  # checked
    name = f"{trainer} {theirs.table.content['version']}"
    notes = [f"{name}: {line}" for line in translation.differing if line.startswith(_NOTED)]
    notes += [f"{name}: {line}" for line in (*translation.apart, *assumed) if line]
    return TheirSide(convention, name, shell_path(path), typed, as_ours, keys, values, notes)


def _taken_from(key: str, value: str, row: Theirs, theirs: Mapping[str, object]) -> str:
    """Return the key of theirs whose value a key of ours takes: one that the row of another key
    names, as that of TRL's loss_type takes max_completion_length; else the row's own."""
    for _, here in row.cases:
        for typed in [here] if isinstance(here, str) else here.values():
            for ours, written in OVERRIDE.findall(typed):
                formula = FORMULA.fullmatch(written)
                name = formula[1] if formula and ours == key else ""
                if name in theirs and text(theirs[name]) == value:
                    return name
    return row.name


def render(parity: Parity) -> str:
    """Return what `pgtk parity` prints."""
    return "\n".join(_lines(parity))


def _lines(parity: Parity) -> Iterator[str]:
    yield from (parity.title, *parity.facts, "")
    of_sides = zip("AB", parity.sides, parity.cuts, parity.losses, strict=True)
    for letter, side, cut, loss in of_sides:
        yield f"{letter}  {_named(side)}: {cut}, loss {loss:.6g}"
    rows = [["", "largest difference", "of the largest", "", ""]]
    for quantity in QUANTITIES:
        largest, relative = parity.apart[quantity]
        if math.isnan(largest):
            rows.append([quantity, "not known", "", "", ""])
            continue
        differs = "" if relative <= parity.tolerance else "differs"
        rows.append([quantity, f"{largest:.3g}", f"{relative:.2g}", differs, parity.how(quantity)])
    yield from ("", *aligned(rows), "")
    if parity.agree:
        yield f"All agree within {parity.tolerance:g} of the largest number."
    for place, explanation in enumerate(parity.explained.sides):
        yield f"{'First' if place == 0 else 'Then'} {explanation.sentence}"
    for explanation in parity.explained.readings:
        yield f"Our reading is another: {explanation.sentence}"


def _named(side: Side) -> str:
    return side.name if isinstance(side, OurSide) else f"{side.trainer}, {side.name}"


def as_json(parity: Parity) -> str:
    """Return all of it as JSON."""

    def explanations(explained: Sequence) -> list[JsonObject]:
        return [
            {"quantity": e.quantity, "relative": e.relative, "says": e.reason, "type": e.typed}
            for e in explained
        ]

    content = {
        "step": parity.title,
        "facts": parity.facts,
        "sides": [
            {
                "name": _named(side),
                "cut": cut,
                "run": sorted(getattr(side, "ran", {})),
                "loss": loss,
            }
            for side, cut, loss in zip(parity.sides, parity.cuts, parity.losses, strict=True)
        ],
        "tolerance": parity.tolerance,
        "agree": parity.agree,
        "quantities": {
            name: {
                "difference": largest if math.isfinite(largest) else None,
                "relative": relative if math.isfinite(relative) else None,
                "how": parity.how(name),
            }
            for name, (largest, relative) in parity.apart.items()
        },
        "explained": explanations(parity.explained.sides),
        "readings": explanations(parity.explained.readings),
    }
    return json.dumps(content, indent=2)
