"""The pages of `pgtk explain` on the commands and their flags."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence

from pgtoolkit.config.explained import Page
from pgtoolkit.launch.command_arguments import ARGUMENTS
from pgtoolkit.launch.help import FLAGS, TRAINING, TRAINING_FLAGS


def pages_on_commands(reports: Mapping[str, Sequence]) -> dict[str, list[Page]]:
    """Return the name of each command and each flag -> its page.

    reports: `commands.REPORTS`.
    """
    commands = {name: _flags_of(name) for name in ARGUMENTS} | TRAINING_FLAGS
    purposes = TRAINING | {name: report[:2] for name, report in reports.items()}
    pages = {}
    by_flag = {flag: {"": meaning} for flag, meaning in FLAGS.items()}
    for name, flags in commands.items():
        words, purpose = purposes[name]
        parts = {"": purpose, "usage": f"pgtk {name} {words}".rstrip(), **flags}
        pages[name] = [Page("command", f"{name}: a command", parts)]
        for written, meaning in flags.items():
            for flag in written.split(", "):
                by_flag.setdefault(flag.split()[0], {})[f"pgtk {name}"] = meaning
    for flag, parts in by_flag.items():
        pages[flag] = [Page("flag", f"{flag}: a flag", parts)]
    return pages


def _flags_of(name: str) -> dict[str, str]:
    """Return the arguments of a command, as they are written, with their meanings."""
    parser = ArgumentParser(add_help=False)
    ARGUMENTS[name](parser)
    arguments = {}
    for action in parser._actions:
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        written = [f"{flag}{value}" for flag in action.option_strings]
        arguments[", ".join(written) or str(action.metavar)] = (action.help or "").replace(
            "%%", "%"
        )
    return arguments
