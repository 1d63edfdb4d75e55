"""The settings of rollouts: where completions come from, which of them are trained, how they become
steps, and how a policy is evaluated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from pgtoolkit.sampling.settings import SamplingSettings
from pgtoolkit.system.declared import (
    REQUIRED,
    Alters,
    Bounded,
    Declared,
    Dictionary,
    Needed,
    Needs,
    Option,
    Refusal,
    Settings,
    chosen,
    key,
)
from pgtoolkit.tasks.settings import Chat, TooLong

POSITION = "the position in the data belongs to it"
"""Why a resumed run cannot change the keys that decide, with the seed, which prompts it trains
on."""

AHEAD = "the checkpoint holds batches that were sampled ahead by these numbers"
"""Why a resumed run cannot change the keys that decide which batches were sampled early."""

_BATCH = "the position in the data is counted in batches of this size"
_PASSES = "the position in the data is counted in passes over a batch"
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


class PassOrder(StrEnum):
    same = "same"
    shuffled = "shuffled"


class TrainedTurns(StrEnum):
    all = "all"
    last = "last"


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    name: str = key(option=True, fixed=POSITION)
    group_size: int | None = key()
    max_completion_length: int | None = key()
    temperature: float = key()
    truncated: Truncated = key()

    @property
    def sampling(self) -> SamplingSettings:
        """Return the settings by which completions are sampled, or were."""
        return SamplingSettings(self.max_completion_length, self.temperature)


OVERLONG_BUFFER = Bounded(
    "overlong_buffer", "max_completion_length", because="It is the last part of a completion."
)


@dataclass(frozen=True, kw_only=True)
class PolicyRolloutSettings(RolloutSettings):
    bounded = (OVERLONG_BUFFER,)

    name: Literal["policy"] = chosen("policy", fixed=POSITION, alters=Alters.prompts)
    prompts_per_batch: int = key(
        default=32,
        help="Prompts in one batch of rollouts (>= 1).",
        least=1,
        most=10**6,
        fixed=_BATCH,
        alters=Alters.age,
    )
    group_size: int = key(
        default=8,
        help="Completions of every prompt (>= 2, so that there is something to compare).",
        least=1,
        most=10**6,
        fixed=_BATCH,
        alters=Alters.age,
    )
    max_completion_length: int = key(
        help="Most tokens of a completion, its end included (>= 1). Six digits take 7.",
        least=1,
        most=10**6,
        evaluate="model",
        alters=Alters.sampling,
    )
    temperature: float = key(
        default=1.0,
        help="Sampling temperature (> 0); log-probs are taken at the same temperature.",
        least=0.01,
        most=100,
        evaluate="model",
        alters=Alters.sampling,
    )
    truncated: Truncated = key(
        default=Truncated.train,
        help="Whether completions that were cut off at the length limit are trained: train, or "
        "mask (they are not, but their rewards stay in the baseline, and they and their tokens in "
        "every count of the aggregation: DAPO's overlong filtering).",
        alters=Alters.nothing,
    )
    top_p: float | None = key(
        default=None,
        help="Sample only from the most likely tokens that together have this probability (0 < "
        "top_p <= 1); null: from all.",
        least=1e-6,
        most=1,
        evaluate="model",
        alters=Alters.sampling,
    )
    top_k: int | None = key(
        default=None,
        help="Sample only from this many of the most likely tokens (>= 1), among which top_p then "
        "chooses; null: from all.",
        least=1,
        most=10**6,
        evaluate="model",
        learns="rollout.top_k!=null",
        added=True,
        alters=Alters.sampling,
    )
    stop: list[str] = key(
        default=[],
        help='Texts that end a completion, such as ["</answer>"]; [] for none. They are trained, '
        "but cut off before the completion is scored.",
        evaluate="model",
        alters=Alters.sampling,
    )
    old_log_probs: OldLogProbs = key(
        default=OldLogProbs.training,
        help="Which old log-probs anchor the ratios: training (of the weights that sampled, by "
        "the forward pass of training, so that the first ratio is 1), sampling (of the same "
        "weights, as the sampler computed them) or proximal (of the weights with which training "
        "on a batch begins, which are newer under a lag; a correction acts on their difference "
        "from the sampler's).",
        alters=Alters.formula,
    )
    overlong_buffer: int | None = key(
        default=None,
        help="Number of tokens before max_completion_length in which the reward is reduced, "
        "further with each token (DAPO's overlong buffer, arXiv 2503.14476, eq. 13); null: none.",
        least=1,
        most=10**6,
        alters=Alters.reward,
    )
    overlong_penalty: float = key(
        default=1.0,
        help="How much the reward of a completion of max_completion_length is reduced (>= 0).",
        least=0,
        most=1e6,
        only_if="rollout.overlong_buffer>0",
        use="rollout.overlong_buffer=TOKENS",
        alters=Alters.reward,
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
        alters=Alters.selection,
    )
    mixed: Mixed = key(
        default=Mixed.reward,
        help="Which prompts are kept then: reward (those whose rewards differ, before "
        "overlong_penalty) or exact_match (those with right and wrong completions). With a shaped "
        "reward, the first also keeps prompts that no completion answers.",
        only_if="rollout.max_sampling_rounds>1",
        use="rollout.max_sampling_rounds=4",
        alters=Alters.selection,
    )
    uninformative: Uninformative = key(
        default=Uninformative.train,
        help="What happens to prompts whose completions all score the same, before "
        "overlong_penalty: train, or drop (they are in no step and in no count of the aggregation, "
        "so that a batch is shorter).",
        learns="rollout.uninformative=drop",
        added=True,
        alters=Alters.selection,
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
        alters=Alters.selection,
    )
    lag: int = key(
        default=0,
        help="Updates between the weights that sample a batch of rollouts and those that begin to "
        "train on it (>= 0).",
        least=0,
        most=10**6,
        fixed=AHEAD,
        alters=Alters.age,
    )
    max_staleness: int | None = key(
        default=None,
        help="Asynchronous sampling: completions are sampled while training goes on, which sees no "
        "document older than this many updates (>= the steps of a batch); null: sampling and "
        "training take turns.",
        least=1,
        most=10**6,
        fixed=AHEAD,
        alters=Alters.age,
    )
    passes: int = key(
        default=1,
        help="How often each batch of rollouts is trained (>= 1). With more than one, old "
        "log-probs are computed before its first update and kept, so that clips act.",
        least=1,
        most=1000,
        learns="rollout.passes>1",
        fixed=_PASSES,
        added=True,
        alters=Alters.age,
    )
    pass_order: PassOrder = key(
        default=PassOrder.same,
        help="The order of a batch in its passes: same (that in which it was sampled) or shuffled "
        "(whole prompts, anew in each pass).",
        only_if="rollout.passes>1",
        use="rollout.passes=4",
        learns="rollout.pass_order=shuffled",
        fixed=_PASSES,
        added=True,
        alters=Alters.nothing,
    )
    keep_completions: int = key(
        default=8,
        help="Completions of every step that are kept in the run directory, for `pgtk samples` (>= "
        "0), first those of prompts whose completions score differently.",
        least=0,
        most=10**6,
        learns=False,
        alters=Alters.nothing,
    )
    save_path: str | None = key(
        default=None,
        help="New folder in which every rollout is recorded as Parquet files, for "
        "rollout=recorded; null: none.",
        writes=True,
        learns=False,
        alters=Alters.nothing,
    )

    def _unify(self) -> None:
        if self.top_p == 1:  # It is sampled from all tokens, as without it.
            object.__setattr__(self, "top_p", None)

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(
            self.max_completion_length,
            self.temperature,
            self.top_p,
            tuple(self.stop),
            top_k=self.top_k,
        )


@dataclass(frozen=True, kw_only=True)
class RecordedRolloutSettings(RolloutSettings):
    name: Literal["recorded"] = chosen("recorded", fixed=POSITION, alters=Alters.prompts)
    path: str = key(
        default=REQUIRED,
        help="A JSONL or Parquet file, a folder of them, or a glob.",
        reads="data",
        fixed=POSITION,
        example="rollouts.parquet",
        alters=Alters.prompts,
    )
    epochs: int = key(
        default=1,
        help="Passes over the files (>= 1).",
        least=1,
        most=10**6,
        alters=Alters.nothing,
    )
    shuffle: bool = key(
        default=False,
        help="Whether every pass takes the groups in another order.",
        fixed=POSITION,
        alters=Alters.nothing,
    )
    group_size: int | None = key(
        default=None,
        help="Completions of every prompt, if the files do not say to which group a document "
        "belongs; null: they do.",
        least=1,
        most=10**6,
        fixed=_BATCH,
        alters=Alters.nothing,
    )
    max_completion_length: int | None = key(
        default=None,
        help="Tokens of the longest completion, for aggregation=constant; null: unknown.",
        least=1,
        most=10**6,
        alters=Alters.nothing,
    )
    temperature: float = key(
        default=1.0,
        help="Temperature at which the completions were sampled (> 0).",
        least=0.01,
        most=100,
        evaluate="model",
        alters=Alters.formula,
    )
    truncated: Truncated = key(
        default=Truncated.train,
        help="Whether completions that the files mark as cut off are trained: train, or mask (they "
        "are not, but their rewards stay in the baseline, and they and their tokens in every count "
        "of the aggregation: DAPO's overlong filtering).",
        alters=Alters.nothing,
    )
    chat: Chat = key(
        default=Chat.auto,
        help="Whether rows of texts go through the chat template of the model's tokenizer: auto "
        "(where it has one) or never.",
        fixed=POSITION,
        alters=Alters.prompts,
    )
    trained_turns: TrainedTurns = key(
        default=TrainedTurns.all,
        help="Which turns of the assistant in a row of texts are trained: all, or the last alone.",
        fixed=POSITION,
        alters=Alters.prompts,
    )
    too_long: TooLong = key(
        default=TooLong.refuse,
        help="What happens to rows with more tokens than fit: refuse (the run) or skip (these "
        "rows, which a note counts).",
        fixed=POSITION,
        alters=Alters.prompts,
    )


class AdvantageEstimator(StrEnum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    max_rl = "max_rl"
    batch_std = "batch_std"
    pass_at_k = "pass_at_k"
    opo = "opo"
    gdpo = "gdpo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    gae = "gae"
    none = "none"
    given = "given"
    custom = "custom"


WITHOUT_OTHERS = ("none", "given", "custom", "reinforce_plus_plus", "gae")
"""Estimators that need no second completion of a prompt, or that may need none."""

_ONLY_GAE: Declared = {
    "learns": "advantage.estimator=gae",
    "only_if": "advantage.estimator=gae",
    "added": True,
}


_MADE_OF_REWARDS: Refusal = {
    "only_if": "advantage.estimator!=given",
    "use": "advantage=dr_grpo",
    "why": "Recorded advantages are taken as they are.",
}


ADVANTAGE_PATH = Needed(
    "advantage=custom",
    needs="advantage.path!=null",
    because="The function at that path makes advantages of rewards.",
    use="advantage=my_module.my_advantages",
)

SHIFT_OF_MAX_RL = Needed(
    "advantage=max_rl",
    needs="advantage.reward_shift=0",
    because="It divides by the mean of the rewards, which are not negative.",
    use="advantage.reward_shift=0 or advantage=dr_grpo",
)


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings(Settings):
    needed = (
        ADVANTAGE_PATH,
        SHIFT_OF_MAX_RL,
    )

    estimator: AdvantageEstimator = key(option=True)
    path: str | None = key(
        default=None,
        help="Dotted path `package.module.function` of a function that computes your own "
        "advantages: my_advantages(rewards, *, lengths, measures) -> advantages, each a list with "
        "a list for every group, in which each completion has a number. "
        "advantage=package.module.function sets it.",
        code="function",
        only_if="advantage.estimator=custom",
        example="my_module.my_advantages",
        stands_for="custom",
    )
    reward_shift: float = key(
        default=0.0,
        help="Added to each reward before advantages are made of it, after what is taken off for "
        "length; the reward that is shown, and the signal of a group, stay the task's.",
        least=-1e6,
        most=1e6,
        learns="advantage.reward_shift!=0 and advantage.reward_shift!=null",
        added=True,
        **_MADE_OF_REWARDS,
    )
    reward_scale: float = key(
        default=1.0,
        help="Factor of each reward after the shift (0.001 to 1000000).",
        least=1e-3,
        most=1e6,
        learns="advantage.reward_scale!=1 and advantage.reward_scale!=null",
        added=True,
        **_MADE_OF_REWARDS,
    )
    reward_clip: float | None = key(
        default=None,
        help="Bound of each reward after shift and scale, on both sides of 0; null: none.",
        least=1e-6,
        most=1e12,
        learns="advantage.reward_clip!=null",
        added=True,
        **_MADE_OF_REWARDS,
    )
    clip_low: float | None = key(
        default=None,
        help="Lower bound of each advantage (at most 0), after baseline, deviation and whitening; "
        "null: none.",
        least=-1e12,
        most=0,
        learns="advantage.clip_low!=null",
        added=True,
        **_MADE_OF_REWARDS,
    )
    clip_high: float | None = key(
        default=None,
        help="Upper bound of each advantage (at least 0), likewise; null: none.",
        least=0,
        most=1e12,
        learns="advantage.clip_high!=null",
        added=True,
        **_MADE_OF_REWARDS,
    )
    gamma: float = key(
        default=1.0,
        help="Discount of later rewards (0 to 1), for each token between.",
        least=0,
        most=1,
        **_ONLY_GAE,
    )
    gae_lambda: float = key(
        default=0.95,
        help="How far an advantage looks ahead (0 to 1); 0: to the next token's value, 1: to the "
        "end of the completion, with the value as a baseline.",
        least=0,
        most=1,
        **_ONLY_GAE,
    )
    whiten: bool = key(
        default=True,
        help="Whether the advantages of a batch's trained tokens are scaled to mean 0 and standard "
        "deviation 1. Tokens of completions that nobody could score do not count.",
        **_ONLY_GAE,
    )


class LastStep(StrEnum):
    short = "short"
    drop = "drop"
    carry = "carry"


MICRO_BATCHES = Needed(
    "accumulation.docs_per_step=0",
    needs="accumulation.micro_batches_per_step!=null",
    because="With docs_per_step=0 a step is a fixed number of micro-batches.",
    use="accumulation.docs_per_step=64 or accumulation.micro_batches_per_step=2",
)


@dataclass(frozen=True, kw_only=True)
class AccumulationSettings(Settings):
    needed = (MICRO_BATCHES,)

    docs_per_step: int = key(
        default=64,
        help="Documents of an optimizer step, over all of its micro-batches (>= 0); 0: a step is a "
        "fixed number of micro-batches instead.",
        least=0,
        most=10**6,
        fixed=AHEAD,
        alters=Alters.formula,
    )
    max_tokens: int = key(
        help="Most tokens of a micro-batch (>= 1), which must hold the longest document.",
        least=1,
        most=10**7,
        machine="accumulation.docs_per_step>0",
        alters=Alters.nothing,
    )
    micro_batches_per_step: int | None = key(
        default=None,
        help="Micro-batches of an optimizer step, if docs_per_step is 0 (>= 1); otherwise null.",
        least=1,
        most=10**6,
        only_if="accumulation.docs_per_step=0",
        alters=Alters.formula,
    )
    last_step: LastStep = key(
        default=LastStep.short,
        help="What happens to the last documents of a batch of rollouts if they do not fill a "
        "step: short (a step of them alone), drop (they are left out) or carry (the next batch "
        "fills the step).",
        fixed=AHEAD,
        alters=Alters.nothing,
    )


_NEEDS_EVALUATION: Needs = {"only_if": "evaluation.every>0", "use": "evaluation.every=20"}
_MEASURE: Declared = {
    **_NEEDS_EVALUATION,
    "fixed": "its evaluations so far would not compare with those to come",
    "fixed_if": "evaluation.every>0",
    "evaluate": "run",
    "alters": Alters.evaluation,
}
"""The declaration of every key that decides which number an evaluation gives."""

_NEEDS_TEMPERATURE: Needs = {
    "only_if": "evaluation.every>0 and evaluation.temperature!=0",
    "use": "evaluation.every=20 and evaluation.temperature=1",
}


GREEDY = Needed(
    "evaluation.temperature=0",
    needs="evaluation.completions_per_prompt=1",
    because="At temperature 0 all completions of a prompt are the same.",
)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    needed = (GREEDY,)
    of_runs = ("every",)

    every: int = key(
        default=0,
        help="Steps between evaluations (>= 0); there are also evaluations before the first step "
        "and after the last. 0: none.",
        least=0,
        most=10**9,
        alters=Alters.evaluation,
    )
    prompts_per_set: int = key(
        default=128,
        help="Prompts of each set (>= 1); all prompts of a file that has fewer.",
        least=1,
        most=10**6,
        **_MEASURE,
    )
    completions_per_prompt: int = key(
        default=4,
        help="Completions of every prompt (>= 1): pass@k is measured for k = 1, 2, 4, ... up to "
        "this number.",
        least=1,
        most=10**4,
        **_MEASURE,
    )
    temperature: float | None = key(
        default=None,
        help="Sampling temperature (>= 0; 0: always the likeliest token); null: "
        "rollout.temperature, as in training.",
        least=0,
        most=100,
        **_MEASURE,
    )
    top_p: float | None = key(
        default=None,
        help="Sample only from the most likely tokens that together have this probability (0 < "
        "top_p <= 1); null: as in training.",
        least=1e-6,
        most=1,
        **_MEASURE | _NEEDS_TEMPERATURE,
    )
    top_k: int | None = key(
        default=None,
        help="Sample only from this many of the most likely tokens (>= 1); null: as in training.",
        least=1,
        most=10**6,
        learns="evaluation.top_k!=null",
        added=True,
        **_MEASURE | _NEEDS_TEMPERATURE,
    )
    max_completion_length: int | None = key(
        default=None,
        help="Most tokens of a completion (>= 1); null: rollout.max_completion_length, as in "
        "training.",
        least=1,
        most=10**6,
        **_MEASURE,
    )
    seed: int = key(
        default=1000000000,
        help="Seed of the held-out prompts and of the sampling (integer from 0), the same for runs "
        "of every seed.",
        least=0,
        most=2**32 - 1,
        **_MEASURE,
    )
    sets: Dictionary = key(
        default={},
        help="Sets of prompts, each under a name of your choice, with the keys that differ from "
        "those of the task: {test: {path: test.jsonl}} for a file, {longer: {num_digits: 8}} for a "
        "generator. A set may also have seed and prompts. {}: one set, held_out, from the task's "
        "generator.",
        free=True,
        code="function",
        **_MEASURE,
    )
    best: str | None = key(
        default="pass@1",
        help="The number by which the best checkpoint is kept besides the newest: avg, pass@1, "
        "pass@2, ... of the first set, or of another: SET/pass@1; null: no best one is kept.",
        last_counts=True,
        alters=Alters.nothing,
        **_NEEDS_EVALUATION,
    )

    def sampling_of(self, rollout: RolloutSettings) -> SamplingSettings:
        """Return how completions are sampled: as in training, but for what is set here."""
        changes = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_completion_length": self.max_completion_length,
        }
        return replace(rollout.sampling, **{k: v for k, v in changes.items() if v is not None})


OPTIONS = {
    "rollout": {
        "policy": Option(
            PolicyRolloutSettings,
            help="The policy in training writes the completions, one batch of rollouts after "
            "another.",
        ),
        "recorded": Option(
            RecordedRolloutSettings,
            help="Completions from files: `pgtk rollout=recorded rollout.path=rollouts.parquet`.",
        ),
    },
    "advantage": {
        "grpo": Option(
            AdvantageSettings,
            help="(reward - mean of the group) / standard deviation of the group (arXiv "
            "2402.03300).",
            base="dr_grpo",
        ),
        "dr_grpo": Option(
            AdvantageSettings,
            help="reward - mean of the group, without the standard deviation (arXiv 2503.20783).",
        ),
        "rloo": Option(
            AdvantageSettings,
            help="reward - mean of the other completions of the group: leave one out (arXiv "
            "2402.14740).",
            base="dr_grpo",
        ),
        "max_rl": Option(
            AdvantageSettings,
            help="(reward - mean of the group) / mean of the group, for rewards that are not "
            "negative (MaxRL, arXiv 2602.02710).",
            base="dr_grpo",
        ),
        "batch_std": Option(
            AdvantageSettings,
            help="(reward - mean of the group) / standard deviation of all rewards of the "
            "batch (Lite PPO, arXiv 2508.08221). Recorded rollouts are one batch, however "
            "many files there are.",
            base="dr_grpo",
        ),
        "pass_at_k": Option(
            AdvantageSettings,
            help="By how much the single best completion of a group is better than the second "
            "best, and 0 for the others: the largest reward of the group, leave one out "
            "(arXiv 2503.19595).",
            base="dr_grpo",
        ),
        "opo": Option(
            AdvantageSettings,
            help="reward - mean of the group in which each completion has the weight of its "
            "number of tokens: the baseline of least variance under simplifying assumptions "
            "(OPO, arXiv 2505.23585).",
            base="dr_grpo",
        ),
        "gdpo": Option(
            AdvantageSettings,
            help="(score - mean of the group) / standard deviation of the group for each "
            "verifier, times its weight, summed, and whitened over the batch (GDPO, arXiv "
            "2601.05242). Needs several task.verifiers.",
            base="dr_grpo",
        ),
        "reinforce_plus_plus": Option(
            AdvantageSettings,
            help="Rewards whitened over the batch, without a group (REINFORCE++, arXiv "
            "2501.03262). Recorded rollouts are one batch.",
            base="dr_grpo",
        ),
        "reinforce_plus_plus_baseline": Option(
            AdvantageSettings,
            help="reward - mean of the group, whitened over the batch (REINFORCE++ with a "
            "group's baseline, arXiv 2501.03262). Recorded rollouts are one batch.",
            base="dr_grpo",
        ),
        "gae": Option(
            AdvantageSettings,
            help="An advantage of each token by the values of a critic: PPO's generalised "
            "advantage estimation (arXiv 1506.02438). The group critic has the critic's keys.",
            base="dr_grpo",
        ),
        "none": Option(
            AdvantageSettings,
            help="0 everywhere: what trains is a loss that compares rewards itself (tpo, lpo), or "
            "a penalty, such as kl=k3_ratio against a teacher (distillation).",
            base="dr_grpo",
        ),
        "given": Option(
            AdvantageSettings,
            help="The advantages recorded with the rollouts, unchanged; needs rollout=recorded.",
            base="dr_grpo",
        ),
        "custom": Option(
            AdvantageSettings,
            help="A function of your own, which advantage=my_module.my_advantages chooses, makes "
            "advantages of rewards.",
            base="dr_grpo",
        ),
    },
    "accumulation": {
        "dynamic": Option(
            AccumulationSettings,
            help="A step is a fixed number of documents, in as many micro-batches as they need.",
        ),
        "fixed": Option(
            AccumulationSettings,
            help="A step is a fixed number of micro-batches, with as many documents as fit.",
            base="dynamic",
            changes={"docs_per_step": 0, "micro_batches_per_step": 2},
        ),
    },
    "evaluation": {
        "default": Option(
            EvaluationSettings,
            help="Evaluation on held-out prompts: `pgtk evaluation.every=20`. It does not change "
            "training.",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
