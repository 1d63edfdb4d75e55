"""The Triton kernels of a decoded token, against products in float64.

Without a GPU they run under Triton's interpreter, which multiplies float32.
"""

import pytest
import torch
from builders.losses import DEVICE
from torch import Tensor
from torch.nn import functional

from pgtoolkit.kernels import triton_token
from pgtoolkit.kernels.triton_token import (
    gated_product,
    product_before_norm,
    product_in_parts,
    sum_and_norm,
)

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCES = {torch.float32: (1e-5, 2e-4), torch.bfloat16: (2**-7, 2**-4)}
"""Relative and absolute errors; the interpreter cuts bfloat16 off where a GPU rounds it."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(actual: Tensor, exact: Tensor) -> None:
    relative, absolute = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=relative, atol=absolute)


@pytest.fixture
def small_tiles(monkeypatch):
    """The interpreter takes its time for large tiles; a share here is of two depths."""
    tile = triton_token.Tile(rows=16, columns=32, depth=32, stages=2, warps=4, share=64)
    monkeypatch.setattr(triton_token, "_GATED", tile)
    monkeypatch.setattr(triton_token, "_LONG", tile)
    monkeypatch.setattr(triton_token, "_BEFORE_NORM", tile)
    monkeypatch.setattr(triton_token, "_SHORT", tile._replace(columns=16))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("rows", "width", "columns", "num_parts"),
    [(1, 8, 24, 1), (20, 72, 40, 2), (33, 168, 96, 3), (16, 64, 32, 1)],
)
def test_products_are_those_of_float64(rows, width, columns, num_parts):
    """A tile ends inside of the rows, of the columns and of a row's numbers."""
    x = random(rows, width)
    weight = random(2 * columns, width, seed=1)
    exact = x.double() @ weight.double().T
    gate, up = exact.chunk(2, -1)
    assert_near(gated_product(x, weight), functional.silu(gate) * up)
    parts = product_in_parts(x, weight)
    assert parts.dtype == torch.float32
    assert len(parts) == num_parts
    assert_near(parts.sum(0), exact)
    for part, start in zip(parts, range(0, width, 64), strict=True):
        numbers = slice(start, start + 64)
        assert_near(part, x[:, numbers].double() @ weight[:, numbers].double().T)


@pytest.mark.usefixtures("small_tiles")
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it():
    x = random(37, 136)
    weight = random(80, 136, seed=1)
    residual = random(37, 80, seed=2)
    factor = random(80, seed=3)
    gated = gated_product(x, weight)
    parts = product_in_parts(x, weight)
    results = sum_and_norm(residual, parts, factor, 0.1)
    for rows in (slice(0, 1), slice(5, 25)):
        assert torch.equal(gated_product(x[rows], weight), gated[rows])
        assert torch.equal(product_in_parts(x[rows], weight), parts[:, rows])
        of_rows = sum_and_norm(residual[rows], parts[:, rows].contiguous(), factor, 0.1)
        assert all(
            torch.equal(some, every[rows]) for some, every in zip(of_rows, results, strict=True)
        )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_parts", "rows", "width"), [(1, 2, 7), (3, 5, 896), (2, 1, 1024)])
def test_the_parts_of_a_product_are_added_and_normed(num_parts, rows, width, dtype):
    hidden = random(rows, width, dtype=dtype)
    parts = random(num_parts, rows, width, seed=1, dtype=torch.float32)
    weight = random(width, seed=2, dtype=dtype)
    normed, total = sum_and_norm(hidden, parts, weight, 0.3)
    assert (normed.dtype, total.dtype) == (dtype, dtype)
    exact = hidden.double() + parts.double().sum(0)
    assert_near(total, exact)
    inverse = torch.rsqrt(exact.square().mean(-1, keepdim=True) + 0.3)
    assert_near(normed, exact * inverse * weight.double())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("rows", "width", "middle", "columns"), [(1, 8, 24, 8), (20, 72, 104, 40)])
def test_a_norm_between_two_products_needs_no_kernel_of_its_own(rows, width, middle, columns):
    x = random(rows, width)
    weight = random(middle, width, seed=1)
    hidden = random(rows, middle, seed=2)
    factor = random(middle, seed=3)
    gate_and_up = random(2 * columns, middle, seed=4)
    total, weighted, squares = product_before_norm(x, weight, hidden, factor)
    exact = hidden.double() + x.double() @ weight.double().T
    assert_near(total, exact)
    assert_near(weighted, exact * factor.double())
    assert_near(squares.sum(0), exact.square().sum(-1))
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 0.3) * factor.double()
    gate, up = (normed @ gate_and_up.double().T).chunk(2, -1)
    gated = gated_product(weighted, gate_and_up, squares, 0.3)
    assert_near(gated, functional.silu(gate) * up)
