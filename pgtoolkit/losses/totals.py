"""The totals of a step that is all at hand, in one piece or in those of several ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.documents import Segments
from pgtoolkit.losses.exchange import all_sum, gather, largest


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
