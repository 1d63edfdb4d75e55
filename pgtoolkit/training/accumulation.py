"""Dynamic accumulation: one optimizer update over as many micro-batches as the documents of a step
need."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable
from typing import TypedDict, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch, Step, StepTotals, have_old_log_probs, known_vectors
from pgtoolkit.errors import NumericalError
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.ranks.gradients import clip_gradients, scale_gradients, sum_gradients
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.loss_scale import LossScale

log = logging.getLogger("pgtoolkit")

_MUST_BE_FINITE = ("loss", "grad_norm", "value_loss", "critic_grad_norm")


class StepOutput(TypedDict):
    """What `training_step` returns to Lightning, which keeps the key "loss" at the top level for a
    tensor."""

    metrics: dict[str, float]


class DynamicAccumulation(lightning.LightningModule):
    """A LightningModule whose batch is a whole Step: each `training_step` is one update of its
    single optimizer.

    A subclass says what a micro-batch's share of the loss is (`micro_batch_loss`) and which
    optimizer takes it (`configure_optimizers`). The rest is here: forward and backward of every
    micro-batch, the sum of gradients and metrics over ranks, clipping, and the update, which is
    left out where nothing is trained or a number is not finite.
    Steps come with their totals: from `rollouts.steps.StepLoader`, which gathers documents until
        `docs_per_step`, or
    from a DataLoader that collates with `rollouts.steps.make_step`.

    layout: the ranks that share each step. To Lightning each of them trains alone, on one device.
    max_grad_norm: the gradient is scaled down to this norm; None: never. max_bad_steps: so many
        steps in a row whose loss or gradient is not finite raise NumericalError.
    num_updates counts the updates made; documents_seen all documents delivered, also those of a
    step that was skipped.
    loss_scale: for gradients that pass through float16; None: they do not. A step in which they
        overflow makes no update on any rank, and does not count among the bad ones.
    """

    loss_scale: LossScale | None = None

    def __init__(
        self,
        layout: Layout = ONE_PROCESS,
        max_grad_norm: float | None = None,
        max_bad_steps: int = 3,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.layout = layout
        self.max_grad_norm = max_grad_norm
        self.max_bad_steps = max_bad_steps
        self.num_updates = 0
        self.documents_seen = 0
        self.num_skipped_steps = 0
        self._bad_steps_in_a_row = 0

    def micro_batch_loss(self, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        """This micro-batch's share of the step's loss, as `pgtoolkit.policy_loss(...,
        totals=totals)` gives it.

        micro_batch: on the module's device; without any token where other ranks have more
            micro-batches.
        """
        raise TypeError(
            f"{type(self).__name__} needs a method micro_batch_loss(micro_batch, totals)"
        )

    def before_update(self) -> dict[str, float]:
        """May set the learning rate of the update that follows; what it returns is among the step's
        metrics."""
        return {}

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        """After a step's last backward: (group, parameters whose gradients here are to be summed
        over it), in order."""
        if self.layout.loss_group is None:
            return []
        return [(self.layout.loss_group, [p for p in self.parameters() if p.requires_grad])]

    def parameters_to_clip(self) -> Iterable[nn.Parameter]:
        """Those whose gradient has the norm that is measured and bounded."""
        return self.parameters()

    def is_finite(self, metrics: dict[str, float]) -> bool:
        """Whether a step may be made: its losses and the norms of its gradients are numbers."""
        return all(math.isfinite(metrics[name]) for name in _MUST_BE_FINITE if name in metrics)

    def backward_of_all(
        self, micro_batches: list[MicroBatch], totals: StepTotals
    ) -> list[PolicyLoss]:
        """Forward and backward of each micro-batch; gradients add up in the parameters."""
        outputs = []
        for micro_batch in micro_batches:
            out = self.micro_batch_loss(micro_batch.counted().to(self.device), totals)
            self.manual_backward(self.scaled(out.loss))
            outputs.append(out)
        return outputs

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what a micro-batch's backward pass starts from."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        # Lightning's wrapper holds copies of its fields, which a loaded state would not reach.
        return cast("torch.optim.Optimizer", self.optimizers(use_pl_optimizer=False))

    def on_fit_start(self) -> None:
        """Refuses what would silently give other gradients."""
        if self.trainer.world_size > 1:
            raise ValueError(
                "DynamicAccumulation needs a Trainer of one device in each process (got "
                f"{self.trainer.world_size} devices). Lightning would average gradients that are "
                "shares of one sum. Use devices=1, and a layout for several processes."
            )

    def transfer_batch_to_device(
        self, batch: Step, device: torch.device, dataloader_idx: int
    ) -> Step:
        return batch  # the micro-batches are moved one at a time

    def training_step(self, step: Step, batch_index: int) -> StepOutput:
        """One optimizer update, or none; the step's metrics by name, for `on_train_batch_end`,
        under "metrics"."""
        started = time.perf_counter()
        self.documents_seen += int(step.totals.num_documents)
        metrics = data_metrics(step.documents, self.num_updates)
        if step.totals.num_tokens == 0:
            self.num_skipped_steps += 1
        else:
            metrics |= self._update(step)
        metrics |= {
            "documents_seen": self.documents_seen,
            "num_skipped_steps": self.num_skipped_steps,
        }
        metrics |= self._measured(step, started)
        return {"metrics": metrics}

    def _measured(self, step: Step, started: float) -> dict[str, float]:
        """What the step took of this process: time and, on a GPU, memory."""
        measured: dict[str, float] = {}
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            measured["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            torch.cuda.reset_peak_memory_stats(self.device)
        update = time.perf_counter() - started
        measured |= {
            f"seconds_{stage}": value
            for stage, value in (step.seconds | {"update": update}).items()
        }
        return measured | {"tokens_per_second": int(step.totals.num_tokens) / update}

    def _update(self, step: Step) -> dict[str, float]:
        self.optimizer.zero_grad()
        micro_batches = [
            local_tokens(micro_batch, self.layout) for micro_batch in step.micro_batches
        ]
        outputs = self.backward_of_all(micro_batches, step.totals)
        for group, parameters in self.gradient_groups():
            sum_gradients(parameters, group)
        if self.loss_scale is not None:
            scale_gradients(self.parameters_to_clip(), 1 / self.loss_scale.value)
        metrics = self._step_metrics(outputs, step)
        metrics |= {"num_micro_batches": len(micro_batches)} | self.before_update()
        is_finite = self.is_finite(metrics)
        overflowed = False
        if self.loss_scale is not None:
            metrics["loss_scale"] = self.loss_scale.value
            overflowed = self._move_scale(self.loss_scale, metrics, is_finite)
            metrics["num_overflows"] = self.loss_scale.num_overflows
        if is_finite:
            optimizer = cast(
                "lightning.pytorch.core.optimizer.LightningOptimizer", self.optimizers()
            )
            optimizer.step()  # Lightning's, which counts it in trainer.global_step
            self.num_updates += 1
            self._bad_steps_in_a_row = 0
        elif not overflowed:
            self._skip_bad_step(step, _not_finite(micro_batches, outputs), metrics)
        return metrics

    def _move_scale(self, scale: LossScale, metrics: dict[str, float], is_finite: bool) -> bool:
        """Return whether the step's gradient has overflowed float16, which the next steps' scale
        follows."""
        if is_finite:
            scale.rise()
            return False
        if not math.isfinite(metrics["loss"]) or not scale.fall():
            return False
        if scale.num_overflows == 1:
            log.info(
                f"the gradient of a loss times {metrics['loss_scale']:g} overflowed float16: the "
                "step made no update, and the scale is halved. Said once; the metrics loss_scale "
                "and num_overflows tell more."
            )
        return True

    def _step_metrics(self, outputs: list[PolicyLoss], step: Step) -> dict[str, float]:
        """Clips the gradient and reads all numbers of the step, those of all ranks, in one transfer
        to the host."""
        loss, sums = self._over_ranks(outputs)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        metrics = {
            "loss": loss,
            "grad_norm": clip_gradients(self.parameters_to_clip(), self.layout, limit),
        }
        metrics |= sums.finalize(step.totals, have_old_log_probs(step.documents))
        values = torch.stack(
            [value.to(self.device, torch.float64) for value in metrics.values()]
        ).tolist()
        counts = {name for name, value in metrics.items() if not value.is_floating_point()}
        return {
            name: int(x) if name in counts else x for name, x in zip(metrics, values, strict=True)
        }

    def _over_ranks(self, outputs: list[PolicyLoss]) -> tuple[Tensor, MetricSums]:
        """The step's loss and metrics, from the shares of every rank that has one."""
        if outputs:
            loss = torch.stack([out.loss.detach().double() for out in outputs]).sum()
            sums = functools.reduce(MetricSums.merge, [out.metric_sums for out in outputs])
        else:
            # A pipeline stage before the last. Several stages have metrics of level none only: one
            # sum, no extrema.
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            sums = MetricSums("none", loss.new_zeros(1), loss.new_empty(0))
        for group in (self.layout.loss_group, self.layout.group("pipeline_parallel")):
            loss, sums = sums.all_reduce(loss, group)
        return loss, sums

    def _skip_bad_step(
        self, step: Step, bad_documents: list[str], metrics: dict[str, float]
    ) -> None:
        """Leaves the weights as they are; raises NumericalError after `max_bad_steps` in a row."""
        self.num_skipped_steps += 1
        self._bad_steps_in_a_row += 1
        names = [
            name
            for of_rank in gather_objects(bad_documents, self.layout.world_group)
            for name in of_rank
        ]
        where, names = "Not finite already in the log-probs of", list(dict.fromkeys(names))
        if not names:
            where = "Every log-prob is finite; the step's documents are"
            names = [document.name for document in step.documents]
        values = [f"{name}={metrics[name]:g}" for name in _MUST_BE_FINITE if name in metrics]
        further = f"; and {len(names) - 8} more" if len(names) > 8 else ""
        message = (
            f"{', '.join(values)}: no update was made. {where}: {'; '.join(names[:8])}{further}."
        )
        if self._bad_steps_in_a_row >= self.max_bad_steps:
            raise NumericalError(
                f"{self._bad_steps_in_a_row} steps in a row were not finite (trainer.max_bad_steps="
                f"{self.max_bad_steps}). The last: {message}"
            )
        log.warning(message)


def _not_finite(micro_batches: list[MicroBatch], outputs: list[PolicyLoss]) -> list[str]:
    """Names of this rank's documents that have a number which is not finite before any gradient."""
    names = []
    # no output on early pipeline stages
    for micro_batch, out in zip(micro_batches, outputs, strict=False):
        vectors = "advantages", *known_vectors(micro_batch)
        total = sum((getattr(micro_batch, name) for name in vectors), out.log_probs.cpu())
        bad = ~torch.isfinite(total) & (micro_batch.labels >= 0)
        names += [micro_batch.names[i] for i in micro_batch.document_index[bad].unique().tolist()]
    return names
