"""The end of the process: only pgtoolkit ends it, and code of the user's cannot do so in silence.

A script takes exit status 0 for a run that is done. Code of the user's that calls `os._exit(0)`, or
replaces the process by another program, would end a run so in the middle of a step.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.system.report import say
from pgtoolkit.system.terminal import flush_streams

really_exit = os._exit
"""Ends the process at once, for code of pgtoolkit's."""

_SECONDS_FOR_THREADS = 5
"""Time for threads of the user's to end with the process."""

_guarded: list[int] = []
"""The id of the process that `refuse_silent_ends` was called in; forks of it are not guarded."""


class OwnEnd(BaseException):
    """Raised in the place of an end of the process."""


def refuse_silent_ends() -> None:
    """Turn what would end this process in silence into an exception, or into a status that is not
    0.

    In the main thread `os._exit` and `os.exec...` raise OwnEnd, which ends a run as any exception
    of the user's code does. In another thread they print where they were called, and the status is
    1. Where a library written in C calls `exit`, the process is aborted.
    """
    if not _guarded:
        faulthandler.enable()  # shows what was called when the process is aborted
        for name in ("_exit", "execv", "execve"):
            setattr(os, name, _refusing(name, getattr(os, name)))
        # Python's own end runs no function that is registered here after those of `atexit`.
        ctypes.CDLL(None)["__cxa_atexit"](ctypes.CDLL(None)["raise"], signal.SIGABRT, None)
        atexit.register(_allow_exit)
        os.register_at_fork(after_in_child=_allow_exit)
    _guarded[:] = [os.getpid()]


def _allow_exit() -> None:
    """Let this process, or this fork of it, end by `exit`: the signal that it raises is ignored."""
    if faulthandler.is_enabled():
        faulthandler.disable()
    signal.signal(signal.SIGABRT, signal.SIG_IGN)


def _refusing(name: str, function: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return a function in the place of one of `os` that ends this process."""

    def refuse(*arguments: object) -> NoReturn:
        if os.getpid() not in _guarded:
            function(*arguments)
        call = f"os.{name}({', '.join(repr(argument)[:60] for argument in arguments)})"
        if threading.current_thread() is threading.main_thread():
            raise OwnEnd(f"{call} would end the process in silence. Use raise or return")
        call_stack = "".join(traceback.format_stack(sys._getframe(1)))
        say(f"pgtk: error: a thread of your code has called {call}:\n{call_stack}", error=True)
        flush_streams()
        really_exit(PgtoolkitError.exit_status)

    return refuse


def end(status: int) -> NoReturn:
    """End this process with an exit status as Python does, but wait for threads that code of the
    user's has left only for some seconds."""
    threads = threading.Thread(target=_join_threads, daemon=True)
    threads.start()
    threads.join(_SECONDS_FOR_THREADS)
    atexit._run_exitfuncs()
    flush_streams()
    really_exit(status)


def _join_threads() -> None:
    if "concurrent.futures.thread" in sys.modules:
        # Threads of an executor wait for further calls until they are told.
        sys.modules["concurrent.futures.thread"]._python_exit()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
