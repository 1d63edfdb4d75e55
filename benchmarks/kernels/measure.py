"""Times and memory of a call, and the ceilings of this machine."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

_HEAD_START = 10_000_000
"""Clock cycles (5 ms) that the GPU idles before each measurement, in which the CPU queues the call:
what is measured is the GPU's time, as in a training step, whose queue is never empty. A
synchronisation inside the call counts."""


def setup(
    name: str, purpose: str
) -> tuple[int, str, tuple[int, int, int], tuple[int, int, int], str]:
    """Return repetitions, device, the shape to time, the shape for errors, and the machine's name.

    A shape is (tokens, width, vocabulary). name, purpose: of `python -m benchmarks.NAME` and its
    docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=purpose.partition("\n")[0]
    )
    parser.add_argument(
        "--repetitions", type=int, default=9, help="calls of which the median is taken (9)"
    )
    repetitions = parser.parse_args().repetitions
    if not torch.cuda.is_available():
        return (
            repetitions,
            "cpu",
            (256, 64, 4096),
            (256, 64, 4096),
            f"CPU, a small version; torch {torch.__version__}",
        )
    machine = f"{torch.cuda.get_device_name()}; torch {torch.__version__}"
    return repetitions, "cuda", (8192, 4096, 151936), (512, 1024, 151936), machine


def seconds(calls: dict[str, Callable], repetitions: int, device: str) -> dict[str, float]:
    """Return the median seconds of each call.

    The calls take turns, so that all see the same clocks and temperature. Each turn is in another
    order: under a limit of power a call is faster after one that drew less.
    """
    for call in calls.values():
        call()
        call()
    marks = {name: [] for name in calls}
    order = list(calls)
    draw = random.Random(0)
    for _ in range(repetitions):
        draw.shuffle(order)
        for name in order:
            marks[name].append(_timed(calls[name], device))
    if device == "cuda":
        torch.cuda.synchronize()
        return {
            name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3
            for name, pairs in marks.items()
        }
    return {name: statistics.median(times) for name, times in marks.items()}


def _timed(call: Callable, device: str):
    """Return the seconds of a call, or on a GPU the events before and after it."""
    if device != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START)
    start.record()
    call()
    end.record()
    return start, end


def peak_bytes(call: Callable, device: str) -> int | None:
    """Return how far the memory in use rises during the call; None without a GPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(like: torch.Tensor, device: str, repetitions: int = 10) -> float:
    """Return the bytes a second, read and written, of a copy as large as `like`."""
    target = torch.empty_like(like)
    duration = seconds({"copy": lambda: target.copy_(like)}, repetitions, device)["copy"]
    return 2 * like.nbytes / duration
