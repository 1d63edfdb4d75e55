"""A mixture of experts: each token passes the few experts that its layer's router has chosen.

transformers computes the choice, and calls `experts` with it. Tokens are sorted by expert, so that
each expert is one product; the way there and back is a permutation, whose backward pass is the
permutation back. Nothing is added up in an order that could change.

Axes: T tokens, k experts of a token, E experts, H hidden size, F width of an expert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.model import lora
from pgtoolkit.model.architectures import (
    Layer,
    architecture_of,
    has_experts,
    is_known,
    is_mixture,
)
from pgtoolkit.model.rowwise import type_of_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pgtoolkit"
"""The name of `experts` in transformers."""

_ALIGNED = 8
"""Numbers in bfloat16 that PyTorch's grouped product needs rows to be a multiple of."""


def register() -> None:
    """Make `experts` known to transformers, in this process."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def switch_on(model: PreTrainedModel) -> None:
    """Make a transformers model of a known type use `experts`, if it is a mixture, in place."""
    if model.config.model_type == "qwen3_moe":
        register()
        model.set_experts_implementation(NAME)


def experts(module: Layer, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each token's experts, (T, H), each times its weight.

    module: holds `gate_up_proj` (E, 2 F, H) and `down_proj` (E, H, F), and `act_fn`. Under autocast
        they are multiplied in its type, as linear layers are.
    hidden: (T, H). chosen: (T, k) int64, different experts for each token. weights: (T, k).
    """
    dtype = type_of_products(hidden, module.gate_up_proj)
    x = hidden.to(dtype)
    gate_and_up = _Matrices(module, "gate_up_proj", dtype)
    down = _Matrices(module, "down_proj", dtype)
    waits = x.is_cuda and not (gate_and_up.have_kernel and down.have_kernel)
    if waits and torch.cuda.is_current_stream_capturing():
        # The host would have to know how many tokens an expert has, which a graph cannot ask for.
        every = down.of_all(_gated(module, gate_and_up.of_all(x)))
        places = chosen[..., None].expand(-1, -1, every.shape[2])
        of_token = every.transpose(0, 1).gather(1, places)
    else:
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(order), device=order.device)
        back = torch.empty_like(order).scatter_(0, order, numbers)
        every_expert = torch.arange(len(module.down_proj), device=order.device)
        ends = torch.searchsorted(by_expert, every_expert, right=True)
        copies = x[:, None].expand(*chosen.shape, x.shape[1]).reshape(-1, x.shape[1])
        sent = _Permuted.apply(copies, order, back)
        gated = _gated(module, gate_and_up.of_own(sent, ends))
        out = _Permuted.apply(down.of_own(gated, ends), back, order)
        of_token = out.view(*chosen.shape, -1)
    return (of_token * weights[..., None]).sum(1).to(hidden.dtype)


def _gated(module: Layer, gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return module.act_fn(gate) * up


class _Matrices:
    """A matrix W of each expert, and beside it the matrices A and B of LoRA where it has them.

    module: the experts of a layer. name: that of their matrix. dtype: the type of the products.
    """

    def __init__(self, module: Layer, name: str, dtype: torch.dtype):
        self._weight = getattr(module, name).to(dtype)
        self._adapter = None
        layer = lora.adapters_of_experts(module).get(name)
        if layer is not None and not layer.disable_adapters:
            a, b, self._factor = lora.factors(layer)
            self._adapter = (a.to(dtype), b.to(dtype).contiguous())

    @property
    def have_kernel(self) -> bool:
        return _has_kernel(self._weight, *(self._adapter or ()))

    def of_all(self, rows: Tensor) -> Tensor:
        """Return rows (n, in), or (E, n, in), times the matrix of every expert, (E, n, out)."""
        return self._multiplied(rows, lambda rows, weights: rows @ weights.transpose(1, 2))

    def of_own(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return rows (n, in), sorted by expert, times the matrix of their own, (n, out).

        ends: (E,) int64, the end of each expert's rows.
        """
        return self._multiplied(rows, lambda rows, weights: _by_expert(rows, weights, ends))

    def _multiplied(self, rows: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        out = multiply(rows, self._weight)
        if self._adapter is None:
            return out
        a, b = self._adapter
        return out + multiply(multiply(rows, a), b) * self._factor


def _has_kernel(*weights: Tensor) -> bool:
    """Return whether PyTorch has the products of experts with these weights as one kernel."""
    return all(
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and all(size % _ALIGNED == 0 for size in weight.shape[1:])
        for weight in weights
    )


def _by_expert(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return (n, out): rows times their expert's matrix.

    rows: (n, in), sorted by expert. weights: (E, out, in). ends: (E,) int64, the end of each
    expert's rows.
    """
    if _has_kernel(weights):
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends.int())
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = zip(rows.split(counts), weights, strict=True)
    return torch.cat([part @ weight.T for part, weight in parts])


class _Permuted(torch.autograd.Function):
    """Rows in another order; PyTorch's indexing would add up gradients as if rows were repeated."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


def save_published(model: PreTrainedModel, folder: Path) -> None:
    """Write a model of any type to a folder, its weights under the names of published models."""
    if has_experts(model):
        # transformers would write the names that it has read, which a checkpoint's are not.
        vars(model).pop("_weight_conversions", None)
    model.save_pretrained(folder)


def routers(model: PreTrainedModel) -> list[Layer]:
    """Return the routers of a mixture of a known type, one for each layer that has experts; [] for
    another model."""
    if not is_known(model) or architecture_of(model).positions is not None:
        return []
    return [
        layer.mlp.gate for layer in architecture_of(model).layers_of(model) if is_mixture(layer)
    ]


@contextlib.contextmanager
def told_of_choices(model: PreTrainedModel, tell: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block, call `tell` with each choice: the router's number, and (T, k) int64."""

    def hook(number: int) -> Callable[..., None]:
        return lambda _router, _inputs, outputs: tell(number, outputs[2])

    handles = [
        router.register_forward_hook(hook(number)) for number, router in enumerate(routers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def choices(model: PreTrainedModel, compute: Callable[[], object]) -> Tensor:
    """Return the experts that the routers choose while `compute` passes T tokens through the model,
    (routers, T, k) int64."""
    of_routers: list[Tensor] = []
    with told_of_choices(model, lambda _, chosen: of_routers.append(chosen)):
        compute()
    return torch.stack(of_routers)


def num_others(chosen: Tensor, others: Tensor) -> int:
    """Return how many choices of experts are other ones than those of the same token and router, in
    whatever order.

    Both: (..., k).
    """
    is_there = (chosen[..., None] == others[..., None, :]).any(-1)
    return int((~is_there).any(-1).sum())
