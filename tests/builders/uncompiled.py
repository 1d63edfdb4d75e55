"""The body of a model without a C++ compiler, for tests of what stands around compiled code.

Compiling a function takes two seconds and more. tests/model/test_compiled.py sees that compiled
code computes the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pgtoolkit.model import rowwise


@contextlib.contextmanager
def uncompiled_functions() -> Iterator[None]:
    """Inside the block, run functions of rows as they are. Where there is a GPU they are compiled.

    These functions keep what is compiled, so they forget it at both ends of the block.
    """
    if torch.cuda.is_available():
        yield
        return
    forget_code()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        forget_code()


def forget_code() -> None:
    """Let each function be compiled again, also where a test before has used it."""
    for function in (
        rowwise.rms_norm,
        rowwise.activation,
        rowwise.gate,
        rowwise.rotary,
        rowwise.turned_heads,
    ):
        function.cache_clear()
