"""The penalty against a reference: every kind against the specification, autograd and every cut."""

import math
from dataclasses import replace

import pytest
import torch
from builders.cuts import CUTS, assert_same, axis_groups, evaluate, expected
from builders.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    DEVICE,
    EVERY_LOSS,
    GRADIENT_ERROR,
    OBJECTIVES,
    PARAMETERS,
    TEMPERATURE,
    corrected,
    make_case,
    make_head_case,
    objective_of,
    options_of,
    relative_error,
)
from builders.threads import on_ranks

from pgtoolkit import kl, linear_policy_loss, log_prob_loss, policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses, triton_objective
from pgtoolkit.losses import reference
from pgtoolkit.losses.kl import KINDS
from pgtoolkit.losses.objective import Objective

COEFFICIENT = 0.4
KL = {kind: kl.KL(kind, coefficient=COEFFICIENT) for kind in KINDS}
# Each family, each aggregation and each kind, but not each with each: that is for the comparison with the reference.
EACH = [(*objective, KINDS[(i + turn) % 4]) for turn in (0, 1) for i, objective in enumerate(OBJECTIVES)]


def ref_of(case) -> torch.Tensor:
    """Log-probs about as far from the old ones as these are from the new; NaN where nothing is trained."""
    generator = torch.Generator().manual_seed(8)
    ref = case.old_log_probs + 0.3 * torch.randn(len(case.labels), generator=generator, dtype=torch.float64)
    return torch.where(case.labels < 0, torch.nan, ref)


def with_reference(case, loss, aggregation, **more) -> dict:
    return options_of(case, loss, aggregation, temperature=TEMPERATURE, ref_log_probs=ref_of(case), **more)


def specified(logits, case, kind, options) -> reference.Reference:
    return reference.policy_loss(logits, *case.tensors[1:], **options, kl=kind, kl_coefficient=COEFFICIENT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_matches_reference(loss, aggregation, kind):
    """Together with an entropy bonus."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    options = with_reference(case, loss, aggregation, metrics="with_entropy", entropy_coefficient=0.2)
    leaf = case.logits.clone().requires_grad_()
    out = policy_loss(leaf, *case.tensors[1:], **options, kl=KL[kind])
    out.loss.backward()
    wanted = specified(case.logits, case, kind, options)
    assert float(out.loss.detach()) == pytest.approx(wanted.loss, rel=1e-12)
    torch.testing.assert_close(leaf.grad, wanted.gradient, rtol=1e-11, atol=1e-14)
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(wanted.metrics, rel=1e-10, abs=1e-14)
    assert float(out.metrics["kl_ref"]) > 0.01


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
    ref, old = ref_of(case).clone(), case.old_log_probs.clone()
    trained = (case.labels >= 0).nonzero()[:, 0]
    new = policy_loss(*case.tensors).log_probs
    for number, (by, beyond) in enumerate([(ref, 21), (ref, -30), (old, 21), (old, -30)]):
        by[trained[number]] = new[trained[number]] - beyond
    leaf = case.logits.clone().requires_grad_()
    tensors = case.labels, old, torch.zeros_like(old), case.document_index
    out = policy_loss(
        *(leaf, *tensors),
        **{"loss": "reinforce", "aggregation": "token_mean", "kl": KL[kind], "ref_log_probs": ref, "impl": impl},
        check_finite=False,  # some of the distances take log-probs above 0
    )
    (found,) = torch.autograd.grad(out.loss, leaf)
    rows = leaf.log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0][trained]
    wanted = COEFFICIENT * FORMULAS[kind](rows, old[trained], ref[trained]).mean()
    assert float(out.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaf)[0], rtol=1e-9, atol=1e-13)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("loss", "aggregation", "level", "kind", "impl", "dtype"),
    [
        # Rounded logits are another matter than the family: one kind of each pass.
        *((*each, "triton", torch.float32) for each in EACH),
        *((*each, "triton", torch.bfloat16) for each in EACH[:4]),
    ],
)
def test_triton_matches_reference(loss, aggregation, level, kind, impl, dtype):
    case = make_case(seed=12, temperature=TEMPERATURE)
    options = with_reference(case, loss, aggregation, metrics=level)
    logits = case.logits.to(dtype)
    wanted = specified(logits, case, kind, options)
    moved = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    tensors = [x.to(DEVICE, torch.float32 if x.is_floating_point() else x.dtype) for x in case.tensors[1:]]
    leaf = logits.clone().to(DEVICE).requires_grad_()
    out = policy_loss(leaf, *tensors, **moved, kl=KL[kind], impl=impl)
    (3 * out.loss).backward()
    assert float(out.loss.detach()) == pytest.approx(wanted.loss, rel=1e-5, abs=1e-5)
    assert relative_error(leaf.grad, 3 * wanted.gradient) < 1.1 * GRADIENT_ERROR[dtype]
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(wanted.metrics, rel=1e-3, abs=1e-3)


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


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize(("loss", "aggregation", "level", "kind"), EACH)
def test_fused_head(loss, aggregation, level, kind, rows, monkeypatch):
    """A document of zero advantage is pulled to the reference, too."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
    problem = make_head_case()
    options = with_reference(problem.case, loss, aggregation, metrics=level)
    by_logits = specified(problem.logits, problem.case, kind, options)
    leaves = problem.leaves()
    counted = {
        "num_documents": 6,
        **{k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()},
    }
    out = linear_policy_loss(*leaves[:2], *problem.tensors, bias=leaves[2], kl=KL[kind], **counted)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(by_logits.loss, rel=1e-12)
    g = by_logits.gradient
    for leaf, gradient in zip(leaves, (g @ problem.weight, g.T @ problem.hidden, g.sum(0)), strict=True):
        assert relative_error(leaf.grad, gradient) < 1e-12
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(by_logits.metrics, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(
    ("loss", "kind", "fused"), [("grpo", "k3", False), ("gspo", "k3_ratio", True), ("cispo", "k2", True)]
)
@pytest.mark.parametrize("cut", CUTS)
def test_over_ranks_and_micro_batches(cut, loss, kind, fused, monkeypatch):
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: min(3, columns))
    problem, cut = make_head_case(), CUTS[cut]
    arguments, ref = (problem, fused, loss, "prompt_mean", "basic"), ref_of(problem.case)

    def run(rank):
        return evaluate(axis_groups(cut.sizes), cut, *arguments, {"ref_log_probs": ref}, kl=KL[kind])

    wanted = expected(*arguments, kl=kind, kl_coefficient=COEFFICIENT, ref_log_probs=ref)
    assert_same(on_ranks(cut.world_size, run), cut, wanted, fused, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_given(kind):
    """The same loss, derivative and metrics from log-probs, with NaN at masked positions of every vector."""
    case = make_case(seed=12)
    leaf = case.logits.clone().requires_grad_()
    options = {"loss": "gspo", "metrics": "basic", "kl": KL[kind], "ref_log_probs": ref_of(case)}
    wanted = policy_loss(leaf, *case.tensors[1:], **options)
    new = leaf.log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0]
    mask = case.labels >= 0
    new = torch.where(mask, new, torch.nan)
    out = log_prob_loss(new, *case.tensors[2:], mask, **options)
    assert float(out.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-14)
    gradients = [torch.autograd.grad(one.loss, leaf, retain_graph=True)[0] for one in (out, wanted)]
    torch.testing.assert_close(gradients[0][mask], gradients[1][mask], rtol=1e-12, atol=1e-15)
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(
        {k: float(v) for k, v in wanted.metrics.items()}
    )


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


def test_a_metric_without_a_penalty():
    case = make_case()
    plain = policy_loss(*case.tensors, metrics="basic")
    with_metric = policy_loss(*case.tensors, metrics="basic", ref_log_probs=ref_of(case))
    assert float(with_metric.loss) == float(plain.loss)
    assert set(with_metric.metrics) - set(plain.metrics) == {"kl_ref"}


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["torch", "fused_linear"])
def test_a_reference_that_is_no_number_where_trained_names_the_document(impl, broken):
    problem = make_head_case()
    case, ref = problem.case, ref_of(problem.case)
    ref[int((case.document_index == 3).nonzero()[2])] = broken
    leaves = problem.leaves()
    options = {"kl": KL["k3"], "ref_log_probs": ref.to(DEVICE), "impl": impl}
    with pytest.raises(DataError, match="ref_log_probs or advantages at a trained position of document 3"):
        linear_policy_loss(*leaves[:2], *problem.tensors, **options)
    for kind in KINDS:
        out = linear_policy_loss(*leaves[:2], *problem.tensors, **options | {"kl": KL[kind]}, check_finite=False)
        assert math.isnan(out.loss.detach())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": KL["k3"]}, "kl needs ref_log_probs"),
        ({"kl": "k3", "ref_log_probs": torch.zeros(32)}, "kl needs a pgtoolkit.kl.KL"),
        ({"ref_log_probs": torch.zeros(32)}, "no effect without kl"),
        ({"kl": KL["k3"], "ref_log_probs": torch.zeros(31)}, "ref_log_probs needs one entry per row"),
        ({"kl": KL["k3"], "ref_log_probs": torch.zeros(32).long()}, "ref_log_probs needs a floating point dtype"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(options, message):
    case = make_case()
    with pytest.raises(ValueError, match=message):
        policy_loss(*case.tensors, **options)
    with pytest.raises(ValueError, match=message):
        log_prob_loss(case.old_log_probs, *case.tensors[2:], case.labels >= 0, **options)


@pytest.mark.parametrize(("kind", "coefficient"), [("k4", 0.1), ("k3", 0), ("k3", -1), ("k3", math.nan), ("none", 0.1)])
def test_a_penalty_that_means_nothing_is_refused(kind, coefficient):
    with pytest.raises(ValueError, match=r"unknown|needs a finite number > 0"):
        kl.KL(kind, coefficient)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_leaves_the_penalties_alone(name):
    """Against the specification; the two of them are what a loss without a correction has of them."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    corrections = corrected(CORRECTIONS[name], case.sampling_log_probs)
    penalties = {"kl": KL["k3"], "entropy_coefficient": 0.2}
    found = []
    for typed in ({}, {"correction": CORRECTIONS[name], "sampling_log_probs": case.sampling_log_probs}):
        options = with_reference(case, "grpo", "token_mean", metrics="with_entropy", **typed)
        losses = []
        for more in ({}, penalties):
            leaf = case.logits.clone().requires_grad_()
            out = policy_loss(leaf, *case.tensors[1:], **options, **more)
            out.loss.backward()
            losses.append((out.loss.detach(), leaf.grad))
        found.append([b - a for a, b in zip(*losses, strict=True)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-14)
    specification = with_reference(case, "grpo", "token_mean", metrics="with_entropy", entropy_coefficient=0.2)
    wanted = specified(case.logits, case, "k3", specification | corrections)
    assert float(losses[1][0]) == pytest.approx(wanted.loss, rel=1e-12)
    torch.testing.assert_close(losses[1][1], wanted.gradient, rtol=1e-10, atol=1e-14)
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(wanted.metrics, rel=1e-10, abs=1e-14)
