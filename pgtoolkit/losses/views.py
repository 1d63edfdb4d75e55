"""Makes the arguments that a loss function of the user's own may ask for beside vectors: `ratio`,
`documents`, `groups` and `step`.

T trained tokens lie one document after the other; there are D documents in G groups. All results
are differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.family import clamped


class Ratio:
    """`ratio(x)` is exp(x) with x clamped to plus or minus 20, beyond which it has no gradient.

    arguments: the x of each call, detached.
    """

    def __init__(self):
        self.arguments: list[Tensor] = []

    def __call__(self, log_ratio: Tensor) -> Tensor:
        self.arguments.append(log_ratio.detach())
        return clamped(log_ratio).exp()


class DocumentView:
    """Sums over documents, and their numbers at each of their tokens.

    sums: of documents that all have a trained token.
    """

    def __init__(self, sums: DocumentSums):
        self._sums = sums

    def __len__(self) -> int:
        return self._sums.num_documents

    def sum(self, values: Tensor) -> Tensor:
        """Return (D,), the sum of (T,) values over each document."""
        return self._sums.sum(self._of_tokens("sum", values))

    def mean(self, values: Tensor) -> Tensor:
        """Return (D,), the mean of (T,) values over each document."""
        return self._sums.mean(self._of_tokens("mean", values))

    def first(self, values: Tensor) -> Tensor:
        """Return (D,), of (T,) values that of each document's first token, exactly.

        A mean of equal numbers, such as a document's rewards, may round.
        """
        values = self._of_tokens("first", values)
        is_first = self._sums.before(torch.ones_like(values)) == 0
        return self._sums.sum(torch.where(is_first, values, 0.0))

    def before(self, values: Tensor) -> Tensor:
        """Return (T,), the sum of (T,) values over the document's tokens before this one."""
        return self._sums.before(self._of_tokens("before", values))

    def spread(self, values: Tensor) -> Tensor:
        """Return (T,), at each token its document's value of (D,)."""
        check_length("documents.spread", values, len(self), "document")
        return self._sums.broadcast(values)

    def _of_tokens(self, name: str, values: Tensor) -> Tensor:
        check_length(f"documents.{name}", values, len(self._sums.index), "token")
        return values


class GroupView:
    """Sums and softmax over the documents of each group.

    group_index: (D,) int64, the group of each document, numbered from 0 without a gap.
    """

    def __init__(self, group_index: Tensor, num_groups: int):
        self._index = group_index
        self._num_groups = num_groups

    def __len__(self) -> int:
        return self._num_groups

    def sum(self, values: Tensor) -> Tensor:
        """Return (G,), the sum of (D,) values over each group."""
        self._check("sum", values)
        return values.new_zeros(self._num_groups).index_add(0, self._index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Return (G,), the mean of (D,) values over each group."""
        return self.sum(values) / self.sum(torch.ones_like(values))

    def max(self, values: Tensor) -> Tensor:
        """Return (G,), the largest of (D,) values of each group."""
        self._check("max", values)
        start = values.new_full((self._num_groups,), -torch.inf)
        return start.scatter_reduce(0, self._index, values, "amax")

    def logsumexp(self, values: Tensor) -> Tensor:
        """Return (G,), the logarithm of the sum of exp of (D,) values over each group."""
        largest = self.max(values.detach())
        return self.sum((values - self.spread(largest)).exp()).log() + largest

    def softmax(self, values: Tensor) -> Tensor:
        """Return (D,), exp of (D,) values over their sum in the group."""
        return (values - self.spread(self.logsumexp(values))).exp()

    def spread(self, values: Tensor) -> Tensor:
        """Return (D,), for each document its group's value of (G,)."""
        check_length("groups.spread", values, self._num_groups, "group")
        return values[self._index]

    def _check(self, name: str, values: Tensor) -> None:
        check_length(f"groups.{name}", values, len(self._index), "document")


class StepView:
    """Sums over the trained tokens of the step."""

    def __init__(self, length: int, num_documents: int, num_groups: int | None):
        self._length = length
        self.num_tokens = length
        self.num_documents = num_documents
        self.num_groups = num_groups

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of (T,) values over the step."""
        return self._of_tokens("sum", values).sum()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of (T,) values over the step."""
        return self._of_tokens("mean", values).mean()

    def quantile(self, values: Tensor, share: float) -> Tensor:
        """Return the number that this share of (T,) values lies below, by linear interpolation."""
        return quantile(self._of_tokens("quantile", values), share)

    def _of_tokens(self, name: str, values: Tensor) -> Tensor:
        check_length(f"step.{name}", values, self._length, "token")
        return values


def quantile(values: Tensor, share: float) -> Tensor:
    """Return the number that this share of (T,) values lies below, by linear interpolation."""
    # torch.quantile refuses more than 16 million numbers.
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def check_length(name: str, values: object, length: int, unit: str) -> None:
    """Raise ValueError unless values has one number for each token, document or group."""
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (length,):
        raise ValueError(f"{name} needs one number per {unit}, shape {(length,)} (got {shape})")
