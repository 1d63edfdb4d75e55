"""Says what is wrong with an override, with the reason and the nearest valid key, option or value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, EnumNode, OmegaConf

from pgtoolkit.config import SCHEMAS
from pgtoolkit.rules.report import text


def config_directory() -> Path:
    """`conf/` inside the installed package, else beside it in a working copy."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def wrong_form(override: Override, groups: dict[str, list[str]]) -> str | None:
    text, key = override.input_line, override.key_or_group
    if override.is_delete():
        hint = f"{key}=none" if "none" in groups.get(key, ()) else "key=value to change it"
        return f"{text} needs to keep the key (got a removal). The configuration is always complete. Use {hint}."
    if override.is_sweep_override():
        return f"{text} needs -m (got several values). One run has one value of each key. Use pgtk -m {text}."
    if override.package is not None:
        return f"{text} needs its group's own place (got @{override.package}). Groups do not move. Use {key}=OPTION."
    return None


def unknown_option(override: Override, names: list[str]) -> str | None:
    key, value = override.key_or_group, override.value()
    if value is None and key in ("experiment", "debug"):
        return None
    wrong = [name for name in (value if isinstance(value, list) else [value]) if name not in names]
    if not wrong:
        return None
    nearest = _nearest(str(wrong[0]), names)
    use = f"{key}={nearest}" if nearest else " or ".join(f"{key}={name}" for name in names)
    return (
        f"{override.input_line} needs one of {', '.join(names)} (got {wrong[0]!r}). "
        f"The options of {key} are the files in conf/{key}. Use {use}."
    )


def unknown_key(config: DictConfig, key: str, value, groups: dict[str, list[str]]) -> str:
    head, _, leaf = key.rpartition(".")
    for schema, types in SCHEMAS.items():
        group, _, option = schema.partition("/")
        if option and head == group and leaf in {field.name for field in fields(types)}:
            return (
                f"{key}={value} needs {group}={option} (got {group}={config[group].name}). Only that option has the "
                f"key. Use {group}={option} {key}={value}."
            )
    known = [*_leaves(config), *groups]
    nearest = _nearest(key, known)
    if nearest is None or nearest.count(".") != key.count("."):
        by_leaf = _nearest(leaf or key, [name.rpartition(".")[2] for name in known])
        nearest = next((name for name in known if name.rpartition(".")[2] == by_leaf), nearest)
    use = f"{nearest}={value}" if nearest else "`pgtk --help` for the groups and `pgtk --cfg job` for the keys"
    return f"{key}={value} needs a key of the configuration (got {key!r}). There is no such key. Use {use}."


def wrong_type(config: DictConfig, key: str, value, node, before) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    reason, use = comment(config, key), f"{key}={text(before)}"
    if isinstance(node, EnumNode):
        names = [member.name for member in node.enum_type]
        needs, nearest = f"one of {', '.join(names)}", _nearest(str(value), names)
        use = f"{key}={nearest}" if nearest else use
    else:
        needs = words.get(node._metadata.ref_type, "another type") + (" or null" if node._is_optional() else "")
    return f"{key}={text(value)} needs {needs} (got {text(value)!r}). {reason} Use {use}."


def comment(config: DictConfig, key: str) -> str:
    """What the YAML file of the chosen option says above `key`; empty if that file is not ours."""
    group, _, leaf = key.rpartition(".")
    name = f"{group}/{OmegaConf.select(config, f'hydra.runtime.choices.{group}')}" if group else "config"
    file = config_directory() / f"{name}.yaml"
    lines = file.readtext().splitlines() if file.is_file() else []
    at = next((i for i, line in enumerate(lines) if line.startswith(f"{leaf}:")), 0)
    return lines[at - 1].lstrip("# ") if at else ""


def composition_problem(error: Exception) -> str:
    """Hydra's refusal of a file of the user's, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [
        line for line in lines if "append to your config" not in line and not line.startswith("Config search path")
    ]
    cause = getattr(error, "__cause__", None)
    if cause is not None and not isinstance(cause, HydraException):
        lines.append(first_line(cause))
    return "the configuration cannot be composed: " + "; ".join(lines[:4])


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        if prefix == "" and key == "hydra":
            continue
        node = config._get_node(key)
        if isinstance(node, DictConfig):
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _nearest(word: str, names: list[str]) -> str | None:
    """The most similar name, if any is; swapped letters count as most similar."""

    def similarity(name: str) -> float:
        swapped = sorted(word) == sorted(name)
        return difflib.SequenceMatcher(None, word, name).ratio() + (0.5 if swapped else 0)

    best = max(names, key=similarity, default=None)
    return best if best is not None and similarity(best) >= 0.5 else None


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
