"""How much the layers of a run's models keep of a forward pass, by the memory that is free.

What is kept is not computed again in the backward pass. That changes no bit of a gradient, see
`recomputed`. Layers that it does not compute, such as those with adapters, keep all or nothing:
autograd checkpoints them, or does not.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from pgtoolkit.batch import MicroBatch
from pgtoolkit.model import recomputed
from pgtoolkit.model.architectures import (
    TYPES_IN_ONE_PIECE,
    Layer,
    architecture_of,
    has_experts,
    is_known,
)
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.recomputed import BytesOfToken
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.ranks.environment import BYTES_OF_CUDA, JOBS_ON_GPU
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.plain_files import JsonObject

log = logging.getLogger("pgtoolkit")

_MARGIN = 0.1
"""Share of the memory that is left free, for gaps between blocks and for other processes."""

_SIZE_OF_A_LAYER = 4
"""Memory of the layer that is computed, forward or backward, at most, in units of its products'
results; also of the tensors that a layer of autograd keeps, which are more."""


@dataclass(frozen=True)
class KeptLayers:
    """Counts the layers of each model that keep something, from the last one on.

    attention: those that keep attention's output. products: those among them that also keep the
        results of matrix products.
    peak_bytes: what the process is expected to take at most.
    """

    attention: int
    products: int
    peak_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of a GPU in a step whose layers kept nothing, in bytes.

    before, after: in use before and after the step, which may have made the optimizer's moments.
    peak: most in use. room: what this process can have in all.
    tokens: most that a layer computed for a micro-batch.
    """

    before: int
    after: int
    peak: int
    room: int
    tokens: int


class KeepsByMemory:
    """Lets layers keep nothing in the first step of a run, and later as much as there is room for.

    policies: models that are trained one after the other, for which `can_keep` holds.
    max_tokens: of a micro-batch.
    kept: what was decided; None before that.
    """

    kept: KeptLayers | None = None

    def __init__(self, policies: Sequence[Policy], max_tokens: int, layout: Layout):
        self._bodies = [_layers_of(policy) for policy in policies]
        self._num_layers = max(map(len, self._bodies))
        self._max_tokens = max_tokens
        self._layout = layout
        self._sizes: list[BytesOfToken] = []
        self._measured: list[MeasuredLayer] = []
        for policy, layers in zip(policies, self._bodies, strict=True):
            policy.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            if _in_one_piece(policy):
                self._sizes.append(recomputed.bytes_of_token(layers[0], policy.compute_dtype))
            else:
                self._measured += map(MeasuredLayer, layers)
        self._before = 0

    def begin_step(self) -> None:
        if self.kept is None:
            self._before = torch.cuda.memory_allocated()

    def end_step(self, peak: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Decide after the first update of which some rank had a document, as all ranks do.

        peak: most bytes in use. micro_batches: of this rank.
        """
        if self.kept is not None:
            return
        after = torch.cuda.memory_allocated()
        tokens = (sum(each.document_lengths) - sum(each.shared) for each in micro_batches)
        memory = StepMemory(self._before, after, peak, room(), max(tokens, default=0))
        sizes = [*self._sizes, *(layer.size for layer in self._measured)]
        of_rank = (memory, functools.reduce(BytesOfToken.larger, sizes))
        of_ranks = gather_objects(of_rank, self._layout.world_group)
        if any(memory.tokens for memory, _ in of_ranks):
            self._keep(self.decided(of_ranks))

    def decided(self, of_ranks: Sequence[tuple[StepMemory, BytesOfToken]]) -> KeptLayers:
        """Return what all ranks keep, given for each its memory in a step that kept nothing, and
        what a token takes in its largest layer: nothing where it had no document to measure."""
        size = functools.reduce(BytesOfToken.larger, (size for _, size in of_ranks))
        return least_of([self.fitting(memory, size) for memory, _ in of_ranks])

    def fitting(self, memory: StepMemory, size: BytesOfToken) -> KeptLayers:
        """Return how many layers can keep how much, after a step that kept nothing.

        size: of the largest layer of all models.
        """
        peak = memory.peak + max(0, memory.after - memory.before)
        of_fuller = self._num_layers * size.hidden + _SIZE_OF_A_LAYER * size.products
        peak += max(0, self._max_tokens - memory.tokens) * of_fuller
        limit = int((1 - _MARGIN) * memory.room)
        of_attention = size.attention * self._max_tokens
        attention = self._num_layers
        if of_attention:
            attention = min(attention, max(0, limit - peak) // of_attention)
        peak += attention * of_attention
        of_products = size.products * self._max_tokens
        products = min(attention, max(0, limit - peak) // of_products)
        if not of_attention:
            attention = products
        return KeptLayers(attention, products, peak + products * of_products)

    def state_dict(self) -> JsonObject:
        assert self.kept is not None
        return asdict(self.kept)

    def load_state_dict(self, state: JsonObject) -> None:
        """Take over what a run has decided, if each rank has the memory for it."""
        kept = KeptLayers(**state)
        if min(gather_objects(room(), self._layout.world_group)) >= kept.peak_bytes:
            self._keep(kept)

    def _keep(self, kept: KeptLayers) -> None:
        self.kept = kept
        for measured in self._measured:
            measured.end()
        for layers in self._bodies:
            # The backward pass of the last layers is over before others are made again.
            for number, layer in enumerate(reversed(layers)):
                recomputed.keep(layer, number < kept.attention, number < kept.products)
        parts = f"{kept.products} keep their forward pass for the backward pass"
        if self._sizes:
            parts = (
                f"{kept.attention} keep attention's output for the backward pass, and "
                f"{kept.products} the results of matrix products"
            )
        gigabytes = f"{kept.peak_bytes / 1e9:.3g} GB"
        log.info(f"of {self._num_layers} layers {parts}: at most about {gigabytes}")


class MeasuredLayer:
    """Checkpoints a layer as transformers does, and before that measures what autograd would keep
    of the layer without it.

    That depends on adapters, number types, attention, and which weights have gradients. A formula
    would have to follow them all, and if it forgot one, a later step would lack memory. So the
    forward pass is made once more for the largest micro-batch so far. What it saves is counted and
    freed, before the memory is needed for the backward pass, which takes more.

    size: the bytes that autograd would keep for each token of that micro-batch.
    """

    size = BytesOfToken(0, 0, 0)

    def __init__(self, layer: Layer):
        self._layer = layer
        self._checkpoint = layer._gradient_checkpointing_func
        self._most_numbers = 0
        layer._gradient_checkpointing_func = self

    def end(self) -> None:
        """Let transformers checkpoint the layer again."""
        self._layer._gradient_checkpointing_func = self._checkpoint

    def __call__(self, forward: Callable[..., Tensor], hidden: Tensor, *more: object) -> Tensor:
        # Older versions of transformers come here in passes without gradients, too, which save
        # nothing.
        if torch.is_grad_enabled() and hidden.numel() > self._most_numbers:
            self._most_numbers = hidden.numel()
            num_tokens = hidden.numel() // hidden.shape[-1]
            saved = self._bytes_saved(forward, hidden, *more)
            self.size = BytesOfToken(-(-hidden.nbytes // num_tokens), 0, -(-saved // num_tokens))
        return self._checkpoint(forward, hidden, *more)

    def _bytes_saved(self, forward: Callable[..., Tensor], hidden: Tensor, *more: object) -> int:
        """Return the bytes that autograd saves in a forward pass, beside weights and its input."""
        storages: dict[int, UntypedStorage] = {}

        def pack(x: Tensor) -> None:
            # Held until all are counted, so that no other tensor takes its place.
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()

        with saved_tensors_hooks(pack, _unused):
            forward(hidden, *more)
        for x in (hidden, *self._layer.parameters()):
            storages.pop(x.untyped_storage().data_ptr(), None)
        return sum(storage.nbytes() for storage in storages.values())


def _unused(_packed: None) -> Tensor:
    raise AssertionError("what is only counted has no backward pass")


def least_of(of_ranks: Sequence[KeptLayers]) -> KeptLayers:
    """Return what the rank with the least memory can keep."""
    return KeptLayers(
        min(kept.attention for kept in of_ranks),
        min(kept.products for kept in of_ranks),
        max(kept.peak_bytes for kept in of_ranks),
    )


def can_keep(policy: Policy, layout: Layout) -> bool:
    """Return whether each rank has the whole layers of a model, and their memory follows from the
    number of tokens."""
    if not (is_known(policy.model) and policy.by_document) or has_experts(policy.model):
        return False
    return not policy.sharded and layout.world_size == layout.size("data_parallel")


def _in_one_piece(policy: Policy) -> bool:
    """Return whether each layer of a model can be computed by `recomputed`."""
    if policy.model.config.model_type not in TYPES_IN_ONE_PIECE or not policy.compiled:
        return False
    return all(map(recomputed.fits, _layers_of(policy)))


def _layers_of(policy: Policy) -> list[Layer]:
    return [*architecture_of(policy.model).layers_of(policy.model)]


def room() -> int:
    """Return the bytes of the GPU that this process's tensors have, or can have."""
    free, total = torch.cuda.mem_get_info()
    share = total // int(os.environ.get(JOBS_ON_GPU, "1")) - BYTES_OF_CUDA
    return min(free + torch.cuda.memory_reserved(), share)
