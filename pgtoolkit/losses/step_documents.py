"""The numbers of a step's documents one by one, and all of them put together again, for a loss that
depends on the whole step."""

from __future__ import annotations

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
    """The numbers of one document that a loss of the whole step reads.

    vectors: (N,) of the trained tokens, by the names of `Tokens`' fields, log_probs, and entropy
        where it is known.
    numbers: 0-dim, by the names of `Tokens`' fields.
    """

    vectors: dict[str, Tensor]
    numbers: dict[str, Tensor]


def documents_of(tokens: Tokens, measured: dict[str, Tensor]) -> list[StepDocument]:
    """Return the numbers of each document of a piece of a step, whose tokens follow each other.

    tokens: on the CPU.
    measured: log_probs, and entropy where it is known, (T,) each on the CPU. The log-probs are the
        old ones of documents that are on_policy.
    """
    trained = tokens.labels >= 0
    counts = torch.bincount(tokens.document_index[trained], minlength=tokens.num_documents).tolist()
    vectors = measured | {"old_log_probs": measured["log_probs"]}
    for name in ("advantages", *known_vectors(tokens)):
        vectors[name] = getattr(tokens, name)
    split = {name: vector[trained].split(counts) for name, vector in vectors.items()}
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


def tokens_of_step(documents: list[StepDocument]) -> tuple[Tokens, dict[str, Tensor]]:
    """Return the trained tokens of all documents of a step, and what was measured of them, (T,)
    each."""
    lengths = torch.tensor([len(document.vectors["advantages"]) for document in documents])
    known = set(documents[0].vectors).intersection(*(document.vectors for document in documents))
    vectors = {
        name: torch.cat([document.vectors[name] for document in documents]) for name in known
    }
    measured = {name: vectors.pop(name) for name in ("log_probs", "entropy") if name in vectors}
    # Excluded documents are a rare field, which not every micro-batch has.
    of_documents = {}
    for name in _OF_DOCUMENTS:
        values = [document.numbers.get(name) for document in documents]
        if name == "excluded":
            values = [torch.tensor(False) if value is None else value for value in values]
        known_values = [value for value in values if value is not None]
        if len(known_values) == len(documents):
            of_documents[name] = torch.stack(known_values)
    return (
        Tokens(
            labels=torch.zeros(len(measured["log_probs"]), dtype=torch.int64),
            document_index=torch.repeat_interleave(torch.arange(len(documents)), lengths),
            num_documents=len(documents),
            **vectors,
            **of_documents,
        ),
        measured,
    )
