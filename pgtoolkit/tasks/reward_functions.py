"""Reward functions of the user's, and how they are called: again where a server was not reached.

Nothing large is imported, so that the processes of verifiers start quickly.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, SupportsFloat, cast

from pgtoolkit.errors import DataError, first_line
from pgtoolkit.system.functions import import_function
from pgtoolkit.tasks.process_pool import NOTHING, Failure
from pgtoolkit.tasks.signatures import signature_of

UNREACHABLE = "unreachable"
"""The kind of failure of a function whose server cannot be reached."""

NOT_REACHED = "could not reach the server that it asks: "
"""The reason of a failure of this kind begins so; Python's message follows."""

WAITS = (0.5, 2.0, 8.0)
"""Seconds before each further call of a function whose server could not be reached."""

_MAX_LOGGED_CHARACTERS = 1000
"""Characters that are kept of a value that a function logs of a completion."""

_NOT_REACHED_EXCEPTIONS = {
    "ConnectionError",
    "TimeoutError",
    "URLError",
    "gaierror",
    "HTTPException",
    "Timeout",
    "TransportError",
    "ClientConnectionError",
    "APIConnectionError",
}
"""Exceptions that mean that a server was not reached: of Python, requests, httpx, aiohttp, and the
clients of OpenAI and Anthropic."""

_BUSY = (408, 425, 429)
"""HTTP statuses below 500 with which a server asks to be called again."""


class TrainerState(NamedTuple):
    """The progress of training, for a reward function in TRL's form.

    global_step: updates of the weights that wrote the completions. max_steps: updates of the run.
    """

    global_step: int
    max_steps: int


class Question(NamedTuple):
    """A completion for a verifier.

    number: of the verifier, among those of the run. on: the completion in words, for errors.
    more: prompt and row by these names, where the verifier asks for them.
    """

    number: int
    completion: str
    answer: str
    on: str
    more: dict[str, object] | None = None


@dataclass
class BatchScores:
    """The scores that a function gives a batch, and everything that it has logged.

    scores: of each completion; None where the function does not score it.
    metrics: logged numbers by name. columns: logged texts by name, one for each completion.
    """

    scores: Sequence[float | Failure | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)


class RewardFunction:
    """A function at a dotted path, called with the arguments that its parameters ask for.

    Raises ConfigError for one that cannot be imported, or that asks for other arguments.
    """

    def __init__(self, key: str, path: str):
        self.setting = f"{key}={path}"
        self._function = import_function(key, path, None)
        self.signature = signature_of(self.setting, self._function)
        self._retries = _Retries()

    def __call__(
        self,
        completion: str,
        answer: str,
        more: Mapping[str, object] | None = None,
    ) -> float | Failure:
        """Return the score of one completion, or why there is none.

        more: the prompt and the row, where the function asks for them. Raises DataError for a value
        that is no score, and whatever the function raises.
        """
        positional, named = self._arguments(completion, answer, more or {})
        return self._single(self._called(lambda: self._function(*positional, **named)))

    async def awaited(
        self,
        completion: str,
        answer: str,
        more: Mapping[str, object] | None = None,
    ) -> float | Failure:
        """Return the same for an `async def`."""
        positional, named = self._arguments(completion, answer, more or {})
        return self._single(await self._awaited(lambda: self._function(*positional, **named)))

    def scores(self, inputs: Mapping[str, object], count: int) -> BatchScores:
        """Return the function's scores of `count` completions, by one call.

        inputs: by parameter. Raises DataError for a value that is no list of scores, and whatever
        the function raises.
        """
        logged = _Logged(self.setting)
        named = self._batch_arguments(inputs, logged)
        return self._batch(self._called(lambda: self._function(**named)), count, logged)

    async def awaited_scores(self, inputs: Mapping[str, object], count: int) -> BatchScores:
        """Return the same for an `async def`."""
        logged = _Logged(self.setting)
        named = self._batch_arguments(inputs, logged)
        return self._batch(await self._awaited(lambda: self._function(**named)), count, logged)

    def _called(self, call: Callable[[], object]) -> object:
        """Call the function, again if it does not reach its server; return its value, or the
        Failure of the last call."""
        failure = None
        for wait in self._retries.waits():
            if wait:  # even a sleep of 0 seconds gives the processor away
                time.sleep(wait)
            try:
                value = call()
            except Exception as error:
                failure = _not_reached(self.setting, error)
                if failure is None:
                    raise
            else:
                self._retries.is_down = False
                return value
        self._retries.is_down = True
        return failure

    async def _awaited(self, call: Callable[[], Awaitable[object]]) -> object:
        """Await the function in the same way."""
        import asyncio

        failure = None
        for wait in self._retries.waits():
            await asyncio.sleep(wait)
            try:
                value = await call()
            except Exception as error:
                failure = _not_reached(self.setting, error)
                if failure is None:
                    raise
            else:
                self._retries.is_down = False
                return value
        self._retries.is_down = True
        return failure

    def _arguments(
        self,
        completion: str,
        answer: str,
        more: Mapping[str, object],
    ) -> tuple[tuple[str, ...], dict[str, object]]:
        """Return the positional arguments and the keywords for one completion."""
        if self.signature.names is None:
            return (completion, answer), {}
        values = {"completion": completion, "answer": answer, **more}
        return (), {name: value for name, value in values.items() if self.signature.wants(name)}

    def _batch_arguments(self, inputs: Mapping[str, object], logged: _Logged) -> dict[str, object]:
        values = {**inputs, "log_extra": logged.extra, "log_metric": logged.metric}
        return {name: value for name, value in values.items() if self.signature.wants(name)}

    def _single(self, reward: object) -> float | Failure:
        if isinstance(reward, Failure):
            return reward
        if is_nothing(reward):
            return Failure(NOTHING, f"returned {reward}")
        return self._number(reward)

    def _batch(self, rewards: object, count: int, logged: _Logged) -> BatchScores:
        if isinstance(rewards, Failure):
            return BatchScores([rewards] * count)
        try:
            values = list(cast("Iterable[object]", rewards))
        except TypeError:
            values = None
        if values is None or isinstance(rewards, str | bytes | dict) or len(values) != count:
            got = repr(rewards)[:60] if values is None else f"{len(values)} of them"
            raise DataError(
                f"{self.setting} must return a list of {count} scores, one for each completion "
                f"(got {got})"
            )
        scores = [None if is_nothing(value) else self._number(value) for value in values]
        for column, texts in logged.columns.items():
            if len(texts) != count:
                raise DataError(
                    f"log_extra of {self.setting} needs {count} values of {column}, one for each "
                    f"completion (got {len(texts)} of them)"
                )
        return BatchScores(scores, logged.metrics, logged.columns)

    def _number(self, reward: object) -> float:
        number = as_number(reward)
        if not math.isfinite(number):
            raise DataError(
                f"{self.setting} returned {repr(reward)[:60]}; a verifier returns a bool or a "
                "finite number"
            )
        return number


@dataclass
class _Retries:
    """The waits before the calls of a function.

    is_down: whether its server could not be reached; until it is reached again, further completions
        do not wait for it.
    """

    is_down: bool = False

    def waits(self) -> tuple[float, ...]:
        """Return the seconds to wait before each call."""
        return (0.0,) if self.is_down else (0.0, *WAITS)


def _not_reached(setting: str, error: Exception) -> Failure | None:
    """Return the failure of a call that could not reach its server; None for any other error.

    Raises DataError, of one line, for a call that the server refuses.
    """
    status = _status(error)
    message = f"{type(error).__name__}: {first_line(error)}"
    if status is not None and status < 500 and status not in _BUSY:
        raise DataError(f"{setting} is refused by the server that it asks: {message}") from error
    names = {kind.__name__ for kind in type(error).__mro__}
    if status is None and not names & _NOT_REACHED_EXCEPTIONS:
        return None
    return Failure(UNREACHABLE, NOT_REACHED + message)


class _Logged:
    """The numbers and texts that a function in TRL's form logs."""

    def __init__(self, setting: str):
        self._setting = setting
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[str]] = {}

    def metric(self, name: str, value: object) -> None:
        number = as_number(value)
        if not re.fullmatch(r"[A-Za-z][\w/]{0,39}", str(name)) or not math.isfinite(number):
            raise DataError(
                f"log_metric of {self._setting} needs a name of up to 40 letters, digits, '_' and "
                f"'/', and a finite number (got {name!r:.60} and {value!r:.60})"
            )
        self.metrics.setdefault(str(name), []).append(number)

    def extra(self, column: str, values: Sequence[object]) -> None:
        texts = [str(value)[:_MAX_LOGGED_CHARACTERS] for value in values]
        self.columns[str(column)[:40]] = texts


def as_number(value: object) -> float:
    """Return a value of the user's code as a number; NaN if it cannot be one.

    A bool and a scalar of NumPy can.
    """
    try:
        return math.nan if isinstance(value, str) else float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def is_nothing(reward: object) -> bool:
    """Return whether a value of the user's code means no score: None or NaN."""
    return reward is None or (not isinstance(reward, str) and reward != reward)


def _status(error: Exception) -> int | None:
    """Return the HTTP status in an exception of some client; None without one."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "code", "status"):
            status = getattr(holder, name, None)
            if type(status) is int and 400 <= status < 600:
                return status
    return None
