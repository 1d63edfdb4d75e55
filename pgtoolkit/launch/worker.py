"""One process of several: joins the others, trains with them, and writes down how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import (
    ConfigError,
    ExitStatus,
    Interrupted,
    PgtoolkitError,
    RankLost,
    as_storage_error,
    first_line,
)
from pgtoolkit.ranks.environment import AXES, Rank, joined
from pgtoolkit.runs.directory import record_end
from pgtoolkit.system.child import channel_to_parent, follow_parent
from pgtoolkit.system.imports import import_metrics, imports_skipping
from pgtoolkit.system.own_end import really_exit, refuse_silent_ends
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.system.terminal import flush_streams, prepare_streams

if TYPE_CHECKING:
    from pgtoolkit.ranks.layout import Layout


@dataclass(frozen=True)
class Training:
    """The arguments of `train`, and the command line for the run's records.

    refused: an error of this process alone, with which the other ranks end, too.
    """

    config: Config
    run_dir: Path
    resume: bool = False
    overrides: list[str] = field(default_factory=list)
    sweep: str | None = None
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    refused: PgtoolkitError | None = None


def imported_train(config: Config) -> Callable[..., None]:
    """Return `assembly.train.train`, imported as the configuration needs it."""
    if config.callbacks.own:
        import_metrics()
    # `imports_skipping` holds back garbage collection, which makes the import faster.
    with imports_skipping():
        from pgtoolkit.assembly.train import train
    return train


def train_as_rank(training: Training, rank: Rank) -> None:
    """Train as one of rank.world_size processes, all of which call this.

    The run directory is that of rank 0.
    """
    with imports_skipping():
        from pgtoolkit.ranks.agreement import failing_together, gather_objects
    train = imported_train(training.config)

    with _process_group(training.config, rank) as layout:
        with failing_together(layout):
            if training.refused is not None:
                raise training.refused
        run_dir = gather_objects(training.run_dir, layout.world_group)[0]
        try:
            train(
                training.config,
                run_dir,
                training.resume,
                training.overrides,
                training.sweep,
                layout,
            )
        except Interrupted:
            _wait_for_all()
            raise
        except RankLost as error:
            if rank.number > 0:  # the node of rank 0 may be gone
                record_end(run_dir, "failed", f"RankLost: {error}")
            raise
        _wait_for_all()


@contextlib.contextmanager
def _process_group(config: Config, rank: Rank) -> Iterator[Layout]:
    """Join torch.distributed inside the block, which gets the layout of all processes."""
    import torch
    import torch.distributed as dist

    from pgtoolkit.ranks.layout import Layout

    on_gpu = torch.cuda.is_available() and config.trainer.device != "cpu"
    if on_gpu:
        if rank.local >= torch.cuda.device_count():
            raise ConfigError(
                f"trainer.device={config.trainer.device} needs a GPU for each process of a machine "
                f"(got {torch.cuda.device_count()} of them, local rank {rank.local}). NCCL does "
                "not share one. Start fewer processes, or use trainer.device=cpu."
            )
        torch.cuda.set_device(rank.local)
    os.environ |= {
        "RANK": str(rank.number),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local),
        "MASTER_ADDR": rank.address,
        "MASTER_PORT": str(rank.port),
    }
    if rank.address == "127.0.0.1" and sys.platform == "linux":
        # The host name of this machine may not resolve to it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    seconds = config.parallelism.timeout_seconds
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=seconds)
        )
        sizes = {name: getattr(config.parallelism, name) for name in AXES}
        layout = Layout.of_world("cuda" if on_gpu else "cpu", seconds, **sizes)
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank.number} did not find all {rank.world_size} processes within "
            f"parallelism.timeout_seconds={seconds}: {first_line(error)}"
        ) from error
    yield layout
    # Not after an error: with NCCL it would wait for operations that the other ranks never join.
    dist.destroy_process_group()


def _wait_for_all() -> None:
    """Wait until all ranks end, since a launcher ends the others once one ends with an error."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):
        dist.barrier()


def main(folder: Path) -> int:
    """Train as a worker that `pgtk` has started; return the exit status.

    folder: holds the job, and receives the error and its traceback in the file `rank-N`.
    An interruption ends with 0, since all ranks agree on it and none needs to be ended for it.
    """
    training: Training = pickle.loads((folder / "job").read_bytes())
    rank = joined()
    assert rank is not None
    sys.argv = training.argv
    prepare_streams()
    error: PgtoolkitError | None = None
    printed_traceback = ""
    try:
        train_as_rank(training, rank)
    except PgtoolkitError as known:
        error = known
    except OSError as system_error:
        error = as_storage_error(system_error)
    except KeyboardInterrupt:
        return ExitStatus.stopped  # the process that sent the signal prints the message
    except BaseException as defect:
        error = PgtoolkitError(f"{type(defect).__name__}: {first_line(defect)}")
        printed_traceback = traceback.format_exc()
    with replacing(folder / f"rank-{rank.number}") as file:
        pickle.dump((error, printed_traceback), file)
    return 0 if error is None or isinstance(error, Interrupted) else error.exit_status


if __name__ == "__main__":
    # Until training handles Ctrl-C, it ends the process at once: a KeyboardInterrupt in the middle
    # of an import would print a traceback, or the import would take it for a failure of its own.
    # The signal is blocked when the interpreter starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follow_parent(channel_to_parent())
    # The job was pickled with the class of `pgtoolkit.launch.worker`, not of `__main__`.
    from pgtoolkit.launch import worker

    refuse_silent_ends()
    status = worker.main(Path(sys.argv[1]))
    flush_streams()
    # An ordinary exit would wait for the threads of a communicator that has lost its peers.
    really_exit(status)
