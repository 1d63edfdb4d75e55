"""Measure a token while completions are sampled: its kernels one by one, and all of it.

    python benchmarks/decoding.py [--rows 64 256] [--places 256 640 4096] [--tune] [--compile]
        [--shared 112] [--shape 1.5b]

Prints microseconds, medians of replays of a CUDA graph, for a model of Qwen2.5's shape with random
weights in bfloat16, and for the attention of a small model in float32. `limit` is what it takes to
read weights, cache or logits once at 4.3 TB/s, an H200's rate. Where 8 rows share their prompt, its
keys are read once for all of them, which takes less. With `--shape tiny` it can be tried on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from rollouts_job import BODIES, GROUP
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from pgtoolkit.kernels.products import linear
from pgtoolkit.model import decoding
from pgtoolkit.model.compiled import switch_on
from pgtoolkit.model.merged import MergedBody
from pgtoolkit.model.policy import Policy
from pgtoolkit.sampling.draw import draw

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BYTES_A_MICROSECOND = 4.3e6
SMALL_BODY = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
"""A model such as sweeps of many small runs train, in float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[64, 256], help="completions at a time, by 8"
    )
    parser.add_argument(
        "--places", nargs="+", type=int, default=[256, 640, 4096], help="tokens of a row so far"
    )
    parser.add_argument(
        "--tune", action="store_true", help="other sizes of the attention kernel, too"
    )
    parser.add_argument(
        "--shape", default="0.5b", choices=BODIES, help="of the model, from Qwen2.5's"
    )
    parser.add_argument(
        "--compile", action="store_true", help="then the tokens once more by model.compile=true"
    )
    parser.add_argument(
        "--shared",
        type=int,
        help="tokens of the prompt that 8 rows share (all but the last ones); the others are each "
        "row's own, as in a long completion",
    )
    arguments = parser.parse_args()
    body = BODIES[arguments.shape]
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name() if GPU else 'CPU'}, torch {torch.__version__}")
    print(f"{'what':42} {'rows':>5} {'places':>6} {'us':>9} {'limit':>7}", flush=True)
    for rows in arguments.rows:
        _draws(rows, body["vocab_size"])
        for places in arguments.places:
            _attention(rows, places, body, torch.bfloat16, arguments.tune and GPU)
    _attention(1024, 64, SMALL_BODY, torch.float32, False)
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(Qwen2Config(**body))
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    cases = list(itertools.product(arguments.rows, arguments.places))
    shared = arguments.shared
    suffix = ""
    kernels_of = {case: _token(model, None, *case, suffix, shared) for case in cases}
    if arguments.compile:
        suffix = ", compiled"
        switch_on(model)
        model = _merged(model)
        merged_body = MergedBody(model)
        kernels_of = {case: _token(model, merged_body, *case, suffix, shared) for case in cases}
    most_rows = arguments.rows[-1]
    for places in arguments.places:
        kernels = kernels_of[most_rows, places]
        print(
            f"\nkernels of a token{suffix}, {most_rows} rows, {places} places: us, how many, and "
            "which"
        )
        longest = sorted(kernels.items(), key=lambda kernel: -kernel[1][0])[:16]
        for name, (microseconds, count) in longest:
            print(f"{microseconds:9.1f} {count:6.1f}  {name[:80]}")


def _print_row(
    name: str, rows: int, places: int | str, microseconds: float, num_bytes: float
) -> None:
    limit = num_bytes / BYTES_A_MICROSECOND
    print(f"{name:42} {rows:5} {places:>6} {microseconds:9.1f} {limit:7.1f}", flush=True)


def _microseconds(step: Callable[[], object], times: int = 20) -> float:
    """Return the time of one step, the median of five replays of a graph of `times` steps.

    A CPU has no graphs and replays a single step.
    """
    step()
    replay = step
    per_replay = 1
    if GPU:
        graph = torch.cuda.CUDAGraph()
        per_replay = times
        with torch.cuda.graph(graph):
            for _ in range(times):
                step()
        replay = graph.replay
    measured = []
    for _ in range(5):
        _wait()
        start = time.perf_counter()
        replay()
        _wait()
        measured.append(1e6 * (time.perf_counter() - start) / per_replay)
    return statistics.median(measured)


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def _drawn(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not GPU:
        return draw(logits, uniform)
    from pgtoolkit.kernels.triton_draw import draw_tokens

    return draw_tokens(logits, uniform, 1.0)


def _draws(rows: int, vocabulary: int) -> None:
    logits = 3 * torch.randn(rows, vocabulary, device=DEVICE)
    uniform = torch.rand(rows, device=DEVICE).double()
    for name, function in (("draw, the kernel", _drawn), ("draw, PyTorch", draw)):
        microseconds = _microseconds(lambda f=function: f(logits, uniform))
        _print_row(name, rows, "", microseconds, 4 * logits.numel())


def _attention(rows: int, places: int, body: dict, dtype: torch.dtype, tune: bool) -> None:
    """Print the attention of a token to `places` of each row, by our kernel and by PyTorch."""
    heads = body["num_attention_heads"]
    groups = body["num_key_value_heads"]
    width = body["hidden_size"] // heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    query = random(rows, heads, 1, width)
    key = random(rows, groups, 1, width)
    value = random(rows, groups, 1, width)
    keys = random(rows, groups, places, width)
    values = random(rows, groups, places, width)
    positions = torch.full((rows,), places - 1, device=DEVICE)
    mask = torch.zeros(rows, 1, 1, places, device=DEVICE, dtype=dtype)
    grouped = query.view(rows, groups, -1, width)

    def by_pytorch() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, mask)

    def ours() -> torch.Tensor:
        if not GPU:
            return decoding._attend(query, key, value, keys, values, positions, width**-0.5, None)
        from pgtoolkit.kernels.triton_attention import attend

        return attend(query, key, value, keys, values, positions, width**-0.5, None)

    for author, function in (("kernel", ours), ("PyTorch", by_pytorch)):
        name = f"attention of a layer, {author}, {str(dtype)[6:]}"
        _print_row(name, rows, places, _microseconds(function), 2 * keys.nbytes)
    if tune:
        _tune(ours, rows, places, 2 * keys.nbytes)


def _tune(attend: Callable[[], object], rows: int, places: int, num_bytes: int) -> None:
    """Print the attention kernel's time at other sizes than its own."""
    from pgtoolkit.kernels import triton_attention as kernel

    before = (kernel._BLOCK_BYTES, kernel._WARPS, kernel._PROGRAMS)
    for programs, size, warps in itertools.product((1, 512, 1024), (4096, 8192, 16384), (2, 4)):
        kernel._BLOCK_BYTES = size
        kernel._WARPS = warps
        kernel._PROGRAMS = programs
        name = f"  {programs} programs, {size} bytes, {warps} warps"
        _print_row(name, rows, places, _microseconds(attend), num_bytes)
    kernel._BLOCK_BYTES, kernel._WARPS, kernel._PROGRAMS = before


@torch.no_grad()
def _token(
    model: Qwen2ForCausalLM,
    body: MergedBody | None,
    rows: int,
    places: int,
    suffix: str,
    shared: int | None,
) -> dict[str, tuple[float, float]]:
    """Print how long a token takes when its rows have `places` tokens.

    shared: tokens of the prompt that rows share; None for all of it.
    Returns the microseconds and the count of each of its kernels, by name.
    """
    tokens = min(64, places // 2)
    prompt_shape = (rows // GROUP, places - tokens)
    prompts = torch.randint(9, model.config.vocab_size, prompt_shape).tolist() * GROUP
    uniform = torch.rand(rows, tokens, device=DEVICE).double()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, model.lm_head.weight, None, True)

    with decoding.decoding(model):
        decoder = decoding.Decoding(
            model,
            logits,
            1.0 if GPU else draw,
            uniform,
            lambda: None,
            [],
            body=body,
            head=_head(model),
        )
        decoder._start(prompts, tokens)
        _wait()
        start = time.perf_counter()
        decoder._start(prompts, tokens)
        _wait()
        first = 1e6 * (time.perf_counter() - start)
        if shared is not None:
            decoder._cache.prompts[1].clamp_(max=shared)
        decoder._step()
        step = decoder._step
        if GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decoder._step()
            step = graph.replay
        step()
        _wait()
        num_timed = tokens - 9
        start = time.perf_counter()
        for _ in range(num_timed):
            step()
        _wait()
        per_token = 1e6 * (time.perf_counter() - start) / num_timed
        kernels = _kernels(step)
    per_place = 2 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads
    per_place *= model.config.hidden_size // model.config.num_attention_heads
    weights = (*model.model.layers.parameters(), *model.lm_head.parameters())
    # The weights, the logits written and read in float32 where there are any, and the cache.
    num_bytes = sum(weight.nbytes for weight in weights)
    num_bytes += per_place * rows * places
    if _head(model) is None:
        num_bytes += 2 * 4 * rows * model.config.vocab_size
    _print_row(f"prompts and first token{suffix}", rows, places - tokens, first, 0)
    _print_row(f"a token{suffix}", rows, places, per_token, num_bytes)
    if GPU:
        microseconds = sum(duration for duration, _ in kernels.values())
        count = sum(count for _, count in kernels.values())
        _print_row(f"  its {count:.0f} kernels", rows, places, microseconds, 0)
    return kernels


def _head(model: Qwen2ForCausalLM) -> torch.Tensor | None:
    """Return the head's weight where tokens are drawn from hidden states, as a policy does."""
    if not GPU:
        return None
    from pgtoolkit.kernels.triton_draw import can_make_logits

    return model.lm_head.weight if can_make_logits(model.lm_head.weight) else None


def _merged(model: Qwen2ForCausalLM) -> nn.Module:
    """Return a copy as a compiled policy samples from it: products with a common input are one."""
    policy = Policy(model, None, torch.bfloat16, compiled=True)
    copied = policy.copied(policy.compute_dtype)
    copied.load(policy.weights())
    return copied.model.eval()


def _kernels(step: Callable[[], object], times: int = 4) -> dict[str, tuple[float, float]]:
    """Return the microseconds and the count of each kernel of a step, by name."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * GPU]) as profile:
        for _ in range(times):
            step()
        _wait()
    microseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profile.events():
        if GPU and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        duration = event.time_range.elapsed_us() if GPU else event.self_cpu_time_total
        microseconds[event.name] += duration / times
        counts[event.name] += 1 / times
    return {name: (microseconds[name], counts[name]) for name in counts}


if __name__ == "__main__":
    main()
