"""The metrics of the loss: of the policy, of its sampler, and of a correction between them."""

from __future__ import annotations

from functools import partial

from pgtoolkit.runs.metric import OF_ADVANTAGES, OF_RATIOS, OF_THE_WHOLE_LOSS, Metric

_TOKENS = "trained tokens"
_FIRST_UPDATE = "at a batch's first update"

_basic = partial(Metric, level="basic")
_of_ratios = partial(_basic, over="documents", condition="with old log-probs", in_formula=OF_RATIOS)
_of_advantages = partial(_basic, over=_TOKENS, in_formula=OF_ADVANTAGES)
_of_sampler = partial(
    _basic,
    over="documents",
    condition="where the sampler's log-probs are known",
    in_formula=("rollout.old_log_probs",),
)
_of_correction = partial(
    _basic,
    over="documents",
    condition="with a `correction`",
    in_formula=("correction", "rollout.old_log_probs", "accumulation"),
)
_of_centering = partial(
    _basic,
    over="documents",
    condition="with `loss.score_centering=true`",
    in_formula=("loss", *OF_ADVANTAGES),
    see="losses.md",
)
_REFERENCE = (
    *("kl.kind", "kl.beta", "kl.reference", "kl.reference_prompt"),
    *("kl.update_every", "kl.update_rate"),
)
"""What is in the formula of the distance from a reference, and says which reference."""

OF_THE_LOSS = (
    Metric(
        "loss",
        "the loss of the step",
        formula="Σ w_t l_t",
        over=_TOKENS,
        in_formula=OF_THE_WHOLE_LOSS,
        healthy="near 0, whatever is learned: it is no measure of progress",
        see="losses.md",
    ),
    Metric(
        "new_logprobs",
        "mean log-prob of the trained tokens under the policy in training",
        formula="Σ u p / D",
        over="documents",
        healthy="rises towards 0 as the policy grows certain",
    ),
    _of_ratios(
        "old_logprobs",
        "the same under the policy that generated them",
        formula="Σ u o / D",
        in_formula=("rollout.old_log_probs",),
        healthy="equals `new_logprobs` on the first step of a batch of rollouts",
    ),
    _of_ratios(
        "ratio_new_old",
        "mean ratio of new to old probability",
        formula="Σ u ρ / D",
        healthy="1 on-policy, then near 1",
        least=0.98,
        most=1.02,
        failing_at=_FIRST_UPDATE,
    ),
    _of_ratios(
        "min_ratio_new_old",
        "smallest ρ",
        over=_TOKENS,
        healthy="falls with each step on the same rollouts",
    ),
    _of_ratios(
        "max_ratio_new_old",
        "largest ρ",
        over=_TOKENS,
        healthy="rises with each step on the same rollouts",
    ),
    _of_ratios(
        "kl_new_old",
        'how far the policy is from the one that sampled, by the estimate "k3", which is never '
        "negative; the distance from a reference is `kl_ref`",
        formula="Σ u (ρ − λ − 1) / D",
        healthy="0 on-policy, then small",
        most=0.001,
        failing_at=_FIRST_UPDATE,
    ),
    _of_ratios(
        "clipped_ratio_fraction",
        "share of tokens, or of documents, whose ratio is outside the bounds of the clip, whatever "
        "the sign of the advantage",
        formula="Σ u [ρ < 1−ε_low or ρ > 1+ε_high] / D",
        healthy="0 on-policy, then a few percent; with `gspo` most",
        most=0.5,
        unless="with `gspo` and `gmpo` where `clipped_low_fraction` + `clipped_high_fraction` "
        "exceeds 0.9",
    ),
    _of_ratios(
        "clipped_low_fraction",
        "the part with ρ < 1−ε_low and A < 0, where the gradient is cut",
        in_formula=(*OF_RATIOS, *OF_ADVANTAGES),
    ),
    _of_ratios(
        "clipped_high_fraction",
        "the part with ρ > 1+ε_high and A > 0, where the gradient is cut",
        in_formula=(*OF_RATIOS, *OF_ADVANTAGES),
    ),
    _of_ratios(
        "clamped_log_ratio_fraction",
        "share of tokens whose log-ratio was clamped to ±20",
        formula="Σ u [the clamp acted] / D",
        healthy="0, always",
        most=0.0,
    ),
    _of_ratios(
        "effective_sample_size",
        "share of the tokens, or documents, that would say as much if all weighed the same",
        formula="(Σ v ρ)² / (Σ v · Σ v ρ²)",
        over=_TOKENS,
        healthy="1 on-policy, above 0.9 afterwards",
        least=0.5,
    ),
    _of_ratios(
        "ratio_new_old_sum",
        "the first sum of `effective_sample_size`, for your own arithmetic",
        formula="Σ v ρ",
        over=_TOKENS,
    ),
    _of_ratios("ratio_new_old_squared_sum", "its second sum", formula="Σ v ρ²", over=_TOKENS),
    _of_advantages(
        "advantage",
        "mean advantage",
        formula="Σ u A / D",
        over="documents",
        healthy="0 where advantages are centred in their group, groups are whole and each attempt "
        "is one document",
    ),
    _of_advantages("min_advantage", "smallest advantage"),
    _of_advantages("max_advantage", "largest advantage"),
    Metric(
        "entropy",
        "mean entropy of the policy at the sampling temperature, in nats",
        formula="Σ u H_t / D, H_t = log Z − Σ_v p_v z_v",
        over="documents",
        level="with_entropy",
        condition="or `basic` with `entropy.coefficient` > 0",
        healthy="falls slowly, not to 0 before the task is solved",
        least=0.01,
    ),
    Metric(
        "entropy_threshold",
        "the least entropy of a token that counts in the policy term, in nats",
        formula="the (1 − fraction) quantile of H_t",
        over=_TOKENS,
        condition="with `entropy.top_fraction`",
        in_formula=("entropy", "accumulation"),
        healthy="falls with `entropy`; near 0 the policy is certain of nearly all it writes",
        see="losses.md",
    ),
    Metric(
        "entropy_kept_fraction",
        "share of the tokens that count in the policy term",
        over=_TOKENS,
        condition="with `entropy.top_fraction`",
        in_formula=("entropy", "accumulation"),
        healthy="`entropy.top_fraction`, or more where many tokens have the threshold's entropy",
        see="losses.md",
    ),
    _basic(
        "largest_group_probability",
        "the largest probability of a completion in the policy's softmax over its prompt's "
        "completions",
        formula="Σ u max_d softmax(s)_d / D",
        over="documents",
        condition="with `loss=tpo` and `lpo`",
        in_formula=("loss",),
        healthy="between 1 / completions and 1; at 1 the others teach nothing",
        see="losses.md",
    ),
    _of_centering(
        "score_centering",
        "mean term of score centering. Only its gradient means something: the value moves with "
        "how much of the probability the likeliest tokens have",
        formula="Σ u A Σ_v a_v ln π_v / D",
    ),
    _of_centering(
        "top_mass_sampling",
        "probability of the sampler's likeliest tokens under the sampler",
        formula="Σ u Σ_v q_v / D",
        healthy="above 0.9; below, the rest is modelled in the shape of the policy's",
    ),
    _of_centering(
        "top_mass_new",
        "the same under the policy in training",
        formula="Σ u Σ_v π_v / D",
        healthy="near `top_mass_sampling`",
    ),
    _basic(
        "kl_ref",
        "how far the policy is from the reference, f the log-prob under it; never negative. With "
        "`kl=full_reverse`, `full_forward` and `full_jsd` it is Σ u k / D of the divergence",
        formula="Σ u (exp(f − p) − (f − p) − 1) / D",
        over="documents",
        in_formula=_REFERENCE,
        condition="where a reference is known: with `kl=...`, or a recorded column `ref_log_probs`",
        healthy="0 at the start of a run with `kl.reference=initial`, then grows; steady where the "
        "penalty holds it. In distillation it falls",
    ),
    _basic(
        "kl_penalty",
        "mean of the penalty's own term, without its coefficient, which is compared with "
        "`kl.target`",
        formula="Σ u k / D",
        over="documents",
        condition="with `kl.target` and `kl.place=loss`",
        in_formula=("kl", "rollout.old_log_probs"),
        healthy="near the target",
    ),
)

OF_THE_SAMPLER = (
    _of_sampler(
        "kl_old_sampling",
        "k3 of o against b: half the square of a typical difference",
        formula="Σ u (v − log v − 1) / D",
        healthy="below 1e-3",
        most=0.01,
    ),
    _of_sampler(
        "difference_old_sampling",
        "mean difference of the two log-probs of a token, without its sign",
        formula="Σ u |o − b| / D",
        healthy="far below the clip's ε",
    ),
    _of_sampler("max_difference_old_sampling", "the largest |o − b|", over=_TOKENS),
    _of_sampler(
        "clipped_sampling_fraction",
        "share of the tokens, or with `gspo` of the documents by their mean difference, whose "
        "ratio the difference alone would take out of the family's clip",
        in_formula=OF_RATIOS,
        healthy="0. Above 0.1 a note is printed once: the clip cannot tell an update from the "
        "difference",
    ),
)

OF_THE_CORRECTION = (
    _of_correction("correction_factor", "mean factor", formula="Σ u ρ / D", healthy="1"),
    _of_correction("min_correction_factor", "smallest factor", over=_TOKENS),
    _of_correction("max_correction_factor", "largest factor", over=_TOKENS),
    _of_correction(
        "correction_outside_fraction",
        "share beyond the correction's bounds: what is truncated, or left out",
        healthy="a few in a thousand",
    ),
    _of_correction(
        "correction_clamped_fraction",
        "share whose log-ratio, as the correction sees it, was clamped to ±20",
        healthy="0",
    ),
    _of_correction(
        "correction_effective_sample_size",
        "share of the tokens that would say as much if all had one factor; missing where every "
        "factor is 0",
        formula="(Σ ρ)² / (N Σ ρ²)",
        over=_TOKENS,
        healthy="above 0.9",
    ),
)

OVER_ALL_DOCUMENTS = frozenset(
    metric.name
    for metric in (*OF_THE_LOSS, *OF_THE_SAMPLER, *OF_THE_CORRECTION)
    if metric.over == "documents"
)
"""Metrics Σ u x / D: a document without a trained token counts in D, as one whose x is 0."""
