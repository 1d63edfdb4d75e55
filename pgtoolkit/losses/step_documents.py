"""The numbers of a step's documents one by one, and all of them put together again, for a loss that
depends on the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.batch import Tokens, known_vectors

_OF_DOCUMENTS = (
    "group_index",
    "trajectory_index",
    "truncated",
    "excluded",
    "rewards",
    "group_rewards",
)


@dataclass(frozen=True)
class StepDocument:
    """The numbers of one document that a loss of the whole step reads, and that are known before a
    forward pass.

    vectors: (N,) of the trained tokens, by the names of `Tokens`' fields.
    numbers: 0-dim, by the names of `Tokens`' fields.
    """

    vectors: dict[str, Tensor]
    numbers: dict[str, Tensor]


def documents_of(tokens: Tokens) -> list[StepDocument]:
    """Return the numbers of each document of a piece of a step.

    tokens: on the CPU; those of a document follow each other.
    """
    names = ("advantages", *known_vectors(tokens))
    split = {name: by_document(tokens, getattr(tokens, name)) for name in names}
    of_documents = {
        name: getattr(tokens, name) for name in _OF_DOCUMENTS if getattr(tokens, name) is not None
    }
    return [
        StepDocument(
            {name: parts[number] for name, parts in split.items()},
            {name: values[number] for name, values in of_documents.items()},
        )
        for number in range(tokens.num_documents)
    ]


def by_document(tokens: Tokens, vector: Tensor) -> Sequence[Tensor]:
    """Return the numbers of the trained tokens of each document of a piece of a step.

    tokens: on the CPU. vector: (T,) on the CPU.
    """
    trained = tokens.labels >= 0
    counts = torch.bincount(tokens.document_index[trained], minlength=tokens.num_documents)
    return vector[trained].split(counts.tolist())


def tokens_of_step(documents: Sequence[StepDocument], log_probs: Sequence[Tensor]) -> Tokens:
    """Return the trained tokens of all documents of a step.

    log_probs: of the trained tokens of each document, the new ones; they are the old ones of
        documents that are on_policy.
    """
    known = set(documents[0].vectors).intersection(*(document.vectors for document in documents))
    vectors = {
        name: torch.cat(
            [
                document.vectors.get(name, new)
                for document, new in zip(documents, log_probs, strict=True)
            ]
        )
        for name in known | {"old_log_probs"}
    }
    # Excluded documents are a rare field, which not every micro-batch has.
    of_documents = {}
    for name in _OF_DOCUMENTS:
        values = [document.numbers.get(name) for document in documents]
        if name == "excluded":
            values = [torch.tensor(False) if value is None else value for value in values]
        known_values = [value for value in values if value is not None]
        if len(known_values) == len(documents):
            of_documents[name] = torch.stack(known_values)
    lengths = torch.tensor([len(new) for new in log_probs])
    return Tokens(
        labels=torch.zeros(int(lengths.sum()), dtype=torch.int64),
        document_index=torch.repeat_interleave(torch.arange(len(documents)), lengths),
        num_documents=len(documents),
        **vectors,
        **of_documents,
    )
