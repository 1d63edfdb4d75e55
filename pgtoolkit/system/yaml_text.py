"""Reads YAML that anybody may have written into plain values no larger than the text, and writes
values as YAML."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

from pgtoolkit.errors import first_line

_DEEPEST = 30
"""Levels of lists and keys that are read. Parsers recurse for each level, and libyaml ends the
process if there are too many."""


def plain_yaml(data: bytes) -> Any:
    """Return the dictionary or list in a YAML text. Raises ValueError, with a message of one line,
    if there is none.

    Refuses aliases (`*name`), ten of which in each of ten lines stand for gigabytes, texts nested
    more than `_DEEPEST` levels deep, and a key that comes twice. Unlike in YAML 1.1, 1e-3 is a
    number.
    """
    import yaml

    if not re.search(rb"[*&!]", data) and not _may_be_deep(data):
        with contextlib.suppress(Exception):  # a problem is found again below, and explained
            value = yaml.load(data, Loader=_loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
            if isinstance(value, (dict, list)):
                return value
    try:
        text = data.decode()
        # without both characters there is no alias
        if ("*" in text and "&" in text) or _may_be_deep(data):
            _refuse_aliases_and_depth(text)
        value = yaml.load(text, Loader=_loader(yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "a line"
        if "nesting depth" in str(error.problem):  # PyYAML's own limit, since 6.0.4
            raise ValueError(f"{line} is more than {_DEEPEST} lists or keys deep") from error
        raise ValueError(f"no YAML, {line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, OSError, AttributeError, TypeError) as error:
        raise ValueError(first_line(error)) from error
    except RecursionError as error:  # tags can hide levels from a quick look
        raise ValueError(f"more than {_DEEPEST} lists or keys deep") from error
    return {} if value is None else _plain(value)


def _plain(value: object) -> dict | list:
    """Return a dictionary or list of plain values. Raises ValueError for any other value."""
    if not isinstance(value, (dict, list)):
        raise ValueError("it has no keys with their values")
    for item in [*value, *value.values()] if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _plain(item)
        elif not isinstance(item, str | int | float | None):
            raise ValueError(f"a value of the type {type(item).__name__}")
    return value


def to_yaml(value: dict | list) -> str:
    """Return plain values as YAML, in the order of their keys.

    A text that a reader would take for a number or a truth value is in quotes, such as "1e-3".
    """
    import yaml

    return yaml.dump(
        value, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_dumper()
    )


@functools.cache
def _dumper() -> type:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

        def represent_text(self, data: str) -> yaml.ScalarNode:
            return self.represent_scalar(
                "tag:yaml.org,2002:str", data, style="'" if _needs_quotes(data) else None
            )

    Dumper.add_representer(str, Dumper.represent_text)
    return Dumper


_TRUTH_VALUES = ("y", "yes", "n", "no", "true", "false", "on", "off")


def _needs_quotes(text: str) -> bool:
    if text.lower() in _TRUTH_VALUES and text in (text.lower(), text.upper(), text.capitalize()):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def _may_be_deep(data: bytes) -> bool:
    """Return whether a text could be nested too deep, without parsing it.

    Each level of a list or mapping on lines of its own begins further right, behind spaces and the
    signs of lists and keys alone, but for a list right below its key; each level on one line has a
    bracket. So if this is False, there are at most 2 * 10 + 10 levels.
    """
    brackets = data.count(b"[") + data.count(b"{")
    is_indented_far = re.search(rb"[ \t?:-]{10}", data) is not None
    return brackets > 10 or is_indented_far


def _refuse_aliases_and_depth(text: str) -> None:
    """Raise ValueError for an alias or for deep nesting, from the text's events, whose reading
    needs no recursion."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1
            raise ValueError(
                f"line {line} has the alias *{event.anchor}; write out what it stands for"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line} is more than {_DEEPEST} lists or keys deep")


@functools.cache
def _loader(base: type) -> type:
    """Return a reader that refuses equal keys, reads 1e-3 as a number, and leaves a date a text."""
    import yaml

    class Loader(base):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            keys = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:str":
                    if key.value in keys:
                        problem = f"found duplicate key {key.value}"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    keys.add(key.value)
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [
            (tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"
        ]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return Loader


_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)
"""A number as Hydra reads it, whose files and overrides have the same values."""
