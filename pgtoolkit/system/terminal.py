"""Writes text to the terminal in any encoding, also where the stream is closed, full or no longer
read."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TextIO

from pgtoolkit.errors import ExitStatus, StorageError
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.safe_text import legible

_streams: dict[int, TextIO] = {}
"""Standard output (1) and error (2) of this process, while it has some of its own."""

_failures: list[OSError] = []
"""The first failure to write to standard output since `prepare_streams`, if there was one."""

_format_warning = warnings.formatwarning


def prepare_streams() -> None:
    """Make standard output and error accept any text of ours and of libraries; called first in each
    process.

    A character that the encoding lacks is shown as "?". A stream that is closed from the start is
    opened on the null device, since otherwise the next file that is opened would get its number,
    and with it what is printed.
    Code of the user's may replace or close `sys.stdout` and `sys.stderr` from here on: what is
    printed by `write_line` to `output` goes where it went before.
    """
    _failures.clear()
    _open_closed_streams()
    # Python's own streams, if they were closed, would close the files of the process, too.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _open(1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _open(2)
    _streams.update({1: sys.stdout, 2: sys.stderr})
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
        sys.stdout = _open(1)
    if sys.stderr is None:
        sys.stderr = _open(2)


def _open(number: int) -> TextIO:
    """Open standard output (1) or error (2) once more, without closing it at the end."""
    python_stream = sys.__stdout__ if number == 1 else sys.__stderr__
    encoding = "utf-8" if python_stream is None else python_stream.encoding
    is_line_buffered = number == 2 or os.isatty(1)
    buffering = 1 if is_line_buffered else -1
    return open(number, "w", buffering, encoding, errors="replace", closefd=False)


def use_streams(stdout: TextIO, stderr: TextIO) -> None:
    """Make these standard output and error of this process, also for `output`."""
    if _streams:
        _streams.update({1: stdout, 2: stderr})
    sys.stdout = stdout
    sys.stderr = stderr


def output(number: int = 1) -> TextIO:
    """Return standard output (1) or error (2) of this process, whatever `sys.stdout` is now."""
    stream = _streams.get(number)
    if stream is None:  # outside of the command pgtk
        return sys.stdout if number == 1 else sys.stderr
    if stream.closed:
        stream = _open(number)
        _streams[number] = stream
    return stream


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
    if not output().isatty():
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
            write_line(line.rstrip("\n"), output())


def forget_streams() -> None:
    """Let `sys.stdout` and `sys.stderr` be what they are from here on, as before
    `prepare_streams`."""
    _streams.clear()


def status_of_output(status: int) -> int:
    """Return the exit status of a command whose result is the text that it has printed.

    status: the command's own. If output was lost, it is 141 where the reader has gone, as a shell
        has it of `yes | head`, and that of a StorageError otherwise.
    """
    flush_streams()
    if not _failures:
        return status
    is_closed = isinstance(_failures[0], BrokenPipeError)
    return ExitStatus.unread if is_closed else StorageError.exit_status


def flush_streams() -> None:
    """Write out what libraries have printed.

    Python would try so at its end, but if it failed there it would print an error and change the
    exit status.
    """
    for stream in (output(1), output(2)):
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
    if stream is output(2) or _failures:
        return
    _failures.append(error)
    if not isinstance(error, BrokenPipeError):
        write_line(f"pgtk: warning: standard output cannot be written: {error.strerror}", output(2))


class Terminal(logging.Handler):
    """Log lines on standard output, as long as somebody reads it; a run's run.log has them all.

    A record with `is_renewed` is left out: the line that renews itself shows it already.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "is_renewed", False):
            write_line(self.format(record), output())


class LegibleFormatter(logging.Formatter):
    """Formats records so that a stranger's text in them, such as a server's error, acts on no
    terminal, not even when run.log is shown."""

    def format(self, record: logging.LogRecord) -> str:
        return legible(super().format(record))
