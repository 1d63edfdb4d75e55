"""Runs that the tests of training share: a short one, and one on recorded rollouts."""

import shutil
from pathlib import Path

import pytest
from builders.parallel_runs import RECORDED_SHORT
from builders.runs import run


@pytest.fixture(scope="session")
def short(tmp_path_factory) -> Path:
    """Return a run of the short settings, six steps, which no test may change."""
    return run(tmp_path_factory.mktemp("short") / "run")


@pytest.fixture
def copied(short, tmp_path) -> Path:
    """Return a copy of the short run, which a test may change."""
    return shutil.copytree(short, tmp_path / "run")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> list[str]:
    """Record the rollouts of a short run, and return settings to train three steps on them, with a
    checkpoint at the end."""
    folder = tmp_path_factory.mktemp("recorded")
    run(folder / "run", f"rollout.save_path={folder / 'rollouts'}", "trainer.max_steps=4")
    return [
        *RECORDED_SHORT,
        "rollout=recorded",
        f"rollout.path={folder / 'rollouts'}",
        "trainer.max_steps=3",
        "trainer.checkpoint_every=3",
    ]
