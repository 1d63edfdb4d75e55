"""Computes loss and coefficients of a piece of a step from its log-probs.

All vectors are (T,), with a number for each of the T positions of the piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

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
    """The loss of a step and its metrics.

    The loss is the sum over tokens of w_t l_t, or with a correction of w_t rho_t l_t.
    temperature: log-probs are log_softmax(logits / temperature).
    metrics: the level, one of LEVELS.
    entropy_coefficient: of the entropy bonus, which adds -entropy_coefficient times the sum over
        tokens of w_t times the entropy of the softmax.
    kl: the penalty against the tokens' ref_log_probs, or None. A correction changes neither penalty
        nor bonus.
    masks_truncated: w_t is 0 in documents that were cut off, though the totals count their tokens.
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
        if not is_finite(self.entropy_coefficient) or self.entropy_coefficient < 0:
            raise ValueError(
                "entropy_coefficient needs a finite number >= 0 (got "
                f"{shown(self.entropy_coefficient)})"
            )

    @property
    def reads_old_log_probs(self) -> bool:
        """Return False if the loss does not depend on them, so that documents need not have any."""
        if self.family.reads_old_log_probs or self.correction is not None:
            return True
        return self.kl is not None and self.kl.reads_old_log_probs

    @property
    def needs_sampling_log_probs(self) -> bool:
        """True if the loss cannot be computed without sampling log-probs."""
        return self.correction is not None and not self.correction.of_policy

    @property
    def full_kl(self) -> bool:
        """Return True if the penalty is over the full vocabulary, and needs reference logits."""
        return self.kl is not None and self.kl.full

    @property
    def level(self) -> str:
        """Return the level of the metrics: with_entropy where a bonus computes it anyway."""
        if self.metrics == "basic" and self.entropy_coefficient:
            return "with_entropy"
        return self.metrics


@dataclass(frozen=True)
class TokenTerms:
    """The terms of each token, (T,) each; 0 (ratio: 1) where nothing is trained.

    losses: the surrogate l_t, times the factors of a correction that is `of_policy`.
    slope: the derivative of the surrogate by the family's `slope_of`, times the derivative of
        `token` and the same factors.
    ratio, log_ratio: those of the token or its document, after the clamp.
    clamped: bool, True where the clamp acted.
    token_log_ratio: that of the token alone, before the family's `token` and the clamp.
    factors: those of a correction that is `of_policy`.
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
    """The objective of a piece of a step: computes loss, coefficients and metrics of its log-probs.

    Vectors are (T,), in the dtype of the log-probs.
    mask: bool, True where a token is trained.
    old_log_probs: None where they are the new ones; `at` then fills them in before anything else is
        computed.
    weights: w_t, times the factor of a correction that is known before the forward pass.
    gradient_weights: the weight of a token's slope: w_t, or, where the family's slope is the
        document's, its mean or sum over the document.
    documents: the sums over documents, with the group of ranks over which these are spread.
    known_scope_advantages: see `scope_advantages`.
    off_policy: a correction that is `of_policy`. It compares the new log-probs with
        sampling_log_probs, or with the old ones where those are not known.
    document_advantages: the mean advantages of documents, for off_policy.
    sampling_log_ratio: the old minus the sampling log-probs, 0 where nothing is trained.
    factors: those of any other correction.
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
        """Return the objective with these as its old log-probs, if it has none.

        log_probs: (T,), detached, of the policy in training.
        """
        if self.old_log_probs is not None:
            return self
        log_ratio = None
        if self.sampling_log_probs is not None:
            log_ratio = torch.where(self.mask, log_probs - self.sampling_log_probs, 0.0)
        penalties = replace(self.penalties, old_log_probs=log_probs)
        return replace(
            self,
            old_log_probs=log_probs,
            penalties=penalties,
            sampling_log_ratio=log_ratio,
            _last_terms=[],
        )

    @property
    def by_document(self) -> bool:
        """Return True if a token's coefficient depends on other log-probs of its document."""
        return self.family.by_document or self.off_policy is not None

    @cached_property
    def scope_advantages(self) -> Tensor:
        """Return (T,) advantages of the tokens or, by the family's scope, of their documents.

        They are 0 where nothing is trained.
        """
        if self.known_scope_advantages is not None:
            return self.known_scope_advantages
        advantages = torch.where(self.mask, self.advantages, 0.0)
        return scope_mean(self.family.scope, advantages, self.documents)

    def losses_and_coefficients(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (losses, coefficients), each (T,), 0 where nothing is trained.

        losses: w_t times the surrogate, with the penalty of the token.
        coefficients: c_t, the derivative of their sum by each log-prob, as autograd would compute
            it, but from formulas, since no graph is kept.
        """
        terms = self.token_terms(log_probs)
        return self.penalties.with_kl(
            log_probs, self.weights * terms.losses, self.gradient_weights * terms.slope
        )

    def coefficients(self, log_probs: Tensor) -> Tensor:
        """Return (T,) c_t alone."""
        return self.losses_and_coefficients(log_probs)[1]

    @cached_property
    def shares(self) -> Tensor:
        """Return (T,) float64, 1 / N_d of the trained tokens of each document."""
        return self.documents.broadcast(self.documents.counts.clamp(min=1).double().reciprocal())

    @property
    def silent_without_advantage(self) -> bool:
        """Return True if a token of advantage 0 has no gradient."""
        return self.family.silent_without_advantage and not self.penalties.active

    def informative(self) -> Tensor:
        """Return (T,) bool, False where the gradient is 0 whatever the log-probs are."""
        if self.silent_without_advantage:
            return self.mask & (self.scope_advantages != 0)
        return self.mask

    def take(self, rows: Tensor | slice, documents: DocumentSums | None) -> Objective:
        """Return the objective of some rows, in their order, without metrics.

        documents: those of the same rows; None only if the objective is not `by_document`.
            Otherwise each document must have all or none of its tokens among the rows.
        """
        names = ("mask", "advantages", "weights", "gradient_weights", "document_advantages")
        names += ("old_log_probs", "sampling_log_probs")
        vectors = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{name: vector[rows] for name, vector in vectors.items() if vector is not None},
            documents=documents,
            penalties=self.penalties.take(rows),
            known_scope_advantages=self.scope_advantages[rows],
            sampling_log_ratio=None,
            factors=None,
            _last_terms=[],
        )

    def not_finite(self, log_probs: Tensor | None = None) -> Tensor:
        """Return (T,) bool, True where a trained token has a number that is not finite."""
        return self.mask & ~torch.isfinite(self._sum_of_data(log_probs) + self.weights)

    def refused(self, log_probs: Tensor | None = None) -> Tensor:
        """Return (T,) bool, True where `check_finite` refuses the data.

        It is True everywhere if the totals are too small.
        """
        totals_too_small = self.documents.counts_here.sum() > self.totals.num_tokens
        bad = self.not_finite(log_probs) | totals_too_small
        for values in self._log_probs_of_data().values():
            bad |= self.mask & (values > MAX_LOG_PROB)
        return bad

    def _log_probs_of_data(self) -> dict[str, Tensor]:
        vectors = {
            "old_log_probs": self.old_log_probs,
            "sampling_log_probs": self.sampling_log_probs,
            "ref_log_probs": self.penalties.ref_log_probs,
        }
        return {name: values for name, values in vectors.items() if values is not None}

    def _sum_of_data(self, log_probs: Tensor | None) -> Tensor:
        """Return (T,), the sum of all inputs: NaN or infinite wherever one of them is."""
        vectors = (
            self.old_log_probs,
            self.advantages,
            self.sampling_log_ratio,
            self.penalties.ref_log_probs,
            self.penalties.divergence,
            log_probs,
        )
        first, *others = (vector for vector in vectors if vector is not None)
        return sum(others, first)

    def check_finite(self, log_probs: Tensor | None = None) -> None:
        """Refuse data that has no loss; costs one synchronisation on a GPU.

        Raises DataError, which names the first documents, for numbers that are not finite and
        log-probs above 0, both at trained positions; ValueError for totals that count fewer tokens
        than this piece has, a document_index out of range, and weights that are not finite.
        """
        if not self.refused(log_probs).any():
            return
        tokens_here = int(self.documents.counts_here.sum())
        tokens_of_step = int(self.totals.num_tokens)
        if tokens_here > tokens_of_step:
            raise ValueError(
                f"totals.num_tokens needs to count at least the {tokens_here} trained tokens of "
                f"this piece (got {tokens_of_step}). Totals are those of the whole step."
            )
        bad = self.not_finite(log_probs)
        if not bad.any():
            self._refuse_positive_log_probs()
        documents = self.documents.index[bad].unique().tolist()
        if documents[-1] == self.documents.num_documents:
            reason = f"negative or not below num_documents={documents[-1]}"
            raise ValueError(f"document_index at a trained position is {reason}")
        weights_are_finite = torch.isfinite(self.weights).all()
        data_is_finite = torch.isfinite(self._sum_of_data(log_probs)[self.mask]).all()
        if data_is_finite and not weights_are_finite:
            raise ValueError(
                "the weight of a trained token is not finite: it comes from a reducer, a factor, "
                "or totals that count none"
            )
        self._refuse_documents(documents)

    def _refuse_documents(self, documents: list[int]) -> NoReturn:
        """Raise DataError for the numbers of documents that are not finite."""
        listing = ", ".join(map(str, documents[:5]))
        if len(documents) > 5:
            listing += ", ..."
        inputs = "old_log_probs"
        if self.sampling_log_ratio is not None:
            inputs += ", sampling_log_probs"
        if self.penalties.ref_log_probs is not None:
            inputs += ", ref_log_probs"
        if self.penalties.divergence is not None:
            inputs += ", a full KL (where the reference rules out what the policy does not)"
        raise DataError(
            f"non-finite logits, {inputs} or advantages at a trained position of document "
            f"{listing}, or a label outside the vocabulary; mask the position (label -1) or drop "
            "the document"
        )

    def _refuse_positive_log_probs(self) -> None:
        """Raise DataError for log-probs above 0 at trained positions."""
        for name, values in self._log_probs_of_data().items():
            wrong = self.mask & (values > MAX_LOG_PROB)
            if wrong.any():
                document = int(self.documents.index[wrong][0])
                highest = float(values[wrong].max())
                raise DataError(
                    f"{name} needs log-probs, which are at most 0, at trained positions (got "
                    f"{highest:.6g} in document {document}). Probabilities are given as their "
                    "logarithms, and logits as their log_softmax."
                )

    def token_terms(self, log_probs: Tensor) -> TokenTerms:
        """Return the terms of each token.

        The last result is kept, since loss and metrics both need it.
        """
        can_keep = not log_probs.requires_grad
        if can_keep and self._last_terms and self._last_terms[0] is log_probs:
            return self._last_terms[1]
        family = self.family
        advantages = self.scope_advantages
        assert self.old_log_probs is not None
        # Select before any arithmetic, since positions that are not trained may hold NaN or
        # infinity.
        token_log_ratio = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        terms, derivative = family.token(token_log_ratio, advantages)
        if derivative is not None:
            # A clip, like the clamp below, would turn an infinite log-ratio into a finite number.
            terms = torch.where(torch.isfinite(token_log_ratio), terms, torch.nan)
        unclamped = over_scope(family.scope, terms, self.documents)
        was_clamped = unclamped.abs() > LOG_RATIO_LIMIT
        finite = torch.isfinite(unclamped) & torch.isfinite(advantages)
        log_ratio = torch.where(finite, clamped(unclamped), torch.nan)
        losses, slope = family.surrogate(
            log_ratio, advantages, torch.where(self.mask, log_probs, 0.0)
        )
        losses = torch.where(finite, losses, torch.nan)
        if family.slope_of == "log_ratio":
            slope = torch.where(was_clamped, 0.0, slope)
            slope = slope if derivative is None else slope * derivative
        factors = self._off_policy_factors(log_probs.detach(), token_log_ratio.detach())
        if factors is not None:
            losses = factors.values * losses
            slope = factors.values * slope
        terms = TokenTerms(
            losses, slope, log_ratio.exp(), log_ratio, was_clamped, token_log_ratio, factors
        )
        if can_keep:
            self._last_terms[:] = log_probs, terms
        return terms

    def _off_policy_factors(self, log_probs: Tensor, token_log_ratio: Tensor) -> Factors | None:
        """Return the factors of the correction that is `of_policy`, or None without one."""
        if self.off_policy is None:
            return None
        since_sampling = token_log_ratio
        if self.sampling_log_probs is not None:
            since_sampling = torch.where(self.mask, log_probs - self.sampling_log_probs, 0.0)
        assert self.document_advantages is not None
        return Factors.of(self.off_policy, since_sampling, self.document_advantages, self.documents)
