"""Trains on as many processes as the configuration says: this one, local workers, or those a launcher started."""

from __future__ import annotations

import atexit
import copy
import gc
import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from pgtoolkit.config.rules.parallelism import world_size
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.worker import Job, take_part
from pgtoolkit.ranks.environment import joined
from pgtoolkit.system.imports import without

_PROCESSES_PER_CORE = 16
"""More are a mistake in writing, and would take the machine's memory before anybody could say so."""


def launch(job: Job) -> None:
    """`train` of the validated configuration, with every kind of parallelism; its errors come out here, once.

    Where a launcher such as torchrun has started this process, the run directory is that of rank 0, and the other
    ranks may give any.
    """
    # The end of the process frees all its memory; to look for garbage in it first would take seconds.
    atexit.register(gc.freeze)
    config = copy.deepcopy(job.config)
    OmegaConf.resolve(config)  # the workers know no resolvers
    job = replace(job, config=config)
    count = world_size(config.parallelism)
    if (rank := joined()) is not None:
        take_part(job, rank)
    elif count == 1:
        with without():
            from pgtoolkit.training.train import train

        train(config, job.run_dir, job.resume, job.overrides, job.sweep)
    else:
        from pgtoolkit.launch.local import run_workers

        _refuse_too_many(config.trainer.device, count)
        with tempfile.TemporaryDirectory(prefix="pgtk-") as folder:
            (Path(folder) / "job").write_bytes(pickle.dumps(job))
            run_workers(Path(folder), count, job.run_dir, config.parallelism.timeout_seconds)


def _refuse_too_many(device: str, count: int) -> None:
    """Whether so many processes can run here, before any is started."""
    import torch

    if count > (limit := _PROCESSES_PER_CORE * (os.cpu_count() or 1)):
        raise ConfigError(
            f"parallelism needs at most {limit} processes on this machine (got {count}). It has "
            f"{os.cpu_count()} cores. Use smaller sizes, or start the processes on several machines with torchrun."
        )
    gpus = torch.cuda.device_count()
    if device != "cpu" and 0 < gpus < count:
        raise ConfigError(
            f"trainer.device={device} needs a GPU for each of {count} processes (got {gpus}). NCCL does not "
            "share one. Use smaller sizes in parallelism, or trainer.device=cpu."
        )
