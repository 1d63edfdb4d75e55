"""The page of pgtk --help, the answer to an unknown command, and words for the Tab key."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from pgtoolkit.config.files import options, sweep_files
from pgtoolkit.config.schema import default_options
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import nearest, say


def help_page(commands: Mapping[str, tuple[str, str, Callable]]) -> str:
    """Return commands, groups with their options, and examples: one screen of at most 38 lines.

    commands: `cli.COMMANDS`.
    """
    lines = [
        "Policy-gradient losses for language models, compared by declarative configuration. "
        "Commands:"
    ]
    lines.append(
        f"  pgtk {'[OVERRIDES]':<28}train, results in outputs/; -m a=1,2 b=3,4 runs all four"
    )
    for name, (words, purpose, _) in commands.items():
        lines.append(f"  pgtk {f'{name} {words}':<28}{purpose}")
    lines.append(
        "Groups (GROUP=OPTION; * is the default), and keys (seed=1 loss.epsilon_high=0.28: "
        "docs/keys.md):"
    )
    lines += _groups()
    lines.append(
        "Flags: -m (--multirun), --fail-fast, --config-dir FOLDER, --cfg job (--resolve, --package "
        "GROUP),"
    )
    lines.append(
        "  --info PART, --version, --shell-completion install=bash for the Tab key: "
        "docs/configuration.md"
    )
    return "\n".join(lines)


def _groups() -> list[str]:
    """Return the lines on the groups of the configuration, in the order of their defaults."""
    defaults = default_options()
    order = list(defaults)
    rows = []
    single = []
    for group in sorted(options(), key=lambda group: [*order, group].index(group)):
        names = options()[group]
        if len(names) == 1:
            single.append(group if names[0] == "default" else f"{group} ({names[0]})")
            continue
        marked = [f"{name}*" if defaults.get(group) == name else name for name in names]
        rows.append(f" {group:<13}" + "  ".join(marked))
    lines = []
    for line in _side_by_side(rows):
        lines += textwrap.wrap(line, 100, subsequent_indent=" " * 14)
    lines.append(" with one option: " + ", ".join(single))
    return lines


def training_help(command: str, words: str, purpose: str) -> str:
    """Return the page of `pgtk COMMAND --help`, for a command whose words Hydra reads."""
    page = [f"usage: pgtk {command} {words}", "", purpose, ""]
    if command == "sweep":
        page.append(f"NAME: {', '.join(sweep_files())}, or path/to/file.yaml")
    page.append("OVERRIDES: GROUP=OPTION or KEY=VALUE, see pgtk --help")
    page += [f"{flag}: {meaning}" for flag, meaning in TRAINING_FLAGS[command].items()]
    return "\n".join(page)


TRAINING = {
    "sweep": (
        "NAME [OVERRIDES]",
        "train what a file in sweeps/ describes; repeated, it continues",
    ),
    "check": (
        "[OVERRIDES]",
        "print the plan and every problem; also: pgtk check sweep NAME",
    ),
    "resume": (
        "RUN_DIR [OVERRIDES]",
        "continue a run; with --step N hydra.run.dir=NEW as a new one",
    ),
    "continue": (
        "DIR [OVERRIDES]",
        "start a run there, or continue it: a job script can repeat it",
    ),
}
"""Command whose words Hydra reads -> its words, and its purpose."""

FLAGS = {
    "-m": "values separated by commas make a sweep, as --multirun does",
    "--multirun": "values separated by commas make a sweep",
    "--fail-fast": "start no further job of a sweep once one has failed",
    "--config-dir": "the folder with options of your own, laid out as conf/ is; PGTK_CONFIG_DIR "
    "says it once for all",
    "--cfg": "job prints the configuration as YAML, without checking that its keys fit together",
    "--resolve": "with --cfg job: values in the place of interpolations",
    "--package": "with --cfg job: one group alone",
    "--info": "what Hydra has read: defaults, defaults-tree, config, plugins or searchpath",
    **dict.fromkeys(
        ("--config-path", "--config-name", "--experimental-rerun"),
        "refused: options of your own lie in the folder that --config-dir names",
    ),
    "--help": "the commands, groups and options; after a command its flags",
    "--version": "the version",
    "--shell-completion": "install=bash or install=fish prints what makes the Tab key complete",
}
"""Flag of `pgtk` itself -> its meaning."""

_CONFIG_DIR = {"--config-dir FOLDER": "options of your own, in files laid out as conf/ is"}

TRAINING_FLAGS = {
    "sweep": {"--fail-fast": "start no further job once one has failed"} | _CONFIG_DIR,
    "check": {
        "-m, --multirun": "values separated by commas make a sweep",
        "--json": "print it as JSON",
        "--find X": "how many seeds of each configuration find a difference of X, such as 0.02",
    }
    | _CONFIG_DIR,
    "resume": {
        "--step N": (
            "continue from the checkpoint of this step, as a run of its own in hydra.run.dir"
        )
    },
    "continue": _CONFIG_DIR,
}
"""Command whose words Hydra reads -> its flags with their meanings."""


def _side_by_side(lines: list[str], width: int = 52) -> list[str]:
    """Join short lines in pairs: each with the next short one, in 100 columns."""
    joined: list[str] = []
    unpaired = None  # the index of a line that has room for another
    for line in lines:
        if unpaired is not None and len(line) <= 102 - width:
            joined[unpaired] = f"{joined[unpaired]:<{width}}{line.removeprefix(' ')}"
            unpaired = None
            continue
        if len(line) < width:
            unpaired = len(joined)
        joined.append(line)
    return joined


_TRAINS = ("train", "run", "start", "fit", "launch", "rl", "grpo_train", "python", "pgtk")
"""Words of other programs for what pgtk does without a command."""


def unknown_command(word: str, rest: Sequence[str], commands: Iterable[str]) -> ConfigError | None:
    """Return the refusal of a word that is no command, with the command that is meant; None where
    the word is rather a part of an override.

    rest: the words after it.
    """
    names = list(commands)
    after = " ".join(map(shlex.quote, rest))
    if word.endswith((".yaml", ".yml")):
        use = f"pgtk sweep {shlex.quote(word)} {after}".rstrip()
    elif word in _TRAINS:
        use = f"pgtk {after}".rstrip()
    else:
        near = nearest(word, names, 0.6)
        is_override = nearest(word, [*options(), *options()["loss"]], 0.7) is not None
        if near is None or is_override:
            return None
        use = f"pgtk {near} {after}".rstrip()
    return ConfigError(
        f"{word!r} is not a command. The commands are {', '.join(names)}; without one, pgtk "
        f"trains. Use {use}."
    )


def complete(argv: list[str], commands: list[str], hydra: Callable[[list[str]], int]) -> int:
    """Answer `pgtk -sc ...`, which the shell asks at the Tab key; return the exit status.

    A half-typed line that cannot be completed gives no words, and is no error.
    hydra: runs Hydra with a command line; it completes the overrides after pgtk's own words.
    """
    if not any(word.startswith("query=") for word in argv):
        return hydra(argv)
    words, line = split(os.environ.get("COMP_LINE", ""), commands)
    say("\n".join(words))
    if line is not None:
        os.environ["COMP_LINE"] = line
        answer = io.StringIO()
        with (
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(answer),
            contextlib.suppress(Exception, SystemExit),
        ):
            hydra(argv)
        # Hydra also offers files that are no options: schemas, and keys that options share.
        offered = answer.getvalue().split()
        say(" ".join(word for word in offered if not re.search("=(schema|_)", word)))
    return 0


def split(line: str, commands: list[str]) -> tuple[list[str], str | None]:
    """Return (the words that fit here, the line that Hydra is to complete).

    The line is None where no override belongs.
    line: the words typed until now, the program first.
    commands: the first words that pgtk knows.
    """
    program, *words = line.split() or [""]
    being_typed = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        return [word for word in commands if word.startswith(being_typed)], line
    if words[0] == "check":
        rest = " ".join([program, *words[1:], being_typed])
        return split(rest, ["sweep"])
    if words[0] == "sweep" and len(words) == 1:
        return [name for name in sweep_files() if name.startswith(being_typed)], None
    if words[0] in ("sweep", "resume") and len(words) > 1:
        return [], " ".join([program, *words[2:], being_typed])
    return [], None if words[0] in commands else line
