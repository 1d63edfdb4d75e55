"""Tensor parallelism: the matrices of each layer, the embedding and the LM head are divided among
ranks.

Parameters are DTensors, so that sharding on top, checkpoints and the gradient norm know their
global shapes; the forward pass computes with the local parts and names its collectives itself: one
where a block (attention, MLP) begins and one where it ends, whatever the number of its matrices.
Between the blocks every rank holds all tokens, or, with sequence parallelism, its share of them,
along the axis of positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from pgtoolkit.model.architectures import Architecture, Layer, architecture_of
from pgtoolkit.model.fixed_order import in_fixed_order
from pgtoolkit.ranks import collectives
from pgtoolkit.ranks.collectives import local

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard_tensors(
    model: PreTrainedModel, mesh: DeviceMesh, sequence_parallel: bool
) -> set[nn.Parameter]:
    """Divide a transformers causal LM among the ranks of `mesh` (one axis), in place.

    Returns the parameters whose gradients are partial: each rank's backward gives its tokens' or
        its heads' part.
    The model's output is complete on each rank, and so must be the gradient that it gets. With
    sequence_parallel the number of positions must divide by the number of ranks, and the model's
    heads always.
    """
    group, parts = mesh.get_group(), architecture_of(model)
    layers, base = parts.layers_of(model), model.base_model
    partial = set()
    for layer in layers:
        partial |= _shard_layer(layer, parts, mesh, sequence_parallel)
    _shard_vocabulary(model, parts, mesh)
    if sequence_parallel:
        norm = getattr(base, parts.final_norm)
        partial |= set(norm.parameters())
        layers[0].register_forward_pre_hook(
            _on_hidden(lambda x: collectives.piece(x, group, 1)), with_kwargs=True
        )
        # The gradient that comes from the loss is complete on each rank.
        norm.register_forward_hook(
            lambda _module, _arguments, x: collectives.join(x, group, 1, False)
        )
    return partial


def vocabulary_start(vocabulary: int, mesh: DeviceMesh) -> int:
    """The first token id of this rank's shard of the embedding and the head, which are cut as
    torch.chunk cuts."""
    return min(vocabulary, -(-vocabulary // mesh.size()) * mesh.get_local_rank())


def _shard_layer(
    layer: Layer, parts: Architecture, mesh: DeviceMesh, sequence_parallel: bool
) -> set[nn.Parameter]:
    group, attention, partial = mesh.get_group(), layer.get_submodule(parts.attention), set()
    for name in parts.column:
        layer.set_submodule(name, ColumnParallel(layer.get_submodule(name), mesh))
    for name in parts.row:
        matrix = RowParallel(layer.get_submodule(name), mesh, sequence_parallel)
        layer.set_submodule(name, matrix)
        if sequence_parallel and matrix.bias is not None:
            partial.add(matrix.bias)
    for name in parts.fused:
        matrix = FusedHeads(layer.get_submodule(name), group, attention.num_heads)
        layer.set_submodule(name, matrix)
        partial |= set(matrix.parameters())
    if parts.fused:
        attention.split_size //= mesh.size()
    norms = parts.head_norms + (parts.norms if sequence_parallel else ())
    for name, module in layer.named_modules():
        if name in norms:
            partial |= set(module.parameters())
    hook = _on_hidden(lambda x: _block_input(x, group, sequence_parallel))
    for block in (attention, layer.mlp):
        block.register_forward_pre_hook(hook, with_kwargs=True)
    return partial


def _shard_vocabulary(model: PreTrainedModel, parts: Architecture, mesh: DeviceMesh) -> None:
    base: Layer = model.base_model
    head: Layer = model.get_output_embeddings()
    embedding = VocabularyEmbedding(getattr(base, parts.embedding), mesh)
    tied = head.weight is getattr(base, parts.embedding).weight
    setattr(base, parts.embedding, embedding)
    head.weight = embedding.weight if tied else _sharded(head.weight, mesh, 0)
    if head.bias is not None:
        head.bias = _sharded(head.bias, mesh, 0)


def _block_input(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """The input of a block, all tokens of it, for each rank's own heads or columns."""
    if torch.is_autocast_enabled(x.device.type):
        # as the matrices would, but before it is sent
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return collectives.join(x, group, 1, True) if sequence_parallel else collectives.copy(x, group)


def _on_hidden(function):
    """A forward pre-hook that applies `function` to the hidden states, however they are passed."""

    def hook(_module, arguments, keywords):
        if "hidden_states" in keywords:
            return arguments, keywords | {"hidden_states": function(keywords["hidden_states"])}
        return (function(arguments[0]), *arguments[1:]), keywords

    return hook


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh, axis: int) -> nn.Parameter:
    # All ranks hold the same weights, so that each takes its part and nothing is sent.
    return nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(axis)], src_data_rank=None))


class DividedMatrix(nn.Module):
    """A linear layer's weight and bias under their names; transposed: (in, out), as in GPT-2's
    Conv1D.

    resharded: FSDP2 divides them further, and holds this rank's part together only while it is
        used.
    """

    resharded = False

    def __init__(self, layer: Layer):
        super().__init__()
        self.transposed = not isinstance(layer, nn.Linear)
        self.weight: nn.Parameter = layer.weight
        self.bias: nn.Parameter | None = layer.bias
        self._parts: dict[str, _Part] = {}

    def part(self, name: str) -> Tensor:
        """This rank's part of the weight or bias."""
        parameter = getattr(self, name)
        if self.resharded or not isinstance(parameter, DTensor):
            return local(parameter)
        part = self._parts.get(name)
        if part is None or not part.is_of(parameter):
            part = self._parts[name] = _Part(parameter)
        return part.leaf

    def matrix(self) -> Tensor:
        """This rank's (out, in)."""
        weight = self.part("weight")
        return weight.T if self.transposed else weight


class _Part:
    """A rank's part of a sharded parameter as a plain leaf, in the same memory, that hands its
    gradient over.

    DTensor.to_local does so too, at the price of three operations on DTensors for each parameter
    and micro-batch: as long as all that a GPU does for one matrix of a small model.
    """

    def __init__(self, parameter: DTensor):
        self.parameter = parameter
        self.leaf = local(parameter.detach()).requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            self.leaf.register_post_accumulate_grad_hook(self._hand_over)

    def is_of(self, parameter: DTensor) -> bool:
        with torch.no_grad():
            return (
                self.parameter is parameter
                and self.leaf.data_ptr() == parameter.to_local().data_ptr()
            )

    def _hand_over(self, leaf: Tensor) -> None:
        whole = self.parameter
        assert leaf.grad is not None
        if whole.grad is None:
            options = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
            whole.grad = DTensor.from_local(
                leaf.grad, whole.device_mesh, whole.placements, **options
            )
        else:
            local(whole.grad).add_(leaf.grad)
        leaf.grad = None


class ColumnParallel(DividedMatrix):
    """Each rank computes a share of the outputs, from an input that all have."""

    def __init__(self, layer: Layer, mesh: DeviceMesh):
        super().__init__(layer)
        self.weight = _sharded(layer.weight, mesh, 1 if self.transposed else 0)
        if layer.bias is not None:
            self.bias = _sharded(layer.bias, mesh, 0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix(), None if self.bias is None else self.part("bias"))


class RowParallel(DividedMatrix):
    """Each rank computes the part of all outputs that its share of the inputs gives; the sum is
    what comes out.

    by_tokens: a rank gets the sum for its share of the tokens only.
    """

    def __init__(self, layer: Layer, mesh: DeviceMesh, by_tokens: bool):
        super().__init__(layer)
        self.weight = _sharded(layer.weight, mesh, 0 if self.transposed else 1)
        self.group, self.by_tokens = mesh.get_group(), by_tokens

    def forward(self, x: Tensor) -> Tensor:
        part = functional.linear(x, self.matrix())
        out = (
            collectives.sum_piece(part, self.group, 1)
            if self.by_tokens
            else collectives.sum_over(part, self.group)
        )
        return out if self.bias is None else out + self.bias.to(out.dtype)


class FusedHeads(DividedMatrix):
    """Query, key and value of this rank's heads, by a matrix (in, 3 * heads * width) that all ranks
    hold whole.

    A shard of it would be no shard of one tensor, but of three; so it is the work that is divided,
    not the memory.
    """

    def __init__(self, layer: Layer, group: ProcessGroup, num_heads: int):
        super().__init__(layer)
        self.group, self.num_heads = group, num_heads

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return functional.linear(x, self._own(local(self.weight)).T, self._own(local(self.bias)))

    def _own(self, columns: Tensor) -> Tensor:
        """(..., 3 * heads * width) -> (..., 3 * own heads * width)."""
        by_head = columns.unflatten(-1, (3, self.num_heads, -1))
        return by_head.chunk(self.group.size(), -2)[self.group.rank()].flatten(-3)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its share of the vocabulary; the output is
    complete."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.weight = _sharded(cast("nn.Parameter", embedding.weight), mesh, 0)
        self.start = vocabulary_start(embedding.num_embeddings, mesh)
        self.padding, self.group = embedding.padding_idx, mesh.get_group()

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        rows = tokens - self.start
        mine = (rows >= 0) & (rows < len(weight))
        padding = None if self.padding is None else self.padding - self.start
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        part = in_fixed_order(functional.embedding(torch.where(mine, rows, 0), weight, padding))
        return collectives.sum_over(torch.where(mine[..., None], part, 0), self.group)
