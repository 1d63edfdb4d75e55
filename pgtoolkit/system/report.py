"""What the rules of the configuration report: problems in one sentence form, and notes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pgtoolkit.losses.checks import is_whole


@dataclass
class Report:
    """problems: refusals, one sentence form each. notes: legal but surprising choices."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, setting: str, needs: str, got: Any, reason: str, use: str) -> None:
        """Add `setting needs X (got Y). Reason. Use override.`"""
        self.problems.append(refusal(setting, needs, got, reason, use))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def refusal(setting: str, needs: str, got: Any, reason: str, use: str) -> str:
    """The sentence form of every problem."""
    return f"{setting} needs {needs} (got {text(got)}). {reason} Use {use}."


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def text(value: Any) -> str:
    """A value as one types it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    return str(value)


def is_number(value: Any) -> bool:
    """A finite int or float, not a bool."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))
