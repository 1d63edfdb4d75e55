"""The command `pgtk`: finds the sub-command of a line, and ends errors in a message and a status.

`pgtk loss=gspo` goes from `main` over `_start` to `launch/start.py`, `launch/ranks.py` and
`assembly/train.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from pgtoolkit import __version__
from pgtoolkit.config.files import OWN_FOLDER, sweep_file
from pgtoolkit.errors import ConfigError, ExitStatus, PgtoolkitError, as_storage_error
from pgtoolkit.launch.commands import REPORTS, report
from pgtoolkit.launch.help import TRAINING, complete, help_page, training_help, unknown_command
from pgtoolkit.system.own_end import end, refuse_silent_ends
from pgtoolkit.system.plain_files import plain_run
from pgtoolkit.system.process_state import print_warnings
from pgtoolkit.system.report import near_path, print_error, refusal, say
from pgtoolkit.system.terminal import (
    flush_streams,
    forget_streams,
    prepare_streams,
    status_of_output,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Errors of the user end in one message, others in a traceback.
    """
    before = sys.argv
    folder_before = os.environ.get(OWN_FOLDER)
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]  # for provenance.json
    prepare_streams()
    if print_warnings():
        say(
            "note: PYTHONWARNINGS makes errors of warnings, and one of a library's would end the "
            "run: they are printed instead.",
            error=True,
        )
    try:
        return _dispatch(_with_own_folder(sys.argv[1:]))
    except PgtoolkitError as error:
        return print_error(error)
    except KeyboardInterrupt:
        say("pgtk: stopped by a keyboard interrupt", error=True)
        return ExitStatus.stopped
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return ExitStatus.unread
    except OSError as error:
        return print_error(as_storage_error(error))
    finally:
        sys.argv = before
        os.environ.pop(OWN_FOLDER, None)
        if folder_before is not None:
            os.environ[OWN_FOLDER] = folder_before
        flush_streams()
        forget_streams()


def _dispatch(argv: list[str]) -> int:
    _refuse_empty_words(argv)
    command = argv[0] if argv and argv[0][:1].isalpha() and "=" not in argv[0] else None
    if command in REPORTS:  # their parsers answer --help themselves
        return status_of_output(report(command, argv[1:]))
    if "--help" in argv or "-h" in argv:
        if command in COMMANDS:
            words, purpose, _ = COMMANDS[command]
            say(training_help(command, words, purpose))
        else:
            say(help_page(COMMANDS))
        return status_of_output(0)
    if "--version" in argv:
        say(f"pgtk {__version__}")
        return status_of_output(0)
    if command in COMMANDS:
        return COMMANDS[command][2](argv[1:])
    refused = None if command is None else unknown_command(command, argv[1:], COMMANDS)
    if refused is not None:
        raise refused
    return _start(argv)


def _with_own_folder(argv: list[str]) -> list[str]:
    """Return the words without the flag --config-dir, wherever it stands, with its folder set for
    this process and those that it starts.

    Raises ConfigError where the flag, or else the variable in its place, names no folder.
    """
    words = []
    rest = iter(argv)
    for word in rest:
        flag, equals, folder = word.partition("=")
        if flag not in ("--config-dir", "-cd"):
            words.append(word)
            continue
        folder = folder if equals else next(rest, "")
        _refuse_no_folder(f"--config-dir={folder}", folder)
        os.environ[OWN_FOLDER] = os.path.abspath(folder)
    named = os.environ.get(OWN_FOLDER)
    if named:
        _refuse_no_folder(f"{OWN_FOLDER}={named}", named)
    return words


def _refuse_no_folder(setting: str, folder: str) -> None:
    """Raise ConfigError if there is no such folder."""
    if not folder or not Path(folder).is_dir():
        raise ConfigError(
            refusal(
                setting=setting,
                needs="a folder",
                got=folder,
                reason="It holds options of your own, such as experiment/mine.yaml.",
                use=f"--config-dir={near_path(folder) or 'FOLDER'}",
            )
        )


def _refuse_empty_words(argv: list[str]) -> None:
    """Refuse a word without a character, and an option such as `--html=` without its value.

    An unset variable of a shell leaves one. As a path it would be the current directory, in which
    `pgtk continue "$RUN"` would train.
    """
    for number, word in enumerate(argv, start=1):
        if not word.strip() or re.fullmatch(r"--[a-z-]+=\s*", word):
            command = " ".join(shlex.quote(typed) for typed in ["pgtk", *argv])
            raise ConfigError(
                refusal(
                    setting=command,
                    needs="words that are not empty",
                    got=f"{word!r} as word {number} after pgtk",
                    reason="A shell's variable without a value leaves one.",
                    use="a dot for the current directory, or leave it out",
                )
            )


def _start(argv: list[str], file: Path | None = None) -> int:
    """Train, or complete a half-typed line; return the exit status.

    file: the file of a sweep.
    """
    from pgtoolkit.config.hydra_command import hydra_answers
    from pgtoolkit.launch.start import start

    if "-sc" in argv or "--shell-completion" in argv:
        return complete(argv, list(COMMANDS), hydra_answers)
    return start(_for_hydra(argv), file, ["pgtk", *sys.argv[1:]])


def _sweep(argv: list[str]) -> int:
    return _start(["--multirun", *argv[1:]], sweep_file(*argv[:1]))


def _check(argv: list[str]) -> int:
    from pgtoolkit.config.hydra_command import hydra_arguments
    from pgtoolkit.launch.check import check, plan_as_json, problems, render_plan
    from pgtoolkit.launch.seeds_to_find import size_of_difference

    file = None
    as_json = "--json" in argv
    find, argv = _taken("--find", [word for word in argv if word != "--json"])
    difference = None if find is None else size_of_difference(find)
    if argv and argv[0] == "sweep":
        file = sweep_file(*argv[1:2])
        argv = ["--multirun", *argv[2:]]
    args = hydra_arguments(_for_hydra(argv))
    checked = check(args.overrides, args.multirun, sweep_file=file)
    say(plan_as_json(checked, difference) if as_json else render_plan(checked, difference))
    return status_of_output(ConfigError.exit_status if problems(checked) else 0)


def _taken(flag: str, argv: list[str]) -> tuple[str | None, list[str]]:
    """Return (the last value of a flag, or None, the other words)."""
    value = None
    words = []
    rest = iter(argv)
    for word in rest:
        name, equals, after = word.partition("=")
        if name == flag:
            value = after if equals else next(rest, "")
        else:
            words.append(word)
    return value, words


def _resume(argv: list[str]) -> int:
    from pgtoolkit.launch.start import resume

    run_dir = _run_dir("resume", argv, "outputs/DATE/TIME-NAME")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--step", type=int)
    try:
        args, overrides = parser.parse_known_args(argv[1:])
    except argparse.ArgumentError as error:
        raise ConfigError(
            f"pgtk resume: {error}. Use pgtk resume RUN_DIR --step N hydra.run.dir=NEW."
        ) from error
    return resume(run_dir, overrides, args.step)


def _continue(argv: list[str]) -> int:
    from pgtoolkit.launch.start import start_or_continue

    return start_or_continue(_run_dir("continue", argv, "outputs/NAME OVERRIDES"), argv[1:])


def _run_dir(command: str, argv: list[str], example: str) -> Path:
    if not argv or (not Path(argv[0]).is_dir() and (argv[0].startswith("-") or "=" in argv[0])):
        raise ConfigError(
            f"pgtk {command} needs a run directory (got none). Use pgtk {command} {example}."
        )
    return plain_run(argv[0])


def _for_hydra(argv: list[str]) -> list[str]:
    return ["hydra.launcher.fail_fast=true" if word == "--fail-fast" else word for word in argv]


COMMANDS = {
    "sweep": (*TRAINING["sweep"], _sweep),
    "check": (*TRAINING["check"], _check),
    "resume": (*TRAINING["resume"], _resume),
    "continue": (*TRAINING["continue"], _continue),
    **REPORTS,
}
"""Name -> its words, its purpose, and its function; `report` calls the functions of `REPORTS`."""


def run() -> NoReturn:
    """Run the command line as a process, and end that with the exit status."""
    refuse_silent_ends()
    try:
        status = main()
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
        status = PgtoolkitError.exit_status
    end(status)


if __name__ == "__main__":
    run()
