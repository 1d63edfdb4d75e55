"""The shape of the batches of rollouts that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pgtoolkit.runs.records import is_count, is_number


def _is_vector(value: object, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.dtype in dtypes


_are_tokens = partial(_is_vector, dtypes=(torch.int64,))
_are_numbers = partial(_is_vector, dtypes=(torch.float32, torch.float64))


def _are_rows(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype == dtype


_are_top_ids = partial(_are_rows, dtype=torch.int32)
_are_top_numbers = partial(_are_rows, dtype=torch.float32)


def _is_batch_number(value: object) -> bool:
    """Return whether a value is the number of a batch, or -1 before the first."""
    return type(value) is int and value >= -1


def _may_be(shape: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or shape(value)


_DOCUMENT = {
    "tokens": _are_tokens,
    "loss_mask": partial(_is_vector, dtypes=(torch.bool,)),
    "advantages": _are_numbers,
    "old_log_probs": _may_be(_are_numbers),
    "sampling_log_probs": _may_be(_are_numbers),
    "ref_log_probs": _may_be(_are_numbers),
    "reference_tokens": _may_be(_are_tokens),
    "group": is_count,
    "name": str,
    "reward": _may_be(is_number),
    "exact_match": bool | None,
    "truncated": bool | None,
    "model_version": int | None,
    "task_reward": _may_be(is_number),
    "dropped_prompt_fraction": _may_be(is_number),
    "measures": {str: is_number},
    "on_policy": bool,
    "trajectory": int | None,
    "anchor_version": int | None,
    "score_failed?": bool,
    "dropped_group_fraction?": _may_be(is_number),
    "left_out?": bool,
    "retired_prompts?": _may_be(is_count),
    "kl_reward?": _may_be(is_number),
    "values?": _may_be(_are_numbers),
    "returns?": _may_be(_are_numbers),
    "logged?": {str: str},
    "sampling_top_ids?": _may_be(_are_top_ids),
    "sampling_top_log_probs?": _may_be(_are_top_numbers),
    "sampling_kept_ids?": _may_be(_are_top_ids),
}
_COMPLETION = {
    "tokens": _are_tokens,
    "log_probs": _are_numbers,
    "finish_reason": str,
    "model_version": int,
    "drawn": _may_be(partial(_is_vector, dtypes=(torch.bool,))),
    "top_ids?": _may_be(_are_top_ids),
    "top_log_probs?": _may_be(_are_top_numbers),
}
_UNSCORED = {"prompt": is_count, "completions": [_COMPLETION]}
STATE = {
    "number": _is_batch_number,
    "next_prompt": is_count,
    "documents": [_DOCUMENT],
    "retired?": [is_count],
    "unscored?": [_UNSCORED],
}
"""The shape of the result of `SampledRollouts.state_dict`, for `expect`."""
