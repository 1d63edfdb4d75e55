"""Trains on the processes of the configuration: this one, local workers, or those of a launcher.

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
"""States in status.json that this process may replace: it knows better why a worker failed."""

GRACE_SECONDS = 30
"""Seconds that rank 0 has for its final status and curves, once another rank has failed."""

_GRACE_SECONDS_OF_OTHERS = 2
"""The same for the other ranks, which write nothing at their end."""

_SECONDS_TO_BECOME_FREE = 600
"""Time for a process whose launcher was killed: it finishes its step and saves."""


def train_on_processes(training: Training) -> None:
    """Train by the validated configuration, with every kind of parallelism; raise its errors once.

    Where a launcher such as torchrun has started this process, the run directory is that of rank 0,
    and the other ranks may give any. Otherwise this function answers signals from here on, also
    while torch is loaded.
    """
    config = training.config
    rank = joined()
    if rank is not None:
        train_as_rank(training, rank)
        return
    with stop_signals_recorded(config, training.run_dir, training.overrides, training.sweep):
        count = world_size(config.parallelism)
        if count > 1:
            _run_workers(training, count)
            return
        with without(), stop_signals_wait():
            from pgtoolkit.training.train import train

        train(config, training.run_dir, training.resume, training.overrides, training.sweep)


def _run_workers(training: Training, count: int) -> None:
    """Train in `count` local processes until all have ended; raise the error that ended them.

    STOP_SIGNALS go on to the workers, which finish their step. Raises StopSignal if they had not
    begun. A worker that fails takes the others with it.
    """
    _check_gpus(training.config, count)
    with tempfile.TemporaryDirectory(prefix="pgtk-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(training))
        # Workers start with SIGINT blocked and unblock it themselves: until then the interpreter
        # would print a traceback. This process blocks it until it can forward the signal, and
        # before the store starts its threads, which must not receive it either.
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
                workers[rank] = _start_worker(folder, rank, count, store.port)
            with answered_by(forward):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                killed = _wait(workers, signals)
        finally:
            end_all(workers.values())  # also after an error of this process
        try:
            _conclude(folder, workers, signals, killed, training)
        except RankLost as error:
            record_end(training.run_dir, "failed", f"RankLost: {error}", AFTER_WORKERS)
            raise


def _check_gpus(config: Config, count: int) -> None:
    """Raise ConfigError where this machine has GPUs, but fewer than processes."""
    import torch

    device = config.trainer.device
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if 0 < gpus < count:
        raise ConfigError(
            f"trainer.device={device} needs a GPU for each of {count} processes (got {gpus}). NCCL "
            "does not share one. Use smaller sizes in parallelism, or trainer.device=cpu."
        )


def loopback_store() -> TCPStore:
    """Return the store where the workers find each other.

    The system chooses its port, so that two jobs of one sweep never meet. The store has no
    password, and torch would open it to the network: it listens on this machine alone.
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


def _start_worker(folder: Path, rank: int, count: int, port: int) -> Child:
    """Start the process of one rank, with the variables that torchrun would set."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "pgtk",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # A server in another environment gets the user's own path instead.
        "PGTK_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-P", "-m", "pgtoolkit.launch.worker", str(folder)]
    if rank == 0:
        return Child(command, environment)
    # Only rank 0 talks to the user. The output of the others is read if one of them dies.
    return Child(command, environment, folder / f"stderr-{rank}", is_quiet=True)


def _wait(workers: dict[int, Child], signals: list[int]) -> list[int]:
    """Wait until all have ended; return the ranks that had to be killed."""
    deadline = None
    while True:
        running = [rank for rank, process in workers.items() if process.poll() is None]
        if not running:
            return []
        now = time.monotonic()
        failed = any(process.poll() for process in workers.values())
        if deadline is None and (failed or signals.count(signal.SIGINT) > 1):
            deadline = now + (GRACE_SECONDS if 0 in running else _GRACE_SECONDS_OF_OTHERS)
        if deadline is not None and failed and 0 not in running:
            deadline = min(deadline, now + _GRACE_SECONDS_OF_OTHERS)
        if deadline is not None and now > deadline:
            _terminate([workers[rank] for rank in running])
            return running
        time.sleep(0.05)


def _terminate(processes: list[Child]) -> None:
    """Ask the processes to end, and give them two seconds for it."""
    for process in processes:
        process.stop(signal.SIGTERM)
    deadline = time.monotonic() + 2
    for process in processes:
        process.wait(max(0, deadline - time.monotonic()))


def _conclude(
    folder: Path,
    workers: Mapping[int, Child],
    signals: list[int],
    killed: list[int],
    training: Training,
) -> None:
    """Raise the error that ended the job, if one did: the first one, not those that followed from
    it.

    killed: ranks that did not end by themselves.
    """
    outcomes: dict[int, tuple[PgtoolkitError | None, str]] = {}
    for rank in workers:
        with contextlib.suppress(FileNotFoundError):
            outcomes[rank] = pickle.loads((folder / f"rank-{rank}").read_bytes())
    errors = {rank: error for rank, (error, _) in outcomes.items() if error is not None}
    _raise_reported(errors, {rank: traceback for rank, (_, traceback) in outcomes.items()})
    if signals:
        name = signal.Signals(signals[-1]).name
        record_end(training.run_dir, "interrupted", name, AFTER_WORKERS)
        raise StopSignal(name)
    resume = f"Continue with: {resume_command(training.run_dir)}"
    lost: dict[int, int] = {}  # rank -> exit status, of those that have left no outcome
    for rank, worker in workers.items():
        if rank not in outcomes and rank not in killed:
            assert worker.returncode is not None  # all have ended
            lost[rank] = worker.returncode
    if lost:
        # A rank that a signal has ended comes first.
        rank = min(lost, key=lambda rank: lost[rank] >= 0)
        raise RankLost(f"{_description_of_lost(rank, lost[rank], killed, folder)} {resume}")
    for error in errors.values():
        if not killed:
            raise RankLost(f"{error}. {resume}")
        names = ", ".join(map(str, killed))
        limit = f"parallelism.timeout_seconds={training.config.parallelism.timeout_seconds:g}"
        raise RankLost(f"rank {names} did not answer within {limit} and was ended. {resume}")


def _raise_reported(errors: dict[int, PgtoolkitError], tracebacks: dict[int, str]) -> None:
    """Raise the error that a rank has reported, but for the loss of another rank.

    tracebacks: by rank, empty where the error needs none.
    """
    for rank, error in errors.items():
        if tracebacks[rank]:
            say(tracebacks[rank], error=True)
            raise PgtoolkitError(f"rank {rank} failed: {error}")
        if not isinstance(error, RankLost | Interrupted):
            needs_rank = rank > 0 and not error.on_all_ranks
            raise type(error)(f"rank {rank}: {error}" if needs_rank else str(error))
    for error in errors.values():
        if isinstance(error, Interrupted):
            raise error


def _description_of_lost(rank: int, status: int, killed: list[int], folder: Path) -> str:
    """Return sentences on a rank that ended without an outcome, with the last lines it printed."""
    if status >= 0:
        ending = f"ended with status {status}"
    else:
        ending = f"was ended by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        ending += " (the system does so when memory runs out)"
    elif status == -signal.SIGABRT and killed:
        # NCCL ends a process so if it has waited too long for others.
        ending += f", and rank {', '.join(map(str, killed))} did not answer any more"
    stderr = folder / f"stderr-{rank}"
    lines: list[str] = []
    if stderr.exists():
        lines = stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last_words = f" Its last words: {' | '.join(lines[-5:])}." if lines else ""
    return f"rank {rank} {ending}.{last_words}"


def train_job(
    config: Config, directory: Path, overrides: list[str], sweep: str | None = None
) -> None:
    """Train in the directory, from its newest checkpoint if there is one, unless it is done."""
    wait_until_free(directory)
    begun = (directory / "config.yaml").is_file()
    if begun:
        refuse_another(directory, plain_config(config))
        if read_status(directory).get("state") == "done":
            say(f"{shortest_path(directory)} is done: nothing is left to train")
            return
    train_on_processes(Training(config, directory, begun, overrides, sweep))


def wait_until_free(directory: Path) -> None:
    """Wait while another process holds the directory, for ten minutes at most.

    One that does not let go is named when training begins.
    """
    if joined() is not None or not is_held(directory):
        return  # another rank of this run may hold it already
    say(f"waiting for another process that still runs {shortest_path(directory)}")
    end = time.monotonic() + _SECONDS_TO_BECOME_FREE
    while is_held(directory) and time.monotonic() < end:
        time.sleep(0.2)


def run_job(file: Path) -> int:
    """Run the job that the launcher wrote into a file; return the exit status."""
    job = json.loads(file.read_text(encoding="utf-8"))
    sys.argv = job["command"]  # for provenance.json
    try:
        config = typed(job["config"], str(file))
        train_job(config, Path(job["directory"]), job["overrides"], job["sweep"])
    except (PgtoolkitError, OSError) as error:
        return print_error(unusable(error) if isinstance(error, OSError) else error)
    except KeyboardInterrupt:
        return Interrupted.exit_status
    return 0
