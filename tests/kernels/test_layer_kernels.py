"""The Triton kernels of a layer's backward pass, against autograd in float64.

Without a GPU they run under Triton's interpreter.
"""

import pytest
import torch
from builders.losses import DEVICE
from torch import Tensor
from torch.nn import functional

from pgtoolkit.kernels import triton_attention, triton_layer
from pgtoolkit.kernels.triton_layer import gate_backward, rms_norm_backward

TOLERANCES = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}
"""Relative errors of a number that was rounded: the interpreter cuts bfloat16 off."""
DTYPES = [*TOLERANCES]


def random(*shape: int, dtype: torch.dtype, device: str = DEVICE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_rounded(actual: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance / 4)


def check_gate(rows: int, width: int, dtype: torch.dtype, device: str = DEVICE) -> None:
    both = random(rows, 2 * width, dtype=dtype, device=device)
    by_gated = random(rows, width, dtype=dtype, device=device, seed=1)
    exact = both.double().requires_grad_()
    exact_gated = functional.silu(exact[:, :width]) * exact[:, width:]
    exact_gated.backward(by_gated.double())
    by_both, gated = gate_backward(both, by_gated)
    assert_rounded(gated, exact_gated.detach())
    assert_rounded(by_both, exact.grad)
    assert (by_both.data_ptr(), gated.data_ptr()) == (both.data_ptr(), by_gated.data_ptr())


def check_norm(
    rows: int, width: int, dtypes: tuple[torch.dtype, torch.dtype], device: str = DEVICE
) -> None:
    """dtypes: of the residual stream, and of products."""
    stream, products = dtypes
    epsilon = 0.3
    x = random(rows, width, dtype=stream, device=device)
    weight = random(width, dtype=torch.float32, device=device, seed=1)
    by_normed = random(rows, width, dtype=products, device=device, seed=2)
    by_x = random(rows, width, dtype=stream, device=device, seed=3)
    exact = x.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    inverse = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    (exact * inverse * exact_weight).backward(by_normed.double())
    results = rms_norm_backward(x, weight, epsilon, by_normed, by_x, products)
    total, rounded, by_weight = results
    assert_rounded(total, exact.grad + by_x.double())
    assert_rounded(rounded, exact.grad + by_x.double())
    assert (total.dtype, rounded.dtype, by_weight.dtype) == (*dtypes, torch.float32)
    error = (by_weight.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 1e-6
    again = rms_norm_backward(x, weight, epsilon, by_normed, by_x, products)
    assert all(map(torch.equal, again, results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 4864), (2, 1024)])
def test_the_gate_and_its_derivative_are_written_over_the_inputs(rows, width, dtype):
    check_gate(rows, width, dtype)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("rows", "width"), [(1, 896), (3, 7), (11, 48)])
def test_the_derivative_of_a_norm_is_added_to_the_other_gradient(monkeypatch, rows, width, dtypes):
    """Four programs have two or three rows each of eleven."""
    monkeypatch.setattr(triton_layer, "_NORM_PROGRAMS", 4)
    check_norm(rows, width, dtypes)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "width"), [(896, 4864), (3584, 18944), (8192, 28672)])
def test_a_gpu_computes_thousands_of_rows_right(hidden, width):
    for dtype in DTYPES:
        check_gate(2001, width, dtype, "cuda")
        check_norm(2001, hidden, (torch.float32, dtype), "cuda")


@pytest.mark.gpu
def test_a_number_of_rows_that_16_divides_compiles_nothing_new():
    kernels = (triton_layer.rms_norm_kernel, triton_attention.attention_kernel)
    compiled = []
    for rows in (33, 32, 48):
        check_norm(rows, 64, (torch.float32, torch.bfloat16), "cuda")
        query, key, value = (random(4, 2, 1, 64, dtype=torch.bfloat16) for _ in range(3))
        keys, values = (random(4, 2, rows, 64, dtype=torch.bfloat16) for _ in range(2))
        positions = torch.full((4,), rows - 1, device="cuda")
        triton_attention.attend(query, key, value, keys, values, positions, 0.125, None)
        compiled.append([len(kernel.device_caches[0][0]) for kernel in kernels])
    assert compiled == compiled[:1] * 3
