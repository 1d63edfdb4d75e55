"""prime-rl's losses against ours inside prime-rl: both set up and called by its own functions, from
its configuration.

prime-rl is no package of PyPI: these tests run where a clone's src and
packages/prime-rl-configs/src are on PYTHONPATH. Its own losses are those of September 2026, when
`ipo` had become its default; our adapter also runs in older states.
"""

from types import SimpleNamespace

import pytest
import torch
from adapters.padded import LENGTHS, batch, ours

pytest.importorskip(
    "prime_rl.trainer.rl.loss", reason="prime-rl on PYTHONPATH", exc_type=ImportError
)

from prime_rl.configs import trainer as configs
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

from pgtoolkit.adapters.prime_rl import policy_loss

PATH = "pgtoolkit.adapters.prime_rl.policy_loss"
HERE = "adapters.test_prime_rl"


def step(config, cut=((0, 1, 2), (3, 4, 5)), weights=None, of=None):
    """Return loss, gradient by the log-probs (B, WIDTH), and the last micro-batch's metrics, of a
    step that is cut into micro-batches of these documents.

    of: the batch, or None for `batch()`.
    """
    new, old, advantages, mask = of or batch()
    leaf = new.clone().requires_grad_()
    scale = float((mask if weights is None else weights.where(mask, 0.0)).sum())
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
            **{"rl_scale": scale, "ce_scale": 1, "ref_kl_scale": 1},
        )
        loss.backward()
        losses.append(loss.detach())
    return sum(losses), leaf.grad, metrics


def custom(loss, **kwargs):
    return configs.CustomLossConfig(import_path=PATH, kwargs={"loss": loss, **kwargs})


def soft_clip(log_ratio, advantages, ratio, *, softness=0.3):
    return -softness * torch.tanh((ratio(log_ratio) - 1) / softness) * advantages


def above_the_mean(log_ratio, advantages, documents):
    mean = documents.spread(documents.mean(log_ratio.detach()))
    return -documents.mean(advantages * log_ratio.exp() * (log_ratio.detach() >= mean))


CUTS = (((0, 1, 2, 3, 4, 5),), ((3,), (1, 0), (2, 4, 5)))


@pytest.mark.parametrize(
    ("loss", "parameters"),
    [
        ("grpo", {"epsilon_low": 0.1, "epsilon_high": 0.15}),
        ("gspo", {"epsilon_low": 0.01, "epsilon_high": 0.015}),
    ],
)
def test_a_custom_loss_is_ours_under_token_mean_however_the_step_is_cut(loss, parameters):
    exact = ours(loss, parameters, "token_mean")
    for cut in CUTS:
        value, gradient, _ = step(custom(loss, **parameters), cut)
        assert float(value) == pytest.approx(float(exact[0]), rel=1e-12)
        torch.testing.assert_close(gradient, exact[1], rtol=1e-10, atol=1e-14)


def by_loops(name):
    """Return the loss of `batch` over its tokens by plain loops, and its gradient."""
    new, old, advantages, _ = batch()
    leaf = new.clone().requires_grad_()
    total = 0.0
    for row, length in enumerate(LENGTHS):
        ratios = [leaf[row, t] - old[row, t] for t in range(length)]
        mean = sum(float(ratio.detach()) for ratio in ratios) / length
        for ratio in ratios:
            if name == "soft_clip":
                total -= 0.2 * torch.tanh((ratio.exp() - 1) / 0.2) * advantages[row]
            elif float(ratio.detach()) >= mean:
                total -= advantages[row] * ratio.exp()
    total = total / sum(LENGTHS)
    total.backward()
    return total.detach(), leaf.grad


@pytest.mark.parametrize(
    ("name", "parameters"), [("soft_clip", {"softness": 0.2}), ("above_the_mean", {})]
)
def test_a_function_is_that_of_plain_loops_however_the_step_is_cut(name, parameters):
    exact = by_loops(name)
    for cut in CUTS:
        value, gradient, _ = step(custom(f"{HERE}.{name}", **parameters), cut)
        assert float(value) == pytest.approx(float(exact[0]), rel=1e-12)
        torch.testing.assert_close(gradient, exact[1], rtol=1e-10, atol=1e-14)


def of_groups(log_probs, documents, groups):
    return groups.mean(documents.mean(log_probs))


def of_rewards(log_probs, rewards):
    return -log_probs * rewards


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (f"{HERE}.of_groups", "needs each document's prompt: prime-rl does not tell a loss which"),
        ("tpo", "loss=tpo needs each document's prompt: prime-rl does not tell a loss which"),
        (f"{HERE}.of_rewards", "asks for rewards, which prime-rl does not give a loss"),
    ],
)
def test_what_prime_rl_does_not_tell_a_loss_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        step(custom(loss))


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo", f"{HERE}.soft_clip"])
def test_a_document_without_a_trained_token_adds_nothing_and_has_finite_metrics(loss):
    """Its numbers may be anything; a step of such documents alone has a loss of 0."""
    new, old, advantages, mask = batch()
    mask = mask.clone()
    mask[0] = False
    old[0] = torch.inf
    advantages[0] = torch.nan
    of = new, old, advantages, mask
    value, gradient, metrics = step(custom(loss), ((1, 2, 3, 4, 5),), of=of)
    with_empty, of_both, all_metrics = step(custom(loss), ((0, 1, 2, 3, 4, 5),), of=of)
    assert float(with_empty) == float(value)
    torch.testing.assert_close(of_both[1:], gradient[1:], rtol=0, atol=0)
    assert not of_both[0].any()
    for name, numbers in all_metrics.items():
        assert torch.isfinite(numbers).all(), name
        assert float(numbers[0]) == 0.0
        assert torch.equal(numbers[1:], metrics[name])
    inputs = SimpleNamespace(
        trainer_logprobs=torch.full_like(new[0], torch.nan),
        inference_logprobs=old[0],
        ref_logprobs=None,
        advantages=advantages[:1].expand(len(new[0])),
        loss_mask=mask[0],
        loss_weights=None,
    )
    assert float(policy_loss(inputs, loss).loss) == 0.0


SAME = [
    # (prime-rl's configuration, its parameters, our loss, its parameters, whether values are equal)
    (
        "IPOLossConfig",
        {"eps": 0.012, "max_importance_ratio": 1.05},
        "dppo",
        {"sides": "both", "delta_low": 0.012, "delta_high": 0.012, "ratio_cap": 1.05},
        False,
    ),
    (
        "IcePopLossConfig",
        {"ratio_low": 0.9, "ratio_high": 1.1},
        "icepop",
        {"low": 0.9, "high": 1.1},
        False,
    ),
    (
        "PPOLossConfig",
        {"ratio_low": 0.95, "ratio_high": 1.05},
        "grpo",
        {"epsilon_low": 0.05, "epsilon_high": 0.05},
        True,
    ),
    ("CISPOLossConfig", {"ratio_high": 1.1}, "cispo", {"epsilon_high": 0.1}, True),
    (
        "CISPOLossConfig",
        {"ratio_low": 0.9, "ratio_high": 1.1},
        "cispo",
        {"epsilon_low": 0.1, "epsilon_high": 0.1},
        True,
    ),
]


@pytest.mark.skipif(
    not hasattr(configs, "IcePopLossConfig"), reason="prime-rl of September 2026 or later"
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("theirs", "flags", "loss", "parameters", "equal"), SAME)
def test_prime_rls_losses_have_the_gradients_of_ours(
    theirs, flags, loss, parameters, equal, weighted
):
    """ipo and icepop are -r A there, and -r A p here with r taken as a number: one derivative, two
    values."""
    weights = None
    if weighted:
        generator = torch.Generator().manual_seed(3)
        weights = torch.rand(batch()[0].shape, generator=generator).double()
        weights[:, 2] = 0.0
    config = getattr(configs, theirs)(**flags)
    their_loss, their_gradient, their_metrics = step(config, weights=weights)
    our_loss, our_gradient, _ = step(custom(loss, **parameters), weights=weights)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-10, atol=1e-14)
    assert (float(our_loss) == pytest.approx(float(their_loss), rel=1e-10)) == equal
    acting = their_metrics.get("is_masked", their_metrics.get("is_clipped"))
    assert float((acting > 0).sum()) > 0
