"""The kernels compile for a GPU (none is needed) under every loss family, and the one-pass kernel keeps its row.

One value that does not fit is read back from memory between two rows, which all programs of a row then wait for: 5 %
of the time on an H200, and no other test would notice.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders.losses import EVERY_LOSS

from pgtoolkit.losses.reference import BY_DOCUMENT

VOCABULARY = 151936
COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pgtoolkit.kernels import triton_families as families, triton_objective, triton_passes
from pgtoolkit.losses.families import FAMILIES, Grpo

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
    open(sys.argv[3], "wb").write(made.asm["cubin"])

numbers = dict.fromkeys(("number0", "number1", "number2", "number3"), "fp32")
known = {name: family() for name, family in FAMILIES.items()} | {"dual_clip": Grpo(dual_clip=3.0), "score": None}
family = known[sys.argv[2]]
formula = None if family is None else triton_objective.formula_of(family)
if sys.argv[1] == "one_pass":
    from pgtoolkit.kernels.triton_one_pass import one_pass_kernel
    threads, columns = 256, VOCABULARY
    most = triton_passes._MAX_BLOCKS if family is None else triton_passes._MAX_BLOCKS_SHARED_GRPO
    needed = -(-columns // (2 * 4 * threads))
    share = -(-needed // most)
    sizes = dict(SURROGATE=formula and formula.surrogate, SHARE=share, BLOCKS=-(-needed // share), THREADS=threads)
    types = dict.fromkeys(("logits", "out_elements"), "*bf16") | dict.fromkeys(("words", "out"), "*i32") | numbers
    types |= dict.fromkeys(("labels", "slots"), "*i64")
    types |= dict.fromkeys(("num_rows", "zero", "sixteen", "upper"), "i32")
    types |= dict.fromkeys(strides := ("row_stride", "out_stride", "num_columns"), "i32")
    types |= dict.fromkeys(("scale", "inverse_temperature"), "fp32")
    sizes |= dict(ENTROPY=False, HALF="bf16", PTX=True)
    registers = 65536 // triton_passes._RESIDENT_THREADS
    compiled(one_pass_kernel, sizes, types, "*fp32", strides, num_warps=threads // 32, maxnreg=registers)
else:
    from pgtoolkit.kernels.triton_tokens import surrogate_kernel
    sizes = dict(SURROGATE=formula.surrogate, TOKEN=formula.token, BEYOND=formula.beyond, SCOPE=family.scope)
    sizes |= dict(OWN_WEIGHT=family.slope_of != "log_ratio", LEVEL=int(sys.argv[1]), BLOCK=triton_objective._BLOCK)
    types = dict(document_index="*i64", parts="*fp64", num_tokens="i32", num_documents="i32") | numbers
    compiled(surrogate_kernel, sizes, types, "*fp32", (), num_warps=8)
""".replace("VOCABULARY", str(VOCABULARY))
ALL = [*EVERY_LOSS, "dual_clip"]
BY_TOKEN = [name for name in ALL if name not in BY_DOCUMENT]


def usage_of(kernel, family, folder, monkeypatch) -> str:
    """What cuobjdump says of a kernel: "one_pass", or the level of the metrics of the kernel over vectors."""
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").exists():
        pytest.skip("this triton brings no tools for NVIDIA's GPUs")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    compiled = folder / "kernel.cubin"
    command = [sys.executable, "-c", COMPILE, kernel, family, str(compiled)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return subprocess.run(
        [str(tools / "cuobjdump"), "-res-usage", str(compiled)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", [*BY_TOKEN, "score"])
def test_nothing_is_spilled(family, tmp_path, monkeypatch):
    usage = usage_of("one_pass", family, tmp_path, monkeypatch)
    assert " STACK:0 " in usage, usage


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_the_kernel_over_vectors_compiles(family, tmp_path, monkeypatch):
    """The compiler knows less of Python than the interpreter does. -1: the coefficients alone."""
    for level in (-1, 2):
        assert "REG:" in usage_of(str(level), family, tmp_path, monkeypatch)
