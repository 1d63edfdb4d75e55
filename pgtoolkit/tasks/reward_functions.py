"""Reward functions of the user's: how they are called, what their values mean, and which of their
exceptions say that a server was not reached.

Nothing large is imported, so that the processes of verifiers start quickly.
"""

from __future__ import annotations

import errno
import inspect
import math
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, SupportsFloat, cast

from pgtoolkit.errors import DataError, first_line
from pgtoolkit.system.functions import import_function
from pgtoolkit.system.own_end import OwnEnd
from pgtoolkit.tasks.process_pool import NOTHING, Failure
from pgtoolkit.tasks.signatures import OF_A_BATCH, OF_VERL, SINGLE, signature_of

UNREACHABLE = "unreachable"
"""The kind of failure of a function whose server cannot be reached."""

NOT_REACHED = "could not reach the server that it asks: "
"""The reason of a failure of this kind begins so; Python's message follows."""

_MAX_LOGGED_CHARACTERS = 1000
"""Characters that are kept of a value that a function logs of a completion."""

_NOT_REACHED_EXCEPTIONS = {
    "ConnectionError",
    "TimeoutError",
    "SSLError",
    "IncompleteReadError",
    "CancelledError",
    "URLError",
    "gaierror",
    "herror",
    "HTTPException",
    "Timeout",
    "TransportError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ChunkedEncodingError",
    "APIConnectionError",
    "RpcError",
}
"""Exceptions that mean that a server was not reached: of Python, requests, httpx, aiohttp, gRPC,
and the clients of OpenAI and Anthropic."""

_CLIENTS = {"requests", "httpx", "aiohttp", "openai", "anthropic", "urllib3", "niquests"}
"""Packages that read a server's answer as JSON."""

_NOT_REACHED_NUMBERS = {
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.EADDRNOTAVAIL,
    errno.ENOBUFS,
    errno.ENOTCONN,
}
"""Numbers of an OSError that mean the same."""

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
        self._function = import_function(key, path, None, reads={*SINGLE, *OF_A_BATCH, *OF_VERL})
        self.signature = signature_of(self.setting, self._function)

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
        try:
            value = self._function(*positional, **named)
        except BaseException as error:
            value = self._not_reached(error)
        return self._single(value)

    async def awaited(
        self,
        completion: str,
        answer: str,
        more: Mapping[str, object] | None = None,
    ) -> float | Failure:
        """Return the same for an `async def`."""
        positional, named = self._arguments(completion, answer, more or {})
        try:
            value = await self._function(*positional, **named)
        except BaseException as error:
            value = self._not_reached(error)
        return self._single(value)

    def scores(self, inputs: Mapping[str, object], count: int) -> BatchScores | Failure:
        """Return the function's scores of `count` completions, by one call, or why there are none.

        inputs: by parameter. Raises DataError for a value that is no list of scores, and whatever
        the function raises.
        """
        logged = _Logged(self.setting)
        named = self._batch_arguments(inputs, logged)
        try:
            values = self._function(**named)
        except BaseException as error:
            values = self._not_reached(error)
        return self._batch(values, count, logged)

    async def awaited_scores(
        self, inputs: Mapping[str, object], count: int
    ) -> BatchScores | Failure:
        """Return the same for an `async def`."""
        logged = _Logged(self.setting)
        named = self._batch_arguments(inputs, logged)
        try:
            values = await self._function(**named)
        except BaseException as error:
            values = self._not_reached(error)
        return self._batch(values, count, logged)

    def _not_reached(self, error: BaseException) -> Failure:
        """Return the failure of a call that could not reach its server; raise any other exception.

        Raises DataError, of one line, for a call that the server refuses.
        """
        failure = _not_reached(self.setting, error)
        if failure is None:
            raise error
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
        if self.signature.is_verl:
            values = {"solution_str": completion, **more}
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

    def _batch(self, rewards: object, count: int, logged: _Logged) -> BatchScores | Failure:
        if isinstance(rewards, Failure):
            return rewards
        try:
            values = list(cast("Iterable[object]", rewards))
        except TypeError:
            values = None
        if values is None or isinstance(rewards, str | bytes | dict) or len(values) != count:
            got = f"{len(values)} of them" if values is not None else repr(rewards)[:60]
            advice = ""
            if values is None or isinstance(rewards, str | bytes | dict):
                got = repr(rewards)[:60]
                advice = f" {_advice(rewards, 'a list of numbers')}"
            raise DataError(
                f"{self.setting} must return a list of {count} scores, one for each completion "
                f"(got {got}).{advice}"
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
        value = reward
        if self.signature.is_verl and isinstance(reward, dict) and "score" in reward:
            value = reward["score"]
        number = as_number(value)
        if not math.isfinite(number):
            raise DataError(
                f"{self.setting} returned {repr(reward)[:60]}; a verifier returns a bool or a "
                f"finite number. {_advice(value, 'a number')}"
            )
        return number


def _advice(value: object, needed: str) -> str:
    """Return what to write in a function in place of a value that is no score.

    needed: "a number", or "a list of numbers". A coroutine is closed.
    """
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that nobody awaited it
    if inspect.isawaitable(value):
        return "Nobody awaited it: write async def, and return await before the call."
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "Write return in place of yield."
    if isinstance(value, dict):
        names = [name for name, entry in value.items() if not math.isnan(as_number(entry))]
        name = "score" if "score" in value else next(iter(names or value), "score")
        return f"Return an entry of the dictionary: return result[{name!r}]."
    if isinstance(value, str | bytes):
        return "Return a number, such as float(text)."
    if isinstance(value, complex):
        return "Return a number, such as value.real."
    if callable(value):
        return "Return what it gives when it is called."
    if hasattr(value, "__len__") and needed == "a number":
        return (
            "Return the number in it, such as float(value[0]); a function with a parameter "
            "completions scores a batch, and returns a list."
        )
    return f"Return {needed}."


def _not_reached(setting: str, error: BaseException) -> Failure | None:
    """Return the failure of a call that could not reach its server; None for any other error.

    Exceptions that do not derive from Exception count, since libraries raise them where a call is
    cancelled or late; but not those by which code ends the process.
    Raises DataError, of one line, for a call that the server refuses.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | OwnEnd):
        return None
    if isinstance(error, BaseExceptionGroup):
        failures = [_not_reached(setting, leaf) for leaf in error.exceptions]
        return None if None in failures else failures[0]
    status = _status(error)
    message = f"{type(error).__name__}: {first_line(error)}"
    if status is not None and status < 500 and status not in _BUSY:
        raise DataError(f"{setting} is refused by the server that it asks: {message}") from error
    names = {kind.__name__ for kind in type(error).__mro__}
    if _is_of_an_answer_without_json(error, names):
        return Failure(UNREACHABLE, f"{NOT_REACHED}its answer is no JSON: {message}")
    is_failure = (
        status is not None
        or bool(names & _NOT_REACHED_EXCEPTIONS)
        or not isinstance(error, Exception)
        or (isinstance(error, OSError) and error.errno in _NOT_REACHED_NUMBERS)
    )
    if is_failure:
        return Failure(UNREACHABLE, NOT_REACHED + message)
    # A client, or the function, may raise an exception of its own for one of these.
    return None if error.__cause__ is None else _not_reached(setting, error.__cause__)


def _is_of_an_answer_without_json(error: BaseException, names: set[str]) -> bool:
    """Return whether an error says that a server's answer, such as a proxy's page under status 200,
    is no JSON. A completion that the function reads as JSON is none of a server's.

    names: of the error's classes.
    """
    if names & {"ContentTypeError", "APIResponseValidationError"}:
        return True  # aiohttp's, and those of the clients of OpenAI and Anthropic
    if "JSONDecodeError" not in names:
        return False
    text = getattr(error, "doc", None)
    if isinstance(text, str) and re.match(r"\s*<(!doctype|html|head|body)\b", text, re.IGNORECASE):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in frames)
    return any(module.partition(".")[0] in _CLIENTS for module in modules)


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
        is_text = isinstance(value, str | bytes | bytearray)
        return math.nan if is_text else float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def is_nothing(reward: object) -> bool:
    """Return whether a value of the user's code means no score: None or NaN."""
    if reward is None:
        return True
    try:
        return not isinstance(reward, str) and bool(reward != reward)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several elements
        return False


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of some client; None without one."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 400 <= status < 600:  # or an HTTPStatus
                return int(status)
    return None
