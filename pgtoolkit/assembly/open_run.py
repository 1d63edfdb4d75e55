"""Opens the directory of a run, and records the run's start or continuation there."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.assembly.continuing import branch_command
from pgtoolkit.assembly.data import record_data
from pgtoolkit.assembly.make_task import held_out_numbers
from pgtoolkit.assembly.preview import notes_on_shared_prompts
from pgtoolkit.config.evaluation_sets import HeldOut, sets_beside_training
from pgtoolkit.config.keys import changes_learning, declared, existing_key, shown
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.rules.executed import named_functions
from pgtoolkit.config.saved import cannot_change, edited, typed
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.ranks.agreement import failing_together, gather_objects, losing_ranks
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.batch_counts import steps_before
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    LastStep,
    PolicyRolloutSettings,
    RolloutSettings,
)
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.completion_files import drop_completions_after
from pgtoolkit.runs.directory import RunDirectory, config_drift
from pgtoolkit.runs.modules import COPIES, keep_copies, modules_of
from pgtoolkit.runs.provenance import changed_code, collect
from pgtoolkit.runs.records import (
    newest_checkpoint,
    plain,
    read_config,
    read_data,
    read_drift,
    read_evaluations,
    read_provenance,
    read_status,
)
from pgtoolkit.runs.series import rows_until
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import shell_path, text
from pgtoolkit.tasks.settings import ReverseTaskSettings, TaskSettings
from pgtoolkit.tracking.progress import entry
from pgtoolkit.training.checkpoint import load_newest, read_checkpoint, refuse_lost_checkpoint
from pgtoolkit.training.optimizer import learning_rate
from pgtoolkit.training.run_log import logging_to, quieten
from pgtoolkit.training.settings import OptimizerSettings, Schedule

log = logging.getLogger("pgtoolkit")


def open_run(
    config: Config,
    run_dir: Path,
    resume: bool,
    overrides: Sequence[str],
    layout: Layout,
    opened: contextlib.ExitStack,
) -> tuple[RunDirectory | None, dict | None]:
    """Return the run directory, which only rank 0 has, and the checkpoint to continue from.

    opened: closes the directory and its log.
    """
    run = None
    checkpoint = None
    with losing_ranks(layout, config.parallelism.timeout_seconds):
        with failing_together(layout):
            if layout.rank == 0:
                run = opened.enter_context(RunDirectory(run_dir, new=not resume))
                opened.enter_context(logging_to(run.path / "run.log"))
                checkpoint = _prepare(config, run, resume, list(overrides))
            else:
                log.handlers = [logging.NullHandler()]
                log.propagate = False
                quieten()
        checkpoint_path: Path | None = None if checkpoint is None else checkpoint["path"]
        path = gather_objects(checkpoint_path, layout.world_group)[0]  # rank 0's
        if layout.rank > 0 and path is not None:
            checkpoint = read_checkpoint(path, check=False)
    return run, checkpoint


def _prepare(config: Config, run: RunDirectory, resume: bool, overrides: list[str]) -> dict | None:
    """Record the start of a run, or its continuation, with its configuration, code and data.

    Returns the checkpoint to continue from, if there is one. Raises ConfigError or StorageError
    before anything is changed.
    """
    log.info(entry("run", shell_path(run.path)))
    checkpoint = None
    if resume:
        refuse_lost_checkpoint(run.path, f"pgtk resume {shell_path(run.path)}")
        checkpoint = load_newest(run.path / "checkpoints")
        if checkpoint is None:
            log.info("no checkpoint was written yet: starting again from the first step")
    step = 0 if checkpoint is None else checkpoint["step"]
    if step > 0:
        log.info(entry("continues", f"after step {step}"))
    _refuse_fewer_steps(config.trainer.max_steps, step)
    if checkpoint is not None:
        _refuse_another(plain_config(config), run.path, checkpoint)
    num_rows, kept_bytes = _read_record(run.path, checkpoint)
    run.keep_finished()
    record_data(run.path, config, None if checkpoint is None else step)
    plain_values = plain_config(config)
    code = changed_code(run.path) if step > 0 else {}
    before = {} if checkpoint is None else read_config(run.path)[0]
    modules, evaluation_modules = _named_modules(plain_values)
    in_rollouts = modules_of(_modules_in_rollouts(plain_values)).keys() & code
    stored_until = (
        _stored_until(config.rollout, config.accumulation, checkpoint)
        if checkpoint is not None
        else step
    )
    acts_after = {module: stored_until if module in in_rollouts else step for module in code}
    drift = run.write_config(plain_values, overrides, step, code, acts_after)
    for label, change in zip(["changed", *[""] * len(drift)], _in_words(drift), strict=False):
        log.info(entry(label, change))
    run.write_provenance(collect(sys.argv, step, modules, evaluation_modules))
    notes = keep_copies(run.path / COPIES, modules | evaluation_modules)
    notes += [
        f"the code of {module} has changed since the run's last start: "
        f"{_made_with_new_code(step, acts_after[module])}. That of the steps before is "
        f"{COPIES}/{module}-{old}.py in the run directory; drift.jsonl has the change."
        for module, (old, _) in code.items()
    ]
    if checkpoint is not None:
        steps_before = config.critic.steps_before_policy
        schedule_note = _schedule_note(config.optimizer, steps_before, drift, checkpoint)
        if schedule_note:
            notes = [*notes, schedule_note]
        if any(name.startswith("evaluation.") for name in drift):
            sets = sets_beside_training(config)
            documents = checkpoint["documents_seen"]
            asked = notes_on_asked_numbers(config.task, config.seed, sets, before, documents)
            notes = [*notes, *asked]
    run.drop_metrics_after(step, kept_bytes)
    for note in [*notes, *drop_completions_after(run.path, step)]:
        log.warning(f"note: {note}")
    if num_rows < step:
        log.warning(
            f"{run.metrics_path} lacks rows of steps before the checkpoint: summary and curves "
            "begin later."
        )
    return checkpoint


def _read_record(run_dir: Path, checkpoint: dict | None) -> tuple[int, int]:
    """Report damaged files before anything is changed.

    Returns number and bytes of the rows of metrics up to the checkpoint.
    """
    read_status(run_dir)
    read_provenance(run_dir)
    read_evaluations(run_dir)
    if checkpoint is not None:
        check_rows(run_dir, checkpoint["path"])
    return rows_until(run_dir / "metrics.jsonl", 0 if checkpoint is None else checkpoint["step"])


def _refuse_fewer_steps(max_steps: int, step: int) -> None:
    """Raise ConfigError where a run has made more steps than it shall have."""
    if step > max_steps:
        raise ConfigError(
            f"trainer.max_steps={max_steps} needs at least the steps already made (got {step} of "
            f"them). A checkpoint is continued, not cut. Use trainer.max_steps={step}."
        )


def _in_words(drift: dict[str, list]) -> list[str]:
    """Return what a resume changes, for each key that may be typed.

    drift: {key: [old, new]}.
    """
    changes = {shown(name): values for name, values in drift.items()}
    return [f"{name}={text(new)}, was {text(old)}" for name, (old, new) in changes.items()]


def is_finished(config: JsonObject, run_dir: Path) -> bool:
    """Return whether a run is done, so that nothing is left to train with this configuration.

    config: the plain configuration. Nothing is written. Raises ConfigError or StorageError for a
        damaged run, as `open_run` does. A run whose last checkpoint is damaged is not finished: its
        last steps are to be made again.
    """
    status = read_status(run_dir)
    if status.get("state") != "done":
        return False
    refuse_lost_checkpoint(run_dir, f"pgtk resume {shell_path(run_dir)}")
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return False
    try:
        checkpoint = read_checkpoint(newest)
    except StorageError:
        raise
    except Exception:  # It is damaged; `open_run` says so.
        return False
    _refuse_fewer_steps(config["trainer"]["max_steps"], status["step"])
    _refuse_another(config, run_dir, checkpoint)
    _read_record(run_dir, checkpoint)
    if status["step"] == config["trainer"]["max_steps"]:
        return True
    # A reason is there where the data or a goal has ended the run before its last step. Without one
    # trainer.max_steps was raised in config.yaml by hand.
    changed = config_drift(read_config(run_dir)[0], plain(config))
    return status.get("reason") is not None and not any(
        declared(existing_key(name, config).last_counts, config) for name in changed
    )


def _named_modules(config: JsonObject) -> tuple[set[str], set[str]]:
    """Return the modules that a configuration names: of training, and of evaluations only."""
    training_modules = set()
    evaluation_modules = set()
    for key, path in named_functions(config).items():
        modules = training_modules if changes_learning(key, config) else evaluation_modules
        modules.add(path.rpartition(".")[0])
    return training_modules, evaluation_modules


def _modules_in_rollouts(config: JsonObject) -> set[str]:
    """Return the modules that a configuration names and whose results a batch of rollouts keeps:
    rewards, what environments said, and advantages."""
    return {
        path.rpartition(".")[0]
        for key, path in named_functions(config).items()
        if key.partition(".")[0] in ("task", "advantage")
    }


def _stored_until(
    rollout: RolloutSettings, accumulation: AccumulationSettings, checkpoint: dict
) -> int | None:
    """Return the last step that trains rollouts of the checkpoint, whose own step it is where these
    are all trained; None where the documents do not say it, as where some are left out."""
    data = checkpoint["data"]
    stored = data["source"].get("documents", ())
    if not isinstance(rollout, PolicyRolloutSettings) or not stored:
        return checkpoint["step"]
    size = rollout.prompts_per_batch * rollout.group_size
    end = data["source"]["number"] + len(stored) // size
    position = data["position"]
    if position >= end * size:
        return checkpoint["step"]
    left_out = any(
        document["left_out"] or document["trajectory"] is not None for document in stored
    )
    if left_out or not accumulation.docs_per_step or accumulation.last_step == LastStep.carry:
        return None
    if accumulation.docs_per_step % rollout.group_size:
        return None  # steps may end where groups do
    passes_done = data.get("pass", 0)
    return checkpoint["step"] + steps_before(
        end, position, size, accumulation, rollout.passes, passes_done
    )


def _made_with_new_code(step: int, acts_after: int | None) -> str:
    """Return from which step on a run uses code that has changed.

    step: of the checkpoint. acts_after: the last step whose rollouts the old code has made; None
        where it is not known, but a later one.
    """
    if acts_after == step:
        return f"steps after {step} are made with the new code"
    steps = f"steps after {acts_after}"
    if acts_after is None:
        steps = "steps of further batches of rollouts"
    return (
        f"{steps}, and evaluations after step {step}, are made with the new code, since rollouts "
        "of the checkpoint keep the scores and advantages of the old"
    )


def _schedule_note(
    optimizer: OptimizerSettings, steps_before: int, drift: dict[str, list], checkpoint: dict
) -> str | None:
    """Return a note on a decaying learning rate that a resume's trainer.max_steps changes.

    steps_before: critic.steps_before_policy, for which the schedule waits.
    drift: the changed keys, as {key: [old, new]}. None where nothing is to be noted.
    """
    if "trainer.max_steps" not in drift or optimizer.schedule == Schedule.constant:
        return None
    old_steps, new_steps = drift["trainer.max_steps"]
    updates = checkpoint["num_updates"]
    old_rate = learning_rate(optimizer, updates, old_steps - steps_before)
    new_rate = learning_rate(optimizer, updates, new_steps - steps_before)
    return (
        f"optimizer.schedule={optimizer.schedule.value} decays to 0 at trainer.max_steps, "
        f"which is {new_steps} now and was {old_steps}: the next update has the learning rate "
        f"{new_rate:.3g} instead of {old_rate:.3g}. pgtk compare does not count this run as a "
        f"seed of one that had trainer.max_steps={new_steps} from the start."
    )


def notes_on_asked_numbers(
    task: TaskSettings, seed: int, sets: Sequence[HeldOut], saved: JsonObject, num_documents: int
) -> list[str]:
    """Return a note on each evaluation set with numbers that a run has asked before its resume,
    since it avoided the numbers of the evaluation that was configured then.

    task, seed, sets: of the run as it goes on. saved: its configuration before. num_documents: that
        were trained before.
    """
    before = typed(saved, "config.yaml")
    if not isinstance(task, ReverseTaskSettings) or not isinstance(
        before.rollout, PolicyRolloutSettings
    ):
        return []
    never = held_out_numbers(before.task, sets_beside_training(before))
    num_asked = math.ceil(num_documents / before.rollout.group_size)
    return notes_on_shared_prompts(task, seed, sets, num_asked, never)


def _refuse_another(config: JsonObject, run_dir: Path, checkpoint: dict) -> None:
    """Raise ConfigError where config.yaml now describes another run than the checkpoint's."""
    # Files of data may have moved: their contents are compared instead.
    movable = {*read_data(run_dir)}
    saved = json.loads(checkpoint["config"])
    problems = [problem for _, problem in cannot_change(saved, config, movable)]
    step = checkpoint["step"]
    drift = [entry for entry in read_drift(run_dir) if entry["step"] >= step]
    changes = {} if problems else edited(saved, read_config(run_dir)[0], drift)
    changes = {key: values for key, values in changes.items() if key not in movable}
    if changes:
        needs = "need a run of their own" if len(changes) > 1 else "needs a run of its own"
        had = " ".join(f"{key}={text(old)}" for key, (old, _) in changes.items())
        has = [f"{key}={text(new)}" for key, (_, new) in changes.items()]
        problems.append(
            f"{' '.join(has)} {needs} (got {shell_path(run_dir)}, which has made {step} steps with "
            f"{had}). It changes what is learned, and a run is the record of one training. Use "
            f"{had} in config.yaml; then {branch_command(run_dir, has)} goes on with the other."
        )
    if problems:
        way_out = (
            f"{shell_path(run_dir / 'config.yaml')} has changed since the checkpoint of step "
            f"{step}: put the value back to continue this run."
        )
        raise ConfigError("\n".join([*problems, way_out]))
