"""Ranks as threads of this process: the real collective calls of torch.distributed, hundreds of
cases a minute.

The process group is the one of PyTorch's own tests, a private module: only this file uses it. It
cannot send from one rank to another. Threads share the interpreter: ranks run no faster than one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed import multi_threaded_pg

SECONDS = 60
"""After this time ranks that still wait for another rank are ended."""

# If a CUDA build of PyTorch sees no GPU, the first thread to enter this mode, as DTensor does, owns
# the device guard of the process: once that thread has ended, the next to enter would read freed
# memory. This thread enters it first, since it does not end.
with FakeTensorMode():
    pass


def on_ranks(world_size: int, function: Callable, *arguments) -> list:
    """Call function(rank, *arguments) for each rank of a process group; return the results by rank.

    If ranks raise, the error of the lowest of them is raised here, and the others are ended.
    """
    results = [None] * world_size
    errors = {}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank, *arguments)
        except BaseException as error:
            errors[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        if any(thread.is_alive() for thread in threads):
            waiting = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
            multi_threaded_pg.ProcessLocalGroup.exception_handle(TimeoutError())
            for thread in threads:
                thread.join(SECONDS)
            raise AssertionError(
                f"ranks {waiting} still wait after {SECONDS} s: not all make the same calls"
            )
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg.ProcessLocalGroup.reset()
    # A rank that was ended because of another raises SystemExit.
    first = [error for _, error in sorted(errors.items()) if not isinstance(error, SystemExit)]
    if first:
        raise first[0]
    assert not errors
    return results
