"""Sentences on data that have no loss: what is wrong at trained positions, and of which documents.

Each fault has a sentence of its own, in the words of the library's keywords.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pgtoolkit.batch import Tokens
from pgtoolkit.losses.kept import KeptSets

if TYPE_CHECKING:
    from pgtoolkit.losses.objective import Objective

_MOST_NAMED = 5
"""Documents that a sentence names."""


@dataclass(frozen=True)
class MadeFrom:
    """What the new log-probs were computed from.

    name: the keyword of the tensor. tokens: the other inputs.
    vocabulary: its size; None where this rank does not hold all of it, and for log-probs that the
        caller has computed.
    """

    name: str
    tokens: Tokens
    vocabulary: int | None


def faults(
    objective: Objective, log_probs: Tensor | None, made_from: MadeFrom | None
) -> Iterator[str]:
    """Yield a sentence for each fault of the inputs of an objective at its trained positions.

    log_probs: the new ones; None leaves them and what they were made from out.
    """
    vectors = {
        "old_log_probs": objective.old_log_probs,
        "advantages": objective.advantages,
        "sampling_log_probs": objective.sampling_log_probs,
        "ref_log_probs": objective.penalties.ref_log_probs,
    }
    for name, values in vectors.items():
        if values is not None:
            wrong = objective.mask & ~torch.isfinite(values)
            needs = f"{name} needs finite numbers at trained positions"
            yield from _sentence(objective, needs, wrong, values)
    if objective.centering is not None:
        needs = (
            "sampling_top_log_probs needs log-probs of the sampler that sum to at most 1, of each "
            "token once, and old_log_probs at the label"
        )
        yield from _sentence(objective, needs, objective.centering.problems.isnan())
    if log_probs is None:
        return
    unexplained = objective.mask & ~torch.isfinite(log_probs)
    needs = "the new log-probs need to be finite at trained positions"
    if made_from is not None:
        for needs_of_tokens, wrong, ids in _of_tokens(objective.mask, made_from):
            yield from _sentence(objective, needs_of_tokens, wrong, ids)
            unexplained = unexplained & ~wrong
        needs = f"{made_from.name} needs finite numbers at trained positions"
        if made_from.name != "log_probs" and made_from.vocabulary is None:
            needs += ", and no label outside the vocabulary"
    yield from _sentence(objective, needs, unexplained, log_probs)
    divergence = objective.penalties.divergence
    if divergence is not None:
        infinite = objective.mask & ~torch.isfinite(divergence) & torch.isfinite(log_probs)
        needs = (
            "a full KL needs finite logits of the reference at trained positions, and no token "
            "that has probability 0 under the reference alone"
        )
        yield from _sentence(objective, needs, infinite, divergence)


def _of_tokens(mask: Tensor, made_from: MadeFrom) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield what tokens need, (T,) bool where it is not so, and (T,) the tokens or None."""
    tokens = made_from.tokens
    kept = KeptSets.of(tokens.sampling_kept_ids, tokens.labels)
    if kept is not None:
        yield "sampling_kept_ids needs the label, and each token once", mask & kept.wrong, None
    if made_from.vocabulary is None:
        return
    named = {
        "labels": tokens.labels.unsqueeze(-1),
        "sampling_kept_ids": tokens.sampling_kept_ids,
        "sampling_top_ids": tokens.sampling_top_ids,
    }
    for name, ids in named.items():
        if ids is not None:
            largest = ids.amax(-1)
            needs = (
                f"{name} needs tokens of the vocabulary, which are 0 to {made_from.vocabulary - 1}"
            )
            yield needs, mask & (largest >= made_from.vocabulary), largest


def _sentence(
    objective: Objective, needs: str, wrong: Tensor, values: Tensor | None = None
) -> Iterator[str]:
    """Yield a sentence where something is wrong.

    wrong: (T,) bool, where. values: (T,), of which the first wrong one is named.
    """
    documents = objective.documents.index[wrong].unique().tolist()
    if not documents:
        return
    listing = ", ".join(map(str, documents[:_MOST_NAMED]))
    if len(documents) > _MOST_NAMED:
        listing += ", ..."
    got = "not so" if values is None else f"got {values[wrong][0].item():g}"
    yield f"{needs} ({got} in document {listing})."
