"""Every key with its type and range; `name` tells options apart. Values and explanations live in `conf/`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Any

from pgtoolkit.losses.corrections import CORRECTIONS, Factor, Mean  # noqa: F401  (types of keys, by their names)
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.kl import KINDS


def between(least: float, most: float) -> Any:
    """A number from `least` to `most`, both included: wide enough for what anybody means, beyond it a slip."""
    return field(metadata={"range": (least, most)})


AggregationMode = StrEnum("AggregationMode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
KLKind = StrEnum("KLKind", ["none", *KINDS])
MetricsLevel = StrEnum("MetricsLevel", ["none", "basic", "with_entropy"])
AdvantageEstimator = StrEnum("AdvantageEstimator", "grpo dr_grpo rloo max_rl batch_std pass_at_k given")
KernelImplementation = StrEnum("KernelImplementation", ["auto", "torch", "triton", "fused_linear"])
OldLogProbs = StrEnum("OldLogProbs", ["training", "sampling"])
Chat = StrEnum("Chat", ["auto", "never"])
TooLong = StrEnum("TooLong", ["refuse", "skip"])
LastStep = StrEnum("LastStep", ["short", "drop", "carry"])
NumberType = StrEnum("NumberType", ["auto", "float32", "bfloat16"])
Schedule = StrEnum("Schedule", ["constant", "linear", "cosine"])


def _config_of(name: str, parameters: tuple = (), *more: tuple) -> type:
    """A class of the keys of an option: its name, the parameters of a family or correction, and more."""
    own = [(one.name, one.type, field(metadata=one.metadata)) for one in parameters]
    made = make_dataclass(name, [("name", "str"), *own, *more], namespace={"__module__": __name__})
    globals()[name] = made  # where pickle looks for it: workers get the configuration as an object
    return made


@dataclass
class AggregationConfig:
    mode: AggregationMode
    divisor: float | None = between(1e-6, 1e12)
    reducer: str | None


@dataclass
class KLConfig:
    kind: KLKind
    coefficient: float | None = between(1e-6, 1000)
    reference: str | None


@dataclass
class EntropyConfig:
    coefficient: float = between(0, 1000)


@dataclass
class MetricsConfig:
    level: MetricsLevel


@dataclass
class AdvantageConfig:
    estimator: AdvantageEstimator


@dataclass
class KernelConfig:
    implementation: KernelImplementation
    logits_memory_mb: int | None = between(1, 2**20)


@dataclass
class ParallelismConfig:
    data_parallel: int = between(1, 65536)
    shard: bool
    tensor_parallel: int = between(1, 65536)
    sequence_parallel: bool
    sequence_data_parallel: int = between(1, 65536)
    pipeline_parallel: int = between(1, 65536)
    timeout_seconds: int = between(1, 604800)


@dataclass
class AccumulationConfig:
    docs_per_step: int = between(0, 10**6)
    max_tokens: int = between(1, 10**7)
    micro_batches_per_step: int | None = between(1, 10**6)
    last_step: LastStep


@dataclass
class TinyModelConfig:
    name: str
    num_layers: int = between(1, 1000)
    hidden_size: int = between(1, 65536)
    num_heads: int = between(1, 1000)
    max_positions: int = between(1, 10**6)
    fp32_lm_head: bool


@dataclass
class HuggingFaceModelConfig:
    name: str
    path: str
    random_weights: bool
    dtype: NumberType
    gradient_checkpointing: bool
    fp32_lm_head: bool
    lora_rank: int | None = between(1, 65536)
    lora_alpha: float = between(1e-6, 1e9)
    lora_targets: list[str]


@dataclass
class ReverseTaskConfig:
    name: str
    num_digits: int = between(1, 1000)


@dataclass
class ReasoningGymTaskConfig:
    name: str
    dataset: str
    options: dict[str, Any]
    chat: Chat
    system_prompt: str | None
    max_prompt_length: int | None = between(1, 10**7)
    too_long: TooLong


@dataclass
class PromptsTaskConfig:
    name: str
    path: str
    split: str | None
    prompt_field: str
    answer_field: str
    verifier: str | None
    pattern: str | None
    verifiers: dict[str, Any]
    verifier_processes: int = between(0, 1024)
    verifier_seconds: float | None = between(0.01, 86400)
    chat: Chat
    system_prompt: str | None
    max_prompt_length: int | None = between(1, 10**7)
    too_long: TooLong


@dataclass
class PolicyRolloutConfig:
    name: str
    prompts_per_batch: int = between(1, 10**6)
    group_size: int = between(1, 10**6)
    max_completion_length: int = between(1, 10**6)
    temperature: float = between(0.01, 100)
    top_p: float | None = between(1e-6, 1)
    stop: list[str]
    old_log_probs: OldLogProbs
    overlong_buffer: int | None = between(1, 10**6)
    overlong_penalty: float = between(0, 1e6)
    max_sampling_rounds: int = between(1, 1000)
    lag: int = between(0, 10**6)
    max_staleness: int | None = between(1, 10**6)
    keep_completions: int = between(0, 10**6)
    save_path: str | None


@dataclass
class RecordedRolloutConfig:
    name: str
    path: str
    epochs: int = between(1, 10**6)
    shuffle: bool
    group_size: int | None = between(1, 10**6)
    max_completion_length: int | None = between(1, 10**6)
    temperature: float = between(0.01, 100)


@dataclass
class TransformersSamplerConfig:
    name: str
    max_sequences: int | None = between(1, 10**6)
    static_cache: bool | None


@dataclass
class VllmSamplerConfig:
    name: str
    urls: list[str]
    executable: str
    arguments: list[str]
    gpus: list[int] | None
    tensor_parallel: int = between(1, 1024)
    servers_per_gpu: int = between(1, 64)
    gpu_memory_share: float = between(0.01, 1)
    max_sequences: int = between(1, 10**6)
    seeded: bool
    weights_folder: str | None
    tolerance: float | None = between(1e-9, 100)
    start_seconds: int = between(1, 604800)
    answer_seconds: int = between(1, 604800)


@dataclass
class OptimizerConfig:
    learning_rate: float = between(1e-12, 1e5)
    beta1: float = between(0, 0.999999)
    beta2: float = between(0, 0.999999)
    epsilon: float = between(1e-30, 1e4)
    weight_decay: float = between(0, 10)
    max_grad_norm: float | None = between(1e-6, 1e9)
    warmup_steps: int = between(0, 10**9)
    schedule: Schedule


@dataclass
class TrainerConfig:
    max_steps: int = between(1, 10**9)
    device: str
    num_threads: int | None = between(1, 1024)
    checkpoint_every: int = between(1, 10**9)
    keep_checkpoints: int = between(1, 10**6)
    max_bad_steps: int = between(1, 10**6)
    accept_changed_data: bool
    stop_at: float | None = between(0, 1e9)


@dataclass
class EvaluationConfig:
    every: int = between(0, 10**9)
    prompts_per_set: int = between(1, 10**6)
    completions_per_prompt: int = between(1, 10**4)
    temperature: float | None = between(0, 100)
    top_p: float | None = between(1e-6, 1)
    max_completion_length: int | None = between(1, 10**6)
    seed: int = between(0, 2**32 - 1)
    sets: dict[str, Any]
    best: str | None


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

    seed: int = between(0, 2**32 - 1)
    loss: Any
    aggregation: AggregationConfig
    correction: Any
    kl: KLConfig
    entropy: EntropyConfig
    metrics: MetricsConfig
    advantage: AdvantageConfig
    kernel: KernelConfig
    parallelism: ParallelismConfig
    accumulation: AccumulationConfig
    model: Any
    task: Any
    rollout: Any
    sampler: Any
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig
    trainer: TrainerConfig
    tracking: TrackingConfig


_SPLITS = ("num_splits", "int", between(1, 65536))
_SHAPES = {
    "loss": {
        **{name: _config_of(f"{kind.__name__}LossConfig", fields(kind), _SPLITS) for name, kind in FAMILIES.items()},
        "custom": _config_of("CustomLossConfig", (), ("path", "str"), ("options", "dict[str, Any]"), _SPLITS),
    },
    "correction": {
        "none": _config_of("NoCorrectionConfig"),
        **{name: _config_of(f"{kind.__name__}Config", fields(kind)) for name, kind in CORRECTIONS.items()},
    },
    "model": {"tiny": TinyModelConfig, "huggingface": HuggingFaceModelConfig},
    "task": {"reverse": ReverseTaskConfig, "reasoning_gym": ReasoningGymTaskConfig, "prompts": PromptsTaskConfig},
    "rollout": {"policy": PolicyRolloutConfig, "recorded": RecordedRolloutConfig},
    "sampler": {"transformers": TransformersSamplerConfig, "vllm": VllmSamplerConfig},
}
SCHEMAS = {
    f"{group}/{option}" if option else group: schema
    for group, one_shape in Config.__annotations__.items()
    if group != "seed"
    for option, schema in _SHAPES.get(group, {"": globals().get(one_shape)}).items()
}
"""The class of each group's keys, GROUP/OPTION where they differ between its options."""
