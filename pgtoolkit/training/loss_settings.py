"""The settings of the loss: its family, weights, corrections and penalties."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Literal

from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.corrections import CORRECTIONS, Factor, MaskMean, Mean, Measure, Normalize  # noqa: F401  (types of keys, by their names)
from pgtoolkit.losses.families import FAMILIES, Divergence, Sides  # noqa: F401  (as above)
from pgtoolkit.losses.group_families import Direction, OfDocument, Scale  # noqa: F401  (as above)
from pgtoolkit.system.declared import (
    REQUIRED,
    Dictionary,
    Needs,
    Option,
    Settings,
    chosen,
    key,
)

_NEEDS_KL: Needs = {"only_if": "kl.kind!=none", "use": "kl=k3"}


class AggregationMode(StrEnum):
    sample_mean = "sample_mean"
    prompt_mean = "prompt_mean"
    balanced = "balanced"
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
    full_jsd = "full_jsd"


class KLPlace(StrEnum):
    loss = "loss"
    reward = "reward"


@dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    name: str = key(option=True)
    num_splits: int = key(
        default=1,
        help="Pieces into which the tokens of a micro-batch are split when logits are materialised "
        "(not with kernel=fused_linear); 1: no split, which losses with a ratio by document need.",
        least=1,
        most=65536,
        machine=True,
    )


@dataclass(frozen=True, kw_only=True)
class CustomLossSettings(LossSettings):
    name: Literal["custom"] = chosen("custom")
    path: str = key(
        default=REQUIRED,
        help="Dotted path `package.module.function` of a loss function, or of the class of a "
        "family, in the current directory or installed; loss=package.module.function sets it.",
        code="function",
        example="my_module.my_loss",
        stands_for="custom",
    )
    options: Dictionary = key(
        default={},
        help="Values of its parameters by their names: loss.NAME=VALUE sets one.",
        free=True,
        gathers=True,
    )


@dataclass(frozen=True, kw_only=True)
class AggregationSettings(Settings):
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
class CorrectionSettings(Settings):
    name: str = key(option=True)


@dataclass(frozen=True, kw_only=True)
class KLSettings(Settings):
    kind: KLKind = key(option=True)
    coefficient: float | None = key(
        default=None,
        help="Factor of the penalty, whose tokens have the weights of the aggregation (0.000001 to "
        "1000; GRPO has 0.04); null: no penalty. With kl.target it is the one that the run begins "
        "with.",
        least=1e-6,
        most=1000,
        fixed="the checkpoint holds the coefficient, which kl.target moves",
        fixed_if="kl.target>0",
        **_NEEDS_KL,
    )
    target: float | None = key(
        default=None,
        help="KL of a batch of rollouts towards which the coefficient is moved after each (> 0): "
        "coefficient <- coefficient (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), n its "
        "documents; KL is the mean over them of the mean of the penalty's term, for k1, k2 and k3 "
        "(arXiv 1909.08593); null: the coefficient stays.",
        least=1e-9,
        most=1e6,
        learns="kl.target>0",
        fixed="the checkpoint holds the coefficient that it moves",
        added=True,
    )
    horizon: int = key(
        default=10000,
        help="Documents over which the coefficient moves by the whole error of the KL, which is at "
        "most 0.2 (>= 1, above a fifth of the documents of a batch).",
        least=1,
        most=10**12,
        learns="kl.target>0",
        added=True,
        only_if="kl.target>0",
        use="kl.target=0.1",
    )
    beta: float = key(
        default=0.5,
        help="Share of the reference in the mixture of full_jsd (above 0 and below 1).",
        least=0,
        most=1,
        learns="kl.kind=full_jsd",
        added=True,
        only_if="kl.kind=full_jsd",
        use="kl=full_jsd",
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
        "completion's reward is reduced by the sum over its tokens before advantages are made, "
        "with advantage=gae at each token by its own, by the old log-probs and without a gradient; "
        "for k1, k2 and k3).",
        learns="kl.place=reward",
        added=True,
    )

    @property
    def adaptive(self) -> AdaptiveKL | None:
        """The coefficient as a run begins, where it follows a target; else None."""
        if self.kind == "none" or self.target is None:
            return None
        assert self.coefficient is not None
        return AdaptiveKL(self.target, self.horizon, self.coefficient)

    @property
    def beta_of_kind(self) -> float | None:
        """The share of the reference in the mixture, None for kinds without one."""
        return self.beta if self.kind == "full_jsd" else None

    @property
    def needs_model(self) -> bool:
        """True if a second model computes the reference's log-probs."""
        return self.kind != "none" and self.reference != "recorded"


@dataclass(frozen=True, kw_only=True)
class EntropySettings(Settings):
    coefficient: float = key(
        default=0.0,
        help="Factor of the bonus, whose tokens have the weights of the aggregation (0 to 1000); "
        "0: no bonus, and no cost.",
        least=0,
        most=1000,
    )
    top_fraction: float | None = key(
        default=None,
        help="Share of a step's trained tokens, those of the largest entropies, that the policy "
        "term of the loss counts (above 0, at most 1; 0.2 is arXiv 2506.01939's); null: all of "
        "them, in one pass over a step instead of two. Denominators and penalties keep every "
        "token.",
        least=1e-6,
        most=1,
        learns="entropy.top_fraction>0",
        added=True,
    )

    def _unify(self) -> None:
        if self.top_fraction == 1:  # All tokens are kept, as without it.
            object.__setattr__(self, "top_fraction", None)


def _schema_of(kind: type, base: type[Settings]) -> type[Settings]:
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


def _option_of(kind: type, base: type[Settings]) -> Option:
    """Return the option of a family or correction, with the first paragraph of its docstring as
    its meaning."""
    paragraph = (kind.__doc__ or "").partition("\n\n")[0]
    return Option(_schema_of(kind, base), help=" ".join(paragraph.split()))


OPTIONS = {
    "loss": {
        **{name: _option_of(family, LossSettings) for name, family in FAMILIES.items()},
        "custom": Option(
            CustomLossSettings,
            help="A loss of your own, which loss=my_module.my_loss chooses (docs/losses.md shows "
            "one).",
        ),
    },
    "aggregation": {
        "sample_mean": Option(
            AggregationSettings,
            help="Every document weighs the same: w_t = 1 / (D N_d). The GRPO and GSPO papers "
            "(arXiv 2402.03300, 2507.18071).",
        ),
        "prompt_mean": Option(
            AggregationSettings,
            help="Every prompt weighs the same, its tokens equally: w_t = 1 / (G N_g). "
            "ScaleRL's choice (arXiv 2510.13786).",
            base="sample_mean",
        ),
        "balanced": Option(
            AggregationSettings,
            help="Every prompt weighs the same; the tokens of its completions with A > 0 and those "
            "with A < 0 are averaged apart, and both means joined by their numbers of completions: "
            "w_t = (G_gs / G_g) / (N_gs G). Balanced Aggregation (arXiv 2605.04077).",
            base="sample_mean",
        ),
        "token_mean": Option(
            AggregationSettings,
            help="Every token weighs the same: w_t = 1 / N. DAPO (arXiv 2503.14476).",
            base="sample_mean",
        ),
        "constant": Option(
            AggregationSettings,
            help="Token losses are summed and divided by a constant: w_t = 1 / (D L). Dr. GRPO "
            "(arXiv 2503.20783, equation 2).",
            base="sample_mean",
        ),
    },
    "correction": {
        "none": Option(
            CorrectionSettings,
            help="No correction: the loss treats the old log-probs as those with which the "
            "completions were sampled.",
        ),
        **{name: _option_of(kind, CorrectionSettings) for name, kind in CORRECTIONS.items()},
    },
    "kl": {
        "none": Option(
            KLSettings,
            help="No penalty against a reference model.",
        ),
        "k1": Option(
            KLSettings,
            help="A penalty on p - f at each token, the plain log-ratio to a frozen reference. "
            "The mean of its gradient over the policy's own samples is 0, so by itself it "
            "pulls nowhere: it is here for comparison.",
            base="k3",
        ),
        "k2": Option(
            KLSettings,
            help="A penalty on (p - f)^2 / 2 at each token, half the squared log-ratio to a frozen "
            "reference.",
            base="k3",
        ),
        "k3": Option(
            KLSettings,
            help="GRPO's penalty: exp(f - p) - (f - p) - 1 at each token, p the policy's "
            "log-prob and f a frozen reference's (arXiv 2402.03300, equation 4).",
            base="none",
            changes={"coefficient": 0.04, "reference": "initial"},
        ),
        "k3_ratio": Option(
            KLSettings,
            help="GRPO's penalty times the token's ratio exp(p - o), which keeps it unbiased "
            "once the policy has left the one that sampled (DeepSeek-V3.2, arXiv "
            "2512.02556; the default of TRL 1.16).",
            base="k3",
        ),
        "full_reverse": Option(
            KLSettings,
            help="KL(policy || reference) over the whole vocabulary at each token, the sum of "
            "exp(p_v) (p_v - f_v) over all tokens v of the vocabulary. It is distillation if "
            "the reference is a teacher (arXiv 2306.13649). The reference must be a model, "
            "since rollouts record the log-prob of one token.",
            base="k3",
        ),
        "full_forward": Option(
            KLSettings,
            help="KL(reference || policy) over the whole vocabulary at each token, the sum of "
            "exp(f_v) (f_v - p_v) over all tokens v of the vocabulary. It makes the policy "
            "cover everything that a teacher might write (arXiv 2306.13649).",
            base="k3",
        ),
        "full_jsd": Option(
            KLSettings,
            help="The generalised Jensen-Shannon divergence over the whole vocabulary at each "
            "token, beta KL(reference || M) + (1 - beta) KL(policy || M) with M = (1 - beta) "
            "policy + beta reference (arXiv 2306.13649).",
            base="k3",
        ),
    },
    "entropy": {
        "bonus": Option(
            EntropySettings,
            help="A bonus on the entropy of the policy at each trained token. Its weighted sum is "
            "subtracted from the loss.",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""
