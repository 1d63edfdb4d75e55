"""Microseconds of a token while completions are sampled: of its kernels, of the whole, and what the
whole consists of.

    python benchmarks/decoding.py [--rows 64 256] [--places 256 640 4096] [--tune] [--compile]
    [--shape 1.5b]

A model of Qwen2.5's shape with random weights in bfloat16; the attention of a small one in float32,
too. Medians of replays of a CUDA graph. `limit` is what reading weights, cache or logits once takes
at 4.3 TB/s, an H200's rate. With `--shape tiny` it can be tried on a CPU.
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
"""Of a model whose sweeps are many small runs in float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
    cases, parts = list(itertools.product(arguments.rows, arguments.places)), {}
    for how in ["", ", compiled"] if arguments.compile else [""]:
        if how:
            switch_on(model)
            model = _merged(model)
        parts |= {case: _whole(model, *case, how) for case in cases}
    for (rows, places), kernels in list(parts.items())[-len(arguments.places) :]:
        print(f"\nkernels of a token{how}, {rows} rows, {places} places: us, how many, and which")
        for name, (microseconds, count) in sorted(
            kernels.items(), key=lambda kernel: -kernel[1][0]
        )[:16]:
            print(f"{microseconds:9.1f} {count:6.1f}  {name[:80]}")


def _say(what: str, rows: int, places: int | str, microseconds: float, num_bytes: float) -> None:
    limit = num_bytes / BYTES_A_MICROSECOND
    print(f"{what:42} {rows:5} {places:>6} {microseconds:9.1f} {limit:7.1f}", flush=True)


def _microseconds(step: Callable[[], object], times: int = 20) -> float:
    """Of one step, of several in a graph: the median of five replays."""
    step()
    replay, per_replay = step, 1
    if GPU:
        graph, per_replay = torch.cuda.CUDAGraph(), times
        with torch.cuda.graph(graph):
            for _ in range(times):
                step()
        replay = graph.replay
    found = []
    for _ in range(5):
        _wait()
        start = time.perf_counter()
        replay()
        _wait()
        found.append(1e6 * (time.perf_counter() - start) / per_replay)
    return statistics.median(found)


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def _drawn(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not GPU:
        return draw(logits, uniform)
    from pgtoolkit.kernels.triton_draw import draw_tokens

    return draw_tokens(logits, uniform, 1.0)


def _draws(rows: int, vocabulary: int) -> None:
    logits, uniform = (
        3 * torch.randn(rows, vocabulary, device=DEVICE),
        torch.rand(rows, device=DEVICE).double(),
    )
    for what, function in (("draw, the kernel", _drawn), ("draw, PyTorch", draw)):
        _say(
            what, rows, "", _microseconds(lambda f=function: f(logits, uniform)), 4 * logits.numel()
        )


def _attention(rows: int, places: int, body: dict, dtype: torch.dtype, tune: bool) -> None:
    """Each row's last place is the same: the limit is of that much, as where all are equally
    long."""
    heads, groups = body["num_attention_heads"], body["num_key_value_heads"]
    width = body["hidden_size"] // heads
    made = {"device": DEVICE, "dtype": dtype}
    query, key, value = (torch.randn(rows, n, 1, width, **made) for n in (heads, groups, groups))
    keys, values = (torch.randn(rows, groups, places, width, **made) for _ in range(2))
    positions = torch.full((rows,), places - 1, device=DEVICE)
    mask = torch.zeros(rows, 1, 1, places, **made)
    grouped = query.view(rows, groups, -1, width)

    def pytorchs():
        return torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, mask)

    def ours():
        if not GPU:
            return decoding._attend(query, key, value, keys, values, positions, width**-0.5, None)
        from pgtoolkit.kernels.triton_attention import attend

        return attend(query, key, value, keys, values, positions, width**-0.5, None)

    for what, function in (("kernel", ours), ("PyTorch", pytorchs)):
        what = f"attention of a layer, {what}, {str(dtype)[6:]}"
        _say(what, rows, places, _microseconds(function), 2 * keys.nbytes)
    if tune:
        from pgtoolkit.kernels import triton_attention as own

        before = own._BLOCK_BYTES, own._WARPS, own._PROGRAMS
        for programs, size, warps in itertools.product((1, 512, 1024), (4096, 8192, 16384), (2, 4)):
            own._BLOCK_BYTES, own._WARPS, own._PROGRAMS = size, warps, programs
            what = f"  {programs} programs, {size} bytes, {warps} warps"
            _say(what, rows, places, _microseconds(ours), 2 * keys.nbytes)
        own._BLOCK_BYTES, own._WARPS, own._PROGRAMS = before


@torch.no_grad()
def _whole(
    model: Qwen2ForCausalLM, rows: int, places: int, how: str
) -> dict[str, tuple[float, float]]:
    """Says how long a token takes at some `places`; gives its kernels, each with microseconds and
    count."""
    tokens = min(64, places // 2)
    prompts = (
        torch.randint(9, model.config.vocab_size, (rows // GROUP, places - tokens)).tolist() * GROUP
    )
    uniform = torch.rand(rows, tokens, device=DEVICE).double()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, model.lm_head.weight, None, True)

    body = MergedBody(model) if how else None
    with decoding.decoding(model):
        decoder = decoding.Decoding(
            model, logits, 1.0 if GPU else draw, uniform, lambda: None, [], body=body
        )
        decoder._begin(prompts, tokens)
        _wait()
        start = time.perf_counter()
        decoder._begin(prompts, tokens)
        _wait()
        first = 1e6 * (time.perf_counter() - start)
        decoder._step()
        step = decoder._step
        if GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decoder._step()
            step = graph.replay
        step()
        _wait()
        start, several = time.perf_counter(), tokens - 9
        for _ in range(several):
            step()
        _wait()
        taken = 1e6 * (time.perf_counter() - start) / several
        parts = _kernels(step)
    per_place = 2 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads
    per_place *= model.config.hidden_size // model.config.num_attention_heads
    weights = (*model.model.layers.parameters(), *model.lm_head.parameters())
    whole = sum(weight.nbytes for weight in weights) + 2 * 4 * rows * model.config.vocab_size
    _say(f"prompts and first token{how}", rows, places - tokens, first, 0)
    _say(f"a token{how}", rows, places, taken, whole + per_place * rows * places)
    if GPU:
        kernels = sum(microseconds for microseconds, _ in parts.values())
        _say(
            f"  its {sum(count for _, count in parts.values()):.0f} kernels",
            rows,
            places,
            kernels,
            0,
        )
    return parts


def _merged(model: Qwen2ForCausalLM) -> nn.Module:
    """A copy as it samples from a compiled policy, whose products with a common input are one."""
    policy = Policy(model, None, torch.bfloat16, compiled=True)
    copied = policy.copied(policy.compute_dtype)
    copied.load(policy.weights())
    return copied.model.eval()


def _kernels(step: Callable[[], object], times: int = 4) -> dict[str, tuple[float, float]]:
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * GPU]) as profile:
        for _ in range(times):
            step()
        _wait()
    microseconds, counts = Counter(), Counter()
    for event in profile.events():
        if GPU and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        microseconds[event.name] += (
            event.time_range.elapsed_us() if GPU else event.self_cpu_time_total
        ) / times
        counts[event.name] += 1 / times
    return {name: (microseconds[name], counts[name]) for name in counts}


if __name__ == "__main__":
    main()
