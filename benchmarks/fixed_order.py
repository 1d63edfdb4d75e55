"""Measure what a fixed order of sums costs on a GPU (`trainer.deterministic`).

    python benchmarks/fixed_order.py

The cases are backward passes of attention and of embeddings. Milliseconds are medians of 12 calls;
*differs*: how many of 20 further calls give other bits than the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pgtoolkit.model import fixed_order
from pgtoolkit.model.attention import Documents, by_document

ATTENTION = [
    (64, 80, 4, 32),
    (256, 128, 14, 64),
    (128, 256, 14, 64),
    (64, 640, 14, 64),
    (16, 2048, 14, 64),
    (8, 4096, 28, 128),
    (1, 32768, 14, 64),
    (1, 32768, 28, 128),
]
"""Documents, tokens of each, heads and their width."""

EMBEDDINGS = [(3000, 14, 128), (5000, 14, 128), (32768, 14, 128), (32768, 151936, 896)]
"""Tokens, rows and width."""


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for case in ATTENTION:
        _row("attention: documents, tokens, heads, width", case, _attention)
    for case in EMBEDDINGS:
        _row("embedding: tokens, rows, width", case, _embedding)


def _row(name: str, case: tuple[int, ...], backward_of: Callable) -> None:
    columns = []
    for on in (False, True):
        fixed_order.switch(on)
        torch.manual_seed(0)
        backward = backward_of(*case)
        kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        milliseconds = _timed(backward)
        different = _different(backward)
        room = (torch.cuda.max_memory_allocated() - kept) / 1e6
        columns.append(f"{milliseconds:.3f} ms, differs {different}/20, {room:.0f} MB")
    print(f"{name} {case}: any order {columns[0]}; fixed {columns[1]}", flush=True)


def _attention(
    documents: int, length: int, heads: int, width: int
) -> Callable[[], tuple[Tensor, ...]]:
    shape = (documents * length, heads, width)
    inputs = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    packed = Documents.whole([length] * documents, shape[0], torch.device("cuda"))
    out = by_document(*inputs, packed, None, None)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _embedding(tokens: int, rows: int, width: int) -> Callable[[], tuple[Tensor, ...]]:
    embedding = nn.Embedding(rows, width, device="cuda")
    fixed_order.switch_on(embedding)
    out = embedding(torch.randint(rows, (tokens,), device="cuda"))
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, embedding.weight, gradient, retain_graph=True)


def _timed(backward: Callable[[], tuple[Tensor, ...]]) -> float:
    times = []
    for _ in range(14):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def _different(backward: Callable[[], tuple[Tensor, ...]]) -> int:
    first = backward()
    return sum(
        any(not torch.equal(a, b) for a, b in zip(backward(), first, strict=True))
        for _ in range(20)
    )


if __name__ == "__main__":
    main()
