"""What the tests of training share."""

import pytest
from builders.parallel_runs import RECORDED
from builders.runs import run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Rollouts of a short run, and overrides to train on them."""
    folder = tmp_path_factory.mktemp("recorded")
    run(folder / "run", f"rollout.save_path={folder / 'rollouts'}", "trainer.max_steps=4")
    return [*RECORDED, "rollout=recorded", f"rollout.path={folder / 'rollouts'}", "trainer.max_steps=3"]
