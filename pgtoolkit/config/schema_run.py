"""The keys of a run: the model, its optimizer, how long and where it trains, and where its metrics
are sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pgtoolkit.system.declared import REQUIRED, Declared, Dictionary, Needs, Option, chosen, key

_WEIGHTS = "the checkpoint holds the weights of this model"
_NEEDS_LORA: Declared = {
    "fixed": _WEIGHTS,
    "only_if": "model.lora_rank>0",
    "use": "model.lora_rank=16",
}
_NEEDS_MLFLOW: Needs = {"only_if": "tracking.name=mlflow"}
_NEEDS_PROJECT: Needs = {
    "only_if": "tracking.name=mlflow or tracking.name=wandb or tracking.also!=[]",
}
_CUT: Declared = {"learns": False}
"""Runs that differ only in rounding are the same experiment."""


class NumberType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


AutoOrBool = Any  # "auto", true or false: in YAML, the last two are no texts


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = key(option=True, fixed=_WEIGHTS)
    fp32_lm_head: bool = key()
    compile: AutoOrBool = key()


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig(ModelConfig):
    name: Literal["tiny"] = chosen("tiny", fixed=_WEIGHTS)
    fp32_lm_head: bool = key(
        default=False,
        help="Must stay false: all of this model computes in float32.",
        only_if="model.name=huggingface",
    )
    compile: AutoOrBool = key(
        default="auto",
        help="Whether norms and activations are compiled (torch.compile); auto: no, since such a "
        "small model gains nothing by it.",
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
class HuggingFaceModelConfig(ModelConfig):
    name: Literal["huggingface"] = chosen("huggingface", fixed=_WEIGHTS)
    fp32_lm_head: bool = key(
        default=True,
        help="Whether the LM head gives float32 logits where the rest is bfloat16 or float16, in "
        "training and in sampling: rounded logits are too coarse for GSPO's clip.",
    )
    compile: AutoOrBool = key(
        default="auto",
        help="Whether norms, gates and rotary positions are compiled (torch.compile), in training "
        "and in sampling: steps are faster, after some 10 seconds at the start. auto: on a GPU, if "
        "the run is long enough to pay for it, as pgtk check tells.",
        **_CUT,
    )
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
        default="auto",
        help="Number type of the forward pass: auto (bfloat16 on a GPU, else float32), float32, "
        "bfloat16, or float16, with which the loss is scaled so that small gradients are not lost "
        "(arXiv 2510.26788).",
    )
    gradient_checkpointing: bool = key(
        default=False,
        help="Whether to recompute activations in the backward pass: less memory, more time.",
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
        "layers by the ends of their names: [q_proj,v_proj].",
        **_NEEDS_LORA,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = key(
        help="Learning rate after the warm-up (> 0).",
        least=1e-12,
        most=1e5,
    )
    beta1: float = key(
        default=0.9,
        help="Decay of the mean of gradients (0 <= beta1 < 1).",
        least=0,
        most=0.999999,
    )
    beta2: float = key(
        default=0.95,
        help="Decay of the mean of squared gradients (0 <= beta2 < 1).",
        least=0,
        most=0.999999,
    )
    epsilon: float = key(
        default=1e-8,
        help="Added to the root of the mean squared gradient (> 0).",
        least=1e-30,
        most=1e4,
    )
    weight_decay: float = key(
        default=0.01,
        help="Decoupled weight decay (>= 0).",
        least=0,
        most=10,
    )
    max_grad_norm: float | None = key(
        default=1.0,
        help="Norm to which larger gradients are scaled down (> 0); null: they are not.",
        least=1e-6,
        most=1e9,
    )
    warmup_steps: int = key(
        default=10,
        help="Steps over which the learning rate rises linearly from 0 (>= 0).",
        least=0,
        most=10**9,
    )
    schedule: Schedule = key(
        default="constant",
        help="The learning rate after the warm-up: constant, or linear or cosine down to 0 at "
        "trainer.max_steps.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    max_steps: int = key(
        default=300,
        help="Optimizer steps of the run (>= 1); it has fewer if the data ends earlier.",
        least=1,
        most=10**9,
    )
    device: Device = key(
        default="auto",
        help="Where to compute: auto (a GPU if there is one), cpu or cuda.",
        evaluate="run",
        machine=True,
    )
    num_threads: int | None = key(
        default=1,
        help="CPU threads of torch (>= 1); null: as many as torch chooses. One is the fastest for "
        "the tiny model, and repeatable.",
        least=1,
        most=1024,
        evaluate="run",
        machine=True,
    )
    deterministic: AutoOrBool = key(
        default="auto",
        help="Whether a GPU adds up in the same order each time, and so repeats a run bit for bit; "
        "auto: as far as it can. The backward pass of attention takes 7 % longer for it, 16 % with "
        "documents of 4096 tokens, and 26 % with a single one of 65536.",
        **_CUT,
    )
    checkpoint_every: int = key(
        default=100,
        help="Steps between checkpoints (>= 1); one is also written at the end and when the run is "
        "interrupted.",
        least=1,
        most=10**9,
        learns=False,
    )
    keep_checkpoints: int = key(
        default=2,
        help="Checkpoints kept in the run directory (>= 1), the newest ones.",
        least=1,
        most=10**6,
        learns=False,
    )
    max_bad_steps: int = key(
        default=3,
        help="Consecutive steps with a non-finite loss or gradient after which the run fails (>= "
        "1). Such steps change no weights.",
        least=1,
        most=10**6,
    )
    accept_changed_data: bool = key(
        default=False,
        help="Whether a resumed run continues although prompts, recorded rollouts or a model "
        "folder have changed. It is to be typed at each resume.",
        learns=False,
    )
    stop_at: float | None = key(
        default=None,
        help="The run ends once the number of evaluation.best reaches this value (>= 0); null: it "
        "goes on to max_steps.",
        least=0,
        most=1e9,
        last_counts=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    name: str = key(option=True)
    also: list[str] = key(
        default=[],
        help="Further trackers, of wandb and tensorboard: tracking.also=[tensorboard].",
        added=True,
        only_if="tracking.name!=none",
        use="tracking=tensorboard",
    )
    uri: str | None = key(
        default=None,
        help="Address of the MLflow store: sqlite:///FILE, http://HOST:PORT or a database; null: "
        "SQLite in outputs/mlflow.db.",
        **_NEEDS_MLFLOW,
    )
    experiment: str | None = key(
        default="pgtoolkit",
        help="The MLflow experiment, or project of Weights & Biases, that collects the runs.",
        **_NEEDS_PROJECT,
    )
    run_name: str | None = key(
        default=None,
        help="Name of the run (at most 80 letters, digits, '.', '_', '-'); null: made of loss, "
        "aggregation and everything else that was typed.",
    )
    system_metrics: bool = key(
        default=False,
        help="Whether CPU, memory, disk, network and GPUs are measured every ten seconds (GPUs "
        "need the package nvidia-ml-py).",
        **_NEEDS_PROJECT,
    )


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    own: Dictionary = key(
        default={},
        help="Name -> `path`, the dotted path of a class of a callback, logger or profiler of "
        "Lightning, and the arguments that it is called with: callbacks.NAME.path=PATH "
        "callbacks.NAME.ARGUMENT=VALUE.",
        free=True,
        gathers=True,
        code="function",
        learns="callbacks.own!={}",
        added=True,
    )


OPTIONS = {
    "callbacks": {
        "none": Option(
            CallbacksConfig,
            help="No callbacks, loggers or profilers of your own.",
        ),
    },
    "model": {
        "tiny": Option(
            TinyModelConfig,
            help="A small GPT-2 with random weights and one token per character; nothing is "
            "downloaded.",
        ),
        "huggingface": Option(
            HuggingFaceModelConfig,
            help="A causal language model of the transformers library: `pgtk model=huggingface "
            "model.path=FOLDER_OR_HUB_NAME`.",
        ),
    },
    "optimizer": {
        "adamw": Option(
            OptimizerConfig,
            help="AdamW; no weight decay on norms and biases.",
        ),
    },
    "trainer": {
        "default": Option(
            TrainerConfig,
            help="Length of the run, device and checkpoints.",
        ),
    },
    "tracking": {
        "mlflow": Option(
            TrackingConfig,
            help="Metrics, parameters, configuration and plots also go to MLflow.",
        ),
        "wandb": Option(
            TrackingConfig,
            help="Metrics and parameters also go to Weights & Biases; WANDB_MODE=offline keeps "
            "them in RUN/wandb. "
            'Needs pip install "pgtk[wandb]".',
            base="mlflow",
        ),
        "tensorboard": Option(
            TrackingConfig,
            help="Metrics and parameters are also written to RUN/tensorboard, for `tensorboard "
            "--logdir`. "
            'Needs pip install "pgtk[tensorboard]".',
            base="mlflow",
        ),
        "none": Option(
            TrackingConfig,
            help="Metrics go to the run directory alone: metrics.jsonl and curves.png.",
            base="mlflow",
            changes={"experiment": None},
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
