"""Checkpoints of several ranks are complete or absent, and any number of ranks can read them.

What is loaded and saved again is compared bit for bit; the kernel kills a rank in mid-file.
"""

from __future__ import annotations

import math
import resource
import signal
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import load_and_save, run_on_ranks
from builders.processes import layout, world
from builders.runs import (
    assert_equal,
    checkpoint_of,
    checkpoint_state,
    config_of,
    copy_as_of,
    metrics_of,
    with_model,
)
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from pgtoolkit.errors import StorageError
from pgtoolkit.training.checkpoint import (
    MOMENTS,
    WEIGHTS,
    list_checkpoints,
    load_newest,
    save_checkpoint,
)

pytestmark = pytest.mark.slow  # ranks are processes

SETTINGS = ["aggregation=constant", "aggregation.divisor=4", "trainer.checkpoint_every=1"]


@pytest.fixture(scope="module")
def run_of_two_ranks(tmp_path_factory, recorded) -> Path:
    """Return a run of three steps."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return run_on_ranks(folder, [*recorded, *SETTINGS], data_parallel=2)


@pytest.fixture(scope="module")
def run_of_one_process(tmp_path_factory, recorded) -> Path:
    """Return a run of two steps."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return run_on_ranks(folder, [*recorded, *SETTINGS, "trainer.max_steps=2"])


def parallelism(sizes: dict[str, int]) -> list[str]:
    return [f"parallelism.{axis}={size}" for axis, size in sizes.items()]


@pytest.mark.parametrize(
    "sizes", [{"data_parallel": 4}, {"pipeline_parallel": 2}], ids=["data", "pipeline"]
)
def test_another_number_of_ranks_continues(tmp_path, recorded, run_of_two_ranks, sizes):
    """Weights, moments, documents_seen and the position in the data are those of two ranks."""
    continued = copy_as_of(run_of_two_ranks, 1, tmp_path / "continued")
    metrics = ["metrics=none"] if "pipeline_parallel" in sizes else []
    run_on_ranks(continued, [*recorded, *SETTINGS, *metrics], resume=True, **sizes)
    rows = metrics_of(continued)
    assert [row["documents_seen"] for row in rows] == [8, 16, 24]
    for row, expected in zip(rows, metrics_of(run_of_two_ranks), strict=True):
        for name in ("loss", "grad_norm", "new_logprobs", "num_tokens"):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (
                row["step"],
                name,
            )


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"data_parallel": 2}, ["parallelism.shard=false"]),
        ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"]),
        ({"sequence_data_parallel": 2}, []),
        ({"pipeline_parallel": 2}, ["metrics=none"]),
        ({"data_parallel": 2, "tensor_parallel": 2}, ["parallelism.shard=true"]),
        ({"data_parallel": 2, "pipeline_parallel": 2}, ["parallelism.shard=true", "metrics=none"]),
    ],
    ids=[
        "data",
        "sequence",
        "sequence_data",
        "pipeline",
        "fsdp of tensor",
        "fsdp of pipeline",
    ],
)
def test_ranks_save_a_checkpoint_of_one_process_again_bit_for_bit(
    tmp_path, recorded, run_of_one_process, sizes, settings
):
    """Weights and moments, and the model as transformers reads it."""
    run = copy_as_of(run_of_one_process, 2, tmp_path / "run")
    before = checkpoint_of(run, 2)
    path = run / "checkpoints" / "step-000002"
    model = AutoModelForCausalLM.from_pretrained(path).state_dict()
    config = (path / "config.json").read_text()
    divided = config_of(*recorded, *SETTINGS, *settings, *parallelism(sizes))
    size = math.prod(sizes.values())

    world(size).run(load_and_save, divided, run, sizes)

    files = {
        file.name.removesuffix("-00001.safetensors") for file in path.glob("model*.safetensors")
    }
    assert files == {f"model-{rank + 1:05d}" for rank in range(size)}  # each rank wrote a file
    after = checkpoint_of(run, 2)
    assert_equal(after["model"], before["model"])
    assert_equal(after["optimizer"], before["optimizer"])
    assert len(after["model"]) == len(model)
    assert len(after["optimizer"]) == 3 * len(model)
    assert_equal(AutoModelForCausalLM.from_pretrained(path).state_dict(), model)
    assert (path / "config.json").read_text() == config


def test_a_tied_head_is_one_matrix_on_any_number_of_ranks(tmp_path, recorded):
    save_with_tokenizer(
        small_llama(num_hidden_layers=2, tie_word_embeddings=True), tmp_path / "base"
    )
    settings = with_model(tmp_path / "base", *SETTINGS, of=recorded)
    run = run_on_ranks(tmp_path / "run", [*settings, "trainer.max_steps=1"])
    before = checkpoint_of(run, 1)
    assert [name for name in before["model"] if "embed" in name or "head" in name] == [
        "model.embed_tokens.weight"
    ]
    for sizes, shard in (
        ({"data_parallel": 2, "tensor_parallel": 2}, "true"),
        ({"tensor_parallel": 2}, "false"),
    ):
        config = config_of(*settings, *parallelism(sizes), f"parallelism.shard={shard}")
        world(math.prod(sizes.values())).run(load_and_save, config, run, sizes)
        after = checkpoint_of(run, 1)
        assert_equal(after["model"], before["model"])
        assert_equal(after["optimizer"], before["optimizer"])
        model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000001")
        assert torch.equal(model.lm_head.weight, before["model"]["model.embed_tokens.weight"])


def save_steps(folder: Path, steps: list[int], keep: int) -> None:
    ranks = layout(data_parallel=2)
    for step in steps:
        tensors = {"x": torch.full((1000,), float(step)), "y": torch.arange(3.0)}
        save_checkpoint(
            folder, checkpoint_state(step), {WEIGHTS: tensors}, lambda folder: None, keep, ranks
        )


def save_large(folder: Path) -> None:
    """Save a checkpoint of 16 MB to which both ranks contribute until its end.

    It has a tensor for each rank to write, and each rank has a part of every tensor.
    """
    ranks = layout(data_parallel=2)
    mesh = ranks.mesh["data_parallel"]
    tensors = {
        f"x{number}": distribute_tensor(torch.zeros(10**6), mesh, [Shard(0)]) for number in range(2)
    }
    save_checkpoint(
        folder,
        checkpoint_state(2),
        {WEIGHTS: tensors, MOMENTS: tensors},
        lambda folder: None,
        1,
        ranks,
    )


def save_until_killed(folder: Path, rank: int) -> None:
    """Save while the kernel kills a rank at byte 100 000 of its file."""
    if layout(data_parallel=2).rank == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    save_large(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint(tmp_path, rank):
    world(2).run(save_steps, tmp_path, [1], 1)
    with pytest.raises(AssertionError, match=f"rank {rank} of 2: the process ended by SIGXFSZ"):
        world(2).run(save_until_killed, tmp_path, rank)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001"]
    assert load_newest(tmp_path)["step"] == 1
    world(2).run(save_steps, tmp_path, [2], 1)  # removes the files of the killed rank
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def error_of_full_disk(folder: Path) -> str:
    """Return the error on this rank where rank 1 cannot write beyond byte 100 000 of a file."""
    if layout(data_parallel=2).rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(StorageError) as refused:
            save_large(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(refused.value)


def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path):
    world(2).run(save_steps, tmp_path, [1], 1)
    for message in world(2).run(error_of_full_disk, tmp_path):
        assert "rank 1: the checkpoint" in message
        assert "step-000002 cannot be written" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_newest(tmp_path)["step"] == 1
