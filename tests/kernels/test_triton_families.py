"""The slopes of loss families in Triton: which families have one, on and beyond the clamps, and all
kernels on a GPU.

Without a GPU the kernels run under Triton's interpreter. test_kernels.py compares them with the
specification.
"""

import pytest
import torch
from builders.losses import DEVICE, FAMILIES, GRADIENT_ERROR, as_floats, relative_error

from pgtoolkit import policy_loss
from pgtoolkit.kernels.triton_families import numbers_of, slope_of
from pgtoolkit.losses.kl import KINDS, KL

BY_TOKEN = [name for name, family in FAMILIES.items() if not family.by_document]


def test_every_family_by_token_has_a_slope():
    for name, family in FAMILIES.items():
        assert (slope_of(family) is not None) == (name in BY_TOKEN)
    # both of cispo have the same
    assert len({slope_of(FAMILIES[name]) for name in BY_TOKEN}) == len(BY_TOKEN) - 1
    assert numbers_of(FAMILIES["grpo"]) == (0.2, 0.25, 1.0, 0.0)
    assert numbers_of(FAMILIES["cispo, no lower bound"]) == (1.0, 0.2, 0.0, 0.0)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_slopes_of_large_log_ratios_match_those_of_pytorch(name):
    """Beyond the clamp and at it, under advantages of both signs and of none, by labels of several
    log-probs."""
    log_ratio = torch.tensor(
        [25.0, 20.0, 0.25, -0.25, -20.0, -25.0], device=DEVICE
    ).repeat_interleave(6)
    advantages = torch.tensor([1.0, 2.0, -1.0, -0.5, 0.0, 0.0], device=DEVICE).repeat(6)
    labels = torch.arange(36, device=DEVICE) % 2
    index = torch.arange(36, device=DEVICE)
    rows = torch.zeros(36, 2, device=DEVICE)
    rows[18:, 0] = 1.5
    gradients = []
    for impl in ("triton", "torch"):
        logits = rows.clone().requires_grad_()
        # Of two equal tokens the log-prob is the same in both implementations, and a log-ratio of
        # 20 is 20.
        old = logits.detach().log_softmax(-1).gather(1, labels[:, None])[:, 0] - log_ratio
        # The largest of the old log-probs are above 0.
        options = {
            "loss": FAMILIES[name],
            "aggregation": "token_mean",
            "impl": impl,
            "check_finite": False,
        }
        policy_loss(logits, labels, old, advantages, index, **options).loss.backward()
        gradients.append(logits.grad)
    assert torch.isfinite(gradients[0]).all()
    torch.testing.assert_close(*gradients, rtol=2e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [(torch.bfloat16, 151936), (torch.float16, 4096), (torch.float32, 4097)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu(name, dtype, vocabulary):
    """Rows that several programs share, that one keeps, and that are read twice: against float64 on
    the same logits.

    In bfloat16 under a penalty, which the first of these kernels has a formula for.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    lengths = torch.tensor([37, 1, 64, 90, 8], device=DEVICE)
    index = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)
    logits = (2 * torch.randn(len(index), vocabulary, generator=generator, device=DEVICE)).to(dtype)
    labels = torch.randint(0, vocabulary, (len(index),), generator=generator, device=DEVICE)
    new = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    scale = 0.02 if name == "vespo" else 0.15
    old, ref = (
        new + by * torch.randn(len(index), generator=generator, device=DEVICE)
        for by in (scale, 0.3)
    )
    advantages = torch.randn(len(lengths), generator=generator, device=DEVICE)[index]
    labels[::5] = -1
    options = {"loss": FAMILIES[name], "aggregation": "token_mean", "metrics": "with_entropy"}
    if dtype == torch.bfloat16:
        options["kl"] = KL(KINDS[[*FAMILIES].index(name) % 4], 0.4)
    results = []
    for values, impl, kind in (
        (logits, "triton", torch.float32),
        (logits.double(), "torch", torch.float64),
    ):
        leaf, vectors = (
            values.clone().requires_grad_(),
            [x.float().to(kind) for x in (old, advantages, ref)],
        )
        given = options | ({"ref_log_probs": vectors[2]} if "kl" in options else {})
        out = policy_loss(leaf, labels, *vectors[:2], index, impl=impl, **given)
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad, as_floats(out.metrics)))
    (loss_found, gradient, metrics), (loss_expected, exact, wanted) = results
    assert float(loss_found) == pytest.approx(float(loss_expected), rel=1e-4, abs=1e-5)
    assert relative_error(gradient, exact) < GRADIENT_ERROR[dtype] * 1.5
    # A token may lie so close to a bound that rounding of its log-prob decides: one of them, at
    # most.
    for key, value in wanted.items():
        allowed = {"abs": 1 / len(labels)} if "fraction" in key else {"rel": 1e-3, "abs": 1e-4}
        assert metrics[key] == pytest.approx(value, **allowed), key
