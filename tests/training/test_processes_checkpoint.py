"""Checkpoints of several ranks: whole or absent, readable by any number of ranks, nothing executed on loading."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders.parallel_runs import assert_close, run_on_ranks
from builders.processes import layout, world
from runs import SHORT, assert_equal, metrics_of, state
from torch.distributed.checkpoint.metadata import Metadata

from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.disk import list_checkpoints
from pgtoolkit.training.sharded_checkpoint import read_tensors, save_shards

SETTINGS = ["aggregation=constant", "aggregation.divisor=4"]


def as_of(step: int, folder: Path, to: Path) -> Path:
    """A copy of a run as a kill after `step` would leave it."""
    shutil.copytree(folder, to)
    for path in list_checkpoints(to / "checkpoints"):
        if int(path.stem.partition("-")[2]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return to


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of several ranks, whole."""
    sizes = {name: found.size for name, found in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    read_tensors(path, lambda _: tensors, ONE_PROCESS)
    return tensors


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, recorded):
    return run_on_ranks(tmp_path_factory.mktemp("two") / "run", [*recorded, *SETTINGS], data_parallel=2)


def test_as_many_ranks_continue_bitwise(tmp_path, recorded, two_ranks):
    again = as_of(1, two_ranks, tmp_path / "again")
    run_on_ranks(again, [*recorded, *SETTINGS], resume=True, data_parallel=2)
    assert metrics_of(again) == metrics_of(two_ranks)
    found, expected = (load_newest(folder / "checkpoints") for folder in (again, two_ranks))
    assert_equal(found | {"path": None}, expected | {"path": None})
    assert_equal(tensors_in(found["path"]), tensors_in(expected["path"]))
    assert found["step"] == 3


def test_rollouts_of_as_many_ranks_continue_bitwise(tmp_path):
    """The batch in use goes on, and the next is drawn with each rank's own random numbers."""
    policy = [*SHORT, "aggregation.divisor=4", "trainer.max_steps=3"]
    whole = run_on_ranks(tmp_path / "whole", policy, data_parallel=2)
    again = as_of(1, whole, tmp_path / "again")
    run_on_ranks(again, policy, resume=True, data_parallel=2)
    assert metrics_of(again) == metrics_of(whole)
    found, expected = (load_newest(folder / "checkpoints") for folder in (again, whole))
    assert_equal(found | {"path": None}, expected | {"path": None})


@pytest.mark.parametrize(
    "sizes", [{}, {"data_parallel": 4}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=["1", "4", "tp", "pp"]
)
def test_another_number_of_ranks_continues(tmp_path, recorded, two_ranks, sizes):
    """Weights, moments, documents_seen and the place in the data go on, whatever the model is cut into."""
    again = as_of(1, two_ranks, tmp_path / "again")
    metrics = ["metrics=none"] if "pipeline_parallel" in sizes else []
    run_on_ranks(again, [*recorded, *SETTINGS, *metrics], resume=True, **sizes)
    rows, others = metrics_of(again), metrics_of(two_ranks)
    assert [row["documents_seen"] for row in rows] == [8, 16, 24]
    for row, other in zip(rows, others, strict=True):
        for name in ("loss", "grad_norm", "new_logprobs", "num_tokens"):
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (row["step"], name)


@pytest.mark.parametrize("shard", ["true", "false"])
def test_the_checkpoint_of_one_process_and_of_shards_is_continued(tmp_path, recorded, shard):
    """One process, then two that share the weights, then one again."""
    run = run_on_ranks(tmp_path / "run", [*recorded, *SETTINGS, "trainer.max_steps=1"])
    settings = [*recorded, *SETTINGS, f"parallelism.shard={shard}", "trainer.max_steps=2"]
    run_on_ranks(run, settings, resume=True, data_parallel=2)
    run_on_ranks(run, [*recorded, *SETTINGS], resume=True)
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [
        "step-000001.ckpt",
        "step-000002",
        "step-000003.ckpt",
    ]
    assert_close(run, run_on_ranks(tmp_path / "one", [*recorded, *SETTINGS]))


def test_a_checkpoint_of_another_model_is_refused(tmp_path, recorded, two_ranks):
    again = as_of(1, two_ranks, tmp_path / "again")
    with pytest.raises(ConfigError, match="does not fit the configured model"):
        run_on_ranks(again, [*recorded, *SETTINGS, "model.hidden_size=64"], resume=True)


def save_steps(folder: Path, steps: list[int], keep: int) -> None:
    ranks = layout(data_parallel=2)
    for step in steps:
        tensors = {"x": torch.full((1000,), float(step)), "y": torch.arange(3.0)}
        save_shards(folder, step, state(step), tensors, keep, ranks)


def test_the_newest_are_kept_and_a_damaged_one_is_passed_over(tmp_path, caplog):
    world(2).run(save_steps, tmp_path, [1, 2, 10, 100], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000100"]
    assert load_newest(tmp_path)["step"] == 100
    assert tensors_in(tmp_path / "step-000100")["x"].unique().tolist() == [100.0]
    largest = max((tmp_path / "step-000100").glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert load_newest(tmp_path)["step"] == 10
    assert "step-000100" in caplog.text
    (tmp_path / "step-000010" / "manifest.json").unlink()
    with pytest.raises(StorageError, match="none of the 2"):
        load_newest(tmp_path)


def die_while_saving(folder: Path, rank: int) -> None:
    import resource

    ranks = layout(data_parallel=2)
    if ranks.rank == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    # Of one tensor for each rank, so that both write.
    tensors = {f"x{number}": torch.zeros(10**6) for number in range(2)}
    save_shards(folder, 2, {"step": 2}, tensors, 1, ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_in_the_middle_of_saving(tmp_path, rank):
    """The kernel kills one rank at byte 100 000 of its file."""
    world(2).run(save_steps, tmp_path, [1], 1)
    with pytest.raises(AssertionError, match=f"rank {rank} of 2: the process ended"):
        world(2).run(die_while_saving, tmp_path, rank)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001"]
    assert load_newest(tmp_path)["step"] == 1
    world(2).run(save_steps, tmp_path, [2], 1)  # over what the killed one left
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def full_disk(folder: Path) -> str:
    import resource

    ranks = layout(data_parallel=2)
    if ranks.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        save_shards(folder, 2, {"step": 2}, {f"x{number}": torch.zeros(10**6) for number in range(2)}, 1, ranks)
    except StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path):
    world(2).run(save_steps, tmp_path, [1], 1)
    for message in world(2).run(full_disk, tmp_path):
        assert "step-000002 cannot be written" in message
    assert load_newest(tmp_path)["step"] == 1


class Malicious:
    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "executed"),)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    world(2).run(save_steps, tmp_path, [1], 1)
    path = tmp_path / "step-000001"
    metadata = dcp.FileSystemReader(path).read_metadata()
    assert isinstance(metadata, Metadata)
    for planted in (Malicious(tmp_path), torch.nn.Linear):
        metadata.planner_data = planted
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(pickle.UnpicklingError, match="has no place in a checkpoint"):
            read_tensors(path, lambda _: {}, ONE_PROCESS)
    assert not (tmp_path / "executed").exists()
