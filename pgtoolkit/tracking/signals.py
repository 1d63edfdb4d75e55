"""A signal before training catches signals itself: the run directory says so, and the run can be
resumed."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import Interrupted
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.provenance import collect
from pgtoolkit.runs.records import read_status
from pgtoolkit.system.report import say
from pgtoolkit.tracking.next_commands import resume_command

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Let a run finish its step, save and stop. SIGHUP comes when a terminal is closed or a connection
to another machine ends; SIGUSR2 is what SLURM is asked to send before it takes a node away."""


def answer_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Let STOP_SIGNALS call the handler from here on; returns what each did before.

    SIGHUP stays ignored where it is: `nohup pgtk ...` goes on when its terminal is closed.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    answered = [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and ignored)]
    return {number: signal.signal(number, handler) for number in answered}


class StopSignal(KeyboardInterrupt):
    """The first of STOP_SIGNALS; str() is its name."""


_swallowed: list[StopSignal] = []
"""The first signal since `stop_signals_recorded` began; still there when training begins, it was
swallowed."""


@contextlib.contextmanager
def answered_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """STOP_SIGNALS call the handler meanwhile."""
    before = answer_stop_signals(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stop_signals_wait() -> Iterator[None]:
    """Around imports: an exception amid them leaves modules half made, of which libraries make
    errors of their own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def stop_signals_recorded(
    config: Config, run_dir: Path, overrides: list[str], sweep: str | None = None
) -> Iterator[None]:
    """Around the imports of training, which take seconds, and the training itself.

    A first signal raises StopSignal where the program is, unless training has set handlers of its
    own; if it ends the program, the run directory records it and Interrupted is raised with the
    command that resumes the run. A second signal ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with answered_by(_raise):
        try:
            yield
        except StopSignal as stop:
            if not read_status(run_dir):
                with RunDirectory(run_dir) as run:
                    run.write_config(plain_config(config), list(overrides))
                    run.write_provenance(collect(sys.argv))
                    run.set_status("interrupted", 0, str(stop), sweep=sweep)
            status = read_status(run_dir)
            if status["state"] == "done":
                say(f"stopped as asked ({stop}) after the run was done")
                return
            raise Interrupted(
                f"stopped as asked ({stop}); the run is {status['state']} at step "
                f"{status['step']}. Continue with: {resume_command(run_dir)}"
            ) from None
        finally:
            _swallowed.clear()


def raise_swallowed() -> None:
    """Raise the StopSignal that has ended nothing: Python drops what is raised within a finalizer
    such as __del__."""
    if _swallowed:
        raise _swallowed[0]


def _raise(number, _frame):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # may come to each process of a job, and from the one above it
    for repeated in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(repeated, signal.SIG_IGN)
    _swallowed.append(StopSignal(signal.Signals(number).name))
    raise _swallowed[0]
