"""The keys of rollouts: where completions come from, and which of them are trained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pgtoolkit.config.schema_tasks import Chat, TooLong
from pgtoolkit.system.declared import REQUIRED, Option, chosen, key

POSITION = "the position in the data belongs to it"
"""Why a resumed run cannot change the keys that decide, with the seed, which prompts it trains
on."""
AHEAD = "the checkpoint holds batches that were sampled ahead by these numbers"
"""Why a resumed run cannot change the keys that decide which batches were sampled early."""
_BATCH = "the position in the data is counted in batches of this size"
_NOT_REPEATABLE = (
    "The weights that sample further rounds would depend on when checkpoints are written."
)


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


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    name: str = key(option=True, fixed=POSITION)
    group_size: int | None = key()
    max_completion_length: int | None = key()
    temperature: float = key()
    truncated: Truncated = key()


@dataclass(frozen=True, kw_only=True)
class PolicyRolloutConfig(RolloutConfig):
    name: Literal["policy"] = chosen("policy", fixed=POSITION)
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
        help="Most tokens of a completion, its end included (>= 1). Six digits take 7.",
        least=1,
        most=10**6,
        evaluate="model",
    )
    temperature: float = key(
        default=1.0,
        help="Sampling temperature (> 0); log-probs are taken at the same temperature.",
        least=0.01,
        most=100,
        evaluate="model",
    )
    truncated: Truncated = key(
        default="train",
        help="Whether completions that were cut off at the length limit are trained: train, or "
        "mask (they are not, but their rewards stay in the baseline, and they and their tokens in "
        "every count of the aggregation: DAPO's overlong filtering).",
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
        "but cut off before the completion is scored.",
        evaluate="model",
    )
    old_log_probs: OldLogProbs = key(
        default="training",
        help="Which old log-probs anchor the ratios: training (of the weights that sampled, by "
        "the forward pass of training, so that the first ratio is 1), sampling (of the same "
        "weights, as the sampler computed them) or proximal (of the weights with which training "
        "on a batch begins, which are newer under a lag; a correction acts on their difference "
        "from the sampler's).",
    )
    overlong_buffer: int | None = key(
        default=None,
        help="Number of tokens before max_completion_length in which the reward is reduced, "
        "further with each token (DAPO's overlong buffer, arXiv 2503.14476, eq. 13); null: none.",
        least=1,
        most=10**6,
    )
    overlong_penalty: float = key(
        default=1.0,
        help="How much the reward of a completion of max_completion_length is reduced (>= 0).",
        least=0,
        most=1e6,
        only_if="rollout.overlong_buffer>0",
        use="rollout.overlong_buffer=TOKENS",
    )
    max_sampling_rounds: int = key(
        default=1,
        help="Most rounds of sampling for a batch (>= 1). With more than one, prompts whose "
        "completions all score the same are dropped, and others are sampled in their place (DAPO's "
        "dynamic sampling); 1: every prompt is kept.",
        least=1,
        most=1000,
        only_if="rollout.max_staleness=null",
        why=_NOT_REPEATABLE,
    )
    mixed: Mixed = key(
        default="reward",
        help="Which prompts are kept then: reward (those whose rewards differ, before "
        "overlong_penalty) or exact_match (those with right and wrong completions). With a shaped "
        "reward, the first also keeps prompts that no completion answers.",
        only_if="rollout.max_sampling_rounds>1",
        use="rollout.max_sampling_rounds=4",
    )
    uninformative: Uninformative = key(
        default="train",
        help="What happens to prompts whose completions all score the same, before "
        "overlong_penalty: train, or drop (they are in no step and in no count of the aggregation, "
        "so that a batch is shorter).",
        learns="rollout.uninformative=drop",
        added=True,
    )
    retire_at: float | None = key(
        default=None,
        help="A prompt counts as solved, and is not asked again, once this share of its "
        "completions in a batch is right (0 < retire_at <= 1; ScaleRL has 0.9, arXiv 2510.13786); "
        "null: all prompts come back.",
        least=1e-6,
        most=1,
        learns="rollout.retire_at!=null",
        added=True,
    )
    lag: int = key(
        default=0,
        help="Updates between the weights that sample a batch of rollouts and those that begin to "
        "train on it (>= 0).",
        least=0,
        most=10**6,
        fixed=AHEAD,
    )
    max_staleness: int | None = key(
        default=None,
        help="Asynchronous sampling: completions are sampled while training goes on, which sees no "
        "document older than this many updates (>= the steps of a batch); null: sampling and "
        "training take turns.",
        least=1,
        most=10**6,
        fixed=AHEAD,
    )
    keep_completions: int = key(
        default=8,
        help="Completions of every step that are kept in the run directory, for `pgtk samples` (>= "
        "0), first those of prompts whose completions score differently.",
        least=0,
        most=10**6,
        learns=False,
    )
    save_path: str | None = key(
        default=None,
        help="New folder in which every rollout is recorded as Parquet files, for "
        "rollout=recorded; null: none.",
        writes=True,
        learns=False,
    )


@dataclass(frozen=True, kw_only=True)
class RecordedRolloutConfig(RolloutConfig):
    name: Literal["recorded"] = chosen("recorded", fixed=POSITION)
    path: str = key(
        default=REQUIRED,
        help="A JSONL or Parquet file, a folder of such files, or a glob.",
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
        help="Completions of every prompt, if the files do not say to which group a document "
        "belongs; null: they do.",
        least=1,
        most=10**6,
        fixed=_BATCH,
    )
    max_completion_length: int | None = key(
        default=None,
        help="Tokens of the longest completion, for aggregation=constant; null: unknown.",
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
        help="Whether completions that the files mark as cut off are trained: train, or mask (they "
        "are not, but their rewards stay in the baseline, and they and their tokens in every count "
        "of the aggregation: DAPO's overlong filtering).",
    )
    chat: Chat = key(
        default="auto",
        help="Whether rows of texts go through the chat template of the model's tokenizer: auto "
        "(where it has one) or never.",
        fixed=POSITION,
    )
    trained_turns: TrainedTurns = key(
        default="all",
        help="Which turns of the assistant in a row of texts are trained: all, or the last alone.",
        fixed=POSITION,
    )
    too_long: TooLong = key(
        default="refuse",
        help="What happens to rows with more tokens than fit: refuse (the run) or skip (these "
        "rows, which a note counts).",
        fixed=POSITION,
    )


OPTIONS = {
    "rollout": {
        "policy": Option(
            PolicyRolloutConfig,
            help="The policy in training writes the completions, one batch of rollouts after "
            "another.",
        ),
        "recorded": Option(
            RecordedRolloutConfig,
            help="Completions from files: `pgtk rollout=recorded rollout.path=rollouts.parquet`.",
        ),
    },
}
"""Group -> option -> its keys and its meaning."""
