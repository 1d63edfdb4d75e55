"""Hydra's own command line: its flags as it reads them, and its answers to --cfg, --info and the
Tab key."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from argparse import Namespace
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser

from pgtoolkit.config.files import config_directory, own_folder
from pgtoolkit.config.hydra_files import reading_as_pgtk, register
from pgtoolkit.config.overrides import NO_CHOICE, hydra_form
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import refusal
from pgtoolkit.system.terminal import output, status_of_output, write_line


def hydra_arguments(argv: list[str]) -> Namespace:
    """Return the arguments as Hydra reads them.

    Raises ConfigError for flags of Hydra's that would bypass what is checked.
    """
    parser = get_args_parser()
    parser.allow_abbrev = False
    parser.error = _not_understood
    words = [word if _is_flag(word, parser) else f"{_OVERRIDE}{word}" for word in argv]
    args = parser.parse_intermixed_args(words)  # overrides may stand on both sides of a flag
    args.overrides = [word.removeprefix(_OVERRIDE) for word in args.overrides]
    for flag in ("config_path", "config_name", "experimental_rerun"):
        value = getattr(args, flag)
        if value is not None:
            raise ConfigError(
                refusal(
                    setting=f"--{flag.replace('_', '-')}={value}",
                    needs="to be left out",
                    got=value,
                    reason=(
                        "pgtk begins with its own conf/config.yaml: another would not be checked, "
                        "and could run code."
                    ),
                    use="pgtk sweep FILE.yaml, or --config-dir=FOLDER for options of your own",
                )
            )
    return args


_OVERRIDE = "\0"
"""Marks words that are no flags of Hydra's, even if they begin with a dash; no word has it."""


def _is_flag(word: str, parser: argparse.ArgumentParser) -> bool:
    """Return whether a word is a flag of Hydra's, or no word with a dash at all."""
    flag, equals, _ = word.partition("=")
    actions = parser._option_string_actions
    takes_value = flag in actions and actions[flag].nargs != 0
    return not word.startswith("-") or (flag in actions and (not equals or takes_value))


def _not_understood(message: str) -> NoReturn:
    use = "pgtk --help"
    if "--cfg" in message or "--info" in message:
        use = "pgtk --cfg job"
    raise ConfigError(f"{message}. Use {use}.")


def for_hydra(argv: list[str], overrides: list[str]) -> list[str]:
    """Return a command line as Hydra needs it: the overrides, each once, and then the flags.

    overrides: those of its words that are overrides.
    """
    words = [word for word in argv if word not in NO_CHOICE]
    flags = [word for word in words if word not in overrides]
    return [*dict.fromkeys(hydra_form(word) for word in words if word in overrides), *flags]


def hydra_answers(argv: list[str]) -> int:
    """Have Hydra answer a command line by itself; returns the exit status."""
    register()
    argv_before = sys.argv
    folder = own_folder()
    sys.argv = [sys.argv[0], *argv, *([] if folder is None else [f"--config-dir={folder}"])]
    # Hydra would end in a traceback where the reader has gone.
    printed = io.StringIO()
    try:
        main = hydra.main(
            version_base="1.3", config_path=str(config_directory()), config_name="config"
        )
        with reading_as_pgtk(), contextlib.redirect_stdout(printed):
            main(lambda config: None)()
    finally:
        sys.argv = argv_before
        text = printed.getvalue()
        if text:
            write_line(text.removesuffix("\n"), output())
    return status_of_output(0)
