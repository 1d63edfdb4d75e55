"""The one-pass kernel, compiled for a GPU (none is needed), keeps its row in registers.

One value that does not fit is read back from memory between two rows, which all programs of a row then wait for: 5 %
of the time on an H200, and no other test would notice.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

VOCABULARY = 151936
COMPILE = """
import os, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pgtoolkit.kernels import triton_passes
from pgtoolkit.kernels.triton_one_pass import one_pass_kernel as kernel
from pgtoolkit.kernels.triton_tokens import clipped

grpo, threads = sys.argv[1] == "grpo", 256
most = triton_passes._MAX_BLOCKS_SHARED_GRPO if grpo else triton_passes._MAX_BLOCKS
needed = -(-{vocabulary} // (2 * 4 * threads))
share = -(-needed // most)
sizes = dict(SURROGATE=clipped if grpo else None, SHARE=share, BLOCKS=-(-needed // share), THREADS=threads)
sizes |= dict(ENTROPY=False, HALF="bf16", PTX=True)
types = dict.fromkeys(("logits", "out_elements"), "*bf16") | dict.fromkeys(("words", "out"), "*i32")
types |= dict.fromkeys(("labels", "slots"), "*i64") | dict.fromkeys(sizes, "constexpr")
types |= dict.fromkeys(("num_rows", "zero", "sixteen", "upper"), "i32")
types |= dict.fromkeys(strides := ("row_stride", "out_stride", "num_columns"), "i32")
types |= dict.fromkeys(("scale", "inverse_temperature", "below", "above"), "fp32")
signature = {{name: types.get(name, "*fp32") for name in kernel.arg_names}}
aligned = {{
    (i,): [["tt.divisibility", 16]]
    for i, name in enumerate(kernel.arg_names)
    if name in strides or signature[name].startswith("*")
}}
source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=aligned)
options = {{"num_warps": threads // 32, "maxnreg": 65536 // triton_passes._RESIDENT_THREADS}}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
open(sys.argv[2], "wb").write(compiled.asm["cubin"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["grpo", "score"])
def test_nothing_is_spilled(what, tmp_path, monkeypatch):
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").exists():
        pytest.skip("this triton brings no tools for NVIDIA's GPUs")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    program, compiled = COMPILE.format(vocabulary=VOCABULARY), tmp_path / "kernel.cubin"
    subprocess.run([sys.executable, "-c", program, what, str(compiled)], check=True, cwd=Path(__file__).parents[2])
    usage = subprocess.run(
        [str(tools / "cuobjdump"), "-res-usage", str(compiled)], capture_output=True, text=True, check=True
    ).stdout
    assert " STACK:0 " in usage, usage
