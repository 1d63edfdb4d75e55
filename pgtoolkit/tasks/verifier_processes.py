"""Verifiers in processes of their own: each answer has its time, and a verifier that dies takes nothing with it.

Questions go in and scores come out over a socket. A process ends with the one that trains, however that ends and
whatever a verifier is doing then. Both sides are here; nothing large is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.verifiers import Named, Question, Verifiers

log = logging.getLogger("pgtoolkit")

START_SECONDS = 120
"""For a process to import its verifiers; the time for an answer begins afterwards."""

TIMEOUT, CRASH = "timeout", "crash"
"""What a question has in the place of a score."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pgtoolkit.tasks.verifier_processes import work; work(int(sys.argv[2]))"
)


class VerifierProcesses:
    """The verifiers of a run in at most `processes` processes, started when they are first needed.

    seconds: the most that one answer may take.
    """

    def __init__(self, named: Sequence[Named], processes: int, seconds: float):
        self._named, self._processes, self._seconds = named, processes, seconds
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._said: set[str] = set()
        weakref.finalize(self, _end, self._workers)  # at the latest when the interpreter ends

    def scores(self, questions: Sequence[Question]) -> list[float | str]:
        """The score of each question, in their order; TIMEOUT or CRASH where there was none.

        Raises DataError where a function of the user's fails, for the first such question, and ConfigError where a
        process cannot be started.
        """
        threads = ThreadPoolExecutor(self._processes)
        try:
            outcomes = list(threads.map(self._outcome, questions))
        except BaseException:
            self.close()  # of answers that nobody waits for any more
            raise
        finally:
            threads.shutdown(cancel_futures=True)
        for question, outcome in zip(questions, outcomes, strict=True):
            self._say(outcome, question)
        for outcome in outcomes:
            if "error" in outcome:
                raise DataError(outcome["error"])
        return [outcome.get("score", outcome.get("none")) for outcome in outcomes]

    def close(self) -> None:
        """End all processes, whatever they do."""
        self._idle.clear()
        _end(self._workers)

    def _outcome(self, question: Question) -> dict:
        """What has become of it, by a process that nobody else asks meanwhile. Called in a thread."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._started()
        outcome = self._answer(worker, dataclasses.asdict(question), self._seconds)
        if "none" not in outcome:
            self._idle.append(worker)
        return outcome

    def _answer(self, worker: _Worker, told: Any, seconds: float) -> dict:
        """As `_Worker.answer` has it; one that is no more is forgotten."""
        answer = worker.answer(told, seconds)
        if "none" in answer:
            self._workers.remove(worker)
        return answer

    def _started(self) -> _Worker:
        worker = _Worker()
        self._workers.append(worker)
        answer = self._answer(worker, [dataclasses.asdict(one) for one in self._named], START_SECONDS)
        if "error" in answer:
            raise ConfigError(answer["error"])
        if kind := answer.get("none"):
            got = f"none within {START_SECONDS} seconds" if kind == TIMEOUT else f"one that ended: {answer['how']}"
            names = ", ".join(f"{one.key}={one.name}" for one in self._named)
            reason, use = "Importing it runs its code.", "a verifier whose module can be imported in seconds"
            raise ConfigError(refusal(names, "a process that imports it", got, reason, use))
        return worker

    def _say(self, outcome: dict, question: Question) -> None:
        kind = outcome.get("none")
        if kind is None or kind in self._said:
            return
        self._said.add(kind)
        named = self._named[question.number]
        happened = {
            TIMEOUT: f"gave no answer within task.verifier_seconds={self._seconds:g}",
            CRASH: f"ended its process: {outcome['how']}",
        }[kind]
        log.warning(
            f"note: {named.key}={named.name} {happened} on {question.on}. The score is 0, and the run goes on. Said "
            f"once; the metric verifier_{kind}_fraction counts such completions."
        )


class _Worker:
    """One process, which is first told its verifiers, and then a question at a time."""

    def __init__(self):
        here, there = socket.socketpair()
        with there:
            # In a session of its own: what a terminal sends is for the process that trains, which needs its answers.
            arguments = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(there.fileno())]
            self._process = subprocess.Popen(arguments, pass_fds=[there.fileno()], start_new_session=True)
        self._connection = Connection(here.detach())

    def answer(self, told: Any, seconds: float) -> dict:
        """What it says to that; where it has died, or its time is over, which ends it, {"none": why, "how": ...}."""
        try:
            self._connection.send_bytes(json.dumps(told).encode())
            if self._connection.poll(seconds):
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            return {"none": CRASH, "how": self.end()}
        return {"none": TIMEOUT, "how": self.end()}

    def end(self) -> str:
        """Kill it with what it has started; returns how it had ended by itself."""
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def work(socket: int) -> None:
    """Serve until the other end is closed.

    In: the verifiers, then a question at a time. Out: {} once they are imported, then {"score"} for each question;
    {"error"} in the place of either.
    """
    connection, process_id = Connection(socket), os.getpid()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(socket, fcntl.F_SETOWN, -os.getpgrp())  # the whole group, of which this process is the first
    with contextlib.suppress(EOFError, OSError):
        named = json.loads(connection.recv_bytes())
        try:
            with _ending_with_the_other_end(socket):
                verifiers = Verifiers([Named(**one) for one in named])
            _send(connection, {})
        except ConfigError as error:
            _send(connection, {"error": str(error)})
        while True:
            question = Question(**json.loads(connection.recv_bytes()))
            try:
                with _ending_with_the_other_end(socket):
                    answer = {"score": verifiers.score(question)}
            except DataError as error:
                answer = {"error": str(error)}
            # What a verifier has forked, and which came back as well, would answer once more.
            if os.getpid() != process_id:
                os._exit(0)
            _send(connection, answer)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with what verifiers have left behind


def _send(connection: Connection, answer: dict) -> None:
    sys.stdout.flush()  # what a verifier prints is not lost with its process
    connection.send_bytes(json.dumps(answer).encode())


@contextlib.contextmanager
def _ending_with_the_other_end(socket: int) -> Iterator[None]:
    """The kernel ends this process when the socket's other end closes, also within a function that never returns.

    The other end sends nothing while it waits for an answer, so that anything that happens to the socket is its end.
    """
    flags = fcntl.fcntl(socket, fcntl.F_GETFL)
    fcntl.fcntl(socket, fcntl.F_SETFL, flags | os.O_ASYNC)
    closed = select.poll()
    closed.register(socket, select.POLLHUP)
    if closed.poll(0):  # before the kernel was told to watch
        os.killpg(os.getpgrp(), signal.SIGKILL)
    try:
        yield
    finally:
        fcntl.fcntl(socket, fcntl.F_SETFL, flags)
