"""The critic of advantage=gae: a value for the state in which each token is drawn, its loss, and
its updates."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pgtoolkit.batch import MicroBatch, StepTotals
from pgtoolkit.config.schema import Config
from pgtoolkit.losses.exchange import Ranks, all_sum
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.piece import make_objective
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.gradients import clip_gradients, sum_gradients
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.training.optimizer import learning_rate, make_optimizer


def with_value_head(policy: Policy) -> Policy:
    """Return a copy of a policy, not yet spread over ranks, with one value in the place of logits.

    The head starts at 0. So does every value, whatever the body and the seed: the first advantages
    are those of the rewards alone, and nothing of them is noise of a head that has learned nothing.
    """
    model = copy.deepcopy(policy.model)
    before = cast("nn.Linear", model.get_output_embeddings())
    with torch.device(before.weight.device):
        head = nn.Linear(before.in_features, 1, dtype=before.weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    return replace(policy, model=model.requires_grad_(True))


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return the loss of each value: half its squared distance from the return.

    The larger one of it and of the distance of the value that has moved from the old one by at most
    `clip`, as PPO clips its ratios (verl's `compute_value_loss`). All are (T,).
    """
    losses = (values - returns) ** 2
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (bounded - returns) ** 2)
    return losses / 2


class Critic:
    """The value model with its optimizer, trained on the micro-batches that the policy is trained
    on.

    body: with one value in the place of logits, spread over the ranks of `layout` like the policy.
        loss: of the
    policy, whose weights the value loss has. num_updates: how many updates its weights have had.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, config: Config, body: Policy, layout: Layout, loss: Loss):
        self.config = config
        self.body = body
        self.layout = layout
        # What of the loss its weights depend on.
        self._loss = Loss(loss.family, loss.aggregation, masks_truncated=loss.masks_truncated)
        self._rate = replace(config.optimizer, learning_rate=config.critic.learning_rate)
        self.num_updates = 0

    @property
    def trains_alone(self) -> bool:
        """Whether the step that follows leaves the policy as it is."""
        return self.num_updates < self.config.critic.steps_before_policy

    def make_optimizer(self) -> None:
        """Called once the weights lie on the device that they are trained on."""
        self.optimizer = make_optimizer(self.body.model, self._rate)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T,) value of the state that each position's token leads to;
        differentiable."""
        hidden, head, _ = self.body.loss_inputs(micro_batch)
        return functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias).squeeze(-1)

    def gradient(
        self, micro_batches: list[MicroBatch], totals: StepTotals, limit: float | None
    ) -> dict[str, float]:
        """Compute the gradient of a step, over all ranks, scale it down to the norm `limit`, and
        return the metrics.

        micro_batches: as many on each rank.
        """
        self.optimizer.zero_grad()
        device = self.body.model.device
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        for micro_batch in micro_batches:
            loss, of_piece = self._piece(micro_batch.to(device), totals)
            loss.backward()
            sums += of_piece
        for group, parameters in self.body.gradient_groups():
            sum_gradients(parameters, group)
        norm = clip_gradients(
            self.body.model.parameters(), self.layout, math.inf if limit is None else limit
        )
        sums = all_sum(sums, self.layout.loss_group)
        *totals_of_step, grad_norm = torch.cat([sums, norm.reshape(1).to(sums)]).tolist()
        return _metrics(dict(zip(_SUMS, totals_of_step, strict=True)), int(totals.num_tokens)) | {
            "critic_grad_norm": grad_norm
        }

    def update(self) -> dict[str, float]:
        """Make the update of the last gradient; returns its learning rate by the metric's name."""
        rate = learning_rate(self._rate, self.num_updates, self.config.trainer.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        return {"critic_learning_rate": rate}

    def _piece(self, micro_batch: MicroBatch, totals: StepTotals) -> tuple[Tensor, Tensor]:
        """Return this micro-batch's share of the value loss, and of the sums that metrics are made
        of."""
        values = self.values(micro_batch)
        trained = micro_batch.labels >= 0
        # None where other ranks have more micro-batches, and this one is empty.
        old_values, returns = (
            values.new_zeros(len(values)) if known is None else known.to(values)
            for known in (micro_batch.values, micro_batch.returns)
        )
        weights = make_objective(micro_batch, totals, self._loss, values.dtype, Ranks()).weights
        losses = value_losses(values, old_values, returns, self.config.critic.clip)
        loss = (weights * losses.where(trained, 0.0)).sum()
        with torch.no_grad():
            numbers = torch.stack([values.detach(), returns]).double()[:, trained]
            left = numbers[1] - numbers[0]
            clip = self.config.critic.clip
            moved = (numbers[0] - old_values.double()[trained]).abs()
            clipped = moved > (math.inf if clip is None else clip)
            vectors = numbers[0], numbers[1], numbers[1] ** 2, left, left**2, clipped.double()
            sums = torch.stack([loss.detach().double(), *(vector.sum() for vector in vectors)])
        return loss, sums


_SUMS = ("loss", "value", "return", "squared_return", "left", "squared_left", "clipped")
"""What each micro-batch adds to: the loss, and sums over its trained tokens."""


def _metrics(sums: dict[str, float], num_tokens: int) -> dict[str, float]:
    """Return the metrics of a step; explained_variance only where returns differ."""
    metrics = {
        "value_loss": sums["loss"],
        "value": sums["value"] / num_tokens,
        "return": sums["return"] / num_tokens,
        "value_clipped_fraction": sums["clipped"] / num_tokens,
    }
    of_returns = sums["squared_return"] - sums["return"] ** 2 / num_tokens
    of_rest = sums["squared_left"] - sums["left"] ** 2 / num_tokens
    if of_returns > 1e-12 * max(1.0, sums["squared_return"]):
        metrics["explained_variance"] = 1 - of_rest / of_returns
    return metrics
