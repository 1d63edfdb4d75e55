"""Makes the optimizer step of some documents: its totals, and the micro-batches of each rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import islice

import torch

from pgtoolkit.batch import Step, StepTotals, known_vectors, pack
from pgtoolkit.document import (
    Document,
    Rooms,
    SampledDocument,
    cut_evenly,
    rooms_behind,
    trajectories_of,
)
from pgtoolkit.losses.checks import check_whole, shown
from pgtoolkit.losses.documents import counted_by_sign
from pgtoolkit.rollouts.batch_counts import saves_a_fifth
from pgtoolkit.system.declared import AutoOrBool


def make_step(
    documents: list[Document],
    max_tokens: int,
    state_after: dict | None = None,
    data_rank: int = 0,
    data_size: int = 1,
    share_prompts: AutoOrBool = False,
) -> Step:
    """Return the step of these documents, in about equal micro-batches of at most `max_tokens`.

    documents: those of all `data_size` ranks. The totals count all of them.
    state_after: see `Step`.
    data_rank: the rank whose share is packed into the micro-batches.
    share_prompts: see `is_sharing`.

    All ranks have the same number of micro-batches, so that none waits for another in vain: where
    the documents of a rank run out, its further micro-batches are empty. Groups and trajectories
    are numbered within the step: one whose documents lie in two steps counts in each as a whole, so
    give all of them together where the loss or the aggregation is one of groups. The totals also
    count by the sign of the advantage, where each document has one advantage and none names a
    trajectory.
    """
    check_whole("max_tokens", max_tokens, 1)
    given = [documents] if isinstance(documents, Document) else documents
    wrong = [each for each in given if given is not documents or not isinstance(each, Document)]
    if wrong:
        raise ValueError(
            f"make_step needs a list of Document (got {type(wrong[0]).__name__}). Use "
            "make_step([Document(tokens=..., loss_mask=..., ...), ...], max_tokens)"
        )
    if share_prompts not in (True, False, "auto"):
        raise ValueError(f"share_prompts needs True, False or 'auto' (got {shown(share_prompts)})")
    trained = [document.num_trained for document in documents]
    groups, tokens_per_group = _numbered([document.group for document in documents], trained)
    trajectories = tokens_per_trajectory = None
    if any(document.trajectory is not None for document in documents):
        trajectories, tokens_per_trajectory = _numbered(trajectories_of(documents), trained)
    by_sign = None
    if trajectories is None:
        by_sign = _by_sign(documents, trained, groups, len(tokens_per_group))
    completions_by_sign, tokens_by_sign = by_sign or (None, None)
    totals = StepTotals(
        num_documents=len(documents),
        num_tokens=sum(trained),
        num_empty_documents=trained.count(0),
        num_groups=len(tokens_per_group),
        tokens_per_group=tokens_per_group,
        tokens_per_trajectory=tokens_per_trajectory,
        completions_by_sign=completions_by_sign,
        tokens_by_sign=tokens_by_sign,
    )
    sharing = is_sharing(share_prompts, documents)
    shares = divide_among_ranks(documents, data_size, sharing)
    of_ranks = [[documents[place] for place in share] for share in shares]
    parts = cut_evenly(of_ranks, max_tokens, sharing)[data_rank]
    known = known_vectors(*documents)
    micro_batches = []
    places = iter(shares[data_rank])
    for part in parts:
        of_part = list(islice(places, len(part)))
        micro_batches.append(
            replace(
                pack(part, known, sharing),
                group_index=_chosen(groups, of_part),
                trajectory_index=_chosen(trajectories, of_part),
                step_places=tuple(of_part),
            )
        )
    return Step(micro_batches, totals, documents, state_after or {})


def _by_sign(
    documents: Sequence[Document], trained: list[int], groups: list[int], num_groups: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (completions_by_sign, tokens_by_sign) of `StepTotals`.

    None where a document has several advantages, or its numbers lie on another rank.
    trained, groups: of each document, its trained tokens and the number of its group.
    """
    if any(document.advantages.is_meta for document in documents):
        return None
    counts = torch.tensor(trained, dtype=torch.int64)
    of_tokens = torch.cat([torch.empty(0), *(each.advantages.cpu() for each in documents)])
    has_tokens = counts > 0
    starts = (counts.cumsum(0) - counts)[has_tokens]
    of_documents = of_tokens[starts]
    changes = of_tokens[1:] != of_tokens[:-1]
    changes[starts[1:] - 1] = False
    if changes.any() or of_documents.isnan().any():
        return None
    signs = torch.zeros_like(counts)
    signs[has_tokens] = of_documents.sign().long()
    return counted_by_sign(torch.tensor(groups, dtype=torch.int64), signs, counts, num_groups)


def _chosen(numbers: list[int] | None, places: list[int]) -> torch.Tensor | None:
    """Return the numbers at these places, int64; None without numbers."""
    if numbers is None:
        return None
    return torch.tensor([numbers[place] for place in places], dtype=torch.int64)


def _numbered(names: Sequence[Hashable], trained: list[int]) -> tuple[list[int], torch.Tensor]:
    """Number the groups of documents, or their trajectories, from 0 in the order of the documents.

    names: the name of each document's group; equal names are one group.
    trained: the trained tokens of each document.
    Return (the number of each document's group, the trained tokens of each group). The second is
    (groups,) int64.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    index = [numbers[name] for name in names]
    tokens = [0] * len(numbers)
    for number, count in zip(index, trained, strict=True):
        tokens[number] += count
    return index, torch.tensor(tokens, dtype=torch.int64)


def is_sharing(share_prompts: AutoOrBool, documents: Sequence[SampledDocument]) -> bool:
    """Return whether each document is to share with the one before it: as chosen, or for "auto"
    where that `saves_a_fifth`."""
    if share_prompts != "auto":
        return share_prompts
    alone = sum(document.num_tokens for document in documents)
    return saves_a_fifth(sum(rooms_behind(documents)), alone)


def divide_among_ranks(
    documents: Sequence[Document], num_ranks: int, sharing: bool = False
) -> list[list[int]]:
    """Return for each rank the indices of its documents, in increasing order.

    All ranks get about the same number of tokens: the longest document is dealt first, and each one
    goes to the rank that has the fewest tokens so far. Where documents share what they begin with
    (sharing), a rank instead gets documents that follow each other.
    """
    if sharing:
        return Rooms.of(documents, sharing).shares_of(num_ranks)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for place in sorted(range(len(documents)), key=lambda i: -documents[i].num_tokens):
        rank = tokens.index(min(tokens))
        shares[rank].append(place)
        tokens[rank] += documents[place].num_tokens
    return [sorted(share) for share in shares]
