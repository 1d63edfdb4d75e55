"""The specification: the same loss, metrics and gradient in plain float64 loops that share no code with the rest.

Slow on purpose. Where an implementation disagrees with this file, the implementation is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """loss: float. log_probs, entropy: T floats, 0 where not trained. gradient: (T, V) float64, of loss by logits."""

    loss: float
    log_probs: list[float]
    entropy: list[float]
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
    epsilon_low: float | None,
    epsilon_high: float,
    aggregation: str,
    divisor: float | None = None,
    group_index: Tensor | None = None,
    num_documents: int | None = None,
    temperature: float = 1.0,
    metrics: str = "with_entropy",
) -> Reference:
    """A whole step, by the equations: sum over t of w_t l_t. Arguments as in `pgtoolkit.policy_loss`."""
    z = [[float(x) / temperature for x in row] for row in logits.double().tolist()]
    y, o, advantage = labels.tolist(), old_log_probs.double().tolist(), advantages.double().tolist()
    belongs_to = document_index.tolist()
    lower, upper = 0.0 if epsilon_low is None else 1 - epsilon_low, 1 + epsilon_high
    D = num_documents if num_documents is not None else max(belongs_to) + 1
    trained = [[t for t in range(len(y)) if y[t] >= 0 and belongs_to[t] == d] for d in range(D)]
    N = sum(len(tokens) for tokens in trained)
    groups = [0] * D if group_index is None else group_index.tolist()
    G = len(set(groups))
    N_g = {g: sum(len(trained[d]) for d in range(D) if groups[d] == g) for g in groups}

    p, entropy, probs = [0.0] * len(y), [0.0] * len(y), {}
    for d in range(D):
        for t in trained[d]:
            largest = max(z[t])
            log_z = largest + math.log(math.fsum(math.exp(x - largest) for x in z[t]))
            probs[t] = [math.exp(x - log_z) for x in z[t]]
            p[t] = z[t][y[t]] - log_z
            entropy[t] = log_z - math.fsum(q * x for q, x in zip(probs[t], z[t], strict=True) if q > 0)

    total, gradient = [], torch.zeros(logits.shape, dtype=torch.float64)
    lam, rho, scope_advantage, was_clamped = {}, {}, {}, {}
    for d in range(D):
        tokens = trained[d]
        if not tokens:
            continue
        n = len(tokens)
        mean_log_ratio = math.fsum(p[t] - o[t] for t in tokens) / n
        mean_advantage = math.fsum(advantage[t] for t in tokens) / n
        weight = {t: _weight(aggregation, D, n, G, N_g[groups[d]], N, divisor) for t in tokens}
        for t in tokens:
            raw = mean_log_ratio if loss == "gspo" else p[t] - o[t]
            A = mean_advantage if loss == "gspo" else advantage[t]
            lam[t] = min(20.0, max(-20.0, raw))
            was_clamped[t] = abs(raw) > 20.0
            scope_advantage[t] = A
            rho[t] = math.exp(lam[t])
            clipped = min(upper, max(lower, rho[t]))
            # cispo: the clipped ratio is a constant factor of the log-prob.
            surrogate = -clipped * A * p[t] if loss == "cispo" else -min(rho[t] * A, clipped * A)
            total.append(weight[t] * surrogate)
        for t in tokens:
            A = scope_advantage[t]
            # 1 where neither clip nor clamp acts; a ratio equal to a bound keeps its gradient.
            k = (rho[t] <= upper if A > 0 else rho[t] >= lower) and not was_clamped[t]
            w = math.fsum(weight.values()) / n if loss == "gspo" else weight[t]
            c = -w * A * (min(upper, max(lower, rho[t])) if loss == "cispo" else rho[t] * k)
            for v, q in enumerate(probs[t]):
                gradient[t, v] = c / temperature * ((v == y[t]) - q)

    def document_mean(value) -> float:
        return math.fsum(math.fsum(value(t) for t in tokens) / len(tokens) for tokens in trained if tokens) / D

    results = {
        "new_logprobs": document_mean(lambda t: p[t]),
        "num_tokens": N,
        "num_documents": D,
        "num_empty_documents": sum(not tokens for tokens in trained),
    }
    if group_index is not None:
        results["num_groups"] = G
    if metrics != "none":
        tokens = [t for document in trained for t in document]
        v = {t: 1 / len(document) if loss == "gspo" else 1.0 for document in trained for t in document}
        # The clip cuts the gradient on one side of A; the weight of cispo is clipped on both.
        down = {t: scope_advantage[t] != 0 if loss == "cispo" else scope_advantage[t] < 0 for t in tokens}
        up = {t: scope_advantage[t] != 0 if loss == "cispo" else scope_advantage[t] > 0 for t in tokens}
        first = math.fsum(v[t] * rho[t] for t in tokens)
        second = math.fsum(v[t] * rho[t] ** 2 for t in tokens)
        results |= {
            "old_logprobs": document_mean(lambda t: o[t]),
            "ratio_new_old": document_mean(lambda t: rho[t]),
            "advantage": document_mean(lambda t: advantage[t]),
            "kl_new_old": document_mean(lambda t: rho[t] - lam[t] - 1),
            "clipped_ratio_fraction": document_mean(lambda t: rho[t] < lower or rho[t] > upper),
            "clipped_low_fraction": document_mean(lambda t: down[t] and rho[t] < lower),
            "clipped_high_fraction": document_mean(lambda t: up[t] and rho[t] > upper),
            "clamped_log_ratio_fraction": document_mean(lambda t: was_clamped[t]),
            "ratio_new_old_sum": first,
            "ratio_new_old_squared_sum": second,
            "effective_sample_size": first**2 / (math.fsum(v.values()) * second),
            "max_advantage": max(advantage[t] for t in tokens),
            "min_advantage": min(advantage[t] for t in tokens),
            "max_ratio_new_old": max(rho[t] for t in tokens),
            "min_ratio_new_old": min(rho[t] for t in tokens),
        }
    if metrics == "with_entropy":
        results["entropy"] = document_mean(lambda t: entropy[t])
    return Reference(math.fsum(total), p, entropy, results, gradient)


def names(family, aggregation) -> dict:
    """The keywords above of a family and an aggregation as objects; ValueError for what is not specified here."""
    loss, mode = type(family).__name__.lower(), aggregation.name
    if loss not in ("grpo", "gspo", "cispo") or mode not in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        raise ValueError(
            "impl='reference' computes whole steps under the four aggregations and the families of pgtoolkit, no others"
        )
    epsilons = {"epsilon_low": family.epsilon_low, "epsilon_high": family.epsilon_high}
    return {"loss": loss, "aggregation": mode, "divisor": getattr(aggregation, "divisor", None), **epsilons}


def _weight(aggregation, D, N_d, G, N_g, N, divisor) -> float:
    if aggregation == "sample_mean":
        return 1 / (D * N_d)
    if aggregation == "prompt_mean":
        return 1 / (G * N_g)
    if aggregation == "token_mean":
        return 1 / N
    assert aggregation == "constant"
    return 1 / (D * divisor)
