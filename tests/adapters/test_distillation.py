"""The full KL has the loss and gradients of TRL's own code for distillation, from hidden states of
two widths and from logits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pgtoolkit import kl, linear_policy_loss, policy_loss


@pytest.mark.parametrize(
    ("kind", "beta"), [("full_reverse", 1.0), ("full_forward", 0.0), ("full_jsd", 0.3)]
)
def test_trls_distillation_is_the_token_mean_of_the_full_kl(kind, beta):
    pytest.importorskip("trl", reason="the extra trl")
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=generator)
    weight = torch.randn(13, 8, generator=generator)
    ref_hidden = torch.randn(10, 5, generator=generator)
    ref_weight = torch.randn(13, 5, generator=generator)
    ref_logits = ref_hidden @ ref_weight.T
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    labels = torch.where(mask == 1, 2, -1)
    zeros = torch.zeros(10)
    vectors = (labels, zeros, zeros, torch.tensor([0] * 4 + [1] * 6))
    options = {
        "loss": "reinforce",
        "aggregation": "token_mean",
        "kl": kl.KL(kind, 1.0, beta=beta if kind == "full_jsd" else None),
        "temperature": 0.7,
    }

    def from_hidden_states(hidden: Tensor, weight: Tensor) -> Tensor:
        reference = {"ref_hidden": ref_hidden, "ref_lm_head_weight": ref_weight}
        return linear_policy_loss(hidden, weight, *vectors, **options, **reference).loss

    def from_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        return policy_loss(hidden @ weight.T, *vectors, **options, ref_logits=ref_logits).loss

    def gkd_trainer(hidden: Tensor, weight: Tensor) -> Tensor:
        return GKDTrainer.generalized_jsd_loss(
            (hidden @ weight.T)[None],
            ref_logits[None],
            labels=torch.where(mask == 1, 2, -100)[None],
            beta=beta,
            temperature=0.7,
        )

    def distillation_trainer(hidden: Tensor, weight: Tensor) -> Tensor:
        return _chunked_divergence_loss(
            hidden[None],
            ref_hidden[None],
            weight,
            ref_weight,
            mask[None],
            beta,
            num_items_in_batch=8,
            temperature=0.7,
        )[0]

    def loss_and_gradients(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = function(*leaves)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    expected = loss_and_gradients(from_hidden_states)
    for function in (from_logits, gkd_trainer, distillation_trainer):
        torch.testing.assert_close(loss_and_gradients(function), expected, rtol=2e-5, atol=2e-6)
