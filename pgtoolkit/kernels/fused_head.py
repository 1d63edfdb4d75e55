"""The fused LM head: loss and gradients from hidden states, with the logits of one chunk of tokens at a time.

The gradient of a log-prob by its logits is (onehot - softmax) / temperature, the *score*, whatever the loss. With
c_t the derivative of the loss by the log-prob of token t,

    gradient of hidden = (c / temperature) * (score @ weight)
    gradient of weight = score.T @ ((c / temperature) * hidden)

so c is applied to T x H vectors, and the score can overwrite the logits before c is known. One pass suffices even
where c_t needs all tokens of its document: chunks are made of whole documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import DocumentCounts
from pgtoolkit.kernels.chunks import Chunk, make_plan
from pgtoolkit.kernels.products import BesideOthers, accumulate_matmul, accumulation_dtype, matmul
from pgtoolkit.losses.exchange import all_sum_
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Objective

_WORTH_COMPACTING = 0.95
"""Share of a chunk's rows that still have a gradient, above which moving them together costs more than it saves."""
_ROWS_PER_MOVE = 128


@dataclass(frozen=True)
class Head:
    """How the head is computed.

    implementation: the module with the vocabulary-sized passes. max_rows: rows of logits that may exist at once.
    fp32_logits: logits in float32 from half-precision operands. check_finite: refuse data that is not.
    level: of the metrics. weight_gradient: (V, H) float32 to which the weight's gradient is added at once, or None to
    return it to autograd. counts: the documents' counts if they are known on the host.
    vocabulary_group: ranks with the other rows of the weight; the implementation knows the group as well.
    """

    implementation: object
    max_rows: int
    temperature: float
    level: str
    fp32_logits: bool
    check_finite: bool
    weight_gradient: Tensor | None
    counts: DocumentCounts | None = None
    vocabulary_group: ProcessGroup | None = None


def linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective, head: Head
) -> tuple[Tensor, Tensor, MetricSums, Verdict]:
    """(loss, log_probs, metric sums, verdict) of hidden (T, H) @ weight (V, H).T; log_probs (T,), detached.

    The verdict says whether any log-prob is not finite.
    """
    if head.weight_gradient is not None:
        weight = weight.detach()
    inputs = (hidden, weight, bias)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        run = _Run(*(None if x is None else x.detach() for x in inputs), labels, head, wanted)
        run.all_chunks(objective)
        loss, _, sums = head.implementation.judge(objective, run.log_probs, run.entropy, head.level)
    if any(wanted):
        loss = _GradientsAtHand.apply(*inputs, loss, run, head.weight_gradient is not None)
    return loss, run.log_probs, sums, run.verdict


@torch.no_grad()
def linear_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
    """(T,) log-prob of each label, 0 where labels < 0; head.counts saves the wait for a GPU."""
    with torch.autocast(hidden.device.type, enabled=False):
        run = _Run(hidden, weight, bias, labels, head, [False] * 3)
        trained = labels >= 0
        number = sum(head.counts.trained) if head.counts is not None else int(trained.sum())
        rows = torch.sort((~trained).int(), stable=True).indices[:number]
        run.make_buffer(number)
        for piece in Chunk(0, number, False, None).pieces(head.max_rows):
            run.forward(rows[piece])
    return run.log_probs


class Verdict:
    """Whether any of (T,) bool is True, on its way to the host while the GPU goes on."""

    def __init__(self, bad: Tensor):
        self._answer, self._arrived = bad.any(), None
        if bad.is_cuda:
            on_device, self._answer = self._answer, torch.empty((), dtype=torch.bool, pin_memory=True)
            self._answer.copy_(on_device, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._answer)


class _GradientsAtHand(torch.autograd.Function):
    """The loss, with the gradients by hidden, weight and bias that the run has computed already."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, run, weight_is_done):
        ctx.gradients = run.hidden_gradient, run.weight_gradient, run.bias_gradient
        ctx.dtypes = tuple(None if x is None else x.dtype for x in (hidden, weight, bias))
        ctx.weight_is_done, ctx.implementation = weight_is_done, run.head.implementation
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        if ctx.gradients is None:
            raise RuntimeError("the fused head's gradients are freed by the first backward; call the loss again")
        if ctx.weight_is_done:
            torch._assert_async(upstream == 1, "weight_gradient holds the gradient of the loss as it was returned")
        gradients = [
            # In place: nothing else holds them, and the weight's is the largest tensor there is.
            None if gradient is None else ctx.implementation.scale_(gradient, upstream).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return *gradients, None, None, None


class _Run:
    """One evaluation of the head: buffers, results, and the steps that fill them."""

    def __init__(self, hidden, weight, bias, labels, head, wanted):
        self.hidden, self.labels, self.head = hidden, labels, head
        # A float32 parameter under a half-precision model computes in the model's precision.
        self.weight = weight.to(hidden.dtype)
        wide = accumulation_dtype(hidden)
        self.logits_dtype = wide if head.fp32_logits else hidden.dtype
        self.bias = None if bias is None else bias.to(self.logits_dtype)
        self.log_probs = hidden.new_zeros(len(hidden), dtype=wide)
        self.entropy = torch.zeros_like(self.log_probs) if head.level == "with_entropy" else None

        self.with_gradient = any(wanted)
        # float16 cannot hold gradients of a loss that is a mean over a step; keep them wide until they are scaled.
        kept = wide if hidden.dtype == torch.float16 else hidden.dtype
        self.hidden_gradient = torch.zeros_like(hidden, dtype=kept) if wanted[0] else None
        self.weight_gradient = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias_gradient = torch.zeros_like(bias, dtype=wide) if wanted[2] else None
        self.weight_total = self.weight_gradient
        if self.with_gradient and head.weight_gradient is not None:
            self.weight_total = head.weight_gradient

    def all_chunks(self, objective: Objective) -> None:
        head = self.head
        plan = make_plan(objective, head.max_rows, self.with_gradient, head.check_finite, head.counts)
        ordered = objective.take(plan.rows, None)
        # Coefficients are means over a step: this power of two brings them near 1, into float16's range.
        self.scale = float(2 ** len(plan.rows).bit_length())
        self.scale_rows = head.implementation.scale_rows
        self.make_buffer(max((chunk.stop - chunk.start for chunk in plan.chunks), default=0))
        self.verdict = Verdict(torch.zeros_like(objective.mask)) if not plan.chunks else None
        for chunk in plan.chunks:
            pieces = [plan.rows[piece] for piece in chunk.pieces(head.max_rows)]
            # Of a document with more rows than may exist at once, only the last piece's score is there when its
            # coefficients are known; the logits of the others come again. This rank may hold nothing of a chunk.
            kept = [pieces.pop()] if chunk.needs_gradient and pieces else []
            parts = [self.forward(rows) for rows in pieces]
            for rows in kept:
                hidden, score, log_probs = self.score(rows)
                parts.append(log_probs)
            if chunk is plan.chunks[-1]:
                # All log-probs are known: the answer reaches the host while the last products run.
                self.verdict = Verdict(objective.not_finite(self.log_probs))
            if not chunk.needs_gradient:
                continue
            coefficients = self.coefficients(ordered, chunk, torch.cat([self.log_probs[:0], *parts]))
            *earlier, last = coefficients.split([len(part) for part in parts]) if parts else [None]
            for rows in kept:
                self.products(rows, hidden, score, last, objective.family.by_document and not earlier)
            for rows, c in zip(pieces, earlier, strict=True):
                hidden, score, _ = self.score(rows)
                self.products(rows, hidden, score, c, False)
        if self.hidden_gradient is not None:
            # Each rank's columns make a part of it.
            all_sum_(self.hidden_gradient, self.head.vocabulary_group)

    def make_buffer(self, largest: int) -> None:
        """Room for the logits of a chunk of `largest` rows, or of as many as may exist at once."""
        rows = min(self.head.max_rows, largest)
        self.numbers = torch.arange(rows, device=self.hidden.device)
        self.buffer = self.hidden.new_empty(rows, len(self.weight), dtype=self.logits_dtype)

    def coefficients(self, ordered: Objective, chunk: Chunk, log_probs: Tensor) -> Tensor:
        share = ordered.take(slice(chunk.start, chunk.stop), chunk.segments)
        return self.head.implementation.coefficients(share, log_probs)

    def forward(self, rows: Tensor) -> Tensor:
        """Fill in log-probs and entropy of these rows, and return the log-probs."""
        logits = self.logits(self.hidden[rows])
        log_probs, _, entropy = self.head.implementation.forward(logits, *self._options(rows))
        return self._record(rows, log_probs, entropy)

    def score(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden, score, log_probs) of these rows, the score in the place of their logits."""
        hidden = self.hidden[rows]
        log_probs, entropy, score = self.head.implementation.forward_score_(
            self.logits(hidden), *self._options(rows), self.hidden.dtype
        )
        return hidden, score, self._record(rows, log_probs, entropy)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = matmul(hidden, self.weight.T, out=self.buffer[: len(hidden)])
        return logits if self.bias is None else logits.add_(self.bias)

    def products(self, rows: Tensor, hidden: Tensor, score: Tensor, coefficients: Tensor, compact: bool) -> None:
        """The two backward products of these rows; overwrites hidden and score."""
        if compact:
            rows, hidden, score, coefficients = _without_zeros(rows, hidden, score, coefficients)
        factor = coefficients * (1 / self.head.temperature)
        if self.hidden_gradient is not None:
            by_hidden = BesideOthers(score, self.weight)
        scaled = factor * self.scale
        if self.bias_gradient is not None:
            column = scaled.to(score.dtype).unsqueeze(-1)
            accumulate_matmul(self.bias_gradient.unsqueeze(-1), score.T, column, alpha=1 / self.scale)
        if self.weight_total is not None:
            hidden = self.scale_rows(hidden, scaled, hidden, self.numbers[: len(rows)])
            accumulate_matmul(self.weight_total, score.T, hidden, alpha=1 / self.scale)
        if self.hidden_gradient is not None:
            self.scale_rows(by_hidden.result(), factor, self.hidden_gradient, rows)

    def _options(self, rows):
        return self.labels[rows], self.head.temperature, self.head.level == "with_entropy"

    def _record(self, rows, log_probs, entropy):
        self.log_probs[rows] = log_probs
        if entropy is not None:
            self.entropy[rows] = entropy
        return log_probs


def _without_zeros(rows, hidden, score, coefficients):
    """The same without the rows of coefficient 0: those of clipped documents. Costs one synchronisation on a GPU."""
    active = coefficients != 0
    number = int(active.sum())
    if number > _WORTH_COMPACTING * len(rows):
        return rows, hidden, score, coefficients
    # Ascending, so that a row only moves up, into the place of a row that is gone or has itself moved.
    keep = torch.sort(~active, stable=True).indices[:number]
    for low in range(0, number, _ROWS_PER_MOVE):
        moved = keep[low : low + _ROWS_PER_MOVE]
        score[low : low + len(moved)] = score[moved]
    return rows[keep], hidden[keep], score[:number], coefficients[keep]
