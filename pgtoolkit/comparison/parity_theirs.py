"""TRL's and verl's side of `pgtk parity`: our reading of their code, as one formula with options.

Vectors are (B, T), with a row for each document, padded on the right; all is float64. Sources:
trl/trainer/grpo_trainer.py of TRL 1.16.0, verl/trainer/ppo/core_algos.py and
rollout_corr_helper.py of verl 0.9.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pgtoolkit.comparison.parity_step import Numbers, RecordedStep
from pgtoolkit.errors import ConfigError

_CLAMP = 20.0

Fields = dict[str, Any]
"""Some fields of a Convention, by name."""


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Says how a framework computes a step.

    deviation: over the rewards of which the advantage is divided. deviation_epsilon is added to it;
        with bessel it is that of a sample, n - 1.
    baseline: the mean, that of the others of the group, or the mean weighted by lengths.
    alone_compared: whether a group of one has its own reward as baseline, or none.
    drops_equal: whether groups of equal rewards are left out.
    family, level, low, high: the surrogate, of a ratio of a token or a document, and its bounds;
        temperatures are those of sapo.
    dual_clip: the bound of the ratio where A < 0; ratio_cap: where it is in any case.
    log_ratio_cap: the bound of the log-ratio before exp.
    kl_coefficient 0 is no penalty. kl_clamp bounds its value, kl_gradient names another kind whose
        gradient it has; kl_ratio: of which level its factor is with k3_ratio.
    entropy_coefficient 0 is no bonus on the entropy. entropy_weights: those of the loss, or
        micro_batch, a mean over the tokens of each.
    correction: "token_mask" and so on; None without.
    mean: what the loss is a mean of; divisor: of constant. mean_of: the step, each micro-batch, or
        each generated_batch of a step that has several.
    scale: by which every weight is multiplied, such as 2 where two micro-batches are added up.
    masks_truncated: whether completions that were cut off are not trained; truncated_counted:
        whether their tokens are counted all the same.
    mask_shift: by how many tokens the mask is shifted, 0 where it is right: with 1 the first token
        of each completion is not trained, with -1 the last.
    temperature: that log-probs are of.
    documents: of a micro-batch, on one of the ranks. generated: of a generated batch, on all ranks;
        None where a step has no several of them.
    """

    deviation: str = "group"
    deviation_epsilon: float = 1e-6
    bessel: bool = True
    baseline: str = "mean"
    alone_compared: bool = True
    drops_equal: bool = False
    family: str = "clip"
    level: str = "token"
    low: float | None = 0.2
    high: float = 0.2
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    dual_clip: float | None = None
    ratio_cap: float | None = None
    log_ratio_cap: float = _CLAMP
    kl: str = "k3"
    kl_coefficient: float = 0.0
    kl_clamp: float | None = None
    kl_gradient: str | None = None
    kl_ratio: str = "token"
    kl_place: str = "loss"
    entropy_coefficient: float = 0.0
    entropy_weights: str = "loss"
    correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    mean: str = "token"
    divisor: float = 1.0
    mean_of: str = "step"
    scale: float = 1.0
    masks_truncated: bool = False
    truncated_counted: bool = True
    mask_shift: int = 0
    temperature: float = 1.0
    documents: int | None = None
    generated: int | None = None
    ranks: int = 1

    @property
    def depends_on_cut(self) -> bool:
        """Return True if a number of the step depends on its micro-batches."""
        of_entropy = self.entropy_coefficient != 0 and self.entropy_weights == "micro_batch"
        return self.mean_of == "micro_batch" or of_entropy


def their_numbers(step: RecordedStep, convention: Convention) -> Numbers:
    """Return the quantities of a step under a convention."""
    c = convention
    rows = Rows(step, c)
    numbers = _advantages(step, c, rows)
    kept = numbers["signal"].nan_to_num(nan=1.0)
    mask = rows.mask * kept[:, None]
    advantages = rows.padded(numbers["advantages"])
    leaf = rows.new.clone().requires_grad_()
    log_ratio = leaf - rows.old
    sequence = (log_ratio * mask).sum(1, True) / mask.sum(1, True).clamp(min=1)
    if c.level == "document":
        # One value a document, whose gradient reaches each of its tokens.
        ratio = (sequence + 0 * log_ratio).clamp(-_CLAMP, c.log_ratio_cap).exp()
    else:
        ratio = log_ratio.clamp(-_CLAMP, c.log_ratio_cap).exp()
    surrogate = _surrogate(c, ratio, advantages, leaf)
    kl = torch.zeros_like(leaf)
    if c.kl_coefficient and c.kl_place == "loss":
        of_kl = sequence if c.kl_ratio == "document" else log_ratio
        kl = c.kl_coefficient * _kl(c, leaf, rows.ref(), of_kl.exp())
    correction = _correction(c, rows, mask)
    weights = _weights(c, rows, mask, kept)
    loss = (weights * mask * (correction * surrogate + kl)).sum()
    loss.backward()
    loss = loss.detach() - _entropy_bonus(c, rows, weights * mask, mask, kept)
    of_tokens = {
        "mask": mask,
        "new log-probs": rows.new,
        "old log-probs": rows.old,
        "ratio": ratio * mask,
        "surrogate": surrogate * mask,
        "correction": correction * mask,
        "kl": kl * mask,
        "weights": weights * mask,
        "gradient": leaf.grad,
    }
    trained = rows.real * (kept[:, None] > 0)
    flat = {name: rows.flat(values.detach() * trained) for name, values in of_tokens.items()}
    return numbers | flat | {"loss": loss[None]}


class Rows:
    """The vectors of a step, padded. real: 1 where there is a token. mask: where it is trained."""

    def __init__(self, step: RecordedStep, convention: Convention):
        self._step = step
        self._lengths = step.lengths
        self.real = self.padded(torch.ones(sum(self._lengths), dtype=torch.float64))
        mask = self.real.clone()
        if convention.mask_shift > 0:
            mask[:, : convention.mask_shift] = 0
        for row, length in enumerate(self._lengths):
            mask[row, length + min(0, convention.mask_shift) : length] = 0
        self.unmasked = mask.clone()
        if convention.masks_truncated:
            mask[torch.tensor(step.truncated, dtype=torch.bool)] = 0
        self.mask = mask
        new = step.new_at(convention.temperature)
        self.new = self.padded(new)
        self.old = self.padded(new if step.old is None else step.old)

    def padded(self, vector: Tensor) -> Tensor:
        return pad_sequence([*vector.split(self._lengths)], batch_first=True)

    def flat(self, rows: Tensor) -> Tensor:
        return rows[self.real > 0]

    def sampling(self) -> Tensor:
        return self._known("sampling", "sampling_log_probs")

    def ref(self) -> Tensor:
        return self._known("ref", "ref_log_probs")

    def entropy(self) -> Tensor:
        assert self._step.entropy is not None
        return self.padded(self._step.entropy)

    def _known(self, name: str, field: str) -> Tensor:
        vector = getattr(self._step, name)
        if vector is None:
            raise ConfigError(
                f"the configuration of the other framework needs {field} of every document (got "
                f"some without). Use a run with {_RECORDED_BY[name]}, which has them, or switch "
                "its penalty or correction off."
            )
        return self.padded(vector)


_RECORDED_BY = {"ref": "kl=k3 kl.coefficient=0.001", "sampling": "correction=token_truncate"}
"""Log-probs -> overrides of a run whose documents have them."""


def _advantages(step: RecordedStep, c: Convention, rows: Rows) -> Numbers:
    """Return the quantities up to the advantages."""
    documents = len(step.attempts)
    if not step.has_rewards:
        unknown = torch.full((documents,), math.nan).double()
        names = ("rewards", "signal", "baseline", "deviation")
        return dict.fromkeys(names, unknown) | {"advantages": step.advantages}
    scores = [math.nan if a.reward is None else a.reward for a in step.attempts]
    rewards = torch.tensor(scores, dtype=torch.float64)
    if c.kl_coefficient and c.kl_place == "reward":
        penalty = _kl(c, rows.old, rows.ref(), torch.ones_like(rows.old))
        rewards = rewards - c.kl_coefficient * (penalty * rows.mask).sum(1)
    signal = torch.ones_like(rewards)
    baseline = torch.zeros_like(rewards)
    deviation = torch.ones_like(rewards)
    for places in step.members:
        group = rewards[places]
        known = group[~group.isnan()]
        if c.drops_equal and len(places) > 1 and known.std(correction=0) == 0:
            signal[places] = 0
        lengths = torch.tensor([step.lengths[place] for place in places], dtype=torch.float64)
        baseline[places] = _baseline(c, group, known, lengths)
        if len(places) == 1 and not c.alone_compared:
            baseline[places] = 0.0
        elif c.deviation == "group":
            deviation[places] = _deviation(known, c) + c.deviation_epsilon
    if c.deviation == "batch":
        trained = rewards[(signal > 0) & ~rewards.isnan()]
        deviation[:] = _deviation(trained, c) + c.deviation_epsilon
    advantages = ((rewards - baseline) / deviation).nan_to_num(nan=0.0) * signal
    made = {"rewards": rewards, "signal": signal, "baseline": baseline, "deviation": deviation}
    return made | {"advantages": advantages[step.index]}


def _baseline(c: Convention, group: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
    if c.baseline == "by_length":
        return (lengths * group).nansum() / lengths.sum().clamp(min=1)
    if c.baseline == "others" and len(known) > 1:
        return (known.sum() - group) / (len(known) - 1)
    return known.mean()


def _deviation(values: Tensor, c: Convention) -> Tensor:
    if len(values) < 2:
        return values.new_zeros(())
    return values.std(correction=int(c.bessel))


def _surrogate(c: Convention, ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> Tensor:
    """Return (B, T) l_t."""
    if c.family == "reinforce":
        return -advantages * log_probs
    if c.family == "sapo":
        t = torch.where(advantages > 0, c.temperature_positive, c.temperature_negative)
        return -4 / t * torch.sigmoid(t * (ratio - 1)) * advantages
    low = -math.inf if c.low is None else 1 - c.low
    within = ratio.clamp(low, 1 + c.high)
    if c.family == "cispo":
        return -within.detach() * advantages * log_probs
    capped = ratio if c.ratio_cap is None else ratio.clamp(max=c.ratio_cap)
    surrogate = torch.maximum(-advantages * capped, -advantages * within)
    if c.dual_clip is None:
        return surrogate
    bounded = torch.minimum(surrogate, -advantages * c.dual_clip)
    return torch.where(advantages < 0, bounded, surrogate)


def _kl(c: Convention, log_probs: Tensor, ref: Tensor, ratio: Tensor) -> Tensor:
    """Return (B, T), the term of the penalty, without its coefficient."""
    distance = log_probs - ref
    values = _term(c.kl, distance)
    if c.kl == "k3_ratio":
        values = values * ratio
    if c.kl_clamp is not None:
        values = values.clamp(-c.kl_clamp, c.kl_clamp)
    if c.kl_gradient is None:
        return values
    backward = _term(c.kl_gradient, distance)
    return values.detach() + backward - backward.detach()


def _term(kind: str, distance: Tensor) -> Tensor:
    if kind == "k1":
        return distance
    if kind == "abs":
        return distance.abs()
    if kind == "k2":
        return distance**2 / 2
    limited = (-distance).clamp(-_CLAMP, _CLAMP)
    return limited.exp() - limited - 1


def _correction(c: Convention, rows: Rows, mask: Tensor) -> Tensor:
    """Return (B, T), the factor for the gap between sampler and trainer."""
    if c.correction is None:
        return torch.ones_like(mask)
    scope, action = c.correction.split("_")
    log_ratio = (rows.old - rows.sampling()) * mask
    if scope == "sequence":
        log_ratio = log_ratio.sum(1, True).expand_as(log_ratio)
    factor = log_ratio.clamp(-_CLAMP, _CLAMP).exp()
    low = -math.inf if c.correction_low is None else c.correction_low
    high = math.inf if c.correction_high is None else c.correction_high
    if action == "truncate":
        return factor.clamp(low, high)
    return torch.where((factor < low) | (factor > high), 0.0, factor)


def _entropy_bonus(
    c: Convention, rows: Rows, weights: Tensor, mask: Tensor, kept: Tensor
) -> Tensor:
    """Return what is subtracted from the loss. It has no gradient by a token's log-prob."""
    if not c.entropy_coefficient:
        return torch.zeros((), dtype=torch.float64)
    if c.entropy_weights == "micro_batch":
        of_tokens = replace(c, mean="token", mean_of="micro_batch", truncated_counted=False)
        weights = _weights(of_tokens, rows, mask, kept) * mask
    return c.entropy_coefficient * (weights * rows.entropy()).sum()


def micro_batches(c: Convention, documents: Sequence[int]) -> list[list[int]]:
    """Return the documents of each micro-batch of all ranks, in order."""
    return _cut(documents, c.documents)


def counted_together(c: Convention, documents: Sequence[int]) -> list[list[int]]:
    """Return the documents whose tokens, or themselves, are counted for one denominator."""
    sizes = {"micro_batch": c.documents, "generated_batch": c.generated}
    return _cut(documents, sizes.get(c.mean_of))


def _cut(documents: Sequence[int], size: int | None) -> list[list[int]]:
    """Return the documents in parts of a size, in order; all in one for None."""
    size = size or len(documents)
    return [[*documents[start : start + size]] for start in range(0, len(documents), size or 1)]


def _weights(c: Convention, rows: Rows, mask: Tensor, kept: Tensor) -> Tensor:
    """Return (B, T) w_t: each denominator counted over the step, or over a part of it."""
    counted = mask if not c.truncated_counted else rows.unmasked * kept[:, None]
    weights = torch.zeros_like(mask)
    documents = kept.nonzero().flatten().tolist()
    parts = counted_together(c, documents)
    for part in parts:
        counts = counted[part].sum(1, True)
        if c.mean == "token":
            denominators = counts.sum().expand_as(counts)
        elif c.mean == "document":
            denominators = counts * len(part)
        else:
            denominators = torch.full_like(counts, c.divisor * len(part))
        weights[part] = c.scale / (denominators.clamp(min=1e-30) * len(parts))
    return weights
