"""`pgtk tokens`: what several losses do to each token of a step, as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from pgtoolkit.comparison.runs import is_run, not_a_run
from pgtoolkit.config.compose import Composed, compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.overrides import jobs
from pgtoolkit.config.paths import DATA, make_absolute
from pgtoolkit.config.plan import documents_per_batch, documents_per_step, equation
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.dumps.configuration import reading
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.inspection.tokens_losses import Judged, common_vectors, judge
from pgtoolkit.inspection.tokens_step import MadeStep, compared, make_again
from pgtoolkit.losses.objective import Loss
from pgtoolkit.runs.directory import config_drift, read_metrics
from pgtoolkit.system.functions import FUNCTIONS
from pgtoolkit.system.report import key_of, refusal
from pgtoolkit.tracking.next_commands import shell_path
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.loss import loss_of

OF_THE_LOSS = ("loss", "aggregation", "correction", "kl", "entropy")
"""Groups that say what a step's loss is: overrides of their keys are what stands side by side."""

INSTRUCTIVE = ("grpo", "gspo", "cispo")
"""Families that stand beside a run's own where none is named: a ratio of a token, one of a document, and a clip that
leaves every gradient."""

_MOVABLE = (*DATA, "trainer.device", "trainer.num_threads")
"""Keys that may differ from the run's: where its files lie now, and what computes."""

_TERMS = ("l_t", "+", "-", "w_t", "rho_t")
"""How the lines of an equation begin that say what a token's number is."""

_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Rounding of other hardware stays within; other documents or weights do not."""


@dataclass(frozen=True)
class Column:
    """One of the losses that stand side by side. label: the overrides that choose it. lines: its equation."""

    label: str
    lines: list[str]
    judged: Judged


@dataclass(frozen=True)
class Inspected:
    """A step with what its tokens are under each loss, the run's own first.

    name: of the run's folder, or of the file. own: what stands before the label of the first column. facts: where
    weights and documents come from and how that is known, by sentence. common: see `tokens_losses.common_vectors`.
    """

    name: str
    own: str
    number: int
    facts: list[str]
    made: MadeStep
    common: dict
    columns: list[Column]


@dataclass(frozen=True)
class _Subject:
    """What is looked at. given: overrides that stand for it. run_dir: None where it is no run."""

    given: tuple[str, ...]
    run_dir: Path | None = None

    def compose(self, overrides: list[str]) -> Composed:
        found = compose([*self.given, *overrides], run_dir=self.run_dir)
        if found.config is not None and self.run_dir is None:
            with open_dict(found.config):
                found.config.pop("hydra", None)
            make_absolute(found.config)
        return found


def inspect(target: str | None, overrides: list[str], number: int | None) -> Inspected:
    """The step of a run, or of a run that would be started on recorded rollouts or without anything.

    target: a run directory, a file or folder of recorded rollouts, or None. overrides: keys of the loss, with several
    values separated by commas, are what stands side by side; others configure what is no run. number: of the step;
    None for the last one of the batch that the newest checkpoint stands before.
    Raises ConfigError, DataError for a step that is not the one that the run has made, and what training raises.
    """
    subject = _subject(target)
    of_loss = [one for one in overrides if key_of(one).split(".")[0] in OF_THE_LOSS]
    others = [one for one in overrides if one not in of_loss]
    named = _named_by_the_run(subject, of_loss)
    varied = [one for one in of_loss if one not in named]
    chosen = [_with_functions(job, named) for job in jobs(varied)] if varied else []
    first = named if subject.run_dir or not chosen else chosen[0]
    own, *beside = _composed(subject, others, [first, *chosen])
    if subject.run_dir is not None and (others or named):
        _refuse_another_run(subject, own.config)
    config = OmegaConf.to_object(own.config)
    if subject.run_dir is None and (path := getattr(config.rollout, "save_path", None)):
        setting, reason = f"rollout.save_path={path}", "A page is made, and no run."
        raise ConfigError(refusal(setting, "to be left out", "a folder", reason, "rollout.save_path=null"))
    rows = read_metrics(subject.run_dir / "metrics.jsonl") if subject.run_dir else []
    number, checkpoint = _begin(subject, config, number, [row["step"] for row in rows])
    made = make_again(config, checkpoint, number)
    facts = [_weights(subject, checkpoint, number), f"Documents: {made.documents}."]
    if subject.run_dir is not None:
        facts.append(_proof(made, next(row for row in rows if row["step"] == number), number))
    if not chosen and made.has_old_log_probs:
        others_of_it = [name for name in INSTRUCTIVE if name != config.loss.name][:2]
        beside = _composed(subject, others, [_with_functions([f"loss={name}"], named) for name in others_of_it])
    columns = list(_columns(made, [own, *beside]))
    title = "this run: " if subject.run_dir else ""
    name = Path(target).resolve().name if target else "new-run"
    return Inspected(name, title, number, [*facts, *_notes(config, made, columns)], made, common_vectors(made), columns)


def _named_by_the_run(subject: _Subject, of_loss: list[str]) -> list[str]:
    """Of what was typed, the functions that the run itself has: no file makes pgtk import one, so they are typed."""
    typed = [one for one in of_loss if key_of(one) in FUNCTIONS] if subject.run_dir else []
    saved = subject.compose([]).config if typed else {}
    return [one for one in typed if OmegaConf.select(saved, key_of(one)) is not None]


def _with_functions(job: list[str], named: list[str]) -> list[str]:
    """A job with the run's own functions, but for those of a group of which it chooses another option."""
    chosen = [*map(key_of, job)]
    return [*(one for one in named if key_of(one) not in chosen and key_of(one).split(".")[0] not in chosen), *job]


def _subject(target: str | None) -> _Subject:
    if target is None:
        return _Subject(())
    path = Path(target)
    if is_run(path):
        return _Subject((), path)
    if not path.exists() or (path.is_dir() and not [*path.glob("*.jsonl"), *path.glob("*.parquet")]):
        raise not_a_run(f"pgtk tokens {target}", path, "a run directory, or recorded rollouts")
    return _Subject(reading(target))


@dataclass(frozen=True)
class _Configured:
    """A configuration with the overrides of the loss that it has; values: the same as the rules have seen it."""

    job: list[str]
    config: DictConfig
    values: Any


def _composed(subject: _Subject, others: list[str], jobs: list[list[str]]) -> list[_Configured]:
    """The configuration of each job; ConfigError with every problem of any. What is wrong with servers is none, since
    none is started."""
    found, problems = [], []
    for job in jobs:
        composed = subject.compose([*others, *job])
        problems += composed.problems
        if composed.config is not None:
            values, report = resolve_and_validate(composed.config)
            problems += report.problems
            found.append(_Configured(job, composed.config, values))
    if problems := [problem for problem in dict.fromkeys(problems) if not problem.startswith("sampler.")]:
        raise ConfigError("\n".join(problems))
    return found


def _refuse_another_run(subject: _Subject, config: DictConfig) -> None:
    """A step is made again as it was: nothing of the run may be changed but the losses that stand beside its own."""
    drift = config_drift(plain_config(subject.compose([]).config), plain_config(config))
    if changed := [key for key in drift if key not in _MOVABLE]:
        before, now = drift[changed[0]]
        raise ConfigError(
            f"{changed[0]}={now} needs to stay as the run had it (got {now}, was {before}). A step is made again as it "
            f"was. Use keys of {', '.join(OF_THE_LOSS)} for what stands beside it, or a new run."
        )


def _begin(subject: _Subject, config: Config, number: int | None, steps: list[int]) -> tuple[int, dict | None]:
    """(number of the step, the newest checkpoint before it); steps: those that the run has made."""
    if subject.run_dir is None:
        most, checkpoint = config.trainer.max_steps, None
        if number is not None and number > most:
            raise ConfigError(
                f"--step={number} needs at most trainer.max_steps={most} (got {number}). Use --step={most}."
            )
    else:
        if not steps:
            raise ConfigError(
                f"pgtk tokens {subject.run_dir} needs a step that the run has made (got none). Use pgtk resume."
            )
        if number is not None and number not in steps:
            raise ConfigError(
                f"--step={number} needs a step that the run has made (got {steps[0]} to {steps[-1]}). Of others "
                f"nothing is known. Use --step={steps[-1]}."
            )
        most = steps[-1]
        checkpoint = load_newest(subject.run_dir / "checkpoints", most if number is None else number)
    return number or min(most, _last_of_batch(config, checkpoint)), checkpoint


def _last_of_batch(config: Config, checkpoint: dict | None) -> int:
    """The last step of the batch of documents that a checkpoint stands before or in: there the ratios are widest."""
    done, position = (0, 0) if checkpoint is None else (checkpoint["step"], checkpoint["data"]["position"])
    batch, per_step = documents_per_batch(config.rollout), documents_per_step(config)
    if batch is None or per_step == 0:
        return done + 1
    return done + -(-(batch - position % batch) // per_step)


def _columns(made: MadeStep, configured: list[_Configured]) -> Iterator[Column]:
    """Each loss once, the first of them the run's own."""
    known: list[Loss] = []
    for one in configured:
        loss = loss_of(OmegaConf.to_object(one.config))
        if loss in known:
            continue
        own = f"loss={one.values.loss.name} aggregation={one.values.aggregation.mode}"
        lines = [line for line in equation(one.values)[1:] if line.strip().startswith(_TERMS)]
        yield Column(" ".join(one.job) if known else own, lines, judge(made, loss))
        known.append(loss)


def _weights(subject: _Subject, checkpoint: dict | None, number: int) -> str:
    """What the new log-probs are of."""
    start, steps = 0 if checkpoint is None else checkpoint["step"], "the weights that the run begins with"
    if checkpoint is not None:
        steps = f"those of the checkpoint of step {start}"
    again = number - 1 - start
    if again:
        span = f"step {start + 1}" if again == 1 else f"steps {start + 1} to {number - 1}"
        steps += f", with {span} made {'again ' if subject.run_dir else ''}in memory"
    return f"Weights: those before the update of step {number}: {steps}."


def _proof(made: MadeStep, row: dict[str, float], number: int) -> str:
    """That this is the step which the run has made; DataError where it is not."""
    pairs = compared(made.metrics, row)
    unequal = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not unequal:
        return f"All {len(pairs)} recorded metrics of step {number} come out the same, bit for bit."
    far = {
        name: pair for name, pair in unequal.items() if not math.isclose(*pair, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    }
    if not far:
        return (
            f"All {len(pairs)} recorded metrics of step {number} come out the same but for rounding, {len(unequal)} of "
            "them not bit for bit: the hardware, a library or the number of processes is another."
        )
    name, (found, recorded) = next(iter(far.items()))
    raise DataError(
        f"--step={number} needs the step as the run has made it (got {name}={found:.6g}, and metrics.jsonl has "
        f"{recorded:.6g}; {len(far)} metrics differ). {made.documents.capitalize()}; on other hardware, or after a "
        "resume with other settings, that is another step. Use a step right after a checkpoint, or rollout.save_path="
        "FOLDER in a new run."
    )


def _notes(config: Config, made: MadeStep, columns: list[Column]) -> Iterator[str]:
    """What a reader would take otherwise."""
    sizes = made.step.totals.tokens_per_group.shape[0], getattr(config.rollout, "group_size", None)
    whole = sizes[1] is None or sizes[0] * sizes[1] == len(made.step.documents)
    if not whole and any(column.judged.loss.aggregation.needs_groups for column in columns):
        yield "Some prompts have documents in other steps as well: N_g counts those of this step."
    if any(column.judged.loss.entropy_coefficient for column in columns):
        yield "An entropy bonus is part of a token's share of the loss and not of its coefficient."
    if not made.has_old_log_probs:
        yield "The documents have no old log-probs: there is no ratio, and nothing is clipped."


def summary(inspected: Inspected, page: Path) -> str:
    """What `pgtk tokens` prints."""
    totals = inspected.made.step.totals
    size = f"{totals.num_documents} documents, {totals.num_tokens} trained tokens"
    lines = [f"step {inspected.number} of {inspected.name}: {size}", *inspected.facts]
    rows = [("", "loss", "cut below", "cut above", "capped")]
    for column in inspected.columns:
        one = column.judged
        capped = one.count("below, capped", "above, capped")
        rows.append(
            (column.label, f"{one.total:.6g}", *map(str, (one.count("below, cut"), one.count("above, cut"), capped)))
        )
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for label, *cells in rows:
        lines.append("  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    return "\n".join([*lines, f"page  {shell_path(page)}"])
