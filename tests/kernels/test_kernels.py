"""The loss of given logits against the reference: every implementation, dtype and odd shape.

Without a GPU the Triton kernels run under Triton's interpreter, one program after the other.
"""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from builders.losses import (
    AGGREGATIONS,
    DEVICE,
    FAMILIES,
    GRADIENT_ERROR,
    IMPLEMENTATIONS,
    LEVELS,
    PENALTIES,
    TEMPERATURE,
    TYPICAL_LOSSES,
    Case,
    Choice,
    Result,
    assert_results_close,
    covering,
    make_case,
    make_head_case,
    relative_error,
    result_of,
)
from builders.quick import with_slow_between
from torch import Tensor

from pgtoolkit import policy_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses, torch_passes
from pgtoolkit.losses.families import Grpo, family_of

INPUTS = ("given", "overwritten", "fused")
"""Logits that stay, logits whose memory takes the gradient, and hidden states with a head."""
SOME_CORRECTIONS = (None, "token truncated", "off policy")
"""None, one known before the forward pass, and one known after it, whose coefficients belong to
documents."""
WITH_EVERY_PENALTY = (*TYPICAL_LOSSES, "gmpo", "vespo", "dppo")
"""Each way in which a document's tokens make its ratio, and families by token with and without a
gradient of the ratio. A kernel adds a penalty to the slope of any family by token alike."""
OTHERS = (AGGREGATIONS, LEVELS, INPUTS, SOME_CORRECTIONS, (0.0, 0.3), (False, True), (None, 0.3))
BY_TRITON = covering(WITH_EVERY_PENALTY, PENALTIES, *OTHERS) + covering(
    [name for name in FAMILIES if name not in WITH_EVERY_PENALTY],
    (None, "k3_ratio", "full_reverse"),
    *OTHERS,
)


@pytest.mark.parametrize(
    (
        "family",
        "kl",
        "aggregation",
        "level",
        "inputs",
        "correction",
        "entropy",
        "trajectories",
        "top_fraction",
    ),
    with_slow_between(BY_TRITON, 7),
    ids=[", ".join(map(str, row)) for row in BY_TRITON],
)
def test_triton_matches_reference(
    family,
    kl,
    aggregation,
    level,
    inputs,
    correction,
    entropy,
    trajectories,
    top_fraction,
    monkeypatch,
):
    """Every pair of these choices for some families, in float32.

    The head computes in chunks of seven rows, as on a GPU.
    """
    problem = make_head_case(11 if inputs == "given" else 6, dtype=torch.float32)
    others = (entropy, trajectories, top_fraction)
    choice = Choice(family, correction, kl, aggregation, level, *others)
    expected = problem.by_reference(choice, inputs == "fused")
    if inputs == "fused":
        choose = losses.choose_implementation
        monkeypatch.setattr(
            losses, "choose_implementation", lambda _, *others: choose("triton", *others)
        )
        monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: 7)
        result = problem.by_fused_head(choice, 3.0)
    else:
        overwrite = inputs == "overwritten"
        result = result_of_logits(problem.case, choice, torch.float32, "triton", overwrite)
    assert_results_close(result, expected, 2e-4, gradient_tolerance=2e-5)


def result_of_logits(
    case: Case, choice: Choice, dtype: torch.dtype, impl: str, overwrite: bool = False
) -> Result:
    """Return what `policy_loss` makes of logits of this dtype, whose memory may take the
    gradient."""
    precise = torch.promote_types(dtype, torch.float32)
    leaf = case.logits.to(DEVICE, dtype).requires_grad_()
    options = {"impl": impl, "overwrite_logits": overwrite, "temperature": TEMPERATURE}
    options |= choice.step(case, precise, device=DEVICE)
    return result_of(policy_loss(leaf * 1, *case.on_device(precise), **options), [leaf], 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("choice", "dtype"),
    [
        (Choice("cispo", aggregation="constant"), torch.float16),
        (Choice("gspo", kl="k3_ratio"), torch.bfloat16),
        (Choice("grpo", kl="k2", entropy=0.3), torch.bfloat16),
        (Choice("gspo", kl="full_reverse"), torch.bfloat16),
        (Choice("grpo", kl="full_forward"), torch.float16),
    ],
    ids=str,
)
def test_the_loss_of_rounded_logits_matches_reference(choice, dtype, impl):
    """The reference gets the same rounded logits."""
    assert_as_specified(make_case(seed=12, temperature=TEMPERATURE), choice, dtype, impl)


def assert_as_specified(case: Case, choice: Choice, dtype: torch.dtype, impl: str) -> None:
    """Assert that loss, metrics and gradient of rounded logits are those of the reference."""
    specified = choice.by_reference(case, case.logits.to(dtype))
    expected = Result(specified.loss, specified.metrics, [specified.gradient])
    for overwrite in (False, True):
        result = result_of_logits(case, choice, dtype, impl, overwrite)
        assert_results_close(result, expected, 2e-4, gradient_tolerance=1.1 * GRADIENT_ERROR[dtype])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        ("grpo", {"lengths": (1, 1)}),
        ("gspo", {"lengths": (9, 1), "vocabulary": 2}),
        ("gspo", {"lengths": (2, 3, 1), "vocabulary": 4095}),
        ("grpo", {"lengths": (2, 3, 1), "vocabulary": 4096}),
        ("grpo", {"lengths": (2, 3, 1), "vocabulary": 4098}),
    ],
    ids=str,
)
def test_odd_shapes_match_reference(loss, shape, impl):
    case = make_case(seed=3, temperature=TEMPERATURE, **shape)
    assert_as_specified(case, Choice(loss, aggregation="token_mean"), torch.float32, impl)


@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
# PyTorch's own bounds check ends the process on a GPU.
@pytest.mark.parametrize("impl", ["triton"] if DEVICE == "cuda" else ["torch", "triton"])
def test_a_label_outside_the_vocabulary_is_an_error(impl, loss):
    case = make_case(seed=1)
    logits = case.logits.to(DEVICE, torch.float32).requires_grad_()
    labels, *others = case.on_device(torch.float32)
    labels = labels.clone()
    labels[9] = 13
    with pytest.raises(DataError, match="document 2"):
        policy_loss(logits, labels, *others, loss=loss, impl=impl)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_totals_that_count_no_token_of_a_trained_document_are_refused(impl):
    case = make_case(lengths=(3, 1), vocabulary=3)
    tensors = case.logits.to(DEVICE, torch.float32), *case.on_device(torch.float32)
    num_trained = int((case.labels >= 0).sum())
    for aggregation, num_tokens, message in (
        (
            "token_mean",
            0,
            rf"totals.num_tokens needs to count at least the {num_trained} trained tokens",
        ),
        (
            "prompt_mean",
            num_trained,
            r"totals.tokens_per_group\[0\] needs to count at least the \d trained tokens",
        ),
    ):
        totals = StepTotals(2, num_tokens, 2, 2, torch.tensor([0, num_tokens]))
        options = {
            "aggregation": aggregation,
            "group_index": case.group_index.to(DEVICE),
            "totals": totals,
        }
        with pytest.raises(ValueError, match=message):
            policy_loss(*tensors, impl=impl, **options)


CLAMP = 20.0
"""The largest log-ratio that is not clamped."""
LOG_RATIOS = [500.0, 21.0, CLAMP, -CLAMP, -21.0, -500.0]


@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, "triton")],
)
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_huge_log_ratios_stay_finite(loss, dtype, impl):
    """Log-ratios are clamped to 20 on both sides. Beyond that no gradient passes, not even one of
    e^-20; 20 itself is not clamped."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for log_ratio, advantage in product(LOG_RATIOS, (1.0, -1.0, 0.0)):
        logits = torch.zeros(1, 2, dtype=dtype, device=DEVICE, requires_grad=True)
        # Rounded to the spacing of floats near 20, so that the difference is 20 to the last bit.
        old = torch.zeros(1, 2, dtype=dtype).log_softmax(-1)[:, 0].to(DEVICE) - log_ratio
        advantages = torch.tensor([advantage], dtype=dtype, device=DEVICE)
        out = policy_loss(
            logits,
            zero,
            old,
            advantages,
            zero,
            loss=loss,
            epsilon_low=0.2,
            epsilon_high=0.25,
            metrics="basic",
            impl=impl,
            check_finite=False,  # some old log-probs are above 0
        )
        out.loss.backward()
        clamped = max(-CLAMP, min(CLAMP, log_ratio))
        ratio = math.exp(clamped)
        passes = abs(log_ratio) <= CLAMP and (ratio <= 1.25 if advantage > 0 else ratio >= 0.8)
        clipped = max(0.8, min(1.25, ratio))
        if loss == "cispo":  # a weight of the log-prob, which is that of one of two equal tokens
            value = clipped * advantage * math.log(2)
            slope = -advantage * clipped
        else:
            value = -min(ratio * advantage, clipped * advantage)
            slope = -advantage * ratio * passes
        exact = {"rel": 1e-12 if dtype == torch.float64 else 4e-6, "abs": 0}
        assert float(out.loss.detach()) == pytest.approx(value, **exact)
        # The derivative of the log-prob by its own logit is one half.
        assert logits.grad[0].tolist() == pytest.approx([slope / 2, -slope / 2], **exact)
        assert float(out.metrics["ratio_new_old"]) == pytest.approx(ratio, **exact)
        assert float(out.metrics["kl_new_old"]) == pytest.approx(ratio - 1 - clamped, **exact)
        assert float(out.metrics["clamped_log_ratio_fraction"]) == (abs(log_ratio) > CLAMP)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_the_clip_does_not_act_at_its_bounds(loss, impl):
    """The new log-prob is that of one of two equal tokens. With twice that as the old one the ratio
    is exactly 2, and with 0 exactly 1/2."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    new = policy_loss(
        torch.zeros(1, 2, device=DEVICE), zero, *torch.zeros(2, 1, device=DEVICE), zero, impl=impl
    ).log_probs
    for ratio, old, advantage in ((2.0, 2 * new, 1.0), (0.5, 0 * new, -1.0)):
        for epsilon_low, epsilon_high, clips in ((0.5, 1.0, False), (0.499, 0.999, True)):
            logits = torch.zeros(1, 2, device=DEVICE, requires_grad=True)
            out = policy_loss(
                logits,
                zero,
                old,
                torch.full((1,), advantage, device=DEVICE),
                zero,
                loss=loss,
                epsilon_low=epsilon_low,
                epsilon_high=epsilon_high,
                metrics="basic",
                impl=impl,
            )
            out.loss.backward()
            assert float(out.metrics["max_ratio_new_old"]) == ratio
            slope = 0 if clips else advantage * ratio / 2
            assert logits.grad[0].tolist() == [-slope, slope]
            assert float(out.metrics["clipped_ratio_fraction"]) == clips
            assert float(out.metrics["clipped_low_fraction"]) == (clips and ratio < 1)
            assert float(out.metrics["clipped_high_fraction"]) == (clips and ratio > 1)


def test_a_second_backward_after_the_logits_were_overwritten_is_refused():
    case = make_case(seed=1)
    for loss in TYPICAL_LOSSES:
        logits = case.logits.float().to(DEVICE).requires_grad_()
        out = policy_loss(
            logits * 1,
            *case.on_device(torch.float32),
            loss=loss,
            impl="triton",
            overwrite_logits=True,
        )
        out.loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="first backward"):
            out.loss.backward()


@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_vectors_may_be_views(loss):
    """One advantage is expanded to all tokens, and the old log-probs have a stride: a kernel would
    read both wrong as they lie in memory."""
    case = make_case(seed=2)
    labels, old, _, index = case.on_device(torch.float32)
    strided = torch.stack([old, torch.full_like(old, math.nan)], 1)[:, 0]
    expanded = torch.ones(1, device=DEVICE).expand(len(old))
    gradients = []
    for tensors in ((labels, strided, expanded, index), (labels, old, expanded.clone(), index)):
        leaf = case.logits.float().to(DEVICE).requires_grad_()
        policy_loss(leaf, *tensors, loss=FAMILIES[loss], impl="triton").loss.backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@dataclass(frozen=True)
class Halved(Grpo):
    """Half of GRPO's surrogate: a family for which no kernel has a formula."""

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, slope = super().surrogate(log_ratio, advantages, log_probs)
        return loss / 2, slope / 2


@dataclass(frozen=True)
class HalvedByDocument(Halved):
    scope = "document"


@pytest.mark.parametrize(("family", "base"), [(Halved, "grpo"), (HalvedByDocument, "gspo")])
def test_a_family_of_the_user_has_its_own_loss_in_every_implementation(family, base):
    """No kernel takes a family for one that it has a formula for, not even if it inherits from
    it."""
    case = make_case()
    for impl in IMPLEMENTATIONS:
        results = []
        for loss in (family(0.1, 0.1), family_of(base, epsilon_low=0.1, epsilon_high=0.1)):
            logits = case.logits.float().to(DEVICE).requires_grad_()
            tensors = case.on_device(torch.float64)
            options = {"num_documents": case.num_documents, "metrics": "basic", "impl": impl}
            out = policy_loss(logits, *tensors, loss=loss, **options)
            out.loss.backward()
            results.append((out.loss.detach(), out.metrics["ratio_new_old"], logits.grad))
        (half_loss, half_ratio, half_gradient), (loss, ratio, gradient) = results
        assert relative_error(half_loss, loss / 2) < 1e-5
        assert relative_error(half_ratio, ratio) < 1e-5
        assert relative_error(half_gradient, gradient / 2) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [151936, 151937])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_more_logits_than_int32_can_count(loss, dtype, columns):
    """The kernel makes one pass, or two for `gspo` and for rows of odd length; it reads words, of
    which bfloat16 has half as many.

    An offset that overflowed 32 bits would point to zeros, which are numbers too, but wrong ones.
    """
    rows = 16384
    generator = torch.Generator(DEVICE).manual_seed(0)
    memory = torch.zeros(2**31 + rows * columns, device=DEVICE, dtype=dtype)
    logits = memory[2**31 :].view(rows, columns)
    for block in logits.split(1024):
        block.copy_(torch.randn(block.shape, generator=generator, device=DEVICE))
    labels = torch.randint(0, columns, (rows,), generator=generator, device=DEVICE)
    labels[::3] = -1
    index = torch.arange(rows, device=DEVICE) // 512
    advantages = torch.randn(32, generator=generator, device=DEVICE)[index]
    tail = slice(rows - 512, rows)
    old = torch.zeros(rows, device=DEVICE)
    old[tail] = torch_passes.forward(logits[tail].float(), labels[tail], 1.0, False)[0]
    old = torch.where(index == 31, old, -12.0)
    options = {
        "loss": loss,
        "aggregation": "constant",
        "divisor": 1.0,
        "num_documents": 32,
        "impl": "triton",
    }
    last = logits[tail].float().clone().requires_grad_()  # a copy: the logits are overwritten
    leaf = logits.requires_grad_()
    out = policy_loss(leaf, labels, old, advantages, index, **options, overwrite_logits=True)
    out.loss.backward()
    expected = policy_loss(
        last, labels[tail], old[tail], advantages[tail], index[tail], **options | {"impl": "torch"}
    )
    expected.loss.backward()
    assert relative_error(leaf.grad[tail], last.grad) < GRADIENT_ERROR[dtype] * 2
    assert (memory[: 2**31] == 0).all()
    assert relative_error(out.log_probs[tail], expected.log_probs) < 1e-5
