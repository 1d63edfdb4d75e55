"""The vocabulary-sized passes in plain PyTorch: they run anywhere, a few rows at a time.

T is the number of rows, V the number of columns, which are tokens of the vocabulary.

With m the maximum of a row of logits, its normalizer is the pair (m, log sum_v exp((x_v - m) /
temperature)). The two are not added, because the sum of a logit of ten thousand and a logarithm
would round the logarithm away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pgtoolkit.kernels.products import accumulation_dtype
from pgtoolkit.losses.centering import CenteredRows

one_pass = False

_ELEMENTS_PER_BLOCK = 2**24
"""Logits converted to float32 at once: 64 MiB, so that no second full copy of the logits exists."""


def forward(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (log_probs, normalizer, entropy) of logits (T, V) / temperature at labels (T,).

    They are (T,), (2, T) and (T,), in float32 (float64 for float64 logits), 0 where labels < 0.
    The entropy is log Z - sum p z, or None unless asked for. A label that is not below V has
    log-prob NaN.
    """
    parts = forward_shard(logits, labels, temperature, with_entropy, 0)
    log_probs, normalizer, entropy = merge_shards([parts], labels, temperature)
    return torch.where(labels < logits.shape[1], log_probs, torch.nan), normalizer, entropy


def forward_shard(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, vocabulary_start: int
) -> Tensor:
    """Return the sums of each row over a shard of the vocabulary, (3 or 4, T).

    The shard has the columns from vocabulary_start on. The sums are the label's logit, or 0 where
    the label is in another shard; the shard's m; its sum of exp(d) with d = (x - m) / temperature;
    and, with_entropy, its sum of d exp(d). All are 0 where labels < 0.
    """
    parts = logits.new_zeros(
        4 if with_entropy else 3, len(labels), dtype=accumulation_dtype(logits)
    )
    for rows in _row_blocks(logits):
        block = logits[rows].to(parts.dtype)
        local = labels[rows] - vocabulary_start
        inside = (local >= 0) & (local < logits.shape[1])
        chosen = block.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
        # A finite floor, so that a shard of -inf only (a masked vocabulary) gives 0 and not NaN.
        maximum = block.amax(-1).clamp(min=-1e30)
        distance = (block - maximum.unsqueeze(-1)) / temperature
        weight = distance.exp()
        values = [torch.where(inside, chosen, 0.0), maximum, weight.sum(-1)]
        if with_entropy:
            # A token of probability 0 adds nothing, also where its logit is -inf.
            values.append((weight * distance.clamp(min=-1000.0)).sum(-1))
        parts[:, rows] = torch.where(labels[rows] >= 0, torch.stack(values), 0.0)
    return parts


def merge_shards(
    shards: list[Tensor], labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (log_probs, normalizer, entropy) as `forward`, from the sums of all shards."""
    trained = labels >= 0
    chosen, maxima, sums, *dots = torch.stack(shards).unbind(1)
    maximum = maxima.amax(0)
    shift = (maxima - maximum) / temperature
    total = torch.where(trained, (sums * shift.exp()).sum(0), 1.0)
    log_sum = total.log()
    # A single shard holds the label, the others hold 0, so the sum is exact.
    log_probs = torch.where(trained, (chosen.sum(0) - maximum) / temperature - log_sum, 0.0)
    entropy = None
    if dots:
        dot = (shift.exp() * (dots[0] + shift.clamp(min=-1000.0) * sums)).sum(0)
        entropy = torch.where(trained, log_sum - dot / total, 0.0)
    return log_probs, torch.stack([maximum, log_sum]), entropy


class Teacher(NamedTuple):
    """The reference of a full KL.

    kind: "full_reverse", "full_forward" or "full_jsd".
    logits: (T, V).
    normalizer: (2, T).
    beta: the share of the reference in the mixture M of full_jsd; 0 for the other kinds.
    divergence: (T,), the full KL, or the divergence, of each row.
    of_policy: (T,), the KL of the policy of each row to what it is compared with, M or the
        reference, which is in the gradient; not for full_forward.
    """

    kind: str
    logits: Tensor
    normalizer: Tensor
    beta: float = 0.0
    divergence: Tensor | None = None
    of_policy: Tensor | None = None


def log_probs_at(
    logits: Tensor, ids: Tensor, normalizer: Tensor, temperature: float, vocabulary_start: int = 0
) -> Tensor:
    """Return (T, k), the log-probs of the tokens ids (T, k), 0 where ids < 0.

    The logits (T, V) are the columns from vocabulary_start on; of a token of other columns the
    log-prob is NaN. normalizer: that of all columns.
    """
    local = ids - vocabulary_start
    inside = (ids >= 0) & (local >= 0) & (local < logits.shape[1])
    if logits.shape[1] == 0:
        return torch.where(ids < 0, 0.0, torch.nan).to(normalizer.dtype)
    chosen = logits.gather(-1, torch.where(inside, local, 0))
    log_probs = torch.where(inside, _log_softmax(chosen, normalizer, temperature), torch.nan)
    return torch.where(ids < 0, 0.0, log_probs)


def divergence(
    logits: Tensor, normalizer: Tensor, teacher: Teacher, labels: Tensor, temperature: float
) -> Tensor:
    """Return (1, T): the full KL of each row, or these columns' share of it; 0 where labels < 0.

    Kind "full_reverse" is sum p (log p - log f), "full_forward" sum f (log f - log p), with p and f
    the softmax of logits (T, V) and of the teacher's. The normalizers are those of all columns.
    For "full_jsd" it is (2, T): KL(f || M) and KL(p || M), with M the mixture of both.
    """
    with_mixture = teacher.kind == "full_jsd"
    result = torch.zeros(2 if with_mixture else 1, len(labels)).to(normalizer)
    for rows in _row_blocks(logits):
        log_p = _log_softmax(logits[rows], normalizer[:, rows], temperature)
        log_f = _log_softmax(teacher.logits[rows], teacher.normalizer[:, rows], temperature)
        pairs = [(log_p, log_f) if teacher.kind == "full_reverse" else (log_f, log_p)]
        if with_mixture:
            log_m = _log_mixture(log_p, log_f, teacher.beta)
            pairs = [(log_f, log_m), (log_p, log_m)]
        for place, (first, second) in enumerate(pairs):
            # A token of probability 0 adds nothing, also where its logit is -inf.
            terms = torch.where(first > -torch.inf, first.exp() * (first - second), 0.0)
            result[place, rows] = torch.where(labels[rows] >= 0, terms.sum(-1), 0.0)
    return result


def _log_mixture(log_p: Tensor, log_f: Tensor, beta: float) -> Tensor:
    """Return the logarithm of (1 - beta) p + beta f."""
    return torch.logaddexp(log_p + math.log1p(-beta), log_f + math.log(beta))


def backward(
    logits: Tensor,
    labels: Tensor,
    normalizer: Tensor,
    coefficients: Tensor,
    temperature: float,
    vocabulary_start: int = 0,
    out: Tensor | None = None,
    teacher: Teacher | None = None,
    centered: CenteredRows | None = None,
) -> Tensor:
    """Return the gradient by the logits, (T, V) in their dtype.

    It is (c_t / temperature) (onehot(label) - softmax), and 0 where c_t = 0, plus what follows.
    coefficients: (T,) c_t; or (n, T): c_t, then e_t where normalizer is (3, T), then k_t where
        there is a teacher. e_t is the derivative of the loss by each row's entropy H_t, the last
        row of normalizer, and adds -(e_t / temperature) p (log p + H_t), with p the softmax. k_t is
        the derivative by each row's full KL, and adds k_t / temperature times
        p (log p - log f - KL) for a reverse one, p - f for a forward one, or (1 - beta) p (log p -
        log M - KL(p || M)) for full_jsd.
    normalizer: that of all columns, where logits are a shard of them.
    out: written and returned; may be `logits`.
    centered: adds on_top / temperature at the tokens of top_ids, and -(elsewhere / temperature) p
        at all others.
    """
    gradient = torch.empty_like(logits) if out is None else out
    coefficients = torch.atleast_2d(coefficients)
    for rows in _row_blocks(logits):
        scale, *others = (coefficients[:, rows] / temperature).unsqueeze(-1)
        log_p = _log_softmax(logits[rows], normalizer[:2, rows], temperature)
        probabilities = log_p.exp()
        terms = []
        if len(normalizer) == 3:
            # A token of probability 0 adds nothing, also where its logit is -inf.
            entropy = normalizer[2, rows].unsqueeze(-1)
            terms.append(-probabilities * (log_p.clamp(min=-1000.0) + entropy))
        if teacher is not None:
            log_f = _log_softmax(teacher.logits[rows], teacher.normalizer[:, rows], temperature)
            if teacher.kind == "full_forward":
                terms.append(probabilities - log_f.exp())
            else:
                assert teacher.of_policy is not None
                full_kl = teacher.of_policy[rows].unsqueeze(-1)
                if teacher.kind == "full_jsd":
                    log_f = _log_mixture(log_p, log_f, teacher.beta)
                # beta is 0 for a reverse KL.
                term = (1 - teacher.beta) * probabilities * (log_p - log_f - full_kl)
                terms.append(torch.where(log_p > -torch.inf, term, 0.0))
        block = -scale * probabilities
        for factor, term in zip(others, terms, strict=True):
            block += factor * term
        active = labels[rows] >= 0
        if centered is None:
            active = active & (coefficients[:, rows] != 0).any(0)
        else:
            block += _of_centered(centered, rows, probabilities, temperature, vocabulary_start)
        local = (labels[rows] - vocabulary_start).unsqueeze(-1)
        inside = (local >= 0) & (local < logits.shape[1])
        block.scatter_add_(-1, torch.where(inside, local, 0), torch.where(inside, scale, 0.0))
        # Select, never multiply by 0: a row that is not trained may hold NaN or infinity.
        gradient[rows] = torch.where(active.unsqueeze(-1), block, 0.0).to(gradient.dtype)
    return gradient


def _of_centered(
    centered: CenteredRows,
    rows: slice,
    probabilities: Tensor,
    temperature: float,
    vocabulary_start: int,
) -> Tensor:
    """Return the part of score centering in the gradient of these rows, (N, V)."""
    columns = probabilities.shape[1]
    part = -(centered.elsewhere[rows] / temperature).unsqueeze(-1) * probabilities
    # Tokens of other columns, and places that are not used, are written into one more column.
    part = torch.nn.functional.pad(part, (0, 1))
    local = centered.top_ids[rows] - vocabulary_start
    inside = (centered.top_ids[rows] >= 0) & (local >= 0) & (local < columns)
    place = torch.where(inside, local, columns)
    return part.scatter_(-1, place, centered.on_top[rows] / temperature)[:, :columns]


def forward_score_(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    dtype: torch.dtype,
    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = forward,
    backward: Callable[..., Tensor] = backward,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (log_probs, entropy, score), the first two as `forward`.

    The score is onehot(label) - softmax, (T, V) in `dtype`; it takes the memory of the logits where
    the dtypes are the same. All labels must be >= 0.
    forward, backward: the passes of an implementation.
    """
    log_probs, normalizer, entropy = forward(logits, labels, temperature, with_entropy)
    # Each program of a GPU's backward knows only a block, so it cannot write another dtype over the
    # logits.
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    coefficients = torch.full_like(log_probs, temperature)
    score = backward(logits, labels, normalizer, coefficients, temperature, out=out)
    return log_probs, entropy, score


def scale_rows(source: Tensor, factors: Tensor, target: Tensor, rows: Tensor) -> Tensor:
    """Set target[rows[i]] = factors[i] * source[i], computed in the factors' dtype; return target.

    source may be target for rows 0, 1, ...
    """
    return target.index_copy_(0, rows, (source * factors.unsqueeze(-1)).to(target.dtype))


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply values by a factor (0-dim) in place."""
    return values.mul_(factor)


def _log_softmax(logits: Tensor, normalizer: Tensor, temperature: float) -> Tensor:
    maximum, log_sum = normalizer.unsqueeze(-1)
    return (logits.to(normalizer.dtype) - maximum) / temperature - log_sum


def _row_blocks(logits: Tensor) -> list[slice]:
    rows = max(1, _ELEMENTS_PER_BLOCK // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
