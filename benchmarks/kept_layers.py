"""Measure updates of a model by how much its layers keep of the forward pass: seconds of forward
and backward pass, and peak memory.

    python benchmarks/kept_layers.py [--case 32x8x112+512] [--rounds 5] [--lora-rank 16]

`true`, `false` and `auto` are values of model.gradient_checkpointing; with `attention` all layers
keep attention's output alone, as those with adapters cannot. Gradients are compared to the bit. On
a CPU the model is small, and there is no `auto`. With PGTK_JOBS_ON_GPU=4 `auto` has a quarter of
the GPU.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from rollouts_job import BODIES
from shared_prompts import SMALL, documents, module_of, policy_of, timed

from pgtoolkit.model import fixed_order, recomputed
from pgtoolkit.model.kept_layers import KeepsByMemory
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.steps import make_step

KEPT = {"true": (False, False), "attention": (True, False), "false": (True, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--case", help="PROMPTSxCOMPLETIONSxPROMPT+COMPLETION")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted")
    parser.add_argument("--max-tokens", type=int, default=65536, help="of a micro-batch")
    parser.add_argument("--lora-rank", type=int, help="of adapters, which alone are trained then")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    fixed_order.switch(True)
    policy = policy_of(
        BODIES["0.5b"] if on_gpu else SMALL,
        "cuda" if on_gpu else "cpu",
        torch.bfloat16 if on_gpu else torch.float32,
        True,
        arguments.lora_rank,
    )
    module = module_of(policy)
    case = arguments.case or ("32x8x112+512" if on_gpu else "2x4x20+30")
    step = make_step(documents(case, policy.vocabulary_size), arguments.max_tokens)
    layers = policy.model.base_model.layers

    def measured() -> tuple[float, float]:
        """Return seconds and GB of an update."""
        seconds, _ = timed(module, step)
        return seconds, torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0

    measured()  # compiles
    first: list[torch.Tensor] = []

    def compare(name: str) -> None:
        """Compare the gradients with the first ones; SystemExit if they differ."""
        gradients = [x.grad.cpu() for x in policy.model.parameters() if x.grad is not None]
        first.extend(gradients if not first else [])
        if not all(map(torch.equal, gradients, first)):
            raise SystemExit(f"gradients of {name} differ from those of true")

    values = [name for name in KEPT if arguments.lora_rank is None or name != "attention"]
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in values}
    for number in range(1 + arguments.rounds):
        for name in values:
            for layer in layers:
                recomputed.keep(layer, *KEPT[name])
            row = measured()
            if number:
                rows[name].append(row)
            else:
                compare(name)
    if on_gpu:
        keeps = KeepsByMemory([policy], arguments.max_tokens, ONE_PROCESS)
        keeps.begin_step()
        seconds, peak = measured()
        compare("auto in its first step")
        print(f"the first step of auto: {seconds:.3f} s, {peak:.1f} GB")
        keeps.end_step(round(1e9 * peak), step.micro_batches)
        print(keeps.kept)
        rows["auto"] = [measured() for _ in range(1 + arguments.rounds)][1:]
        compare("auto")
    for name, measurements in rows.items():
        seconds, peaks = zip(*measurements, strict=True)
        print(
            f"{name:>9}: {statistics.median(seconds):.3f} s ({min(seconds):.3f} to "
            f"{max(seconds):.3f}), {max(peaks):.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
