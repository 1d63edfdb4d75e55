"""FlashAttention's functions under the names of the package flash-attn, by the kernels at hand.

    python benchmarks/flash_attn_by_torch.py FOLDER

verl and transformers' continuous batching ask for the package flash-attn, which PyPI has as source
alone and which takes an hour to build. This writes FOLDER/flash_attn in its place: packed
attention, forward and backward, is the FlashAttention 2 that PyTorch itself contains
(`torch.nn.attention.varlen`), attention over a cache in pages is the FlashAttention 3 that vLLM
contains, and the cross entropy is compiled by torch.compile. With FOLDER and this file's folder on
PYTHONPATH both programs take it for flash-attn 2.8.3.

Of vLLM it needs the folder vllm/vllm_flash_attn alone, beside an empty vllm/__init__.py: so a GPU
without vLLM needs no more than these files of its wheel on PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

VERSION = "2.8.3"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_,
) -> Tensor:
    """Return attention by document, (tokens, heads, width).

    q: (tokens, heads, width); k, v: (keys, key-value heads, width). Causality counts from the end
    of both, as in flash-attn.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert dropout_p == 0
    window = (window_size[0], 0 if causal else window_size[1])
    options = {}
    if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        options["enable_gqa"] = True
    return varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        int(max_seqlen_q),
        int(max_seqlen_k),
        scale=softmax_scale,
        window_size=window,
        **options,
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_,
) -> Tensor:
    """Return attention of rows of equal length, (rows, length, heads, width)."""
    rows, length = q.shape[:2]
    num_keys = k.shape[1]
    ends = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    out = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ends * length,
        ends * num_keys,
        length,
        num_keys,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
    )
    return out.unflatten(0, (rows, length))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Write a token's key and value into its page and return its attention.

    Returns (rows, 1, heads, width).

    q: (rows, 1, heads, width); k, v: (rows, 1, key-value heads, width). k_cache, v_cache: (pages,
    tokens of a page, key-value heads, width). cache_seqlens: (rows,) int32, tokens before this one.
    block_table: (rows, pages of a row) int32, -1 where a row has no further page: such a token goes
    to the last page, which transformers keeps for it. A row that only fills up the batch has -1
    tokens.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func as paged_attention

    rows = len(q)
    num_pages, page_size = k_cache.shape[:2]
    numbers = k[0].numel()
    ends = torch.empty(rows + 1, dtype=torch.int32, device=q.device)
    seen = torch.empty_like(cache_seqlens)
    _write_token[(rows,)](
        k.contiguous(),
        v.contiguous(),
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        ends,
        seen,
        block_table.stride(0),
        num_pages,
        page_size,
        numbers,
        NUMBERS=triton.next_power_of_2(numbers),
    )
    out = paged_attention(
        q[:, 0],
        k_cache,
        v_cache,
        max_seqlen_q=1,
        cu_seqlens_q=ends,
        max_seqlen_k=block_table.shape[1] * page_size,
        seqused_k=seen,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=list(window_size),
        block_table=block_table,
        fa_version=3,
    )
    return out[:, None]


@triton.jit
def _write_token(
    k,
    v,
    k_cache,
    v_cache,
    lengths,
    block_table,
    ends,
    seen,
    table_stride,
    num_pages,
    page_size,
    numbers,
    NUMBERS: tl.constexpr,
):
    """Copy a row's key and value, `numbers` each, into its page.

    Also writes what the attention kernel needs besides: `ends`, where the rows' queries begin and
    end, and `seen`, the keys of each row.
    """
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    place = tl.maximum(length, 0)
    page = tl.load(block_table + row * table_stride + place // page_size)
    page = tl.where(page < 0, num_pages - 1, page)
    columns = tl.arange(0, NUMBERS)
    inside = columns < numbers
    at = (page.to(tl.int64) * page_size + place % page_size) * numbers + columns
    new = row.to(tl.int64) * numbers + columns
    tl.store(k_cache + at, tl.load(k + new, mask=inside), mask=inside)
    tl.store(v_cache + at, tl.load(v + new, mask=inside), mask=inside)
    tl.store(ends + row, row)
    tl.store(ends + row + 1, row + 1)
    tl.store(seen + row, length + 1)


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, inplace_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the losses, (tokens,) float32, of logits (tokens, vocabulary), and zeros.

    inplace_backward: ignored; the gradient gets memory of its own.
    """
    losses = _losses(logits, labels)
    return losses, torch.zeros_like(losses)


@torch.compile(dynamic=True)
def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    values = logits.float()
    return values.logsumexp(-1) - values.gather(-1, labels[:, None])[:, 0]


def install(folder: Path) -> None:
    """Write a package flash_attn of these functions, with the metadata that is asked for."""
    package = folder / "flash_attn"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(
        "from flash_attn_by_torch import (\n"
        "    flash_attn_func,\n"
        "    flash_attn_varlen_func,\n"
        "    flash_attn_with_kvcache,\n"
        ")\n"
        f'__version__ = "{VERSION}"\n'
    )
    # verl has its own padding where this lacks `rearrange`.
    (package / "bert_padding.py").write_text(
        "from transformers.modeling_flash_attention_utils import _pad_input as pad_input\n"
        "from transformers.modeling_flash_attention_utils import _unpad_input as unpad_input\n"
    )
    triton = package / "ops" / "triton"
    triton.mkdir(parents=True, exist_ok=True)
    (package / "ops" / "__init__.py").touch()
    (triton / "__init__.py").touch()
    (triton / "cross_entropy.py").write_text("from flash_attn_by_torch import cross_entropy_loss\n")
    metadata = folder / f"flash_attn-{VERSION}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
    )
    (metadata / "top_level.txt").write_text("flash_attn\n")
    (metadata / "RECORD").write_text("flash_attn/__init__.py,,\n")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
