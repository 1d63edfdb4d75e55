"""Makes the library's arguments of padded tensors, (B, T), with a row per document."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pgtoolkit.losses.checks import shown


class Array(Protocol):
    """A tensor, or another array that `torch.as_tensor` takes, such as numpy's."""

    def __array__(self) -> object: ...


def from_padded(
    *,
    old_log_probs: Array,
    advantages: Array,
    logits: Array | None = None,
    hidden: Array | None = None,
    log_probs: Array | None = None,
    labels: Array | None = None,
    mask: Array | None = None,
    sampling_log_probs: Array | None = None,
    ref_log_probs: Array | None = None,
) -> dict[str, Any]:
    """Return keywords of `policy_loss`, `linear_policy_loss` or `log_prob_loss`.

        arguments = pgtoolkit.from_padded(logits=logits, labels=labels, ...)
        out = pgtoolkit.policy_loss(**arguments, loss="grpo")

    A batch has B documents, padded to the length T. Each row is a document, also if it has no
    trained token. Arguments are tensors, or numpy arrays, which go to the device of the model's
    output. Floating dtypes are kept; lists and arrays of whole numbers become float64, but for
    labels and mask.

    logits, hidden, log_probs: (B, T, V), (B, T, H) or (B, T), one of the three, as the model gives
        it, with its gradient.
    labels: (B, T) integers, needed with logits and hidden; labels[b, t] is token t + 1 of document
        b, which the logits at t predict, and negative where nothing is trained.
    mask: (B, T) bool or 0 and 1, where a token is trained. Padding on either side is masked. With
        log_probs either of the two is needed. Where both are given, a token is trained where both
        say so.
    advantages: (B,), a number for each document, or (B, T).
    old_log_probs, sampling_log_probs, ref_log_probs: (B, T).

    Raises ValueError for what is no array, and where shapes do not fit together.
    """
    outputs = {}
    for name, output in (("logits", logits), ("hidden", hidden), ("log_probs", log_probs)):
        if output is not None:
            outputs[name] = _of_floats(_tensor(name, output))
    if len(outputs) != 1:
        raise ValueError(
            "from_padded needs one of logits, hidden and log_probs (got "
            f"{', '.join(outputs) or 'none'})"
        )
    ((name, rows),) = outputs.items()
    shape = {"log_probs": "(B, T)", "logits": "(B, T, V)", "hidden": "(B, T, H)"}[name]
    if rows.dim() != shape.count(",") + 1:
        raise ValueError(f"from_padded needs {name} of shape {shape} (got {shown(rows)})")
    documents, length = rows.shape[:2]
    size = (documents, length)

    def flat(key: str, values: Array) -> Tensor:
        """Return (B * T,) values; raises ValueError for another shape."""
        value = _tensor(key, values).to(rows.device)
        if key == "advantages" and value.shape == (documents,):
            value = value[:, None].expand(size)
        if value.shape != size:
            more = f", or one number a document, ({documents},)" if key == "advantages" else ""
            if value.shape == (documents, length - 1):
                more = ": label t is token t + 1, and the last position has none, which is a mask"
            raise ValueError(
                f"{key} needs shape {tuple(size)} as {name}{more} (got {shown(value)})"
            )
        return value.reshape(-1)

    if name == "log_probs" and mask is None and labels is None:
        raise ValueError(
            "from_padded needs mask or labels with log_probs: nothing else says which tokens are "
            "trained"
        )
    if name != "log_probs" and labels is None:
        raise ValueError(f"from_padded needs labels with {name}, the token after each position")
    index = torch.arange(documents, device=rows.device)[:, None].expand(size)
    keywords = {
        name: rows.flatten(0, 1),
        "document_index": index.reshape(-1),
        "num_documents": documents,
    }
    vectors = {"old_log_probs": old_log_probs, "advantages": advantages}
    for key, value in vectors.items():
        if value is None:
            raise ValueError(
                f"from_padded needs {key} (got None). On-policy the old log-probs are those of the "
                "policy itself, without a gradient"
            )
    vectors |= {"sampling_log_probs": sampling_log_probs, "ref_log_probs": ref_log_probs}
    keywords |= {
        key: _of_floats(flat(key, value)) for key, value in vectors.items() if value is not None
    }
    trained = None if mask is None else _as_bool(flat("mask", mask))
    if labels is not None:
        tokens = flat("labels", labels)
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"labels needs integers (got {shown(tokens)}). Use labels.long()")
        trained = tokens >= 0 if trained is None else trained & (tokens >= 0)
        if name != "log_probs":
            keywords["labels"] = torch.where(trained, tokens, -1)
    if name == "log_probs":
        keywords["mask"] = trained
    return keywords


def _tensor(key: str, values: Array) -> Tensor:
    """Return an array as a tensor, a list of floating numbers in float64; raises ValueError for
    what is none. key: its keyword."""
    try:
        value = torch.as_tensor(values)
        if isinstance(values, list | tuple) and value.is_floating_point():
            value = torch.as_tensor(values, dtype=torch.float64)
        return value
    except (TypeError, ValueError, RuntimeError) as error:
        # A model of transformers returns an object that has the tensor.
        fields = [name for name in ("logits", "last_hidden_state") if hasattr(values, name)]
        use = "".join(f". Use {key}=output.{name} of this output" for name in fields[:1])
        raise ValueError(
            f"{key} needs a tensor or an array of numbers (got a {type(values).__name__}){use}"
        ) from error


def _of_floats(values: Tensor) -> Tensor:
    """Return numbers that are floats by meaning, whole ones in float64."""
    is_whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    return values.double() if is_whole else values


def _as_bool(mask: Tensor) -> Tensor:
    """Return a mask of 0 and 1 as bool; raises ValueError for other numbers."""
    if mask.dtype == torch.bool:
        return mask
    others = mask[(mask != 0) & (mask != 1)]
    if others.numel():
        raise ValueError(
            f"mask needs 0 and 1, where a token is trained (got {others[0].item():g}). "
            "Use mask=weights > 0 for weights; they belong to the advantages"
        )
    return mask.bool()
