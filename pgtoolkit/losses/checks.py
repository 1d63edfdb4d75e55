"""Checks of a single argument, each of which raises one sentence. No torch is imported here."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import TypeGuard

MAX_LOG_PROB = 1e-3
"""A log-prob up to this counts as rounding, as of half precision; it is at most 0."""

LARGEST_GAP = 1e-2
"""How far two numbers for one log-prob of a sampler may lie apart, which rounds them."""

LARGEST_MASS = 1.01
"""Probabilities that add up to at most this count as rounding; they add up to at most 1."""


def check_name(key: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless value is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{key}={shown(value)} is unknown; choose one of {', '.join(known)}")


def refuse_class(key: str, value: object, kind: type) -> None:
    """Raise ValueError for a class where an object of it is needed. kind: its base class."""
    if isinstance(value, type):
        use = f"{key}={value.__name__}()" if issubclass(value, kind) else f"a {kind.__name__}"
        raise ValueError(f"{key} needs an object, not a class (got {value.__name__}). Use {use}")


def check_object(key: str, value: object, kind: type, use: str) -> None:
    """Raise ValueError unless value is an object of this kind. use: what to type in its place."""
    refuse_class(key, value, kind)
    if not isinstance(value, kind):
        raise ValueError(
            f"{key} needs an object of {kind.__name__} (got {shown(value)}). Use {use}"
        )


def check_call(
    key: str, function: Callable, arguments: Sequence[str], keywords: Sequence[str]
) -> None:
    """Raise ValueError for a function of the user's own that cannot be called in this way.

    arguments, keywords: the names of its positional arguments, and of those it gets by name.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*arguments, "*", *keywords])
        raise ValueError(
            f"{key} needs a function that can be called as function({call}) (got "
            f"{name_of_function(function)}{signature}): {error}. Use def my_function({call}), or "
            "**others in the place of those that it does not read"
        ) from error


def name_of_function(function: Callable) -> str:
    """Return the name of a function, that of the function in a functools.partial, or of an object's
    class."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def check_switches(**switches: object) -> None:
    """Raise ValueError unless each is True or False."""
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{key} needs True or False (got {shown(value)})")


def check_positive(key: str, value: object, needed: str = "") -> None:
    """Raise ValueError unless value is a finite number > 0.

    needed: another beginning of the message.
    """
    if not is_finite(value) or value <= 0:
        raise ValueError(f"{needed or f'{key} needs a finite number > 0'} (got {shown(value)})")


def is_finite(value: object) -> TypeGuard[float]:
    """Return True if value is a finite number; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(key: str, value: object, least: int) -> None:
    """Raise ValueError unless value is a whole number of at least `least`."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{key} needs a whole number >= {least} (got {shown(value)})")


def is_whole(value: object) -> TypeGuard[int]:
    """Return True if value is a whole number; a bool is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def use_of_array(key: str, value: object) -> str:
    """Return what to type in the place of a list or of NumPy's array, to be put behind a sentence;
    empty for a tensor and for what is no array. key: its keyword."""
    is_tensor = str(getattr(value, "dtype", "")).startswith("torch.")
    if is_tensor or not (isinstance(value, list | tuple) or hasattr(value, "__array__")):
        return ""
    return f". Use torch.as_tensor({key}), on the device of the others"


def shown(value: object) -> str:
    """Return a value in words: a tensor by its shape and dtype, anything else shortened."""
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{tuple(shape)}, {short(dtype)}"
    return reprlib.repr(value)


def short(dtype: object) -> str:
    """Return the name of a torch dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")
