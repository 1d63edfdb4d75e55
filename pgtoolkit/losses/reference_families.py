"""The specification of the loss families: ratio, surrogate, slope and clips of a token.

It is written as `reference.py` is. The surrogate of a family is a function of a ratio r, its
log-ratio x, the advantage A and the new log-prob p. It returns (l, its derivative by the log-ratio,
or by the log-prob where the ratio is a factor without gradient). A ratio equal to a bound keeps its
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Parameters = Mapping[str, Any]
"""All parameters of a family or of a correction by name: numbers, None and names."""

BY_DOCUMENT = ("gspo", "gmpo", "vespo")
"""The families whose ratio and advantage are those of a document."""

Clips = tuple[bool, bool, bool]
"""(outside of the bounds, the lower bound changes the coefficient, the upper one does)."""


def _clip(
    r: float,
    x: float,
    A: float,
    p: float,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> tuple[float, float]:
    """Return the surrogate of grpo and gspo, -min(r A, clip(r) A).

    With a dual clip it is at most -dual_clip A where A < 0.
    """
    clipped = min(1 + epsilon_high, max(1 - epsilon_low, r))
    if dual_clip is not None and A < 0 and r > dual_clip:
        return -dual_clip * A, 0.0
    passes = r <= 1 + epsilon_high if A > 0 else r >= 1 - epsilon_low
    return -min(r * A, clipped * A), -r * A if passes else 0.0


def factor(loss: str, r: float, parameters: Parameters) -> float:
    """Return f(r) of the families with l = -f(r) A p, without a gradient through f."""
    if loss == "cispo":
        low = parameters["epsilon_low"]
        return min(1 + parameters["epsilon_high"], max(0.0 if low is None else 1 - low, r))
    if loss == "icepop":
        return r if parameters["low"] <= r <= parameters["high"] else 0.0
    assert loss == "reinforce"
    return 1.0


def _cispo(
    r: float, x: float, A: float, p: float, **parameters: float | None
) -> tuple[float, float]:
    slope = -factor("cispo", r, parameters) * A
    return slope * p, slope


def _sapo(
    r: float, x: float, A: float, p: float, temperature_positive: float, temperature_negative: float
) -> tuple[float, float]:
    tau = temperature_positive if A > 0 else temperature_negative
    gate = 1 / (1 + math.exp(-tau * (r - 1))) if r < 1e3 else 1.0
    return -4 / tau * gate * A, -4 * r * gate * (1 - gate) * A


def _gmpo(
    r: float, x: float, A: float, p: float, epsilon_low: float, epsilon_high: float
) -> tuple[float, float]:
    return -r * A, -r * A


def _dppo(
    r: float,
    x: float,
    A: float,
    p: float,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
    divergence: str,
    sides: str,
) -> tuple[float, float]:
    moved = _moved(x, p, divergence)
    can_rise = A > 0 or sides == "both"
    can_fall = A < 0 or sides == "both"
    if (can_rise and moved > delta_high) or (can_fall and moved < -delta_low):
        return 0.0, 0.0
    return -min(r, ratio_cap) * A * p, -min(r, ratio_cap) * A


def _icepop(
    r: float, x: float, A: float, p: float, **parameters: float | None
) -> tuple[float, float]:
    slope = -factor("icepop", r, parameters) * A
    return slope * p, slope


def _moved(x: float, p: float, divergence: str) -> float:
    """Return how far dppo says that a token's probability has moved from exp(o) to exp(p).

    It is below 0 where the probability has fallen. x: p - o.
    """
    new = math.exp(p)
    old = math.exp(p - x)
    if divergence == "total_variation":
        return new - old
    if divergence == "squared_log_ratio":
        return math.copysign(x * x / 2, x)
    kl = -old * x + (1 - old) * math.log((max(0.0, 1 - old) + 1e-8) / (max(0.0, 1 - new) + 1e-8))
    return math.copysign(kl, x)


def _vespo(
    r: float,
    x: float,
    A: float,
    p: float,
    power_positive: float,
    decay_positive: float,
    power_negative: float,
    decay_negative: float,
) -> tuple[float, float]:
    power = power_positive if A >= 0 else power_negative
    decay = decay_positive if A >= 0 else decay_negative
    weight = r**power * math.exp(decay * (1 - r))
    return -weight * A * p, -weight * A


def _kimi(r: float, x: float, A: float, p: float, tau: float) -> tuple[float, float]:
    return -A * p + tau / 2 * x**2, -A + tau * x


def _reinforce(
    r: float, x: float, A: float, p: float, **parameters: float | None
) -> tuple[float, float]:
    slope = -factor("reinforce", r, parameters) * A
    return slope * p, slope


SURROGATES: dict[str, Callable[..., tuple[float, float]]] = {
    "grpo": _clip,
    "gspo": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "dppo": _dppo,
    "icepop": _icepop,
    "vespo": _vespo,
    "kimi": _kimi,
    "reinforce": _reinforce,
}


def token_terms(
    loss: str, log_ratio: dict[int, float], A: float, parameters: Parameters
) -> dict[int, float]:
    """Return the term of each token of a document: its log-ratio.

    gmpo clips it on the side to which the document's advantage A pushes it.
    """
    if loss == "gmpo" and A > 0:
        return {t: min(x, parameters["epsilon_high"]) for t, x in log_ratio.items()}
    if loss == "gmpo" and A < 0:
        return {t: max(x, -parameters["epsilon_low"]) for t, x in log_ratio.items()}
    return log_ratio


def over_scope(loss: str, terms: dict[int, float]) -> dict[int, float]:
    """Return, for each token of a document, its term, or the sum or mean over the document."""
    if loss not in BY_DOCUMENT:
        return terms
    over_document = math.fsum(terms.values())
    if loss != "vespo":
        over_document /= len(terms)
    return dict.fromkeys(terms, over_document)


def clips_of(loss: str, r: float, p: float, x: float, A: float, parameters: Parameters) -> Clips:
    """Return which bounds of the family a token lies beyond.

    x: the log-ratio of the token alone.
    """
    below = False
    above = False
    if loss in ("grpo", "gspo", "cispo"):
        epsilon_low = parameters["epsilon_low"]
        below = r < (0.0 if epsilon_low is None else 1 - epsilon_low)
        above = r > 1 + parameters["epsilon_high"]
    if loss == "gmpo":
        below = x < -parameters["epsilon_low"]
        above = x > parameters["epsilon_high"]
    if loss == "dppo":
        moved = _moved(min(20.0, max(-20.0, x)), p, parameters["divergence"])
        below = moved < -parameters["delta_low"]
        above = moved > parameters["delta_high"]
    if loss == "icepop":
        below = r < parameters["low"]
        above = r > parameters["high"]
    # A clip removes the gradient on one side of A; other bounds act on both.
    both = loss in ("cispo", "icepop") or parameters.get("sides") == "both"
    lower_acts = A != 0 if both else A < 0
    upper_acts = A != 0 if both else A > 0
    dual_clip = parameters.get("dual_clip")
    is_beyond_dual_clip = dual_clip is not None and A < 0 and r > dual_clip
    return below or above, below and lower_acts, (above and upper_acts) or is_beyond_dual_clip


def outside_bounds(
    loss: str, x: dict[int, float], o: list[float], A: float, parameters: Parameters
) -> dict[int, bool]:
    """Return whether each token of a document would lie outside of the family's bounds.

    x: the log-ratios in the place of new minus old. o: the log-probs in the place of the new ones.
    """
    scoped = over_scope(loss, token_terms(loss, x, A, parameters))
    ratio = {t: math.exp(min(20.0, max(-20.0, scoped[t]))) for t in x}
    return {t: clips_of(loss, ratio[t], o[t], x[t], A, parameters)[0] for t in x}
