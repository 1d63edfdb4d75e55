"""prime-rl's losses against ours inside prime-rl: both set up and called by its own functions, from
its configuration.

prime-rl is no package of PyPI: these tests run where a clone's src and
packages/prime-rl-configs/src are on PYTHONPATH.
"""

import pytest
import torch
from adapters.padded import LENGTHS, batch, ours

pytest.importorskip(
    "prime_rl.trainer.rl.loss", reason="prime-rl on PYTHONPATH", exc_type=ImportError
)

from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

PATH = "pgtoolkit.adapters.prime_rl.policy_loss"


def step(config, cut=((0, 1, 2), (3, 4, 5)), weights=None):
    """Return loss, gradient by the log-probs (B, WIDTH), and the last micro-batch's metrics, of a
    step that is cut into micro-batches of these documents."""
    new, old, advantages, mask = batch()
    leaf = new.clone().requires_grad_()
    losses = []
    metrics = None
    for rows in cut:
        streams = {"rl_weights": weights, "ce_weights": None, "ref_kl_weights": None}

        def taken(x, rows=rows):
            return None if x is None else [x[row, : LENGTHS[row]] for row in rows]

        loss, metrics = compute_loss(
            trainer_logprobs=taken(leaf),
            inference_logprobs=taken(old),
            ref_logprobs=None,
            advantages=taken(advantages[:, None].expand_as(old)),
            loss_mask=taken(mask),
            **{name: taken(stream) for name, stream in streams.items()},
            rl_loss_fn=setup_rl_loss_fn(config),
            **{"rl_scale": sum(LENGTHS), "ce_scale": 1, "ref_kl_scale": 1},
        )
        loss.backward()
        losses.append(loss.detach())
    return sum(losses), leaf.grad, metrics


def custom(loss, **kwargs):
    return CustomLossConfig(import_path=PATH, kwargs={"loss": loss, **kwargs})


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [
        ("grpo", {"epsilon_low": 0.1, "epsilon_high": 0.15}),
        ("gspo", {"epsilon_low": 0.01, "epsilon_high": 0.015}),
    ],
)
def test_a_custom_loss_is_ours_under_token_mean_however_the_step_is_cut(loss, parameters):
    exact = ours(loss, parameters, "token_mean")
    for cut in (((0, 1, 2, 3, 4, 5),), ((3,), (1, 0), (2, 4, 5))):
        value, gradient, _ = step(custom(loss, **parameters), cut)
        assert float(value) == pytest.approx(float(exact[0]), rel=1e-12)
        torch.testing.assert_close(gradient, exact[1], rtol=1e-10, atol=1e-14)


def pull(kl_tau):
    return {"kl": "k2", "kl_coefficient": 2 * kl_tau} if kl_tau else {}


@pytest.mark.parametrize("kl_tau", [0.0, 0.05])
@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rls_default_has_the_gradient_of_our_dppo(weighted, kl_tau):
    """Its loss is -r A where ours is -r A p with r taken as a number: one derivative, two
    values."""
    weights = (
        torch.rand(batch()[0].shape, generator=torch.Generator().manual_seed(3)).double()
        if weighted
        else None
    )
    theirs = DefaultLossConfig(dppo_mask_low=0.01, dppo_mask_high=0.008, kl_tau=kl_tau)
    same = custom("dppo", delta_low=0.01, delta_high=0.008, ratio_cap=1e9, **pull(kl_tau))
    their_loss, their_gradient, their_metrics = step(theirs, weights=weights)
    our_loss, our_gradient, _ = step(same, weights=weights)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-10, atol=1e-14)
    assert float(our_loss) != pytest.approx(float(their_loss), rel=0.1)
    assert float((their_metrics["is_masked"] > 0).sum()) > 0
