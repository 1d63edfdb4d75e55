"""The vocabulary-sized passes, and the loss over them, against float64: every implementation, dtype and odd shape.

Without a GPU the Triton kernels run under Triton's interpreter, one program after the other.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from builders.losses import EPSILONS, LOSSES, PAIRS, SMOOTH, make_case, relative_error

from pgtoolkit import policy_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import torch_passes, triton_passes
from pgtoolkit.losses import reference
from pgtoolkit.losses.families import Grpo, family_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"torch": torch_passes, "triton": triton_passes}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What rounding the gradient to the dtype costs; the arithmetic is float32 throughout.
GRADIENT_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
VECTOR_ERROR = 2e-6
TEMPERATURE = 0.7


def make_rows(rows, columns, dtype, seed=0):
    """Logits with an untrained row of NaN, a row with tokens of probability 0, and a row whose coefficient is 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(0, columns, (rows,), generator=generator)
    coefficients = torch.randn(rows, generator=generator)
    if rows > 3:
        labels[1], logits[1] = -1, math.nan
        labels[2], logits[2, 1 : 1 + columns // 2] = 0, -math.inf
        coefficients[3] = 0
    return logits.to(DEVICE), labels.to(DEVICE), coefficients.to(DEVICE)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        *((torch.float32, columns) for columns in (1, 37, 64, 4095, 4096, 4098)),
        *((dtype, columns) for dtype in (torch.bfloat16, torch.float16) for columns in (37, 4096)),
    ],
)
def test_triton_passes_match_float64(dtype, columns, with_entropy):
    logits, labels, coefficients = make_rows(6, columns, dtype)
    found = triton_passes.forward(logits, labels, TEMPERATURE, with_entropy)
    expected = torch_passes.forward(logits.double(), labels, TEMPERATURE, with_entropy)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is theirs is None or relative_error(ours, theirs) < VECTOR_ERROR
    arguments = labels, coefficients, TEMPERATURE
    gradient = triton_passes.backward(logits, labels, found[1], *arguments[1:])
    exact = torch_passes.backward(logits.double(), labels, expected[1], coefficients.double(), TEMPERATURE)
    assert relative_error(gradient, exact) < GRADIENT_ERROR[dtype]
    assert (gradient[labels < 0] == 0).all()
    assert (gradient[coefficients == 0] == 0).all()
    in_place = triton_passes.backward(logits, labels, found[1], *arguments[1:], out=logits)
    assert torch.equal(in_place, gradient)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "score_dtype", "columns"),
    [
        *((dtype, dtype, columns) for dtype in (torch.float32, torch.bfloat16) for columns in (1, 4095, 4096, 8194)),
        *((torch.float16, torch.float16, columns) for columns in (38, 4098)),
        *((torch.float32, torch.bfloat16, columns) for columns in (38, 4095)),
    ],
)
def test_score_overwrites_the_logits(dtype, score_dtype, columns, with_entropy):
    logits, labels, _ = make_rows(6, columns, dtype)
    logits, labels = logits[labels >= 0].contiguous(), labels[labels >= 0]
    exact = torch_passes.forward_score_(logits.double(), labels, TEMPERATURE, with_entropy, torch.float64)
    found = triton_passes.forward_score_(logits, labels, TEMPERATURE, with_entropy, score_dtype)
    assert relative_error(found[0], exact[0]) < VECTOR_ERROR
    if with_entropy:
        assert relative_error(found[1], exact[1]) < VECTOR_ERROR
    assert found[2].dtype == score_dtype
    assert relative_error(found[2], exact[2]) < GRADIENT_ERROR[score_dtype]


@pytest.mark.parametrize(
    ("dtype", "impl"), [(torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, "triton")]
)
@pytest.mark.parametrize(("loss", "aggregation"), PAIRS)
def test_loss_matches_reference(loss, aggregation, dtype, impl):
    check_loss(make_case(seed=12, temperature=TEMPERATURE), loss, aggregation, dtype, impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_of_rounded_logits_matches_reference(loss, dtype, impl):
    check_loss(make_case(seed=12, temperature=TEMPERATURE), loss, "sample_mean", dtype, impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    "shape",
    [
        {"lengths": (1, 1)},
        {"lengths": (1, 1, 1, 2)},
        {"lengths": (9, 1), "vocabulary": 2},
        {"lengths": (2, 3, 1), "vocabulary": 4095},
        {"lengths": (2, 3, 1), "vocabulary": 4096},
        {"lengths": (2, 3, 1), "vocabulary": 4098},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", SMOOTH)
def test_odd_shapes_match_reference(loss, shape, impl):
    check_loss(make_case(seed=3, temperature=TEMPERATURE, **shape), loss, "token_mean", torch.float32, impl)


def check_loss(case, loss, aggregation, dtype, impl):
    """Loss, log-probs, metrics and gradient (of three times the loss) against the loops, on the same rounded logits."""
    options = {
        "loss": loss,
        "aggregation": aggregation,
        "divisor": 8.0 if aggregation == "constant" else None,
        "temperature": TEMPERATURE,
        "metrics": "with_entropy",
        **EPSILONS[loss],
    }
    logits = case.logits.to(dtype)
    expected = reference.policy_loss(logits, *case.tensors[1:], group_index=case.group_index, **options)
    precise = dtype if dtype == torch.float64 else torch.float32
    labels, old, advantages, index = (
        x.to(DEVICE, precise if x.is_floating_point() else x.dtype) for x in case.tensors[1:]
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for overwrite in (False, True):
        leaf = logits.clone().to(DEVICE).requires_grad_()
        out = policy_loss(
            leaf * 1,
            labels,
            old,
            advantages,
            index,
            group_index=case.group_index.to(DEVICE),
            impl=impl,
            overwrite_logits=overwrite,
            **options,
        )
        (3 * out.loss).backward()
        size = sum(abs(x) for x in expected.log_probs) / len(expected.log_probs)
        assert abs(float(out.loss.detach()) - expected.loss) < tolerance * max(1.0, size)
        assert relative_error(out.log_probs, torch.tensor(expected.log_probs, dtype=torch.float64)) < tolerance
        assert relative_error(leaf.grad, 3 * expected.gradient) < GRADIENT_ERROR[dtype] * 1.1
        found = {name: float(value) for name, value in out.metrics.items()}
        assert found == pytest.approx(expected.metrics, rel=20 * tolerance, abs=20 * tolerance, nan_ok=True)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits(dtype, impl):
    """Logits of ten thousand: the log-probs of float32 must not be what a sum near 10000 rounds to."""
    generator = torch.Generator().manual_seed(0)
    logits = (1e4 * (2 * torch.rand(8, 40, generator=generator) - 1)).to(dtype)
    logits[0] = 1e4
    logits[1, :2] = 1e4  # a tie at the top
    labels = logits.argmax(-1)
    labels[-1] = 3
    found = IMPLEMENTATIONS[impl].forward(logits.to(DEVICE), labels.to(DEVICE), 1.0, True)
    expected = torch_passes.forward(logits.double(), labels, 1.0, True)
    torch.testing.assert_close(found[0].cpu().double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2].cpu().double(), expected[2], rtol=1e-5, atol=1e-6)
    if dtype == torch.float32:
        score = IMPLEMENTATIONS[impl].forward_score_(logits.clone().to(DEVICE), labels.to(DEVICE), 1.0, True, dtype)[2]
        exact = torch_passes.forward_score_(logits.double(), labels, 1.0, True, torch.float64)[2]
        torch.testing.assert_close(score.cpu().double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_vocabulary_shards_merge(impl, with_entropy):
    implementation = IMPLEMENTATIONS[impl]
    logits, labels, coefficients = make_rows(7, 61, torch.float32)
    cuts = [(0, 20), (20, 21), (21, 61)]
    parts = [
        implementation.forward_shard(logits[:, low:high], labels, TEMPERATURE, with_entropy, low) for low, high in cuts
    ]
    merged = torch_passes.merge_shards(parts, labels, TEMPERATURE)
    whole = torch_passes.forward(logits.double(), labels, TEMPERATURE, with_entropy)
    for found, expected in zip(merged, whole, strict=True):
        assert found is expected is None or relative_error(found, expected) < VECTOR_ERROR
    gradient = torch.cat(
        [
            implementation.backward(logits[:, low:high], labels, merged[1], coefficients, TEMPERATURE, low)
            for low, high in cuts
        ],
        1,
    )
    expected = torch_passes.backward(logits.double(), labels, whole[1], coefficients.double(), TEMPERATURE)
    assert relative_error(gradient, expected) < 1e-5


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_strided_rows(impl):
    logits, labels, coefficients = make_rows(6, 50, torch.bfloat16)
    wide = torch.full((6, 130), math.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 14:64] = logits
    implementation = IMPLEMENTATIONS[impl]
    for view in (wide[:, 14:64], logits.T.contiguous().T):
        for found, expected in zip(
            implementation.forward(view, labels, 1.0, True),
            implementation.forward(logits, labels, 1.0, True),
            strict=True,
        ):
            assert relative_error(found, expected) < 1e-6
    normalizer = implementation.forward(logits, labels, 1.0, False)[1]
    expected = implementation.backward(logits, labels, normalizer, coefficients, 1.0)
    view = wide[:, 14:64]
    assert torch.equal(implementation.backward(view, labels, normalizer, coefficients, 1.0, out=view), expected)
    assert torch.isnan(wide[:, :14]).all()
    assert torch.isnan(wide[:, 64:]).all()


@pytest.mark.parametrize("loss", LOSSES)
# PyTorch's own bounds check ends the process on a GPU.
@pytest.mark.parametrize("impl", ["triton"] if DEVICE == "cuda" else ["torch", "triton"])
def test_a_label_outside_the_vocabulary_is_an_error(impl, loss):
    case = make_case(seed=1)
    tensors = [x.to(DEVICE, torch.float32) if x.is_floating_point() else x.clone().to(DEVICE) for x in case.tensors]
    tensors[1][9] = 13
    with pytest.raises(DataError, match="document 2"):
        policy_loss(tensors[0].requires_grad_(), *tensors[1:], loss=loss, impl=impl)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity less infinity, in the interpreter
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [0, 2, 3])
@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_is_not_finite_makes_the_loss_nan_where_nobody_looks_for_it(impl, loss, field, poison):
    """An infinite log-ratio would be clamped to 20, and an advantage that is infinite give an infinite loss."""
    case = make_case(lengths=(3, 1), vocabulary=3)
    tensors = [x.to(DEVICE, torch.float32) if x.is_floating_point() else x.clone().to(DEVICE) for x in case.tensors]
    assert tensors[1].tolist()[0] == -1 <= tensors[1].tolist()[1]
    # Of the logits the label's: minus infinity elsewhere is a token of probability 0.
    tensors[field][(1, tensors[1][1]) if field == 0 else 1] = poison
    for gradient in (False, True):
        logits = tensors[0].clone().requires_grad_(gradient)
        out = policy_loss(logits, *tensors[1:], loss=loss, impl=impl, check_finite=False, metrics="basic")
        assert torch.isnan(out.loss.detach())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_totals_that_count_no_token_of_a_trained_document_are_refused(impl):
    case = make_case(lengths=(3, 1), vocabulary=3)
    tensors = [x.to(DEVICE, torch.float32) if x.is_floating_point() else x.to(DEVICE) for x in case.tensors]
    totals = StepTotals(2, 0, 2, 2, torch.tensor([0, 0]))
    for aggregation in ("token_mean", "prompt_mean"):
        options = {"aggregation": aggregation, "group_index": case.group_index.to(DEVICE), "totals": totals}
        with pytest.raises(ValueError, match=r"weight of a trained token is not finite: .* the totals count none"):
            policy_loss(*tensors, impl=impl, **options)


EDGE = 20.0
LOG_RATIOS = [500.0, 89.0, 21.0, EDGE, -EDGE, -21.0, -500.0]


@pytest.mark.parametrize(
    ("dtype", "impl"), [(torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, "triton")]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_huge_log_ratios_stay_finite(loss, advantage, dtype, impl):
    """Clamped to 20 on both sides, beyond which no gradient passes, not even one of e^-20; 20 itself is inside."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for log_ratio in LOG_RATIOS:
        logits = torch.zeros(1, 2, dtype=dtype, device=DEVICE, requires_grad=True)
        # Rounded to the steps of 20, so that the difference is 20 to the last bit.
        old = torch.zeros(1, 2, dtype=dtype).log_softmax(-1)[:, 0].to(DEVICE) - log_ratio
        tensors = zero, old, torch.tensor([advantage], dtype=dtype, device=DEVICE), zero
        options = {"loss": loss, "epsilon_low": 0.2, "epsilon_high": 0.25, "metrics": "basic"}
        out = policy_loss(logits, *tensors, impl=impl, **options)
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
        assert float(out.metrics["kl_new_old"]) == pytest.approx(ratio - 1 - max(-EDGE, min(EDGE, log_ratio)), **exact)
        assert float(out.metrics["clamped_log_ratio_fraction"]) == (abs(log_ratio) > EDGE)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("loss", SMOOTH)
def test_the_clip_does_not_act_at_its_bounds(loss, impl):
    """Ratios of exactly 2 and 1/2: e to the power of the log-prob of one of two equal tokens, or of minus it."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    new = policy_loss(
        torch.zeros(1, 2, device=DEVICE), zero, *torch.zeros(2, 1, device=DEVICE), zero, impl=impl
    ).log_probs
    for ratio, old in ((2.0, 2 * new), (0.5, 0 * new)):
        for inside in (True, False):
            wide = {"epsilon_low": 0.5 if inside else 0.499, "epsilon_high": 1.0 if inside else 0.999}
            advantage = 1.0 if ratio > 1 else -1.0
            logits = torch.zeros(1, 2, device=DEVICE, requires_grad=True)
            tensors = zero, old, torch.full((1,), advantage, device=DEVICE), zero
            out = policy_loss(logits, *tensors, loss=loss, impl=impl, metrics="basic", **wide)
            out.loss.backward()
            assert float(out.metrics["max_ratio_new_old"]) == ratio
            assert logits.grad[0].tolist() == ([-advantage * ratio / 2, advantage * ratio / 2] if inside else [0, 0])
            found = [float(out.metrics[f"clipped_{name}_fraction"]) for name in ("ratio", "low", "high")]
            assert found == ([0, 0, 0] if inside else [1, ratio < 1, ratio > 1])


def test_the_logits_can_be_given_up_once():
    case = make_case(seed=1)
    for loss in LOSSES:
        logits = case.logits.float().to(DEVICE).requires_grad_()
        rest = [x.to(DEVICE) for x in case.tensors[1:]]
        out = policy_loss(logits * 1, *rest, loss=loss, impl="triton", overwrite_logits=True)
        out.loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="first backward"):
            out.loss.backward()


@pytest.mark.parametrize(("loss", "aggregation"), PAIRS)
def test_pieces_of_a_step_with_totals(loss, aggregation):
    """Totals given, documents out of order and in two pieces: the kernels over T-vectors against PyTorch's."""
    case = make_case(seed=7, temperature=TEMPERATURE)
    order = torch.randperm(len(case.labels), generator=torch.Generator().manual_seed(0))
    _, labels, old, advantages, index = (x[order] for x in case.tensors)
    totals = StepTotals(9, 40, 2, 4, torch.tensor([11, 7, 13, 9]))
    options = {
        "loss": loss,
        "aggregation": aggregation,
        "divisor": 8.0 if aggregation == "constant" else None,
        "group_index": case.group_index.to(DEVICE),
        "num_documents": 6,
        "totals": totals,
        "temperature": TEMPERATURE,
        "metrics": "with_entropy",
        **EPSILONS[loss],
    }
    outs = []
    for impl in ("triton", "torch"):
        leaf = case.logits[order].to(DEVICE, torch.float32).requires_grad_()
        rest = labels.to(DEVICE), old.float().to(DEVICE), advantages.float().to(DEVICE), index.to(DEVICE)
        out = policy_loss(leaf, *rest, impl=impl, **options)
        out.loss.backward()
        outs.append([out.loss.detach(), leaf.grad, out.metric_sums.sums, out.metric_sums.maxima])
    for found, expected in zip(*outs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_vectors_may_be_views(loss):
    """One advantage for all tokens by expand, old log-probs with a stride: not what kernels may read as they lie."""
    case = make_case(seed=2)
    logits, labels, old, _, index = (
        x.to(DEVICE, torch.float32) if x.is_floating_point() else x.to(DEVICE) for x in case.tensors
    )
    strided = torch.stack([old, torch.full_like(old, math.nan)], 1)[:, 0]
    one = torch.ones(1, device=DEVICE).expand(len(old))
    results = []
    for tensors in ((labels, strided, one, index), (labels, old, one.clone(), index)):
        leaf = logits.clone().requires_grad_()
        policy_loss(leaf, *tensors, loss=loss, impl="triton", **EPSILONS[loss]).loss.backward()
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
    """No kernel may take a family for one that it has a formula for: not even one that inherits from it."""
    case = make_case()
    for impl in IMPLEMENTATIONS:
        results = []
        for loss in (family(0.1, 0.1), family_of(base, epsilon_low=0.1, epsilon_high=0.1)):
            logits = case.logits.float().to(DEVICE).requires_grad_()
            tensors = [x.to(DEVICE) for x in case.tensors[1:]]
            options = {"num_documents": case.num_documents, "metrics": "basic", "impl": impl}
            out = policy_loss(logits, *tensors, loss=loss, **options)
            out.loss.backward()
            results.append((out.loss.detach(), out.metrics["ratio_new_old"], logits.grad))
        halved, whole = results
        for ours, theirs in zip(halved, (whole[0] / 2, whole[1], whole[2] / 2), strict=True):
            assert relative_error(ours, theirs) < 1e-5


def test_gradcheck():
    case = make_case(seed=5, vocabulary=5, lengths=(3, 2, 2))
    for loss in SMOOTH:

        def value(logits, loss=loss):
            return policy_loss(logits, *case.tensors[1:], loss=loss, impl="torch", **EPSILONS[loss]).loss

        assert torch.autograd.gradcheck(value, (case.logits.clone().requires_grad_(),), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(("dtype", "message"), [(torch.float64, "float32"), (torch.int64, "float32")])
def test_triton_refuses_what_it_cannot_do(dtype, message):
    with pytest.raises(ValueError, match=message):
        triton_passes.check_runs_on(torch.zeros(2, 3, dtype=dtype, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32768, 128256, 151936, 151937, 262144, 700002])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_shared_by_programs(dtype, columns):
    """Vocabularies of real models, whose rows several programs share; the last two take the kernels that need none."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = 600  # more rows than programs run at once
    logits = (3 * torch.randn(rows, columns, generator=generator, device=DEVICE)).to(dtype)
    labels = torch.randint(0, columns, (rows,), generator=generator, device=DEVICE)
    labels[:8] = torch.tensor([0, columns - 1, 4096, 4095, columns // 2, 40960, 32767, 1], device=DEVICE) % columns
    for with_entropy in (False, True):
        exact = [
            torch_passes.forward_score_(z.double(), y, TEMPERATURE, True, torch.float64)
            for z, y in zip(logits.split(100), labels.split(100), strict=True)
        ]
        work = logits.clone()
        found = triton_passes.forward_score_(work, labels, TEMPERATURE, with_entropy, dtype)
        again = triton_passes.forward_score_(logits.clone(), labels, TEMPERATURE, with_entropy, dtype)
        assert relative_error(found[0], torch.cat([x[0] for x in exact])) < VECTOR_ERROR
        if with_entropy:
            assert relative_error(found[1], torch.cat([x[1] for x in exact])) < VECTOR_ERROR
        error = sum((a.double() - b[2]).norm() ** 2 for a, b in zip(found[2].split(100), exact, strict=True)).sqrt()
        norm = sum(b[2].norm() ** 2 for b in exact).sqrt()
        assert float(error / norm) < GRADIENT_ERROR[dtype]
        assert torch.equal(found[2], again[2])
        assert torch.equal(found[0], again[0])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [151936, 151937])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", LOSSES)
def test_more_logits_than_int32_can_count(loss, dtype, columns):
    """In one pass (of words: those of bfloat16 are half as many) and, for odd rows and `gspo`, in two.

    Zeros lie where an offset that went through 32 bits would point, so that a wrong number is read and not nothing.
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
    options = {"loss": loss, "aggregation": "constant", "divisor": 1.0, "num_documents": 32, "impl": "triton"}
    last = logits[tail].float().clone().requires_grad_()  # a copy: the logits are overwritten
    leaf = logits.requires_grad_()
    out = policy_loss(leaf, labels, old, advantages, index, **options, overwrite_logits=True)
    out.loss.backward()
    expected = policy_loss(last, labels[tail], old[tail], advantages[tail], index[tail], **options | {"impl": "torch"})
    expected.loss.backward()
    assert relative_error(leaf.grad[tail], last.grad) < GRADIENT_ERROR[dtype] * 2
    assert (memory[: 2**31] == 0).all()
    assert relative_error(out.log_probs[tail], expected.log_probs) < 1e-5
