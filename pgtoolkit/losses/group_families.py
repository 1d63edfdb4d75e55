"""The loss families over a prompt's group of completions.

They take rewards as they are, and no advantages. No torch is imported here; tensors bring their
methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgtoolkit.losses.family import Choice, parameter
from pgtoolkit.losses.function import FunctionFamily

if TYPE_CHECKING:
    from torch import Tensor

    from pgtoolkit.losses.views import DocumentView, GroupView


class OfDocument(Choice):
    sum = "sum"
    mean = "mean"


class Direction(Choice):
    forward = "forward"
    reverse = "reverse"


class Scale(Choice):
    deviation = "deviation"
    mean = "mean"
    none = "none"


@dataclass(frozen=True)
class Tpo(FunctionFamily):
    """TPO: the policy's softmax over a prompt's completions moves towards the old one, tilted by
    the rewards (arXiv 2604.06159)."""

    temperature: float = parameter(
        1.0,
        least=1e-6,
        most=1e6,
        help="What the rewards, in deviations of the group, are divided by in the target (> 0): "
        "the smaller, the more of the target lies on the best completions.",
    )
    log_prob: OfDocument = parameter(
        OfDocument.sum,
        help="A completion's log-prob: the sum over its tokens (the paper's) or their mean.",
    )

    @property
    def equation(self) -> str:
        score = "sum" if self.log_prob == "sum" else "mean"
        return (
            f"-sum over the group's documents of target_d log softmax(s)_d,  s_d = {score} over "
            f"the document of p_t, target = softmax({score} of o_t + u_d / {self.temperature:g}), "
            "u_d = (R_d - mean of the group) / its deviation"
        )

    def notes(self) -> list[str]:
        note = (
            "loss=tpo with loss.log_prob=sum: between completions of many tokens the sums of "
            "log-probs differ by far more than 1, so the target is nearly one completion whatever "
            "the rewards are. loss.log_prob=mean compares them by token."
        )
        return [note] if self.log_prob == "sum" else []

    def function(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rewards: Tensor,
        documents: DocumentView,
        groups: GroupView,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return l_g, (G,), and the largest probability of a group's completion."""
        of_document = documents.sum if self.log_prob == "sum" else documents.mean
        reward = documents.first(rewards)
        centred = reward - groups.spread(groups.mean(reward))
        deviation = groups.spread(groups.mean(centred * centred).sqrt())
        has_signal = groups.spread(groups.max(reward) > -groups.max(-reward))
        tilt = (centred / deviation.where(has_signal, 1.0)).where(has_signal, 0.0)
        target = groups.softmax(of_document(old_log_probs) + tilt / self.temperature)
        score = of_document(log_probs)
        log_softmax = score - groups.spread(groups.logsumexp(score))
        largest = groups.max(log_softmax.detach().exp())
        return -groups.sum(target * log_softmax), {"largest_group_probability": largest}


@dataclass(frozen=True)
class Lpo(FunctionFamily):
    """LPO: the group's softmax of log-ratios against the sampler is projected onto one that the
    rewards give (arXiv 2605.06139)."""

    divergence: Direction = parameter(
        Direction.forward,
        help="forward: KL(target || policy's softmax); reverse: KL(policy's softmax || target).",
    )
    scale: Scale = parameter(
        Scale.deviation,
        help="What the rewards are divided by in the target: the group's population deviation, its "
        "mean, or nothing.",
    )
    temperature: float | None = parameter(
        None,
        least=1e-6,
        most=1e6,
        help="A number (> 0) that the rewards are divided by in place of loss.scale; null: "
        "loss.scale decides.",
    )

    @property
    def equation(self) -> str:
        deviation = "population deviation of R in the group"
        divisor = {"deviation": deviation, "mean": "mean of R", "none": "1"}
        by = divisor[self.scale] if self.temperature is None else f"{self.temperature:g}"
        pair = "target || softmax(s)" if self.divergence == "forward" else "softmax(s) || target"
        return (
            f"KL({pair}) over the group's documents,  s_d = sum over the document of p_t - b_t, "
            f"target = softmax(R_d / ({by}) + sum of o_t - b_t)"
        )

    def function(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rewards: Tensor,
        documents: DocumentView,
        groups: GroupView,
        sampling_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return l_g, (G,), and the largest probability of a group's completion."""
        sampled = old_log_probs if sampling_log_probs is None else sampling_log_probs
        reward = documents.first(rewards)
        tilt = reward / self._temperatures(reward, groups)
        log_target = tilt + documents.sum(old_log_probs - sampled)
        log_target = log_target - groups.spread(groups.logsumexp(log_target))
        score = documents.sum(log_probs - sampled)
        log_softmax = score - groups.spread(groups.logsumexp(score))
        distance = log_target - log_softmax
        losses = log_target.exp() * distance
        if self.divergence == "reverse":
            losses = log_softmax.exp() * -distance
        largest = groups.max(log_softmax.detach().exp())
        return groups.sum(losses), {"largest_group_probability": largest}

    def _temperatures(self, reward: Tensor, groups: GroupView) -> Tensor:
        """Return (D,), what each reward is divided by; infinite where the rewards say nothing."""
        if self.temperature is not None:
            return reward * 0 + self.temperature
        mean = groups.spread(groups.mean(reward))
        if self.scale == "none":
            return reward * 0 + 1
        if self.scale == "mean":
            return mean.where(mean > 0, float("inf"))
        deviation = groups.spread(groups.mean((reward - mean) ** 2).sqrt())
        has_signal = groups.spread(groups.max(reward) > -groups.max(-reward))
        return deviation.where(has_signal, float("inf"))
