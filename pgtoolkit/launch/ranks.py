"""Trains on the processes of the configuration: this one, local workers, or those of a launcher.

Local workers are processes of this machine, one for each rank. They are started, watched, and ended
together. A signal to stop lets them finish their step, however long it takes.
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

from pgtoolkit.assembly.continuing import resume_command
from pgtoolkit.assembly.early_stop import stop_signals_recorded
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.saved import compiled_as_begun, typed
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, RankLost, as_storage_error
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.launch.worker import Training, imported_train, train_as_rank
from pgtoolkit.ranks.environment import joined, world_size
from pgtoolkit.runs.directory import is_held, record_end
from pgtoolkit.runs.provenance import changed_modules
from pgtoolkit.runs.records import read_status
from pgtoolkit.system.child import Child, end_all
from pgtoolkit.system.report import print_error, say, shortest_path
from pgtoolkit.tracking.signals import StopSignal, answered_by, stop_signals_wait

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)

_REPLACEABLE_STATES = ("running", "failed")
"""States in status.json that this process may replace once the workers have ended: it knows better
than a worker why another one failed."""

GRACE_SECONDS = 30
"""Seconds that rank 0 has to write its final status and curves, once another rank has failed or
SIGINT has come twice."""

_GRACE_SECONDS_OF_OTHERS = 2
"""Seconds that ranks have to end once rank 0 has ended; they write nothing at their end."""

_SECONDS_TO_END = 2
"""Seconds from SIGTERM to SIGKILL for ranks that did not end by then."""

_SECONDS_TO_BECOME_FREE = 600
"""Seconds to wait for a run directory that another process holds. After its launcher was killed, a
process still finishes its step and saves."""


def train_on_processes(training: Training) -> None:
    """Train by the validated configuration, in this process, in local workers, or as one rank.

    Raises the first error of the run, also if several processes end with one.

    This process is one rank if a launcher such as torchrun has started it. All ranks then use the
    run directory of rank 0, whatever directories they were given. Otherwise this function answers
    signals from here on, also while torch is loaded.
    """
    config = training.config
    rank = joined()
    if rank is not None:
        train_as_rank(training, rank)
        return
    with stop_signals_recorded(
        plain_config(config), training.run_dir, training.overrides, training.sweep
    ):
        count = world_size(config.parallelism)
        if count > 1:
            _run_workers(training, count)
            return
        with stop_signals_wait():
            train = imported_train(config)
        train(config, training.run_dir, training.resume, training.overrides, training.sweep)


def _run_workers(training: Training, count: int) -> None:
    """Train in `count` local processes, wait until all have ended, and raise the error of the run.

    STOP_SIGNALS (tracking/signals.py) are sent on to the workers, which finish their step and then
    report Interrupted. Raises StopSignal if they were stopped before training began. When a worker
    fails, the others are ended.
    """
    _check_gpus(training.config, count)
    with tempfile.TemporaryDirectory(prefix="pgtk-") as folder_name:
        folder = Path(folder_name)
        (folder / "job").write_bytes(pickle.dumps(training))
        # SIGINT is blocked from here until this process can send it on. Workers inherit the block,
        # and unblock the signal once Python would no longer print a traceback for it. The threads
        # of the store inherit it too, and must never receive the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        store = loopback_store()
        workers: dict[int, Child] = {}
        signals: list[int] = []

        def send_on(signal_number: int, _frame: FrameType | None) -> None:
            signals.append(signal_number)
            for worker in workers.values():
                worker.send_signal(signal_number)

        try:
            for rank in range(count):
                workers[rank] = _start_worker(folder, rank, count, store.port)
            with answered_by(send_on):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                killed = _wait_for_workers(workers, signals)
        finally:
            end_all(workers.values())  # It ends those that still run, also after an error here.
        try:
            _conclude(folder, workers, signals, killed, training)
        except RankLost as error:
            record_end(training.run_dir, "failed", f"RankLost: {error}", _REPLACEABLE_STATES)
            raise


def _check_gpus(config: Config, count: int) -> None:
    """Raise ConfigError if training uses GPUs, and this machine has fewer than `count`."""
    import torch

    device = config.trainer.device
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if 0 < gpus < count:
        raise ConfigError(
            f"trainer.device={device} needs a GPU for each of {count} processes (got {gpus}). NCCL "
            "does not let processes share a GPU. Use smaller sizes in parallelism, or "
            "trainer.device=cpu."
        )


def loopback_store() -> TCPStore:
    """Return a store through which the workers find each other.

    The system chooses its port, so that the jobs of a sweep never use the same store. The store has
    no password. By default torch would open it to the network; this one listens on the address
    127.0.0.1 alone.
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
        # The user's own value, for servers that run in another environment.
        "PGTK_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-P", "-m", "pgtoolkit.launch.worker", str(folder)]
    if rank == 0:
        return Child(command, environment)
    # Only rank 0 prints to the user. What another rank prints to stderr is read if it dies.
    return Child(command, environment, folder / f"stderr-{rank}", is_quiet=True)


def _wait_for_workers(workers: dict[int, Child], signals: list[int]) -> list[int]:
    """Wait until all workers have ended; return the ranks that did not end by themselves.

    Workers have any time they need, until one of them fails or the user sends SIGINT again. Then
    there is a deadline. Those that still run after it get SIGTERM, and may still run after that.
    """
    deadline = None
    while True:
        running = [rank for rank, worker in workers.items() if worker.poll() is None]
        if not running:
            return []
        now = time.monotonic()
        failed = any(worker.poll() for worker in workers.values())
        if deadline is None and (failed or signals.count(signal.SIGINT) > 1):
            deadline = now + (GRACE_SECONDS if 0 in running else _GRACE_SECONDS_OF_OTHERS)
        if deadline is not None and failed and 0 not in running:
            deadline = min(deadline, now + _GRACE_SECONDS_OF_OTHERS)
        if deadline is not None and now > deadline:
            _terminate([workers[rank] for rank in running])
            return running
        time.sleep(0.05)


def _terminate(processes: list[Child]) -> None:
    """Send SIGTERM to the processes, and wait a short time for them to end."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        process.wait(max(0, deadline - time.monotonic()))


def _conclude(
    folder: Path,
    workers: Mapping[int, Child],
    signals: list[int],
    killed: list[int],
    training: Training,
) -> None:
    """Raise the error that ended the run, if one did. All workers have ended.

    One error often leads to errors of other ranks: the cause is raised, not what followed from it.

    folder: has the outcome of each rank that could write one.
    signals: the signals that this process has received.
    killed: the ranks that did not end by themselves.
    """
    # rank -> (its error, the traceback to be printed with it)
    outcomes: dict[int, tuple[PgtoolkitError | None, str]] = {}
    for rank in workers:
        with contextlib.suppress(FileNotFoundError):
            outcomes[rank] = pickle.loads((folder / f"rank-{rank}").read_bytes())
    errors = {rank: error for rank, (error, _) in outcomes.items() if error is not None}
    _raise_reported(errors, {rank: traceback for rank, (_, traceback) in outcomes.items()})
    if signals:
        name = signal.Signals(signals[-1]).name
        record_end(training.run_dir, "interrupted", name, _REPLACEABLE_STATES)
        raise StopSignal(name)
    resume = f"Continue with: {resume_command(training.run_dir)}"
    # rank -> exit status, of ranks that have ended by themselves without an outcome
    lost: dict[int, int] = {}
    for rank, worker in workers.items():
        if rank not in outcomes and rank not in killed:
            assert worker.returncode is not None  # It has ended.
            lost[rank] = worker.returncode
    if lost:
        # If a signal has ended a rank, that is the cause.
        first = min(lost, key=lambda rank: lost[rank] >= 0)
        raise RankLost(f"{_description_of_lost(first, lost[first], killed, folder)} {resume}")
    if not errors:
        return
    # The errors that are left report the loss of another rank.
    if killed:
        limit = f"parallelism.timeout_seconds={training.config.parallelism.timeout_seconds:g}"
        were_ended = "was ended" if len(killed) == 1 else "were ended"
        raise RankLost(f"{_ranks(killed)} did not answer within {limit} and {were_ended}. {resume}")
    raise RankLost(f"{next(iter(errors.values()))}. {resume}")


def _ranks(numbers: list[int]) -> str:
    """Return ranks in words, such as "ranks 1, 3"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _raise_reported(errors: dict[int, PgtoolkitError], tracebacks: dict[int, str]) -> None:
    """Raise the first error that a rank has reported as its own, and print its traceback.

    Raise Interrupted if there is none, and a rank was interrupted. The loss of another rank is not
    raised here.

    errors: by rank.
    tracebacks: by rank; empty for errors that the message alone explains.
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
    """Describe how a rank ended that left no outcome, with the last lines that it printed.

    status: its exit status, negative for the signal that ended it.
    killed: the ranks that did not end by themselves.
    """
    if status >= 0:
        ending = f"ended with status {status}"
    else:
        ending = f"was ended by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        ending += " (the system does so when memory runs out)"
    elif status == -signal.SIGABRT and killed:
        # This is how NCCL ends a process that has waited too long for others.
        ending += f", and {_ranks(killed)} no longer answered"
    stderr = folder / f"stderr-{rank}"
    lines: list[str] = []
    if stderr.exists():
        lines = stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last_lines = f" It printed last: {' | '.join(lines[-5:])}." if lines else ""
    return f"rank {rank} {ending}.{last_lines}"


def train_job(
    config: Config, directory: Path, overrides: list[str], sweep: str | None = None
) -> None:
    """Train in a directory. If a run has begun there, continue it; if it is done, do nothing.

    Raises ConfigError if the run that has begun there has another configuration.
    """
    wait_until_free(directory)
    has_begun = (directory / "config.yaml").is_file()
    if has_begun:
        refuse_another(directory, plain_config(config))
        if read_status(directory).get("state") == "done":
            note = f"{shortest_path(directory)} is done: nothing is left to train."
            say(note + trained_before(directory))
            return
        config = compiled_as_begun(config, directory)
    train_on_processes(Training(config, directory, has_begun, overrides, sweep))


def trained_before(directory: Path) -> str:
    """Return the sentence that a run was trained before modules of the user's own changed."""
    changed = changed_modules(directory)
    if not changed:
        return ""
    modules = " and ".join(changed)
    return f" It was trained before {modules} changed; use another directory to train anew."


def wait_until_free(directory: Path) -> None:
    """Wait while another process holds the directory, for ten minutes at most.

    If it still holds it then, training refuses to begin and names that process.
    """
    if joined() is not None:
        return  # Another rank of this run may hold it already.
    if not is_held(directory):
        return
    say(f"waiting for another process that still runs {shortest_path(directory)}")
    end = time.monotonic() + _SECONDS_TO_BECOME_FREE
    while is_held(directory) and time.monotonic() < end:
        time.sleep(0.2)


def run_job(file: Path) -> int:
    """Run the job of a sweep that multirun.py wrote into a file; return the exit status."""
    job = json.loads(file.read_text(encoding="utf-8"))
    sys.argv = job["command"]  # It is recorded in provenance.json.
    try:
        config = typed(job["config"], str(file))
        train_job(config, Path(job["directory"]), job["overrides"], job["sweep"])
    except (PgtoolkitError, OSError) as error:
        return print_error(as_storage_error(error) if isinstance(error, OSError) else error)
    except KeyboardInterrupt:
        return Interrupted.exit_status
    return 0
