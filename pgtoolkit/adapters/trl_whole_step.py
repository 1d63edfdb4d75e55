"""The first of two passes over an optimizer step of TRL, for a loss that depends on all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pgtoolkit.adapters.trl_heads import Inputs, Trainer, log_probs_of, trained_tokens
from pgtoolkit.kernels.losses import LossOfStep
from pgtoolkit.losses.step_documents import by_document, documents_of, tokens_of_step

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class FirstPass:
    """The results of the first pass, those of the loss the same on all processes.

    loss: 0-dim float64, of the surrogate.
    metrics: 0-dim tensors by name, without those of a penalty.
    coefficients: of each micro-batch of this process, (T,) float64, c_t; 0 where nothing is
        trained.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    coefficients: list[Tensor]


@torch.no_grad()
def first_pass(trainer: Trainer, pieces: list[Inputs]) -> FirstPass:
    """Run the model forward on all micro-batches of a step, and compute the loss of all of them.

    pieces: those of this process. The loss is computed on the documents of all processes, in
    float64 on the CPU.
    """
    documents = []
    new = []
    trained = []
    for piece in pieces:
        mask = trained_tokens(piece)
        log_probs = log_probs_of(trainer, piece)
        tokens, loss = trainer.tokens_and_loss(piece, mask, log_probs)
        tokens = tokens.on_the_host()
        documents += documents_of(tokens)
        new += by_document(tokens, log_probs.reshape(-1).cpu())
        trained.append(mask.reshape(-1).cpu())
    of_processes = _of_all_processes((documents, new))
    documents = [document for of_process, _ in of_processes for document in of_process]
    new = [log_probs for _, of_process in of_processes for log_probs in of_process]
    of_step = LossOfStep(
        torch.cat(new), tokens_of_step(documents, new), replace(loss, kl=None), True
    )
    value, metrics = of_step.measured()
    counts = [sum(map(len, of_process)) for _, of_process in of_processes]
    rank = dist.get_rank() if len(of_processes) > 1 else 0
    of_process = of_step.coefficients().split(counts)[rank]
    parts = of_process.split([int(mask.sum()) for mask in trained])
    return FirstPass(
        value,
        metrics,
        [
            torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, part)
            for mask, part in zip(trained, parts, strict=True)
        ],
    )


def _of_all_processes(value: _Value) -> list[_Value]:
    """Return every process's value, by their numbers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
