"""The part of the loss that lives on vectors of length T, between the two vocabulary-sized kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import Aggregation
from pgtoolkit.losses.checks import check_name, check_positive
from pgtoolkit.losses.documents import Segments
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.metrics import LEVELS, MetricSums, metric_sums
from pgtoolkit.losses.totals import whole_step_totals

LOG_RATIO_LIMIT = 20.0
"""The log-ratio is clamped to plus or minus this before exp: exp overflows float32 at 89, and the infinity would
reach the gradient as 0 * inf through the branch that the clip did not select."""


@dataclass(frozen=True)
class Loss:
    """What the loss of a step is, and what is measured of it: the sum over its tokens of w_t l_t.

    temperature: log-probs are log_softmax(logits / temperature). metrics: the level, one of LEVELS.
    """

    family: Family
    aggregation: Aggregation
    temperature: float = 1.0
    metrics: str = "none"

    def __post_init__(self):
        check_name("metrics", self.metrics, LEVELS)
        check_positive("temperature", self.temperature)


@dataclass(frozen=True)
class Judged:
    """T-vectors of what each token is judged by, 0 (ratio: 1) where nothing is trained.

    losses: the surrogate l_t. slope: of the surrogate, by the family's `slope_of`, times the token's own derivative.
    ratio, log_ratio: after the clamp. clamped: bool, True where the clamp acted. token_log_ratio: each token's own.
    """

    losses: Tensor
    slope: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clamped: Tensor
    token_log_ratio: Tensor


@dataclass(frozen=True)
class Objective:
    """The objective of one piece of a step: log-probs in, loss and metrics out.

    mask: (T,) bool. The others of (T,) are in the dtype the log-probs come in. gradient_weights: what a token's slope
    is weighted by: w_t, or its mean or sum over the document where the family's slope is the document's.
    known_advantages: see `judged_advantages`. Where documents are spread over ranks, segments know the group.
    """

    family: Family
    mask: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    gradient_weights: Tensor
    segments: Segments
    totals: StepTotals
    known_advantages: Tensor | None = None
    _last: list = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def judged_advantages(self) -> Tensor:
        """(T,) the advantages as the family sees them, 0 where nothing is trained; made when first asked for."""
        if self.known_advantages is not None:
            return self.known_advantages
        return in_scope(self.family, torch.where(self.mask, self.advantages, 0.0), self.segments)

    def value(self, log_probs: Tensor) -> Tensor:
        """This piece's share of the step's loss: the sum of w_t times the surrogate. Differentiable by autograd."""
        return (self.weights * self.judged(log_probs).losses).sum()

    def losses_and_coefficients(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """(w_t times the surrogate, c_t), each (T,): c_t is the derivative of `value` by each log-prob.

        Both are 0 where nothing is trained. c is what autograd would find, by formula, since it is wanted without a
        graph: a slope by the document's mean is the same for all its tokens.
        """
        judged = self.judged(log_probs)
        return self.weights * judged.losses, self.gradient_weights * judged.slope

    def informative(self) -> Tensor:
        """(T,) bool: False where c_t is 0 whatever the log-probs turn out to be."""
        return self.mask & (self.judged_advantages != 0) if self.family.silent_without_advantage else self.mask

    def take(self, rows: Tensor | slice, segments: Segments | None) -> Objective:
        """The share of some rows, in that order; documents that the family needs whole must be whole in it.

        segments: the same rows' documents; None only for a family that judges tokens one by one.
        """
        return replace(
            self,
            mask=self.mask[rows],
            old_log_probs=self.old_log_probs[rows],
            advantages=self.advantages[rows],
            weights=self.weights[rows],
            gradient_weights=self.gradient_weights[rows],
            segments=segments,
            known_advantages=self.judged_advantages[rows],
            _last=[],
        )

    def metrics(self, level: str, log_probs: Tensor, entropy: Tensor | None) -> MetricSums:
        """What this piece adds to the metrics of the step; entropy: (T,), at level with_entropy."""
        return metric_sums(level, self, log_probs, entropy)

    def not_finite(self, log_probs: Tensor | None = None) -> Tensor:
        """(T,) bool: trained positions whose weight, old log-prob, advantage or, if given, log-prob is not finite."""
        total = self.old_log_probs + self.advantages + self.weights
        return self.mask & ~torch.isfinite(total if log_probs is None else total + log_probs)

    def check_finite(self, log_probs: Tensor | None = None) -> None:
        """Raise DataError naming the first documents that hold a non-finite number at a trained position.

        Reads the result on the host: one synchronisation on a GPU.
        """
        bad = self.not_finite(log_probs)
        if bad.any():
            documents = self.segments.index[bad].unique().tolist()
            if documents[-1] == self.segments.num_documents:
                raise ValueError(
                    f"document_index at a trained position is negative or not below num_documents={documents[-1]}"
                )
            if not torch.isfinite(self.weights).all():
                raise ValueError("the weight of a trained token is not finite: the reducer's, or the totals count none")
            named = ", ".join(map(str, documents[:5])) + (", ..." if len(documents) > 5 else "")
            raise DataError(
                f"non-finite logits, old_log_probs or advantages at a trained position of document {named}, or a "
                "label outside the vocabulary; mask the position (label -1) or drop the document"
            )

    def judged(self, log_probs: Tensor) -> Judged:
        """What each token is judged by; kept, since loss and metrics both ask for it."""
        kept = not log_probs.requires_grad
        if kept and self._last and self._last[0] is log_probs:
            return self._last[1]
        family, advantages = self.family, self.judged_advantages
        # Dropped by selection before any arithmetic: what is not trained may hold NaN or infinity.
        token_log_ratio = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        own, derivative = family.token(token_log_ratio, advantages)
        if derivative is not None:  # which would make a number of an infinite log-ratio, as the clamp would
            own = torch.where(torch.isfinite(token_log_ratio), own, torch.nan)
        unclamped = over_scope(family, own, self.segments)
        clamped, log_ratio = unclamped.abs() > LOG_RATIO_LIMIT, unclamped.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        finite = torch.isfinite(unclamped) & torch.isfinite(advantages)
        log_ratio = torch.where(finite, log_ratio, torch.nan)
        losses, slope = family.surrogate(log_ratio, advantages, torch.where(self.mask, log_probs, 0.0))
        losses = torch.where(finite, losses, torch.nan)
        if family.slope_of == "log_ratio":
            slope = torch.where(clamped, 0.0, slope)
            slope = slope if derivative is None else slope * derivative
        judged = Judged(losses, slope, log_ratio.exp(), log_ratio, clamped, token_log_ratio)
        if kept:
            self._last[:] = log_probs, judged
        return judged


def in_scope(family: Family, values: Tensor, segments: Segments | None) -> Tensor:
    """(T,) the values themselves, or the mean of each one's document for a family by document."""
    return segments.broadcast(segments.mean(values)) if family.by_document else values


def over_scope(family: Family, values: Tensor, segments: Segments | None) -> Tensor:
    """(T,) the values themselves, or the mean or the sum of each one's document, as the family's scope is."""
    if family.scope == "document_sum":
        return segments.broadcast(segments.sum(values))
    return in_scope(family, values, segments)


def make_objective(
    tokens: Tokens, totals: StepTotals | None, loss: Loss, dtype: torch.dtype, ranks: Ranks, settle=None
) -> Objective:
    """Masks, segments and weights of a piece; `dtype` is what the log-probs will come in.

    settle: what makes them faster where it can (`kernels.triton_objective.settle`), or None. Without totals the piece
    is the whole step, or the pieces of ranks.data are. Reads tensors on the host only where the caller left sizes open.
    """
    family, aggregation = loss.family, loss.aggregation
    old_log_probs, advantages = (x.to(dtype).contiguous() for x in (tokens.old_log_probs, tokens.advantages))
    has_groups = tokens.group_index is not None and (totals is None or totals.tokens_per_group is not None)
    aggregation.check_groups(has_groups)
    if settle is not None and ranks.sequence is None and ranks.data is None:
        settled = settle(tokens, aggregation, totals)
        if settled is not None:
            mask, segments, totals, weights = settled
            return Objective(family, mask, old_log_probs, advantages, weights, weights, segments, totals)
    mask = tokens.labels >= 0
    misplaced = mask & ((tokens.document_index < 0) | (tokens.document_index >= tokens.num_documents))
    segments = Segments(tokens.document_index, mask & ~misplaced, tokens.num_documents, ranks.sequence)
    known_advantages = None
    if ranks.sequence is not None:
        # First, since the documents' lengths, which the rest needs, travel with it.
        known_advantages = in_scope(family, torch.where(mask, advantages, 0.0), segments)
    group_index = tokens.group_index
    if totals is None:
        totals, group_index = whole_step_totals(segments, group_index, ranks.data)
    weights = aggregation.weights(totals, segments, mask, group_index)
    weights = torch.where(misplaced, torch.nan, weights).to(dtype)  # no document, no result
    own_slope = family.slope_of != "log_ratio" or (aggregation.alike and family.scope != "document_sum")
    gradient_weights = weights if own_slope else over_scope(family, weights, segments)
    return Objective(
        family, mask, old_log_probs, advantages, weights, gradient_weights, segments, totals, known_advantages
    )
