"""The loss families: what each one takes as the ratio of a token, and the clipped surrogate they share.

A family is a symmetric linear map of T-vectors, from the log-ratios and advantages of the tokens to those that each
token is judged by. Everything after that (clamp, exp, clip, min) is common ground. Symmetric: the same map takes the
weights of the tokens to those of their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.losses.segments import Segments

LOG_RATIO_LIMIT = 20.0
"""The log-ratio is clamped to plus or minus this before exp: exp overflows float32 at 89, and the infinity would
reach the gradient as 0 * inf through the branch that the clip did not select."""


def grpo(values: Tensor, segments: Segments) -> Tensor:
    """One ratio per token: r_t = exp(log_ratio_t) (arXiv 2402.03300, eq. 3)."""
    return values


def gspo(values: Tensor, segments: Segments) -> Tensor:
    """One ratio per document: exp of its mean log-ratio, with its mean advantage (arXiv 2507.18071, eq. 5 and 7)."""
    return segments.broadcast(segments.mean(values))


FAMILIES = {"grpo": grpo, "gspo": gspo}

DEFAULT_EPSILONS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
"""(epsilon_low, epsilon_high) of the papers. A mean of log-ratios moves far less than a single one."""


@dataclass(frozen=True)
class Surrogate:
    """T-vectors of the clipped surrogate, 0 (ratio: 1) where nothing is trained.

    losses: the surrogate loss of each token. ratio, log_ratio: after the clamp. advantages: as the family sees them.
    clamped: bool, True where the clamp acted.
    """

    losses: Tensor
    ratio: Tensor
    log_ratio: Tensor
    advantages: Tensor
    clamped: Tensor


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float) -> Surrogate:
    """-min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A) for each token (T,), as the family judges it.

    Both are 0 where nothing is trained. The gradient passes at the clip bounds themselves (what min and clamp give).
    Where one of the two is not finite, loss and ratio are NaN: the clamp would make a number of an infinite log-ratio.
    """
    unclamped = log_ratio
    log_ratio = unclamped.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_ratio = torch.where(torch.isfinite(unclamped) & torch.isfinite(advantages), log_ratio, torch.nan)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return Surrogate(losses, ratio, log_ratio, advantages, unclamped.abs() > LOG_RATIO_LIMIT)
