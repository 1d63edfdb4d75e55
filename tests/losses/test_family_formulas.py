"""Each family against its paper's formula (formulas.py), differentiated by autograd in float64."""

import math
from itertools import product

import pytest
import torch
from losses.formulas import ADVANTAGES, FORMULAS, LOG_RATIO, NEW, of_log_probs

from pgtoolkit import families
from pgtoolkit.losses.function import FunctionFamily

ALL_FAMILIES = [
    family()
    for family in families.FAMILIES.values()
    if not issubclass(family, FunctionFamily)  # tests/losses/test_group_families.py has those
]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_loss_and_coefficients_are_those_of_the_paper(formula):
    new = NEW.clone().requires_grad_()
    expected = formula(new, new - (NEW - LOG_RATIO), ADVANTAGES).sum() / 8
    expected.backward()
    loss, gradient, _ = of_log_probs(FORMULAS[formula])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-14)
    torch.testing.assert_close(gradient, new.grad, rtol=1e-13, atol=1e-16)


def test_dppo_masks_and_counts_tokens_by_the_change_of_their_probability():
    """Between small probabilities a ratio of 2.5 is within bounds: the difference counts."""
    new = torch.tensor([0.9, 0.05, 0.2, 0.2], dtype=torch.float64)
    old = torch.tensor([0.6, 0.02, 0.6, 0.6]).double()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    options = {"new": new.log(), "log_ratio": new.log() - old.log(), "advantages": advantages}
    _, gradient, metrics = of_log_probs(families.Dppo(delta_low=0.2, delta_high=0.2), **options)
    expected = torch.tensor([0.0, -0.05 / 0.02, -0.2 / 0.6, 0.0], dtype=torch.float64) / 4
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-12)
    assert metrics["clipped_high_fraction"] == pytest.approx(1 / 3 / 2)
    assert metrics["clipped_low_fraction"] == pytest.approx(1 / 2)
    assert metrics["clipped_ratio_fraction"] == pytest.approx((2 / 3 + 1) / 2)


def test_dppo_bounds_the_binary_kl_of_the_old_to_the_new_policy():
    """From 0.1 to 0.3 it is 0.116, and 0.154 in the other order; from 0.3 to 0.1 the reverse."""
    new = torch.tensor([0.3, 0.1], dtype=torch.float64)
    old = torch.tensor([0.1, 0.3], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    options = {"new": new.log(), "log_ratio": new.log() - old.log(), "advantages": advantages}
    family = families.Dppo(delta_low=0.13, delta_high=0.13, divergence="binary_kl")
    _, gradient, _ = of_log_probs(family, **options)
    expected = torch.tensor([-0.3 / 0.1 / 2, 0.0], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_beyond_20_are_clamped(family, dtype):
    """The loss and the weight of a token are those of 20; a gradient through the log-ratio is 0."""
    for log_ratio, sign in product((-700.0, -25.0, 25.0, 700.0), (1, -1)):
        advantages = torch.full((4,), sign, dtype=dtype)
        ratios = torch.full((4,), log_ratio, dtype=dtype)
        loss, gradient, metrics = of_log_probs(family, NEW[:4].to(dtype), ratios, advantages)
        at_twenty = of_log_probs(family, NEW[:4].to(dtype), ratios.clamp(-20, 20), advantages)
        assert loss == pytest.approx(at_twenty[0], rel=1e-4)
        expected = torch.zeros_like(gradient) if family.slope_of == "log_ratio" else at_twenty[1]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=0)
        assert metrics["max_ratio_new_old"] == pytest.approx(
            at_twenty[2]["max_ratio_new_old"], rel=1e-4
        )


@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda family: family.name)
def test_without_the_check_a_non_finite_number_makes_the_loss_nan(family):
    for broken, place in product((math.nan, math.inf, -math.inf), ("log_ratio", "advantages")):
        vectors = {"log_ratio": LOG_RATIO.clone(), "advantages": ADVANTAGES.clone()}
        vectors[place][1] = broken
        assert math.isnan(of_log_probs(family, **vectors)[0])
