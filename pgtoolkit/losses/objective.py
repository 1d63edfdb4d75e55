"""The part of the loss that lives on vectors of length T, between the two vocabulary-sized kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.parallel import all_sum, gather, largest
from pgtoolkit.losses.aggregation import Reducer, token_weights
from pgtoolkit.losses.arguments import check_mode, check_totals, check_whole, count_documents
from pgtoolkit.losses.metrics import MetricSums, metric_sums
from pgtoolkit.losses.segments import Segments
from pgtoolkit.losses.surrogates import FAMILIES, clipped_surrogate

NEEDS_WHOLE_DOCUMENTS = {"grpo": False, "gspo": True}
"""Whether a token's coefficient depends on the log-probs of the other tokens of its document."""


@dataclass(frozen=True)
class Objective:
    """The objective of one piece of a step: log-probs in, loss and metrics out.

    mask: (T,) bool. The others of (T,) are in the dtype the log-probs come in. gradient_weights: what a token's
    gradient is weighted by, the weights as the family sees them. known_advantages: see `judged_advantages`.
    Where documents are spread over ranks, segments know the group, and only they.
    """

    loss: str
    epsilon_low: float
    epsilon_high: float
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
        return FAMILIES[self.loss](torch.where(self.mask, self.advantages, 0.0), self.segments)

    def value(self, log_probs: Tensor) -> Tensor:
        """This piece's share of the step's loss: the sum of w_t times the surrogate. Differentiable."""
        return (self.weights * self._surrogate(log_probs).losses).sum()

    def losses_and_coefficients(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """(w_t times the surrogate, c_t), each (T,): c_t is the derivative of `value` by each log-prob.

        Both are 0 where nothing is trained. c is what autograd would find, by formula, since it is wanted without a
        graph: the slope of the surrogate is the same for all tokens that are judged together.
        """
        surrogate = self._surrogate(log_probs)
        ratio, advantages = surrogate.ratio, surrogate.advantages
        passes = torch.where(advantages > 0, ratio <= 1 + self.epsilon_high, ratio >= 1 - self.epsilon_low)
        slope = torch.where(passes & ~surrogate.clamped, -ratio * advantages, 0.0)
        return self.weights * surrogate.losses, self.gradient_weights * slope

    def informative(self) -> Tensor:
        """(T,) bool: False where c_t is 0 whatever the log-probs turn out to be (untrained, or of zero advantage)."""
        return self.mask & (self.judged_advantages != 0)

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
        with torch.no_grad():
            surrogate = self._surrogate(log_probs) if level != "none" else None
        return metric_sums(
            level,
            self.loss,
            surrogate,
            log_probs,
            self.old_log_probs,
            self.advantages,
            entropy,
            self.segments,
            self.mask,
            self.epsilon_low,
            self.epsilon_high,
        )

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

    def _surrogate(self, log_probs):
        log_ratio = self._log_ratio(log_probs)
        return clipped_surrogate(log_ratio, self.judged_advantages, self.epsilon_low, self.epsilon_high)

    def _log_ratio(self, log_probs):
        """The log-ratio that the family judges each token by; kept, since loss and metrics would both exchange it."""
        kept = not log_probs.requires_grad
        if kept and self._last and self._last[0] is log_probs:
            return self._last[1]
        # Dropped by selection before any arithmetic: what is not trained may hold NaN or infinity.
        own = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        log_ratio = FAMILIES[self.loss](own, self.segments)
        if kept:
            self._last[:] = log_probs, log_ratio
        return log_ratio


def make_objective(
    labels: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    document_index: Tensor,
    *,
    loss: str,
    epsilon_low: float,
    epsilon_high: float,
    aggregation: str,
    divisor: float | None,
    reducer: Reducer | None,
    group_index: Tensor | None,
    num_documents: int | None,
    totals: StepTotals | None,
    dtype: torch.dtype,
    sequence_group: ProcessGroup | None = None,
    data_group: ProcessGroup | None = None,
    settle=None,
) -> Objective:
    """Settle masks, segments and weights of a piece; `dtype` is what the log-probs will come in.

    settle: what does so faster where it can (`kernels.triton_objective.settle`), or None.

    Without totals the piece is the whole step, or the data_group's pieces are. Reads tensors on the host only where
    the caller left sizes open. Raises ValueError for what cannot be right.
    """
    if num_documents is None:
        num_documents = count_documents(document_index, is_whole_step=totals is None)
    check_whole("num_documents", num_documents, 0)
    check_totals(totals, num_documents, group_index, like=labels)
    has_groups = group_index is not None and (totals is None or totals.tokens_per_group is not None)
    check_mode(aggregation, divisor, reducer, has_groups)
    if group_index is not None:
        group_index = group_index.long()
    old_log_probs, advantages = old_log_probs.to(dtype).contiguous(), advantages.to(dtype).contiguous()
    if settle is not None and reducer is None and sequence_group is None and data_group is None:
        settled = settle(labels, document_index, num_documents, aggregation, divisor, group_index, totals)
        if settled is not None:
            mask, segments, totals, weights = settled
            clip = (loss, epsilon_low, epsilon_high)
            return Objective(*clip, mask, old_log_probs, advantages, weights, weights, segments, totals)
    mask = labels >= 0
    misplaced = mask & ((document_index < 0) | (document_index >= num_documents))
    segments = Segments(document_index, mask & ~misplaced, num_documents, sequence_group)
    known_advantages = None
    if sequence_group is not None:
        # First, since the documents' lengths, which the rest needs, travel with it.
        known_advantages = FAMILIES[loss](torch.where(mask, advantages, 0.0), segments)
    if totals is None:
        totals, group_index = whole_step_totals(segments, group_index, data_group)
    weights = token_weights(aggregation, totals, segments, mask, group_index, divisor, reducer)
    weights = torch.where(misplaced, torch.nan, weights).to(dtype)  # no document, no result
    # The aggregations weight a document's tokens alike; a reducer need not.
    gradient_weights = weights if reducer is None else FAMILIES[loss](weights, segments)
    return Objective(
        loss,
        epsilon_low,
        epsilon_high,
        mask,
        old_log_probs,
        advantages,
        weights,
        gradient_weights,
        segments,
        totals,
        known_advantages,
    )


def whole_step_totals(
    segments: Segments, group_index: Tensor | None, data_group: ProcessGroup | None = None
) -> tuple[StepTotals, Tensor | None]:
    """The totals of a step that is all in one piece, and its groups renumbered from 0 (documents,).

    data_group: ranks with other documents of the step, whose group_index has the same numbers for the same groups.
    """
    counts = segments.counts
    numbers = torch.stack([torch.full_like(counts.sum(), len(counts)), counts.sum(), (counts == 0).sum()])
    num_documents, num_tokens, num_empty = all_sum(numbers, data_group)
    num_groups = tokens_per_group = None
    if group_index is not None:
        groups, group_index = _common_numbers(group_index, data_group)
        num_groups = len(groups)
        tokens_per_group = torch.zeros_like(groups, dtype=torch.int64).index_add_(0, group_index, counts)
        tokens_per_group = all_sum(tokens_per_group, data_group)
    if data_group is None:
        num_documents = segments.num_documents
    return StepTotals(num_documents, num_tokens, num_empty, num_groups, tokens_per_group), group_index


def _common_numbers(group_index, data_group):
    """(the different numbers on all ranks, where this rank's are among them)."""
    groups, places = torch.unique(group_index, return_inverse=True)
    if data_group is None:
        return groups, places
    length = largest(len(groups), data_group, groups.device)
    if length == 0:
        return groups, places
    # Ranks with fewer repeat a number of theirs; one without any stands aside.
    mine = groups.new_empty(2, length)
    mine[0] = groups[torch.arange(length, device=groups.device).clamp(max=len(groups) - 1)] if len(groups) else 0
    mine[1] = len(groups) > 0
    numbers, exist = gather(mine, data_group).unbind(1)
    common = numbers[exist != 0].unique()
    return common, torch.searchsorted(common, groups)[places]
