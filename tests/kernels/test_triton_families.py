"""Every loss family by token has a slope in Triton, which is that of PyTorch also where log-ratios
are clamped. On a GPU all kernels match float64.

Without a GPU the kernels run under Triton's interpreter. test_kernels.py compares them with the
reference.
"""

import math

import pytest
import torch
from builders.losses import DEVICE, FAMILIES, GRADIENT_ERROR, as_floats, relative_error

from pgtoolkit import policy_loss
from pgtoolkit.kernels.triton_families import numbers_of, slope_of
from pgtoolkit.losses.families import Dppo, Icepop
from pgtoolkit.losses.kl import KINDS, KL

BY_TOKEN = [name for name, family in FAMILIES.items() if not family.by_document]


def test_every_family_by_token_has_a_slope():
    for name, family in FAMILIES.items():
        assert (slope_of(family) is not None) == (name in BY_TOKEN)
    # Both variants of cispo have the same slope, and dppo's of one and of both sides.
    assert len({slope_of(FAMILIES[name]) for name in BY_TOKEN}) == len(BY_TOKEN) - 3
    assert numbers_of(FAMILIES["grpo"]) == (0.2, 0.25, 1.0, 0.0)
    assert numbers_of(FAMILIES["cispo, no lower bound"]) == (1.0, 0.2, 0.0, 0.0)
    assert numbers_of(FAMILIES["dppo, both sides"]) == (0.01, 0.008, 1.1, math.inf)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_slopes_of_large_log_ratios_match_those_of_pytorch(name):
    """Log-ratios lie beyond the clamp of 20, on it and within; advantages have both signs or are 0;
    labels have several log-probs."""
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
        # Two equal tokens have the same log-prob in both implementations, so that a log-ratio of 20
        # is exactly 20.
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


AT_BOUNDS = {
    "icepop": (Icepop(low=1.0, high=1.0), (0.0,), (1e-4, -1e-4)),
    "dppo, square": (
        Dppo(0.125, 0.125, divergence="squared_log_ratio", sides="both"),
        (0.5, -0.5),
        (0.5001, -0.5001),
    ),
}
"""Family, log-ratios at its bounds, log-ratios beyond them."""


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", AT_BOUNDS)
def test_a_token_at_a_bound_keeps_its_gradient(name, impl):
    family, at_bounds, beyond = AT_BOUNDS[name]
    log_ratio = torch.tensor([*at_bounds, *beyond], device=DEVICE)
    count = len(log_ratio)
    # The log-prob of the label is -200, so that log-ratios at the bounds are exact.
    logits = torch.tensor([-200.0, 0.0], device=DEVICE).repeat(count, 1).requires_grad_()
    policy_loss(
        logits,
        torch.zeros(count, dtype=torch.int64, device=DEVICE),
        -200.0 - log_ratio,
        torch.ones(count, device=DEVICE),
        torch.arange(count, device=DEVICE),
        loss=family,
        aggregation="token_mean",
        impl=impl,
    ).loss.backward()
    kept = logits.grad[:, 0] != 0
    assert kept.tolist() == [True] * len(at_bounds) + [False] * len(beyond)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [(torch.bfloat16, 151936), (torch.float16, 4096), (torch.float32, 4097)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu_loss_gradient_and_metrics_match_float64(name, dtype, vocabulary):
    """Rows are shared by several programs, kept by a single program, or read twice.

    In bfloat16 there is also a penalty, for which the kernel of shared rows has a formula.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    lengths = torch.tensor([37, 1, 64, 90, 8], device=DEVICE)
    index = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)
    logits = (2 * torch.randn(len(index), vocabulary, generator=generator, device=DEVICE)).to(dtype)
    labels = torch.randint(0, vocabulary, (len(index),), generator=generator, device=DEVICE)
    new = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    scale = 0.02 if name == "vespo" else 0.15
    old = new + scale * torch.randn(len(index), generator=generator, device=DEVICE)
    ref = new + 0.3 * torch.randn(len(index), generator=generator, device=DEVICE)
    advantages = torch.randn(len(lengths), generator=generator, device=DEVICE)[index]
    labels[::5] = -1
    options = {"loss": FAMILIES[name], "aggregation": "token_mean", "metrics": "with_entropy"}
    if dtype == torch.bfloat16:
        options["kl"] = KL(KINDS[[*FAMILIES].index(name) % 4], 0.4)
    results = []
    for values, impl, vector_dtype in (
        (logits, "triton", torch.float32),
        (logits.double(), "torch", torch.float64),
    ):
        leaf = values.clone().requires_grad_()
        vectors = [x.float().to(vector_dtype) for x in (old, advantages, ref)]
        reference = {"ref_log_probs": vectors[2]} if "kl" in options else {}
        out = policy_loss(leaf, labels, *vectors[:2], index, impl=impl, **options, **reference)
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad, as_floats(out.metrics)))
    (loss, gradient, metrics), (exact_loss, exact_gradient, exact_metrics) = results
    assert float(loss) == pytest.approx(float(exact_loss), rel=1e-4, abs=1e-5)
    assert relative_error(gradient, exact_gradient) < GRADIENT_ERROR[dtype] * 1.5
    # A single token may be so close to a bound that the rounding of its log-prob decides.
    for key, value in exact_metrics.items():
        allowed = {"abs": 1 / len(labels)} if "fraction" in key else {"rel": 1e-3, "abs": 1e-4}
        assert metrics[key] == pytest.approx(value, **allowed), key
