"""The policy spread over processes: what each kind of parallelism does to the model, put together,
and FSDP2.

With FSDP2 weights, gradients and optimizer states are divided among the ranks that see different
data. A layer's weights are brought together while it computes. The gradient is the sum over the
ranks, as everywhere here; FSDP2 would average. The embedding, the last norm and the head are one
unit, which stays together from the model's forward until its backward, so that the loss can use the
head in between.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from pgtoolkit.batch import MicroBatch
from pgtoolkit.config.rules.step import misfits
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.kernels.losses import LMHead
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.model.architectures import architecture_of
from pgtoolkit.model.attention import Documents, documents_here, use_packed_attention
from pgtoolkit.model.pipeline import Pipeline, keep_stage, weights_of_all_stages
from pgtoolkit.model.policy import Policy, all_tensors
from pgtoolkit.model.tensor import DividedMatrix, shard_tensors, vocabulary_start
from pgtoolkit.ranks.agreement import check_same, failing_together
from pgtoolkit.ranks.collectives import join, local
from pgtoolkit.ranks.layout import AXES, Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ParallelPolicy(Policy):
    """A policy of which this process holds its part, and which sees its part of the tokens.

    sharded: by FSDP2. multiple: what the number of positions must divide by (sequence parallelism).
    partial: names of the parameters whose gradients the tensor ranks must add up after the backward
        passes.
    max_tokens: the most tokens of a micro-batch. vocabulary: tokens of the whole head, which other
        ranks may hold.
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
                pass  # none begins to gather while another has failed
        own, group = super().weights(), self.layout.group("pipeline_parallel")
        if group is None:
            return own
        # What another stage holds stands for a tensor, see `collectives.whole`.
        return cast("dict[str, Tensor]", weights_of_all_stages(own, group, self.model.device))

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The stages that the layers are cut into, or None; then micro-batches go through its
        `run`."""
        if self.layout.size("pipeline_parallel") == 1:
            return None
        return Pipeline(self._stage_states, self.model, self.layout, self.max_tokens)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """(T, H) hidden states of this rank's tokens; also without a token each rank takes part in
        the exchanges."""
        tokens, positions, lengths = (
            micro_batch.tokens,
            micro_batch.position_ids,
            micro_batch.document_lengths,
        )
        group = self.layout.group("sequence_data_parallel")
        if len(micro_batch.tokens) == 0:
            tokens = positions = tokens.new_zeros(self.multiple)
            lengths = ()
        elif group is None:
            return super().hidden_states(micro_batch)
        more = (
            {}
            if group is None
            else {"documents": documents_here(lengths, len(tokens), group, tokens.device)}
        )
        return self._body(tokens[None], positions[None], lengths, **more)[
            0, : len(micro_batch.tokens)
        ]

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead, Ranks]:
        return self.with_head(self.hidden_states(micro_batch))

    def with_head(self, hidden: Tensor) -> tuple[Tensor, LMHead, Ranks]:
        """What the loss needs, from the hidden states just computed; with FSDP2, not from older
        ones."""
        layout = self.layout
        if self.compute_dtype != torch.float32:
            # a pipeline's stages hand over what the residual stream has
            hidden = hidden.to(self.compute_dtype)
        weight, bias = self.head.weight, self.head.bias
        head = LMHead(local(weight), None if bias is None else local(bias))
        group, start = layout.group("tensor_parallel"), None
        if group is not None:
            assert layout.mesh is not None
            start = vocabulary_start(self.vocabulary_size, layout.mesh["tensor_parallel"])
        return hidden, head, Ranks(group, start, layout.group("sequence_data_parallel"))

    def put_away(self) -> None:
        if self.sharded:
            # FSDP2 keeps the head's unit together for the backward
            cast("FSDPModule", self.model).reshard()

    def all_tokens(self, values: Tensor) -> Tensor:
        group = self.layout.group("sequence_data_parallel")
        return values if group is None else join(values, group, 0, False)

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        groups = []
        if self.partial:
            partial = [p for name, p in self.model.named_parameters() if name in self.partial]
            groups.append((self.layout.group("tensor_parallel"), partial))
        # else FSDP2 has summed them already
        if self.layout.loss_group is not None and not self.sharded:
            groups.append(
                (self.layout.loss_group, [p for p in self.model.parameters() if p.requires_grad])
            )
        return groups

    def _body(
        self, tokens: Tensor, position_ids: Tensor, lengths: Sequence[int] = (), **more
    ) -> Tensor:
        length = tokens.shape[1]
        if missing := -length % self.multiple:
            # As if each row went on: a position that does not follow the one before would begin a
            #   document.
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
        states: Any = self.model.transformer_states  # see `shard_fully`
        return states(**inputs)


def refuse_misfit(model: PreTrainedModel, sizes: dict[str, int], shard: bool) -> None:
    """ConfigError where a transformers causal LM cannot be spread so, which `check` may not have
    known."""
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


def parallelize(policy: Policy, layout: Layout, config: Config) -> Policy:
    """The policy with its model spread over the ranks of `layout`: each gets its part from the
    reader of its node.

    Raises ConfigError where the model cannot be spread so, RankLost where the nodes have read other
    weights.
    """
    if layout.world_size == 1:
        return policy
    # An outline is divided, and then filled one tensor after the other: no rank but the reader
    # holds the whole model.
    model, parallelism, partial = policy.outline().model, config.parallelism, set()
    with failing_together(layout):
        refuse_misfit(model, {name: layout.size(name) for name in AXES}, parallelism.shard)
    vocabulary = policy.vocabulary_size
    assert layout.mesh is not None
    if layout.size("tensor_parallel") > 1:
        partial = shard_tensors(
            model, layout.mesh["tensor_parallel"], parallelism.sequence_parallel
        )
    if layout.size("sequence_data_parallel") > 1:
        use_packed_attention(model)
    if (size := layout.size("pipeline_parallel")) > 1:
        keep_stage(model, layout.rank_in("pipeline_parallel"), size)
    names = frozenset(name for name, parameter in model.named_parameters() if parameter in partial)
    sharded = parallelism.shard and layout.loss_group is not None
    if sharded:
        assert layout.loss_mesh is not None
        shard_fully(model, layout.loss_mesh)
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
        layout=layout,
        sharded=sharded,
        multiple=layout.size("tensor_parallel") if parallelism.sequence_parallel else 1,
        partial=names,
        max_tokens=config.accumulation.max_tokens,
        vocabulary=vocabulary,
    )


@torch.no_grad()
def _fill(model: PreTrainedModel, source: PreTrainedModel, layout: Layout) -> int:
    """Put the numbers of `source`, which the reader of the node has, in the place of this rank's
    part, on the device.

    Returns a digest of a few numbers of each tensor.
    """
    assert layout.mesh is not None
    kind, parts, digest = layout.mesh.device_type, all_tensors(model), 0
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    for name, tensor in all_tensors(source).items():
        if layout.rank == layout.reader:
            whole = tensor.detach().to(device).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if layout.node_group is not None:
            dist.broadcast(whole, layout.reader, layout.node_group)
        numbers = whole.flatten()[:: max(1, whole.numel() // 64)]
        digest = zlib.crc32(numbers.double().cpu().numpy().tobytes(), digest)
        if (part := parts.get(name)) is not None:  # else it is another stage's
            if isinstance(part, DTensor):
                # its part
                whole = distribute_tensor(
                    whole, part.device_mesh, part.placements, src_data_rank=None
                )
            made = (
                nn.Parameter(whole, part.requires_grad)
                if isinstance(part, nn.Parameter)
                else whole.detach()
            )
            # whoever knows the parameter, as FSDP2 does, knows it still
            torch.utils.swap_tensors(part, made)
    return digest


def shard_fully(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide a transformers causal LM among the ranks of `mesh` (one axis), in place; parameters
    become DTensors.

    Afterwards the hidden states come from `model.transformer_states(**inputs)`.
    """
    for layer in architecture_of(model).layers_of(model):
        if next(layer.parameters(), None) is not None:  # a pipeline's stage has passed others on
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
    # Not a view, on which FSDP2's hook for the backward pass would not be safe.
    return model.base_model(**inputs).last_hidden_state.clone()
