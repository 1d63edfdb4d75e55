"""`pgtk tokens`: what several losses do to each token of a step, as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pgtoolkit.comparison.tokens_losses import LossOnStep, common_vectors, loss_on_step
from pgtoolkit.comparison.tokens_step import MadeStep, make_again
from pgtoolkit.config.compose import compose
from pgtoolkit.config.keys import keys_of
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.overrides import jobs, reading
from pgtoolkit.config.plan import documents_per_batch, documents_per_step, equation
from pgtoolkit.config.rules.executed import imports
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.losses.objective import Loss
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.report import key_of, plural, say, shell_path
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.loss import loss_of

OF_THE_LOSS = ("loss", "aggregation", "correction", "kl", "entropy")
"""Groups that say what a step's loss is: overrides of their keys are what stands side by side."""

INSTRUCTIVE = ("grpo", "gspo", "cispo")
"""Families that stand beside a run's own where none is named: a ratio of a token, one of a document, and a clip that
leaves every gradient."""

_TERMS = ("l_t", "+", "-", "w_t", "rho_t")
"""How the lines of an equation begin that say what a token's number is."""

_OF_THE_UPDATE = ("seconds_", "time", "tokens_per_second", "peak_memory_gb", "num_micro_batches", "learning_rate")
"""Metrics, by how their names begin, that say how a step was made, not what was known before its update."""

_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Rounding of other hardware stays within; other documents or weights do not."""


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
    columns: list[LossOnStep]


def inspect(target: str, overrides: list[str], number: int | None) -> Inspected:
    """The step of a run, or of a run that would be started on recorded rollouts.

    target: a run directory, or a file or folder of recorded rollouts. overrides: keys of the loss, with several
    values separated by commas, are what stands side by side; others configure what is no run. number: of the step;
    None for the last one of the batch that the newest checkpoint stands before.
    Raises ConfigError, DataError for a step that is not the one that the run has made, and what training raises.
    """
    run_dir = Path(target) if is_run(Path(target)) else None
    of_loss = [override for override in overrides if key_of(override).split(".")[0] in OF_THE_LOSS]
    others = [override for override in overrides if override not in of_loss]
    if not run_dir:
        path = Path(target)
        if not path.exists() or (path.is_dir() and not [*path.glob("*.jsonl"), *path.glob("*.parquet")]):
            raise not_a_run(f"pgtk tokens {target}", path, "a run directory, or recorded rollouts")
        others = [*reading(target), *others]
    chosen = jobs(of_loss) if of_loss else []
    first = [] if run_dir or not chosen else chosen[0]
    (_, config), *beside = _composed(run_dir, others, [first, *chosen])
    if run_dir and others:
        _refuse_another_run(run_dir, config)
    recorded = read_metrics(run_dir / "metrics.jsonl") if run_dir else {"step": []}
    steps = [int(step) for step in recorded["step"]]
    number, checkpoint = _begin(run_dir, config, number, steps)
    for line in imports(config, *(other for _, other in beside)):
        say(f"note: {line}", error=True)
    made = make_again(config, checkpoint, number)
    facts = [_weights(run_dir, checkpoint, number), f"Documents: {made.documents}."]
    if run_dir:
        row = {name: column[steps.index(number)] for name, column in recorded.items()}
        facts.append(_proof(made, {name: value for name, value in row.items() if value == value}, number))
    if not chosen and made.has_old_log_probs:
        others_of_it = [name for name in INSTRUCTIVE if name != config.loss.name][:2]
        beside = _composed(run_dir, others, [[f"loss={name}"] for name in others_of_it])
    columns = list(_columns(made, [(first, config), *beside]))
    title = "this run: " if run_dir else ""
    name = Path(target).resolve().name
    return Inspected(name, title, number, facts, made, common_vectors(made), columns)


def _composed(run_dir: Path | None, others: list[str], jobs: list[list[str]]) -> list[tuple[list[str], Config]]:
    """Each job with its configuration; ConfigError with the problems of all but for servers', as none is started."""
    configured, problems = [], []
    for job in jobs:
        config, report = validated(compose([*others, *job], run_dir=run_dir))
        problems += report.problems
        configured.append((job, config))
    if problems := [problem for problem in dict.fromkeys(problems) if not problem.startswith("sampler.")]:
        raise ConfigError("\n".join(problems))
    return configured


def _refuse_another_run(run_dir: Path, config: Config) -> None:
    """Refuse a configuration that is not the run's: a step is made again as it was, but for losses beside its own."""
    drift = config_drift(plain_config(saved_config(run_dir)), plain_config(config))
    movable = {key.name for key in keys_of(config) if key.reads or key.machine}  # where files lie now, what computes
    if changed := [key for key in drift if key not in movable]:
        before, now = drift[changed[0]]
        raise ConfigError(
            f"{changed[0]}={now} needs to stay as the run had it (got {now}, was {before}). A step is made again as it "
            f"was. Use keys of {', '.join(OF_THE_LOSS)} for what stands beside it, or a new run."
        )


def _begin(run_dir: Path | None, config: Config, number: int | None, steps: list[int]) -> tuple[int, dict | None]:
    """(number of the step, the newest checkpoint before it); steps: those that the run has made."""
    if run_dir is not None and not steps:
        raise ConfigError(f"pgtk tokens {run_dir} needs a step that the run has made (got none). Use pgtk resume.")
    first, last = (steps[0], steps[-1]) if run_dir is not None else (1, config.trainer.max_steps)
    if number is not None and not first <= number <= last:
        of = "trainer.max_steps" if run_dir is None else "which the run has made"
        needs = f"a step from {first} to {last}, {of}"
        raise ConfigError(f"--step={number} needs {needs} (got {number}). Use --step={last}.")
    checkpoint = None if run_dir is None else load_newest(run_dir / "checkpoints", last if number is None else number)
    return number or min(last, _last_of_batch(config, checkpoint)), checkpoint


def _last_of_batch(config: Config, checkpoint: dict | None) -> int:
    """The last step of the batch of documents that a checkpoint stands before or in: there the ratios are widest."""
    done, position = (0, 0) if checkpoint is None else (checkpoint["step"], checkpoint["data"]["position"])
    batch, per_step = documents_per_batch(config.rollout), documents_per_step(config)
    if batch is None or per_step == 0:
        return done + 1
    return done + -(-(batch - position % batch) // per_step)


def _columns(made: MadeStep, configured: list[tuple[list[str], Config]]) -> Iterator[LossOnStep]:
    """Each loss once, the first of them the run's own."""
    known: list[Loss] = []
    for job, config in configured:
        loss = loss_of(config)
        if loss in known:
            continue
        label = " ".join(job) if known else f"loss={config.loss.name} aggregation={config.aggregation.mode}"
        lines = [line for line in equation(config)[1:] if line.strip().startswith(_TERMS)]
        yield replace(loss_on_step(made, loss), label=label, lines=lines)
        known.append(loss)


def _weights(run_dir: Path | None, checkpoint: dict | None, number: int) -> str:
    """What the new log-probs are of."""
    start, steps = 0 if checkpoint is None else checkpoint["step"], "the weights that the run begins with"
    if checkpoint is not None:
        steps = f"those of the checkpoint of step {start}"
    again = number - 1 - start
    if again:
        span = f"step {start + 1}" if again == 1 else f"steps {start + 1} to {number - 1}"
        steps += f", with {span} made {'again ' if run_dir else ''}in memory"
    return f"Weights: those before the update of step {number}: {steps}."


def _proof(made: MadeStep, row: dict[str, float], number: int) -> str:
    """That this is the step which the run has made; DataError where it is not."""
    names = [name for name in row if name in made.metrics and not name.startswith(_OF_THE_UPDATE)]
    pairs = {name: (made.metrics[name], row[name]) for name in names}
    other = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not other:
        return f"All {len(pairs)} recorded metrics of step {number} come out the same, bit for bit."
    far = {name: pair for name, pair in other.items() if not math.isclose(*pair, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)}
    if not far:
        return (
            f"All {len(pairs)} recorded metrics of step {number} come out the same but for rounding, {len(other)} of "
            "them not bit for bit: hardware, a library or the number of processes is another, or a GPU rounds anew."
        )
    name, (made_again, recorded) = next(iter(far.items()))
    raise DataError(
        f"--step={number} needs the step as the run has made it (got {name}={made_again:.6g}, and metrics.jsonl has "
        f"{recorded:.6g}; {len(far)} of {len(pairs)} metrics differ). {made.documents.capitalize()}; on other "
        "hardware, or after a resume with other settings, that is another step. Use a step right after a checkpoint, "
        "or rollout.save_path=FOLDER in a new run."
    )


def summary(inspected: Inspected, page: Path) -> str:
    """What `pgtk tokens` prints."""
    totals = inspected.made.step.totals
    size = f"{plural(int(totals.num_documents), 'document')}, {plural(int(totals.num_tokens), 'trained token')}"
    lines = [f"step {inspected.number} of {inspected.name}: {size}", *inspected.facts]
    rows = [["", "loss", "cut below", "cut above", "capped"]]
    for one in inspected.columns:
        counts = [one.count(*clips) for clips in (["below, cut"], ["above, cut"], ["below, capped", "above, capped"])]
        rows.append([one.label, f"{one.total:.6g}", *map(str, counts)])
    return "\n".join([*lines, *aligned(rows), f"page  {shell_path(page)}"])
