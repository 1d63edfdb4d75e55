"""What is wrong with an override, or with a file of options: the reason, and the nearest valid key,
option or value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from omegaconf import DictConfig, Node, OmegaConf

from pgtoolkit.config.composable import changeable
from pgtoolkit.config.elsewhere import keys_called, keys_mentioned, known_as
from pgtoolkit.config.files import OPTIONAL
from pgtoolkit.config.key import Key
from pgtoolkit.config.keys import KEYS, OWN_CODE, fits, is_own_code, keys_of, values_in_words
from pgtoolkit.config.own_code import keys_set
from pgtoolkit.config.schema import SCHEMAS, default_options
from pgtoolkit.errors import first_line
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import nearest, refusal, text

_LISTS = {key.name for key in KEYS if key.type == "list[str]"}
"""Keys whose value is a list of texts."""

SEARCH_PATH = refusal(
    *("hydra.searchpath", "to be left out", "a search path"),
    *("Options of your own lie in one folder, laid out as conf/ is.", "--config-dir=FOLDER"),
)
"""Hydra imports the packages in a search path, before anything can be seen."""

_NAMES_OF_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

ALSO_CALLED = {"ppo": "loss=grpo"}
"""What the field calls an option, where that name is none of ours."""


_TAKES_VALUE = {
    "model": ("huggingface", "model.path", "{}"),
    "task": ("prompts", "task.path", "{}"),
    "rollout": ("recorded", "rollout.path", "{}"),
    "sampler": ("vllm", "sampler.urls", "[{}]"),
}
"""Group -> the option and key for a path or an address, and how the value is written."""


def unreadable(override: str, error: Exception) -> str:
    """Not in Hydra's grammar."""
    key, equals, value = override.partition("=")
    reason = _first_line(error)
    use = "quotes around special characters: \"key='a, b'\""
    if not equals:
        reason = "It has no equals sign"
        use = "KEY=VALUE, such as loss=grpo"
    elif value.endswith(","):
        use = override.rstrip(",")
    elif "range(" in value:
        use = f"{key}=range(FIRST,END), or single values: {key}=A,B"
    elif value.startswith("~/"):  # which a shell does not replace within a word
        use = override.replace("~/", "$HOME/", 1)
    elif key in _LISTS:
        use = _as_list(key, value)
    elif not set("'\"[]{}") & set(value):
        use = f"\"{key}='{value}'\""
    return f"{override} needs the form key=value (got {override!r}). {reason}. Use {use}."


def as_typed(override: Override) -> str:
    """Return an override as it was typed."""
    assert override.input_line is not None  # Hydra's parser keeps it with each that it reads
    return override.input_line


def pattern(override: Override, groups: dict[str, list[str]]) -> str:
    """Refuse a pattern such as `loss=glob(g*)`, and name the options that it stands for."""
    key = override.key_or_group
    value = override.value()
    assert isinstance(value, Glob)  # which Hydra's annotation of `value` leaves out
    matching = value.filter(groups.get(key, []))
    return refusal(
        setting=as_typed(override),
        needs="names of options",
        got="a pattern",
        reason="Options are chosen by their names, not by a pattern.",
        use=f"pgtk -m {key}={','.join(matching)}" if matching else f"{key}=OPTION",
    )


def _as_list(key: str, value: str) -> str:
    """The override, for a shell, that makes a list of what was typed."""
    inside = value.strip().strip("'[]\"")
    return f"'{key}=[\"{inside}\"]'"


def wrong_form(override: Override, groups: dict[str, list[str]]) -> str | None:
    """A secret, a removal, several values or a moved group: nothing that one run can take."""
    typed = as_typed(override)
    key = override.key_or_group
    if (hidden := redact(typed)) != typed:
        return holds_secret(hidden)
    if override.is_delete():
        use = f"{key}=none" if "none" in groups.get(key, ()) else "key=value to change it"
        return (
            f"{typed} needs to keep the key (got a removal). The configuration is always "
            f"complete. Use {use}."
        )
    if override.is_sweep_override():
        use = _one_value(key, typed)
        return (
            f"{typed} needs -m (got several values). One run has one value of each key. Use {use}."
        )
    if key == "hydra.searchpath":
        return SEARCH_PATH
    if key.startswith("hydra.") and key not in _NAMES_OF_FOLDERS and "${" in typed:
        return refusal(
            setting=typed,
            needs="a plain value",
            got="an interpolation",
            reason="pgtk reads it before other keys have values.",
            use=f"{key}=VALUE",
        )
    if override.package is not None:
        return (
            f"{typed} needs its group's own place (got @{override.package}). Groups do not "
            f"move. Use {key}=OPTION."
        )
    return None


def _one_value(key: str, typed: str) -> str:
    """Return how to type several values, or one value with a comma in it where the key may have
    one."""
    value = typed.partition("=")[2]
    is_text = any(
        known.name == key and known.type.startswith("str") and not known.names for known in KEYS
    )
    in_quotes = f"\"{key}='{value}'\""
    if not is_text or "(" in value or "'" in value:
        return f"pgtk -m {typed}"
    if os.path.exists(value):
        return in_quotes
    return f"pgtk -m {typed}, or {in_quotes} for one value with a comma in it"


def holds_secret(setting: str) -> str:
    """A value that would be written to the run directory and to MLflow; setting: without it."""
    return refusal(
        setting=setting,
        needs="to hold no secret",
        got="what looks like one",
        reason="It would be written to the run directory and to MLflow.",
        use="an environment variable, such as MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN",
    )


def given_twice(parsed: list[Override]) -> list[str]:
    """A key with two values in one command, also inside of dictionaries: all but one would be
    ignored."""
    problems: list[str] = []
    seen: dict[str, str] = {}
    for override in parsed:
        typed = as_typed(override)
        for key in _keys(override):
            if first := seen.get(key):
                problems.append(
                    refusal(
                        setting=typed,
                        needs=f"to be the only value of {key}",
                        got=f"{first} before it",
                        reason="One of the two would be ignored.",
                        use=f"{first} or {typed}",
                    )
                )
        seen = dict.fromkeys(_keys(override), typed) | seen
    return problems


def _keys(override: Override) -> list[str]:
    """The keys that an override gives values to; a sweep's, in all of its values together."""
    key, value = override.key_or_group, override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return list(dict.fromkeys(name for single in values for name in keys_set(key, single)))


def unknown_option(override: Override, groups: dict[str, list[str]]) -> str | None:
    """An option that its group does not have; the way out may be an option of another one."""
    key, value = override.key_or_group, override.value()
    names, several = (
        groups[key],
        value if value and isinstance(value, list) and key in OPTIONAL else [value],
    )
    word = next(
        (text(name) for name in several if name not in names and not is_own_code(key, name)), None
    )
    if word is None:
        return None
    use = f"{key}={nearest(word, names) or default_options().get(key, names[0])}"
    others = [group for group in groups if word != "none" and word in groups[group]]
    elsewhere = f"{others[0]}={word}" if others else None
    use = ALSO_CALLED.get(word) or elsewhere or _as_value(key, word, names) or use
    reason = f"The options of {key} are the files in conf/{key}."
    needs = f"one of {', '.join(names)}"
    if key in OWN_CODE:
        needs += f", or the dotted path of a {kind_of(key)} of your own"
    return f"{override.input_line} needs {needs} (got {word!r}). {reason} Use {use}."


def _as_value(group: str, word: str, names: list[str]) -> str | None:
    """Return the option that takes the word as the value of a key, if it is a path or a model."""
    if group not in _TAKES_VALUE or word in ("", "null"):
        return None
    option, key, form = _TAKES_VALUE[group]
    is_path = (
        "/" in word
        or os.path.exists(word)
        or word.endswith((".jsonl", ".json", ".parquet", ".arrow"))
    )
    fits_key = is_path or (option == "huggingface" and nearest(word, names, 0.6) is None)
    return f"{group}={option} {key}={form.format(word)}" if fits_key else None


def options_as_keys(values: Any, groups: Iterable[str]) -> str | None:
    """The problem with a file on the whole configuration that sets groups where it has to choose
    their options."""
    chosen = (
        {group: values[group] for group in groups if group in values}
        if isinstance(values, dict)
        else {}
    )
    lines = [
        f"{group}: {text(value)}"
        for group, value in chosen.items()
        if not isinstance(value, dict | list)
    ]
    if not lines:
        return None
    return refusal(
        setting=", ".join(lines),
        needs="to stand in the list `defaults:`",
        got="a key",
        reason="A group's option is a file.",
        use=", ".join(f"- override /{line}" for line in lines),
    )


def incomplete(config: DictConfig) -> list[str]:
    """The problem with files of the user's that leave out a group, or make it something else than
    an option of it."""
    places = {changeable(schema): name for name, schema in SCHEMAS.items()}
    wrong = []
    for group in dict.fromkeys(name.partition("/")[0] for name in SCHEMAS):
        kind = OmegaConf.get_type(config, group) if group in config else None
        of, _, option = ("" if kind is None else places.get(kind, "")).partition("/")
        if of != group or (option and _name_in(config, group) != option):
            wrong.append(group)
    if not wrong:
        return []
    return [
        refusal(
            setting="the configuration",
            needs="the keys of an option in every group",
            got=f"none in {', '.join(wrong)}",
            reason="A file changes the main configuration.",
            use=f"defaults: [config, override /{wrong[0]}: OPTION, _self_]",
        )
    ]


def _name_in(config: DictConfig, group: str) -> Any:
    """Return the name of a group's option as it was written, an interpolation unresolved."""
    values = config._get_node(group)
    assert isinstance(values, DictConfig)  # a node of the class of the group's keys
    name = values._get_node("name")
    assert isinstance(name, Node)  # only a slice of a list is several
    return name._value()


def unknown_key(config: DictConfig, key: str, value: Any, groups: Iterable[str]) -> str:
    """Refuse a key that the schema of the chosen options does not have."""
    if not key:
        return refusal(
            setting=f"={text(value)}",
            needs="a key before the equals sign",
            got="none",
            reason="A value alone sets nothing.",
            use="KEY=VALUE",
        )
    group, _, leaf = key.partition(".")
    having = [known for known in KEYS if known.name == key and "/" in known.schema]
    if having:
        options = [known.schema.replace("/", "=") for known in having]
        got = f"{group}={config[group].name}"
        use = f"{options[0]} {_fitting(having[0], value)}"
        if having[0].stands_for and is_own_code(group, value):
            use = f"{group}={value}"
        choices = having[0].names
        same = [
            known
            for known in KEYS
            if known.leaf == leaf and known.group != group and known.names == choices
        ]
        if choices and same:
            use = f"{_fitting(same[0], value)}, or {use}"
        reason = f"{got} does not have the key."
        return f"{key}={text(value)} needs {' or '.join(options)} (got {got}). {reason} Use {use}."
    use = "`pgtk --help` for the groups and `pgtk --cfg job` for the keys"
    keys = [
        name for name in keys_called(key) if group not in groups or name.startswith(f"{group}.")
    ]
    if not keys and leaf and group in groups:
        keys = keys_mentioned(leaf, group)
    near = _nearest_key(config, key, groups)
    elsewhere = [] if group in groups and leaf else known_as(key)
    if elsewhere and not keys:
        name, row = elsewhere[0]
        return f"Unknown key {key!r}. {row.sentence(name)} Use pgtk explain {leaf or key}."
    if keys:
        use = " ".join(f"{name}={text(value)}" for name in keys)
        if near and near not in keys and near.rpartition(".")[2] == key:
            use = f"{use}, or {near}={text(value)}"
    elif near:
        use = f"{near}={text(value)}"
    elif leaf and isinstance(config.get(group), DictConfig):
        use = "one of " + ", ".join(f"{group}.{name}" for name in config[group] if name != "name")
    return f"Unknown key {key!r}. Use {use}."


def _fitting(key: Key, value: Any) -> str:
    """Return the override of a key with this value, or one that it takes."""
    if not fits(key, value) and key.names:
        value = key.names[0]
    return f"{key.name}={text(value)}"


def unresolvable(key: str, value: Any, error: Exception) -> str:
    """A value that refers to something that is not there."""
    return (
        f"{key}={value} needs a value that resolves (got {value}). {_first_line(error)}. Use "
        f"{key}=VALUE."
    )


def wrong_type(key: Key, value: Any, usual: Any) -> str:
    """Refuse a value that the type of its key does not allow; usual: the key's default."""
    use = nearest(text(value), key.names) or usual
    # as 1e3, which is 1000.0
    if isinstance(value, float) and value.is_integer() and fits(key, int(value)):
        use = int(value)
    use = (
        _as_list(key.name, value)
        if key.name in _LISTS and isinstance(value, str)
        else f"{key.name}={text(use)}"
    )
    reason = key.help or "Every key has a type."
    got = value if isinstance(value, float) else text(value)
    return f"{key.name}={got} needs {values_in_words(key)} (got {got!r}). {reason} Use {use}."


def composition_problem(error: Exception) -> str:
    """Hydra's refusal of one of its own keys or of a file of the user's, on one line."""
    details = ("To append", "full_key", "reference_type", "object_type")
    message = f"{error}\n{error.__cause__ or ''}".partition("Config search path")[0]
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith(details)]
    if option := re.match(r"In '(\w+)/(\w+)'.*raised", lines[0]):
        chosen = "=".join(option.groups())
        return refusal(
            setting=chosen,
            needs="options with the keys that it sets",
            got=lines[1],
            reason="It was written for other options.",
            use=f"other options, or leave {chosen} out",
        )
    return f"the configuration cannot be composed: {' '.join(lines)}"


def _nearest_key(config: DictConfig, key: str, groups: Iterable[str]) -> str | None:
    """In the same group first, then among the groups, and the keys of this name in whatever
    group."""
    head, _, leaf = key.rpartition(".")
    known = [known for known in keys_of(config) if not known.option]
    if inside := nearest(leaf, [other.leaf for other in known if other.group == head], 0.6):
        return f"{head}.{inside}".lstrip(".")
    if not head and (group := nearest(key, groups, 0.7)):
        return group
    last = nearest(leaf, [other.leaf for other in known], 0.75)
    return next((other.name for other in known if other.leaf == last), None)


def _first_line(error: Exception) -> str:
    line = first_line(error).rstrip(".")
    return line[:1].upper() + line[1:]
