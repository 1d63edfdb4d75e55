"""Says what is wrong with an override, with the reason and the nearest valid key, option or value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hydra.conf import HydraConf
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, EnumNode, ListConfig, OmegaConf

from pgtoolkit.config.defaults import comment, default
from pgtoolkit.config.files import default_options
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.errors import first_line
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, text

_HYDRAS = ("hydra", "config")
"""Hydra's own settings, of which conf/hydra/pgtk.yaml is made."""
_GROUPS = list(dict.fromkeys(schema.partition("/")[0] for schema in SCHEMAS))
_LISTS = {key.name for key in KEYS if key.type == "list[str]"}
"""Keys whose value is a list of texts."""

ALSO_CALLED = {"ppo": "loss=grpo"}
"""What the field calls an option, where that name is none of ours."""


def unreadable(override: str, error: Exception, groups: Iterable[str]) -> str:
    """Not in Hydra's grammar."""
    near, (key, equals, value) = nearest(override, [*groups, *_schema_keys()]), override.partition("=")
    use = "quotes around special characters: \"key='a, b'\""
    if near and not equals:
        use = f"{near}=VALUE"
    elif "~/" in value:  # which a shell does not replace within a word
        use = override.replace("~/", "$HOME/", 1)
    elif key in _LISTS:
        use = _as_list(key, value)
    elif equals and not set("'\"[]{}") & set(value):
        use = f"\"{key}='{value}'\""
    return f"{override} needs the form key=value (got {override!r}). {_first_line(error)}. Use {use}."


def _as_list(key: str, value: str) -> str:
    """The override, for a shell, that makes a list of what was typed."""
    inside = value.strip().strip("'[]\"")
    return f"'{key}=[\"{inside}\"]'"


def wrong_form(override: Override, groups: dict[str, list[str]]) -> str | None:
    """A secret, a removal, several values or a moved group: nothing that one run can take."""
    typed, key = override.input_line, override.key_or_group
    if (hidden := redact(typed)) != typed and key != "tracking.uri":
        reason = "It would be written to the run directory and to MLflow."
        return f"{hidden} needs to hold no secret (got what looks like one). {reason} Use an environment variable."
    if override.is_delete():
        use = f"{key}=none" if "none" in groups.get(key, ()) else "key=value to change it"
        return f"{typed} needs to keep the key (got a removal). The configuration is always complete. Use {use}."
    if override.is_sweep_override():
        return f"{typed} needs -m (got several values). One run has one value of each key. Use pgtk -m {typed}."
    if override.package is not None:
        return f"{typed} needs its group's own place (got @{override.package}). Groups do not move. Use {key}=OPTION."
    return None


def given_twice(parsed: list[Override]) -> list[str]:
    """A key with two values in one command, also inside of dictionaries: all but one would be ignored."""
    problems: list[str] = []
    seen: dict[str, str] = {}
    for override in parsed:
        typed = override.input_line
        for key in _keys(override):
            if first := seen.get(key):
                needs, got, use = f"to be the only value of {key}", f"{first} before it", f"{first} or {typed}"
                problems.append(refusal(typed, needs, got, "One of the two would be ignored.", use))
        seen = dict.fromkeys(_keys(override), typed) | seen
    return problems


def _keys(override: Override) -> list[str]:
    """The keys that an override gives values to; a sweep's, in all of its values together."""
    key, value = override.key_or_group, override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return list(dict.fromkeys(leaf for one in values for leaf, _ in leaves({key: one})))


def unknown_option(override: Override, groups: dict[str, list[str]]) -> str | None:
    """An option that its group does not have; the way out may be an option of another one."""
    key, value = override.key_or_group, override.value()
    names = groups[key]
    if value is None and key in ("experiment", "debug"):
        return None
    several = value if isinstance(value, list) and key in ("experiment", "debug") else [value]
    wrong = [name for name in several or [value] if name not in names]
    if not wrong:
        return None
    near, word = nearest(text(wrong[0]), names), text(wrong[0])
    use = f"{key}={near}" if near else " or ".join(f"{key}={name}" for name in names)
    if elsewhere := ALSO_CALLED.get(word) or next((f"{one}={word}" for one in groups if word in groups[one]), None):
        use = elsewhere
    reason = f"The options of {key} are the files in conf/{key}."
    return f"{override.input_line} needs one of {', '.join(names)} (got {text(wrong[0])!r}). {reason} Use {use}."


def options_as_keys(primary: Any, groups: Iterable[str]) -> list[str]:
    """The problems with a sweep's file that is no dictionary, or that sets a group where it has to choose an option."""
    if not OmegaConf.is_dict(primary):
        reason, use = "It changes the main configuration.", "the files in sweeps/ as examples"
        return [refusal("the file of a sweep", "keys and their values", "a list", reason, use)]
    problems = []
    for group in groups:
        node = primary._get_node(group)
        if node is not None and not OmegaConf.is_config(node):
            line = f"{group}: {text(node._value())}"
            reason, use = "A group's option is a file, which Hydra adds to the configuration.", f"- override /{line}"
            problems.append(refusal(line, "to stand in the list `defaults:`", "a key", reason, use))
    return problems


def incomplete(config: DictConfig) -> list[str]:
    """Groups that a file of the user's, or hydra.* keys, have left out or made something else than one option."""
    if lacking := [group for group in _GROUPS if group not in config.keys()]:  # noqa: SIM118 (`in` needs a value)
        reason = f"It lacks {', '.join(lacking)}: a sweep changes the main configuration."
        needs, use = "the main configuration among its defaults", "defaults: [config, _self_]"
        return [refusal("the file of a sweep", needs, "none", reason, use)]
    problems, defaults = [], default_options()
    for group in _GROUPS:
        name = _entry(node := config._get_node(group), "name")
        types = SCHEMAS.get(group) or SCHEMAS.get(f"{group}/{name}")
        if not _is_whole(node) or types is not node._metadata.object_type:
            needs, use = "the keys of one of its options", f"override /{group}: {defaults[group]}"
            reason = "A file that sets keys of a group chooses its option in its defaults list."
            problems.append(refusal(group, needs, name or node, reason, use))
    for kind, use in (("launcher", "local"), ("sweeper", "basic")):
        node = config.hydra._get_node(kind)
        if _entry(node, "_target_") is None:
            reason = "It names the plug-in of Hydra, and holds its settings."
            needs = f"one of the options of hydra/{kind}"
            problems.append(refusal(f"hydra.{kind}", needs, node, reason, f"hydra/{kind}={use}"))
    return problems


def _is_whole(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def _entry(node: Any, name: str) -> Any:
    entry = node._get_node(name) if _is_whole(node) and name in node.keys() else None  # noqa: SIM118
    return entry._value() if entry is not None else None


def unknown_key(config: DictConfig, key: str, value: Any, groups: Iterable[str]) -> str:
    """A key that the schema of the chosen options does not have."""
    group, _, leaf = key.partition(".")
    if having := _options_with(group, leaf):
        got = f"{group}={config[group].name}"
        reason, use = f"{got} does not have the key.", f"{having[0]} {key}={text(value)}"
        return f"{key}={text(value)} needs {' or '.join(having)} (got {got}). {reason} Use {use}."
    use = "`pgtk --help` for the groups and `pgtk --cfg job` for the keys"
    if near := _nearest_key(config, key, groups):
        use = f"{near}={text(value)}"
    elif leaf and isinstance(config.get(group), DictConfig):
        use = "one of " + ", ".join(f"{group}.{name}" for name in config[group] if name != "name")
    return f"{key}={text(value)} needs a key of the configuration (got {key!r}). There is no such key. Use {use}."


def unresolvable(key: str, value: Any, error: Exception) -> str:
    """A value that refers to something that is not there."""
    return f"{key}={value} needs a value that resolves (got {value}). {_first_line(error)}. Use {key}=VALUE."


def wrong_type(config: DictConfig, key: str, value: Any, node: Any) -> str:
    """A value that the type of its key does not allow."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    is_whole = isinstance(value, float) and abs(value) < 1e16 and value.is_integer()  # as 1e3, which is 1000.0
    use = f"{key}={text(value if is_whole and node._metadata.ref_type is int else default(config, key))}"
    if isinstance(node, EnumNode):
        names = [member.name for member in node.enum_type]
        needs, near = f"one of {', '.join(names)}", nearest(text(value), names)
        use = f"{key}={near}" if near else use
    elif isinstance(node, DictConfig):
        needs = "a dictionary"
    elif isinstance(node, ListConfig):
        needs = "a list of texts"
        use = _as_list(key, value) if isinstance(value, str) else use
    else:
        needs = words.get(node._metadata.ref_type, "another type") + (" or null" if node._is_optional() else "")
    reason = comment(config, key) or "Every key has a type."
    got = value if isinstance(value, float) else text(value)
    return f"{key}={got} needs {needs} (got {got!r}). {reason} Use {use}."


def composition_problem(error: Exception) -> str:
    """Hydra's refusal of one of its own keys or of a file of the user's, on one line."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        names = [option for option in error.options if not option.endswith("schema") and (group, option) != _HYDRAS]
        near = names[0] if len(names) == 1 else nearest(name, names)
        reason, use = "An option is a file in the folder of its group.", f"{group}={near}" if near else "one of these"
        return refusal(f"{group}={name}", f"one of {', '.join(names)}", name, reason, use)
    said = f"{error}\n{error.__cause__ or ''}"
    if problem := _key_of_another_option(said):
        return problem
    drop = ("To append", "Config search path", "provider=", "reference_type", "object_type")
    lines = [line.strip().rstrip(".") for line in said.splitlines()]
    lines = [line for line in lines if line and not line.startswith(drop)]
    hydra_keys = leaves({"hydra": OmegaConf.to_container(OmegaConf.structured(HydraConf))})
    key = re.search(r"full_key: (\S+)", said)
    near = nearest(key[1], [*_schema_keys(), *(name for name, _ in hydra_keys)]) if key else None
    hint = f" Use {near}." if near and near != key[1] else ""
    return f"the configuration cannot be composed: {'; '.join(lines[:4])}.{hint}"


def _key_of_another_option(said: str) -> str | None:
    """A file, such as debug/short or a sweep's, that sets a key which the chosen option of a group does not have."""
    found = re.search(r"In '([^']+)'.*Key '(\w+)' not in '(\w+)'", said, re.DOTALL)
    of_type = {types.__name__: schema.partition("/") for schema, types in SCHEMAS.items()}
    if found is None or found[3] not in of_type:
        return None
    (group, _, got) = of_type[found[3]]
    chosen = found[1].replace("/", "=") if "/" in found[1] else f"{found[1]}.yaml"
    if not (having := _options_with(group, found[2])):
        return None
    needs, reason = " or ".join(having), f"It sets {group}.{found[2]}, which {group}={got} does not have."
    return f"{chosen} needs {needs} (got {group}={got}). {reason} Use {needs}, or leave {chosen} out."


def _options_with(group: str, leaf: str) -> list[str]:
    """`GROUP=OPTION` for each option of a group of several shapes that has this key."""
    return [
        schema.replace("/", "=")
        for schema, types in SCHEMAS.items()
        if schema.startswith(f"{group}/") and leaf in {field.name for field in fields(types)}
    ]


def nearest(word: str, names: Iterable[str], at_least: float = 0.5) -> str | None:
    """The most similar name, if any is; swapped letters and initials (lr) count as most similar."""
    word = word.lower()

    def similarity(name: str) -> float:
        initials = "".join(part[0] for part in name.rpartition(".")[2].split("_") if part)
        same = sorted(word) == sorted(name) or (len(word) > 1 and word == initials)
        return difflib.SequenceMatcher(None, word, name).ratio() + (0.5 if same else 0)

    best = max(names, key=similarity, default=None)
    return best if best is not None and similarity(best) >= at_least else None


def _nearest_key(config: DictConfig, key: str, groups: Iterable[str]) -> str | None:
    """In the same group first, then among the groups, all keys, and keys of this name in whatever group."""
    head, _, leaf = key.rpartition(".")
    sections = [group for group in config if group != "hydra" and isinstance(config[group], DictConfig)]
    places = {f"{group}.{name}": name for group in sections for name in config[group].keys() if name != "name"}  # noqa: SIM118
    own = [name for place, name in places.items() if place.startswith(f"{head}.")]
    if inside := nearest(leaf, own, 0.6):
        return f"{head}.{inside}"
    if not head and (group := nearest(key, [*groups, "seed"], 0.7)):
        return group
    others = [place for place in places if not place.startswith(f"{head}.")]
    last = nearest(leaf, places.values(), 0.75)
    return nearest(key, others, 0.75) or next((place for place, name in places.items() if name == last), None)


def _schema_keys() -> list[str]:
    """Every key of every option that one may set."""
    of = [(schema.partition("/")[0], field.name) for schema, types in SCHEMAS.items() for field in fields(types)]
    return ["seed", *dict.fromkeys(f"{group}.{name}" for group, name in of if name != "name")]


def _first_line(error: Exception) -> str:
    line = first_line(error).rstrip(".")
    return line[:1].upper() + line[1:]
