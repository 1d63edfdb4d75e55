"""The commands on finished runs, such as `pgtk compare`: their arguments, and where the results go."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from pgtoolkit.errors import ConfigError, PgtoolkitError, StorageError
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.next_commands import shell_path


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{self.prog}: {message}. Use {' '.join(self.format_usage().split()[1:])}.")


def main(command: str, argv: list[str]) -> int:
    """Run one of COMMANDS; returns the exit status. Raises PgtoolkitError for what the user can mend."""
    return COMMANDS[command](argv)


def _compare(argv):
    parser = _Parser("pgtk compare", description="Compare runs: which keys vary, what they reached, seed noise.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, folder with runs, or a sweep's name")
    parser.add_argument("--uri", metavar="URI", help="read this MLflow store; RUN is then an experiment or a sweep")
    parser.add_argument("--metric", default="reward", metavar="NAME", help="what is compared (default: reward)")
    for suffix, what in (("html", "report in one page"), ("csv", "row per run"), ("png", "picture of the curves")):
        parser.add_argument(f"--{suffix}", type=Path, metavar="FILE", help=f"write a {what}")
    args = parser.parse_args(argv)
    files = {name: getattr(args, name) for name in ("html", "csv", "png") if getattr(args, name)}
    for name, path in files.items():
        _refuse_unwritable(name, path)

    from pgtoolkit.comparison.files import write
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.runs import find_runs
    from pgtoolkit.comparison.terminal import page

    if args.uri:
        from pgtoolkit.comparison.stored import stored_runs

        runs = stored_runs(args.uri, args.runs)
    else:
        runs = find_runs(args.runs)
    compared = compare(runs, args.metric)
    print(page(compared), flush=True)
    for name, path in files.items():
        try:
            write(compared, name, path, redact(shlex.join(["pgtk", "compare", *argv])))
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        print(f"{name:<5}{shell_path(path)}", flush=True)
    return 0


def _refuse_unwritable(name, path):
    if path.is_dir() or not path.parent.is_dir():
        got = "a folder" if path.is_dir() else f"no folder {path.parent}"
        reason = "The report is one file." if path.is_dir() else "Folders are not made."
        raise ConfigError(
            f"--{name}={path} needs the name of a file in a folder that exists (got {got}). {reason} "
            f"Use --{name}=comparison.{name}."
        )


def _diff(argv):
    parser = _Parser("pgtk diff", description="What changed between two runs: configuration, code, packages, hardware.")
    parser.add_argument("first", metavar="RUN_A", type=Path)
    parser.add_argument("second", metavar="RUN_B", type=Path)
    args = parser.parse_args(argv)

    from pgtoolkit.comparison.diff import page

    print(page(args.first, args.second), flush=True)
    return 0


def _ui(argv):
    parser = _Parser("pgtk ui", description="Show MLflow's pages of the runs tracked from this directory.")
    parser.add_argument("--port", default="5000", metavar="N", help="port on 127.0.0.1 (default: 5000)")
    parser.add_argument("--uri", metavar="URI", help="another store (default: sqlite:///outputs/mlflow.db)")
    args = parser.parse_args(argv)

    from pgtoolkit.comparison.ui import serve

    return serve(args.uri, args.port)


def _sync(argv):
    parser = _Parser("pgtk sync", description="Deliver to MLflow what run directories hold and the store lacks.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or a folder with runs such as a sweep")
    parser.add_argument("--uri", metavar="URI", help="another store than the run's own")
    parser.add_argument("--experiment", metavar="NAME", help="another experiment than the run's own")
    args = parser.parse_args(argv)

    from pgtoolkit.comparison.runs import is_run, run_directories
    from pgtoolkit.tracking.sync import sync

    failed = []
    for directory in run_directories("pgtk sync", args.runs):
        if not is_run(directory):
            print(f"{shell_path(directory)}: it ended before its config.yaml was written", flush=True)
            continue
        try:
            print(sync(directory, args.uri, args.experiment), flush=True)
        except PgtoolkitError as error:  # such as of a run that is damaged, or still going on: the others do not wait
            failed.append(error)
    if failed:
        worst = max(failed, key=lambda error: error.exit_status)
        raise type(worst)("\n".join(dict.fromkeys(map(str, failed)))) from worst
    return 0


def _export(argv):
    parser = _Parser("pgtk export", description="Write a run's newest checkpoint as a Hugging Face folder.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("folder", metavar="DIR", type=Path, help="new or empty folder")
    args = parser.parse_args(argv)

    from pgtoolkit.training.export import export

    step = export(args.run, args.folder)
    print(f"step {step} of {shell_path(args.run)} is in {shell_path(args.folder)}; its README.md says how to load it")
    return 0


COMMANDS = {"compare": _compare, "diff": _diff, "export": _export, "sync": _sync, "ui": _ui}
