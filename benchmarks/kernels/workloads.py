"""The steps of `python -m benchmarks.kernels`: made-up packed documents, and exact gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pgtoolkit.batch import DocumentCounts, Tokens
from pgtoolkit.kernels import torch_passes
from pgtoolkit.losses.aggregation import SampleMean
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.objective import Loss, Objective


@dataclass(frozen=True)
class Workload:
    """T packed tokens of documents of random length, and what the loss needs besides the logits.

    The old log-probs differ from the new ones by noise of 0.1 a token whose mean in a document is
    1e-4: GRPO clips 5 % of the tokens, GSPO nothing.
    """

    loss: str
    labels: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    document_index: Tensor
    num_documents: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.labels, self.old_log_probs, self.advantages, self.document_index

    @property
    def options(self) -> dict:
        return {"loss": self.loss, "num_documents": self.num_documents}

    def counts(self) -> DocumentCounts:
        """Return the counts that the training loop, whose documents come from the host, has."""
        return self._tokens().counted().counts

    def objective(self, dtype: torch.dtype = torch.float32) -> Objective:
        return make_objective(
            self._tokens(), None, Loss(family_of(self.loss), SampleMean()), dtype, Ranks()
        )

    def _tokens(self) -> Tokens:
        return Tokens(**{key: value for key, value in vars(self).items() if key != "loss"})

    def half_untrained(self) -> Workload:
        """Return the same with every other position a prompt's or padding."""
        odd = torch.arange(len(self.labels), device=self.labels.device) % 2 == 1
        return replace(self, labels=torch.where(odd, -1, self.labels))

    def half_zero_advantage(self) -> Workload:
        """Return the same with advantage 0 in documents that have half of the tokens.

        That is how it is where the rewards of a group are all equal.
        """
        lengths = torch.bincount(self.document_index, minlength=self.num_documents).tolist()
        chosen = []
        room = len(self.labels) // 2
        for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
            if lengths[document] <= room:
                chosen.append(document)
                room -= lengths[document]
        zero = torch.isin(self.document_index, torch.tensor(chosen, device=self.labels.device))
        return replace(self, advantages=torch.where(zero, 0.0, self.advantages))


def document_lengths(total: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < total:
        lengths.append(int(torch.randint(shortest, longest + 1, (1,), generator=generator)))
    lengths[-1] -= sum(lengths) - total
    return lengths


def make_workload(
    loss: str,
    log_probs_of: Callable[[Tensor], Tensor],
    vocabulary: int,
    lengths: list[int],
    device: str,
) -> Workload:
    """Return documents of these lengths. log_probs_of(labels): (T,) new log-prob of each label."""
    generator = torch.Generator(device).manual_seed(1)
    total = sum(lengths)
    count = len(lengths)
    index = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths)).to(device)
    labels = torch.randint(0, vocabulary, (total,), generator=generator, device=device)
    noise = 0.1 * torch.randn(total, generator=generator, device=device)
    means = torch.zeros(count, device=device).index_add_(0, index, noise) / torch.tensor(
        lengths, device=device
    )
    drift = 1e-4 * torch.randn(count, generator=generator, device=device)
    old = log_probs_of(labels) + noise + (drift - means)[index]
    advantages = torch.randn(count, generator=generator, device=device)[index]
    return Workload(loss, labels, old, advantages, index, count)


def exact_gradient(
    workload: Workload, logits_of: Callable[[slice], Tensor], rows: int = 1024
) -> tuple[Tensor, Callable[[], Iterator[tuple[slice, Tensor]]]]:
    """Return the loss in float64, and a function that yields its gradient by the logits.

    The function yields (slice, gradient) for `rows` rows at a time. logits_of(slice): the logits of
    these rows, of any dtype.
    """
    total = len(workload.labels)
    cuts = [slice(low, min(low + rows, total)) for low in range(0, total, rows)]
    forwards = [
        torch_passes.forward(logits_of(cut).double(), workload.labels[cut], 1.0, False)
        for cut in cuts
    ]
    losses, coefficients = workload.objective(torch.float64).losses_and_coefficients(
        torch.cat([log_probs for log_probs, _, _ in forwards])
    )

    def blocks():
        for cut, (_, normalizer, _) in zip(cuts, forwards, strict=True):
            yield (
                cut,
                torch_passes.backward(
                    logits_of(cut).double(),
                    workload.labels[cut],
                    normalizer,
                    coefficients[cut],
                    1.0,
                ),
            )

    return losses.sum(), blocks


def head_matrices(
    tokens: int, hidden_size: int, vocabulary: int, device: str
) -> tuple[Tensor, Tensor]:
    """Return hidden states, (tokens, hidden_size), and the head's weight, in bfloat16 on a GPU.

    Their logits have a standard deviation of 2.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    hidden = (
        torch.randn(tokens, hidden_size, generator=generator, device=device)
        .to(dtype)
        .requires_grad_()
    )
    weight = torch.randn(vocabulary, hidden_size, generator=generator, device=device)
    return hidden, (weight * (2 / hidden_size**0.5)).to(dtype).requires_grad_()
