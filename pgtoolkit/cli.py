"""The command `pgtk`: trains, checks or resumes what the overrides describe."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from pathlib import Path

from pgtoolkit import __version__
from pgtoolkit.config.files import config_directory, default_options, options, sweep_file, sweep_files
from pgtoolkit.errors import ConfigError, DataError, Interrupted, PgtoolkitError, StorageError, unusable
from pgtoolkit.launch import torchrun
from pgtoolkit.ranks.environment import joined
from pgtoolkit.system.redaction import redact

COMMANDS = {
    "[OVERRIDES]": "train, results in outputs/; -m a=1,2 b=3,4 runs all four",
    "sweep NAME [OVERRIDES]": "train what a file in sweeps/ describes; again: go on with it",
    "check ...": "of any of these: print the plan and every problem, start nothing",
    "resume RUN_DIR [OVERRIDES]": "continue a run from its newest checkpoint",
    "compare RUN_DIR...": "what varies, what was reached over seeds, seed noise; --html FILE",
    "diff RUN_A RUN_B": "what changed: configuration, code, packages, hardware",
    "export RUN_DIR DIR": "the newest checkpoint as a Hugging Face folder",
    "sync RUN_DIR...": "deliver to MLflow what it lacks of runs, such as after an outage",
    "ui": "MLflow's pages of the runs tracked from this directory; --port N",
}


FAIL_FAST = "hydra.launcher.fail_fast=true"
"""What --fail-fast stands for."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors of the user end in one message, others in a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except PgtoolkitError as error:
        return _say(error)
    except KeyboardInterrupt:
        print("pgtk: stopped by a keyboard interrupt", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; python must not write to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _say(unusable(error))


def _dispatch(argv: list[str]) -> int:
    command = argv[0] if argv and argv[0][:1].isalpha() and "=" not in argv[0] else None
    if command in ("compare", "diff", "export", "sync", "ui"):
        from pgtoolkit.launch.commands import main as run_command

        return run_command(command, argv[1:])
    if "--help" in argv or "-h" in argv:
        print(help_page())
    elif "--version" in argv:
        print(f"pgtk {__version__}")
    elif command is None:
        return _train(argv)
    elif command == "sweep":
        return _train(argv[1:], _sweep_file(argv[1:]))
    elif command == "check":
        return _check(argv[1:])
    elif command == "resume":
        return _resume(argv[1:])
    else:
        raise _unknown_command(command)
    sys.stdout.flush()
    return 0


def help_page() -> str:
    """Commands, groups with their options, examples: one screen of 24 lines."""
    lines = ["Policy-gradient losses for language models, compared by declarative configuration. Commands:"]
    lines += [f"  pgtk {use:<28}{text}" for use, text in COMMANDS.items()]
    lines.append("Groups (GROUP=OPTION; * is the default):")
    defaults, single, columns = default_options(), [], []
    for group, names in sorted(options().items(), key=lambda item: [*defaults, item[0]].index(item[0])):
        if len(names) == 1:
            single.append(f"{group} ({names[0]})")
            continue
        marked = [f"{name}*" if defaults.get(group) == name else name for name in names]
        columns.append(f"  {group:<13}" + "  ".join(marked))
    lines += _side_by_side(columns)
    lines.append("  with one option: " + ", ".join(single))
    lines.append("Single keys: loss.epsilon_high=0.28 seed=1; all of them with their meaning: conf/, or pgtk --cfg job")
    lines.append("Examples: pgtk loss=gspo aggregation=constant  |  pgtk check experiment=dapo  |  pgtk debug=short")
    return "\n".join(lines)


def _side_by_side(lines: list[str], width: int = 52) -> list[str]:
    """Two neighbours on one line of 100 columns where both are short."""
    joined: list[str] = []
    for line in lines:
        if joined and len(joined[-1]) < width and len(line) <= 102 - width:
            joined[-1] = f"{joined[-1]:<{width}}{line.removeprefix('  ')}"
        else:
            joined.append(line)
    return joined


def _train(argv: list[str], sweep_file: Path | None = None) -> int:
    """Refuse a bad configuration before anything is created, then hand over to Hydra.

    sweep_file: the primary configuration of `pgtk sweep`.
    """
    from pgtoolkit.config.compose import NO_CHOICE, hydra_form, search_path
    from pgtoolkit.launch.check import check, notes, problems

    typed = argv if sweep_file is None else ["sweep", *argv]
    argv, fail_fast = [arg for arg in argv if arg != "--fail-fast"], "--fail-fast" in argv
    if sweep_file is not None:
        argv = ["--multirun", *argv[1:]]
    args = _hydra_arguments(argv)
    if args.shell_completion:
        from pgtoolkit.config.completion import complete

        return complete(argv, _commands(), _run_hydra)
    if args.cfg and args.multirun:
        raise ConfigError("--cfg needs one run (got -m). It prints one configuration. Use pgtk check -m for a sweep.")
    if fail_fast and FAIL_FAST not in args.overrides:
        argv, args.overrides = [*argv, FAIL_FAST], [*args.overrides, FAIL_FAST]
    starts = not (args.cfg or args.info or args.hydra_help)
    if starts and (rank := joined()) is not None:
        if args.multirun:
            reason, use = "The runs of a sweep start their own processes.", "pgtk -m without torchrun or srun"
            raise ConfigError(f"-m needs one process (got WORLD_SIZE={rank.world_size}). {reason} Use {use}.")
        if rank.number > 0:
            return torchrun.follow(args.overrides, args.config_dir)
    sweep = None
    if starts or args.cfg:
        checked = check(args.overrides, args.multirun, args.config_dir, starts, sweep_file, ["pgtk", *typed])
        if found := problems(checked):
            raise torchrun.told(_refusal(found), args.overrides, args.config_dir, starts)
        for note in notes(checked):
            print(f"pgtk: note: {note}", file=sys.stderr)
        sweep = checked.sweep
    rest = [hydra_form(arg) if arg in args.overrides else arg for arg in argv if arg not in NO_CHOICE]
    if sweep is None:
        try:
            return _run_hydra(rest, checked=checked.runs[0].config if starts else None)
        except StorageError as error:  # from before it began
            raise torchrun.told(error, args.overrides, args.config_dir) from error

    from pgtoolkit.launch.multirun import start

    if checked.searches:
        sweep.jobs = {}
    folder = str(sweep.folder).replace("'", "\\'")
    rest += [f"hydra.sweep.dir='{folder}'", *([search_path(config_directory())] if sweep_file else [])]
    rest.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(checked.unnamed)}]")
    return start(sweep, lambda: _run_hydra(rest, sweep_file), checked.runs[0].config)


def _hydra_arguments(argv: list[str]):
    """The arguments as Hydra reads them, without its flags that would go past what is checked."""
    from hydra._internal.utils import get_args_parser

    args = get_args_parser().parse_args(argv)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if (value := getattr(args, flag)) is not None:
            name = f"--{flag.replace('_', '-')}={value}"
            reason = "pgtk begins with its own conf/config.yaml: another would not be checked, and could run code."
            use = "pgtk sweep FILE.yaml, or --config-dir=FOLDER for options of your own"
            raise ConfigError(f"{name} needs to be left out (got one). {reason} Use {use}.")
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        reason = "It holds options of your own, such as experiment/mine.yaml."
        got = f"--config-dir={args.config_dir} needs a folder (got {args.config_dir})"
        raise ConfigError(f"{got}. {reason} Use --config-dir=FOLDER.")
    return args


def _run_hydra(argv: list[str], primary: Path | None = None, checked=None) -> int:
    """What Hydra does with these arguments. checked: the configuration of a single run, which is not composed again."""
    import hydra

    from pgtoolkit.config.compose import register

    statuses: list[int] = []
    started = False

    def task(config) -> None:
        nonlocal started
        started = True
        try:
            _train_one(config)
        except Interrupted as stop:
            # Ends a sweep too, whose launcher goes on after any other exception.
            raise SystemExit(_say(stop)) from None
        except PgtoolkitError as error:
            statuses.append(_say(error))

    register()
    primary = primary or config_directory() / "config.yaml"
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra shortens the traceback of a defect
    before, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        if checked is None:
            hydra.main(version_base="1.3", config_path=str(primary.parent), config_name=primary.stem)(task)()
        else:
            _run_job(checked, task)
    except OSError as error:
        if started:
            raise
        raise StorageError(
            f"the run directory cannot be made: {error}. Choose another with hydra.run.dir=..."
        ) from error
    finally:
        sys.argv = before
    return statuses[0] if statuses else 0


def _run_job(config, task) -> None:
    """Hydra's way to run a single configuration: its directory, logging and callbacks."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.utils import run_job
    from hydra.types import HydraContext, RunMode

    config.hydra.mode = RunMode.RUN
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=config.hydra.job.config_name)
    done = run_job(task, config, "hydra.run.dir", None, HydraContext(None, callbacks))
    callbacks.on_run_end(config=config, config_name=config.hydra.job.config_name, job_return=done)
    _ = done.return_value  # raises what the task has raised


def _train_one(config) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from pgtoolkit.config.compose import name_in
    from pgtoolkit.config.paths import make_absolute

    own = HydraConfig.get()
    overrides = list(own.overrides.task)
    in_sweep = own.mode == RunMode.MULTIRUN
    config.tracking.run_name = name_in(own, config.tracking.run_name)
    make_absolute(config)
    if in_sweep:  # another launcher than ours, such as SLURM's
        from pgtoolkit.launch.job import run

        run(config, Path(own.runtime.output_dir), overrides, Path(own.sweep.dir).name)
    else:
        _launch(config, Path(own.runtime.output_dir), overrides)


def _launch(config, run_dir: Path, overrides: list[str], resume: bool = False) -> None:
    """Train; signals are answered in an orderly way from here on, also while torch is loaded."""
    from pgtoolkit.tracking.signals import stop_signals_recorded

    with stop_signals_recorded(config, run_dir, overrides) if joined() is None else contextlib.nullcontext():
        from pgtoolkit.launch.processes import launch

        launch(config, run_dir, resume=resume, overrides=overrides)


def _check(argv: list[str]) -> int:
    from pgtoolkit.launch.check import check, page, problems

    file = None
    if argv and argv[0] == "sweep":
        file, argv = _sweep_file(argv[1:]), ["--multirun", *argv[2:]]
    args = _hydra_arguments(argv)
    checked = check(args.overrides, args.multirun, args.config_dir, sweep_file=file)
    print(redact(page(checked)), flush=True)
    return ConfigError.exit_status if problems(checked) else 0


def _sweep_file(argv: list[str]) -> Path:
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        names = ", ".join(sweep_files())
        reason = "A sweep is a file in sweeps/, or your own."
        raise ConfigError(f"pgtk sweep needs a sweep (got none). {reason} Use one of {names}, or path/to/file.yaml.")
    return sweep_file(argv[0])


def _resume(argv: list[str]) -> int:
    if not argv or (not Path(argv[0]).is_dir() and (argv[0].startswith("-") or "=" in argv[0])):
        raise ConfigError("pgtk resume needs a run directory (got none). Use pgtk resume outputs/DATE/TIME-NAME.")
    from pgtoolkit.config.resume import compose_resumed
    from pgtoolkit.config.validate import resolve, validate
    from pgtoolkit.system.report import Report
    from pgtoolkit.training.machine import look

    run_dir, overrides = Path(argv[0]), argv[1:]
    composed = compose_resumed(run_dir, overrides)
    report = validate(composed.config)
    look(resolve(composed.config, Report()), report, typed=False, begins=False)
    if problems := composed.problems + report.problems:
        raise _refusal(problems)
    _launch(composed.config, run_dir, overrides, resume=True)
    return 0


def _refusal(problems: list[str]) -> PgtoolkitError:
    from pgtoolkit.training.machine import DataProblem

    kind = DataError if all(isinstance(problem, DataProblem) for problem in problems) else ConfigError
    if len(problems) == 1:
        return kind(problems[0])
    return kind(f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {p}" for p in problems))


def _unknown_command(word: str) -> ConfigError:
    commands = _commands()
    nearest = difflib.get_close_matches(word, [*commands, *options()], n=1)
    if word in ("train", "run"):
        use = "pgtk [OVERRIDES], without a word, to train"
    elif word == "bench":
        use = "python -m benchmarks.kernels, in a checkout of pgtoolkit"
    elif not nearest:
        use = "pgtk --help"
    else:
        use = f"pgtk {nearest[0]}" + ("" if nearest[0] in commands else "=OPTION")
    reason = f"The commands are {', '.join(commands)}."
    return ConfigError(f"{word} needs to be a command or key=value (got neither). {reason} Use {use}.")


def _commands() -> list[str]:
    return [word for word in (use.split()[0] for use in COMMANDS) if word.isalpha()]


def _say(error: PgtoolkitError) -> int:
    rank, said = joined(), redact(str(error))
    if rank is None or rank.number == 0:
        print(f"pgtk: error: {said}", file=sys.stderr)
    elif not error.on_all_ranks:
        print(f"pgtk: error: rank {rank.number}: {said}", file=sys.stderr)
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
