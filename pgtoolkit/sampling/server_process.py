"""A server of our own as a process: started under a guard, its log in a file, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling import server_guard

_END_SECONDS = 15
"""More than the guard gives the server."""
_OF_THIS_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAST_LINES = 5


class ServerProcess:
    """A command that runs until `end`, or until this process is gone, even by SIGKILL.

    command: a program with its arguments. environment: variables that it gets besides those of this process.
    log: file that takes what it prints. port: kept for it.
    Raises SamplerLost where the program does not exist.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, port: socket.socket):
        variables = own_environment() | environment
        if shutil.which(command[0], path=variables.get("PATH")) is None:
            raise SamplerLost(
                f"the sampling server cannot be started: there is no program {command[0]}. Give sampler.executable the "
                "path of vllm in the environment that it is installed in, or sampler.urls those of running servers."
            )
        self.log, self._port = log, port
        with log.open("a+", encoding="utf-8") as file:
            self._guard = guard("run", *command, stdout=file, stderr=subprocess.STDOUT, env=variables)

    @property
    def status(self) -> int | None:
        """The server's exit status; None while it runs."""
        return self._guard.poll()

    def last_words(self) -> str:
        """The last lines of the log that tell of an error, or else its last lines, and where the log is."""
        lines = []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = list(dict.fromkeys(line for line in lines if re.search(r"(Error|Exception|Value error)\b.*:? ", line)))
        told = " | ".join(line[-300:] for line in (errors[-2:] or lines[-_LAST_LINES:]))
        return f"Its last words: {told}. All of them: {self.log}." if told else f"Its log, {self.log}, is empty."

    def end(self) -> None:
        """Nothing of it is left afterwards."""
        self._guard.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)  # where the guard itself was killed
        self._guard.wait()
        self._port.close()


def guard(*task: str, **how: Any) -> subprocess.Popen:
    """A process that outlives this one, whatever ends this one, by as long as its task takes: see server_guard.py."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", server_guard.__file__, str(os.getpid()), *task],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the training process, which ends this one in its time
        **how,
    )


def own_environment() -> dict[str, str]:
    """The variables of this process but for those that torch.distributed and our launcher have set for its ranks.

    The server may be of another environment, to which the packages on our PYTHONPATH are poison.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THIS_JOB and not name.startswith("TORCHELASTIC_")
    }
    if (before := found.pop("PGTK_PYTHONPATH", None)) is not None:
        found["PYTHONPATH"] = before
    return found


def reserve_port() -> socket.socket:
    """A port of this machine's own address that nobody else is given, for a server that lets others bind it, too.

    vLLM does (SO_REUSEPORT): two servers that had been given the same port, one after the other, would share it, and
    each answer some of the other's requests. A socket that is bound and does not listen gets none.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
