"""A call in a background thread, whose result or error is handed to the thread that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Start calling `function` in a daemon thread, for which the end of the process does not wait.

    The future's `result(seconds)` waits at most that long, while signals to the process still act.
    It raises what the function has raised, or TimeoutError if it is not done by then. The function
    is not stopped then, but its result is dropped unless somebody asks again.
    """
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # of any kind: it is raised in the thread that asks
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future
