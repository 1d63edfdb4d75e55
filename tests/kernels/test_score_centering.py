"""Score centering by the Triton kernels and in half precision, and under every cut of a step."""

import pytest
import torch
from builders.cuts import CUTS, assert_matches_reference
from builders.losses import (
    CENTERED,
    DEVICE,
    TEMPERATURE,
    Choice,
    Result,
    assert_results_close,
    covering,
    make_case,
    make_head_case,
    on_device,
    result_of,
)

from pgtoolkit import policy_loss
from pgtoolkit.kernels import losses

FUSED = 7
INPUTS = ("given", "overwritten", "fused")
BY_TRITON = covering([*CENTERED], INPUTS, (None, "k3", "full_reverse", "full_forward"), (0.0, 0.3))
SPREAD = covering([*CUTS], [*CENTERED], (None, 3, 100), (0.0, 0.3), ("none", "with_entropy"))


def by_triton(problem, choice, inputs, monkeypatch, factor=3.0):
    """Return the step by the kernels, from logits or by the fused head in chunks of seven rows."""
    case = problem.case
    if inputs == "fused":
        choose = losses.choose_implementation
        monkeypatch.setattr(
            losses, "choose_implementation", lambda _, *others: choose("triton", *others)
        )
        monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: FUSED)
        return problem.by_fused_head(choice, factor)
    precise = torch.promote_types(problem.dtype, torch.float32)
    leaf = case.logits.to(DEVICE, problem.dtype).requires_grad_()
    out = policy_loss(
        leaf * 1,
        *[on_device(x, precise) for x in case.tensors[1:]],
        impl="triton",
        temperature=TEMPERATURE,
        overwrite_logits=inputs == "overwritten",
        **choice.step(case, precise, device=DEVICE),
    )
    return result_of(out, [leaf], factor)


@pytest.mark.parametrize(
    ("family", "inputs", "kl", "entropy"), BY_TRITON, ids=lambda value: str(value)
)
def test_triton_matches_the_reference(family, inputs, kl, entropy, monkeypatch):
    problem = make_head_case(11, dtype=torch.float32)
    choice = Choice(family, None, kl, "token_mean", "with_entropy", entropy)
    expected = problem.by_reference(choice, inputs == "fused")
    result = by_triton(problem, choice, inputs, monkeypatch)
    assert_results_close(result, expected, 2e-4, gradient_tolerance=2e-5)


@pytest.mark.parametrize("vocabulary", [2049, 4096])
def test_tokens_of_other_blocks_are_left_to_them(vocabulary):
    """A row of several blocks, each of which writes only its own tokens of H."""
    case = make_case(5, vocabulary, (2, 3, 1), TEMPERATURE)
    choice = Choice("cispo, centered", metrics="basic")
    specified = choice.by_reference(case, case.logits.float())
    leaf = case.logits.float().to(DEVICE).requires_grad_()
    out = policy_loss(
        leaf,
        *[on_device(x, torch.float32) for x in case.tensors[1:]],
        impl="triton",
        temperature=TEMPERATURE,
        **choice.step(case, torch.float32, device=DEVICE),
    )
    expected = Result(specified.loss, specified.metrics, [specified.gradient])
    assert_results_close(result_of(out, [leaf]), expected, 2e-4, gradient_tolerance=2e-5)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_half_precision_keeps_small_gradients(dtype, tolerance, impl, monkeypatch):
    """The loss times 1e-5, whose gradient by the logits is below what float16 holds."""
    problem = make_head_case(11, dtype=dtype)
    choose = losses.choose_implementation
    monkeypatch.setattr(losses, "choose_implementation", lambda _, *others: choose(impl, *others))
    choice = Choice("cispo, centered", None, None, "token_mean", "basic")
    result = problem.by_fused_head(choice, 1.0, fp32_logits=True)
    expected = problem.by_reference(choice)
    assert_results_close(result, expected, 1e-3, gradient_tolerance=tolerance)


@pytest.mark.parametrize(
    ("cut", "family", "rows", "entropy", "level"),
    SPREAD,
    ids=[", ".join(map(str, row)) for row in SPREAD],
)
def test_it_does_not_depend_on_the_cut_of_a_step(cut, family, rows, entropy, level, monkeypatch):
    """Micro-batches, their order and padding, and ranks that share data, sequence, vocabulary."""
    if rows is not None:
        monkeypatch.setattr(
            losses, "rows_within", lambda memory, columns, dtype: min(rows, columns)
        )
    choice = Choice(family, None, None, "prompt_mean", level, entropy)
    assert_matches_reference(CUTS[cut], make_head_case(), choice, rows is not None)
