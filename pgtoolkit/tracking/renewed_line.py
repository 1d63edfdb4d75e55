"""The line at the foot of a terminal that renews itself; what is printed meanwhile stands above
it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, TextIO
from weakref import WeakSet

from tqdm import tqdm
from tqdm.utils import disp_len

from pgtoolkit.system.legible import legible

_SECONDS_BETWEEN = 0.1
"""Least time from one renewal to the next, so that quick steps do not wait for the terminal."""

_NEVER = 1e9
"""Seconds until tqdm would show its bar by itself."""

_ERASE = "\x1b[K"
"""Erases what a terminal shows from the cursor to the end of the line, such as the ^C that it has
echoed."""

_RESERVED = 3
"""Columns left free at the end of the line, for ^C and the cursor: a line that is full would become
two."""

_COLUMNS_OF_BAR = 13
_LEAST_WITH_BAR = 50
"""Columns of a terminal that has room for a bar beside the first numbers."""


def is_terminal(stream: TextIO) -> bool:
    """Return whether a line of the stream can be renewed: not in a file or a pipe, or where no
    cursor moves."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    except ValueError:  # it is closed
        return False


class RenewedLine:
    """A progress bar with numbers on one line of standard output, which is a terminal.

    While it is shown, whatever else this process prints, by any thread, stands above it. `close`
    leaves the line as it was last.
    """

    def __init__(self, total: int, done: int = 0):
        # a signal handler may print while its thread renews the line
        self._lock = threading.RLock()
        self._stream = sys.stdout
        self._bar = _Bar(total=total, initial=done, file=self._stream, disable=False, delay=_NEVER)
        self._bar.ncols = self._bar.nrows = None  # of the terminal as it was: it is asked each time
        self._fields: Sequence[str] = ()
        self._shown_at = 0.0
        self._wrapped = (sys.stdout, sys.stderr)
        sys.stdout = _AboveLine(sys.stdout, self)
        sys.stderr = _AboveLine(sys.stderr, self)

    def show(self, done: int, fields: Sequence[str]) -> None:
        """Show how far it is.

        fields: texts, the most important first; those for which there is no room are left out.
        """
        with self._lock:
            self._bar.n = done
            self._fields = fields
            if time.monotonic() - self._shown_at >= _SECONDS_BETWEEN:
                self._draw()
                self._shown_at = time.monotonic()

    def write_above(self, text: str, stream: TextIO) -> None:
        """Write whole lines to a stream. Raises OSError as the stream does."""
        with self._lock:
            self._bar.clear(nolock=True)
            try:
                stream.write(text)
                stream.flush()
            finally:
                self._draw()

    def close(self, leave: bool = True) -> None:
        """Leave the line as it is now, or take it away. What is printed from here on stands below
        it."""
        with self._lock:
            for wrapper in (sys.stdout, sys.stderr):
                if isinstance(wrapper, _AboveLine):
                    wrapper.write_rest()
            sys.stdout, sys.stderr = self._wrapped
            if leave:
                self._draw()
            else:
                self._bar.clear(nolock=True)
            self._bar.fp.write("\n" if leave else "")
            self._bar.fp.flush()
            self._bar.disable = True

    def _draw(self) -> None:
        columns = self._columns()
        bar = ["|{bar:10}|"] if columns >= _LEAST_WITH_BAR else []
        free = columns - _RESERVED - (_COLUMNS_OF_BAR if bar else 0)
        shown: list[str] = []
        for field in map(legible, self._fields):
            if disp_len(" ".join([*shown, field])) > free:
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
    """tqdm without what is meant for several bars: its threads, its list of bars, and a lock
    between processes."""

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
        whole, newline, rest = (self._rest + text).rpartition("\n")
        self._rest = rest.rpartition("\r")[2]  # of a bar of somebody else's, how it was last
        if newline:
            self._line.write_above(whole + newline, self._stream)
        return len(text)

    def write_rest(self) -> None:
        if self._rest:
            self._line.write_above(self._rest + "\n", self._stream)
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
