"""The keys of a step: its metrics, its kernels, and how it is cut and spread over processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from pgtoolkit.config.schema_rollouts import AHEAD
from pgtoolkit.system.declared import Declared, Option, key

_CUT: Declared = {"learns": False}
"""The result of a step does not depend on how it is cut, and over how many ranks."""


class MetricsLevel(StrEnum):
    none = "none"
    basic = "basic"
    with_entropy = "with_entropy"


class KernelImplementation(StrEnum):
    auto = "auto"
    torch = "torch"
    triton = "triton"
    fused_linear = "fused_linear"


class LastStep(StrEnum):
    short = "short"
    drop = "drop"
    carry = "carry"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    level: MetricsLevel = key(option=True)


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    implementation: KernelImplementation = key(option=True)
    logits_memory_mb: int | None = key(
        default=None,
        help="Memory for a piece of the logits where the LM head is fused with the loss, in MiB "
        "(>= 1); null: a sixty-fourth of the GPU's memory, at least 512, and 512 on a CPU.",
        least=1,
        most=2**20,
    )

    @property
    def needs_gpu(self) -> bool:
        """True if Triton is to compile its kernels."""
        return self.implementation == "triton" and os.environ.get("TRITON_INTERPRET") != "1"


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    data_parallel: int = key(
        default=1,
        help="Copies of the model, each with its share of every step's documents (>= 1).",
        least=1,
        most=65536,
        **_CUT,
    )
    shard: bool = key(
        default=False,
        help="Whether the copies share one set of weights, gradients and optimizer moments, a part "
        "on each rank (FSDP2).",
        **_CUT,
    )
    tensor_parallel: int = key(
        default=1,
        help="Shards of the large weight matrices and of the vocabulary (>= 1, a divisor of the "
        "attention heads).",
        least=1,
        most=65536,
        **_CUT,
    )
    sequence_parallel: bool = key(
        default=False,
        help="Whether activations between the tensor-parallel matrices are sharded along the "
        "tokens.",
        **_CUT,
    )
    sequence_data_parallel: int = key(
        default=1,
        help="Shards of every document's tokens (>= 1).",
        least=1,
        most=65536,
        **_CUT,
    )
    pipeline_parallel: int = key(
        default=1,
        help="Stages the layers are divided into (>= 1).",
        least=1,
        most=65536,
        **_CUT,
    )
    timeout_seconds: int = key(
        default=300,
        help="Seconds that a process waits for another before the run ends (>= 1).",
        least=1,
        most=604800,
        learns=False,
    )


@dataclass(frozen=True, kw_only=True)
class AccumulationConfig:
    docs_per_step: int = key(
        default=64,
        help="Documents of an optimizer step, over all of its micro-batches (>= 0); 0: a step is a "
        "fixed number of micro-batches instead.",
        least=0,
        most=10**6,
        fixed=AHEAD,
    )
    max_tokens: int = key(
        help="Most tokens of a micro-batch (>= 1), which must hold the longest document.",
        least=1,
        most=10**7,
    )
    micro_batches_per_step: int | None = key(
        default=None,
        help="Micro-batches of an optimizer step, if docs_per_step is 0 (>= 1); otherwise null.",
        least=1,
        most=10**6,
        only_if="accumulation.docs_per_step=0",
    )
    last_step: LastStep = key(
        default="short",
        help="What happens to the last documents of a batch of rollouts if they do not fill a "
        "step: short (a step of them alone), drop (they are left out) or carry (the next batch "
        "fills the step).",
        fixed=AHEAD,
    )


OPTIONS = {
    "metrics": {
        "none": Option(
            MetricsConfig,
            help="Only the loss, the gradient norm, the log-probs, and metrics of the data.",
            base="basic",
        ),
        "basic": Option(
            MetricsConfig,
            help="Also ratios, clipping, KL and advantages, without an extra pass.",
        ),
        "with_entropy": Option(
            MetricsConfig,
            help="As basic, with the entropy of the policy at every trained position, which is "
            "computed in the same pass over the vocabulary.",
            base="basic",
        ),
    },
    "kernel": {
        "auto": Option(
            KernelConfig,
            help="The fastest implementation for the device.",
        ),
        "torch": Option(
            KernelConfig,
            help="Plain PyTorch on materialised logits; it runs everywhere, and is the easiest to "
            "read.",
            base="auto",
        ),
        "triton": Option(
            KernelConfig,
            help="Triton kernels on materialised logits; they need a GPU, or TRITON_INTERPRET=1 "
            "for tests.",
            base="auto",
        ),
        "fused_linear": Option(
            KernelConfig,
            help="The LM head fused with the loss: the logits never exist in full, only one piece "
            "at a time.",
            base="auto",
        ),
    },
    "parallelism": {
        "single": Option(
            ParallelismConfig,
            help="One process on one device.\n\nWith sizes above 1, their product is the "
            "number of processes: pgtk starts them on this machine, or joins those that "
            "torchrun or srun started. docs/parallelism.md says which combinations work.",
        ),
        "ddp": Option(
            ParallelismConfig,
            help="Data parallel: a copy of the model on each rank; gradients are added up once per "
            "step.",
            base="single",
            changes={"data_parallel": 2},
        ),
        "fsdp": Option(
            ParallelismConfig,
            help="Fully sharded data parallel: as ddp, with weights, gradients and optimizer "
            "moments divided over the ranks.",
            base="single",
            changes={"data_parallel": 2, "shard": True},
        ),
        "tensor": Option(
            ParallelismConfig,
            help="Tensor parallel: the large weight matrices and the vocabulary divided over the "
            "ranks.",
            base="single",
            changes={"tensor_parallel": 2},
        ),
        "sequence": Option(
            ParallelismConfig,
            help="Sequence parallel: as tensor, with the activations between the matrices divided "
            "along the tokens.",
            base="single",
            changes={"tensor_parallel": 2, "sequence_parallel": True},
        ),
        "sequence_data": Option(
            ParallelismConfig,
            help="Sequence-data parallel (context parallel): the tokens of every document divided "
            "over the ranks.",
            base="single",
            changes={"sequence_data_parallel": 2},
        ),
        "pipeline": Option(
            ParallelismConfig,
            help="Pipeline parallel: consecutive layers on consecutive ranks; micro-batches "
            "pass through them. Needs metrics=none.",
            base="single",
            changes={"pipeline_parallel": 2},
        ),
    },
    "accumulation": {
        "dynamic": Option(
            AccumulationConfig,
            help="A step is a fixed number of documents, in as many micro-batches as they need.",
        ),
        "fixed": Option(
            AccumulationConfig,
            help="A step is a fixed number of micro-batches, with as many documents as fit.",
            base="dynamic",
            changes={"docs_per_step": 0, "micro_batches_per_step": 2},
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
