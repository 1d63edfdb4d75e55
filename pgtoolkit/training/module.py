"""The LightningModule that `pgtk` trains: a policy under the configured loss, by AdamW over dynamic accumulation."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from pgtoolkit.batch import MicroBatch, Step, StepTotals
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import KLPlace
from pgtoolkit.config.schema_run import OptimizerConfig, Schedule
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.losses import Computation, LMHead, PolicyLoss, log_probs_of_hidden, loss_of_hidden
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
from pgtoolkit.training.loss import loss_of

if TYPE_CHECKING:
    from pgtoolkit.model.spread import ParallelPolicy

log = logging.getLogger("pgtoolkit")

Inputs = tuple[Tensor, LMHead, Ranks]


class PolicyGradientModule(DynamicAccumulation):
    """Trains `policy` by the loss that `config` describes, together with the other ranks of `layout`.

    reference: without gradient, spread like the policy; None where the documents bring their ref_log_probs or none are
    needed; the policy itself where it is what the policy is without its adapters.
    evaluator: measures the policy on held-out prompts, where the configuration asks for it.
    """

    reference: Policy | None = None
    evaluator: Evaluator | None = None

    def __init__(self, config: Config, policy: Policy, layout: Layout, reference: Policy | None = None):
        super().__init__(layout, config.optimizer.max_grad_norm, config.trainer.max_bad_steps)
        self.config = config
        self.policy = policy
        self.model = policy.model  # registered here, so that Lightning moves it
        self.reference = reference
        if reference is not None and reference is not policy:
            self.reference_model = reference.model  # as above
        self.loss = loss_of(config)
        impl, memory = config.kernel.implementation.value, config.kernel.logits_memory_mb
        # Finite numbers are looked for once per step, in the loss and the gradient.
        self.computation = Computation(impl, False, config.loss.num_splits, memory)
        self._noted_no_signal = self._noted_mismatch = False

    def configure_optimizers(self):
        return make_optimizer(self.model, self.config.optimizer)

    def training_step(self, step: Step, batch_index: int) -> StepOutput:
        self._check_log_probs(step)
        updates = self.num_updates
        output = super().training_step(step, batch_index)
        if self.num_updates > updates:
            self._move_reference()
        rowwise.tell()
        weight_sum = self.loss.aggregation.weight_sum(step.totals) if step.totals.num_tokens else None
        if weight_sum is not None:
            output["metrics"]["weight_sum"] = weight_sum
        is_silent = output["metrics"].get("zero_advantage_group_fraction") == 1
        if is_silent and not self._noted_no_signal and self.config.advantage.estimator != "none":
            self._noted_no_signal = True
            log.warning(
                f"note: every advantage of the step that ends at document {self.documents_seen} is 0: the completions "
                "of each prompt have equal rewards, so it teaches nothing. Is the task too hard, too easy, or an "
                "answer longer than a completion? Said once; the metric zero_advantage_group_fraction tells more."
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
        whole = self.layout.world_size == self.layout.size("data_parallel") and not self.config.parallelism.shard
        weight = self.policy.head.weight
        if torch.is_grad_enabled() and self.computation.fused and whole and weight.requires_grad:
            # The loss adds the head's gradient to it, which saves a second one's memory.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            head = replace(head, weight_gradient=weight.grad)
        loss = self._loss((hidden, head, ranks), micro_batch, totals)
        if self.loss.full_kl and self.reference is not None and self.reference is not self.policy:
            self.reference.put_away()
        return loss

    def backward_of_all(self, micro_batches: list[MicroBatch], totals: StepTotals) -> list[PolicyLoss]:
        """As for any module; through a pipeline's stages, of which only the last has outputs, all at once."""
        if self.policy.pipeline is None:
            return super().backward_of_all(micro_batches, totals)
        policy = cast("ParallelPolicy", self.policy)
        with_head = policy.with_head
        return self.policy.pipeline.run(micro_batches, lambda m, hidden: self._loss(with_head(hidden), m, totals))

    def gradient_groups(self):
        return self.policy.gradient_groups()

    def before_update(self) -> dict[str, float]:
        rate = learning_rate(self.config.optimizer, self.num_updates, self.config.trainer.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return {"learning_rate": rate}

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """(T,) log-prob of each label by the forward pass that training uses; temperature: None for the run's."""
        count, policy = len(micro_batch.tokens), self.policy
        micro_batch = local_tokens(micro_batch, self.layout).counted().to(self.device)
        if policy.pipeline is None:
            log_probs = self.log_probs_of(policy.loss_inputs(micro_batch), micro_batch, temperature)[0]
        else:
            with_head = cast("ParallelPolicy", policy).with_head
            log_probs = policy.pipeline.on_last_stage(
                micro_batch, lambda hidden: self.log_probs_of(with_head(hidden), micro_batch, temperature)[0]
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
    def entropy(self, micro_batch: MicroBatch) -> Tensor:
        """(T,) entropy of the softmax before each label, 0 where labels < 0; the micro-batch is counted and on the
        module's device."""
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
        """(T,) the reference's log-prob of each label; the micro-batch is counted and on the module's device."""
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
        """The reference's hidden states and head; the latter stays together until the reference is put away."""
        (hidden, head, _), _ = self._read_by_reference(micro_batch)
        return _here(hidden, micro_batch), self._precise(head)

    def _read_by_reference(self, micro_batch: MicroBatch) -> tuple[Inputs, MicroBatch]:
        """What the loss would need of the reference, and of which tokens: with its own prompts, where it has any."""
        assert self.reference is not None
        if micro_batch.for_reference is not None:
            micro_batch = replace(micro_batch.for_reference, counts=micro_batch.counts)
        with without_adapters(self.reference.model):
            return self.reference.loss_inputs(micro_batch), micro_batch

    def log_probs_of(
        self, inputs: Inputs, micro_batch: MicroBatch, temperature: float | None = None, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`kernels.losses.log_probs_of_hidden` of what a policy's `loss_inputs` gave, under the run's settings."""
        hidden, head, ranks = inputs
        computation = replace(self.computation, num_splits=1)
        loss = self.loss if temperature is None else replace(self.loss, temperature=temperature)
        return log_probs_of_hidden(hidden, self._precise(head), micro_batch, loss, ranks, computation, with_entropy)

    def _loss(self, inputs: Inputs, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        hidden, head, ranks = inputs
        return loss_of_hidden(hidden, self._precise(head), micro_batch, totals, self.loss, ranks, self.computation)

    def _check_log_probs(self, step: Step) -> None:
        """A loader of one's own may lack them, and the rollouts of a run that goes on with a correction."""
        now = self.num_updates
        unknown = [d.name for d in step.documents if d.old_log_probs is None and d.anchor_version != now]
        if unknown and self.loss.reads_old_log_probs:
            raise DataError(
                f"the loss needs old_log_probs of every document (got none of {unknown[0]}). It compares the policy "
                "with the one that sampled. Give them, or use loss=reinforce correction=none kl=none."
            )
        lacking = [document.name for document in step.documents if document.sampling_log_probs is None]
        if lacking and self.loss.needs_sampling_log_probs:
            assert self.loss.correction is not None
            raise DataError(
                f"correction={self.loss.correction.name} needs sampling_log_probs of every document (got none of "
                f"{lacking[0]}). The checkpoint's batch of rollouts was sampled without them. "
                "Use correction=none, or start a new run."
            )

    def _precise(self, head: LMHead) -> LMHead:
        return replace(head, fp32_logits=self.config.model.fp32_lm_head)


def _here(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """What the reference gives for each position, where the policy predicts the same token."""
    return values if micro_batch.places is None else values[micro_batch.places]


class LocalAdamW(torch.optim.AdamW):
    """AdamW that takes of each sharded parameter this rank's part, as a plain tensor.

    The update is elementwise, so that it comes to the same; but it takes many plain tensors at once, and DTensors only
    one by one. The state keeps the parameters' kind.
    """

    def _init_group(self, group, *lists):
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW; parameters with fewer than two dimensions (norms, biases) are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas, fused = (config.beta1, config.beta2), parameters[0].is_cuda  # one kernel instead of a dozen
    return LocalAdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)


def learning_rate(config: OptimizerConfig, num_updates: int, max_steps: int) -> float:
    """The rate of update number `num_updates` (from 0): linear warm-up, then constant, or decay to 0 at max_steps."""
    if num_updates < config.warmup_steps:
        return config.learning_rate * (num_updates + 1) / config.warmup_steps
    progress = min(1.0, (num_updates - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    if config.schedule == Schedule.linear:
        return config.learning_rate * (1.0 - progress)
    if config.schedule == Schedule.cosine:
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate
