"""Trains on as many processes as the configuration says: this one, local workers, or those a
launcher started.

Local workers are started, watched, and ended together; a signal lets a step of any length finish.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pgtoolkit.config.names import plain_config
from pgtoolkit.config.saved import typed
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, RankLost, unusable
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.launch.worker import Training, train_as_rank
from pgtoolkit.ranks.environment import joined, world_size
from pgtoolkit.runs.directory import is_held, record_end
from pgtoolkit.runs.records import read_status
from pgtoolkit.system.child import Child, end_all
from pgtoolkit.system.imports import without
from pgtoolkit.system.report import print_error, say, shortest_path
from pgtoolkit.tracking.next_commands import resume_command
from pgtoolkit.tracking.signals import (
    StopSignal,
    answered_by,
    stop_signals_recorded,
    stop_signals_wait,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)

AFTER_WORKERS = ("running", "failed")
"""States that a worker may have left: who has started it knows better why it failed."""

GRACE_SECONDS = 30
"""For rank 0 to write final status and curves once another has failed; 2 for the others, who have
none to write."""

_SECONDS_TO_BECOME_FREE = 600
"""For a process whose launcher was killed, which finishes its step and saves."""


def train_on_processes(training: Training) -> None:
    """`train` of the validated configuration, with every kind of parallelism; its errors come out
    here, once.

    Where a launcher such as torchrun has started this process, the run directory is that of rank 0,
    and the other ranks may give any. Otherwise signals are answered in an orderly way from here on,
    also while torch is loaded.
    """
    config = training.config
    if (rank := joined()) is not None:
        train_as_rank(training, rank)
        return
    with stop_signals_recorded(config, training.run_dir, training.overrides, training.sweep):
        if (count := world_size(config.parallelism)) > 1:
            _run_workers(training, count)
            return
        with without(), stop_signals_wait():
            from pgtoolkit.training.train import train

        train(config, training.run_dir, training.resume, training.overrides, training.sweep)


def _run_workers(training: Training, count: int) -> None:
    """Train in so many local processes until all have ended; raises the error that ended them.

    STOP_SIGNALS go on to the workers, who finish their step; StopSignal if they had not begun. A
    worker that fails takes the others with it.
    """
    import torch

    device = training.config.trainer.device
    if device != "cpu" and 0 < (gpus := torch.cuda.device_count()) < count:
        raise ConfigError(
            f"trainer.device={device} needs a GPU for each of {count} processes (got {gpus}). NCCL "
            "does not share one. Use smaller sizes in parallelism, or trainer.device=cpu."
        )
    with tempfile.TemporaryDirectory(prefix="pgtk-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(training))
        # Workers start with SIGINT blocked, which they undo: until then their interpreter would
        # show where it was. Here it waits until it can be forwarded; the store's threads, which
        # come next, must not have it either.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        store = loopback_store()
        workers: dict[int, Child] = {}
        signals: list[int] = []

        def forward(number: int, _frame: FrameType | None) -> None:
            signals.append(number)
            for process in workers.values():
                process.stop(number)

        try:
            for rank in range(count):
                workers[rank] = _started(folder, rank, count, store.port)
            with answered_by(forward):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                unanswering = _wait(workers, signals)
        finally:
            end_all(workers.values())  # whatever happened here, nobody stays behind
        try:
            _conclude(folder, workers, signals, unanswering, training)
        except RankLost as error:
            record_end(training.run_dir, "failed", f"RankLost: {error}", AFTER_WORKERS)
            raise


def loopback_store() -> TCPStore:
    """Where the workers find each other: a port of the system's choice, so that two jobs of one
    sweep never meet.

    It asks nobody for a password, and torch would open it to the network: only this machine may
    come in.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    # The store closes the socket.
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _started(folder: Path, rank: int, count: int, port: int) -> Child:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    own |= {
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "pgtk",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    own |= {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    own |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # what servers in other environments get
    own |= {"PGTK_PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environment = os.environ | {name: str(value) for name, value in own.items()}
    command = [sys.executable, "-P", "-m", "pgtoolkit.launch.worker", str(folder)]
    if rank == 0:
        return Child(command, environment)
    # The others have nothing to say that rank 0 does not; what a library prints is looked at if one
    # dies.
    return Child(command, environment, folder / f"stderr-{rank}", is_quiet=True)


def _wait(workers: dict[int, Child], signals: list[int]) -> list[int]:
    """Until all have ended; returns the ranks that had to be killed."""
    deadline = None
    while running := [rank for rank, process in workers.items() if process.poll() is None]:
        failed = any(process.poll() for process in workers.values())
        if deadline is None and (failed or signals.count(signal.SIGINT) > 1):
            deadline = time.monotonic() + (GRACE_SECONDS if 0 in running else 2)
        if deadline is not None and failed and 0 not in running:
            deadline = min(deadline, time.monotonic() + 2)
        if deadline is not None and time.monotonic() > deadline:
            for rank in running:
                workers[rank].stop(signal.SIGTERM)
            deadline = time.monotonic() + 2
            for rank in running:
                workers[rank].wait(max(0, deadline - time.monotonic()))
            return running
        time.sleep(0.05)
    return []


def _conclude(
    folder: Path,
    workers: Mapping[int, Child],
    signals: list[int],
    unanswering: list[int],
    training: Training,
) -> None:
    """Raise the error that ended the job, if one did: what came first, not what followed from
    it."""
    outcomes: dict[int, tuple[PgtoolkitError | None, str]] = {}
    for rank in workers:
        with contextlib.suppress(FileNotFoundError):
            outcomes[rank] = pickle.loads((folder / f"rank-{rank}").read_bytes())
    resume = f"Continue with: {resume_command(training.run_dir)}"
    failed = {rank: error for rank, (error, _) in outcomes.items() if error is not None}
    for rank, error in failed.items():
        if shown := outcomes[rank][1]:
            say(shown, error=True)
            raise PgtoolkitError(f"rank {rank} failed: {error}")
        if not isinstance(error, RankLost | Interrupted):
            raise type(error)(
                str(error) if rank == 0 or error.on_all_ranks else f"rank {rank}: {error}"
            )
    for error in failed.values():
        if isinstance(error, Interrupted):
            raise error
    if signals:
        name = signal.Signals(signals[-1]).name
        record_end(training.run_dir, "interrupted", name, AFTER_WORKERS)
        raise StopSignal(name)
    unknown: dict[int, int] = {}
    for rank, worker in workers.items():
        if rank not in outcomes and rank not in unanswering:
            assert worker.returncode is not None  # all have ended
            unknown[rank] = worker.returncode
    for rank, code in sorted(unknown.items(), key=lambda pair: pair[1] >= 0):  # by a signal first
        how = (
            f"ended with status {code}"
            if code >= 0
            else f"was ended by {signal.Signals(-code).name}"
        )
        if code == -signal.SIGKILL:
            how += " (the system does so when memory runs out)"
        elif (
            code == -signal.SIGABRT and unanswering
        ):  # as NCCL ends a process that has waited too long for others
            how += f", and rank {', '.join(map(str, unanswering))} did not answer any more"
        stderr = folder / f"stderr-{rank}"
        lines = (
            stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if stderr.exists()
            else []
        )
        last_words = f" Its last words: {' | '.join(lines[-5:])}." if lines else ""
        raise RankLost(f"rank {rank} {how}.{last_words} {resume}")
    for error in failed.values():
        if not unanswering:
            raise RankLost(f"{error}. {resume}")
        names, seconds = (
            ", ".join(map(str, unanswering)),
            training.config.parallelism.timeout_seconds,
        )
        limit = f"parallelism.timeout_seconds={seconds:g}"
        raise RankLost(f"rank {names} did not answer within {limit} and was ended. {resume}")


def train_job(
    config: Config, directory: Path, overrides: list[str], sweep: str | None = None
) -> None:
    """Train in the directory: from its newest checkpoint if a run was begun there before; nothing
    if it is done."""
    wait_until_free(directory)
    if begun := (directory / "config.yaml").is_file():
        refuse_another(directory, plain_config(config))
        if read_status(directory).get("state") == "done":
            say(f"{shortest_path(directory)} is done: nothing is left to train")
            return
    train_on_processes(Training(config, directory, begun, overrides, sweep))


def wait_until_free(directory: Path) -> None:
    """Another process may still hold the directory; one that does not let go is named when training
    begins."""
    if joined() is not None or not is_held(directory):
        return  # of several ranks another one may hold it already
    say(f"waiting for another process that still runs {shortest_path(directory)}")
    end = time.monotonic() + _SECONDS_TO_BECOME_FREE
    while is_held(directory) and time.monotonic() < end:
        time.sleep(0.2)


def run_job(file: Path) -> int:
    """Run the job that the launcher wrote into a file; returns the exit status."""
    job = json.loads(file.read_text(encoding="utf-8"))
    sys.argv = job["command"]  # what provenance.json names
    try:
        train_job(
            typed(job["config"], str(file)), Path(job["directory"]), job["overrides"], job["sweep"]
        )
    except (PgtoolkitError, OSError) as error:
        return print_error(unusable(error) if isinstance(error, OSError) else error)
    except KeyboardInterrupt:
        return Interrupted.exit_status
    return 0
