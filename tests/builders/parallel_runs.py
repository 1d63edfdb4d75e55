"""Runs of several processes for the tests, and what their numbers may differ in from those of
one."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch.distributed as dist

from builders.processes import layout, world
from builders.runs import SHORT, config_of, metrics_of
from pgtoolkit.config.validate import validate
from pgtoolkit.training.build import build
from pgtoolkit.training.checkpoint import load_newest, save_checkpoint
from pgtoolkit.training.state import restore, snapshot, write_settings
from pgtoolkit.training.train import train

RECORDED_SHORT = [
    setting for setting in SHORT if not setting.startswith(("rollout.", "task.", "aggregation="))
]
CUT = ("num_micro_batches",)
"""What depends on how a step was cut."""


def train_on_rank(config, folder: Path, sizes: dict[str, int], resume: bool) -> None:
    train(config, folder, resume=resume, layout=layout(**sizes))


def run_on_ranks(folder: Path, overrides: list[str], resume: bool = False, **sizes: int) -> Path:
    """A run of as many processes as the sizes multiply to; one process trains here."""
    config = config_of(*overrides, *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))
    assert validate(config)[1].problems == []
    if sizes:
        world(math.prod(sizes.values())).run(train_on_rank, config, folder, sizes, resume)
    else:
        train(config, folder, resume=resume)
    return folder


def assert_runs_close(found: Path, expected: Path, tolerance: float = 1e-5) -> None:
    rows, others = metrics_of(found), metrics_of(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    assert len(rows) > 0
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - set(CUT):
            assert row[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), (
                row["step"],
                name,
            )


def load_and_save(config, folder: Path, sizes: dict[str, int]) -> None:
    """Load the newest checkpoint of a run and save it, without a step between."""
    ranks = layout(**sizes)
    module, loader = build(config, resume=True, layout=ranks)
    module.optimizers = functools.cache(lambda use_pl_optimizer: module.configure_optimizers())
    state = load_newest(folder / "checkpoints")
    loader.load_state_dict(state["data"])
    restore(module, state)
    dist.barrier()  # before it is replaced, all have read it
    settings = functools.partial(write_settings, module)
    save_checkpoint(folder / "checkpoints", *snapshot(module, state["data"]), settings, 99, ranks)
