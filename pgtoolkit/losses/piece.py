"""The objective of a piece of a step, made of its tokens: masks, documents, weights, and what corrects or penalises."""

from __future__ import annotations

import torch

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.losses.corrections import Factors
from pgtoolkit.losses.documents import DocumentSums, whole_step_totals
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.family import over_scope, scope_mean
from pgtoolkit.losses.kl import Penalties
from pgtoolkit.losses.objective import Loss, Objective


def make_objective(
    tokens: Tokens, totals: StepTotals | None, loss: Loss, dtype: torch.dtype, ranks: Ranks
) -> Objective:
    """Masks, documents and weights of a piece; `dtype` is what the log-probs will come in.

    Without totals the piece, or the pieces of all of ranks.data, are the whole step. Reads tensors on the host only
    where the caller left sizes open.
    """
    family, aggregation = loss.family, loss.aggregation
    off_policy = loss.correction if loss.correction is not None and loss.correction.of_policy else None
    advantages = tokens.advantages.to(dtype).contiguous()
    optional = tokens.old_log_probs, tokens.sampling_log_probs, tokens.ref_log_probs
    old_log_probs, sampling_log_probs, ref_log_probs = (
        vector if vector is None else vector.to(dtype).contiguous() for vector in optional
    )
    has_groups = tokens.group_index is not None and (totals is None or totals.tokens_per_group is not None)
    if aggregation.needs_groups and not has_groups:
        raise ValueError(
            "aggregation='prompt_mean' needs group_index, each document's group (and totals that count groups)"
        )
    mask = tokens.labels >= 0
    index, num_documents = tokens.document_index, tokens.num_documents
    misplaced = mask & ((index < 0) | (index >= num_documents))
    documents = DocumentSums.of_tokens(index, mask & ~misplaced, num_documents, ranks.sequence)
    scope_advantages = None
    if ranks.sequence is not None:
        # First, since the documents' lengths, which the rest needs, travel with it.
        scope_advantages = scope_mean(family.scope, torch.where(mask, advantages, 0.0), documents)
    of_documents = tokens.group_index, tokens.trajectory_index
    if totals is None:
        totals, *of_documents = whole_step_totals(documents, *of_documents, ranks.data)
    weights = aggregation.weights(totals, documents, mask, *of_documents)
    weights = torch.where(misplaced, torch.nan, weights).to(dtype)  # no document, no result
    for without_weight in (tokens.truncated if loss.masks_truncated else None, tokens.excluded):
        if without_weight is not None:
            weights = torch.where(documents.broadcast(without_weight.to(dtype)) > 0, 0.0, weights)
    correction, equal = loss.correction, aggregation.equal_within_documents
    sampling_log_ratio = factors = document_advantages = None
    if sampling_log_probs is not None and old_log_probs is not None:
        sampling_log_ratio = torch.where(mask, old_log_probs - sampling_log_probs, 0.0)
    for measured in (sampling_log_probs if sampling_log_ratio is None else sampling_log_ratio, ref_log_probs):
        if measured is not None:  # no loss of such data, also where it only feeds a metric
            weights = torch.where(mask & ~torch.isfinite(measured), torch.nan, weights)
    divergence = torch.zeros_like(weights) if loss.full_kl else None
    penalties = Penalties(loss.kl, loss.entropy_coefficient, mask, weights, old_log_probs, ref_log_probs, divergence)
    if off_policy is not None:
        document_advantages = scope_mean(off_policy.scope, torch.where(mask, advantages, 0.0), documents)
    elif correction is not None:
        if sampling_log_ratio is None:
            raise ValueError(f"correction={correction.name!r} needs sampling_log_probs beside old_log_probs")
        factors = Factors.of(correction, sampling_log_ratio, advantages, documents)
        weights, equal = weights * factors.values, equal and correction.equal_within_documents
    if tokens.factors is not None:
        weights, equal = weights * torch.where(mask, tokens.factors.to(dtype), 0.0), False
    own_slope = family.slope_of != "log_ratio" or (equal and family.scope != "document_sum")
    return Objective(
        family,
        mask,
        old_log_probs,
        advantages,
        weights,
        weights if own_slope else over_scope(family.scope, weights, documents),
        documents,
        totals,
        penalties,
        scope_advantages,
        off_policy,
        document_advantages,
        sampling_log_probs,
        sampling_log_ratio,
        factors,
    )
