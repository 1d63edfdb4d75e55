"""Starts what the command line describes, once it is checked: a run, a rank of one, a sweep, or a
resumed run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pgtoolkit.config.compose import compose, compose_node
from pgtoolkit.config.hydra_command import for_hydra, hydra_answers, hydra_arguments
from pgtoolkit.config.key import with_values
from pgtoolkit.config.paths import occupied_by_rollouts
from pgtoolkit.config.rules.executed import announce, written_elsewhere
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError, StorageError
from pgtoolkit.launch.check import PlannedRun, check, check_run, notes, problems
from pgtoolkit.launch.multirun import run_sweep
from pgtoolkit.launch.ranks import train_job, train_on_processes, wait_until_free
from pgtoolkit.launch.worker import Training
from pgtoolkit.ranks.environment import joined
from pgtoolkit.system.report import key_of, refusal, say, shell_path
from pgtoolkit.training.inputs import DataProblem
from pgtoolkit.training.machine import check_machine


def start(argv: list[str], sweep_file: Path | None, command: list[str]) -> int:
    """Check everything, then train; or print what Hydra's own flags ask for. Returns the exit
    status.

    argv: overrides and flags.
    sweep_file: of `pgtk sweep`.
    command: what was typed.
    Raises PgtoolkitError, before anything is created if it can be known then.
    """
    args = hydra_arguments(argv)
    if args.info or args.hydra_help:
        return hydra_answers(for_hydra(argv, args.overrides))
    if args.cfg:
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
        if wrong := compose_node(args.overrides, args.config_dir).problems:
            raise refused(list(dict.fromkeys(wrong)))
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
    # of torchrun or srun: the same run, whose directory rank 0 chooses
    if rank is not None and rank.number > 0:
        run = check_run(compose(args.overrides, args.config_dir), args.overrides)
        if run.refused_anywhere:
            return ConfigError.exit_status  # rank 0 says why
        train_on_processes(Training(run.named_config, Path(), overrides=args.overrides))
        return 0
    checked = check(args.overrides, args.multirun, args.config_dir, sweep_file, command)
    if found := problems(checked):
        raise _ending_other_ranks(refused(found), checked.runs[0])
    for note in notes(checked):
        say(f"note: {note}", error=True)
    if checked.sweep is not None:
        return run_sweep(checked)
    _run(checked.runs[0])
    return 0


def resume(run_dir: Path, overrides: list[str], step: int | None = None) -> int:
    """Continue a run from its newest checkpoint; returns the exit status. Raises PgtoolkitError.

    step: continue from the checkpoint of this step, as a run of its own in hydra.run.dir, which is
        then among them.
    """
    folder = run_dir
    places = [override for override in overrides if key_of(override) == "hydra.run.dir"]
    if step is None and places:
        raise ConfigError(
            refusal(
                setting=places[0],
                needs="--step N, which makes a run of its own",
                got="none",
                reason="A run goes on where it lies.",
                use=f"pgtk resume {shell_path(run_dir)} --step N {places[0]}",
            )
        )
    overrides = [override for override in overrides if override not in places]
    run = check_run(compose(overrides, run_dir=run_dir), overrides)
    assert run.config is not None  # a saved run has one
    run.report.problems += written_elsewhere(
        run.config, run_dir, {key_of(override) for override in overrides}
    )
    if step is not None:
        from pgtoolkit.training.export import branch, lacks_checkpoint  # which loads torch

        most = run.config.trainer.max_steps
        if problem := lacks_checkpoint(run_dir, f"pgtk resume {shell_path(run_dir)}", step, most):
            run.report.problems.insert(0, problem)
        elif step >= most:
            run.report.refuse(
                setting=f"--step={step}",
                needs=f"trainer.max_steps above {step}",
                got=most,
                reason="There would be nothing left to train.",
                use=f"trainer.max_steps={2 * step}",
            )
        new = compose(places)
        run.report.problems += [*new.problems, *new.problems_of_directory]
        if places and new.directory is not None:
            folder = Path(new.directory)
        elif not new.problems_of_directory:
            run.report.refuse(
                setting=f"--step={step}",
                needs="hydra.run.dir=NEW",
                got=" ".join(places) or "none",
                reason="It becomes a run of its own, and this one stays as it is.",
                use="hydra.run.dir=outputs/NEW",
            )
        if problem := occupied_by_rollouts(getattr(run.config.rollout, "save_path", None)):
            run.report.problems.append(problem)
    rank = joined()
    if not run.report.problems and (rank is None or rank.number == 0):
        announce(run.config)
    check_machine(run.config, run.report)
    if run.report.problems:
        raise refused(run.report.problems)
    config = run.config
    if step is not None:
        if not any(key_of(override) == "tracking.run_name" for override in overrides):
            config = with_values(config, {"tracking.run_name": None})  # that of its folder
        if rank is None or rank.number == 0:
            try:
                branch(run_dir, step, folder)
            except PgtoolkitError as error:
                raise _ending_other_ranks(error, run) from error
    train_on_processes(Training(config, folder, True, overrides))
    return 0


def start_or_continue(run_dir: Path, argv: list[str]) -> int:
    """Start the run of these overrides in run_dir, continue it if it was begun there, or do nothing
    if it is done.

    Returns the exit status. Raises PgtoolkitError, also where a run of another configuration lies
    there.
    """
    wait_until_free(run_dir)
    if not (run_dir / "config.yaml").is_file():
        place = str(run_dir).replace("\\", "\\\\").replace("'", "\\'")
        return start(
            [*argv, f"hydra.run.dir='{place}'"], None, ["pgtk", "continue", str(run_dir), *argv]
        )
    args = hydra_arguments(argv)
    run = check_run(compose(args.overrides, args.config_dir), args.overrides)
    rank = joined()
    if run.config is not None and (rank is None or rank.number == 0):
        if not run.report.problems:
            announce(run.config)
        check_machine(run.config, run.report)
    if run.report.problems:
        if rank is not None and rank.number > 0:
            return ConfigError.exit_status  # rank 0 says why
        raise _ending_other_ranks(refused(run.report.problems), run)
    train_job(run.named_config, run_dir, args.overrides)
    return 0


def refused(problems: list[str]) -> PgtoolkitError:
    """All problems in one error, which has an exit status of its own if it is the data alone."""
    kind = (
        DataError if all(isinstance(problem, DataProblem) for problem in problems) else ConfigError
    )
    if len(problems) == 1:
        return kind(problems[0])
    return kind(
        f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {p}" for p in problems)
    )


def _run(run: PlannedRun) -> None:
    """Train a single run in its directory."""
    assert run.directory is not None
    try:
        run.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failed = StorageError(
            f"the run directory cannot be made: {error}. Choose another with hydra.run.dir=..."
        )
        raise _ending_other_ranks(failed, run) from error
    train_on_processes(Training(run.named_config, run.directory.resolve(), overrides=run.recorded))


def _ending_other_ranks(error: PgtoolkitError, run: PlannedRun) -> PgtoolkitError:
    """The error; where rank 0 alone has met it, the ranks that wait for it end with it, too."""
    if joined() is not None and run.config is not None and not run.refused_anywhere:
        with contextlib.suppress(PgtoolkitError):
            train_on_processes(Training(run.config, Path(), refused=error))
    return error
