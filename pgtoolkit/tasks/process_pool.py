"""Processes that answer questions with a time limit: those of verifiers, and those of environments.

Questions go in and answers come out over the channel of a child process, which is under guard
(system/child.py): it ends with the process that trains, whatever code of the user's is doing then.
Both sides are here; nothing large is imported.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.child import Child
from pgtoolkit.system.report import refusal
from pgtoolkit.system.terminal import output_of_child

START_SECONDS = 120
"""Time for a process to import the code that answers, for what this code imports during a call, and
for the first answer of all, for which it may load more."""

_LOADS_AGAIN = 2
"""The first answer of a later process may take this many times as long as first answers have."""

_IMPORTING = "importing"
_IMPORTED = "imported"

TIMEOUT = "timeout"
CRASH = "crash"
NOTHING = "nothing"
"""Kinds of failures: no answer in time; none because the process ended; an answer without a
score."""


class Failure(NamedTuple):
    """Stands for the answer to a question that got none.

    reason: a verb and more, to follow the name of the code that was asked.
    """

    kind: str
    reason: str


_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pgtoolkit.system.child import stay_under_guard
channel = stay_under_guard()
from pgtoolkit.tasks.process_pool import answer_questions
answer_questions(channel)
"""
"""The program of a process: it forks off its guard before it imports more, so that the guard is
small."""

_SECONDS_TO_END = 10
"""Time for a guard to end what it guards, and for a process whose channel is closed to be gone."""

_SECONDS_BEYOND = 1
"""Time beyond its limit for a process that keeps to that limit itself to say so."""

_MORE = object()
"""In place of a message: the answers to an earlier one go on."""

PART = "part"
"""The kind of an outcome that is followed by others, for the same message."""

Answer = Any
"""Whatever `kind.answer` returns, or a Failure."""

_Outcome = tuple[str, Answer]
"""("answer", value), (PART, (place, value)), ("error", text), (TIMEOUT, seconds), or (CRASH, how
the process has ended)."""


@dataclass(eq=False)
class Processes:
    """At most `processes` processes, started when they are first needed, which answer questions.
    Any thread may ask.

    kind, arguments: each process makes `kind(*arguments)`, whose method `answer` takes a question;
        with 0 processes, this process does.
    noun: a name for the thing that answers, in keys and metrics. setting: as the configuration
        names it.
    seconds: the longest that one answer may take. What is imported during a call is not counted.
        The first answer of all has START_SECONDS if that is longer, and the first one of a later
        process _LOADS_AGAIN times as long as first answers took.
    """

    kind: type
    arguments: tuple
    noun: str
    setting: str
    processes: int
    seconds: float | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # How long the first answer of a process has taken at most; None before the first one.
        self._first_answer: float | None = None
        # Made only when it is asked, since this runs code of the user's.
        self._here = functools.cache(lambda: self.kind(*self.arguments))
        self._workers = [
            _Worker(self.kind, self.arguments, self.setting) for _ in range(self.processes)
        ]

    def answers(self, questions: Sequence[object], is_first_longer: bool = True) -> list[Answer]:
        """Return the answer to each question, in their order; a Failure where a process gave none.

        is_first_longer: whether the first answer of a process has more than `seconds`.
        Raises DataError where a function of the user's fails, for the first such question, and
        ConfigError where a process cannot be started.
        """
        if not self._workers:
            here = self._here()
            return [here.answer(question) for question in questions]
        with self._lock:
            return self._answers(questions, is_first_longer)

    def answers_together(
        self, questions: Sequence[object], together: Callable[[list], object]
    ) -> list[Answer]:
        """Return the answers to questions of which a process answers several at a time.

        together: makes a message of some questions, whose answer is an iterator over the place of
            each and its answer.
        A process that gives no answer for longer than `seconds` is ended; each question that it
        leaves open is then asked alone.
        """
        questions = list(questions)
        if not self._workers:
            parts = [dict(self._here().answer(together(questions)))]
        else:
            with self._lock:
                parts = self._parts(questions, together)
        count = len(parts)
        outcomes: dict[int, Answer] = {
            number + count * place: value
            for number, part in enumerate(parts)
            for place, value in part.items()
        }
        left = [place for place in range(len(questions)) if place not in outcomes]
        if left:
            alone = self.answers([questions[place] for place in left], is_first_longer=False)
            outcomes |= dict(zip(left, alone, strict=True))
        return [outcomes[place] for place in range(len(questions))]

    def _parts(
        self, questions: list[object], together: Callable[[list], object]
    ) -> list[dict[int, Answer]]:
        """Ask each process for its share of the questions: every N-th of them.

        Return the answers that each gave, by the place of the question in its share.
        """
        workers = self._workers
        shares = [questions[number :: len(workers)] for number in range(len(workers))]

        def part(worker: _Worker, share: list[object]) -> dict[int, Answer]:
            assert self.seconds is not None
            return worker.part(together(share), self.seconds) if share else {}

        with ThreadPoolExecutor(len(workers)) as threads:
            try:
                return list(threads.map(part, workers, shares))
            except BaseException:
                self.close()  # Nobody waits for their answers any more.
                raise

    def measures(self, outcomes: Sequence[object]) -> dict[str, float]:
        """Return whether one of these outcomes is a failure, by metric; {} without processes."""
        kinds = (TIMEOUT, CRASH) if self._workers else ()
        failed = {outcome.kind for outcome in outcomes if isinstance(outcome, Failure)}
        return {f"{self.noun}_{kind}_fraction": float(kind in failed) for kind in kinds}

    def _answers(self, questions: Sequence[object], is_first_longer: bool) -> list[object]:
        idle = list(self._workers)

        def outcome(question: object) -> _Outcome:
            worker = idle.pop()  # Among the idle ones, the one that was asked last.
            try:
                return self._outcome(worker, question, is_first_longer)
            finally:
                idle.append(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                outcomes = list(threads.map(outcome, questions))
            except BaseException:
                self.close()  # Nobody waits for their answers any more.
                raise
        for kind, value in outcomes:
            if kind == "error":
                raise DataError(value)
        return [
            value if kind == "answer" else self._failure(kind, value) for kind, value in outcomes
        ]

    def _outcome(self, worker: _Worker, question: object, is_first_longer: bool) -> _Outcome:
        """Ask a process a question, and return what came of it."""
        limit = self.seconds
        assert limit is not None
        is_first = worker.process is None
        if is_first:
            worker.start()
        if is_first and is_first_longer:
            first = self._first_answer
            limit = max(limit, START_SECONDS if first is None else _LOADS_AGAIN * first)
        kind, value = worker.ask(question, limit)
        if is_first and is_first_longer:
            # One that has taken too long was no answer, and says nothing about the next one.
            took = 0.0 if kind == TIMEOUT else worker.seconds
            self._first_answer = max(self._first_answer or 0.0, took)
        return kind, limit if kind == TIMEOUT else value

    def _failure(self, kind: str, value: str | float) -> Failure:
        if kind == CRASH:
            return Failure(kind, f"ended its process: {value}")
        if value == self.seconds:
            return Failure(kind, f"gave no answer within task.{self.noun}_seconds={value:g}")
        return Failure(
            kind,
            f"gave no answer within the {value:.3g} seconds that the first call of a process has",
        )

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for worker in self._workers:
            if worker.process is not None:
                worker.end(worker.process)


class _Worker:
    """One process at a time; none before it is started, and after it has ended.

    seconds: how long the latest answer took, without imports.
    """

    def __init__(self, kind: type, arguments: tuple, setting: str):
        self._kind = kind
        self._arguments = arguments
        self._setting = setting
        self.process: Child | None = None
        self.seconds = 0.0

    def part(self, message: object, seconds: float) -> dict[int, Answer]:
        """Ask the process several questions by one message, and return the answers that come, by
        place.

        Raises DataError where a function of the user's fails.
        """
        if self.process is None:
            self.start()
        answers: dict[int, Answer] = {}
        kind, value = self.ask(message, seconds + _SECONDS_BEYOND)
        while kind == PART:
            place, answer = value
            answers[place] = answer
            kind, value = self.ask(_MORE, seconds + _SECONDS_BEYOND)
        if kind == "error":
            raise DataError(value)
        return answers

    def start(self) -> None:
        """Start the process. Raises ConfigError where it does not get ready."""
        command = [sys.executable, "-P", "-u", "-c", _PROGRAM, json.dumps(sys.path)]
        with output_of_child() as printed:
            self.process = Child(command, printed=printed)
        self._connection = self.process.connection()
        kind, value = self.ask((self._kind, self._arguments), START_SECONDS)
        if kind == "error":
            raise ConfigError(value)
        if kind != "ready":
            took_too_long = f"none within {START_SECONDS} seconds"
            raise ConfigError(
                refusal(
                    setting=self._setting,
                    needs="a process that imports it",
                    got=took_too_long if kind == TIMEOUT else f"one that ended: {value}",
                    reason="Importing it runs its code.",
                    use="a module that can be imported in seconds",
                )
            )

    def ask(self, message: object, seconds: float) -> _Outcome:
        """Send a message to the process, and return its first answer; end it if there is none."""
        process = self.process
        assert process is not None
        kind = TIMEOUT
        try:
            if message is not _MORE:
                self._connection.send(message)
            outcome = self._received(seconds)
            if outcome is not None:
                return outcome
        except (EOFError, OSError):
            kind = CRASH
            process.wait(_SECONDS_TO_END)
        return kind, self.end(process)

    def _received(self, seconds: float) -> _Outcome | None:
        """Return the answer that the process sends within this time; None if there is none.

        The time of its imports, which is limited by START_SECONDS, is not counted.
        """
        counted = 0.0
        importing = 0.0
        is_importing = False
        while True:
            began = time.monotonic()
            left = START_SECONDS - importing if is_importing else seconds - counted
            if not self._connection.poll(max(0.0, left)):
                return None
            outcome = self._connection.recv()
            if is_importing:
                importing += time.monotonic() - began
            else:
                counted += time.monotonic() - began
            is_importing = outcome[0] == _IMPORTING
            if outcome[0] not in (_IMPORTING, _IMPORTED):
                self.seconds = counted
                return outcome

    def end(self, process: Child) -> str:
        """End a process and its descendants. Return how it had ended by itself, if it had."""
        self.process = None
        code = process.poll()
        process.end(_SECONDS_TO_END)
        return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def answer_questions(channel: socket.socket) -> None:
    """Answer the questions that come in over the channel, one at a time.

    The first message names the object that answers. An outcome goes out once that is made, and
    after each question.
    """
    os.setsid()  # Code that signals its own process group does not reach the guard.
    connection = Connection(channel.detach())
    process_id = os.getpid()
    answering = None
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if answering is None:
                kind, arguments = message
                answering = kind(*arguments)
                _tell_of_imports(connection)
                outcome = ("ready", None)
            else:
                outcome = ("answer", answering.answer(message))
            if isinstance(outcome[1], Iterator):
                for part in outcome[1]:
                    connection.send((PART, part))
                outcome = ("answer", None)
        except (ConfigError, DataError) as error:
            outcome = ("error", str(error))
        # A fork by the user's code comes back here as well, and would answer once more.
        if os.getpid() != process_id:
            os._exit(0)
        connection.send(outcome)


def _tell_of_imports(connection: Connection) -> None:
    """Have each import that loads a module sent over the connection, as it begins and as it ends.

    Only those of this thread are, which answers the questions, and not those of a fork.
    """
    bootstrap: Any = importlib._bootstrap  # pyright: ignore  (what `import` calls for a new module)
    load = bootstrap._find_and_load
    answering = (os.getpid(), threading.get_ident())
    is_loading = False

    def load_and_tell(name: str, import_: object) -> object:
        nonlocal is_loading
        if is_loading or (os.getpid(), threading.get_ident()) != answering:
            return load(name, import_)
        is_loading = True
        connection.send((_IMPORTING, None))
        try:
            return load(name, import_)
        finally:
            is_loading = False
            connection.send((_IMPORTED, None))

    bootstrap._find_and_load = load_and_tell
