"""The T-vectors of the loss on a GPU: launches of the kernels in `triton_vectors`.

Only for float32 and losses that no ranks share: each function returns None, and does nothing, for others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels import triton_tokens as kernels
from pgtoolkit.losses.aggregation import Aggregation, Constant, PromptMean, SampleMean, TokenMean
from pgtoolkit.losses.documents import Segments
from pgtoolkit.losses.families import Cispo, Family, Grpo, Gspo
from pgtoolkit.losses.metrics import LEVELS, MetricSums
from pgtoolkit.losses.objective import Objective

_BLOCK = 1024
# What the kernels have formulas for. Anything else takes the path of `losses.objective`.
_SURROGATES = {Grpo: kernels.clipped, Gspo: kernels.clipped, Cispo: kernels.weighted}
_MODES = {SampleMean: "sample_mean", PromptMean: "prompt_mean", TokenMean: "token_mean", Constant: "constant"}


def surrogate_of(family: Family):
    """The family's function in `triton_tokens`, or None if it has none."""
    if getattr(family, "dual_clip", None) is not None:
        return None
    return _SURROGATES.get(type(family))


def margins(family: Family) -> tuple[float, float]:
    """How far below and above 1 the ratios lie that bound the clip."""
    lower, upper = family.bounds
    return 1 - lower, upper - 1


def settle(
    tokens: Tokens, aggregation: Aggregation, totals: StepTotals | None
) -> tuple[Tensor, Segments, StepTotals, Tensor] | None:
    """(mask, segments, totals, weights in float32) of a piece, as `losses.objective.make_objective` has them.

    None where the totals are not numbers on the host, or are wanted and count groups.
    """
    if type(aggregation) not in _MODES:
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
    kernels.settle_kernel[(num_documents + 1,)](
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
        MODE=_MODES[type(aggregation)],
        WHOLE=totals is None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    if totals is None:
        totals = StepTotals(num_documents, counts[-2], counts[-1])
    return mask, Segments.of_index(index, counts[: num_documents + 1]), totals, weights


def judge(
    objective: Objective, log_probs: Tensor, entropy: Tensor | None, level: str
) -> tuple[Tensor, Tensor, MetricSums] | None:
    """As `torch_passes.judge`."""
    if not _is_ours(objective, log_probs):
        return None
    number = LEVELS.index(level)
    # Loss and mean log-prob; eight means, entropy, three sums.
    width = (2, 13, 14)[number]
    segments = objective.segments
    columns = width + (4 if number else 0)  # the extrema
    parts = torch.empty(segments.num_documents + 1, columns, dtype=torch.float64, device=log_probs.device)
    coefficients = torch.empty_like(log_probs)
    _launch(objective, log_probs, entropy, segments.index, segments.num_documents, coefficients, parts, number)
    sums = parts[:, :width].sum(0)
    maxima = parts[:, width:].amax(0) if number else parts.new_empty(0)
    return sums[0].to(log_probs.dtype), coefficients, MetricSums(level, sums[1:], maxima)


def coefficients(objective: Objective, log_probs: Tensor) -> Tensor | None:
    """As `torch_passes.coefficients`."""
    if not _is_ours(objective, log_probs):
        return None
    segments, result = objective.segments, torch.empty_like(log_probs)
    if segments is None:
        index, num_documents = torch.zeros_like(objective.mask, dtype=torch.int64), 1
    else:
        index, num_documents = segments.index, segments.num_documents
    _launch(objective, log_probs, None, index, num_documents, result, None, -1)
    return result


def _is_ours(objective, log_probs):
    shared = objective.segments is not None and objective.segments.group is not None
    return log_probs.dtype == torch.float32 and not shared and surrogate_of(objective.family) is not None


def _launch(objective, log_probs, entropy, index, num_documents, coefficients, parts, level):
    kernels.surrogate_kernel[(num_documents + 1,)](
        log_probs,
        log_probs if entropy is None else entropy,
        objective.old_log_probs,
        objective.advantages,
        objective.weights,
        index,
        coefficients,
        coefficients if parts is None else parts,
        len(log_probs),
        num_documents,
        *margins(objective.family),
        SURROGATE=surrogate_of(objective.family),
        BY_DOCUMENT=objective.family.by_document,
        BY_SIGN=objective.family.clips_by_sign,
        LEVEL=level,
        BLOCK=_BLOCK,
        num_warps=8,
    )


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
