"""Servers as processes of ours: started under guards, their logs in files, and their end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from pgtoolkit.errors import SamplerLost
from pgtoolkit.system.child import Child, end_all, under_guard

_GRACE_SECONDS = 5
"""From SIGTERM, at which a server may clean up, to SIGKILL."""
_END_SECONDS = 15
"""More than a guard gives its server."""
_OF_THIS_JOB = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAST_LINES = 5


class ServerProcess:
    """A server that was started here, and runs until `end`, or until this process ends.

    variables: that it gets besides those of this process. log: a file that takes what it prints.
        port: kept for it.
    Raises SamplerLost where there is no such program.
    """

    def __init__(
        self, command: list[str], variables: dict[str, str], log: Path, port: socket.socket
    ):
        environment = own_environment() | variables
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise SamplerLost(
                f"the sampling server cannot be started: there is no program {command[0]}. Give "
                "sampler.executable the path of vllm in the environment that it is installed in, "
                "or sampler.urls those of running servers."
            )
        self.guard = Child(under_guard(command, _GRACE_SECONDS), environment, log)
        self.log = log
        self._port = port

    @property
    def status(self) -> int | None:
        """The server's exit status, as a shell tells it where a signal ended it; None while it
        runs."""
        status = self.guard.poll()
        return 128 - status if status is not None and status < 0 else status

    def last_words(self) -> str:
        return last_words(self.log)


def last_words(log: Path) -> str:
    """Return the last lines of a process's log that tell of an error, or else its last lines, and
    where the log is."""
    lines = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        lines = [
            line.strip()
            for line in file.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
    errors = list(
        dict.fromkeys(
            line for line in lines if re.search(r"(Error|Exception|Value error)\b.*:? ", line)
        )
    )
    words = " | ".join(line[-300:] for line in (errors[-2:] or lines[-_LAST_LINES:]))
    return (
        f"Its last words: {words}. All of them: {log}." if words else f"Its log, {log}, is empty."
    )


def end_servers(servers: Iterable[ServerProcess]) -> None:
    """End servers with all that has come of them, at the same time."""
    servers = list(servers)
    end_all([server.guard for server in servers], _END_SECONDS)
    for server in servers:
        server._port.close()


def own_environment() -> dict[str, str]:
    """The variables of this process but for those that torch.distributed and our launcher have set
    for its ranks.

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
    """A port of this machine's own address that nobody else is given, for a server that lets others
    bind it, too.

    vLLM does (SO_REUSEPORT): two servers that had been given the same port, one after the other,
    would share it, and each answer some of the other's requests. A socket that is bound and does
    not listen gets none.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
