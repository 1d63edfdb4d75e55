"""The penalty against a reference policy: autograd of its formulas, its clamps, and refused
references.

test_losses.py and the tests of kernels compare penalties and the entropy bonus with the reference
implementation.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.losses import (
    DEVICE,
    EVERY_LOSS,
    TYPICAL_LOSSES,
    make_case,
    make_head_case,
    objective_of,
)

from pgtoolkit import kl, linear_policy_loss, policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.losses.kl import FULL_KINDS, KINDS

COEFFICIENT = 0.4
KL = {kind: kl.KL(kind, coefficient=COEFFICIENT) for kind in KINDS}
FORMULAS = {
    "k1": lambda p, o, f: p - f,
    "k2": lambda p, o, f: (p - f) ** 2 / 2,
    "k3": lambda p, o, f: (f - p).clamp(-20, 20).exp() - (f - p).clamp(-20, 20) - 1,
    "k3_ratio": lambda p, o, f: FORMULAS["k3"](p, o, f) * (p - o).clamp(-20, 20).exp(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_penalty_and_gradient_match_autograd_of_the_formula(impl, kind):
    """Distances and log-ratios lie beyond 20 on both sides."""
    case = make_case(seed=3)
    ref = case.ref_log_probs
    old = case.old_log_probs.clone()
    trained = (case.labels >= 0).nonzero()[:, 0]
    new = policy_loss(*case.tensors).log_probs
    for number, (by, beyond) in enumerate([(ref, 21), (ref, -30), (old, 21), (old, -30)]):
        by[trained[number]] = new[trained[number]] - beyond
    leaf = case.logits.clone().requires_grad_()
    tensors = leaf, case.labels, old, torch.zeros_like(old), case.document_index
    options = {
        "loss": "reinforce",
        "aggregation": "token_mean",
        "kl": KL[kind],
        "ref_log_probs": ref,
        "impl": impl,
    }
    # Some of the distances take log-probs above 0, which the check would refuse.
    out = policy_loss(*tensors, **options, check_finite=False)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    rows = leaf.log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0][trained]
    expected = COEFFICIENT * FORMULAS[kind](rows, old[trained], ref[trained]).mean()
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, leaf)[0], rtol=1e-9, atol=1e-13
    )
    assert torch.isfinite(gradient).all()


def _jsd(p: torch.Tensor, f: torch.Tensor, beta: float) -> torch.Tensor:
    m = ((1 - beta) * p.exp() + beta * f.exp()).log()
    return beta * f.exp() * (f - m) + (1 - beta) * p.exp() * (p - m)


FULL = {
    "full_reverse": lambda p, f: p.exp() * (p - f),
    "full_forward": lambda p, f: f.exp() * (f - p),
    "full_jsd": lambda p, f: _jsd(p, f, 0.5),
}
"""The term of a token of the vocabulary, whose log-probs are p, and f in the reference."""


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", FULL_KINDS)
@pytest.mark.parametrize("impl", ["torch", "reference", "triton"])
def test_the_full_kl_and_its_gradient_match_autograd_of_the_formula(impl, kind):
    """Both agree at one token, and both give one token of the vocabulary a probability of 0."""
    case = make_case(seed=3)
    dtype = torch.float32 if impl == "triton" else torch.float64
    ref = case.ref_logits
    agree = int((case.labels >= 0).nonzero()[0])
    case.labels[case.labels == 12] = 0
    case.logits[:, 12] = ref[:, 12] = -math.inf
    ref[agree] = case.logits[agree] + 3
    leaf = case.logits.clone().requires_grad_()
    tensors = [x.to(DEVICE, dtype) for x in (leaf.detach(), ref)]
    tensors[0].requires_grad_()
    options = {
        "loss": "reinforce",
        "aggregation": "token_mean",
        "kl": kl.KL(kind, COEFFICIENT),
        "metrics": "basic",
    }
    arguments = tensors[0], *case.on_device(dtype)
    arguments[3].zero_()
    out = policy_loss(*arguments, **options, ref_logits=tensors[1], impl=impl, temperature=1.7)
    out.loss.backward()
    trained = case.labels >= 0
    rows = [(x[trained][:, :12] / 1.7).log_softmax(-1) for x in (leaf, ref)]
    values = FULL[kind](*rows).sum(-1)
    expected = COEFFICIENT * values.mean()
    assert float(out.loss.detach()) == pytest.approx(
        float(expected.detach()), rel=1e-5 if impl == "triton" else 1e-12
    )
    exact = torch.autograd.grad(expected, leaf)[0]
    gradient = tensors[0].grad.cpu().double()
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-7 if impl == "triton" else 1e-15)
    assert gradient[agree].abs().max() < (1e-7 if impl == "triton" else 1e-16)
    documents = case.document_index[trained]
    shares = torch.bincount(documents)[documents] * case.num_documents
    assert float(out.metrics["kl_ref"]) == pytest.approx(
        float((values.detach() / shares).sum()), rel=1e-5
    )


@pytest.mark.parametrize("impl", ["torch", "reference", "fused_linear"])
def test_reverse_kl_refuses_a_reference_with_a_probability_of_zero(impl):
    """The reverse KL is infinite, the forward KL and the divergence from a mixture finite."""
    problem = make_head_case()
    ref = problem.case.ref_logits.to(DEVICE)
    bias = torch.zeros(12, dtype=torch.float64, device=DEVICE)
    bias[4] = -math.inf

    def loss(kind: str, **options: object) -> torch.Tensor:
        options |= {"impl": impl, "kl": kl.KL(kind, COEFFICIENT)}
        if impl != "fused_linear":
            logits = problem.case.logits.to(DEVICE)
            return policy_loss(logits, *problem.tensors, ref_logits=ref + bias, **options).loss
        head = {"ref_lm_head_weight": torch.eye(12).to(ref), "ref_bias": bias}
        hidden, weight, _ = problem.leaves()
        return linear_policy_loss(
            hidden, weight, *problem.tensors, ref_hidden=ref, **head, **options
        ).loss

    reverse, forward, jsd = FULL_KINDS
    with pytest.raises(DataError, match=r"^a full KL needs .* \(got inf in document 0"):
        loss(reverse)
    assert torch.isnan(loss(reverse, check_finite=False))
    assert torch.isfinite(loss(forward))
    assert torch.isfinite(loss(jsd))


# Triton's interpreter multiplies infinity by 0.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_slopes_in_triton_match_the_objective_at_and_beyond_the_clamps(kind):
    """Near 0 a difference of exp would have no digits left. Non-finite references give NaN."""
    distance = torch.tensor(
        [25.0, -25.0, 20.0, -20.0, 3.0, -3.0, 0.11, -0.09, 1e-3, -1e-4, 0.0], device=DEVICE
    )
    log_ratio = torch.tensor(
        [0.5, -25.0, 25.0, -0.5, 20.0, -20.0, 0.1, 0.2, -0.1, 0.3, 0.0], device=DEVICE
    )
    labels = torch.zeros(11, dtype=torch.int64, device=DEVICE)
    index = torch.arange(11, device=DEVICE)
    new = torch.full((11,), -math.log(2), device=DEVICE)  # The vocabulary has two equal tokens.
    tensors = labels, new - log_ratio, torch.zeros_like(new), index
    options = {"loss": "reinforce", "aggregation": "token_mean", "kl": KL[kind], "impl": "triton"}

    def coefficients(ref: torch.Tensor) -> torch.Tensor:
        """Return the derivative of the loss by each log-prob."""
        logits = torch.zeros(11, 2, device=DEVICE, requires_grad=True)
        # Some log-probs are above 0, which the check would refuse.
        out = policy_loss(logits, *tensors, **options, ref_log_probs=ref, check_finite=False)
        out.loss.backward()
        assert torch.equal(out.log_probs, new)
        return 2 * logits.grad[:, 0]  # A log-prob's derivative by its logit is one half.

    ref = new - distance
    # From the float32 differences: a distance of exactly 20 stays 20.
    old_log_probs, exact_ref = (new.double() - (new - x).double() for x in (tensors[1], ref))
    objective = objective_of(
        (labels, old_log_probs, torch.zeros_like(exact_ref), index), "reinforce", ("token_mean",)
    )
    penalties = replace(objective.penalties, kl=KL[kind], ref_log_probs=exact_ref)
    exact = replace(objective, penalties=penalties).coefficients(new.double())
    torch.testing.assert_close(coefficients(ref).double(), exact, rtol=1e-5, atol=0)
    for wrong in (math.nan, math.inf, -math.inf):
        slopes = coefficients(torch.where(index == 4, wrong, ref))
        assert torch.isnan(slopes).tolist() == (index == 4).tolist()


@pytest.mark.parametrize("impl", ["torch", "triton", "fused_linear"])
def test_measuring_without_a_penalty_or_correction_changes_no_bit(impl):
    """Sampling log-probs without a correction, a reference without a penalty, and an entropy
    coefficient of 0 only add metrics."""
    problem = make_head_case(dtype=torch.float32)
    more = {
        "sampling_log_probs": problem.case.sampling_log_probs,
        "ref_log_probs": problem.case.ref_log_probs,
    }
    more = {name: x.to(DEVICE, torch.float32) for name, x in more.items()} | {
        "entropy_coefficient": 0.0
    }
    of_sampling = {"kl_old_sampling", "difference_old_sampling", "max_difference_old_sampling"}
    for loss in EVERY_LOSS if impl != "triton" else TYPICAL_LOSSES:
        results = []
        names = []
        for options in ({}, more):
            hidden, weight, _ = problem.leaves()
            out = linear_policy_loss(
                hidden, weight, *problem.tensors, loss=loss, impl=impl, metrics="basic", **options
            )
            out.loss.backward()
            names.append(set(out.metrics))
            results.append(
                [
                    out.loss.detach(),
                    hidden.grad,
                    weight.grad,
                    *(out.metrics[name] for name in names[0]),
                ]
            )
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert names[1] - names[0] == of_sampling | {"clipped_sampling_fraction", "kl_ref"}


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["torch", "fused_linear"])
def test_the_error_of_a_non_finite_reference_names_the_document(impl, broken):
    problem = make_head_case()
    case = problem.case
    ref = case.ref_log_probs
    ref[int((case.document_index == 3).nonzero()[2])] = broken
    leaves = problem.leaves()
    options = {"kl": KL["k3"], "ref_log_probs": ref.to(DEVICE), "impl": impl}
    with pytest.raises(
        DataError, match=f"^ref_log_probs needs finite .* \\(got {broken} in document 3\\). Mask"
    ):
        linear_policy_loss(*leaves[:2], *problem.tensors, **options)
    for kind in KINDS:
        out = linear_policy_loss(
            *leaves[:2], *problem.tensors, **options | {"kl": KL[kind]}, check_finite=False
        )
        assert math.isnan(out.loss.detach())
