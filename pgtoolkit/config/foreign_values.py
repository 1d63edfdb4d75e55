"""Refuses values of an experiment that are meant for another option than the one that is typed.

`epsilon_high` of `experiment=dapo` is the width of a clip of token ratios (`loss=grpo`). GSPO's
ratios of documents have a key of the same name, whose useful values are a thousand times smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pgtoolkit.config.files import OPTIONAL, config_directory, own_folder, read_options
from pgtoolkit.config.keys import option_values
from pgtoolkit.config.schema import OPTIONS
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import is_number, refusal, text


def foreign_values(choices: Mapping[str, object], typed: set[str]) -> Iterator[str]:
    """Yield a refusal for each number that a chosen file sets for the option that it chooses
    itself, where another one is chosen that has another default for it.

    choices: group -> its option. typed: the keys that the overrides set.
    """
    for group in OPTIONAL:
        names = choices.get(group)
        for name in names if isinstance(names, list) else [names]:
            yield from _of_file(f"{group}={name}", _content(group, str(name)), choices, typed)


def _content(group: str, name: str) -> Mapping[str, object]:
    """Return the keys of an option's file; empty where there is none that can be read."""
    folders = [folder for folder in (own_folder(), config_directory()) if folder is not None]
    files = [Path(folder, group, f"{name}.yaml") for folder in folders]
    for file in [file for file in files if file.is_file()][:1]:
        try:
            content = read_options(file)
        except ConfigError:  # which is refused where the file is composed
            return {}
        return content if isinstance(content, dict) else {}
    return {}


def _of_file(
    setting: str, content: Mapping[str, object], choices: Mapping[str, object], typed: set[str]
) -> Iterator[str]:
    defaults = content.get("defaults")
    for entry in defaults if isinstance(defaults, list) else []:
        for place, meant in entry.items() if isinstance(entry, dict) else ():
            group = str(place).rpartition("/")[2]
            values = content.get(group)
            chosen = choices.get(group)
            if group not in OPTIONS or chosen == meant or not isinstance(values, dict):
                continue
            ours = option_values(group, str(chosen))
            theirs = option_values(group, str(meant))
            for leaf in sorted(ours.keys() & theirs.keys() & values.keys()):
                key = f"{group}.{leaf}"
                is_one = is_number(ours[leaf]) and is_number(theirs[leaf])
                if not is_one or ours[leaf] == theirs[leaf] or key in typed:
                    continue
                yield refusal(
                    setting=setting,
                    needs=f"{group}={meant}, or {key} typed beside it",
                    got=f"{group}={chosen}",
                    reason=f"It sets {key}={text(values[leaf])} for {group}={meant}; the default "
                    f"is {text(theirs[leaf])} there and {text(ours[leaf])} with {group}={chosen}.",
                    use=f"{key}={text(ours[leaf])}",
                )
