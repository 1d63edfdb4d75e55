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
    Choice,
    Result,
    assert_results_close,
    covering,
    make_case,
    make_head_case,
    relative_error,
    result_of,
)

from pgtoolkit import policy_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses, torch_passes
from pgtoolkit.losses.families import Grpo, family_of

WAYS = ("given", "overwritten", "fused")
SOME_CORRECTIONS = (None, "token truncated", "off policy")
"""None, one known before the forward pass, and one after it, with which coefficients are not by
token."""
BY_TRITON = covering(
    [*FAMILIES], PENALTIES, AGGREGATIONS, LEVELS, WAYS, SOME_CORRECTIONS, (0.0, 0.3), (False, True)
)


@pytest.mark.parametrize(
    ("family", "kl", "aggregation", "level", "way", "correction", "entropy", "trajectories"),
    BY_TRITON,
    ids=[", ".join(map(str, row)) for row in BY_TRITON],
)
def test_triton_matches_reference(
    family, kl, aggregation, level, way, correction, entropy, trajectories, monkeypatch
):
    """Any two of these, in float32; the head in chunks of seven rows, as on a GPU."""
    problem = make_head_case(11 if way == "given" else 6, dtype=torch.float32)
    choice = Choice(family, correction, kl, aggregation, level, entropy, trajectories)
    wanted = problem.by_reference(choice, way == "fused")
    if way == "fused":
        choose = losses.choose_implementation
        monkeypatch.setattr(
            losses, "choose_implementation", lambda _, *given: choose("triton", *given)
        )
        monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: 7)
        found = problem.by_fused_head(choice, 3.0)
    else:
        found = of_logits(problem.case, choice, torch.float32, "triton", way == "overwritten")
    assert_results_close(found, wanted, 2e-4, gradient_tolerance=2e-5)


def of_logits(case, choice, dtype, impl, overwrite=False):
    """By `policy_loss`, of logits of this dtype, whose memory may take the gradient."""
    precise, leaf = (
        torch.promote_types(dtype, torch.float32),
        case.logits.to(DEVICE, dtype).requires_grad_(),
    )
    options = {"impl": impl, "overwrite_logits": overwrite, "temperature": TEMPERATURE}
    options |= choice.step(case, precise, device=DEVICE)
    return result_of(policy_loss(leaf * 1, *case.on_device(precise), **options), [leaf], 3.0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("choice", "dtype"),
    [
        *(
            (Choice("cispo", aggregation="constant"), dtype)
            for dtype in (torch.float32, torch.float16)
        ),
        *(
            (Choice("gspo", kl="k3_ratio"), torch.bfloat16),
            (Choice("grpo", kl="k2", entropy=0.3), torch.bfloat16),
        ),
        *(
            (Choice("gspo", kl="full_reverse"), torch.bfloat16),
            (Choice("grpo", kl="full_forward"), torch.float16),
        ),
    ],
    ids=str,
)
def test_the_loss_of_rounded_logits_matches_reference(choice, dtype, impl):
    """The loops get the same rounded logits."""
    check(make_case(seed=12, temperature=TEMPERATURE), choice, dtype, impl)


def check(case, choice, dtype, impl):
    specified = choice.by_reference(case, case.logits.to(dtype))
    wanted = Result(specified.loss, specified.metrics, [specified.gradient])
    for overwrite in (False, True):
        found = of_logits(case, choice, dtype, impl, overwrite)
        assert_results_close(found, wanted, 2e-4, gradient_tolerance=1.1 * GRADIENT_ERROR[dtype])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        *(("grpo", {"lengths": (1, 1)}), ("gspo", {"lengths": (9, 1), "vocabulary": 2})),
        *(
            ("gspo", {"lengths": (2, 3, 1), "vocabulary": 4095}),
            ("grpo", {"lengths": (2, 3, 1), "vocabulary": 4096}),
        ),
        ("grpo", {"lengths": (2, 3, 1), "vocabulary": 4098}),
    ],
    ids=str,
)
def test_odd_shapes_match_reference(loss, shape, impl):
    case = make_case(seed=3, temperature=TEMPERATURE, **shape)
    check(case, Choice(loss, aggregation="token_mean"), torch.float32, impl)


@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
# PyTorch's own bounds check ends the process on a GPU.
@pytest.mark.parametrize("impl", ["triton"] if DEVICE == "cuda" else ["torch", "triton"])
def test_a_label_outside_the_vocabulary_is_an_error(impl, loss):
    case = make_case(seed=1)
    tensors = [
        case.logits.to(DEVICE, torch.float32),
        *(x.clone() for x in case.on_device(torch.float32)),
    ]
    tensors[1][9] = 13
    with pytest.raises(DataError, match="document 2"):
        policy_loss(tensors[0].requires_grad_(), *tensors[1:], loss=loss, impl=impl)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_totals_that_count_no_token_of_a_trained_document_are_refused(impl):
    case = make_case(lengths=(3, 1), vocabulary=3)
    tensors = case.logits.to(DEVICE, torch.float32), *case.on_device(torch.float32)
    trained = int((case.labels >= 0).sum())
    for aggregation, number, message in (
        (
            "token_mean",
            0,
            rf"totals.num_tokens needs to count at least the {trained} trained tokens",
        ),
        (
            "prompt_mean",
            trained,
            r"weight of a trained token is not finite: .* totals that count none",
        ),
    ):
        totals = StepTotals(2, number, 2, 2, torch.tensor([0, 0]))
        options = {
            "aggregation": aggregation,
            "group_index": case.group_index.to(DEVICE),
            "totals": totals,
        }
        with pytest.raises(ValueError, match=message):
            policy_loss(*tensors, impl=impl, **options)


EDGE = 20.0
LOG_RATIOS = [500.0, 21.0, EDGE, -EDGE, -21.0, -500.0]


@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, "triton")],
)
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_huge_log_ratios_stay_finite(loss, dtype, impl):
    """Clamped to 20 on both sides, beyond which no gradient passes, not even one of e^-20; 20
    itself is inside."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for log_ratio, advantage in product(LOG_RATIOS, (1.0, -1.0, 0.0)):
        logits = torch.zeros(1, 2, dtype=dtype, device=DEVICE, requires_grad=True)
        # Rounded to the steps of 20, so that the difference is 20 to the last bit.
        old = torch.zeros(1, 2, dtype=dtype).log_softmax(-1)[:, 0].to(DEVICE) - log_ratio
        tensors = zero, old, torch.tensor([advantage], dtype=dtype, device=DEVICE), zero
        options = {"loss": loss, "epsilon_low": 0.2, "epsilon_high": 0.25, "metrics": "basic"}
        # old ones are above 0, too
        out = policy_loss(logits, *tensors, impl=impl, check_finite=False, **options)
        out.loss.backward()
        ratio = math.exp(max(-EDGE, min(EDGE, log_ratio)))
        passes = abs(log_ratio) <= EDGE and (ratio <= 1.25 if advantage > 0 else ratio >= 0.8)
        clipped = max(0.8, min(1.25, ratio))
        value, slope = -min(ratio * advantage, clipped * advantage), -advantage * ratio * passes
        if loss == "cispo":  # a weight of the log-prob, which is that of one of two equal tokens
            value, slope = clipped * advantage * math.log(2), -advantage * clipped
        exact = {"rel": 1e-12 if dtype == torch.float64 else 4e-6, "abs": 0}
        assert float(out.loss.detach()) == pytest.approx(value, **exact)
        # The derivative of the log-prob by its own logit is one half.
        assert logits.grad[0].tolist() == pytest.approx([slope / 2, -slope / 2], **exact)
        assert float(out.metrics["ratio_new_old"]) == pytest.approx(ratio, **exact)
        assert float(out.metrics["kl_new_old"]) == pytest.approx(
            ratio - 1 - max(-EDGE, min(EDGE, log_ratio)), **exact
        )
        assert float(out.metrics["clamped_log_ratio_fraction"]) == (abs(log_ratio) > EDGE)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_the_clip_does_not_act_at_its_bounds(loss, impl):
    """Ratios of exactly 2 and 1/2: e to the power of the log-prob of one of two equal tokens, or of
    minus it."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    new = policy_loss(
        torch.zeros(1, 2, device=DEVICE), zero, *torch.zeros(2, 1, device=DEVICE), zero, impl=impl
    ).log_probs
    for ratio, old in ((2.0, 2 * new), (0.5, 0 * new)):
        for inside in (True, False):
            wide = {
                "epsilon_low": 0.5 if inside else 0.499,
                "epsilon_high": 1.0 if inside else 0.999,
            }
            advantage = 1.0 if ratio > 1 else -1.0
            logits = torch.zeros(1, 2, device=DEVICE, requires_grad=True)
            tensors = zero, old, torch.full((1,), advantage, device=DEVICE), zero
            out = policy_loss(logits, *tensors, loss=loss, impl=impl, metrics="basic", **wide)
            out.loss.backward()
            assert float(out.metrics["max_ratio_new_old"]) == ratio
            assert logits.grad[0].tolist() == (
                [-advantage * ratio / 2, advantage * ratio / 2] if inside else [0, 0]
            )
            found = [
                float(out.metrics[f"clipped_{name}_fraction"]) for name in ("ratio", "low", "high")
            ]
            assert found == ([0, 0, 0] if inside else [1, ratio < 1, ratio > 1])


def test_the_logits_can_be_given_up_once():
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
    """One advantage for all tokens by expand, old log-probs with a stride: not what kernels may
    read as they lie."""
    case = make_case(seed=2)
    labels, old, _, index = case.on_device(torch.float32)
    strided = torch.stack([old, torch.full_like(old, math.nan)], 1)[:, 0]
    one = torch.ones(1, device=DEVICE).expand(len(old))
    results = []
    for tensors in ((labels, strided, one, index), (labels, old, one.clone(), index)):
        leaf = case.logits.float().to(DEVICE).requires_grad_()
        policy_loss(leaf, *tensors, loss=FAMILIES[loss], impl="triton").loss.backward()
        results.append(leaf.grad)
    assert torch.equal(*results)


@dataclass(frozen=True)
class Halved(Grpo):
    """Half of the surrogate, by token: a class of its own, for which no kernel has a formula."""

    def surrogate(self, log_ratio, advantages, log_probs):
        return tuple(x / 2 for x in super().surrogate(log_ratio, advantages, log_probs))


@dataclass(frozen=True)
class HalvedByDocument(Halved):
    scope = "document"


@pytest.mark.parametrize(("family", "base"), [(Halved, "grpo"), (HalvedByDocument, "gspo")])
def test_a_family_that_no_kernel_knows(family, base):
    """No kernel may take a family for one that it has a formula for: not even one that inherits
    from it."""
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
        halved, whole = results
        for ours, theirs in zip(halved, (whole[0] / 2, whole[1], whole[2] / 2), strict=True):
            assert relative_error(ours, theirs) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [151936, 151937])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_more_logits_than_int32_can_count(loss, dtype, columns):
    """In one pass (of words: those of bfloat16 are half as many) and, for odd rows and `gspo`, in
    two.

    Zeros lie where an offset that went through 32 bits would point, so that a wrong number is read
    and not nothing.
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
