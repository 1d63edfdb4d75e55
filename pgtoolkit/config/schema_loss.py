"""The keys of the loss: its family, weights, corrections, penalties and advantages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Literal

from pgtoolkit.losses.corrections import CORRECTIONS, Factor, MaskMean, Mean  # noqa: F401  (types of keys, by their names)
from pgtoolkit.losses.families import FAMILIES, Divergence  # noqa: F401  (as above)
from pgtoolkit.system.declared import (
    REQUIRED,
    Declared,
    Dictionary,
    Needs,
    Option,
    chosen,
    key,
)

_NEEDS_KL: Needs = {"only_if": "kl.kind!=none", "use": "kl=k3"}
_ONLY_GAE: Declared = {
    "learns": "advantage.estimator=gae",
    "only_if": "advantage.estimator=gae",
    "added": True,
}


class AggregationMode(StrEnum):
    sample_mean = "sample_mean"
    prompt_mean = "prompt_mean"
    token_mean = "token_mean"
    constant = "constant"


class KLKind(StrEnum):
    none = "none"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_ratio = "k3_ratio"
    full_reverse = "full_reverse"
    full_forward = "full_forward"


class KLPlace(StrEnum):
    loss = "loss"
    reward = "reward"


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


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    name: str = key(option=True)
    num_splits: int = key(
        default=1,
        help="Pieces into which the tokens of a micro-batch are split when logits are materialised "
        "(not with kernel=fused_linear); 1: no split, which losses with a ratio by document need.",
        least=1,
        most=65536,
    )


@dataclass(frozen=True, kw_only=True)
class CustomLossConfig(LossConfig):
    name: Literal["custom"] = chosen("custom")
    path: str = key(
        default=REQUIRED,
        help="Dotted path `package.module.Class` of a family, in the current directory or "
        "installed; loss=package.module.Class sets it.",
        code="function",
        example="my_module.MyFamily",
        stands_for="custom",
    )
    options: Dictionary = key(
        default={},
        help="Values of its fields by their names: loss.NAME=VALUE sets one.",
        free=True,
        gathers=True,
    )


@dataclass(frozen=True, kw_only=True)
class AggregationConfig:
    mode: AggregationMode = key(option=True)
    divisor: float | None = key(
        default=None,
        help="L in tokens, only for aggregation=constant: a number > 0 that stays the same during "
        "the run, such as the longest possible completion; else null.",
        least=1e-6,
        most=1e12,
        only_if="aggregation.mode=constant",
    )
    reducer: str | None = key(
        default=None,
        help="Dotted path `package.module.function` of a function that computes your own weights "
        "in place of the mode's; null: none. aggregation=package.module.function sets it.",
        code="function",
        stands_for="sample_mean",
    )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    name: str = key(option=True)


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    kind: KLKind = key(option=True)
    coefficient: float | None = key(
        default=None,
        help="Factor of the penalty, whose tokens have the weights of the aggregation (0.000001 to "
        "1000; GRPO has 0.04); null: no penalty.",
        least=1e-6,
        most=1000,
        **_NEEDS_KL,
    )
    reference: str | None = key(
        default=None,
        help="The reference, whose log-probs are f: initial (the weights that the run starts "
        "from), recorded (the column ref_log_probs of recorded rollouts, without a model), or a "
        "teacher, as a model folder or a name on the Hugging Face hub; null: no penalty.",
        reads="reference",
        **_NEEDS_KL,
    )
    reference_prompt: str | None = key(
        default=None,
        help="What the reference reads in place of the prompt: a template with the fields {prompt} "
        "and {answer}, the task's reference answer, such as \"{prompt} (The answer is "
        '{answer}.)" (self-distillation); null: the prompt itself.',
    )
    update_every: int | None = key(
        default=None,
        help="Updates of the policy between moves of the reference towards it; null: the reference "
        "does not move.",
        least=1,
        most=10**9,
        learns="kl.update_every>0",
        fixed="the checkpoint holds the reference that has moved",
        added=True,
        only_if="kl.kind!=none and kl.reference=initial",
        use="kl=k3 and kl.reference=initial",
    )
    update_rate: float = key(
        default=1.0,
        help="How far the reference moves (0 to 1): its weights become update_rate times the "
        "policy's plus 1 - update_rate times its own; 1: the policy's.",
        least=1e-6,
        most=1,
        learns="kl.update_every>0",
        added=True,
        only_if="kl.update_every>0",
        use="kl.update_every=512",
    )

    place: KLPlace = key(
        default=KLPlace.loss,
        help="Where the penalty acts: loss (a term of each token's loss) or reward (each "
        "completion's reward is reduced by the sum over its tokens before advantages are made, by "
        "the old log-probs and without a gradient; for k1, k2 and k3).",
        learns="kl.place=reward",
        added=True,
    )

    @property
    def needs_model(self) -> bool:
        """True if a second model computes the reference's log-probs."""
        return self.kind != "none" and self.reference != "recorded"


@dataclass(frozen=True, kw_only=True)
class EntropyConfig:
    coefficient: float = key(
        default=0.0,
        help="Factor of the bonus, whose tokens have the weights of the aggregation (0 to 1000); "
        "0: no bonus, and no cost.",
        least=0,
        most=1000,
    )


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
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
        "deviation 1.",
        **_ONLY_GAE,
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    path: str | None = key(
        default=None,
        help="The model with whose body the critic starts: a folder or a name on the Hugging Face "
        "hub, with the policy's vocabulary; null: the weights that the policy starts from. The "
        "critic's head starts at 0.",
        reads="reference",
        fixed="the checkpoint holds the critic's weights",
    )
    learning_rate: float = key(
        help="Learning rate of the critic after the warm-up (> 0); the rest of its optimizer is as "
        "in the group optimizer.",
        least=1e-12,
        most=1e5,
    )
    clip: float | None = key(
        default=0.5,
        help="Once a value has moved this far from where it was when training on the batch began, "
        "its loss gives no further gradient (> 0); null: there is no limit.",
        least=1e-9,
        most=1e12,
    )
    steps_before_policy: int = key(
        default=0,
        help="Steps at the start that train the critic alone (>= 0, fewer than trainer.max_steps).",
        least=0,
        most=10**9,
    )


def _schema_of(kind: type, base: type) -> type:
    """Return a dataclass of a family's or correction's keys: those of `base` and its parameters."""
    parameters = [
        (
            parameter.name,
            parameter.type,
            field(default=parameter.default, metadata=parameter.metadata),
        )
        for parameter in fields(kind)
    ]
    name = kind.__name__ + base.__name__
    schema = make_dataclass(
        name,
        parameters,
        bases=(base,),
        namespace={"__module__": __name__},
        frozen=True,
        kw_only=True,
    )
    # where pickle looks for it: workers get the configuration as an object
    globals()[name] = schema
    return schema


def _option_of(kind: type, base: type) -> Option:
    """Return the option of a family or correction, with the first paragraph of its docstring as
    its meaning."""
    paragraph = (kind.__doc__ or "").partition("\n\n")[0]
    return Option(_schema_of(kind, base), help=" ".join(paragraph.split()))


OPTIONS = {
    "loss": {
        **{name: _option_of(family, LossConfig) for name, family in FAMILIES.items()},
        "custom": Option(
            CustomLossConfig,
            help="A loss family of your own, which loss=my_module.MyFamily chooses (docs/losses.md "
            "shows one).",
        ),
    },
    "aggregation": {
        "sample_mean": Option(
            AggregationConfig,
            help="Every document weighs the same: w_t = 1 / (D N_d). The GRPO and GSPO papers "
            "(arXiv 2402.03300, 2507.18071).",
        ),
        "prompt_mean": Option(
            AggregationConfig,
            help="Every prompt weighs the same, its tokens equally: w_t = 1 / (G N_g). "
            "ScaleRL's choice (arXiv 2510.13786).",
            base="sample_mean",
        ),
        "token_mean": Option(
            AggregationConfig,
            help="Every token weighs the same: w_t = 1 / N. DAPO (arXiv 2503.14476).",
            base="sample_mean",
        ),
        "constant": Option(
            AggregationConfig,
            help="Token losses are summed and divided by a constant: w_t = 1 / (D L). Dr. GRPO "
            "(arXiv 2503.20783, equation 2).",
            base="sample_mean",
        ),
    },
    "correction": {
        "none": Option(
            CorrectionConfig,
            help="No correction: the loss treats the old log-probs as those with which the "
            "completions were sampled.",
        ),
        **{name: _option_of(kind, CorrectionConfig) for name, kind in CORRECTIONS.items()},
    },
    "kl": {
        "none": Option(
            KLConfig,
            help="No penalty against a reference model.",
        ),
        "k1": Option(
            KLConfig,
            help="A penalty on p - f at each token, the plain log-ratio to a frozen reference. "
            "The mean of its gradient over the policy's own samples is 0, so by itself it "
            "pulls nowhere: it is here for comparison.",
            base="k3",
        ),
        "k2": Option(
            KLConfig,
            help="A penalty on (p - f)^2 / 2 at each token, half the squared log-ratio to a frozen "
            "reference.",
            base="k3",
        ),
        "k3": Option(
            KLConfig,
            help="GRPO's penalty: exp(f - p) - (f - p) - 1 at each token, p the policy's "
            "log-prob and f a frozen reference's (arXiv 2402.03300, equation 4).",
            base="none",
            changes={"coefficient": 0.04, "reference": "initial"},
        ),
        "k3_ratio": Option(
            KLConfig,
            help="GRPO's penalty times the token's ratio exp(p - o), which keeps it unbiased "
            "once the policy has left the one that sampled (DeepSeek-V3.2, arXiv "
            "2512.02556; the default of TRL 1.16).",
            base="k3",
        ),
        "full_reverse": Option(
            KLConfig,
            help="KL(policy || reference) over the whole vocabulary at each token, the sum of "
            "exp(p_v) (p_v - f_v) over all tokens v of the vocabulary. It is distillation if "
            "the reference is a teacher (arXiv 2306.13649). The reference must be a model, "
            "since rollouts record the log-prob of one token.",
            base="k3",
        ),
        "full_forward": Option(
            KLConfig,
            help="KL(reference || policy) over the whole vocabulary at each token, the sum of "
            "exp(f_v) (f_v - p_v) over all tokens v of the vocabulary. It makes the policy "
            "cover everything that a teacher might write (arXiv 2306.13649).",
            base="k3",
        ),
    },
    "entropy": {
        "bonus": Option(
            EntropyConfig,
            help="A bonus on the entropy of the policy at each trained token. Its weighted sum is "
            "subtracted from the loss.",
        ),
    },
    "critic": {
        "default": Option(
            CriticConfig,
            help="The value model of advantage=gae.",
        ),
    },
    "advantage": {
        "grpo": Option(
            AdvantageConfig,
            help="(reward - mean of the group) / standard deviation of the group (arXiv "
            "2402.03300).",
            base="dr_grpo",
        ),
        "dr_grpo": Option(
            AdvantageConfig,
            help="reward - mean of the group, without the standard deviation (arXiv 2503.20783).",
        ),
        "rloo": Option(
            AdvantageConfig,
            help="reward - mean of the other completions of the group: leave one out (arXiv "
            "2402.14740).",
            base="dr_grpo",
        ),
        "max_rl": Option(
            AdvantageConfig,
            help="(reward - mean of the group) / mean of the group, for rewards that are not "
            "negative (MaxRL, arXiv 2602.02710).",
            base="dr_grpo",
        ),
        "batch_std": Option(
            AdvantageConfig,
            help="(reward - mean of the group) / standard deviation of all rewards of the "
            "batch (Lite PPO, arXiv 2508.08221). Recorded rollouts are one batch, however "
            "many files there are.",
            base="dr_grpo",
        ),
        "pass_at_k": Option(
            AdvantageConfig,
            help="By how much the single best completion of a group is better than the second "
            "best, and 0 for the others: the largest reward of the group, leave one out "
            "(arXiv 2503.19595).",
            base="dr_grpo",
        ),
        "opo": Option(
            AdvantageConfig,
            help="reward - mean of the group in which each completion has the weight of its "
            "number of tokens: the baseline of least variance under simplifying assumptions "
            "(OPO, arXiv 2505.23585).",
            base="dr_grpo",
        ),
        "gdpo": Option(
            AdvantageConfig,
            help="(score - mean of the group) / standard deviation of the group for each "
            "verifier, times its weight, summed, and whitened over the batch (GDPO, arXiv "
            "2601.05242). Needs several task.verifiers.",
            base="dr_grpo",
        ),
        "reinforce_plus_plus": Option(
            AdvantageConfig,
            help="Rewards whitened over the batch, without a group (REINFORCE++, arXiv "
            "2501.03262). Recorded rollouts are one batch.",
            base="dr_grpo",
        ),
        "reinforce_plus_plus_baseline": Option(
            AdvantageConfig,
            help="reward - mean of the group, whitened over the batch (REINFORCE++ with a "
            "group's baseline, arXiv 2501.03262). Recorded rollouts are one batch.",
            base="dr_grpo",
        ),
        "gae": Option(
            AdvantageConfig,
            help="An advantage of each token by the values of a critic: PPO's generalised "
            "advantage estimation (arXiv 1506.02438). The group critic has the critic's keys.",
            base="dr_grpo",
        ),
        "none": Option(
            AdvantageConfig,
            help="0 everywhere: only a penalty trains, such as kl=k3_ratio against a teacher "
            "(distillation).",
            base="dr_grpo",
        ),
        "given": Option(
            AdvantageConfig,
            help="The advantages recorded with the rollouts, unchanged; needs rollout=recorded.",
            base="dr_grpo",
        ),
        "custom": Option(
            AdvantageConfig,
            help="A function of your own, which advantage=my_module.my_advantages chooses, makes "
            "advantages of rewards.",
            base="dr_grpo",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
