"""The command `pgtk`: trains, checks or resumes what the overrides describe."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from pathlib import Path

from pgtoolkit import __version__
from pgtoolkit.conf_files import config_directory, default_options, options
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, StorageError

COMMANDS = {
    "[OVERRIDES]": "train, results in outputs/; -m a=1,2 b=3,4 runs all four",
    "check [OVERRIDES]": "print the plan and every problem; start nothing",
    "resume RUN_DIR [OVERRIDES]": "continue a run from its newest checkpoint",
    "compare RUN_DIR...": "what varies, what was reached over seeds, seed noise; --html FILE",
    "diff RUN_A RUN_B": "what changed: configuration, code, packages, hardware",
    "sync RUN_DIR...": "deliver to MLflow what it lacks of runs, such as after an outage",
    "ui": "MLflow's pages of the runs tracked from this directory; --port N",
    "bench": "measure the kernels on this machine",
}


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


def _dispatch(argv: list[str]) -> int:
    command = argv[0] if argv and argv[0][:1].isalpha() and "=" not in argv[0] else None
    if command in ("compare", "diff", "sync", "ui"):
        from pgtoolkit.comparison.command import main as run_command

        return run_command(command, argv[1:])
    if "--help" in argv or "-h" in argv:
        print(help_page())
    elif "--version" in argv:
        print(f"pgtk {__version__}")
    elif command is None:
        return _train(argv)
    elif command == "check":
        return _check(argv[1:])
    elif command == "resume":
        return _resume(argv[1:])
    elif command == "bench" and _has_bench():
        return importlib.import_module("pgtoolkit.bench").main(argv[1:]) or 0
    else:
        raise _unknown_command(command)
    sys.stdout.flush()
    return 0


def help_page() -> str:
    """Commands, groups with their options, examples: one screen of 24 lines."""
    lines = ["Policy-gradient losses for language models, compared by declarative configuration.", "Commands:"]
    shown = {use: text for use, text in COMMANDS.items() if use != "bench" or _has_bench()}
    lines += [f"  pgtk {use:<28}{text}" for use, text in shown.items()]
    lines += ["", "Groups (GROUP=OPTION; * is the default):"]
    defaults, single, columns = default_options(), [], []
    for group, names in sorted(options().items(), key=lambda item: [*defaults, item[0]].index(item[0])):
        if len(names) == 1:
            single.append(f"{group} ({names[0]})")
            continue
        marked = [f"{name}*" if defaults.get(group) == name else name for name in names]
        columns.append(f"  {group:<13}" + "  ".join(marked))
    lines += _side_by_side(columns)
    lines.append("  with one option: " + ", ".join(single))
    lines += [
        "",
        "Single keys: loss.epsilon_high=0.28 seed=1; all of them with their meaning: conf/, or pgtk --cfg job",
    ]
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


def _train(argv: list[str]) -> int:
    """Refuse a bad configuration before anything is created, then hand over to Hydra."""
    from hydra._internal.utils import get_args_parser

    from pgtoolkit.check import check, notes, problems
    from pgtoolkit.compose import NO_CHOICE, hydra_form

    args = get_args_parser().parse_args(argv)
    if args.cfg and args.multirun:
        raise ConfigError("--cfg needs one run (got -m). It prints one configuration. Use pgtk check -m for a sweep.")
    starts = not (args.cfg or args.info or args.shell_completion or args.hydra_help)
    if starts or args.cfg:
        runs = check(args.overrides, args.multirun, args.config_dir, rules=starts)
        if found := problems(runs):
            raise _refusal(found)
        for note in notes(runs):
            print(f"pgtk: note: {note}", file=sys.stderr)
    return _run_hydra([hydra_form(arg) if arg in args.overrides else arg for arg in argv if arg not in NO_CHOICE])


def _run_hydra(argv: list[str]) -> int:
    import hydra

    from pgtoolkit.compose import register

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
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra shortens the traceback of a defect
    before, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="config")(task)()
    except OSError as error:
        if started:
            raise
        raise StorageError(
            f"the run directory cannot be made: {error}. Choose another with hydra.run.dir=..."
        ) from error
    finally:
        sys.argv = before
    return statuses[0] if statuses else 0


def _train_one(config) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from pgtoolkit.compose import name_of
    from pgtoolkit.training.train import train

    own = HydraConfig.get()
    overrides = list(own.overrides.task)
    in_sweep = own.mode == RunMode.MULTIRUN
    config.tracking.run_name = name_of(config.tracking.run_name, overrides, in_sweep)
    train(config, Path(own.runtime.output_dir), resume=False, overrides=overrides)


def _check(argv: list[str]) -> int:
    from hydra._internal.utils import get_args_parser

    from pgtoolkit.check import check, page, problems

    args = get_args_parser().parse_args(argv)
    runs = check(args.overrides, args.multirun, args.config_dir)
    print(page(runs), flush=True)
    return ConfigError.exit_status if problems(runs) else 0


def _resume(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise ConfigError("pgtk resume needs a run directory (got none). Use pgtk resume outputs/DATE/TIME-NAME.")
    from pgtoolkit.resume import compose_resumed
    from pgtoolkit.validate import validate

    run_dir, overrides = Path(argv[0]), argv[1:]
    composed = compose_resumed(run_dir, overrides)
    problems = composed.problems + validate(composed.config).problems
    if problems:
        raise _refusal(problems)
    from pgtoolkit.training.train import train

    train(composed.config, run_dir, resume=True, overrides=overrides)
    return 0


def _refusal(problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {p}" for p in problems))


def _unknown_command(word: str) -> ConfigError:
    commands = ["check", "resume", "compare", "diff", "sync", "ui", *(["bench"] if _has_bench() else [])]
    nearest = difflib.get_close_matches(word, [*commands, *options()], n=1)
    if word in ("train", "run"):
        use = "pgtk [OVERRIDES], without a word, to train"
    elif not nearest:
        use = "pgtk --help"
    else:
        use = f"pgtk {nearest[0]}" + ("" if nearest[0] in commands else "=OPTION")
    reason = f"The commands are {', '.join(commands)}."
    return ConfigError(f"{word} needs to be a command or key=value (got neither). {reason} Use {use}.")


def _has_bench() -> bool:
    return importlib.util.find_spec("pgtoolkit.bench") is not None


def _say(error: PgtoolkitError) -> int:
    print(f"pgtk: error: {error}", file=sys.stderr)
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
