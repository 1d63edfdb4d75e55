"""Environments of conversations: a class of the user's, called here or in processes; and `Guess`.

Nothing large is imported, so that these processes start quickly.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.system.report import refusal

METHODS = ("start", "reply", "score")


class Ask(NamedTuple):
    """A call of a method of an environment.

    environment: as `Environments` keeps it; None for a new one. on: the conversation in words, for
        errors.
    """

    environment: object
    method: str
    argument: object
    on: str


class Environments:
    """Makes environments, and calls them.

    path: of the class. options: the keywords that it is made with.
    pickled: between two calls an environment is bytes, so that any process can answer for it.
    Raises ConfigError for a class that cannot be imported, or lacks a method.
    """

    def __init__(self, path: str, options: Mapping[str, object], pickled: bool = False):
        self._path = path
        self._pickled = pickled
        kind = import_function("task.environment", path, (), tuple(options))
        missing = [name for name in METHODS if not callable(getattr(kind, name, None))]
        if missing:
            raise ConfigError(
                refusal(
                    setting=f"task.environment={path}",
                    needs=f"methods {', '.join(METHODS)}",
                    got=f"none named {', '.join(missing)}",
                    reason="They make a conversation.",
                    use=f"a class with def {missing[0]}(self, ...)",
                )
            )
        self._make = partial(kind, **options)

    def answer(self, ask: Ask) -> tuple[object, object]:
        """Call the method; return the environment after it, and its result.

        Raises DataError where it fails.
        """
        setting = f"task.environment={self._path}"
        with blaming(f"{ask.method} of {setting}", DataError, ask.on):
            environment = ask.environment
            if isinstance(environment, bytes) and environment and self._pickled:
                environment = pickle.loads(environment)
            if environment is None:
                environment = self._make()
            value = getattr(environment, ask.method)(ask.argument)
        if not self._pickled:
            return environment, value
        action = f"pickling {setting} (not with task.environment_processes=0)"
        with blaming(action, DataError, ask.on):
            return pickle.dumps(environment), value


class Guess:
    """The policy guesses a number from 0 to numbers - 1, told "higher" or "lower" after each guess.

    A guess is the first number in a turn. The right number ends the conversation, and so does a
    turn without a number in the range. The reward is 1 for the right number. Otherwise it is half
    of the nearness of the last guess, which falls from 1 to 0 over the largest possible distance;
    0 without a guess.
    """

    def __init__(self, numbers: int):
        self._numbers = numbers

    def start(self, prompt: Prompt) -> list[Message]:
        # A hash, not a generator of random numbers: the same in every version of every library.
        drawn = hashlib.sha256(str(prompt.seed).encode()).digest()[:8]
        self._number = int.from_bytes(drawn, "little") % self._numbers
        return [{"role": "user", "content": f"0-{self._numbers - 1}?"}]

    def reply(self, messages: Sequence[Message]) -> Message | None:
        guess = self._guess(messages)
        if guess is None or guess == self._number:
            return None
        return {"role": "user", "content": "higher" if guess < self._number else "lower"}

    def score(self, messages: Sequence[Message]) -> tuple[float, dict[str, float]]:
        guess = self._guess(messages)
        if guess is None:
            return 0.0, {}
        if guess == self._number:
            return 1, {}
        nearness = 1 - abs(guess - self._number) / (self._numbers - 1)
        return nearness / 2, {}

    def _guess(self, messages: Sequence[Message]) -> int | None:
        number = re.search("[0-9]+", messages[-1]["content"])
        if number is None or len(number[0]) >= 10:
            return None
        guess = int(number[0])
        return guess if guess < self._numbers else None
