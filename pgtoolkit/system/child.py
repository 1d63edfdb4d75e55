"""Child processes: each has a session of its own, and ends when its parent has ended, however the
parent ends.

The standard input of a child is one end of a pair of sockets, its channel; the parent holds the
other end. When the parent ends, even by SIGKILL, the kernel closes the parent's end, and whoever
watches the child's end sees that:

* a program of ours that should end in an orderly way follows its parent (`follow_parent`);
* any other program, and one that runs the user's code, has a guard (`under_guard`,
  `stay_under_guard`). This is a small process between parent and program, which only watches the
  channel, and ends the program with all its descendants.

The first part of this file is for the parent, the second for the child, the third for the guard.
As a script, `python -I child.py SECONDS COMMAND...`, the file runs a command under a guard; it
imports nothing of pgtoolkit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SECONDS_TO_DIE = 10
"""Seconds to wait until killed processes have ended. A process that waits for a disk may take
longer; it is then left to the kernel."""

_IGNORED_BY_GUARDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a guard ignores. They may be sent to all processes of a job, and so do not mean that
the parent has ended."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_children: weakref.WeakSet[Child] = weakref.WeakSet()

parent_has_ended = threading.Event()
"""Set in a process that follows its parent (`follow_parent`) once the parent has ended."""


class Child:
    """A child process in its own session, so that Ctrl-C in a terminal reaches its parent alone.

    environment: the child's environment variables; None for those of this process.
    log: a file to which the child's output and errors are appended; None for no such file.
    is_quiet: True if the child's standard output is dropped, but not its errors.
    printed: the descriptor of an open file that takes output and errors if there is no log; None
        for the output and errors of this process.

    `channel` is this process's end of the socket to the child.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        is_quiet: bool = False,
        printed: int | None = None,
    ):
        self.channel, other_end = socket.socketpair()
        with contextlib.ExitStack() as opened:
            opened.enter_context(other_end)
            output = printed if log is None else opened.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=other_end.fileno(),
                stdout=subprocess.DEVNULL if is_quiet else output,
                stderr=output,
                start_new_session=True,
            )
        self._connections: list[Connection] = []
        _children.add(self)

    @property
    def pid(self) -> int:
        """The id of the process, and of its group, since it begins a session."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for the signal that ended the process; None until `poll` or
        `wait` has read it."""
        return self._process.returncode

    def connection(self) -> Connection:
        """Return a connection over the channel, for objects in the place of bytes.

        `end` closes it together with the channel.
        """
        from multiprocessing.connection import Connection

        connection = Connection(os.dup(self.channel.fileno()))
        self._connections.append(connection)
        return connection

    def poll(self) -> int | None:
        """Return the exit status, as `returncode`, without waiting; None while the process runs."""
        return self.wait(0)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the process has ended, at most `seconds` (None: no limit).

        Return what `poll` returns then.
        """
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            if self.returncode is not None:
                # Kill the rest of its group: the program, if its guard was killed. Do it now: after
                # a while the kernel gives the id of an ended process to another process.
                self._kill_group()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it runs. A program of ours may then save and end.

        number: of the signal. A guard ignores those of `_IGNORED_BY_GUARDS`.
        """
        if self.poll() is None:
            self._process.send_signal(number)

    def end(self, seconds: float = 0) -> int | None:
        """End the process as `end_all` does, and return its exit status."""
        end_all([self], seconds)
        return self.returncode

    def _close(self) -> None:
        self.channel.close()
        # Several threads may come here, and a connection must not be closed by two of them.
        with contextlib.suppress(IndexError):
            while True:
                self._connections.pop().close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def end_all(children: Iterable[Child], seconds: float = 0) -> None:
    """Close the channels of these children, as if this process had ended, and wait until they have
    ended.

    A child that still runs after `seconds` is killed with its group. A guard gives its program some
    seconds to end; `seconds` should then be more than these.
    """
    children = list(children)
    for child in children:
        # `close` would do nothing as long as another thread waits for the channel.
        with contextlib.suppress(OSError):
            child.channel.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + seconds
    for child in children:
        if child.wait(max(0, deadline - time.monotonic())) is None:
            child._kill_group()
    for child in children:
        child.wait(_SECONDS_TO_DIE)
        child._close()


def _forget_children() -> None:
    """Forget the children in a fork of this process: they belong to the process that started them.

    A channel that stays open here would outlive that process. Waiting for a child here would fail.
    """
    for child in _children:
        child._close()
        child._process.returncode = 0  # as if it had ended, so that nothing waits for it


os.register_at_fork(after_in_child=_forget_children)


def under_guard(command: Sequence[str], seconds: float) -> list[str]:
    """Return a command that runs `command` under a guard, which gives it `seconds` to end.

    See `stay_under_guard`.
    """
    return [sys.executable, "-I", __file__, str(seconds), *command]


def channel_to_parent() -> socket.socket:
    """Return the child's end of the channel, which was its standard input until now.

    Standard input becomes an empty file, so that nothing else reads from the channel.
    """
    channel = socket.socket(fileno=os.dup(0))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return channel


def follow_parent(channel: socket.socket) -> None:
    """Start a thread that sends SIGTERM to this process when its parent has ended.

    Bytes that the parent sends over the channel are dropped.
    """

    def wait_for_end() -> None:
        with contextlib.suppress(OSError):
            while channel.recv(1):
                pass
        parent_has_ended.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="launcher", daemon=True).start()


def stay_under_guard(seconds: float = 0) -> socket.socket:
    """Fork: this process becomes the guard, and never returns. The new process returns the channel,
    and becomes the program.

    When the parent ends or closes the channel, or when the program ends, the guard sends SIGTERM to
    all descendants, in any session, and SIGKILL to those that still run after `seconds`; with 0
    seconds it sends SIGKILL alone. Once none is left, the guard ends as the program did: with the
    same status, or by the same signal.
    The guard must stay alone in its process: call this before any thread is started, and before any
    of the user's code runs.
    """
    channel = channel_to_parent()
    guard = os.getpid()
    # A descendant whose parent ends becomes a child of the guard, so that none is lost.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_BY_GUARDS)
    program = os.fork()
    if program != 0:
        _guard(program, channel, seconds)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # even a guard that is killed takes it along
    if os.getppid() != guard:  # the guard was killed before that
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return channel


def _guard(program: int, channel: socket.socket, seconds: float) -> NoReturn:
    """Wait until a program and all its descendants have ended; then end as the program did.

    program: the id of its process, a child of this one.
    """

    def watch_channel() -> None:
        # Polling for no event waits for the end of the channel alone. Data, which is for the
        # program, wakes nobody.
        poller = select.poll()
        poller.register(channel, 0)
        poller.poll()
        _end_descendants(seconds)

    threading.Thread(target=watch_channel, daemon=True).start()
    status = 0
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            pid, wait_status = os.wait()
            if pid == program:  # and not a descendant that has lost its parent
                status = os.waitstatus_to_exitcode(wait_status)
                channel.shutdown(socket.SHUT_RDWR)  # for `watch_channel`
    _end_as(status)


def _end_as(status: int) -> NoReturn:
    """End this process with an exit status, or by the signal -status if the status is negative."""
    if status < 0:
        # The program may have left a core dump already.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = -status
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(status)


def _end_descendants(seconds: float) -> None:
    """End all descendants of this process: by SIGTERM, and after `seconds` by SIGKILL.

    With 0 seconds there is no SIGTERM.
    """
    deadline = time.monotonic() + seconds
    if seconds > 0:
        _signal_all(_descendants(), signal.SIGTERM)
        while _descendants() and time.monotonic() < deadline:
            time.sleep(0.05)
    while (running := _descendants()) and time.monotonic() < deadline + _SECONDS_TO_DIE:
        # Again and again, since they may start more processes in between.
        _signal_all(running, signal.SIGKILL)
        time.sleep(0.01)


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants() -> list[int]:
    """Return the ids of all running descendants of this process."""
    if sys.platform != "linux":
        import psutil

        return [process.pid for process in psutil.Process().children(recursive=True)]
    children: dict[int, list[tuple[int, str]]] = {}  # by parent: ids and states
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        children.setdefault(int(parent), []).append((int(name), state.decode()))
    running = []
    parents = [os.getpid()]
    while parents:
        for pid, state in children.get(parents.pop(), []):
            parents.append(pid)
            if state != "Z":  # a zombie has ended, and only waits to be read
                running.append(pid)
    return running


def _prctl(option: int, value: int) -> None:
    """Set an option of this process, on Linux; do nothing on other systems."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _run_under_guard(seconds: str, *command: str) -> NoReturn:
    """Become the guard, and run the command in the new process."""
    stay_under_guard(float(seconds))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _run_under_guard(*sys.argv[1:])
