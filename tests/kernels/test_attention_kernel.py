"""The Triton kernels for attention over a cache, against loops in float64.

Without a GPU they run under Triton's interpreter.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from builders.losses import DEVICE
from triton.runtime import interpreter

from pgtoolkit.kernels import triton_attention
from pgtoolkit.kernels.triton_attention import attend

ROOM = 300


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """The interpreter multiplies the bits of bfloat16 as if they were integers: as float32 they are
    what they are."""
    right = interpreter.InterpreterBuilder.create_dot

    def as_float32(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(
            (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def create_dot(self, a, b, *others):
        return right(self, as_float32(a), as_float32(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def inputs(rows, heads, groups, width, dtype):
    """query, key, value, keys, values; the first three as one product gives them: rows lie
    apart."""
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(rows, 1, (heads + 2 * groups) * width, generator=generator).to(
        DEVICE, dtype
    )
    split = fused.split([heads * width, groups * width, groups * width], -1)
    query, key, value = (x.view(rows, 1, -1, width).transpose(1, 2) for x in split)
    cache = torch.randn(2, rows, groups, ROOM, width, generator=generator).to(DEVICE, dtype)
    return query, key, value, *cache


def expected(query, key, value, keys, values, positions, scaling, window):
    """Query by query and key by key, in float64."""
    rows, heads, _, width = query.shape
    repeats, out = heads // keys.shape[1], torch.zeros(rows, heads, width, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for head in range(heads):
            own = head // repeats
            first = 0 if window is None else max(0, position + 1 - window)
            all_keys = [*keys[row, own, first:position], key[row, own, 0]]
            all_values = [*values[row, own, first:position], value[row, own, 0]]
            products = torch.stack(
                [(query[row, head, 0].double() * k.double()).sum() for k in all_keys]
            )
            shares = (scaling * products).softmax(0)
            out[row, head] = sum(
                share * v.double() for share, v in zip(shares, all_values, strict=True)
            ).cpu()
    return out


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "window", "dtype", "tolerance"),
    [
        (6, 2, 16, None, torch.float32, 4e-6),
        (4, 4, 20, 40, torch.float32, 4e-6),
        (7, 1, 80, None, torch.float64, 2e-6),
        (14, 2, 64, None, torch.bfloat16, 3e-2),
        (17, 1, 24, 290, torch.float16, 2e-3),
        (2, 2, 5, 1, torch.bfloat16, 3e-2),
    ],
)
def test_a_token_sees_its_row_up_to_itself(
    monkeypatch, programs, heads, groups, width, window, dtype, tolerance
):
    """By one program a row and key-value head, and by several, of which some have nothing to
    read."""
    monkeypatch.setattr(triton_attention, "_PROGRAMS", programs)
    monkeypatch.setattr(triton_attention, "_FEWEST_PLACES", 70)
    _, key, value, keys, values = given = inputs(4, heads, groups, width, dtype)
    positions = torch.tensor([0, 1, 150, ROOM - 1], device=DEVICE)
    want = expected(*given, positions, 0.3, window)
    for row, position in enumerate(positions.tolist()):  # what is not seen is read by nobody
        keys[row, :, position:], values[row, :, position:] = torch.nan, torch.nan
    found = attend(*given, positions, 0.3, window)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double().cpu(), want, rtol=0, atol=tolerance)
    for row, position in enumerate(positions.tolist()):
        assert torch.equal(keys[row, :, position], key[row, :, 0])
        assert torch.equal(values[row, :, position], value[row, :, 0])
        assert keys[row, :, position + 1 :].isnan().all()
        assert keys[row, :, :position].isfinite().all()


def test_what_is_no_number_shows():
    given = inputs(2, 2, 1, 16, torch.float32)
    given[3][1, 0, 7] = torch.nan
    found = attend(*given, torch.tensor([9, 9], device=DEVICE), 0.25, None)
    assert found.isfinite().all(-1).tolist() == [[True, True], [False, False]]
