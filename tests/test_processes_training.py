"""Training on several ranks: the same documents, numbers and weights as one process, in real gloo processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from runs import SHORT, config_of, metrics_of, run
from worlds import layout, world

from pgtoolkit.training.train import train
from pgtoolkit.validate import validate

# What depends on how a step was cut, and on the clock.
CUT = ("num_micro_batches",)


RECORDED = [setting for setting in SHORT if not setting.startswith("rollout.")]


def train_on_rank(config, folder: Path, sizes: dict[str, int], resume: bool) -> None:
    train(config, folder, resume=resume, layout=layout(**sizes))


def run_on_ranks(folder: Path, overrides: list[str], resume: bool = False, **sizes: int) -> Path:
    """A run of as many processes as the sizes multiply to; one process trains here."""
    config = config_of(*overrides, *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))
    assert validate(config).problems == []
    if sizes:
        world(math.prod(sizes.values())).run(train_on_rank, config, folder, sizes, resume)
    else:
        train(config, folder, resume=resume)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Rollouts of a short run, and overrides to train on them."""
    folder = tmp_path_factory.mktemp("recorded")
    run(folder / "run", f"rollout.save_path={folder / 'rollouts'}", "trainer.max_steps=4")
    return [*RECORDED, "rollout=recorded", f"rollout.path={folder / 'rollouts'}", "aggregation.divisor=4"]


def assert_close(found: list[dict], expected: list[dict], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - set(CUT):
            assert row[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), (row["step"], name)


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel_ranks_train_as_one_process_does(tmp_path, recorded, size):
    found = metrics_of(run_on_ranks(tmp_path / "ranks", recorded, data_parallel=size))
    assert_close(found, metrics_of(run_on_ranks(tmp_path / "one", recorded)))
