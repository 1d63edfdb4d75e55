"""The vocabulary-sized passes on a GPU: launches of the Triton kernels (on a CPU, under Triton's interpreter)."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from pgtoolkit.kernels import triton_kernels as kernels
from pgtoolkit.losses.objective import Objective

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = (torch.float32, *_HALVES)
_LOG2_E = math.log2(math.e)

_RESIDENT_THREADS = 1024
"""Threads of the one-pass kernel that a processor holds at once, with 64 registers each."""
_MAX_BLOCKS = 8
"""Blocks of 4 words a thread that a program keeps: 32 registers of the 64. With more the compiler runs out, and what
it spills includes numbers that it then has to wait for."""
_MAX_SHARE = 32
_cannot_launch: set[torch.device] = set()


def check_runs_on(logits: Tensor) -> None:
    """Refuse, with ValueError, a dtype or device that the kernels cannot run on."""
    if logits.dtype not in _DTYPES:
        raise ValueError(f"impl='triton' needs float32, bfloat16 or float16 (got {logits.dtype}); use impl='torch'")
    if logits.device.type != "cuda" and not _INTERPRETED:
        raise ValueError(f"impl='triton' needs a GPU (got {logits.device}); use impl='torch'")


def forward(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `torch_impl.forward`."""
    log_probs, maximum, log_sum, entropy = _forward(logits, labels, temperature, with_entropy, None)
    return log_probs, torch.stack([maximum, log_sum]), entropy


def forward_shard(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, vocabulary_start: int
) -> Tensor:
    """As `torch_impl.forward_shard`."""
    label_logits, maximum, total, dot = _forward(logits, labels, temperature, with_entropy, vocabulary_start)
    # The kernel counts in powers of two.
    return torch.stack([label_logits, maximum, total] + ([] if dot is None else [dot * math.log(2.0)]))


def backward(
    logits: Tensor,
    labels: Tensor,
    normalizer: Tensor,
    coefficients: Tensor,
    temperature: float,
    vocabulary_start: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """As `torch_impl.backward`."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    logits = _rows(logits)
    rows, columns = logits.shape
    if logits.numel() == 0:
        return gradient
    block = 2048
    kernels.backward_kernel[(rows * -(-columns // block),)](
        logits,
        gradient,
        labels,
        *normalizer,
        coefficients,
        rows,
        logits.stride(0),
        gradient.stride(0),
        columns,
        vocabulary_start,
        _LOG2_E / temperature,
        1 / temperature,
        BLOCK=block,
        num_warps=2,
    )
    return gradient


def forward_score_(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `torch_impl.forward_score_`."""
    score = logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]
    results = _one_pass(logits, labels, temperature, with_entropy, None, score)
    if results is not None:
        return *results, score
    log_probs, normalizer, entropy = forward(logits, labels, temperature, with_entropy)
    # Each program of the backward knows its own block only, so it cannot write another dtype over the logits.
    score = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    ones = torch.full_like(log_probs, temperature)
    return log_probs, entropy, backward(logits, labels, normalizer, ones, temperature, out=score)


def forward_gradient(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, objective: Objective, out: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """(log_probs, entropy, losses) and, in `out`, the gradient of `grpo`'s objective, with one read of the logits.

    losses: (T,) weighted. out may be the logits. None, and nothing done, where a row cannot be kept on the chip.
    """
    losses = torch.zeros(len(labels), dtype=torch.float32, device=logits.device)
    results = _one_pass(logits, labels, temperature, with_entropy, objective, out, losses)
    return None if results is None else (*results, losses)


def losses_and_coefficients(objective: Objective, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """As `Objective.losses_and_coefficients`, in one kernel for the families that it knows."""
    by_document = objective.loss == "gspo"
    spread = by_document and objective.segments.group is not None
    if spread or objective.loss not in ("grpo", "gspo"):
        return objective.losses_and_coefficients(log_probs)
    losses, coefficients = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    block = 1024
    num_programs = objective.segments.num_documents if by_document else -(-len(log_probs) // block)
    if num_programs and len(log_probs):
        kernels.coefficients_kernel[(num_programs,)](
            log_probs,
            objective.old_log_probs,
            objective.advantages,
            objective.weights,
            objective.mask,
            objective.segments.index if by_document else objective.mask,
            losses,
            coefficients,
            len(log_probs),
            objective.epsilon_low,
            objective.epsilon_high,
            BY_DOCUMENT=by_document,
            BLOCK=block,
            num_warps=4,
        )
    return losses, coefficients


def scale_rows(source: Tensor, factors: Tensor, target: Tensor, rows: Tensor) -> Tensor:
    """target[rows[i]] = factors[i] * source[i], in float32; source may be target where rows are 0, 1, 2, ..."""
    if source.numel():
        kernels.scale_rows_kernel[(len(rows),)](source, factors, target, rows, source.shape[1], BLOCK=2048, num_warps=4)
    return target


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """values *= factor (0-dim, on the device) in place, free of charge where it is 1."""
    block = 8192
    if values.numel():
        # Few programs: where there is nothing to do, starting them is all that it costs.
        kernels.scale_kernel[(min(1024, -(-values.numel() // block)),)](
            values, factor, values.numel(), BLOCK=block, num_warps=8
        )
    return values


def _forward(logits, labels, temperature, with_entropy, vocabulary_start):
    logits = _rows(logits)
    rows, columns = logits.shape
    log_probs = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    maximum, log_sum = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    entropy = torch.zeros_like(log_probs) if with_entropy else None
    if rows:
        kernels.forward_kernel[(rows,)](
            logits,
            labels,
            log_probs,
            maximum,
            log_sum,
            log_probs if entropy is None else entropy,
            logits.stride(0),
            columns,
            vocabulary_start or 0,
            _LOG2_E / temperature,
            ENTROPY=with_entropy,
            SHARD=vocabulary_start is not None,
            BLOCK=1024,
            UNROLL=8,
            num_warps=4,
        )
    return log_probs, maximum, log_sum, entropy


def _one_pass(logits, labels, temperature, with_entropy, objective, out, losses=None):
    rows, columns = logits.shape
    half = _HALVES.get(logits.dtype, "")
    layout = _layout(logits, out, half)
    if layout is None:
        return None
    threads, share, blocks = layout
    log_probs = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    entropy = torch.zeros_like(log_probs) if with_entropy else None
    if rows == 0:
        return log_probs, entropy
    slots = torch.full((rows, (1 + with_entropy) * share if share > 1 else 0), -1, device=logits.device)
    per_token = [log_probs] * 3
    if objective is not None:
        per_token = [objective.old_log_probs, objective.advantages, objective.weights]
    words = logits.view(torch.int32) if half else logits
    out_words = out.view(torch.int32) if half else out
    grid = 1
    if not _INTERPRETED:
        processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
        grid = min(rows, processors * (_RESIDENT_THREADS // threads) // share) * share
    try:
        kernels.one_pass_kernel[(grid,)](
            logits,
            words,
            out_words,
            out,
            labels,
            *per_token,
            log_probs if losses is None else losses,
            log_probs,
            log_probs if entropy is None else entropy,
            slots,
            rows,
            words.stride(0),
            out_words.stride(0),
            columns,
            _LOG2_E / temperature,
            1 / temperature,
            0.0 if objective is None else objective.epsilon_low,
            0.0 if objective is None else objective.epsilon_high,
            0,
            GRPO=objective is not None,
            ENTROPY=with_entropy,
            HALF=half,
            PTX=not _INTERPRETED,
            SHARE=share,
            BLOCKS=blocks,
            THREADS=threads,
            num_warps=threads // 32,
            maxnreg=65536 // _RESIDENT_THREADS,
            # Programs of a row wait for each other, so all must run at once: the driver refuses a grid that cannot.
            launch_cooperative_grid=share > 1,
        )
    except RuntimeError as error:
        if "cooperative" not in str(error).lower():
            raise
        _cannot_launch.add(logits.device)
        return None
    return log_probs, entropy


def _layout(logits: Tensor, out: Tensor, half: str) -> tuple[int, int, int] | None:
    """(threads, programs a row, blocks a program) of the one-pass kernel; None where a row does not fit or align."""
    columns, per_word = logits.shape[1], 2 if half else 1
    if logits.stride(1) != 1 or out.stride(1) != 1 or logits.device in _cannot_launch or torch.version.hip:
        return None
    if half and (columns % 2 or any(x.stride(0) % 2 or x.storage_offset() % 2 for x in (logits, out))):
        return None
    needed = -(-columns // (per_word * 4 * 512))
    if needed <= _MAX_BLOCKS:
        return 512, 1, needed
    # Smaller programs where they wait for each other: more of them are there to fill the wait.
    needed = -(-columns // (per_word * 4 * 256))
    share = -(-needed // _MAX_BLOCKS)
    # The interpreter runs one program after the other: none can wait for the next.
    return None if share > _MAX_SHARE or _INTERPRETED else (256, share, -(-needed // share))


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
