"""Packing: whole documents on the one flat token axis of a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.batch import Document, MicroBatch, known_vectors
from pgtoolkit.errors import DataError


def pack(documents: list[Document], group_numbers: list[int], known: tuple[str, ...] | None = None) -> MicroBatch:
    """One micro-batch of the documents in their order; group_numbers: each one's group as numbered within the step.

    known: the optional vectors that all documents of the step have; None: those that these documents have.

    Here alone tokens become labels: position t predicts token t + 1 of its document, with that token's old log-prob
    and advantage; the last position of a document predicts nothing. No documents give a micro-batch of length 0.
    """
    lengths = [document.num_tokens for document in documents]
    tokens = _concatenate([document.tokens for document in documents], torch.int64)
    trained = _concatenate([document.loss_mask for document in documents], torch.bool).nonzero().squeeze(1)

    def labelled(values: Tensor, elsewhere: float) -> Tensor:
        """(T,) from the values of the trained tokens: each stands where its token is predicted, one place earlier."""
        return values.new_full((len(tokens),), elsewhere).index_copy(0, trained - 1, values)

    # Zeros where nobody knows the old ones: the loss then does not read them, and no metric of them is given.
    old = [torch.zeros(d.num_trained) if d.old_log_probs is None else d.old_log_probs for d in documents]
    vectors = {"old_log_probs": labelled(_concatenate(old, torch.float32), 0.0)}
    for name in ("advantages", *(known_vectors(*documents) if known is None else known)):
        values = _concatenate([getattr(document, name) for document in documents], torch.float32)
        vectors[name] = labelled(values, 0.0)
    return MicroBatch(
        tokens=tokens,
        position_ids=_concatenate([torch.arange(length) for length in lengths], torch.int64),
        labels=labelled(tokens[trained], -1),
        document_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        **vectors,
        num_documents=len(documents),
        group_index=torch.tensor(group_numbers, dtype=torch.int64),
        names=tuple(document.name for document in documents),
        document_lengths=tuple(lengths),
    )


def cut(documents: list[Document], max_tokens: int) -> list[list[Document]]:
    """The documents in their order, in runs of at most max_tokens tokens; each run takes as many as fit.

    Raises DataError for a document that alone is longer, since documents are never split.
    """
    parts: list[list[Document]] = []
    free = 0
    for document in documents:
        if document.num_tokens > max_tokens:
            raise DataError(
                f"{document.name} has {document.num_tokens} tokens and does not fit a micro-batch of {max_tokens}. "
                f"Documents are never split. Use accumulation.max_tokens={document.num_tokens} or more."
            )
        if not parts or document.num_tokens > free:
            parts.append([])
            free = max_tokens
        parts[-1].append(document)
        free -= document.num_tokens
    return parts


def _concatenate(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *tensors])
