"""Measure the training step on 1, 2 and 4 GPUs under each kind of parallelism.

    python benchmarks/parallel_step.py OUTPUT_FOLDER [MAX_TOKENS]

Prints tokens per second, and which share of the time went into communication. Trains a Qwen2-like
model of 0.55 billion parameters with random weights on made-up recorded rollouts, with the
program's own main job, the same step of 64 documents however many GPUs there are, in micro-batches
of MAX_TOKENS (default 65536; a pipeline, which needs several, takes a fourth). The last step runs
under PyTorch's profiler and counts for the shares only. Runs that fit beside each other run at the
same time. Without a GPU it rehearses with a small model on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from made_up_job import overrides, write_inputs

if TYPE_CHECKING:
    from pgtoolkit.batch import Step

ON_GPU = torch.cuda.is_available()
STEPS = 8 if ON_GPU else 3
DOCUMENTS_PER_STEP = 64 if ON_GPU else 8
PROMPT = (256, 512) if ON_GPU else (2, 6)
COMPLETION = (1024, 2048) if ON_GPU else (8, 24)
MAX_TOKENS = 65536 if ON_GPU else 128
MODEL = {
    "hidden_size": 1024 if ON_GPU else 32,
    "intermediate_size": 4096 if ON_GPU else 64,
    "num_hidden_layers": 16 if ON_GPU else 4,
    "num_attention_heads": 16 if ON_GPU else 4,
    "num_key_value_heads": 4,
    "vocab_size": 151936 if ON_GPU else 512,
}
SIZES = {
    "ddp": "data_parallel",
    "fsdp": "data_parallel",
    "tensor": "tensor_parallel",
    "sequence": "tensor_parallel",
    "sequence_data": "sequence_data_parallel",
    "pipeline": "pipeline_parallel",
}
NUMBER = torch.cuda.device_count() if ON_GPU else 4
RUNS = [("single", 1), *((kind, number) for number in (2, 4) if number <= NUMBER for kind in SIZES)]
"""(kind, GPUs)"""


def main() -> int:
    started = time.monotonic()
    folder = Path(sys.argv[1]).resolve()
    max_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else MAX_TOKENS
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder, MODEL, STEPS * DOCUMENTS_PER_STEP, PROMPT, COMPLETION)
    results = []
    waiting = list(RUNS)
    while waiting:
        runs = [waiting.pop(0)]
        while waiting and sum(number for _, number in [*runs, waiting[0]]) <= NUMBER:
            runs.append(waiting.pop(0))
        children = []
        first_gpu = 0
        for kind, number in runs:
            children.append(_start(folder, kind, number, first_gpu, max_tokens))
            first_gpu += number
        for (kind, number), child in zip(runs, children, strict=True):
            results.append(
                {"kind": kind, "gpus": number} | _result(child, folder / f"{kind}-{number}")
            )
            print(_line(results[-1], results), f"[{time.monotonic() - started:.0f} s]", flush=True)
        (folder / "parallel_step.json").write_text(json.dumps(results, indent=1))
    return 0


def _line(run: dict, results: list[dict]) -> str:
    name = f"{run['kind']:14s}{run['gpus']} GPUs "
    if "error" in run:
        return name + run["error"]
    of_one_gpu = next(
        (r["tokens_per_second"] for r in results if r["gpus"] == 1 and "error" not in r),
        float("nan"),
    )
    scaling = run["tokens_per_second"] / of_one_gpu
    shares = ", ".join(f"{part} {100 * share:.0f}%" for part, share in run["shares"].items())
    parts = (
        f"{name}{run['tokens_per_second']:9.0f} trained tokens/s",
        f"{scaling:.2f} x one GPU ({100 * scaling / run['gpus']:.0f}%)",
        f"{run['seconds']:.3f} s, peak {run['peak_gb']:.1f} GB",
        shares,
        f"first loss {run['loss']:.9g}, norm {run['norm']:.7g}",
    )
    return "; ".join(parts)


def _start(
    folder: Path, kind: str, number: int, first_gpu: int, max_tokens: int
) -> subprocess.Popen:
    if kind == "pipeline":
        max_tokens //= 4
    job = overrides(folder, DOCUMENTS_PER_STEP, max_tokens, STEPS)
    job += [
        "model.compile=false",
        f"kernel={'fused_linear' if ON_GPU else 'torch'}",
        f"trainer.device={'cuda' if ON_GPU else 'cpu'}",
        f"parallelism={kind}",
    ]
    if kind in SIZES:
        job.append(f"parallelism.{SIZES[kind]}={number}")
    if kind == "pipeline":
        job.append("metrics=none")
    run_folder = folder / f"{kind}-{number}"
    run_folder.mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "8" if ON_GPU else "1",
    }
    if ON_GPU:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(first_gpu + i) for i in range(number))
    command = [sys.executable]
    if number > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    command += [__file__, "--child", *job]
    with (run_folder / "output").open("w") as output:
        return subprocess.Popen(
            command,
            cwd=run_folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _result(child: subprocess.Popen, run_folder: Path) -> dict:
    try:
        child.wait(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
    output = (run_folder / "output").read_text()
    printed = [line for line in output.splitlines() if line.startswith('{"seconds_of_steps"')]
    if not printed:
        return {"error": f"ended with {child.returncode}\n{output[-1500:]}"}
    result = json.loads(printed[0])
    # The first steps compile kernels, load cuBLAS's and fill the allocator.
    later = slice(2, None) if ON_GPU else slice(1, None)
    seconds = result["seconds_of_steps"][later]
    tokens = result["tokens_of_steps"][later]
    result["seconds"] = statistics.median(seconds)
    result["tokens_per_second"] = statistics.median(
        n / s for n, s in zip(tokens, seconds, strict=True)
    )
    return result


def _run_child(job: list[str]) -> int:
    """Run the main job, timed step by step, until its last step is done."""
    from pgtoolkit.cli import main as pgtk
    from pgtoolkit.training.module import PolicyGradientModule

    training_step = PolicyGradientModule.training_step
    seconds_of_steps = []
    tokens_of_steps = []
    norms = []
    peaks = []
    rank = int(os.environ.get("RANK", "0"))

    def timed(self: PolicyGradientModule, step: Step, index: int) -> dict:
        last = index == STEPS - 1
        profile = (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            if ON_GPU and last
            else None
        )
        if profile is not None:
            profile.start()
        _wait()
        if torch.distributed.is_initialized():
            # Over gloo: the start of a profiler takes its time, other than on other ranks.
            torch.distributed.all_reduce(torch.zeros(()))
        started = time.perf_counter()
        output = training_step(self, step, index)
        _wait()
        peaks.append(output["metrics"].get("peak_memory_gb", 0.0))
        if profile is not None:
            profile.stop()
        if not last:
            seconds_of_steps.append(time.perf_counter() - started)
            tokens_of_steps.append(step.totals.num_tokens)
            norms.append((output["metrics"]["loss"], output["metrics"]["grad_norm"]))
            return output
        if rank == 0:
            result = {"seconds_of_steps": seconds_of_steps, "tokens_of_steps": tokens_of_steps}
            result |= {"shares": _shares(profile), "loss": norms[0][0], "norm": norms[0][1]}
            result["peak_gb"] = max(peaks, default=0.0)
            print("\n" + json.dumps(result), flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        os._exit(0)  # the checkpoint that would follow is not what is measured

    PolicyGradientModule.training_step = timed
    return pgtk(job)


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _shares(profile: torch.profiler.profile | None) -> dict[str, float]:
    """Return the shares of the profiled step in which rank 0's GPU did each kind of work.

    Where several kernels run at a time, the first kind of the result counts.
    """
    if profile is None:
        return {}
    words = {
        "communication": ("nccl",),  # the wait for other ranks included
        "matrix products": ("nvjet", "gemm", "cutlass_80", "xmma"),
        "attention": ("flash", "fmha", "attention", "sdpa"),
        "other kernels": ("",),
    }
    parts = {part: [] for part in words}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            part = next(
                part for part, known in words.items() if any(word in name for word in known)
            )
            parts[part].append((event.time_range.start, event.time_range.end))
    parts["communication"] = parts.pop("communication")  # last: only where nothing else runs
    all_spans = [span for spans in parts.values() for span in spans]
    duration = max(end for _, end in all_spans) - min(start for start, _ in all_spans)
    covered = []
    shares = {}
    for part, spans in parts.items():
        before = _length(covered)
        covered += spans
        shares[part] = (_length(covered) - before) / duration
    return shares | {"no kernel": 1.0 - sum(shares.values())}


def _length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


if __name__ == "__main__":
    raise SystemExit(_run_child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main())
