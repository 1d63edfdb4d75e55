"""Sentences on data that have no loss: what is wrong at trained positions, and of which documents.

Each fault has a sentence of its own, in the words of the library's keywords.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.batch import Tokens
from pgtoolkit.losses.kept import KeptSets

_MOST_NAMED = 5
"""Documents that a sentence names."""


@dataclass(frozen=True)
class MadeFrom:
    """Holds the inputs from which the new log-probs were computed.

    name: the keyword of the tensor. tokens: the other inputs.
    vocabulary: its size; None where this rank does not hold all of it, and for log-probs that the
        caller has computed.
    """

    name: str
    tokens: Tokens
    vocabulary: int | None


@dataclass(frozen=True)
class Data:
    """The inputs of an objective at its T positions, as far as they can be faulty.

    mask: (T,) bool, True where trained. document_index: (T,) int64.
    by_keyword: numbers, (T,) each, that need to be finite.
    of_top: (T,), NaN where the sampler's likeliest tokens cannot be such, or None without any.
    divergence: (T,), the full KL, or None without one.
    """

    mask: Tensor
    document_index: Tensor
    by_keyword: dict[str, Tensor]
    of_top: Tensor | None
    divergence: Tensor | None

    def faults(self, log_probs: Tensor | None, made_from: MadeFrom | None) -> Iterator[str]:
        """Yield a sentence for each fault.

        log_probs: the new ones; None leaves them and what they were made from out.
        """
        for name, values in self.by_keyword.items():
            needs = f"{name} needs finite numbers at trained positions"
            if name == "rewards":
                needs = "rewards needs a finite number for each document that is trained"
            yield from self._sentence(needs, ~torch.isfinite(values), values)
        if self.of_top is not None:
            needs = (
                "sampling_top_log_probs needs log-probs of the sampler that sum to at most 1, of "
                "each token once, and old_log_probs at the label"
            )
            yield from self._sentence(needs, self.of_top.isnan())
        if log_probs is None:
            return
        unexplained = ~torch.isfinite(log_probs)
        needs = "the new log-probs need to be finite at trained positions"
        if made_from is not None:
            for needs_of_tokens, wrong, ids in _of_tokens(made_from):
                yield from self._sentence(needs_of_tokens, wrong, ids)
                unexplained = unexplained & ~wrong
            needs = f"{made_from.name} needs finite numbers at trained positions"
            if made_from.name != "log_probs" and made_from.vocabulary is None:
                needs += ", and no label outside the vocabulary"
        yield from self._sentence(needs, unexplained, log_probs)
        if self.divergence is not None:
            infinite = ~torch.isfinite(self.divergence) & torch.isfinite(log_probs)
            needs = (
                "a full KL needs finite logits of the reference at trained positions, and no token "
                "that has probability 0 under the reference alone"
            )
            yield from self._sentence(needs, infinite, self.divergence)

    def _sentence(self, needs: str, wrong: Tensor, values: Tensor | None = None) -> Iterator[str]:
        """Yield a sentence where something is wrong at a trained position.

        wrong: (T,) bool, where. values: (T,), of which the first wrong one is named.
        """
        wrong = wrong & self.mask
        documents = self.document_index[wrong].unique().tolist()
        if not documents:
            return
        listing = ", ".join(map(str, documents[:_MOST_NAMED]))
        if len(documents) > _MOST_NAMED:
            listing += ", ..."
        got = "not so" if values is None else f"got {values[wrong][0].item():g}"
        yield f"{needs} ({got} in document {listing})."


def _of_tokens(made_from: MadeFrom) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield what tokens need, (T,) bool, True where a token breaks it, and (T,) the tokens or
    None."""
    tokens = made_from.tokens
    kept = KeptSets.of(tokens.sampling_kept_ids, tokens.labels)
    if kept is not None:
        yield "sampling_kept_ids needs the label, and each token once", kept.wrong, None
    if made_from.vocabulary is None:
        return
    named = {
        "labels": tokens.labels.unsqueeze(-1),
        "sampling_kept_ids": tokens.sampling_kept_ids,
        "sampling_top_ids": tokens.sampling_top_ids,
    }
    last = made_from.vocabulary - 1
    for name, ids in named.items():
        if ids is not None:
            largest = ids.amax(-1)
            needs = f"{name} needs tokens of the vocabulary, which are 0 to {last}"
            yield needs, largest > last, largest
