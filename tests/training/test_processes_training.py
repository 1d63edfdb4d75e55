"""Several ranks train on the same documents to the same numbers as one process does.

The ranks are processes with gloo; the reference is a run of one process.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from builders.parallel_runs import assert_runs_close, run_on_ranks, train_on_rank
from builders.processes import world
from builders.runs import SHORT, config_of, metrics_of

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, PgtoolkitError

pytestmark = pytest.mark.slow  # ranks are processes


def error_on_rank(
    config: Config, folder: Path, sizes: dict[str, int]
) -> tuple[type, str, bool, float]:
    """Return the error that ends a run on this rank: type, message, whether it is on all ranks,
    and the seconds until it came."""
    began = monotonic()
    with pytest.raises(PgtoolkitError) as raised:
        train_on_rank(config, folder, sizes, resume=False)
    error = raised.value
    return type(error), str(error), error.on_all_ranks, monotonic() - began


def test_a_refusal_on_rank_0_alone_ends_every_rank_before_its_timeout(tmp_path):
    """Rank 1 would otherwise wait for rank 0 until the collectives' timeout of 60 seconds."""
    (tmp_path / "metrics.jsonl").touch()
    config = config_of(*SHORT, "parallelism.data_parallel=2")
    errors = world(2).run(error_on_rank, config, tmp_path, {"data_parallel": 2})
    for kind, message, on_all_ranks, seconds in errors:
        assert kind is ConfigError
        assert message.startswith(
            f"rank 0: the run directory {tmp_path} needs a directory without a run (got one with "
            "metrics."
        )
        assert message == errors[0][1]
        assert on_all_ranks
        assert seconds < 30


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, ["aggregation=constant", "aggregation.divisor=4", "metrics=with_entropy"]),
        # The four documents of a prompt are on four ranks.
        (4, ["loss=grpo", "aggregation=balanced", "entropy.coefficient=0.1"]),
        # One rank gets no document.
        (4, ["accumulation.docs_per_step=3", "aggregation=token_mean", "entropy.top_fraction=0.4"]),
    ],
    ids=["two ranks", "groups over ranks", "fewer documents than ranks"],
)
def test_data_parallel_ranks_train_as_one_process_does(tmp_path, recorded, size, settings):
    """Every metric of every step; the totals and documents_seen among them."""
    on_ranks = run_on_ranks(tmp_path / "ranks", [*recorded, *settings], data_parallel=size)
    in_one_process = run_on_ranks(tmp_path / "one", [*recorded, *settings])
    assert_runs_close(on_ranks, in_one_process)


@pytest.mark.parametrize("shard", ["false", "true"])
def test_ranks_whose_completions_share_prompts_train_as_one_process_without(tmp_path, shard):
    """Completions are sampled; a critic and a reference in the rewards score them. Each step has
    two groups, of which each rank gets one."""
    settings = [
        *SHORT,
        *("trainer.max_steps=3", "advantage=gae", "rollout.passes=2", "kl=k3"),
        *("kl.place=reward", "kl.reference=initial", "kl.coefficient=0.1"),
        "trainer.checkpoint_every=3",
    ]
    sharing = ["model.share_prompts=true", f"parallelism.shard={shard}"]
    on_ranks = run_on_ranks(tmp_path / "ranks", [*settings, *sharing], data_parallel=2)
    in_one_process = run_on_ranks(tmp_path / "one", settings)
    rows, expected = map(metrics_of, (on_ranks, in_one_process))
    assert [row["num_micro_batches"] for row in rows] == [1] * 3
    assert min(row["num_micro_batches"] for row in expected) > 1
    assert_runs_close(on_ranks, in_one_process)
