"""The fused LM head: loss and gradients from hidden states, with the logits of a chunk at a time.

T is the number of positions, N the rows of a chunk, V the vocabulary, H the hidden width.

The gradient of a log-prob by its logits is (onehot - softmax) / temperature, the *score*, whatever
the loss. With c_t the derivative of the loss by the log-prob of token t,

    gradient of hidden = (c / temperature) * (score @ weight)
    gradient of weight = score.T @ ((c / temperature) * hidden)

so c is applied to T x H vectors, and the score can overwrite the logits before c is known. One pass
suffices even where c_t needs all tokens of its document: chunks are made of complete documents.

An entropy bonus, or the full KL against a reference, adds a second row to the gradient of the
logits, with a coefficient of its own. A chunk's logits, and the reference's beside them, then stay
until c is known, and are read once more; no product is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import DocumentCounts
from pgtoolkit.kernels.chunks import Chunk, make_plan
from pgtoolkit.kernels.given_logits import GradientsFromForward, Passes, compared
from pgtoolkit.kernels.products import (
    LMHead,
    ParallelProduct,
    Projection,
    accumulate_matmul,
    accumulation_dtype,
)
from pgtoolkit.kernels.torch_passes import Teacher
from pgtoolkit.losses.exchange import all_reduce_
from pgtoolkit.losses.measure import evaluate_objective
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss, Objective

_WORTH_COMPACTING = 0.95
"""Rows are moved together where at most this share of a chunk's rows has a gradient: above it,
moving costs more than it saves."""
_ROWS_PER_MOVE = 128


@dataclass(frozen=True)
class HeadOptions:
    """Options of the fused head.

    implementation: the vocabulary-sized passes.
    max_rows: rows of logits that may exist at once.
    check_finite: refuse numbers that are not finite.
    counts: the documents' counts if they are known on the host.
    vocabulary_group: ranks with the other rows of the weight; the implementation has the group as
        well.
    """

    implementation: Passes
    max_rows: int
    loss: Loss
    check_finite: bool = True
    counts: DocumentCounts | None = None
    vocabulary_group: ProcessGroup | None = None

    @property
    def bonus(self) -> bool:
        """Return True if the loss has an entropy bonus."""
        return self.loss.entropy_coefficient != 0

    @property
    def keeps_logits(self) -> bool:
        """Return True if the gradient by a row's logits is more than a number times the score."""
        return self.bonus or self.loss.full_kl

    @property
    def with_entropy(self) -> bool:
        """Return True if the entropy is computed, for the bonus or for the metrics."""
        return self.bonus or self.loss.level == "with_entropy"


class Piece(NamedTuple):
    """Rows between forward and backward: hidden (N, H), log_probs (N,), and score (N, V).

    With `keeps_logits`, `score` holds the logits instead. Their normalizer is (2, N), or (3, N)
    with the entropy for a bonus; teacher is the reference of a full KL.
    """

    hidden: Tensor
    score: Tensor
    log_probs: Tensor
    normalizer: Tensor | None = None
    teacher: Teacher | None = None


def linear_loss(
    hidden: Tensor, head: LMHead, labels: Tensor, objective: Objective, options: HeadOptions
) -> tuple[Tensor, Tensor, MetricSums, AnyOnHost]:
    """Return (loss, log_probs, metric sums, any refused) of hidden (T, H) @ weight (V, H).T.

    log_probs: (T,), detached.
    any refused: True if `Objective.refused` holds for a token, such as for NaN.
    """
    can_scale = head.weight_gradient is None
    inputs = (hidden, head.weight if can_scale else head.weight.detach(), head.bias)
    needs_gradient = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in inputs
    ]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        divergence = objective.penalties.divergence
        run = _FusedPass(hidden, head, labels, options, needs_gradient, divergence)
        run.all_chunks(objective)
        loss, _, sums = evaluate_objective(
            objective.at(run.log_probs), run.log_probs, run.entropy, options.loss.level
        )
    if any(needs_gradient):
        gradients = [run.hidden_gradient, run.weight_gradient, run.bias_gradient]
        loss = GradientsFromForward.apply(
            loss, gradients, options.implementation.scale_, can_scale, *inputs
        )
    assert run.any_not_finite is not None
    return loss, run.log_probs, sums, run.any_not_finite


@torch.no_grad()
def linear_log_probs(
    hidden: Tensor, head: LMHead, labels: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor | None]:
    """Return (log-prob of each label, entropy or None), (T,) each, 0 where labels < 0.

    The entropy is computed if the options ask for it. options.counts saves a wait for the GPU.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        run = _FusedPass(hidden, head, labels, options, [False] * 3)
        trained = labels >= 0
        number = sum(options.counts.trained) if options.counts is not None else int(trained.sum())
        rows = torch.sort((~trained).int(), stable=True).indices[:number]
        run.make_buffer(number)
        for piece in Chunk(0, number, False, None).pieces(options.max_rows):
            run.with_logits(rows[piece])
    return run.log_probs, run.entropy


class AnyOnHost:
    """True if any of (T,) bool is True.

    The answer is copied to the host while the GPU works on; bool() waits for it.
    """

    def __init__(self, values: Tensor):
        self._answer = values.any()
        self._arrived = None
        if values.is_cuda:
            on_device = self._answer
            self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._answer.copy_(on_device, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._answer)


class _FusedPass:
    """One evaluation of the head: buffers, results, and the steps that fill them."""

    def __init__(
        self,
        hidden: Tensor,
        head: LMHead,
        labels: Tensor,
        options: HeadOptions,
        needs_gradient: list[bool],
        divergence: Tensor | None = None,
    ):
        """Allocate the results.

        needs_gradient: by hidden states, weight and bias.
        divergence: (T,), filled in with the full KL.
        """
        self.divergence = divergence
        self.any_not_finite: AnyOnHost | None = None
        self.policy = Projection(hidden, head)
        self.reference = None if head.reference is None else Projection(*head.reference)
        self.labels = labels
        self.options = options
        self.temperature = options.loss.temperature
        self.hidden = self.policy.hidden
        wide = accumulation_dtype(hidden)
        self.log_probs = hidden.new_zeros(len(hidden), dtype=wide)
        self.entropy = torch.zeros_like(self.log_probs) if options.with_entropy else None

        self.with_gradient = any(needs_gradient)
        by_hidden, by_weight, by_bias = needs_gradient
        # float16 cannot hold gradients of a loss that is a mean over a step: they stay in float32
        # until they are scaled.
        dtype = wide if hidden.dtype == torch.float16 else hidden.dtype
        self.hidden_gradient = torch.zeros_like(hidden, dtype=dtype) if by_hidden else None
        self.weight_gradient = torch.zeros_like(head.weight, dtype=wide) if by_weight else None
        self.bias_gradient = None
        if head.bias is not None and by_bias:
            self.bias_gradient = torch.zeros_like(head.bias, dtype=wide)
        self.weight_total = self.weight_gradient
        if self.with_gradient and head.weight_gradient is not None:
            self.weight_total = head.weight_gradient

    def all_chunks(self, objective: Objective) -> None:
        """Compute the log-probs, and the gradients of the objective, chunk by chunk."""
        options = self.options
        plan = make_plan(
            objective, options.max_rows, self.with_gradient, options.check_finite, options.counts
        )
        ordered = objective.take(plan.rows, None)
        # Coefficients are means over a step. This power of two brings them near 1, into the range
        # of float16.
        self.scale = float(2 ** len(plan.rows).bit_length())
        self.scale_rows = options.implementation.scale_rows
        self.make_buffer(max((chunk.stop - chunk.start for chunk in plan.chunks), default=0))
        if not plan.chunks:
            self.any_not_finite = AnyOnHost(torch.zeros_like(objective.mask))
        clips_documents = _may_clip_documents(objective)
        for chunk in plan.chunks:
            pieces = [plan.rows[piece] for piece in chunk.pieces(options.max_rows)]
            # If a document has more rows than may exist at once, only the last piece's score still
            # exists when the coefficients are known; the other logits are computed again. This
            # rank may have no row of a chunk.
            kept = [pieces.pop()] if chunk.needs_gradient and pieces else []
            parts = [self.with_logits(rows).log_probs for rows in pieces]
            for rows in kept:
                last_piece = self.score(rows)
                parts.append(last_piece.log_probs)
            if chunk is plan.chunks[-1]:
                # All log-probs are known now, so the answer reaches the host while the last
                # products run.
                self.any_not_finite = AnyOnHost(objective.refused(self.log_probs))
            if not chunk.needs_gradient:
                continue
            share = ordered.take(slice(chunk.start, chunk.stop), chunk.documents)
            log_probs = torch.cat([self.log_probs[:0], *parts])
            coefficients = share.at(log_probs).coefficients(log_probs)
            if options.keeps_logits:
                coefficients = torch.stack([coefficients, *share.penalties.of_rows])
            if not parts:
                continue
            *earlier, last = coefficients.split([len(part) for part in parts], -1)
            for rows in kept:
                self.products(rows, last_piece, last, clips_documents and not earlier)
            for rows, c in zip(pieces, earlier, strict=True):
                self.products(rows, self.score(rows), c, False)
        if self.hidden_gradient is not None:
            # Each rank has computed the part of its columns.
            all_reduce_(self.hidden_gradient, options.vocabulary_group)

    def make_buffer(self, largest: int) -> None:
        """Allocate the logits of a chunk of `largest` rows, or of as many as may exist at once."""
        rows = min(self.options.max_rows, largest)
        self.numbers = torch.arange(rows, device=self.hidden.device)
        self.policy.make_buffer(rows)
        if self.reference is not None:
            self.reference.make_buffer(rows)

    def with_logits(self, rows: Tensor) -> Piece:
        """Return these rows with their logits; record their log-probs, entropies and full KL."""
        implementation = self.options.implementation
        hidden = self.hidden[rows]
        teacher = None
        logits = self.policy.logits(hidden)
        log_probs, normalizer, entropy = implementation.forward(logits, *self._arguments(rows))
        if self.reference is not None:
            ref_logits = self.reference.logits(self.reference.hidden[rows])
            assert self.options.loss.kl is not None
            assert self.divergence is not None
            teacher = compared(
                implementation,
                logits,
                normalizer,
                self.options.loss.kl.kind,
                ref_logits,
                self.labels[rows],
                self.temperature,
            )
            assert teacher.divergence is not None
            self.divergence[rows] = teacher.divergence
        if self.options.bonus:
            assert entropy is not None
            normalizer = torch.cat([normalizer, entropy[None]])
        return Piece(hidden, logits, self._record(rows, log_probs, entropy), normalizer, teacher)

    def score(self, rows: Tensor) -> Piece:
        """Return these rows with the score in the place of their logits, unless `keeps_logits`."""
        if self.options.keeps_logits:
            return self.with_logits(rows)
        hidden = self.hidden[rows]
        log_probs, entropy, score = self.options.implementation.forward_score_(
            self.policy.logits(hidden), *self._arguments(rows), self.hidden.dtype
        )
        return Piece(hidden, score, self._record(rows, log_probs, entropy))

    def gradient(self, rows: Tensor, piece: Piece, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return (score, coefficients), whose product is the gradient by the logits of `piece`.

        coefficients: (n, N), as `torch_passes.backward` takes them. The scale keeps small numbers
            in the range of float16.
        """
        logits = piece.score
        dtype = piece.hidden.dtype
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        score = self.options.implementation.backward(
            logits,
            self.labels[rows],
            piece.normalizer,
            coefficients * self.scale,
            self.temperature,
            out=out,
            teacher=piece.teacher,
        )
        return score, torch.full_like(coefficients[0], self.temperature / self.scale)

    def products(self, rows: Tensor, piece: Piece, coefficients: Tensor, compact: bool) -> None:
        """Add the two backward products of these rows to the gradients; overwrites the piece."""
        hidden = piece.hidden
        score = piece.score
        if self.options.keeps_logits:
            score, coefficients = self.gradient(rows, piece, coefficients)
        elif compact:
            rows, hidden, score, coefficients = _without_zeros(rows, hidden, score, coefficients)
        factor = coefficients * (1 / self.temperature)
        if self.hidden_gradient is not None:
            by_hidden = ParallelProduct(score, self.policy.weight)
        scaled = factor * self.scale
        if self.bias_gradient is not None:
            column = scaled.to(score.dtype).unsqueeze(-1)
            accumulate_matmul(
                self.bias_gradient.unsqueeze(-1), score.T, column, alpha=1 / self.scale
            )
        if self.weight_total is not None:
            hidden = self.scale_rows(hidden, scaled, hidden, self.numbers[: len(rows)])
            accumulate_matmul(self.weight_total, score.T, hidden, alpha=1 / self.scale)
        if self.hidden_gradient is not None:
            self.scale_rows(by_hidden.result(), factor, self.hidden_gradient, rows)

    def _arguments(self, rows: Tensor) -> tuple[Tensor, float, bool]:
        return self.labels[rows], self.temperature, self.options.with_entropy

    def _record(self, rows: Tensor, log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        self.log_probs[rows] = log_probs
        if entropy is not None and self.entropy is not None:
            self.entropy[rows] = entropy
        return log_probs


def _may_clip_documents(objective: Objective) -> bool:
    """Return True if all tokens of a document may turn out to have no gradient.

    They cannot if the family's weight is never 0, if the old log-probs are those of this pass
    (every ratio is 1), or if penalties give every token a gradient.
    """
    if objective.penalties.active:
        return False
    if objective.off_policy is not None:
        return True
    family = objective.family
    clips = family.by_document and family.slope_of == "log_ratio"
    return clips and objective.old_log_probs is not None


def _without_zeros(
    rows: Tensor, hidden: Tensor, score: Tensor, coefficients: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments without rows of coefficient 0, such as those of clipped documents.

    Costs one synchronisation on a GPU. The remaining rows of score are moved in place.
    """
    active = coefficients != 0
    number = int(active.sum())
    if number > _WORTH_COMPACTING * len(rows):
        return rows, hidden, score, coefficients
    # In ascending order, so that a row only moves up, to the place of a row that is dropped or that
    # has moved before.
    keep = torch.sort(~active, stable=True).indices[:number]
    for low in range(0, number, _ROWS_PER_MOVE):
        moved = keep[low : low + _ROWS_PER_MOVE]
        score[low : low + len(moved)] = score[moved]
    return rows[keep], hidden[keep], score[:number], coefficients[keep]
