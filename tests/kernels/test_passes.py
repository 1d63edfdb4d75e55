"""The passes over the vocabulary against float64: every implementation, dtype and odd shape.

Without a GPU the Triton kernels run under Triton's interpreter, one program after the other.
"""

import math

import pytest
import torch
from builders.losses import DEVICE, GRADIENT_ERROR, IMPLEMENTATIONS, TEMPERATURE, relative_error

from pgtoolkit.kernels import torch_passes, triton_passes

VECTOR_ERROR = 2e-6


def make_rows(rows, columns, dtype, seed=0):
    """Logits with an untrained row of NaN, a row with tokens of probability 0, and a row whose
    coefficient is 0."""
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
        *((torch.float32, columns) for columns in (1, 37, 4095, 4098)),
        *((torch.bfloat16, 37), (torch.float16, 4096)),
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
    exact = torch_passes.backward(
        logits.double(), labels, expected[1], coefficients.double(), TEMPERATURE
    )
    assert relative_error(gradient, exact) < GRADIENT_ERROR[dtype]
    assert (gradient[labels < 0] == 0).all()
    assert (gradient[coefficients == 0] == 0).all()
    in_place = triton_passes.backward(logits, labels, found[1], *arguments[1:], out=logits)
    assert torch.equal(in_place, gradient)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "score_dtype", "columns"),
    [
        *((torch.float32, torch.float32, columns) for columns in (1, 4095, 8194)),
        *((torch.bfloat16, torch.bfloat16, 4096), (torch.float16, torch.float16, 38)),
        (torch.float32, torch.bfloat16, 38),
    ],
)
def test_score_overwrites_the_logits(dtype, score_dtype, columns, with_entropy):
    logits, labels, _ = make_rows(6, columns, dtype)
    logits, labels = logits[labels >= 0].contiguous(), labels[labels >= 0]
    exact = torch_passes.forward_score_(
        logits.double(), labels, TEMPERATURE, with_entropy, torch.float64
    )
    found = triton_passes.forward_score_(logits, labels, TEMPERATURE, with_entropy, score_dtype)
    assert relative_error(found[0], exact[0]) < VECTOR_ERROR
    if with_entropy:
        assert relative_error(found[1], exact[1]) < VECTOR_ERROR
    assert found[2].dtype == score_dtype
    assert relative_error(found[2], exact[2]) < GRADIENT_ERROR[score_dtype]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.float32, 1), (torch.float32, 4098), (torch.bfloat16, 37)],
)
def test_gradient_of_the_entropy(impl, dtype, columns):
    """Against autograd in float64 of c log p(label) + e H, row by row; also where c alone, or e
    alone, is 0."""
    implementation = IMPLEMENTATIONS[impl]
    logits, labels, coefficients = make_rows(6, columns, dtype)
    by_entropy = torch.linspace(-1, 1, 6, device=DEVICE)
    by_entropy[3], by_entropy[4] = 0.4, 0.0  # row 3 has c = 0
    _, normalizer, entropy = implementation.forward(logits, labels, TEMPERATURE, True)
    both = torch.stack([coefficients, by_entropy])
    arguments = labels, torch.cat([normalizer, entropy[None]]), both, TEMPERATURE
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
def test_extreme_logits(dtype, impl):
    """Logits of ten thousand: the log-probs of float32 must not be what a sum near 10000 rounds
    to."""
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
    whole = torch_passes.forward(logits.double(), labels, TEMPERATURE, with_entropy)
    for found, expected in zip(merged, whole, strict=True):
        assert found is expected is None or relative_error(found, expected) < VECTOR_ERROR
    gradient = torch.cat(
        [
            implementation.backward(
                logits[:, low:high], labels, merged[1], coefficients, TEMPERATURE, low
            )
            for low, high in cuts
        ],
        1,
    )
    expected = torch_passes.backward(
        logits.double(), labels, whole[1], coefficients.double(), TEMPERATURE
    )
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
    assert torch.equal(
        implementation.backward(view, labels, normalizer, coefficients, 1.0, out=view), expected
    )
    assert torch.isnan(wide[:, :14]).all()
    assert torch.isnan(wide[:, 64:]).all()


def test_triton_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="float32"):
        triton_passes.check_runs_on(torch.zeros(2, 3, dtype=torch.float64, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32768, 128256, 151936, 151937, 262144, 700002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_shared_by_programs(dtype, columns):
    """Vocabularies of real models, whose rows several programs share; the last two take the kernels
    that need none."""
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
        found = triton_passes.forward_score_(work, labels, TEMPERATURE, with_entropy, dtype)
        again = triton_passes.forward_score_(
            logits.clone(), labels, TEMPERATURE, with_entropy, dtype
        )
        assert relative_error(found[0], torch.cat([x[0] for x in exact])) < VECTOR_ERROR
        if with_entropy:
            assert relative_error(found[1], torch.cat([x[1] for x in exact])) < VECTOR_ERROR
        error = sum(
            (a.double() - b[2]).norm() ** 2 for a, b in zip(found[2].split(100), exact, strict=True)
        ).sqrt()
        norm = sum(b[2].norm() ** 2 for b in exact).sqrt()
        assert float(error / norm) < GRADIENT_ERROR[dtype]
        assert torch.equal(found[2], again[2])
        assert torch.equal(found[0], again[0])
