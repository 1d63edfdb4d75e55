"""Verifiers: whether a completion answers its prompt; in this process, or in some of their own with a time limit.

Environments of conversations are asked by the same processes. Questions go in and answers come out over a socket. A
process ends with the one that trains, however that ends and whatever code of the user's is doing then. Both sides are
here; nothing large is imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
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
from dataclasses import dataclass
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

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pgtoolkit.tasks.verifiers import work; work({}, {})"
)


class Named(NamedTuple):
    """A verifier of the configuration: its key there, which names it or has its dotted path, and its pattern."""

    key: str
    name: str
    pattern: str | None = None

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


class Question(NamedTuple):
    """What a verifier is asked. number: of the verifier, among those of the run. on: the rest in words, for errors."""

    number: int
    completion: str
    answer: str
    on: str


class Verifiers:
    """The verifiers of a run. Raises ConfigError for one that cannot be imported."""

    def __init__(self, named: Sequence[Named]):
        self._named = named
        self._functions = [make_verifier(one.name, one.pattern, one.key) for one in named]

    def answer(self, question: Question) -> float:
        """Raises DataError where a function of the user's fails."""
        with blaming(str(self._named[question.number]), DataError, question.on):
            return float(self._functions[question.number](question.completion, question.answer))


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


def verifiers_of(named: Sequence[Named], processes: int = 0, seconds: float | None = None) -> Processes:
    """The verifiers of a run. Raises ConfigError for one that cannot be imported, where this process asks it."""
    setting, who = ", ".join(map(str, named)), lambda question: str(named[question.number])
    found = Processes(Verifiers, ([*named],), "verifier", setting, processes, seconds, who, "The score is 0")
    found.answers([])  # this process imports them now
    return found


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
