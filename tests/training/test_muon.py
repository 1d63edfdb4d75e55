"""Muon of sharded matrices: each rank makes the update of the whole matrix, and keeps its part."""

import pytest
import torch
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.processes import world
from builders.runs import SHORT, assert_equal, checkpoint_of, copy_as_of, metrics_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pgtoolkit.training.optimizer import WholeMuon

SETTINGS = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
SHAPES = ((5, 3), (4, 6), (1, 7))
"""Of the last one a rank of two has nothing."""


def three_updates(sharded: bool) -> list[list[torch.Tensor]]:
    """Return weights and momenta, whole, after three updates; each rank of a world calls it."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        weights = [distribute_tensor(weight, mesh, [Shard(0)]) for weight in weights]
    weights = [weight.requires_grad_() for weight in weights]
    optimizer = (WholeMuon if sharded else torch.optim.Muon)(weights, **SETTINGS)
    for _ in range(3):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient
        optimizer.step()
    momenta = [optimizer.state[weight]["momentum_buffer"] for weight in weights]
    if sharded:
        assert all(momentum.placements == (Shard(0),) for momentum in momenta)
    return [
        [one.full_tensor() if isinstance(one, DTensor) else one.detach() for one in tensors]
        for tensors in (weights, momenta)
    ]


def compared_with_whole_matrices() -> None:
    assert_equal(three_updates(sharded=True), three_updates(sharded=False))


def test_a_sharded_matrix_gets_the_update_of_the_whole_one_to_the_bit():
    world(2).run(compared_with_whole_matrices)


@pytest.mark.slow
def test_a_sharded_run_trains_as_one_process_does_and_resumes_to_the_bit(tmp_path):
    """Rounding of gradients becomes that of bfloat16 in an orthogonal update."""
    settings = [*SHORT, "optimizer=muon", "trainer.max_steps=3"]
    sharded = [*settings, "parallelism.shard=true"]
    once = "trainer.checkpoint_every=3"
    single = run_on_ranks(tmp_path / "single", [*settings, once])
    ranks = run_on_ranks(tmp_path / "ranks", sharded, data_parallel=2)
    assert_runs_close(ranks, single, 2e-3)
    resumed = copy_as_of(ranks, 1, tmp_path / "resumed")
    run_on_ranks(resumed, sharded, resume=True, data_parallel=2)
    for step in (2, 3):
        assert_equal(checkpoint_of(resumed, step), checkpoint_of(ranks, step))
    losses = [[row["loss"] for row in metrics_of(folder)] for folder in (resumed, ranks)]
    assert losses[0] == losses[1]
    plain = [*settings, "metrics=none", once]
    staged = [*plain, "parallelism.pipeline_parallel=2"]
    assert_runs_close(
        run_on_ranks(tmp_path / "staged", staged, pipeline_parallel=2),
        run_on_ranks(tmp_path / "plain", plain),
        2e-3,
    )
