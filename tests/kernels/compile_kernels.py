"""Compiles kernels for a GPU of compute capability 9.0, without one; test_registers.py starts it.

A line of standard input is a JSON object: the name of a function of `KERNELS`, its arguments, and
the path of the file to be written. Each is answered by a line, "compiled" or the error.
"""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import float32

from pgtoolkit.kernels import (
    triton_attention,
    triton_draw,
    triton_families,
    triton_layer,
    triton_one_pass,
    triton_passes,
    triton_two_pass,
)
from pgtoolkit.losses.families import FAMILIES, Dppo, Grpo
from pgtoolkit.losses.function import FunctionFamily

VOCABULARY = 151936
CLASSES = {
    name: family() for name, family in FAMILIES.items() if not issubclass(family, FunctionFamily)
}
LOSSES = CLASSES | {
    "dual_clip": Grpo(dual_clip=3.0),
    "binary_kl": Dppo(divergence="binary_kl"),
    "squared_log_ratio": Dppo(0.5, 0.5, divergence="squared_log_ratio", sides="both"),
}


def compiled(
    kernel: triton.JITFunction,
    constants: dict,
    types: dict[str, str],
    *,
    divisible: tuple[str, ...] = (),
    **options: int,
) -> bytes:
    """Return the machine code of a kernel.

    constants: its constexpr arguments. types: of its other arguments; those left out are pointers
    to float32. divisible: numbers that are multiples of 16, as all pointers are. options: of the
    compiler.
    """
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(kernel.arg_names)
        if name in divisible or signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return program.asm["cubin"]


def one_pass(
    loss: str | None, kl: str | None = None, dtype: str = "bf16", bonus: bool = False
) -> bytes:
    """Compile the kernel of a loss with given logits; loss: None for log-probs alone."""
    threads = 256
    is_half = dtype != "fp32"
    max_blocks = triton_passes._MAX_BLOCKS
    slope = None
    if loss is not None:
        slope = triton_families.slope_of(LOSSES[loss])
        max_blocks = triton_passes._MAX_BLOCKS_SHARED_PENALTY
        if kl is None:
            max_blocks = triton_passes._MAX_BLOCKS_SHARED_GRPO
    columns_of_block = 4 * threads * (2 if is_half else 1)
    blocks = triton.cdiv(VOCABULARY, columns_of_block)
    share = triton.cdiv(blocks, max_blocks)
    constants = {
        "SLOPE": slope,
        "KL": kl,
        "BONUS": bonus,
        "ENTROPY": bonus,
        "HALF": dtype if is_half else "",
        "SHARE": share,
        "BLOCKS": triton.cdiv(blocks, share),
        "THREADS": threads,
        "PTX": True,
    }
    strides = ("row_stride", "out_stride", "num_columns")
    whole_numbers = (*strides, "num_rows", "zero", "sixteen", "upper")
    numbers = ("scale", "inverse_temperature", "number0", "number1", "number2", "number3")
    types = {
        **dict.fromkeys(("logits", "out_elements"), f"*{dtype}"),
        **dict.fromkeys(("words", "out"), "*i32" if is_half else "*fp32"),
        **dict.fromkeys(("labels", "slots"), "*i64"),
        **dict.fromkeys(whole_numbers, "i32"),
        **dict.fromkeys(numbers, "fp32"),
    }
    return compiled(
        triton_one_pass.one_pass_kernel,
        constants,
        types,
        divisible=strides,
        num_warps=threads // 32,
        maxnreg=65536 // triton_passes._RESIDENT_THREADS,
    )


def draw_blocks(dtype: str) -> bytes:
    return _of_draw(triton_draw.blocks_kernel, dtype)


def draw_head(dtype: str) -> bytes:
    rows, columns, depth = triton_draw._TILE
    constants = {
        "ROWS": rows,
        "COLUMNS": columns,
        "DEPTH": depth,
        "STAGES": triton_draw._STAGES,
    }
    return _of_draw(triton_draw.head_kernel, dtype, constants, triton_draw._HEAD_BLOCK, 8)


def draw(dtype: str) -> bytes:
    constants = {"hidden": None, "weight": None, "DEPTH": 1}
    return _of_draw(triton_draw.draw_kernel, dtype, constants)


def draw_of_hidden(dtype: str) -> bytes:
    constants = {"logits": None, "DEPTH": 128}
    return _of_draw(triton_draw.draw_kernel, dtype, constants, triton_draw._HEAD_BLOCK, 8)


def _of_draw(
    kernel: triton.JITFunction,
    dtype: str,
    constants: dict | None = None,
    block: int = triton_draw._BLOCK,
    num_warps: int = 16,
) -> bytes:
    """Compile one of the kernels that draw tokens."""
    constants = (constants or {}) | {
        "BLOCK": block,
        "BLOCKS": triton.next_power_of_2(triton.cdiv(VOCABULARY, block)),
    }
    sizes = ("row_stride", "num_rows", "num_columns", "width")
    types = {
        **dict.fromkeys(("logits", "hidden", "weight"), f"*{dtype}"),
        "uniform": "*fp64",
        "inverse_temperature": "fp32",
        **dict.fromkeys(("tokens", "offsets", "positions", "following"), "*i64"),
        **dict.fromkeys(sizes, "i32"),
    }
    if kernel is triton_draw.head_kernel:
        rows, columns, depth = triton_draw._TILE
        types |= {
            "hidden": f"tensordesc<{dtype}[{rows},{depth}]>",
            "weight": f"tensordesc<{dtype}[{columns},{depth}]>",
        }
    return compiled(kernel, constants, types, divisible=sizes, num_warps=num_warps)


def attention(dtype: str, group: int, parts: int, rotates: bool) -> bytes:
    """Compile the attention of decoding.

    group: query heads of a key-value head. parts: of a row's keys. rotates: whether the kernel
    rotates queries and keys by their positions, and reads prompts from other rows.
    """
    uses_tensor_cores = dtype != "fp32" or group > 4
    constants = {
        "HEADS": 2,
        "GROUP": group,
        "QUERIES": 16 if uses_tensor_cores else group,
        "WIDTH": 64,
        "COLUMNS": 64,
        "BLOCK": 32 if dtype == "fp32" else 64,
        "PARTS": parts,
        "DOT": uses_tensor_cores,
        "NUMBER": float32,
    }
    if parts == 1:
        constants["log_sums"] = None
    if not rotates:
        optional = ("cosines", "sines", "prompt_rows", "prompt_lengths")
        constants |= dict.fromkeys(optional)
    pointer = f"*{dtype}"
    strides = ("query_stride", "key_stride", "value_stride")
    types = {
        **dict.fromkeys(("query", "key", "value", "keys", "values", "cosines", "sines"), pointer),
        **dict.fromkeys(("positions", "prompt_rows", "prompt_lengths"), "*i64"),
        "out": pointer if parts == 1 else "*fp32",
        "scale": "fp32",
        **dict.fromkeys((*strides, "room", "window"), "i32"),
    }
    kernel = triton_attention.attention_kernel
    return compiled(kernel, constants, types, divisible=strides, num_warps=4)


def combine() -> bytes:
    """Compile the kernel that adds the parts of a row's attention."""
    constants = {"GROUP": 7, "WIDTH": 64, "COLUMNS": 64, "PARTS": 4}
    return compiled(triton_attention.combine_kernel, constants, {"out": "*bf16"}, num_warps=2)


def divergence(kl: str, dtype: str) -> bytes:
    """Compile the forward pass of a KL divergence over the vocabulary."""
    constants = {"KIND": kl, "BLOCK": 4096}
    return _of_two_passes(triton_two_pass.divergence_kernel, constants, dtype, 8)


def backward(kl: str | None, dtype: str, top: int = 0) -> bytes:
    """Compile the backward pass of a KL divergence over the vocabulary, with an entropy bonus.

    top: tokens of score centering.
    """
    constants = {"KIND": kl, "BONUS": True, "TOP": top, "BLOCK": 2048}
    return _of_two_passes(triton_two_pass.backward_kernel, constants, dtype, 2)


def _of_two_passes(
    kernel: triton.JITFunction, constants: dict, dtype: str, num_warps: int
) -> bytes:
    strides = ("row_stride", "gradient_stride", "ref_stride", "num_columns")
    types = {
        **dict.fromkeys(("logits", "gradient", "ref_logits"), f"*{dtype}"),
        **dict.fromkeys(("labels", "top_ids"), "*i64"),
        **dict.fromkeys((*strides, "num_rows", "vocabulary_start", "num_top"), "i32"),
        **dict.fromkeys(("scale", "inverse_temperature", "beta"), "fp32"),
    }
    return compiled(kernel, constants, types, divisible=strides, num_warps=num_warps)


def norm(width: int, dtype: str) -> bytes:
    """Compile the derivative of a norm whose rows have `width` float32 numbers.

    dtype: of the gradient by the norm.
    """
    block = triton.next_power_of_2(width)
    types = {
        **dict.fromkeys(("by_normed", "rounded"), f"*{dtype}"),
        **dict.fromkeys(("num_rows", "width"), "i32"),
        "epsilon": "fp32",
    }
    return compiled(
        triton_layer.rms_norm_kernel,
        {"BLOCK": block},
        types,
        divisible=("width",),
        num_warps=triton_layer.warps_of_norm(block),
    )


KERNELS = {
    function.__name__: function
    for function in (
        one_pass,
        draw_blocks,
        draw_head,
        draw,
        draw_of_hidden,
        attention,
        combine,
        divergence,
        backward,
        norm,
    )
}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        function = KERNELS[request["kernel"]]
        try:
            Path(request["path"]).write_bytes(function(**request["arguments"]))
        except Exception as error:
            print(repr(str(error)), flush=True)
        else:
            print("compiled", flush=True)


if __name__ == "__main__":
    main()
