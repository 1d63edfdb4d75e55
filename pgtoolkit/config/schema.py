"""Every key with its type and all that is true of it (`key.Key`). Values and explanations live in `conf/`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from string import ascii_lowercase
from typing import Any

from pgtoolkit.config.key import key
from pgtoolkit.losses.corrections import CORRECTIONS, Factor, Mean  # noqa: F401  (types of keys, by their names)
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.kl import FULL_KINDS, KINDS

_WEIGHTS = "the checkpoint holds the weights of this model"
POSITION = "the position in the data belongs to it"
"""Why a resumed run cannot change the keys that decide, with the seed, which prompts it trains on."""
_BATCH = "the position in the data is counted in batches of this size"
_AHEAD = "the checkpoint holds batches that were sampled ahead by these numbers"
_COUNTED = {
    "only_if": "rollout.max_staleness=null and accumulation.docs_per_step!=0",
    "use": "rollout.max_staleness=null and accumulation=dynamic",
}
_MEANWHILE = {
    "only_if": "accumulation.docs_per_step!=0 and rollout.old_log_probs!=training and accumulation.last_step!=carry",
    "use": "accumulation=dynamic and rollout.old_log_probs=sampling and accumulation.last_step=short",
}
_GONE = "A batch is sampled while the one before is trained: then the weights that wrote it are gone."
_OF_ANOTHER_MOMENT = "Further rounds would be sampled by weights that depend on when checkpoints are made."
_PUNISHED = {
    "only_if": "advantage.estimator!=max_rl",
    "use": "advantage=grpo",
    "why": "Rewards become negative, by whose mean max_rl would divide.",
}
_BY_TEMPLATE = {
    "only_if": "model.name=huggingface and task.chat!=never",
    "use": "model=huggingface and task.chat=auto",
}
_OF_TEXTS = {"only_if": "model.name=huggingface", "why": "The tiny model has no chat template."}
_INCOMPLETE = "A group without one of its completions has other advantages."
_ASKED = "rollout.name=policy or evaluation.every>0"
_IS_AHEAD = "rollout.lag>0 or rollout.max_staleness>0"
_MEASURED = "its evaluations so far would not compare with those to come"

_MEASURED_BY = "evaluation.every>0 and evaluation.best!=null"
_EVALUATED = {"only_if": "evaluation.every>0", "use": "evaluation.every=20"}
_MEASURES = _EVALUATED | {"fixed": _MEASURED, "fixed_if": "evaluation.every>0", "evaluate": "run"}
_NOT_GREEDY = {
    "only_if": "evaluation.every>0 and evaluation.temperature!=0",
    "use": "evaluation.every=20 and evaluation.temperature=1",
}
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
_LIMITED = {"use": "task.verifier_seconds=10", "why": "A process of its own has a time limit."}
_LIMITING = {"use": "task.verifier_processes=4", "why": "Only a process of its own can be ended."}
_ENDED = _LIMITED | {"use": "task.environment_seconds=10", "only_if": "task.environment_seconds!=null"}
_ENDING = _LIMITING | {"use": "task.environment_processes=4", "only_if": "task.environment_processes>0"}
_OF_ROWS = {"only_if": "task.path!=null", "use": "task.path=prompts.jsonl"}
_TRACKED = {"only_if": "tracking.name=mlflow"}
_STARTED = {"only_if": "sampler.urls=[]"}
_APART = {"only_if": "sampler.urls=[] and sampler.gpus!=null", "use": "sampler.urls=[] and sampler.gpus=[1,2]"}
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
OldLogProbs = StrEnum("OldLogProbs", ["training", "sampling", "proximal"])
Chat = StrEnum("Chat", ["auto", "never"])
Mixed = StrEnum("Mixed", ["reward", "exact_match"])
Truncated = StrEnum("Truncated", ["train", "mask"])
TooLong = StrEnum("TooLong", ["refuse", "skip"])
TrainedTurns = StrEnum("TrainedTurns", ["all", "last"])
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
    docs_per_step: int = key(0, 10**6, fixed=_AHEAD, fixed_if=_IS_AHEAD)
    max_tokens: int = key(1, 10**7)
    micro_batches_per_step: int | None = key(1, 10**6, only_if="accumulation.docs_per_step=0")
    last_step: LastStep = key(fixed=_AHEAD, fixed_if=_IS_AHEAD)


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
class TaskConfig:
    name: str = key(option=True)


@dataclass
class GeneratedTaskConfig(TaskConfig):
    """Problems of a generator, which never end.

    alphabet: their characters, each of them a token to the tiny model. size: the key of the largest.
    longest: characters of the longest prompt; and of the longest worked answer, with the end.
    """

    alphabet, size, longest = "", "", (0, 0)


@dataclass
class ReverseTaskConfig(GeneratedTaskConfig):
    num_digits: int = key(1, 1000, only_if=_ASKED)
    alphabet, size = "0123456789=", "num_digits"
    longest = property(lambda self: (self.num_digits + 1, self.num_digits + 1))


@dataclass
class ChainSumTaskConfig(GeneratedTaskConfig):
    min_terms: int = key(2, 100, only_if=_ASKED)
    max_terms: int = key(2, 100, only_if=_ASKED)
    alphabet, size = "0123456789+=;", "max_terms"
    longest = property(lambda self: (3 * self.max_terms, 9 * self.max_terms - 6))


@dataclass
class ShortestPathTaskConfig(GeneratedTaskConfig):
    min_nodes: int = key(8, 26, only_if=_ASKED)
    max_nodes: int = key(8, 26, only_if=_ASKED)
    alphabet, size = f"{ascii_lowercase} :=", "max_nodes"
    longest = property(lambda self: (6 * self.max_nodes - 6, self.max_nodes + 1))


@dataclass
class GuessTaskConfig(GeneratedTaskConfig):
    numbers: int = key(2, 10**6, only_if=_ASKED)
    max_turns: int = key(1, 1000, only_if=_ASKED)
    alphabet, size = "0123456789-?eghilorw", "numbers"

    @property
    def longest(self) -> tuple[int, int]:
        guess = len(str(self.numbers - 1)) + 1
        return 2 + guess, self.max_turns * guess + (self.max_turns - 1) * len("higher")


@dataclass
class WrittenTaskConfig(TaskConfig):
    """Prompts in words, which a tokenizer cuts, perhaps with a chat template."""

    chat: Chat
    system_prompt: str | None = key(**_BY_TEMPLATE)
    max_prompt_length: int | None = key(1, 10**7)
    too_long: TooLong


@dataclass
class ReasoningGymTaskConfig(WrittenTaskConfig):
    dataset: str = key(example="chain_sum")
    options: dict[str, Any] = key(free=True)


@dataclass
class PromptsTaskConfig(WrittenTaskConfig):
    path: str = key(reads="data", example="prompts.jsonl")
    split: str | None
    prompt_field: str
    answer_field: str
    verifier: str | None = key(code="function", only_if="task.verifiers={}")
    pattern: str | None = key(only_if="task.verifiers={}")
    verifiers: dict[str, Any] = key(free=True, code="function")
    verifier_processes: int = key(0, 1024, learns=False, fixed="", only_if="task.verifier_seconds!=null", **_LIMITED)
    verifier_seconds: float | None = key(0.01, 86400, fixed="", only_if="task.verifier_processes>0", **_LIMITING)


@dataclass
class ConversationTaskConfig(WrittenTaskConfig):
    environment: str = key(code="function", example="my_module.Environment")
    options: dict[str, Any] = key(free=True)
    max_turns: int = key(1, 10**6)
    path: str | None = key(reads="data", example="prompts.jsonl")
    split: str | None = key(**_OF_ROWS)
    prompt_field: str = key(**_OF_ROWS)
    answer_field: str = key(**_OF_ROWS)
    environment_processes: int = key(0, 1024, learns=False, fixed="", **_ENDED)
    environment_seconds: float | None = key(0.01, 86400, fixed="", **_ENDING)


@dataclass
class RolloutConfig:
    name: str = key(option=True, fixed=POSITION)
    group_size: int | None = key(1, 10**6)
    max_completion_length: int | None = key(1, 10**6)
    temperature: float = key(0.01, 100, evaluate="model")
    truncated: Truncated


@dataclass
class PolicyRolloutConfig(RolloutConfig):
    prompts_per_batch: int = key(1, 10**6, fixed=_BATCH)
    group_size: int = key(1, 10**6, fixed=_BATCH)
    max_completion_length: int = key(1, 10**6, evaluate="model")
    top_p: float | None = key(1e-6, 1, evaluate="model")
    stop: list[str] = key(evaluate="model")
    old_log_probs: OldLogProbs
    overlong_buffer: int | None = key(1, 10**6, **_PUNISHED)
    overlong_penalty: float = key(0, 1e6, only_if="rollout.overlong_buffer>0", use="rollout.overlong_buffer=TOKENS")
    max_sampling_rounds: int = key(1, 1000, only_if="rollout.max_staleness=null", why=_OF_ANOTHER_MOMENT)
    mixed: Mixed = key(only_if="rollout.max_sampling_rounds>1", use="rollout.max_sampling_rounds=4")
    lag: int = key(0, 10**6, fixed=_AHEAD, **_COUNTED)
    max_staleness: int | None = key(1, 10**6, fixed=_AHEAD, why=_GONE, **_MEANWHILE)
    keep_completions: int = key(0, 10**6, learns=False)
    save_path: str | None = key(writes=True, learns=False)


@dataclass
class RecordedRolloutConfig(RolloutConfig):
    path: str = key(reads="data", fixed=POSITION, example="rollouts.parquet")
    epochs: int = key(1, 10**6)
    shuffle: bool = key(fixed=POSITION)
    group_size: int | None = key(1, 10**6, fixed=_BATCH)
    chat: Chat = key(fixed=POSITION, **_OF_TEXTS)
    trained_turns: TrainedTurns = key(fixed=POSITION, **_OF_TEXTS)
    too_long: TooLong = key(fixed=POSITION, only_if="advantage.estimator=given", why=_INCOMPLETE)


@dataclass
class SamplerConfig:
    name: str = key(option=True)
    max_sequences: int | None = key(1, 10**6)


@dataclass
class TransformersSamplerConfig(SamplerConfig):
    static_cache: bool | None


@dataclass
class VllmSamplerConfig(SamplerConfig):
    max_sequences: int = key(1, 10**6, **_STARTED)
    urls: list[str] = key(learns=False)
    executable: str = key(code="command", learns=False, **_STARTED)
    arguments: list[str] = key(code="command", **_STARTED)
    gpus: list[int] | None = key(learns=False, **_STARTED)
    tensor_parallel: int = key(1, 1024, **_APART)
    servers_per_gpu: int = key(1, 64, learns=False, **_STARTED)
    gpu_memory_share: float = key(0.01, 1, learns=False, **_STARTED)
    seeded: bool
    weights_folder: str | None = key(writes=True, learns=False)
    tolerance: float | None = key(1e-9, 100, learns=False)
    start_seconds: int = key(1, 604800, learns=False)
    answer_seconds: int = key(1, 604800, learns=False)


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
    max_steps: int = key(1, 10**9)
    device: Device = key(evaluate="run", machine=True)
    num_threads: int | None = key(1, 1024, evaluate="run", machine=True)
    checkpoint_every: int = key(1, 10**9, learns=False)
    keep_checkpoints: int = key(1, 10**6, learns=False)
    max_bad_steps: int = key(1, 10**6)
    accept_changed_data: bool = key(learns=False)
    stop_at: float | None = key(0, 1e9, only_if=_MEASURED_BY, use="evaluation.every=20 and evaluation.best=pass@1")


@dataclass
class EvaluationConfig:
    every: int = key(0, 10**9)
    prompts_per_set: int = key(1, 10**6, **_MEASURES)
    completions_per_prompt: int = key(1, 10**4, **_MEASURES)
    temperature: float | None = key(0, 100, **_MEASURES)
    top_p: float | None = key(1e-6, 1, **_MEASURES | _NOT_GREEDY)
    max_completion_length: int | None = key(1, 10**6, **_MEASURES)
    seed: int = key(0, 2**32 - 1, **_MEASURES)
    sets: dict[str, Any] = key(free=True, code="function", **_MEASURES)
    best: str | None = key(**_EVALUATED)


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
    task: TaskConfig = key(fixed=POSITION, evaluate="run", only_if=f"{_ASKED} or model.name=tiny")
    rollout: RolloutConfig = key(evaluate="kept")
    sampler: SamplerConfig = key(learns="rollout.name=policy", evaluate="run", only_if=_ASKED)
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig = key(learns=False, evaluate="kept")
    trainer: TrainerConfig = key(evaluate="kept")
    tracking: TrackingConfig = key(learns=False)


def _config_of(kind: type, base: type) -> type:
    """The class of the keys of an option: the parameters of a family or correction, after the keys that all have."""
    parameters = [(given.name, given.type, field(metadata=given.metadata)) for given in fields(kind)]
    name = kind.__name__ + base.__name__
    made = make_dataclass(name, parameters, bases=(base,), namespace={"__module__": __name__})
    globals()[name] = made  # where pickle looks for it: workers get the configuration as an object
    return made


_SHAPES = {
    "loss": {name: _config_of(kind, LossConfig) for name, kind in FAMILIES.items()} | {"custom": CustomLossConfig},
    "correction": {"none": CorrectionConfig}
    | {name: _config_of(kind, CorrectionConfig) for name, kind in CORRECTIONS.items()},
    "model": {"tiny": TinyModelConfig, "huggingface": HuggingFaceModelConfig},
    "task": {
        "reverse": ReverseTaskConfig,
        "chain_sum": ChainSumTaskConfig,
        "shortest_path": ShortestPathTaskConfig,
        "reasoning_gym": ReasoningGymTaskConfig,
        "prompts": PromptsTaskConfig,
        "conversation": ConversationTaskConfig,
        "guess": GuessTaskConfig,
    },
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
