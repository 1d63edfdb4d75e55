"""The penalty against a reference and the entropy bonus: autograd of their formulas, clamps, and what costs nothing.

Against the specification they are compared with everything else, in test_losses.py and the tests of kernels.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.losses import (
    AGGREGATIONS,
    DEVICE,
    EVERY_LOSS,
    GRADIENT_ERROR,
    LOSSES,
    PARAMETERS,
    TEMPERATURE,
    Choice,
    make_case,
    make_head_case,
    objective_of,
    relative_error,
)

from pgtoolkit import kl, linear_policy_loss, policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses, triton_objective
from pgtoolkit.losses.kl import KINDS
from pgtoolkit.losses.objective import Objective

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
def test_value_and_gradient_are_those_of_the_formula(impl, kind):
    """By autograd in float64, with distances and log-ratios beyond 20 on both sides."""
    case = make_case(seed=3)
    ref, old = case.ref_log_probs, case.old_log_probs.clone()
    trained = (case.labels >= 0).nonzero()[:, 0]
    new = policy_loss(*case.tensors).log_probs
    for number, (by, beyond) in enumerate([(ref, 21), (ref, -30), (old, 21), (old, -30)]):
        by[trained[number]] = new[trained[number]] - beyond
    leaf = case.logits.clone().requires_grad_()
    tensors = leaf, case.labels, old, torch.zeros_like(old), case.document_index
    options = {"loss": "reinforce", "aggregation": "token_mean", "kl": KL[kind], "ref_log_probs": ref, "impl": impl}
    out = policy_loss(*tensors, **options, check_finite=False)  # some of the distances take log-probs above 0
    (found,) = torch.autograd.grad(out.loss, leaf)
    rows = leaf.log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0][trained]
    wanted = COEFFICIENT * FORMULAS[kind](rows, old[trained], ref[trained]).mean()
    assert float(out.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaf)[0], rtol=1e-9, atol=1e-13)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_bonus_is_what_autograd_makes_of_the_formula(aggregation):
    """loss(coefficient) - loss(0) = -coefficient sum w H, with the weights read off a REINFORCE gradient."""
    case, ones = make_case(seed=5, temperature=TEMPERATURE), torch.ones(32, dtype=torch.float64)
    leaf = case.logits.clone().requires_grad_()
    rows = (leaf / TEMPERATURE).log_softmax(-1)
    case = replace(case, old_log_probs=rows.gather(-1, case.labels.clamp(min=0)[:, None])[:, 0].detach())
    case = replace(case, advantages=ones)
    choice = Choice("reinforce", aggregation=aggregation, metrics="none", entropy=0.3)
    options = choice.step(case) | {"entropy_coefficient": 0, "temperature": TEMPERATURE}
    plain = policy_loss(leaf, *case.tensors[1:], **options)
    # With advantages of 1 the loss is minus the sum of w log p: its derivative by log p is minus the weight.
    score = torch.zeros_like(rows).scatter(-1, case.labels.clamp(min=0)[:, None], 1.0) - rows.detach().exp()
    (by_logits,) = torch.autograd.grad(plain.loss, leaf)
    weights = torch.where(case.labels >= 0, -(by_logits * score).sum(-1) / (score**2).sum(-1) * TEMPERATURE, 0.0)
    bonus = -0.3 * (weights * -(rows.exp() * rows).sum(-1)).sum()
    (by_bonus,) = torch.autograd.grad(bonus, leaf)
    found = choice.specified(case)
    assert found.loss == pytest.approx(float((plain.loss + bonus).detach()), rel=1e-12)
    torch.testing.assert_close(found.gradient, by_logits + by_bonus, rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times 0, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_triton_on_and_beyond_the_clamps(kind):
    """Values and slopes, near 0 too, where a difference of exp has no digits left; and NaN for what is not finite."""
    distance = torch.tensor([25.0, -25.0, 20.0, -20.0, 3.0, -3.0, 0.11, -0.09, 1e-3, -1e-4, 0.0], device=DEVICE)
    log_ratio = torch.tensor([0.5, -25.0, 25.0, -0.5, 20.0, -20.0, 0.1, 0.2, -0.1, 0.3, 0.0], device=DEVICE)
    labels, index = torch.zeros(11, dtype=torch.int64, device=DEVICE), torch.arange(11, device=DEVICE)
    new = torch.full((11,), -0.5, device=DEVICE)

    def evaluated(evaluate, ref, dtype):
        tensors = labels, (new - log_ratio).to(dtype), torch.zeros_like(new, dtype=dtype), index
        objective = objective_of(tensors, "reinforce", ("token_mean",), dtype=dtype)
        objective = replace(objective, penalties=replace(objective.penalties, kl=KL[kind], ref_log_probs=ref.to(dtype)))
        return evaluate(objective, new.to(dtype), None, "none")[:2]

    found = evaluated(triton_objective.evaluate, new - distance, torch.float32)
    wanted = evaluated(Objective.evaluate, new - distance, torch.float64)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)
    for wrong in (math.nan, math.inf, -math.inf):
        ref = torch.where(index == 4, wrong, new - distance)
        value, coefficients = evaluated(triton_objective.evaluate, ref, torch.float32)
        assert torch.isnan(value)
        assert torch.isnan(coefficients).tolist() == (index == 4).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(("loss", "kind"), [(loss, KINDS[i % 4]) for i, loss in enumerate(EVERY_LOSS)])
def test_on_a_gpu(loss, kind):
    """Rows that several programs share, in bfloat16: against float64 on the same logits."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    index = torch.arange(200, device=DEVICE) // 40
    logits = (2 * torch.randn(200, 151936, generator=draw, device=DEVICE)).bfloat16()
    labels = torch.randint(0, 151936, (200,), generator=draw, device=DEVICE)
    new = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    old, ref = (new + scale * torch.randn(200, generator=draw, device=DEVICE) for scale in (0.02, 0.3))
    advantages = torch.randn(5, generator=draw, device=DEVICE)[index]
    labels[::5] = -1
    options = {"loss": loss, "aggregation": "token_mean", "metrics": "basic", "kl": KL[kind], **PARAMETERS[loss]}
    results = []
    for values, impl, dtype in ((logits, "triton", torch.float32), (logits.double(), "torch", torch.float64)):
        leaf = values.clone().requires_grad_()
        given = labels, old.to(dtype), advantages.to(dtype), index
        out = policy_loss(leaf, *given, ref_log_probs=ref.to(dtype), impl=impl, **options)
        out.loss.backward()
        results.append((float(out.loss.detach()), leaf.grad, float(out.metrics["kl_ref"])))
    (value, gradient, distance), (exact_value, exact, exact_distance) = results
    assert value == pytest.approx(exact_value, rel=1e-4, abs=1e-5)
    assert relative_error(gradient, exact) < GRADIENT_ERROR[torch.bfloat16] * 1.5
    assert distance == pytest.approx(exact_distance, rel=1e-3)


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_the_bonus_in_half_precision(loss, dtype, fp32_logits, monkeypatch):
    """A mean over a step makes coefficients that float16 has no room for: they are wide until the loss is scaled."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: 4)
    problem, factor = make_head_case(dtype=dtype), 1e5
    hidden, weight, bias = leaves = problem.leaves()
    wide = {"loss": loss, "epsilon_low": 0.9, "epsilon_high": 9.0, "aggregation": "constant", "divisor": factor}
    wide |= {"entropy_coefficient": 0.3}
    given = {"bias": bias, "temperature": TEMPERATURE, "fp32_logits": fp32_logits}
    out = linear_policy_loss(hidden, weight, *problem.tensors, **given, **wide)
    (factor * out.loss).backward()
    value, gradients, _ = problem.expected(factor, **wide)
    tolerance = {torch.bfloat16: 1e-2 if fp32_logits else 3e-2, torch.float16: 3e-3}[dtype]
    assert relative_error(out.loss.detach(), value) < tolerance
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert relative_error(leaf.grad, gradient) < tolerance


@pytest.mark.parametrize("impl", ["torch", "triton", "fused_linear"])
def test_a_uniform_softmax_has_the_largest_entropy_and_no_gradient(impl):
    """With equal logits the bonus is -coefficient log V, and nothing pushes; untrained NaN changes nothing."""
    hidden = torch.zeros(4, 2, requires_grad=True, device=DEVICE)
    weight = torch.ones(9, 2, device=DEVICE, requires_grad=True)
    labels = torch.tensor([3, 1, -1, 0], device=DEVICE)
    zeros = torch.where(labels < 0, math.nan, 0.0)
    tensors = hidden, weight, labels, zeros - math.log(9), zeros, labels.clamp(max=0, min=0)
    out = linear_policy_loss(*tensors, loss="grpo", entropy_coefficient=0.5, impl=impl)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(-0.5 * math.log(9), rel=1e-6)
    assert hidden.grad.abs().max() < 1e-7


def test_a_reference_that_is_the_policy_costs_nothing():
    """k1, k2 and k3 are 0 there, and the gradients of the last two; k3_ratio as well."""
    case = make_case()
    new = policy_loss(*case.tensors).log_probs
    for kind in KINDS:
        leaf = case.logits.clone().requires_grad_()
        tensors = case.labels, case.old_log_probs, torch.zeros_like(new), case.document_index
        out = policy_loss(leaf, *tensors, loss="grpo", kl=KL[kind], ref_log_probs=new, metrics="basic")
        out.loss.backward()
        assert float(out.loss.detach()) == float(out.metrics["kl_ref"]) == 0
        assert (float(leaf.grad.abs().max()) > 0) is (kind == "k1")


@pytest.mark.parametrize("impl", ["torch", "triton", "fused_linear"])
def test_what_is_measured_alone_changes_no_bit(impl):
    """Sampling log-probs without a correction, a reference without a penalty, a coefficient of 0."""
    problem = make_head_case(dtype=torch.float32)
    more = {"sampling_log_probs": problem.case.sampling_log_probs, "ref_log_probs": problem.case.ref_log_probs}
    more = {name: x.to(DEVICE, torch.float32) for name, x in more.items()} | {"entropy_coefficient": 0.0}
    of_sampling = {"kl_old_sampling", "difference_old_sampling", "max_difference_old_sampling"}
    for loss in EVERY_LOSS if impl != "triton" else LOSSES:
        results, names = [], []
        for options in ({}, more):
            hidden, weight, _ = problem.leaves()
            out = linear_policy_loss(hidden, weight, *problem.tensors, loss=loss, impl=impl, metrics="basic", **options)
            out.loss.backward()
            names.append(set(out.metrics))
            results.append([out.loss.detach(), hidden.grad, weight.grad, *(out.metrics[name] for name in names[0])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert names[1] - names[0] == of_sampling | {"clipped_sampling_fraction", "kl_ref"}


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["torch", "fused_linear"])
def test_a_reference_that_is_no_number_where_trained_names_the_document(impl, broken):
    problem = make_head_case()
    case, ref = problem.case, problem.case.ref_log_probs
    ref[int((case.document_index == 3).nonzero()[2])] = broken
    leaves = problem.leaves()
    options = {"kl": KL["k3"], "ref_log_probs": ref.to(DEVICE), "impl": impl}
    with pytest.raises(DataError, match="ref_log_probs or advantages at a trained position of document 3"):
        linear_policy_loss(*leaves[:2], *problem.tensors, **options)
    for kind in KINDS:
        out = linear_policy_loss(*leaves[:2], *problem.tensors, **options | {"kl": KL[kind]}, check_finite=False)
        assert math.isnan(out.loss.detach())


@pytest.mark.parametrize(("kind", "coefficient"), [("k4", 0.1), ("k3", 0), ("k3", math.nan), ("none", 0.1)])
def test_a_penalty_that_means_nothing_is_refused(kind, coefficient):
    with pytest.raises(ValueError, match=r"unknown|needs a finite number > 0"):
        kl.KL(kind, coefficient)
