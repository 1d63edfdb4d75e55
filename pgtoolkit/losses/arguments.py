"""What the entry points of the library refuse, before anything is computed; keywords in, objects out."""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.batch import DocumentCounts, Tokens
from pgtoolkit.kernels.parallel import Ranks
from pgtoolkit.losses.aggregation import Reducer, aggregation_of
from pgtoolkit.losses.families import Family, family_of
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.policy_gradient import Computation, LMHead


def loss_of(
    loss: str | Family,
    epsilons: dict[str, float | None],
    aggregation: tuple[str, float | None, Reducer | None],
    temperature: float,
    metrics: str,
) -> Loss:
    """The loss of the front door's keywords; epsilons: None for the family's own. ValueError for what cannot be."""
    given = {name: value for name, value in epsilons.items() if value is not None}
    return Loss(family_of(loss, **given), aggregation_of(*aggregation), temperature, metrics)


def tokens_of(
    name: str,
    rows: Tensor,
    vectors: dict[str, Tensor],
    num_documents: int | None,
    group_index: Tensor | None,
    counts: DocumentCounts | None = None,
) -> Tokens:
    """labels, old_log_probs, advantages and document_index of `rows`, the (T, ...) input that the caller calls `name`.

    Whole numbers come out as int64. num_documents: None for the largest index + 1, read on the host.
    ValueError for what does not fit.
    """
    for key, tensor in vectors.items():
        if tensor.shape != rows.shape[:1]:
            raise ValueError(f"{key} needs one entry per row of {name}, {len(rows)} (got shape {tuple(tensor.shape)})")
        if key in ("labels", "document_index"):
            if tensor.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"{key} needs dtype int64 (got {tensor.dtype})")
            vectors = vectors | {key: tensor.long().contiguous()}
    if num_documents is None:
        index = vectors["document_index"]
        num_documents = int(index.max()) + 1 if index.numel() else 0
    if group_index is not None and group_index.shape != (num_documents,):
        raise ValueError(f"group_index needs one entry per document, {num_documents} (got {tuple(group_index.shape)})")
    if counts is not None and len(counts.trained) != num_documents:
        raise ValueError(f"counts needs {num_documents} documents, as num_documents (got {len(counts.trained)})")
    return Tokens(**vectors, num_documents=num_documents, group_index=group_index, counts=counts)


def check_rows(name: str, rows: Tensor) -> None:
    """ValueError unless rows, which the caller calls `name`, is a matrix of floating point."""
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"{name} needs two dimensions of floating point (got {tuple(rows.shape)}, {rows.dtype})")


def check_head(hidden: Tensor, head: LMHead, family: Family, how: Computation) -> None:
    """ValueError for a head that does not fit, or a computation of it that cannot mean what was asked."""
    if head.weight.dim() != 2 or head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"lm_head_weight needs shape (V, {hidden.shape[1]}) (got {tuple(head.weight.shape)})")
    splits = f"num_splits={how.num_splits}"
    if how.num_splits > 1 and family.by_document:
        raise ValueError(f"{splits} needs a family by token (got {family.name!r}): its ratio is a whole document's")
    if how.num_splits > 1 and how.impl in ("fused_linear", "reference"):
        raise ValueError(f"{splits} has no effect with impl={how.impl!r}; it cuts materialised logits")
    if head.weight_gradient is not None and not how.fused:
        raise ValueError(f"weight_gradient needs impl='fused_linear' (got {how.impl!r})")


def check_ranks(ranks: Ranks, impl: str, num_documents: int | None) -> None:
    """ValueError for groups of ranks that cannot mean what was asked; num_documents: as the caller gave it."""
    named = {"vocabulary_group": ranks.vocabulary, "sequence_group": ranks.sequence, "data_group": ranks.data}
    for name, group in named.items():
        if group is not None and impl == "reference":
            raise ValueError(f"{name} needs another impl than 'reference', which computes whole steps on one rank")
    start = ranks.vocabulary_start
    if start is not None and (ranks.vocabulary is None or start < 0):
        raise ValueError(f"vocabulary_start needs a vocabulary_group and a number >= 0 (got {start!r})")
    if ranks.sequence is not None and num_documents is None:
        raise ValueError("sequence_group needs num_documents: ranks must agree on the documents, whatever they hold")
