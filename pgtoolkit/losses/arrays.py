"""Makes tensors of the lists and arrays in the place of them that the library takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pgtoolkit.losses.checks import shown


class _Convertible(Protocol):
    """What `torch.as_tensor` takes, such as numpy's arrays."""

    def __array__(self) -> object: ...


Array = Tensor | _Convertible | Sequence
"""A tensor, another array, or a list of numbers or of lists."""


def tensor_of(key: str, values: object) -> Tensor:
    """Return an array as a tensor, a list of floating numbers in float64; raises ValueError for
    what is none. key: its keyword."""
    try:
        value = torch.as_tensor(values)
        if isinstance(values, list | tuple) and value.is_floating_point():
            value = torch.as_tensor(values, dtype=torch.float64)
        return value
    except (TypeError, ValueError, RuntimeError) as error:
        # A model of transformers returns an object that has the tensor.
        fields = [name for name in ("logits", "last_hidden_state") if hasattr(values, name)]
        use = "".join(f". Use {key}=output.{name} of this output" for name in fields[:1])
        raise ValueError(
            f"{key} needs a tensor or an array of numbers (got a {type(values).__name__}){use}"
        ) from error


def of_floats(values: Tensor) -> Tensor:
    """Return numbers that are floats by meaning, whole ones in float64."""
    return values.double() if _is_whole(values) else values


def of_integers(key: str, values: Tensor, is_tensor: bool) -> Tensor:
    """Return whole numbers as int64; raises ValueError for other ones.

    key: the keyword of the values. is_tensor: whether the caller gave a tensor or another array.
    """
    if not _is_whole(values) and values.numel():
        made = key if is_tensor else f"torch.as_tensor({key})"
        raise ValueError(f"{key} needs integers (got {shown(values)}). Use {made}.long()")
    return values.long()


def _is_whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def on_device_of(like: Tensor, key: str, values: object, is_integer: bool) -> object:
    """Return a list or another array as a tensor on the device of `like`, and anything else as it
    is, tensors included.

    key: its keyword. is_integer: whether its numbers are whole by meaning. Other ones are floating,
    see `of_floats`. Raises ValueError for a list or an array that is not one of numbers.
    """
    is_array = isinstance(values, list | tuple) or hasattr(values, "__array__")
    if isinstance(values, Tensor) or not is_array:
        return values
    value = tensor_of(key, values).to(like.device)
    return of_integers(key, value, is_tensor=False) if is_integer else of_floats(value)


def of_bools(mask: Tensor) -> Tensor:
    """Return a mask of 0 and 1 as bool; raises ValueError for other numbers."""
    if mask.dtype == torch.bool:
        return mask
    others = mask[(mask != 0) & (mask != 1)]
    if others.numel():
        raise ValueError(
            f"mask needs 0 and 1, where a token is trained (got {others[0].item():g}). "
            "Use mask=weights > 0 for weights; they belong to the advantages"
        )
    return mask.bool()


def mask_of_tokens(mask: object, like: Tensor) -> Tensor:
    """Return a mask as bools, one for each entry of `like`, on its device; raises ValueError for
    another number of them, and for numbers other than 0 and 1."""
    value = tensor_of("mask", mask)
    if not isinstance(mask, Tensor):
        value = value.to(like.device)
    if value.shape != (len(like),):
        raise ValueError(
            f"mask needs a bool, or 0 or 1, per token, {len(like)} (got {shown(value)})"
        )
    return of_bools(value)
