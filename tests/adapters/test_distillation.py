"""The full KL against TRL's own code for it: loss and gradients, of hidden states of two widths and
of logits."""

import pytest
import torch

from pgtoolkit import kl, linear_policy_loss, policy_loss


@pytest.mark.parametrize(("kind", "beta"), [("full_reverse", 1.0), ("full_forward", 0.0)])
def test_trls_distillation_is_the_token_mean_of_the_full_kl(kind, beta):
    pytest.importorskip("trl", reason="the extra trl")
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    draw = torch.Generator().manual_seed(0)
    shapes = (10, 8), (13, 8), (10, 5), (13, 5)
    hidden, weight, ref_hidden, ref_weight = (
        torch.randn(*shape, generator=draw) for shape in shapes
    )
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    index, zeros = torch.tensor([0] * 4 + [1] * 6), torch.zeros(10)
    labels = torch.where(mask == 1, 2, -1)
    how = {
        "loss": "reinforce",
        "aggregation": "token_mean",
        "kl": kl.KL(kind, 1.0),
        "temperature": 0.7,
    }
    found = []
    for who in ("pgtoolkit", "DistillationTrainer", "GKDTrainer", "logits"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logits, ref_logits = leaves[0] @ leaves[1].T, ref_hidden @ ref_weight.T
        if who == "pgtoolkit":
            of_reference = {"ref_hidden": ref_hidden, "ref_lm_head_weight": ref_weight}
            loss = linear_policy_loss(
                *leaves, labels, zeros, zeros, index, **how, **of_reference
            ).loss
        elif who == "logits":
            loss = policy_loss(
                logits, labels, zeros, zeros, index, **how, ref_logits=ref_logits
            ).loss
        elif who == "GKDTrainer":
            of_labels = {
                "labels": torch.where(mask == 1, 2, -100)[None],
                "beta": beta,
                "temperature": 0.7,
            }
            loss = GKDTrainer.generalized_jsd_loss(logits[None], ref_logits[None], **of_labels)
        else:
            given = leaves[0][None], ref_hidden[None], leaves[1], ref_weight, mask[None], beta
            loss = _chunked_divergence_loss(*given, num_items_in_batch=8, temperature=0.7)[0]
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=2e-5, atol=2e-6)
