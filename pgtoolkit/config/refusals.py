"""Refusals of overrides and of files of options, whatever keys there are."""

from __future__ import annotations

import shlex

from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import DictConfig, Node, OmegaConf

from pgtoolkit.config.composable import changeable
from pgtoolkit.config.own_code import keys_set
from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.errors import first_line
from pgtoolkit.system.declared import Key
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, text

SEARCH_PATH = refusal(
    setting="hydra.searchpath",
    needs="to be left out",
    got="a search path",
    reason="Options of your own lie in one folder, laid out as conf/ is.",
    use="--config-dir=FOLDER",
)
"""Refuses a search path: Hydra would import the packages in it before they can be checked."""

_NAMES_OF_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")


def as_typed(override: Override) -> str:
    """Return an override as it was typed."""
    assert override.input_line is not None  # Hydra's parser keeps it
    return override.input_line


def wrong_form(override: Override, is_saved: bool = False) -> str | None:
    """Refuse what no run can take: a secret, a search path, or a group that is moved. Returns None
    for other overrides.

    is_saved: whether the override is set on a saved run, of which no sweep is made.
    """
    typed = as_typed(override)
    key = override.key_or_group
    without_secret = redact(typed)
    if without_secret != typed:
        return holds_secret(without_secret)
    if override.is_sweep_override() and is_saved:
        first = typed.partition(",")[0] if "(" not in typed and "[" not in typed else None
        return refusal(
            setting=typed,
            needs="one value",
            got="several values",
            reason="A run that has begun is one run: a sweep starts new ones.",
            use=first or f"{key}=VALUE",
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
            use=f"{key}={text(override.value())}",
        )
    return None


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
    """Refuse keys with two values in one command, dictionaries included: one would be ignored. An
    override that is typed twice alike is one of `parse`.

    A key inside of a dictionary that is typed before it changes that part of it, as Hydra has it.
    """
    problems: list[str] = []
    seen: dict[str, Override] = {}
    for override in parsed:
        problems += _twice_in_itself(override)
        for key in _keys(override):
            first = seen.get(key)
            if first is not None and not _changes_part(override, first):
                problems.append(_two_values(key, first, override))
        seen = dict.fromkeys(_keys(override), override) | seen
    return problems


def _changes_part(override: Override, dictionary: Override) -> bool:
    """Return whether an override sets a key of a dictionary that another sets."""
    return isinstance(dictionary.value(), dict) and override.key_or_group.startswith(
        f"{dictionary.key_or_group}."
    )


def _two_values(key: str, first: Override, second: Override) -> str:
    quoted = [shlex.quote(as_typed(override)) for override in (first, second)]
    use = " or ".join(quoted)
    if _changes_part(first, second):
        use = f"{quoted[1]} {quoted[0]}, or one of the two"
    return refusal(
        setting=as_typed(second),
        needs=f"to be the only value of {key}",
        got=f"{as_typed(first)} before it",
        reason="One of the two would be ignored.",
        use=use,
    )


def _twice_in_itself(override: Override) -> list[str]:
    """Refuse a dictionary that has a value under each of two names of a key, as in `loss={tau: 0.3,
    options: {tau: 0.5}}`."""
    problems = []
    for single in _values(override):
        keys = [*keys_set(override.key_or_group, single)]
        twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
        problems += [
            refusal(
                setting=as_typed(override),
                needs=f"one value for {key}",
                got="two",
                reason="It has two names, and one of the two values would be ignored.",
                use=f"{key}=VALUE",
            )
            for key in twice
        ]
    return problems


def _keys(override: Override) -> list[str]:
    """Return the keys that an override gives values to; of several values, the keys of all."""
    key = override.key_or_group
    values = _values(override)
    return list(dict.fromkeys(name for single in values for name in keys_set(key, single)))


def _values(override: Override) -> list:
    """Return the value that an override gives, or the several."""
    value = override.value()
    return value.list if isinstance(value, ChoiceSweep) else [value]


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


def unresolvable(key: str, value: object, error: Exception, better: str = "VALUE") -> str:
    """Refuse a value that refers to something that does not exist. better: another value."""
    return (
        f"{key}={value} needs a value that resolves (got {value}). {sentence_of(error)}. Use "
        f"{key}={better}."
    )


def empty_text(key: Key, default: object) -> str:
    """Refuse a text without a character. default: the key's."""
    better = default if default or key.type.endswith("| None") else key.example or "VALUE"
    return refusal(
        setting=f"{key.name}=",
        needs="a text that is not empty",
        got="",
        reason=key.help or "Every key has a type.",
        use=f"{key.name}={text(better)}",
    )


def sentence_of(error: Exception) -> str:
    """Return the first line of an error's message, to be followed by a full stop."""
    line = first_line(error).rstrip(".")
    return line[:1].upper() + line[1:]
