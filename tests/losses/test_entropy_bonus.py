"""The entropy bonus against the specification: every implementation and cut, with every family."""

import math

import pytest
import torch
from builders.cuts import CUTS, assert_same, axis_groups, evaluate, expected
from builders.losses import (
    AGGREGATIONS,
    DEVICE,
    EVERY_LOSS,
    GRADIENT_ERROR,
    OBJECTIVES,
    PAIRS,
    SMOOTH,
    TEMPERATURE,
    make_case,
    make_head_case,
    options_of,
    relative_error,
)
from builders.threads import on_ranks

from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.kernels import losses
from pgtoolkit.losses import reference
from pgtoolkit.losses.families import FAMILIES

COEFFICIENT = 0.3


def with_bonus(case, loss, aggregation, **more) -> dict:
    return options_of(
        case, loss, aggregation, **{"temperature": TEMPERATURE, "entropy_coefficient": COEFFICIENT} | more
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_specification_is_what_autograd_makes_of_the_formula(aggregation):
    """loss(coefficient) - loss(0) = -coefficient sum w H, with the weights read off a REINFORCE gradient."""
    case = make_case(seed=5, temperature=TEMPERATURE)
    leaf = case.logits.clone().requires_grad_()
    rows = (leaf / TEMPERATURE).log_softmax(-1)
    new = rows.gather(-1, case.labels.clamp(min=0)[:, None])[:, 0]
    options = with_bonus(case, "reinforce", aggregation)
    ones = torch.ones_like(case.advantages)
    plain = policy_loss(
        leaf, case.labels, new.detach(), ones, case.document_index, **options | {"entropy_coefficient": 0}
    )
    # With advantages of 1 the loss is minus the sum of w log p: its derivative by log p is minus the weight.
    score = torch.zeros_like(rows).scatter(-1, case.labels.clamp(min=0)[:, None], 1.0) - rows.detach().exp()
    (by_logits,) = torch.autograd.grad(plain.loss, leaf)
    weights = torch.where(case.labels >= 0, -(by_logits * score).sum(-1) / (score**2).sum(-1) * TEMPERATURE, 0.0)
    entropy = -(rows.exp() * rows).sum(-1)
    bonus = -COEFFICIENT * (weights * entropy).sum()
    (by_bonus,) = torch.autograd.grad(bonus, leaf)
    tensors = case.logits, case.labels, new.detach(), ones, case.document_index
    found = reference.policy_loss(*tensors, **options)
    assert found.loss == pytest.approx(float((plain.loss + bonus).detach()), rel=1e-12)
    torch.testing.assert_close(found.gradient, by_logits + by_bonus, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_matches_reference(loss, aggregation):
    case = make_case(seed=12, temperature=TEMPERATURE)
    options = with_bonus(case, loss, aggregation, metrics="with_entropy")
    leaf = case.logits.clone().requires_grad_()
    out = policy_loss(leaf, *case.tensors[1:], **options)
    out.loss.backward()
    wanted = reference.policy_loss(*case.tensors, **options)
    assert float(out.loss.detach()) == pytest.approx(wanted.loss, rel=1e-12)
    torch.testing.assert_close(leaf.grad, wanted.gradient, rtol=1e-11, atol=1e-14)
    found = {name: float(value) for name, value in out.metrics.items()}
    assert found == pytest.approx(wanted.metrics, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("loss", "aggregation"), [*PAIRS, ("gmpo", "token_mean"), ("kimi", "sample_mean")])
def test_triton_matches_reference(loss, aggregation, dtype):
    """Also of a scaled loss, in the place of the logits."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    options = with_bonus(case, loss, aggregation, metrics="basic")
    logits = case.logits.to(dtype)
    wanted = reference.policy_loss(logits, *case.tensors[1:], **options)
    tensors = [x.to(DEVICE, torch.float32 if x.is_floating_point() else x.dtype) for x in case.tensors[1:]]
    leaf = logits.clone().to(DEVICE).requires_grad_()
    options["group_index"] = case.group_index.to(DEVICE)
    out = policy_loss(leaf * 1, *tensors, **options, impl="triton", overwrite_logits=True)
    (3 * out.loss).backward()
    assert float(out.loss.detach()) == pytest.approx(wanted.loss, abs=1e-5)
    assert relative_error(leaf.grad, 3 * wanted.gradient) < 1.1 * GRADIENT_ERROR[dtype]
    assert "entropy" in out.metrics


def fused(problem, rows, factor=3, **options):
    leaves = problem.leaves()
    options["group_index"] = problem.case.group_index.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
        out = linear_policy_loss(*leaves[:2], *problem.tensors, bias=leaves[2], **options)
    (factor * out.loss).backward()
    return out, leaves


@pytest.mark.parametrize("rows", [1, 4, 7, 1000])
@pytest.mark.parametrize(("loss", "aggregation", "level"), OBJECTIVES)
def test_fused_head(loss, aggregation, level, rows):
    """Documents longer than a chunk, of zero advantage, and clipped."""
    problem = make_head_case()
    wanted = expected(
        problem, True, loss, aggregation, "with_entropy" if level == "basic" else level, entropy_coefficient=COEFFICIENT
    )
    out, leaves = fused(problem, rows, **with_bonus(problem.case, loss, aggregation, metrics=level))
    assert float(out.loss.detach()) == pytest.approx(wanted.loss, rel=1e-12)
    for leaf, gradient in zip(leaves, wanted.gradients, strict=True):
        assert relative_error(leaf.grad, 3 * gradient) < 1e-12
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(wanted.metrics, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_fused_head_in_half_precision(loss, dtype, fp32_logits):
    """A mean over a step makes coefficients that float16 has no room for: they are wide until the loss is scaled."""
    problem, factor = make_head_case(dtype=dtype), 1e5
    wide = with_bonus(problem.case, loss, "constant", divisor=factor) | {"epsilon_low": 0.9, "epsilon_high": 9.0}
    out, leaves = fused(problem, 4, factor, fp32_logits=fp32_logits, **wide)
    del wide["temperature"]
    value, gradients, _ = problem.expected(factor, **wide)
    tolerance = {torch.bfloat16: 1e-2 if fp32_logits else 3e-2, torch.float16: 3e-3}[dtype]
    assert relative_error(out.loss.detach(), value) < tolerance
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert relative_error(leaf.grad, gradient) < tolerance


@pytest.mark.parametrize(("loss", "aggregation"), [("grpo", "token_mean"), ("gspo", "sample_mean")])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_over_ranks_and_micro_batches(cut, is_fused, loss, aggregation, monkeypatch):
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: min(3, columns))
    problem, cut = make_head_case(), CUTS[cut]
    arguments = problem, is_fused, loss, aggregation, "with_entropy"

    def run(rank):
        return evaluate(axis_groups(cut.sizes), cut, *arguments, entropy_coefficient=COEFFICIENT)

    wanted = expected(*arguments, entropy_coefficient=COEFFICIENT)
    assert_same(on_ranks(cut.world_size, run), cut, wanted, is_fused, 1e-12)


@pytest.mark.parametrize("impl", ["torch", "triton", "fused_linear"])
def test_a_uniform_softmax_has_the_largest_entropy_and_no_gradient(impl):
    """With equal logits the bonus is -coefficient log V, and nothing pushes; untrained NaN changes nothing."""
    hidden = torch.zeros(4, 2, requires_grad=True, device=DEVICE)
    weight = torch.ones(9, 2, device=DEVICE, requires_grad=True)
    labels = torch.tensor([3, 1, -1, 0], device=DEVICE)
    zeros = torch.where(labels < 0, math.nan, 0.0)
    old = zeros - math.log(9)
    out = linear_policy_loss(
        hidden, weight, labels, old, zeros, labels.clamp(max=0, min=0), loss="grpo", entropy_coefficient=0.5, impl=impl
    )
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(-0.5 * math.log(9), rel=1e-6)
    assert hidden.grad.abs().max() < 1e-7


def test_a_coefficient_of_zero_changes_no_bit():
    for impl in ("torch", "triton", "fused_linear"):
        for loss in SMOOTH if impl == "triton" else FAMILIES:  # in one pass over the logits, and in two
            results = []
            for options in ({}, {"entropy_coefficient": 0.0}):
                leaves = make_head_case(dtype=torch.float32).leaves()
                out = linear_policy_loss(
                    *leaves[:2],
                    *make_head_case(dtype=torch.float32).tensors,
                    loss=loss,
                    impl=impl,
                    metrics="basic",
                    **options,
                )
                out.loss.backward()
                results.append([out.loss.detach(), leaves[0].grad, leaves[1].grad, *out.metrics.values()])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("coefficient", [-0.1, math.nan, math.inf, "0.1", True])
def test_a_coefficient_that_means_nothing_is_refused(coefficient):
    with pytest.raises(ValueError, match="entropy_coefficient needs a finite number >= 0"):
        policy_loss(*make_case().tensors, entropy_coefficient=coefficient)
