"""Writes conf/, docs/keys.md and the tables of other pages of docs/ from their declarations:
`python -m pgtoolkit.config.pages`, in a working copy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from pgtoolkit.config.api_page import api_page
from pgtoolkit.config.defaults import Computed, SameAs, number
from pgtoolkit.config.entries import entries
from pgtoolkit.config.files import config_directory
from pgtoolkit.config.keys import KEYS, OPTION_KEYS, group_help, option_values, shown
from pgtoolkit.config.schema import OPTIONS, default_options
from pgtoolkit.config.tables import as_text, filled, rules, words
from pgtoolkit.config.words import VARIABLES
from pgtoolkit.system.declared import Alters, Key
from pgtoolkit.system.report import text

_WIDTH = 100

_MAIN_HEAD = """\
# The experiment: one option of each group, and below them the seed.
# `pgtk loss=grpo` changes an option, `pgtk loss.epsilon_high=0.28` a single key;
# `pgtk check ...` shows the plan.

# Which option of each group is used. Groups are folders here, options are files in them.
defaults:
  # The types of all keys
  - schema
  # Before the groups, so that an experiment can change everything, the seed included
  - _self_
"""

_MAIN_END = """\
  # Run directories and logging of Hydra itself
  - hydra: pgtk
  # The settings of a paper, which change those above, such as experiment=dapo
  - experiment: null
  # A small or special run for debugging, which changes all others, such as debug=short
  - debug: null
"""

_KEYS_HEAD = """\
# Keys

After this page you know what every key of the configuration means, its type and range (both ends
included) and its default; below the keys are the settings that exclude each other, and environment
variables. `pgtk explain KEY` prints the same, and the reasons. The last column ends with marks:

| mark | is |
|---|---|
| Needs ... | without it any value but the default is refused |
| *Kept* | `pgtk resume` refuses another value |
| *Not learned* | it does not change what is learned: a finished job of a sweep stays finished |
| *Own code* | it may name code of your own, which is imported when a run starts \
([configuration.md](configuration.md#what-runs-code)) |
| *Command* | it is run as a command: `pgtk resume` takes it only if it is typed |
| *Path* | a relative path is seen from the directory in which the run starts |

This page and [`conf/`](../conf) are written by `python -m pgtoolkit.config.pages` from the schema
(the settings of each group); a test compares them.
"""

_RULES_HEAD = """\
## Settings that exclude each other

`pgtk check` names each that is broken, and says what to type. `!=` is: other than.
"""

_VARIABLES_HEAD = """\
## Environment variables

Besides those of PyTorch, MLflow, Weights & Biases, vLLM and the hub itself these are spoken of in
these pages:
"""


def files() -> dict[Path, str]:
    """Return the text of every file that is written from declarations, by its path."""
    conf = config_directory()
    docs = conf.parent / "docs"
    texts = {
        docs / "keys.md": keys_page(),
        docs / "api.md": api_page(),
        conf / "config.yaml": main_file(),
    }
    for page in sorted(docs.glob("*.md")):
        texts.setdefault(page, filled(page.read_text(encoding="utf-8")))
    page = docs / "comparing.md"
    texts[page] = with_measures(page.read_text(encoding="utf-8"))
    for group, options in OPTIONS.items():
        for name in options:
            texts[conf / group / f"{name}.yaml"] = option_file(group, name)
    return texts


def main_file() -> str:
    """Return conf/config.yaml: the default option of each group, and the keys of no group."""
    lines = []
    for group, option in default_options().items():
        lines += _comment(f"{group_help(group).rstrip('.')}: {', '.join(OPTIONS[group])}", "  ")
        lines.append(f"  - {group}: {option}")
    single = [
        line for key in KEYS if not key.schema for line in ("", *_key_lines(key, key.default))
    ]
    return _MAIN_HEAD + "\n".join(lines) + "\n" + _MAIN_END + "\n".join(single) + "\n"


def option_file(group: str, name: str) -> str:
    """Return the file of an option: all of its keys, or what differs from the option that it is
    based on."""
    option = OPTIONS[group][name]
    lines = [*_comment(option.help), ""]
    if option.base:
        lines += [f"defaults: [{option.base}, _self_]", ""]
    if group in OPTION_KEYS:
        lines.append(f"{OPTION_KEYS[group].rpartition('.')[2]}: {name}")
    if option.base:
        lines += [f"{leaf}: {_in_yaml(value)}" for leaf, value in option.changes.items()]
    else:
        values = option_values(group, name)
        for key in KEYS:
            if key.schema in (group, f"{group}/{name}") and not key.option:
                lines += _key_lines(key, values[key.leaf])
    return "\n".join(lines) + "\n"


def keys_page() -> str:
    """Return docs/keys.md."""
    lines = [_KEYS_HEAD.rstrip()]
    group = None
    for entry in entries():
        if entry.key.group != group:
            group = entry.key.group
            lines += ["", f"## {group or 'seed'}", ""]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        options = f" ({entry.options})" if entry.options else ""
        cells = [f"`{shown(entry.key.name)}`{options}", *entry.description(brief=True).values()]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", _RULES_HEAD, as_text(rules()), _VARIABLES_HEAD]
    return "\n".join(lines) + "\n" + as_text(words("`variable`", VARIABLES))


def with_measures(page: str) -> str:
    """Return docs/comparing.md with the table of keys that change a measured number."""
    before, begin, rest = page.partition("<!-- measures -->\n")
    _, end, after = rest.partition("<!-- end -->")
    lines = ["| a key that | |", "|---|---|"]
    for kind in Alters:
        if kind != Alters.nothing:
            lines.append(f"| {kind} | {', '.join(f'`{name}`' for name in _altering(kind))} |")
    return before + begin + "\n".join(lines) + "\n" + end + after


def _altering(kind: Alters) -> list[str]:
    """Return the keys of a kind; in the place of all keys of a group its name."""
    groups_with_others = {key.group for key in KEYS if key.alters != kind}
    names = [
        shown(key.name) if key.group in groups_with_others or not key.group else key.group
        for key in KEYS
        if key.alters == kind
    ]
    return list(dict.fromkeys(names))


def _key_lines(key: Key, value: object) -> Iterator[str]:
    """Yield the lines of a key: its meaning as a comment, and its value."""
    meaning = key.help
    if isinstance(value, SameAs):
        meaning += f" By default the value of {value}."
    elif isinstance(value, Computed):
        meaning += f" By default {value}."
    yield from _comment(meaning)
    yield f"{key.leaf}: {_in_yaml(value)}"


def _comment(sentences: str, indent: str = "") -> list[str]:
    """Return text as comment lines; paragraphs are divided by an empty comment."""
    lines = []
    for paragraph in sentences.split("\n\n"):
        if lines:
            lines.append(f"{indent}#")
        lines += textwrap.wrap(
            paragraph,
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
    return lines


def _in_yaml(value: object) -> str:
    """Return a default as it stands in a file of conf/."""
    if isinstance(value, Computed):
        return value.interpolation
    if isinstance(value, bool) or value is None:
        return text(value)
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_in_yaml, value))}]"
    return str(value)


if __name__ == "__main__":
    for file, written in files().items():
        file.write_text(written, encoding="utf-8")
