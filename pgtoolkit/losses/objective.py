"""Loss and coefficients of a piece of a step, from its log-probs: all on vectors of one number per token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import Aggregation
from pgtoolkit.losses.checks import MAX_LOG_PROB, check_name, check_positive, is_finite, shown
from pgtoolkit.losses.corrections import Correction, Factors
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.family import LOG_RATIO_LIMIT, Family, clamped, over_scope, scope_mean
from pgtoolkit.losses.kl import KL, Penalties
from pgtoolkit.losses.metrics import LEVELS


@dataclass(frozen=True)
class Loss:
    """What the loss of a step is, and what is measured of it: the sum over its tokens of w_t l_t, or of w_t rho_t l_t.

    temperature: log-probs are log_softmax(logits / temperature). metrics: the level, one of LEVELS.
    entropy_coefficient: of the entropy bonus, minus so much times the sum of w_t times the entropy of the softmax.
    kl: the penalty against the tokens' ref_log_probs, or None. A correction changes neither.
    masks_truncated: each w_t is 0 in documents that were cut off, though everything else counts their tokens.
    """

    family: Family
    aggregation: Aggregation
    temperature: float = 1.0
    metrics: str = "none"
    correction: Correction | None = None
    entropy_coefficient: float = 0.0
    kl: KL | None = None
    masks_truncated: bool = False

    def __post_init__(self):
        check_name("metrics", self.metrics, LEVELS)
        check_positive("temperature", self.temperature)
        if not is_finite(entropy := self.entropy_coefficient) or entropy < 0:
            raise ValueError(f"entropy_coefficient needs a finite number >= 0 (got {shown(entropy)})")

    @property
    def reads_old_log_probs(self) -> bool:
        """False if neither loss nor gradient depends on them, so that documents without any can be trained on."""
        asked = self.family.reads_old_log_probs or self.correction is not None
        return asked or (self.kl is not None and self.kl.reads_old_log_probs)

    @property
    def needs_sampling_log_probs(self) -> bool:
        """Whether there is no loss without them."""
        return self.correction is not None and not self.correction.of_policy

    @property
    def full_kl(self) -> bool:
        """Whether it needs the logits of a reference."""
        return self.kl is not None and self.kl.full

    @property
    def level(self) -> str:
        """The level of the metrics: the entropy is among them where the bonus measures it anyway."""
        return "with_entropy" if self.metrics == "basic" and self.entropy_coefficient else self.metrics


@dataclass(frozen=True)
class TokenTerms:
    """The terms of each token, (T,) each; 0 (ratio: 1) where nothing is trained.

    losses: the surrogate l_t. slope: of the surrogate, by the family's `slope_of`, times the token's own derivative.
        Both are multiplied by the factors of a correction `of_policy`.
    ratio, log_ratio: the token's or its document's, after the clamp. clamped: bool, True where the clamp acted.
    token_log_ratio: of the token alone, before the family's `token` and the clamp. factors: of such a correction.
    """

    losses: Tensor
    slope: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clamped: Tensor
    token_log_ratio: Tensor
    factors: Factors | None = None


@dataclass(frozen=True)
class Objective:
    """The objective of one piece of a step: log-probs in, loss, coefficients and metrics out.

    old_log_probs: None where they are the new ones; `at` then fills them in before anything else is computed.
    mask: (T,) bool. The others of (T,) are in the dtype the log-probs come in. weights: w_t, times the factor of a
    correction that is known before the forward pass. gradient_weights: what a token's slope is weighted by: the same,
    or its mean or sum over the document where the family's slope is the document's.
    known_scope_advantages: see `scope_advantages`. Where documents are spread over ranks, `documents` knows the group.
    off_policy: a correction `of_policy`, and document_advantages the mean advantage that it looks at. It compares the
    new log-probs with sampling_log_probs, where they are known.
    sampling_log_ratio: the old less the sampling log-probs, 0 where nothing is trained. factors: of another correction.
    """

    family: Family
    mask: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    weights: Tensor
    gradient_weights: Tensor
    documents: DocumentSums
    totals: StepTotals
    penalties: Penalties
    known_scope_advantages: Tensor | None = None
    off_policy: Correction | None = None
    document_advantages: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    sampling_log_ratio: Tensor | None = None
    factors: Factors | None = None
    _last_terms: list = field(default_factory=list, compare=False, repr=False)

    def at(self, log_probs: Tensor) -> Objective:
        """The same with old log-probs: where none were given these, detached ones of the policy in training."""
        if self.old_log_probs is not None:
            return self
        ratio = self.sampling_log_probs
        if ratio is not None:
            ratio = torch.where(self.mask, log_probs - ratio, 0.0)
        penalties = replace(self.penalties, old_log_probs=log_probs)
        return replace(self, old_log_probs=log_probs, penalties=penalties, sampling_log_ratio=ratio, _last_terms=[])

    @property
    def by_document(self) -> bool:
        """Whether a token's coefficient depends on the log-probs of the other tokens of its document."""
        return self.family.by_document or self.off_policy is not None

    @cached_property
    def scope_advantages(self) -> Tensor:
        """(T,) advantages of the tokens or of their documents, as the family has it; 0 where nothing is trained."""
        if self.known_scope_advantages is not None:
            return self.known_scope_advantages
        return scope_mean(self.family.scope, torch.where(self.mask, self.advantages, 0.0), self.documents)

    def losses_and_coefficients(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """(w_t times the surrogate, c_t), each (T,): c_t is the derivative of their sum by each log-prob.

        Both are 0 where nothing is trained. c_t is what autograd would find, by formula, since it is wanted without a
        graph: a slope by the document's mean is the same for all its tokens.
        """
        terms = self.token_terms(log_probs)
        return self.penalties.with_kl(log_probs, self.weights * terms.losses, self.gradient_weights * terms.slope)

    def coefficients(self, log_probs: Tensor) -> Tensor:
        """(T,) c_t alone."""
        return self.losses_and_coefficients(log_probs)[1]

    @cached_property
    def shares(self) -> Tensor:
        """(T,) u: one over the document's length at its trained tokens, so that each document sums to one."""
        return self.documents.broadcast(self.documents.counts.clamp(min=1).double().reciprocal())

    @property
    def silent_without_advantage(self) -> bool:
        """Whether a token of advantage 0 has no gradient."""
        return self.family.silent_without_advantage and not self.penalties.active

    def informative(self) -> Tensor:
        """(T,) bool: False where the gradient is 0 whatever the log-probs turn out to be."""
        return self.mask & (self.scope_advantages != 0) if self.silent_without_advantage else self.mask

    def take(self, rows: Tensor | slice, documents: DocumentSums | None) -> Objective:
        """The share of some rows, in that order; documents that the family needs whole must be whole in it.

        documents: those of the same rows; None only where nothing is `by_document`. The share has no metrics.
        """
        names = "mask", "advantages", "weights", "gradient_weights", "document_advantages", "old_log_probs"
        return replace(
            self,
            **{name: x[rows] for name in (*names, "sampling_log_probs") if (x := getattr(self, name)) is not None},
            documents=documents,
            penalties=self.penalties.take(rows),
            known_scope_advantages=self.scope_advantages[rows],
            sampling_log_ratio=None,
            factors=None,
            _last_terms=[],
        )

    def not_finite(self, log_probs: Tensor | None = None) -> Tensor:
        """(T,) bool: trained positions whose weight, any log-prob that is known or advantage is not finite."""
        return self.mask & ~torch.isfinite(self._data(log_probs) + self.weights)

    def refused(self, log_probs: Tensor | None = None) -> Tensor:
        """(T,) bool: what `check_finite` refuses. Also log-probs above 0, and all of a piece with too many tokens."""
        bad = self.not_finite(log_probs) | (self.documents.counts_here.sum() > self.totals.num_tokens)
        for values in self._given_log_probs().values():
            bad |= self.mask & (values > MAX_LOG_PROB)
        return bad

    def _given_log_probs(self) -> dict[str, Tensor]:
        known = {"old_log_probs": self.old_log_probs, "sampling_log_probs": self.sampling_log_probs}
        known["ref_log_probs"] = self.penalties.ref_log_probs
        return {name: values for name, values in known.items() if values is not None}

    def _data(self, log_probs: Tensor | None) -> Tensor:
        """(T,) not finite where something that was given is not."""
        of_reference = self.penalties.ref_log_probs, self.penalties.divergence
        given = self.old_log_probs, self.advantages, self.sampling_log_ratio, *of_reference, log_probs
        first, *others = (x for x in given if x is not None)
        return sum(others, first)

    def check_finite(self, log_probs: Tensor | None = None) -> None:
        """Raise DataError naming the first documents that hold a non-finite number at a trained position.

        So for log-probs above 0; and ValueError for totals of fewer tokens than are here.
        Reads the result on the host: one synchronisation on a GPU.
        """
        if not self.refused(log_probs).any():
            return
        trained, all_trained = int(self.documents.counts_here.sum()), int(self.totals.num_tokens)
        if trained > all_trained:
            raise ValueError(
                f"totals.num_tokens needs to count at least the {trained} trained tokens of this piece (got "
                f"{all_trained}). Totals are those of the whole step."
            )
        if not (bad := self.not_finite(log_probs)).any():  # but a log-prob above 0
            for name, values in self._given_log_probs().items():
                if (wrong := self.mask & (values > MAX_LOG_PROB)).any():
                    document, worst = int(self.documents.index[wrong][0]), float(values[wrong].max())
                    raise DataError(
                        f"{name} needs log-probs, which are at most 0, at trained positions (got {worst:.6g} in "
                        f"document {document}). Probabilities are given as their logarithms, and logits as their "
                        "log_softmax."
                    )
        documents = self.documents.index[bad].unique().tolist()
        if documents[-1] == self.documents.num_documents:
            reason = f"negative or not below num_documents={documents[-1]}"
            raise ValueError(f"document_index at a trained position is {reason}")
        if not torch.isfinite(self.weights).all() and torch.isfinite(self._data(log_probs)[self.mask]).all():
            reason = "a reducer's, a factor, or the totals count none"
            raise ValueError(f"the weight of a trained token is not finite: {reason}")
        named = ", ".join(map(str, documents[:5])) + (", ..." if len(documents) > 5 else "")
        given = "old_log_probs" if self.sampling_log_ratio is None else "old_log_probs, sampling_log_probs"
        given += "" if self.penalties.ref_log_probs is None else ", ref_log_probs"
        if self.penalties.divergence is not None:
            given += ", a full KL (where the reference rules out what the policy does not)"
        raise DataError(
            f"non-finite logits, {given} or advantages at a trained position of document {named}, or a label "
            "outside the vocabulary; mask the position (label -1) or drop the document"
        )

    def token_terms(self, log_probs: Tensor) -> TokenTerms:
        """The terms of each token, kept for the same log-probs, since loss and metrics both ask for them."""
        kept = not log_probs.requires_grad
        if kept and self._last_terms and self._last_terms[0] is log_probs:
            return self._last_terms[1]
        family, advantages = self.family, self.scope_advantages
        assert self.old_log_probs is not None
        # Dropped by selection before any arithmetic: what is not trained may hold NaN or infinity.
        token_log_ratio = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        terms, derivative = family.token(token_log_ratio, advantages)
        if derivative is not None:  # a clip, like the clamp below, would make a number of an infinite log-ratio
            terms = torch.where(torch.isfinite(token_log_ratio), terms, torch.nan)
        unclamped = over_scope(family.scope, terms, self.documents)
        was_clamped = unclamped.abs() > LOG_RATIO_LIMIT
        finite = torch.isfinite(unclamped) & torch.isfinite(advantages)
        log_ratio = torch.where(finite, clamped(unclamped), torch.nan)
        losses, slope = family.surrogate(log_ratio, advantages, torch.where(self.mask, log_probs, 0.0))
        losses = torch.where(finite, losses, torch.nan)
        if family.slope_of == "log_ratio":
            slope = torch.where(was_clamped, 0.0, slope)
            slope = slope if derivative is None else slope * derivative
        factors = None
        if (correction := self.off_policy) is not None:
            moved = token_log_ratio.detach()
            if self.sampling_log_probs is not None:  # else o stands for it
                moved = torch.where(self.mask, log_probs.detach() - self.sampling_log_probs, 0.0)
            assert self.document_advantages is not None
            factors = Factors.of(correction, moved, self.document_advantages, self.documents)
            losses, slope = factors.values * losses, factors.values * slope
        terms = TokenTerms(losses, slope, log_ratio.exp(), log_ratio, was_clamped, token_log_ratio, factors)
        if kept:
            self._last_terms[:] = log_probs, terms
        return terms
