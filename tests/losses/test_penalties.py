"""The penalty against a reference and the entropy bonus: autograd of their formulas, clamps, and
what costs nothing.

Against the specification they are compared with everything else, in test_losses.py and the tests of
kernels.
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
    options = {
        "loss": "reinforce",
        "aggregation": "token_mean",
        "kl": KL[kind],
        "ref_log_probs": ref,
        "impl": impl,
    }
    # some of the distances take log-probs above 0
    out = policy_loss(*tensors, **options, check_finite=False)
    (found,) = torch.autograd.grad(out.loss, leaf)
    rows = leaf.log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0][trained]
    wanted = COEFFICIENT * FORMULAS[kind](rows, old[trained], ref[trained]).mean()
    assert float(out.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaf)[0], rtol=1e-9, atol=1e-13)
    assert torch.isfinite(found).all()


FULL = {
    "full_reverse": lambda p, f: p.exp() * (p - f),
    "full_forward": lambda p, f: f.exp() * (f - p),
}
"""Of a token of the vocabulary."""


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", FULL_KINDS)
@pytest.mark.parametrize("impl", ["torch", "reference", "triton"])
def test_the_full_kl_and_its_gradient_are_those_of_the_formula(impl, kind):
    """By autograd in float64, also where the two agree, and with tokens that neither may write."""
    case, dtype = make_case(seed=3), torch.float32 if impl == "triton" else torch.float64
    ref, agree = case.ref_logits, int((case.labels >= 0).nonzero()[0])
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
    given = tensors[0], *case.on_device(dtype)
    given[3].zero_()
    out = policy_loss(*given, **options, ref_logits=tensors[1], impl=impl, temperature=1.7)
    out.loss.backward()
    trained = case.labels >= 0
    rows = [(x[trained][:, :12] / 1.7).log_softmax(-1) for x in (leaf, ref)]
    values = FULL[kind](*rows).sum(-1)
    wanted = COEFFICIENT * values.mean()
    assert float(out.loss.detach()) == pytest.approx(
        float(wanted.detach()), rel=1e-5 if impl == "triton" else 1e-12
    )
    exact, found = torch.autograd.grad(wanted, leaf)[0], tensors[0].grad.cpu().double()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-7 if impl == "triton" else 1e-15)
    assert found[agree].abs().max() < (1e-7 if impl == "triton" else 1e-16)
    documents = case.document_index[trained]
    shares = torch.bincount(documents)[documents] * case.num_documents
    assert float(out.metrics["kl_ref"]) == pytest.approx(
        float((values.detach() / shares).sum()), rel=1e-5
    )


@pytest.mark.parametrize("impl", ["torch", "reference", "fused_linear"])
def test_a_reference_that_rules_out_what_the_policy_does_not_is_refused(impl):
    """The reverse KL is infinite; the forward one is not."""
    problem, never = make_head_case(), torch.zeros(12, dtype=torch.float64, device=DEVICE)
    ref, never[4] = problem.case.ref_logits.to(DEVICE), -math.inf
    call, rows, more = policy_loss, problem.case.logits.to(DEVICE), {"ref_logits": ref + never}
    if impl == "fused_linear":
        call, rows, identity = linear_policy_loss, problem.leaves()[0], torch.eye(12).to(ref)
        more = {"ref_hidden": ref, "ref_lm_head_weight": identity, "ref_bias": never}
    head = problem.leaves()[1:2] if impl == "fused_linear" else []
    arguments, options = (rows, *head, *problem.tensors), {"impl": impl, **more}
    reverse, forward = (kl.KL(kind, COEFFICIENT) for kind in FULL_KINDS)
    with pytest.raises(DataError, match=r"a full KL .* at a trained position of document 0"):
        call(*arguments, **options, kl=reverse)
    assert torch.isnan(call(*arguments, **options, kl=reverse, check_finite=False).loss)
    assert torch.isfinite(call(*arguments, **options, kl=forward).loss)


# infinity times 0, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_slopes_in_triton_on_and_beyond_the_clamps(kind):
    """Near 0 too, where a difference of exp has no digits left; and NaN for what is not finite."""
    distance = torch.tensor(
        [25.0, -25.0, 20.0, -20.0, 3.0, -3.0, 0.11, -0.09, 1e-3, -1e-4, 0.0], device=DEVICE
    )
    log_ratio = torch.tensor(
        [0.5, -25.0, 25.0, -0.5, 20.0, -20.0, 0.1, 0.2, -0.1, 0.3, 0.0], device=DEVICE
    )
    labels, index = (
        torch.zeros(11, dtype=torch.int64, device=DEVICE),
        torch.arange(11, device=DEVICE),
    )
    new = torch.full((11,), -math.log(2), device=DEVICE)  # of one of two equal tokens
    tensors = labels, new - log_ratio, torch.zeros_like(new), index
    options = {"loss": "reinforce", "aggregation": "token_mean", "kl": KL[kind], "impl": "triton"}

    def coefficients(ref):
        logits = torch.zeros(11, 2, device=DEVICE, requires_grad=True)
        # some are above 0
        out = policy_loss(logits, *tensors, **options, ref_log_probs=ref, check_finite=False)
        out.loss.backward()
        assert torch.equal(out.log_probs, new)
        return 2 * logits.grad[:, 0]  # the derivative of the log-prob by its own logit is one half

    ref = new - distance
    # Of the differences as float32 has them: 20 is 20.
    old_log_probs, exact_ref = (new.double() - (new - x).double() for x in (tensors[1], ref))
    objective = objective_of(
        (labels, old_log_probs, torch.zeros_like(exact_ref), index), "reinforce", ("token_mean",)
    )
    penalties = replace(objective.penalties, kl=KL[kind], ref_log_probs=exact_ref)
    exact = replace(objective, penalties=penalties).coefficients(new.double())
    torch.testing.assert_close(coefficients(ref).double(), exact, rtol=1e-5, atol=0)
    for wrong in (math.nan, math.inf, -math.inf):
        found = coefficients(torch.where(index == 4, wrong, ref))
        assert torch.isnan(found).tolist() == (index == 4).tolist()


@pytest.mark.parametrize("impl", ["torch", "triton", "fused_linear"])
def test_what_is_measured_alone_changes_no_bit(impl):
    """Sampling log-probs without a correction, a reference without a penalty, a coefficient of
    0."""
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
        results, names = [], []
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
def test_a_reference_that_is_no_number_where_trained_names_the_document(impl, broken):
    problem = make_head_case()
    case, ref = problem.case, problem.case.ref_log_probs
    ref[int((case.document_index == 3).nonzero()[2])] = broken
    leaves = problem.leaves()
    options = {"kl": KL["k3"], "ref_log_probs": ref.to(DEVICE), "impl": impl}
    with pytest.raises(
        DataError, match="ref_log_probs or advantages at a trained position of document 3"
    ):
        linear_policy_loss(*leaves[:2], *problem.tensors, **options)
    for kind in KINDS:
        out = linear_policy_loss(
            *leaves[:2], *problem.tensors, **options | {"kl": KL[kind]}, check_finite=False
        )
        assert math.isnan(out.loss.detach())
