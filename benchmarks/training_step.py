"""The whole training step on a GPU: tokens/s, peak memory and where the time goes, by kernel.

    python benchmarks/training_step.py OUTPUT_FOLDER

Trains a model of about half a billion parameters, random weights, on made-up recorded rollouts with
the program's own
main job, once for each way of computing the head: fused, and with materialised logits by Triton and
    by PyTorch, under
PyTorch's profiler of GPU activity.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from made_up_job import overrides, write_inputs

STEPS, DOCUMENTS_PER_STEP, MAX_TOKENS = 6, 32, 16384
MODEL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
KINDS = {
    "fused_linear": "fused head",
    "triton": "all logits, Triton",
    "torch": "all logits, PyTorch",
}
# What a GPU kernel's name gives away, looked for in this order.
PARTS = {
    "loss kernels": (
        "one_pass_kernel",
        "forward_kernel",
        "backward_kernel",
        "scale_rows",
        "scale_kernel",
    ),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix products": ("nvjet", "gemm", "cutlass", "xmma"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
}


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder, MODEL, STEPS * DOCUMENTS_PER_STEP, (256, 512), (1024, 2048))
    results = []
    for kernel, name in KINDS.items():
        run = {"name": name, "kernel": kernel} | _child(folder, kernel)
        results.append(run)
        print(_line(run), flush=True)
    (folder / "training_step.json").write_text(json.dumps(results, indent=1))
    return 0


def _line(run: dict) -> str:
    busy = sum(run["parts"].values())
    shares = ", ".join(
        f"{part} {100 * seconds / busy:.0f}%" for part, seconds in run["parts"].items()
    )
    longest = ", ".join(f"{name[:60]} {seconds:.2f} s" for name, seconds in run["longest_other"])
    shares += f"\n{'':24s}longest of the others: {longest}"
    return (
        f"{run['name']:22s}{run['tokens_per_second']:9.0f} trained tokens/s  peak "
        f"{run['peak_gb']:.1f} GB  {shares}"
    )


def _child(folder: Path, kernel: str) -> dict:
    job = overrides(folder, DOCUMENTS_PER_STEP, MAX_TOKENS, STEPS)
    job += [f"kernel={kernel}", "trainer.device=cuda"]
    where = folder / kernel
    where.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, "--child", *job]
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{kernel} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    result = json.loads(done.stdout.splitlines()[-1])
    steps = [
        json.loads(line)
        for file in where.rglob("metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    # The first steps compile kernels, load cuBLAS's and fill the allocator.
    result["steps"] = [step["tokens_per_second"] for step in steps]
    result["peak_gb"] = max(step["peak_memory_gb"] for step in steps)
    result["tokens_per_second"] = statistics.median(result["steps"][len(steps) // 2 :])
    return result


def _run_child(job: list[str]) -> int:
    import torch

    from pgtoolkit.cli import main as pgtk

    parts, others = {}, []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        status = pgtk(job)
    for event in profile.key_averages():
        name, seconds = event.key, event.self_device_time_total / 1e6
        if "DtoH" in name:  # the checkpoint at the end
            continue
        part = next(
            (p for p, words in PARTS.items() if any(w in name.lower() for w in words)), "other"
        )
        parts[part] = parts.get(part, 0.0) + seconds
        if part == "other":
            others.append((name, seconds))
    longest = sorted(others, key=lambda item: -item[1])[:6]
    print("\n" + json.dumps({"parts": parts, "longest_other": longest}))
    return status


if __name__ == "__main__":
    raise SystemExit(_run_child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main())
