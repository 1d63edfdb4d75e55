"""The critic of advantage=gae: the value of each state, its loss and its updates."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import StateDict

from pgtoolkit.batch import MicroBatch, StepTotals
from pgtoolkit.losses.exchange import Ranks, all_sum
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.gradients import clip_gradients, sum_gradients
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.training.optimizer import learning_rate, make_optimizer
from pgtoolkit.training.settings import CriticSettings, OptimizerSettings


def with_value_head(policy: Policy) -> Policy:
    """Return a copy of a policy whose head gives one value instead of logits.

    policy: not yet spread over ranks.
    The head starts at 0, so every value does, whatever the body and the seed. The first advantages
    come from the rewards alone, without the noise of an untrained head.
    """
    model = copy.deepcopy(policy.model)
    lm_head = cast("nn.Linear", model.get_output_embeddings())
    with torch.device(lm_head.weight.device):
        head = nn.Linear(lm_head.in_features, 1, dtype=lm_head.weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    return replace(policy, model=model.requires_grad_(True))


def check_value_head(body: Policy) -> None:
    """Raise ValueError for a critic whose head gives other than one value."""
    size = cast("nn.Linear", body.model.get_output_embeddings()).out_features
    if size != 1:
        raise ValueError(
            f"body needs a head of one value (got one of {size}, the logits of a policy). Use "
            "body=with_value_head(policy) of pgtoolkit.training.critic"
        )


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return the (T,) loss of each value: half its squared distance from the return.

    With `clip` the value is also bounded to within `clip` of the old value, as PPO clips its
    ratios, and the larger of the two losses counts. values, old_values, returns: (T,).
    Source: verl's `compute_value_loss`.
    """
    losses = (values - returns) ** 2
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (bounded - returns) ** 2)
    return losses / 2


class Critic:
    """The value model with its optimizer, trained on the micro-batches of the policy.

    optimizer: the settings, with the learning rate of the critic. max_steps: of the run.
    body: a model as `with_value_head` gives it, spread over the ranks of `layout` like the policy.
    loss: of the policy; the value loss weighs tokens as it does.
    num_updates: how many updates the critic's weights have had.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        settings: CriticSettings,
        optimizer: OptimizerSettings,
        max_steps: int,
        body: Policy,
        layout: Layout,
        loss: Loss,
    ):
        self.settings = settings
        self._optimizer_settings = optimizer
        self._max_steps = max_steps
        self.body = body
        self.layout = layout
        # Only these parts of the loss decide the weights of tokens.
        self._loss = Loss(loss.family, loss.aggregation, masks_truncated=loss.masks_truncated)
        self.num_updates = 0
        self._loaded: StateDict | None = None

    @property
    def trains_alone(self) -> bool:
        """True if the next step updates the critic only, and not the policy."""
        return self.num_updates < self.settings.steps_before_policy

    def make_optimizer(self) -> None:
        """Make the optimizer, once the weights are on the device that trains them."""
        self.optimizer = make_optimizer(self.body.model, self._optimizer_settings)
        if self._loaded is not None:
            self.optimizer.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> StateDict:
        """Return the state without the weights."""
        return {"num_updates": self.num_updates, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a result of `state_dict`, before the optimizer is made."""
        self.num_updates = state["num_updates"]
        self._loaded = state["optimizer"]

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) value of the state after each position's token, with its gradient."""
        hidden, head, _ = self.body.loss_inputs(micro_batch)
        return functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias).squeeze(-1)

    def gradient(
        self, micro_batches: list[MicroBatch], totals: StepTotals, limit: float | None
    ) -> dict[str, float]:
        """Compute the gradient of a step over all ranks, and return the step's metrics.

        micro_batches: this rank's; every rank has the same number.
        limit: the gradient is scaled down to this norm; None: it is not.
        """
        self.optimizer.zero_grad()
        device = self.body.model.device
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        for micro_batch in micro_batches:
            loss, micro_batch_sums = self._loss_and_sums(micro_batch.to(device), totals)
            loss.backward()
            sums += micro_batch_sums
        for group, parameters in self.body.gradient_groups():
            sum_gradients(parameters, group)
        max_norm = math.inf if limit is None else limit
        norm = clip_gradients(self.body.model.parameters(), self.layout, max_norm)
        sums = all_sum(sums, self.layout.loss_group)
        # One transfer to the host for all numbers.
        *step_sums, grad_norm = torch.cat([sums, norm.reshape(1).to(sums)]).tolist()
        metrics = _metrics(dict(zip(_SUMS, step_sums, strict=True)))
        return metrics | {"critic_grad_norm": grad_norm}

    def update(self) -> dict[str, float]:
        """Apply the last gradient, and return the learning rate as a metric."""
        rate = learning_rate(self._optimizer_settings, self.num_updates, self._max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        return {"critic_learning_rate": rate}

    def _loss_and_sums(self, micro_batch: MicroBatch, totals: StepTotals) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the value loss, and of the sums in `_SUMS`."""
        values = self.values(micro_batch)
        objective = make_objective(micro_batch, totals, self._loss, values.dtype, Ranks())
        trained = objective.measured
        old_values = _or_zeros(micro_batch.values, values)
        returns = _or_zeros(micro_batch.returns, values)
        clip = self.settings.clip
        losses = value_losses(values, old_values, returns, clip)
        loss = (objective.weights * losses.where(trained, 0.0)).sum()
        with torch.no_grad():
            trained_values = values.detach().double()[trained]
            trained_returns = returns.double()[trained]
            residuals = trained_returns - trained_values
            moved = (trained_values - old_values.double()[trained]).abs()
            clipped = moved > (math.inf if clip is None else clip)
            vectors = (
                trained_values,
                trained_returns,
                trained_returns**2,
                residuals,
                residuals**2,
                clipped.double(),
                torch.ones_like(trained_values),
            )
            sums = torch.stack([loss.detach().double(), *(vector.sum() for vector in vectors)])
        return loss, sums


_SUMS = (
    *("loss", "value", "return", "squared_return"),
    *("residual", "squared_residual", "clipped", "tokens"),
)
"""Names of the sums of a step: the loss, then sums over the trained tokens of documents that have a
weight, the last one their number."""


def _or_zeros(known: Tensor | None, values: Tensor) -> Tensor:
    """Return `known` in the type of `values`.

    It is None in the empty micro-batch of a rank whose others have more of them.
    """
    return values.new_zeros(len(values)) if known is None else known.to(values)


def _metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step, with explained_variance only where returns differ."""
    num_tokens = sums["tokens"]
    if not num_tokens:
        return {"value_loss": sums["loss"]}
    metrics = {
        "value_loss": sums["loss"],
        "value": sums["value"] / num_tokens,
        "return": sums["return"] / num_tokens,
        "value_clipped_fraction": sums["clipped"] / num_tokens,
    }
    # Both are num_tokens times a variance.
    return_variation = sums["squared_return"] - sums["return"] ** 2 / num_tokens
    residual_variation = sums["squared_residual"] - sums["residual"] ** 2 / num_tokens
    if return_variation > 1e-12 * max(1.0, sums["squared_return"]):
        metrics["explained_variance"] = 1 - residual_variation / return_variation
    return metrics
