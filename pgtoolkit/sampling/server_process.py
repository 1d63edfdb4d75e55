"""Servers as processes of ours: started under a guard, their logs in files, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling import server_guard

_END_SECONDS = 15
"""More than the guard gives the servers."""
_OF_THIS_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAST_LINES = 5


class Guard:
    """A process that outlives this one, whatever ends this one, until it has ended the servers and deleted `folder`."""

    def __init__(self, folder: Path):
        self._process = subprocess.Popen(
            [sys.executable, "-I", server_guard.__file__, str(os.getpid()), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training process, which ends this one in its time
            text=True,
        )
        self._started, self._ended = 0, {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, command: list[str], variables: dict[str, str], log: Path, port: socket.socket) -> ServerProcess:
        """A server that runs until the guard ends; variables: that it gets besides those of this process.

        log: file that takes what it prints. port: kept for it. Raises SamplerLost where there is no such program.
        """
        environment = own_environment() | variables
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise SamplerLost(
                f"the sampling server cannot be started: there is no program {command[0]}. Give sampler.executable the "
                "path of vllm in the environment that it is installed in, or sampler.urls those of running servers."
            )
        server = ServerProcess(self, self._started, log, port)
        self._started += 1
        with contextlib.suppress(BrokenPipeError):  # as its status then says
            self._process.stdin.write(
                json.dumps({"command": command, "environment": environment, "log": str(log)}) + "\n"
            )
            self._process.stdin.flush()
        return server

    def status(self, number: int) -> int | None:
        """A server's exit status; None while it runs."""
        if number not in self._ended and (code := self._process.poll()) is not None:
            return 128 - code if code < 0 else code  # the guard was killed, and its servers with it
        return self._ended.get(number)

    def end(self) -> None:
        """Nothing of the servers is left afterwards."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # where the guard itself was killed
        self._process.wait()

    def _listen(self) -> None:
        for line in self._process.stdout:
            number, status = map(int, line.split())
            self._ended[number] = status


class ServerProcess:
    """A server that a guard has started."""

    def __init__(self, guard: Guard, number: int, log: Path, port: socket.socket):
        self.log, self._guard, self._number, self._port = log, guard, number, port

    @property
    def status(self) -> int | None:
        """The server's exit status; None while it runs."""
        return self._guard.status(self._number)

    def last_words(self) -> str:
        """The last lines of the log that tell of an error, or else its last lines, and where the log is."""
        lines = []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = list(dict.fromkeys(line for line in lines if re.search(r"(Error|Exception|Value error)\b.*:? ", line)))
        told = " | ".join(line[-300:] for line in (errors[-2:] or lines[-_LAST_LINES:]))
        return f"Its last words: {told}. All of them: {self.log}." if told else f"Its log, {self.log}, is empty."

    def close(self) -> None:
        self._port.close()


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
