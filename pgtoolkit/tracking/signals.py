"""Records a signal that comes before training handles signals itself, so that the run can be
resumed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_REPEATED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Those of STOP_SIGNALS that may come more than once for one reason: to each process of a job and
from its parent, or from the kernel each second."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_REPEATED)
"""Signals after which a run finishes its step, saves and stops. SIGHUP comes when a terminal is
closed or a connection to another machine ends; SIGUSR1 and SIGUSR2 from SLURM, which is asked to
send one before it takes a node away; SIGXCPU from the kernel, at a soft limit of CPU seconds."""

Handler = Callable[[int, FrameType | None], object]
"""A function that is called with a signal's number and the interrupted frame."""


def answer_stop_signals(handler: Handler) -> dict[int, Handler | int | None]:
    """Let STOP_SIGNALS call a handler from now on, and return the earlier handler of each.

    Of those in `_REPEATED` the handler gets each once. SIGHUP stays ignored if it is: `nohup pgtk
    ...` continues when its terminal is closed.
    """
    arrived: set[int] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        if number in arrived and number in _REPEATED:
            return
        arrived.add(number)
        handler(number, frame)

    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    answered = [
        number for number in STOP_SIGNALS if not (number == signal.SIGHUP and ignores_hangup)
    ]
    return {number: signal.signal(number, handle) for number in answered}


class StopSignal(KeyboardInterrupt):
    """The first of STOP_SIGNALS; str() is its name."""


swallowed: list[StopSignal] = []
"""The first signal since `stop_signals_recorded` began. If it is still here when training begins,
the exception was swallowed."""


@contextlib.contextmanager
def answered_by(handler: Handler) -> Iterator[None]:
    """Let STOP_SIGNALS call a handler in the block."""
    earlier_handlers = answer_stop_signals(handler)
    try:
        yield
    finally:
        for number, earlier_handler in earlier_handlers.items():
            signal.signal(number, earlier_handler)


@contextlib.contextmanager
def stop_signals_wait() -> Iterator[None]:
    """Hold back STOP_SIGNALS in a block of imports.

    An exception in the middle of an import leaves half of a module, and confusing errors.
    """
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)


def raise_swallowed() -> None:
    """Raise a StopSignal again if Python dropped it because a finalizer (__del__) raised it."""
    if swallowed:
        raise swallowed[0]


def raise_stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for repeated in _REPEATED:
        signal.signal(repeated, signal.SIG_IGN)
    swallowed.append(StopSignal(signal.Signals(number).name))
    raise swallowed[0]
