"""An optimizer of the user's own, in PyTorch's form: imported, tried, and with a state that a
checkpoint can hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pgtoolkit.errors import ConfigError
from pgtoolkit.ranks.collectives import local
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.system.report import refusal
from pgtoolkit.training.settings import OptimizerName, OptimizerSettings

Groups = list[dict[str, Any]]
Fields = Mapping[str, Tensor]

_RATE = 0.01
_UPDATES = 4


Make = Callable[[Groups, float], torch.optim.Optimizer]
"""Makes an optimizer from groups of parameters and a learning rate."""


class OfShards(torch.optim.Optimizer):
    """Has an optimizer of the user's own update this rank's part of each sharded weight, as a plain
    tensor.

    groups: of parameters, none of them empty. The user's has to work elementwise.
    """

    def __init__(self, make: Make, groups: Groups, rate: float):
        self._plain: dict[int, nn.Parameter] = {}
        for group in groups:
            for weight in group["params"]:
                self._plain[id(weight)] = nn.Parameter(local(weight.detach()))
        plain = [group | {"params": [*map(self.plain, group["params"])]} for group in groups]
        self.inner = make(plain, rate)
        super().__init__(groups, {"lr": rate})

    def plain(self, weight: Tensor) -> nn.Parameter:
        return self._plain[id(weight)]

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs["lr"] = group["lr"]
            for weight in group["params"]:
                self.plain(weight).grad = None if weight.grad is None else local(weight.grad)
        self.inner.step()
        self.inner.zero_grad()

    def kept(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state of a weight, in the same shards."""
        plain = self.plain(weight)
        return {
            name: _sharded(value, weight) if value.shape == plain.shape else value
            for name, value in self.inner.state.get(plain, {}).items()
        }


def _sharded(part: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor as the sharded tensor, which is as another one is."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def own_optimizer(groups: Groups, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the user's own over groups of parameters, once it has been tried.

    groups: each with its `weight_decay`. Raises ConfigError as `check_own_optimizer` does.
    """
    groups = [group for group in groups if group["params"]]
    is_sharded = any(isinstance(weight, DTensor) for group in groups for weight in group["params"])
    make = check_own_optimizer(settings, is_sharded)
    if is_sharded:
        return OfShards(make, groups, settings.learning_rate)
    return make(groups, settings.learning_rate)


def kept_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> Mapping[str, Tensor]:
    """Return what an optimizer keeps of a weight."""
    if isinstance(optimizer, OfShards):
        return optimizer.kept(weight)
    return optimizer.state.get(weight, {})


def check_own_optimizer(settings: OptimizerSettings, is_sharded: bool = False) -> Make:
    """Return what makes the optimizer of the user's own.

    It is tried on two small weights. Raises ConfigError where it cannot be imported or made, has no
    learning rate of its groups, or keeps something that a checkpoint could not hold; with
    is_sharded also where the update of a part of a weight is another than that of the whole.
    """
    assert settings.name == OptimizerName.custom
    assert settings.path is not None
    path = settings.path
    options = dict(settings.options)
    setting = f"optimizer={path}"
    if "lr" in options:
        raise ConfigError(
            refusal(
                setting=f"optimizer.lr={options['lr']}",
                needs="optimizer.learning_rate",
                got="lr",
                reason="It is what the schedule sets at each update.",
                use=f"optimizer.learning_rate={options['lr']}",
            )
        )
    kind = import_function("optimizer", path, ("params",), ("lr", *options))
    decays = "weight_decay" in inspect.signature(kind).parameters
    default = OptimizerSettings(learning_rate=1.0).weight_decay
    if not decays and settings.weight_decay != default:
        raise ConfigError(
            refusal(
                setting=f"optimizer.weight_decay={settings.weight_decay:g}",
                needs="an optimizer with a parameter weight_decay",
                got=path,
                reason="It would have no effect.",
                use=f"optimizer.weight_decay={default:g}",
            )
        )

    def make(groups: Groups, rate: float) -> torch.optim.Optimizer:
        if not decays:
            groups = [{"params": group["params"]} for group in groups]
        with blaming(setting, ConfigError, "the groups of parameters, when it was made"):
            optimizer = kind(groups, lr=rate, **options)
        is_one = isinstance(optimizer, torch.optim.Optimizer)
        if not is_one or any("lr" not in group for group in optimizer.param_groups):
            raise _refused(
                setting,
                "a class that inherits from torch.optim.Optimizer, whose groups have an lr",
                type(optimizer).__name__,
                "Each update sets the learning rate of its groups.",
            )
        return optimizer

    _try(setting, make)
    if is_sharded:
        _try_parts(setting, make)
    return make


def _refused(setting: str, needs: str, got: str, reason: str) -> ConfigError:
    use = "optimizer=adamw, in Python name='adamw'"
    return ConfigError(refusal(setting, needs, got, reason, use))


class _Trial:
    """Two small weights with an optimizer, and the gradients of some updates."""

    def __init__(self, setting: str, make: Make, rate: float):
        generator = torch.Generator().manual_seed(0)
        shapes = ((3, 4), (5,))
        self.setting = setting
        self.weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.gradients = [
            [torch.randn(shape, generator=generator) for shape in shapes] for _ in range(_UPDATES)
        ]
        self._rate = rate
        self.make(make)

    def make(self, make: Make) -> None:
        """Make the optimizer of the present weights."""
        matrix, vector = self.weights
        self.optimizer = make(
            [
                {"params": [matrix], "weight_decay": 0.01},
                {"params": [vector], "weight_decay": 0.0},
            ],
            self._rate,
        )

    def update(self, first: int, last: int) -> None:
        """Make the updates of these numbers, from 0, without the last one."""
        for number in range(first, last):
            for weight, gradient in zip(self.weights, self.gradients[number], strict=True):
                weight.grad = gradient.clone()
            with blaming(self.setting, ConfigError, "two small weights, in a trial of it"):
                self.optimizer.step()

    @property
    def values(self) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights])


def _try(setting: str, make: Make) -> None:
    """Raise ConfigError for an optimizer whose run could not be resumed to the bit, or that does
    not follow the learning rate."""
    rng = torch.get_rng_state()
    try:
        at_once = _Trial(setting, make, _RATE)
        begin = at_once.values
        at_once.update(0, 1)
        slower = _Trial(setting, make, _RATE)
        for group in slower.optimizer.param_groups:
            group["lr"] = _RATE / 2
        slower.update(0, 1)
        if torch.equal(at_once.values, slower.values) or not at_once.values.isfinite().all():
            moved = "no change" if torch.equal(at_once.values, begin) else "the same update"
            raise _refused(
                setting,
                "updates that follow the learning rate of its groups",
                f"{moved} with half of it",
                "The schedule sets it at each update.",
            )
        at_once.update(1, 2)
        _check_state(setting, at_once)
        resumed = _Trial(setting, make, _RATE)
        with torch.no_grad():
            for weight, value in zip(resumed.weights, at_once.weights, strict=True):
                weight.copy_(value)
        state = [dict(at_once.optimizer.state.get(weight, {})) for weight in at_once.weights]
        load_fields(
            resumed.optimizer,
            {
                weight: {name: value.clone() for name, value in fields.items()}
                for weight, fields in zip(resumed.weights, state, strict=True)
            },
        )
        for trial in (at_once, resumed):
            trial.update(2, _UPDATES)
        if not torch.equal(at_once.values, resumed.values):
            raise _refused(
                setting,
                "a state that is all in its tensors of each weight",
                "other updates from these tensors",
                "A run that is resumed has the weights and these tensors alone.",
            )
    finally:
        torch.set_rng_state(rng)


def _try_parts(setting: str, make: Make) -> None:
    """Raise ConfigError for an optimizer whose update of a half of each weight is not the half of
    its update."""
    at_once = _Trial(setting, make, _RATE)
    at_once.update(0, _UPDATES)
    halves = []
    for half in range(2):
        trial = _Trial(setting, make, _RATE)
        parts = [weight.detach().chunk(2)[half].clone() for weight in trial.weights]
        trial.gradients = [
            [gradient.chunk(2)[half] for gradient in of_update] for of_update in trial.gradients
        ]
        trial.weights = [nn.Parameter(part) for part in parts]
        trial.make(make)
        trial.update(0, _UPDATES)
        halves.append(trial.weights)
    joined = torch.cat([torch.cat(parts).flatten() for parts in zip(*halves, strict=True)])
    if not torch.allclose(at_once.values, joined, rtol=1e-5, atol=1e-7):
        raise _refused(
            setting,
            "updates of single numbers, under parallelism that shards weights",
            "other updates of the halves of two small weights than of the whole",
            "Each rank updates its part of a weight.",
        )


def _check_state(setting: str, trial: _Trial) -> None:
    """Raise ConfigError for a state that is not made of plain tensors by weight."""
    problem = None
    known = {id(weight) for weight in trial.weights}
    for weight, fields in trial.optimizer.state.items():
        if id(weight) not in known:
            problem = f"state of {weight!r:.60}"
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if type(value) is not Tensor or not isinstance(name, str):
                problem = f"{name} of type {type(value).__name__}"
    if problem is not None:
        raise _refused(
            setting,
            "a state of plain tensors by the name of each, for each weight",
            problem,
            "A checkpoint keeps tensors.",
        )


def load_fields(optimizer: torch.optim.Optimizer, fields: Mapping[nn.Parameter, Fields]) -> None:
    """Give an optimizer its state of weights, on the devices on which it keeps it.

    fields: whole tensors, of which a rank with shards keeps its part.
    """
    if isinstance(optimizer, OfShards):
        plain_one = optimizer
        load_fields(
            plain_one.inner,
            {
                plain_one.plain(weight): {
                    name: _part(value, weight) for name, value in of_weight.items()
                }
                for weight, of_weight in fields.items()
            },
        )
        return
    packed = optimizer.state_dict()
    weights: Sequence[nn.Parameter] = [
        weight for group in optimizer.param_groups for weight in group["params"]
    ]
    packed["state"] = {
        number: dict(fields[weight]) for number, weight in enumerate(weights) if fields.get(weight)
    }
    optimizer.load_state_dict(packed)


def _part(complete: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is sharded as a weight of its shape is."""
    if not isinstance(like, DTensor) or complete.shape != like.shape:
        return complete
    complete = complete.to(like.device)
    return local(distribute_tensor(complete, like.device_mesh, like.placements, src_data_rank=None))
