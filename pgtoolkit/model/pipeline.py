"""Pipeline parallelism: each rank holds some consecutive layers, and micro-batches follow one
another through them.

A stage is the whole transformer with the other stages' parts taken out, so that parameters keep
their names. The schedule is one forward, one backward (1F1B) of torch.distributed.pipelining; the
loss is computed on the last stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pgtoolkit.batch import MicroBatch
from pgtoolkit.model.architectures import architecture_of
from pgtoolkit.ranks import collectives
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.ranks.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def keep_stage(model: PreTrainedModel, stage: int, num_stages: int) -> None:
    """Take out of a transformers causal LM what other stages compute, in place.

    It has at least as many layers as there are stages, and its embedding and head are two matrices.
    """
    parts = architecture_of(model)
    layers, base = parts.layers_of(model), model.base_model
    first, last = (len(layers) * number // num_stages for number in (stage, stage + 1))
    for number in range(len(layers)):
        if not first <= number < last:
            layers[number] = _PassThrough()
    if stage > 0:
        setattr(base, parts.embedding, _PassThrough())
        if parts.positions is not None:
            setattr(base, parts.positions, _Zero())
    if stage < num_stages - 1:
        setattr(base, parts.final_norm, _PassThrough())
        model.set_output_embeddings(_PassThrough())


@dataclass(frozen=True)
class OfStage:
    """A weight that one stage of a pipeline holds, and the others get from it. part: None on
    those."""

    part: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stage: int
    group: ProcessGroup

    def whole(self, dtype: torch.dtype) -> Tensor:
        """See `collectives.whole`; called by every stage."""
        dtype = dtype if self.dtype.is_floating_point else self.dtype
        weight = torch.empty(self.shape, dtype=dtype, device=self.device)
        if self.part is not None:  # copied: a sampler keeps it while this one is trained
            weight.copy_(collectives.whole(self.part, dtype))
        dist.broadcast(weight, group_src=self.stage, group=self.group)
        return weight


def weights_of_all_stages(
    own: dict[str, Tensor], group: ProcessGroup, device: torch.device
) -> dict[str, OfStage]:
    """The whole model's weights; called by every stage with its own."""
    kinds = gather_objects(
        {name: (weight.shape, weight.dtype) for name, weight in own.items()}, group
    )
    return {
        name: OfStage(own.get(name), shape, dtype, device, stage, group)
        for stage, kind_of in enumerate(kinds)
        for name, (shape, dtype) in kind_of.items()
    }


class Pipeline:
    """Runs a step's micro-batches through the stages.

    states(**inputs): this stage's hidden states (1, max_tokens, H), from input_ids or, after the
    first stage, from inputs_embeds, position_ids, and the lengths of the documents. Every
    micro-batch is padded to max_tokens: what is sent has one shape.
    """

    def __init__(self, states: Callable, model: PreTrainedModel, layout: Layout, max_tokens: int):
        self.states, self.model, self.max_tokens = states, model, max_tokens
        self.number, self.count = (
            layout.rank_in("pipeline_parallel"),
            layout.size("pipeline_parallel"),
        )
        self.group = layout.group("pipeline_parallel")
        self._schedules: dict[int, Schedule1F1B] = {}

    def run(
        self,
        micro_batches: list[MicroBatch],
        loss_function: Callable,
        scaled: Callable[[Tensor], Tensor],
    ) -> list:
        """Forward and backward of all micro-batches, on every stage at once; gradients add up in
        the parameters.

        loss_function(micro_batch, hidden): what the last stage makes of the hidden states (T, H) of
        a micro-batch's tokens. scaled(loss): what the backward pass starts from. The last stage
        gets the results in order, others [].
        """
        count = max(len(micro_batches), self.count)  # 1F1B needs one for each stage
        self.lengths = [micro_batch.document_lengths for micro_batch in micro_batches]
        self.lengths += [()] * (count - len(micro_batches))
        micro_batches = [micro_batch.to(self._device) for micro_batch in micro_batches]
        outputs = {}

        def loss_of(hidden: Tensor, number: Tensor) -> Tensor:
            if (index := int(number)) >= len(micro_batches):
                return 0.0 * hidden.sum()
            micro_batch = micro_batches[index]
            outputs[index] = loss_function(micro_batch, hidden[0, : len(micro_batch.tokens)])
            return scaled(outputs[index].loss)

        schedule, self._loss_of = self._schedule(count), loss_of
        # Padding has position 0 throughout: each of its tokens begins a document of its own.
        tokens, positions = torch.zeros(
            2, count, self.max_tokens, dtype=torch.int64, device=self._device
        )
        for row, micro_batch in enumerate(micro_batches):
            tokens[row, : len(micro_batch.tokens)] = micro_batch.tokens
            positions[row, : len(micro_batch.tokens)] = micro_batch.position_ids
        inputs = (tokens,) if self.number == 0 else ()
        numbers = torch.arange(count)
        target = numbers if self.number == self.count - 1 else None
        schedule.step(
            *inputs, position_ids=positions, number=numbers, target=target, return_outputs=False
        )
        return [outputs[index] for index in sorted(outputs)]

    @torch.no_grad()
    def on_last_stage(
        self, micro_batch: MicroBatch, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """(T,) float32 of the hidden states (T, H) of a micro-batch's tokens, on every stage; all
        call this.

        function: computes it on the last stage; it has one number for each token.
        """
        count, dtype = len(micro_batch.tokens), next(self.model.parameters()).dtype
        tokens, positions = torch.zeros(
            2, 1, self.max_tokens, dtype=torch.int64, device=self._device
        )
        tokens[0, :count], positions[0, :count] = micro_batch.tokens, micro_batch.position_ids
        key, x = "input_ids", tokens
        if self.number > 0:
            key = "inputs_embeds"
            x = torch.empty(
                1, self.max_tokens, self.model.config.hidden_size, dtype=dtype, device=self._device
            )
            dist.recv(x, group_src=self.number - 1, group=self.group)
        hidden = self.states(
            **{key: x}, position_ids=positions, lengths=micro_batch.document_lengths
        )
        if self.number < self.count - 1:
            dist.send(hidden.to(dtype).contiguous(), group_dst=self.number + 1, group=self.group)
            found = torch.empty(count, device=self._device)
        else:
            found = function(hidden[0, :count]).float().contiguous()
        dist.broadcast(found, group_src=self.count - 1, group=self.group)
        return found

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _schedule(self, count: int) -> Schedule1F1B:
        """One for each number of micro-batches, with a stage of its own: a stage belongs to one
        schedule."""
        if count not in self._schedules:
            dtype, config = next(self.model.parameters()).dtype, self.model.config
            tokens = torch.empty(1, self.max_tokens, dtype=torch.int64, device="meta")
            hidden = torch.empty(
                1,
                self.max_tokens,
                config.hidden_size,
                dtype=dtype,
                device="meta",
                requires_grad=True,
            )
            # With the shapes given nothing is tried out first, which would compute a loss that
            # nobody asked for.
            stage = PipelineStage(
                _Stage(self),
                self.number,
                self.count,
                self._device,
                input_args=tokens if self.number == 0 else hidden,
                output_args=hidden,
                group=self.group,
            )
            self._schedules[count] = Schedule1F1B(
                stage,
                count,
                loss_fn=lambda hidden, number: self._loss_of(hidden, number),
                scale_grads=False,
            )
        return self._schedules[count]


class _Stage(nn.Module):
    """What torch.distributed.pipelining calls: hidden states from the tokens, or from the stage
    before."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.model = pipeline.model
        self.pipeline = pipeline
        self.key = "input_ids" if pipeline.number == 0 else "inputs_embeds"

    def forward(self, x: Tensor, position_ids: Tensor, number: Tensor) -> Tensor:
        lengths = self.pipeline.lengths[int(number)]
        return self.pipeline.states(**{self.key: x}, position_ids=position_ids, lengths=lengths)


class _PassThrough(nn.Module):
    """In the place of what another stage computes."""

    def forward(self, x: Tensor, *_more, **_keywords) -> Tensor:
        return x


class _Zero(nn.Module):
    """In the place of position embeddings, which the first stage has added."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.new_zeros((), dtype=torch.float32)
