"""Refusals of overrides and of files of options: what is wrong with them, why, and the nearest
valid key, option or value."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from omegaconf import DictConfig, Node, OmegaConf

from pgtoolkit.config.composable import changeable
from pgtoolkit.config.elsewhere import keys_called, keys_mentioned, known_as
from pgtoolkit.config.files import OPTIONAL, options
from pgtoolkit.config.keys import (
    KEYS,
    OWN_CODE,
    existing_key,
    fits,
    is_own_code,
    keys_of,
    values_in_words,
)
from pgtoolkit.config.launchers import LAUNCHERS, SEARCH
from pgtoolkit.config.own_code import keys_set
from pgtoolkit.config.saved import FORMER_TASKS
from pgtoolkit.config.schema import SCHEMAS, Config, default_options
from pgtoolkit.errors import first_line
from pgtoolkit.losses.checks import is_whole
from pgtoolkit.system.declared import Key
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import nearest, refusal, text

_LISTS = {key.name for key in KEYS if key.type == "list[str]"}
"""Keys whose value is a list of texts."""

SEARCH_PATH = refusal(
    setting="hydra.searchpath",
    needs="to be left out",
    got="a search path",
    reason="Options of your own lie in one folder, laid out as conf/ is.",
    use="--config-dir=FOLDER",
)
"""Refuses a search path: Hydra would import the packages in it before they can be checked."""

_NAMES_OF_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

_OPTIONS_OF_HYDRA = {
    "hydra/launcher": LAUNCHERS,
    "hydra/sweeper": ("basic", SEARCH),
}
"""Group of Hydra's -> its options that pgtk knows, the default first."""

ALSO_CALLED = {"ppo": "loss=grpo"}
"""Name that the field has for an option -> our name of it."""

_VALUES_ALSO_CALLED = {"gpu": "cuda"}
"""Name that the field has for a value -> our name of it."""

_TAKES_VALUE = {
    "model": ("huggingface", "model.path", "{}"),
    "task": ("prompts", "task.path", "{}"),
    "rollout": ("recorded", "rollout.path", "{}"),
    "sampler": ("vllm", "sampler.urls", "[{}]"),
}
"""Group -> the option and key for a path or an address, and how the value is written."""


def unreadable(override: str, error: Exception) -> str:
    """Refuse an override that is not in Hydra's grammar."""
    key, equals, value = override.partition("=")
    if override.startswith("-"):
        return refusal(
            setting=override,
            needs="to be left out",
            got="a flag",
            reason="This command has no such flag.",
            use="pgtk --help, which has the flags",
        )
    reason = _first_line(error)
    use = "quotes around special characters: \"key='a, b'\""
    if not equals:
        reason = "It has no equals sign"
        use = "KEY=VALUE, such as loss=grpo"
    elif value.endswith(","):
        use = override.rstrip(",")
    elif "range(" in value:
        use = f"{key}=range(FIRST,END), or single values: {key}=A,B"
    elif value.startswith("~/"):  # a shell replaces it at the beginning of a word alone
        use = override.replace("~/", "$HOME/", 1)
    elif key in _LISTS:
        use = _as_list(key, value)
    elif not set("'\"[]{}") & set(value):
        use = f"\"{key}='{value}'\""
    return f"{override} needs the form key=value (got {override!r}). {reason}. Use {use}."


def as_typed(override: Override) -> str:
    """Return an override as it was typed."""
    assert override.input_line is not None  # Hydra's parser keeps it
    return override.input_line


def pattern(override: Override, groups: dict[str, list[str]]) -> str:
    """Refuse a pattern such as `loss=glob(g*)`, and name the options that it stands for."""
    key = override.key_or_group
    value = override.value()
    assert isinstance(value, Glob)  # which Hydra's annotation of `value` leaves out
    if key not in groups:
        return refusal(
            setting=as_typed(override),
            needs="values",
            got="a pattern",
            reason="A pattern stands for options, of which a key has none.",
            use=f"{key}=A,B",
        )
    matching = value.filter(groups[key])
    return refusal(
        setting=as_typed(override),
        needs="names of options",
        got="a pattern",
        reason="Options are chosen by their names, not by a pattern.",
        use=f"pgtk -m {key}={','.join(matching)}" if matching else f"{key}=OPTION",
    )


def _as_list(key: str, value: str) -> str:
    """Return the override, quoted for a shell, that makes a list of the typed value."""
    inside = value.strip().strip("'[]\"")
    return f"'{key}=[\"{inside}\"]'"


def wrong_form(
    override: Override, groups: dict[str, list[str]], is_saved: bool = False
) -> str | None:
    """Refuse what no single run can take: a secret, a removal, several values, a search path, or a
    group that is moved. Returns None for other overrides.

    is_saved: whether the override is set on a saved run, of which no sweep is made.
    """
    typed = as_typed(override)
    key = override.key_or_group
    without_secret = redact(typed)
    if without_secret != typed:
        return holds_secret(without_secret)
    if override.is_delete():
        use = f"{key}={'OPTION' if key in groups else 'VALUE'} to change it"
        if "none" in groups.get(key, ()):
            use = f"{key}=none"
        return refusal(
            setting=typed,
            needs="to keep the key",
            got="a removal",
            reason="The configuration is always complete.",
            use=use,
        )
    if override.is_sweep_override() and is_saved:
        first = typed.partition(",")[0] if "(" not in typed and "[" not in typed else None
        return refusal(
            setting=typed,
            needs="one value",
            got="several values",
            reason="A run that has begun is one run: a sweep starts new ones.",
            use=first or f"{key}=VALUE",
        )
    if override.is_sweep_override():
        return refusal(
            setting=typed,
            needs="-m",
            got="several values",
            reason="A run has one value of each key.",
            use=_several_values_or_text(key, typed),
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
        return refusal(
            setting=typed,
            needs="its group's own place",
            got=f"@{override.package}",
            reason="Groups do not move.",
            use=f"{key}=OPTION",
        )
    return None


def _several_values_or_text(key: str, typed: str) -> str:
    """Return how to type several values, and one value with a comma in it if the key is a text."""
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
    """Refuse a secret. setting: the override without it."""
    return refusal(
        setting=setting,
        needs="to hold no secret",
        got="what looks like one",
        reason="It would be written to the run directory and to MLflow.",
        use="an environment variable, such as MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN",
    )


def given_twice(parsed: list[Override]) -> list[str]:
    """Refuse keys with two values in one command, dictionaries included: one would be ignored."""
    problems: list[str] = []
    seen: dict[str, str] = {}
    for override in parsed:
        typed = as_typed(override)
        for key in _keys(override):
            first = seen.get(key)
            if first is not None:
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
    """Return the keys that an override gives values to; of several values, the keys of all."""
    key = override.key_or_group
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return list(dict.fromkeys(name for single in values for name in keys_set(key, single)))


def unknown_option(override: Override, groups: dict[str, list[str]]) -> str | None:
    """Refuse an option that its group does not have. Returns None for one that it has."""
    key = override.key_or_group
    value = override.value()
    names = groups[key]
    options = value if value and isinstance(value, list) and key in OPTIONAL else [value]
    unknown = [
        text(option) for option in options if option not in names and not is_own_code(key, option)
    ]
    if not unknown:
        return None
    word = unknown[0]
    use = ALSO_CALLED.get(word) or FORMER_TASKS.get(word)
    if use is None and word != "none":
        groups_with_option = [group for group in groups if word in groups[group]]
        use = f"{groups_with_option[0]}={word}" if groups_with_option else None
    if use is None:
        use = _as_value_of_key(key, word, names)
    if use is None:
        use = f"{key}={nearest(word, names) or default_options().get(key, names[0])}"
    needs = f"one of {', '.join(names)}"
    if key in OWN_CODE:
        needs += f", or the dotted path of a {kind_of(key)} of your own"
    reason = f"The options of {key} are the files in conf/{key}."
    return f"{override.input_line} needs {needs} (got {word!r}). {reason} Use {use}."


def _as_value_of_key(group: str, word: str, names: list[str]) -> str | None:
    """Return the option and key that take the word as a value, if it is a path or a model."""
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


def options_as_keys(values: object, groups: Iterable[str]) -> str | None:
    """Refuse a file on the whole configuration that sets groups as keys, and does not choose their
    options. Returns None for other files."""
    lines = []
    if isinstance(values, dict):
        for group in groups:
            if group in values and not isinstance(values[group], dict | list):
                lines.append(f"{group}: {text(values[group])}")
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
    """Refuse files of the user's that leave out a group, or put something else than an option of it
    in its place. Returns at most one problem."""
    names_of_schemas = {changeable(schema): name for name, schema in SCHEMAS.items()}
    wrong = []
    groups = dict.fromkeys(name.partition("/")[0] for name in SCHEMAS)
    for group in groups:
        kind = OmegaConf.get_type(config, group) if group in config else None
        name_of_schema = "" if kind is None else names_of_schemas.get(kind, "")
        group_of_schema, _, option = name_of_schema.partition("/")
        if group_of_schema != group or (option and _name_in(config, group) != option):
            wrong.append(group)
    if not wrong:
        return []
    use = f"defaults: [config, override /{wrong[0]}: OPTION, _self_]"
    if len(wrong) == len(groups):
        use = "defaults: [config, _self_] at the file's top"
    return [
        refusal(
            setting="the configuration",
            needs="the keys of an option in every group",
            got=f"none in {', '.join(wrong)}",
            reason="A file changes the main configuration.",
            use=use,
        )
    ]


def _name_in(config: DictConfig, group: str) -> object:
    """Return the name of a group's option as it was written, an interpolation unresolved."""
    values = config._get_node(group)
    assert isinstance(values, DictConfig)  # a node of the class of the group's keys
    name = values._get_node("name")
    assert isinstance(name, Node)  # only a slice of a list is several
    return name._value()


def unknown_key(config: DictConfig, key: str, value: object, groups: Iterable[str]) -> str:
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
    keys_of_other_options = [known for known in KEYS if known.name == key and "/" in known.schema]
    if keys_of_other_options:
        return _key_of_other_option(config, keys_of_other_options, value)
    similar = _nearest_key(config, key, groups)
    keys_for_theirs = [
        name for name in keys_called(key) if group not in groups or name.startswith(f"{group}.")
    ]
    if not keys_for_theirs and leaf and group in groups:
        keys_for_theirs = keys_mentioned(leaf, group)
    is_in_group = bool(leaf) and group in groups
    is_like_one_of_group = similar is not None and similar.startswith(f"{group}.")
    if not keys_for_theirs and not (is_in_group and is_like_one_of_group):
        # loss.beta is not the optimizer's beta1, but the `beta` of another trainer.
        rows = known_as(leaf if is_in_group else key)
        if rows:
            name, row = rows[0]
            return f"Unknown key {key!r}. {row.sentence(name)} Use pgtk explain {leaf or key}."
    use = "`pgtk --help` for the groups and `pgtk --cfg job` for the keys"
    if keys_for_theirs:
        values = [value] * len(keys_for_theirs)
        if isinstance(value, list) and len(value) == len(keys_for_theirs):
            values = value  # such as optimizer.betas, whose two numbers have a key each here
        pairs = zip(keys_for_theirs, values, strict=True)
        use = " ".join(f"{name}={text(part)}" for name, part in pairs)
        if similar and similar not in keys_for_theirs and similar.rpartition(".")[2] == key:
            use = f"{use}, or {similar}={text(value)}"
    elif similar and similar in groups:
        use = f"{similar}={text(value)}"
    elif similar:
        similar_key = existing_key(similar, config)
        use = _fitting(similar_key, value)
    elif leaf and isinstance(config.get(group), DictConfig):
        use = "one of " + ", ".join(f"{group}.{name}" for name in config[group] if name != "name")
    return f"Unknown key {key!r}. Use {use}."


def _key_of_other_option(config: DictConfig, keys: list[Key], value: object) -> str:
    """Refuse a key that other options of its group have. keys: theirs, all of one name."""
    key = keys[0]
    group = key.group
    options = [known.schema.replace("/", "=") for known in keys]
    got = f"{group}={config[group].name}"
    use = f"{options[0]} {_fitting(key, value)}"
    if key.stands_for and is_own_code(group, value):
        use = f"{group}={value}"
    if key.names:
        # A key of another group may be what is meant, such as rollout.too_long for task.too_long.
        alike = [
            known
            for known in KEYS
            if known.leaf == key.leaf and known.group != group and known.names == key.names
        ]
        if alike:
            use = f"{_fitting(alike[0], value)}, or {use}"
    return refusal(
        setting=f"{key.name}={text(value)}",
        needs=" or ".join(options),
        got=got,
        reason=f"{got} does not have the key.",
        use=use,
    )


def _fitting(key: Key, value: object) -> str:
    """Return the override of a key with this value, or one with a value that it takes."""
    if fits(key, value):
        return f"{key.name}={text(value)}"
    if key.names:
        return f"{key.name}={key.names[0]}"
    return f"{key.name}=VALUE"


def unresolvable(key: str, value: object, error: Exception) -> str:
    """Refuse a value that refers to something that does not exist."""
    return (
        f"{key}={value} needs a value that resolves (got {value}). {_first_line(error)}. Use "
        f"{key}=VALUE."
    )


def empty_text(key: Key, default: object) -> str:
    """Refuse a text without a character. default: the key's."""
    better = default if default or key.type.endswith("| None") else "VALUE"
    return refusal(
        setting=f"{key.name}=",
        needs="a text that is not empty",
        got="",
        reason=key.help or "Every key has a type.",
        use=f"{key.name}={text(better)}",
    )


def wrong_type(key: Key, value: object, default: object) -> str:
    """Refuse a value that the type of its key does not allow. default: the key's."""
    word = _VALUES_ALSO_CALLED.get(text(value), text(value))
    better = nearest(word, key.names) or default
    if better is None and not key.type.endswith("| None"):
        better = "VALUE"  # of a key that has no default
    if isinstance(value, float) and value.is_integer() and fits(key, int(value)):
        better = int(value)  # for 1e3, which is 1000.0
    if key.type.startswith("list[int]") and is_whole(value):
        better = [value]
    use = f"{key.name}={text(better)}"
    if key.name in _LISTS and isinstance(value, str):
        use = _as_list(key.name, value)
    reason = key.help or "Every key has a type."
    got = value if isinstance(value, float) else text(value)
    return f"{key.name}={got} needs {values_in_words(key)} (got {got!r}). {reason} Use {use}."


def composition_problem(error: Exception) -> str:
    """Return Hydra's refusal of one of its own keys, or of a file of the user's, on one line."""
    details = ("To append", "full_key", "reference_type", "object_type")
    message = f"{error}\n{error.__cause__ or ''}".partition("Config search path")[0]
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith(details)]
    option = re.match(r"In '(\w+)/(\w+)'.*raised", lines[0])
    if option is not None:
        chosen = "=".join(option.groups())
        return refusal(
            setting=chosen,
            needs="options with the keys that it sets",
            got=lines[1],
            reason="It was written for other options.",
            use=f"other options, or leave {chosen} out",
        )
    sentence = " ".join(lines)
    in_file = re.match(
        r"In '([^']+)': ConfigKeyError raised .*Key '([^']+)' not in '(\w+)'", sentence
    )
    if in_file is not None:
        problem = _unknown_key_of_file(*in_file.groups())
        if problem is not None:
            return problem
    unknown_option = re.search(r"Could not find '([\w/]+)/([^'/]*)'", sentence)
    if unknown_option is not None:
        group, word = unknown_option.groups()
        reason = f"The options of {group} are the files in conf/{group}."
        names = options().get(group, [])
        if group in _OPTIONS_OF_HYDRA:
            reason = "pgtk knows how to stop and continue the jobs of these."
            names = _OPTIONS_OF_HYDRA[group]
        if names:
            return refusal(
                setting=f"{group}={word}",
                needs=f"one of {', '.join(names)}",
                got=word,
                reason=reason,
                use=f"{group}={nearest(word, names) or names[0]}",
            )
    wrong_value = re.match(r"Error merging override ([^\s=]+)=(.*)", lines[0])
    if wrong_value is not None:
        key = wrong_value[1]
        needs = "a value of another type"
        use = f"another value, or leave {key} out"
        if "to Integer" in sentence:
            needs = "a whole number"
            use = f"{key}=1"
        elif "valid bool" in sentence:
            needs = "true or false"
            use = f"{key}=true"
        return refusal(
            setting=f"{key}={wrong_value[2]}",
            needs=needs,
            got=wrong_value[2],
            reason=f"Hydra says: {lines[-1].rstrip('.')}.",
            use=use,
        )
    unknown = re.match(r"Could not override '(hydra[^']*)'", lines[0])
    if unknown is not None:
        return (
            f"Unknown key {unknown[1]!r}. Use pgtk --cfg hydra, which prints those that there are."
        )
    return f"the configuration cannot be composed: {sentence}"


def _unknown_key_of_file(file: str, key: str, keys_class: str) -> str | None:
    """Refuse a key in a file of the user's that the options of its group do not have.

    Return None for a key inside of Hydra's own keys.
    keys_class: the name of the class of these options' keys.
    """
    names = [name for name, schema in SCHEMAS.items() if schema.__name__ == keys_class]
    if not names:
        if keys_class != Config.__name__:
            return None
        groups = list(dict.fromkeys(name.partition("/")[0] for name in SCHEMAS))
        use = nearest(key, groups) or f"one of {', '.join(groups)}"
        return f"{file}.yaml sets the unknown key {key!r}. Use {use}."
    known = [field.name for field in dataclasses.fields(SCHEMAS[names[0]]) if field.name != "name"]
    group = names[0].partition("/")[0]
    with_key = [other.schema.partition("/")[2] for other in KEYS if other.name == f"{group}.{key}"]
    if with_key:
        return refusal(
            setting=f"{group}.{key} in {file}.yaml",
            needs=" or ".join(f"{group}={option}" for option in with_key),
            got=names[0].replace("/", "="),
            reason="Other options do not have the key.",
            use=f"`override /{group}: {with_key[0]}` in its list `defaults`",
        )
    similar = nearest(key, known)
    use = similar if similar is not None else f"one of {', '.join(known)}"
    return f"{file}.yaml sets the unknown key {group}.{key}. Use {use}."


def _nearest_key(config: DictConfig, key: str, groups: Iterable[str]) -> str | None:
    """Return the most similar key of the same group, else a similar group, else a key of another
    group with a similar name; None if nothing is similar."""
    group, _, leaf = key.rpartition(".")
    keys = [known for known in keys_of(config) if not known.option]
    leaf_in_group = nearest(leaf, [known.leaf for known in keys if known.group == group], 0.6)
    if leaf_in_group is not None:
        return f"{group}.{leaf_in_group}".lstrip(".")
    nearest_group = None if group else nearest(key, groups, 0.7)
    if nearest_group is not None:
        return nearest_group
    nearest_leaf = nearest(leaf, [known.leaf for known in keys], 0.75)
    return next((known.name for known in keys if known.leaf == nearest_leaf), None)


def _first_line(error: Exception) -> str:
    line = first_line(error).rstrip(".")
    return line[:1].upper() + line[1:]
