"""The fused LM head: loss and gradients from hidden states, a few rows of logits at a time.

T is the number of positions, N the rows of a slab, V the vocabulary, H the hidden width.

A *chunk* is a set of rows whose coefficients are computed together (chunks.py). A *slab* is the
part of a chunk whose logits exist at once: nearly always the complete chunk.

The *score* is onehot(label) - softmax. The gradient of a log-prob by its logits is score /
temperature, whatever the loss. With c_t the derivative of the loss by the log-prob of token t,

    gradient of hidden = (c / temperature) * (score @ weight)
    gradient of weight = score.T @ ((c / temperature) * hidden)

so c only scales vectors of width H, and the score can overwrite the logits before c is known. Where
c_t depends on all tokens of its document, one pass still suffices, because a chunk holds complete
documents.

An entropy bonus, the full KL against a reference, or score centering adds a second term to the
gradient by the logits, with coefficients of its own. Then the logits of a slab, and those of the
reference, are kept until the coefficients are known, and read once more. No product is computed
again for that.

Where log-probs are over the sets that truncated sampling has kept, the score is onehot(label) -
softmax over the set, and 0 at all other tokens. It does not depend on c either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import DocumentCounts
from pgtoolkit.kernels.chunks import Chunk, make_plan
from pgtoolkit.kernels.given_logits import (
    GradientsFromForward,
    Passes,
    compared,
    over_kept,
    where_all_known,
    with_kept,
)
from pgtoolkit.kernels.products import (
    LMHead,
    ParallelProduct,
    Projection,
    accumulate_matmul,
    accumulation_dtype,
)
from pgtoolkit.kernels.torch_passes import Teacher
from pgtoolkit.losses.centering import CenteredRows
from pgtoolkit.losses.exchange import all_reduce_
from pgtoolkit.losses.kept import KeptRows, KeptSets
from pgtoolkit.losses.measure import evaluate_objective
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss, Objective

_WORTH_COMPACTING = 0.95
"""Rows without a gradient are left out if at most this share of a slab's rows has one: above it,
moving the rows together costs more than it saves."""
_ROWS_PER_MOVE = 128
"""Rows that are moved at once: only these are copied."""


@dataclass(frozen=True)
class HeadOptions:
    """Options of the fused head.

    implementation: the passes over (N, V) logits.
    max_rows: the most rows of logits that may exist at once.
    loss: the settings of the loss.
    check_finite: True to refuse numbers that are not finite.
    counts: the token counts of the documents, if the host knows them.
    vocabulary_group: the ranks over which the rows of the weight are spread, the same group that
        `implementation` then has.
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
        """Return True if the gradient by a row's logits has more terms than c_t times the score."""
        return self.bonus or self.loss.full_kl or self.loss.family.score_centering

    @property
    def with_entropy(self) -> bool:
        """Return True if the entropy is computed, for the bonus or for the metrics."""
        return self.bonus or self.loss.level == "with_entropy"


class Slab(NamedTuple):
    """Rows of a chunk that have been through forward and not through backward.

    hidden: (N, H).
    score: (N, V); the logits in its place with `HeadOptions.keeps_logits`.
    log_probs: (N,).
    normalizer: of the logits, (2, N) as in torch_passes.py; (3, N) with the entropy, for a bonus.
        None beside a score.
    teacher: the reference of a full KL.
    kept: of log-probs over kept sets, beside logits; None beside a score.
    """

    hidden: Tensor
    score: Tensor
    log_probs: Tensor
    normalizer: Tensor | None = None
    teacher: Teacher | None = None
    kept: KeptRows | None = None


class AnyOnHost:
    """The answer to whether any value of a bool vector is True, which bool() of it gives.

    The answer is copied to the host while the GPU continues to work, and bool() waits for it.
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


def linear_loss(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    objective: Objective,
    options: HeadOptions,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor, MetricSums, AnyOnHost]:
    """Return (loss, log_probs, metric sums, any_not_finite) of hidden (T, H) @ weight (V, H).T.

    log_probs: (T,), detached.
    kept: the sets that log-probs are taken over; None for the vocabulary.
    any_not_finite: True if `Objective.refused` is True for a token, for example because of NaN.

    The gradients are computed here already; the backward pass of the loss only hands them out. If
    the loss has a full KL, that of each row is written into `objective.penalties.divergence`.
    """
    # A gradient that is added to the caller's tensor here cannot be scaled in the backward pass.
    can_scale = head.weight_gradient is None
    inputs = (hidden, head.weight if can_scale else head.weight.detach(), head.bias)
    needs_gradient = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in inputs
    ]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        divergence = objective.penalties.divergence
        top_ids = None if objective.centering is None else objective.centering.top_ids
        fused = _FusedPass(hidden, head, labels, options, needs_gradient, divergence, top_ids, kept)
        fused.all_chunks(objective)
        objective = objective.at(fused.log_probs, fused.top_log_probs)
        loss, _, sums = evaluate_objective(
            objective, fused.log_probs, fused.entropy, options.loss.level
        )
    if any(needs_gradient):
        gradients = [fused.hidden_gradient, fused.weight_gradient, fused.bias_gradient]
        loss = GradientsFromForward.apply(
            loss, gradients, options.implementation.scale_, can_scale, *inputs
        )
    assert fused.any_not_finite is not None
    return loss, fused.log_probs, sums, fused.any_not_finite


@torch.no_grad()
def linear_log_probs(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    options: HeadOptions,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (log_probs, entropy), each (T,), 0 where labels < 0.

    kept: the sets that log-probs are taken over; None for the vocabulary.
    entropy: None unless `options.with_entropy`.
    options.counts: saves a wait for the GPU.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        fused = _FusedPass(hidden, head, labels, options, [False] * 3, kept=kept)
        trained = labels >= 0
        if options.counts is not None:
            num_trained = sum(options.counts.trained)
        else:
            num_trained = int(trained.sum())
        rows = torch.sort((~trained).int(), stable=True).indices[:num_trained]
        fused.make_buffers(num_trained)
        chunk = Chunk(0, num_trained, needs_gradient=False, documents=None)
        for slab in chunk.slabs(options.max_rows):
            fused.forward(rows[slab])
    return fused.log_probs, fused.entropy


class _FusedPass:
    """One pass over the rows: its buffers, its results, and the steps that fill them."""

    def __init__(
        self,
        hidden: Tensor,
        head: LMHead,
        labels: Tensor,
        options: HeadOptions,
        needs_gradient: list[bool],
        divergence: Tensor | None = None,
        top_ids: Tensor | None = None,
        kept: KeptSets | None = None,
    ):
        """Allocate the results.

        needs_gradient: whether the gradients by hidden states, weight and bias are asked for.
        divergence: (T,); the full KL of each row is written into it.
        top_ids: (T, k), the tokens whose log-probs score centering needs.
        kept: the sets that log-probs are taken over.
        """
        self.kept = kept
        self.divergence = divergence
        self.top_ids = top_ids
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
        self.top_log_probs = None
        if top_ids is not None:
            self.top_log_probs = torch.zeros_like(top_ids, dtype=wide)

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
        # The gradient of the weight is added up here: in the caller's tensor if there is one.
        self.weight_total = self.weight_gradient
        if self.with_gradient and head.weight_gradient is not None:
            self.weight_total = head.weight_gradient

    def all_chunks(self, objective: Objective) -> None:
        """Compute the log-probs of all rows, and the gradients of the objective, chunk by chunk."""
        options = self.options
        plan = make_plan(
            objective, options.max_rows, self.with_gradient, options.check_finite, options.counts
        )
        ordered = objective.take(plan.rows, None)
        # Coefficients are means over a step. This power of two brings them near 1, into the range
        # of float16.
        self.scale = float(2 ** len(plan.rows).bit_length())
        self.scale_rows = options.implementation.scale_rows
        self.make_buffers(max((chunk.stop - chunk.start for chunk in plan.chunks), default=0))
        if not plan.chunks:
            self.any_not_finite = AnyOnHost(torch.zeros_like(objective.mask))
        clips_documents = _may_clip_documents(objective)
        for chunk in plan.chunks:
            # The rows of each slab; where a gradient is needed, the last slab is held apart. This
            # rank may have no row of a chunk.
            earlier_rows = [plan.rows[slab] for slab in chunk.slabs(options.max_rows)]
            last_rows = last_slab = None
            if chunk.needs_gradient and earlier_rows:
                last_rows = earlier_rows.pop()
            log_probs = [self.forward(rows).log_probs for rows in earlier_rows]
            if last_rows is not None:
                last_slab = self.forward_with_score(last_rows)
                log_probs.append(last_slab.log_probs)
            if chunk is plan.chunks[-1]:
                # All log-probs are known now, so the answer reaches the host while the last
                # products run.
                self.any_not_finite = AnyOnHost(objective.refused(self.log_probs))
            if not chunk.needs_gradient:
                continue
            # A rank without rows makes this call too, since ranks may exchange sums in it.
            coefficients, centered = self._coefficients(
                ordered.take(slice(chunk.start, chunk.stop), chunk.documents),
                torch.cat([self.log_probs[:0], *log_probs]),
                plan.rows[chunk.start : chunk.stop],
            )
            if last_rows is None or last_slab is None:
                continue
            *earlier, last = coefficients.split([len(part) for part in log_probs], -1)
            compact = clips_documents and not earlier
            self.add_products(last_rows, last_slab, last, compact, centered)
            # The score of the last slab has overwritten those of the others, whose logits are
            # computed again. There are others only where a document is longer than max_rows.
            for rows, of_slab in zip(earlier_rows, earlier, strict=True):
                self.add_products(rows, self.forward_with_score(rows), of_slab, compact=False)
        if self.hidden_gradient is not None:
            # Each rank has the sum over its own tokens of the vocabulary.
            all_reduce_(self.hidden_gradient, options.vocabulary_group)

    def _coefficients(
        self, objective: Objective, log_probs: Tensor, rows: Tensor
    ) -> tuple[Tensor, CenteredRows | None]:
        """Return (c_t of these rows, score centering), as `torch_passes.backward` takes them.

        The first is (N,); with `keeps_logits` (n, N).
        objective: of the rows of a chunk. Score centering is of families by token, whose chunks
            with a gradient are a single slab.
        """
        top_log_probs = None if self.top_log_probs is None else self.top_log_probs[rows]
        objective = objective.at(log_probs, top_log_probs)
        coefficients = objective.coefficients(log_probs)
        if self.options.keeps_logits:
            coefficients = torch.stack([coefficients, *objective.penalties.of_rows])
        return coefficients, objective.centered_rows

    def make_buffers(self, largest: int) -> None:
        """Allocate memory for the logits of chunks of at most `largest` rows.

        Of a longer chunk than max_rows, only max_rows rows exist at once.
        """
        rows = min(self.options.max_rows, largest)
        self.row_numbers = torch.arange(rows, device=self.hidden.device)
        self.policy.make_buffer(rows)
        if self.reference is not None:
            self.reference.make_buffer(rows)

    def forward(self, rows: Tensor) -> Slab:
        """Compute and record the log-probs, entropies and full KL of these rows.

        Return the slab with its logits in the field `score`.
        """
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
                self.options.loss.kl,
                ref_logits,
                self.labels[rows],
                self.temperature,
            )
            assert teacher.divergence is not None
            self.divergence[rows] = teacher.divergence
        if self.top_ids is not None:
            assert self.top_log_probs is not None
            top_log_probs = implementation.log_probs_at(
                logits, self.top_ids[rows], normalizer, self.temperature
            )
            self.top_log_probs[rows] = top_log_probs
            log_probs = where_all_known(log_probs, top_log_probs)
        kept_rows = None
        if self.kept is not None:
            kept = self.kept.take(rows)
            log_probs, kept_rows = over_kept(
                implementation, logits, kept, log_probs, normalizer, self.temperature
            )
        if self.options.bonus:
            assert entropy is not None
            normalizer = torch.cat([normalizer, entropy[None]])
        log_probs = self._record(rows, log_probs, entropy)
        return Slab(hidden, logits, log_probs, normalizer, teacher, kept_rows)

    def forward_with_score(self, rows: Tensor) -> Slab:
        """Do as `forward`, and return the slab with its score; with its logits if `keeps_logits`.

        The score takes the memory of the logits if it has their dtype.
        """
        if self.options.keeps_logits:
            return self.forward(rows)
        if self.kept is not None:
            slab = self.forward(rows)
            temperatures = torch.full_like(slab.log_probs, self.temperature)
            return slab._replace(score=self._gradient(rows, slab, temperatures, None))
        hidden = self.hidden[rows]
        log_probs, entropy, score = self.options.implementation.forward_score_(
            self.policy.logits(hidden), *self._arguments(rows), self.hidden.dtype
        )
        return Slab(hidden, score, self._record(rows, log_probs, entropy))

    def _gradient_as_score(
        self,
        rows: Tensor,
        slab: Slab,
        coefficients: Tensor,
        centered: CenteredRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient by the logits of a slab in the form of a score and its coefficients.

        The result is (score, c): (c / temperature) * score is the gradient. Here `score` is the
        gradient times `self.scale`, which keeps small numbers in the range of float16.

        coefficients, centered: as `torch_passes.backward` takes them.
        """
        if centered is not None:
            centered = centered.times(self.scale)
        score = self._gradient(rows, slab, coefficients * self.scale, centered)
        return score, torch.full_like(coefficients[0], self.temperature / self.scale)

    def _gradient(
        self, rows: Tensor, slab: Slab, coefficients: Tensor, centered: CenteredRows | None
    ) -> Tensor:
        """Return the gradient by the logits of a slab, in the dtype of the hidden states.

        It takes the memory of the logits if they have that dtype. coefficients, centered: as
        `torch_passes.backward` takes them; the first are by log-probs over kept sets, if there are.
        """
        if slab.kept is not None:
            coefficients, centered = with_kept(coefficients, slab.kept)
        logits = slab.score
        dtype = slab.hidden.dtype
        out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        return self.options.implementation.backward(
            logits,
            self.labels[rows],
            slab.normalizer,
            coefficients,
            self.temperature,
            out=out,
            teacher=slab.teacher,
            centered=centered,
        )

    def add_products(
        self,
        rows: Tensor,
        slab: Slab,
        coefficients: Tensor,
        compact: bool,
        centered: CenteredRows | None = None,
    ) -> None:
        """Add the part of these rows to the gradients of hidden states, weight and bias.

        Overwrites the slab.
        compact: True to leave out rows of coefficient 0. Has no effect with `keeps_logits`.
        """
        hidden = slab.hidden
        score = slab.score
        if self.options.keeps_logits:
            score, coefficients = self._gradient_as_score(rows, slab, coefficients, centered)
        elif compact:
            rows, hidden, score, coefficients = _without_zeros(rows, hidden, score, coefficients)
        factor = coefficients * (1 / self.temperature)
        if self.hidden_gradient is not None:
            # It runs beside the product for the weight.
            by_hidden = ParallelProduct(score, self.policy.weight)
        scaled = factor * self.scale
        if self.bias_gradient is not None:
            column = scaled.to(score.dtype).unsqueeze(-1)
            accumulate_matmul(
                self.bias_gradient.unsqueeze(-1), score.T, column, alpha=1 / self.scale
            )
        if self.weight_total is not None:
            hidden = self.scale_rows(hidden, scaled, hidden, self.row_numbers[: len(rows)])
            accumulate_matmul(self.weight_total, score.T, hidden, alpha=1 / self.scale)
        if self.hidden_gradient is not None:
            self.scale_rows(by_hidden.result(), factor, self.hidden_gradient, rows)

    def _arguments(self, rows: Tensor) -> tuple[Tensor, float, bool]:
        """Return the arguments that all forward passes of an implementation have in common."""
        return self.labels[rows], self.temperature, self.options.with_entropy

    def _record(self, rows: Tensor, log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        """Write log-probs and entropies of these rows into the results; return the log-probs."""
        self.log_probs[rows] = log_probs
        if entropy is not None and self.entropy is not None:
            self.entropy[rows] = entropy
        return log_probs


def _may_clip_documents(objective: Objective) -> bool:
    """Return True if it may turn out that no token of some document has a gradient.

    That cannot be if penalties give every token a gradient, if the slope of the family is never 0,
    or if the old log-probs are those of this pass, so that every ratio is 1.
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

    Costs one synchronisation on a GPU. The remaining rows of score are moved in place, to its
    beginning. Where few rows would be left out, returns the arguments as they are.
    """
    active = coefficients != 0
    num_active = int(active.sum())
    if num_active > _WORTH_COMPACTING * len(rows):
        return rows, hidden, score, coefficients
    # In ascending order, so that each row moves towards the beginning, to the place of a row that
    # is left out or has been moved already.
    keep = torch.sort(~active, stable=True).indices[:num_active]
    for low in range(0, num_active, _ROWS_PER_MOVE):
        moved = keep[low : low + _ROWS_PER_MOVE]
        score[low : low + len(moved)] = score[moved]
    return rows[keep], hidden[keep], score[:num_active], coefficients[keep]
