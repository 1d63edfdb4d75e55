"""What an implementation of the passes over the vocabulary offers: a module of functions, or an object."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.losses.aggregation import Aggregation
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Objective


@runtime_checkable
class Passes(Protocol):
    """`torch_passes`, whose docstrings say what each function returns; `triton_passes`; and `shards.VocabularyShard`.

    one_pass: whether `forward_gradient` may be asked for an objective by token: loss and gradient from one read.
    make_weights: of a piece's tokens; None where `losses.objective` is to make them.
    """

    one_pass: bool

    def forward(
        self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def backward(
        self, logits: Tensor, labels: Tensor, normalizer: Tensor, coefficients: Tensor, temperature: float, **options
    ) -> Tensor: ...

    def forward_score_(
        self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor]: ...

    def forward_gradient(
        self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, objective: Objective, out: Tensor
    ) -> tuple[Tensor, Tensor | None] | None: ...

    def evaluate(
        self, objective: Objective, log_probs: Tensor, entropy: Tensor | None, level: str
    ) -> tuple[Tensor, Tensor, MetricSums]: ...

    def coefficients(self, objective: Objective, log_probs: Tensor) -> Tensor: ...

    def make_weights(
        self, tokens: Tokens, aggregation: Aggregation, totals: StepTotals | None
    ) -> tuple[Tensor, DocumentSums, StepTotals, Tensor] | None: ...

    def scale_rows(self, source: Tensor, factors: Tensor, target: Tensor, rows: Tensor) -> Tensor: ...

    def scale_(self, values: Tensor, factor: Tensor) -> Tensor: ...
