"""The same work by other libraries, as far as they are installed, and by plain PyTorch.

Peers take documents as rows of one length; they get all documents of the same length, their best
case.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.workloads import Workload
from pgtoolkit.losses.families import family_of


def eager_loss(workload: Workload) -> Callable[[Tensor], Tensor]:
    """Return the loss by PyTorch's own operations, in float32, differentiated by autograd."""
    objective = workload.objective()
    labels = workload.labels
    # Sorted once, before the measurement: the documents stay the same.
    objective.documents.token_order  # noqa: B018

    def loss(logits: Tensor) -> Tensor:
        log_probs = (
            logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        )
        return objective.losses_and_coefficients(log_probs)[0].sum()

    return loss


def compiled_loss(workload: Workload) -> Callable[[Tensor], Tensor]:
    """Return the same with all that is as large as the logits, log-softmax and gather, compiled."""
    objective = workload.objective()
    labels = workload.labels.clamp(min=0).unsqueeze(-1)

    @torch.compile
    def log_probs(logits: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, labels).squeeze(-1)

    return lambda logits: objective.losses_and_coefficients(log_probs(logits))[0].sum()


def liger_logits(loss: str, logits: Tensor, rows: int) -> Callable[[], None] | None:
    """Return forward and backward of Liger-Kernel's GRPO loss, at token or sequence level.

    rows: documents, of equal length.
    """
    if not importlib.util.find_spec("liger_kernel"):
        return None
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    length = len(logits) // rows - 1
    logits = logits.detach()[: rows * (length + 1)].view(rows, length + 1, -1).requires_grad_()
    ids, old, advantages = _equal_documents(rows, length, logits.shape[-1], logits.device)
    family = family_of(loss)

    def call():
        logits.grad = None
        value, _ = triton_grpo_loss(
            logits,
            old,
            None,
            ids,
            advantages,
            torch.ones_like(ids),
            temperature=1.0,
            beta=0.0,
            eps_low=family.epsilon_low,
            eps_high=family.epsilon_high,
            inplace=False,
            loss_type="grpo",
            importance_sampling_level="token" if loss == "grpo" else "sequence",
            reduce=True,
        )
        value.backward()

    return call


def liger_head(loss: str, hidden: Tensor, weight: Tensor, rows: int) -> Callable[[], None] | None:
    """Return forward and backward of Liger-Kernel's fused linear GRPO loss.

    TF32 products are allowed, since it computes the logits in float32.
    """
    if not importlib.util.find_spec("liger_kernel"):
        return None
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    length = len(hidden) // rows
    hidden = hidden.detach().view(rows, length, -1).requires_grad_()
    weight = weight.detach().requires_grad_()
    ids, old, advantages = _equal_documents(rows, length, len(weight), hidden.device)
    module = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        loss_type="grpo",
        importance_sampling_level="token" if loss == "grpo" else "sequence",
        epsilon_low=family_of(loss).epsilon_low,
        epsilon_high=family_of(loss).epsilon_high,
    )

    def call():
        hidden.grad = None
        weight.grad = None
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        value, _ = module(
            hidden, weight, ids, torch.ones_like(ids), advantages, old_per_token_logps=old
        )
        value.backward()
        torch.backends.cuda.matmul.allow_tf32 = before

    return call


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, filtered: bool
) -> Callable[[], None] | None:
    """Return forward and backward of Apple's cut cross entropy.

    It is another loss, but needs the same three products.
    """
    if not importlib.util.find_spec("cut_cross_entropy"):
        return None
    from cut_cross_entropy import linear_cross_entropy

    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_()

    def call():
        hidden.grad = None
        weight.grad = None
        linear_cross_entropy(
            hidden, weight, labels, filter_eps="high" if filtered else None
        ).backward()

    return call


def _equal_documents(
    rows: int, length: int, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels and old log-probs, (rows, length) each, and advantages, (rows,)."""
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator, device=device)
    old = -13 + 0.1 * torch.randn(rows, length, generator=generator, device=device)
    return ids, old, torch.randn(rows, generator=generator, device=device)
