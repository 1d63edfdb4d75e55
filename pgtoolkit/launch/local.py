"""Local worker processes by torch's elastic launcher: started, watched, and ended together.

Of torch.distributed.elastic this takes what starts the processes, not the agent that restarts and kills them: a
signal has to let a step of any length finish.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from pgtoolkit import errors
from pgtoolkit.errors import Interrupted, PgtoolkitError, RankLost
from pgtoolkit.runs.directory import RunDirectory, read_status
from pgtoolkit.tracking.next_commands import resume_command
from pgtoolkit.tracking.signals import StopSignal

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_SECONDS = 30
"""For rank 0 to write final status and curves once another has failed; 2 for the others, who have none to write."""


def run_workers(folder: Path, world_size: int, run_dir: Path, timeout_seconds: float) -> None:
    """Run the job in `folder` on world_size local processes until all have ended; raises the error that ended them.

    SIGINT and SIGTERM go on to the workers, who finish their step; StopSignal if they had not begun. A worker that
    fails takes the others with it.
    """
    # Workers start with SIGINT blocked, which they undo: until then their interpreter would show where it was. Here it
    # waits until it can be forwarded; the store's threads, which come next, must not have it either.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    store = loopback_store()
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it would say is said below
    ranks = range(world_size)
    before = {number: signal.getsignal(number) for number in _HANDLED}
    context = start_processes(
        name="pgtk",
        entrypoint=sys.executable,
        args={rank: ("-P", "-m", "pgtoolkit.launch.worker", str(folder)) for rank in ranks},
        envs={rank: _environment(rank, world_size, store.port) for rank in ranks},
        # The other ranks have nothing to say that rank 0 does not; what a library prints is looked at if one dies.
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects={rank: Std.ALL for rank in ranks if rank > 0}),
    )
    processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    try:
        with _forwarded(processes, before) as signals:
            unanswering = _wait(context, processes, signals)
    finally:
        context.close(signal.SIGKILL, timeout=2)  # whatever happened here, nobody stays behind
    try:
        _conclude(folder, processes, signals, unanswering, timeout_seconds, context.stderrs, run_dir)
    except RankLost as error:
        _record(run_dir, "failed", f"RankLost: {error}")
        raise


def loopback_store() -> TCPStore:
    """Where the workers find each other: a port of the system's choice, so that two jobs of one sweep never meet.

    It asks nobody for a password, and torch would open it to the network: only this machine may come in.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    # The store closes the socket.
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "pgtk",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PGTK_PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # what servers in other environments get
    }


@contextlib.contextmanager
def _forwarded(processes: dict[int, Popen], before: dict[int, Any]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM of this process are the workers'; gives the numbers of those that came.

    before: the handlers to go back to. Those of torch's launcher, which it has just set, would end the workers at once.
    """
    came: list[int] = []

    def forward(number, _frame) -> None:
        came.append(number)
        for process in processes.values():
            if process.poll() is None:
                process.send_signal(number)

    for number in _HANDLED:
        signal.signal(number, forward if number in (signal.SIGINT, signal.SIGTERM) else before[number])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(context, processes: dict[int, Popen], signals: list[int]) -> list[int]:
    """Until all have ended; returns the ranks that had to be killed."""
    deadline = None
    while running := [rank for rank, process in processes.items() if process.poll() is None]:
        failed = any(process.poll() for process in processes.values())
        if deadline is None and (failed or signals.count(signal.SIGINT) > 1):
            deadline = time.monotonic() + (GRACE_SECONDS if 0 in running else 2)
        if failed and 0 not in running:
            deadline = min(deadline, time.monotonic() + 2)
        if deadline is not None and time.monotonic() > deadline:
            context.close(signal.SIGTERM, timeout=2)
            return running
        time.sleep(0.05)
    return []


def _conclude(folder, processes, signals, unanswering, timeout_seconds, stderrs, run_dir) -> None:
    """Raise the error that ended the job, if one did: what came first, not what followed from it."""
    outcomes = {}
    for rank in processes:
        with contextlib.suppress(FileNotFoundError):
            outcomes[rank] = json.loads((folder / f"rank-{rank}.json").read_text())
    resume = f"Continue with: {resume_command(run_dir)}"
    failed = {rank: found for rank, found in outcomes.items() if found["status"] and found["kind"] != "RankLost"}
    for rank, found in failed.items():
        if found["kind"] == "defect":
            print(found["traceback"], file=sys.stderr)
            raise PgtoolkitError(f"rank {rank} failed: {found['message']}")
        where = "" if rank == 0 or found["on_all_ranks"] else f"rank {rank}: "
        raise getattr(errors, found["kind"])(where + found["message"])
    if interrupted := [found for found in outcomes.values() if found["kind"] == "Interrupted"]:
        raise Interrupted(interrupted[0]["message"])
    codes = {rank: process.returncode for rank, process in processes.items() if rank not in outcomes}
    if signals:
        name = signal.Signals(signals[-1]).name
        _record(run_dir, "interrupted", name)
        raise StopSignal(name)
    if dead := {rank: -code for rank, code in codes.items() if code < 0 and rank not in unanswering}:
        rank, number = next(iter(dead.items()))
        name = signal.Signals(number).name
        # NCCL ends a process by SIGABRT that has waited too long for others.
        hint = {"SIGKILL": " (the system does so when memory runs out)"}.get(name, "")
        if name == "SIGABRT" and unanswering:
            hint = f", and rank {', '.join(map(str, unanswering))} did not answer any more"
        raise RankLost(f"rank {rank} was ended by {name}{hint}.{_last_words(stderrs.get(rank))} {resume}")
    if exited := {rank: code for rank, code in codes.items() if rank not in unanswering}:
        rank, code = next(iter(exited.items()))
        raise RankLost(f"rank {rank} ended with status {code}.{_last_words(stderrs.get(rank))} {resume}")
    if unanswering and any(found["status"] for found in outcomes.values()):
        names, limit = ", ".join(map(str, unanswering)), f"parallelism.timeout_seconds={timeout_seconds:g}"
        raise RankLost(f"rank {names} did not answer within {limit} and was ended. {resume}")
    for found in outcomes.values():
        if found["status"]:
            raise RankLost(f"{found['message']}. {resume}")


def _last_words(stderr: str | None) -> str:
    lines = Path(stderr).read_text(errors="replace").strip().splitlines() if stderr and Path(stderr).exists() else []
    return f" Its last words: {' | '.join(lines[-5:])}." if lines else ""


def _record(run_dir: Path, state: str, reason: str) -> None:
    """How the run ended, in status.json, where rank 0 could not know it."""
    with contextlib.suppress(PgtoolkitError), RunDirectory(run_dir) as run:
        status = read_status(run.path)
        if status.get("state") in ("running", "failed"):
            run.set_status(state, status["step"], reason)
