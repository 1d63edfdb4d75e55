"""The cases of `python -m benchmarks.kernels`: the loss of given logits, and the fused head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.measure import copy_bandwidth, peak_bytes, seconds
from benchmarks.kernels.workloads import (
    Workload,
    document_lengths,
    exact_gradient,
    head_matrices,
    make_workload,
)
from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.kernels.chunks import default_logits_memory_mb
from pgtoolkit.kernels.given_logits import choose_implementation
from pgtoolkit.kernels.products import accumulate_matmul

LOSSES = ("grpo", "gspo")
_CHUNK = 2048


@dataclass(frozen=True)
class Row:
    """One line of the table.

    rate: GB/s for logits, TFLOP/s for the head. share: of the ceiling. For logits the rate counts
        the bytes that must move, 4 T V for GRPO and 6 T V for GSPO in half precision, and the
        ceiling is the rate of a copy. For the head the ceiling is the three plain products: share
        is their time over the row's.
    """

    section: str
    name: str
    loss: str
    tokens: int
    vocabulary: int
    case: str
    milliseconds: float
    rate: float | None
    share: float | None
    extra_megabytes: float | None
    loss_error: float | None = None
    gradient_error: float | None = None

    def dictionary(self) -> dict:
        return asdict(self)


def given_logits(
    tokens: int, vocabulary: int, device: str, repetitions: int, everything: bool
) -> Iterator[Row]:
    """Yield rows of forward and backward of given logits.

    everything: also eager PyTorch, torch.compile, the peers, and the errors.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(tokens, vocabulary, dtype=dtype, device=device)
    for block in logits.split(1024):
        block.copy_(2 * torch.randn(block.shape, generator=generator, device=device))
    bandwidth = copy_bandwidth(logits, device)
    implementation = choose_implementation("auto", logits)
    leaf = logits.requires_grad_()

    def ours(workload: Workload, impl: str, **options) -> Callable:
        def call():
            leaf.grad = None
            out = policy_loss(
                leaf,
                *workload.tensors,
                **workload.options,
                impl=impl,
                check_finite=False,
                **options,
            )
            out.loss.backward()
            return out.loss.detach()

        return call

    def other(loss_of: Callable) -> Callable:
        def call():
            leaf.grad = None
            loss_of(leaf).backward()

        return call

    for loss in LOSSES:
        lengths = document_lengths(tokens, *((64, 2048) if tokens > 2048 else (4, 64)))
        workload = make_workload(
            loss,
            lambda labels: implementation.forward(logits.detach(), labels, 1.0, False)[0],
            vocabulary,
            lengths,
            device,
        )
        best = "triton" if device == "cuda" else "torch"
        calls = {
            (best, f"metrics {level}"): ours(workload, best, metrics=level)
            for level in ("none", "basic", "with_entropy")
        }
        calls[best, "half untrained"] = ours(workload.half_untrained(), best)
        if everything:
            calls |= _passes_alone(leaf, workload, implementation)
            if device == "cuda":
                calls["torch", "metrics none"] = ours(workload, "torch")
                calls["torch.compile", "metrics none"] = other(peers.compiled_loss(workload))
                calls["liger-kernel", "equal lengths"] = peers.liger_logits(
                    loss, logits, max(1, tokens // 1024)
                )
            calls["eager PyTorch", "metrics none"] = other(peers.eager_loss(workload))
        calls = {key: call for key, call in calls.items() if call is not None}
        times = seconds(calls, repetitions, device)
        moved = (2 if loss == "grpo" else 3) * tokens * vocabulary * logits.element_size()
        for (name, case), call in calls.items():
            errors = (None, None)
            if everything and (name, case) == (best, "metrics none"):
                errors = _logits_errors(workload, leaf, call)
            leaf.grad = None
            extra = peak_bytes(call, device)
            model = moved / 2 if case == "half untrained" else moved
            rate = model / times[name, case] / 1e9
            extra_megabytes = None
            if extra is not None:
                extra_megabytes = (extra - (0 if leaf.grad is None else logits.nbytes)) / 1e6
            yield Row(
                "logits",
                name,
                loss,
                tokens,
                vocabulary,
                case,
                times[name, case] * 1e3,
                rate,
                rate * 1e9 / bandwidth,
                extra_megabytes,
                *errors,
            )
        leaf.grad = None
        torch._dynamo.reset()


def _passes_alone(leaf: Tensor, workload: Workload, implementation: ModuleType) -> dict:
    """Return a call of the kernels over the logits without the operations on vectors around them.

    implementation: a module of passes over given logits.
    """
    values = leaf.detach()
    labels = workload.labels
    objective = workload.objective()
    out = torch.empty_like(values)
    name = implementation.__name__.rpartition(".")[2].removesuffix("_passes")
    if workload.loss == "grpo" and implementation.one_pass:
        return {
            (name, "passes alone"): lambda: implementation.forward_gradient(
                values, labels, 1.0, False, objective, out
            )
        }
    ones = torch.ones(len(labels), device=values.device)

    def call():
        _, normalizer, _ = implementation.forward(values, labels, 1.0, False)
        implementation.backward(values, labels, normalizer, ones, 1.0, out=out)

    return {(name, "passes alone"): call}


def _logits_errors(
    workload: Workload, leaf: Tensor, call: Callable[[], Tensor]
) -> tuple[float, float]:
    """Return the relative errors of the loss and of the gradient, against float64."""
    leaf.grad = None
    loss = call()
    assert leaf.grad is not None
    exact, blocks = exact_gradient(workload, lambda rows: leaf.detach()[rows])
    wrong = 0.0
    total = 0.0
    for rows, gradient in blocks():
        wrong += float((leaf.grad[rows].double() - gradient).norm() ** 2)
        total += float(gradient.norm() ** 2)
    return _relative(loss, exact), (wrong / total) ** 0.5


def fused_head(
    tokens: int, hidden_size: int, vocabulary: int, device: str, repetitions: int
) -> Iterator[Row]:
    """Yield rows of the head and the loss, forward and backward.

    They stand against the three plain products of the same matrices.
    """
    hidden, weight = head_matrices(tokens, hidden_size, vocabulary, device)
    with torch.no_grad():
        score = hidden @ weight.T
    implementation = choose_implementation("auto", score)
    total = torch.zeros(vocabulary, hidden_size, device=device)
    rows = tokens * torch.finfo(hidden.dtype).bits // 8 * vocabulary / 2**20
    budgets = (512, 640, 1200) if device == "cuda" else (max(1, int(rows / 4)),)

    def ours(workload: Workload, **options) -> Callable:
        options = {
            "metrics": "basic",
            "logits_memory_mb": budgets[min(1, len(budgets) - 1)],
            "weight_gradient": total,
            # As in training: documents are counted on the host, and a step's numbers are looked at
            # once.
            "check_finite": False,
            "counts": workload.counts(),
        } | options

        def call():
            hidden.grad = weight.grad = None
            out = linear_policy_loss(
                hidden, weight, *workload.tensors, **workload.options, **options
            )
            out.loss.backward()
            return out.loss.detach()

        return call

    def naive(loss_of: Callable) -> Callable:
        def call():
            hidden.grad = weight.grad = None
            loss_of(torch.nn.functional.linear(hidden, weight)).backward()

        return call

    for loss in LOSSES:
        lengths = document_lengths(tokens, *((64, 2048) if tokens > 2048 else (4, 64)))
        with torch.no_grad():
            torch.mm(hidden, weight.T, out=score)
        workload = make_workload(
            loss,
            lambda labels: implementation.forward(score, labels, 1.0, False)[0],
            vocabulary,
            lengths,
            device,
        )
        with torch.no_grad():
            implementation.forward_score_(score, workload.labels, 1.0, False, hidden.dtype)
        default = default_logits_memory_mb(hidden.device)
        calls = {("fused_linear", f"default, {default} MiB"): ours(workload, logits_memory_mb=None)}
        calls |= {
            ("fused_linear", f"{mb} MiB"): ours(workload, logits_memory_mb=mb) for mb in budgets
        }
        calls["fused_linear", "metrics none"] = ours(workload, metrics="none")
        calls["fused_linear", "with entropy"] = ours(workload, metrics="with_entropy")
        calls["fused_linear", "half untrained"] = ours(workload.half_untrained())
        calls["fused_linear", "half zero advantage"] = ours(workload.half_zero_advantage())
        calls["fused_linear", "float32 logits"] = ours(workload, fp32_logits=True)
        calls["fused_linear", "counts read, checked"] = ours(
            workload, counts=None, check_finite=True
        )
        calls["fused_linear", "gradient by autograd"] = ours(workload, weight_gradient=None)
        if device == "cuda":
            calls["triton", "all logits"] = ours(
                workload, impl="triton", logits_memory_mb=None, weight_gradient=None, counts=None
            )
            calls["torch.compile", "all logits"] = naive(peers.compiled_loss(workload))
            calls["liger-kernel", "equal lengths"] = peers.liger_head(
                loss, hidden, weight, max(1, tokens // 1024)
            )
            calls["cut-cross-entropy", "filtered"] = peers.cut_cross_entropy(
                hidden, weight, workload.labels, True
            )
            calls["cut-cross-entropy", "exact"] = peers.cut_cross_entropy(
                hidden, weight, workload.labels, False
            )
        calls["eager PyTorch", "all logits"] = naive(peers.eager_loss(workload))
        calls = {key: call for key, call in calls.items() if call is not None}
        products = _plain_products(hidden.detach(), weight.detach(), score, total)
        slow = {
            key: call for key, call in calls.items() if key[0] not in ("fused_linear", "triton")
        }
        quick = {key: call for key, call in calls.items() if key not in slow}
        times = seconds(products | quick, repetitions, device) | seconds(
            slow, max(2, repetitions // 3), device
        )
        plain = times["plain products", "one each"]
        work = 6 * tokens * hidden_size * vocabulary
        for (name, case), call in (products | calls).items():
            extra = errors = None
            if (name, case) not in products:
                hidden.grad = weight.grad = None
                extra = peak_bytes(call, device)
                kept = sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)
                extra = None if extra is None else (extra - kept) / 1e6
            if name == "fused_linear" and case in ("metrics none", "float32 logits"):
                errors = _head_errors(workload, hidden, weight, total, call, case == "metrics none")
            time = times[name, case]
            yield Row(
                "head",
                name,
                loss,
                tokens,
                vocabulary,
                case,
                time * 1e3,
                work / time / 1e12,
                plain / time,
                extra,
                *(errors or (None, None)),
            )
        torch._dynamo.reset()


def _plain_products(hidden: Tensor, weight: Tensor, score: Tensor, total: Tensor) -> dict:
    """Return calls of the least that must be computed, each in one product.

    That is the logits, the gradient of hidden and the gradient of the weight.
    """
    logits = torch.empty_like(score)
    by_hidden = torch.empty_like(hidden)
    by_weight = torch.empty_like(weight)

    def two():
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(score, weight, out=by_hidden)

    def three():
        two()
        torch.mm(score.T, hidden, out=by_weight)

    calls = {("plain products", "one each"): three}
    if hidden.is_cuda:

        def accumulating():
            two()
            torch.addmm(total, score.T, hidden, out_dtype=torch.float32, out=total)

        def in_chunks():
            for low in range(0, len(hidden), _CHUNK):
                rows = slice(low, low + _CHUNK)
                torch.mm(hidden[rows], weight.T, out=logits[rows])
                torch.mm(score[rows], weight, out=by_hidden[rows])
                accumulate_matmul(total, score[rows].T, hidden[rows], alpha=1.0)

        calls["plain products", "adding to float32"] = accumulating
        calls["plain products", f"{_CHUNK} rows at a time"] = in_chunks
    return calls


def _head_errors(
    workload: Workload,
    hidden: Tensor,
    weight: Tensor,
    total: Tensor,
    call: Callable[[], Tensor],
    rounded_logits: bool,
) -> tuple[float, float]:
    """Return the errors of the loss and of the worse gradient, against float64 on the same inputs.

    total: where the call adds the weight's gradient, if not to `weight.grad`.
    """
    total.zero_()
    hidden.grad = None
    weight.grad = None
    loss = call()
    wide = weight.detach().double()
    wide_hidden = hidden.detach().double()
    if rounded_logits:
        # The head's product in its own dtype, as given; the errors are of all that follows.
        exact, blocks = exact_gradient(
            workload, lambda rows: hidden.detach()[rows] @ weight.detach().T
        )
    else:
        exact, blocks = exact_gradient(workload, lambda rows: wide_hidden[rows] @ wide.T)
    by_weight = torch.zeros_like(wide)
    by_hidden = torch.empty_like(wide_hidden)
    for rows, gradient in blocks():
        by_hidden[rows] = gradient @ wide
        by_weight.addmm_(gradient.T, wide_hidden[rows])
    ours = total if weight.grad is None else weight.grad
    error = max(
        float((gradient.double() - reference).norm() / reference.norm())
        for gradient, reference in ((hidden.grad, by_hidden), (ours, by_weight))
    )
    return _relative(loss, exact), error


def _relative(value: Tensor, exact: Tensor) -> float:
    return abs(float(value) - float(exact)) / abs(float(exact))
