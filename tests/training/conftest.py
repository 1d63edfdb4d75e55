"""What the tests of training share."""

import shutil

import pytest
from builders.parallel_runs import RECORDED_SHORT
from builders.runs import run


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """A run of the short settings, six steps, to be read and not changed."""
    return run(tmp_path_factory.mktemp("short") / "run")


@pytest.fixture
def copied(short, tmp_path):
    """A copy of it."""
    return shutil.copytree(short, tmp_path / "run")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Rollouts of a short run, and overrides to train on them."""
    folder = tmp_path_factory.mktemp("recorded")
    run(folder / "run", f"rollout.save_path={folder / 'rollouts'}", "trainer.max_steps=4")
    return [
        *RECORDED_SHORT,
        "rollout=recorded",
        f"rollout.path={folder / 'rollouts'}",
        "trainer.max_steps=3",
    ]
