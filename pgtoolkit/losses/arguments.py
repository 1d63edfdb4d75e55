"""What the entry points of the library refuse, before anything is computed."""

from __future__ import annotations

import math
import reprlib
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.metrics import LEVELS
from pgtoolkit.losses.surrogates import DEFAULT_EPSILONS, FAMILIES

AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")


def check_choices(
    loss: str, metrics: str, epsilon_low: float | None, epsilon_high: float | None, temperature: float, **switches: bool
) -> tuple[float, float]:
    """(epsilon_low, epsilon_high), the family's own where None; ValueError for what cannot be right."""
    check_name("loss", loss, FAMILIES)
    check_name("metrics", metrics, LEVELS)
    low, high = DEFAULT_EPSILONS[loss]
    epsilon_low = low if epsilon_low is None else epsilon_low
    epsilon_high = high if epsilon_high is None else epsilon_high
    for name, value in (("epsilon_low", epsilon_low), ("epsilon_high", epsilon_high), ("temperature", temperature)):
        check_positive(name, value)
    if epsilon_low >= 1:
        raise ValueError(f"epsilon_low needs a number < 1 (got {epsilon_low!r}); the ratio is never negative")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} needs True or False (got {_text(value)})")
    return epsilon_low, epsilon_high


def check_name(key: str, value: Any, known) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{key}={_text(value)} is unknown; choose one of {', '.join(known)}")


def check_positive(key: str, value: Any) -> None:
    if not _is_positive(value):
        raise ValueError(f"{key} needs a finite number > 0 (got {_text(value)})")


def check_whole(key: str, value: Any, least: int) -> None:
    if not _is_whole(value) or value < least:
        raise ValueError(f"{key} needs a whole number >= {least} (got {_text(value)})")


def check_mode(mode: str, divisor: float | None, reducer: Any, has_groups: bool) -> None:
    """Refuse, with ValueError, an aggregation that cannot mean what was asked; also one whose place a reducer takes."""
    check_name("aggregation", mode, AGGREGATIONS)
    if reducer is not None and not callable(reducer):
        raise ValueError(f"reducer needs a function or None (got {_text(reducer)})")
    if mode == "constant":
        if not _is_positive(divisor) and (reducer is None or divisor is not None):
            raise ValueError(f"aggregation='constant' needs a finite divisor > 0 (got {_text(divisor)})")
    elif divisor is not None:
        raise ValueError(f"divisor={_text(divisor)} has no effect with aggregation={mode!r}; it belongs to 'constant'")
    if mode == "prompt_mean" and not has_groups and reducer is None:
        raise ValueError(
            "aggregation='prompt_mean' needs group_index, each document's group (and totals that count groups)"
        )


def check_tensors(
    name: str, rows: Tensor, labels: Tensor, old_log_probs: Tensor, advantages: Tensor, document_index: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four T-vectors, whole numbers as int64; ValueError if one does not fit `rows`, the (T, V) or (T, H) input.

    name: what the caller calls `rows`.
    """
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"{name} needs two dimensions of floating point (got {_text(rows)})")
    per_row = f"one entry per row of {name}, {len(rows)}"
    for key, vector in (("labels", labels), ("document_index", document_index)):
        check_tensor(key, vector, rows, (len(rows),), per_row, whole=True)
    for key, vector in (("old_log_probs", old_log_probs), ("advantages", advantages)):
        check_tensor(key, vector, rows, (len(rows),), per_row)
    return labels.long().contiguous(), old_log_probs, advantages, document_index.long().contiguous()


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, weight_gradient: Tensor | None) -> None:
    """Refuse, with ValueError, a head that does not fit the hidden states, which are checked already."""
    columns = hidden.shape[1]
    fits = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == columns
    check_tensor("lm_head_weight", weight, hidden, weight.shape if fits else None, f"shape (V, {columns})")
    if bias is not None:
        check_tensor("bias", bias, hidden, (len(weight),), f"one entry per row of lm_head_weight, {len(weight)}")
    if weight_gradient is not None:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        shape = tuple(weight.shape)
        check_tensor("weight_gradient", weight_gradient, hidden, shape, f"the shape of lm_head_weight, {shape}")
        if weight_gradient.dtype != wide:
            raise ValueError(f"weight_gradient needs dtype {_short(wide)} (got {_text(weight_gradient)})")


def check_tensor(key: str, value: Any, like: Tensor, shape, says: str, whole: bool = False) -> None:
    """Refuse anything but a tensor of that shape (None: of no shape) on the device of `like`."""
    if not isinstance(value, Tensor) or value.shape != shape:
        raise ValueError(f"{key} needs {says} (got {_text(value)})")
    if whole and value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{key} needs dtype int64 (got {_text(value)})")
    if not whole and not value.is_floating_point():
        raise ValueError(f"{key} needs a floating point dtype (got {_text(value)})")
    if value.device != like.device:
        raise ValueError(f"{key} needs to be on {like.device}, as the other tensors (got {value.device})")


def check_groups(impl: str, num_documents, vocabulary_group, vocabulary_start, sequence_group, data_group) -> None:
    """Refuse, with ValueError, groups of ranks that cannot mean what was asked."""
    named = {"vocabulary_group": vocabulary_group, "sequence_group": sequence_group, "data_group": data_group}
    for name, group in named.items():
        if group is not None and not isinstance(group, ProcessGroup):
            raise ValueError(
                f"{name} needs a process group of torch.distributed that this rank is in (got {_text(group)})"
            )
        if group is not None and impl == "reference":
            raise ValueError(f"{name} needs another impl than 'reference', which computes whole steps on one rank")
    if vocabulary_start is not None and vocabulary_group is None:
        raise ValueError(f"vocabulary_start={_text(vocabulary_start)} needs a vocabulary_group")
    if vocabulary_start is not None:
        check_whole("vocabulary_start", vocabulary_start, 0)
    if sequence_group is not None and num_documents is None:
        raise ValueError("sequence_group needs num_documents: ranks must agree on the documents, whatever they hold")


def count_documents(document_index: Tensor, is_whole_step: bool) -> int:
    """Largest index + 1; ValueError where a whole step's documents leave numbers out, as 1-based ones leave out 0.

    Each number counts as a document in the step's denominators. One read from a GPU.
    """
    if document_index.numel() == 0:
        return 0
    used = document_index.clamp(min=-1).sort().values
    # The number before the first document's is -1, also where nothing carries it.
    gaps = torch.diff(used, prepend=used.new_full((1,), -1))
    largest, widest = torch.stack([used[-1], gaps.max()]).tolist()
    if widest > 1 and is_whole_step:
        missing = int((used - gaps)[gaps > 1][0]) + 1
        raise ValueError(
            f"document_index needs every number from 0 to {largest} (got none of {missing}): a number that is left out "
            "would count as a document; number the documents from 0 on, or pass num_documents to count those without "
            "a token, too"
        )
    return largest + 1


def check_totals(totals: StepTotals | None, num_documents: int, group_index: Tensor | None, like: Tensor) -> None:
    """Refuse, with ValueError, groups and totals of another type, shape or dtype, and counts that are negative.

    Reads the values of tensors on a CPU only: asking a GPU costs a synchronisation.
    """
    if group_index is not None:
        says = f"one entry per document, {num_documents}"
        check_tensor("group_index", group_index, like, (num_documents,), says, whole=True)
    if totals is None:
        return
    if not isinstance(totals, StepTotals):
        raise ValueError(f"totals needs a StepTotals or None (got {_text(totals)})")
    for name, value in vars(totals).items():
        of_groups = name in ("num_groups", "tokens_per_group")
        if value is None and of_groups:
            continue
        if isinstance(value, Tensor):
            dimensions = 1 if name == "tokens_per_group" else 0
            if value.dim() != dimensions or value.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"totals.{name} needs {dimensions} dimensions of int64 (got {_text(value)})")
            least = 0 if value.is_cuda or value.numel() == 0 else int(value.min())
        elif name == "tokens_per_group" or not _is_whole(value):
            raise ValueError(f"totals.{name} needs a whole number or an int64 tensor (got {_text(value)})")
        else:
            least = value
        if least < 0:
            raise ValueError(f"totals.{name} needs numbers >= 0 (got {least})")
    if (totals.num_groups is None) != (totals.tokens_per_group is None):
        raise ValueError("totals needs both of num_groups and tokens_per_group, or neither")
    if group_index is not None and totals.tokens_per_group is not None and not group_index.is_cuda:
        number = len(totals.tokens_per_group)
        if num_documents and not 0 <= int(group_index.min()) <= int(group_index.max()) < number:
            raise ValueError(
                f"group_index needs numbers from 0 to {number - 1}, the places in totals.tokens_per_group "
                f"(got {int(group_index.min())} to {int(group_index.max())})"
            )


def check_counts(counts: Any, num_documents: int) -> None:
    """Refuse, with ValueError, `kernels.plan.DocumentCounts` that cannot be those of so many documents."""
    trained, informative = (getattr(counts, name, None) for name in ("trained", "informative"))
    if not isinstance(trained, list) or not isinstance(informative, list):
        raise ValueError(f"counts needs DocumentCounts, two lists of numbers (got {_text(counts)})")
    if len(trained) != num_documents or len(informative) != num_documents:
        lengths = f"{len(trained)} and {len(informative)}"
        raise ValueError(f"counts needs {num_documents} documents, as num_documents (got {lengths})")
    for all_of_it, part in zip(trained, informative, strict=True):
        if not _is_whole(all_of_it) or not _is_whole(part) or not 0 <= part <= all_of_it:
            raise ValueError(f"counts needs 0 <= informative <= trained of each document (got {part!r}, {all_of_it!r})")


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """A tensor by its shape and dtype, anything else as it prints, in short."""
    return f"{tuple(value.shape)}, {_short(value.dtype)}" if isinstance(value, Tensor) else reprlib.repr(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
