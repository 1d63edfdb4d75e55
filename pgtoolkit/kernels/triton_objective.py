"""The loss on vectors of one number per token on a GPU: launches of the kernels in `triton_tokens`.

For float32, families and aggregations with a formula in Triton, and losses that no ranks share and that have no
correction by new log-probs; `losses.objective` computes all others.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels import triton_families as formulas
from pgtoolkit.kernels import triton_tokens as kernels
from pgtoolkit.losses.aggregation import AGGREGATIONS, Aggregation, Constant
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.families import Cispo, Dppo, Family, Gmpo, Grpo, Gspo, Kimi, Reinforce, Sapo, Vespo
from pgtoolkit.losses.metrics import LEVELS, MetricSums, with_more
from pgtoolkit.losses.objective import Objective

_BLOCK = 1024


class Formula(NamedTuple):
    """A family's functions in `triton_families`. token: None for a family whose tokens contribute their log-ratio."""

    surrogate: object
    beyond: object
    token: object = None


_FORMULAS = {
    Grpo: Formula(formulas.clipped, formulas.beyond_clip),
    Gspo: Formula(formulas.clipped, formulas.beyond_clip),
    Cispo: Formula(formulas.weighted, formulas.beyond_weight),
    Sapo: Formula(formulas.soft_gated, formulas.beyond_nothing),
    Gmpo: Formula(formulas.unclipped, formulas.beyond_log_clip, formulas.one_sided),
    Dppo: Formula(formulas.left_out, formulas.beyond_move),
    Vespo: Formula(formulas.smooth_weight, formulas.beyond_nothing),
    Kimi: Formula(formulas.pulled_back, formulas.beyond_nothing),
    Reinforce: Formula(formulas.by_advantage, formulas.beyond_nothing),
}


def formula_of(family: Family) -> Formula | None:
    """The family's functions, or None for one that has none there."""
    if type(family) is Grpo and family.dual_clip is not None:
        return Formula(formulas.dual_clipped, formulas.beyond_dual_clip)
    return _FORMULAS.get(type(family))


def numbers_of(family: Family) -> tuple[float, float, float, float]:
    """The family's fields as its functions take them. A lower bound that is None lies at 0, which is 1 below 1."""
    numbers = [getattr(family, one.name) for one in fields(family)]
    numbers += [0.0] * (4 - len(numbers))
    return tuple(1.0 if number is None else float(number) for number in numbers)


def penalty_of(objective: Objective) -> tuple[str | None, Tensor, Tensor]:
    """(kind of the penalty against a reference or None, the reference's log-probs, weights of the penalty): (T,) each.

    Where there is none, these are any vectors.
    """
    penalties = objective.penalties
    if penalties.kl is None or penalties.kl.full:
        return None, objective.weights, objective.weights
    return penalties.kl.kind, penalties.ref_log_probs, penalties.kl.coefficient * penalties.weights


def make_weights(
    tokens: Tokens, aggregation: Aggregation, totals: StepTotals | None
) -> tuple[Tensor, DocumentSums, StepTotals, Tensor] | None:
    """(mask, documents, totals, weights in float32) of a piece, as `losses.piece.make_objective` has them.

    None where the aggregation has no formula, documents are parts of trajectories, or the totals are not numbers on the
    host or are to be counted with groups.
    """
    if aggregation.name not in AGGREGATIONS or tokens.trajectory_index is not None:
        return None
    labels, document_index = tokens.labels, tokens.document_index
    num_documents, group_index = tokens.num_documents, tokens.group_index
    num_groups, tokens_per_group = 1, labels
    if totals is None:
        if group_index is not None:
            return None
        over_documents, over_tokens = num_documents, 0
    else:
        over_documents, over_tokens = totals.num_documents, totals.num_tokens
        if any(isinstance(x, Tensor) for x in (over_documents, over_tokens, totals.num_groups)):
            return None
        if aggregation.needs_groups:
            num_groups, tokens_per_group = totals.num_groups, totals.tokens_per_group.to(labels.device)
    mask = torch.empty_like(labels, dtype=torch.bool)
    index = torch.empty_like(document_index)
    weights = torch.empty_like(labels, dtype=torch.float32)
    # Tokens of each document and of none, then tokens and empty documents of the whole.
    counts = torch.zeros(num_documents + 3, dtype=torch.int64, device=labels.device)
    kernels.weights_kernel[(num_documents + 1,)](
        labels,
        document_index,
        labels if group_index is None else group_index.contiguous(),
        tokens_per_group,
        mask,
        index,
        weights,
        counts,
        len(labels),
        num_documents,
        over_documents,
        over_tokens,
        num_groups,
        float(aggregation.divisor) if isinstance(aggregation, Constant) else 1.0,
        MODE=aggregation.name,
        WHOLE=totals is None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    if totals is None:
        totals = StepTotals(num_documents, counts[-2], counts[-1])
    return mask, DocumentSums(index, counts[: num_documents + 1], num_documents), totals, weights


def evaluate(
    objective: Objective, log_probs: Tensor, entropy: Tensor | None, level: str
) -> tuple[Tensor, Tensor, MetricSums]:
    """As `Objective.evaluate`."""
    if not _has_kernel(objective, log_probs):
        return objective.evaluate(log_probs, entropy, level)
    number = LEVELS.index(level)
    # Loss and mean log-prob; eight means, entropy, three sums.
    width = (2, 13, 14)[number]
    num_maxima = 4 if number else 0
    result, parts = _launch(objective, log_probs, entropy, number, width + num_maxima)
    sums = parts[:, :width].sum(0)
    maxima = parts[:, width:].amax(0) if number else parts.new_empty(0)
    metrics = with_more(objective, MetricSums(level, sums[1:], maxima), log_probs)
    return objective.penalties.with_rows(sums[0].to(log_probs.dtype), entropy), result, metrics


def coefficients(objective: Objective, log_probs: Tensor) -> Tensor:
    """As `Objective.coefficients`."""
    if not _has_kernel(objective, log_probs):
        return objective.coefficients(log_probs)
    return _launch(objective, log_probs, None, -1, 0)[0]


def _has_kernel(objective: Objective, log_probs: Tensor) -> bool:
    shared = objective.documents is not None and objective.documents.group is not None
    known = objective.off_policy is None and formula_of(objective.family) is not None
    return log_probs.dtype == torch.float32 and not shared and known


def _launch(objective: Objective, log_probs: Tensor, entropy: Tensor | None, level: int, columns: int):
    """(coefficients, parts): (T,), and (D + 1, columns) float64, what each document adds; level -1: no parts."""
    documents, result = objective.documents, torch.empty_like(log_probs)
    family, formula = objective.family, formula_of(objective.family)
    kind, *of_penalty = penalty_of(objective)
    if documents is None:
        index, num_documents = torch.zeros_like(objective.mask, dtype=torch.int64), 1
    else:
        index, num_documents = documents.index, documents.num_documents
    parts = torch.empty(num_documents + 1, columns, dtype=torch.float64, device=log_probs.device) if columns else result
    kernels.surrogate_kernel[(num_documents + 1,)](
        log_probs,
        log_probs if entropy is None else entropy,
        objective.old_log_probs,
        objective.advantages,
        objective.weights,
        *of_penalty,
        index,
        result,
        parts,
        len(log_probs),
        num_documents,
        *numbers_of(family),
        SURROGATE=formula.surrogate,
        TOKEN=formula.token,
        BEYOND=formula.beyond,
        SCOPE=family.scope,
        OWN_WEIGHT=family.slope_of != "log_ratio",
        KL=kind,
        LEVEL=level,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return result, parts


def scale_rows(source: Tensor, factors: Tensor, target: Tensor, rows: Tensor) -> Tensor:
    """target[rows[i]] = factors[i] * source[i], in float32; source may be target where rows are 0, 1, 2, ..."""
    if source.numel():
        kernels.scale_rows_kernel[(len(rows),)](source, factors, target, rows, source.shape[1], BLOCK=2048, num_warps=4)
    return target


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """values *= factor (0-dim, on the device) in place, free of charge where it is 1."""
    block = 8192
    if values.numel():
        # Few programs: where there is nothing to do, starting them is all that it costs.
        kernels.scale_kernel[(min(1024, -(-values.numel() // block)),)](
            values, factor, values.numel(), BLOCK=block, num_warps=8
        )
    return values
