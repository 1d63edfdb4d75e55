"""Training on several ranks: the same documents, numbers and weights as one process, in real gloo processes."""

from __future__ import annotations

import zlib
from pathlib import Path
from time import monotonic

import pytest
from builders.parallel_runs import RECORDED, assert_close, run_on_ranks, train_on_rank
from builders.processes import layout, world
from builders.runs import SHORT, config_of
from omegaconf import OmegaConf

from pgtoolkit.errors import ConfigError, PgtoolkitError, RankLost
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.training.build import build, fit
from pgtoolkit.training.recorder import Recorder

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
    OmegaConf.resolve(config)
    (seconds, first), (_, second) = world(2).run(error_on_rank, config, tmp_path, {"data_parallel": 2})
    assert seconds < 30
    assert first == second
    assert first[::2] == (ConfigError, True)
    said = f"rank 0: the run directory {tmp_path} needs a directory without a run (got one with metrics."
    assert first[1].startswith(said)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, ["aggregation=constant", "aggregation.divisor=4", "metrics=with_entropy"]),
        # The four documents of a prompt are on four ranks.
        pytest.param(4, ["loss=grpo", "aggregation=prompt_mean"], marks=pytest.mark.slow),
        (4, ["accumulation.docs_per_step=3", "loss=grpo", "aggregation=token_mean"]),  # one rank gets none
    ],
    ids=["two ranks", "groups over ranks", "less documents than ranks"],
)
def test_data_parallel_ranks_train_as_one_process_does(tmp_path, recorded, size, settings):
    """Every metric of every step; the totals and documents_seen among them."""
    found = run_on_ranks(tmp_path / "ranks", [*recorded, *settings], data_parallel=size)
    assert_close(found, run_on_ranks(tmp_path / "one", [*recorded, *settings]))


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        pytest.param({"data_parallel": 2}, ["parallelism.shard=true"], marks=pytest.mark.slow),
        pytest.param({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"], marks=pytest.mark.slow),
        pytest.param({"sequence_data_parallel": 2}, ["loss=grpo"], marks=pytest.mark.slow),
        ({"pipeline_parallel": 2}, ["metrics=none"]),
        ({"data_parallel": 2, "tensor_parallel": 2}, ["parallelism.shard=true"]),
    ],
    ids=["fsdp", "sequence", "sequence_data", "pipeline", "fsdp of tensor"],
)
def test_every_kind_of_parallelism_trains_as_one_process_does(tmp_path, recorded, sizes, settings):
    found = run_on_ranks(tmp_path / "ranks", [*recorded, *settings], **sizes)
    alone = [setting for setting in settings if not setting.startswith("parallelism")]
    assert_close(found, run_on_ranks(tmp_path / "one", [*recorded, *alone]))


def weights_of_a_run(config, folder: Path) -> list[int]:
    """Checksums of this rank's weights at the start and after the last step."""
    ranks = layout(data_parallel=4)
    module, loader = build(config, layout=ranks)
    found = [digest(module)]
    fit(module, loader, config, Recorder(None, folder, config.trainer, None))
    return [*found, digest(module)]


def digest(module) -> int:
    value = 0
    for tensor in module.model.state_dict().values():
        value = zlib.crc32(tensor.numpy().tobytes(), value)
    return value


def test_the_ranks_hold_bitwise_the_same_weights(tmp_path, recorded):
    config = OmegaConf.to_object(config_of(*recorded, "parallelism.data_parallel=4"))
    digests = world(4).run(weights_of_a_run, config, tmp_path)
    assert digests == [digests[0]] * 4
    assert digests[0][0] != digests[0][1]


def test_rollouts_are_generated_in_shares_and_trained_on_as_a_whole(tmp_path):
    """One process that trains on what two ranks have generated gets the numbers they got."""
    policy = [*SHORT, "aggregation.divisor=4", "trainer.max_steps=4"]
    found = run_on_ranks(tmp_path / "ranks", [*policy, f"rollout.save_path={tmp_path / 'saved'}"], data_parallel=2)
    settings = [*RECORDED, "aggregation=constant", "aggregation.divisor=4", "trainer.max_steps=4"]
    again = ["rollout=recorded", f"rollout.path={tmp_path / 'saved'}", "rollout.shuffle=false"]
    assert_close(found, run_on_ranks(tmp_path / "one", [*settings, *again]))
    source = RecordedRollouts(config_of(*settings, *again).rollout, "dr_grpo", 12, 0, ("group_id",), 64)
    batch = [source.document(position) for position in range(16)]
    assert [document.group for document in batch] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    completions = [document.tokens[4:].tolist() for document in batch]
    assert completions[:4] != completions[4:8]  # each rank draws its own random numbers


def other_data(config, folder: Path) -> str:
    ranks = layout(data_parallel=2)
    module, loader = build(config, layout=ranks)
    if ranks.rank == 1:
        loader._position = 1
    with pytest.raises(RankLost) as caught:
        fit(module, loader, config, Recorder(None, folder, config.trainer, None))
    return str(caught.value)


def test_ranks_that_read_other_documents_say_so(tmp_path, recorded):
    config = OmegaConf.to_object(config_of(*recorded, "parallelism.data_parallel=2"))
    for message in world(2).run(other_data, config, tmp_path):
        assert message.startswith("the documents of step 1 on rank 1 differ from those on rank 0.")
