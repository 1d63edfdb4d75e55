"""How much the layers of a run's models keep of a forward pass, by the memory that is free.

What is kept is not computed again in the backward pass. That changes no bit of a gradient, see
`recomputed`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from pgtoolkit.batch import MicroBatch
from pgtoolkit.model import recomputed
from pgtoolkit.model.architectures import TYPES_IN_ONE_PIECE, Layer, architecture_of
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.ranks.environment import BYTES_OF_CUDA, JOBS_ON_GPU
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.plain_files import JsonObject

log = logging.getLogger("pgtoolkit")

_MARGIN = 0.1
"""Share of the memory that is left free, for gaps between blocks and for other processes."""

_SIZE_OF_A_LAYER = 4
"""Memory of the layer that is computed, forward or backward, in units of its products' results."""


@dataclass(frozen=True)
class KeptLayers:
    """Numbers of layers of each model, counted from the last one.

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
        for policy, layers in zip(policies, self._bodies, strict=True):
            policy.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            sizes = recomputed.bytes_of_token(layers[0], policy.compute_dtype)
            self._bytes = sizes if policy is policies[0] else self._bytes.larger(sizes)
        self._before = 0

    def begin_step(self) -> None:
        if self.kept is None:
            self._before = torch.cuda.memory_allocated()

    def end_step(self, peak: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Decide after the first step with an update, as all ranks do.

        peak: most bytes in use. micro_batches: of this rank.
        """
        if self.kept is not None:
            return
        after = torch.cuda.memory_allocated()
        tokens = (sum(each.document_lengths) - sum(each.shared) for each in micro_batches)
        memory = StepMemory(self._before, after, peak, room(), max(tokens, default=0))
        of_ranks = gather_objects(self.fitting(memory), self._layout.world_group)
        self._keep(least_of(of_ranks))

    def fitting(self, memory: StepMemory) -> KeptLayers:
        """Return how many layers can keep how much, after a step that kept nothing."""
        peak = memory.peak + max(0, memory.after - memory.before)
        of_fuller = self._num_layers * self._bytes.hidden + _SIZE_OF_A_LAYER * self._bytes.products
        peak += max(0, self._max_tokens - memory.tokens) * of_fuller
        limit = int((1 - _MARGIN) * memory.room)
        of_attention = self._bytes.attention * self._max_tokens
        attention = min(self._num_layers, max(0, limit - peak) // of_attention)
        peak += attention * of_attention
        of_products = self._bytes.products * self._max_tokens
        products = min(attention, max(0, limit - peak) // of_products)
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
        for layers in self._bodies:
            # The backward pass of the last layers is over before others are made again.
            for number, layer in enumerate(reversed(layers)):
                recomputed.keep(layer, number < kept.attention, number < kept.products)
        log.info(
            f"of {self._num_layers} layers {kept.attention} keep attention's output for the "
            f"backward pass, and {kept.products} the results of matrix products: at most about "
            f"{kept.peak_bytes / 1e9:.3g} GB"
        )


def least_of(of_ranks: Sequence[KeptLayers]) -> KeptLayers:
    """Return what the rank with the least memory can keep."""
    return KeptLayers(
        min(kept.attention for kept in of_ranks),
        min(kept.products for kept in of_ranks),
        max(kept.peak_bytes for kept in of_ranks),
    )


def can_keep(policy: Policy, layout: Layout) -> bool:
    """Return whether each layer of a model, spread over ranks, can keep parts of a forward pass."""
    if policy.model.config.model_type not in TYPES_IN_ONE_PIECE:
        return False
    if not (policy.compiled and policy.by_document) or policy.sharded:
        return False
    is_whole = layout.world_size == layout.size("data_parallel")
    return is_whole and all(map(recomputed.fits, _layers_of(policy)))


def _layers_of(policy: Policy) -> list[Layer]:
    return [*architecture_of(policy.model).layers_of(policy.model)]


def room() -> int:
    """Return the bytes of the GPU that this process's tensors have, or can have."""
    free, total = torch.cuda.mem_get_info()
    share = total // int(os.environ.get(JOBS_ON_GPU, "1")) - BYTES_OF_CUDA
    return min(free + torch.cuda.memory_reserved(), share)
