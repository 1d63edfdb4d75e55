"""Checks of the arguments of the library's functions, before anything is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pgtoolkit.batch import DocumentCounts, StepTotals, Tokens
from pgtoolkit.kernels.losses import Computation, LMHead, check_splits
from pgtoolkit.kernels.products import accumulation_dtype
from pgtoolkit.losses.arrays import Array, on_device_of
from pgtoolkit.losses.checks import (
    check_whole,
    is_finite,
    is_whole,
    short,
    shown,
    use_of_array,
)
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import FULL_KINDS
from pgtoolkit.losses.objective import Loss

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NEEDED = ("labels", "old_log_probs", "advantages", "document_index")
VECTORS = (*_NEEDED, "sampling_log_probs", "ref_log_probs", "factors", "coefficients")
OF_DOCUMENTS = {"group_index": "tokens_per_group", "trajectory_index": "tokens_per_trajectory"}
"""Number that documents may share -> the field of the totals with its counts of tokens."""

_ONE_AXIS = (
    " The tokens of all documents lie on one axis: pgtoolkit.from_padded makes one of (B, T)."
)


def tokens_of(
    name: str,
    rows: Tensor,
    vectors: tuple[Array | None, ...],
    num_documents: int | None,
    of_documents: tuple[Array | None, Array | None],
    totals: StepTotals | None,
    counts: DocumentCounts | None = None,
    rewards: Array | None = None,
    top: tuple[Array | None, Array | None] = (None, None),
    kept_ids: Array | None = None,
) -> Tokens:
    """Return the tokens of `rows`, with integers as int64, and lists and other arrays as tensors.

    name: the keyword of rows, (T, ...).
    vectors: the first of VECTORS, (T,) each; None for an optional one that is missing.
    of_documents: those of OF_DOCUMENTS, (documents,) each, or None.
    num_documents: None for the largest index + 1, read on the host.
    rewards: (documents,) floating, or None.
    top: sampling_top_ids and sampling_top_log_probs, (T, k) each, or None for both.
    kept_ids: sampling_kept_ids, (T, k), or None.
    Raises ValueError for a vector that does not fit the rows.
    """
    per_row = f"one entry per row of {name}, {len(rows)}"
    named: dict[str, Tensor] = {}
    for key, vector in zip(VECTORS, vectors, strict=False):
        if vector is None and key not in _NEEDED:
            continue
        is_index = key in ("labels", "document_index")
        made = checked(key, vector, rows, (len(rows),), per_row, is_integer=is_index)
        made = made if made.is_floating_point() else made.long()
        named[key] = made.contiguous()
    if num_documents is None:
        num_documents = count_documents(named["document_index"], is_whole_step=totals is None)
    check_whole("num_documents", num_documents, 0)
    per_document = f"one entry per document, {num_documents}"
    indices: dict[str, Tensor] = {}
    for key, index in zip(OF_DOCUMENTS, of_documents, strict=True):
        if index is not None:
            shape = (num_documents,)
            indices[key] = checked(key, index, rows, shape, per_document, is_integer=True, hint="")
    check_totals(totals, num_documents, indices)
    if counts is not None:
        check_counts(counts, num_documents)
    if rewards is not None:
        needed = f"one reward per document, {num_documents}"
        rewards = checked("rewards", rewards, rows, (num_documents,), needed, hint="")
    top_ids, top_log_probs = top
    if top_ids is not None and top_log_probs is not None:
        ids = _checked_ids("sampling_top_ids", top_ids, rows, name)
        needed = f"the shape of sampling_top_ids, {tuple(ids.shape)}"
        named["sampling_top_ids"] = ids
        named["sampling_top_log_probs"] = checked(
            "sampling_top_log_probs", top_log_probs, rows, ids.shape, needed
        )
    if kept_ids is not None:
        named["sampling_kept_ids"] = _checked_ids("sampling_kept_ids", kept_ids, rows, name)
    indices = {key: index.long() for key, index in indices.items()}
    return Tokens(**named, num_documents=num_documents, **indices, counts=counts, rewards=rewards)


def _checked_ids(key: str, ids: Array, rows: Tensor, name: str) -> Tensor:
    """Return tokens of the sampler, (T, k); raises ValueError where they do not fit the rows."""
    made = on_device_of(rows, key, ids, is_integer=True)
    width = made.shape[-1] if isinstance(made, Tensor) and made.dim() == 2 else 0
    shape = (len(rows), width) if width else None
    needed = f"one row of k >= 1 entries per row of {name}, {len(rows)}"
    return checked(key, made, rows, shape, needed, is_integer=True)


def check_top(
    loss: Loss, top_ids: Array | None, top_log_probs: Array | None
) -> tuple[Array | None, Array | None]:
    """Return the likeliest tokens of the sampler and their log-probs.

    Raises ValueError where only one of them is there, and where the loss does not read them.
    """
    are_given = [x is not None for x in (top_ids, top_log_probs)]
    if any(are_given) and not all(are_given):
        raise ValueError("sampling_top_ids and sampling_top_log_probs need each other (got one)")
    if any(are_given) and not loss.family.score_centering:
        raise ValueError(
            "sampling_top_ids have no effect without score centering. Use "
            "loss=pgtoolkit.families.Reinforce(score_centering=True), or another family that has it"
        )
    return top_ids, top_log_probs


def check_rewards(loss: Loss, rewards: Array | None) -> None:
    """Raise ValueError for rewards that the loss does not read."""
    family = loss.family
    asked = family.asked if isinstance(family, FunctionFamily) else frozenset()
    if rewards is not None and not asked & {"rewards", "group_rewards"}:
        raise ValueError(
            "rewards have no effect without a loss function that has a parameter rewards or "
            f"group_rewards (got loss={family.name!r}, which takes the advantages)"
        )


def check_coefficients(loss: Loss, coefficients: Array | None) -> None:
    """Raise ValueError for coefficients of a loss that needs no first pass over the step."""
    family = loss.family
    needs_step = isinstance(family, FunctionFamily) and family.level == "step"
    if coefficients is not None and not needs_step:
        raise ValueError(
            "coefficients need a loss that depends on other documents of the step (got loss="
            f"{family.name!r}, which does not). They would take its place, and its value be 0. "
            "Leave them out, or use factors= to multiply the loss of each token"
        )


_OF_ITSELF = {
    "logits": "use old_log_probs={of_logits}.log_softmax(-1).gather(-1, "
    "labels.clamp(min=0)[..., None])[..., 0]",
    "hidden": "they are the new ones of these hidden states, detached",
    "log_probs": "use old_log_probs=log_probs.detach()",
}
"""Model's output -> the old log-probs of a policy that trains on its own samples."""


def old_or_zeros(
    name: str,
    rows: Tensor,
    loss: Loss,
    old_log_probs: Array | None,
    sampling_log_probs: Array | None,
    kept_ids: Array | None = None,
) -> Array | None:
    """Return the old log-probs; zeros where there are none, and nothing reads them.

    name: the keyword of rows, the model's output. sampling_log_probs: those that a correction
        `of_policy` compares the new ones with in their place. kept_ids: sampling_kept_ids.
    Raises ValueError where something reads them.
    """
    if old_log_probs is not None:
        return old_log_probs
    correction = loss.correction
    reader = loss.reader_of_old_log_probs
    if correction is not None and correction.of_policy and sampling_log_probs is not None:
        reader = replace(loss, correction=None).reader_of_old_log_probs
    if reader is not None:
        of_logits = "logits.detach()"
        if loss.temperature != 1:
            of_logits = f"(logits.detach() / {loss.temperature:g})"
        of_itself = _OF_ITSELF[name].format(of_logits=of_logits)
        if kept_ids is not None:
            of_itself = (
                "they are the log_softmax over the tokens of sampling_kept_ids alone, as the "
                "sampler gives it; where a row of these is all -1, over all tokens"
            )
        raise ValueError(
            "old_log_probs needs the log-probs of the labels under the policy that sampled (got "
            f"None): {reader} reads them. On the policy's own samples {of_itself}. "
            "loss='reinforce' reads none"
        )
    if loss.metrics != "none":
        raise ValueError(
            f"old_log_probs=None needs metrics='none' (got {loss.metrics!r}): ratios and clips are "
            "measured against them. Use metrics='none', or give them"
        )
    return rows.new_zeros(len(rows)) if isinstance(rows, Tensor) and rows.dim() else None


def check_sampling(
    loss: Loss, sampling_log_probs: Array | None, coefficients: Array | None
) -> None:
    """Raise ValueError for log-probs of the sampler that have no effect.

    Beside coefficients they may have had one in the first pass, which takes the same arguments.
    """
    has_effect = loss.correction is not None or loss.metrics != "none" or coefficients is not None
    if sampling_log_probs is not None and not has_effect and not _asks(loss, "sampling_log_probs"):
        raise ValueError(
            "sampling_log_probs has no effect without a correction and with metrics='none'. Use "
            "correction='token_truncate', metrics='basic' to measure their distance from "
            "old_log_probs, or leave it out"
        )


def _asks(loss: Loss, name: str) -> bool:
    """Return whether the loss is a function that has a parameter of this name."""
    return isinstance(loss.family, FunctionFamily) and name in loss.family.asked


def check_reference(
    loss: Loss,
    ref_log_probs: Array | None,
    coefficients: Array | None,
    **of_rows: Tensor | None,
) -> None:
    """Raise ValueError for a penalty without its reference, and for a reference that has no effect.

    coefficients: as for `check_sampling`.
    of_rows: by keyword, the inputs that a full KL reads in the place of ref_log_probs; ref_bias may
        be missing.
    """
    kl = loss.kl
    present = [name for name, tensor in of_rows.items() if tensor is not None]
    full = kl is not None and kl.full
    needed = [name for name in of_rows if name != "ref_bias"]
    if kl is not None and kl.full and (not {*needed} <= {*present} or ref_log_probs is not None):
        inputs = f"{' and '.join(needed)} of the reference, and no ref_log_probs"
        raise ValueError(f"kl={kl.kind!r} needs {inputs} (got {', '.join(present) or None})")
    if present and not full:
        raise ValueError(
            f"{present[0]} needs a KL of kind {', '.join(map(repr, FULL_KINDS))} (got kl={kl})"
        )
    if kl is not None and not full and ref_log_probs is None:
        raise ValueError(
            "kl needs ref_log_probs, the log-probs of the labels under the reference (got None)"
        )
    has_effect = kl is not None or loss.metrics != "none" or coefficients is not None
    if ref_log_probs is not None and not has_effect and not _asks(loss, "ref_log_probs"):
        raise ValueError(
            "ref_log_probs has no effect without kl and with metrics='none'; they give the metric "
            "kl_ref"
        )


def check_rows(name: str, rows: Tensor) -> None:
    """Raise ValueError unless rows, whose keyword is `name`, is a matrix of floating point."""
    tensor_of_rank(name, rows)
    if rows.dim() != 2 or not rows.is_floating_point():
        hint = _ONE_AXIS if rows.dim() != 2 else f" Use {name}.float()"
        raise ValueError(
            f"{name} needs two dimensions of floating point (got {shown(rows)}).{hint}"
        )


def check_head(hidden: Tensor, head: LMHead, loss: Loss, method: Computation) -> None:
    """Raise ValueError for a head that does not fit the hidden states, or conflicting options."""
    _check_shapes(hidden, head)
    if head.reference is not None:
        ref_hidden, ref_head = head.reference
        check_rows("ref_hidden", ref_hidden)
        shape = len(hidden), ref_hidden.shape[1]
        check_tensor(
            "ref_hidden", ref_hidden, hidden, shape, f"one row per row of hidden, {len(hidden)}"
        )
        _check_shapes(ref_hidden, ref_head, "ref_")
        if len(ref_head.weight) != len(head.weight):
            needed = f"the {len(head.weight)} rows of lm_head_weight, a token each"
            raise ValueError(f"ref_lm_head_weight needs {needed} (got {shown(ref_head.weight)})")
    if head.weight_gradient is not None:
        _check_weight_gradient(hidden, head, head.weight_gradient, method)
    check_splits(loss, method)


def _check_weight_gradient(
    hidden: Tensor, head: LMHead, gradient: Tensor, method: Computation
) -> None:
    """Raise ValueError for a weight_gradient that cannot be added to."""
    shape = tuple(head.weight.shape)
    needed = f"the shape of lm_head_weight, {shape}"
    check_tensor("weight_gradient", gradient, hidden, shape, needed, hint="")
    dtype = accumulation_dtype(hidden)
    if gradient.dtype != dtype:
        raise ValueError(f"weight_gradient needs dtype {short(dtype)} (got {shown(gradient)})")
    if not method.fused:
        raise ValueError(f"weight_gradient needs impl='fused_linear' (got {method.impl!r})")


def _check_shapes(hidden: Tensor, head: LMHead, prefix: str = "") -> None:
    weight = head.weight
    name = f"{prefix}lm_head_weight"
    width = hidden.shape[1]
    tensor_of_rank(name, weight)
    fits = weight.dim() == 2 and weight.shape[1] == width
    is_transposed = weight.dim() == 2 and weight.shape[0] == width
    hint = f" Use {name}.T, a row for each token of the vocabulary." if is_transposed else ""
    shape = weight.shape if fits else None
    check_tensor(name, weight, hidden, shape, f"shape (V, {width})", hint=hint)
    if head.bias is not None:
        per_row = f"one entry per row of {name}, {len(weight)}"
        check_tensor(f"{prefix}bias", head.bias, hidden, (len(weight),), per_row, hint="")


_WHOLE_PARAMETER = (
    "FSDP averages gradients over ranks, and so must this one be. Use\n"
    'average = [torch.distributed.tensor.Partial("avg")] * {key}.device_mesh.ndim\n'
    "{key} = {key}.full_tensor(grad_placements=average)"
)
_OF_PARAMETERS = {
    **dict.fromkeys(("lm_head_weight", "bias"), _WHOLE_PARAMETER),
    **dict.fromkeys(("ref_lm_head_weight", "ref_bias"), "Use {key}.full_tensor()"),
    "weight_gradient": "It is added to, and a copy would be lost. Use weight_gradient=None",
}
"""What to give in place of DTensors without rows of tokens."""

_OF_COLUMNS = {
    "logits": "logits.to_local(), ...",
    "ref_logits": "..., ref_logits=ref_logits.to_local()",
}
"""Keywords of logits -> the arguments of `policy_loss` with the columns of a rank."""


def _use_of_spread(key: str, value: DTensor) -> str:
    """Return what to give in place of a DTensor, by how it is spread over ranks.

    A rank's gradient of the tensor that `full_tensor` returns counts as the whole one. It is, where
    the rank computes the loss of all rows.
    """
    if key in _OF_PARAMETERS:
        return _OF_PARAMETERS[key].format(key=key)
    mesh = value.device_mesh
    placements = value.placements
    spread = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if not spread:
        return f"Each rank has all of it. Use {key}.to_local(), and no group of these ranks"
    axis = spread[0]
    by_columns = len(spread) == 1 and placements[axis].is_shard(value.dim() - 1)
    if key in _OF_COLUMNS and by_columns and value.shape[-1] % mesh.size(axis) == 0:
        return (
            "Each rank has some of its columns. Use\n"
            f"group = {key}.device_mesh.get_group({axis})\n"
            f"policy_loss({_OF_COLUMNS[key]}, vocabulary_group=group)"
        )
    return (
        f"Use {key}.full_tensor() on every rank, with all others of its rows, and no group of "
        "these ranks"
    )


def tensor_of_rank(key: str, value: object) -> Tensor:
    """Return the value; raises ValueError unless it is a tensor of this rank. key: its keyword."""
    if not isinstance(value, Tensor):
        use = use_of_array(key, value)
        got = f"a {type(value).__name__}: {shown(value)}" if use else shown(value)
        raise ValueError(f"{key} needs a tensor (got {got}){use}")
    if type(value).__name__ == "DTensor":
        use = _use_of_spread(key, cast("DTensor", value))
        got = f"a DTensor, {shown(value)}"
        raise ValueError(f"{key} needs a tensor of this rank (got {got}). {use}")
    return value


def checked(
    key: str,
    values: object,
    like: Tensor,
    shape: tuple[int, ...] | None,
    needed: str,
    is_integer: bool = False,
    hint: str = _ONE_AXIS,
) -> Tensor:
    """Return data as a tensor, lists and other arrays on the device of `like`; raises ValueError
    as `check_tensor` does."""
    value = on_device_of(like, key, values, is_integer)
    check_tensor(key, value, like, shape, needed, is_integer, hint)
    assert isinstance(value, Tensor)
    return value


def check_tensor(
    key: str,
    value: object,
    like: Tensor,
    shape: tuple[int, ...] | None,
    needed: str,
    is_integer: bool = False,
    hint: str = _ONE_AXIS,
) -> None:
    """Raise ValueError unless value is a tensor of this shape, on the device of `like`.

    key: the keyword of value.
    shape: None refuses every value.
    needed: the shape in words. hint: what follows, where the shape is another.
    """
    value = tensor_of_rank(key, value)
    if value.shape != shape:
        raise ValueError(f"{key} needs {needed} (got {shown(value)}).{hint}")
    if is_integer and value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{key} needs dtype int64 (got {shown(value)}). Use {key}.long()")
    if not is_integer and not value.is_floating_point():
        raise ValueError(
            f"{key} needs a floating point dtype (got {shown(value)}). Use {key}.float()"
        )
    if value.device != like.device:
        raise ValueError(
            f"{key} needs to be on {like.device}, as the other tensors (got {value.device})"
        )


def check_ranks(ranks: Ranks, impl: str, num_documents: int | None) -> None:
    """Raise ValueError for groups of ranks that do not fit the call.

    num_documents: the caller's, or None.
    """
    if impl == "reference" and (ranks.vocabulary or ranks.sequence or ranks.data):
        raise ValueError(
            "impl='reference' computes whole steps on one rank: no vocabulary, sequence or data "
            "group"
        )
    if ranks.vocabulary_start is not None:
        if ranks.vocabulary is None:
            raise ValueError(
                f"vocabulary_start={shown(ranks.vocabulary_start)} needs a vocabulary_group"
            )
        check_whole("vocabulary_start", ranks.vocabulary_start, 0)
    if ranks.sequence is not None and num_documents is None:
        raise ValueError(
            "sequence_group needs num_documents: ranks must agree on the documents, whatever they "
            "hold"
        )


def count_documents(document_index: Tensor, is_whole_step: bool) -> int:
    """Return the largest index + 1, read on the host.

    Raises ValueError where a number is missing in a complete step: each number counts as a document
    in the step's denominators, so that numbers from 1 on would count a document too many.
    """
    if document_index.numel() == 0:
        return 0
    used = document_index.clamp(min=-1).sort().values
    # The number before the first document's is -1, also where no row has it.
    gaps = torch.diff(used, prepend=used.new_full((1,), -1))
    largest, widest = torch.stack([used[-1], gaps.max()]).tolist()
    if widest > 1 and is_whole_step:
        missing = int((used - gaps)[gaps > 1][0]) + 1
        raise ValueError(
            f"document_index needs every number from 0 to {largest} (got none of {missing}): a "
            "number that is left out would count as a document; number the documents from 0 on, or "
            "pass num_documents to count those without a token, too"
        )
    return largest + 1


def check_totals(
    totals: StepTotals | None, num_documents: int, of_documents: dict[str, Tensor]
) -> None:
    """Raise ValueError for groups, trajectories or totals that cannot belong to these documents.

    of_documents: by name, the indices of OF_DOCUMENTS that are present.
    The values of tensors are read on a CPU only: reading them from a GPU costs a synchronisation.
    """
    for key, index in of_documents.items():
        smallest = 0 if index.is_cuda or not num_documents else int(index.min())
        if smallest < 0:
            unit = "trajectory" if key == "trajectory_index" else "group"
            raise ValueError(
                f"{key} needs numbers from 0 on (got {smallest}). Documents that share one are one "
                f"{unit}; give a document that is one by itself a number of its own"
            )
    trajectories = of_documents.get("trajectory_index")
    if totals is None:
        return
    if not isinstance(totals, StepTotals):
        raise ValueError(f"totals needs a StepTotals or None (got {shown(totals)})")
    _check_counts_of_totals(totals)
    counted = totals.num_documents
    if is_whole(counted) and num_documents > counted:
        raise ValueError(
            f"totals.num_documents needs to count at least the {num_documents} documents of this "
            f"call (got {counted}). Totals are those of the whole step."
        )
    if (totals.num_groups is None) != (totals.tokens_per_group is None):
        raise ValueError("totals needs both of num_groups and tokens_per_group, or neither")
    if (trajectories is None) != (totals.tokens_per_trajectory is None):
        raise ValueError(
            "trajectory_index and totals.tokens_per_trajectory need each other (got one of them "
            "alone)"
        )
    for key, index in of_documents.items():
        counts = getattr(totals, OF_DOCUMENTS[key])
        if counts is None or index.is_cuda or not num_documents:
            continue
        smallest = int(index.min())
        largest = int(index.max())
        if not 0 <= smallest <= largest < len(counts):
            raise ValueError(
                f"{key} needs numbers from 0 to {len(counts) - 1}, the places in "
                f"totals.{OF_DOCUMENTS[key]} (got {smallest} to {largest})"
            )


def _check_counts_of_totals(totals: StepTotals) -> None:
    """Raise ValueError for totals that are no counts, or a mean that is no number."""
    mean = totals.mean_factor
    if not (mean is None or is_finite(mean) or (isinstance(mean, Tensor) and mean.dim() == 0)):
        raise ValueError(
            f"totals.mean_factor needs a finite number, a 0-dim tensor, or None (got {shown(mean)})"
        )
    for name in ("num_documents", "num_tokens", "num_empty_documents", "num_groups"):
        value = getattr(totals, name)
        if value is None and name == "num_groups":
            continue
        is_count = is_whole(value) and value >= 0
        if isinstance(value, Tensor):
            is_count = value.dim() == 0 and value.dtype in (torch.int64, torch.int32)
        if not is_count:
            raise ValueError(
                f"totals.{name} needs a whole number >= 0, an int or a 0-dim int64 tensor (got "
                f"{shown(value)}). It is a count over the whole step"
            )
    empty = totals.num_empty_documents
    if is_whole(empty) and is_whole(totals.num_documents) and empty > totals.num_documents:
        raise ValueError(
            f"totals.num_empty_documents needs at most totals.num_documents, "
            f"{totals.num_documents} (got {empty}). It counts those without a trained token"
        )
    for name in (
        "tokens_per_group",
        "tokens_per_trajectory",
        "completions_by_sign",
        "tokens_by_sign",
    ):
        value = getattr(totals, name)
        if value is None:
            continue
        counts = tensor_of_rank(f"totals.{name}", value)
        if counts.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"totals.{name} needs counts, of dtype int64 (got {shown(counts)}). Use "
                f"{name}={name}.long()"
            )
        _check_parts_of_totals(totals, name, counts)


def _check_parts_of_totals(totals: StepTotals, name: str, counts: Tensor) -> None:
    """Raise ValueError for counts that contradict the other fields of the totals.

    name: the field. Numbers are read on a CPU only.
    """
    by_sign = name.endswith("by_sign")
    length = len(counts) if counts.dim() else 0
    num_groups = totals.num_groups
    if name != "tokens_per_trajectory" and num_groups is not None and not _is_on_gpu(num_groups):
        length = int(num_groups)
    shape = (length, 3) if by_sign else (length,)
    if counts.shape != shape:
        each = "each trajectory" if name == "tokens_per_trajectory" else "each of the num_groups"
        raise ValueError(
            f"totals.{name} needs shape {shape}, an entry for {each} (got {shown(counts)})"
        )
    total_name = "num_documents" if name == "completions_by_sign" else "num_tokens"
    expected = getattr(totals, total_name)
    if _is_on_gpu(counts) or _is_on_gpu(expected):
        return
    total = int(counts.sum())
    if total != int(expected):
        raise ValueError(
            f"totals.{name} needs to add up to totals.{total_name}, {int(expected)} (got {total}). "
            "Both are counted over the whole step"
        )


def _is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def check_counts(counts: DocumentCounts, num_documents: int) -> None:
    """Raise ValueError for counts that do not fit the number of documents."""
    pairs = [*zip(counts.informative, counts.trained, strict=False)]
    if {len(counts.trained), len(counts.informative)} != {num_documents}:
        raise ValueError(
            f"counts needs {num_documents} documents, as num_documents (got {len(pairs)})"
        )
    wrong = [(part, total) for part, total in pairs if not 0 <= part <= total]
    if wrong:
        raise ValueError(
            f"counts needs 0 <= informative <= trained of each document (got {wrong[0]})"
        )
