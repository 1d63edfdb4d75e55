"""A call in a thread of its own, whose result or error the thread that asks for it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_END_SECONDS = 10


class InBackground:
    """Begins to call `function`, which takes nothing, at once; the end of the process does not wait for it."""

    def __init__(self, function: Callable[[], Any]):
        self._value, self._error = None, None
        self._thread = threading.Thread(target=self._call, args=(function,), daemon=True)
        self._thread.start()

    def result(self, seconds: float | None = None) -> Any:
        """Waits, for so long at most; a signal to the process still acts. Raises what the function has raised.

        TimeoutError where it is not done by then: it goes on, and is of no consequence.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def abandon(self) -> None:
        """Waits a little for a call that was told to end."""
        self._thread.join(_END_SECONDS)

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            self._value = function()
        except BaseException as error:  # whatever it is, it belongs to the caller's thread
            self._error = error
