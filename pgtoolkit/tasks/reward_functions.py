"""Reward functions of the user's: the arguments that their parameters ask for, and their calls.

Nothing large is imported, so that the processes of verifiers start quickly.
"""

from __future__ import annotations

import inspect
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.process_pool import NOTHING, TIMEOUT, Failure

if TYPE_CHECKING:
    import asyncio

UNREACHABLE = "unreachable"
"""The kind of failure of a function whose server cannot be reached."""

NOT_REACHED = "could not reach the server that it asks: "
"""The beginning of the reason of such a failure; Python's message follows."""

SINGLE = ("completion", "answer", "prompt", "row")
"""Names of the parameters that a function that scores one completion may have."""

OF_A_BATCH = (
    "completions",
    "prompts",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""Names of the parameters, as TRL has them, that a function that scores a batch may have, besides
the columns of the file."""

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

_Value = TypeVar("_Value")


class TrainerState(NamedTuple):
    """The progress of training, for a reward function in TRL's form.

    global_step: updates of the weights that wrote the completions. max_steps: updates of the run.
    """

    global_step: int
    max_steps: int


class Signature(NamedTuple):
    """The arguments that a reward function is called with.

    is_batch: whether one call scores all completions. is_async: whether it is awaited.
    names: the parameters that it gets by name; None: it gets (completion, answer) by position.
    takes_all: whether it gets all other arguments by name as well.
    needed: parameters without a default.
    """

    is_batch: bool
    is_async: bool
    names: tuple[str, ...] | None
    takes_all: bool
    needed: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        return self.names or ("completion", "answer")

    def wants(self, name: str) -> bool:
        return self.takes_all or name in self.named

    @property
    def wants_rows(self) -> bool:
        """Return whether it asks for more of a row than its prompt and its answer."""
        if not self.is_batch:
            return self.wants("row")
        return self.takes_all or bool(set(self.named) - set(OF_A_BATCH))

    @property
    def columns(self) -> list[str]:
        """Return the columns that every row must have."""
        return [
            name for name in self.needed if self.is_batch and name not in (*OF_A_BATCH, "answer")
        ]


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
        self.signature = _signature(self.setting, self._function)
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

    def _batch(self, rewards: Any, count: int, logged: _Logged) -> BatchScores:
        if isinstance(rewards, Failure):
            return BatchScores([rewards] * count)
        try:
            values = list(rewards)
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
        import asyncio

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
        import asyncio

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

    def _run(self, scores: Callable[[], Coroutine[Any, Any, _Value]]) -> _Value:
        import asyncio

        with self._lock:
            if self._runner is None:
                self._runner = asyncio.Runner()
            try:
                return self._runner.run(scores())
            except BaseExceptionGroup as group:
                raise _first(group) from None


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


def as_number(value: Any) -> float:
    """Return a value of the user's code as a number, such as a bool or a scalar of NumPy; NaN if it
    is none."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def is_nothing(reward: object) -> bool:
    """Return whether a value of the user's code means no score: None or NaN."""
    return reward is None or (not isinstance(reward, str) and reward != reward)


def _signature(setting: str, function: Callable[..., object]) -> Signature:
    """Return how a function is called, by its parameters. ConfigError if they ask for other
    arguments."""
    call = getattr(function, "__call__", None)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # The parameters of some functions written in C are not known.
        return Signature(False, is_async, None, False, ())
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    plain = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    by_name = [
        parameter.name for parameter in plain if parameter.kind is not parameter.POSITIONAL_ONLY
    ]
    needed = [parameter.name for parameter in plain if parameter.default is parameter.empty]
    if {"completions", "completion_ids", "prompts"} & set(by_name):
        names = tuple(by_name)
        return Signature(True, is_async, names, takes_all, tuple(needed))
    names = tuple(name for name in by_name if name in SINGLE)
    if (names or takes_all) and set(needed) <= set(names):
        return Signature(False, is_async, names, takes_all, tuple(needed))
    first_two = [parameter.name for parameter in plain[:2]]
    in_other_order = any(
        name in SINGLE and name != SINGLE[place] for place, name in enumerate(first_two)
    )
    if not in_other_order and _takes_two(function):
        return Signature(False, is_async, None, False, ())
    name = getattr(function, "__name__", type(function).__name__)
    raise ConfigError(
        refusal(
            setting=setting,
            needs=f"a function with parameters among {', '.join(SINGLE)}, or with completions for "
            "a whole batch",
            got=f"{name}{inspect.signature(function)}",
            reason="It gets arguments by the names of its parameters; two parameters of other "
            "names get the completion and its answer.",
            use="def score(completion, answer)",
        )
    )


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("", "")
    except TypeError:
        return False
    return True


def _status(error: Exception) -> int | None:
    """Return the HTTP status in an exception of some client; None without one."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "code", "status"):
            status = getattr(holder, name, None)
            if type(status) is int and 400 <= status < 600:
                return status
    return None


def _first(group: BaseExceptionGroup) -> BaseException:
    """Return the first exception of a group, also out of groups within it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
