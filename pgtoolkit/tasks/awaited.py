"""Calls of reward functions that are awaited (`async def`), several at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from pgtoolkit.errors import DataError
from pgtoolkit.system.functions import blaming
from pgtoolkit.tasks.process_pool import TIMEOUT, Failure
from pgtoolkit.tasks.reward_functions import BatchScores, Question, RewardFunction

_Value = TypeVar("_Value")


class Awaited:
    """Awaits reward functions, up to `concurrency` calls at a time and each for up to `seconds`.

    One event loop lasts as long as the run, since an HTTP client that a module keeps belongs to the
    loop that it was first used in.
    """

    def __init__(self, concurrency: int, seconds: float | None):
        self._concurrency = concurrency
        self._seconds = seconds
        self._lock = threading.Lock()
        self._runner: asyncio.Runner | None = None

    def each(
        self, function: RewardFunction, questions: Sequence[Question]
    ) -> list[float | Failure]:
        """Return the function's score of each completion, in their order."""
        free = asyncio.Semaphore(self._concurrency)

        async def score(question: Question) -> float | Failure:
            async with free:
                with blaming(function.setting, DataError, question.on):
                    call = function.awaited(question.completion, question.answer, question.more)
                    return await self._limited(call)

        async def scores() -> list[float | Failure]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(question)) for question in questions]
            return [task.result() for task in tasks]

        return self._run(scores)

    def batch(
        self,
        function: RewardFunction,
        inputs: Mapping[str, object],
        count: int,
        on: str,
    ) -> BatchScores:
        """Return the function's scores of a batch. on: the batch in words, for errors."""

        async def scores() -> BatchScores:
            with blaming(function.setting, DataError, on):
                outcome = await self._limited(function.awaited_scores(inputs, count))
            return BatchScores([outcome] * count) if isinstance(outcome, Failure) else outcome

        return self._run(scores)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    async def _limited(self, call: Awaitable[_Value]) -> _Value | Failure:
        """Await a call for up to `seconds`; return its value, or a Failure if it takes longer."""
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            return Failure(
                TIMEOUT, f"gave no answer within task.verifier_seconds={self._seconds:g}"
            )

    def _run(self, scores: Callable[[], Coroutine[None, None, _Value]]) -> _Value:
        with self._lock:
            if self._runner is None:
                self._runner = asyncio.Runner()
            try:
                return self._runner.run(scores())
            except BaseExceptionGroup as group:
                raise _first(group) from None


def _first(group: BaseExceptionGroup) -> BaseException:
    """Return the first exception of a group, also out of groups within it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
