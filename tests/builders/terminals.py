"""A terminal as a user has one for `pgtk`, and the text on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

from builders.forked import ForkedPython


def on_terminal(
    command: list[str],
    folder: Path,
    columns: int = 80,
    environment: dict[str, str] | None = None,
    keys: Callable[[str], bytes] = lambda shown: b"",
) -> tuple[int, str]:
    """Run a command on a terminal; return its exit status and everything that it wrote there.

    keys: returns the keys to type, by the text written so far; called until it returns some.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = ForkedPython(
        command,
        cwd=folder,
        env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **(environment or {})},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    written = b""
    typed = b""
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    written += os.read(ours, 65536)
                except OSError:  # the last process has closed the terminal
                    break
                if not typed:
                    typed = keys(written.decode(errors="replace"))
                    os.write(ours, typed)
        return process.wait(timeout=10), written.decode(errors="replace")
    finally:
        process.kill()
        os.close(ours)


def screen(written: str, columns: int = 80) -> list[str]:
    """Return the lines on the screen after this text.

    Of the control sequences it applies those that `RenewedLine` writes.
    """
    lines = [""]
    row = column = 0
    for token in re.findall(r"\x1b\[K|\x1b\[[0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token == "\x1b[K":
            lines[row] = lines[row][:column]
        elif len(token) == 1:
            if column == columns:
                row += 1
                column = 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]
