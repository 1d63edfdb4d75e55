"""Tensor parallelism: the matrices of each layer, the embedding and the LM head are divided among
ranks.

Parameters are DTensors, so that sharding on top, checkpoints and the gradient norm know their
global shapes. The forward pass computes with the local parts and calls its collectives itself: one
where a block (attention, MLP) begins and one where it ends, whatever the number of its matrices.
Between the blocks every rank holds all tokens or, with sequence parallelism, its share of them
along the axis of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

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

    Returns the parameters whose gradients are partial: each rank's backward pass gives the part of
    its tokens or heads. The model's output is complete on each rank, and so must be the gradient
    that it gets. The number of heads must be a multiple of the number of ranks, and with
    sequence_parallel the number of positions, too.
    """
    group = mesh.get_group()
    parts = architecture_of(model)
    layers = parts.layers_of(model)
    base = model.base_model
    partial: set[nn.Parameter] = set()
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
    """Return the first token id of this rank's shard of the embedding and the head, which are cut
    as torch.chunk cuts."""
    return min(vocabulary, -(-vocabulary // mesh.size()) * mesh.get_local_rank())


def _shard_layer(
    layer: Layer, parts: Architecture, mesh: DeviceMesh, sequence_parallel: bool
) -> set[nn.Parameter]:
    """Divide a layer in place, and return its parameters whose gradients are partial."""
    group = mesh.get_group()
    attention = layer.get_submodule(parts.attention)
    partial: set[nn.Parameter] = set()
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
    norms = parts.head_norms
    if sequence_parallel:
        norms += parts.norms + parts.output_norms
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
    is_tied = head.weight is getattr(base, parts.embedding).weight
    setattr(base, parts.embedding, embedding)
    head.weight = embedding.weight if is_tied else _sharded(head.weight, mesh, 0)
    if head.bias is not None:
        head.bias = _sharded(head.bias, mesh, 0)


def _block_input(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return the input of a block with all tokens, for each rank's own heads or columns."""
    if torch.is_autocast_enabled(x.device.type):
        # The matrices would cast it, too, but here that is before it is sent.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return collectives.join(x, group, 1, True) if sequence_parallel else collectives.copy(x, group)


def _on_hidden(
    function: Callable[[Tensor], Tensor],
) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Any]], tuple]:
    """Return a forward pre-hook that applies `function` to the hidden states.

    They may be passed by place or by name.
    """

    def hook(
        _module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        if "hidden_states" in keywords:
            return arguments, keywords | {"hidden_states": function(keywords["hidden_states"])}
        return (function(arguments[0]), *arguments[1:]), keywords

    return hook


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh, axis: int) -> nn.Parameter:
    # All ranks hold the same weights. Each takes its part, and nothing is sent.
    return nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(axis)], src_data_rank=None))


class DividedMatrix(nn.Module):
    """A linear layer's weight and bias under their names.

    transposed: whether the weight is (in, out), as in GPT-2's Conv1D.
    resharded: whether FSDP2 divides them further, and gathers this rank's part only while it is
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
        """Return this rank's part of the weight or bias."""
        parameter = getattr(self, name)
        if self.resharded or not isinstance(parameter, DTensor):
            return local(parameter)
        part = self._parts.get(name)
        if part is None or not part.is_of(parameter):
            part = _Part(parameter)
            self._parts[name] = part
        return part.leaf

    def matrix(self) -> Tensor:
        """Return this rank's part of the weight as (out, in)."""
        weight = self.part("weight")
        return weight.T if self.transposed else weight


class _Part:
    """A rank's part of a sharded parameter as a plain leaf, in the same memory, that hands its
    gradient over to the parameter.

    DTensor.to_local does the same by three operations on DTensors for each parameter and
    micro-batch. They take as long as all the work of a GPU for one matrix of a small model.
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
        parameter = self.parameter
        assert leaf.grad is not None
        if parameter.grad is None:
            parameter.grad = DTensor.from_local(
                leaf.grad,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            local(parameter.grad).add_(leaf.grad)
        leaf.grad = None


class ColumnParallel(DividedMatrix):
    """A linear layer of which each rank computes a share of the outputs; all have the input."""

    def __init__(self, layer: Layer, mesh: DeviceMesh):
        super().__init__(layer)
        self.weight = _sharded(layer.weight, mesh, 1 if self.transposed else 0)
        if layer.bias is not None:
            self.bias = _sharded(layer.bias, mesh, 0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix(), None if self.bias is None else self.part("bias"))


class RowParallel(DividedMatrix):
    """A linear layer of which each rank has a share of the inputs. The output is the sum over the
    ranks.

    by_tokens: whether a rank gets the sum for its share of the tokens only.
    """

    def __init__(self, layer: Layer, mesh: DeviceMesh, by_tokens: bool):
        super().__init__(layer)
        self.weight = _sharded(layer.weight, mesh, 0 if self.transposed else 1)
        self.group = mesh.get_group()
        self.by_tokens = by_tokens

    def forward(self, x: Tensor) -> Tensor:
        part = functional.linear(x, self.matrix())
        if self.by_tokens:
            out = collectives.sum_piece(part, self.group, 1)
        else:
            out = collectives.sum_over(part, self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class FusedHeads(DividedMatrix):
    """Query, key and value of this rank's heads, by a matrix (in, 3 * heads * width).

    All ranks hold all of the matrix, since its shard would consist of shards of three tensors. So
    the work is divided, but not the memory.
    """

    def __init__(self, layer: Layer, group: ProcessGroup, num_heads: int):
        super().__init__(layer)
        self.group = group
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        weight = self._of_rank(local(self.weight))
        return functional.linear(x, weight.T, self._of_rank(local(self.bias)))

    def _of_rank(self, columns: Tensor) -> Tensor:
        """Return this rank's part of columns (..., 3 * heads * width)."""
        by_head = columns.unflatten(-1, (3, self.num_heads, -1))
        return by_head.chunk(self.group.size(), -2)[self.group.rank()].flatten(-3)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its share of the vocabulary.

    Its output is complete on every rank.
    embed_scale: the number that Gemma multiplies embeddings by, under transformers' name; or None.
    """

    embed_scale: Tensor | None

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.weight = _sharded(cast("nn.Parameter", embedding.weight), mesh, 0)
        self.start = vocabulary_start(embedding.num_embeddings, mesh)
        self.padding = embedding.padding_idx
        self.group = mesh.get_group()
        scale = getattr(embedding, "embed_scale", None)
        self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        rows = tokens - self.start
        is_here = (rows >= 0) & (rows < len(weight))
        padding = None if self.padding is None else self.padding - self.start
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        part = in_fixed_order(functional.embedding(torch.where(is_here, rows, 0), weight, padding))
        out = collectives.sum_over(torch.where(is_here[..., None], part, 0), self.group)
        scale = self.embed_scale
        return out if scale is None else out * scale.to(out.dtype)
