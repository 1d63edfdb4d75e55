"""Checks of a single argument, each of which raises one sentence. No torch is imported here."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeGuard

MAX_LOG_PROB = 1e-3
"""Log-probs are at most 0; so much more may be rounding, as of half precision."""


def check_name(key: str, value: Any, known: Iterable[str]) -> None:
    """ValueError unless value is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{key}={shown(value)} is unknown; choose one of {', '.join(known)}")


def check_positive(key: str, value: Any, needed: str = "") -> None:
    """ValueError unless value is a finite number > 0; needed: the beginning of the message, if it is another."""
    if not is_finite(value) or value <= 0:
        raise ValueError(f"{needed or f'{key} needs a finite number > 0'} (got {shown(value)})")


def is_finite(value: Any) -> bool:
    """Whether value is a finite number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(key: str, value: Any, least: int) -> None:
    """ValueError unless value is a whole number, and not below least."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{key} needs a whole number >= {least} (got {shown(value)})")


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether value is a whole number; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A tensor by its shape and dtype, anything else as it prints, in short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)}, {short(value.dtype)}"
    return reprlib.repr(value)


def short(dtype: Any) -> str:
    """A dtype of torch without the name of the package."""
    return str(dtype).removeprefix("torch.")
