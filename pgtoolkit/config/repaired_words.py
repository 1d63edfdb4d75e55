"""The overrides that a user most likely meant by other words of a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from pgtoolkit.config.field_words import FIELD_WORDS
from pgtoolkit.config.keys import KEYS, key_named
from pgtoolkit.config.meant_keys import (
    option_meant,
    overrides_meant,
    spelled,
    with_value,
)
from pgtoolkit.config.meant_values import typed, without_typography
from pgtoolkit.config.overrides import PROGRAMS
from pgtoolkit.config.resolve import default_in
from pgtoolkit.config.schema import default_options
from pgtoolkit.config.trainer_keys import known_as

_FLAGS = {
    "dry-run": "pgtk check",
    "check": "pgtk check",
    "resume": "pgtk resume --help",
    "multi-run": "-m",
    "sweep": "-m",
}
"""Flag of other programs, without its dashes -> what to type for it."""

_SEVERAL = re.compile(r"[\s,;|&]+(?=[A-Za-z_][\w./-]*\s*=)")
"""What stands between two overrides that are one word."""

_KEY_AND_VALUE = re.compile(r"\s*([^=\s>:]+)\s*(?:[:=-]?=+>?|->|:|\s)\s*(.*)", re.DOTALL)


def reason_of(words: str) -> str:
    """Return why words are no override, in a sentence; empty where nothing but the grammar says."""
    plain = without_typography(words)
    if any(
        not character.isascii() and character != without_typography(character)
        for character in words
    ):
        return "It has characters of a word processor."
    if words.startswith("-"):
        return "Overrides are written without dashes, and pgtk has no such flag."
    if re.search(r"\s=|=\s|==|:=|=>|->", plain):
        return "Between key and value there is one equals sign and no space."
    if len(_SEVERAL.split(plain)) > 1:
        return "Overrides are words of their own."
    if re.search(r"[;&|\\]$", plain):
        return "Its last character is one of the shell's."
    if "=" not in plain:
        return "It has no equals sign."
    return ""


def use_for(words: str, config: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    """Return what to type in place of words that are no override.

    groups: group -> its options.
    """
    flag = _FLAGS.get(without_typography(words).partition("=")[0].lstrip("-").replace("_", "-"))
    if flag is not None:
        return flag
    while words.partition(" ")[0] in PROGRAMS:
        words = words.partition(" ")[2]
    config_flag = re.fullmatch("--config[=_ -](.*)", words)
    if config_flag is not None and Path(config_flag[1]).is_dir():
        return f"--config-dir={config_flag[1]}"
    if words.endswith((".yaml", ".yml")) and "=" not in words.removeprefix("--config="):
        return f"pgtk sweep {re.split('[ =]', words)[-1]}"
    if re.match("[–—−‐]", words):  # noqa: RUF001 a dash of a word processor
        return without_typography(words).replace("-", "--", 1) if len(words) > 2 else "-m"
    key, equals, value = words.partition("=")
    name = spelled(key)
    known = key_named(name, config)
    if equals and known is not None and known.type.startswith("list"):
        return with_value(config, known, value)
    if equals and _is_text(name, config) and without_typography(words[:1]):
        return _text(name, value, config)
    plain = without_typography(words).strip()
    plain = re.sub(r"^[-!#$>{(\[\s]+|[\s\\;&|,.)}\]>]+$", "", plain)
    uses = []
    for part in _SEVERAL.split(plain):
        uses.append(_use_for_one(part, config, groups))
    if any(use.startswith("pgtk -m ") for use in uses):
        uses = ["pgtk -m", *(use.removeprefix("pgtk -m ") for use in uses)]
    return " ".join(dict.fromkeys(uses))


def _is_text(name: str, config: DictConfig) -> bool:
    """Return whether a name is that of a key, or a list, of any text."""
    key = key_named(name, config) or next((key for key in KEYS if key.name == name), None)
    if key is None or key.name != name:
        return name == "hydra.run.dir"
    return key.type.startswith("str") and not key.names and not key.option


def _text(name: str, value: str, config: DictConfig) -> str:
    """Return the override that gives a key of any text this value."""
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    value = re.sub("^~/", "$HOME/", value)  # a shell replaces ~ at the beginning of a word alone
    key = key_named(name, config)
    if key is None and not name.startswith("hydra."):
        key = next(key for key in KEYS if key.name == name)
        return f"{key.schema.replace('/', '=')} {typed(name, value)}"
    return typed(name, value)


def _use_for_one(part: str, config: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    """Return what to type in place of a text that holds one override."""
    key, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals or not key:
        match = _KEY_AND_VALUE.fullmatch(part)
        key, value = (match[1], match[2]) if match and key else (part.strip("= "), "")
    value = value.lstrip("=>: ")
    further = re.fullmatch(r"(\w+)\.(\w+)=(.*)", value)
    if further is not None and spelled(key) in groups:
        key, value = f"{key}.{further[1]}.{further[2]}", further[3]
    name = spelled(key)
    if name in groups and not value:
        return f"{name}={default_options().get(name) or groups[name][0]}"
    if name in groups:
        return option_meant(config, name, value, groups)
    known = key_named(name, config)
    if known is not None and known.name == name:
        return with_value(config, known, value or default_in(config, name))
    meant = overrides_meant(config, key, value, groups) if name else None
    if meant is None and not value:
        options = [group for group in ("loss", *groups) if name in groups[group]]
        meant = f"{options[0]}={name}" if options else None
    return meant or elsewhere(name)


def elsewhere(name: str) -> str:
    """Return the command that explains the name of another trainer or a word of the field, or the
    group of a key; else the page of help."""
    group, _, leaf = name.rpartition(".")
    if leaf and (known_as(leaf) or leaf in FIELD_WORDS):
        return f"pgtk explain {leaf}"
    return f"pgtk explain {group}" if group in default_options() else "pgtk --help"
