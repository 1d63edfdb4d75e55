"""Writes text to the terminal in any encoding, also where the stream is closed, full or no longer
read."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TextIO

from pgtoolkit.errors import StorageError
from pgtoolkit.system.legible import legible
from pgtoolkit.system.redaction import redact

_failures: list[OSError] = []
"""The first failure to write to standard output since `prepare_streams`, if there was one."""

_format_warning = warnings.formatwarning


def prepare_streams() -> None:
    """Make standard output and error accept any text of ours and of libraries; called first in each
    process.

    A character that the encoding lacks is shown as "?". A stream that is closed from the start is
    opened on the null device, since otherwise the next file that is opened would get its number,
    and with it what is printed.
    """
    _failures.clear()
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = _legible_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LegibleFormatter())


def _open_closed_streams() -> None:
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays open)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays open)


def _legible_warning(*arguments, **keywords) -> str:
    return legible(redact(_format_warning(*arguments, **keywords)))


def write_line(line: str, stream: TextIO) -> None:
    """Print a line at once. If that fails, the line and all later ones of the stream are dropped,
    and the program continues."""
    try:
        print(line, file=stream, flush=True)
    except OSError as error:
        _give_up(stream, error)


@contextlib.contextmanager
def output_of_child() -> Iterator[int | None]:
    """Yield the file that a child process is to print to while it is started; None for the streams
    of this process.

    On a terminal it is a pipe, whose lines this process prints: a line that renews itself then
    stays below them.
    """
    if not sys.stdout.isatty():
        yield None
        return
    read_end, write_end = os.pipe()
    threading.Thread(
        target=_print_lines, args=(read_end,), name="output of a child", daemon=True
    ).start()
    try:
        yield write_end
    finally:
        os.close(write_end)  # the child has its own


def _print_lines(read_end: int) -> None:
    with open(read_end, encoding="utf-8", errors="replace") as printed:
        for line in printed:
            write_line(line.rstrip("\n"), sys.stdout)


def status_of_output(status: int) -> int:
    """Return the exit status of a command whose result is the text that it has printed.

    status: the command's own. If output was lost, it is 141 where the reader has gone, as a shell
        has it of `yes | head`, and that of a StorageError otherwise.
    """
    flush_streams()
    if not _failures:
        return status
    return 141 if isinstance(_failures[0], BrokenPipeError) else StorageError.exit_status


def flush_streams() -> None:
    """Write out what libraries have printed.

    Python would try so at its end, but if it failed there it would print an error and change the
    exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            _give_up(stream, error)


def _give_up(stream: TextIO, error: OSError) -> None:
    """Send the rest of the stream to the null device. For standard output print one warning, unless
    its reader left."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    if stream is sys.stderr or _failures:
        return
    _failures.append(error)
    if not isinstance(error, BrokenPipeError):
        write_line(
            f"pgtk: warning: standard output cannot be written: {error.strerror}", sys.stderr
        )


class Terminal(logging.Handler):
    """Log lines on standard output, as long as somebody reads it; a run's run.log has them all.

    A record with `is_renewed` is left out: the line that renews itself shows it already.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "is_renewed", False):
            write_line(self.format(record), sys.stdout)


class LegibleFormatter(logging.Formatter):
    """Formats records so that a stranger's text in them, such as a server's error, acts on no
    terminal, not even when run.log is shown."""

    def format(self, record: logging.LogRecord) -> str:
        return legible(super().format(record))
