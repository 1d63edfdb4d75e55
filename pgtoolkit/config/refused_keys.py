"""Refusals of words, keys, options and values that do not exist, with the user's most likely
meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from omegaconf import DictConfig

from pgtoolkit.config.field_words import FIELD_WORDS
from pgtoolkit.config.files import OPTIONAL, misplaced
from pgtoolkit.config.keys import (
    KEYS,
    OWN_CODE,
    fits,
    is_own_code,
    key_named,
    values_in_words,
)
from pgtoolkit.config.meant_keys import option_meant, overrides_meant, spelled, with_value
from pgtoolkit.config.meant_values import value_meant
from pgtoolkit.config.overrides import Unreadable
from pgtoolkit.config.own_code import parameter_key
from pgtoolkit.config.refusals import as_typed, sentence_of
from pgtoolkit.config.repaired_words import elsewhere, reason_of, use_for
from pgtoolkit.config.schema import default_options
from pgtoolkit.config.trainer_keys import known_as
from pgtoolkit.system.declared import Key
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.report import nearest, refusal, text

Groups = Mapping[str, Sequence[str]]
"""Group -> its options."""


def unreadable(typed: Unreadable, config: DictConfig, groups: Groups) -> str:
    """Refuse words that are no override."""
    if typed.pattern is not None:
        return pattern(typed.pattern, config, groups)
    words = typed.words
    error = typed.error
    key, _, value = words.partition("=")
    reason = reason_of(words)
    if not reason and error is not None:
        reason = "The value has characters that are no part of it without quotes."
        if "range(" in value:
            reason = f"{sentence_of(error)}."
    use = use_for(words, config, groups)
    if "range(" in value:
        use = f"pgtk -m '{key}=range(1,4)' for the values 1, 2 and 3"
    return refusal(
        setting=words,
        needs="the form KEY=VALUE",
        got=repr(words),
        reason=reason or "A word alone is no override.",
        use=use,
    )


def pattern(override: Override, config: DictConfig, groups: Groups) -> str:
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
            use=use_for(key, config, groups),
        )
    matching = [name for name in value.filter(list(groups[key])) if name != "custom"]
    use = f"pgtk -m {key}={','.join(matching)}" if matching else _default(key, groups)
    return refusal(
        setting=as_typed(override),
        needs="names of options",
        got="a pattern",
        reason="Options are chosen by their names, not by a pattern.",
        use=use,
    )


def _default(group: str, groups: Groups) -> str:
    """Return the override that leaves a group at its default."""
    nothing = "null" if group in OPTIONAL else groups[group][0]
    return f"{group}={default_options().get(group, nothing)}"


def removal(override: Override, config: DictConfig, groups: Groups) -> str:
    """Refuse an override that removes a key."""
    key = override.key_or_group
    use = use_for(key, config, groups)
    if key in groups:
        use = f"{key}=none" if "none" in groups[key] else _default(key, groups)
    return refusal(
        setting=as_typed(override),
        needs="to keep the key",
        got="a removal",
        reason="The configuration is always complete.",
        use=use,
    )


def several_values(override: Override, config: DictConfig, groups: Groups) -> str:
    """Refuse several values for a single run."""
    return refusal(
        setting=as_typed(override),
        needs="-m",
        got="several values",
        reason="A run has one value of each key.",
        use=", or ".join(_as_sweep_or_one(override, config, groups)),
    )


def _as_sweep_or_one(override: Override, config: DictConfig, groups: Groups) -> list[str]:
    """Return how to type several values, and the one value that may be meant by them."""
    name = override.key_or_group.removeprefix("hydra.sweeper.params.")
    written = as_typed(override).partition("=")[2]
    as_sweep = f"pgtk -m {typed_sweep(name, written)}"
    if name.startswith("hydra"):
        return [as_sweep]
    if name in groups:
        return [option_meant(config, name, written.split(","), groups)]
    if parameter_key(name, config) != name:
        return [as_sweep]
    key = key_named(name, config) or next((key for key in KEYS if key.name == name), None)
    if key is None or key.name != name:
        values = [part.strip() for part in written.strip("[]()").split(",")]
        meant = overrides_meant(config, name, values, groups)
        first = overrides_meant(config, name, values[0], groups)
        if meant is not None and first is not None and " " not in first and "=" in first:
            meant = f"pgtk -m {first.partition('=')[0]}={written}"
        return [meant or elsewhere(spelled(name))]
    if key_named(name, config) is None:
        as_sweep = f"pgtk -m {key.schema.replace('/', '=')} {typed_sweep(name, written)}"
    if "(" in written:
        return [as_sweep]
    single_value = value_meant(key, written, None)
    if key.type.startswith("list"):
        return [with_value(config, key, written)]
    if key.type.startswith("str") and not key.names:
        quoted = with_value(config, key, written)
        return [quoted] if Path(written).exists() else [as_sweep, f"{quoted} for one value"]
    single = with_value(config, key, written if single_value is None else single_value)
    fitting = _fitting(key, override)
    if single_value is not None and len(fitting) < written.count(",") + 1:
        return [single]
    if len(fitting) < 2:
        return [with_value(config, key, "".join(fitting))]
    as_sweep = as_sweep.replace(written, ",".join(fitting))
    return [as_sweep] if single_value is None else [as_sweep, f"{single} for one number"]


def _fitting(key: Key, override: Override) -> list[str]:
    """Return those of several values that a key takes or may mean, as they are to be typed."""
    several = override.value()
    assert isinstance(several, ChoiceSweep)  # a range is handled before
    written = as_typed(override).partition("=")[2].split(",")
    fitting = []
    for word, value in zip(written, several.list, strict=True):
        meant = value_meant(key, word, _NOTHING)
        if meant is not _NOTHING:
            fitting.append(word if fits(key, value) else text(meant))
    return fitting


_NOTHING = object()
"""What no key takes."""


def typed_sweep(name: str, values: str) -> str:
    """Return an override with several values in the spelling of a shell."""
    needs_quotes = re.search(r"[\s()\[\]{};&|<>*?]", values)
    return f"'{name}={values}'" if needs_quotes else f"{name}={values}"


_PLACEHOLDERS = ("NAME", "OPTION", "VALUE")
"""Words that stand for an option in the documentation, beside its group's name in capitals."""


def unknown_options(group: str, value: object, groups: Groups) -> list[str]:
    """Return those names in the place of a group's option, several where it takes several, that are
    no options of it."""
    several = value if value and isinstance(value, list) and group in OPTIONAL else [value]
    return [
        text(option)
        for option in several
        if option not in groups[group] and not is_own_code(group, option)
    ]


def unknown_option(override: Override, config: DictConfig, groups: Groups) -> str:
    """Refuse an option that its group does not have."""
    group = override.key_or_group
    value = override.value()
    names = groups[group]
    unknown = unknown_options(group, value, groups)
    meant = option_meant(config, group, unknown[0] if group in OPTIONAL else value, groups)
    if isinstance(value, list) and len(value) > 1 and group in OPTIONAL:
        near = {word: nearest(word, names) for word in unknown}
        kept = [near.get(text(option), text(option)) for option in value]
        meant = f"{group}=[{','.join(filter(None, kept))}]"
    needs = f"one of {', '.join(names)}"
    if group in OWN_CODE:
        needs += f", or the dotted path of a {kind_of(group)} of your own"
    reason, use = misplaced(group, unknown[0]) or (
        f"The options of {group} are the files in conf/{group}.",
        meant,
    )
    if unknown[0].rstrip("0123456789") in (group.upper(), *_PLACEHOLDERS):
        reason = f"{unknown[0]} stands for the one of them that you choose."
        use = _default(group, groups)
    return f"{as_typed(override)} needs {needs} (got {unknown[0]!r}). {reason} Use {use}."


def unknown_key(config: DictConfig, key: str, value: object, groups: Groups) -> str:
    """Refuse a key that the schema of the chosen options does not have."""
    if not key:
        return refusal(
            setting=f"={text(value)}",
            needs="a key before the equals sign",
            got="none",
            reason="A value alone sets nothing.",
            use=use_for(text(value), config, groups),
        )
    keys_of_other_options = [known for known in KEYS if known.name == key and "/" in known.schema]
    if keys_of_other_options:
        return _key_of_other_option(config, keys_of_other_options, value)
    meant = overrides_meant(config, key, value, groups)
    group, _, leaf = key.partition(".")
    rows = known_as(leaf if leaf and group in groups else key)
    if meant is not None:
        return f"Unknown key {key!r}. Use {meant}."
    if rows:
        name, row = rows[0]
        return f"Unknown key {key!r}. {row.sentence(name)} Use pgtk explain {leaf or key}."
    of_field = FIELD_WORDS.get(spelled(leaf or key))
    if of_field is not None:
        reason = f"{of_field[0]} comes nearest, and counts in another unit."
        return f"Unknown key {key!r}. {reason} Use pgtk explain {spelled(leaf or key)}."
    if leaf and group in groups and isinstance(config.get(group), DictConfig):
        names = [f"{group}.{name}" for name in config[group] if name != "name"]
        reason = f"{group} has the keys {', '.join(names)}."
        return f"Unknown key {key!r}. {reason} Use pgtk explain {group}."
    return f"Unknown key {key!r}. Use pgtk --help, which has the groups."


def _key_of_other_option(config: DictConfig, keys: list[Key], value: object) -> str:
    """Refuse a key that other options of its group have. keys: theirs, all of one name."""
    key = keys[0]
    group = key.group
    options = [known.schema.replace("/", "=") for known in keys]
    got = f"{group}={config[group].name}"
    use = with_value(config, key, value)
    if key.stands_for and is_own_code(group, value):
        use = f"{group}={value}"
    if key.names:
        # A key of another group may be what is meant, such as rollout.too_long for task.too_long.
        alike = [
            known
            for known in KEYS
            if known.leaf == key.leaf and known.group != group and known.names == key.names
        ]
        if alike and key_named(alike[0].name, config) is alike[0]:
            use = f"{with_value(config, alike[0], value)}, or {use}"
    return refusal(
        setting=f"{key.name}={text(value)}",
        needs=" or ".join(options),
        got=got,
        reason=f"{got} does not have the key.",
        use=use,
    )


def wrong_type(config: DictConfig, key: Key, value: object) -> str:
    """Refuse a value that the type of its key does not allow."""
    reason = key.help or "Every key has a type."
    got = value if isinstance(value, float) else text(value)
    return (
        f"{key.name}={got} needs {values_in_words(key)} (got {got!r}). {reason} "
        f"Use {with_value(config, key, value)}."
    )
