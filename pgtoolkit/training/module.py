"""The LightningModule that `pgtk` trains: a policy under the configured loss, by AdamW over dynamic
accumulation."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pgtoolkit.batch import MicroBatch, Step, StepTotals
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import KLPlace
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.losses import (
    Computation,
    LMHead,
    PolicyLoss,
    log_probs_of_hidden,
    loss_of_hidden,
)
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.model import rowwise
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.model.lora import without_adapters
from pgtoolkit.model.policy import Policy, named_weights
from pgtoolkit.ranks.collectives import local
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.data_metrics import sampling_note
from pgtoolkit.rollouts.evaluator import Evaluator
from pgtoolkit.training.accumulation import DynamicAccumulation, StepOutput
from pgtoolkit.training.critic import Critic
from pgtoolkit.training.loss import loss_of
from pgtoolkit.training.loss_scale import LossScale
from pgtoolkit.training.optimizer import learning_rate, make_optimizer

if TYPE_CHECKING:
    from pgtoolkit.model.spread import ParallelPolicy

log = logging.getLogger("pgtoolkit")

Inputs = tuple[Tensor, LMHead, Ranks]


class PolicyGradientModule(DynamicAccumulation):
    """Trains `policy` by the loss that `config` describes, together with the other ranks of
    `layout`.

    reference: without gradient, spread like the policy; None where the documents bring their
        ref_log_probs or none are
    needed; the policy itself where it is what the policy is without its adapters.
    evaluator: measures the policy on held-out prompts, where the configuration asks for it.
    critic: gives the advantages of single tokens, where the configuration asks for it; see
        `add_critic`.
    """

    reference: Policy | None = None
    evaluator: Evaluator | None = None
    critic: Critic | None = None

    def __init__(
        self, config: Config, policy: Policy, layout: Layout, reference: Policy | None = None
    ):
        super().__init__(layout, config.optimizer.max_grad_norm, config.trainer.max_bad_steps)
        self.config = config
        self.policy = policy
        self.model = policy.model  # registered here, so that Lightning moves it
        self.reference = reference
        if reference is not None and reference is not policy:
            self.reference_model = reference.model  # as above
        if policy.compute_dtype == torch.float16:
            self.loss_scale = LossScale()
        self.loss = loss_of(config)
        impl, memory = config.kernel.implementation.value, config.kernel.logits_memory_mb
        # Finite numbers are looked for once per step, in the loss and the gradient.
        self.computation = Computation(impl, False, config.loss.num_splits, memory)
        self._noted_no_signal = self._noted_mismatch = False

    def add_critic(self, body: Policy) -> None:
        """Train a critic beside the policy. body: see `Critic`."""
        self.critic = Critic(self.config, body, self.layout, self.loss)
        self.critic_model = body.model  # registered here, so that Lightning moves it

    def configure_optimizers(self):
        if self.critic is not None:
            self.critic.make_optimizer()
        return make_optimizer(self.model, self.config.optimizer)

    def training_step(self, step: Step, batch_index: int) -> StepOutput:
        self._check_log_probs(step)
        updates = self.num_updates
        output = super().training_step(step, batch_index)
        if self.num_updates > updates:
            self._move_reference()
        rowwise.tell()
        weight_sum = (
            self.loss.aggregation.weight_sum(step.totals) if step.totals.num_tokens else None
        )
        if weight_sum is not None:
            output["metrics"]["weight_sum"] = weight_sum
        is_silent = output["metrics"].get("zero_advantage_group_fraction") == 1
        if is_silent and not self._noted_no_signal and self.config.advantage.estimator != "none":
            self._noted_no_signal = True
            log.warning(
                f"note: every advantage of the step that ends at document {self.documents_seen} is "
                "0: the completions of each prompt have equal rewards, so it teaches nothing. Is "
                "the task too hard, too easy, or an answer longer than a completion? Said once; "
                "the metric zero_advantage_group_fraction tells more."
            )
        if not self._noted_mismatch and (note := sampling_note(output["metrics"], self.config)):
            self._noted_mismatch = True
            log.warning(f"note: {note}")
        return output

    def micro_batch_loss(self, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        micro_batch = self.with_reference(micro_batch)
        reference = self._reference_states(micro_batch) if self.loss.full_kl else None
        hidden, head, ranks = self.policy.loss_inputs(micro_batch)
        head = replace(head, reference=reference)
        whole = (
            self.layout.world_size == self.layout.size("data_parallel")
            and not self.config.parallelism.shard
        )
        weight = self.policy.head.weight
        # What the loss adds itself is of the loss as it is, not times a scale.
        adds = self.computation.fused and whole and weight.requires_grad and self.loss_scale is None
        if torch.is_grad_enabled() and adds:
            # The loss adds the head's gradient to it, which saves a second one's memory.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            head = replace(head, weight_gradient=weight.grad)
        loss = self._loss((hidden, head, ranks), micro_batch, totals)
        if self.loss.full_kl and self.reference is not None and self.reference is not self.policy:
            self.reference.put_away()
        return loss

    def backward_of_all(
        self, micro_batches: list[MicroBatch], totals: StepTotals
    ) -> list[PolicyLoss]:
        """As for any module; through a pipeline's stages, of which only the last has outputs, all
        at once."""
        if self.policy.pipeline is None:
            return super().backward_of_all(micro_batches, totals)
        policy = cast("ParallelPolicy", self.policy)
        with_head = policy.with_head

        def loss_of_states(micro_batch: MicroBatch, hidden: Tensor) -> PolicyLoss:
            return self._loss(with_head(hidden), micro_batch, totals)

        return self.policy.pipeline.run(micro_batches, loss_of_states, self.scaled)

    def gradient_groups(self):
        return self.policy.gradient_groups()

    def parameters_to_clip(self):
        return self.model.parameters()

    def _update(self, step: Step) -> dict[str, float]:
        if self.critic is None:
            return super()._update(step)
        if self.critic.trains_alone:
            return self._update_critic_alone(self.critic, step)
        updates = self.num_updates
        metrics = super()._update(step)
        return metrics if self.num_updates == updates else metrics | self.critic.update()

    def _update_critic_alone(self, critic: Critic, step: Step) -> dict[str, float]:
        metrics = self._critics_gradient(critic, step)
        if self.is_finite(metrics):
            self._bad_steps_in_a_row = 0
            return metrics | critic.update()
        self._skip_bad_step(step, [], metrics)
        return metrics

    def _step_metrics(self, outputs: list[PolicyLoss], step: Step) -> dict[str, float]:
        metrics = super()._step_metrics(outputs, step)
        return (
            metrics if self.critic is None else metrics | self._critics_gradient(self.critic, step)
        )

    def _critics_gradient(self, critic: Critic, step: Step) -> dict[str, float]:
        return critic.gradient(step.micro_batches, step.totals, self.max_grad_norm)

    def before_update(self) -> dict[str, float]:
        rate = learning_rate(self.config.optimizer, self.num_updates, self.config.trainer.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return {"learning_rate": rate}

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """(T,) log-prob of each label by the forward pass that training uses; temperature: None for
        the run's."""
        count, policy = len(micro_batch.tokens), self.policy
        micro_batch = local_tokens(micro_batch, self.layout).counted().to(self.device)
        if policy.pipeline is None:
            log_probs = self.log_probs_of(
                policy.loss_inputs(micro_batch), micro_batch, temperature
            )[0]
        else:
            with_head = cast("ParallelPolicy", policy).with_head
            log_probs = policy.pipeline.on_last_stage(
                micro_batch,
                lambda hidden: self.log_probs_of(with_head(hidden), micro_batch, temperature)[0],
            )
        policy.put_away()
        return policy.all_tokens(log_probs)[:count]

    @torch.no_grad()
    def ref_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """(T,) log-prob of each label under the reference."""
        count = len(micro_batch.tokens)
        micro_batch = local_tokens(micro_batch, self.layout).counted().to(self.device)
        return self.policy.all_tokens(self._by_reference(micro_batch))[:count]

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """(T,) value of each position by the critic."""
        assert self.critic is not None
        values = self.critic.values(micro_batch.to(self.device))
        self.critic.body.put_away()
        return values

    @torch.no_grad()
    def entropy(self, micro_batch: MicroBatch) -> Tensor:
        """(T,) entropy of the softmax before each label, 0 where labels < 0; the micro-batch is
        counted and on the module's device."""
        inputs = self.policy.loss_inputs(micro_batch)
        _, entropy = self.log_probs_of(inputs, micro_batch, with_entropy=True)
        assert entropy is not None
        return entropy

    @torch.no_grad()
    def with_reference(self, micro_batch: MicroBatch) -> MicroBatch:
        """With the reference's log-probs, where it is a model and no full KL is asked.

        Where the penalty acts on rewards, the documents bring those that it was made of.
        """
        if self.reference is None or self.loss.full_kl or self.config.kl.place == KLPlace.reward:
            return micro_batch
        return replace(micro_batch, ref_log_probs=self._by_reference(micro_batch))

    def _by_reference(self, micro_batch: MicroBatch) -> Tensor:
        """(T,) the reference's log-prob of each label; the micro-batch is counted and on the
        module's device."""
        assert self.reference is not None
        log_probs = self.log_probs_of(*self._read_by_reference(micro_batch))[0]
        self.reference.put_away()
        return _here(log_probs, micro_batch)

    @torch.no_grad()
    def _move_reference(self) -> None:
        """Move the reference towards the policy, where that is due after this update."""
        every, rate = self.config.kl.update_every, self.config.kl.update_rate
        if every is None or self.num_updates % every != 0:
            return
        assert self.reference is not None
        weights = named_weights(self.policy.model)
        for name, weight in named_weights(self.reference.model).items():
            if weight.is_floating_point():
                local(weight).lerp_(local(weights[name]), rate)

    @torch.no_grad()
    def _reference_states(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead]:
        """The reference's hidden states and head; the latter stays together until the reference is
        put away."""
        (hidden, head, _), _ = self._read_by_reference(micro_batch)
        return _here(hidden, micro_batch), self._precise(head)

    def _read_by_reference(self, micro_batch: MicroBatch) -> tuple[Inputs, MicroBatch]:
        """What the loss would need of the reference, and of which tokens: with its own prompts,
        where it has any."""
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
        """`kernels.losses.log_probs_of_hidden` of what a policy's `loss_inputs` gave, under the
        run's settings."""
        hidden, head, ranks = inputs
        computation = replace(self.computation, num_splits=1)
        loss = self.loss if temperature is None else replace(self.loss, temperature=temperature)
        return log_probs_of_hidden(
            hidden, self._precise(head), micro_batch, loss, ranks, computation, with_entropy
        )

    def _loss(self, inputs: Inputs, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        hidden, head, ranks = inputs
        return loss_of_hidden(
            hidden, self._precise(head), micro_batch, totals, self.loss, ranks, self.computation
        )

    def _check_log_probs(self, step: Step) -> None:
        """A loader of one's own may lack them, and the rollouts of a run that goes on with a
        correction."""
        now = self.num_updates
        unknown = [
            d.name for d in step.documents if d.old_log_probs is None and d.anchor_version != now
        ]
        if unknown and self.loss.reads_old_log_probs:
            raise DataError(
                f"the loss needs old_log_probs of every document (got none of {unknown[0]}). It "
                "compares the policy with the one that sampled. Give them, or use loss=reinforce "
                "correction=none kl=none."
            )
        lacking = [
            document.name for document in step.documents if document.sampling_log_probs is None
        ]
        if lacking and self.loss.needs_sampling_log_probs:
            assert self.loss.correction is not None
            raise DataError(
                f"correction={self.loss.correction.name} needs sampling_log_probs of every "
                f"document (got none of {lacking[0]}). The checkpoint's batch of rollouts was "
                "sampled without them. Use correction=none, or start a new run."
            )

    def _precise(self, head: LMHead) -> LMHead:
        return replace(head, fp32_logits=self.config.model.fp32_lm_head)


def _here(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """What the reference gives for each position, where the policy predicts the same token."""
    return values if micro_batch.places is None else values[micro_batch.places]
