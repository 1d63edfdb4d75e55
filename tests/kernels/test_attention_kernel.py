"""The Triton kernels for attention over a cache, against loops in float64.

Without a GPU they run under Triton's interpreter.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from builders.losses import DEVICE
from torch import Tensor
from triton.runtime import interpreter

from pgtoolkit.kernels import triton_attention
from pgtoolkit.kernels.triton_attention import attend

ROOM = 300
"""Places of the cache."""


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """Let the interpreter multiply bfloat16 as float32: it would multiply the bits as integers."""
    original = interpreter.InterpreterBuilder.create_dot

    def as_float32(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle(
            (x.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def create_dot(self, a, b, *others):
        return original(self, as_float32(a), as_float32(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def inputs(rows: int, heads: int, groups: int, width: int, dtype: torch.dtype) -> tuple:
    """Return query, key, value, and the cache's keys and values.

    The first three are parts of one product, so their rows lie apart in memory.
    """
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(rows, 1, (heads + 2 * groups) * width, generator=generator).to(
        DEVICE, dtype
    )
    split = fused.split([heads * width, groups * width, groups * width], -1)
    query, key, value = (x.view(rows, 1, -1, width).transpose(1, 2) for x in split)
    cache = torch.randn(2, rows, groups, ROOM, width, generator=generator).to(DEVICE, dtype)
    return query, key, value, *cache


def attention_in_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Return the attention of each query over keys one by one, in float64: (rows, heads, width)."""
    rows, heads, _, width = query.shape
    heads_per_group = heads // keys.shape[1]
    out = torch.zeros(rows, heads, width, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(heads):
            group = head // heads_per_group
            all_keys = [*keys[row, group, first:position], key[row, group, 0]]
            all_values = [*values[row, group, first:position], value[row, group, 0]]
            products = torch.stack(
                [(query[row, head, 0].double() * k.double()).sum() for k in all_keys]
            )
            shares = (scaling * products).softmax(0)
            for share, v in zip(shares, all_values, strict=True):
                out[row, head] += (share * v.double()).cpu()
    return out


@pytest.mark.slow
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
def test_a_token_attends_to_its_row_up_to_itself_and_no_further_than_the_window(
    monkeypatch, programs, heads, groups, width, window, dtype, tolerance
):
    """One program reads a row and key-value head, or several do, some of which have nothing to
    read. The kernel also writes the token's key and value into the cache."""
    monkeypatch.setattr(triton_attention, "_PROGRAMS", programs)
    monkeypatch.setattr(triton_attention, "_FEWEST_PLACES", 70)
    query, key, value, keys, values = inputs(4, heads, groups, width, dtype)
    positions = torch.tensor([0, 1, 150, ROOM - 1], device=DEVICE)
    expected = attention_in_loops(query, key, value, keys, values, positions, 0.3, window)
    for row, position in enumerate(positions.tolist()):
        # Places after the token must not be read.
        keys[row, :, position:] = torch.nan
        values[row, :, position:] = torch.nan
    out = attend(query, key, value, keys, values, positions, 0.3, window)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)
    for row, position in enumerate(positions.tolist()):
        assert torch.equal(keys[row, :, position], key[row, :, 0])
        assert torch.equal(values[row, :, position], value[row, :, 0])
        assert keys[row, :, position + 1 :].isnan().all()
        assert keys[row, :, :position].isfinite().all()


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize(
    ("heads", "dtype", "tolerance"), [(2, torch.float32, 4e-6), (14, torch.bfloat16, 3e-2)]
)
def test_prompts_are_read_from_the_row_that_is_named(
    monkeypatch, programs, heads, dtype, tolerance
):
    """Places of the prompt are NaN in the other rows, which read no further place elsewhere."""
    monkeypatch.setattr(triton_attention, "_PROGRAMS", programs)
    monkeypatch.setattr(triton_attention, "_FEWEST_PLACES", 70)
    query, key, value, keys, values = inputs(5, heads, 2, 16, dtype)
    positions = torch.tensor([100, 299, 37, 160, 37], device=DEVICE)
    prompt_rows = torch.tensor([0, 0, 2, 0, 2], device=DEVICE)
    prompt_lengths = torch.tensor([100, 100, 37, 100, 37], device=DEVICE)
    for row, (prompt_row, length) in enumerate(zip(prompt_rows, prompt_lengths, strict=True)):
        keys[row, :, :length] = keys[prompt_row, :, :length]
        values[row, :, :length] = values[prompt_row, :, :length]
    expected = attention_in_loops(query, key, value, keys, values, positions, 0.3, None)
    for row in (1, 3, 4):
        keys[row, :, : prompt_lengths[row]] = torch.nan
        values[row, :, : prompt_lengths[row]] = torch.nan
    out = attend(
        query,
        key,
        value,
        keys,
        values,
        positions,
        0.3,
        None,
        prompts=(prompt_rows, prompt_lengths),
    )
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)


def test_a_nan_in_the_cache_reaches_the_attention_of_its_row_alone():
    query, key, value, keys, values = inputs(2, 2, 1, 16, torch.float32)
    keys[1, 0, 7] = torch.nan
    positions = torch.tensor([9, 9], device=DEVICE)
    out = attend(query, key, value, keys, values, positions, 0.25, None)
    assert out.isfinite().all(-1).tolist() == [[True, True], [False, False]]
