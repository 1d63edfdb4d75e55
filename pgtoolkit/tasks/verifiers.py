"""Verifiers: whether a completion answers its prompt; in this process, or in some of their own with a time limit.

Of a process of its own, questions go in and answers come out over a socket. It ends with the one that trains, however
that ends and whatever code of the user's is doing then. Both sides are here; nothing large is imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

Verifier = Callable[[str, str], float]
"""`verifier(completion, answer)` returns the reward; 1 or more counts as an exact match."""

START_SECONDS = 120
"""For a process to import what it asks; the time for an answer begins afterwards."""

TIMEOUT, CRASH = "timeout", "crash"
"""What a question has in the place of an answer."""

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import pgtoolkit.tasks.verifiers as v; v.work({})"


class Named(NamedTuple):
    """A verifier of the configuration: its key there, which names it or has its dotted path, and its pattern."""

    key: str
    name: str
    pattern: str | None = None


class Question(NamedTuple):
    """What a verifier is asked. number: of the verifier, among those of the run. on: the rest in words, for errors."""

    number: int
    completion: str
    answer: str
    on: str


class Verifiers:
    """The verifiers of a run in this process. Raises ConfigError for one that cannot be imported."""

    def __init__(self, named: Sequence[Named]):
        self._named = named
        self._functions = [make_verifier(one.name, one.pattern, one.key) for one in named]

    def answer(self, question: Question) -> float:
        """Raises DataError where a function of the user's fails."""
        named = self._named[question.number]
        with blaming(f"{named.key}={named.name}", DataError, question.on):
            return float(self._functions[question.number](question.completion, question.answer))

    def answers(self, questions: Sequence[Question]) -> list[float]:
        """The score of each question, in their order."""
        return [self.answer(question) for question in questions]


class Processes:
    """At most so many processes, started when they are first needed, which answer questions, from any thread.

    kind, told: each of them makes `kind(*told)`, and asks that. setting: what names it in the configuration. limit: the
    key of the most seconds that one answer may take, and these. note: says of TIMEOUT or CRASH, a question and what
    happened what becomes of it.
    """

    def __init__(
        self, kind: type, told: tuple, setting: str, processes: int, limit: tuple[str, float], note: Callable[..., str]
    ):
        self._limit, self._note, self._lock = limit, note, threading.Lock()
        self._workers = [_Worker((kind, told), setting) for _ in range(processes)]
        self._said: set[str] = set()

    def answers(self, questions: Sequence[Any]) -> list[Any]:
        """The answer to each question, in their order; TIMEOUT or CRASH where there was none.

        Raises DataError where a function of the user's fails, for the first such question, and ConfigError where a
        process cannot be started.
        """
        with self._lock:
            return self._answers(questions)

    def _answers(self, questions: Sequence[Any]) -> list[Any]:
        idle, (limit, seconds) = [*self._workers], self._limit

        def outcome(question: Any) -> tuple[str, Any]:
            worker = idle.pop()  # of those that nobody else asks, the one that was asked last
            try:
                return worker.outcome(question, seconds)
            finally:
                idle.append(worker)

        threads = ThreadPoolExecutor(len(self._workers))
        try:
            outcomes = list(threads.map(outcome, questions))
        except BaseException:
            self.close()  # of answers that nobody waits for any more
            raise
        finally:
            threads.shutdown(cancel_futures=True)
        for question, (kind, value) in zip(questions, outcomes, strict=True):
            if kind == "error":
                raise DataError(value)
            if kind != "answer" and kind not in self._said:
                self._said.add(kind)
                late = f"gave no answer within {limit}={seconds:g}"
                note = self._note(kind, question, late if kind == TIMEOUT else f"ended its process: {value}")
                log.warning(f"note: {note}")
        return [value if kind == "answer" else kind for kind, value in outcomes]

    def close(self) -> None:
        """End all processes, whatever they do."""
        for worker in self._workers:
            if worker.process is not None:
                worker.end(worker.process)


class VerifierProcesses(Processes):
    """The verifiers of a run in at most `processes` processes; seconds: the most that one answer may take."""

    def __init__(self, named: Sequence[Named], processes: int, seconds: float):
        self._named, setting = named, ", ".join(f"{one.key}={one.name}" for one in named)
        limit = "task.verifier_seconds", seconds
        super().__init__(Verifiers, ([*named],), setting, processes, limit, self._without_answer)

    def _without_answer(self, kind: str, question: Question, happened: str) -> str:
        named = self._named[question.number]
        return (
            f"{named.key}={named.name} {happened} on {question.on}. The score is 0, and the run goes on. "
            f"Said once; the metric verifier_{kind}_fraction counts such completions."
        )


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
        here, there = socket.socketpair()
        arguments = [sys.executable, "-P", "-u", "-c", _PROGRAM.format(there.fileno()), json.dumps(sys.path)]
        # In a session of its own: what a terminal sends is for the process that trains, which needs its answers.
        self.process = subprocess.Popen(arguments, pass_fds=[there.fileno()], start_new_session=True)
        there.close()
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


def work(descriptor: int) -> None:
    """Serve until the other process closes its end of the socket with this descriptor.

    In: what to make, then a question at a time. Out: a first answer once it is made, then one for each
    question, as `_Worker.outcome` has it. Between question and answer nothing but its end comes over the socket: then
    the kernel kills the group of this process, also within a function that never returns.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    connection, process_id, made = Connection(descriptor), os.getpid(), None
    while True:
        try:
            told = connection.recv()
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC)
            if connection.poll():  # it has ended before the kernel was told to watch
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
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        # What the user's code has forked, and which came back as well, would answer once more.
        if os.getpid() != process_id:
            os._exit(0)
        connection.send(answer)


def make_verifier(name: str, pattern: str | None = None, key: str = "task.verifier") -> Verifier:
    """The verifier of that name, or the function at a dotted path `package.module.function`.

    exact_match: the completion is the answer, up to white space around both.
    regular_expression: what the one group of `pattern` captured last in the completion is the answer, likewise.
    math_verify: both are mathematically equal, by the math-verify package.
    A function of yours takes (completion, answer) and returns a bool or a finite number.

    Raises ConfigError for a verifier that cannot be imported; the verifier raises DataError for a reward that is no
    finite number, and whatever a function of yours raises.
    """
    if name == "exact_match":
        return lambda completion, answer: float(completion.strip() == answer.strip())
    if name == "regular_expression":
        return _regular_expression(pattern)
    if name == "math_verify":
        return _math_verify()
    return _imported(key, name)


def _regular_expression(pattern: str) -> Verifier:
    expression = re.compile(pattern)

    def verify(completion: str, answer: str) -> float:
        # The last match: a completion that reasons may mention other candidates first.
        captured = [match.group(1) for match in expression.finditer(completion)]
        return float(bool(captured) and captured[-1] is not None and captured[-1].strip() == answer.strip())

    return verify


def _math_verify() -> Verifier:
    from math_verify import parse, verify

    def equal(completion: str, answer: str) -> float:
        # Its time limit is a signal, which only the main thread may set.
        limit = 5 if threading.current_thread() is threading.main_thread() else None
        gold = parse(answer, parsing_timeout=limit)
        return float(verify(gold, parse(completion, parsing_timeout=limit), timeout_seconds=limit))

    return equal


def as_number(value: object) -> float:
    """What code of the user's gave, such as a bool or a scalar of NumPy; NaN for what is no number."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _imported(key: str, path: str) -> Verifier:
    function = import_function(key, path, ("completion", "answer"))

    def verify(completion: str, answer: str) -> float:
        reward = function(completion, answer)
        if not math.isfinite(number := as_number(reward)):
            raise DataError(f"{key}={path} returned {repr(reward)[:60]}; a verifier returns a bool or a finite number")
        return number

    return verify
