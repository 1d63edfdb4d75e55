"""The totals of a step of which every document is at hand, on this rank or on those of a group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.exchange import all_sum, gather, largest


def whole_step_totals(
    documents: DocumentSums, group_index: Tensor | None, data_group: ProcessGroup | None = None
) -> tuple[StepTotals, Tensor | None]:
    """The totals of these documents as a whole step, and their groups renumbered from 0, (documents,).

    data_group: ranks with other documents of the step, whose group_index has the same numbers for the same groups.
    """
    counts = documents.counts
    numbers = torch.stack([torch.full_like(counts.sum(), len(counts)), counts.sum(), (counts == 0).sum()])
    num_documents, num_tokens, num_empty = all_sum(numbers, data_group)
    num_groups = tokens_per_group = None
    if group_index is not None:
        groups, group_index = _common_numbers(group_index, data_group)
        num_groups = len(groups)
        tokens_per_group = torch.zeros_like(groups, dtype=torch.int64).index_add_(0, group_index, counts)
        tokens_per_group = all_sum(tokens_per_group, data_group)
    if data_group is None:
        num_documents = documents.num_documents
    return StepTotals(num_documents, num_tokens, num_empty, num_groups, tokens_per_group), group_index


def _common_numbers(group_index: Tensor, data_group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """(the different numbers on all ranks, ascending; the place of each of this rank's among them)."""
    groups, places = torch.unique(group_index, return_inverse=True)
    if data_group is None:
        return groups, places
    length = largest(len(groups), data_group, groups.device)
    if length == 0:
        return groups, places
    # Ranks with fewer numbers repeat their last; the second row is 0 on a rank without any.
    mine = groups.new_empty(2, length)
    mine[0] = groups[torch.arange(length, device=groups.device).clamp(max=len(groups) - 1)] if len(groups) else 0
    mine[1] = len(groups) > 0
    numbers, exist = gather(mine, data_group).unbind(1)
    common = numbers[exist != 0].unique()
    return common, torch.searchsorted(common, groups)[places]
