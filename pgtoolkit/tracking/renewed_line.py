"""Progress that renews itself: a line at the foot of a terminal, below all that is printed
meanwhile, or a bar in a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar, TextIO, cast
from weakref import WeakSet

from tqdm import tqdm
from tqdm.utils import disp_len

from pgtoolkit.system.safe_text import legible
from pgtoolkit.system.terminal import output, use_streams, write_line

_SECONDS_BETWEEN = 0.1
"""The shortest time between renewals, so that quick steps do not wait for the terminal."""

_NEVER = 1e9
"""Seconds until tqdm would show its bar by itself."""

_ERASE = "\x1b[K"
"""Erases the rest of a terminal's line, such as the ^C that it has echoed."""

_RESERVED = 3
"""Columns left free at the end of the line, for ^C and the cursor: a full line would become two."""

_COLUMNS_OF_BAR = 13
_LEAST_WITH_BAR = 50
"""Columns of a terminal that has room for the bar besides the first numbers."""


_READER = "PGTK_PROGRESS"
"""Environment variable with the pipe whose reader shows the progress in a notebook: a process tells
it only if its standard output is that pipe."""

_TOLD = "\x1e"
"""Begins a line of a pipe that tells the progress; no other line of ours has this character."""


def progress_line(total: int, done: int) -> RenewedLine | ToldLine | None:
    """Return what shows the progress where standard output can: a line of its own on a terminal,
    or a bar of the notebook that reads it; None elsewhere."""
    if is_terminal(output()):
        return RenewedLine(total, done)
    if os.environ.get(_READER) == _name_of_pipe(1):
        return ToldLine(total)
    return None


def variables_for(pipe: int) -> dict[str, str]:
    """Return the variables of a process that prints to this pipe, whose reader shows progress."""
    return {_READER: _name_of_pipe(pipe)}


def _name_of_pipe(number: int) -> str:
    try:
        status = os.fstat(number)
    except OSError:  # it is closed
        return ""
    return f"{status.st_dev}:{status.st_ino}"


class ToldLine:
    """Tells the reader of standard output how far this process is, which shows it."""

    before_text = ""

    def __init__(self, total: int):
        self._total = total
        self._shown_at = 0.0

    def show(self, done: int, fields: Sequence[str]) -> None:
        """Tell the number of steps that are done. fields: as those of `RenewedLine`."""
        is_last = done == self._total
        if is_last or time.monotonic() - self._shown_at >= _SECONDS_BETWEEN:
            self._shown_at = time.monotonic()
            message = json.dumps([self._total, done, [*map(legible, fields)]])
            write_line(_TOLD + message, output())

    def close(self, leave: bool = True) -> None:
        """Tell that no more comes. leave: whether the bar stays."""
        write_line(_TOLD + json.dumps(leave), output())


class NotebookBar:
    """Shows, by a bar of tqdm in a notebook, what a `ToldLine` tells."""

    def __init__(self):
        self._bar: tqdm | None = None

    def take(self, line: str) -> bool:
        """Show what a line tells; return whether it tells any progress."""
        if not line.startswith(_TOLD):
            return False
        message = json.loads(line.removeprefix(_TOLD))
        if isinstance(message, bool):
            self.close(leave=message)
        else:
            self._show(*message)
        return True

    def _show(self, total: int, done: int, fields: list[str]) -> None:
        if self._bar is None:
            self._bar = _notebook_bar(total, done)
        self._bar.n = done
        self._bar.set_description_str(fields[0] if fields else "", refresh=False)
        self._bar.set_postfix_str("  ".join(fields[1:]), refresh=False)
        self._bar.refresh()

    def close(self, leave: bool = True) -> None:
        """End the bar. leave: whether it stays to be seen."""
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
        self._bar = None


def _notebook_bar(total: int, done: int) -> tqdm:
    """Return a bar of widgets, or of text where the notebook has none."""
    options = {"total": total, "initial": done, "bar_format": "{desc} |{bar}|{postfix}"}
    if importlib.util.find_spec("ipywidgets") is None:
        return tqdm(**options, file=cast("TextIO", _LineOfNotebook()), ascii=False, ncols=100)
    from tqdm.notebook import tqdm as bar_of_widgets

    return bar_of_widgets(**options)


class _LineOfNotebook:
    """What tqdm writes its bar to, as one display of the notebook, whose text is replaced.

    By a stream each state of the bar would stay in the saved notebook.
    """

    def __init__(self):
        display = importlib.import_module("IPython.display").display
        self._display = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        """Show a state of the bar, which tqdm begins with a carriage return."""
        if text.startswith("\r"):
            self._display.update({"text/plain": text.strip()}, raw=True)

    def flush(self) -> None:
        """Do nothing: a display is shown at once."""


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def is_terminal(stream: TextIO) -> bool:
    """Return whether a line of a stream can be renewed: on a terminal whose cursor can move."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    except ValueError:  # it is closed
        return False


class RenewedLine:
    """A progress bar with numbers on one line of standard output, which is a terminal.

    While it is shown, all that this process prints, by any thread, appears above it.

    before_text: what comes before a text that is written past this process's streams: it moves the
        cursor to the beginning of the line, and erases the line.
    """

    before_text = "\r" + _ERASE

    def __init__(self, total: int, done: int = 0):
        # Reentrant, since a signal handler may print while its thread renews the line.
        self._lock = threading.RLock()
        self._stream = output()
        self._bar = _Bar(total=total, initial=done, file=self._stream, disable=False, delay=_NEVER)
        # The size of the terminal is looked up at each renewal instead.
        self._bar.ncols = None
        self._bar.nrows = None
        self._fields: Sequence[str] = ()
        self._shown_at = 0.0
        self._wrapped = (output(1), output(2))
        above = [cast("TextIO", _AboveLine(stream, self)) for stream in self._wrapped]
        use_streams(*above)

    def show(self, done: int, fields: Sequence[str]) -> None:
        """Show the number of steps that are done.

        fields: texts, the most important first. The last ones are left out if there is no room.
        """
        with self._lock:
            self._bar.n = done
            self._fields = fields
            if time.monotonic() - self._shown_at >= _SECONDS_BETWEEN:
                self._draw()
                self._shown_at = time.monotonic()

    def write_above(self, text: str, stream: TextIO) -> None:
        """Write whole lines to a stream, above this one. Raises OSError as the stream does."""
        with self._lock:
            self._bar.clear(nolock=True)
            try:
                stream.write(text)
                stream.flush()
            finally:
                self._draw()

    def close(self, leave: bool = True) -> None:
        """Stop renewing the line; what is printed from here on appears below it.

        leave: whether the line stays, or is erased.
        """
        with self._lock:
            for wrapper in (output(1), output(2)):
                if isinstance(wrapper, _AboveLine):
                    wrapper.write_rest()
            use_streams(*self._wrapped)
            if leave:
                self._draw()
            else:
                self._bar.clear(nolock=True)
            self._bar.fp.write("\n" if leave else "")
            self._bar.fp.flush()
            self._bar.disable = True

    def _draw(self) -> None:
        columns = self._columns()
        free_columns = columns - _RESERVED
        bar = []
        if columns >= _LEAST_WITH_BAR:
            bar = ["|{bar:10}|"]
            free_columns -= _COLUMNS_OF_BAR
        shown: list[str] = []
        for field in map(legible, self._fields):
            if disp_len(" ".join([*shown, field])) > free_columns:
                break
            shown.append(field)
        escaped = [field.replace("{", "{{").replace("}", "}}") for field in shown]
        self._bar.bar_format = " ".join([*escaped[:1], *bar, *escaped[1:]]) + _ERASE
        self._bar.refresh(nolock=True)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


class _Bar(tqdm):
    """A single tqdm bar, without the thread, the list and the lock that serve several bars."""

    monitor_interval = 0
    _instances: ClassVar[WeakSet] = WeakSet()
    _lock = threading.RLock()


class _AboveLine:
    """A stream whose lines are written above a renewed line."""

    def __init__(self, stream: TextIO, line: RenewedLine):
        self._stream = stream
        self._line = line
        self._rest = ""  # a line that has not ended

    def write(self, text: str) -> int:
        lines, newline, rest = (self._rest + text).rpartition("\n")
        self._rest = rest.rpartition("\r")[2]  # only the last state of another progress bar
        if newline:
            self._line.write_above(lines + newline, self._stream)
        return len(text)

    def write_rest(self) -> None:
        if self._rest:
            self._line.write_above(self._rest + "\n", self._stream)
        self._rest = ""

    def close(self) -> None:
        """Do nothing: the line still needs the stream, also where code of the user's closes it."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
