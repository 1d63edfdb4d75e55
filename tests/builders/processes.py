"""Worlds of real processes for the tests: gloo workers started once per session, ready for the next
function.

`world(2).run(function, *arguments)` calls the function in both workers at once and gives the list
of what they return; torch.distributed is initialised in them. The function must be found by import:
one of a module's top level.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

START_SECONDS = 60
RUN_SECONDS = 60
PRELOADED = [
    "torch.distributed.tensor",
    "pgtoolkit.training.train",
    "transformers.models.gpt2.modeling_gpt2",
]


class World:
    """`size` processes; a failure in one ends all, and the next `run` starts new ones."""

    def __init__(self, size: int):
        self.size = size
        self._workers: list[tuple] = []

    def run(self, function, *arguments, seconds: float = RUN_SECONDS) -> list:
        """What each worker's function(*arguments) returns, by rank; AssertionError with the
        traceback of a failure."""
        task = pickle.dumps((sys.path, pickle.dumps((function, arguments))))
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send_bytes(task)
        return self._collect(seconds)

    def stop(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _start(self) -> None:
        # A forked child of a process that has loaded torch is there at once; this one itself may
        # have threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, store, rank, self.size), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._collect(START_SECONDS)

    def _collect(self, seconds: float) -> list:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results, failures = [None] * self.size, []
        deadline = monotonic() + seconds
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process ended"
                results[rank] = value
                if not succeeded:
                    failures.append(f"rank {rank} of {self.size}: {value}")
                    deadline = min(deadline, monotonic() + 2)  # the others may wait for it in vain
        if waiting and not failures:
            failures.append(
                f"ranks {sorted(waiting.values())} of {self.size} took more than {seconds} s"
            )
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results


@functools.cache
def world(size: int) -> World:
    """The session's world of that many processes."""
    return World(size)


@functools.cache
def layout(**sizes: int):
    """In a worker: the layout of its world, made once for all tests with these sizes."""
    from pgtoolkit.ranks.layout import Layout

    return Layout.of_world("cpu", RUN_SECONDS, **sizes)


def _work(connection, store: str, rank: int, size: int) -> None:
    """A worker's life: does what it is sent until the connection ends."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=RUN_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            path, task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        try:
            function, arguments = pickle.loads(task)
            answer = pickle.dumps((True, function(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
