"""Environments of conversations: a class of the user's, called here or in processes; and one that
comes along.

Nothing large is imported, for the sake of these processes.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from functools import partial
from typing import Any, NamedTuple

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.system.report import refusal

METHODS = ("start", "reply", "score")


class Ask(NamedTuple):
    """A call of a method. environment: None for a new one. on: which conversation it is, in words,
    for errors."""

    environment: Any
    method: str
    argument: Any
    on: str


class Environments:
    """Makes environments, and calls them. Raises ConfigError for a class that cannot be imported,
    or lacks a method.

    path, options: of the class, and the keywords that it is made with. pickled: between two calls
        an environment is
    bytes, so that any process answers for it.
    """

    def __init__(self, path: str, options: dict[str, Any], pickled: bool = False):
        self._path, self._pickled = path, pickled
        made = import_function("task.environment", path, (), tuple(options))
        if missing := [name for name in METHODS if not callable(getattr(made, name, None))]:
            raise ConfigError(
                refusal(
                    setting=f"task.environment={path}",
                    needs=f"methods {', '.join(METHODS)}",
                    got=f"none named {', '.join(missing)}",
                    reason="They make a conversation.",
                    use=f"a class with def {missing[0]}(self, ...)",
                )
            )
        self._make = partial(made, **options)

    def answer(self, ask: Ask) -> tuple[Any, Any]:
        """The environment after the call, and what it returned; DataError where it fails."""
        with blaming(f"{ask.method} of task.environment={self._path}", DataError, ask.on):
            known = (
                pickle.loads(ask.environment)
                if self._pickled and ask.environment
                else ask.environment
            )
            environment = self._make() if known is None else known
            value = getattr(environment, ask.method)(ask.argument)
        with blaming(
            f"pickling task.environment={self._path} (not with task.environment_processes=0)",
            DataError,
            ask.on,
        ):
            return pickle.dumps(environment) if self._pickled else environment, value


class Guess:
    """A number from 0 to numbers - 1 is found by "higher" and "lower"; a guess is the first number
    in a turn.

    The number ends the conversation, and so does a turn without any of them. The reward is 1 for
    the number; else half of how near the last guess came, of all that it could be away, or 0 where
    it is none.
    """

    def __init__(self, numbers: int):
        self._numbers = numbers

    def start(self, prompt):
        # A hash, not a generator of random numbers: the same in every version of every library.
        drawn = hashlib.sha256(str(prompt.seed).encode()).digest()[:8]
        self._number = int.from_bytes(drawn, "little") % self._numbers
        return [{"role": "user", "content": f"0-{self._numbers - 1}?"}]

    def reply(self, messages):
        guess = self._guess(messages)
        if guess in (None, self._number):
            return None
        return {"role": "user", "content": "higher" if guess < self._number else "lower"}

    def score(self, messages):
        guess = self._guess(messages)
        near = 0 if guess is None else 1 - abs(guess - self._number) / (self._numbers - 1)
        return 1 if guess == self._number else near / 2, {}

    def _guess(self, messages) -> int | None:
        found = re.search("[0-9]+", messages[-1]["content"])
        return (
            int(found[0])
            if found and len(found[0]) < 10 and int(found[0]) < self._numbers
            else None
        )
