"""Run by torchrun: one fixed step of a Qwen2 in bfloat16, on one GPU and spread over all, and how
far they are apart.

Prints one line of JSON: for each cut the relative distances of loss, gradient norm and gradient (of
    the parameter
where it is largest) from one process's, and the same for one process's from float32. Without GPUs
it runs on CPUs.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from model.spread import configuration, step

from pgtoolkit.model import attention, compiled
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout

SCALE = 20
OBJECTIVE = {"loss": "gspo", "aggregation": "sample_mean", "metrics": "basic"}
TP, SDP, DP, PP = "tensor_parallel", "sequence_data_parallel", "data_parallel", "pipeline_parallel"
CUTS = {
    2: {
        "ddp": ({DP: 2}, ""),
        "fsdp": ({DP: 2}, "shard"),
        "tensor": ({TP: 2}, ""),
        "sequence": ({TP: 2}, "sequence"),
    }
    | {"sequence_data": ({SDP: 2}, ""), "pipeline": ({PP: 2}, "")}
    | {
        "fsdp, compiled": ({DP: 2}, "shard compiled"),
        "sequence, compiled": ({TP: 2}, "sequence compiled"),
    },
    4: {
        "ddp": ({DP: 4}, ""),
        "fsdp": ({DP: 4}, "shard"),
        "tensor": ({TP: 4}, ""),
        "sequence_data": ({SDP: 4}, ""),
    }
    | {
        "fsdp x tensor": ({DP: 2, TP: 2}, "shard"),
        "sequence_data x sequence": ({SDP: 2, TP: 2}, "sequence"),
    },
}


def build(device: torch.device, dtype: torch.dtype, how: str = "") -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    shape = {
        "vocab_size": 4099,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape, **heads, max_position_embeddings=1024, tie_word_embeddings=False)
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention.switch_on(model, dtype, device)
    if "compiled" in how:
        compiled.switch_on(model)
    return Policy(model.to(device).train(), None, dtype)


def distances(found: dict, expected: dict) -> dict[str, float]:
    """Relative, of numbers and, by the 2-norm, of gradients."""
    apart = {}
    for name in expected.keys() & found.keys():
        difference = (found[name] - expected[name]).double().norm()
        apart[name] = float(difference / expected[name].double().norm())
    gradients = {name: apart[name] for name in sorted(apart) if "." in name}
    worst = max(gradients, key=gradients.get)
    numbers = {name: apart[name] for name in ("loss", "norm") if name in apart}
    return numbers | {"gradient": gradients[worst], "where": worst}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    whole = step(build(device, torch.bfloat16), ONE_PROCESS, SCALE, **OBJECTIVE)
    exact = step(build(device, torch.float32), ONE_PROCESS, SCALE, **OBJECTIVE)
    rows = {"one process, from float32": distances(whole, exact)}
    for name, (sizes, how) in CUTS[dist.get_world_size()].items():
        layout = Layout.of_world(device.type, **sizes)
        objective = OBJECTIVE | ({"metrics": "none"} if PP in sizes else {})
        policy = parallelize(
            build(device, torch.bfloat16, how),
            layout,
            configuration(sizes, "shard" in how, "sequence" in how, SCALE),
        )
        rows[name] = distances(step(policy, layout, SCALE, **objective), whole)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    if dist.get_rank() == 0:
        # The largest over the ranks; a pipeline's stages but the last know no loss.
        print(
            json.dumps(
                {name: max((rows[name] for rows in everyone), key=_largest) for name in rows}
            ),
            flush=True,
        )
    dist.destroy_process_group()


def _largest(row: dict) -> float:
    return row["gradient"]


if __name__ == "__main__":
    main()
