"""A document of a few numbers, for tests that need one without sampling it."""

import torch
from torch import Tensor

from pgtoolkit.document import Document


def document_of(
    tokens: Tensor | int,
    loss_mask: Tensor | None = None,
    *,
    advantages: Tensor | float = 0.0,
    old_log_probs: Tensor | float | None = 0.0,
    group: int = 0,
    name: str = "a document",
    **fields: object,
) -> Document:
    """Return a document.

    tokens: their ids, or how many there are, with the ids 0, 1 and so on. loss_mask: every token
    but the first by default. advantages, old_log_probs: a number is that of each trained token.
    fields: others of `Document`.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens)
    if loss_mask is None:
        loss_mask = torch.arange(len(tokens)) > 0
    count = int(loss_mask.sum())

    def of_each(values: Tensor | float) -> Tensor:
        return values if isinstance(values, Tensor) else torch.full((count,), float(values))

    return Document(
        tokens=tokens,
        loss_mask=loss_mask,
        advantages=of_each(advantages),
        old_log_probs=None if old_log_probs is None else of_each(old_log_probs),
        group=group,
        name=name,
        **fields,
    )
