"""Processes that answer questions with a time limit: those of verifiers, and those of environments.

Questions go in and answers come out over a socket. A process ends with the one that trains, however that ends and
whatever code of the user's is doing then. Both sides are here; nothing large is imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

START_SECONDS = 120
"""For a process to import what it asks; the time for an answer begins afterwards."""

TIMEOUT, CRASH = "timeout", "crash"
"""What a question has in the place of an answer."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pgtoolkit.tasks.processes import work; work({}, {})"
)


@dataclass(eq=False)
class Processes:
    """At most so many processes, started when they are first needed, which answer questions, from any thread.

    kind, told: each of them makes `kind(*told)`, and asks that; where there are to be none, this process does. what:
    they are, in the names of keys and metrics. setting: what names it in the configuration. seconds: the most that one
    answer may take. who: is asked by a question, in words. cost: of a question without an answer.
    """

    kind: type
    told: tuple
    what: str
    setting: str
    processes: int
    seconds: float | None
    who: Callable[[Any], str]
    cost: str

    def __post_init__(self):
        self._lock, self._said = threading.Lock(), set()
        self._here = functools.cache(lambda: self.kind(*self.told))  # once it is asked: this runs code of the user's
        self._workers = [_Worker((self.kind, self.told), self.setting) for _ in range(self.processes)]

    def answers(self, questions: Sequence[Any]) -> list[Any]:
        """The answer to each question, in their order; TIMEOUT or CRASH where a process gave none.

        Raises DataError where a function of the user's fails, for the first such question, and ConfigError where a
        process cannot be started.
        """
        if not self._workers:
            here = self._here()
            return [here.answer(question) for question in questions]
        with self._lock:
            return self._answers(questions)

    def measures(self, outcomes: Sequence[Any]) -> dict[str, float]:
        """By metric, whether one of these was without an answer, where that may be."""
        kinds = (TIMEOUT, CRASH) if self._workers else ()
        return {f"{self.what}_{kind}_fraction": float(kind in outcomes) for kind in kinds}

    def _answers(self, questions: Sequence[Any]) -> list[Any]:
        idle = [*self._workers]

        def outcome(question: Any) -> tuple[str, Any]:
            worker = idle.pop()  # of those that nobody else asks, the one that was asked last
            try:
                return worker.outcome(question, self.seconds)
            finally:
                idle.append(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                outcomes = list(threads.map(outcome, questions))
            except BaseException:
                self.close()  # of answers that nobody waits for any more
                raise
        for question, (kind, value) in zip(questions, outcomes, strict=True):
            if kind == "error":
                raise DataError(value)
            if kind != "answer" and kind not in self._said:
                self._said.add(kind)
                late = f"gave no answer within task.{self.what}_seconds={self.seconds:g}"
                log.warning(
                    f"note: {self.who(question)} {late if kind == TIMEOUT else f'ended its process: {value}'} on "
                    f"{question.on}. {self.cost}, and the run goes on. "
                    f"Said once; the metric {self.what}_{kind}_fraction counts them."
                )
        return [value if kind == "answer" else kind for kind, value in outcomes]

    def close(self) -> None:
        """End all processes, whatever they do."""
        for worker in self._workers:
            if worker.process is not None:
                worker.end(worker.process)


class _Worker:
    """One process at a time, started when it is first asked and after one that has ended."""

    def __init__(self, made: tuple[type, tuple], setting: str):
        self._made, self._setting, self.process = made, setting, None

    def outcome(self, question: Any, seconds: float) -> tuple[str, Any]:
        """("answer", value), ("error", text), or TIMEOUT or CRASH with how the process has ended."""
        if self.process is None:
            self._start()
        return self._ask(question, seconds)

    def _start(self) -> None:
        # The second pair is open on this side for as long as this process lives.
        (here, there), (self._lives, watched) = socket.socketpair(), socket.socketpair()
        with there, watched:
            ends = there.fileno(), watched.fileno()
            arguments = [sys.executable, "-P", "-u", "-c", _PROGRAM.format(*ends), json.dumps(sys.path)]
            # In a session of its own: what a terminal sends is for the process that trains, which needs its answers.
            self.process = subprocess.Popen(arguments, pass_fds=ends, start_new_session=True)
        self._connection = Connection(here.detach())
        kind, value = self._ask(self._made, START_SECONDS)
        if kind == "error":
            raise ConfigError(value)
        if kind != "ready":
            got = f"none within {START_SECONDS} seconds" if kind == TIMEOUT else f"one that ended: {value}"
            reason, use = "Importing it runs its code.", "a module that can be imported in seconds"
            raise ConfigError(refusal(self._setting, "a process that imports it", got, reason, use))

    def _ask(self, told: Any, seconds: float) -> tuple[str, Any]:
        kind, process = TIMEOUT, self.process
        try:
            self._connection.send(told)
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            kind = CRASH
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        return kind, self.end(process)

    def end(self, process: subprocess.Popen) -> str:
        """Kill a process with what it has started; returns how it had ended by itself."""
        self.process = None
        code = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def work(descriptor: int, watched: int) -> None:
    """Serve until the other process closes its ends of the sockets with these descriptors.

    In: what to make, then a question at a time. Out: a first answer once it is made, then one for each question, as
    `_Worker.outcome` has it. Nothing but its end ever comes over the watched one: then the kernel kills the group of
    this process, also within a function that never returns. Of the other it may tell of a question already read.
    """
    fcntl.fcntl(watched, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(watched, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(watched, fcntl.F_SETFL, os.O_ASYNC)
    connection, life, process_id, made = Connection(descriptor), Connection(watched), os.getpid(), None
    while True:
        try:
            told = connection.recv()
            if made is None and life.poll():  # it has ended before the kernel was told to watch
                raise EOFError
        except EOFError:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        try:
            if made is None:
                kind, arguments = told
                made, answer = kind(*arguments), ("ready", None)
            else:
                answer = "answer", made.answer(told)
        except (ConfigError, DataError) as error:
            answer = "error", str(error)
        # What the user's code has forked, and which came back as well, would answer once more.
        if os.getpid() != process_id:
            os._exit(0)
        connection.send(answer)
