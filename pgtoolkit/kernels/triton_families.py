"""The loss families of `losses.families` as Triton functions, which the kernels take as constants.

Each takes the family's own numbers in the order of its fields, four at most; a kernel without registers to spare keeps
none of them, so a bound counts from 1 and is put together where it is used.

A surrogate makes (loss, slope, ratio, log-ratio after the clamp) of a log-ratio before it, the advantage and the new
log-prob. slope: 0 where clip or clamp cut the gradient; a pass that wants it alone does not compute the others. For the
metrics a family has its bounds: (below, above, whether below, whether above changes the coefficient).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pgtoolkit.kernels.triton_two_pass import LN_2


@triton.jit
def _clamped(log_ratio):
    """The log-ratio between plus and minus 20, and its exp."""
    limited = tl.minimum(tl.maximum(log_ratio, -20.0), 20.0)
    return limited, tl.exp2(limited * (1 / LN_2))


@triton.jit
def _or_nan(value, log_ratio, advantage):
    """The value, NaN where log-ratio or advantage is not finite: the clamp drops a NaN and makes infinity a number."""
    finite = (tl.abs(log_ratio) < float("inf")) & (tl.abs(advantage) < float("inf"))
    return tl.where(finite, value, float("nan"))


@triton.jit
def clipped(log_ratio, advantage, log_prob, below, above, dual_clip, _unused):
    """`Grpo` without a dual clip, and `Gspo`."""
    limited, ratio = _clamped(log_ratio)
    limit = tl.minimum(tl.maximum(ratio, 1 - below), 1 + above)
    loss = -tl.minimum(ratio * advantage, limit * advantage)
    # The bounds themselves pass, as autograd of min and clamp has it. NaN does not pass.
    passes = tl.where(advantage > 0, ratio <= 1 + above, ratio >= 1 - below)
    slope = tl.where(passes & (tl.abs(log_ratio) <= 20.0), -ratio * advantage, 0.0)
    return _or_nan(loss, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def dual_clipped(log_ratio, advantage, log_prob, below, above, dual_clip, _unused):
    """`Grpo` with a dual clip."""
    loss, slope, ratio, limited = clipped(log_ratio, advantage, log_prob, below, above, dual_clip, _unused)
    beyond = (advantage < 0) & (ratio > dual_clip)
    return tl.where(beyond, -dual_clip * advantage, loss), tl.where(beyond, 0.0, slope), ratio, limited


@triton.jit
def weighted(log_ratio, advantage, log_prob, below, above, _unused, _unused_too):
    """`Cispo`: the clipped ratio is a factor without gradient, so no token loses its own."""
    limited, ratio = _clamped(log_ratio)
    slope = -tl.minimum(tl.maximum(ratio, 1 - below), 1 + above) * advantage
    return _or_nan(slope * log_prob, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def soft_gated(log_ratio, advantage, log_prob, positive, negative, _unused, _unused_too):
    """`Sapo`: 4 sigmoid(x) / tau in the place of the ratio, with x = tau (ratio - 1)."""
    limited, ratio = _clamped(log_ratio)
    tau = tl.where(advantage > 0, positive, negative)
    x = tau * (ratio - 1)
    small = tl.exp2(-tl.abs(x) * (1 / LN_2))  # never overflows: the sigmoid is 1 / (1 + small), or one less that
    loss = -4 / tau * tl.where(x < 0, small, 1.0) / (1 + small) * advantage
    slope = -4 * small / ((1 + small) * (1 + small)) * ratio * advantage
    slope = tl.where(tl.abs(log_ratio) <= 20.0, slope, 0.0)
    return _or_nan(loss, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def one_sided(log_ratio, advantage, low, high, _unused, _unused_too):
    """`Gmpo`, a token's share of its document's mean: the log-ratio, clipped on the side of the advantage's sign."""
    above = tl.where(advantage > 0, tl.minimum(log_ratio, high), log_ratio)
    clip = tl.where(advantage < 0, tl.maximum(log_ratio, -low), above)
    return tl.where(tl.abs(log_ratio) < float("inf"), clip, float("nan"))


@triton.jit
def unclipped(log_ratio, advantage, log_prob, low, high, _unused, _unused_too):
    """`Gmpo`, of the mean."""
    limited, ratio = _clamped(log_ratio)
    slope = tl.where(tl.abs(log_ratio) <= 20.0, -ratio * advantage, 0.0)
    return _or_nan(-ratio * advantage, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def left_out(log_ratio, advantage, log_prob, low, high, cap, _unused):
    """`Dppo`."""
    limited, ratio = _clamped(log_ratio)
    _, _, below, above = beyond_move(ratio, log_ratio, advantage, log_prob, low, high, cap, _unused)
    slope = tl.where(below | above, 0.0, -tl.minimum(ratio, cap) * advantage)
    return _or_nan(slope * log_prob, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def smooth_weight(log_ratio, advantage, log_prob, power_positive, decay_positive, power_negative, decay_negative):
    """`Vespo`: ratio^power exp(decay (1 - ratio)) as a factor without gradient."""
    limited, ratio = _clamped(log_ratio)
    # ratio - 1, which is small by its series: the difference of two numbers near 1 has few digits.
    x = limited
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    excess = tl.where(tl.abs(x) < 0.5, series, ratio - 1)
    power = tl.where(advantage >= 0, power_positive, power_negative)
    decay = tl.where(advantage >= 0, decay_positive, decay_negative)
    slope = -tl.exp2((power * x - decay * excess) * (1 / LN_2)) * advantage
    return _or_nan(slope * log_prob, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def pulled_back(log_ratio, advantage, log_prob, tau, _unused, _unused_too, _unused_as_well):
    """`Kimi`."""
    limited, ratio = _clamped(log_ratio)
    loss = tau / 2 * limited * limited - advantage * log_prob
    slope = tau * limited - advantage
    return _or_nan(loss, log_ratio, advantage), slope, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def by_advantage(log_ratio, advantage, log_prob, _unused, _unused_too, _unused_as_well, _unused_either):
    """`Reinforce`."""
    limited, ratio = _clamped(log_ratio)
    loss = _or_nan(-advantage * log_prob, log_ratio, advantage)
    return loss, -advantage, _or_nan(ratio, log_ratio, advantage), limited


@triton.jit
def _outside(ratio, below, above):
    return ratio < 1 - below, ratio > 1 + above


@triton.jit
def beyond_clip(ratio, token_log_ratio, advantage, log_prob, below, above, _unused, _unused_too):
    """`Grpo` without a dual clip, and `Gspo`."""
    low, high = _outside(ratio, below, above)
    return low, high, low & (advantage < 0), high & (advantage > 0)


@triton.jit
def beyond_dual_clip(ratio, token_log_ratio, advantage, log_prob, below, above, dual_clip, _unused):
    """`Grpo` with a dual clip."""
    low, high = _outside(ratio, below, above)
    return low, high, low & (advantage < 0), (high & (advantage > 0)) | ((advantage < 0) & (ratio > dual_clip))


@triton.jit
def beyond_weight(ratio, token_log_ratio, advantage, log_prob, below, above, _unused, _unused_too):
    """`Cispo`, whose clip acts whatever the sign of the advantage."""
    low, high = _outside(ratio, below, above)
    return low, high, low & (advantage != 0), high & (advantage != 0)


@triton.jit
def beyond_log_clip(ratio, token_log_ratio, advantage, log_prob, low, high, _unused, _unused_too):
    """`Gmpo`."""
    below, above = token_log_ratio < -low, token_log_ratio > high
    return below, above, below & (advantage < 0), above & (advantage > 0)


@triton.jit
def beyond_move(ratio, token_log_ratio, advantage, log_prob, low, high, _unused, _unused_too):
    """`Dppo`, by how far the probability has moved."""
    moved = tl.exp2(log_prob * (1 / LN_2)) * (1 - 1 / ratio)
    below, above = moved < -low, moved > high
    return below, above, below & (advantage < 0), above & (advantage > 0)


@triton.jit
def beyond_nothing(ratio, token_log_ratio, advantage, log_prob, _unused, _unused_too, _unused_as_well, _unused_either):
    """Families without bounds."""
    never = ratio < 0
    return never, never, never, never


@triton.jit
def drawn_back(distance, log_ratio, KIND: tl.constexpr):
    """(value, slope) of a penalty of `losses.kl`, and not of a family, from the new log-prob less the reference's.

    log_ratio: of the new to the old log-prob.
    """
    finite = tl.abs(distance) < float("inf")
    if KIND == "k1":
        value, slope = distance, distance * 0 + 1
    elif KIND == "k2":
        value, slope = distance * distance / 2, distance
    else:
        x, ratio = _clamped(-distance)
        # exp(x) - 1 - x; where x is small, by its series.
        series = x * x * (0.5 + x * (1 / 6 + x * (1 / 24 + x / 120)))
        value = tl.where(tl.abs(x) < 0.1, series, ratio - 1 - x)
        slope = tl.where(tl.abs(distance) <= 20.0, -(value + x), 0.0)
        if KIND == "k3_ratio":
            finite = finite & (log_ratio == log_ratio)
            _, ratio = _clamped(log_ratio)
            # Of both factors; together they are the distance, of which exp would leave no digits in a difference.
            both = tl.where(tl.abs(distance) <= 20.0, distance, value)
            slope = ratio * tl.where(tl.abs(log_ratio) <= 20.0, both, slope)
            value = value * ratio
    return tl.where(finite, value, float("nan")), tl.where(finite, slope, float("nan"))
