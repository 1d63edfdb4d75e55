"""The specification: the same loss, metrics and gradient in plain float64 loops that share no code
with the rest.

Slow on purpose. Where an implementation disagrees with this file, the implementation is wrong.

Names are those of the equations. Of a token t: z logits over temperature, y its label, p, o, b and
f its log-probs under the new, the old, the sampling and the reference policy; lam the clamped
log-ratio over the scope, rho its exponential, A the advantage. Of the step: D documents, N trained
tokens, G groups; N_g and N_a trained tokens of a group g and of an attempt (trajectory) a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.losses.reference_terms import OF_ROW, OF_TOKEN, factors, k3, log_softmax, mismatch
from pgtoolkit.losses.reference_terms import metrics as metrics_of_sampling


@dataclass(frozen=True)
class Reference:
    """A step's loss, metrics and gradient.

    log_probs, entropy: T floats, 0 where not trained. gradient: (T, V) float64, of the loss by the
        logits.

    divergence: T floats, the full KL of each row; 0 where not trained, and where the loss has none.
    """

    loss: float
    log_probs: list[float]
    entropy: list[float]
    divergence: list[float]
    metrics: dict[str, float]
    gradient: Tensor


def policy_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    document_index: Tensor,
    *,
    loss: str,
    aggregation: str,
    divisor: float | None = None,
    group_index: Tensor | None = None,
    trajectory_index: Tensor | None = None,
    num_documents: int | None = None,
    temperature: float = 1.0,
    metrics: str = "with_entropy",
    correction: str | None = None,
    correction_settings: dict | None = None,
    sampling_log_probs: Tensor | None = None,
    entropy_coefficient: float = 0.0,
    kl: str | None = None,
    kl_coefficient: float = 0.0,
    ref_log_probs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    **parameters: float | None,
) -> Reference:
    """Compute a whole step by the equations: the sum over t of w_t rho_t l_t. Arguments as in
    `pgtoolkit.policy_loss`.

    kl: the kind of the penalty; ref_logits: (T, V), for one over the whole vocabulary.
    parameters, correction_settings: all those of the loss family, of the correction.
    """
    z = [[float(x) / temperature for x in row] for row in logits.double().tolist()]
    y = labels.tolist()
    o = old_log_probs.double().tolist()
    advantage = advantages.double().tolist()
    b = None if sampling_log_probs is None else sampling_log_probs.double().tolist()
    f = None if ref_log_probs is None else ref_log_probs.double().tolist()
    belongs_to = document_index.tolist()
    D = num_documents if num_documents is not None else max(belongs_to) + 1
    trained = [[t for t in range(len(y)) if y[t] >= 0 and belongs_to[t] == d] for d in range(D)]
    N = sum(len(tokens) for tokens in trained)
    groups = [0] * D if group_index is None else group_index.tolist()
    G = len(set(groups))
    N_g = {g: sum(len(trained[d]) for d in range(D) if groups[d] == g) for g in groups}
    attempts = list(range(D)) if trajectory_index is None else trajectory_index.tolist()
    N_a = {a: sum(len(trained[d]) for d in range(D) if attempts[d] == a) for a in attempts}

    p = [0.0] * len(y)
    entropy = [0.0] * len(y)
    probs = {}
    for d in range(D):
        for t in trained[d]:
            largest = max(z[t])
            log_z = largest + math.log(math.fsum(math.exp(x - largest) for x in z[t]))
            probs[t] = [math.exp(x - log_z) for x in z[t]]
            p[t] = z[t][y[t]] - log_z
            entropy[t] = log_z - math.fsum(
                q * x for q, x in zip(probs[t], z[t], strict=True) if q > 0
            )

    total = []
    gradient = torch.zeros(logits.shape, dtype=torch.float64)
    lam, rho, was_clamped, clips, corrected, measured = {}, {}, {}, {}, {}, {}
    divergence = [0.0] * len(y)
    by_logit = {}
    for d in range(D):
        tokens = trained[d]
        if not tokens:
            continue
        n = len(tokens)
        mean_advantage = math.fsum(advantage[t] for t in tokens) / n
        own = {t: p[t] - o[t] for t in tokens}
        if loss == "gmpo":
            own = {t: _one_sided(own[t], mean_advantage, **parameters) for t in tokens}
        over_document = math.fsum(own.values()) if loss == "vespo" else math.fsum(own.values()) / n
        weight = {
            t: _weight(aggregation, len(N_a), N_a[attempts[d]], G, N_g[groups[d]], N, divisor)
            for t in tokens
        }
        corrected |= factors(correction, correction_settings, tokens, p, o, b, advantage)
        plain = weight
        weight = {t: plain[t] * corrected.get(t, (1.0,))[0] for t in tokens}
        slopes = {}
        penalty = dict.fromkeys(tokens, 0.0)
        for t in tokens:
            raw = over_document if loss in BY_DOCUMENT else own[t]
            A = mean_advantage if loss in BY_DOCUMENT else advantage[t]
            lam[t] = min(20.0, max(-20.0, raw))
            was_clamped[t] = abs(raw) > 20.0
            rho[t] = math.exp(lam[t])
            surrogate, slopes[t] = _SURROGATES[loss](rho[t], lam[t], A, p[t], **parameters)
            clips[t] = _clips(loss, rho[t], p[t], p[t] - o[t], A, **parameters)
            total.append(weight[t] * surrogate)
            total.append(-entropy_coefficient * plain[t] * entropy[t])
            if kl in OF_ROW:
                assert ref_logits is not None
                its = [float(x) / temperature for x in ref_logits[t].double().tolist()]
                divergence[t], by_logit[t] = OF_ROW[kl](log_softmax(z[t]), log_softmax(its))
                total.append(kl_coefficient * plain[t] * divergence[t])
            elif kl is not None:
                assert f is not None
                value, slope = OF_TOKEN[kl](p[t], o[t], f[t])
                total.append(kl_coefficient * plain[t] * value)
                penalty[t] = kl_coefficient * plain[t] * slope
        if b is not None:
            beyond = _outside(loss, {t: o[t] - b[t] for t in tokens}, o, mean_advantage, parameters)
            measured |= mismatch(tokens, o, b, beyond)
        for t in tokens:
            c = weight[t] * slopes[t]
            # the derivative goes through the mean of the document's log-ratios
            if loss in ("gspo", "gmpo"):
                c = math.fsum(weight[u] * slopes[u] for u in tokens) / n
            if loss == "gmpo" and own[t] != p[t] - o[t]:
                c = 0.0
            # the others' log-ratio has no gradient
            if was_clamped[t] and loss in ("grpo", "gspo", "sapo", "gmpo"):
                c = 0.0
            c += penalty[t]
            for v, q in enumerate(probs[t]):
                gradient[t, v] = c / temperature * ((v == y[t]) - q)
                if kl in OF_ROW:
                    gradient[t, v] += kl_coefficient * plain[t] * by_logit[t][v] / temperature
                # the derivative of the entropy by a logit is -q (log q + entropy) / temperature
                if q > 0:
                    slope = q * (math.log(q) + entropy[t]) / temperature
                    gradient[t, v] += entropy_coefficient * plain[t] * slope

    def document_mean(value) -> float:
        return (
            math.fsum(
                math.fsum(value(t) for t in tokens) / len(tokens) for tokens in trained if tokens
            )
            / D
        )

    results = {
        "new_logprobs": document_mean(lambda t: p[t]),
        "num_tokens": N,
        "num_documents": D,
        "num_empty_documents": sum(not tokens for tokens in trained),
    }
    if group_index is not None:
        results["num_groups"] = G
    if trajectory_index is not None:
        results["num_trajectories"] = len(N_a)
    if metrics != "none":
        results |= _basic_metrics(
            trained, document_mean, loss, lam, rho, was_clamped, clips, o, advantage
        )
        results |= metrics_of_sampling(
            corrected, measured, document_mean, [t for tokens in trained for t in tokens]
        )
    if metrics != "none" and kl in OF_ROW:
        results["kl_ref"] = document_mean(lambda t: divergence[t])
    elif metrics != "none" and f is not None:
        results["kl_ref"] = document_mean(lambda t: k3(p[t], o[t], f[t])[0])
    if metrics == "with_entropy":
        results["entropy"] = document_mean(lambda t: entropy[t])
    return Reference(math.fsum(total), p, entropy, divergence, results, gradient)


def names(family, aggregation) -> dict:
    """Return the keywords above for a family and an aggregation as objects.

    Raises ValueError for those that are not specified here.
    """
    loss = type(family).__name__.lower()
    mode = aggregation.name
    is_custom = not type(family).__module__.startswith("pgtoolkit.")
    if (
        is_custom
        or loss not in _SURROGATES
        or mode not in ("sample_mean", "prompt_mean", "token_mean", "constant")
    ):
        raise ValueError(
            "impl='reference' computes whole steps under the four aggregations and the families of "
            "pgtoolkit, no others"
        )
    return {
        "loss": loss,
        "aggregation": mode,
        "divisor": getattr(aggregation, "divisor", None),
        **vars(family),
    }


def _weight(aggregation, D, N_d, G, N_g, N, divisor) -> float:
    if aggregation == "sample_mean":
        return 1 / (D * N_d)
    if aggregation == "prompt_mean":
        return 1 / (G * N_g)
    if aggregation == "token_mean":
        return 1 / N
    assert aggregation == "constant"
    return 1 / (D * divisor)


BY_DOCUMENT = ("gspo", "gmpo", "vespo")  # families whose ratio and advantage are a document's

# The families: (l, its derivative by the log-ratio, or by the log-prob where the ratio is a factor
#   without gradient) of a ratio r, log-ratio x, advantage A and new log-prob p. The bounds
#   themselves pass.


def _clip(r, x, A, p, epsilon_low, epsilon_high, dual_clip=None):
    """grpo, gspo: -min(r A, clip(r) A); with a dual clip at most -dual_clip A where A < 0."""
    clipped = min(1 + epsilon_high, max(1 - epsilon_low, r))
    if dual_clip is not None and A < 0 and r > dual_clip:
        return -dual_clip * A, 0.0
    passes = r <= 1 + epsilon_high if A > 0 else r >= 1 - epsilon_low
    return -min(r * A, clipped * A), -r * A if passes else 0.0


def _cispo(r, x, A, p, epsilon_low, epsilon_high):
    clipped = min(1 + epsilon_high, max(0.0 if epsilon_low is None else 1 - epsilon_low, r))
    return -clipped * A * p, -clipped * A


def _sapo(r, x, A, p, temperature_positive, temperature_negative):
    tau = temperature_positive if A > 0 else temperature_negative
    gate = 1 / (1 + math.exp(-tau * (r - 1))) if r < 1e3 else 1.0
    return -4 / tau * gate * A, -4 * r * gate * (1 - gate) * A


def _gmpo(r, x, A, p, epsilon_low, epsilon_high):
    return -r * A, -r * A


def _dppo(r, x, A, p, delta_low, delta_high, ratio_cap, divergence):
    moved = _moved(x, p, divergence)
    if (A > 0 and moved > delta_high) or (A < 0 and moved < -delta_low):
        return 0.0, 0.0
    return -min(r, ratio_cap) * A * p, -min(r, ratio_cap) * A


def _moved(x, p, divergence):
    """dppo: how far a token's probability has moved from exp(o) to exp(p), below 0 where it has
    fallen; x = p - o."""
    new = math.exp(p)
    old = math.exp(p - x)
    if divergence == "total_variation":
        return new - old
    kl = -old * x + (1 - old) * math.log((max(0.0, 1 - old) + 1e-8) / (max(0.0, 1 - new) + 1e-8))
    return math.copysign(kl, x)


def _vespo(r, x, A, p, power_positive, decay_positive, power_negative, decay_negative):
    power, decay = (power_positive, decay_positive) if A >= 0 else (power_negative, decay_negative)
    weight = r**power * math.exp(decay * (1 - r))
    return -weight * A * p, -weight * A


def _kimi(r, x, A, p, tau):
    return -A * p + tau / 2 * x**2, -A + tau * x


def _reinforce(r, x, A, p):
    return -A * p, -A


_SURROGATES = {
    **{"grpo": _clip, "gspo": _clip, "cispo": _cispo, "sapo": _sapo, "gmpo": _gmpo, "dppo": _dppo},
    **{"vespo": _vespo, "kimi": _kimi, "reinforce": _reinforce},
}


def _one_sided(x, A, epsilon_low, epsilon_high) -> float:
    """gmpo: a token's log-ratio, clipped on the side to which the advantage pushes it."""
    return min(x, epsilon_high) if A > 0 else max(x, -epsilon_low) if A < 0 else x


def _clips(
    loss,
    r,
    p,
    x,
    A,
    epsilon_low=None,
    epsilon_high=None,
    delta_low=None,
    delta_high=None,
    divergence=None,
    dual_clip=None,
    **_,
):
    """(outside the bounds, the lower bound changes the coefficient, the upper one does); x: of the
    token alone."""
    below = above = False
    if loss in ("grpo", "gspo", "cispo"):
        assert epsilon_high is not None
        below, above = r < (0.0 if epsilon_low is None else 1 - epsilon_low), r > 1 + epsilon_high
    if loss == "gmpo":
        assert epsilon_low is not None
        assert epsilon_high is not None
        below, above = x < -epsilon_low, x > epsilon_high
    if loss == "dppo":
        assert delta_low is not None
        assert delta_high is not None
        moved = _moved(min(20.0, max(-20.0, x)), p, divergence)
        below, above = moved < -delta_low, moved > delta_high
    # The clip cuts the gradient on one side of A; the weight of cispo is clipped on both.
    low, high = (
        below and (A != 0 if loss == "cispo" else A < 0),
        above and (A != 0 if loss == "cispo" else A > 0),
    )
    return below or above, low, high or (dual_clip is not None and A < 0 and r > dual_clip)


def _outside(loss, x, o, A, parameters) -> dict[int, bool]:
    """For each token whether log-ratios x, o being the upper log-prob, lie outside of the family's
    bounds."""
    own = {t: _one_sided(x[t], A, **parameters) for t in x} if loss == "gmpo" else x
    over_document = (
        math.fsum(own.values()) if loss == "vespo" else math.fsum(own.values()) / len(own)
    )
    over = {t: over_document if loss in BY_DOCUMENT else own[t] for t in x}
    ratio = {t: math.exp(min(20.0, max(-20.0, over[t]))) for t in x}
    return {
        t: _clips(loss, ratio[t], o[t], x[t], A, **parameters | {"dual_clip": None})[0] for t in x
    }


def _basic_metrics(
    trained, document_mean, loss, lam, rho, was_clamped, clips, o, advantage
) -> dict[str, float]:
    tokens = [t for document in trained for t in document]
    v = {
        t: 1 / len(document) if loss in BY_DOCUMENT else 1.0
        for document in trained
        for t in document
    }
    first = math.fsum(v[t] * rho[t] for t in tokens)
    second = math.fsum(v[t] * rho[t] ** 2 for t in tokens)
    return {
        "old_logprobs": document_mean(lambda t: o[t]),
        "ratio_new_old": document_mean(lambda t: rho[t]),
        "advantage": document_mean(lambda t: advantage[t]),
        "kl_new_old": document_mean(lambda t: rho[t] - lam[t] - 1),
        "clipped_ratio_fraction": document_mean(lambda t: clips[t][0]),
        "clipped_low_fraction": document_mean(lambda t: clips[t][1]),
        "clipped_high_fraction": document_mean(lambda t: clips[t][2]),
        "clamped_log_ratio_fraction": document_mean(lambda t: was_clamped[t]),
        "ratio_new_old_sum": first,
        "ratio_new_old_squared_sum": second,
        "effective_sample_size": first**2 / (math.fsum(v.values()) * second),
        "max_advantage": max(advantage[t] for t in tokens),
        "min_advantage": min(advantage[t] for t in tokens),
        "max_ratio_new_old": max(rho[t] for t in tokens),
        "min_ratio_new_old": min(rho[t] for t in tokens),
    }
