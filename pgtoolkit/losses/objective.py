"""Computes the loss of a piece of a step, and its derivatives by the log-probs of its tokens.

x_t, s_t and l_t are those of `family.py`, w_t is the weight of `aggregation.py`, and rho_t the
factor of `corrections.py`. `make_objective` makes the objective. All vectors are (T,), with a
number for each of the T positions of the piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, without_waiting
from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import AGGREGATIONS, Aggregation
from pgtoolkit.losses.centering import CenteredRows, Centering
from pgtoolkit.losses.checks import (
    MAX_LOG_PROB,
    check_name,
    check_object,
    check_positive,
    check_switches,
    is_finite,
    shown,
)
from pgtoolkit.losses.corrections import CORRECTIONS, Correction, Factors
from pgtoolkit.losses.data_faults import Data, MadeFrom
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import LOG_RATIO_LIMIT, Family, clamped, over_scope, scope_mean
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.function_values import Evaluated, check_results, evaluate
from pgtoolkit.losses.kl import KL, Penalties
from pgtoolkit.losses.metrics import LEVELS
from pgtoolkit.losses.top_entropy import check_fraction
from pgtoolkit.losses.views import DocumentView, GroupView, StepView

_MASK_THEM = "Mask these positions (label -1, or mask False) or drop the documents."
_DROP_THEM = "Drop the documents, or mask all of their tokens (label -1, or mask False)."


@dataclass(frozen=True)
class Loss:
    """The choice of a loss and of its metrics, without any data.

    The loss is the sum over tokens of w_t l_t, or of w_t rho_t l_t with a correction.
    temperature: log-probs are log_softmax(logits / temperature).
    metrics: the level of the metrics, one of LEVELS.
    entropy_coefficient: the coefficient of the entropy bonus. The bonus adds -entropy_coefficient
        times the sum over tokens of w_t times the entropy of the softmax.
    kl: the penalty against the reference, or None. A correction changes neither penalty nor bonus.
    masks_truncated: True if w_t is 0 in documents that were cut off. The totals still count their
        tokens.
    entropy_top_fraction: the share of the step's tokens, those of the largest entropies, of which
        alone the surrogate counts; None: all. Pieces of a step get the choice as `factors`.
    measures_penalty: whether the mean of the penalty's own term is among the metrics, which an
        adaptive coefficient reads; for kinds by token.
    """

    family: Family
    aggregation: Aggregation
    temperature: float = 1.0
    metrics: str = "none"
    correction: Correction | None = None
    entropy_coefficient: float = 0.0
    kl: KL | None = None
    masks_truncated: bool = False
    entropy_top_fraction: float | None = None
    measures_penalty: bool = False

    def __post_init__(self):
        _check_parts(self)
        check_switches(masks_truncated=self.masks_truncated, measures_penalty=self.measures_penalty)
        check_name("metrics", self.metrics, LEVELS)
        check_positive("temperature", self.temperature)
        if not is_finite(self.entropy_coefficient) or self.entropy_coefficient < 0:
            raise ValueError(
                "entropy_coefficient needs a finite number >= 0 (got "
                f"{shown(self.entropy_coefficient)})"
            )
        if self.entropy_top_fraction is not None:
            check_fraction("entropy_top_fraction", self.entropy_top_fraction)
        _check_correction(self)

    @property
    def reads_old_log_probs(self) -> bool:
        """Return True if the loss depends on old log-probs; else documents need not have them."""
        return self.reader_of_old_log_probs is not None

    @property
    def reader_of_old_log_probs(self) -> str | None:
        """Return the part of the loss that depends on old log-probs, as Python types it; None
        where none does."""
        family = self.family
        if family.reads_old_log_probs:
            return f"loss={family.name!r}"
        if family.score_centering:
            return f"score_centering=True of loss={family.name!r}"
        if self.correction is not None:
            return f"correction={self.correction.name!r}"
        if self.kl is not None and self.kl.reads_old_log_probs:
            return f"kl={self.kl.kind!r}"
        return None

    @property
    def needs_sampling_log_probs(self) -> bool:
        """Return True if the loss cannot be computed without sampling log-probs."""
        return self.correction is not None and not self.correction.of_policy

    @property
    def full_kl(self) -> bool:
        """Return True if the KL is over the full vocabulary, which needs the reference's logits."""
        return self.kl is not None and self.kl.full

    @property
    def needs_whole_groups(self) -> bool:
        """Return True if the documents of a group must be in one step."""
        of_function = isinstance(self.family, FunctionFamily) and "groups" in self.family.asked
        return self.aggregation.needs_groups or of_function

    @property
    def level(self) -> str:
        """Return the level of the metrics, with the entropy if the bonus computes it anyway."""
        if self.metrics == "basic" and self.entropy_coefficient:
            return "with_entropy"
        return self.metrics


def _check_correction(loss: Loss) -> None:
    """Raise ValueError for a correction beside a family that corrects for the sampler itself."""
    family = loss.family
    if loss.correction is None:
        return
    if isinstance(family, FunctionFamily) and "groups" in family.asked:
        raise ValueError(
            f"correction={loss.correction.name!r} beside the loss function {family.name}, which "
            "asks for groups: the factor of one document would scale the others. Use "
            "correction=None; the function may read sampling_log_probs itself"
        )
    if family.score_centering:
        raise ValueError(
            f"score_centering beside correction={loss.correction.name!r}: the family's own factor "
            "corrects for the sampler already, and old_log_probs are the sampler's. Use "
            "correction=None"
        )


def _check_parts(loss: Loss) -> None:
    """Raise ValueError for a name, a class or another object in the place of a part of the loss."""

    def named(value: object, known: Collection[str], otherwise: str) -> str:
        return value if isinstance(value, str) and value in known else otherwise

    family = FAMILIES[named(loss.family, FAMILIES, "grpo")].__name__
    use = f"pgtoolkit.families.{family}()"
    if _is_function(loss.family):
        use = "pgtoolkit.losses.function.FunctionLoss(my_loss) for a function of your own"
    check_object("family", loss.family, Family, use)
    mode = named(loss.aggregation, AGGREGATIONS, "token_mean")
    use = f"pgtoolkit.losses.aggregation.aggregation_of({mode!r})"
    if _is_function(loss.aggregation):
        use = "aggregation_of('sample_mean', reducer=my_reducer) of pgtoolkit.losses.aggregation"
    check_object("aggregation", loss.aggregation, Aggregation, use)
    if loss.correction is not None:
        correction = CORRECTIONS[named(loss.correction, CORRECTIONS, "token_truncate")].__name__
        use = f"pgtoolkit.corrections.{correction}()"
        check_object("correction", loss.correction, Correction, use)
    if loss.kl is not None and not isinstance(loss.kl, KL):
        raise ValueError(
            "kl needs a pgtoolkit.kl.KL, such as KL('k3', coefficient=0.05), or None (got "
            f"{shown(loss.kl)})"
        )


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


@dataclass(frozen=True)
class TokenTerms:
    """The terms of each token before they are weighted, (T,) each.

    Where nothing is trained the ratio is 1, and losses, slope and log-ratios are 0.
    losses: the surrogate l_t, times rho_t if a correction is `of_policy`.
    slope: the derivative of l_t by the variable that the family's `slope_of` names, times the same
        rho_t. For "log_ratio" it is also times the derivative of x_t by the token's log-ratio.
    log_ratio: s_t, after the clamp.
    ratio: exp(log_ratio).
    clamped: bool, True where the clamp acted.
    token_log_ratio: the new minus the old log-prob of the token, from which x_t and s_t are made.
    factors: rho_t of a correction that is `of_policy`; None without one.
    ratio_by_document: True if the ratio is that of a document.
    own_metrics: metrics of the loss itself, by name, (T,) each; only a function has some.
    bounds: of the ratio, where they come from a function; None: the family knows them.
    """

    losses: Tensor
    slope: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clamped: Tensor
    token_log_ratio: Tensor
    factors: Factors | None = None
    ratio_by_document: bool = False
    own_metrics: dict[str, Tensor] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Objective:
    """A loss with the data of a piece of a step: computes losses and coefficients of log-probs.

    The log-probs that its methods take are the new ones, of the policy in training. Vectors are
    (T,), in the dtype of the log-probs.
    mask: bool, True where a token is trained.
    old_log_probs: None where they are the new ones; `at` then fills them in before anything else is
        computed.
    weights: w_t, times all factors that are known before the forward pass.
    gradient_weights: the weight of a token's slope: `weights`, or their mean or sum over the
        document where the slope is that of the whole document.
    documents: computes sums over documents, also where several ranks share a document.
    totals: the denominators of the whole step.
    known_scope_advantages: the result of `scope_advantages` if it was computed before, or None.
    off_policy: the correction if it is `of_policy`, or None. It compares the new log-probs with
        sampling_log_probs, or with the old log-probs where the sampling ones are not known.
    document_advantages: each token's mean advantage over the scope of off_policy, which needs it.
    sampling_log_ratio: the old minus the sampling log-probs, 0 where nothing is trained.
    factors: the factors of a correction that is not `of_policy`, for the metrics. They are in
        `weights` already.
    known_before: the vectors of `function.KNOWN_BEFORE` that the family asks for, by name.
    has_weight: (documents,) bool, False for those of which every weight is 0, and which metrics
        leave out; None where no document is known to be such.
    group_index: (documents,) int64, where the objective is the whole step's and the family's level
        is the step.
    centering: the term of score centering, or None.
    coefficients_of_step: (T,), c_t of a loss that depends on the whole step, computed before; the
        surrogate's own value is then not computed.
    given_factors: those of the caller, which may be 0; None without any. They are in `weights`.
    shared: of a piece of a step, for each of group_index and trajectory_index that its totals
        count: (the field of the totals, each document's place in it, the counts), so that a piece
        with more tokens than these is refused.
    _last_terms: empty, or the log-probs of the last call of `token_terms`, and its result.
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
    known_before: dict[str, Tensor] = field(default_factory=dict)
    has_weight: Tensor | None = None
    group_index: Tensor | None = None
    coefficients_of_step: Tensor | None = None
    given_factors: Tensor | None = None
    shared: tuple[tuple[str, Tensor, Tensor], ...] = ()
    centering: Centering | None = None
    _last_terms: list = field(default_factory=list, compare=False, repr=False)

    def at(self, log_probs: Tensor, top_log_probs: Tensor | None = None) -> Objective:
        """Return the objective with old log-probs: its own, or else these new ones, detached.

        top_log_probs: (T, k), the new ones of the sampler's likeliest tokens, for score centering.
        """
        if top_log_probs is not None:
            assert self.centering is not None
            centering = self.centering.at(top_log_probs)
            return replace(self, centering=centering, _last_terms=[]).at(log_probs)
        if self.old_log_probs is not None:
            return self
        sampling_log_ratio = None
        if self.sampling_log_probs is not None:
            sampling_log_ratio = torch.where(self.mask, log_probs - self.sampling_log_probs, 0.0)
        penalties = replace(self.penalties, old_log_probs=log_probs)
        return replace(
            self,
            old_log_probs=log_probs,
            penalties=penalties,
            sampling_log_ratio=sampling_log_ratio,
            _last_terms=[],
        )

    @property
    def by_document(self) -> bool:
        """Return True if a token's coefficient depends on other log-probs of its document."""
        if self.coefficients_of_step is not None:
            return False
        return self.family.by_document or self.off_policy is not None

    @cached_property
    def scope_advantages(self) -> Tensor:
        """Return (T,), the advantages of the tokens, or the mean ones of their documents.

        The family's scope decides between the two. They are 0 where nothing is trained.
        """
        if self.known_scope_advantages is not None:
            return self.known_scope_advantages
        advantages = torch.where(self.mask, self.advantages, 0.0)
        return scope_mean(self.family.scope, advantages, self.documents)

    def losses_and_coefficients(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (losses, coefficients), each (T,), 0 where nothing is trained.

        losses: the weighted surrogate, plus score centering and the penalty by token.
        coefficients: c_t, the derivative of the sum of the losses by each log-prob. Formulas give
            it in the place of autograd, since no graph is kept.
        """
        terms = self.token_terms(log_probs)
        losses = self.weights * terms.losses
        if self.centering is not None:
            losses = losses + self.centering.losses
        return self.penalties.with_kl(log_probs, losses, self.gradient_weights * terms.slope)

    @property
    def centered_rows(self) -> CenteredRows | None:
        """Return score centering's part of the gradient by the logits; None without it."""
        return None if self.centering is None else self.centering.rows

    def coefficients(self, log_probs: Tensor) -> Tensor:
        """Return (T,), the coefficients c_t alone."""
        return self.losses_and_coefficients(log_probs)[1]

    def token_terms(self, log_probs: Tensor) -> TokenTerms:
        """Return the terms of each token.

        The last result is kept, since loss and metrics both need it, but not if log_probs requires
        a gradient.
        """
        can_keep = not log_probs.requires_grad
        if can_keep and self._last_terms and self._last_terms[0] is log_probs:
            return self._last_terms[1]
        if self.coefficients_of_step is not None:
            terms = self._terms_of_known(self.coefficients_of_step, log_probs)
        elif isinstance(self.family, FunctionFamily):
            terms = self._terms_of_function(self.family, log_probs)
        else:
            terms = self._terms_of_class(log_probs)
        if can_keep:
            self._last_terms[:] = log_probs, terms
        return terms

    def _terms_of_class(self, log_probs: Tensor) -> TokenTerms:
        """Return the terms of each token by the methods of the family."""
        family = self.family
        advantages = self.scope_advantages
        assert self.old_log_probs is not None
        # Select before any arithmetic, since positions that are not trained may hold NaN or
        # infinity.
        token_log_ratio = torch.where(self.mask, log_probs - self.old_log_probs, 0.0)
        x, derivative = family.token(token_log_ratio, advantages)
        if derivative is not None:
            # A clip in `token`, like the clamp below, would hide an infinite log-ratio.
            x = torch.where(torch.isfinite(token_log_ratio), x, torch.nan)
        unclamped = over_scope(family.scope, x, self.documents)  # s_t
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
        return TokenTerms(
            losses,
            slope,
            log_ratio.exp(),
            log_ratio,
            was_clamped,
            token_log_ratio,
            factors,
            family.by_document,
        )

    def _terms_of_known(self, coefficients: Tensor, log_probs: Tensor) -> TokenTerms:
        """Return the terms of each token where the whole step was computed before.

        The losses are 0: the value is the step's, and is known as well.
        """
        assert self.old_log_probs is not None
        token_log_ratio = torch.where(self.mask, log_probs.detach() - self.old_log_probs, 0.0)
        log_ratio = clamped(token_log_ratio)
        was_clamped = token_log_ratio.abs() > LOG_RATIO_LIMIT
        return TokenTerms(
            losses=torch.zeros_like(log_probs),
            slope=torch.where(self.mask, coefficients, 0.0),
            ratio=log_ratio.exp(),
            log_ratio=log_ratio,
            clamped=was_clamped,
            token_log_ratio=token_log_ratio,
        )

    def _terms_of_function(self, family: FunctionFamily, log_probs: Tensor) -> TokenTerms:
        """Return the terms of each token by a function of the user's own.

        `slope` then includes the weights.
        """
        zeros = torch.zeros_like(log_probs)
        if not self.calls_function:
            return TokenTerms(zeros, zeros, zeros + 1, zeros, zeros.bool(), zeros)
        assert self.old_log_probs is not None
        token_log_ratio = torch.where(self.mask, log_probs.detach() - self.old_log_probs, 0.0)
        factors = self._off_policy_factors(log_probs.detach(), token_log_ratio)
        weights = self.weights if factors is None else self.weights * factors.values
        evaluated = self._evaluated(family, log_probs, weights)
        losses = evaluated.losses
        if factors is not None:
            losses = factors.values * losses
        return TokenTerms(
            torch.where(self.mask, losses, 0.0),
            torch.where(self.mask, evaluated.coefficients, 0.0),
            evaluated.log_ratio.exp(),
            evaluated.log_ratio,
            evaluated.clamped,
            token_log_ratio,
            factors,
            evaluated.ratio_by_document,
            evaluated.metrics,
            evaluated.bounds,
        )

    def ratio_from_sampler(self) -> Tensor:
        """Return (T,), the ratio of a function if the policy were the old one and had been sampled
        with the sampling log-probs: what their difference alone does to it."""
        assert isinstance(self.family, FunctionFamily)
        assert self.old_log_probs is not None
        from_sampler = replace(self, old_log_probs=self.sampling_log_probs, _last_terms=[])
        evaluated = from_sampler._evaluated(self.family, self.old_log_probs, self.weights)
        return evaluated.log_ratio.exp()

    def _evaluated(self, family: FunctionFamily, log_probs: Tensor, weights: Tensor) -> Evaluated:
        """Return the function's results at all positions, 0 where it gets no token.

        A document of weight 0 has no part in those of other documents.
        """
        if family.level == "token":
            return self._call(family, log_probs, weights, None, (None, None, None))
        if family.level == "document" and self.documents.is_sorted:
            views = DocumentView(self.documents), None, None
            return self._call(family, log_probs, weights, None, views)
        trained = self.documents.counts > 0
        members = self.members()
        if not bool(members.any()):
            rows, views = self._seen_by(trained)
            of_all = self._call(family, log_probs, weights, rows, views)
            zeros = torch.zeros_like(log_probs)
            return replace(of_all, losses=zeros, coefficients=zeros)
        rows, views = self._seen_by(members)
        return self._call(family, log_probs, weights, rows, views)

    def _call(
        self,
        family: FunctionFamily,
        log_probs: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        views: tuple[DocumentView | None, GroupView | None, StepView | None],
    ) -> Evaluated:
        """Return the function's results at all positions, 0 where it gets no token.

        rows: the positions of the tokens that it gets, document by document; None for all, in their
            order. views: documents, groups and step.
        """

        def seen(vector: Tensor) -> Tensor:
            return torch.where(self.mask, vector, 0.0) if rows is None else vector[rows]

        evaluated = evaluate(
            family,
            seen(log_probs),
            seen(weights),
            {name: seen(vector) for name, vector in self.vectors_of_function().items()},
            *views,
        )
        return evaluated if rows is None else evaluated.at(rows, len(log_probs))

    @cached_property
    def calls_function(self) -> bool:
        """Return False if the loss is a function that no token here is given to.

        It is not called with empty vectors, of which it may take the maximum.
        """
        assert isinstance(self.family, FunctionFamily)
        if self.family.level == "token" or self.documents.is_sorted:
            return bool(len(self.mask)) or self.documents.group is not None
        # Ranks that share documents all call it, also without a token: its sums are collectives.
        return bool((self.documents.counts > 0).any())

    def _seen_by(
        self, shown: Tensor
    ) -> tuple[Tensor, tuple[DocumentView, GroupView | None, StepView | None]]:
        """Return (rows, (documents, groups, step)) as a function gets them.

        shown: (documents,) bool, the documents that it gets.
        rows: the positions of their tokens, document by document.
        """
        rows, documents = self.documents.only(shown)
        if self.family.by_document:
            return rows, (DocumentView(documents), None, None)
        groups = None
        num_groups = None
        if self.group_index is not None:
            numbers, group_index = self.group_index[shown].unique(return_inverse=True)
            # In the order of their first documents: where each group has one, a number per group
            # is also one per document.
            place = torch.arange(len(group_index), device=group_index.device)
            first = torch.full_like(numbers, len(place))
            first = first.scatter_reduce(0, group_index, place, "amin")
            group_index = first.argsort().argsort()[group_index]
            num_groups = len(numbers)
            groups = GroupView(group_index, num_groups)
        step = StepView(len(rows), documents.num_documents, num_groups)
        return rows, (DocumentView(documents), groups, step)

    def members(self) -> Tensor:
        """Return (documents,) bool: those that a function gets, with a trained token and a weight.

        The weights of the penalties are those without the factors of a correction.
        """
        has_weight = self.documents.sum(self.penalties.weights.abs()) > 0
        return (self.documents.counts > 0) & has_weight

    def vectors_of_function(self) -> dict[str, Tensor]:
        """Return the vectors that a function may ask for, (T,) each, but for the new ones."""
        return {"advantages": self.advantages, **self._log_probs_of_data(), **self.known_before}

    def _off_policy_factors(self, log_probs: Tensor, token_log_ratio: Tensor) -> Factors | None:
        """Return the factors of the correction that is `of_policy`, or None without one."""
        if self.off_policy is None:
            return None
        log_ratio = token_log_ratio  # against the old log-probs, unless better ones are known
        if self.sampling_log_probs is not None:
            log_ratio = torch.where(self.mask, log_probs - self.sampling_log_probs, 0.0)
        assert self.document_advantages is not None
        return Factors.of(self.off_policy, log_ratio, self.document_advantages, self.documents)

    @cached_property
    def measured(self) -> Tensor:
        """Return (T,) bool, True at the trained tokens of documents that have a weight."""
        if self.has_weight is None:
            return self.mask
        return self.mask & (self.documents.broadcast(self.has_weight.double()) > 0)

    @cached_property
    def shares(self) -> Tensor:
        """Return (T,) float64, 1 / N_d at the trained tokens of each document; else 0."""
        return self.documents.broadcast(self.documents.counts.clamp(min=1).double().reciprocal())

    @property
    def silent_without_advantage(self) -> bool:
        """Return True if every token of advantage 0 has a gradient of 0."""
        known = self.coefficients_of_step is not None
        return self.family.silent_without_advantage and not known and not self.penalties.active

    @property
    def multiplier(self) -> Tensor | None:
        """Return (T,) numbers without which a token has no gradient, its document's other tokens
        aside: its known coefficient, or its weight with the caller's factor. None where no more is
        known than advantages."""
        if self.penalties.active:
            return None
        if self.coefficients_of_step is not None:
            return self.coefficients_of_step
        return None if self.given_factors is None else self.weights

    def informative(self) -> Tensor:
        """Return (T,) bool, False where the gradient is 0 whatever the log-probs are; with
        `by_document`, where all tokens of the document are such."""
        informative = self.mask
        if self.silent_without_advantage:
            informative = informative & (self.scope_advantages != 0)
        if self.multiplier is not None:
            informative = informative & (self.multiplier != 0)
        return informative

    def take(self, rows: Tensor | slice, documents: DocumentSums | None) -> Objective:
        """Return the objective of the positions `rows`, in that order, for coefficients alone.

        It lacks what only metrics read.
        documents: the sums over the documents of these rows; None only if the objective is not
            `by_document`. Otherwise each document must have all or none of its tokens among them.
        """
        names = (
            "mask",
            "advantages",
            "weights",
            "gradient_weights",
            "document_advantages",
            "old_log_probs",
            "sampling_log_probs",
            "coefficients_of_step",
            "given_factors",
        )
        vectors = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{name: vector[rows] for name, vector in vectors.items() if vector is not None},
            documents=documents,
            penalties=self.penalties.take(rows),
            centering=None if self.centering is None else self.centering.take(rows),
            known_scope_advantages=self.scope_advantages[rows],
            known_before={name: vector[rows] for name, vector in self.known_before.items()},
            sampling_log_ratio=None,
            factors=None,
            has_weight=None,
            _last_terms=[],
        )

    def check_finite(
        self, log_probs: Tensor | None = None, made_from: MadeFrom | None = None
    ) -> None:
        """Raise an error if these data have no loss; wait for the GPU once.

        log_probs: the new ones, to be checked as well; None leaves them out. made_from: where they
        come from, for the message.
        Raises DataError, which names the first documents, for inputs that are not finite and for
        log-probs above 0, both at trained positions. Raises ValueError for totals that count fewer
        tokens than this piece has, a document_index out of range, and weights that are not finite.
        """
        refused = self.refused(log_probs)
        of_data = self._log_probs_of_data()
        if log_probs is not None and made_from is not None and made_from.name == "log_probs":
            # Those that the caller has computed may be no log-probs, either.
            of_data["log_probs"] = log_probs
            refused = refused | self.mask & (log_probs > MAX_LOG_PROB)
        if not refused.any():
            return
        tokens_here = int(self.documents.counts_here.sum())
        tokens_of_step = int(self.totals.num_tokens)
        if tokens_here > tokens_of_step:
            raise ValueError(
                f"totals.num_tokens needs to count at least the {tokens_here} trained tokens of "
                f"this piece (got {tokens_of_step}). Totals are those of the whole step."
            )
        for name, here, counts in self._tokens_of_shared():
            if (here > counts).any():
                place = int((here > counts).nonzero()[0])
                index = "group_index" if name == "tokens_per_group" else "trajectory_index"
                raise ValueError(
                    f"totals.{name}[{place}] needs to count at least the {int(here[place])} "
                    f"trained tokens of this piece (got {int(counts[place])}). Totals are those of "
                    f"the whole step, and {index} has the same number in every piece"
                )
        trained_here = int(self._trained_here())
        trained_of_step = int(self._trained_of_step())
        if trained_here > trained_of_step:
            raise ValueError(
                f"totals.num_documents less totals.num_empty_documents needs to be at least the "
                f"{trained_here} documents of this piece with a trained token (got "
                f"{trained_of_step}). Totals are those of the whole step."
            )
        bad = self.not_finite(log_probs)
        if not bad.any():  # what `refused` has found is then a log-prob above 0
            self._refuse_positive(of_data)
        documents = self.documents.index[bad].unique().tolist()
        num_documents = self.documents.num_documents
        if documents[-1] == num_documents:  # which stands for any index out of range
            raise ValueError(
                "document_index at a trained position is negative or not below "
                f"num_documents={num_documents}"
            )
        weights_are_finite = torch.isfinite(self.weights).all()
        data_is_finite = torch.isfinite(self._sum_of_data(log_probs)[self.mask]).all()
        if data_is_finite and not weights_are_finite:
            raise ValueError(
                "the weight of a trained token is not finite: it comes from a reducer, a "
                "mean_factor, totals that count none, or with aggregation='balanced' from a "
                "document whose tokens have different advantages"
            )
        sentences = [*self._data().faults(log_probs, made_from)]
        sentences = sentences or ["the inputs need a finite sum at each trained position."]
        of_rewards = [sentence.startswith("rewards ") for sentence in sentences]
        use = _DROP_THEM if all(of_rewards) else _MASK_THEM
        raise DataError(f"{' '.join(sentences)} {use}", documents)

    def check_function(self, log_probs: Tensor) -> None:
        """Raise ValueError for a function of the user's own that gives a trained token a loss or a
        slope that is not finite, though the data are.

        log_probs: (T,), the new ones, for which `token_terms` keeps the results. Waits for the GPU
        where the loss is a function.
        """
        if not isinstance(self.family, FunctionFamily) or self.coefficients_of_step is not None:
            return
        terms = self.token_terms(log_probs)
        vectors = terms.losses, terms.slope, terms.token_log_ratio, self.documents.index
        check_results(self.family.name, *(vector[self.mask] for vector in vectors))

    def refused(self, log_probs: Tensor | None = None) -> Tensor:
        """Return (T,) bool, True where `check_finite` refuses the data, without waiting for a GPU.

        It is True everywhere if the totals are too small.
        """
        totals_too_small = self.documents.counts_here.sum() > self.totals.num_tokens
        totals_too_small = totals_too_small | (self._trained_here() > self._trained_of_step())
        for _, here, counts in self._tokens_of_shared():
            totals_too_small = totals_too_small | (here > counts).any()
        bad = self.not_finite(log_probs) | totals_too_small
        for values in self._log_probs_of_data().values():
            bad |= self.mask & (values > MAX_LOG_PROB)
        return bad

    def _trained_here(self) -> Tensor:
        """Return the number of documents with a trained token here, 0-dim."""
        return (self.documents.counts_here > 0).sum()

    def _trained_of_step(self) -> int | Tensor:
        """Return the number of the step's documents with a trained token, by its totals."""
        return self.totals.num_documents - self.totals.num_empty_documents

    def _tokens_of_shared(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield, for each of `shared`, its name, the trained tokens here and those of the step."""
        for name, places, counts in self.shared:
            of_documents = self.documents.counts_here
            here = of_documents.new_zeros(len(counts)).index_add(0, places, of_documents)
            yield name, here, without_waiting(counts, here.device)

    def not_finite(self, log_probs: Tensor | None = None) -> Tensor:
        """Return (T,) bool, True where an input or the weight of a trained token is not finite."""
        return self.mask & ~torch.isfinite(self._sum_of_data(log_probs) + self.weights)

    def _sum_of_data(self, log_probs: Tensor | None) -> Tensor:
        """Return (T,), the sum of all inputs: not finite wherever one of them is not."""
        vectors = (
            *self._by_keyword().values(),
            self.penalties.divergence,
            None if self.centering is None else self.centering.problems,
            log_probs,
        )
        first, *others = (vector for vector in vectors if vector is not None)
        return sum(others, first)

    def _by_keyword(self) -> dict[str, Tensor]:
        """Return the numbers that came with the data, (T,) each, by their keywords."""
        vectors = {
            "old_log_probs": self.old_log_probs,
            "advantages": self.advantages,
            "sampling_log_probs": self.sampling_log_probs,
            "ref_log_probs": self.penalties.ref_log_probs,
            "rewards": self.known_before.get("rewards"),
            "factors": self.given_factors,
            "coefficients": self.coefficients_of_step,
        }
        return {name: values for name, values in vectors.items() if values is not None}

    def _data(self) -> Data:
        return Data(
            self.mask,
            self.documents.index,
            self._by_keyword(),
            None if self.centering is None else self.centering.problems,
            self.penalties.divergence,
        )

    def _log_probs_of_data(self) -> dict[str, Tensor]:
        """Return the log-probs that came with the data, by name."""
        vectors = {
            "old_log_probs": self.old_log_probs,
            "sampling_log_probs": self.sampling_log_probs,
            "ref_log_probs": self.penalties.ref_log_probs,
        }
        if self.centering is not None:
            vectors["sampling_top_log_probs"] = self.centering.largest_log_probs
        return {name: values for name, values in vectors.items() if values is not None}

    def _refuse_positive(self, log_probs: dict[str, Tensor]) -> None:
        """Raise DataError for the first log-probs, by name, above 0 at trained positions."""
        for name, values in log_probs.items():
            wrong = self.mask & (values > MAX_LOG_PROB)
            if wrong.any():
                document = int(self.documents.index[wrong][0])
                highest = float(values[wrong].max())
                raise DataError(
                    f"{name} needs log-probs, which are at most 0, at trained positions (got "
                    f"{highest:.6g} in document {document}). Probabilities are given as their "
                    "logarithms, and logits as their log_softmax.",
                    [document],
                )
