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

from pgtoolkit.kernels.plan import make_plan
from pgtoolkit.kernels.products import accumulate_matmul, matmul
from pgtoolkit.losses.objective import Objective


@dataclass(frozen=True)
class Head:
    """How the head is computed.

    implementation: the module with the vocabulary-sized passes. max_rows: rows of logits that may exist at once.
    fp32_logits: logits in float32 from half-precision operands. with_gradient: False computes log-probs only.
    weight_gradient: (V, H) float32 to which the weight's gradient is added at once, or None to return it to autograd.
    """

    implementation: object
    max_rows: int
    temperature: float
    with_entropy: bool
    fp32_logits: bool
    with_gradient: bool
    weight_gradient: Tensor | None


def linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective, head: Head
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, log_probs, entropy) of hidden (T, H) @ weight (V, H).T; log_probs and entropy are (T,), detached."""
    if head.weight_gradient is not None:
        weight = weight.detach()
    return _LinearLoss.apply(hidden, weight, bias, labels, objective, head)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, objective, head):
        with torch.autocast(hidden.device.type, enabled=False):
            run = _Run(hidden, weight, bias, labels, head, ctx.needs_input_grad[:3])
            run.all_chunks(objective)
            loss = objective.value(run.log_probs)
        ctx.gradients = (run.hidden_gradient, run.weight_gradient, run.bias_gradient)
        ctx.dtypes = tuple(None if x is None else x.dtype for x in (hidden, weight, bias))
        ctx.weight_is_done = head.weight_gradient is not None
        ctx.mark_non_differentiable(run.log_probs, *([] if run.entropy is None else [run.entropy]))
        return loss, run.log_probs, run.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, _log_probs, _entropy):
        if ctx.gradients is None:
            raise RuntimeError("the fused head's gradients are freed by the first backward; call the loss again")
        if ctx.weight_is_done:
            torch._assert_async(upstream == 1, "weight_gradient holds the gradient of the unscaled loss")
        gradients = [
            # In place: nothing else holds them, and the weight's is the largest tensor there is.
            None if gradient is None else gradient.mul_(upstream).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return *gradients, None, None, None


class _Run:
    """One evaluation of the head: buffers, results, and the steps that fill them."""

    def __init__(self, hidden, weight, bias, labels, head, needs_gradient):
        self.hidden, self.labels, self.head = hidden, labels, head
        # A float32 parameter under a half-precision model computes in the model's precision.
        self.weight = weight.to(hidden.dtype)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.logits_dtype = wide if head.fp32_logits else hidden.dtype
        self.bias = None if bias is None else bias.to(self.logits_dtype)
        self.log_probs = hidden.new_zeros(len(hidden), dtype=wide)
        self.entropy = torch.zeros_like(self.log_probs) if head.with_entropy else None

        self.hidden_gradient = self.weight_gradient = self.bias_gradient = self.weight_total = None
        if head.with_gradient:
            # float16 cannot hold gradients of a loss that is a mean over a step; keep them wide until they are scaled.
            kept = wide if hidden.dtype == torch.float16 else hidden.dtype
            if needs_gradient[0]:
                self.hidden_gradient = torch.zeros_like(hidden, dtype=kept)
            if head.weight_gradient is not None:
                self.weight_total = head.weight_gradient
            elif needs_gradient[1]:
                self.weight_total = self.weight_gradient = torch.zeros_like(weight, dtype=wide)
            if needs_gradient[2]:
                self.bias_gradient = torch.zeros_like(bias, dtype=wide)

    def all_chunks(self, objective: Objective) -> None:
        max_rows = self.head.max_rows
        plan = make_plan(objective, max_rows, self.head.with_gradient)
        if not plan.chunks:
            return
        ordered = objective.take(plan.rows, None)
        # Coefficients are means over a step: this power of two brings them near 1, into float16's range.
        self.scale = float(2 ** len(plan.rows).bit_length())
        largest = max(min(max_rows, chunk.stop - chunk.start) for chunk in plan.chunks)
        self.buffer = self.hidden.new_empty(largest, len(self.weight), dtype=self.logits_dtype)
        for chunk in plan.chunks:
            pieces = [plan.rows[piece] for piece in chunk.pieces(max_rows)]
            share = ordered.take(slice(chunk.start, chunk.stop), chunk.segments)
            if not chunk.needs_gradient:
                for rows in pieces:
                    self.forward(rows)
            elif len(pieces) == 1:
                log_probs, score = self.score(pieces[0])
                self.products(pieces[0], score, share.coefficients(log_probs)[1])
            else:
                # A document with more rows than logits may exist at once: its coefficients first, then again.
                log_probs = torch.cat([self.forward(rows) for rows in pieces])
                coefficients = share.coefficients(log_probs)[1].split(max_rows)
                for rows, c in zip(pieces, coefficients, strict=True):
                    self.products(rows, self.score(rows)[1], c)

    def forward(self, rows: Tensor) -> Tensor:
        """Fill in log-probs and entropy of these rows, and return the log-probs."""
        log_probs, _, entropy = self.head.implementation.forward(self.logits(rows), *self._options(rows))
        return self._record(rows, log_probs, entropy)

    def score(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the score of each row in the place of its logits."""
        log_probs, entropy, score = self.head.implementation.forward_score_(
            self.logits(rows), *self._options(rows), self.hidden.dtype
        )
        return self._record(rows, log_probs, entropy), score

    def logits(self, rows: Tensor) -> Tensor:
        logits = matmul(self.hidden[rows], self.weight.T, out=self.buffer[: len(rows)])
        return logits if self.bias is None else logits.add_(self.bias)

    def products(self, rows: Tensor, score: Tensor, coefficients: Tensor) -> None:
        """The two backward products of these rows."""
        factor = (coefficients * (self.scale / self.head.temperature)).unsqueeze(-1)
        if self.hidden_gradient is not None:
            gradient = (score @ self.weight).to(factor.dtype) * (factor / self.scale)
            self.hidden_gradient[rows] = gradient.to(self.hidden_gradient.dtype)
        if self.weight_total is not None:
            scaled = (self.hidden[rows] * factor).to(score.dtype)
            accumulate_matmul(self.weight_total, score.T, scaled, alpha=1 / self.scale)
        if self.bias_gradient is not None:
            column = factor.to(score.dtype)
            accumulate_matmul(self.bias_gradient.unsqueeze(-1), score.T, column, alpha=1 / self.scale)

    def _options(self, rows):
        return self.labels[rows], self.head.temperature, self.head.with_entropy

    def _record(self, rows, log_probs, entropy):
        self.log_probs[rows] = log_probs
        if entropy is not None:
            self.entropy[rows] = entropy
        return log_probs
