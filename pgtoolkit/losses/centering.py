"""Score centering: takes the pull towards the sampler out of the gradient (arXiv 2609.20807).

pi and q are the probabilities of the policy and of the sampler, H the likeliest tokens of the
sampler at a position, f the family's factor, A the advantage and w the weight of the token there:

    rest_pi = max(1 - sum_H pi, 1e-6)     rest_q = max(1 - sum_H q, 1e-6)
    rho = rest_q / rest_pi                alpha = rho f(1 / rho)
    a_v = q_v f(pi_v / q_v) - alpha pi_v  for v in H, without a gradient

The loss has w A sum_H a_v ln pi_v beside -w A f(r) p. The label is not added to H. Only the
gradient of the term means something: by a logit it is w A / temperature times

    a_v - pi_v sum_H a = q_v f(pi_v / q_v) - pi_v sum_H q f - alpha pi_v (1 - sum_H pi)   in H
    -pi_v sum_H a                                                                         elsewhere

T is the number of positions, k the most tokens of an H.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pgtoolkit.batch import Tokens
from pgtoolkit.losses.checks import LARGEST_GAP, LARGEST_MASS
from pgtoolkit.losses.families import Weighted
from pgtoolkit.losses.family import Family, clamped

LEAST_REST = 1e-6
"""The least probability that all tokens outside of H count as having."""

_LEAST_LOG_PROB = -1000.0
"""In the value of the term: ln pi is -inf where a logit is, and a value of infinity would hide the
rest of the loss, whose gradient is finite."""


class CenteredRows(NamedTuple):
    """Holds the part of the gradient by the logits of rows that is not c_t times the score.

    top_ids: (N, k) int64, the tokens of H, each once; -1 where unused.
    on_top: (N, k), the derivative by the logit of each of them, times the temperature.
    elsewhere: (N,), the same for all others, over minus their probability.
    """

    top_ids: Tensor
    on_top: Tensor
    elsewhere: Tensor

    def times(self, factor: Tensor | float) -> CenteredRows:
        """Return the derivatives of `factor` times the loss."""
        return CenteredRows(self.top_ids, self.on_top * factor, self.elsewhere * factor)


@dataclass(frozen=True)
class Centering:
    """The term of score centering of a piece of a step.

    family: gives f.
    mask: (T,) bool.
    advantages: (T,).
    weights: (T,) w_t, those of the surrogate.
    old_log_probs: (T,), which are the sampler's; None where the loss does not read them.
    labels: (T,) int64.
    top_ids: (T, k) int64, the tokens of H; -1 where unused, and where masked.
    sampling_log_probs: (T, k), ln q of them, at the temperature of the loss.
    log_probs: (T, k), ln pi of them; None before the forward pass.
    """

    family: Weighted
    mask: Tensor
    advantages: Tensor
    weights: Tensor
    old_log_probs: Tensor | None
    labels: Tensor
    top_ids: Tensor
    sampling_log_probs: Tensor
    log_probs: Tensor | None = None

    def at(self, log_probs: Tensor) -> Centering:
        """Return the term with the new log-probs of H, (T, k)."""
        return replace(self, log_probs=log_probs)

    def take(self, rows: Tensor | slice) -> Centering:
        """Return the term of some rows."""
        names = "mask", "advantages", "weights", "labels", "top_ids", "sampling_log_probs"
        others = "old_log_probs", "log_probs"
        vectors = {name: getattr(self, name) for name in (*names, *others)}
        return replace(
            self, **{name: vector[rows] for name, vector in vectors.items() if vector is not None}
        )

    @cached_property
    def used(self) -> Tensor:
        """Return (T, k) bool, True at the tokens of H of trained positions."""
        return self.top_ids >= 0

    @cached_property
    def masses(self) -> tuple[Tensor, Tensor]:
        """Return the probability of H under the sampler and under the policy, (T,) float64 each."""
        _, q, pi = self._probabilities
        return q.sum(-1), pi.sum(-1)

    @cached_property
    def _probabilities(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ln pi, q, pi), (T, k) float64 each; where unused, q and pi are 0."""
        assert self.log_probs is not None
        used = self.used
        log_pi = torch.where(used, self.log_probs.double(), 0.0)
        q = torch.where(used, self.sampling_log_probs.double().exp(), 0.0)
        return log_pi, q, torch.where(used, log_pi.exp(), 0.0)

    @cached_property
    def _weighted(self) -> tuple[Tensor, Tensor]:
        """Return (q f(pi / q), alpha), (T, k) and (T, 1) float64."""
        log_pi, q, _ = self._probabilities
        mass_q, mass_pi = self.masses
        # Where q is 0 so is q f, whatever f is.
        log_q = torch.where(q > 0, self.sampling_log_probs.double(), log_pi)
        log_ratio = torch.where(q > 0, clamped(log_pi - log_q), 0.0)
        rest_pi = (1 - mass_pi).clamp(min=LEAST_REST)
        rho = (1 - mass_q).clamp(min=LEAST_REST) / rest_pi
        alpha = rho * self.family.factor(1 / rho)
        return q * self.family.factor(log_ratio.exp()), alpha.unsqueeze(-1)

    @property
    def terms(self) -> Tensor:
        """Return (T,) float64, A sum_H a_v ln pi_v, without the weights; 0 where masked."""
        log_pi, _, pi = self._probabilities
        q_f, alpha = self._weighted
        sums = ((q_f - alpha * pi) * log_pi.clamp(min=_LEAST_LOG_PROB)).sum(-1)
        return torch.where(self.mask, self.advantages.double() * sums, 0.0)

    @property
    def losses(self) -> Tensor:
        """Return (T,), the terms with their weights."""
        return (torch.where(self.mask, self.weights, 0.0) * self.terms).to(self.weights.dtype)

    @property
    def rows(self) -> CenteredRows:
        """Return the part of the gradient by the logits."""
        _, _, pi = self._probabilities
        q_f, alpha = self._weighted
        sum_q_f = q_f.sum(-1, keepdim=True)
        mass_pi = self.masses[1].unsqueeze(-1)
        scale = self.weights.double() * self.advantages.double()
        scale = torch.where(self.mask, scale, 0.0).unsqueeze(-1)
        on_top = q_f - pi * sum_q_f - alpha * pi * (1 - mass_pi)
        elsewhere = (sum_q_f - alpha * mass_pi) * scale
        dtype = self.weights.dtype
        return CenteredRows(
            self.top_ids,
            (scale * on_top).to(dtype).contiguous(),
            elsewhere.squeeze(-1).to(dtype).contiguous(),
        )

    @property
    def problems(self) -> Tensor:
        """Return (T,): NaN where H cannot be the likeliest tokens of the sampler, else 0."""
        used = self.used
        log_q = torch.where(used, self.sampling_log_probs, -torch.inf)
        wrong = torch.isnan(log_q) | (log_q == torch.inf)
        in_order = self.top_ids.sort(-1).values
        wrong[:, 1:] |= (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        bad = wrong.any(-1) | ~used.any(-1)
        bad |= torch.where(used, log_q.exp(), 0.0).sum(-1) > LARGEST_MASS
        if self.old_log_probs is not None:
            is_label = used & (self.top_ids == self.labels.unsqueeze(-1))
            gap = (log_q - self.old_log_probs.unsqueeze(-1)).abs()
            bad |= (is_label & ~(gap <= LARGEST_GAP)).any(-1)
        return torch.where(self.mask & bad, torch.nan, 0.0).to(self.weights.dtype)

    @property
    def largest_log_probs(self) -> Tensor:
        """Return (T,), the largest ln q of each position, which is at most 0."""
        return torch.where(self.used, self.sampling_log_probs, -torch.inf).amax(-1)


def centering_of(
    tokens: Tokens, family: Family, mask: Tensor, weights: Tensor, old_log_probs: Tensor | None
) -> Centering | None:
    """Return the term of these tokens, or None for a family without it.

    mask: (T,) bool. weights, old_log_probs: (T,), as the objective has them.
    Raises ValueError where the tokens of the sampler are missing.
    """
    if not family.score_centering:
        return None
    assert isinstance(family, Weighted)
    top_ids = tokens.sampling_top_ids
    top_log_probs = tokens.sampling_top_log_probs
    if tokens.num_documents == 0 and top_ids is None:  # a rank without a document of the step
        top_ids = torch.full_like(tokens.labels, -1).unsqueeze(-1)
        top_log_probs = torch.zeros_like(weights).unsqueeze(-1)
    if top_ids is None or top_log_probs is None:
        raise ValueError(
            f"score_centering of {family.name} needs logits, and sampling_top_ids with "
            "sampling_top_log_probs: the likeliest tokens of the sampler at each position"
        )
    return Centering(
        family,
        mask,
        tokens.advantages.to(weights.dtype),
        weights,
        old_log_probs,
        tokens.labels,
        torch.where(mask.unsqueeze(-1), top_ids.long(), -1),
        top_log_probs.to(weights.dtype),
    )
