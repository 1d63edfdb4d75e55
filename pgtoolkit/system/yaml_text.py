"""YAML of a file that anybody may have written: parsed into plain values that are no larger than the text."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

from pgtoolkit.errors import first_line

_DEEPEST = 30
"""Levels of lists and keys. Parsers call themselves for each: libyaml breaks off the process, OmegaConf ends at 90."""


def parse_yaml(data: bytes) -> Any:
    """The OmegaConf configuration in a YAML text. Raises ValueError in one line for what is no YAML.

    Aliases (`*name`) are refused: ten of them in each of ten lines stand for gigabytes. So is a text nested more than
    `_DEEPEST` levels deep.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = data.decode()
        if ("*" in text and "&" in text) or _may_be_deep(data):  # without both characters there is no alias
            _refuse_aliases_and_depth(text)
        return OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"no YAML, {where}{error.problem or error.context}") from error
    except (OmegaConfBaseException, yaml.YAMLError, OSError, AssertionError, AttributeError, TypeError) as error:
        raise ValueError(first_line(error)) from error
    except RecursionError as error:  # tags can hide levels from a quick look
        raise ValueError(f"more than {_DEEPEST} lists or keys deep") from error


def _may_be_deep(data: bytes) -> bool:
    """Return whether a text could be nested too deep, by a quick look.

    Each level of a list or mapping on lines of its own begins further right, behind spaces and the signs of lists and
    keys alone, but for a list right below its key; each level on one line has a bracket. So there are at most
    2 * 10 + 10 levels where this is false.
    """
    return data.count(b"[") + data.count(b"{") > 10 or re.search(rb"[ \t?:-]{10}", data) is not None


def _refuse_aliases_and_depth(text: str) -> None:
    """Raise ValueError for an alias or a text nested too deep, by its events: reading them needs no recursion."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1
            raise ValueError(f"line {line} has the alias *{event.anchor}; write out what it stands for")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line} is more than {_DEEPEST} lists or keys deep")


def plain_yaml(data: bytes) -> Any:
    """The same in plain dictionaries and lists: by libyaml, in a tenth of the time, where nothing needs OmegaConf."""
    from omegaconf import OmegaConf

    if not re.search(rb"[*&!]|\$\{", data) and not _may_be_deep(data):
        with contextlib.suppress(Exception):  # what is wrong is said below
            value = _libyaml_loader()(data).get_single_data()
            if isinstance(value, (dict, list)):
                return value
    return OmegaConf.to_container(parse_yaml(data))


@functools.cache
def _libyaml_loader() -> type:
    """OmegaConf's reader of YAML, with its numbers and its refusal of equal keys, on libyaml's parser."""
    from omegaconf._utils import get_yaml_loader
    from yaml.constructor import SafeConstructor
    from yaml.cyaml import CParser  # pyright: ignore[reportAttributeAccessIssue]  (compiled, without types)
    from yaml.resolver import Resolver

    class Loader(CParser, get_yaml_loader()):
        def __init__(self, data: bytes):
            CParser.__init__(self, data)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    return Loader
