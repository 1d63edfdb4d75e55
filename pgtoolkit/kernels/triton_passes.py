"""The vocabulary-sized passes on a GPU: launches of the Triton kernels.

They also run on a CPU, under Triton's interpreter. `torch_passes` has the docstrings.
"""

from __future__ import annotations

import math
import os

import torch
import triton
from torch import Tensor

from pgtoolkit.kernels import torch_passes
from pgtoolkit.kernels.torch_passes import Teacher
from pgtoolkit.kernels.triton_families import numbers_of, slope_of
from pgtoolkit.kernels.triton_one_pass import one_pass_kernel
from pgtoolkit.kernels.triton_scale import scale_kernel, scale_rows_kernel
from pgtoolkit.kernels.triton_two_pass import backward_kernel, divergence_kernel, forward_kernel
from pgtoolkit.losses.centering import CenteredRows
from pgtoolkit.losses.objective import Objective

one_pass = True
log_probs_at = torch_passes.log_probs_at

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = (torch.float32, *_HALVES)
_LOG2_E = math.log2(math.e)

_RESIDENT_THREADS = 1024
"""Threads of the one-pass kernel that a processor holds at once, with 64 registers each."""
_MAX_BLOCKS = 8
"""Blocks of 4 words a thread that a program keeps: 32 registers of the 64. With more, registers run
out, and the compiler spills numbers that the program then has to wait for."""
_MAX_BLOCKS_SHARED_GRPO = 7
"""The same where programs share a row and each computes the coefficient, which needs registers."""
_MAX_BLOCKS_SHARED_PENALTY = 6
"""The same where the loss also has a penalty against a reference."""
_MAX_SHARE = 32
"""Programs that may share a row."""
_cannot_launch: set[torch.device] = set()
"""Devices that have refused a grid whose programs wait for each other."""


def check_runs_on(logits: Tensor) -> None:
    """Raise ValueError for a dtype or device that the kernels cannot run on."""
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
    """Do as `torch_passes.forward`."""
    results = _forward(logits, labels, temperature, with_entropy, None)
    return results[0], results[1:3], results[3] if with_entropy else None


def forward_shard(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, vocabulary_start: int
) -> Tensor:
    """Do as `torch_passes.forward_shard`."""
    results = _forward(logits, labels, temperature, with_entropy, vocabulary_start)
    results[3:] *= math.log(2.0)  # the kernel counts in powers of two
    return results


def divergence(
    logits: Tensor, normalizer: Tensor, teacher: Teacher, labels: Tensor, temperature: float
) -> Tensor:
    """Do as `torch_passes.divergence`."""
    logits = _rows(logits)
    ref_logits = _rows(teacher.logits)
    with_mixture = teacher.kind == "full_jsd"
    result = torch.zeros(2 if with_mixture else 1, len(labels)).to(normalizer)
    if logits.numel():
        divergence_kernel[(len(labels),)](
            logits,
            ref_logits,
            labels,
            *normalizer,
            *teacher.normalizer,
            *result,
            *([] if with_mixture else result),
            logits.stride(0),
            ref_logits.stride(0),
            logits.shape[1],
            _LOG2_E / temperature,
            teacher.beta,
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
    centered: CenteredRows | None = None,
) -> Tensor:
    """Do as `torch_passes.backward`."""
    gradient = out
    if gradient is None:
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    logits = _rows(logits)
    rows, columns = logits.shape
    if logits.numel() == 0:
        return gradient
    block = 2048
    coefficients, *others = torch.atleast_2d(coefficients).unbind()
    maxima, log_sums, *entropies = normalizer
    of_teacher = [coefficients] * 5
    if teacher is not None:
        of_teacher = others.pop(), teacher.of_policy, _rows(teacher.logits), *teacher.normalizer
    of_centered = [labels, coefficients, coefficients] if centered is None else centered
    num_top = 0 if centered is None else centered.top_ids.shape[1]
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
        *of_centered,
        rows,
        logits.stride(0),
        gradient.stride(0),
        of_teacher[2].stride(0),
        num_top,
        columns,
        vocabulary_start,
        _LOG2_E / temperature,
        1 / temperature,
        0.0 if teacher is None else teacher.beta,
        BONUS=bool(others),
        KIND=None if teacher is None else teacher.kind,
        TOP=triton.next_power_of_2(num_top) if num_top else 0,
        BLOCK=block,
        num_warps=2,
    )
    return gradient


def forward_score_(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Do as `torch_passes.forward_score_`; the score always takes the memory of the logits."""
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
    """Return (log_probs, entropy), and write the gradient of an objective by token into `out`.

    The logits are read once. out may be the logits.
    Returns None and does nothing where the family has no slope in Triton, or a row does not fit on
    the chip.
    """
    if slope_of(objective.family) is None:
        return None
    return _one_pass(logits, labels, temperature, with_entropy, objective, out)


def scale_rows(source: Tensor, factors: Tensor, target: Tensor, rows: Tensor) -> Tensor:
    """Do as `torch_passes.scale_rows`, in float32."""
    if source.numel():
        scale_rows_kernel[(len(rows),)](
            source, factors, target, rows, source.shape[1], BLOCK=2048, num_warps=4
        )
    return target


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """Do as `torch_passes.scale_`; where the factor is 1, nothing is read or written."""
    block = 8192
    if values.numel():
        # Few programs, since starting them is the only cost where the factor is 1.
        programs = min(1024, -(-values.numel() // block))
        scale_kernel[(programs,)](values, factor, values.numel(), BLOCK=block, num_warps=8)
    return values


def _forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    vocabulary_start: int | None,
) -> Tensor:
    """Return (3 or 4, rows): log-prob, maximum, log-sum and entropy, 0 where untrained.

    With vocabulary_start they are the sums of a shard, as `torch_passes.forward_shard` has them.
    """
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


def _one_pass(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    objective: Objective | None,
    out: Tensor,
) -> tuple[Tensor, Tensor | None] | None:
    """Return (log_probs, entropy), and write the gradient or, without objective, the score.

    Returns None and does nothing where a row does not fit on the chip.
    """
    rows, columns = logits.shape
    half = _HALVES.get(logits.dtype, "")
    max_blocks = _MAX_BLOCKS
    if objective is not None:
        has_penalty = objective.penalties.kl is not None
        max_blocks = _MAX_BLOCKS_SHARED_PENALTY if has_penalty else _MAX_BLOCKS_SHARED_GRPO
    layout = _layout(logits, out, half, max_blocks)
    if layout is None:
        return None
    threads, share, blocks = layout
    # Zeros where nothing is trained. If the kernel stored them, it would need registers that it
    # does not have.
    log_probs = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    entropy = torch.zeros_like(log_probs) if with_entropy else None
    if rows == 0:
        return log_probs, entropy
    num_slots = (1 + with_entropy) * share if share > 1 else 0
    slots = torch.full((rows, num_slots), -1, device=logits.device)
    per_token = [log_probs] * 6  # not read without an objective
    kind = None
    bonus = False
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
            # Programs of a row wait for each other, so all must run at once. The driver refuses a
            # grid that is too large for that.
            launch_cooperative_grid=share > 1,
        )
    except RuntimeError as error:
        if "cooperative" not in str(error).lower():
            raise
        _cannot_launch.add(logits.device)
        return None
    return log_probs, entropy


def _penalty_of(objective: Objective) -> tuple[str | None, Tensor, Tensor]:
    """Return (kind of the penalty or None, log-probs of the reference, weights of the penalty).

    The vectors are (T,); without a penalty by log-probs they are not read.
    """
    penalties = objective.penalties
    if penalties.kl is None or penalties.kl.full:
        return None, objective.weights, objective.weights
    return penalties.kl.kind, penalties.ref_log_probs, penalties.kl.coefficient * penalties.weights


def _layout(
    logits: Tensor, out: Tensor, half: str, max_blocks_shared: int
) -> tuple[int, int, int] | None:
    """Return (threads, programs a row, blocks a program) of the one-pass kernel.

    max_blocks_shared: blocks that a program may keep where several share a row.
    Returns None where a row does not fit, or is not aligned.
    """
    columns = logits.shape[1]
    per_word = 2 if half else 1
    if logits.device in _cannot_launch or torch.version.hip:
        return None
    for tensor in (logits, out):
        if tensor.stride(1) != 1:
            return None
        if half and (tensor.stride(0) % 2 or tensor.storage_offset() % 2):
            return None
    if half and columns % 2:
        return None
    needed = -(-columns // (per_word * 4 * 512))
    if needed <= _MAX_BLOCKS:
        return 512, 1, needed
    # Smaller programs where they wait for each other, so that there are more of them to fill the
    # wait.
    needed = -(-columns // (per_word * 4 * 256))
    share = -(-needed // max_blocks_shared)
    # The interpreter runs programs in sequence, so that none can wait for the next.
    if share > _MAX_SHARE or _INTERPRETED:
        return None
    return 256, share, -(-needed // share)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
