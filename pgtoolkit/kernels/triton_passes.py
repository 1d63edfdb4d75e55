"""The vocabulary-sized passes on a GPU: launches of the Triton kernels (on a CPU, under Triton's
interpreter)."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from pgtoolkit.kernels import torch_passes
from pgtoolkit.kernels.torch_passes import Teacher
from pgtoolkit.kernels.triton_families import numbers_of, slope_of
from pgtoolkit.kernels.triton_one_pass import one_pass_kernel
from pgtoolkit.kernels.triton_scale import scale_kernel, scale_rows_kernel
from pgtoolkit.kernels.triton_two_pass import backward_kernel, divergence_kernel, forward_kernel
from pgtoolkit.losses.objective import Objective

one_pass = True

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = (torch.float32, *_HALVES)
_LOG2_E = math.log2(math.e)

_RESIDENT_THREADS = 1024
"""Threads of the one-pass kernel that a processor holds at once, with 64 registers each."""
_MAX_BLOCKS = 8
"""Blocks of 4 words a thread that a program keeps: 32 registers of the 64. With more the compiler
runs out, and what it spills includes numbers that it then has to wait for."""
_MAX_BLOCKS_SHARED_GRPO = 7
"""The same where programs share a row and each computes the coefficient, which takes registers
too."""
_MAX_BLOCKS_SHARED_PENALTY = 6
"""And where the loss has a penalty against a reference."""
_MAX_SHARE = 32
_cannot_launch: set[torch.device] = set()


def check_runs_on(logits: Tensor) -> None:
    """Refuse, with ValueError, a dtype or device that the kernels cannot run on."""
    if logits.dtype not in _DTYPES:
        raise ValueError(
            f"impl='triton' needs float32, bfloat16 or float16 (got {logits.dtype}); use "
            "impl='torch'"
        )
    if logits.device.type != "cuda" and not _INTERPRETED:
        raise ValueError(f"impl='triton' needs a GPU (got {logits.device}); use impl='torch'")


def forward(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `torch_passes.forward`."""
    results = _forward(logits, labels, temperature, with_entropy, None)
    return results[0], results[1:3], results[3] if with_entropy else None


def forward_shard(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, vocabulary_start: int
) -> Tensor:
    """As `torch_passes.forward_shard`."""
    results = _forward(logits, labels, temperature, with_entropy, vocabulary_start)
    results[3:] *= math.log(2.0)  # the kernel counts in powers of two
    return results


def divergence(
    logits: Tensor, normalizer: Tensor, teacher: Teacher, labels: Tensor, temperature: float
) -> Tensor:
    """As `torch_passes.divergence`."""
    logits, ref_logits = _rows(logits), _rows(teacher.logits)
    result = torch.zeros_like(normalizer[0])
    if logits.numel():
        divergence_kernel[(len(result),)](
            logits,
            ref_logits,
            labels,
            *normalizer,
            *teacher.normalizer,
            result,
            logits.stride(0),
            ref_logits.stride(0),
            logits.shape[1],
            _LOG2_E / temperature,
            KIND=teacher.kind,
            BLOCK=4096,
            num_warps=8,
        )
    return result


def backward(
    logits: Tensor,
    labels: Tensor,
    normalizer: Tensor,
    coefficients: Tensor,
    temperature: float,
    vocabulary_start: int = 0,
    out: Tensor | None = None,
    teacher: Teacher | None = None,
) -> Tensor:
    """As `torch_passes.backward`."""
    gradient = (
        torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    )
    logits = _rows(logits)
    rows, columns = logits.shape
    if logits.numel() == 0:
        return gradient
    block = 2048
    coefficients, *others = torch.atleast_2d(coefficients).unbind()
    maxima, log_sums, *entropies = normalizer
    of_teacher = [coefficients] * 5
    if teacher is not None:
        of_teacher = others.pop(), teacher.divergence, _rows(teacher.logits), *teacher.normalizer
    backward_kernel[(rows * -(-columns // block),)](
        logits,
        gradient,
        labels,
        maxima,
        log_sums,
        coefficients,
        *(others or [coefficients]),
        *(entropies or [log_sums]),
        *of_teacher,
        rows,
        logits.stride(0),
        gradient.stride(0),
        of_teacher[2].stride(0),
        columns,
        vocabulary_start,
        _LOG2_E / temperature,
        1 / temperature,
        BONUS=bool(others),
        KIND=None if teacher is None else teacher.kind,
        BLOCK=block,
        num_warps=2,
    )
    return gradient


def forward_score_(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `torch_passes.forward_score_`."""
    score = logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]
    results = _one_pass(logits, labels, temperature, with_entropy, None, score)
    if results is not None:
        return *results, score
    return torch_passes.forward_score_(
        logits, labels, temperature, with_entropy, dtype, forward, backward
    )


def forward_gradient(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    objective: Objective,
    out: Tensor,
) -> tuple[Tensor, Tensor | None] | None:
    """(log_probs, entropy) and, in `out`, the gradient of an objective by token, with one read of
    the logits.

    out may be the logits. None, and nothing done, where the family has no slope in Triton, or a row
    cannot be kept on the chip.
    """
    if slope_of(objective.family) is None:
        return None
    return _one_pass(logits, labels, temperature, with_entropy, objective, out)


def scale_rows(source: Tensor, factors: Tensor, target: Tensor, rows: Tensor) -> Tensor:
    """As `torch_passes.scale_rows`, in float32."""
    if source.numel():
        scale_rows_kernel[(len(rows),)](
            source, factors, target, rows, source.shape[1], BLOCK=2048, num_warps=4
        )
    return target


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """As `torch_passes.scale_`, free of charge where the factor is 1."""
    block = 8192
    if values.numel():
        # Few programs: where there is nothing to do, starting them is all that it costs.
        programs = min(1024, -(-values.numel() // block))
        scale_kernel[(programs,)](values, factor, values.numel(), BLOCK=block, num_warps=8)
    return values


def _forward(logits, labels, temperature, with_entropy, vocabulary_start):
    """(3 or 4, rows): log-prob, maximum, log-sum and entropy, or what a shard has in their place; 0
    where untrained."""
    logits = _rows(logits)
    rows, columns = logits.shape
    results = torch.zeros(3 + with_entropy, rows, dtype=torch.float32, device=logits.device)
    if rows:
        forward_kernel[(rows,)](
            logits,
            labels,
            *results[:3],
            results[-1],
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
    return results


def _one_pass(logits, labels, temperature, with_entropy, objective, out):
    rows, columns = logits.shape
    half = _HALVES.get(logits.dtype, "")
    most = _MAX_BLOCKS
    if objective is not None:
        most = (
            _MAX_BLOCKS_SHARED_GRPO
            if objective.penalties.kl is None
            else _MAX_BLOCKS_SHARED_PENALTY
        )
    layout = _layout(logits, out, half, most)
    if layout is None:
        return None
    threads, share, blocks = layout
    # Zeros where nothing is trained: stored by the kernel, they would cost it registers that it
    #   does not have.
    log_probs = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    entropy = torch.zeros_like(log_probs) if with_entropy else None
    if rows == 0:
        return log_probs, entropy
    slots = torch.full(
        (rows, (1 + with_entropy) * share if share > 1 else 0), -1, device=logits.device
    )
    per_token, kind, bonus = [log_probs] * 6, None, False
    if objective is not None:
        kind, *of_penalty = _penalty_of(objective)
        bonus = objective.penalties.bonus
        per_token = [objective.old_log_probs, objective.advantages, objective.weights, *of_penalty]
        per_token += [objective.penalties.by_entropy if bonus else log_probs]
    words = logits.view(torch.int32) if half else logits
    out_words = out.view(torch.int32) if half else out
    grid = 1
    if not _INTERPRETED:
        processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
        grid = min(rows, processors * (_RESIDENT_THREADS // threads) // share) * share
    try:
        one_pass_kernel[(grid,)](
            logits,
            words,
            out_words,
            out,
            labels,
            *per_token,
            log_probs,
            log_probs if entropy is None else entropy,
            slots,
            rows,
            words.stride(0),
            out_words.stride(0),
            columns,
            _LOG2_E / temperature,
            1 / temperature,
            *((0.0,) * 4 if objective is None else numbers_of(objective.family)),
            0,
            16,
            -65536,
            SLOPE=None if objective is None else slope_of(objective.family),
            KL=kind,
            BONUS=bonus,
            ENTROPY=with_entropy,
            HALF=half,
            PTX=not _INTERPRETED,
            SHARE=share,
            BLOCKS=blocks,
            THREADS=threads,
            num_warps=threads // 32,
            maxnreg=65536 // _RESIDENT_THREADS,
            # Programs of a row wait for each other, so all must run at once: the driver refuses a
            # grid that cannot.
            launch_cooperative_grid=share > 1,
        )
    except RuntimeError as error:
        if "cooperative" not in str(error).lower():
            raise
        _cannot_launch.add(logits.device)
        return None
    return log_probs, entropy


def _penalty_of(objective: Objective) -> tuple[str | None, Tensor, Tensor]:
    """Return the kind of the penalty against a reference or None, the reference's log-probs,
    weights of the penalty.

    (T,) each; any vectors where there is no penalty by log-probs.
    """
    penalties = objective.penalties
    if penalties.kl is None or penalties.kl.full:
        return None, objective.weights, objective.weights
    return penalties.kl.kind, penalties.ref_log_probs, penalties.kl.coefficient * penalties.weights


def _layout(
    logits: Tensor, out: Tensor, half: str, most_shared: int
) -> tuple[int, int, int] | None:
    """(threads, programs a row, blocks a program) of the one-pass kernel; None where a row does not
    fit or align.

    most_shared: blocks that a program keeps at most where several share a row.
    """
    columns, per_word = logits.shape[1], 2 if half else 1
    if (
        logits.stride(1) != 1
        or out.stride(1) != 1
        or logits.device in _cannot_launch
        or torch.version.hip
    ):
        return None
    if half and (
        columns % 2 or any(x.stride(0) % 2 or x.storage_offset() % 2 for x in (logits, out))
    ):
        return None
    needed = -(-columns // (per_word * 4 * 512))
    if needed <= _MAX_BLOCKS:
        return 512, 1, needed
    # Smaller programs where they wait for each other: more of them are there to fill the wait.
    needed = -(-columns // (per_word * 4 * 256))
    share = -(-needed // most_shared)
    # The interpreter runs one program after the other: none can wait for the next.
    return None if share > _MAX_SHARE or _INTERPRETED else (256, share, -(-needed // share))


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
