"""Slopes of the loss families of `losses.families` as Triton functions.

The one-pass kernel takes such a function as a constant. Only families by token have one: the slope
of a family by document needs log-probs of other rows.

A slope is the derivative of a token's loss by its log-prob, 0 where clip or clamp cut the gradient.
It is a function of the log-ratio before the clamp, the advantage, the new log-prob, and the
family's numbers in the order of its fields, four at most. The kernel has no registers to spare and
keeps none of these numbers, so a clip is given by its distance from 1, and the bound is computed
where it is used.
"""

from __future__ import annotations

import math
from dataclasses import fields

import triton
import triton.language as tl

from pgtoolkit.kernels.triton_two_pass import LN_2
from pgtoolkit.losses.families import Cispo, Dppo, Grpo, Icepop, Kimi, Reinforce, Sapo
from pgtoolkit.losses.family import Family


def slope_of(family: Family) -> triton.JITFunction | None:
    """Return the family's slope, or None for a family without one."""
    if type(family) is Grpo and family.dual_clip is not None:
        return dual_clipped
    if type(family) is Dppo and family.divergence == "binary_kl":
        return left_out_by_kl
    if type(family) is Dppo and family.divergence == "squared_log_ratio":
        return left_out_by_square
    return _SLOPES.get(type(family))


def numbers_of(family: Family) -> tuple[float, float, float, float]:
    """Return the family's numbers as its slope takes them.

    Without a lower bound the bound is 0, so epsilon_low is 1. Dppo's sides are the number below
    which an advantage moves a token down: 0, or infinity for all advantages.
    """
    values = [getattr(family, field.name) for field in fields(family)]
    numbers = [value for value in values if not isinstance(value, str | bool)]
    if type(family) is Dppo and not family.clips_by_sign:
        numbers.append(math.inf)
    numbers += [0.0] * (4 - len(numbers))
    return tuple(1.0 if number is None else float(number) for number in numbers)


@triton.jit
def _clamped(log_ratio):
    """Return the log-ratio between plus and minus 20, and its exp."""
    limited = tl.minimum(tl.maximum(log_ratio, -20.0), 20.0)
    return limited, tl.exp2(limited * (1 / LN_2))


@triton.jit
def clipped(log_ratio, advantage, log_prob, below, above, dual_clip, _unused):
    """`Grpo` without a dual clip."""
    _, ratio = _clamped(log_ratio)
    # A ratio equal to a bound keeps its gradient, as in autograd of min and clamp. NaN does not.
    passes = tl.where(advantage > 0, ratio <= 1 + above, ratio >= 1 - below)
    return tl.where(passes & (tl.abs(log_ratio) <= 20.0), -ratio * advantage, 0.0)


@triton.jit
def dual_clipped(log_ratio, advantage, log_prob, below, above, dual_clip, _unused):
    """`Grpo` with a dual clip."""
    slope = clipped(log_ratio, advantage, log_prob, below, above, dual_clip, _unused)
    _, ratio = _clamped(log_ratio)
    return tl.where((advantage < 0) & (ratio > dual_clip), 0.0, slope)


@triton.jit
def weighted(log_ratio, advantage, log_prob, below, above, _unused, _unused_too):
    """`Cispo`: the clipped ratio is a factor without gradient, so every token keeps a gradient."""
    _, ratio = _clamped(log_ratio)
    return -tl.minimum(tl.maximum(ratio, 1 - below), 1 + above) * advantage


@triton.jit
def soft_gated(log_ratio, advantage, log_prob, positive, negative, _unused, _unused_too):
    """`Sapo`: 4 sigmoid(x) / tau in the place of the ratio, with x = tau (ratio - 1)."""
    _, ratio = _clamped(log_ratio)
    tau = tl.where(advantage > 0, positive, negative)
    x = tau * (ratio - 1)
    # It never overflows: the sigmoid is 1 / (1 + small), or 1 minus that.
    small = tl.exp2(-tl.abs(x) * (1 / LN_2))
    slope = -4 * small / ((1 + small) * (1 + small)) * ratio * advantage
    return tl.where(tl.abs(log_ratio) <= 20.0, slope, 0.0)


@triton.jit
def left_out(log_ratio, advantage, log_prob, low, high, cap, side):
    """`Dppo`, by the difference of the probabilities."""
    _, ratio = _clamped(log_ratio)
    moved = tl.exp2(log_prob * (1 / LN_2)) * (1 - 1 / ratio)
    too_far = ((moved < -low) & (advantage < side)) | ((moved > high) & (advantage > -side))
    return tl.where(too_far, 0.0, -tl.minimum(ratio, cap) * advantage)


@triton.jit
def left_out_by_kl(log_ratio, advantage, log_prob, low, high, cap, side):
    """`Dppo`, by the binary KL of the old to the new policy."""
    limited, ratio = _clamped(log_ratio)
    old = tl.exp2((log_prob - limited) * (1 / LN_2))
    old_others = tl.maximum(1 - old, 0.0)
    others = tl.maximum(1 - tl.exp2(log_prob * (1 / LN_2)), 0.0)
    moved = (
        old_others * LN_2 * (tl.log2(old_others + 1e-8) - tl.log2(others + 1e-8)) - old * limited
    )
    too_far = ((moved > low) & (limited < 0) & (advantage < side)) | (
        (moved > high) & (limited > 0) & (advantage > -side)
    )
    return tl.where(too_far, 0.0, -tl.minimum(ratio, cap) * advantage)


@triton.jit
def left_out_by_square(log_ratio, advantage, log_prob, low, high, cap, side):
    """`Dppo`, by half the square of the log-ratio."""
    limited, ratio = _clamped(log_ratio)
    moved = limited * limited / 2
    too_far = ((moved > low) & (limited < 0) & (advantage < side)) | (
        (moved > high) & (limited > 0) & (advantage > -side)
    )
    return tl.where(too_far, 0.0, -tl.minimum(ratio, cap) * advantage)


@triton.jit
def within(log_ratio, advantage, log_prob, low, high, _unused, _unused_too):
    """`Icepop`."""
    _, ratio = _clamped(log_ratio)
    return tl.where((ratio < low) | (ratio > high), 0.0, -ratio * advantage)


@triton.jit
def pulled_back(log_ratio, advantage, log_prob, tau, _unused, _unused_too, _unused_as_well):
    """`Kimi`."""
    limited, _ = _clamped(log_ratio)
    return tau * limited - advantage


@triton.jit
def by_advantage(
    log_ratio, advantage, log_prob, _unused, _unused_too, _unused_as_well, _unused_either
):
    """`Reinforce`."""
    return -advantage


_SLOPES = {
    Grpo: clipped,
    Cispo: weighted,
    Sapo: soft_gated,
    Dppo: left_out,
    Icepop: within,
    Kimi: pulled_back,
    Reinforce: by_advantage,
}


@triton.jit
def drawn_back(distance, log_ratio, KIND: tl.constexpr):
    """Return the slope of a penalty of `losses.kl`; NaN if the inputs are not finite.

    distance: the new log-prob minus the reference's.
    log_ratio: the new log-prob minus the old one.
    """
    finite = tl.abs(distance) < float("inf")
    if KIND == "k1":
        slope = distance * 0 + 1
    elif KIND == "k2":
        slope = distance
    else:
        x, ratio = _clamped(-distance)
        # exp(x) - 1 - x; for a small x by its series.
        series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x / 120)))
        value = tl.where(tl.abs(x) < 0.1, series, ratio - 1 - x)
        slope = tl.where(tl.abs(distance) <= 20.0, -(value + x), 0.0)
        if KIND == "k3_ratio":
            finite = finite & (log_ratio == log_ratio)
            _, ratio = _clamped(log_ratio)
            # The slopes of both factors add up to the distance. The difference of their
            # exponentials would leave no digits of it.
            both = tl.where(tl.abs(distance) <= 20.0, distance, value)
            slope = ratio * tl.where(tl.abs(log_ratio) <= 20.0, both, slope)
    return tl.where(finite, slope, float("nan"))
