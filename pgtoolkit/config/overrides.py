"""Overrides in Hydra's grammar, and the jobs that several values of a key stand for."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, ValueType
from hydra.errors import HydraException

from pgtoolkit.config import refusals
from pgtoolkit.config.files import OPTIONAL
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.launchers import Axis

NO_CHOICE = tuple(f"{group}=null" for group in OPTIONAL)
"""The defaults of the groups that change others; Hydra accepts these in its files but not as
overrides."""


PROGRAMS = ("pgtk", "pgtoolkit", "python", "python3", "train", "run", "start", "check")
"""Words that belong before the overrides, or nowhere."""


@dataclass(frozen=True)
class Unreadable:
    """Words that are no override that pgtk takes.

    error: of the parser; None where it has not read them.
    pattern: the override, where it is one whose value is a pattern.
    """

    words: str
    error: Exception | None = None
    pattern: Override | None = None


def units(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, each with those that belong to it: `loss = grpo` is one
    override, and `grpo gspo` after `loss=` are two values."""
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        is_bare = "=" not in word and not word.startswith(("-", "~"))
        is_second_half = word.startswith("=") and "=" not in before
        if joined and (is_bare or is_second_half or before in PROGRAMS):
            joined[-1] = f"{before} {word}"
        else:
            joined.append(word)
    return joined


def parse(overrides: list[str]) -> tuple[list[Override], list[Unreadable]]:
    """Return the overrides in Hydra's grammar, each once, and the other words."""
    parsed = []
    unreadable = []
    for words in dict.fromkeys(units(overrides)):
        if words not in overrides:  # several words
            unreadable.append(Unreadable(words))
            continue
        try:
            override = _parsed(words)
            if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
                unreadable.append(Unreadable(words, pattern=override))
                continue
            value = override.value()
            if isinstance(value, RangeSweep):
                _refuse_endless(value)
            parsed.append(override)
        except (HydraException, ValueError, RecursionError) as error:
            # Thousands of digits raise ValueError, and lists in lists RecursionError.
            unreadable.append(Unreadable(words, error))
    return parsed, unreadable


def _refuse_endless(values: RangeSweep) -> None:
    """Raise ValueError for a range without values, without an end, or longer than any sweep."""
    assert values.start is not None  # the grammar knows no range without its two ends
    assert values.stop is not None
    count = (values.stop - values.start) / values.step if values.step else math.inf
    if not 0 < count <= _LONGEST_RANGE:
        raise ValueError(f"A range has from 1 to {_LONGEST_RANGE} values")


_LONGEST_RANGE = 10_000


@functools.lru_cache(4096)  # the jobs of a sweep have the same values again and again
def _parsed(typed: str) -> Override:
    return OverridesParser.create().parse_override(typed)


def jobs(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep: all combinations of the values.

    Of two overrides of one key the later counts, since a sweep's file comes before what is typed.
    An interval, from which a search draws, stands for its two ends.
    """
    parsed, unreadable = parse([override for override in overrides if override not in NO_CHOICE])
    if unreadable:  # `compose` reports them
        return [overrides]
    last = {
        override.key_or_group: override for override in parsed if not override.is_hydra_override()
    }
    for key, override in last.items():
        value = override.value()
        if isinstance(value, IntervalSweep):
            last[key] = parse([f"{key}={value.start},{value.end}"])[0][0]
    return BasicSweeper.split_arguments([*last.values()], None)[0]


def axes(overrides: list[str]) -> dict[str, Axis]:
    """Return the axes of a search by their keys; of two overrides of one key the later counts."""
    parsed, _ = parse(overrides)
    last = {
        override.key_or_group: override for override in parsed if not override.is_hydra_override()
    }
    return {key: _axis(override) for key, override in last.items() if override.is_sweep_override()}


def _axis(override: Override) -> Axis:
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None  # the grammar knows no interval without its two ends
        assert value.end is not None
        return Axis(low=value.start, high=value.end, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = [*value.range()]
        return Axis(low=numbers[0], high=numbers[-1], step=value.step)
    return Axis(values=tuple(override.sweep_string_iterator()))


def intervals(overrides: list[str]) -> list[str]:
    """Return the overrides whose values are drawn from an interval."""
    parsed, _ = parse(overrides)
    return [refusals.as_typed(override) for override in parsed if override.is_interval_sweep()]


def is_swept(override: str) -> bool:
    """Return whether an override stands for several values."""
    parsed, _ = parse([override])
    return bool(parsed) and parsed[0].is_sweep_override()


def overrides_to_read(path: str) -> tuple[str, str]:
    """Return the overrides that read recorded rollouts from a path, whatever characters it has."""
    quoted = path.replace("\\", "\\\\").replace("'", "\\'")
    return "rollout=recorded", f"rollout.path='{quoted}'"


def hydra_form(override: str) -> str:
    """Return the override as Hydra needs it: without a plus if the key exists, with it if not."""
    plain = override.lstrip("+")
    return f"++{plain}" if plain.startswith(tuple(key.name for key in KEYS if key.free)) else plain
