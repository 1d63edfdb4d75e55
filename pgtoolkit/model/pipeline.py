"""Pipeline parallelism: each rank holds some consecutive layers, and micro-batches follow one
another through them.

A stage is the whole transformer with the other stages' parts taken out, so that parameters keep
their names. The schedule is one forward, one backward (1F1B) of torch.distributed.pipelining; the
loss is computed on the last stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

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
    """Take the parts of other stages out of a transformers causal LM, in place.

    It has at least as many layers as there are stages, and its embedding and head are two matrices.
    """
    parts = architecture_of(model)
    layers = parts.layers_of(model)
    base = model.base_model
    first = len(layers) * stage // num_stages
    end = len(layers) * (stage + 1) // num_stages
    for number in range(len(layers)):
        if not first <= number < end:
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
    """A weight that one stage of a pipeline holds, and that the other stages get from it.

    part: the weight on that stage, which may be sharded there; None on the others.
    """

    part: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stage: int
    group: ProcessGroup

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as `collectives.whole` does; called by every stage."""
        dtype = dtype if self.dtype.is_floating_point else self.dtype
        weight = torch.empty(self.shape, dtype=dtype, device=self.device)
        if self.part is not None:
            # A copy, since a sampler may keep it while this weight is trained.
            weight.copy_(collectives.whole(self.part, dtype))
        dist.broadcast(weight, group_src=self.stage, group=self.group)
        return weight


def weights_of_all_stages(
    weights: dict[str, Tensor], group: ProcessGroup, device: torch.device
) -> dict[str, OfStage]:
    """Return the weights of all stages; called by every stage with its own."""
    kinds = gather_objects(
        {name: (weight.shape, weight.dtype) for name, weight in weights.items()}, group
    )
    return {
        name: OfStage(weights.get(name), shape, dtype, device, stage, group)
        for stage, kinds_of_stage in enumerate(kinds)
        for name, (shape, dtype) in kinds_of_stage.items()
    }


class _HasLoss(Protocol):
    @property
    def loss(self) -> Tensor: ...


Output = TypeVar("Output", bound=_HasLoss)


class Pipeline:
    """Runs a step's micro-batches through the stages.

    states: returns this stage's hidden states (1, max_tokens, H), given the keywords position_ids,
        lengths (of the documents), and input_ids or, after the first stage, inputs_embeds.
    max_tokens: every micro-batch is padded to this number, so that all that is sent has one shape.
    """

    def __init__(
        self,
        states: Callable[..., Tensor],
        model: PreTrainedModel,
        layout: Layout,
        max_tokens: int,
    ):
        self.states = states
        self.model = model
        self.max_tokens = max_tokens
        self.number = layout.rank_in("pipeline_parallel")
        self.count = layout.size("pipeline_parallel")
        self.group = layout.group("pipeline_parallel")
        self._schedules: dict[int, Schedule1F1B] = {}

    def run(
        self,
        micro_batches: list[MicroBatch],
        loss_function: Callable[[MicroBatch, Tensor], Output],
        scaled: Callable[[Tensor], Tensor],
    ) -> list[Output]:
        """Run all micro-batches forward and backward; gradients add up in the parameters.

        Called on every stage at once. Returns the results of loss_function, in order, on the last
        stage; [] on the others.
        loss_function: called on the last stage with a micro-batch and the hidden states (T, H) of
            its tokens.
        scaled: returns the number that the backward pass starts from, given a loss.
        """
        count = max(len(micro_batches), self.count)  # 1F1B needs one for each stage
        self.lengths = [micro_batch.document_lengths for micro_batch in micro_batches]
        self.lengths += [()] * (count - len(micro_batches))
        micro_batches = [micro_batch.to(self._device) for micro_batch in micro_batches]
        outputs: dict[int, Output] = {}

        def loss_of(hidden: Tensor, number: Tensor) -> Tensor:
            index = int(number)
            if index >= len(micro_batches):
                return 0.0 * hidden.sum()
            micro_batch = micro_batches[index]
            outputs[index] = loss_function(micro_batch, hidden[0, : len(micro_batch.tokens)])
            return scaled(outputs[index].loss)

        schedule = self._schedule(count)
        self._loss_of = loss_of
        # All padding has position 0, so that each of its tokens is a document by itself.
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
        self, micro_batch: MicroBatch, function: Callable[[Tensor], Tensor], num_rows: int
    ) -> Tensor:
        """Return a (num_rows, T) float32 result on every stage; all call this.

        function: computes it on the last stage from the hidden states (T, H) of the micro-batch's
            tokens.
        """
        count = len(micro_batch.tokens)
        dtype = next(self.model.parameters()).dtype
        tokens, positions = torch.zeros(
            2, 1, self.max_tokens, dtype=torch.int64, device=self._device
        )
        tokens[0, :count] = micro_batch.tokens
        positions[0, :count] = micro_batch.position_ids
        inputs = {"input_ids": tokens}
        if self.number > 0:
            width = self.model.config.hidden_size
            received = torch.empty(1, self.max_tokens, width, dtype=dtype, device=self._device)
            dist.recv(received, group_src=self.number - 1, group=self.group)
            inputs = {"inputs_embeds": received}
        hidden = self.states(**inputs, position_ids=positions, lengths=micro_batch.document_lengths)
        if self.number < self.count - 1:
            dist.send(hidden.to(dtype).contiguous(), group_dst=self.number + 1, group=self.group)
            result = torch.empty(num_rows, count, device=self._device)
        else:
            result = function(hidden[0, :count]).float().contiguous()
        dist.broadcast(result, group_src=self.count - 1, group=self.group)
        return result

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _schedule(self, count: int) -> Schedule1F1B:
        """Return the schedule for a number of micro-batches, with a stage of its own, since a stage
        belongs to one schedule."""
        if count not in self._schedules:
            dtype = next(self.model.parameters()).dtype
            tokens = torch.empty(1, self.max_tokens, dtype=torch.int64, device="meta")
            hidden = torch.empty(
                1,
                self.max_tokens,
                self.model.config.hidden_size,
                dtype=dtype,
                device="meta",
                requires_grad=True,
            )
            # The shapes are given, since torch would otherwise find them by a trial, and compute a
            # loss for it.
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
    """The module that torch.distributed.pipelining calls: hidden states from tokens, or from those
    of the stage before."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.model = pipeline.model
        self.pipeline = pipeline
        self.key = "input_ids" if pipeline.number == 0 else "inputs_embeds"

    def forward(self, x: Tensor, position_ids: Tensor, number: Tensor) -> Tensor:
        lengths = self.pipeline.lengths[int(number)]
        return self.pipeline.states(**{self.key: x}, position_ids=position_ids, lengths=lengths)


class _PassThrough(nn.Module):
    """Takes the place of a module that another stage computes."""

    def forward(self, x: Tensor, *_arguments, **_keywords) -> Tensor:
        return x


class _Zero(nn.Module):
    """Takes the place of position embeddings, which the first stage has added."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.new_zeros((), dtype=torch.float32)
