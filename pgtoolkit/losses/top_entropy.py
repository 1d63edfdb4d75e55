"""The tokens at which the policy is least certain, whose surrogate alone counts (arXiv 2506.01939).

Where penalties, a critic and denominators keep every token, such a choice is a factor of the
surrogate: 1 where the token is kept, 0 elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pgtoolkit.losses.arrays import Array, mask_of_tokens, of_floats, tensor_of
from pgtoolkit.losses.checks import is_finite, shown
from pgtoolkit.losses.views import quantile

if TYPE_CHECKING:
    from pgtoolkit.batch import Tokens

TIE = 1e-6
"""Entropies that differ by less are equal. The first tokens of a prompt's completions all have the
same one, which float32 gives with errors that depend on how the step was cut."""


class TopEntropy(NamedTuple):
    """The result of `top_entropy`.

    factors: (T,), 1 where a token is kept, 0 elsewhere; in the dtype of the entropies. NaN where
        the entropy of a trained token is not finite, so that a loss with these factors refuses it.
    threshold: 0-dim, the least entropy that is kept, in nats.
    """

    factors: Tensor
    threshold: Tensor


@torch.no_grad()
def top_entropy(entropy: Array, mask: Array, fraction: float) -> TopEntropy:
    """Keep the tokens of a whole step at which the policy is least certain.

    The threshold is the (1 - fraction) quantile of the entropies, by linear interpolation; a token
    is kept where its entropy is at least the threshold, so that ties are kept.

    entropy: (T,) floating, of the softmax of logits / temperature at each position, of all
        documents of the step.
    mask: (T,) bool, or 0 and 1, where a token is trained; other positions are not read, and their
        factor is 0.
    fraction: above 0, and at most 1.
    Lists and numpy's arrays are taken as tensors are.
    """
    check_fraction("fraction", fraction)
    numbers = tensor_of("entropy", entropy)
    entropy = numbers if isinstance(entropy, Tensor) else of_floats(numbers)
    if entropy.dim() != 1 or not entropy.is_floating_point():
        raise ValueError(f"entropy needs one floating number per token (got {shown(entropy)})")
    mask = mask_of_tokens(mask, entropy)
    wide = entropy.double()
    is_readable = torch.isfinite(wide)
    trained = wide[mask & is_readable]
    if not len(trained):
        nothing_kept = torch.zeros_like(entropy).masked_fill(mask, torch.nan)
        return TopEntropy(nothing_kept, wide.new_tensor(torch.nan))
    threshold = quantile(trained, 1 - fraction)
    kept = mask & (wide >= threshold - TIE)
    factors = kept.to(entropy.dtype)
    return TopEntropy(torch.where(mask & ~is_readable, torch.nan, factors), threshold)


def has_weight(tokens: Tokens, masks_truncated: bool) -> Tensor:
    """Return (documents,) bool, False for documents that a verifier or their cut end leaves out."""
    has_weight = torch.ones(tokens.num_documents, dtype=torch.bool)
    if tokens.excluded is not None:
        has_weight &= ~tokens.excluded
    if masks_truncated and tokens.truncated is not None:
        has_weight &= ~tokens.truncated
    return has_weight


def check_fraction(name: str, fraction: object) -> None:
    """Raise ValueError unless a fraction is above 0 and at most 1."""
    if not is_finite(fraction) or not 0 < fraction <= 1:
        raise ValueError(f"{name} needs a number above 0 and at most 1 (got {shown(fraction)})")
