"""Makes the objective of a piece of a step from its tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.losses.aggregation import Aggregation, Custom, signs_of
from pgtoolkit.losses.centering import centering_of
from pgtoolkit.losses.corrections import Correction, Factors
from pgtoolkit.losses.documents import DocumentSums, whole_step_totals
from pgtoolkit.losses.exchange import Ranks, all_sum
from pgtoolkit.losses.family import over_scope, scope_mean
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import Penalties
from pgtoolkit.losses.objective import Loss, Objective


def make_objective(
    tokens: Tokens,
    totals: StepTotals | None,
    loss: Loss,
    dtype: torch.dtype,
    ranks: Ranks,
    is_whole_step: bool = False,
) -> Objective:
    """Return the objective of a piece.

    totals: None if the piece, or the pieces of all of ranks.data, are the complete step.
    dtype: the one that the log-probs will have.
    is_whole_step: True if the log-probs will be those of all documents of the step, on one rank.
    Reads tensors on the host only where the caller left sizes open. Raises ValueError for an
    aggregation without its groups, a correction without its log-probs, and a loss of the whole step
    without its coefficients.
    """
    _check_groups(tokens, totals, loss)
    _check_level(tokens, loss, is_whole_step)
    _check_centering(tokens, loss)
    family = loss.family
    aggregation = loss.aggregation
    correction = loss.correction
    advantages = tokens.advantages.to(dtype).contiguous()
    old_log_probs = _as_dtype(tokens.old_log_probs, dtype)
    sampling_log_probs = _as_dtype(tokens.sampling_log_probs, dtype)
    ref_log_probs = _as_dtype(tokens.ref_log_probs, dtype)
    mask = tokens.labels >= 0
    index = tokens.document_index
    misplaced = mask & ((index < 0) | (index >= tokens.num_documents))
    documents = DocumentSums.of_tokens(
        index, mask & ~misplaced, tokens.num_documents, ranks.sequence
    )
    scope_advantages = None
    if ranks.sequence is not None:
        # Before all other sums, since this one also exchanges the documents' lengths, which the
        # others need.
        scope_advantages = scope_mean(family.scope, torch.where(mask, advantages, 0.0), documents)
    group_index = tokens.group_index
    trajectory_index = tokens.trajectory_index
    is_complete = totals is None
    totals_given = totals is not None or ranks.data is not None
    if totals is None:
        signs = signs_of(documents, advantages, mask)[0] if aggregation.by_sign else None
        totals, group_index, trajectory_index = whole_step_totals(
            documents, group_index, trajectory_index, ranks.data, signs
        )

    left_out = _left_out(tokens, loss)
    unreadable = torch.zeros_like(mask)
    sampling_log_ratio = None
    if sampling_log_probs is not None and old_log_probs is not None:
        sampling_log_ratio = torch.where(mask, old_log_probs - sampling_log_probs, 0.0)
    of_sampler = sampling_log_probs if sampling_log_ratio is None else sampling_log_ratio
    for numbers in (of_sampler, ref_log_probs, tokens.coefficients):
        if numbers is not None:  # also where they give the loss no value
            unreadable = unreadable | mask & ~torch.isfinite(numbers)

    def weights_of(aggregation: Aggregation) -> Tensor:
        """Return (T,) weights, 0 in documents that are left out.

        They are NaN where an input is none. That makes the loss NaN, and `Objective.check_finite`
        finds it.
        """
        weights = aggregation.weights(
            totals, documents, mask, group_index, trajectory_index, advantages
        )
        weights = torch.where(misplaced, torch.nan, weights).to(dtype)
        if left_out is not None:
            weights = torch.where(documents.broadcast(left_out.to(dtype)) > 0, 0.0, weights)
        return torch.where(unreadable, torch.nan, weights)

    weights = weights_of(aggregation)
    of_penalties = weights
    if aggregation.of_penalties is not aggregation:
        of_penalties = weights_of(aggregation.of_penalties)
    has_weight = None if left_out is None else ~left_out
    if isinstance(aggregation, Custom):  # only a reducer gives other documents weights of 0
        has_weight = documents.sum(weights.abs()) != 0
    divergence = torch.zeros_like(weights) if loss.full_kl else None
    penalties = Penalties(
        loss.kl,
        loss.entropy_coefficient,
        mask,
        of_penalties,
        old_log_probs,
        ref_log_probs,
        divergence,
        measures_terms=loss.measures_penalty and loss.kl is not None,
    )

    # Corrections and factors weight the surrogate alone, not the penalties.
    off_policy = None
    document_advantages = None
    factors = None
    if tokens.coefficients is not None:
        pass  # they contain the factors
    elif correction is not None and correction.of_policy:
        off_policy = correction
        document_advantages = scope_mean(
            off_policy.scope, torch.where(mask, advantages, 0.0), documents
        )
    elif correction is not None:
        if sampling_log_ratio is None:
            raise ValueError(
                f"correction={correction.name!r} needs sampling_log_probs beside old_log_probs"
            )
        factors = Factors.of(correction, sampling_log_ratio, advantages, documents)
        if correction.normalize == "step":
            mean = totals.mean_factor
            if is_complete:
                mean = mean_of_factors(*sums_of_factors(correction, factors, documents), ranks.data)
            factors = factors.over_mean(_known_mean(mean))
        weights = weights * factors.values
    if tokens.factors is not None:
        weights = weights * torch.where(mask, tokens.factors.to(dtype), 0.0)
    return Objective(
        family=family,
        mask=mask,
        old_log_probs=old_log_probs,
        advantages=advantages,
        weights=weights,
        gradient_weights=_gradient_weights(weights, tokens, loss, documents),
        documents=documents,
        totals=totals,
        penalties=penalties,
        known_scope_advantages=scope_advantages,
        off_policy=off_policy,
        document_advantages=document_advantages,
        sampling_log_probs=sampling_log_probs,
        sampling_log_ratio=sampling_log_ratio,
        factors=factors,
        has_weight=has_weight,
        known_before=_known_before(tokens, totals_given, loss, documents, has_weight, dtype),
        group_index=tokens.group_index if is_whole_step else None,
        coefficients_of_step=_as_dtype(tokens.coefficients, dtype),
        given_factors=_as_dtype(tokens.factors, dtype),
        shared=() if is_complete else _shared(tokens, totals),
        centering=centering_of(tokens, family, mask, weights, old_log_probs),
    )


def _left_out(tokens: Tokens, loss: Loss) -> Tensor | None:
    """Return (documents,) bool, True for those whose weights are 0 whatever the aggregation says;
    None where the data say that of none."""
    truncated = tokens.truncated if loss.masks_truncated else None
    if truncated is None or tokens.excluded is None:
        return tokens.excluded if truncated is None else truncated
    return truncated | tokens.excluded


def _shared(tokens: Tokens, totals: StepTotals) -> tuple[tuple[str, Tensor, Tensor], ...]:
    """Return `Objective.shared` of a piece of a step."""
    pairs = {
        "tokens_per_group": (tokens.group_index, totals.tokens_per_group),
        "tokens_per_trajectory": (tokens.trajectory_index, totals.tokens_per_trajectory),
    }
    return tuple(
        (name, places, counts)
        for name, (places, counts) in pairs.items()
        if places is not None and counts is not None
    )


def sums_of_factors(
    correction: Correction, factors: Factors, documents: DocumentSums
) -> tuple[Tensor, Tensor]:
    """Return what a document adds to the mean of the factors, and to how many these are.

    (documents,) float64 each. Factors that are not finite add 0: the loss finds them elsewhere.
    """
    values = factors.values.double()
    values = torch.where(torch.isfinite(values), values, 0.0)
    if correction.mean_over_documents:
        of_documents = documents.mean(values)
        return of_documents, (documents.counts > 0).double()
    of_tokens = documents.sum(values)
    return of_tokens, documents.counts.double()


def mean_of_factors(sums: Tensor, counts: Tensor, data: ProcessGroup | None = None) -> Tensor:
    """Return the mean of all documents' factors, 0-dim float64; 0 if there are none.

    sums, counts: from `sums_of_factors`. data: ranks with other documents.
    """
    total, count = all_sum(torch.stack([sums.sum(), counts.sum()]), data)
    return total / count.clamp(min=1)


def _known_mean(mean: float | Tensor | None) -> float | Tensor:
    if mean is None:
        raise ValueError(
            "correction.normalize='step' needs totals.mean_factor in a piece of a step: the mean "
            "of the factors of the whole step. Use normalize='none', or in a module of "
            "DynamicAccumulation, with `from pgtoolkit.training.whole_step import "
            "with_mean_factor`, `def take_step(self, step): return super().take_step("
            "with_mean_factor(step, self.correction, self.layout))`"
        )
    return mean


def _known_before(
    tokens: Tokens,
    is_piece: bool,
    loss: Loss,
    documents: DocumentSums,
    has_weight: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the vectors of `function.KNOWN_BEFORE` that a function asks for and the data have,
    (T,) each.

    is_piece: True if other pieces of the step may hold documents of the same groups.
    has_weight: that of the objective. dtype: of the vectors.
    """
    family = loss.family
    if not isinstance(family, FunctionFamily):
        return {}
    asked = family.asked
    known = {}
    if "lengths" in asked:
        known["lengths"] = documents.broadcast(documents.counts.to(dtype))
    if "position" in asked:
        known["position"] = documents.before(torch.ones_like(tokens.labels, dtype=dtype))
    if tokens.rewards is not None and asked & {"rewards", "group_rewards"}:
        # A document of weight 0 may have no reward. If it has one, that is part of the baseline.
        needs_one = documents.counts > 0
        if has_weight is not None:
            needs_one = needs_one & has_weight
        is_known = needs_one | torch.isfinite(tokens.rewards)
        rewards = torch.where(is_known, tokens.rewards, 0.0)
        known["rewards"] = documents.broadcast(rewards.to(dtype))
        group_rewards = tokens.group_rewards
        if group_rewards is None and tokens.group_index is not None and not is_piece:
            counted = is_known
            if tokens.trajectory_index is not None:
                counted = is_known & _are_first(tokens.trajectory_index, is_known)
            group_rewards = _means_of_groups(rewards, tokens.group_index, counted)
        if group_rewards is not None:
            known["group_rewards"] = documents.broadcast(group_rewards.to(dtype))
    return known


def _are_first(index: Tensor, candidates: Tensor) -> Tensor:
    """Return (documents,) bool, True for the first candidate of each number in the index."""
    _, number = index.unique(return_inverse=True)
    place = torch.arange(len(index), device=index.device)
    place = torch.where(candidates, place, len(index))
    first = torch.full_like(number, len(index)).scatter_reduce(0, number, place, "amin")
    return candidates & (place == first[number])


def _means_of_groups(rewards: Tensor, group_index: Tensor, counted: Tensor) -> Tensor:
    """Return (documents,), the mean reward of those of each document's group that are counted.

    rewards: (documents,), finite where not counted.
    """
    groups, index = group_index.unique(return_inverse=True)
    counts = counted.double()
    # A product of a matrix of 0 and 1 adds in a fixed order, on a GPU as well.
    belongs = (index == torch.arange(len(groups), device=index.device)[:, None]).double()
    return ((belongs @ (rewards.double() * counts)) / (belongs @ counts).clamp(min=1))[index]


def _check_level(tokens: Tokens, loss: Loss, is_whole_step: bool) -> None:
    """Raise ValueError for a loss of the whole step that is to be computed from a piece."""
    family = loss.family
    if not isinstance(family, FunctionFamily) or family.level != "step":
        return
    if tokens.coefficients is None and not is_whole_step:
        raise ValueError(
            f"the loss function {family.name} asks for groups or step, so it depends on all "
            "log-probs of the step. Compute its coefficients by pgtoolkit.step_coefficients, and "
            "give them here as coefficients="
        )
    if tokens.trajectory_index is not None:
        raise ValueError(
            f"the loss function {family.name} depends on whole groups, and does not know "
            "trajectories of several documents (got trajectory_index)"
        )


def _check_centering(tokens: Tokens, loss: Loss) -> None:
    """Raise ValueError for what does not go with score centering."""
    if loss.family.score_centering and tokens.sampling_kept_ids is not None:
        raise ValueError(
            "score_centering beside sampling_kept_ids: the likeliest tokens have their "
            "probabilities under the whole vocabulary"
        )


def _check_groups(tokens: Tokens, totals: StepTotals | None, loss: Loss) -> None:
    """Raise ValueError where the aggregation needs the groups of documents and has none."""
    counts_groups = totals is None or totals.tokens_per_group is not None
    aggregation = loss.aggregation
    name = f"aggregation={aggregation.name!r}"
    if isinstance(aggregation, Custom):
        name = "reducer= beside aggregation='prompt_mean'"
        if aggregation.by_sign:
            name = "a reducer that asks for totals by sign"
    if aggregation.needs_groups or aggregation.by_sign:
        if tokens.group_index is None:
            raise ValueError(f"{name} needs group_index, each document's group (got None)")
        if not counts_groups:
            raise ValueError(
                f"{name} needs totals that count groups: num_groups and tokens_per_group (got None "
                "of them, beside group_index)"
            )
    if aggregation.by_sign and tokens.trajectory_index is not None:
        raise ValueError(
            f"{name} counts completions, and does not know trajectories of several documents (got "
            "trajectory_index)"
        )
    has_signs = totals is None or (
        totals.completions_by_sign is not None and totals.tokens_by_sign is not None
    )
    if aggregation.by_sign and not has_signs:
        raise ValueError(
            f"{name} needs totals with completions_by_sign and tokens_by_sign: a group's documents "
            "with A < 0, A = 0 and A > 0, and their trained tokens. make_step counts them where "
            "each document has one advantage and none names a trajectory"
        )


def _gradient_weights(
    weights: Tensor, tokens: Tokens, loss: Loss, documents: DocumentSums
) -> Tensor:
    """Return (T,), the weight of each token's slope.

    The slope of a document's mean has the mean of the weights of its tokens. Equal weights are that
    mean already.
    """
    family = loss.family
    correction = loss.correction
    equal_within_documents = loss.aggregation.equal_within_documents and tokens.factors is None
    if correction is not None and not correction.of_policy:
        equal_within_documents &= correction.equal_within_documents
    if isinstance(family, FunctionFamily) or tokens.coefficients is not None:
        return torch.ones_like(weights)  # the slope includes the weights
    if family.slope_of != "log_ratio":
        return weights
    if equal_within_documents and family.scope != "document_sum":
        return weights
    return over_scope(family.scope, weights, documents)


def _as_dtype(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if vector is None else vector.to(dtype).contiguous()
