"""Messages of the command as they say in Python what to write."""

from __future__ import annotations

import json
import os
import re
import shlex

from pgtoolkit.tracking.next_commands import OF_PYTHON, of_own_folder, python_call

_VALUE = r"[\w./@+,()\[\]-]*[\w)\]]"
_WORD = rf"[\w./@+~-]+=(?:'[^'\s]*'|{_VALUE})"
_QUOTED = rf"(?:{_WORD}|'{_WORD}'|\"{_WORD}\")"
_WORDS = rf"{_QUOTED}(?: {_QUOTED})*"


def as_reached(message: str) -> str:
    """Return a message as it is, or in a process of OF_PYTHON with what to write in Python."""
    return in_python(message) if OF_PYTHON in os.environ else message


def before_the_call(folder: str) -> str:
    """Return what to write where the command has --config-dir."""
    return f"{of_own_folder(folder)}, before this call"


def in_python(message: str) -> str:
    """Return a message of the command with overrides as Python types them where it says to use
    several, a sweep or another directory: `"loss=gspo", "seed=1"`,
    `sweep({"loss": ["grpo", "gspo"]})` and `train(config, "outputs/OTHER")`."""
    end = r"(?=\.(?:\n|$))"
    message = re.sub(
        r"Use another directory, or \S*pgtk resume [^\n]*",
        'Use train(config, "outputs/OTHER").',
        message,
    )
    message = re.sub(rf"\bpgtk -m ({_WORDS})", _sweep_of, message)
    message = re.sub(
        rf"Use --config-dir=(\S+) {_WORD}{end}",
        lambda match: f"Use {before_the_call(match[1])}",
        message,
    )
    message = re.sub(rf"(?<=Use )({_QUOTED}(?: {_QUOTED})+){end}", _separate, message)
    message = re.sub(rf"(?<=, or )({_QUOTED}(?: {_QUOTED})+)(?= for one )", _separate, message)
    message = re.sub(rf"Use pgtk sweep ([\w./-]+){end}", r'Use sweep("\1")', message)
    message = message.replace("`pgtk sweep rate_range`", '`sweep("rate_range")`')
    message = re.sub(r"^pgtk (sweep|compare) needs", r"\1 needs", message)
    message = re.sub(r"^(?:pgtk )?(compare|load) (\S+) needs", r'\1("\2") needs', message)
    message = re.sub(
        r"Use pgtk resume (\S+) to continue that run, pgtk continue \S+ in a script[^,]*",
        r'Use train(config, "\1") to continue that run',
        message,
    )
    message = message.replace("needs -m (got several values)", "needs a sweep (got several values)")
    message = re.sub(r"Use pgtk check\.$", "Use check(config).", message)
    message = re.sub(r"Use pgtk resume --help\.$", 'Use train(config, "RUN_DIR").', message)
    return message.replace(
        "Use seed=0,1,2 for three, or pgtk without -m", 'Use "seed": [0, 1, 2] for three, or train'
    )


def _sweep_of(command: re.Match[str]) -> str:
    """Return the call that is the same as a command with -m. That of keys of the sweep itself has
    the keys of its runs, too."""
    words = shlex.split(command[1])
    if all(word.startswith("hydra") for word in words):
        return f"sweep(grid, {', '.join(map(json.dumps, words))})"
    return python_call("-m", *words) or command[0]


def _separate(words: re.Match[str]) -> str:
    """Return overrides as the texts that a function takes."""
    return ", ".join(map(json.dumps, shlex.split(words[1])))
