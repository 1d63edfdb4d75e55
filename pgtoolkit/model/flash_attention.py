"""FlashAttention 4, the kernels of another package: on long documents they are faster than
PyTorch's.

A process takes them where the package is installed, on a GPU for which it has kernels that add up
in a fixed order, and for heads with which they have come near float64 and have repeated their
bits. Which documents they compute depends on lengths alone. So the numbers of a document depend
neither on time nor on the documents beside it.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pgtoolkit.errors import first_line
from pgtoolkit.model.misfits import FLASH_ATTENTION, beyond_flash_attention, flash_attention_version
from pgtoolkit.model.plain_attention import one_document, repeated

log = logging.getLogger("pgtoolkit")

LONG = 1024
"""Keys of a document from which on these kernels compute it. It is the shortest length at which
both of their passes were measured as faster than PyTorch's (docs/performance.md). At 630 the
backward pass is slower."""

_QUERIES = (1100, 300)
_KEYS = (1100, 700)
"""By document: the numbers of queries and keys that are compared with float64. The second document
has keys before its first query."""

_REPEATED = (8192, 5000)
"""Tokens of the documents that are computed repeatedly. Two calls could differ where many blocks of
keys add to the same gradients."""

_REPEATS = 3
"""Further calls."""

_version: str | None = None
"""The version of the package whose kernels this process takes; None: it takes PyTorch's alone."""


def switch(on: bool) -> None:
    """Let this process take the kernels from now on, where it can, or PyTorch's alone."""
    global _version
    _version = flash_attention_version() if on and torch.cuda.is_available() else None
    if _version is not None:
        capability = torch.cuda.get_device_capability()
        if beyond_flash_attention(capability, None, False) is not None:
            _version = None


def version() -> str | None:
    """Return the version of the package whose kernels this process takes, for `go_on` after a
    resume; None where it takes PyTorch's alone."""
    return _version


def go_on(saved: str | None) -> None:
    """Go on with the attention that a run has had so far, and say so where that is not possible.

    saved: the result of `version` in the process that wrote its checkpoint.
    """
    global _version
    if saved == _version:
        return
    if saved is None:
        _version = None
        log.info(
            f"{FLASH_ATTENTION} is installed, but this run goes on with PyTorch's attention, with "
            "which it has begun."
        )
        return
    if _version is None:
        other = "PyTorch's, since the package is not installed or not for this device"
    else:
        other = f"that of {_version}"
    log.warning(
        f"note: so far this run had the attention of {FLASH_ATTENTION} {saved}, and goes on with "
        f"{other}. Numbers of documents of {LONG} tokens or more are rounded in another way from "
        f"here on. Use pip install {FLASH_ATTENTION}=={saved}, on a GPU such as it had, to go on "
        "as before."
    )


def serves(query: Tensor, key: Tensor, window: int | None) -> bool:
    """Return whether the kernels compute attention of these heads in this process.

    query: (queries, heads, width). key: (keys, key-value heads, width).
    window: as in `attention.by_document`.
    The first call for each kind of heads compiles kernels, which takes some seconds, and tries
    them.
    """
    if _version is None:
        return False
    _, heads, width = query.shape
    return _problem(query.device, query.dtype, width, heads // key.shape[1], window is None) is None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    scaling: float | None,
) -> Tensor:
    """Return the output of causal attention within documents, (queries, heads, width), of which the
    backward pass adds up in the same order each time.

    query: (queries, heads, width). key, value: (keys, key-value heads, width).
    query_ends, key_ends: running sums from 0 over documents, (documents + 1,) int32.
    """
    out, _ = _kernels()(
        query,
        key,
        value,
        cu_seqlens_q=query_ends,
        cu_seqlens_k=key_ends,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scaling,
        causal=True,
        deterministic=True,
    )
    return out


@functools.cache
def _kernels() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the package's function, whose compiled kernels are kept in a folder of the user.

    By default the package keeps them in /tmp, where others may have put something in their place,
    and only if it is told to.
    """
    try:
        folder = Path.home() / ".cache" / "pgtoolkit" / "flash_attention"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no folder: they are compiled anew in each process
        pass
    else:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    from flash_attn.cute import (  # pyright: ignore[reportMissingImports]  (an extra)
        flash_attn_varlen_func,
    )

    return flash_attn_varlen_func


@functools.cache
def _problem(
    device: torch.device, dtype: torch.dtype, width: int, repeats: int, sees_all: bool
) -> str | None:
    """Return why the kernels do not serve for such heads, and log it; None where they do.

    repeats: heads of queries for each head of keys. sees_all: whether there is no window.
    """
    capability = torch.cuda.get_device_capability(device)
    problem = beyond_flash_attention(capability, width, not sees_all)
    if problem is None:
        try:
            with (
                warnings.catch_warnings(action="ignore"),  # the compiler's, of the package's code
                torch.inference_mode(False),
                torch.autocast(device.type, enabled=False),
                # The first use may be in a checkpointed layer, whose hooks count what is saved in
                # its forward pass. Of several hooks the last alone are called.
                saved_tensors_hooks(lambda x: x, lambda x: x),
            ):
                problem = _trial(device, dtype, width, repeats)
        except Exception as error:  # a compiler may raise anything, and PyTorch's attention serves
            problem = first_line(error)
    if problem is None:
        log.info(
            f"attention of documents of {LONG} tokens or more is that of {FLASH_ATTENTION} "
            f"{_version}"
        )
    else:
        log.warning(
            f"note: PyTorch's attention takes the place of {FLASH_ATTENTION}'s for heads of "
            f"{width}: {problem}."
        )
    return problem


def _trial(device: torch.device, dtype: torch.dtype, width: int, repeats: int) -> str | None:
    """Return what is wrong with the numbers of the kernels; None where nothing is."""
    draw = torch.Generator(device).manual_seed(0)

    def inputs(queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Tensor]:
        """Return query, key, value and the gradient by the output, for two key-value heads."""
        shapes = [(sum(queries), 2 * repeats, width), (sum(keys), 2, width)]
        return [
            torch.randn(shapes[is_key], generator=draw, device=device, dtype=dtype)
            for is_key in (False, True, True, False)
        ]

    short = inputs(_QUERIES, _KEYS)
    exact = _forward_and_backward([x.double() for x in short], _QUERIES, _KEYS, _exact)
    parts = ("output", "gradient by queries", "gradient by keys", "gradient by values")
    # Six times what rounding the softmax and its gradient to either type gives.
    tolerance = 2 * torch.finfo(dtype).eps
    of_kernels = _forward_and_backward(short, _QUERIES, _KEYS, _by_kernels)
    for part, x, right in zip(parts, of_kernels, exact, strict=True):
        error = float((x.double() - right).norm() / right.norm())
        if not error < tolerance:
            return f"its {part} is {error:.2g} off float64's, more than {tolerance:.2g}"
    long = inputs(_REPEATED, _REPEATED)
    first = _forward_and_backward(long, _REPEATED, _REPEATED, _by_kernels)
    for _ in range(_REPEATS):
        again = _forward_and_backward(long, _REPEATED, _REPEATED, _by_kernels)
        if not all(torch.equal(a, b) for a, b in zip(again, first, strict=True)):
            return "two calls do not give the same bits"
    with torch.no_grad():
        if not torch.equal(_by_kernels(long[:3], _REPEATED, _REPEATED), first[0]):
            return "a call without gradients does not give the same bits"
    return None


def _forward_and_backward(
    inputs: list[Tensor],
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    compute: Callable[[list[Tensor], tuple[int, ...], tuple[int, ...]], Tensor],
) -> list[Tensor]:
    """Return the output, and the gradients by query, key and value."""
    with torch.enable_grad():
        *leaves, gradient = inputs
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = compute(leaves, queries, keys)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def _by_kernels(inputs: list[Tensor], queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    query, key, value = inputs
    query_ends, key_ends = (
        torch.tensor([0, *counts], device=query.device).cumsum(0, dtype=torch.int32)
        for counts in (queries, keys)
    )
    return attend(query, key, value, query_ends, key_ends, max(queries), max(keys), None)


def _exact(inputs: list[Tensor], queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    query, key, value = inputs
    parts = zip(
        query.split(queries),
        repeated(key, query).split(keys),
        repeated(value, query).split(keys),
        strict=True,
    )
    return torch.cat([one_document(*of_document, None, None) for of_document in parts])
