"""The specification: loss, metrics and gradient of a step in plain float64 loops.

It shares no code with the rest and is slow on purpose. Where an implementation disagrees with this
file, the implementation is wrong.

Names are those of the equations. Of a token t: z logits over temperature, y its label, p, o, b and
f its log-probs under the new, the old, the sampling and the reference policy; lam the clamped
log-ratio over the scope, rho its exponential, A the advantage. Of the step: D documents, N trained
tokens, G groups; N_g and N_a trained tokens of a group g and of an attempt (trajectory) a.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pgtoolkit.losses.reference_families import (
    BY_DOCUMENT,
    SURROGATES,
    Clips,
    Parameters,
    clips_of,
    outside_bounds,
    over_scope,
    token_terms,
)
from pgtoolkit.losses.reference_terms import (
    OF_ROW,
    OF_TOKEN,
    DocumentMean,
    centering,
    corrections,
    full_jsd,
    k3,
    kept_by_entropy,
    log_softmax,
    mismatch,
    normalized,
)
from pgtoolkit.losses.reference_terms import metrics as metrics_of_sampling

if TYPE_CHECKING:
    from pgtoolkit.losses.aggregation import Aggregation
    from pgtoolkit.losses.family import Family


@dataclass(frozen=True)
class Reference:
    """A step's loss, metrics and gradient.

    log_probs, entropy: T floats, 0 where not trained.
    divergence: T floats, the full KL of each row; 0 where not trained, and where the loss has none.
    gradient: (T, V) float64, of the loss by the logits.
    """

    loss: float
    log_probs: list[float]
    entropy: list[float]
    divergence: list[float]
    metrics: dict[str, float]
    gradient: Tensor


@dataclass(frozen=True)
class _Step:
    """The documents of a step, and the totals by which its weights divide.

    trained: the places of the trained tokens of each document.
    groups, attempts: the group and the attempt of each document.
    signs: of the advantage of each document, 0 where no token is trained.
    """

    trained: list[list[int]]
    groups: list[int]
    attempts: list[int]
    signs: list[int]
    N: int
    G: int
    N_g: dict[int, int]
    N_a: dict[int, int]

    @classmethod
    def of(
        cls,
        labels: list[int],
        document_index: list[int],
        num_documents: int | None,
        group_index: Tensor | None,
        trajectory_index: Tensor | None,
        advantage: list[float],
    ) -> _Step:
        D = num_documents if num_documents is not None else max(document_index) + 1
        trained = [
            [t for t in range(len(labels)) if labels[t] >= 0 and document_index[t] == d]
            for d in range(D)
        ]
        groups = [0] * D if group_index is None else group_index.tolist()
        attempts = list(range(D)) if trajectory_index is None else trajectory_index.tolist()
        return cls(
            trained=trained,
            groups=groups,
            attempts=attempts,
            signs=[
                (advantage[tokens[0]] > 0) - (advantage[tokens[0]] < 0) if tokens else 0
                for tokens in trained
            ],
            N=sum(len(tokens) for tokens in trained),
            G=len(set(groups)),
            N_g={g: sum(len(trained[d]) for d in range(D) if groups[d] == g) for g in groups},
            N_a={a: sum(len(trained[d]) for d in range(D) if attempts[d] == a) for a in attempts},
        )

    def weight(self, aggregation: str, d: int, divisor: float | None) -> float:
        """Return w_t of the tokens of document d."""
        if aggregation == "sample_mean":
            return 1 / (len(self.N_a) * self.N_a[self.attempts[d]])
        if aggregation == "prompt_mean":
            return 1 / (self.G * self.N_g[self.groups[d]])
        if aggregation == "token_mean":
            return 1 / self.N
        if aggregation == "balanced":
            if self.signs[d] == 0:
                return 0.0
            group = [e for e in range(len(self.groups)) if self.groups[e] == self.groups[d]]
            same = [e for e in group if self.signs[e] == self.signs[d]]
            N_gs = sum(len(self.trained[e]) for e in same)
            return len(same) / len(group) / (N_gs * self.G)
        assert aggregation == "constant"
        assert divisor is not None
        return 1 / (len(self.N_a) * divisor)

    def document_mean(self, value: Callable[[int], float]) -> float:
        """Return the mean over documents of the mean of value(t) over their trained tokens.

        A document without trained tokens counts as 0.
        """
        means = [
            math.fsum(value(t) for t in tokens) / len(tokens) for tokens in self.trained if tokens
        ]
        return math.fsum(means) / len(self.trained)


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
    correction_settings: Parameters | None = None,
    sampling_log_probs: Tensor | None = None,
    entropy_coefficient: float = 0.0,
    kl: str | None = None,
    kl_coefficient: float = 0.0,
    kl_beta: float | None = None,
    ref_log_probs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    factors: Tensor | None = None,
    entropy_top_fraction: float | None = None,
    sampling_top_ids: Tensor | None = None,
    sampling_top_log_probs: Tensor | None = None,
    sampling_kept_ids: Tensor | None = None,
    **parameters: float | str | None,
) -> Reference:
    """Return a whole step by the equations: the sum over t of w_t rho_t l_t.

    Arguments are those of `pgtoolkit.policy_loss`, but for these:
    kl, kl_beta: the kind of the penalty, and beta of full_jsd.
    ref_logits: (T, V), for a penalty over the whole vocabulary.
    factors: (T,), of each token's surrogate.
    entropy_top_fraction: of the trained tokens, those of the largest entropies, that the surrogate
        counts; None: all.
    parameters: all those of the loss family.
    correction_settings: all those of the correction.
    """
    z = [[float(x) / temperature for x in row] for row in logits.double().tolist()]
    y = labels.tolist()
    o = old_log_probs.double().tolist()
    advantage = advantages.double().tolist()
    b = None if sampling_log_probs is None else sampling_log_probs.double().tolist()
    f = None if ref_log_probs is None else ref_log_probs.double().tolist()
    of_tokens = [1.0] * len(y) if factors is None else factors.double().tolist()
    step = _Step.of(
        y, document_index.tolist(), num_documents, group_index, trajectory_index, advantage
    )
    p, entropy, probs = _softmax_of_trained(z, y, step.trained)
    S = {} if sampling_kept_ids is None else _kept_sets(sampling_kept_ids, step.trained)
    probs_of_S = dict(probs)
    for t, kept_ids in S.items():
        p[t], probs_of_S[t] = _over_kept(z[t], y[t], kept_ids)
    kept = {t for tokens in step.trained for t in tokens}
    if entropy_top_fraction is not None:
        kept = kept_by_entropy({t: entropy[t] for t in kept}, entropy_top_fraction)

    total = []
    gradient = torch.zeros(logits.shape, dtype=torch.float64)
    lam: dict[int, float] = {}
    rho: dict[int, float] = {}
    was_clamped: dict[int, bool] = {}
    clips: dict[int, Clips] = {}
    corrected: dict[int, tuple[float, bool, bool]] = {}
    measured: dict[int, tuple[float, float, bool]] = {}
    divergence = [0.0] * len(y)
    by_logit: dict[int, list[float]] = {}
    centered: dict[int, tuple[float, float, float]] = {}
    centered_by_logit: dict[int, list[float]] = {}
    for tokens in filter(None, step.trained):
        corrected |= corrections(correction, correction_settings, tokens, p, o, b, advantage)
    corrected = normalized(correction, correction_settings, corrected, step.trained)
    for d, tokens in enumerate(step.trained):
        if not tokens:
            continue
        n = len(tokens)
        mean_advantage = math.fsum(advantage[t] for t in tokens) / n
        log_ratio = {t: p[t] - o[t] for t in tokens}
        term = token_terms(loss, log_ratio, mean_advantage, parameters)
        scoped = over_scope(loss, term)
        of_surrogate = step.weight(aggregation, d, divisor)
        of_penalties = of_surrogate
        if aggregation == "balanced":
            of_penalties = step.weight("prompt_mean", d, divisor)
        uncorrected = dict.fromkeys(tokens, of_penalties)
        weight = {
            t: of_surrogate * corrected.get(t, (1.0,))[0] * of_tokens[t] * (t in kept)
            for t in tokens
        }
        slopes: dict[int, float] = {}
        penalty = dict.fromkeys(tokens, 0.0)
        for t in tokens:
            raw = scoped[t]
            A = mean_advantage if loss in BY_DOCUMENT else advantage[t]
            lam[t] = min(20.0, max(-20.0, raw))
            was_clamped[t] = abs(raw) > 20.0
            rho[t] = math.exp(lam[t])
            surrogate, slopes[t] = SURROGATES[loss](rho[t], lam[t], A, p[t], **parameters)
            if parameters.get("score_centering"):
                assert sampling_top_ids is not None
                assert sampling_top_log_probs is not None
                top = zip(
                    sampling_top_ids[t].tolist(), sampling_top_log_probs[t].tolist(), strict=True
                )
                q = {v: x for v, x in top if v >= 0}
                value, slopes_by_logit, mass = centering(loss, parameters, log_softmax(z[t]), q)
                total.append(weight[t] * A * value)
                centered[t] = A * value, math.fsum(math.exp(x) for x in q.values()), mass
                centered_by_logit[t] = [weight[t] * A * x for x in slopes_by_logit]
            clips[t] = clips_of(loss, rho[t], p[t], log_ratio[t], A, parameters)
            total.append(weight[t] * surrogate)
            total.append(-entropy_coefficient * uncorrected[t] * entropy[t])
            if kl in OF_ROW or kl == "full_jsd":
                assert ref_logits is not None
                ref_row = [float(x) / temperature for x in ref_logits[t].double().tolist()]
                rows = log_softmax(z[t]), log_softmax(ref_row)
                if kl_beta is None:
                    divergence[t], by_logit[t] = OF_ROW[kl](*rows)
                else:
                    divergence[t], by_logit[t] = full_jsd(*rows, kl_beta)
                total.append(kl_coefficient * uncorrected[t] * divergence[t])
            elif kl is not None:
                assert f is not None
                value, slope = OF_TOKEN[kl](p[t], o[t], f[t])
                total.append(kl_coefficient * uncorrected[t] * value)
                penalty[t] = kl_coefficient * uncorrected[t] * slope
        if b is not None:
            old_to_sampling = {t: o[t] - b[t] for t in tokens}
            beyond = outside_bounds(loss, old_to_sampling, o, mean_advantage, parameters)
            measured |= mismatch(tokens, o, b, beyond)
        for t in tokens:
            c = weight[t] * slopes[t]
            # The derivative goes through the mean of the document's log-ratios.
            if loss in ("gspo", "gmpo"):
                c = math.fsum(weight[u] * slopes[u] for u in tokens) / n
            if loss == "gmpo" and term[t] != log_ratio[t]:
                c = 0.0
            # In the other families the log-ratio has no gradient.
            if was_clamped[t] and loss in ("grpo", "gspo", "sapo", "gmpo"):
                c = 0.0
            c += penalty[t]
            row = _gradient_of_row(
                probs[t],
                y[t],
                entropy[t],
                over_kept=probs_of_S[t],
                by_log_prob=c,
                by_entropy=entropy_coefficient * uncorrected[t],
                by_divergence=kl_coefficient * uncorrected[t],
                divergence_by_logit=by_logit.get(t),
                temperature=temperature,
            )
            if t in centered_by_logit:
                pairs = zip(row, centered_by_logit[t], strict=True)
                row = [x + y / temperature for x, y in pairs]
            gradient[t] = torch.tensor(row, dtype=torch.float64)

    results: dict[str, float] = {
        "new_logprobs": step.document_mean(lambda t: p[t]),
        "num_tokens": step.N,
        "num_documents": len(step.trained),
        "num_empty_documents": sum(not tokens for tokens in step.trained),
    }
    if group_index is not None:
        results["num_groups"] = step.G
    if trajectory_index is not None:
        results["num_trajectories"] = len(step.N_a)
    if metrics != "none":
        results |= _basic_metrics(step, loss, lam, rho, was_clamped, clips, o, advantage)
        results |= metrics_of_sampling(
            corrected, measured, step.document_mean, [t for tokens in step.trained for t in tokens]
        )
    if metrics != "none" and (kl in OF_ROW or kl == "full_jsd"):
        results["kl_ref"] = step.document_mean(lambda t: divergence[t])
    elif metrics != "none" and f is not None:
        results["kl_ref"] = step.document_mean(lambda t: k3(p[t], o[t], f[t])[0])
    if metrics != "none" and centered:
        for place, name in enumerate(("score_centering", "top_mass_sampling", "top_mass_new")):
            results[name] = step.document_mean(lambda t, place=place: centered[t][place])
    if metrics == "with_entropy":
        results["entropy"] = step.document_mean(lambda t: entropy[t])
    return Reference(math.fsum(total), p, entropy, divergence, results, gradient)


def _softmax_of_trained(
    z: list[list[float]], y: list[int], trained: list[list[int]]
) -> tuple[list[float], list[float], dict[int, list[float]]]:
    """Return (log-probs of the labels, entropies, probabilities of each row) of trained tokens.

    The first two have T entries, 0 where not trained.
    """
    p = [0.0] * len(y)
    entropy = [0.0] * len(y)
    probs: dict[int, list[float]] = {}
    for tokens in trained:
        for t in tokens:
            largest = max(z[t])
            log_z = largest + math.log(math.fsum(math.exp(x - largest) for x in z[t]))
            probs[t] = [math.exp(x - log_z) for x in z[t]]
            p[t] = z[t][y[t]] - log_z
            entropy[t] = log_z - math.fsum(
                q * x for q, x in zip(probs[t], z[t], strict=True) if q > 0
            )
    return p, entropy, probs


def _kept_sets(kept_ids: Tensor, trained: list[list[int]]) -> dict[int, list[int]]:
    """Return the tokens of S of each trained token whose S is not the vocabulary."""
    rows = {t: [v for v in kept_ids[t].tolist() if v >= 0] for tokens in trained for t in tokens}
    return {t: row for t, row in rows.items() if row}


def _over_kept(z: list[float], label: int, kept_ids: list[int]) -> tuple[float, list[float]]:
    """Return the log-prob of the label over S, and the softmax over S of all tokens."""
    assert label in kept_ids
    largest = max(z[v] for v in kept_ids)
    log_z = largest + math.log(math.fsum(math.exp(z[v] - largest) for v in kept_ids))
    return z[label] - log_z, [math.exp(x - log_z) * (v in kept_ids) for v, x in enumerate(z)]


def _gradient_of_row(
    probs: list[float],
    label: int,
    entropy: float,
    *,
    over_kept: list[float],
    by_log_prob: float,
    by_entropy: float,
    by_divergence: float,
    divergence_by_logit: list[float] | None,
    temperature: float,
) -> list[float]:
    """Return the derivatives of the loss by the logits of a row.

    probs, entropy: of the softmax over the vocabulary. over_kept: the softmax that the log-prob is
        of.
    by_log_prob: the derivative of the loss by the log-prob of the label.
    by_entropy, by_divergence: the factors of the entropy bonus and of the full KL in the loss.
    """
    row = []
    for v, q in enumerate(probs):
        derivative = by_log_prob / temperature * ((v == label) - over_kept[v])
        if divergence_by_logit is not None:
            derivative += by_divergence * divergence_by_logit[v] / temperature
        # The derivative of the entropy by a logit is -q (log q + entropy) / temperature.
        if q > 0:
            slope = q * (math.log(q) + entropy) / temperature
            derivative += by_entropy * slope
        row.append(derivative)
    return row


def names(family: Family, aggregation: Aggregation) -> Parameters:
    """Return the keywords of `policy_loss` for a family and an aggregation.

    Raises ValueError for those that are not specified here.
    """
    loss = type(family).__name__.lower()
    mode = aggregation.name
    is_custom = not type(family).__module__.startswith("pgtoolkit.")
    if (
        is_custom
        or loss not in SURROGATES
        or mode not in ("sample_mean", "prompt_mean", "balanced", "token_mean", "constant")
    ):
        raise ValueError(
            "impl='reference' computes whole steps under the aggregations and the families of "
            "pgtoolkit, no others"
        )
    return {
        "loss": loss,
        "aggregation": mode,
        "divisor": getattr(aggregation, "divisor", None),
        **vars(family),
    }


def _basic_metrics(
    step: _Step,
    loss: str,
    lam: dict[int, float],
    rho: dict[int, float],
    was_clamped: dict[int, bool],
    clips: dict[int, Clips],
    o: list[float],
    advantage: list[float],
) -> dict[str, float]:
    document_mean: DocumentMean = step.document_mean
    tokens = [t for document in step.trained for t in document]
    # Of a family by document, the ratio of a document counts once.
    v = {
        t: 1 / len(document) if loss in BY_DOCUMENT else 1.0
        for document in step.trained
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
