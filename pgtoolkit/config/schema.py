"""Every key with its type and all that is true of it (`key.Key`), with those of schema_completions.py.

Values and explanations live in `conf/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Any, get_type_hints

from pgtoolkit.config import schema_completions as completions
from pgtoolkit.config.key import key
from pgtoolkit.losses.corrections import CORRECTIONS, Factor, Mean  # noqa: F401  (types of keys, by their names)
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.kl import FULL_KINDS, KINDS

_WEIGHTS = "the checkpoint holds the weights of this model"
_IS_AHEAD = "rollout.lag>0 or rollout.max_staleness>0"
_MEASURED_BY = "evaluation.every>0 and evaluation.best!=null"
_PENALIZED = {"only_if": "kl.kind!=none", "use": "kl=k3"}
_PROMPTED = {
    "only_if": "kl.kind!=none and kl.reference!=recorded and rollout.name=policy and "
    "parallelism.sequence_data_parallel=1",
    "use": "kl=k3 and kl.reference=initial and rollout=policy and parallelism.sequence_data_parallel=1",
    "why": "A reference reads it before completions that are sampled, on the ranks of the policy's tokens.",
}
_ADAPTED = {"fixed": _WEIGHTS, "only_if": "model.lora_rank>0", "use": "model.lora_rank=16"}
_ADAPTABLE = "model.random_weights=false and parallelism.tensor_parallel=1 and parallelism.pipeline_parallel=1"
_BESIDE = "Adapters stand beside the whole matrices of a model that was trained, and are stored alone."
_TRACKED = {"only_if": "tracking.name=mlflow"}
_CUT = {"learns": False}
"""How a step is cut, by how many ranks, or how it rounds, changes nothing of it."""

AggregationMode = StrEnum("AggregationMode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
KLKind = StrEnum("KLKind", ["none", *KINDS, *FULL_KINDS])
MetricsLevel = StrEnum("MetricsLevel", ["none", "basic", "with_entropy"])
AdvantageEstimator = StrEnum(
    "AdvantageEstimator",
    "grpo dr_grpo rloo max_rl batch_std pass_at_k opo gdpo reinforce_plus_plus reinforce_plus_plus_baseline "
    "none given custom",
)
KernelImplementation = StrEnum("KernelImplementation", ["auto", "torch", "triton", "fused_linear"])
LastStep = StrEnum("LastStep", ["short", "drop", "carry"])
NumberType = StrEnum("NumberType", ["auto", "float32", "bfloat16"])
Schedule = StrEnum("Schedule", ["constant", "linear", "cosine"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])
AutoOrBool = Any  # in YAML, true and false are no texts


@dataclass
class LossConfig:
    name: str = key(option=True)
    num_splits: int = key(
        1, 65536, only_if="kernel.implementation!=fused_linear", use="kernel=torch", why="The fused head cuts its own."
    )


@dataclass
class CustomLossConfig(LossConfig):
    path: str = key(code="function", example="my_module.MyFamily")
    options: dict[str, Any] = key(free=True)


@dataclass
class CorrectionConfig:
    name: str = key(option=True)


@dataclass
class AggregationConfig:
    mode: AggregationMode = key(option=True)
    divisor: float | None = key(1e-6, 1e12, only_if="aggregation.mode=constant")
    reducer: str | None = key(code="function")


@dataclass
class KLConfig:
    kind: KLKind = key(option=True)
    coefficient: float | None = key(1e-6, 1000, **_PENALIZED)
    reference: str | None = key(reads="reference", **_PENALIZED)
    reference_prompt: str | None = key(**_PROMPTED)

    @property
    def needs_model(self) -> bool:
        """Whether a second model computes the reference's log-probs."""
        return self.kind != "none" and self.reference != "recorded"


@dataclass
class EntropyConfig:
    coefficient: float = key(0, 1000)


@dataclass
class MetricsConfig:
    level: MetricsLevel = key(option=True)


@dataclass
class AdvantageConfig:
    estimator: AdvantageEstimator = key(option=True)
    path: str | None = key(code="function", only_if="advantage.estimator=custom", example="my_module.my_advantages")


@dataclass
class KernelConfig:
    implementation: KernelImplementation = key(option=True)
    logits_memory_mb: int | None = key(
        1, 2**20, only_if="kernel.implementation=auto and loss.num_splits=1 or kernel.implementation=fused_linear"
    )

    @property
    def needs_gpu(self) -> bool:
        """Whether Triton is to compile its kernels."""
        return self.implementation == "triton" and os.environ.get("TRITON_INTERPRET") != "1"


@dataclass
class ParallelismConfig:
    data_parallel: int = key(1, 65536, **_CUT)
    shard: bool = key(**_CUT)
    tensor_parallel: int = key(1, 65536, **_CUT)
    sequence_parallel: bool = key(**_CUT)
    sequence_data_parallel: int = key(1, 65536, **_CUT)
    pipeline_parallel: int = key(1, 65536, **_CUT)
    timeout_seconds: int = key(1, 604800, learns=False)


@dataclass
class AccumulationConfig:
    docs_per_step: int = key(0, 10**6, fixed=completions.AHEAD, fixed_if=_IS_AHEAD)
    max_tokens: int = key(1, 10**7)
    micro_batches_per_step: int | None = key(1, 10**6, only_if="accumulation.docs_per_step=0")
    last_step: LastStep = key(fixed=completions.AHEAD, fixed_if=_IS_AHEAD)


@dataclass
class ModelConfig:
    name: str = key(option=True, fixed=_WEIGHTS)
    fp32_lm_head: bool
    compile: AutoOrBool = key(**_CUT)


@dataclass
class TinyModelConfig(ModelConfig):
    fp32_lm_head: bool = key(only_if="model.name=huggingface")
    num_layers: int = key(1, 1000, fixed=_WEIGHTS)
    hidden_size: int = key(1, 65536, fixed=_WEIGHTS)
    num_heads: int = key(1, 1000, fixed=_WEIGHTS)
    max_positions: int = key(1, 10**6, fixed=_WEIGHTS)
    # What other models choose; none of these is a key.
    dtype, lora_rank, gradient_checkpointing, random_weights = "float32", None, False, True


@dataclass
class HuggingFaceModelConfig(ModelConfig):
    path: str = key(reads="model", fixed=_WEIGHTS, example="Qwen/Qwen3-0.6B")
    random_weights: bool = key(fixed=_WEIGHTS)
    dtype: NumberType
    gradient_checkpointing: bool
    lora_rank: int | None = key(1, 65536, fixed=_WEIGHTS, only_if=_ADAPTABLE, why=_BESIDE)
    lora_alpha: float = key(1e-6, 1e9, **_ADAPTED)
    lora_targets: list[str] = key(**_ADAPTED)


@dataclass
class OptimizerConfig:
    learning_rate: float = key(1e-12, 1e5)
    beta1: float = key(0, 0.999999)
    beta2: float = key(0, 0.999999)
    epsilon: float = key(1e-30, 1e4)
    weight_decay: float = key(0, 10)
    max_grad_norm: float | None = key(1e-6, 1e9)
    warmup_steps: int = key(0, 10**9)
    schedule: Schedule


@dataclass
class TrainerConfig:
    max_steps: int = key(1, 10**9, last_counts="optimizer.schedule=constant")
    device: Device = key(evaluate="run", machine=True)
    num_threads: int | None = key(1, 1024, evaluate="run", machine=True)
    deterministic: AutoOrBool = key(**_CUT)
    checkpoint_every: int = key(1, 10**9, learns=False)
    keep_checkpoints: int = key(1, 10**6, learns=False)
    max_bad_steps: int = key(1, 10**6)
    accept_changed_data: bool = key(learns=False)
    stop_at: float | None = key(
        0,
        1e9,
        only_if=_MEASURED_BY,
        use="evaluation.every=20 and evaluation.best=pass@1",
        last_counts=True,
    )


@dataclass
class TrackingConfig:
    name: str = key(option=True)
    uri: str | None = key(**_TRACKED)
    experiment: str | None = key(**_TRACKED)
    run_name: str | None
    system_metrics: bool = key(**_TRACKED)


@dataclass
class Config:
    """The whole experiment. What a group declares holds for all of its keys that do not declare it themselves.

    Groups with several shapes are objects of the class of the option that was chosen, which inherits from the one here.
    """

    seed: int = key(0, 2**32 - 1, fixed="prompts and the order of the data come from this seed", evaluate="model")
    loss: LossConfig
    aggregation: AggregationConfig
    correction: CorrectionConfig
    kl: KLConfig
    entropy: EntropyConfig
    metrics: MetricsConfig
    advantage: AdvantageConfig
    kernel: KernelConfig
    parallelism: ParallelismConfig
    accumulation: AccumulationConfig = key(evaluate="kept")
    model: ModelConfig = key(evaluate="model")
    task: completions.TaskConfig = key(
        fixed=completions.POSITION, evaluate="run", only_if=f"{completions.ASKED} or model.name=tiny"
    )
    rollout: completions.RolloutConfig = key(evaluate="kept")
    sampler: completions.SamplerConfig = key(learns="rollout.name=policy", evaluate="run", only_if=completions.ASKED)
    optimizer: OptimizerConfig
    evaluation: completions.EvaluationConfig = key(learns=False, evaluate="kept")
    trainer: TrainerConfig = key(evaluate="kept")
    tracking: TrackingConfig = key(learns=False)


def _config_of(kind: type, base: type) -> type:
    """The class of the keys of an option: the parameters of a family or correction, after the keys that all have."""
    parameters = [(given.name, given.type, field(metadata=given.metadata)) for given in fields(kind)]
    name = kind.__name__ + base.__name__
    made = make_dataclass(name, parameters, bases=(base,), namespace={"__module__": __name__})
    globals()[name] = made  # where pickle looks for it: workers get the configuration as an object
    return made


_SHAPES = completions.SHAPES | {
    "loss": {name: _config_of(kind, LossConfig) for name, kind in FAMILIES.items()} | {"custom": CustomLossConfig},
    "correction": {"none": CorrectionConfig}
    | {name: _config_of(kind, CorrectionConfig) for name, kind in CORRECTIONS.items()},
    "model": {"tiny": TinyModelConfig, "huggingface": HuggingFaceModelConfig},
}
SCHEMAS = {
    f"{group}/{option}" if option else group: schema
    for group, one_shape in get_type_hints(Config).items()
    if group != "seed"
    for option, schema in _SHAPES.get(group, {"": one_shape}).items()
}
"""The class of each group's keys, GROUP/OPTION where they differ between its options."""
