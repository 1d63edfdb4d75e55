"""`pgtk tokens`: what several losses do to each token of a step, as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pgtoolkit.assembly.loss import loss_of
from pgtoolkit.comparison.tokens_losses import LossOnStep, common_vectors, loss_on_step
from pgtoolkit.comparison.tokens_step import MadeStep, make_again
from pgtoolkit.config.compose import compose
from pgtoolkit.config.counts import documents_per_step
from pgtoolkit.config.keys import declared, keys_of
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.overrides import jobs, overrides_to_read
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.plan import equation
from pgtoolkit.config.rules.executed import imports
from pgtoolkit.config.rules.rule import Rule
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config, Rollout
from pgtoolkit.config.validate import RULES, validated
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.report import key_of, plural, say, shell_path
from pgtoolkit.training.checkpoint import load_newest

OF_THE_LOSS = ("loss", "aggregation", "correction", "kl", "entropy")
"""Groups that decide a step's loss. Overrides of their keys choose the losses to compare."""

INSTRUCTIVE = ("grpo", "gspo", "cispo")
"""Families to compare with a run's own where the user names none.

They have a ratio of each token, a ratio of each document, and a clip that leaves every gradient.
"""

RULES_BESIDE = tuple(
    rule
    for rule in RULES
    if not (isinstance(rule, Rule) and "advantage" in f"{rule.when} {rule.needs}")
)
"""The rules for a loss that is shown on a step of another.

The step's advantages are there, whatever the loss makes of them: without any, grpo is 0.
"""

_TERMS = ("l_t", "+", "-", "w_t", "rho_t")
"""Beginnings of the lines of an equation that define one of the numbers of a token."""

_OF_THE_UPDATE = (
    "seconds_",
    "time",
    "tokens_per_second",
    "peak_memory_gb",
    "num_micro_batches",
    "learning_rate",
)
"""Beginnings of the names of metrics that depend on how a step was computed, and so may differ when
it is repeated."""

_RELATIVE_TOLERANCE = 1e-3
_ABSOLUTE_TOLERANCE = 1e-5
"""Other hardware or libraries change a metric by less than this, other documents or weights by
more."""


@dataclass(frozen=True)
class Inspected:
    """A step with the numbers of its tokens under each loss, the run's own first.

    name: of the run's folder, or of the file.
    prefix: words before the label of the first column.
    facts: sentences on where weights and documents come from, and how that is known.
    common: see `tokens_losses.common_vectors`.
    """

    name: str
    prefix: str
    number: int
    facts: list[str]
    made: MadeStep
    common: dict[str, np.ndarray]
    columns: list[LossOnStep]


def inspect(target: str, overrides: list[str], number: int | None) -> Inspected:
    """Return a step of a run, or of a run that would be started on recorded rollouts, under several
    losses.

    target: a run directory, or a file or folder of recorded rollouts.
    overrides: keys of the loss, with several values separated by commas, choose the losses to
        compare; for recorded rollouts others configure the run.
    number: of the step; None for the last step on the batch of documents with which the newest
        checkpoint goes on.
    Raises ConfigError, DataError if the repeated step is not the one that the run has made, and
    what training raises.
    """
    path = Path(target)
    run_dir = path if is_run(path) else None
    of_loss = [override for override in overrides if key_of(override).split(".")[0] in OF_THE_LOSS]
    others = [override for override in overrides if override not in of_loss]
    if run_dir is None:
        refuse_no_rollouts("pgtk tokens", path)
        others = [*overrides_to_read(target), *others]
    losses = jobs(of_loss) if of_loss else []
    # Recorded rollouts have no loss of their own, so the first loss that was chosen comes first.
    first = [] if run_dir or not losses else losses[0]
    (_, config), *compared = composed(run_dir, others, [first, *losses])
    run = RunToRepeat(run_dir, config)
    run.refuse_another()
    for line in imports(config, *(other for _, other in compared)):
        say(f"note: {line}", error=True)
    number, made, facts = run.step(number)
    if not losses and made.has_old_log_probs:
        instructive = [name for name in INSTRUCTIVE if name != config.loss.name][:2]
        compared = composed(run_dir, others, [[f"loss={name}"] for name in instructive])
    return Inspected(
        name=path.resolve().name,
        prefix="this run: " if run_dir else "",
        number=number,
        facts=facts,
        made=made,
        common=common_vectors(made),
        columns=list(_columns(made, [(first, config), *compared])),
    )


@dataclass(frozen=True)
class RunToRepeat:
    """A run with its configuration. directory: None for one on recorded rollouts."""

    directory: Path | None
    config: Config

    def refuse_another(self) -> None:
        """Refuse a configuration that is not the run's, since its step would be a different one.

        Only keys may differ that say where files lie or on which hardware to compute.
        """
        if self.directory is None:
            return
        config = self.config
        drift = config_drift(plain_config(saved_config(self.directory)), plain_config(config))
        movable = {
            key.name for key in keys_of(config) if key.reads or declared(key.machine, config)
        }
        changed = [key for key in drift if key not in movable]
        if changed:
            before, now = drift[changed[0]]
            raise ConfigError(
                f"{changed[0]}={now} needs to stay as the run had it (got {now}, was {before}). A "
                f"step is made again as it was. Use keys of {', '.join(OF_THE_LOSS)} for the "
                "losses to compare, or a new run."
            )

    def step(
        self, number: int | None, temperatures: Sequence[float] = ()
    ) -> tuple[int, MadeStep, list[str]]:
        """Return a step's number, the step, and sentences on where it comes from, and how that is
        known.

        number, and what is raised: see `inspect`. temperatures: see `make_again`.
        """
        config = self.config
        directory = self.directory
        recorded = read_metrics(directory / "metrics.jsonl") if directory else {"step": []}
        steps = [int(step) for step in recorded["step"]]
        max_steps = config.trainer.max_steps
        number, checkpoint = _step_and_checkpoint(directory, max_steps, number, steps)
        if number is None:
            number = last_of_batch(config.rollout, documents_per_step(config), checkpoint)
            number = min(number, steps[-1] if directory else max_steps)
        made = make_again(config, checkpoint, number, temperatures)
        facts = [
            _origin_of_weights(directory, checkpoint, number),
            f"Documents: {made.documents}.",
        ]
        if directory:
            values = {name: column[steps.index(number)] for name, column in recorded.items()}
            row = {name: value for name, value in values.items() if not math.isnan(value)}
            facts.append(_agreement(made, row, number))
        return number, made, facts


def refuse_no_rollouts(command: str, path: Path) -> None:
    """Raise ConfigError for what is neither a run nor recorded rollouts."""
    if not _may_be_rollouts(path) or (path / "status.json").is_file():
        raise not_a_run(f"{command} {path}", path, "a run directory, or recorded rollouts")


def _may_be_rollouts(path: Path) -> bool:
    """Return whether this is a file, or a folder with files of the kinds that hold rollouts."""
    if path.is_dir():
        return any(path.glob("*.jsonl")) or any(path.glob("*.parquet"))
    return path.exists()


def composed(
    run_dir: Path | None, others: list[str], jobs: list[list[str]]
) -> list[tuple[list[str], Config]]:
    """Return each job (overrides) with its configuration.

    Raises ConfigError with the problems of all. Those of servers are left out, since no server is
    started.
    """
    configured = []
    problems = []
    for job in jobs:
        rules = RULES_BESIDE if run_dir or configured else RULES
        config, report = validated(compose([*others, *job], run_dir=run_dir), rules)
        problems += report.problems
        configured.append((job, config))
    problems = [
        problem for problem in dict.fromkeys(problems) if not problem.startswith("sampler.")
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return configured


def _step_and_checkpoint(
    run_dir: Path | None, max_steps: int, number: int | None, steps: list[int]
) -> tuple[int | None, dict | None]:
    """Return the step's number, if one is asked for, and the newest checkpoint before it.

    steps: the numbers of the steps that the run has made.
    """
    if run_dir is None:
        first = 1
        last = max_steps
        limit = "trainer.max_steps"
    elif not steps:
        raise ConfigError(
            f"pgtk tokens {run_dir} needs a step that the run has made (got none). Use pgtk resume."
        )
    else:
        first = steps[0]
        last = steps[-1]
        limit = "which the run has made"
    if number is not None and not first <= number <= last:
        needs = f"a step from {first} to {last}, {limit}"
        raise ConfigError(f"--step={number} needs {needs} (got {number}). Use --step={last}.")
    checkpoint = None
    if run_dir is not None:
        checkpoint = load_newest(run_dir / "checkpoints", last if number is None else number)
    return number, checkpoint


def last_of_batch(rollout: Rollout, per_step: int, checkpoint: dict | None) -> int:
    """Return the last step on the batch of documents with which training continues from a
    checkpoint, in the last pass over it: there ratios are widest.

    per_step: documents of a step; 0 where they are not known.
    """
    steps_done = 0
    position = 0
    passes_done = 0
    if checkpoint is not None:
        steps_done = checkpoint["step"]
        position = checkpoint["data"]["position"]
        passes_done = checkpoint["data"].get("pass", 0)
    if not isinstance(rollout, PolicyRolloutSettings) or per_step == 0:
        return steps_done + 1
    batch_size = rollout.prompts_per_batch * rollout.group_size
    left_in_pass = math.ceil((batch_size - position % batch_size) / per_step)
    further_passes = rollout.passes - 1 - passes_done
    return steps_done + left_in_pass + further_passes * math.ceil(batch_size / per_step)


def _columns(made: MadeStep, configured: list[tuple[list[str], Config]]) -> Iterator[LossOnStep]:
    """Yield each different loss on the step, the run's own first."""
    known: list[Loss] = []
    choices: list[tuple[object, ...]] = []  # an own function is made anew for each loss
    for job, config in configured:
        loss = loss_of(config)
        choice = tuple(plain_config(config).get(group) for group in OF_THE_LOSS)
        if loss in known or choice in choices:
            continue
        label = " ".join(job)
        if not known:
            options = [f"{group}={chosen(config, group)}" for group in ("loss", "aggregation")]
            label = _first_label(job, options)
        lines = [line for line in equation(config)[1:] if line.strip().startswith(_TERMS)]
        shown = loss
        if loss.family.score_centering:
            lines.append("score centering, which is no number of one token's log-prob, is left out")
            shown = replace(loss, family=replace(loss.family, score_centering=False))
        yield replace(loss_on_step(made, shown), label=label, lines=lines)
        known.append(loss)
        choices.append(choice)


def _first_label(job: list[str], options: list[str]) -> str:
    """Return the label of the first loss: its options of loss and aggregation, and the other keys
    that were typed for it."""
    groups = [key_of(option) for option in options]
    return " ".join([*options, *(word for word in job if key_of(word) not in groups)])


def _origin_of_weights(run_dir: Path | None, checkpoint: dict | None, number: int) -> str:
    """Return a sentence on where the weights come from that the new log-probs belong to."""
    if checkpoint is None:
        start = 0
        origin = "the weights that the run begins with"
    else:
        start = checkpoint["step"]
        origin = f"those of the checkpoint of step {start}"
    repeated = number - 1 - start
    if repeated:
        span = f"step {start + 1}" if repeated == 1 else f"steps {start + 1} to {number - 1}"
        origin += f", with {span} made {'again ' if run_dir else ''}in memory"
    return f"Weights: those before the update of step {number}: {origin}."


def _agreement(made: MadeStep, row: dict[str, float], number: int) -> str:
    """Return a sentence on how the metrics of the repeated step agree with the run's row of
    metrics.jsonl.

    Raises DataError where they differ by more than rounding.
    """
    names = [name for name in row if name in made.metrics and not name.startswith(_OF_THE_UPDATE)]
    pairs = {name: (made.metrics[name], row[name]) for name in names}
    different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not different:
        return f"All {len(pairs)} recorded metrics of step {number} come out the same, bit for bit."
    far = {
        name: pair
        for name, pair in different.items()
        if not math.isclose(*pair, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    }
    if not far:
        return (
            f"All {len(pairs)} recorded metrics of step {number} come out the same but for "
            f"rounding, {len(different)} of them not bit for bit: hardware, a library or the "
            "number of processes is another, or a GPU rounds anew."
        )
    name, (made_again, recorded) = next(iter(far.items()))
    raise DataError(
        f"--step={number} needs the step as the run has made it (got {name}={made_again:.6g}, and "
        f"metrics.jsonl has {recorded:.6g}; {len(far)} of {len(pairs)} metrics differ). "
        f"{made.documents.capitalize()}; on other hardware, or after a resume with other settings, "
        "that is another step. Use a step right after a checkpoint, or rollout.save_path=FOLDER in "
        "a new run."
    )


def tokens_summary(inspected: Inspected, page: Path) -> str:
    """Return what `pgtk tokens` prints: the step, where it comes from, and totals of each loss."""
    totals = inspected.made.step.totals
    size = (
        f"{plural(int(totals.num_documents), 'document')}, "
        f"{plural(int(totals.num_tokens), 'trained token')}"
    )
    lines = [f"step {inspected.number} of {inspected.name}: {size}", *inspected.facts]
    rows = [["", "loss", "cut below", "cut above", "capped"]]
    for column in inspected.columns:
        cut_below = column.count("below, cut")
        cut_above = column.count("above, cut")
        capped = column.count("below, capped", "above, capped")
        rows.append(
            [column.label, f"{column.total:.6g}", str(cut_below), str(cut_above), str(capped)]
        )
    return "\n".join([*lines, *aligned(rows), f"page  {shell_path(page)}"])
