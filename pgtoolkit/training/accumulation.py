"""Dynamic accumulation: one optimizer update from all micro-batches that a step has."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch, Step, StepTotals, known_vectors
from pgtoolkit.document import have_old_log_probs
from pgtoolkit.errors import ConfigError, DataError, NumericalError
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.checks import check_positive, check_whole
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.ranks.agreement import gather_numbers, gather_objects
from pgtoolkit.ranks.gradients import clip_gradients, scale_gradients, sum_gradients
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.training.end_of_steps import EndOfSteps
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.loss_scale import LossScale
from pgtoolkit.training.schedulers import (
    SchedulerSteps,
    check_callback,
    check_optimizers,
    check_schedulers,
    schedulers_of_hand,
)

log = logging.getLogger("pgtoolkit")

_MUST_BE_FINITE = ("loss", "grad_norm", "value_loss", "critic_grad_norm")
"""Metrics without which there is no update; a step has some or all of them."""

_COUNTERS = (
    *("num_updates", "updates_in_epoch", "num_skipped_steps"),
    *("documents_seen", "documents_trained"),
)
"""Counters of a module that a checkpoint of the Trainer keeps."""

KEPT = "pgtoolkit"
"""The key of a Trainer's checkpoint for the state that only a module here knows."""

_SCHEDULERS = "schedulers"
"""The key of that state for the schedulers that a subclass steps by itself."""

Checkpoint = dict[str, Any]
"""A checkpoint of the Trainer, as Lightning hands it to a module."""

WEIGHTS_ALONE = (
    "module.load_state_dict(torch.load(PATH, weights_only=False)['state_dict']), which begins "
    "anew with the weights, and trainer.fit without ckpt_path"
)
"""What a refusal says to use instead of a Trainer's checkpoint."""

_MOST_NAMES = 8
"""Documents that the message on a skipped step names."""


class StepOutput(TypedDict):
    """The result of `training_step`.

    The metrics are one level below, since one of them is named "loss": at that key of the result
    Lightning expects a tensor.
    """

    metrics: dict[str, float]


class DynamicAccumulation(lightning.LightningModule):
    """A LightningModule whose batch is a Step, and whose `training_step` makes one update.

    A subclass defines a micro-batch's share of the loss (`micro_batch_loss`), which is a PolicyLoss
    with the step's totals, and its single optimizer (`configure_optimizers`), which takes one
    gradient, unlike LBFGS. This class does the rest: forward and backward of every micro-batch, the
    sum of gradients and metrics over ranks, clipping, and the update. There is no update if the
    step has no trained token, or if its loss or its gradient is not finite.
    Schedulers from `configure_optimizers` are stepped here, by interval and frequency: of "step",
    after updates; of "epoch", after the last step of an epoch. A ReduceLROnPlateau is refused, and
    the refusal says how to step it; a scheduler that is an attribute of the module is kept in the
    Trainer's checkpoints.
    Steps come with their totals, from `rollouts.step_loader.StepLoader`, which gathers documents
    until `docs_per_step`, or from a DataLoader that collates with `rollouts.steps.make_step`.

    layout: the ranks that share each step. To Lightning each of them trains alone, on one device.
    max_grad_norm: a gradient with a larger norm is scaled down to this one; None: none is.
    max_bad_steps: after this number of bad steps in a row NumericalError is raised. A step is bad
        if its loss or its gradient is not finite.
    num_updates: the updates made so far.
    updates_in_epoch: those in the Trainer's present epoch, by which the frequency of a scheduler
        counts.
    documents_seen: the documents of all steps so far, also of those without an update. Each counts
        once, however many passes train it.
    documents_trained: the same with each document counted in each pass; None where each batch is
        trained once.
    num_skipped_steps: the steps so far that had no trained token or were bad.
    loss_scale: for gradients in float16; None if they have another type. A step whose gradient
        overflows makes no update on any rank. It is neither bad nor skipped: the loss scale counts
        it.
    """

    loss_scale: LossScale | None = None

    reads_old_log_probs: bool = True
    """Whether the loss reads them. Without them documents are refused, since the numbers of their
    micro-batches mean nothing, unless a subclass says False."""

    masks_truncated: bool = False
    """Whether documents that were cut off have weight 0."""

    without_old_log_probs: ClassVar[str] = (
        "reads_old_log_probs = False of the module if its loss does not read them"
    )
    """What the refusal says to use where they are unknown."""

    reports_metrics: bool = True
    """Whether each step's metrics go to the callbacks and loggers of the Trainer from here; `fit`
    does it by itself, for several ranks."""

    at_end_of_epoch: Callable[[], bool] | None = None
    """Returns whether a step was the last one of an epoch; None: the Trainer knows. `fit` sets it,
    for whose epochs the Trainer knows no length."""

    def __init__(
        self,
        layout: Layout = ONE_PROCESS,
        max_grad_norm: float | None = None,
        max_bad_steps: int = 3,
    ):
        super().__init__()
        if max_grad_norm is not None:
            check_positive("max_grad_norm", max_grad_norm)
        check_whole("max_bad_steps", max_bad_steps, 1)
        self.automatic_optimization = False
        self.layout = layout
        self.max_grad_norm = max_grad_norm
        self.max_bad_steps = max_bad_steps
        self.num_updates = 0
        self.updates_in_epoch = 0
        self.documents_seen = 0
        self.documents_trained: int | None = None
        self.num_skipped_steps = 0
        self._bad_steps_in_a_row = 0
        self._steps_in_trainer = 0
        self._scheduler_steps = SchedulerSteps()
        self._kept_schedulers: dict[str, dict[str, object]] | None = None

    def micro_batch_loss(self, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        """Return this micro-batch's share of the step's loss, as `pgtoolkit.policy_loss` does.

        micro_batch: on the module's device. It has no tokens if this rank has fewer micro-batches
            than another one, since every rank must make the same number of calls.
        totals: those of the whole step, for `policy_loss`.
        """
        raise TypeError(
            f"{type(self).__name__} needs a method micro_batch_loss(micro_batch, totals)"
        )

    def before_update(self) -> dict[str, float]:
        """Return further metrics of the step; a subclass may set the learning rate here.

        Called when the gradient is complete, also if the update is then skipped.
        """
        return {}

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        """Return pairs (process group, parameters).

        After the backward passes of a step, the gradients of these parameters are summed over the
        group, one pair after the other.
        """
        if self.layout.loss_group is None:
            return []
        return [(self.layout.loss_group, [p for p in self.parameters() if p.requires_grad])]

    def parameters_to_clip(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradient is measured and clipped; before that, the loss scale
        is divided out of it."""
        return self.parameters()

    def is_finite(self, metrics: dict[str, float]) -> bool:
        """Return whether the losses and gradient norms of a step are all finite."""
        return all(math.isfinite(metrics[name]) for name in _MUST_BE_FINITE if name in metrics)

    def backward_of_all(
        self, micro_batches: list[MicroBatch], totals: StepTotals
    ) -> list[PolicyLoss]:
        """Run forward and backward of each micro-batch, and return the loss of each.

        Gradients add up in the parameters.
        """
        outputs = []
        for micro_batch in micro_batches:
            output = self._loss_of(micro_batch, totals)
            self.manual_backward(self.scaled(output.loss))
            outputs.append(output)
        return outputs

    def _loss_of(self, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        """Return what a subclass makes of a micro-batch.

        Raises TypeError for another result than a PolicyLoss, ValueError for one of other totals
        than the step's, and DataError, with the names of documents, for their data.
        """
        try:
            output = self.micro_batch_loss(micro_batch.counted().to(self.device), totals)
        except DataError as error:
            if not error.documents or error.documents[-1] >= len(micro_batch.names):
                raise
            numbers = error.documents[:_MOST_NAMES]
            named = "; ".join(f"{number} is {micro_batch.names[number]}" for number in numbers)
            raise DataError(f"{error} Of the documents of this micro-batch {named}.") from error
        name = f"{type(self).__name__}.micro_batch_loss"
        if not isinstance(output, PolicyLoss):
            raise TypeError(
                f"{name} needs to return a PolicyLoss (got {type(output).__name__}). The metrics "
                "of the step are in it, too. Use return pgtoolkit.policy_loss(..., totals=totals), "
                "without .loss."
            )
        got = output.totals
        counts = [(int(of.num_documents), int(of.num_tokens)) for of in (totals, got)]
        if got is not totals and counts[0] != counts[1]:
            of_step, of_loss = [f"{each[0]} documents with {each[1]}" for each in counts]
            raise ValueError(
                f"{name} needs the totals of the step, of {of_step} trained tokens (got those of "
                f"{of_loss}). Its loss would be that of a step of its own. Use "
                "pgtoolkit.policy_loss(..., totals=totals)."
            )
        return output

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the loss scale, if there is one, for its backward pass."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        # Not Lightning's wrapper. It has copies of the optimizer's fields, and they keep their old
        # values when a state is loaded.
        return cast("torch.optim.Optimizer", self.optimizers(use_pl_optimizer=False))

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep the counters in a checkpoint of the Trainer, and the state of the schedulers that a
        subclass steps by itself, which the Trainer does not know."""
        checkpoint[KEPT] = {name: getattr(self, name) for name in _COUNTERS}
        if self._trainer is not None:
            of_hand = schedulers_of_hand(self)
            checkpoint[KEPT][_SCHEDULERS] = {
                name: scheduler.state_dict() for name, scheduler in of_hand.items()
            }

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Go on counting, so that a schedule goes on, from where the Trainer's checkpoint was.

        Raises ConfigError for a checkpoint without the counters.
        """
        kept = checkpoint.get(KEPT)
        if not isinstance(kept, dict) or not kept.keys() >= {*_COUNTERS}:
            raise ConfigError(
                f"ckpt_path needs a checkpoint with the counters of {type(self).__name__} (got one "
                "without). Schedules and metrics would begin anew. An on_save_checkpoint of your "
                "own needs super().on_save_checkpoint(checkpoint); of a checkpoint that lacks them "
                f"use {WEIGHTS_ALONE}."
            )
        for name in _COUNTERS:
            setattr(self, name, kept[name])
        self._kept_schedulers = kept.get(_SCHEDULERS, {})

    def _restore_schedulers(self) -> None:
        """Give the schedulers that a subclass steps by itself their state of a checkpoint that is
        resumed. Raises ConfigError where it has other ones."""
        states = self._kept_schedulers
        self._kept_schedulers = None
        if states is None:
            return
        of_hand = schedulers_of_hand(self)
        if states.keys() != of_hand.keys():
            here = ", ".join(f"self.{name}" for name in of_hand) or "none"
            there = ", ".join(f"self.{name}" for name in states) or "none"
            raise ConfigError(
                f"ckpt_path needs the schedulers that {type(self).__name__} steps by itself, "
                f"{here} (got a checkpoint with {there}). Their rates would begin anew. Make them "
                f"in configure_optimizers under the names of the checkpoint, or use "
                f"{WEIGHTS_ALONE}."
            )
        for name, scheduler in of_hand.items():
            scheduler.load_state_dict(states[name])

    def configure_callbacks(self) -> list[lightning.Callback]:
        """Refuse a Trainer that is to clip or to accumulate, and callbacks that would do something
        else than they say; return the one that ends a training without further steps.

        Lightning asks for them before it refuses both by itself, with advice that leads nowhere.
        """
        clip = self.trainer.gradient_clip_val
        if clip:
            raise ValueError(
                f"{type(self).__name__} needs a Trainer without gradient_clip_val (got {clip}). It "
                "clips the gradient of a whole step, over all ranks. Use max_grad_norm="
                f"{clip}, of DynamicAccumulation or OptimizerSettings."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"{type(self).__name__} needs a Trainer of accumulate_grad_batches=1 (got "
                f"{self.trainer.accumulate_grad_batches}). Each Step is one update, of as many "
                "micro-batches as it has. Use steps of more documents, such as "
                "DataLoader(batch_size=...) or accumulation.docs_per_step."
            )
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]  (set by Lightning's connector)
            self._check_callback(callback)
        return [] if self.at_end_of_epoch is not None else [EndOfSteps()]  # `fit` knows the end

    def _check_callback(self, callback: lightning.Callback) -> None:
        """Raise ValueError for a callback that would do something else than it says."""
        check_callback(self, callback)

    def on_train_start(self) -> None:
        self._steps_in_trainer = 0
        self._scheduler_steps.begin()
        self._restore_schedulers()

    def _report(self, metrics: dict[str, float]) -> None:
        """Give a step's metrics to the callbacks and loggers of a Trainer.

        Not by LightningModule.log, which takes 49 ms for sixty numbers.
        """
        if self._trainer is None or not self.reports_metrics:
            return
        trainer = self.trainer
        tensors = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        trainer.callback_metrics.update(tensors)
        trainer.logged_metrics.update(tensors)
        self._steps_in_trainer += 1
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]  (set by Lightning's connector)
        if every and self._steps_in_trainer % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def on_fit_start(self) -> None:
        """Refuse a Trainer of several devices, which would silently change the gradients, and one
        of a precision that it cannot give to steps; then optimizers and schedulers."""
        self.check_precision(self.trainer.precision)
        if self.trainer.world_size > 1:
            raise ValueError(
                "DynamicAccumulation needs a Trainer of one device in each process (got "
                f"{self.trainer.world_size} devices). Lightning would average gradients that have "
                "to be summed. Use devices=1, and a layout for several processes."
            )
        name = type(self).__name__
        check_optimizers(name, self.trainer.optimizers, self.parameters())
        self._check_schedulers()

    def _check_schedulers(self) -> None:
        """Raise ValueError for a scheduler that this module cannot step."""
        check_schedulers(type(self).__name__, self.trainer.lr_scheduler_configs)

    def check_precision(self, precision: str) -> None:
        """Raise ValueError for a Trainer's precision under which the module cannot be trained.

        The "true" ones convert each batch, and Lightning cannot convert a step. The scale of
        "16-mixed" would still be in the gradients when they are measured and clipped.
        """
        if precision == "16-mixed":
            raise ValueError(
                f"{type(self).__name__} needs a Trainer of precision='32-true' or 'bf16-mixed' "
                "(got '16-mixed'). Lightning would scale the loss, and the gradients are clipped "
                "before it divides them again. Use precision='bf16-mixed'."
            )
        converted = {"64-true": "double", "bf16-true": "bfloat16", "16-true": "half"}
        if precision in converted:
            raise ValueError(
                f"{type(self).__name__} needs a Trainer of precision='32-true' or 'bf16-mixed' "
                f"(got {precision!r}). Lightning cannot convert the numbers of a step. Use "
                f"precision='32-true', and module.{converted[precision]}() before trainer.fit."
            )

    def transfer_batch_to_device(
        self, batch: Step, device: torch.device, dataloader_idx: int
    ) -> Step:
        return batch  # each micro-batch is moved when its turn comes

    def training_step(self, step: Step, batch_index: int) -> StepOutput:
        """Make one optimizer update, or skip it, and return the step's metrics.

        The metrics reach callbacks as `trainer.callback_metrics`, the Trainer's loggers, and
        `Callback.on_train_batch_end` under the key "metrics".
        """
        if not isinstance(step, Step):
            raise ValueError(
                f"{type(self).__name__} needs a Step as a batch (got a {type(step).__name__}). "
                "Only a step has its totals. Use DataLoader(documents, batch_size=..., "
                "collate_fn=lambda batch: make_step(batch, max_tokens)), with make_step of "
                "pgtoolkit.rollouts.steps."
            )
        if batch_index == 0:
            self.updates_in_epoch = 0
        updates_before = self.num_updates
        output = self.take_step(step)
        made_update = self.num_updates > updates_before
        self.updates_in_epoch += made_update
        self._report(output["metrics"])
        if self._trainer is not None:
            counts = {}
            if made_update:
                counts["step"] = self.updates_in_epoch
            if self._ends_epoch(batch_index):
                counts["epoch"] = self.current_epoch + 1
            self._step_schedulers(counts)
        return output

    def _step_schedulers(self, counts: dict[str, int]) -> None:
        """Do the work of `SchedulerSteps.step`."""
        self._scheduler_steps.step(self, counts)

    def _ends_epoch(self, batch_index: int) -> bool:
        if self.at_end_of_epoch is not None:
            return self.at_end_of_epoch()
        return self.trainer.is_last_batch or batch_index + 1 == self.trainer.num_training_batches

    def take_step(self, step: Step) -> StepOutput:
        """Do the work of `training_step`, but for reporting."""
        started = time.perf_counter()
        check_shares(step, self.layout)
        self._check_old_log_probs(step)
        self._count_documents(step)
        updates_before = self.num_updates
        of_update = {}
        if step.totals.num_tokens == 0:
            self.num_skipped_steps += 1
        else:
            of_update = self._update(step)
        # Not earlier: a GPU still changes the weights, and does not wait for this.
        of_data = data_metrics(step.documents, updates_before, self.masks_truncated)
        metrics = of_data | of_update
        metrics |= {
            "documents_seen": self.documents_seen,
            "num_skipped_steps": self.num_skipped_steps,
        }
        if self.documents_trained is not None:
            metrics["documents_trained"] = self.documents_trained
        metrics |= self._time_and_memory(step, started)
        return {"metrics": metrics}

    def _check_old_log_probs(self, step: Step) -> None:
        """Raise DataError for documents without the old log-probs that the loss reads.

        They may come from a loader of the user's own, or from the checkpoint of a run that is
        resumed with another correction. An on_policy document has none, and would need them after
        further updates than those of its `anchor_version`.
        """
        present = (None, self.num_updates)
        without_old = [
            document.name
            for document in step.documents
            if document.old_log_probs is None
            and not (document.on_policy and document.anchor_version in present)
        ]
        if without_old and self.reads_old_log_probs:
            raise DataError(
                f"the loss needs old_log_probs of every document (got none of {without_old[0]}). "
                "It compares the policy with the one that sampled. Give them, or use "
                f"{self.without_old_log_probs}."
            )

    def _count_documents(self, step: Step) -> None:
        documents = int(step.totals.num_documents)
        if step.of_pass is None or step.of_pass.is_first:
            self.documents_seen += documents
        if step.of_pass is not None:
            self.documents_trained = (self.documents_trained or 0) + documents

    def _update(self, step: Step) -> dict[str, float]:
        """Compute the gradient of a step, and update the weights unless a number is not finite.

        Returns the metrics of the loss and of the update.
        """
        micro_batches = [
            local_tokens(micro_batch, self.layout) for micro_batch in step.micro_batches
        ]
        outputs = self._compute_gradient(micro_batches, step.totals)
        metrics = self._clip_and_measure(outputs, step)
        metrics |= {"num_micro_batches": len(micro_batches)} | self.before_update()
        all_finite = self.is_finite(metrics)
        overflowed = False
        if self.loss_scale is not None:
            metrics["loss_scale"] = self.loss_scale.value
            overflowed = self._adapt_scale(self.loss_scale, metrics, all_finite)
            metrics["num_overflows"] = self.loss_scale.num_overflows
        if all_finite:
            # Lightning's wrapper of the optimizer counts the update in trainer.global_step.
            counting_optimizer = cast(
                "lightning.pytorch.core.optimizer.LightningOptimizer", self.optimizers()
            )
            counting_optimizer.step()
            self.num_updates += 1
            self._bad_steps_in_a_row = 0
        elif not overflowed:
            bad_documents = _not_finite_documents(micro_batches, outputs)
            self._skip_bad_step(step, bad_documents, metrics)
        return metrics

    def _compute_gradient(
        self, micro_batches: list[MicroBatch], totals: StepTotals
    ) -> list[PolicyLoss]:
        """Put the gradient of the step, summed over ranks and without the loss scale, into the
        parameters; return the loss of each micro-batch."""
        self.optimizer.zero_grad()
        outputs = self.backward_of_all(micro_batches, totals)
        for group, parameters in self.gradient_groups():
            sum_gradients(parameters, group)
        if self.loss_scale is not None:
            scale_gradients(self.parameters_to_clip(), 1 / self.loss_scale.value)
        return outputs

    def _clip_and_measure(self, outputs: list[PolicyLoss], step: Step) -> dict[str, float]:
        """Clip the gradient, and return the metrics of the loss over all ranks.

        `grad_norm` is the norm from before clipping.
        """
        loss, sums = self._sum_over_ranks(outputs)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        metrics = {
            "loss": loss,
            "grad_norm": clip_gradients(self.parameters_to_clip(), self.layout, limit),
        }
        metrics |= sums.finalize(step.totals, have_old_log_probs(step.documents))
        return _as_numbers(metrics, self.device)

    def _sum_over_ranks(self, outputs: list[PolicyLoss]) -> tuple[Tensor, MetricSums]:
        """Return the step's loss and sums of metrics, added up over micro-batches and ranks."""
        if outputs:
            loss = torch.stack([output.loss.detach().double() for output in outputs]).sum()
            sums = functools.reduce(MetricSums.merge, [output.metric_sums for output in outputs])
        else:
            # This is a pipeline stage before the last one, which alone has the loss. A run with
            # several stages measures at level "none": three sums, and no extrema.
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            sums = MetricSums("none", loss.new_zeros(3), loss.new_empty(0))
        for group in (self.layout.loss_group, self.layout.group("pipeline_parallel")):
            loss, sums = sums.all_reduce(loss, group)
        return loss, sums

    def _adapt_scale(self, scale: LossScale, metrics: dict[str, float], all_finite: bool) -> bool:
        """Raise or lower the loss scale after a step, and return whether its gradient overflowed.

        A gradient that is not finite has overflowed if the loss is finite and the scale could still
        be lowered.
        """
        if all_finite:
            scale.rise()
            return False
        overflowed = math.isfinite(metrics["loss"]) and scale.fall()
        if overflowed and scale.num_overflows == 1:
            log.info(
                f"with a loss scale of {metrics['loss_scale']:g} the gradient overflowed float16: "
                "this step made no update, and the scale was halved. This note is printed once; "
                "the metrics loss_scale and num_overflows show every case."
            )
        return overflowed

    def _skip_bad_step(
        self, step: Step, bad_documents: list[str], metrics: dict[str, float]
    ) -> None:
        """Count a bad step and warn of it; every rank calls this.

        bad_documents: the names that `_not_finite_documents` returned on this rank.
        Raises NumericalError if this is the last of `max_bad_steps` in a row.
        """
        self.num_skipped_steps += 1
        self._bad_steps_in_a_row += 1
        gathered = gather_objects(bad_documents, self.layout.world_group)
        names = list(dict.fromkeys(name for rank_names in gathered for name in rank_names))
        if names:
            introduction = "Log-probs or data are not finite in"
        else:
            introduction = "No log-prob is known to be infinite or NaN. The step's documents"
            names = [document.name for document in step.documents]
        values = [f"{name}={metrics[name]:g}" for name in _MUST_BE_FINITE if name in metrics]
        listed = "; ".join(names[:_MOST_NAMES])
        if len(names) > _MOST_NAMES:
            listed += f"; and {len(names) - _MOST_NAMES} more"
        message = f"{', '.join(values)}: no update was made. {introduction}: {listed}."
        if self._bad_steps_in_a_row >= self.max_bad_steps:
            raise NumericalError(
                f"{self._bad_steps_in_a_row} steps in a row were not finite (trainer.max_bad_steps="
                f"{self.max_bad_steps}, in Python max_bad_steps). The last: {message}"
            )
        log.warning(message)

    def _time_and_memory(self, step: Step, started: float) -> dict[str, float]:
        """Return the seconds of each stage of the step, its tokens per second, and on a GPU its
        peak memory, which is measured anew from here on.

        started: when the update began, as `time.perf_counter` gave it.
        """
        measured: dict[str, float] = {}
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            measured["peak_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            torch.cuda.reset_peak_memory_stats(self.device)
        update_seconds = time.perf_counter() - started
        seconds = step.seconds | {"update": update_seconds}
        measured |= {f"seconds_{stage}": value for stage, value in seconds.items()}
        measured["tokens_per_second"] = int(step.totals.num_tokens) / update_seconds
        return measured


def check_shares(step: Step, layout: Layout) -> None:
    """Raise ValueError, on every rank, unless the micro-batches of all data ranks together hold
    each document of a step once.

    The places of documents are compared by the sum of their squares, where `make_step` gave them.
    """
    documents = int(step.totals.num_documents)
    here = sum(micro_batch.num_documents for micro_batch in step.micro_batches)
    places = [place for micro_batch in step.micro_batches for place in micro_batch.step_places]
    numbers = [here, sum(place * place for place in places), int(len(places) == here)]
    of_ranks = gather_numbers(layout, numbers)
    size = layout.size("data_parallel")
    copies = layout.world_size // size  # other ranks hold the documents of a data rank, too
    held = sum(of_rank[0] for of_rank in of_ranks) // copies
    squares = sum(of_rank[1] for of_rank in of_ranks) // copies
    has_places = all(of_rank[2] for of_rank in of_ranks)
    if held == documents and not has_places:
        return
    if held == documents and squares == sum(place * place for place in range(documents)):
        return
    got = f"{held}, some of them twice" if held == documents else f"{held}"
    use = "make_step(documents, max_tokens), without data_rank and data_size"
    if size > 1:
        use = (
            "make_step(documents, max_tokens, data_rank=layout.rank_in('data_parallel'), "
            "data_size=layout.size('data_parallel')), by the layout of the module"
        )
    elif held < documents:
        use += ", or give the module the layout of several processes, Layout.of_world(...)"
    raise ValueError(
        f"a step needs each of its {documents} documents once, over the data ranks of the "
        f"module's layout, data_parallel={size} (got {got}). Its denominators count each once, so "
        f"the gradient would be wrong. Use {use}."
    )


def _as_numbers(metrics: dict[str, Tensor], device: torch.device) -> dict[str, float]:
    """Return the metrics as Python numbers; all come from the device in one transfer.

    Counts, which are whole, become int.
    """
    values = torch.stack([value.to(device, torch.float64) for value in metrics.values()]).tolist()
    counts = {name for name, value in metrics.items() if not value.is_floating_point()}
    return {
        name: int(value) if name in counts else value
        for name, value in zip(metrics, values, strict=True)
    }


def _not_finite_documents(micro_batches: list[MicroBatch], outputs: list[PolicyLoss]) -> list[str]:
    """Return the names of this rank's documents with a trained token whose log-prob or data, such
    as its advantage, is not finite."""
    names = []
    # Pipeline stages before the last have no outputs.
    for micro_batch, output in zip(micro_batches, outputs, strict=False):
        vectors = ("advantages", *known_vectors(micro_batch))
        # A sum is not finite if one of its terms is not.
        total = sum((getattr(micro_batch, name) for name in vectors), output.log_probs.cpu())
        is_trained = micro_batch.labels >= 0
        bad_tokens = ~torch.isfinite(total) & is_trained
        bad_documents = micro_batch.document_index[bad_tokens].unique().tolist()
        names += [micro_batch.names[index] for index in bad_documents]
    return names
