"""The overrides that a user most likely meant by a key or an option that does not exist."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from omegaconf import DictConfig

from pgtoolkit.config.field_words import FIELD_WORDS
from pgtoolkit.config.files import OPTIONAL
from pgtoolkit.config.keys import (
    KEYS,
    fits,
    in_words,
    is_own_code,
    key_named,
    keys_of,
    remedies_of,
    with_required,
)
from pgtoolkit.config.meant_values import ALSO_CALLED as VALUES_ALSO_CALLED
from pgtoolkit.config.meant_values import (
    FALSE_WORDS,
    NOTHING_WORDS,
    TRUE_WORDS,
    readings,
    typed,
    value_meant,
    values_meant,
    without_typography,
)
from pgtoolkit.config.named_values import named_value
from pgtoolkit.config.resolve import default_in
from pgtoolkit.config.saved import FORMER_TASKS
from pgtoolkit.config.schema import default_options
from pgtoolkit.config.trainer_keys import keys_called, keys_mentioned, known_as, option_called
from pgtoolkit.system.conditions import holds, parts, singles
from pgtoolkit.system.declared import Key
from pgtoolkit.system.report import all_nearest, nearest, text

OPTIONS_ALSO_CALLED = {
    "ppo": "loss=grpo",
    "pg": "loss=reinforce",
    "vanilla": "loss=reinforce",
    "tis": "correction=token_truncate",
    "mis": "correction=token_mask",
    "zero3": "parallelism=fsdp",
    "deepspeed": "parallelism=fsdp",
}
"""Name that the field has for an option -> our name of it."""

_COUNTED_OTHERWISE = ("epochs", "micro_", "microbatch")
"""Parts of words of the field whose numbers are of another unit than the key that comes nearest,
so that none follows from theirs."""

_SWITCHED_ON = {
    "kl": "kl=k3 kl.reference=initial",
    "debug": "debug=short",
    "critic": "advantage=gae",
    "evaluation": "evaluation.every=20",
}
"""Group -> the overrides that switch it on, for the words for true."""

_TAKES_PATH = {
    "model": "model=huggingface model.path={}",
    "task": "task=prompts task.path={}",
    "rollout": "rollout=recorded rollout.path={}",
    "sampler": "sampler=vllm sampler.urls=[{}]",
}
"""Group -> the overrides for a path or an address in the place of an option."""


def spelled(name: str) -> str:
    """Return a name of a key as ours are spelled: small letters, underscores, single dots."""
    name = re.sub(r"[/:@]|\[(?=\w)", ".", without_typography(name)).replace("]", "")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name) if re.search("[a-z]", name) else name
    return re.sub(r"\.{2,}", ".", re.sub(r"[-\s]+", "_", name.lower())).strip("._+~!#&;,()")


def with_value(config: DictConfig, key: Key, value: object) -> str:
    """Return the overrides that give a key the value that is most likely meant, in this
    configuration: its option if another is chosen, and what it needs to act."""
    default = default_in(config, key.name)
    if key_named(key.name, config) is None:
        default = key.default if isinstance(key.default, str | int | float | list | dict) else None
    if default is None and not fits(key, None):
        default = key.example or "VALUE"
    fitting = any(fits(key, reading) for reading in readings(key, value))
    several = None if fitting else values_meant(key, value)
    if several is not None and key_named(key.name, config) is not None:
        quoted = f"'{key.name}={several}'" if "(" in several else f"{key.name}={several}"
        return " ".join(["pgtk -m", *_needed(config, key, several), quoted])
    better = value_meant(key, value, default)
    overrides = []
    if key_named(key.name, config) is None:
        overrides.append(with_required(key.schema.replace("/", "="), key.name))
    if better not in (None, default):
        overrides += _needed(config, key, better)
    if key.type == "Dictionary" and key.example and better == default:
        return " ".join([*overrides, f"'{key.name}={key.example}'"])
    return " ".join([*overrides, typed(key.name, better)])


def _needed(config: DictConfig, key: Key, value: object) -> list[str]:
    """Return the overrides without which a key has no effect in this configuration."""
    if not key.only_if or holds(key.only_if, config) or " or " in key.only_if:
        return []
    conditions = singles(key.only_if)
    remedies = remedies_of(key, value) or [in_words(single) for single in conditions]
    needed = [
        remedy
        for single, remedy in zip(conditions, remedies, strict=False)
        if not (holds(single, config) or _comes_with(key, single, config))
    ]
    return [_SWITCHED_ON["kl"] if remedy == "kl=k3" else with_required(remedy) for remedy in needed]


def _comes_with(key: Key, single: str, config: DictConfig) -> bool:
    """Return whether a condition on one key holds by the defaults of the option that the key is of,
    which is not chosen yet."""
    name, operator, expected = parts(single)
    return key_named(name, config) is None and any(
        other.name == name and other.schema == key.schema and text(other.default) == expected
        for other in KEYS
        if operator == "="
    )


def overrides_meant(
    config: DictConfig, name: str, value: object, groups: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the overrides that a user most likely meant by a key that does not exist; None if
    nothing is similar.

    groups: group -> its options.
    """
    known = spelled(name)
    if known.startswith("hydra."):
        return None
    group = known.partition(".")[0]
    ending = known.rpartition(".")[2]
    key = key_named(known, config) or key_named(known.rpartition(".")[0], config)
    if known in groups:
        return option_meant(config, known, value, groups)
    if key is not None and known in (key.name, f"{key.name}.{ending}"):
        return with_value(config, key, value)
    if group in groups and text(value) in groups[group] and known == f"{group}.{group}":
        return f"{group}={text(value)}"
    choice = _choice_in(config, known, value, groups)
    if choice is not None:
        return choice
    of_options = _likeliest(config, [key for key in KEYS if key.name == known])
    if of_options is not None:
        return with_value(config, of_options, value)
    if group in groups:
        of_group = [key for key in keys_of(config) if key.group == group and not key.option]
        near = nearest(ending, [key.leaf for key in of_group], 0.85)
        if near is not None:
            return with_value(config, next(key for key in of_group if key.leaf == near), value)
    named = named_value(known, value)
    if named is not None:
        return " ".join(_of_table(config, named)) or None
    for word in (known.replace(".", "_"), "_".join(known.split(".")[-2:]), ending):
        if word in FIELD_WORDS and any(part in word for part in _COUNTED_OTHERWISE):
            return None
        if word in FIELD_WORDS:
            return _of_field(config, word, value, groups)
    keys = _theirs(known, group in groups)
    if keys:
        return " ".join(_with_values(config, keys, value))
    with_leaf = _likeliest(config, [key for key in KEYS if key.leaf == ending and not key.option])
    if with_leaf is not None:
        return with_value(config, with_leaf, value)
    return _similar(config, known, value, groups)


_LESS_LIKELY = ("critic", "evaluation")
"""Groups whose keys repeat those of others, which a name without its group means."""


def _likeliest(config: DictConfig, keys: list[Key]) -> Key | None:
    """Return the key that is most likely meant; None where there is none."""
    return min(
        keys,
        key=lambda key: (
            key_named(key.name, config) is not key,
            key.group in _LESS_LIKELY,
            key.schema != "task/prompts",
        ),
        default=None,
    )


def _theirs(name: str, is_group_ours: bool) -> list[str]:
    """Return our keys for another trainer's, if they take the same value."""
    group, _, leaf = name.partition(".")
    keys = [key for key in keys_called(name) if not is_group_ours or key.startswith(f"{group}.")]
    if not keys and leaf and is_group_ours:
        keys = keys_mentioned(leaf, group) or keys_called(leaf)
    likely = [key for key in keys if key.partition(".")[0] not in _LESS_LIKELY or group == "critic"]
    keys = likely or keys
    same_leaf = [key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2]]
    keys = same_leaf[:1] or keys
    return [key for key in keys if key.partition(".")[0] == keys[0].partition(".")[0]]


def _with_values(config: DictConfig, names: list[str], value: object) -> list[str]:
    """Return the overrides of keys by their names; a list with a value for each is divided."""
    values = [value] * len(names)
    if isinstance(value, str) and value.count(",") == len(names) - 1:
        value = value.split(",")
    if isinstance(value, list) and len(value) == len(names):
        values = value  # such as optimizer.betas, whose two numbers have a key each here
    overrides = []
    for name, part in zip(names, values, strict=True):
        chosen = _likeliest(config, [key for key in KEYS if key.name == name])
        overrides.append(typed(name, part) if chosen is None else with_value(config, chosen, part))
    return overrides


def _of_table(config: DictConfig, named: Mapping[str, object]) -> list[str]:
    """Return the overrides of options and keys that a table of theirs gives for a value."""
    overrides = []
    for name, value in named.items():
        key = _likeliest(config, [key for key in KEYS if key.name == name and not key.option])
        if key is None or name.partition(".")[0] in named:  # its option stands before it
            overrides.append(typed(name, value))
        else:
            overrides.append(with_value(config, key, value))
    return overrides


def _choice_in(
    config: DictConfig, name: str, value: object, groups: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the overrides for a name in which an option stands, such as `loss.grpo.epsilon_high`
    or `grpo.epsilon_high`; None for another name."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        of_groups = [group for group in groups if part in groups[group] and group not in OPTIONAL]
        before = parts[place - 1] if place else ""
        if before in groups and part in groups[before]:
            of_groups = [before]
        elif before or not of_groups or (len(parts) > 1 and parts[1] in groups[of_groups[0]]):
            continue
        group = "loss" if "loss" in of_groups else of_groups[0]
        leaf = ".".join(parts[place + 1 :])
        key = next(
            (
                key
                for key in KEYS
                if key.name == f"{group}.{leaf}" and _has(key, part) and not key.option
            ),
            None,
        )
        if key is not None and key_named(key.name, config) is key:
            return with_value(config, key, value)
        if key is not None:
            return with_value(config, key, value) if "/" in key.schema else f"{group}={part}"
        if not leaf or text(value) in parts:
            return f"{group}={part}"
    return None


def _has(key: Key, option: str) -> bool:
    """Return whether an option of the key's group has the key."""
    return "/" not in key.schema or key.schema.partition("/")[2] == option


def _of_field(
    config: DictConfig, word: str, value: object, groups: Mapping[str, Sequence[str]]
) -> str:
    """Return the overrides for a word of the field."""
    overrides = []
    for name in FIELD_WORDS[word]:
        if name in groups:
            is_option = word in groups[name] and text(value) not in groups[name]
            overrides.append(option_meant(config, name, word if is_option else value, groups))
            continue
        if name.startswith("hydra."):
            overrides.append(typed(name, text(value)))
            continue
        key = key_named(name, config) or next(key for key in KEYS if key.name == name)
        if word in VALUES_ALSO_CALLED and text(value).lower() in TRUE_WORDS:
            value = word
        overrides.append(with_value(config, key, value))
    return " ".join(overrides)


def _similar(
    config: DictConfig, name: str, value: object, groups: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the override of the most similar key of the same group, else of a similar group, else
    of a similar key of another group; None if nothing is similar."""
    group, _, leaf = name.rpartition(".")
    if known_as(leaf if group in groups else name):
        return None  # the name of another trainer, which is explained
    keys = [known for known in keys_of(config) if not known.option]
    leaf_in_group = nearest(leaf, [known.leaf for known in keys if known.group == group], 0.6)
    if leaf_in_group is not None:
        key = key_named(f"{group}.{leaf_in_group}".lstrip("."), config)
        return None if key is None else with_value(config, key, value)
    near_group = nearest(group or name, groups, 0.7)
    if near_group is not None and group:
        meant = f"{near_group}.{leaf}"
        return None if near_group == group else overrides_meant(config, meant, value, groups)
    if near_group is not None:
        return option_meant(config, near_group, value, groups)
    near_leaf = nearest(leaf, [known.leaf for known in keys], 0.75)
    key = next((known for known in keys if known.leaf == near_leaf), None)
    return None if key is None else with_value(config, key, value)


def option_meant(
    config: DictConfig, group: str, value: object, groups: Mapping[str, Sequence[str]]
) -> str:
    """Return the overrides that a user most likely meant by an option that a group does not have,
    else by its default."""
    names = list(groups[group])
    several = _several(group, value, names)
    if len(several) > 1:
        return f"pgtk -m {group}={','.join(several)}"
    word = text(several[0] if several else value)
    if word in names:
        return f"{group}={word}"
    default = default_options().get(group) or ("null" if group in OPTIONAL else names[0])
    if word.startswith("$"):  # a variable that the shell has not replaced
        return f"{group}={default}"
    clean = without_typography(word).strip().strip("()[]{}<>;,&|\\").strip().rstrip(".")
    clean = re.sub(r"\.(yaml|yml)$", "", clean)
    short = clean.lower().replace("-", "_").replace(" ", "_")
    for name in (clean, short, short.rpartition("/")[2]):
        if name in names:
            return f"{group}={name}"
    if short in OPTIONS_ALSO_CALLED or clean in FORMER_TASKS:
        return OPTIONS_ALSO_CALLED.get(short) or FORMER_TASKS[clean]
    if group == "evaluation" and short in (*NOTHING_WORDS, *FALSE_WORDS):
        return "evaluation.every=0"
    if short in NOTHING_WORDS or short in FALSE_WORDS:
        nothing = "none" if "none" in names else "null"
        is_said = nothing in names or group in OPTIONAL
        return f"{group}={nothing if is_said else default_options()[group]}"
    if short in TRUE_WORDS and group in _SWITCHED_ON:
        return _SWITCHED_ON[group]
    if group == "task" and is_own_code("loss", clean):
        return _own_task(clean)
    with_part = [name for name in names if short in name.split("_")]
    if with_part:
        return f"{group}={nearest(short, with_part, 0) or with_part[0]}"
    elsewhere = [other for other in groups if clean in groups[other] and clean != "none"]
    if elsewhere:
        return f"{elsewhere[0]}={clean}"
    theirs = option_called(group, short)
    if theirs:
        return theirs
    number = next((key for key in KEYS if key.name == f"{group}.coefficient"), None)
    if number is not None and re.fullmatch(r"[\d.,e+-]+", clean):
        return with_value(config, number, clean)
    if is_own_code(group, clean):
        return f"{group}={clean}"
    as_path = _as_path(group, clean, names)
    if as_path is not None:
        return as_path
    return " or ".join(f"{group}={name}" for name in all_nearest(short, names) or [default])


def _own_task(path: str) -> str:
    """Return the overrides of an environment or a verifier of the user's own."""
    if path.rpartition(".")[2][:1].isupper():
        return f"task=conversation task.environment={path}"
    return f"task=prompts task.path=FILE task.verifier={path}"


def _several(group: str, value: object, names: list[str]) -> list[str]:
    """Return the options in a list, a text with several names, or a pattern; empty for one word."""
    usable = [name for name in names if name != "custom"]
    if isinstance(value, list):
        parts = [text(part) for part in value]
        meant = [part if is_own_code(group, part) else nearest(part, names, 0.6) for part in parts]
        return [part for part in meant if part is not None]
    word = text(value).strip()
    is_pattern = re.search(r"[*?]", word) and not re.search(r"[\s.]", word) and word != "???"
    if word.lower() in ("all", "any") or is_pattern:
        pattern = re.sub(r"glob\((.*)\)", r"\1", word)
        return fnmatch.filter(usable, "*" if word.lower() in ("all", "any") else pattern)
    parts = [part for part in re.split(r"[\s,;|+&]+", word.strip("()[]{}")) if part]
    meant = [nearest(part, names, 0.6) or "" for part in parts]
    return meant if len(parts) > 1 and all(meant) else []


def _as_path(group: str, word: str, names: Iterable[str]) -> str | None:
    """Return the overrides that take the word as a path, an address or the name of a model."""
    if group not in _TAKES_PATH or word in ("", "null"):
        return None
    is_path = (
        "/" in word
        or os.path.exists(word)
        or word.endswith((".jsonl", ".json", ".parquet", ".arrow"))
    )
    is_size = re.fullmatch(r"[\d.]+[bm]?", word.lower()) is not None
    is_model = group == "model" and not is_size and nearest(word, names, 0.6) is None
    place = re.sub("^~/", "$HOME/", word)  # which a shell replaces at the beginning of a word alone
    return _TAKES_PATH[group].format(place) if is_path or is_model else None
