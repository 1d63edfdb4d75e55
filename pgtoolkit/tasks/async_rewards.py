"""Calls of reward functions that are awaited (`async def`), several at a time.

Nothing large is imported, since the processes of verifiers import this file.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pgtoolkit.errors import DataError
from pgtoolkit.system.background import in_background
from pgtoolkit.system.functions import blaming
from pgtoolkit.tasks.process_pool import TIMEOUT, Failure
from pgtoolkit.tasks.reward_functions import BatchScores, Question, RewardFunction

_SECONDS_TO_CANCEL = 1
"""Time for calls that are cancelled to end."""

_Value = TypeVar("_Value")

_lock = threading.Lock()
"""Held while the event loop runs."""


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process.

    It lasts as long as the process, since an HTTP client that a module keeps belongs to the loop
    that it was first used in, be that in the trial before a run, in the run or in its evaluations.
    No thread that a function leaves behind in `asyncio.to_thread` delays the end of the process.
    """
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads())
    # A thread that the end of the process does not wait for may still run it.
    atexit.register(lambda: loop.is_running() or loop.close())
    return loop


class Awaited:
    """Awaits reward functions, up to `concurrency` calls at a time and each for up to `seconds`."""

    def __init__(self, concurrency: int, seconds: float | None):
        self._concurrency = concurrency
        self._seconds = seconds

    def each(
        self, function: RewardFunction, questions: Sequence[Question]
    ) -> Iterator[tuple[int, float | Failure]]:
        """Yield the function's score of each completion with its place, in the order of their
        ends."""
        free = asyncio.Semaphore(self._concurrency)

        async def call(question: Question) -> float | Failure:
            with blaming(function.setting, DataError, question.on):
                return await function.awaited(question.completion, question.answer, question.more)

        async def score(place: int, question: Question) -> tuple[int, float | Failure]:
            await free.acquire()
            outcome = await self._limited(call(question))
            free.release()  # not after an error, which ends the others: no further call begins
            return place, outcome

        with _lock:
            loop = _loop()
            calls = {
                loop.create_task(score(place, question)) for place, question in enumerate(questions)
            }
            pending = calls
            try:
                while pending:
                    some = asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    done, pending = loop.run_until_complete(some)
                    for task in done:
                        yield task.result()
            finally:
                self._cancel_all()
                _read_errors(calls)

    def batch(
        self, function: RewardFunction, inputs: Mapping[str, object], count: int, on: str
    ) -> BatchScores | Failure:
        """Return the function's scores of a batch. on: the batch in words, for errors."""

        async def call() -> BatchScores | Failure:
            with blaming(function.setting, DataError, on):
                return await function.awaited_scores(inputs, count)

        with _lock:
            try:
                return _loop().run_until_complete(self._limited(call()))
            finally:
                self._cancel_all()

    async def _limited(self, call: Awaitable[_Value]) -> _Value | Failure:
        """Await a call for up to `seconds`; return its value, or a Failure if it takes longer.

        A call that does not end when it is cancelled is left alone.
        """
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return task.result()
        task.cancel()
        return Failure(TIMEOUT, f"gave no answer within task.verifier_seconds={self._seconds:g}")

    def _cancel_all(self) -> None:
        """Cancel the calls that nobody waits for, and give them some time to end."""
        loop = _loop()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
            # They may catch that; the loop would complain of them at its end.
            task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_SECONDS_TO_CANCEL))
            _read_errors(left)


def _read_errors(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Read the error of each task that has one: asyncio prints a traceback of those that nobody
    has read."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


class _DaemonThreads(ThreadPoolExecutor):
    """Makes each call in a thread for which the end of the process does not wait."""

    def submit(
        self, fn: Callable[..., _Value], /, *args: object, **kwargs: object
    ) -> Future[_Value]:
        return in_background(lambda: fn(*args, **kwargs))
