"""Programs of ours without their seconds of imports: forks of the process that starts them.

`ForkedPython` is a `subprocess.Popen`. Where its command is Python with a program of pgtoolkit's
that needs the imports of a run, or with a small server of the tests, the new process is a fork of
this one, made to look like one that was started: its arguments, variables, current directory,
standard streams, signals and session are its own, and no other open file is left. Its name, as `ps`
shows it, is that of the program.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from pgtoolkit.system import child
from pgtoolkit.system.own_end import really_exit
from pgtoolkit.system.terminal import forget_streams

PROGRAMS = {
    "pgtoolkit.cli": "pgtk",
    "pgtoolkit.launch.worker": "rank",
    "pgtoolkit.launch.forks": "forks",
    "pgtoolkit.launch.apart": "apart",
    "pgtoolkit.sampling.copy_process": "copy",
    "builders/vllm_server.py": "guard",
    "builders/other_server.py": "guard",
    "submitit.local._local": "controller",
    "submitit.core._submit": "task",
}
"""What is forked: a part of its command, and the name of the process."""


class ForkedPython(subprocess.Popen):
    """A process of a command, forked from this one if the command is one of PROGRAMS.

    A process whose threads may hold locks is not forked: it starts the command.
    """

    def _execute_child(self, args, *others):
        name = _name_of(args)
        if name is None or not all(map(_only_waits, threading.enumerate())):
            super()._execute_child(args, *others)
            return
        before_program = others[1]
        cwd = others[4]
        environment = others[5]
        pipes = others[9:15]  # both ends of standard input, output and error, or -1
        starts_session = others[-2]

        def run() -> None:
            if before_program is not None:
                before_program()
            run_python(args)

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if starts_session:
                os.setsid()
            become([pipes[0], pipes[3], pipes[5]], cwd, environment, name, run)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _name_of(command: Sequence[str]) -> str | None:
    """Return the name of the process for a command that is forked, or None for others."""
    is_python = command[0] == sys.executable
    if is_python and child.__file__ in command:  # as `child.under_guard` writes it
        is_python = command[4] == sys.executable
    if is_python:
        for words, name in PROGRAMS.items():
            if any(words in word for word in command[1:]):
                return name
    return None


def _only_waits(thread: threading.Thread) -> bool:
    """Return whether a thread holds no lock: this one, one that waits for another process, one that
    torchrun wakes every few seconds, or one of a test that waits for a file and then interrupts."""
    waiting = ("launcher", "(_listen)", "(interrupt)")
    is_of_torchrun = thread.name.startswith("RendezvousKeepAliveTimer")
    return thread is threading.main_thread() or is_of_torchrun or thread.name.endswith(waiting)


def forking_subprocess() -> types.SimpleNamespace:
    """Return the module `subprocess` with `ForkedPython` in the place of its processes."""
    return types.SimpleNamespace(**vars(subprocess) | {"Popen": ForkedPython})


@contextlib.contextmanager
def forked_children(wanted: bool = True) -> Iterator[None]:
    """Fork the children that pgtoolkit starts from this process, inside the block, if wanted.

    They have what a test has patched until then.
    """
    before = child.subprocess
    if wanted:
        child.subprocess = forking_subprocess()
    try:
        yield
    finally:
        child.subprocess = before


def are_children_forked() -> bool:
    return child.subprocess is not subprocess


def become(
    streams: Sequence[int],
    cwd: str | None,
    environment: dict[str, str] | None,
    name: str,
    program: Callable[[], object],
    kept: Sequence[int] = (),
) -> NoReturn:
    """Make this fork look like a process that was started, run its program, and end.

    streams: descriptors for standard input, output and error; -1 for those of this process.
    cwd, environment: None for those of this process.
    kept: descriptors of other files that stay open.
    """
    status = 1
    try:
        atexit._clear()
        _restore_signals()
        _replace_files(streams, kept)
        if environment is not None:
            os.environ.clear()
            os.environ |= environment
        if cwd is not None:
            os.chdir(cwd)
        tempfile.tempdir = None  # which was looked up in another environment
        Path("/proc/self/comm").write_text(name)
        gc.freeze()  # so that the memory of the other process is not copied only to be searched
        program()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
        really_exit(status)


def run_python(command: Sequence[str]) -> None:
    """Run what follows the interpreter in a command, with its arguments: `-m MODULE`, `-c CODE`, a
    file, or one that `child.under_guard` has put under a guard."""
    words = [word for word in command[1:] if word not in ("-P", "-u", "-I")]
    if words[0] == child.__file__:
        _, seconds, _, *words = words
        child.stay_under_guard(float(seconds))
    if words[0].endswith(".py"):
        _run_file(words)
        return
    main = types.ModuleType("__main__")
    if words[0] == "-m":
        words = words[1:]
        spec = importlib.util.find_spec(words[0])
        code = spec.loader.get_code(words[0])
        main.__package__ = spec.parent
    else:
        assert words[0] == "-c", command
        code = compile(words[1], "<string>", "exec")
        words = ["-c", *words[2:]]
    sys.modules["__main__"] = main
    sys.argv = words
    exec(code, vars(main))


def _run_file(words: list[str]) -> None:
    """Run a file of Python with arguments."""
    Path("/proc/self/comm").write_text("python")
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(words[0]).parent), *filter(None, folders)]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _restore_signals() -> None:
    """Give each signal that this process answers the answer that a new interpreter has."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    faulthandler.disable()


def _replace_files(streams: Sequence[int], kept: Sequence[int]) -> None:
    """Give this process its standard streams, and close all other files but those that are kept.

    The numbers of the others stay in use, since objects that are left would close them later.
    """
    for number, descriptor in enumerate(streams):
        if descriptor != -1:
            os.dup2(descriptor, number)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (nothing, *kept):
            with contextlib.suppress(OSError):  # the one that listed them
                os.dup2(nothing, descriptor, inheritable=False)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
    forget_streams()
