"""Corrections in every implementation against the reference, and the cases they are compared on."""

import pytest
import torch
from builders.losses import (
    CORRECTIONS,
    DEVICE,
    IMPLEMENTATIONS,
    OBJECTIVES,
    TEMPERATURE,
    corrected,
    make_case,
    make_head_case,
    numbers,
    options_of,
    relative_error,
)
from torch.nn.functional import linear

from pgtoolkit import linear_policy_loss, log_prob_loss, policy_loss
from pgtoolkit.kernels import losses as kernel_losses
from pgtoolkit.losses import reference

OF_SAMPLING = [name for name in CORRECTIONS if name != "off policy"]


def options_with(case, loss, aggregation, level="basic"):
    return options_of(case, loss, aggregation, num_documents=case.num_documents, metrics=level)


def by_turns(first, *others):
    """The first (family, aggregation) with every correction, of the others each with every third."""
    pairs = [(*first, correction) for correction in CORRECTIONS]
    for number, objective in enumerate(others):
        pairs += [(*objective, name) for i, name in enumerate(CORRECTIONS) if (i + number) % 3 == 0]
    return pairs


@pytest.mark.parametrize(("loss", "aggregation", "level", "correction"), by_turns(*OBJECTIVES))
def test_given_logits_match_the_reference(loss, aggregation, level, correction):
    case = make_case(seed=12)
    options = options_with(case, loss, aggregation, level)
    expected = reference.policy_loss(
        *case.tensors, **options, **corrected(CORRECTIONS[correction], case.sampling_log_probs)
    )
    given = {"correction": CORRECTIONS[correction], "sampling_log_probs": case.sampling_log_probs}
    for impl in ("torch", "reference"):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(logits, *case.tensors[1:], impl=impl, **options, **given)
        (3 * out.loss).backward()
        assert out.loss.item() == pytest.approx(expected.loss, rel=1e-12, abs=1e-15)
        torch.testing.assert_close(logits.grad, 3 * expected.gradient, rtol=1e-11, atol=1e-14)
        assert numbers(out.metrics) == pytest.approx(expected.metrics, rel=1e-10, abs=1e-14)
    if level == "with_entropy":
        return
    mask = case.labels >= 0
    again = case.logits.clone().requires_grad_()
    new = again.log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0]
    out = log_prob_loss(new, *case.tensors[2:], mask, **options, **given)
    (3 * out.loss).backward()
    assert out.loss.item() == pytest.approx(expected.loss, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(again.grad, 3 * expected.gradient, rtol=1e-11, atol=1e-14)
    assert numbers(out.metrics) == pytest.approx(expected.metrics, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(("loss", "aggregation", "level", "correction"), by_turns(*OBJECTIVES))
def test_the_fused_head_matches_the_reference(loss, aggregation, level, correction, monkeypatch):
    """In chunks of four rows, of which most documents need several."""
    problem = make_head_case()
    monkeypatch.setattr(kernel_losses, "rows_within", lambda memory, columns, dtype: 4)
    options = options_with(problem.case, loss, aggregation, level)
    leaves, case = [x.clone().requires_grad_() for x in (problem.hidden, problem.weight, problem.bias)], problem.case
    expected = reference.policy_loss(
        problem.logits,
        *case.tensors[1:],
        temperature=TEMPERATURE,
        **options,
        **corrected(CORRECTIONS[correction], case.sampling_log_probs),
    )
    linear(*leaves).backward(expected.gradient)
    for check_finite in (True, False):
        hidden, weight, bias = problem.leaves()
        out = linear_policy_loss(
            hidden,
            weight,
            *problem.tensors,
            bias=bias,
            temperature=TEMPERATURE,
            correction=CORRECTIONS[correction],
            sampling_log_probs=case.sampling_log_probs.to(DEVICE),
            check_finite=check_finite,
            **options | {"group_index": case.group_index.to(DEVICE)},
        )
        out.loss.backward()
        assert out.loss.item() == pytest.approx(expected.loss, rel=1e-12, abs=1e-15)
        for leaf, wanted in zip((hidden, weight, bias), leaves, strict=True):
            assert relative_error(leaf.grad, wanted.grad) < 1e-11
        assert numbers(out.metrics) == pytest.approx(expected.metrics, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("loss", "aggregation", "correction"),
    by_turns(
        *(("grpo", "constant"), ("gspo", "sample_mean"), ("cispo", "prompt_mean")),
        *(("gmpo", "token_mean"), ("vespo", "constant"), ("kimi", "sample_mean")),
    ),
)
def test_in_float32_with_kernels_or_without(impl, loss, aggregation, correction):
    """Triton's single pass over the logits, its two, and its vectors; PyTorch's where it has no formula."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    options = options_with(case, loss, aggregation, "with_entropy") | {"temperature": TEMPERATURE}
    logits = case.logits.float()
    expected = reference.policy_loss(
        logits, *case.tensors[1:], **options, **corrected(CORRECTIONS[correction], case.sampling_log_probs)
    )
    labels, old, advantages, index, sampling = (
        x.to(DEVICE, torch.float32) if x.is_floating_point() else x.to(DEVICE)
        for x in (*case.tensors[1:], case.sampling_log_probs)
    )
    leaf = logits.clone().to(DEVICE).requires_grad_()
    out = policy_loss(
        leaf,
        labels,
        old,
        advantages,
        index,
        impl=impl,
        correction=CORRECTIONS[correction],
        sampling_log_probs=sampling,
        **options | {"group_index": case.group_index.to(DEVICE)},
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
    assert relative_error(leaf.grad, expected.gradient) < 2e-5
    assert numbers(out.metrics) == pytest.approx(expected.metrics, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize(
    ("loss", "aggregation", "correction"),
    by_turns(("grpo", "token_mean"), ("gspo", "sample_mean"), ("sapo", "constant"), ("vespo", "token_mean")),
)
def test_the_fused_head_with_tritons_kernels(loss, aggregation, correction, monkeypatch):
    """As on a GPU, in chunks of seven rows."""
    choose = kernel_losses.choose_implementation
    monkeypatch.setattr(kernel_losses, "choose_implementation", lambda _, *given: choose("triton", *given))
    monkeypatch.setattr(kernel_losses, "rows_within", lambda memory, columns, dtype: 7)
    problem = make_head_case(dtype=torch.float32)
    case, options = problem.case, options_with(problem.case, loss, aggregation) | {"temperature": TEMPERATURE}
    given = corrected(CORRECTIONS[correction], case.sampling_log_probs)
    expected = reference.policy_loss(problem.logits, *case.tensors[1:], **options, **given)
    hidden, weight, bias = problem.leaves()
    out = linear_policy_loss(
        hidden,
        weight,
        *problem.tensors,
        bias=bias,
        correction=CORRECTIONS[correction],
        sampling_log_probs=case.sampling_log_probs.to(DEVICE, torch.float32),
        **options | {"group_index": case.group_index.to(DEVICE)},
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    assert relative_error(hidden.grad, expected.gradient @ problem.weight) < 2e-5
    assert relative_error(weight.grad, expected.gradient.T @ problem.hidden) < 2e-5
    assert numbers(out.metrics) == pytest.approx(expected.metrics, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_bounds_act_in_the_cases_above_on_each_side_and_not_everywhere(correction):
    """Otherwise the comparisons would not see a bound that is missing."""
    chosen = CORRECTIONS[correction]
    for case, temperature in ((make_case(seed=12), 1.0), (make_head_case().case, TEMPERATURE)):
        given = {"correction": chosen, "sampling_log_probs": case.sampling_log_probs, "temperature": temperature}
        out = policy_loss(*case.tensors, metrics="basic", num_documents=6, **given)
        assert 0.1 < float(out.metrics["correction_outside_fraction"]) < 0.8
        if correction == "off policy":
            continue
        mask = case.labels >= 0
        difference = torch.where(mask, case.old_log_probs - case.sampling_log_probs, 0.0)
        over = difference[mask]
        if hasattr(chosen, "mean"):
            documents = [difference[mask & (case.document_index == d)] for d in range(5)]
            over = torch.stack([x.mean() if chosen.mean == "geometric" else x.sum() for x in documents])
        low, high = chosen.bounds
        assert (over.exp() > high).any()
        assert (over.exp() < low).any() or chosen.low is None
