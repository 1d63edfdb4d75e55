"""Servers as processes of ours: their start under guards, their logs, and their end."""

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
"""Seconds from SIGTERM, at which a server may clean up, to SIGKILL."""
_END_SECONDS = 15
"""Seconds until a guard must have ended; more than it gives its server."""
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that torch.distributed and our launcher set for each rank."""
_LAST_LINES = 5


class ServerProcess:
    """A server that was started here, and runs until `end`, or until this process ends.

    variables: of its environment, besides those of this process. log: the file for its output.
    port: the socket that reserves its port.
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
                "or sampler.urls the addresses of running servers."
            )
        self.guard = Child(under_guard(command, _GRACE_SECONDS), environment, log)
        self.log = log
        self._port = port

    @property
    def status(self) -> int | None:
        """Return the server's exit status, None while it runs.

        A server that a signal ended has 128 and the signal's number, as in a shell.
        """
        status = self.guard.poll()
        return 128 - status if status is not None and status < 0 else status

    def last_words(self) -> str:
        return last_words(self.log)


def last_words(log: Path) -> str:
    """Return the last lines of a process's log that name an error, or else its last lines, with the
    path of the log."""
    lines = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        text = file.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception|Value error)\b.*:? ", line)]
    distinct_errors = list(dict.fromkeys(errors))
    words = " | ".join(line[-300:] for line in (distinct_errors[-2:] or lines[-_LAST_LINES:]))
    if not words:
        return f"Its log, {log}, is empty."
    return f"Its last words: {words}. The whole log: {log}."


def end_servers(servers: Iterable[ServerProcess]) -> None:
    """End servers at the same time, with all processes that they have started."""
    servers = list(servers)
    end_all([server.guard for server in servers], _END_SECONDS)
    for server in servers:
        server._port.close()


def own_environment() -> dict[str, str]:
    """Return the variables of this process without those that are set for a rank.

    PYTHONPATH is the user's. A server may be of another environment, where the packages on ours
    would break it.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    users_path = variables.pop("PGTK_PYTHONPATH", None)
    if users_path is not None:
        variables["PYTHONPATH"] = users_path
    return variables


def reserve_port() -> socket.socket:
    """Return a socket that reserves a port of 127.0.0.1 for a server.

    vLLM binds its port with SO_REUSEPORT. Two servers that were started with the same port would
    share it, and each answer some of the other's requests. The socket returned here is bound too,
    so that the system gives the port to nobody else; it does not listen, and so gets no requests.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
