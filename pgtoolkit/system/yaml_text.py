"""YAML of a file that anybody may have written: parsed into plain values that are no larger than the text."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

from pgtoolkit.errors import first_line


def parse_yaml(data: bytes) -> Any:
    """The OmegaConf configuration in a YAML text. Raises ValueError in one line for what is no YAML.

    Aliases (`*name`) are refused: ten of them in each of ten lines stand for gigabytes.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = data.decode()
        if "*" in text and "&" in text:  # without either there is no alias
            for event in yaml.parse(text, Loader=yaml.SafeLoader):
                if isinstance(event, yaml.AliasEvent):
                    line = event.start_mark.line + 1
                    raise ValueError(f"line {line} has the alias *{event.anchor}; write out what it stands for")
        return OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"no YAML, {where}{error.problem or error.context}") from error
    except (OmegaConfBaseException, yaml.YAMLError, OSError, AssertionError, AttributeError, TypeError) as error:
        raise ValueError(first_line(error)) from error
    except RecursionError as error:
        raise ValueError("lists or keys within each other, too deep to be read") from error


def plain_yaml(data: bytes) -> Any:
    """The same in plain dictionaries and lists: by libyaml, in a tenth of the time, where nothing needs OmegaConf."""
    from omegaconf import OmegaConf

    if not re.search(rb"[*&!]|\$\{", data):
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
    from yaml.cyaml import CParser
    from yaml.resolver import Resolver

    class Loader(CParser, get_yaml_loader()):
        def __init__(self, data: bytes):
            CParser.__init__(self, data)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    return Loader
