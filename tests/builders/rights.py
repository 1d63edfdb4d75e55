"""The rights of an ordinary user for tests that root runs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_VERSION = 0x20080522
_DAC_OVERRIDE = 1
_DAC_READ_SEARCH = 2


@contextlib.contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Let the modes of files hold in the block for this thread, also where root runs it.

    Only Linux's capabilities to pass over them are taken, so that root still owns its files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    capabilities = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, in two halves
    assert libc.capget(header, capabilities) == 0
    effective = capabilities[0]
    capabilities[0] = effective & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    assert libc.capset(header, capabilities) == 0
    try:
        yield
    finally:
        capabilities[0] = effective
        assert libc.capset(header, capabilities) == 0
