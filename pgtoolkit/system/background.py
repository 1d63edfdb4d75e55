"""A call in a thread of its own, whose result or error the thread that asks for it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_background(function: Callable[[], Any]) -> Future:
    """Begins to call `function`, which takes nothing, at once; the end of the process does not wait for it.

    `result(seconds)` waits, for so long at most, while signals to the process still act. It raises what the function
    has raised, or a bare TimeoutError where it is not done by then: it goes on, and is of no consequence.
    """
    future: Future = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # whatever it is, it belongs to the thread that asks
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future
