"""Real processes for the tests that need no seconds for imports: forked from a server that has all
of them. They are ranks, `pgtk`, or another program.

`world(2).run(function, *arguments)` calls the function in two workers at the same time, with
torch.distributed initialised, and returns the list of their results. The workers are started once
per file of tests. The function must be importable: at the top level of a module.

`ForkedProcess` is a program with words of its own, an environment of its own and a log.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from builders.forked import are_children_forked, become, forked_children, run_python

if TYPE_CHECKING:
    from pgtoolkit.ranks.layout import Layout

START_SECONDS = 60
RUN_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Server:
    """Forks processes for the tests.

    Where there is no GPU it is a fork of this process, which waits until the first test that needs
    it. It is made before the first test: later this process may have threads, and what a test has
    changed. Where there is a GPU it is a new process, since CUDA fails in forks of one that has
    asked for GPUs.
    """

    def __init__(self) -> None:
        import torch

        forkserver.set_forkserver_preload(["builders.forked_from"])
        self._gate, self._opens = os.pipe()
        resource_tracker.ensure_running()  # a process of its own
        environment = dict(os.environ)
        # Else a new process would not find tests/, and would leave out what it does not find.
        folders = f"{Path(__file__).parents[1]}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        os.environ["PYTHONPATH"] = folders
        spawn = util.spawnv_passfds
        if not torch.cuda.is_available():
            util.spawnv_passfds = self._fork
        try:
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = spawn
            os.environ.clear()
            os.environ.update(environment)

    def open(self) -> None:
        """Let a fork that waits begin."""
        os.write(self._opens, b".")

    def _fork(self, _: str, command: list[str], kept: list[int]) -> int:
        """Fork the server of a command, whose files are kept, in the place of starting it."""
        pid = os.fork()
        if pid == 0:
            forkserver._forkserver.__init__()  # whose lock is held
            become([-1] * 3, None, None, "server", lambda: self._run(command), [*kept, self._gate])
        return pid

    def _run(self, command: list[str]) -> None:
        logging.root.handlers.clear()  # pytest's
        if os.read(self._gate, 1):  # else the tests have ended
            run_python([command[0], *command[-2:]])  # without options of the interpreter


start_server = functools.cache(_Server)
"""Start the server, once."""


@functools.cache
def open_server() -> None:
    """Let the server begin, once."""
    start_server().open()


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from the server."""
    open_server()
    return multiprocessing.get_context("forkserver")


class World:
    """A group of processes; a failure in one ends all, and the next `run` starts new ones."""

    def __init__(self, size: int):
        self.size = size
        self._workers: list[tuple] = []

    def run(self, function: Callable, *arguments, seconds: float = RUN_SECONDS) -> list:
        """Call function(*arguments) in each worker; return the results in the order of ranks.

        Raises AssertionError, with the tracebacks, if a worker fails.
        """
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
        context = fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, self._folder.name, rank, self.size), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._collect(START_SECONDS)

    def _collect(self, seconds: float) -> list:
        """Return the answer of each worker, by rank; AssertionError if one fails or is too slow."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results = [None] * self.size
        failures = []
        deadline = monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded = False
                    results[rank] = self._end_of(rank)
                if not succeeded:
                    failures.append(f"rank {rank} of {self.size}: {results[rank]}")
                    # The others may wait for this rank without end.
                    deadline = min(deadline, monotonic() + 2)
        if waiting and not failures:
            slow = sorted(waiting.values())
            failures.append(f"ranks {slow} of {self.size} took more than {seconds} s")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def _end_of(self, rank: int) -> str:
        """Say how a worker ended that has not answered, and what it was doing if it crashed."""
        process, _ = self._workers[rank]
        process.join(10)
        ended = "the process ended"
        if process.exitcode is not None and process.exitcode < 0:
            ended += f" by {signal.Signals(-process.exitcode).name}"
        elif process.exitcode is not None:
            ended += f" with status {process.exitcode}"
        crash = _crash_file(self._folder.name, rank)
        return f"{ended}\n{crash.read_text()[:2000] if crash.exists() else ''}".rstrip()


class ForkedProcess:
    """`pgtk` in a process that has the imports of a run done, with the methods of a Popen.

    Its own children are forks of it, unless the test is marked `starts_python`.

    words: its arguments.
    cwd: its current directory.
    environment: its variables.
    log: receives what it prints.
    program: `pgtk`, or a file of Python.
    """

    def __init__(
        self,
        words: list[str],
        cwd: Path,
        environment: dict[str, str],
        log: Path,
        program: str = "pgtk",
    ):
        arguments = (program, words, str(cwd), environment, str(log), are_children_forked())
        # A daemon is ended at the end of the session.
        self._process = fork_server().Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("pgtk", timeout)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _become(
    program: str,
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    log: str,
    forks_children: bool,
) -> None:
    """Run a program in this process, which ends with its exit status."""

    def run() -> None:
        sys.argv = [program, *words]
        if program != "pgtk":
            runpy.run_path(program, run_name="__main__")
            return
        from pgtoolkit.cli import run

        with forked_children(forks_children):
            run()

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    become([-1, file, file], cwd, environment, Path(program).stem, run)


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """Return the group of `size` processes that the tests of a file share."""
    return _worlds.setdefault(size, World(size))


def stop_worlds() -> None:
    """End the processes of all groups: what the tests of a file leave in their memory, such as a
    message that nobody has received, cannot meet those of the next file."""
    for each in _worlds.values():
        each.stop()


@functools.cache
def layout(**sizes: int) -> Layout:
    """Return the layout of a worker's group, made once for all tests with these sizes."""
    # Only workers need it, and this module is imported by processes that must start quickly.
    from pgtoolkit.ranks.layout import Layout

    return Layout.of_world("cpu", RUN_SECONDS, **sizes)


def _crash_file(folder: str, rank: int) -> Path:
    """Return the file that receives the call stacks of a worker that crashes."""
    return Path(folder) / f"crash-{rank}"


def _work(connection: Connection, folder: str, rank: int, size: int) -> None:
    """Call the functions that are sent, until the connection ends."""
    faulthandler.enable(os.open(_crash_file(folder, rank), os.O_WRONLY | os.O_CREAT))
    # The fork server has loaded torch; a process that only starts workers need not.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=RUN_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout
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
            with forked_children():
                answer = pickle.dumps((True, function(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
