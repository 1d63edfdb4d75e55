"""An optimizer of the user's own: what is refused before a run starts."""

import pytest
import torch
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.processes import world
from builders.runs import SHORT, assert_equal, checkpoint_of, copy_as_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD

from pgtoolkit.errors import ConfigError
from pgtoolkit.training.own_optimizer import (
    check_own_optimizer,
    kept_of,
    load_fields,
    own_optimizer,
)
from pgtoolkit.training.settings import OptimizerName, OptimizerSettings


class Counting(SGD):
    """Keeps a count of its own beside its tensors."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["momentum"] = 0.1 * self.count
        super().step(closure)


class InNumbers(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] = state.get("step", 0) + 1
        super().step(closure)


class ByChance(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad *= torch.rand(())
        super().step(closure)


class OwnRate(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= 0.01 * weight.grad


class NoOptimizer:
    def __init__(self, params, lr):
        self.rate = lr


HERE = "training.test_own_optimizer"


def settings_of(path: str, weight_decay: float = 0.01, **options: object) -> OptimizerSettings:
    """Return the settings of an optimizer of one's own. options: values of its parameters."""
    return OptimizerSettings(
        name=OptimizerName.custom,
        learning_rate=1e-3,
        weight_decay=weight_decay,
        path=path,
        options=options,
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            settings_of(f"{HERE}.Counting"),
            "needs a state that is all in its tensors of each weight (got other updates",
        ),
        (
            settings_of(f"{HERE}.ByChance"),
            "needs a state that is all in its tensors of each weight (got other updates",
        ),
        (
            settings_of(f"{HERE}.InNumbers"),
            "needs a state of plain tensors by the name of each, for each weight (got step of type",
        ),
        (
            settings_of(f"{HERE}.OwnRate"),
            "needs updates that follow the learning rate of its groups (got the same update with",
        ),
        (
            settings_of(f"{HERE}.NoOptimizer"),
            "needs a class that inherits from torch.optim.Optimizer, whose groups have an lr",
        ),
        (settings_of("torch.optim.LBFGS"), "LBFGS doesn't support per-parameter options"),
        (settings_of("torch.optim.SGD", lr=3), "Use optimizer.learning_rate=3."),
        (
            settings_of("torch.optim.Rprop", weight_decay=0.1),
            "needs an optimizer with a parameter weight_decay (got torch.optim.Rprop)",
        ),
    ],
)
def test_an_optimizer_that_a_run_could_not_continue_or_lead_is_refused(settings, problem):
    with pytest.raises(ConfigError) as refused:
        check_own_optimizer(settings)
    assert problem in str(refused.value)


class ByNorm(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad /= weight.grad.norm()
        super().step(closure)


def test_one_that_does_not_work_elementwise_is_refused_where_weights_are_sharded():
    settings = settings_of(f"{HERE}.ByNorm")
    check_own_optimizer(settings)
    with pytest.raises(ConfigError, match="needs updates of single numbers, under parallelism"):
        check_own_optimizer(settings, is_sharded=True)


def three_updates(sharded: bool) -> list[list[torch.Tensor]]:
    """Return weights and what RMSprop keeps of them, whole; each rank of a world calls it.

    Its state is taken after two updates, and given to a new one.
    """
    settings = settings_of("torch.optim.RMSprop", momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((5, 3), (1, 7), (3,))]
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        weights = [distribute_tensor(weight, mesh, [Shard(0)]) for weight in weights]
    weights = [torch.nn.Parameter(weight) for weight in weights]
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:]}]

    def made() -> torch.optim.Optimizer:
        optimizer = own_optimizer([dict(group) for group in groups], settings)
        for group in optimizer.param_groups:
            group["lr"] = 0.03
        return optimizer

    optimizer = made()
    for number in range(3):
        if number == 2:
            kept = [kept_of(optimizer, weight) for weight in weights]
            whole = [{name: whole_of(value) for name, value in one.items()} for one in kept]
            optimizer = made()
            load_fields(optimizer, dict(zip(weights, whole, strict=True)))
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient
        optimizer.step()
    state = [whole_of(value) for weight in weights for value in kept_of(optimizer, weight).values()]
    assert len(state) == 9
    return [[whole_of(weight) for weight in weights], state]


def whole_of(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def compared_with_whole_weights() -> None:
    assert_equal(three_updates(sharded=True), three_updates(sharded=False))


def test_a_sharded_weight_gets_the_update_of_the_whole_one_to_the_bit():
    world(2).run(compared_with_whole_weights)


@pytest.mark.slow
def test_a_sharded_run_resumes_to_the_bit(tmp_path):
    own = ("optimizer=torch.optim.RMSprop", "optimizer.momentum=0.9", "trainer.max_steps=3")
    settings = [*SHORT, *own, "parallelism.shard=true"]
    whole = run_on_ranks(tmp_path / "whole", settings, data_parallel=2)
    assert_runs_close(
        whole, run_on_ranks(tmp_path / "single", [*SHORT, *own, "trainer.checkpoint_every=3"])
    )
    resumed = copy_as_of(whole, 1, tmp_path / "resumed")
    run_on_ranks(resumed, settings, resume=True, data_parallel=2)
    for step in (2, 3):
        assert_equal(checkpoint_of(resumed, step), checkpoint_of(whole, step))


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adagrad", "RMSprop", "Adadelta", "ASGD"])
def test_optimizers_of_pytorch_are_accepted(name):
    state = torch.get_rng_state()
    check_own_optimizer(settings_of(f"torch.optim.{name}"))
    assert torch.equal(torch.get_rng_state(), state)
