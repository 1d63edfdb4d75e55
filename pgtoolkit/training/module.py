"""The LightningModule: one training step is one optimizer update over all micro-batches of a Step."""

from __future__ import annotations

import functools
import logging
import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from pgtoolkit.batch import MicroBatch, Step, StepTotals
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import NumericalError
from pgtoolkit.kernels.losses import LMHead, PolicyLoss, log_probs_of_hidden, loss_of_hidden
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.model.norms import clip_gradients, gradient_groups
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.sequence_data import local_tokens
from pgtoolkit.ranks.agreement import gather
from pgtoolkit.ranks.gradients import sum_gradients
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.loss import computation_of, loss_of
from pgtoolkit.training.optimizer import learning_rate, make_optimizer

log = logging.getLogger("pgtoolkit")


class PolicyGradientModule(lightning.LightningModule):
    """Trains `policy` by the loss that `config` describes, together with the other ranks of `layout`.

    Manual optimization: a batch is a whole Step, so progress, schedules and checkpoints count optimizer steps.
    num_updates counts the optimizer updates taken; documents_seen all documents delivered, also those of a step
    that was skipped. names_in_optimizer: of the whole model's parameters, in the order of one process's optimizer.
    """

    def __init__(self, config: Config, policy: Policy, layout: Layout, names_in_optimizer: list[str]):
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.policy = policy
        self.layout = layout
        self.names_in_optimizer = names_in_optimizer
        self.model = policy.model  # registered here, so that Lightning moves it
        self.num_updates = 0
        self.documents_seen = 0
        self.num_skipped_steps = 0
        self._bad_steps_in_a_row = 0
        self.loss = loss_of(config)
        self.computation = computation_of(config)
        self._noted_no_signal = False

    def configure_optimizers(self):
        return make_optimizer(self.model, self.config.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        # Lightning's wrapper holds copies of its fields, which a loaded state would not reach.
        return self.optimizers(use_pl_optimizer=False)

    def transfer_batch_to_device(self, batch: Step, device: torch.device, dataloader_idx: int) -> Step:
        return batch  # the micro-batches are moved one at a time

    def training_step(self, step: Step, batch_index: int) -> dict[str, dict[str, float]]:
        """One optimizer update, or none where nothing is trained or a number is not finite."""
        started = time.perf_counter()
        self.documents_seen += step.totals.num_documents
        metrics = data_metrics(step.documents, self.num_updates)
        self._note_no_signal(metrics)
        if step.totals.num_tokens == 0:
            self.num_skipped_steps += 1
        else:
            metrics |= self._update(step)
        seconds = time.perf_counter() - started
        metrics |= {
            "documents_seen": self.documents_seen,
            "num_skipped_steps": self.num_skipped_steps,
            "tokens_per_second": step.totals.num_tokens / seconds,
        }
        return {"metrics": metrics}  # Lightning keeps the key "loss" at the top level for a tensor

    def _note_no_signal(self, metrics: dict[str, float]) -> None:
        if metrics.get("zero_advantage_group_fraction") == 1 and not self._noted_no_signal:
            self._noted_no_signal = True
            log.warning(
                f"note: every advantage of the step that ends at document {self.documents_seen} is 0: the completions "
                "of each prompt have equal rewards, so it teaches nothing. Is the task too hard, too easy, or an "
                "answer longer than a completion? Said once; the metric zero_advantage_group_fraction tells more."
            )

    def _update(self, step: Step) -> dict[str, float]:
        optimizer = self.optimizer
        optimizer.zero_grad()
        micro_batches = [local_tokens(micro_batch, self.layout) for micro_batch in step.micro_batches]
        outputs = self._backward(micro_batches, step.totals)
        for group, parameters in gradient_groups(self.policy, self.layout):
            sum_gradients(parameters, group)
        rate = learning_rate(self.config.optimizer, self.num_updates, self.config.trainer.max_steps)
        metrics = self._step_metrics(outputs, step.totals)
        metrics |= {"num_micro_batches": len(micro_batches), "learning_rate": rate}
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            self.num_updates += 1
            self._bad_steps_in_a_row = 0
        else:
            self._skip_bad_step(step, _not_finite(micro_batches, outputs), metrics)
        return metrics

    def _backward(self, micro_batches: list[MicroBatch], totals: StepTotals) -> list[PolicyLoss]:
        """Forward and backward of all micro-batches; none is returned by pipeline stages before the last."""
        if self.policy.pipeline is not None:
            with_head = self.policy.with_head
            return self.policy.pipeline.run(micro_batches, lambda m, hidden: self._loss(m, totals, with_head(hidden)))
        outputs = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            self.policy.synchronise_gradients(last=number == len(micro_batches))
            out = self._loss(micro_batch, totals)
            self.manual_backward(out.loss)
            outputs.append(out)
        return outputs

    def _step_metrics(self, outputs: list[PolicyLoss], totals: StepTotals) -> dict[str, float]:
        """Clips the gradient and reads all numbers of the step, those of all ranks, in one transfer to the host."""
        loss, sums = self._over_ranks(outputs)
        limit = self.config.optimizer.max_grad_norm
        metrics = {
            "loss": loss,
            "grad_norm": clip_gradients(self.parameters(), self.layout, math.inf if limit is None else limit),
            **sums.finalize(totals),
        }
        values = torch.stack([value.to(self.device, torch.float64) for value in metrics.values()]).tolist()
        counts = {name for name, value in metrics.items() if not value.is_floating_point()}
        return {name: int(x) if name in counts else x for name, x in zip(metrics, values, strict=True)}

    def _over_ranks(self, outputs: list[PolicyLoss]) -> tuple[Tensor, MetricSums]:
        """The step's loss and metrics, from the shares of every rank that has one."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        # Of a pipeline stage before the last, which there is at level none only: one sum, no extrema.
        sums = MetricSums(self.config.metrics.level.value, loss.new_zeros(1), loss.new_empty(0))
        if outputs:
            sums = functools.reduce(MetricSums.merge, [out.metric_sums for out in outputs])
            loss = torch.stack([out.loss.detach().double() for out in outputs]).sum()
        for group in (self.layout.loss_group, self.layout.group("pipeline_parallel")):
            loss, sums = sums.all_reduce(loss, group)
        return loss, sums

    def _skip_bad_step(self, step: Step, bad_documents: list[str], metrics: dict[str, float]) -> None:
        """Leaves the weights as they are; raises NumericalError after `trainer.max_bad_steps` in a row."""
        self.num_skipped_steps += 1
        self._bad_steps_in_a_row += 1
        names = [name for found in gather(bad_documents, self.layout.world_group) for name in found]
        message = (
            f"loss={metrics['loss']:g}, grad_norm={metrics['grad_norm']:g}: no update was made. "
            f"{_blame(step, list(dict.fromkeys(names)))}"
        )
        if self._bad_steps_in_a_row >= self.config.trainer.max_bad_steps:
            raise NumericalError(
                f"{self._bad_steps_in_a_row} steps in a row were not finite (trainer.max_bad_steps="
                f"{self.config.trainer.max_bad_steps}). The last: {message}"
            )
        log.warning(message)

    def _loss(self, micro_batch: MicroBatch, totals: StepTotals, inputs: tuple | None = None) -> PolicyLoss:
        """This micro-batch's share of the step's loss and metrics; inputs: of the loss, where they exist already."""
        if inputs is None:
            micro_batch = micro_batch.counted().to(self.device)
            hidden, head, ranks = self.policy.loss_inputs(micro_batch)
            if torch.is_grad_enabled() and self._head_adds_its_gradient():
                weight = self.policy.head.weight
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                head = replace(head, weight_gradient=weight.grad)
        else:
            hidden, head, ranks = inputs
        return loss_of_hidden(hidden, self._precise(head), micro_batch, totals, self.loss, ranks, self.computation)

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """(T,) log-prob of each label by the forward pass that training uses."""
        micro_batch = micro_batch.counted().to(self.device)
        hidden, head, _ = self.policy.loss_inputs(micro_batch)
        how = replace(self.computation, num_splits=1)
        return log_probs_of_hidden(hidden, self._precise(head), micro_batch, self.loss, how)

    def _precise(self, head: LMHead) -> LMHead:
        return replace(head, fp32_logits=self.config.model.fp32_lm_head)

    def _head_adds_its_gradient(self) -> bool:
        """Whether the loss may add the head's gradient to `weight.grad` itself, which saves a second one's memory."""
        whole = self.layout.world_size == self.layout.size("data_parallel") and not self.config.parallelism.shard
        return self.computation.fused and whole and self.policy.head.weight.requires_grad


def _not_finite(micro_batches: list[MicroBatch], outputs: list[PolicyLoss]) -> list[str]:
    """Names of this rank's documents that have a number which is not finite before any gradient."""
    names = []
    for micro_batch, out in zip(micro_batches, outputs, strict=False):  # no output on early pipeline stages
        bad = ~torch.isfinite(out.log_probs.cpu() + micro_batch.old_log_probs + micro_batch.advantages)
        bad &= micro_batch.labels >= 0
        names += [micro_batch.names[i] for i in micro_batch.document_index[bad].unique().tolist()]
    return names


def _blame(step: Step, names: list[str]) -> str:
    reason = "Not finite already in the log-probs of" if names else "Every log-prob is finite; the step's documents are"
    names = names or [document.name for document in step.documents]
    shown = "; ".join(names[:8]) + (f"; and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{reason}: {shown}."
