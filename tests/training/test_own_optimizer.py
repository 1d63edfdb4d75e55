"""An optimizer of the user's own: what is refused before a run starts."""

import pytest
import torch
from builders.runs import config_of
from torch.optim import SGD

from pgtoolkit.errors import ConfigError
from pgtoolkit.training.own_optimizer import check_own_optimizer


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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [f"optimizer={HERE}.Counting"],
            "needs a state that is all in its tensors of each weight (got other updates",
        ),
        (
            [f"optimizer={HERE}.ByChance"],
            "needs a state that is all in its tensors of each weight (got other updates",
        ),
        (
            [f"optimizer={HERE}.InNumbers"],
            "needs a state of plain tensors by the name of each, for each weight (got step of type",
        ),
        (
            [f"optimizer={HERE}.OwnRate"],
            "needs updates that follow the learning rate of its groups (got the same update with",
        ),
        (
            [f"optimizer={HERE}.NoOptimizer"],
            "needs a class that inherits from torch.optim.Optimizer, whose groups have an lr",
        ),
        (["optimizer=torch.optim.LBFGS"], "LBFGS doesn't support per-parameter options"),
        (["optimizer=torch.optim.SGD", "optimizer.lr=3"], "Use optimizer.learning_rate=3."),
        (
            ["optimizer=torch.optim.Rprop", "optimizer.weight_decay=0.1"],
            "needs an optimizer with a parameter weight_decay (got torch.optim.Rprop)",
        ),
    ],
)
def test_an_optimizer_that_a_run_could_not_continue_or_lead_is_refused(overrides, problem):
    with pytest.raises(ConfigError) as refused:
        check_own_optimizer(config_of(*overrides).optimizer)
    assert problem in str(refused.value)


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adagrad", "RMSprop", "Adadelta", "ASGD"])
def test_optimizers_of_pytorch_are_accepted(name):
    state = torch.get_rng_state()
    check_own_optimizer(config_of(f"optimizer=torch.optim.{name}").optimizer)
    assert torch.equal(torch.get_rng_state(), state)
