"""Verifiers in processes of their own: each answer has its time, and a verifier that dies takes nothing with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.verifiers import Named, Question
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

START_SECONDS = 120
"""For a process to import its verifiers; the time for an answer begins afterwards."""

TIMEOUT, CRASH = "timeout", "crash"
"""What a question has in the place of a score."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pgtoolkit.rollouts.verifier_worker import work; work(int(sys.argv[2]))"
)


class VerifierProcesses:
    """The verifiers of a run in at most `processes` processes, started when they are first needed.

    seconds: the most that one answer may take.
    """

    def __init__(self, named: Sequence[Named], processes: int, seconds: float):
        self._named = named
        self._processes = processes
        self._seconds = seconds
        self._workers: list[_Worker] = []
        self._said: set[str] = set()
        weakref.finalize(self, _end, self._workers)  # at the latest when the interpreter ends

    def scores(self, questions: Sequence[Question]) -> list[float | str]:
        """The score of each question, in their order; TIMEOUT or CRASH where there was none.

        Raises DataError where a function of the user's fails, for the first such question, and ConfigError where a
        process cannot be started.
        """
        try:
            found = self._outcomes(questions)
        except BaseException:
            self.close()  # of answers that nobody waits for any more
            raise
        for outcome in found:
            if "error" in outcome:
                raise DataError(outcome["error"])
        return [outcome.get("score", outcome.get("none")) for outcome in found]

    def close(self) -> None:
        """End all processes, whatever they do."""
        _end(self._workers)

    def _outcomes(self, questions: Sequence[Question]) -> list[dict]:
        found: dict[int, dict] = {}
        waiting = deque(range(len(questions)))
        while len(found) < len(questions):
            self._hand_out(waiting, questions)
            for worker in self._answered():
                number, outcome = worker.number, self._outcome(worker)
                if outcome is not None:
                    found[number] = outcome
                    self._say(outcome, questions[number])
        return [found[number] for number in range(len(questions))]

    def _hand_out(self, waiting: deque[int], questions: Sequence[Question]) -> None:
        idle = [worker for worker in self._workers if worker.ready and worker.number is None]
        starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._processes and len(idle) + starting < len(waiting):
            self._workers.append(_Worker(self._named))
            starting += 1
        for worker in idle[: len(waiting)]:
            worker.ask(waiting.popleft(), questions, self._seconds)

    def _answered(self) -> list[_Worker]:
        """Those with an answer, that have died, or whose time is over; waits until there is one."""
        busy = [worker for worker in self._workers if not worker.ready or worker.number is not None]
        first = min(worker.deadline for worker in busy)
        ready = set(wait([worker.connection for worker in busy], max(0, first - time.monotonic())))
        late = [worker for worker in busy if worker.deadline <= time.monotonic()]
        return [worker for worker in busy if worker.connection in ready] or late

    def _outcome(self, worker: _Worker) -> dict | None:
        """What has become of its question; None for a process that has only just started."""
        try:
            if not worker.connection.poll():
                raise TimeoutError
            answer = json.loads(worker.connection.recv_bytes())
        except (TimeoutError, EOFError, OSError) as error:
            self._workers.remove(worker)
            late = isinstance(error, TimeoutError)
            how = worker.end(by_itself=not late)
            if not worker.ready:
                got = f"none within {START_SECONDS} seconds" if late else f"one that ended: {how}"
                names = ", ".join(f"{one.key}={one.name}" for one in self._named)
                reason = "Importing it runs its code."
                use = "a verifier whose module can be imported in seconds"
                raise ConfigError(refusal(names, "a process that imports it", got, reason, use)) from None
            return {"none": TIMEOUT} if late else {"none": CRASH, "how": how}
        if not worker.ready and "error" in answer:
            raise ConfigError(answer["error"])
        worker.ready, worker.number = True, None
        return answer or None

    def _say(self, outcome: dict, question: Question) -> None:
        kind = outcome.get("none")
        if kind is None or kind in self._said:
            return
        self._said.add(kind)
        named = self._named[question.number]
        what = {
            TIMEOUT: f"gave no answer within task.verifier_seconds={self._seconds:g}",
            CRASH: f"ended its process: {outcome.get('how')}",
        }[kind]
        log.warning(
            f"note: {named.key}={named.name} {what} on {question.on}. The score is 0, and the run goes on. Said once; "
            f"the metric verifier_{kind}_fraction counts such completions."
        )


class _Worker:
    """One process. ready: whether its verifiers are imported. number: of the question it is at, if at one."""

    def __init__(self, named: Sequence[Named]):
        here, there = socket.socketpair()
        with there:
            # In a session of its own: what a terminal sends is for the process that trains, which needs its answers.
            arguments = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(there.fileno())]
            self._process = subprocess.Popen(arguments, pass_fds=[there.fileno()], start_new_session=True)
        self.connection = Connection(here.detach())
        self.connection.send_bytes(json.dumps([dataclasses.asdict(one) for one in named]).encode())
        self.ready = False
        self.number: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    def ask(self, number: int, questions: Sequence[Question], seconds: float) -> None:
        self.number, self.deadline = number, time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has died: that is seen where its answer is waited for
            self.connection.send_bytes(json.dumps(dataclasses.asdict(questions[number])).encode())

    def end(self, by_itself: bool = False) -> str:
        """Kill it with what it has started; returns how it had ended, where it has closed its end of the socket."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1 if by_itself else 0)
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
