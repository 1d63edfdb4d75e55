"""The LightningModule that `pgtk` trains: a policy under the configured loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch, Step, StepTotals
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.kernels.losses import (
    Computation,
    LMHead,
    PolicyLoss,
    check_splits,
    log_probs_of_hidden,
    loss_of_hidden,
)
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.checks import MAX_LOG_PROB, check_object, check_whole
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import REWARD_KINDS
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.top_entropy import check_fraction
from pgtoolkit.losses.trial import check_on_step, has_own_code
from pgtoolkit.model import rowwise
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.model.kept_layers import KeepsByMemory
from pgtoolkit.model.lora import adapted_layers, without_adapters
from pgtoolkit.model.policy import Policy, check_policy, named_weights
from pgtoolkit.model.weight_files import vocabularies_differ
from pgtoolkit.ranks.collectives import local
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.advantages import Shape
from pgtoolkit.rollouts.evaluator import Evaluator
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.sampling.settings import SamplingSettings
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import refusal
from pgtoolkit.training.accumulation import (
    KEPT,
    WEIGHTS_ALONE,
    Checkpoint,
    DynamicAccumulation,
    StepOutput,
)
from pgtoolkit.training.critic import Critic, check_value_head
from pgtoolkit.training.fitting_parts import check_parts
from pgtoolkit.training.frameworks import callbacks, lightning
from pgtoolkit.training.loss_scale import LossScale
from pgtoolkit.training.optimizer import LearningRate, make_optimizer
from pgtoolkit.training.settings import CriticSettings, OptimizerSettings, Schedule
from pgtoolkit.training.surprises import Surprises
from pgtoolkit.training.whole_step import (
    FirstPass,
    after_first_pass,
    needs_first_pass,
    whole_step,
    with_mean_factor,
    with_rewards,
    with_signs,
)

if TYPE_CHECKING:
    from pgtoolkit.model.spread import ParallelPolicy

log = logging.getLogger("pgtoolkit")

Inputs = tuple[Tensor, LMHead, Ranks]


class PolicyGradientModule(DynamicAccumulation):
    """Trains `policy` by a loss, with the other ranks of `layout`.

    computation: how the loss is computed; with check_finite=False, since the step's loss and
        gradient are checked.
    max_steps: of the run, to whose end the learning rate decays. Training ends where the Trainer or
        the loader says so: a Trainer of your own has max_steps, too, or later updates have the
        least rate, which is warned of.
    reference: without gradient, spread like the policy. It is the policy itself where the reference
        is the policy without its adapters, and None where documents bring their ref_log_probs or
        need none.
    max_bad_steps: consecutive steps with a loss or gradient that is not finite that end the run.
    reference_every: updates between moves of the reference towards the policy; None: it stays.
        Where each batch has several passes, a move waits for the last step of the last one.
    reference_rate: how far it moves, above 0 and at most 1.
    reference_is_due: whether the reference is to move once its batch has been trained.
    Attributes that may be set afterwards:
    evaluator: measures the policy on held-out prompts; None: the run is not evaluated.
    critic: gives advantages of single tokens, see `add_critic`; None: the run has none.
    surprises: gives notes on steps; None: nobody does.
    adaptive_kl: the coefficient of the penalty, in place of that of the loss, where it follows a
        target. Where the penalty is a part of the loss, each step's documents are counted as they
        are first trained, and the coefficient moves after the last step of their batch; elsewhere
        who makes rewards moves it, and documents have their kl_reward.
    shape: what happens to rewards before a loss that asks for them gets them.
    sampling: how completions are sampled, for the folder of a checkpoint.
    keeps_layers: decides on a GPU how much the layers keep of a forward pass; None: that is fixed.
    record: what a checkpoint keeps of the run's configuration.
    """

    without_old_log_probs = (
        "loss=reinforce correction=none kl=none, in Python Loss(Reinforce(), ...) without either"
    )
    reference: Policy | None = None
    evaluator: Evaluator | None = None
    critic: Critic | None = None
    surprises: Surprises | None = None
    adaptive_kl: AdaptiveKL | None = None
    shape: Shape = Shape()
    sampling: SamplingSettings | None = None
    keeps_layers: KeepsByMemory | None = None
    _schedule: LearningRate | None = None

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        computation: Computation,
        optimizer: OptimizerSettings,
        max_steps: int,
        layout: Layout = ONE_PROCESS,
        reference: Policy | None = None,
        *,
        max_bad_steps: int = 3,
        reference_every: int | None = None,
        reference_rate: float = 1.0,
    ):
        check_policy("policy", policy)
        if reference is not None:
            check_policy("reference", reference)
        check_object("loss", loss, Loss, "Loss(Grpo(), aggregation_of('token_mean'))")
        check_object("computation", computation, Computation, "Computation(check_finite=False)")
        use = "OptimizerSettings(learning_rate=1e-6)"
        check_object("optimizer", optimizer, OptimizerSettings, use)
        check_whole("max_steps", max_steps, 1)
        _check_loss(loss, computation, reference, layout)
        if reference_every is not None:
            check_whole("reference_every", reference_every, 1)
        check_fraction("reference_rate", reference_rate)
        _check_moves(policy, reference, reference_every, reference_rate)
        _check_reference(policy, reference)
        if reference is not None:
            _check_vocabulary("reference", policy, reference, len(reference.head.weight))
        super().__init__(layout, optimizer.max_grad_norm, max_bad_steps)
        self.policy = policy
        self.model = policy.model  # as an attribute, so that Lightning moves it to the device
        self.reference = reference
        if reference is not None and reference is not policy:
            self.reference_model = reference.model  # as above
        if policy.compute_dtype == torch.float16:
            self.loss_scale = LossScale()
        self.loss = loss
        self._has_untried_code = has_own_code(loss)
        self.computation = computation
        self.max_steps = max_steps
        self.reference_every = reference_every
        self._reference_rate = reference_rate
        self._optimizer_settings = optimizer
        self._first_pass: FirstPass | None = None
        self._kept_inputs: Inputs | None = None
        self._noted_other_reference = False
        self.reference_is_due = False
        self.record: JsonObject = {}

    def refuse_another_end(self, steps: int) -> None:
        """Raise ConfigError where the learning rate decays to another step than the run's last.

        steps: of the whole run.
        """
        schedule = self._optimizer_settings.schedule
        if self._has_own_optimizer() or schedule == Schedule.constant or steps == self.max_steps:
            return
        later = "Later steps would have the least rate"
        reason = later if steps > self.max_steps else "The rate would not come down"
        raise ConfigError(
            refusal(
                setting=f"PolicyGradientModule(..., max_steps={self.max_steps})",
                needs=f"max_steps={steps}, as the StepLoader has",
                got=f"schedule={schedule}, which ends at step {self.max_steps}",
                reason=f"{reason}.",
                use=f"max_steps={steps} in both",
            )
        )

    def add_critic(self, body: Policy, settings: CriticSettings) -> None:
        """Train a critic together with the policy: `body`, `training.critic.with_value_head(...)`
        of a policy.

        Each step's documents need values and returns, which rollouts with `Estimator('gae')` give
        them. Raises ValueError for a body of another head or of other tokens, and for settings by
        which the policy would never be trained.
        """
        check_policy("body", body)
        check_value_head(body)
        _check_vocabulary("body", self.policy, body, len(self.policy.head.weight))
        if settings.steps_before_policy >= self.max_steps:
            raise ValueError(
                f"CriticSettings(steps_before_policy={settings.steps_before_policy}) needs fewer "
                f"than the max_steps={self.max_steps} of the module: the policy would never be "
                "trained. Use steps_before_policy=0"
            )
        optimizer = replace(self._optimizer_settings, learning_rate=settings.learning_rate)
        self.critic = Critic(settings, optimizer, self.max_steps, body, self.layout, self.loss)
        self.critic_model = body.model  # as for the policy

    def configure_optimizers(
        self,
    ) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        """Return the optimizer of the settings, and the schedule of its rate.

        A subclass may return an optimizer of its own, with schedulers or without, as to Lightning.
        Of the settings only max_grad_norm then has an effect, and the others have for a critic.
        """
        if self.critic is not None:
            self.critic.make_optimizer()
        optimizer = make_optimizer(self.model, self._optimizer_settings)
        updates = self.max_steps
        if self.critic is not None:
            updates -= self.critic.settings.steps_before_policy
        self._schedule = LearningRate(optimizer, self._optimizer_settings, updates)
        return [optimizer], [{"scheduler": self._schedule, "interval": "step"}]

    def _has_own_optimizer(self) -> bool:
        """Return whether a subclass has a `configure_optimizers` of its own."""
        method = type(self).configure_optimizers
        return method is not PolicyGradientModule.configure_optimizers

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.critic is not None and not hasattr(self.critic, "optimizer"):
            self.critic.make_optimizer()

    def on_train_start(self) -> None:
        super().on_train_start()
        loader = self.trainer.train_dataloader
        if isinstance(loader, StepLoader):  # of a Trainer of the user's own
            check_parts(self, loader)

    def _check_schedulers(self) -> None:
        """Raise ConfigError for a scheduler other than the one of the settings, which sets the rate
        of each update; of an optimizer of a subclass, ValueError for one that cannot be stepped."""
        if self._schedule is not None and self._schedule.optimizer not in self.trainer.optimizers:
            self._schedule = None  # of a subclass that calls this method for the critic's optimizer
        if self._schedule is None:
            super()._check_schedulers()
            return
        for config in self.trainer.lr_scheduler_configs:
            if config.scheduler is not self._schedule:
                name = type(config.scheduler).__name__
                raise ConfigError(_sets_the_rate(name, "no scheduler of your own"))

    def _check_callback(self, callback: lightning.Callback) -> None:
        is_averaging = isinstance(callback, callbacks.StochasticWeightAveraging)
        if is_averaging and not self._has_own_optimizer():
            name = type(callback).__name__
            raise ConfigError(_sets_the_rate(name, f"a Trainer without {name}"))
        super()._check_callback(callback)

    def _step_schedulers(self, counts: dict[str, int]) -> None:
        if self._schedule is None:
            super()._step_schedulers(counts)
        # Else `before_update` sets the rate, by the number of the update.

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep the parts that the Trainer does not know in its checkpoint."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEPT] |= {name: part() for name, part in self._kept_parts().items()}

    def _kept_parts(self) -> dict[str, Callable[[], object]]:
        """Return a function for the state of each part that the Trainer does not know, by name.

        Weights are not in it, since the Trainer keeps those of a critic and of a reference, too.
        """
        parts: dict[str, Callable[[], object]] = {}
        if self.critic is not None:
            parts["critic"] = self.critic.state_dict
        if self.adaptive_kl is not None:
            parts["adaptive_kl"] = self.adaptive_kl.state_dict
        if self.loss_scale is not None:
            parts["loss_scale"] = self.loss_scale.state_dict
        if self.reference_every is not None:
            parts["reference_is_due"] = lambda: self.reference_is_due
        return parts

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the Trainer; raises ConfigError where that lacks a part."""
        super().on_load_checkpoint(checkpoint)
        kept = checkpoint[KEPT]
        lacking = [name for name in self._kept_parts() if name not in kept]
        if lacking:
            raise ConfigError(
                refusal(
                    setting="ckpt_path",
                    needs="a checkpoint of a module with the same parts",
                    got=f"one without {', '.join(lacking)}",
                    reason="The training would not go on as it was.",
                    use=WEIGHTS_ALONE,
                )
            )
        if self.critic is not None:
            self.critic.load_state_dict(kept["critic"])
        if self.adaptive_kl is not None:
            self.adaptive_kl.load_state_dict(kept["adaptive_kl"])
            self.take_kl_coefficient()
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(kept["loss_scale"])
        if self.reference_every is not None:
            self.reference_is_due = kept["reference_is_due"]

    def take_step(self, step: Step) -> StepOutput:
        self._check_tokens(step)
        self._check_sampling_log_probs(step)
        self._check_ref_log_probs(step)
        self._check_returns(step)
        self._check_above_0(step)
        self._check_adaptive_kl(step)
        self.take_kl_coefficient()
        step = with_signs(step, self.loss, self.layout)
        updates_before = self.num_updates
        if self.keeps_layers is not None:
            self.keeps_layers.begin_step()
        output = super().take_step(step)
        if self.num_updates > updates_before:
            self._note_due_reference()
            if self.keeps_layers is not None:
                peak = round(1e9 * output["metrics"]["peak_memory_gb"])
                self.keeps_layers.end_step(peak, step.micro_batches)
        if self.reference_is_due and (step.of_pass is None or step.ends_batch):
            self._move_reference()
        rowwise.tell()
        metrics = output["metrics"]
        if self.adaptive_kl is not None:
            metrics["kl_coefficient"] = self.adaptive_kl.coefficient
            if self.loss.kl is not None:
                self._adapt_kl(self.adaptive_kl, step, metrics)
        if step.totals.num_tokens:
            weight_sum = self.loss.aggregation.weight_sum(step.totals)
            if weight_sum is not None:
                metrics["weight_sum"] = weight_sum
        if self.surprises is not None:
            self.surprises.of_step(metrics, self.documents_seen)
        return output

    def micro_batch_loss(self, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        micro_batch = self.with_reference(micro_batch)
        reference_states = self._reference_states(micro_batch) if self.loss.full_kl else None
        kept, self._kept_inputs = self._kept_inputs, None
        hidden, head, ranks = kept or self.policy.loss_inputs(micro_batch)
        head = replace(head, reference=reference_states)
        weight = self.policy.head.weight
        if self._adds_head_gradient() and torch.is_grad_enabled():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            head = replace(head, weight_gradient=weight.grad)
        loss = self._loss((hidden, head, ranks), micro_batch, totals)
        if self.loss.full_kl and self.reference is not None and self.reference is not self.policy:
            self.reference.put_away()
        return loss

    def _adds_head_gradient(self) -> bool:
        """Return whether the loss itself adds to the gradient of the LM head's weight.

        That saves the memory of a second gradient. It needs a whole weight on each rank, and a loss
        that no scale multiplies after it is computed.
        """
        return (
            self.computation.fused
            and self._has_whole_policy()
            and self.policy.head.weight.requires_grad
            and self.loss_scale is None
        )

    def _has_whole_policy(self) -> bool:
        """Return whether this process computes whole micro-batches with weights of its own."""
        is_alone = self.layout.world_size == self.layout.size("data_parallel")
        return is_alone and not self.policy.sharded

    def backward_of_all(
        self, micro_batches: list[MicroBatch], totals: StepTotals
    ) -> list[PolicyLoss]:
        """Run forward and backward of each micro-batch; gradients add up in the parameters.

        A pipeline takes all micro-batches at once. Its stages before the last return no outputs.
        """
        if self.policy.pipeline is None:
            return super().backward_of_all(micro_batches, totals)
        with_head = cast("ParallelPolicy", self.policy).with_head

        def loss_of_states(micro_batch: MicroBatch, hidden: Tensor) -> PolicyLoss:
            return self._loss(with_head(hidden), micro_batch, totals)

        return self.policy.pipeline.run(micro_batches, loss_of_states, self.scaled)

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        return self.policy.gradient_groups()

    def parameters_to_clip(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()

    def _update(self, step: Step) -> dict[str, float]:
        step = with_rewards(step, self.loss, self.layout, self.shape)
        step = with_mean_factor(step, self.loss.correction, self.layout)
        self._try_own_code(step)
        if self.critic is None or not self.critic.trains_alone:
            step = self._after_first_pass(step)
        if self.critic is None:
            return super()._update(step)
        if self.critic.trains_alone:
            return self._update_critic_alone(self.critic, step)
        updates_before = self.num_updates
        metrics = super()._update(step)
        if self.num_updates > updates_before:
            metrics |= self.critic.update()
        return metrics

    def _try_own_code(self, step: Step) -> None:
        """Try a loss of the user's own on the first step of this process, before its update.

        Costs a forward pass. Raises ConfigError, on every rank, where the step's numbers would
        depend on how it was cut.
        """
        if not (self._has_untried_code and step.totals.num_tokens):
            return
        self._has_untried_code = False
        step = self._with_reference_vectors(step)
        log_probs = [self.log_probs(micro_batch) for micro_batch in step.micro_batches]
        of_step = whole_step(step, log_probs, self.layout)
        try:
            check_on_step(self.loss, of_step.tokens, of_step.log_probs, step.totals)
        except ValueError as error:
            raise ConfigError(
                f"{error}. It was tried on the documents of the first step, in float64, before any "
                "update."
            ) from error

    def _with_reference_vectors(self, step: Step) -> Step:
        """Return the step with the reference's log-probs, where a function asks for them."""
        family = self.loss.family
        if (
            self.reference is None
            or self.loss.kl is None
            or self.loss.full_kl
            or not isinstance(family, FunctionFamily)
            or "ref_log_probs" not in family.asked
        ):
            return step
        micro_batches = [
            replace(micro_batch, ref_log_probs=self.ref_log_probs(micro_batch))
            for micro_batch in step.micro_batches
        ]
        return replace(step, micro_batches=micro_batches)

    def _after_first_pass(self, step: Step) -> Step:
        """Return the step with the results of its first pass, where the loss depends on the whole
        step."""
        self._first_pass = self._kept_inputs = None
        if needs_first_pass(self.loss):
            step = self._with_reference_vectors(step)
            passes = self._numbers_of_step(step, self.loss.entropy_top_fraction is not None)
            step, self._first_pass = after_first_pass(step, self.loss, passes, self.layout)
        return step

    def _numbers_of_step(
        self, step: Step, with_entropy: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return (log-prob of each label, entropies or None) of each micro-batch.

        The states of the first one are made last, with their graph: the second pass begins with
        them, and makes them no second time.
        """
        if not (step.micro_batches and self._has_whole_policy()):
            return [self._numbers_of_tokens(each, with_entropy) for each in step.micro_batches]
        first, *others = step.micro_batches
        of_others = [self._numbers_of_tokens(each, with_entropy) for each in others]
        on_device = first.counted().to(self.device)
        self._kept_inputs = self.policy.loss_inputs(on_device)
        with torch.no_grad():
            of_first = self.log_probs_of(self._kept_inputs, on_device, None, with_entropy)
        return [of_first, *of_others]

    def _update_critic_alone(self, critic: Critic, step: Step) -> dict[str, float]:
        metrics = self._critic_gradient(critic, step)
        if self.is_finite(metrics):
            self._bad_steps_in_a_row = 0
            return metrics | critic.update()
        self._skip_bad_step(step, [], metrics)
        return metrics

    def _clip_and_measure(self, outputs: list[PolicyLoss], step: Step) -> dict[str, float]:
        # The first pass is measured while a GPU still works on the second one.
        of_whole = None if self._first_pass is None else self._first_pass.measured()
        metrics = super()._clip_and_measure(outputs, step)
        if of_whole is not None:
            loss, of_first = of_whole
            if loss is not None:
                # The second pass has the value of the penalties alone.
                of_first["loss"] = metrics["loss"] + loss
            metrics |= of_first
        if self.critic is not None:
            metrics |= self._critic_gradient(self.critic, step)
        return metrics

    def _critic_gradient(self, critic: Critic, step: Step) -> dict[str, float]:
        return critic.gradient(step.micro_batches, step.totals, self.max_grad_norm)

    def before_update(self) -> dict[str, float]:
        if self._schedule is None:
            return {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        schedule = self._optimizer_settings.schedule
        if self.num_updates == self.max_steps and schedule != Schedule.constant:
            log.warning(
                f"PolicyGradientModule has made its max_steps={self.max_steps} updates, to whose "
                f"end schedule={schedule} has decayed: from now on the learning rate is the least "
                "one. Use lightning.Trainer(max_steps=...) of the same number."
            )
        return {"learning_rate": self._schedule.set(self.num_updates)}

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """Return the (T,) log-prob of each label, by the forward pass that training uses.

        temperature: None for the run's.
        """
        return self._numbers_of_tokens(micro_batch, False, temperature)[0]

    @torch.no_grad()
    def _numbers_of_tokens(
        self, micro_batch: MicroBatch, with_entropy: bool, temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (log-prob of each label, entropy of each row's softmax or None), (T,) each, by the
        forward pass that training uses."""
        policy = self.policy
        num_tokens = len(micro_batch.tokens)
        micro_batch = local_tokens(micro_batch, self.layout).counted().to(self.device)

        def rows_of(inputs: Inputs) -> Tensor:
            """Return (1, T) log-probs, or (2, T) with the entropies."""
            numbers = self.log_probs_of(inputs, micro_batch, temperature, with_entropy)
            return torch.stack([vector for vector in numbers if vector is not None])

        if policy.pipeline is None:
            rows = rows_of(policy.loss_inputs(micro_batch))
        else:
            with_head = cast("ParallelPolicy", policy).with_head
            rows = policy.pipeline.on_last_stage(
                micro_batch, lambda hidden: rows_of(with_head(hidden)), 1 + with_entropy
            )
        policy.put_away()
        log_probs, *entropy = [policy.all_tokens(row)[:num_tokens] for row in rows]
        return log_probs, entropy[0] if entropy else None

    @torch.no_grad()
    def ref_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) log-prob of each label under the reference. Raises ConfigError without
        one."""
        if self.reference is None:
            raise ConfigError(
                refusal(
                    setting="SampledRollouts(..., penalty=...)",
                    needs="a reference",
                    got="None",
                    reason="The penalty on rewards is the distance from it.",
                    use="PolicyGradientModule(..., reference=...)",
                )
            )
        num_tokens = len(micro_batch.tokens)
        micro_batch = local_tokens(micro_batch, self.layout).counted().to(self.device)
        return self.policy.all_tokens(self._reference_log_probs(micro_batch))[:num_tokens]

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) value that the critic gives each position. Raises ConfigError without
        one."""
        if self.critic is None:
            raise ConfigError(
                refusal(
                    setting="Estimator('gae')",
                    needs="a critic",
                    got="None",
                    reason="The advantages of gae are made of its values.",
                    use="PolicyGradientModule.add_critic(body, CriticSettings(...))",
                )
            )
        values = self.critic.values(micro_batch.to(self.device))
        self.critic.body.put_away()
        return values

    @torch.no_grad()
    def entropy(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) entropy of the softmax before each label, 0 where labels < 0.

        micro_batch: counted, and on the module's device.
        """
        inputs = self.policy.loss_inputs(micro_batch)
        _, entropy = self.log_probs_of(inputs, micro_batch, with_entropy=True)
        assert entropy is not None
        return entropy

    @torch.no_grad()
    def with_reference(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the reference's log-probs, where the loss reads them.

        The full KL reads hidden states instead. For a penalty on rewards, which is no part of the
        loss, the documents have the log-probs already.
        """
        if self.reference is None or self.loss.full_kl or self.loss.kl is None:
            return micro_batch
        return replace(micro_batch, ref_log_probs=self._reference_log_probs(micro_batch))

    def _reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) log-prob of each label under the reference.

        micro_batch: counted, and on the module's device.
        """
        assert self.reference is not None
        log_probs, _ = self.log_probs_of(*self._reference_inputs(micro_batch))
        self.reference.put_away()
        return _at_places_of_policy(log_probs, micro_batch)

    def _adapt_kl(self, adaptive: AdaptiveKL, step: Step, metrics: dict[str, float]) -> None:
        """Count the documents of a step, and move the coefficient of the penalty once their batch
        has been trained.

        metrics: of the step, without the mean of the penalty's term where it did not train the
            policy.
        """
        kl = metrics.get("kl_penalty")
        if kl is not None and (step.of_pass is None or step.of_pass.is_first):
            documents = int(step.totals.num_documents)
            # Only these have a term; in the mean the others count as 0.
            with_a_term = documents - int(metrics["num_empty_documents"])
            adaptive.add(kl * documents, with_a_term)
        if step.ends_batch:
            adaptive.adapt()
            self.take_kl_coefficient()

    def take_kl_coefficient(self) -> None:
        """Give the loss the present coefficient of its penalty, and have it measured."""
        if self.adaptive_kl is None or self.loss.kl is None:
            return
        if self.loss.kl.kind not in REWARD_KINDS or self.loss.metrics == "none":
            raise ConfigError(
                refusal(
                    setting="adaptive_kl",
                    needs=f"a penalty of kind {' or '.join(REWARD_KINDS)}, and metrics",
                    got=f"KL({self.loss.kl.kind!r}, ...) and metrics={self.loss.metrics!r}",
                    reason="The target is compared with the mean of the penalty's term of single "
                    "tokens, without a ratio, which is measured with the metrics.",
                    use="Loss(..., kl=KL('k3', ...), metrics='basic')",
                )
            )
        kl = replace(self.loss.kl, coefficient=self.adaptive_kl.coefficient)
        if kl != self.loss.kl or not self.loss.measures_penalty:
            self.loss = replace(self.loss, kl=kl, measures_penalty=True)

    def _note_due_reference(self) -> None:
        """Note that the reference is to move, if the last update is one of `reference_every`."""
        every = self.reference_every
        if every is not None and self.num_updates % every == 0:
            self.reference_is_due = True

    @torch.no_grad()
    def _move_reference(self) -> None:
        """Move the reference towards the policy."""
        assert self.reference is not None
        self.reference_is_due = False
        weights = named_weights(self.policy.model)
        for name, weight in named_weights(self.reference.model).items():
            if weight.is_floating_point():
                local(weight).lerp_(local(weights[name]), self._reference_rate)

    @torch.no_grad()
    def _reference_states(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead]:
        """Return the reference's hidden states and its head.

        A sharded head stays gathered until the reference is put away.
        """
        (hidden, head, _), _ = self._reference_inputs(micro_batch)
        return _at_places_of_policy(hidden, micro_batch), self._with_precision(head)

    def _reference_inputs(self, micro_batch: MicroBatch) -> tuple[Inputs, MicroBatch]:
        """Return the reference's inputs of the loss, and the micro-batch that they belong to.

        That is another one than the policy's where the reference reads prompts of its own.
        """
        assert self.reference is not None
        if micro_batch.for_reference is not None:
            micro_batch = replace(micro_batch.for_reference, counts=micro_batch.counts)
        with without_adapters(self.reference.model):
            return self.reference.loss_inputs(micro_batch), micro_batch

    def log_probs_of(
        self,
        inputs: Inputs,
        micro_batch: MicroBatch,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `kernels.losses.log_probs_of_hidden` under the run's settings.

        inputs: from a policy's `loss_inputs`. temperature: None for the run's.
        """
        hidden, head, ranks = inputs
        computation = replace(self.computation, num_splits=1)
        loss = self.loss if temperature is None else replace(self.loss, temperature=temperature)
        head = self._with_precision(head)
        return log_probs_of_hidden(
            hidden, head, micro_batch, loss, ranks, computation, with_entropy
        )

    def _loss(self, inputs: Inputs, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        hidden, head, ranks = inputs
        head = self._with_precision(head)
        return loss_of_hidden(hidden, head, micro_batch, totals, self.loss, ranks, self.computation)

    def check_precision(self, precision: str) -> None:
        """Raise ValueError for a Trainer's precision other than "32-true", which leaves all as it
        is: rollouts, too, have log-probs of the policy in its own dtype."""
        if precision != "32-true":
            raise ValueError(
                "PolicyGradientModule needs a Trainer of precision='32-true' (got "
                f"{precision!r}). Its policy computes in the dtype that it was made with, also the "
                "log-probs of rollouts, which a Trainer does not convert. Use precision='32-true', "
                "and HuggingFaceModelSettings(..., dtype='bfloat16'), or policy.model.double() for "
                "float64."
            )

    @property
    def reads_old_log_probs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.loss.reads_old_log_probs

    @property
    def masks_truncated(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.loss.masks_truncated

    def _check_tokens(self, step: Step) -> None:
        """Raise DataError for tokens without weights, and for documents beyond the positions, of
        the policy or of the reference."""
        for micro_batch in step.micro_batches:
            _check_tokens_of("policy", self.policy, micro_batch)
            if self.reference is not None:
                read = micro_batch.for_reference or micro_batch
                _check_tokens_of("reference", self.reference, read)

    def _check_sampling_log_probs(self, step: Step) -> None:
        """Raise DataError for documents without the sampler's log-probs that the loss reads.

        They may come from the checkpoint of a run that is resumed with another correction.
        """
        without_top = [
            document.name for document in step.documents if document.sampling_top_ids is None
        ]
        if without_top and self.loss.family.score_centering:
            raise DataError(
                "loss.score_centering=true needs sampling_top_ids of every document (got none of "
                f"{without_top[0]}). Those that were sampled for another loss lack them, as the "
                "batch of a checkpoint may be. Use loss.score_centering=false, or start a new run; "
                "in Python documents with both sampling_top_ids and sampling_top_log_probs."
            )
        without_sampling = [
            document.name for document in step.documents if document.sampling_log_probs is None
        ]
        if without_sampling and self.loss.needs_sampling_log_probs:
            assert self.loss.correction is not None
            raise DataError(
                f"correction={self.loss.correction.name} needs sampling_log_probs of every "
                f"document (got none of {without_sampling[0]}). Those that were sampled for "
                "another loss lack them, as the batch of a checkpoint may be. Use correction=none, "
                "or start a new run; in Python Loss(..., correction=None), or documents with "
                "sampling_log_probs."
            )

    def _check_above_0(self, step: Step) -> None:
        """Raise DataError for old log-probs that are probabilities.

        The loss itself checks no number here, since the step's loss and gradient are checked.
        """
        for micro_batch in step.micro_batches:
            old = micro_batch.old_log_probs
            if old is None or not old.numel() or not old.max() > MAX_LOG_PROB:
                continue
            place = int(micro_batch.document_index[old.argmax()])
            name = "a document"
            if micro_batch.step_places:
                name = step.documents[micro_batch.step_places[place]].name
            raise DataError(
                f"old_log_probs of {name} needs log-probs, which are at most 0 (got "
                f"{old.max().item():g}). Probabilities are given as their logarithms: use "
                "old_log_probs.log()."
            )

    def _check_ref_log_probs(self, step: Step) -> None:
        """Raise DataError for documents without the reference's log-probs, where no reference
        computes them."""
        kl = self.loss.kl
        if kl is None:
            return
        if self.reference is not None:
            self._note_other_reference(step)
            return
        without = [document.name for document in step.documents if document.ref_log_probs is None]
        if without:
            raise DataError(
                f"kl=KL({kl.kind!r}, ...) needs a reference, or ref_log_probs of every document "
                f"(got none of {without[0]}). A penalty is the distance from a reference. Use "
                "PolicyGradientModule(..., reference=...), with a policy whose weights stay."
            )

    def _note_other_reference(self, step: Step) -> None:
        """Note, once, documents that bring a reference's log-probs beside the one that computes
        them."""
        # A penalty on rewards leaves those of the module's reference.
        with_others = [
            document.name
            for document in step.documents
            if document.ref_log_probs is not None
            and document.kl_reward is None
            and not document.is_excluded
        ]
        if with_others and not self._noted_other_reference:
            self._noted_other_reference = True
            log.warning(
                f"note: ref_log_probs of {with_others[0]} are not read, since the reference "
                "computes its own. Use kl.reference=recorded, in Python reference=None, to train "
                "by those of the documents."
            )

    def _check_returns(self, step: Step) -> None:
        """Raise DataError for documents that a critic learns nothing from."""
        without = [document.name for document in step.documents if document.returns is None]
        if without and self.critic is not None:
            raise DataError(
                f"a critic needs values and returns of every document (got none of {without[0]}). "
                "It learns the returns. Use SampledRollouts with Estimator('gae'), documents with "
                "both, or a module without add_critic."
            )

    def _check_adaptive_kl(self, step: Step) -> None:
        """Raise ConfigError for a coefficient of a penalty that neither the loss nor the rewards
        of any document of the step have."""
        if self.adaptive_kl is None or self.loss.kl is not None or not step.documents:
            return
        for document in step.documents:
            # A penalty on rewards leaves those of failed scores, of which it still knows the
            # reference's log-probs.
            is_failed = document.reward is None and document.ref_log_probs is not None
            if document.kl_reward is not None or is_failed:
                return
        raise ConfigError(
            refusal(
                setting="adaptive_kl",
                needs="a penalty, whose coefficient it is",
                got="a loss with kl=None, and documents without kl_reward",
                reason="Nothing would have that coefficient.",
                use="Loss(..., kl=KL('k3', coefficient=...), metrics='basic'), documents whose "
                "rewards have the penalty kl_reward, or adaptive_kl=None",
            )
        )

    def _with_precision(self, head: LMHead) -> LMHead:
        return replace(head, fp32_logits=self.policy.fp32_lm_head)


def _check_tokens_of(name: str, policy: Policy, micro_batch: MicroBatch) -> None:
    """Raise DataError for a micro-batch that a policy cannot read. name: of the argument."""
    if not len(micro_batch.tokens):
        return
    for noun, numbers, limit, use in (
        (
            "token",
            micro_batch.tokens,
            policy.vocabulary_size,
            "tokens of its tokenizer",
        ),
        (
            "position",
            micro_batch.position_ids,
            policy.max_positions,
            "shorter documents, or a model of more positions",
        ),
    ):
        highest = int(numbers.max())
        if highest < limit:
            continue
        place = int(micro_batch.document_index[int(numbers.argmax())])
        raise DataError(
            f"{micro_batch.names[place]} needs {noun}s below {limit}, those of the {name}'s model "
            f"(got {highest}). Use {use}."
        )


_COPY = (
    "reference=dataclasses.replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))"
)
"""What to write for a reference of the policy's own weights."""


def _check_loss(
    loss: Loss, computation: Computation, reference: Policy | None, layout: Layout
) -> None:
    """Raise ValueError for a loss that cannot be computed in this way, or on these ranks."""
    check_splits(loss, computation)
    if computation.impl == "reference":
        raise ValueError(
            "computation needs an impl that takes pieces of a step (got impl='reference'). Use "
            "impl='torch'"
        )
    if loss.kl is not None and loss.full_kl and reference is None:
        raise ValueError(
            f"kl=KL({loss.kl.kind!r}, ...) needs reference=, a policy whose weights stay (got "
            "None): it is over the whole vocabulary, of which documents record one token"
        )
    if layout.size("pipeline_parallel") == 1:
        return
    if loss.metrics != "none":
        raise ValueError(
            f"metrics={loss.metrics!r} needs a layout with pipeline_parallel=1: stages without the "
            "loss have no advantage extrema to give. Use Loss(..., metrics='none')"
        )
    if reference is not None:
        raise ValueError(
            "reference needs a layout with pipeline_parallel=1: the stages hand on the hidden "
            "states of the policy alone. Use ref_log_probs of the documents"
        )


def _check_moves(policy: Policy, reference: Policy | None, every: int | None, rate: float) -> None:
    """Raise ValueError for moves of a reference that cannot move. every, rate: of the moves."""
    if every is None and rate != 1:
        raise ValueError(
            f"reference_rate={rate!r} needs reference_every, the updates between moves (got None). "
            "Use reference_every=512, or leave it out"
        )
    if every is not None and (reference is None or reference is policy):
        got = "None" if reference is None else "the policy itself"
        raise ValueError(
            f"reference_every={every} needs reference=, a policy with weights of its own (got "
            f"{got}). Use {_COPY}, made before the policy is trained"
        )


def _check_reference(policy: Policy, reference: Policy | None) -> None:
    """Raise ValueError for a reference that is trained itself."""
    if reference is None or reference.model is not policy.model or adapted_layers(policy.model):
        return
    raise ValueError(
        "reference needs weights of its own (got the model of the policy, which has no adapters): "
        f"the distance from it would always be 0. Use {_COPY}, made before the policy is trained"
    )


def _check_vocabulary(name: str, policy: Policy, other: Policy, rows: int) -> None:
    """Raise ValueError for a further model that reads other tokens than the policy.

    name: of the argument. rows: of the other model's head.
    """
    if other.tokenizer is policy.tokenizer and rows == len(policy.head.weight):
        return
    difference = vocabularies_differ(
        len(policy.head.weight), policy.tokenizer, rows, other.tokenizer
    )
    if difference is not None:
        needs, got = difference
        raise ValueError(
            f"{name} needs {needs} (got {got}): its numbers would be those of other tokens. Use a "
            "model of the same family"
        )


def _sets_the_rate(got: str, needs: str) -> str:
    """Return the refusal of a second part that would set the learning rate.

    got: that part. needs: what the module needs in its place.
    """
    return refusal(
        setting="PolicyGradientModule",
        needs=needs,
        got=got,
        reason="Its optimizer's settings give the learning rate of each update.",
        use="OptimizerSettings(schedule=..., warmup_steps=...)",
    )


def _at_places_of_policy(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the reference's values, reordered to the positions of the policy's micro-batch."""
    return values if micro_batch.places is None else values[micro_batch.places]
