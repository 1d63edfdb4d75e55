"""The page of `pgtk --help`, and what is said of a command that is none."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Mapping

from pgtoolkit.config.files import default_options, options
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import refusal

Commands = Mapping[str, tuple[str, str, Callable]]
"""As `cli.COMMANDS`."""


def help_page(commands: Commands) -> str:
    """Commands, groups with their options, examples: one screen of at most 32 lines."""
    lines = ["Policy-gradient losses for language models, compared by declarative configuration. Commands:"]
    lines.append(f"  pgtk {'[OVERRIDES]':<28}train, results in outputs/; -m a=1,2 b=3,4 runs all four")
    lines += [f"  pgtk {f'{name} {words}':<28}{says}" for name, (words, says, _) in commands.items()]
    lines.append("Groups (GROUP=OPTION; * is the default):")
    defaults, single, columns = default_options(), [], []
    for group, names in sorted(options().items(), key=lambda item: [*defaults, item[0]].index(item[0])):
        if len(names) == 1:
            single.append(f"{group} ({names[0]})")
            continue
        marked = [f"{name}*" if defaults.get(group) == name else name for name in names]
        columns.append(f"  {group:<13}" + "  ".join(marked))
    for line in _side_by_side(columns):
        lines += textwrap.wrap(line, 100, subsequent_indent=" " * 15)
    lines.append("  with one option: " + ", ".join(single))
    lines.append("Single keys: loss.epsilon_high=0.28 seed=1; pgtk explain KEY says what one means; docs/keys.md")
    return "\n".join(lines)


def _side_by_side(lines: list[str], width: int = 52) -> list[str]:
    """Two on one line of 100 columns where both are short: one and the next short one after it."""
    joined: list[str] = []
    free = None  # number of a line that has room for another
    for line in lines:
        if free is not None and len(line) <= 102 - width:
            joined[free], free = f"{joined[free]:<{width}}{line.removeprefix('  ')}", None
        else:
            free = len(joined) if len(line) < width else free
            joined.append(line)
    return joined


def unknown_command(word: str, commands: Commands) -> ConfigError:
    """The refusal of a first word that is no command, with the nearest."""
    uses = {name: f"pgtk {name}=OPTION" for name in options()} | {name: f"pgtk {name}" for name in commands}
    uses |= dict.fromkeys(("train", "run"), "pgtk [OVERRIDES], without a word, to train")
    uses["bench"] = "python -m benchmarks.kernels, in a checkout of pgtoolkit"
    near = difflib.get_close_matches(word, uses, n=1)
    reason, use = f"The commands are {', '.join(commands)}.", uses[near[0]] if near else "pgtk --help"
    return ConfigError(refusal(word, "to be a command or key=value", "neither", reason, use))
