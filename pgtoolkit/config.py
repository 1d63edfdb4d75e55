"""The configuration schema: every key with its type. Values and their explanations live in `conf/`.

`name` tells the options of a group apart. Cross-field rules are in `pgtoolkit.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore


class LossName(StrEnum):
    grpo = "grpo"
    gspo = "gspo"


class AggregationMode(StrEnum):
    sample_mean = "sample_mean"
    prompt_mean = "prompt_mean"
    token_mean = "token_mean"
    constant = "constant"


class MetricsLevel(StrEnum):
    none = "none"
    basic = "basic"
    with_entropy = "with_entropy"


class AdvantageEstimator(StrEnum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    given = "given"


class KernelImplementation(StrEnum):
    auto = "auto"
    torch = "torch"
    triton = "triton"
    fused_linear = "fused_linear"


class OldLogProbs(StrEnum):
    training = "training"
    sampling = "sampling"


class TooLong(StrEnum):
    refuse = "refuse"
    skip = "skip"


class LastStep(StrEnum):
    short = "short"
    drop = "drop"
    carry = "carry"


class NumberType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class LossConfig:
    name: LossName
    epsilon_low: float
    epsilon_high: float
    num_splits: int


@dataclass
class AggregationConfig:
    mode: AggregationMode
    divisor: float | None
    reducer: str | None


@dataclass
class MetricsConfig:
    level: MetricsLevel


@dataclass
class AdvantageConfig:
    estimator: AdvantageEstimator


@dataclass
class KernelConfig:
    implementation: KernelImplementation
    logits_memory_mb: int | None


@dataclass
class ParallelismConfig:
    data_parallel: int
    shard: bool
    tensor_parallel: int
    sequence_parallel: bool
    sequence_data_parallel: int
    pipeline_parallel: int
    timeout_seconds: int


@dataclass
class AccumulationConfig:
    docs_per_step: int
    max_tokens: int
    micro_batches_per_step: int | None
    last_step: LastStep


@dataclass
class TinyModelConfig:
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    max_positions: int
    fp32_lm_head: bool


@dataclass
class HuggingFaceModelConfig:
    name: str
    path: str
    random_weights: bool
    dtype: NumberType
    gradient_checkpointing: bool
    fp32_lm_head: bool


@dataclass
class ReverseTaskConfig:
    name: str
    num_digits: int


@dataclass
class ReasoningGymTaskConfig:
    name: str
    dataset: str
    options: dict[str, Any]
    too_long: TooLong


@dataclass
class PromptsTaskConfig:
    name: str
    path: str
    prompt_field: str
    answer_field: str
    verifier: str
    pattern: str | None
    too_long: TooLong


@dataclass
class PolicyRolloutConfig:
    name: str
    prompts_per_batch: int
    group_size: int
    max_completion_length: int
    temperature: float
    top_p: float | None
    old_log_probs: OldLogProbs
    save_path: str | None


@dataclass
class RecordedRolloutConfig:
    name: str
    path: str
    epochs: int
    shuffle: bool
    group_size: int | None
    max_completion_length: int | None
    temperature: float


@dataclass
class OptimizerConfig:
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float | None
    warmup_steps: int
    schedule: Schedule


@dataclass
class TrainerConfig:
    max_steps: int
    device: str
    num_threads: int | None
    checkpoint_every: int
    keep_checkpoints: int
    max_bad_steps: int


@dataclass
class TrackingConfig:
    name: str
    uri: str | None
    experiment: str | None
    run_name: str | None
    system_metrics: bool


@dataclass
class Config:
    """The whole experiment. Groups with several shapes are typed by the option that was chosen."""

    seed: int
    loss: LossConfig
    aggregation: AggregationConfig
    metrics: MetricsConfig
    advantage: AdvantageConfig
    kernel: KernelConfig
    parallelism: ParallelismConfig
    accumulation: AccumulationConfig
    model: Any
    task: Any
    rollout: Any
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    tracking: TrackingConfig


SCHEMAS = {
    "loss": LossConfig,
    "aggregation": AggregationConfig,
    "metrics": MetricsConfig,
    "advantage": AdvantageConfig,
    "kernel": KernelConfig,
    "parallelism": ParallelismConfig,
    "accumulation": AccumulationConfig,
    "model/tiny": TinyModelConfig,
    "model/huggingface": HuggingFaceModelConfig,
    "task/reverse": ReverseTaskConfig,
    "task/reasoning_gym": ReasoningGymTaskConfig,
    "task/prompts": PromptsTaskConfig,
    "rollout/policy": PolicyRolloutConfig,
    "rollout/recorded": RecordedRolloutConfig,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "tracking": TrackingConfig,
}


def register_schemas() -> None:
    """Make `schema` (and `schema_OPTION` in groups with several shapes) known to Hydra's defaults lists."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for key, schema in SCHEMAS.items():
        group, _, option = key.partition("/")
        store.store(group=group, name=f"schema_{option}" if option else "schema", node=schema)
