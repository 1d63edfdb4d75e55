"""The keys of completions: what is asked, who answers, what becomes of the answers, and how a policy is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from string import ascii_lowercase
from typing import Any

from pgtoolkit.config.key import key

POSITION = "the position in the data belongs to it"
"""Why a resumed run cannot change the keys that decide, with the seed, which prompts it trains on."""
_BATCH = "the position in the data is counted in batches of this size"
AHEAD = "the checkpoint holds batches that were sampled ahead by these numbers"
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
ASKED = "rollout.name=policy or evaluation.every>0"
_MEASURED = "its evaluations so far would not compare with those to come"

_EVALUATED = {"only_if": "evaluation.every>0", "use": "evaluation.every=20"}
_MEASURES = _EVALUATED | {"fixed": _MEASURED, "fixed_if": "evaluation.every>0", "evaluate": "run"}
_NOT_GREEDY = {
    "only_if": "evaluation.every>0 and evaluation.temperature!=0",
    "use": "evaluation.every=20 and evaluation.temperature=1",
}
_LIMITED = {"use": "task.verifier_seconds=10", "why": "A process of its own has a time limit."}
_LIMITING = {"use": "task.verifier_processes=4", "why": "Only a process of its own can be ended."}
_ENDED = _LIMITED | {"use": "task.environment_seconds=10", "only_if": "task.environment_seconds!=null"}
_ENDING = _LIMITING | {"use": "task.environment_processes=4", "only_if": "task.environment_processes>0"}
_OF_ROWS = {"only_if": "task.path!=null", "use": "task.path=prompts.jsonl"}
_STARTED = {"only_if": "sampler.urls=[]"}
_APART = {"only_if": "sampler.urls=[] and sampler.gpus!=null", "use": "sampler.urls=[] and sampler.gpus=[1,2]"}

OldLogProbs = StrEnum("OldLogProbs", ["training", "sampling", "proximal"])
Chat = StrEnum("Chat", ["auto", "never"])
Mixed = StrEnum("Mixed", ["reward", "exact_match"])
Truncated = StrEnum("Truncated", ["train", "mask"])
TooLong = StrEnum("TooLong", ["refuse", "skip"])
TrainedTurns = StrEnum("TrainedTurns", ["all", "last"])


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
    num_digits: int = key(1, 1000, only_if=ASKED)
    alphabet, size = "0123456789=", "num_digits"
    longest = property(lambda self: (self.num_digits + 1, self.num_digits + 1))


@dataclass
class ChainSumTaskConfig(GeneratedTaskConfig):
    min_terms: int = key(2, 100, only_if=ASKED)
    max_terms: int = key(2, 100, only_if=ASKED)
    alphabet, size = "0123456789+=;", "max_terms"
    longest = property(lambda self: (3 * self.max_terms, 9 * self.max_terms - 6))


@dataclass
class ShortestPathTaskConfig(GeneratedTaskConfig):
    min_nodes: int = key(8, 26, only_if=ASKED)
    max_nodes: int = key(8, 26, only_if=ASKED)
    alphabet, size = f"{ascii_lowercase} :=", "max_nodes"
    longest = property(lambda self: (6 * self.max_nodes - 6, self.max_nodes + 1))


@dataclass
class GuessTaskConfig(GeneratedTaskConfig):
    numbers: int = key(2, 10**6, only_if=ASKED)
    max_turns: int = key(1, 1000, only_if=ASKED)
    alphabet, size = "0123456789-?eghilorw", "numbers"
    # What other conversations choose; none of these is a key.
    environment, path, environment_processes, environment_seconds = "pgtoolkit.tasks.environments.Guess", None, 0, None
    options = property(lambda self: {"numbers": self.numbers})

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
    lag: int = key(0, 10**6, fixed=AHEAD, **_COUNTED)
    max_staleness: int | None = key(1, 10**6, fixed=AHEAD, why=_GONE, **_MEANWHILE)
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


SHAPES = {
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
"""Group -> option -> the class of its keys."""
