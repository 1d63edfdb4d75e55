"""Measure attention of packed documents by PyTorch and by FlashAttention 4 on a GPU.

    python benchmarks/attention.py [--calls 12]

Each row is documents x tokens, heads / key-value heads of a width, in bfloat16. Milliseconds are
medians of forward and backward passes, which add up in a fixed order. *error*: the largest relative
distance from float64 among the output and the three gradients, for the last 256 queries of the
first document. *repeats*: whether three further calls give the same bits. The first line says how
long FlashAttention 4 took to compile and to be tried; a second process reads its kernels from disk.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pgtoolkit.model import fixed_order, flash_attention
from pgtoolkit.model.attention import Documents, by_flash_attention, by_torch

CASES = [
    (1, 65536, 16, 8, 128),
    (1, 16384, 16, 8, 128),
    (1, 8192, 16, 8, 128),
    (16, 4096, 28, 4, 128),
    (32, 2048, 28, 4, 128),
    (64, 1024, 28, 4, 128),
    (16, 4096, 14, 2, 64),
    (32, 2048, 14, 2, 64),
    (64, 1024, 14, 2, 64),
    (104, 630, 14, 2, 64),
]
"""Documents, tokens of each, heads, key-value heads, width."""

COMPARED = 256
"""Queries that are compared with float64."""

Way = Callable[[Tensor, Tensor, Tensor, Documents], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=12, help="that are timed")
    calls = parser.parse_args().calls
    fixed_order.switch(True)
    flash_attention.switch(True)
    ways: dict[str, Way] = {"torch": functools.partial(by_torch, scaling=None, window=None)}
    if flash_attention.version() is not None:
        ways["FA4"] = functools.partial(by_flash_attention, scaling=None)
    print(
        f"torch {torch.__version__}, FlashAttention 4 {flash_attention.version()}, "
        f"{torch.cuda.get_device_name()}"
    )
    for heads in dict.fromkeys(case[2:] for case in CASES):
        start = time.perf_counter()
        query, key, _ = _inputs(8, *heads)
        serves = flash_attention.serves(query, key, None)
        print(f"heads {heads}: tried in {time.perf_counter() - start:.1f} s, serves: {serves}")
    print(f"{'documents':>12} {'heads':>10} {'':>6} forward ms  backward ms    error  repeats")
    for case in CASES:
        for name, way in ways.items():
            print(_row(case, name, way, calls), flush=True)


def _inputs(tokens: int, heads: int, key_heads: int, width: int) -> list[Tensor]:
    """Return query, key and value."""
    draw = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(
            tokens, count, width, generator=draw, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]


def _row(case: tuple[int, ...], name: str, way: Way, calls: int) -> str:
    count, length, *heads = case
    documents = Documents.whole([length] * count, count * length, torch.device("cuda"))
    inputs = _inputs(count * length, *heads)
    draw = torch.Generator("cuda").manual_seed(1)
    gradient = torch.randn(inputs[0].shape, generator=draw, device="cuda", dtype=torch.bfloat16)
    forward: list[float] = []
    backward: list[float] = []
    results = []
    for number in range(calls + 2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = way(*inputs, documents)
        marks[1].record()
        gradients = torch.autograd.grad(out, inputs, gradient)
        marks[2].record()
        torch.cuda.synchronize()
        forward.append(marks[0].elapsed_time(marks[1]))
        backward.append(marks[1].elapsed_time(marks[2]))
        if number < 4:
            results.append([out.detach(), *gradients])
    repeats = all(
        torch.equal(a, b) for again in results[1:] for a, b in zip(again, results[0], strict=True)
    )
    del results, out, gradients
    error = _error(inputs, gradient, documents, way)
    key_heads, width = heads[1:]
    return (
        f"{f'{count} x {length}':>12} {f'{heads[0]}/{key_heads} x {width}':>10} {name:>6} "
        f"{statistics.median(forward[2:]):10.3f} {statistics.median(backward[2:]):12.3f} "
        f"{error:8.5f}  {'yes' if repeats else 'NO'}"
    )


def _error(inputs: list[Tensor], gradient: Tensor, documents: Documents, way: Way) -> float:
    """Return the largest relative distance from float64 for the last queries of a document.

    No other query has a gradient.
    """
    length = documents.queries[0]
    first = length - COMPARED
    only_last = torch.zeros_like(gradient)
    only_last[first:length] = gradient[first:length]
    out = way(*inputs, documents)
    by_query, *by_keys = torch.autograd.grad(out, inputs, only_last)
    result = [out.detach()[first:length], by_query[first:length], *(x[:length] for x in by_keys)]
    query = inputs[0][first:length].detach().double().requires_grad_()
    key, value = (x[:length].detach().double().requires_grad_() for x in inputs[1:])
    expected = _exact(query, key, value)
    gradients = torch.autograd.grad(expected, (query, key, value), gradient[first:length].double())
    return max(
        float((a.double() - b).norm() / b.norm())
        for a, b in zip(result, (expected.detach(), *gradients), strict=True)
    )


def _exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of the last queries of a document to its keys."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("qhw,khw->hqk", query, key) / math.sqrt(query.shape[2])
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).triu(
        len(key) - len(query) + 1
    )
    return torch.einsum("hqk,khw->qhw", scores.masked_fill(future, -math.inf).softmax(-1), value)


if __name__ == "__main__":
    main()
