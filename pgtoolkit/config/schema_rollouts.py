"""The keys of rollouts: where completions come from, and which of them are trained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from pgtoolkit.config.defaults import REQUIRED, ByWeights
from pgtoolkit.config.key import Needs, Option, Refusal, key
from pgtoolkit.config.schema_tasks import Chat, TooLong

POSITION = "the position in the data belongs to it"
"""Why a resumed run cannot change the keys that decide, with the seed, which prompts it trains
on."""
AHEAD = "the checkpoint holds batches that were sampled ahead by these numbers"
"""Why a resumed run cannot change the keys that decide which batches were sampled early."""
_BATCH = "the position in the data is counted in batches of this size"
_NEEDS_COUNTED_STEPS: Needs = {
    "only_if": "rollout.max_staleness=null and accumulation.docs_per_step!=0",
    "use": "rollout.max_staleness=null and accumulation=dynamic",
}
_NEEDS_ASYNC: Needs = {
    "only_if": (
        "accumulation.docs_per_step!=0 and rollout.old_log_probs!=training and "
        "accumulation.last_step!=carry"
    ),
    "use": (
        "accumulation=dynamic and rollout.old_log_probs=sampling and accumulation.last_step=short"
    ),
}
_WEIGHTS_ARE_GONE = (
    "A batch is sampled while the one before is trained: then the weights that wrote it are gone."
)
_NOT_REPEATABLE = (
    "Further rounds would be sampled by weights that depend on when checkpoints are made."
)
_NOT_MAX_RL: Refusal = {
    "only_if": "advantage.estimator!=max_rl",
    "use": "advantage=grpo",
    "why": "Rewards become negative, by whose mean max_rl would divide.",
}
_NEEDS_TOKENIZER: Refusal = {
    "only_if": "model.name=huggingface",
    "why": "The tiny model has no chat template.",
}
_INCOMPLETE_GROUP = "A group without one of its completions has other advantages."


class OldLogProbs(StrEnum):
    training = "training"
    sampling = "sampling"
    proximal = "proximal"


class Mixed(StrEnum):
    reward = "reward"
    exact_match = "exact_match"


class Uninformative(StrEnum):
    train = "train"
    drop = "drop"


class Truncated(StrEnum):
    train = "train"
    mask = "mask"


class TrainedTurns(StrEnum):
    all = "all"
    last = "last"


@dataclass(frozen=True)
class RolloutConfig:
    name: str = key(option=True, fixed=POSITION)
    group_size: int | None = key()
    max_completion_length: int | None = key()
    temperature: float = key()
    truncated: Truncated = key()


@dataclass(frozen=True)
class PolicyRolloutConfig(RolloutConfig):
    prompts_per_batch: int = key(
        default=32,
        help="Prompts in one batch of rollouts (>= 1).",
        least=1,
        most=10**6,
        fixed=_BATCH,
    )
    group_size: int = key(
        default=8,
        help="Completions of every prompt (>= 2, so that there is something to compare).",
        least=1,
        most=10**6,
        fixed=_BATCH,
    )
    max_completion_length: int = key(
        default=ByWeights(random=7, trained=256),
        help="Most tokens of a completion, its end included (>= 1). Six digits need 7.",
        least=1,
        most=10**6,
        evaluate="model",
    )
    temperature: float = key(
        default=1.0,
        help="Sampling temperature (> 0); log-probs are those of the same temperature.",
        least=0.01,
        most=100,
        evaluate="model",
    )
    truncated: Truncated = key(
        default="train",
        help="What is learned from completions that were cut off at the length limit: train, or "
        "mask: nothing, though their rewards stay in the baseline, and they and their tokens in "
        "every count of the aggregation (DAPO's overlong filtering).",
    )
    top_p: float | None = key(
        default=None,
        help="Sample only from the most likely tokens that together have this probability (0 < "
        "top_p <= 1); null: from all.",
        least=1e-6,
        most=1,
        evaluate="model",
    )
    stop: list[str] = key(
        default=[],
        help='Texts that end a completion, such as ["</answer>"]; [] for none. They are trained, '
        "and cut off where it is scored.",
        evaluate="model",
    )
    old_log_probs: OldLogProbs = key(
        default="training",
        help="Whose old log-probs anchor the ratios: training (the weights that sampled, by the "
        "forward pass that training uses: the first ratio is 1), sampling (the same, as the "
        "sampler said) or proximal (the weights with which training on a batch begins, which "
        "under a lag are newer; corrections act on what they differ by from the sampler's).",
    )
    overlong_buffer: int | None = key(
        default=None,
        help="Last tokens of max_completion_length in which a completion is punished for its "
        "length, more with each of them (DAPO's overlong buffer, arXiv 2503.14476, eq. 13); "
        "null: none is.",
        least=1,
        most=10**6,
        **_NOT_MAX_RL,
    )
    overlong_penalty: float = key(
        default=1.0,
        help="The most that is taken off the reward for the length (>= 0), from a completion of "
        "max_completion_length.",
        least=0,
        most=1e6,
        only_if="rollout.overlong_buffer>0",
        use="rollout.overlong_buffer=TOKENS",
    )
    max_sampling_rounds: int = key(
        default=1,
        help="Rounds of sampling at most for one batch (>= 1). With more than one, prompts whose "
        "completions all score the same are dropped and others sampled in their place (DAPO's "
        "dynamic sampling); 1: every prompt is taken.",
        least=1,
        most=1000,
        only_if="rollout.max_staleness=null",
        why=_NOT_REPEATABLE,
    )
    mixed: Mixed = key(
        default="reward",
        help="Which prompts are kept then: those whose rewards differ, before overlong_penalty "
        "(reward), or of whose completions some are right and some wrong (exact_match): of a "
        "shaped reward the first keeps prompts that nobody answered.",
        only_if="rollout.max_sampling_rounds>1",
        use="rollout.max_sampling_rounds=4",
    )
    uninformative: Uninformative = key(
        default="train",
        help="What becomes of prompts whose completions all score the same, before "
        "overlong_penalty: train, or drop: no step has them, and no count of the aggregation; a "
        "batch is then shorter.",
        learns="rollout.uninformative=drop",
        added=True,
        only_if="rollout.lag=0 and rollout.max_staleness=null and rollout.max_sampling_rounds=1 "
        "and accumulation.last_step!=drop",
        use="rollout.lag=0 and rollout.max_staleness=null and rollout.max_sampling_rounds=1 and "
        "accumulation.last_step=short",
        why="How many documents a batch has is known only once it is scored, and further rounds "
        "replace them.",
    )
    retire_at: float | None = key(
        default=None,
        help="Share of right completions of a prompt, of those of one batch, from which on it is "
        "solved and never asked again (0 < retire_at <= 1; 0.9 is ScaleRL's, arXiv 2510.13786); "
        "null: prompts always come back.",
        least=1e-6,
        most=1,
        learns="rollout.retire_at!=null",
        added=True,
        only_if="task.path!=null or task.name=reasoning_gym",
        use="task=prompts",
        why="Prompts of a generator never come back.",
    )
    lag: int = key(
        default=0,
        help="Updates from the weights that write a batch of rollouts to those that begin to train "
        "on it (>= 0).",
        least=0,
        most=10**6,
        fixed=AHEAD,
        **_NEEDS_COUNTED_STEPS,
    )
    max_staleness: int | None = key(
        default=None,
        help="Sample while training, which then sees no document older than this many updates (>= "
        "the steps of a batch); null: in turn.",
        least=1,
        most=10**6,
        fixed=AHEAD,
        why=_WEIGHTS_ARE_GONE,
        **_NEEDS_ASYNC,
    )
    keep_completions: int = key(
        default=8,
        help="Completions of every step kept in the run directory, to be read with `pgtk samples` "
        "(>= 0): of prompts whose completions score differently, as far as there are any.",
        least=0,
        most=10**6,
        learns=False,
    )
    save_path: str | None = key(
        default=None,
        help="New folder to record every rollout in, for rollout=recorded, as Parquet files; null: "
        "none.",
        writes=True,
        learns=False,
    )

    if TYPE_CHECKING:
        name: Literal["policy"] = "policy"


@dataclass(frozen=True)
class RecordedRolloutConfig(RolloutConfig):
    path: str = key(
        default=REQUIRED,
        help="JSONL or Parquet file, a folder of them, or a glob.",
        reads="data",
        fixed=POSITION,
        example="rollouts.parquet",
    )
    epochs: int = key(
        default=1,
        help="Passes over the files (>= 1).",
        least=1,
        most=10**6,
    )
    shuffle: bool = key(
        default=False,
        help="Whether every pass takes the groups in another order.",
        fixed=POSITION,
    )
    group_size: int | None = key(
        default=None,
        help="Completions of every prompt, where the files do not say which group a document "
        "belongs to; null: they do.",
        least=1,
        most=10**6,
        fixed=_BATCH,
    )
    max_completion_length: int | None = key(
        default=None,
        help="Tokens of the longest completion, for aggregation=constant; null: not known.",
        least=1,
        most=10**6,
    )
    temperature: float = key(
        default=1.0,
        help="Temperature at which the completions were sampled (> 0).",
        least=0.01,
        most=100,
        evaluate="model",
    )
    truncated: Truncated = key(
        default="train",
        help="What is learned from completions that were cut off, as the files say of each: train, "
        "or mask: nothing, though their rewards stay in the baseline, and they and their tokens in "
        "every count of the aggregation (DAPO's overlong filtering).",
    )
    chat: Chat = key(
        default="auto",
        help="Whether rows of texts go through the chat template of the model's tokenizer: auto "
        "(where it has one) or never.",
        fixed=POSITION,
        **_NEEDS_TOKENIZER,
    )
    trained_turns: TrainedTurns = key(
        default="all",
        help="Which turns of the assistant in such a row are trained: all, or the last alone.",
        fixed=POSITION,
        **_NEEDS_TOKENIZER,
    )
    too_long: TooLong = key(
        default="refuse",
        help="What happens to rows with more tokens than fit: refuse (the run) or skip (them, with "
        "a note that counts them).",
        fixed=POSITION,
        only_if="advantage.estimator=given",
        why=_INCOMPLETE_GROUP,
    )

    if TYPE_CHECKING:
        name: Literal["recorded"] = "recorded"


OPTIONS = {
    "rollout": {
        "policy": Option(
            PolicyRolloutConfig,
            help="The policy in training writes the completions, one batch of rollouts after the "
            "other.",
        ),
        "recorded": Option(
            RecordedRolloutConfig,
            help="Completions from files: `pgtk rollout=recorded rollout.path=rollouts.parquet`.",
        ),
    },
}
"""Group -> option -> its keys and what it is."""
