"""Puts back what code of the user's may change in this process by mistake, after each call."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence

log = logging.getLogger("pgtoolkit")

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)

_noted: set[tuple[str, str]] = set()
"""(function, change) of each note that was printed."""


class ProcessState:
    """The working directory, handlers of signals, warnings that are errors, and settings of torch
    and NumPy at the time of its creation.

    A run's files, its way to stop, and its gradients depend on them. The global generators of
    random numbers are not among them: pgtoolkit does not use them, and a user's code that does
    should not draw the same numbers each time.
    """

    def __init__(self):
        self._folder = _folder()
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._torch = _torch_settings()
        self._numpy = _numpy_errors()
        self._errors_of_warnings = [item for item in warnings.filters if _makes_errors(item)]

    def restore(self, function: str) -> None:
        """Put back what has changed since, and print a note for each kind of change, once for each
        function of the user's."""
        changed = []
        if self._folder is not None and _folder() != self._folder:
            os.chdir(self._folder)
            changed.append("the working directory")
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
                    changed.append(f"the handler of {signal.Signals(number).name}")
        changed += self._restore_torch()
        if self._numpy and _numpy_errors() != self._numpy:
            sys.modules["numpy"].seterr(**self._numpy)
            changed.append("numpy.seterr")
        if _print_warnings(but=self._errors_of_warnings):
            changed.append("warnings.filters")
        for change in changed:
            if (function, change) not in _noted:
                _noted.add((function, change))
                log.warning(
                    f"note: {function} changed {change}, which was put back: the run depends on "
                    "it. Said once."
                )

    def _restore_torch(self) -> list[str]:
        """Put back settings of torch, and return the names of those that had changed.

        If torch was not imported before, these are the settings with which it is imported.
        """
        now = _torch_settings()
        torch = sys.modules.get("torch")
        if torch is None:
            return []
        before = self._torch or {
            "set_grad_enabled": True,
            "set_default_dtype": torch.float32,
            "set_default_device": torch.device("cpu"),
        }
        changed = [name for name, value in before.items() if now[name] != value]
        for name in changed:
            value = before[name]
            # A default device that is set, if only to the CPU, makes each call of torch slower.
            is_cpu = name == "set_default_device" and str(value).partition(":")[0] == "cpu"
            getattr(torch, name)(None if is_cpu else value)
        return [f"torch.{name}" for name in changed]


def print_warnings() -> bool:
    """Let warnings be printed here and in processes that this one starts, where PYTHONWARNINGS
    makes them errors; return whether it does.

    As an error, a warning of a library would end the run, or change it where the library catches
    it. A filter that names its module stays.
    """
    typed = os.environ.get("PYTHONWARNINGS")
    if typed:
        os.environ["PYTHONWARNINGS"] = ",".join(map(_as_printed, typed.split(",")))
    return _print_warnings()


def _as_printed(typed: str) -> str:
    """Return an entry of PYTHONWARNINGS, action:message:category:module:line, with the action
    `default` in place of `error`, which may be cut short."""
    action, *others = typed.strip().split(":")
    is_of_any_module = len(others) < 3 or not others[2]
    if action and "error".startswith(action) and is_of_any_module:
        action = "default"
    return ":".join([action, *others])


def _print_warnings(but: Sequence[tuple] = ()) -> bool:
    """Replace the filters that make errors of warnings of any module; return whether there were
    any. but: filters to keep."""
    has_replaced = False
    for number, item in enumerate(warnings.filters):
        if _makes_errors(item) and item not in but:
            # In place: Python's own code holds the same list.
            warnings.filters[number] = ("default", *item[1:])  # pyright: ignore[reportIndexIssue]
            has_replaced = True
    return has_replaced


def _makes_errors(item: tuple) -> bool:
    """Return whether a filter, (action, message, category, module, line), makes errors of warnings
    of any module."""
    return item[0] == "error" and item[3] is None


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


def _torch_settings() -> dict[str, object]:
    """Return torch's settings by the function that sets them; {} if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "set_grad_enabled": torch.is_grad_enabled(),
        "set_default_dtype": torch.get_default_dtype(),
        "set_default_device": torch.get_default_device(),
        "set_num_threads": torch.get_num_threads(),
        "set_deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "set_float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _numpy_errors() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    return {} if numpy is None else numpy.geterr()
