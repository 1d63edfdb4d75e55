"""Child processes: each has a session of its own, and ends with this process, however this one
ends.

The standard input of a child is one end of a socket, its channel; this process holds the other end.
When this process ends, even by SIGKILL, the kernel closes its end, and whoever watches the channel
on the other side sees that:

* a program of ours that should end in an orderly way follows its parent (`follow_parent`);
* any other program, and one that runs code of the user's, has a guard: a small process between the
  two that does nothing else (`stay_under_guard`, `under_guard`), and ends the program with all its
  descendants.

As a script, `python -I child.py SECONDS COMMAND...`, this runs a command under a guard; it imports
nothing of pgtoolkit.
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
"""Seconds to wait for killed processes. One that waits for a disk may take longer, and is left to
the kernel."""

_NOT_FOR_GUARDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may be sent to all processes of a job, and so do not mean that the parent has
ended."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_children: weakref.WeakSet[Child] = weakref.WeakSet()

parent_has_ended = threading.Event()
"""Set in a process that follows its parent (`follow_parent`) once that has ended."""


class Child:
    """A child process in its own session, so that Ctrl-C in a terminal reaches its parent alone.

    environment: None for that of this process.
    log: a file to which the child's output is appended; None for the output of this process.
    is_quiet: its standard output is dropped.
    printed: an open file that takes its output in the place of a log.
    channel: a stream between the two processes.
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
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for the signal that ended the process; None until `poll` or
        `wait` has read it."""
        return self._process.returncode

    def connection(self) -> Connection:
        """Return a connection over the channel for objects in the place of bytes; both are closed
        together."""
        from multiprocessing.connection import Connection

        connection = Connection(os.dup(self.channel.fileno()))
        self._connections.append(connection)
        return connection

    def poll(self) -> int | None:
        """Return the exit status, negative for the signal that ended the process; None while it
        runs."""
        return self.wait(0)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the process has ended, but at most `seconds`; then return as `poll` does."""
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            if self.returncode is not None:
                # Kill what is left in its group: the program, if its guard was killed. It must be
                #   now, since the kernel gives the number of an ended process to another one after
                #   a while.
                self._kill_group()
        return self.returncode

    def stop(self, number: int) -> None:
        """Send a signal to the process, which may save and end then. A guard ignores those of
        `_NOT_FOR_GUARDS`."""
        if self.poll() is None:
            self._process.send_signal(number)

    def end(self, seconds: float = 0) -> int | None:
        """End the process and its descendants, see `end_all`, and return its exit status."""
        end_all([self], seconds)
        return self.returncode

    def _close(self) -> None:
        for end in (self.channel, *self._connections):
            end.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def end_all(children: Iterable[Child], seconds: float = 0) -> None:
    """Close the channels of these processes, as the end of this process would, and wait until they
    have ended.

    A process that still runs after `seconds` is killed with its group. A guard gives its program
    time to end; for a guard `seconds` should be longer than that.
    """
    children = list(children)
    for child in children:
        # Not `close`, which does nothing as long as another thread waits for the channel.
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
    """In a fork of this process, forget the children, which belong to the process that started
    them.

    A channel left open here would outlive that process, and waiting for a child here would fail.
    """
    for child in _children:
        child._close()
        child._process.returncode = 0


os.register_at_fork(after_in_child=_forget_children)


def channel_to_parent() -> socket.socket:
    """Return this process's end of the channel, its standard input, and put an empty file in the
    place of that."""
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


def follow_parent(channel: socket.socket) -> None:
    """Send SIGTERM to this process, from a thread, when its parent has ended. What the channel
    brings is dropped."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while channel.recv(1):
                pass
        parent_has_ended.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def under_guard(command: Sequence[str], seconds: float) -> list[str]:
    """Return a command that runs this command under a guard; see `stay_under_guard`."""
    return [sys.executable, "-I", __file__, str(seconds), *command]


def stay_under_guard(seconds: float = 0) -> socket.socket:
    """Go on in a new process, and stay behind as its guard in this one. Return the channel, for the
    new process.

    When the parent ends or closes the channel, and when the new process ends, the guard sends
    SIGTERM to all descendants of the new process, in any session, and SIGKILL after `seconds`. It
    ends when none is left, with the status of the new process, or by the signal that ended that.
    Nothing else may run in this process: no thread, and no code of the user's.
    """
    channel = channel_to_parent()
    guard = os.getpid()
    # A descendant whose parent ends becomes a child of the guard, so that none is lost.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_GUARDS)
    process = os.fork()
    if process != 0:
        _guard(process, channel, seconds)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # even a guard that is killed takes it along
    if os.getppid() != guard:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return channel


def _guard(process: int, channel: socket.socket, seconds: float) -> NoReturn:
    """Wait until a process and its descendants have ended; then end as the process did."""

    def end_descendants() -> None:
        # Polling for no event waits for the end of the channel; data, which is for the other
        # process, wakes nobody.
        hung_up = select.poll()
        hung_up.register(channel, 0)
        hung_up.poll()
        _end_descendants(seconds)

    threading.Thread(target=end_descendants, daemon=True).start()
    status = 0
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            ended, wait_status = os.wait()
            if ended == process:  # and not a descendant that has lost its parent
                status = os.waitstatus_to_exitcode(wait_status)
                channel.shutdown(socket.SHUT_RDWR)
    _end_as(status)


def _end_as(status: int) -> NoReturn:
    """End this process with an exit status, or by a signal where it is negative."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = -status
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(status)


def _end_descendants(seconds: float) -> None:
    """Send SIGTERM to all descendants of this process, and SIGKILL after `seconds` until none
    runs."""
    deadline = time.monotonic() + seconds
    if seconds > 0:
        _signal_all(_descendants(), signal.SIGTERM)
        while _descendants() and time.monotonic() < deadline:
            time.sleep(0.05)
    while (running := _descendants()) and time.monotonic() < deadline + _SECONDS_TO_DIE:
        # again and again, since they may start more in between
        _signal_all(running, signal.SIGKILL)
        time.sleep(0.01)


def _signal_all(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Return the numbers of all running descendants of this process."""
    if sys.platform != "linux":
        import psutil

        return [process.pid for process in psutil.Process().children(recursive=True)]
    children: dict[int, list[tuple[int, str]]] = {}
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
    following = [os.getpid()]
    while following:
        for process, state in children.get(following.pop(), []):
            following.append(process)
            if state != "Z":
                running.append(process)
    return running


def _prctl(option: int, value: int) -> None:
    """Set an option of this process; does nothing but on Linux."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _run_under_guard(seconds: str, *command: str) -> NoReturn:
    stay_under_guard(float(seconds))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _run_under_guard(*sys.argv[1:])
