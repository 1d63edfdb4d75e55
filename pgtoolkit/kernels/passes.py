"""The passes over the vocabulary over a rank's columns of the logits."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.kernels.products import accumulation_dtype
from pgtoolkit.kernels.torch_passes import Teacher, forward_score_, merge_shards
from pgtoolkit.losses.exchange import gather_stacked


class VocabularyShard:
    """The passes where each rank's logits are the columns from `start` on; labels number the whole vocabulary.

    They use those of `implementation` for the columns here. Shards may differ in size, or be empty.
    There is no pass that reads the logits once: the gradient needs the other ranks' sums.
    """

    one_pass, make_weights = False, None

    def __init__(self, implementation: ModuleType, group: ProcessGroup, start: int):
        self.implementation, self.group, self.start = implementation, group, start
        self.evaluate, self.coefficients = implementation.evaluate, implementation.coefficients
        self.scale_rows, self.scale_ = implementation.scale_rows, implementation.scale_

    def forward(
        self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `torch_passes.forward`, for all columns and the same on every rank; one collective of 3 or 4 (T,)."""
        trained = labels >= 0
        if logits.shape[1]:
            parts = self.implementation.forward_shard(logits, labels, temperature, with_entropy, self.start)
        else:
            parts = logits.new_zeros(3 + with_entropy, len(labels), dtype=accumulation_dtype(logits))
            parts[1] = torch.where(trained, -1e30, 0.0)
        # NaN says that the label is elsewhere: if none has it, or two do, there is no log-prob.
        inside = (labels >= self.start) & (labels < self.start + logits.shape[1])
        parts[0] = torch.where(inside, parts[0], torch.nan)
        shards = gather_stacked(parts, self.group)
        held = ~torch.isnan(shards[:, 0])
        shards[:, 0] = torch.where(held, shards[:, 0], 0.0)
        log_probs, normalizer, entropy = merge_shards(list(shards), labels, temperature)
        return torch.where(trained & (held.sum(0) != 1), torch.nan, log_probs), normalizer, entropy

    def divergence(self, logits: Tensor, *others) -> Tensor:
        """As `torch_passes.divergence`, over all columns; one collective of (T,)."""
        return gather_stacked(self.implementation.divergence(logits, *others), self.group).sum(0)

    def forward_score_(self, *given) -> tuple[Tensor, Tensor | None, Tensor]:
        """As `torch_passes.forward_score_`, of this rank's columns."""
        return forward_score_(*given, self.forward, self.backward)

    def backward(self, logits: Tensor, *others, out: Tensor | None = None, teacher: Teacher | None = None) -> Tensor:
        """As `torch_passes.backward`, of this rank's columns."""
        if logits.numel() == 0:
            return torch.empty_like(logits) if out is None else out
        return self.implementation.backward(logits, *others, self.start, out, teacher)


Passes = ModuleType | VocabularyShard
"""`torch_passes`, whose docstrings say what each function returns; `triton_passes`; or a rank's columns by one of them.

one_pass: whether there is `forward_gradient` for an objective by token: loss and gradient from one read.
make_weights: of a piece's tokens; None where `losses.piece` makes them.
"""
