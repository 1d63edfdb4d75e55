"""The settings of the model, and of its spread over processes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pgtoolkit.model.architectures import TYPES_IN_WORDS
from pgtoolkit.system.declared import (
    REQUIRED,
    AutoOrBool,
    Declared,
    Needed,
    Option,
    Settings,
    chosen,
    key,
)

_WEIGHTS = "the checkpoint holds the weights of this model"
_NEEDS_LORA: Declared = {
    "fixed": _WEIGHTS,
    "only_if": "model.lora_rank>0",
    "use": "model.lora_rank=16",
}
_CUT: Declared = {"learns": False}
"""Runs that differ only in rounding are the same experiment."""


class NumberType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_SHARED = (
    "Whether what the completions of a prompt begin with is computed once for all of them in a "
    "micro-batch, in training and for their log-probs; auto: on a GPU in bfloat16 or float16, "
    "where that saves a fifth of the tokens or more."
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    name: str = key(option=True, fixed=_WEIGHTS)
    fp32_lm_head: bool = key()
    compile: bool | None = key()
    share_prompts: AutoOrBool = key(default=False, help=_SHARED, added=True, learns=False)


@dataclass(frozen=True, kw_only=True)
class TinyModelSettings(ModelSettings):
    name: Literal["tiny"] = chosen("tiny", fixed=_WEIGHTS)
    fp32_lm_head: bool = key(
        default=False,
        help="Must stay false: all of this model computes in float32.",
        only_if="model.name=huggingface",
    )
    compile: bool = key(
        default=False,
        help="Whether norms and activations are compiled (torch.compile). Such a small model gains "
        "nothing by it.",
        **_CUT,
    )
    num_layers: int = key(
        default=2,
        help="Transformer layers (>= 1).",
        least=1,
        most=1000,
        fixed=_WEIGHTS,
    )
    hidden_size: int = key(
        default=128,
        help="Width of the hidden states (a multiple of num_heads).",
        least=1,
        most=65536,
        fixed=_WEIGHTS,
    )
    num_heads: int = key(
        default=4,
        help="Attention heads (>= 1).",
        least=1,
        most=1000,
        fixed=_WEIGHTS,
    )
    max_positions: int = key(
        default=64,
        help="Longest document, prompt and completion, in tokens (>= 2): there is one learned "
        "position for each.",
        least=1,
        most=10**6,
        fixed=_WEIGHTS,
    )
    # Keys of other models, which are fixed here.
    dtype = "float32"
    lora_rank = None
    gradient_checkpointing = False
    random_weights = True


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModelSettings(ModelSettings):
    name: Literal["huggingface"] = chosen("huggingface", fixed=_WEIGHTS)
    fp32_lm_head: bool = key(
        default=True,
        help="Whether the LM head gives float32 logits where the rest is bfloat16 or float16, in "
        "training and in sampling: rounded logits are too coarse for GSPO's clip.",
    )
    compile: bool | None = key(
        default=None,
        help="Whether norms, gates and rotary positions are compiled (torch.compile), in training "
        "and in sampling: steps are faster, after some 10 seconds at the start; null: on a GPU, "
        f"for models of type {TYPES_IN_WORDS}.",
        **_CUT,
    )
    share_prompts: AutoOrBool = key(default="auto", help=_SHARED, added=True, learns=False)
    path: str = key(
        default=REQUIRED,
        help="A local folder or a name on the Hugging Face hub. Where the hub does not answer, its "
        "cache on this machine is used.",
        reads="model",
        fixed=_WEIGHTS,
        example="Qwen/Qwen3-0.6B",
    )
    random_weights: bool = key(
        default=False,
        help="Whether to take only the shape of the model, and to start from random weights.",
        fixed=_WEIGHTS,
    )
    dtype: NumberType = key(
        default=NumberType.auto,
        help="Number type of the forward pass: auto (bfloat16 on a GPU, else float32), float32, "
        "bfloat16, or float16, with which the loss is scaled so that small gradients are not lost "
        "(arXiv 2510.26788).",
    )
    gradient_checkpointing: AutoOrBool = key(
        default="auto",
        help="Whether to compute the layers again in the backward pass: less memory, more time; "
        "auto: on a GPU in the first step, and then as far as the memory of the GPU does not "
        "suffice to keep attention's output and the results of matrix products, or with LoRA all "
        "of a layer.",
        machine=True,
        learns=False,
    )
    lora_rank: int | None = key(
        default=None,
        help="Rank of LoRA's adapters (>= 1), which alone are trained then; null: all weights are "
        'trained. LoRA needs the package peft: pip install "pgtk[lora]".',
        least=1,
        most=65536,
        fixed=_WEIGHTS,
    )
    lora_alpha: float = key(
        default=32,
        help="Factor of LoRA's products, which are then divided by the rank (> 0).",
        least=1e-6,
        most=1e9,
        **_NEEDS_LORA,
    )
    lora_targets: list[str] = key(
        default=["all-linear"],
        help="The layers that get adapters: [all-linear], all linear layers except the head, or "
        "layers by the ends of their names: [q_proj,v_proj]. The experts of a qwen3_moe are no "
        "linear layers: [q_proj,k_proj,v_proj,o_proj,gate_up_proj,down_proj] names them, too.",
        **_NEEDS_LORA,
    )


SEQUENCE_PARALLEL = Needed(
    "parallelism.sequence_parallel=true",
    needs="parallelism.tensor_parallel>1",
    because="The activations are sharded over the same ranks as the matrices.",
    use="parallelism.tensor_parallel=2 or parallelism.sequence_parallel=false",
)

SHARD = Needed(
    "parallelism.shard=true",
    needs="parallelism.data_parallel>1 or parallelism.sequence_data_parallel>1",
    because="The weights are divided over the ranks that see different tokens.",
    use="parallelism.data_parallel=2 or parallelism.shard=false",
)


@dataclass(frozen=True, kw_only=True)
class ParallelismSettings(Settings):
    needed = (
        SEQUENCE_PARALLEL,
        SHARD,
    )

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


OPTIONS = {
    "model": {
        "tiny": Option(
            TinyModelSettings,
            help="A small GPT-2 with random weights and one token per character; nothing is "
            "downloaded.",
        ),
        "huggingface": Option(
            HuggingFaceModelSettings,
            help="A causal language model of the transformers library: `pgtk model=huggingface "
            "model.path=FOLDER_OR_HUB_NAME`.",
        ),
    },
    "parallelism": {
        "single": Option(
            ParallelismSettings,
            help="One process on one device.\n\nWith sizes above 1, their product is the "
            "number of processes: pgtk starts them on this machine, or joins those that "
            "torchrun or srun started. docs/parallelism.md says which combinations work.",
        ),
        "ddp": Option(
            ParallelismSettings,
            help="Data parallel: a copy of the model on each rank; gradients are added up once per "
            "step.",
            base="single",
            changes={"data_parallel": 2},
        ),
        "fsdp": Option(
            ParallelismSettings,
            help="Fully sharded data parallel: as ddp, with weights, gradients and optimizer "
            "moments divided over the ranks.",
            base="single",
            changes={"data_parallel": 2, "shard": True},
        ),
        "tensor": Option(
            ParallelismSettings,
            help="Tensor parallel: the large weight matrices and the vocabulary divided over the "
            "ranks.",
            base="single",
            changes={"tensor_parallel": 2},
        ),
        "sequence": Option(
            ParallelismSettings,
            help="Sequence parallel: as tensor, with the activations between the matrices divided "
            "along the tokens.",
            base="single",
            changes={"tensor_parallel": 2, "sequence_parallel": True},
        ),
        "sequence_data": Option(
            ParallelismSettings,
            help="Sequence-data parallel (context parallel): the tokens of every document divided "
            "over the ranks.",
            base="single",
            changes={"sequence_data_parallel": 2},
        ),
        "pipeline": Option(
            ParallelismSettings,
            help="Pipeline parallel: consecutive layers on consecutive ranks; micro-batches "
            "pass through them. Needs metrics=none.",
            base="single",
            changes={"pipeline_parallel": 2},
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
