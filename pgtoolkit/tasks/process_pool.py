"""Processes that answer questions with a time limit: those of verifiers, and those of environments.

Questions go in and answers come out over the channel of a child process, which is under guard
(system/child.py): it ends with the process that trains, whatever code of the user's is doing then.
Both sides are here; nothing large is imported.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.child import Child
from pgtoolkit.system.report import refusal
from pgtoolkit.system.terminal import output_of_child

START_SECONDS = 120
"""For a process to import what it asks, and again for its first answer, at which code may import
what it needs."""

TIMEOUT, CRASH, NOTHING = "timeout", "crash", "nothing"
"""Kinds of failures: no answer in time, none since what was asked broke, and one that says
nothing."""


class Failure(NamedTuple):
    """What a question has in the place of an answer. reason: in words that follow the name of what
    was asked."""

    kind: str
    reason: str


_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pgtoolkit.system.child import stay_under_guard
channel = stay_under_guard()
from pgtoolkit.tasks.process_pool import serve
serve(channel)
"""
"""The guard, which forks as soon as it can, is small."""

_SECONDS_TO_END = 10
"""For a guard to end what it guards, and for a process whose channel is closed to be gone."""


@dataclass(eq=False)
class Processes:
    """At most so many processes, started when they are first needed, which answer questions, from
    any thread.

    kind, told: each of them makes `kind(*told)`, and asks that; where there are to be none, this
        process does. what:
    they are, in the names of keys and metrics. setting: what names it in the configuration.
        seconds: the most that one
    answer may take, but for the first one of a process, which has START_SECONDS if that is longer.
    """

    kind: type
    told: tuple
    what: str
    setting: str
    processes: int
    seconds: float | None

    def __post_init__(self):
        self._lock = threading.Lock()
        # once it is asked: this runs code of the user's
        self._here = functools.cache(lambda: self.kind(*self.told))
        self._workers = [
            _Worker((self.kind, self.told), self.setting) for _ in range(self.processes)
        ]

    def answers(self, questions: Sequence[Any]) -> list[Any]:
        """The answer to each question, in their order; a Failure where a process gave none.

        Raises DataError where a function of the user's fails, for the first such question, and
        ConfigError where a process cannot be started.
        """
        if not self._workers:
            here = self._here()
            return [here.answer(question) for question in questions]
        with self._lock:
            return self._answers(questions)

    def measures(self, outcomes: Sequence[Any]) -> dict[str, float]:
        """Return whether one of these outcomes is a failure, by metric; none where nothing runs in
        processes."""
        kinds = (TIMEOUT, CRASH) if self._workers else ()
        failed = {outcome.kind for outcome in outcomes if isinstance(outcome, Failure)}
        return {f"{self.what}_{kind}_fraction": float(kind in failed) for kind in kinds}

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
        for kind, value in outcomes:
            if kind == "error":
                raise DataError(value)
        return [
            value if kind == "answer" else self._failure(kind, value) for kind, value in outcomes
        ]

    def _failure(self, kind: str, value: Any) -> Failure:
        if kind == CRASH:
            return Failure(kind, f"ended its process: {value}")
        if value == self.seconds:
            return Failure(kind, f"gave no answer within task.{self.what}_seconds={value:g}")
        return Failure(
            kind,
            f"gave no answer within the {value:g} seconds that the first call of a process has",
        )

    def close(self) -> None:
        """End all processes, whatever they do."""
        for worker in self._workers:
            if worker.process is not None:
                worker.end(worker.process)


class _Worker:
    """One process at a time, started when it is first asked and after one that has ended."""

    def __init__(self, made: tuple[type, tuple], setting: str):
        self._made, self._setting, self.process, self._has_answered = made, setting, None, False

    def outcome(self, question: Any, seconds: float | None) -> tuple[str, Any]:
        """("answer", value), ("error", text), TIMEOUT with the limit, or CRASH with how the process
        has ended."""
        if self.process is None:
            self._start()
            self._has_answered = False
        # The first call may import what the others find imported, such as torch.
        assert seconds is not None
        limit = seconds if self._has_answered else max(seconds, START_SECONDS)
        kind, value = self._ask(question, limit)
        self._has_answered = True
        return kind, limit if kind == TIMEOUT else value

    def _start(self) -> None:
        command = [sys.executable, "-P", "-u", "-c", _PROGRAM, json.dumps(sys.path)]
        with output_of_child() as printed:
            self.process = Child(command, printed=printed)
        self._connection = self.process.connection()
        kind, value = self._ask(self._made, START_SECONDS)
        if kind == "error":
            raise ConfigError(value)
        if kind != "ready":
            raise ConfigError(
                refusal(
                    setting=self._setting,
                    needs="a process that imports it",
                    got=f"none within {START_SECONDS} seconds"
                    if kind == TIMEOUT
                    else f"one that ended: {value}",
                    reason="Importing it runs its code.",
                    use="a module that can be imported in seconds",
                )
            )

    def _ask(self, told: Any, seconds: float) -> tuple[str, Any]:
        kind, process = TIMEOUT, self.process
        assert process is not None
        try:
            self._connection.send(told)
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            kind = CRASH
            process.wait(_SECONDS_TO_END)
        return kind, self.end(process)

    def end(self, process: Child) -> str:
        """End a process with what it has started. Return how it had ended by itself."""
        self.process = None
        code = process.poll()
        process.end(_SECONDS_TO_END)
        return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def serve(channel: socket.socket) -> None:
    """Answer questions, which come in over the channel: what to make, then one at a time.

    Out: a first answer once it is made, then one for each question, as `_Worker.outcome` has it.
    """
    os.setsid()  # code that signals its own process group does not reach the guard
    connection = Connection(channel.detach())
    process_id = os.getpid()
    made = None
    while True:
        try:
            told = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
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
