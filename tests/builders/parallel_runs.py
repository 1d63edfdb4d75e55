"""Runs of several processes for the tests, and their comparison with a run of one process."""

from __future__ import annotations

import functools
import math
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from builders.processes import RUN_SECONDS, layout, world
from builders.runs import SHORT, at_step, config_of, metrics_of
from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.train import train
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validate
from pgtoolkit.errors import Interrupted, SamplerLost
from pgtoolkit.training.checkpoint import load_newest, save_checkpoint
from pgtoolkit.training.state import restore, snapshot, write_settings

RECORDED_SHORT = [
    setting for setting in SHORT if not setting.startswith(("rollout.", "task.", "aggregation="))
]
DEPENDS_ON_CUT = ("num_micro_batches",)
"""Metrics that depend on how a step was cut."""


def train_on_rank(config: Config, folder: Path, sizes: dict[str, int], resume: bool) -> None:
    train(config, folder, resume=resume, layout=layout(**sizes))


def resume_until_signal(config: Config, folder: Path, step: int) -> str:
    """Resume a run of two ranks, of which the second alone gets SIGTERM once the step is recorded.

    Returns the message with which this rank has stopped.
    """
    ranks = layout(data_parallel=2)
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: os.kill(processes[1], signal.SIGTERM))
        with pytest.raises(Interrupted) as stop:
            train(config, folder, resume=True, layout=ranks)
    return str(stop.value)


def lost_sampler_of_rank(config: Config, folder: Path) -> tuple[str, bool]:
    """Train with servers of which one fails; return the error, and whether all ranks raise it."""
    with pytest.raises(SamplerLost) as lost:
        train(config, folder, layout=layout(data_parallel=2))
    return str(lost.value), lost.value.on_all_ranks


def run_on_ranks(
    folder: Path,
    overrides: list[str],
    resume: bool = False,
    seconds: float = RUN_SECONDS,
    **sizes: int,
) -> Path:
    """Train a run in as many processes as the sizes multiply to; without sizes in this process.

    seconds: the time that the processes have.
    """
    config = config_of(*overrides, *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))
    assert validate(config)[1].problems == []
    if sizes:
        ranks = world(math.prod(sizes.values()))
        ranks.run(train_on_rank, config, folder, sizes, resume, seconds=seconds)
    else:
        train(config, folder, resume=resume)
    return folder


def assert_runs_close(run: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Compare all metrics of two runs but those that depend on the cut and the clock."""
    rows = metrics_of(run)
    expected_rows = metrics_of(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    assert len(rows) > 0
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected_row.keys()
        for name in row.keys() - set(DEPENDS_ON_CUT):
            value = pytest.approx(expected_row[name], rel=tolerance, abs=tolerance)
            assert row[name] == value, (row["step"], name)


def load_and_save(config: Config, folder: Path, sizes: dict[str, int]) -> None:
    """Load the newest checkpoint of a run and save it as step 99, without training between."""
    ranks = layout(**sizes)
    module, loader = build(config, resume=True, layout=ranks)
    module.optimizers = functools.cache(
        lambda use_pl_optimizer: module.configure_optimizers()[0][0]
    )
    state = load_newest(folder / "checkpoints")
    loader.load_state_dict(state["data"])
    restore(module, state)
    dist.barrier()  # All have read the checkpoint before it is replaced.
    settings = functools.partial(write_settings, module)
    save_checkpoint(folder / "checkpoints", *snapshot(module, state["data"]), settings, 99, ranks)
