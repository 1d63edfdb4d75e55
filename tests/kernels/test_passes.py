"""Each pass over the vocabulary is that of float64, in every implementation and dtype and for odd
shapes.

Without a GPU the Triton kernels run under Triton's interpreter, one program after the other.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from builders.losses import DEVICE, GRADIENT_ERROR, IMPLEMENTATIONS, TEMPERATURE, relative_error
from torch import Tensor

from pgtoolkit.kernels import torch_passes, triton_passes

VECTOR_ERROR = 2e-6


def make_rows(
    rows: int, columns: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels and coefficients.

    Row 1 is not trained and NaN, row 2 has tokens of probability 0, row 3 the coefficient 0.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(0, columns, (rows,), generator=generator)
    coefficients = torch.randn(rows, generator=generator)
    if rows > 3:
        labels[1] = -1
        logits[1] = math.nan
        labels[2] = 0
        logits[2, 1 : 1 + columns // 2] = -math.inf
        coefficients[3] = 0
    return logits.to(DEVICE), labels.to(DEVICE), coefficients.to(DEVICE)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        *((torch.float32, columns) for columns in (1, 37, 4095, 4098)),
        (torch.bfloat16, 37),
        (torch.float16, 4096),
    ],
)
def test_triton_passes_match_float64(dtype, columns, with_entropy):
    logits, labels, coefficients = make_rows(6, columns, dtype)
    vectors = triton_passes.forward(logits, labels, TEMPERATURE, with_entropy)
    expected = torch_passes.forward(logits.double(), labels, TEMPERATURE, with_entropy)
    assert_vectors_close(vectors, expected)
    normalizer = vectors[1]
    gradient = triton_passes.backward(logits, labels, normalizer, coefficients, TEMPERATURE)
    exact = torch_passes.backward(
        logits.double(), labels, expected[1], coefficients.double(), TEMPERATURE
    )
    assert relative_error(gradient, exact) < GRADIENT_ERROR[dtype]
    assert (gradient[labels < 0] == 0).all()
    assert (gradient[coefficients == 0] == 0).all()
    in_place = triton_passes.backward(
        logits, labels, normalizer, coefficients, TEMPERATURE, out=logits
    )
    assert torch.equal(in_place, gradient)


def assert_vectors_close(
    vectors: Sequence[Tensor | None], expected: Sequence[Tensor | None]
) -> None:
    """Assert that log-probs, normalizers and entropies are close, or missing on both sides."""
    for vector, expected_vector in zip(vectors, expected, strict=True):
        if vector is None or expected_vector is None:
            assert vector is expected_vector
        else:
            assert relative_error(vector, expected_vector) < VECTOR_ERROR


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "score_dtype", "columns"),
    [
        *((torch.float32, torch.float32, columns) for columns in (1, 4095, 8194)),
        (torch.bfloat16, torch.bfloat16, 4096),
        (torch.float16, torch.float16, 38),
        (torch.float32, torch.bfloat16, 38),
    ],
)
def test_the_pass_that_makes_the_score_matches_float64(dtype, score_dtype, columns, with_entropy):
    """The score is the gradient of the log-prob by the logits, whose memory it takes."""
    logits, labels, _ = make_rows(6, columns, dtype)
    trained = labels >= 0
    logits = logits[trained].contiguous()
    labels = labels[trained]
    exact = torch_passes.forward_score_(
        logits.double(), labels, TEMPERATURE, with_entropy, torch.float64
    )
    log_probs, entropies, score = triton_passes.forward_score_(
        logits, labels, TEMPERATURE, with_entropy, score_dtype
    )
    assert relative_error(log_probs, exact[0]) < VECTOR_ERROR
    if with_entropy:
        assert relative_error(entropies, exact[1]) < VECTOR_ERROR
    assert score.dtype == score_dtype
    assert relative_error(score, exact[2]) < GRADIENT_ERROR[score_dtype]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.float32, 1), (torch.float32, 4098), (torch.bfloat16, 37)],
)
def test_the_gradient_of_log_prob_and_entropy_is_that_of_autograd(impl, dtype, columns):
    """Autograd differentiates c log p(label) + e H in float64, row by row. Row 3 has c = 0, row 4
    e = 0."""
    implementation = IMPLEMENTATIONS[impl]
    logits, labels, coefficients = make_rows(6, columns, dtype)
    by_entropy = torch.linspace(-1, 1, 6, device=DEVICE)
    by_entropy[3] = 0.4
    by_entropy[4] = 0.0
    _, normalizer, entropy = implementation.forward(logits, labels, TEMPERATURE, True)
    normalizer_and_entropy = torch.cat([normalizer, entropy[None]])
    arguments = (
        labels,
        normalizer_and_entropy,
        torch.stack([coefficients, by_entropy]),
        TEMPERATURE,
    )
    gradient = implementation.backward(logits, *arguments)

    leaf = logits.double().requires_grad_()
    rows = (leaf / TEMPERATURE).log_softmax(-1)
    chosen = rows.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    terms = torch.where(rows.isinf(), 0.0, rows) * rows.exp()
    value = torch.where(labels >= 0, coefficients * chosen - by_entropy * terms.sum(-1), 0.0).sum()
    (expected,) = torch.autograd.grad(value, leaf)
    expected = torch.where((labels >= 0)[:, None], expected, 0.0)
    assert relative_error(gradient, expected) < GRADIENT_ERROR[dtype]
    assert relative_error(gradient[3], expected[3]) < GRADIENT_ERROR[dtype]
    assert (gradient[labels < 0] == 0).all()
    if columns > 1:
        cuts = ((logits[:, : columns // 3], 0), (logits[:, columns // 3 :], columns // 3))
        shards = [implementation.backward(part, *arguments, start) for part, start in cuts]
        assert relative_error(torch.cat(shards, 1), gradient) < 1e-6
    assert torch.equal(implementation.backward(logits, *arguments, out=logits), gradient)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_logits_near_10000_are_exact(dtype, impl):
    """Computed from a sum near 10000, float32 log-probs would have errors of 0.001."""
    generator = torch.Generator().manual_seed(0)
    logits = (1e4 * (2 * torch.rand(8, 40, generator=generator) - 1)).to(dtype)
    logits[0] = 1e4
    logits[1, :2] = 1e4  # a tie at the top
    labels = logits.argmax(-1)
    labels[-1] = 3
    log_probs, _, entropies = IMPLEMENTATIONS[impl].forward(
        logits.to(DEVICE), labels.to(DEVICE), 1.0, True
    )
    exact_log_probs, _, exact_entropies = torch_passes.forward(logits.double(), labels, 1.0, True)
    torch.testing.assert_close(log_probs.cpu().double(), exact_log_probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies.cpu().double(), exact_entropies, rtol=1e-5, atol=1e-6)
    if dtype == torch.float32:
        score = IMPLEMENTATIONS[impl].forward_score_(
            logits.clone().to(DEVICE), labels.to(DEVICE), 1.0, True, dtype
        )[2]
        exact = torch_passes.forward_score_(logits.double(), labels, 1.0, True, torch.float64)[2]
        torch.testing.assert_close(score.cpu().double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_vocabulary_shards_merge(impl, with_entropy):
    implementation = IMPLEMENTATIONS[impl]
    logits, labels, coefficients = make_rows(7, 61, torch.float32)
    cuts = [(0, 20), (20, 21), (21, 61)]
    parts = [
        implementation.forward_shard(logits[:, low:high], labels, TEMPERATURE, with_entropy, low)
        for low, high in cuts
    ]
    merged = torch_passes.merge_shards(parts, labels, TEMPERATURE)
    expected = torch_passes.forward(logits.double(), labels, TEMPERATURE, with_entropy)
    assert_vectors_close(merged, expected)
    gradients = [
        implementation.backward(
            logits[:, low:high], labels, merged[1], coefficients, TEMPERATURE, low
        )
        for low, high in cuts
    ]
    exact = torch_passes.backward(
        logits.double(), labels, expected[1], coefficients.double(), TEMPERATURE
    )
    assert relative_error(torch.cat(gradients, 1), exact) < 1e-5


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_that_lie_apart_in_memory_give_the_same_and_their_surroundings_stay(impl):
    logits, labels, coefficients = make_rows(6, 50, torch.bfloat16)
    wide = torch.full((6, 130), math.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 14:64] = logits
    implementation = IMPLEMENTATIONS[impl]
    for view in (wide[:, 14:64], logits.T.contiguous().T):
        vectors = implementation.forward(view, labels, 1.0, True)
        expected_vectors = implementation.forward(logits, labels, 1.0, True)
        for vector, expected in zip(vectors, expected_vectors, strict=True):
            assert relative_error(vector, expected) < 1e-6
    normalizer = implementation.forward(logits, labels, 1.0, False)[1]
    expected = implementation.backward(logits, labels, normalizer, coefficients, 1.0)
    view = wide[:, 14:64]
    assert torch.equal(
        implementation.backward(view, labels, normalizer, coefficients, 1.0, out=view), expected
    )
    assert torch.isnan(wide[:, :14]).all()
    assert torch.isnan(wide[:, 64:]).all()


def test_triton_refuses_logits_in_float64():
    with pytest.raises(ValueError, match="float32"):
        triton_passes.check_runs_on(torch.zeros(2, 3, dtype=torch.float64, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32768, 128256, 151936, 151937, 262144, 700002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_several_programs_share_match_float64_and_are_deterministic(dtype, columns):
    """The vocabularies are those of real models; rows of the last two are not shared."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = 600  # more rows than programs run at once
    logits = (3 * torch.randn(rows, columns, generator=generator, device=DEVICE)).to(dtype)
    labels = torch.randint(0, columns, (rows,), generator=generator, device=DEVICE)
    labels[:8] = (
        torch.tensor([0, columns - 1, 4096, 4095, columns // 2, 40960, 32767, 1], device=DEVICE)
        % columns
    )
    for with_entropy in (False, True):
        exact = [
            torch_passes.forward_score_(z.double(), y, TEMPERATURE, True, torch.float64)
            for z, y in zip(logits.split(100), labels.split(100), strict=True)
        ]
        work = logits.clone()
        log_probs, entropies, score = triton_passes.forward_score_(
            work, labels, TEMPERATURE, with_entropy, dtype
        )
        again = triton_passes.forward_score_(
            logits.clone(), labels, TEMPERATURE, with_entropy, dtype
        )
        assert relative_error(log_probs, torch.cat([x[0] for x in exact])) < VECTOR_ERROR
        if with_entropy:
            assert relative_error(entropies, torch.cat([x[1] for x in exact])) < VECTOR_ERROR
        error = sum(
            (a.double() - b[2]).norm() ** 2 for a, b in zip(score.split(100), exact, strict=True)
        ).sqrt()
        norm = sum(b[2].norm() ** 2 for b in exact).sqrt()
        assert float(error / norm) < GRADIENT_ERROR[dtype]
        assert torch.equal(score, again[2])
        assert torch.equal(log_probs, again[0])
