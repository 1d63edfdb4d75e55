"""Checks what the command line describes, and starts it: a run, one rank of a run, a sweep, or a
resumed run."""

from __future__ import annotations

import contextlib
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from pgtoolkit.assembly.continuing import another_training, training_on_command
from pgtoolkit.assembly.inputs import DataProblem
from pgtoolkit.assembly.machine import check_machine
from pgtoolkit.config.compose import compose, compose_node, is_refused
from pgtoolkit.config.hydra_command import for_hydra, hydra_answers, hydra_arguments
from pgtoolkit.config.keys import shown
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.rules.executed import announce, written_elsewhere
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError, StorageError
from pgtoolkit.launch.check import add_notes_on_prompts, check, check_run, notes, problems
from pgtoolkit.launch.in_python import as_reached
from pgtoolkit.launch.multirun import run_sweep
from pgtoolkit.launch.ranks import (
    train_job,
    train_on_processes,
    trained_before,
    wait_until_free,
)
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.launch.worker import Training
from pgtoolkit.ranks.environment import joined
from pgtoolkit.rollouts.recorded_folder import occupied_by_rollouts
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import known_provenance, read_config, read_status
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.report import key_of, plural, refusal, say, shell_path, text


def start(argv: list[str], sweep_file: Path | None, command: list[str]) -> int:
    """Check everything, then train; or print what Hydra's own flags ask for.

    argv: overrides and flags.
    sweep_file: the file that `pgtk sweep` names.
    command: the words that were typed.
    Returns the exit status.
    Raises PgtoolkitError; for all that can be known then, before anything is created.
    """
    args = hydra_arguments(argv)
    if args.cfg and not args.info and not args.hydra_help:
        _check_shown_config(args)
    if args.cfg or args.info or args.hydra_help:
        return hydra_answers(for_hydra(argv, args.overrides))
    rank = joined()
    if rank is not None and args.multirun:
        raise ConfigError(
            refusal(
                setting="-m",
                needs="one process",
                got=f"WORLD_SIZE={rank.world_size}",
                reason="The runs of a sweep start their own processes.",
                use="pgtk -m without torchrun or srun",
            )
        )
    # torchrun or srun has started this process for the same run; rank 0 chooses the directory.
    if rank is not None and rank.number > 0:
        run = check_run(compose(args.overrides), args.overrides)
        if run.refused_anywhere:
            return ConfigError.exit_status  # rank 0 says why
        train_on_processes(Training(run.named_config, Path(), overrides=args.overrides))
        return 0
    checked = check(args.overrides, args.multirun, sweep_file, command)
    if isinstance(checked, Sweep):
        add_notes_on_prompts(checked)
    all_problems = problems(checked)
    if all_problems:
        first = checked.runs[0] if isinstance(checked, Sweep) else checked
        raise _ending_other_ranks(refused(all_problems), first)
    for note in notes(checked):
        say(f"note: {as_reached(note)}", error=True)
    if isinstance(checked, Sweep):
        return run_sweep(checked)
    _run(checked)
    return 0


def _check_shown_config(args: Namespace) -> None:
    """Raise PgtoolkitError if --cfg cannot print one configuration."""
    if args.multirun:
        raise ConfigError(
            refusal(
                setting="--cfg",
                needs="one run",
                got="-m",
                reason="It prints one configuration.",
                use="pgtk check -m for a sweep",
            )
        )
    composing_problems = compose_node(args.overrides).problems
    if composing_problems:
        raise refused(list(dict.fromkeys(composing_problems)))


def resume(run_dir: Path, overrides: list[str], step: int | None = None) -> int:
    """Continue a run from its newest checkpoint; return the exit status. Raises PgtoolkitError.

    step: continue from the checkpoint of this step, as a run of its own, in the folder of the
        override hydra.run.dir.
    """
    folder_overrides = [item for item in overrides if key_of(item) == "hydra.run.dir"]
    overrides = [item for item in overrides if item not in folder_overrides]
    composed = compose(overrides, run_dir=run_dir)
    run = check_run(composed, overrides)
    if step is None and folder_overrides:
        run.report.refuse(
            setting=folder_overrides[0],
            needs="--step N, which makes a run of its own",
            got="none",
            reason="A run goes on where it lies.",
            use=f"pgtk resume {shell_path(run_dir)} --step N {folder_overrides[0]}",
        )
    if step is None:
        assert composed.saved is not None
        accepted = [item for item in overrides if not is_refused(key_of(item), composed.problems)]
        before = plain_config(composed.saved)
        problem = another_training(before, plain_config(run.config), run_dir, accepted)
        run.report.problems += [problem] if problem else []
    typed_keys = {key_of(override) for override in overrides}
    run.report.problems += written_elsewhere(run.config, run_dir, typed_keys)
    folder = run_dir if step is None else _check_branch(run, run_dir, step, folder_overrides)
    rank = joined()
    is_first = rank is None or rank.number == 0
    if not run.report.is_refused and is_first:
        announce(run.config)
    check_machine(run.config, run.report)
    if run.report.problems:
        raise refused([*map(_with_start_of(run_dir), run.report.problems)])
    config = run.config
    if step is not None:
        if "tracking.run_name" not in typed_keys:
            config = with_values(config, {"tracking.run_name": None})  # named after its folder
        if is_first:
            _make_branch(run, run_dir, step, folder)
    if step is None and _is_finished(config, run_dir):
        if is_first:
            say(_note_on_finished_run(config, run_dir), error=True)
        return 0
    train_on_processes(Training(config, folder, True, overrides))
    return 0


def _with_start_of(run_dir: Path) -> Callable[[str], str]:
    """Return a function that adds to a problem with a module that is not found here the directory
    where the run was started."""
    directory = known_provenance(run_dir).get("directory")

    def added(problem: str) -> str:
        if "ModuleNotFoundError" not in problem or directory in (None, str(Path.cwd())):
            return problem
        command = (
            f"cd {shlex.quote(directory)} && pgtk resume {shlex.quote(str(run_dir.resolve()))}"
        )
        start = f" The run was started in {directory}, where its code may be: {command}"
        return type(problem)(problem + start)

    return added


def _is_finished(config: Config, run_dir: Path) -> bool:
    """Return whether a run is done with this configuration. Raises PgtoolkitError if it is
    damaged."""
    if read_status(run_dir).get("state") != "done":
        return False
    from pgtoolkit.assembly.open_run import is_finished  # which loads torch

    return is_finished(plain_config(config), run_dir)


def _note_on_finished_run(config: Config, run_dir: Path) -> str:
    """Return that a run is done, and how one that has made all of its steps can train on."""
    step = read_status(run_dir)["step"]
    note = f"note: {shell_path(run_dir)} is done, after {plural(step, 'step')}: "
    note += "nothing is left to train."
    changes = config_drift(read_config(run_dir)[0], plain_config(config))
    if changes:
        typed = ", ".join(f"{shown(key)}={text(new)}" for key, (_, new) in changes.items())
        note += f" Its record does not change, without {typed}."
    note += trained_before(run_dir)
    if step < config.trainer.max_steps:
        return note
    return f"{note} {training_on_command(run_dir, {'trainer.max_steps': 2 * step})} trains on."


def _check_branch(run: PlannedRun, run_dir: Path, step: int, folder_overrides: list[str]) -> Path:
    """Add the problems of a run that begins with a checkpoint of another; return its folder."""
    from pgtoolkit.assembly.export import lacks_checkpoint  # which loads torch

    max_steps = run.config.trainer.max_steps
    command = f"pgtk resume {shell_path(run_dir)}"
    no_checkpoint = lacks_checkpoint(run_dir, command, step, max_steps)
    if no_checkpoint:
        run.report.problems.insert(0, no_checkpoint)
    elif step >= max_steps:
        run.report.refuse(
            setting=f"--step={step}",
            needs=f"trainer.max_steps above {step}",
            got=max_steps,
            reason="There would be nothing left to train.",
            use=f"trainer.max_steps={2 * step}",
        )
    folder = run_dir
    composed = compose(folder_overrides)
    run.report.problems += [*composed.problems, *composed.problems_of_directory]
    if folder_overrides and composed.directory is not None:
        folder = Path(composed.directory)
    elif not composed.problems_of_directory:
        run.report.refuse(
            setting=f"--step={step}",
            needs="hydra.run.dir=NEW",
            got=" ".join(folder_overrides) or "none",
            reason="It becomes a run of its own, and this one does not change.",
            use="hydra.run.dir=outputs/NEW",
        )
    occupied = occupied_by_rollouts(getattr(run.config.rollout, "save_path", None))
    if occupied is not None:
        run.report.problems.append(occupied)
    return folder


def _make_branch(run: PlannedRun, run_dir: Path, step: int, folder: Path) -> None:
    """Put the checkpoint of a step into the folder of a new run."""
    from pgtoolkit.assembly.export import branch

    try:
        branch(run_dir, step, folder)
    except PgtoolkitError as error:
        raise _ending_other_ranks(error, run) from error


def start_or_continue(run_dir: Path, argv: list[str]) -> int:
    """Start the run of these overrides in run_dir, or continue it if it was begun there.

    Does nothing if it is done. Returns the exit status.
    Raises PgtoolkitError, also where run_dir holds a run of another configuration.
    """
    wait_until_free(run_dir)
    if not (run_dir / "config.yaml").is_file():
        command = ["pgtk", "continue", str(run_dir), *argv]
        return start([*argv, in_directory(run_dir)], None, command)
    args = hydra_arguments(argv)
    run = check_run(compose(args.overrides), args.overrides)
    rank = joined()
    if run.composed.config is not None and (rank is None or rank.number == 0):
        if not run.report.is_refused:
            announce(run.config)
        check_machine(run.config, run.report)
    if run.report.problems:
        if rank is not None and rank.number > 0:
            return ConfigError.exit_status  # rank 0 says why
        raise _ending_other_ranks(refused(run.report.problems), run)
    train_job(run.named_config, run_dir, args.overrides)
    return 0


def in_directory(run_dir: str | Path) -> str:
    """Return the override that trains in this directory."""
    quoted = str(run_dir).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.run.dir='{quoted}'"


def refused(problems: list[str]) -> PgtoolkitError:
    """Return one error of all problems: a DataError if they all lie in the data."""
    in_data = all(isinstance(problem, DataProblem) for problem in problems)
    error_type = DataError if in_data else ConfigError
    if len(problems) == 1:
        return error_type(problems[0])
    listed = "\n".join(f"  {problem}" for problem in problems)
    return error_type(f"{len(problems)} problems in the configuration:\n{listed}")


def _run(run: PlannedRun) -> None:
    """Train a single run in its directory."""
    directory = Path(run.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failed = StorageError(
            f"the run directory cannot be made: {error}. Choose another with hydra.run.dir=..."
        )
        raise _ending_other_ranks(failed, run) from error
    recorded = run.composed.overrides
    train_on_processes(Training(run.named_config, directory.resolve(), overrides=recorded))


def _ending_other_ranks(error: PgtoolkitError, run: PlannedRun) -> PgtoolkitError:
    """Return the error; if only rank 0 has met it, end the ranks that wait for rank 0 with it."""
    if joined() is not None and run.composed.config is not None and not run.refused_anywhere:
        with contextlib.suppress(PgtoolkitError):
            train_on_processes(Training(run.config, Path(), refused=error))
    return error
