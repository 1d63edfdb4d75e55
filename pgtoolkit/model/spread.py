"""The policy spread over processes: all kinds of parallelism put together, and FSDP2.

With FSDP2 weights, gradients and optimizer states are divided among the ranks that see different
data. A layer's weights are gathered while it computes. The gradient is the sum over the ranks, as
everywhere here; by default FSDP2 would average. The embedding, the last norm and the head are one
unit, which stays gathered from the model's forward until its backward, so that the loss can use the
head in between.

Axes: T tokens of this rank, H hidden size.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from pgtoolkit.batch import MicroBatch
from pgtoolkit.errors import ConfigError
from pgtoolkit.kernels.losses import LMHead
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.model.architectures import architecture_of
from pgtoolkit.model.attention import Documents, documents_here, use_packed_attention
from pgtoolkit.model.misfits import misfits
from pgtoolkit.model.pipeline import Pipeline, keep_stage, weights_of_all_stages
from pgtoolkit.model.policy import Policy, all_tensors
from pgtoolkit.model.settings import ParallelismSettings
from pgtoolkit.model.tensor import DividedMatrix, shard_tensors, vocabulary_start
from pgtoolkit.ranks.agreement import check_same, failing_together
from pgtoolkit.ranks.collectives import join, local
from pgtoolkit.ranks.layout import AXES, Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ParallelPolicy(Policy):
    """A policy of which this process holds a part, and which sees a part of the tokens.

    sharded: whether FSDP2 divides it.
    multiple: the number of positions must be a multiple of it (sequence parallelism).
    partial: names of the parameters whose gradients the tensor ranks must add up after the backward
        passes.
    max_tokens: most tokens of a micro-batch.
    vocabulary: tokens of the head, of which other ranks may hold a part.
    """

    layout: Layout
    sharded: bool
    multiple: int
    partial: frozenset[str]
    max_tokens: int
    vocabulary: int

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    @property
    def is_whole(self) -> bool:
        return (
            not self.sharded
            and self.layout.size("tensor_parallel") * self.layout.size("pipeline_parallel") == 1
        )

    def weights(self) -> dict[str, Tensor]:
        if not self.is_whole:
            with failing_together(self.layout):
                pass  # no rank begins to gather while another has failed
        weights = super().weights()
        group = self.layout.group("pipeline_parallel")
        if group is None:
            return weights
        # `collectives.whole` takes these like tensors.
        return cast("dict[str, Tensor]", weights_of_all_stages(weights, group, self.model.device))

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """Return the pipeline whose `run` takes the micro-batches, or None where the layers are not
        cut into stages."""
        if self.layout.size("pipeline_parallel") == 1:
            return None
        return Pipeline(self._stage_states, self.model, self.layout, self.max_tokens)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T, H) hidden states of this rank's tokens.

        A rank without tokens takes part in the exchanges, too.
        """
        tokens = micro_batch.tokens
        positions = micro_batch.position_ids
        lengths = micro_batch.document_lengths
        group = self.layout.group("sequence_data_parallel")
        if len(micro_batch.tokens) == 0:
            tokens = tokens.new_zeros(self.multiple)
            positions = tokens
            lengths = ()
        elif group is None:
            return super().hidden_states(micro_batch)
        more = {}
        if group is not None:
            more["documents"] = documents_here(lengths, len(tokens), group, tokens.device)
        hidden = self._body(tokens[None], positions[None], lengths, **more)
        return hidden[0, : len(micro_batch.tokens)]

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead, Ranks]:
        return self.with_head(self.hidden_states(micro_batch))

    def with_head(self, hidden: Tensor) -> tuple[Tensor, LMHead, Ranks]:
        """Return the inputs of the loss, from hidden states that were computed last.

        With FSDP2 older ones will not do: the head is gathered by their forward pass.
        """
        layout = self.layout
        if self.compute_dtype != torch.float32:
            # The stages of a pipeline hand over the residual stream in its own type.
            hidden = hidden.to(self.compute_dtype)
        bias = self.head.bias
        head = LMHead(local(self.head.weight), None if bias is None else local(bias))
        group = layout.group("tensor_parallel")
        start = None
        if group is not None:
            assert layout.mesh is not None
            start = vocabulary_start(self.vocabulary_size, layout.mesh["tensor_parallel"])
        return hidden, head, Ranks(group, start, layout.group("sequence_data_parallel"))

    def put_away(self) -> None:
        if self.sharded:
            # FSDP2 keeps the head's unit gathered for a backward pass.
            cast("FSDPModule", self.model).reshard()

    def all_tokens(self, values: Tensor) -> Tensor:
        group = self.layout.group("sequence_data_parallel")
        return values if group is None else join(values, group, 0, False)

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        groups = []
        named = self.model.named_parameters()
        if self.partial:
            partial = [parameter for name, parameter in named if name in self.partial]
            groups.append((self.layout.group("tensor_parallel"), partial))
        # Where FSDP2 divides the model, it has summed the gradients already.
        if self.layout.loss_group is not None and not self.sharded:
            trained = [
                parameter for parameter in self.model.parameters() if parameter.requires_grad
            ]
            groups.append((self.layout.loss_group, trained))
        return groups

    def _body(
        self, tokens: Tensor, position_ids: Tensor, lengths: Sequence[int] = (), **more
    ) -> Tensor:
        length = tokens.shape[1]
        missing = -length % self.multiple
        if missing > 0:
            # The positions go on, since one that does not follow the one before would begin another
            # document.
            following = position_ids[:, -1:] + torch.arange(1, missing + 1, device=tokens.device)
            position_ids = torch.cat([position_ids, following.clamp(max=self.max_positions - 1)], 1)
            tokens = functional.pad(tokens, (0, missing))
        return super()._body(tokens, position_ids, lengths, **more)[:, :length]

    def _stage_states(self, lengths: Sequence[int], **inputs) -> Tensor:
        device = inputs["position_ids"].device
        if self.by_document:
            inputs["documents"] = Documents.whole(lengths, self.max_tokens, device)
        with self.autocast(device):
            return self._transformer(use_cache=False, **inputs)

    def _transformer(self, **inputs) -> Tensor:
        if not self.sharded:
            return super()._transformer(**inputs)
        states = cast("Callable[..., Tensor]", self.model.transformer_states)  # see `shard_fully`
        return states(**inputs)


def refuse_misfit(model: PreTrainedModel, sizes: dict[str, int], shard: bool) -> None:
    """Raise ConfigError where a transformers causal LM cannot be spread over these sizes.

    `pgtk check` may not have known it, since it does not load the model.
    """
    config = model.config
    head = cast("nn.Linear", model.get_output_embeddings()).weight
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    heads, key_value_heads, layers = (getattr(config, name, None) for name in names)
    known = {
        "type": config.model_type,
        "attention heads": heads,
        "key-value heads": key_value_heads,
        "layers": layers,
    }
    known["tied"] = head is cast("nn.Embedding", model.get_input_embeddings()).weight
    for problem in misfits(sizes, shard, known, len(head)):
        raise ConfigError(problem)


def parallelize(
    policy: Policy, layout: Layout, parallelism: ParallelismSettings, max_tokens: int
) -> Policy:
    """Return the policy with its model spread over the ranks of `layout`.

    max_tokens: most tokens of a micro-batch.
    Each rank gets its part from the reader of its node. Raises ConfigError where the model cannot
    be spread over them, RankLost where the nodes have read different weights.
    """
    if layout.world_size == 1:
        return policy
    # An outline is divided, and then filled one tensor after the other, so that no rank but the
    # reader holds all of the model.
    model = policy.outline().model
    with failing_together(layout):
        refuse_misfit(model, {name: layout.size(name) for name in AXES}, parallelism.shard)
    sharded = parallelism.shard and layout.loss_group is not None
    partial = _divide(model, layout, parallelism.sequence_parallel, sharded)
    check_same(layout, "the weights of the model", _fill(model, policy.model, layout))
    return ParallelPolicy(
        model,
        policy.tokenizer,
        policy.compute_dtype,
        policy.base_digest,
        packs=policy.packs,
        mixes_lengths=policy.mixes_lengths,
        not_sampled=policy.not_sampled,
        compiled=policy.compiled,
        fp32_lm_head=policy.fp32_lm_head,
        pretrained=policy.pretrained,
        layout=layout,
        sharded=sharded,
        multiple=layout.size("tensor_parallel") if parallelism.sequence_parallel else 1,
        partial=partial,
        max_tokens=max_tokens,
        vocabulary=policy.vocabulary_size,
    )


def _divide(
    model: PreTrainedModel, layout: Layout, sequence_parallel: bool, sharded: bool
) -> frozenset[str]:
    """Reduce a model to the part of this rank, in place.

    Returns the names of the parameters whose gradients the tensor ranks must add up.
    """
    assert layout.mesh is not None
    partial: set[nn.Parameter] = set()
    if layout.size("tensor_parallel") > 1:
        partial = shard_tensors(model, layout.mesh["tensor_parallel"], sequence_parallel)
    if layout.size("sequence_data_parallel") > 1:
        use_packed_attention(model)
    num_stages = layout.size("pipeline_parallel")
    if num_stages > 1:
        keep_stage(model, layout.rank_in("pipeline_parallel"), num_stages)
    # Before FSDP2 puts other parameters in the place of these.
    names = frozenset(name for name, parameter in model.named_parameters() if parameter in partial)
    if sharded:
        assert layout.loss_mesh is not None
        shard_fully(model, layout.loss_mesh)
    return names


@torch.no_grad()
def _fill(model: PreTrainedModel, source: PreTrainedModel, layout: Layout) -> int:
    """Fill this rank's part of a model, on its device, with the numbers that the reader of the node
    has in `source`.

    Returns a digest of a few numbers of each tensor.
    """
    assert layout.mesh is not None
    kind = layout.mesh.device_type
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, torch.cuda.current_device())
    parts = all_tensors(model)
    digest = 0
    for name, tensor in all_tensors(source).items():
        if layout.rank == layout.reader:
            full = tensor.detach().to(device).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if layout.node_group is not None:
            dist.broadcast(full, layout.reader, layout.node_group)
        numbers = full.flatten()[:: max(1, full.numel() // 64)]
        digest = zlib.crc32(numbers.double().cpu().numpy().tobytes(), digest)
        part = parts.get(name)
        if part is None:
            continue  # another stage has it
        if isinstance(part, DTensor):
            mesh = part.device_mesh
            filled = distribute_tensor(full, mesh, part.placements, src_data_rank=None)
        else:
            filled = full
        if isinstance(part, nn.Parameter):
            filled = nn.Parameter(filled, part.requires_grad)
        else:
            filled = filled.detach()
        # Swapped and not replaced, since FSDP2 holds references to the parameter.
        torch.utils.swap_tensors(part, filled)
    return digest


def shard_fully(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide a transformers causal LM among the ranks of `mesh` (one axis), in place; parameters
    become DTensors.

    Afterwards the hidden states come from `model.transformer_states(**inputs)`.
    """
    for layer in architecture_of(model).layers_of(model):
        if next(layer.parameters(), None) is not None:  # another stage's layers have none
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    vars(model)["transformer_states"] = types.MethodType(_transformer_states, model)
    register_fsdp_forward_method(model, "transformer_states")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        elif isinstance(module, DividedMatrix):
            module.resharded = True


def _transformer_states(model: PreTrainedModel, **inputs) -> Tensor:
    # A copy, since FSDP2's hook for the backward pass would not be safe on a view.
    return model.base_model(**inputs).last_hidden_state.clone()
