"""AdamW and Muon over sharded parameters, and their learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import StateDict

from pgtoolkit.errors import ConfigError
from pgtoolkit.model.lora import trains_experts
from pgtoolkit.model.misfits import cannot_update_by_muon
from pgtoolkit.ranks.collectives import local
from pgtoolkit.system.declared import Dictionary
from pgtoolkit.training.own_optimizer import Groups, own_optimizer
from pgtoolkit.training.settings import OptimizerName, OptimizerSettings, Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Closure = Callable[[], object]


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's part of each sharded parameter as a plain tensor.

    The update is elementwise, so the result is the same. Plain tensors are updated many at a time,
    DTensors only one by one. The optimizer's state stays sharded like the parameters.
    """

    def _init_group(self, group: dict[str, object], *tensor_lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = map(local, tensors)
        return has_complex


class WholeMuon(torch.optim.Muon):
    """Muon that gathers each sharded matrix: the orthogonal update of a part is another one.

    Every rank of the matrix makes the same update of it, and keeps its own part. The optimizer's
    state stays sharded like the parameters.
    """

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        super().step(closure)  # of matrices that are not sharded
        for group in self.param_groups:
            settings = {name: group[name] for name in self.defaults}
            for matrix in _sharded(group["params"]):
                self._update(matrix, settings)

    def _init_group(self, group: Dictionary, *tensor_lists: list[Tensor]) -> bool:
        plain = [weight for weight in group["params"] if not isinstance(weight, DTensor)]
        return super()._init_group(group | {"params": plain}, *tensor_lists)

    def _update(self, matrix: DTensor, settings: Dictionary) -> None:
        """Make the update of a sharded matrix. settings: the arguments of Muon."""
        assert isinstance(matrix.grad, DTensor)
        complete = nn.Parameter(matrix.full_tensor())
        complete.grad = matrix.grad.full_tensor()
        muon = torch.optim.Muon([complete], **settings)
        state = self.state[matrix]
        for name, part in state.items():
            muon.state[complete][name] = part.full_tensor()
        muon.step()
        for name, value in muon.state[complete].items():
            state[name] = _part(value, matrix)
        matrix.copy_(_part(complete, matrix))


def _sharded(weights: Iterable[Tensor]) -> Iterator[DTensor]:
    """Yield the weights of which this rank has a part, and that have a gradient."""
    for weight in weights:
        if isinstance(weight, DTensor) and weight.grad is not None:
            yield weight


def _part(complete: Tensor, like: DTensor) -> DTensor:
    """Return a tensor that each rank has, sharded like another one."""
    return distribute_tensor(
        complete.detach(), like.device_mesh, like.placements, src_data_rank=None
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon of some matrices, and AdamW of all other weights, in the form of one optimizer.

    Both have their own groups of parameters, and one state.
    """

    def __init__(self, muon: WholeMuon, adamw: LocalAdamW):
        self._parts = (muon, adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._matrices = {id(p) for group in muon.param_groups for p in group["params"]}
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for part in self._parts:
            part.step()

    def updates_by_muon(self, weight: Tensor) -> bool:
        return id(weight) in self._matrices


def make_optimizer(model: PreTrainedModel, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of a model.

    Those with fewer than two dimensions (norms, biases) have no weight decay. Raises ConfigError
    for weights that the optimizer cannot update.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.name == OptimizerName.adamw:
        betas = settings.beta1, settings.beta2
        return _adamw(parameters, settings, betas=betas, eps=settings.epsilon)
    if settings.name == OptimizerName.custom:
        return own_optimizer(_groups(parameters, settings), settings)
    problem = cannot_update_by_muon(trains_experts(model))
    if problem:
        raise ConfigError(problem)
    matrices = _hidden_matrices(model)
    of_muon = [p for p in parameters if id(p) in matrices]
    others = _adamw([p for p in parameters if id(p) not in matrices], settings)
    if not of_muon:
        return others
    muon = WholeMuon(
        of_muon,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate suits both
    )
    return MuonAndAdamW(muon, others)


def _groups(parameters: list[nn.Parameter], settings: OptimizerSettings) -> Groups:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings, **more: Any) -> LocalAdamW:
    # Fused, it is one kernel instead of a dozen.
    on_gpu = bool(parameters) and parameters[0].is_cuda
    groups = _groups(parameters, settings)
    return LocalAdamW(groups, lr=settings.learning_rate, fused=on_gpu, **more)


def _hidden_matrices(model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights of two dimensions that are neither of an embedding nor of the
    head."""
    head = model.get_output_embeddings()
    at_the_ends = {
        id(p)
        for module in model.modules()
        if module is head or isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    matrices = {id(p) for p in model.parameters() if p.ndim == 2}
    return matrices - at_the_ends


def fields_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> tuple[str, ...] | None:
    """Return the names of an optimizer's tensors of a weight once it has updated it; None where
    only the optimizer knows, which is one of the user's own.

    They are in the optimizer's order. So a resumed run divides tensors into files as a run that was
    never stopped.
    """
    if isinstance(optimizer, MuonAndAdamW) and optimizer.updates_by_muon(weight):
        return ("momentum_buffer",)
    is_ours = isinstance(optimizer, MuonAndAdamW | LocalAdamW)
    return ("step", "exp_avg", "exp_avg_sq") if is_ours else None


class LearningRate(torch.optim.lr_scheduler.LRScheduler):
    """The learning rate of each update, in PyTorch's form, which callbacks look for.

    PyTorch's own schedulers multiply a base, which changes the last bits.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, max_steps: int
    ):
        self._settings = settings
        self._max_steps = max_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        rate = learning_rate(self._settings, self.last_epoch, self._max_steps)
        return [rate for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, object]:
        """Return the number of the update whose rate is set; the settings are the module's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.set(state_dict["last_epoch"])

    def set(self, num_updates: int) -> float:
        """Set the rate of update number `num_updates` (from 0), and return it."""
        self.last_epoch = num_updates
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates
        return float(rates[0])


def learning_rate(settings: OptimizerSettings, num_updates: int, max_steps: int) -> float:
    """Return the learning rate of update number `num_updates` (from 0).

    It rises linearly during the warm-up. Then it stays, or decays to the least one at `max_steps`,
    the number of updates that the weights get in the run.
    """
    if num_updates < settings.warmup_steps:
        return settings.learning_rate * (num_updates + 1) / settings.warmup_steps
    updates_after_warmup = num_updates - settings.warmup_steps
    progress = min(1.0, updates_after_warmup / max(1, max_steps - settings.warmup_steps))
    least = settings.min_learning_rate
    if settings.schedule == Schedule.linear:
        return least + (settings.learning_rate - least) * (1.0 - progress)
    if settings.schedule == Schedule.cosine:
        above = (settings.learning_rate - least) * 0.5
        return least + above * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate
