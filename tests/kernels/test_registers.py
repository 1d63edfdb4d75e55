"""The kernels compile for a GPU under every family and penalty, and spill no register that they
should keep, as NVIDIA's cuobjdump reports. No GPU is needed.

A value that does not fit into the registers of the one-pass kernel is read back from memory between
two rows, and all programs of a row wait for it. That takes 5 % of the time on an H200, and no other
test would notice.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders.losses import EVERY_LOSS

from pgtoolkit.losses.kl import FULL_KINDS, KINDS
from pgtoolkit.losses.reference_families import BY_DOCUMENT

VOCABULARY = 151936
COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pgtoolkit.kernels import triton_families as families, triton_passes
from pgtoolkit.losses.families import FAMILIES, Dppo, Grpo

def compiled(kernel, sizes, types, other, aligned, **options):
    types = types | dict.fromkeys(sizes, "constexpr")
    signature = {name: types.get(name, other) for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in aligned or signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.asm["cubin"]

numbers = dict.fromkeys(("number0", "number1", "number2", "number3"), "fp32")
known = {name: family() for name, family in FAMILIES.items()}
known |= {"dual_clip": Grpo(dual_clip=3.0), "binary_kl": Dppo(divergence="binary_kl")}
known |= {"score": None}

def one_pass(family, kind, half, bonus):
    from pgtoolkit.kernels.triton_one_pass import one_pass_kernel
    threads, columns = 256, VOCABULARY
    most = triton_passes._MAX_BLOCKS
    if family is not None and kind is None:
        most = triton_passes._MAX_BLOCKS_SHARED_GRPO
    elif family is not None:
        most = triton_passes._MAX_BLOCKS_SHARED_PENALTY
    needed = -(-columns // ((2 if half else 1) * 4 * threads))
    share = -(-needed // most)
    slope = None if family is None else families.slope_of(family)
    sizes = dict(SLOPE=slope, SHARE=share, BLOCKS=-(-needed // share), THREADS=threads)
    types = dict.fromkeys(("logits", "out_elements"), "*" + (half or "fp32")) | numbers
    types |= dict.fromkeys(("words", "out"), "*i32" if half else "*fp32")
    types |= dict.fromkeys(("labels", "slots"), "*i64")
    types |= dict.fromkeys(("num_rows", "zero", "sixteen", "upper"), "i32")
    types |= dict.fromkeys(strides := ("row_stride", "out_stride", "num_columns"), "i32")
    types |= dict.fromkeys(("scale", "inverse_temperature"), "fp32")
    sizes |= dict(KL=kind, BONUS=bonus, ENTROPY=bonus, HALF=half, PTX=True)
    registers = 65536 // triton_passes._RESIDENT_THREADS
    options = dict(num_warps=threads // 32, maxnreg=registers)
    return compiled(one_pass_kernel, sizes, types, "*fp32", strides, **options)

def draw(kernel, half):
    from pgtoolkit.kernels import triton_draw
    sizes = dict(BLOCK=8192, BLOCKS=triton.next_power_of_2(triton.cdiv(VOCABULARY, 8192)))
    types = dict(logits="*" + half, uniform="*fp64", inverse_temperature="fp32")
    types |= dict.fromkeys(("tokens", "offsets", "positions", "following"), "*i64")
    types |= dict.fromkeys(("row_stride", "num_columns"), "i32")
    kernel = triton_draw.blocks_kernel if kernel == "blocks" else triton_draw.draw_kernel
    return compiled(kernel, sizes, types, "*fp32", ("row_stride", "num_columns"), num_warps=16)

def attention(half, group, parts, turns):
    from pgtoolkit.kernels.triton_attention import attention_kernel
    dot = half != "fp32" or group > 4
    sizes = dict(HEADS=2, GROUP=group, QUERIES=16 if dot else group)
    sizes |= dict(WIDTH=64, COLUMNS=64, PARTS=parts, DOT=dot)
    sizes |= dict(BLOCK=32 if half == "fp32" else 64)
    sizes |= dict(NUMBER=triton.language.float32) | ({} if parts > 1 else dict(log_sums=None))
    sizes |= {} if turns else dict(cosines=None, sines=None)
    types = dict(positions="*i64", log_sums="*fp32", scale="fp32")
    types |= dict(out="*fp32" if parts > 1 else "*" + half)
    types |= dict.fromkeys(strides := ("query_stride", "key_stride", "value_stride"), "i32")
    types |= dict.fromkeys(("room", "window"), "i32")
    return compiled(attention_kernel, sizes, types, "*" + half, strides, num_warps=4)

def combine():
    from pgtoolkit.kernels.triton_attention import combine_kernel
    sizes = dict(GROUP=7, WIDTH=64, COLUMNS=64, PARTS=4)
    return compiled(combine_kernel, sizes, dict(out="*bf16"), "*fp32", (), num_warps=2)

def full_kl(which, name, half):
    from pgtoolkit.kernels.triton_two_pass import backward_kernel, divergence_kernel
    types = dict.fromkeys(("logits", "gradient", "ref_logits"), "*" + half) | dict(labels="*i64")
    strides = ("row_stride", "gradient_stride", "ref_stride", "num_columns")
    types |= dict.fromkeys(strides, "i32")
    types |= dict.fromkeys(("num_rows", "vocabulary_start"), "i32")
    types |= dict.fromkeys(("scale", "inverse_temperature"), "fp32")
    if which == "divergence":
        sizes = dict(KIND=name, BLOCK=4096)
        return compiled(divergence_kernel, sizes, types, "*fp32", strides, num_warps=8)
    sizes = dict(KIND=name, BONUS=True, BLOCK=2048)
    return compiled(backward_kernel, sizes, types, "*fp32", strides, num_warps=2)

for line in sys.stdin:
    kernel, name, kind, path = line.split()
    if kernel in ("draw", "blocks", "attention", "combine"):
        sizes = map(int, name.split("x")) if kernel == "attention" else ()
        others = {"attention": lambda: attention(kind, *sizes), "combine": combine}
        made = others.get(kernel, lambda: draw(kernel, kind))()
        open(path, "wb").write(made)
        print("compiled", flush=True)
        continue
    if kernel in ("divergence", "backward"):
        open(path, "wb").write(full_kl(kernel, name, kind))
        print("compiled", flush=True)
        continue
    half = "" if kernel.endswith("fp32") else "fp16" if kernel.endswith("fp16") else "bf16"
    try:
        made = one_pass(known[name], None if kind == "none" else kind, half, "bonus" in kernel)
        open(path, "wb").write(made)
        print("compiled", flush=True)
    except Exception as error:
        print(repr(str(error)), flush=True)
""".replace("VOCABULARY", str(VOCABULARY))
BY_TOKEN = [name for name in (*EVERY_LOSS, "dual_clip", "binary_kl") if name not in BY_DOCUMENT]


@pytest.fixture(scope="module")
def usage_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that compiles a kernel and returns cuobjdump's report on it."""
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").exists():
        pytest.skip("this triton brings no tools for NVIDIA's GPUs")
    folder = tmp_path_factory.mktemp("kernels")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILE],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def usage(kernel: str, family: str, kl: str = "none") -> str:
        compiled = folder / f"{kernel}_{family}_{kl}.cubin"
        print(kernel, family, kl, compiled, file=process.stdin, flush=True)
        assert process.stdout.readline() == "compiled\n"
        command = [str(tools / "cuobjdump"), "-res-usage", str(compiled)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    yield usage
    process.stdin.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kl"),
    [*((name, "none") for name in [*BY_TOKEN, "score"]), *(("grpo", kind) for kind in KINDS)],
)
def test_the_one_pass_kernel_spills_no_register(usage_of, family, kl):
    usage = usage_of("one_pass", family, kl)
    assert " STACK:0 " in usage, usage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kl"),
    [("bf16", "k3_ratio"), ("fp16", "none"), ("fp16", "k3_ratio"), ("fp32", "none")],
)
def test_the_one_pass_kernel_with_an_entropy_bonus_spills_at_most_24_bytes(usage_of, dtype, kl):
    """With four blocks a program it would spill none, but take a quarter longer."""
    usage = usage_of(f"one_pass_bonus_{dtype}", "grpo", kl)
    assert stack_bytes(usage) <= (24 if dtype == "fp16" else 16), usage


def stack_bytes(usage: str) -> int:
    """Return the bytes of the stack of a thread, where registers are spilled to."""
    return int(re.search(r" STACK:(\d+) ", usage)[1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_that_draw_spill_at_most_a_division_in_float64(usage_of, dtype):
    """The division takes 8 bytes."""
    assert " STACK:0 " in usage_of("blocks", "none", dtype)
    usage = usage_of("draw", "none", dtype)
    assert stack_bytes(usage) <= 8, usage


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [*zip(FULL_KINDS, ("bf16", "fp32"), strict=True)])
def test_the_kernels_of_the_full_kl_spill_no_register(usage_of, kind, dtype):
    usage = usage_of("divergence", kind, dtype) + usage_of("backward", kind, dtype)
    assert usage.count(" STACK:0 ") == 2, usage


@pytest.mark.slow
def test_the_kernels_for_attention_spill_no_register(usage_of):
    """Sizes are the heads of a group, the parts of a row, and whether the kernel turns queries and
    keys."""
    for sizes, dtype in (
        ("7x4x0", "bf16"),
        ("4x4x0", "fp32"),
        ("7x1x1", "bf16"),
        ("7x4x1", "bf16"),
        ("1x1x1", "fp32"),
    ):
        usage = usage_of("attention", sizes, dtype) + usage_of("combine", sizes)
        assert usage.count(" STACK:0 ") == 2, usage
