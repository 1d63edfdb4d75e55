"""The specification of corrections, penalties against a reference, score centering and a critic.

It is written as `reference.py` is. A penalty on a token is a function of its log-probs p (new), o
(old) and f (of the reference), and returns (value, its derivative by p). A penalty on a row of the
vocabulary is a function of the log-probs p_v and f_v of all its tokens, and returns (value, its
derivatives by the logits).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pgtoolkit.losses.reference_families import Parameters, factor

if TYPE_CHECKING:
    from pgtoolkit.losses.corrections import Correction

DocumentMean = Callable[[Callable[[int], float]], float]
"""The mean over documents of the mean of a function of their trained tokens."""


def corrections(
    correction: str | None,
    settings: Parameters | None,
    tokens: list[int],
    p: list[float],
    o: list[float],
    b: list[float] | None,
    advantage: list[float],
) -> dict[int, tuple[float, bool, bool]]:
    """Return (rho, whether it lies beyond the bounds, whether the clamp acted) of each token.

    tokens: the trained ones of a document.
    """
    if correction is None:
        return {}
    assert settings is not None
    n = len(tokens)
    if correction == "off_policy_mask":
        sampled = o if b is None else b
        behind = math.fsum(sampled[t] - p[t] for t in tokens) / n
        masked = (
            math.fsum(advantage[t] for t in tokens) / n < 0
            and _clamp(behind) > settings["threshold"]
        )
        return {t: (0.0 if masked else 1.0, masked, abs(behind) > 20) for t in tokens}
    assert b is not None
    if settings.get("measure", "ratio") != "ratio":
        return _masked_by_distance(correction, settings, tokens, o, b)
    low = settings["low"] or 0.0
    high = settings["high"]
    mean = settings.get("mean")
    results = {}
    for t in tokens:
        x = o[t] - b[t]
        v = math.exp(_clamp(x))
        over = x
        if mean in ("product", "geometric"):
            over = math.fsum(o[u] - b[u] for u in tokens) / (n if mean == "geometric" else 1)
        ratio = math.exp(_clamp(over))
        outside = ratio < low or ratio > high
        if mean == "worst":
            of_tokens = [math.exp(_clamp(o[u] - b[u])) for u in tokens]
            outside = min(of_tokens) < low or max(of_tokens) > high
        if correction.endswith("truncate"):
            rho = min(high, max(low, ratio))
        else:
            kept = {"document": ratio, "token": v, "one": 1.0}[settings.get("factor", "token")]
            rho = 0.0 if outside else kept
        results[t] = rho, outside, abs(over) > 20
    return results


def _masked_by_distance(
    correction: str, settings: Parameters, tokens: list[int], o: list[float], b: list[float]
) -> dict[int, tuple[float, bool, bool]]:
    """Return the results of `factors` for a mask by k2 or k3."""
    distance = {}
    for t in tokens:
        x = _clamp(o[t] - b[t])
        distance[t] = x * x / 2 if settings["measure"] == "k2" else math.exp(x) - 1 - x
    if correction == "sequence_mask":
        over = {
            "product": math.fsum(distance.values()),
            "geometric": math.fsum(distance.values()) / len(tokens),
            "worst": max(distance.values()),
        }[settings["mean"]]
        distance = dict.fromkeys(tokens, over)
    results = {}
    for t in tokens:
        outside = distance[t] > settings["threshold"]
        results[t] = 0.0 if outside else 1.0, outside, abs(o[t] - b[t]) > 20
    return results


def normalized(
    correction: str | None,
    settings: Parameters | None,
    corrected: dict[int, tuple[float, bool, bool]],
    trained: list[list[int]],
) -> dict[int, tuple[float, bool, bool]]:
    """Return the results of `factors` of a whole step, with rho divided by its mean if asked for.

    trained: the trained tokens of each document.
    """
    if settings is None or settings.get("normalize", "none") == "none":
        return corrected
    by_document = correction == "sequence_truncate" or settings.get("factor") == "document"
    if by_document:
        rho = [corrected[tokens[0]][0] for tokens in trained if tokens]
    else:
        rho = [corrected[t][0] for tokens in trained for t in tokens]
    mean = math.fsum(rho) / len(rho)
    return {
        t: (rho_t / mean if mean else 0.0, outside, clamped)
        for t, (rho_t, outside, clamped) in corrected.items()
    }


def mismatch(
    tokens: list[int], o: list[float], b: list[float], beyond: dict[int, bool]
) -> dict[int, tuple[float, float, bool]]:
    """Return (k3 of o against b, |o - b|, whether the family's clip would act) of each token.

    tokens: the trained ones of a document. beyond: whether the clip would act, of each token.
    """
    differences = {t: o[t] - b[t] for t in tokens}
    return {
        t: (math.exp(_clamp(x)) - _clamp(x) - 1, abs(x), beyond[t]) for t, x in differences.items()
    }


def metrics(
    corrected: dict[int, tuple[float, bool, bool]],
    measured: dict[int, tuple[float, float, bool]],
    document_mean: DocumentMean,
    tokens: list[int],
) -> dict[str, float]:
    """Return the metrics of all documents.

    corrected: the results of `corrections`; empty without a correction.
    measured: the results of `mismatch`; empty without sampling log-probs.
    """
    results = {}
    if measured:
        results |= {
            "kl_old_sampling": document_mean(lambda t: measured[t][0]),
            "difference_old_sampling": document_mean(lambda t: measured[t][1]),
            "clipped_sampling_fraction": document_mean(lambda t: measured[t][2]),
            "max_difference_old_sampling": max(measured[t][1] for t in tokens),
        }
    if corrected:
        rho = {t: corrected[t][0] for t in tokens}
        first = math.fsum(rho.values())
        second = math.fsum(x**2 for x in rho.values())
        results |= {
            "correction_factor": document_mean(lambda t: rho[t]),
            "correction_outside_fraction": document_mean(lambda t: corrected[t][1]),
            "correction_clamped_fraction": document_mean(lambda t: corrected[t][2]),
            "max_correction_factor": max(rho.values()),
            "min_correction_factor": min(rho.values()),
            "correction_effective_sample_size": first**2 / (len(tokens) * second)
            if second
            else math.nan,
        }
    return results


def correction_names(correction: Correction | None) -> Parameters:
    """Return the keywords of `reference.policy_loss` for a correction."""
    if correction is None:
        return {}
    return {"correction": correction.name, "correction_settings": vars(correction)}


def _clamp(x: float) -> float:
    return min(20.0, max(-20.0, x))


def _k1(p: float, o: float, f: float) -> tuple[float, float]:
    return p - f, 1.0


def _k2(p: float, o: float, f: float) -> tuple[float, float]:
    return (p - f) ** 2 / 2, p - f


def k3(p: float, o: float, f: float) -> tuple[float, float]:
    x = _clamp(f - p)
    return math.exp(x) - x - 1, 1 - math.exp(x) if x == f - p else 0.0


def _k3_ratio(p: float, o: float, f: float) -> tuple[float, float]:
    value, slope = k3(p, o, f)
    x = _clamp(p - o)
    return value * math.exp(x), math.exp(x) * (slope + (value if x == p - o else 0.0))


OF_TOKEN = {"k1": _k1, "k2": _k2, "k3": k3, "k3_ratio": _k3_ratio}
"""Kind of penalty -> its function of a token."""


def _full_reverse(p: list[float], f: list[float]) -> tuple[float, list[float]]:
    value = math.fsum(math.exp(x) * (x - y) for x, y in zip(p, f, strict=True) if x > -math.inf)
    return value, [
        math.exp(x) * (x - y - value) if x > -math.inf else 0.0 for x, y in zip(p, f, strict=True)
    ]


def _full_forward(p: list[float], f: list[float]) -> tuple[float, list[float]]:
    value = math.fsum(math.exp(y) * (y - x) for x, y in zip(p, f, strict=True) if y > -math.inf)
    return value, [math.exp(x) - math.exp(y) for x, y in zip(p, f, strict=True)]


def full_jsd(p: list[float], f: list[float], beta: float) -> tuple[float, list[float]]:
    """Return beta KL(f || M) + (1 - beta) KL(p || M), M = (1 - beta) p + beta f, and its
    derivatives."""
    mixed = [(1 - beta) * math.exp(x) + beta * math.exp(y) for x, y in zip(p, f, strict=True)]
    of_policy = [
        math.exp(x) * (x - math.log(m)) if x > -math.inf else 0.0
        for x, m in zip(p, mixed, strict=True)
    ]
    of_reference = [
        math.exp(y) * (y - math.log(m)) if y > -math.inf else 0.0
        for y, m in zip(f, mixed, strict=True)
    ]
    K = math.fsum(of_policy)
    slopes = [(1 - beta) * (t - math.exp(x) * K) for t, x in zip(of_policy, p, strict=True)]
    return beta * math.fsum(of_reference) + (1 - beta) * K, slopes


OF_ROW = {"full_reverse": _full_reverse, "full_forward": _full_forward}
"""Kind of penalty -> its function of a row of the vocabulary."""


def centering(
    loss: str, parameters: Parameters, p: list[float], q: dict[int, float]
) -> tuple[float, list[float], float]:
    """Return (sum over H of a_v ln pi_v, its derivatives by the logits, sum over H of pi_v).

    p: the new log-probs of a row of the vocabulary. q: the sampler's log-probs of the tokens of H.
    Source: arXiv 2609.20807. The advantage, the weight and the temperature are not in it.
    """
    pi = {v: math.exp(p[v]) for v in q}
    rest_pi = max(1 - math.fsum(pi.values()), 1e-6)
    rest_q = max(1 - math.fsum(math.exp(x) for x in q.values()), 1e-6)
    rho = rest_q / rest_pi
    alpha = rho * factor(loss, 1 / rho, parameters)
    a = {
        v: math.exp(q[v]) * factor(loss, math.exp(_clamp(p[v] - q[v])), parameters) - alpha * pi[v]
        for v in q
    }
    value = math.fsum(a[v] * max(p[v], -1000.0) for v in q)
    by_logit = [a.get(v, 0.0) - math.exp(x) * math.fsum(a.values()) for v, x in enumerate(p)]
    return value, by_logit, math.fsum(pi.values())


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    trained: Sequence[bool],
    gamma: float,
    gae_lambda: float,
) -> dict[int, tuple[float, float]]:
    """Return place -> (advantage, return) of each trained token of a document.

    rewards, values, trained: of each place; those that are not trained are passed over.
    Source: arXiv 1506.02438, equations 12 and 16.
    """
    places = [place for place, is_trained in enumerate(trained) if is_trained]
    differences = []
    for number, place in enumerate(places):
        following = values[places[number + 1]] if number + 1 < len(places) else 0.0
        differences.append(rewards[place] + gamma * following - values[place])
    results = {}
    for number, place in enumerate(places):
        terms = ((gamma * gae_lambda) ** later * x for later, x in enumerate(differences[number:]))
        advantage = math.fsum(terms)
        results[place] = advantage, advantage + values[place]
    return results


def value_loss(
    value: float, old_value: float, target: float, clip: float | None
) -> tuple[float, float]:
    """Return (loss, its derivative by the value) of a critic.

    The loss is half the squared distance to the target, clipped as in PPO; clip None: not clipped.
    """
    free = (value - target) ** 2 / 2
    if clip is None or abs(value - old_value) <= clip:
        return free, value - target
    bounded = old_value + math.copysign(clip, value - old_value)
    held = (bounded - target) ** 2 / 2
    return (free, value - target) if free > held else (held, 0.0)


def log_softmax(row: list[float]) -> list[float]:
    largest = max(row)
    log_z = largest + math.log(math.fsum(math.exp(x - largest) for x in row))
    return [x - log_z for x in row]


def kept_by_entropy(entropy: dict[int, float], fraction: float) -> set[int]:
    """Return the tokens whose entropy is at least the (1 - fraction) quantile of all, which lies
    between two entropies in proportion. Entropies that differ by less than 1e-6 are equal."""
    ordered = sorted(entropy.values())
    place = (1 - fraction) * (len(ordered) - 1)
    low = ordered[math.floor(place)]
    high = ordered[math.ceil(place)]
    threshold = low + (place - math.floor(place)) * (high - low)
    return {t for t, value in entropy.items() if value >= threshold - 1e-6}
