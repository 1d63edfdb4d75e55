"""Ranks as threads of this process: the real collective calls of torch.distributed, hundreds of
cases a minute.

The process group is PyTorch's own for its tests, a private module: this file is its only user here.
It has no sending from one rank to another. The interpreter switches threads, so ranks do not run
faster than one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed import multi_threaded_pg

SECONDS = 60
"""After which ranks that wait for one that has left, or that waits elsewhere, are given up."""

# Where a CUDA build of PyTorch sees no GPU, the first thread to enter this mode, as DTensor does,
# owns what guards the
# devices of the whole process: once it has ended, the next one to enter would read freed memory.
#   This thread stays.
with FakeTensorMode():
    pass


def on_ranks(world_size: int, function: Callable, *arguments) -> list:
    """[function(rank, *arguments) of each rank], inside a process group of that many ranks.

    Raises what a rank raised, of the lowest rank that did; the others are ended.
    """
    results, errors = [None] * world_size, {}
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def run(rank):
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
