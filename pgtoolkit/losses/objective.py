"""Loss, coefficients and metrics of a piece of a step, from its log-probs: all on vectors of one number per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import Aggregation
from pgtoolkit.losses.checks import check_name, check_positive
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.metrics import LEVELS, MetricSums
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
class TokenTerms:
    """The terms of each token, (T,) each; 0 (ratio: 1) where nothing is trained.

    losses: the surrogate l_t. slope: of the surrogate, by the family's `slope_of`, times the token's own derivative.
    ratio, log_ratio: the token's or its document's, after the clamp. clamped: bool, True where the clamp acted.
    token_log_ratio: of the token alone, before the family's `token` and the clamp.
    """

    losses: Tensor
    slope: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clamped: Tensor
    token_log_ratio: Tensor


@dataclass(frozen=True)
class Objective:
    """The objective of one piece of a step: log-probs in, loss, coefficients and metrics out.

    mask: (T,) bool. The others of (T,) are in the dtype the log-probs come in. gradient_weights: what a token's slope
    is weighted by: w_t, or its mean or sum over the document where the family's slope is the document's.
    known_scope_advantages: see `scope_advantages`. Where documents are spread over ranks, `documents` knows the group.
    """

    family: Family
    mask: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    gradient_weights: Tensor
    documents: DocumentSums
    totals: StepTotals
    known_scope_advantages: Tensor | None = None
    _last_terms: list = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def scope_advantages(self) -> Tensor:
        """(T,) advantages of the tokens or of their documents, as the family has it; 0 where nothing is trained."""
        if self.known_scope_advantages is not None:
            return self.known_scope_advantages
        return scope_mean(self.family, torch.where(self.mask, self.advantages, 0.0), self.documents)

    def value(self, log_probs: Tensor) -> Tensor:
        """This piece's share of the step's loss: the sum of w_t times the surrogate. Differentiable by autograd."""
        return (self.weights * self.token_terms(log_probs).losses).sum()

    def losses_and_coefficients(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """(w_t times the surrogate, c_t), each (T,): c_t is the derivative of `value` by each log-prob.

        Both are 0 where nothing is trained. c_t is what autograd would find, by formula, since it is wanted without a
        graph: a slope by the document's mean is the same for all its tokens.
        """
        terms = self.token_terms(log_probs)
        return self.weights * terms.losses, self.gradient_weights * terms.slope

    def coefficients(self, log_probs: Tensor) -> Tensor:
        """(T,) c_t alone; `documents` may be None where the family's scope is the token."""
        return self.losses_and_coefficients(log_probs)[1]

    def evaluate(self, log_probs: Tensor, entropy: Tensor | None, level: str) -> tuple[Tensor, Tensor, MetricSums]:
        """(loss, coefficients, metric sums): 0-dim, (T,), and those of the level; entropy: (T,), if it has it."""
        losses, coefficients = self.losses_and_coefficients(log_probs)
        return losses.sum(), coefficients, self.metrics(level, log_probs, entropy)

    @torch.no_grad()
    def metrics(self, level: str, log_probs: Tensor, entropy: Tensor | None) -> MetricSums:
        """What this piece adds to the metrics of the step; entropy: (T,), at level with_entropy."""
        # u: one over the document's length at its trained tokens, so that each document sums to one.
        u = self.documents.broadcast(1.0 / self.documents.counts.clamp(min=1).double())

        def document_sums(values: list[Tensor]) -> Tensor:
            # All at once: on a GPU each operation on a vector costs the same, however little it does.
            return (u * torch.where(self.mask, torch.stack([x.double() for x in values]), 0.0)).sum(1)

        if level == "none":
            return MetricSums(level, document_sums([log_probs]), u.new_empty(0))

        family, terms = self.family, self.token_terms(log_probs)
        ratio, log_ratio = terms.ratio.double(), terms.log_ratio.double()
        low, high = family.outside(terms.ratio, terms.token_log_ratio, log_probs)
        values = [
            log_probs,
            self.old_log_probs,
            ratio,
            self.advantages,
            log_ratio.expm1() - log_ratio,
            low | high,
            *family.cuts(low, high, terms.ratio, self.scope_advantages),
            terms.clamped,
        ]
        if level == "with_entropy":
            values.append(entropy)
        v = u if family.by_document else self.mask.double()
        weighted = v * ratio
        sums = torch.cat([document_sums(values), torch.stack([weighted, weighted * ratio, v]).sum(1)])

        advantages = self.advantages.double()
        extrema = torch.stack([advantages, ratio, -advantages, -ratio])
        # A piece without tokens has no maximum to take: -inf joins in.
        lowest = extrema.new_full((len(extrema), 1), -torch.inf)
        maxima = torch.cat([torch.where(self.mask, extrema, -torch.inf), lowest], 1).amax(1)
        return MetricSums(level, sums, maxima)

    def informative(self) -> Tensor:
        """(T,) bool: False where c_t is 0 whatever the log-probs turn out to be."""
        return self.mask & (self.scope_advantages != 0) if self.family.silent_without_advantage else self.mask

    def take(self, rows: Tensor | slice, documents: DocumentSums | None) -> Objective:
        """The share of some rows, in that order; documents that the family needs whole must be whole in it.

        documents: those of the same rows; None only for a family whose scope is the token.
        """
        return replace(
            self,
            mask=self.mask[rows],
            old_log_probs=self.old_log_probs[rows],
            advantages=self.advantages[rows],
            weights=self.weights[rows],
            gradient_weights=self.gradient_weights[rows],
            documents=documents,
            known_scope_advantages=self.scope_advantages[rows],
            _last_terms=[],
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
            documents = self.documents.index[bad].unique().tolist()
            if documents[-1] == self.documents.num_documents:
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

    def token_terms(self, log_probs: Tensor) -> TokenTerms:
        """The terms of each token, kept for the same log-probs, since loss and metrics both ask for them."""
        kept = not log_probs.requires_grad
        if kept and self._last_terms and self._last_terms[0] is log_probs:
            return self._last_terms[1]
        family, advantages = self.family, self.scope_advantages
        # Dropped by selection before any arithmetic: what is not trained may hold NaN or infinity.
        token_log_ratio = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        own, derivative = family.token(token_log_ratio, advantages)
        if derivative is not None:  # a clip, like the clamp below, would make a number of an infinite log-ratio
            own = torch.where(torch.isfinite(token_log_ratio), own, torch.nan)
        unclamped = over_scope(family, own, self.documents)
        clamped, log_ratio = unclamped.abs() > LOG_RATIO_LIMIT, unclamped.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        finite = torch.isfinite(unclamped) & torch.isfinite(advantages)
        log_ratio = torch.where(finite, log_ratio, torch.nan)
        losses, slope = family.surrogate(log_ratio, advantages, torch.where(self.mask, log_probs, 0.0))
        losses = torch.where(finite, losses, torch.nan)
        if family.slope_of == "log_ratio":
            slope = torch.where(clamped, 0.0, slope)
            slope = slope if derivative is None else slope * derivative
        terms = TokenTerms(losses, slope, log_ratio.exp(), log_ratio, clamped, token_log_ratio)
        if kept:
            self._last_terms[:] = log_probs, terms
        return terms


def scope_mean(family: Family, values: Tensor, documents: DocumentSums | None) -> Tensor:
    """(T,) the values themselves, or the mean of each one's document for a family by document."""
    return documents.broadcast(documents.mean(values)) if family.by_document else values


def over_scope(family: Family, values: Tensor, documents: DocumentSums | None) -> Tensor:
    """(T,) the values themselves, or the mean or the sum of each one's document, as the family's scope says."""
    if family.scope == "document_sum":
        return documents.broadcast(documents.sum(values))
    return scope_mean(family, values, documents)


def make_objective(
    tokens: Tokens,
    totals: StepTotals | None,
    loss: Loss,
    dtype: torch.dtype,
    ranks: Ranks,
    make_weights: Callable | None = None,
) -> Objective:
    """Masks, documents and weights of a piece; `dtype` is what the log-probs will come in.

    make_weights: `kernels.triton_objective.make_weights`, which is faster where it can be used, or None. Without
    totals the piece, or the pieces of all of ranks.data, are the whole step. Reads tensors on the host only where the
    caller left sizes open.
    """
    family, aggregation = loss.family, loss.aggregation
    old_log_probs, advantages = (x.to(dtype).contiguous() for x in (tokens.old_log_probs, tokens.advantages))
    has_groups = tokens.group_index is not None and (totals is None or totals.tokens_per_group is not None)
    aggregation.check_groups(has_groups)
    if make_weights is not None and ranks.sequence is None and ranks.data is None:
        made = make_weights(tokens, aggregation, totals)
        if made is not None:
            mask, documents, totals, weights = made
            return Objective(family, mask, old_log_probs, advantages, weights, weights, documents, totals)
    mask = tokens.labels >= 0
    misplaced = mask & ((tokens.document_index < 0) | (tokens.document_index >= tokens.num_documents))
    documents = DocumentSums.of_tokens(tokens.document_index, mask & ~misplaced, tokens.num_documents, ranks.sequence)
    scope_advantages = None
    if ranks.sequence is not None:
        # First, since the documents' lengths, which the rest needs, travel with it.
        scope_advantages = scope_mean(family, torch.where(mask, advantages, 0.0), documents)
    group_index = tokens.group_index
    if totals is None:
        totals, group_index = whole_step_totals(documents, group_index, ranks.data)
    weights = aggregation.weights(totals, documents, mask, group_index)
    weights = torch.where(misplaced, torch.nan, weights).to(dtype)  # no document, no result
    own_slope = family.slope_of != "log_ratio" or (
        aggregation.equal_within_documents and family.scope != "document_sum"
    )
    gradient_weights = weights if own_slope else over_scope(family, weights, documents)
    return Objective(
        family, mask, old_log_probs, advantages, weights, gradient_weights, documents, totals, scope_advantages
    )
