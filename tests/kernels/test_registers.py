"""The kernels compile for a GPU under every family and penalty, and spill no register that they
should keep, as NVIDIA's cuobjdump reports. No GPU is needed.

A value that does not fit into the registers of the one-pass kernel is read back from memory between
two rows, and all programs of a row wait for it. That takes 5 % of the time on an H200, and no other
test would notice.
"""

import json
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

VARIANTS = ("dual_clip", "binary_kl", "squared_log_ratio")
BY_TOKEN = [name for name in (*EVERY_LOSS, *VARIANTS) if name not in BY_DOCUMENT]


@pytest.fixture(scope="module")
def usage_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that has compile_kernels.py compile a kernel, and returns cuobjdump's
    report on it."""
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").exists():
        pytest.skip("this triton brings no tools for NVIDIA's GPUs")
    folder = tmp_path_factory.mktemp("kernels")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("compile_kernels.py")],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def usage(kernel: str, **arguments: object) -> str:
        path = folder / "kernel.cubin"
        request = {"kernel": kernel, "arguments": arguments, "path": str(path)}
        print(json.dumps(request), file=process.stdin, flush=True)
        assert process.stdout.readline() == "compiled\n"
        command = [str(tools / "cuobjdump"), "-res-usage", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    yield usage
    process.stdin.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "kl"),
    [*((name, None) for name in [*BY_TOKEN, None]), *(("grpo", kind) for kind in KINDS)],
)
def test_the_one_pass_kernel_spills_no_register(usage_of, loss, kl):
    usage = usage_of("one_pass", loss=loss, kl=kl)
    assert " STACK:0 " in usage, usage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kl"),
    [("bf16", "k3_ratio"), ("fp16", None), ("fp16", "k3_ratio"), ("fp32", None)],
)
def test_the_one_pass_kernel_with_an_entropy_bonus_spills_at_most_24_bytes(usage_of, dtype, kl):
    """With four blocks a program it would spill none, but take a quarter longer."""
    usage = usage_of("one_pass", loss="grpo", kl=kl, dtype=dtype, bonus=True)
    assert stack_bytes(usage) <= (24 if dtype == "fp16" else 16), usage


def stack_bytes(usage: str) -> int:
    """Return the bytes of the stack of a thread, where registers are spilled to."""
    return int(re.search(r" STACK:(\d+) ", usage)[1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_that_draw_spill_at_most_a_division_in_float64(usage_of, dtype):
    """The division takes 8 bytes."""
    assert " STACK:0 " in usage_of("draw_blocks", dtype=dtype)
    usage = usage_of("draw", dtype=dtype)
    assert stack_bytes(usage) <= 8, usage


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["draw_head", "draw_of_hidden"])
def test_the_kernels_that_draw_from_hidden_states_spill_no_register(usage_of, kernel):
    usage = usage_of(kernel, dtype="bf16")
    assert " STACK:0 " in usage, usage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip(FULL_KINDS, ("bf16", "fp32", "bf16"), strict=True)]
)
@pytest.mark.parametrize("kernel", ["divergence", "backward"])
def test_the_kernels_of_the_full_kl_spill_no_register(usage_of, kernel, kind, dtype):
    usage = usage_of(kernel, kl=kind, dtype=dtype)
    assert " STACK:0 " in usage, usage


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [(None, "bf16"), ("full_reverse", "fp32")])
def test_the_kernel_with_score_centering_spills_no_register(usage_of, kind, dtype):
    usage = usage_of("backward", kl=kind, dtype=dtype, top=32)
    assert " STACK:0 " in usage, usage


@pytest.mark.slow
def test_the_kernels_for_attention_spill_no_register(usage_of):
    assert " STACK:0 " in usage_of("combine")
    for dtype, group, parts, rotates in (
        ("bf16", 7, 4, False),
        ("fp32", 4, 4, False),
        ("bf16", 7, 1, True),
        ("bf16", 7, 4, True),
        ("fp32", 1, 1, True),
    ):
        arguments = {"dtype": dtype, "group": group, "parts": parts, "rotates": rotates}
        usage = usage_of("attention", **arguments)
        assert " STACK:0 " in usage, usage


@pytest.mark.slow
@pytest.mark.parametrize("width", [896, 1536, 3584, 8192])
def test_the_derivative_of_a_norm_spills_no_register(usage_of, width):
    usage = usage_of("norm", width=width, dtype="bf16")
    assert " STACK:0 " in usage, usage
