"""What a correction makes of the log-ratios that it looks at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.losses.corrections import Correction
from pgtoolkit.losses.documents import DocumentSums, over_scope
from pgtoolkit.losses.family import LOG_RATIO_LIMIT, clamped


@dataclass(frozen=True)
class Factors:
    """What a correction makes of each token, (T,) each, without gradient.

    values: rho. outside: bool, True beyond the correction's bounds. clamped: bool, True where the clamp acted on the
    log-ratio that it looks at.
    """

    values: Tensor
    outside: Tensor
    clamped: Tensor

    @classmethod
    def of(cls, correction: Correction, log_ratio: Tensor, advantages: Tensor, documents: DocumentSums) -> Factors:
        """log_ratio: (T,) of each token, not clamped, 0 where nothing is trained. advantages: over the scope."""
        over = over_scope(correction, log_ratio, documents)
        values, outside = correction.factors(clamped(over), clamped(log_ratio), advantages)
        # The clamp makes a number of an infinite log-ratio, and a mask of NaN.
        finite = torch.isfinite(over) & torch.isfinite(log_ratio)
        return cls(torch.where(finite, values, torch.nan), outside, over.abs() > LOG_RATIO_LIMIT)
