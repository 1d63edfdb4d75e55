"""Run by torchrun: compares a fixed step of a Qwen2 in bfloat16, spread over all GPUs, with that of
one GPU.

Prints a line of JSON: for each cut the relative distances of loss, gradient norm and gradient (of
the parameter where it is largest) from those of one process, and the distances of one process from
float32. Without GPUs it runs on CPUs.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from model.spread import LENGTHS, step
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from pgtoolkit.model import attention, compiled
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import ParallelismSettings
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout

SCALE = 20
OBJECTIVE = {"loss": "gspo", "aggregation": "sample_mean", "metrics": "basic"}
TP = "tensor_parallel"
SDP = "sequence_data_parallel"
DP = "data_parallel"
PP = "pipeline_parallel"
CUTS = {
    2: {
        "ddp": ({DP: 2}, ""),
        "fsdp": ({DP: 2}, "shard"),
        "tensor": ({TP: 2}, ""),
        "sequence": ({TP: 2}, "sequence"),
        "sequence_data": ({SDP: 2}, ""),
        "pipeline": ({PP: 2}, ""),
        "fsdp, compiled": ({DP: 2}, "shard compiled"),
        "sequence, compiled": ({TP: 2}, "sequence compiled"),
    },
    4: {
        "ddp": ({DP: 4}, ""),
        "fsdp": ({DP: 4}, "shard"),
        "tensor": ({TP: 4}, ""),
        "sequence_data": ({SDP: 4}, ""),
        "fsdp x tensor": ({DP: 2, TP: 2}, "shard"),
        "sequence_data x sequence": ({SDP: 2, TP: 2}, "sequence"),
    },
}
"""By number of GPUs and name of the cut: the sizes of its axes, and its options."""


def build(device: torch.device, dtype: torch.dtype, options: str = "") -> Policy:
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4099,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention.switch_on(model, dtype, device)
    if "compiled" in options:
        compiled.switch_on(model)
    return Policy(model.to(device).train(), None, dtype)


def distances(step: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | str]:
    """Return the relative distances of loss and norm, and of the gradient of the parameter where it
    is largest, by the 2-norm."""
    by_name = {}
    for name in expected.keys() & step.keys():
        difference = (step[name] - expected[name]).double().norm()
        by_name[name] = float(difference / expected[name].double().norm())
    gradients = {name: by_name[name] for name in sorted(by_name) if "." in name}
    worst = max(gradients, key=gradients.__getitem__)
    numbers = {name: by_name[name] for name in ("loss", "norm") if name in by_name}
    return numbers | {"gradient": gradients[worst], "where": worst}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    of_one_process = step(build(device, torch.bfloat16), ONE_PROCESS, SCALE, **OBJECTIVE)
    exact = step(build(device, torch.float32), ONE_PROCESS, SCALE, **OBJECTIVE)
    rows = {"one process, from float32": distances(of_one_process, exact)}
    for name, (sizes, options) in CUTS[dist.get_world_size()].items():
        layout = Layout.of_world(device.type, **sizes)
        objective = OBJECTIVE | ({"metrics": "none"} if PP in sizes else {})
        policy = parallelize(
            build(device, torch.bfloat16, options),
            layout,
            ParallelismSettings(
                shard="shard" in options, sequence_parallel="sequence" in options, **sizes
            ),
            SCALE * sum(LENGTHS),
        )
        rows[name] = distances(step(policy, layout, SCALE, **objective), of_one_process)
    rows_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(rows_by_rank, rows)
    if dist.get_rank() == 0:
        # The row of the rank with the largest distance. Only the last stage of a pipeline has a
        # loss.
        worst = {
            name: max((of_rank[name] for of_rank in rows_by_rank), key=_gradient) for name in rows
        }
        print(json.dumps(worst), flush=True)
    dist.destroy_process_group()


def _gradient(row: dict[str, Any]) -> float:
    return row["gradient"]


if __name__ == "__main__":
    main()
