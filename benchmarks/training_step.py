"""Measure the whole training step on a GPU: tokens per second, peak memory and the busy kernels.

    python benchmarks/training_step.py FOLDER
    python benchmarks/training_step.py FOLDER --prime-rl [--rows lora16-16384 lora16-65536]
        [--steps 4]

Trains a model with random weights on made-up recorded rollouts by the program's own main job.
Without options the model has half a billion parameters and each way of computing the head takes a
turn (fused; materialised logits by Triton and by PyTorch), under PyTorch's profiler of GPU
activity. With `--prime-rl` it has the shape of Qwen3-0.6B, the steps are those of prime-rl's
published benchmark of its trainer, and its numbers are printed beside ours; `--rows` chooses some
of its rows. `--tiny` makes either small enough for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from made_up_job import overrides, write_inputs

STEPS = 6
DOCUMENTS_PER_STEP = 32
MAX_TOKENS = 16384
MODEL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 65536,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
}
KINDS = {
    "fused_linear": "fused head",
    "triton": "all logits, Triton",
    "torch": "all logits, PyTorch",
}
# Words that a GPU kernel's name contains, looked for in this order.
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
PEAK_OPERATIONS = 989e12
"""Dense bfloat16 operations per second of an H100 or H200, as prime-rl counts them."""

MICRO_BATCHES = 2
"""Micro-batches of a step in prime-rl's benchmark, each of them one document."""

PRIME_RL_STEPS = 4
"""Steps of a run by default, as many as in prime-rl's benchmark."""


@dataclass(frozen=True)
class Published:
    """A row of prime-rl's table for Qwen3-0.6B on one H100 (80 GB), RL, of 2026-02-01.

    It is benchmarks/results/BENCHMARKS.md of github.com/PrimeIntellect-ai/prime-rl: FlashAttention
    3, torch.compile, recomputed activations, float32 weights. Its step time is that of one
    micro-batch, its memory is what PyTorch reserved.
    """

    length: int
    lora_rank: int | None
    tokens_per_second: int
    seconds: float
    mfu: float
    peak_gib: float

    @property
    def name(self) -> str:
        weights = f"lora{self.lora_rank}" if self.lora_rank else "all"
        return f"{weights}-{self.length}"


PUBLISHED = (
    Published(16384, None, 11900, 1.38, 11.1, 12.5),
    Published(65536, None, 10150, 6.46, 26.8, 19.6),
    Published(16384, 16, 13340, 1.23, 10.9, 5.1),
    Published(65536, 16, 9970, 6.58, 25.2, 11.5),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--prime-rl", action="store_true", help="the steps of prime-rl's published benchmark"
    )
    names = [published.name for published in PUBLISHED]
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, help="of prime-rl's benchmark"
    )
    parser.add_argument(
        "--steps", type=int, default=PRIME_RL_STEPS, help="of each of prime-rl's rows, at least 2"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and short documents, for a CPU"
    )
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2 (got {arguments.steps}): the first warms up")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.prime_rl:
        rows = [published for published in PUBLISHED if published.name in arguments.rows]
        results = _prime_rl(folder, arguments.tiny, rows, arguments.steps)
    else:
        results = _heads(folder, arguments.tiny)
    (folder / "training_step.json").write_text(json.dumps(results, indent=1))
    return 0


def _heads(folder: Path, tiny: bool) -> list[dict]:
    """Measure each way of computing the head."""
    model = MODEL | TINY if tiny else MODEL
    prompt = (8, 16) if tiny else (256, 512)
    completion = (8, 16) if tiny else (1024, 2048)
    write_inputs(folder, model, STEPS * DOCUMENTS_PER_STEP, prompt, completion)
    results = []
    for kernel, name in KINDS.items():
        if tiny and kernel == "triton":
            continue  # its kernels need a GPU
        job = overrides(folder, DOCUMENTS_PER_STEP, MAX_TOKENS, STEPS)
        job += [f"kernel={kernel}"]
        run = {"name": name, "kernel": kernel} | _child(folder / kernel, job, profiled=True)
        results.append(run)
        print(_line(run), flush=True)
    return results


def _line(run: dict) -> str:
    busy = sum(run["parts"].values()) or 1.0
    shares = ", ".join(
        f"{part} {100 * seconds / busy:.0f}%" for part, seconds in run["parts"].items()
    )
    longest = ", ".join(f"{name[:60]} {seconds:.2f} s" for name, seconds in run["longest_other"])
    shares += f"\n{'':24s}longest of the others: {longest}"
    return (
        f"{run['name']:22s}{run['tokens_per_second']:9.0f} trained tokens/s  peak "
        f"{run['peak_gb']:.1f} GB  {shares}"
    )


def _prime_rl(folder: Path, tiny: bool, rows: list[Published], steps: int) -> list[dict]:
    """Measure the steps of each published row and print both."""
    model = QWEN3 | TINY if tiny else QWEN3
    results = []
    print(
        f"{'job':>12} {'':>9} {'tokens/s':>9} {'s':>7} {'MFU %':>6} {'GiB':>6}   "
        "(s: of a micro-batch; GiB: reserved)"
    )
    for published in rows:
        length = published.length // 256 if tiny else published.length
        inputs = folder / published.name
        inputs.mkdir(exist_ok=True)
        # A group has eight documents, of which the last steps may take a part.
        num_documents = -(-steps * MICRO_BATCHES // 8) * 8
        # The first token of a document has no log-prob, so it is the prompt. prime-rl draws its
        # tokens from the first hundred of the vocabulary.
        write_inputs(
            inputs,
            model,
            num_documents,
            (1, 1),
            (length - 1, length - 1),
            num_words=100,
            weights=published.lora_rank is not None,
        )
        job = overrides(inputs, MICRO_BATCHES, length, steps)
        job += ["model.compile=" + ("false" if tiny else "true")]
        if published.lora_rank is not None:
            job.remove("model.random_weights=true")  # adapters need weights that are there
            job.append(f"model.lora_rank={published.lora_rank}")
        run = _child(inputs / "run", job, profiled=False)
        seconds = run["seconds"] / MICRO_BATCHES
        tokens_per_second = length / seconds
        row = {
            "job": published.name,
            "tokens_per_second": tokens_per_second,
            "seconds": seconds,
            "mfu": mfu(model, length, tokens_per_second, published),
            "peak_gib": run["reserved_gib"],
            "all_steps": run["all_seconds"],
        }
        results.append(row)
        print(_prime_rl_line(published.name, "ours", row), flush=True)
        print(_prime_rl_line("", "prime-rl", vars(published)), flush=True)
    return results


def _prime_rl_line(name: str, whose: str, row: dict) -> str:
    return (
        f"{name:>12} {whose:>9} {row['tokens_per_second']:9.0f} {row['seconds']:7.2f} "
        f"{row['mfu']:6.1f} {row['peak_gib']:6.1f}"
    )


def mfu(model: dict, length: int, tokens_per_second: float, published: Published) -> float:
    """Return the percentage of the GPU's peak that prime-rl's formula gives.

    Its attention takes hidden_size / num_attention_heads for a head's width, which for Qwen3-0.6B
    is half of the true width, and counts no causal mask. Rows of LoRA take the operations that the
    published numbers imply, since the formula needs the adapters of prime-rl's own layers.
    """
    if published.lora_rank is not None:
        return published.mfu * tokens_per_second / published.tokens_per_second
    hidden = model["hidden_size"]
    heads = model["num_attention_heads"]
    layers = model["num_hidden_layers"]
    queries = heads * model["head_dim"]
    keys = model["num_key_value_heads"] * model["head_dim"]
    weights_of_a_layer = hidden * (2 * queries + 2 * keys + 3 * model["intermediate_size"])
    weights = layers * weights_of_a_layer + model["vocab_size"] * hidden
    operations = 6 * weights + 12 * layers * heads * (hidden // heads) * length
    return 100 * operations * tokens_per_second / PEAK_OPERATIONS


def _child(folder: Path, job: list[str], profiled: bool) -> dict:
    """Run the job in a process of its own and return what it took.

    The first steps compile kernels, load cuBLAS's and fill the allocator, so numbers are medians of
    the second half. `seconds` are those from one step's end to the next, everything included.
    """
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, "--child" if profiled else "--child-unprofiled", *job]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{folder} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    result = json.loads(done.stdout.splitlines()[-1])
    steps = [
        json.loads(line)
        for file in folder.rglob("metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    second_half = len(steps) // 2
    result["steps"] = [step["tokens_per_second"] for step in steps]
    result["peak_gb"] = max(step.get("peak_memory_gb", 0.0) for step in steps)
    result["tokens_per_second"] = statistics.median(result["steps"][second_half:])
    ends = [step["time"] for step in steps]
    seconds = [end - before for before, end in pairwise(ends)]
    result["all_seconds"] = seconds
    result["seconds"] = statistics.median(seconds[second_half - 1 :])
    return result


def _run_child(job: list[str], profiled: bool) -> int:
    import torch

    from pgtoolkit.cli import main as pgtk

    gpu = torch.cuda.is_available()
    job = [*job, f"trainer.device={'cuda' if gpu else 'cpu'}"]
    if not profiled:
        import pgtoolkit.training.recorder

        # The checkpoint at the end is no part of a step.
        pgtoolkit.training.recorder.save_checkpoint = lambda *_: None
        status = pgtk(job)
        reserved = torch.cuda.max_memory_reserved() / 2**30 if gpu else 0.0
        print("\n" + json.dumps({"reserved_gib": reserved}))
        return status
    parts = {}
    others = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        status = pgtk(job)
    for event in profile.key_averages():
        name = event.key
        seconds = event.self_device_time_total / 1e6
        if "DtoH" in name:  # the checkpoint at the end
            continue
        part = _part(name)
        parts[part] = parts.get(part, 0.0) + seconds
        if part == "other":
            others.append((name, seconds))
    longest = sorted(others, key=lambda item: -item[1])[:6]
    print("\n" + json.dumps({"parts": parts, "longest_other": longest}))
    return status


def _part(kernel: str) -> str:
    for part, words in PARTS.items():
        if any(word in kernel.lower() for word in words):
            return part
    return "other"


if __name__ == "__main__":
    if sys.argv[1:2] in (["--child"], ["--child-unprofiled"]):
        raise SystemExit(_run_child(sys.argv[2:], profiled=sys.argv[1] == "--child"))
    raise SystemExit(main())
