"""Training on several ranks: the same documents, numbers and weights as one process, in real gloo
processes."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from builders.parallel_runs import assert_runs_close, run_on_ranks, train_on_rank
from builders.processes import world
from builders.runs import SHORT, config_of

from pgtoolkit.errors import ConfigError, PgtoolkitError

pytestmark = pytest.mark.slow  # ranks are processes


def error_on_rank(config, folder: Path, sizes: dict[str, int]) -> tuple:
    began = monotonic()
    try:
        train_on_rank(config, folder, sizes, resume=False)
    except PgtoolkitError as error:
        return monotonic() - began, (type(error), str(error), error.on_all_ranks)


def test_what_rank_0_alone_finds_in_its_way_ends_all_at_once(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    config = config_of(*SHORT, "parallelism.data_parallel=2")
    (seconds, first), (_, second) = world(2).run(
        error_on_rank, config, tmp_path, {"data_parallel": 2}
    )
    assert seconds < 30
    assert first == second
    assert first[::2] == (ConfigError, True)
    said = (
        f"rank 0: the run directory {tmp_path} needs a directory without a run (got one with "
        "metrics."
    )
    assert first[1].startswith(said)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, ["aggregation=constant", "aggregation.divisor=4", "metrics=with_entropy"]),
        # The four documents of a prompt are on four ranks.
        pytest.param(4, ["loss=grpo", "aggregation=prompt_mean"], marks=pytest.mark.slow),
        # one rank gets none
        (4, ["accumulation.docs_per_step=3", "loss=grpo", "aggregation=token_mean"]),
    ],
    ids=["two ranks", "groups over ranks", "less documents than ranks"],
)
def test_data_parallel_ranks_train_as_one_process_does(tmp_path, recorded, size, settings):
    """Every metric of every step; the totals and documents_seen among them."""
    found = run_on_ranks(tmp_path / "ranks", [*recorded, *settings], data_parallel=size)
    assert_runs_close(found, run_on_ranks(tmp_path / "one", [*recorded, *settings]))
