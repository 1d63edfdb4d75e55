"""Calls a function in a process of its own, so that the one that asks, such as the kernel of a
notebook, does not change.

Training sets seeds, threads, handlers of signals and more of its process, and depends on them. In a
process of its own it is what the command `pgtk` makes of it, whatever the caller has set.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pgtoolkit.errors import Interrupted, PgtoolkitError, as_storage_error, first_line
from pgtoolkit.system.child import Child, channel_to_parent, follow_parent
from pgtoolkit.system.own_end import end, really_exit, refuse_silent_ends
from pgtoolkit.system.process_state import print_warnings
from pgtoolkit.system.report import say
from pgtoolkit.system.terminal import output, prepare_streams
from pgtoolkit.tracking.next_commands import OF_PYTHON
from pgtoolkit.tracking.renewed_line import NotebookBar, is_notebook, variables_for
from pgtoolkit.tracking.signals import answer_stop_signals, answered_by

Result = TypeVar("Result")

_SECONDS_TO_SAVE = 30
"""Seconds that the process has to save and end where this one stops waiting for it."""


def call_apart(function: Callable[..., Result], arguments: Sequence, command: list[str]) -> Result:
    """Return what a function of a module gives, called in a process of its own.

    Meanwhile STOP_SIGNALS, such as the interrupt of a notebook, are sent on to it. What it prints
    is printed here, and its progress is a bar in a notebook.

    arguments: they and the result are pickled.
    command: what `pgtk` would be called with, for the record of a run.
    Raises the function's PgtoolkitError.
    """
    with tempfile.TemporaryDirectory(prefix="pgtk-") as folder_name:
        folder = Path(folder_name)
        (folder / "call").write_bytes(pickle.dumps((function, arguments, command)))
        words = [sys.executable, "-P", "-m", "pgtoolkit.launch.apart", folder_name]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            # The user's own value, for servers that run in another environment.
            "PGTK_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            OF_PYTHON: "1",
        }
        if is_notebook():
            status = _run_shown(words, environment)
        else:
            child = Child(words, environment)
            with _signals_sent_to(child):
                status = child.wait()
        return _outcome(folder, status)


def _run_shown(words: list[str], environment: dict[str, str]) -> int | None:
    """Run a command, and print its output by this process's streams; return its exit status."""
    read_end, write_end = os.pipe()
    bar = NotebookBar()
    with open(read_end, "rb", buffering=0) as printed:
        child = Child(words, environment | variables_for(write_end), printed=write_end)
        os.close(write_end)
        unread = b""
        try:
            with _signals_sent_to(child):
                while True:
                    has_more = bool(select.select([printed], [], [], 0.1)[0])
                    data = printed.read(65536) if has_more else b""
                    *lines, unread = (unread + data).split(b"\n")
                    for line in lines:
                        text = line.decode(errors="replace")
                        if not bar.take(text):
                            print(text, file=output(), flush=True)
                    if not data and child.poll() is not None:
                        return child.returncode
        finally:
            bar.close()


@contextlib.contextmanager
def _signals_sent_to(child: Child) -> Iterator[None]:
    """Send STOP_SIGNALS on to a process in the block; after an exception let it save and end.

    Only the main thread can receive signals.
    """

    def send_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with answered_by(send_on) if in_main_thread else contextlib.nullcontext():
            yield
    finally:
        child.end(_SECONDS_TO_SAVE)


def _outcome(folder: Path, status: int | None) -> Any:  # what the function gives
    """Return the result that a call has written, or raise its error."""
    try:
        result, error, printed_traceback = pickle.loads((folder / "outcome").read_bytes())
    except FileNotFoundError:
        if status == Interrupted.exit_status:
            raise Interrupted("stopped as asked before it began.") from None
        if status is not None and status < 0:
            ending = f"was ended by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                ending += " (the system does so when memory runs out)"
        else:
            ending = f"ended with status {status}"
        raise PgtoolkitError(f"the process of the run {ending}.") from None
    if printed_traceback:
        say(printed_traceback, error=True)
    if error is not None:
        raise error
    return result


def main(folder: Path) -> int:
    """Make the call that lies in a folder, and write its outcome there; return the exit status."""
    error: PgtoolkitError | None = None
    result: object = None
    printed_traceback = ""
    try:
        function, arguments, sys.argv = pickle.loads((folder / "call").read_bytes())
        result = function(*arguments)
    except PgtoolkitError as known:
        error = known
    except OSError as system_error:
        error = as_storage_error(system_error)
    except KeyboardInterrupt:
        error = Interrupted("stopped by a keyboard interrupt")
    except BaseException as defect:
        error = PgtoolkitError(f"{type(defect).__name__}: {first_line(defect)}")
        printed_traceback = traceback.format_exc()
    error_alone = None if error is None else type(error)(str(error))
    (folder / "outcome").write_bytes(pickle.dumps((result, error_alone, printed_traceback)))
    return 0 if error is None else error.exit_status


if __name__ == "__main__":
    # Until training handles these signals there is nothing to save.
    answer_stop_signals(lambda *_: really_exit(Interrupted.exit_status))
    follow_parent(channel_to_parent())
    prepare_streams()
    print_warnings()
    refuse_silent_ends()
    end(main(Path(sys.argv[1])))
