"""Makes a frozen `Config` of a composed configuration: interpolations resolved, every value in its
range."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, Node, OmegaConf, ValueNode
from omegaconf.base import DictKeyType
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from pgtoolkit.config.keys import default, fits, help_of, key_named, keys_of, values_in_words
from pgtoolkit.config.meant_values import typed, value_meant
from pgtoolkit.config.refusals import holds_secret, unresolvable
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.runs.records import plain
from pgtoolkit.system.conditions import value_of, with_values
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, text


def resolve(config: DictConfig, problems: dict[str, str]) -> Config:
    """Return the configuration as an object.

    problems: gets a problem for each key that is unset or does not resolve; the key gets its
    default, so that the rules can still be checked.
    """
    with _without_environment():
        groups = {}
        for group in map(str, config):
            if group != "hydra":
                value = _resolve_node(config, group, group, problems)
                if isinstance(value, dict):
                    schema = SCHEMAS.get(group) or SCHEMAS[f"{group}/{value['name']}"]
                    value = schema.unchecked(value)
                groups[group] = value
        return Config(**groups)


def in_range(config: Config, problems: dict[str, str], choices: Mapping[str, str]) -> Config:
    """Return the configuration with defaults in place of values that their keys do not take.

    problems: gets a problem for each of these keys that has none yet. choices: see `keys.default`.
    """
    values = {}
    for key in keys_of(config):
        value = value_of(config, key.name)
        if fits(key, value):
            continue
        better = default(config, key.name, choices)
        if key.range and not fits(key, better):
            better = key.range[0]
        if key.name not in problems:  # else `resolve` has said why
            problems[key.name] = refusal(
                setting=f"{key.name}={text(value)}",
                needs=values_in_words(key),
                got=text(value) if value is None else value,
                reason=key.help or "Every key has a type.",
                use=typed(key.name, value_meant(key, value, better)),
            )
        values[key.name] = better
    return with_values(config, values) if values else config


def value_in(config: DictConfig, name: str) -> object:
    """Return a key's value in plain types; None if it does not resolve (`resolve` refuses it)."""
    try:
        value = value_of(config, name)
        return plain(
            OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        )
    except OmegaConfBaseException:
        return None


def default_in(config: DictConfig, name: str) -> object:
    """Return the default of a key; None where it is computed from a value that does not resolve."""
    try:
        return default(config, name, choices_of(config))
    except OmegaConfBaseException:
        return None


def choices_of(config: DictConfig) -> dict[str, str]:
    """Return the option of each group; empty for a saved run, whose values name them."""
    chosen = OmegaConf.select(config, "hydra.runtime.choices")
    if chosen is None:
        return {}
    options = OmegaConf.to_container(chosen)
    assert isinstance(options, dict)
    return {str(group): option for group, option in options.items()}


def _unresolved(node: Node) -> str:
    return str(
        OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node._value()
    )


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """Inside the block, no interpolation reads an environment variable, however it spells the
    resolver's name."""

    def refuse(*_: object) -> None:
        raise ValueError(
            "It would read an environment variable, where secrets are, into the run directory"
        )

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _resolve_node(
    parent: DictConfig, name: DictKeyType, path: str, problems: dict[str, str]
) -> object:
    """Return the value of a node in plain types, with everything below it.

    name: the node's, in its parent. path: its dotted name. problems: see `resolve`.
    """
    # The name is known to be there, and asking the schema takes a third of the time.
    node = parent._get_node(name, validate_access=False, validate_key=False)
    if name == "_target_":
        problems[path] = refusal(path, "to be left out", node, *_NO_CODE)
        return None
    assert isinstance(node, Node)
    if isinstance(node, DictConfig) and _has_values(node):
        return {str(part): _resolve_node(node, part, f"{path}.{part}", problems) for part in node}
    root = parent._get_root()
    assert isinstance(root, DictConfig)
    try:
        if node._is_missing():
            problems[path] = _missing(root, path)
        elif "_target_" in _unresolved(node):
            problems[path] = refusal(path, "plain values", "_target_", *_NO_CODE)
        else:
            # OmegaConf's own look-up takes most of a composition's time.
            value = parent[name] if node._is_interpolation() else node
            if isinstance(value, ValueNode):
                value = value._value()
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(
                    value, resolve=True, throw_on_missing=True, enum_to_str=True
                )
            setting = f"{path}={value}"
            if value is None or isinstance(value, int | float) or redact(setting) == setting:
                return value
            problems[path] = holds_secret(path)
    except (OmegaConfBaseException, RecursionError) as error:
        better = text(default_in(root, path))
        problems[path] = unresolvable(path, node._value(), error, better)
    return default_in(root, path)


def _has_values(node: DictConfig) -> bool:
    return not (node._is_none() or node._is_missing() or node._is_interpolation())


def _missing(root: DictConfig, path: str) -> str:
    """Refuse a configuration without a value for a key that has no default."""
    meaning = help_of(root, path, choices_of(root))
    example = getattr(key_named(path, root), "example", "") or text(default_in(root, path))
    return refusal(
        setting=path,
        needs="a value",
        got="none",
        reason=meaning or "??? stands for a value that is still to be set.",
        use=f"{path}={example}",
    )


_NO_CODE = ("A configuration never names code to be run.", "the options of the groups")
