"""Makes the library's arguments of padded tensors, (B, T), with a row per document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pgtoolkit.losses.arrays import Array, of_bools, of_floats, of_integers, tensor_of
from pgtoolkit.losses.checks import shown


def from_padded(
    *,
    old_log_probs: Array | None,
    advantages: Array,
    logits: Array | None = None,
    hidden: Array | None = None,
    log_probs: Array | None = None,
    labels: Array | None = None,
    mask: Array | None = None,
    sampling_log_probs: Array | None = None,
    ref_log_probs: Array | None = None,
    rewards: Array | None = None,
    group_index: Array | None = None,
    trajectory_index: Array | None = None,
) -> dict[str, Any]:
    """Return keywords of `policy_loss`, `linear_policy_loss` or `log_prob_loss`.

        arguments = pgtoolkit.from_padded(logits=logits, labels=labels, ...)
        out = pgtoolkit.policy_loss(**arguments, loss="grpo")

    A batch has B documents, padded to the length T. Each row is a document, also if it has no
    trained token. Arguments are tensors, numpy's arrays or lists, which go to the device of the
    model's output. Floating dtypes are kept; lists and whole numbers become float64, but for
    labels, mask and indices.

    logits, hidden, log_probs: (B, T, V), (B, T, H) or (B, T), one of the three, as the model gives
        it, with its gradient.
    labels: (B, T) integers, needed with logits and hidden; labels[b, t] is token t + 1 of document
        b, which the logits at t predict, and negative where nothing is trained.
    mask: (B, T) bool or 0 and 1, where a token is trained. Padding on either side is masked. With
        log_probs either of the two is needed. Where both are given, a token is trained where both
        say so.
    advantages: (B,), a number for each document, or (B, T).
    old_log_probs, sampling_log_probs, ref_log_probs: (B, T). A loss and metrics that read no old
        log-probs, as "reinforce" does not, take None.
    rewards, group_index, trajectory_index: (B,), a number for each document, as in `policy_loss`.
        Beside totals an index is that of the whole step: numbered anew in each piece, or on each
        rank, every piece would have the denominators of the first groups.

    Raises ValueError for what is no array, and where shapes do not fit together.
    """
    outputs = {}
    for name, output in (("logits", logits), ("hidden", hidden), ("log_probs", log_probs)):
        if output is not None:
            outputs[name] = of_floats(tensor_of(name, output))
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
        value = tensor_of(key, values).to(rows.device)
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
    if advantages is None:
        raise ValueError(
            "from_padded needs advantages, a number for each document (got None). For a loss that "
            f"reads rewards alone, use advantages=torch.zeros({documents})"
        )
    vectors = {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "sampling_log_probs": sampling_log_probs,
        "ref_log_probs": ref_log_probs,
    }
    keywords |= {
        key: of_floats(flat(key, value)) for key, value in vectors.items() if value is not None
    }
    # An argument without a default, which the loss refuses to be None where it reads it.
    keywords.setdefault("old_log_probs", None)
    trained = None if mask is None else of_bools(flat("mask", mask))
    if labels is not None:
        tokens = of_integers("labels", flat("labels", labels), isinstance(labels, Tensor))
        trained = tokens >= 0 if trained is None else trained & (tokens >= 0)
        if name != "log_probs":
            keywords["labels"] = torch.where(trained, tokens, -1)
    if name == "log_probs":
        keywords["mask"] = trained
    of_documents = {
        "rewards": rewards,
        "group_index": group_index,
        "trajectory_index": trajectory_index,
    }
    for key, values in of_documents.items():
        if values is None:
            continue
        value = tensor_of(key, values).to(rows.device)
        if value.shape != (documents,):
            raise ValueError(
                f"{key} needs one number a document, ({documents},) as the rows of {name} (got "
                f"{shown(value)})"
            )
        if key == "rewards":
            keywords[key] = of_floats(value)
        else:
            keywords[key] = of_integers(key, value, isinstance(values, Tensor))
    return keywords
