"""Makes the library's arguments of padded tensors, (B, T), with a row per document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pgtoolkit.losses.checks import shown


def from_padded(
    *,
    old_log_probs: Any,
    advantages: Any,
    logits: Any = None,
    hidden: Any = None,
    log_probs: Any = None,
    labels: Any = None,
    mask: Any = None,
    sampling_log_probs: Any = None,
    ref_log_probs: Any = None,
) -> dict[str, Any]:
    """Return keywords of `policy_loss` (for logits), `linear_policy_loss` (hidden) or
    `log_prob_loss` (log_probs).

        out = pgtoolkit.policy_loss(**pgtoolkit.from_padded(logits=logits, labels=labels, ...),
        loss="grpo")

    One of logits, (B, T, V), hidden, (B, T, H), and log_probs, (B, T): as the model gives them,
    with their gradients.
    labels: (B, T) integers with logits or hidden; labels[b, t] is token t + 1 of document b, which
        the logits at t predict, and negative where nothing is trained.
    mask: (B, T) bool or 0 and 1, where a token is trained; needed with log_probs. Padding on either
        side is a mask.
    advantages: (B,), one a document, or (B, T). The others: (B, T). Tensors, or numpy arrays, which
        go to the device of the first three. What is floating keeps its dtype.

    Each row is a document, also one without a trained token. Raises ValueError where shapes do not
    fit together.
    """
    outputs = {"logits": logits, "hidden": hidden, "log_probs": log_probs}
    outputs = {
        name: torch.as_tensor(output) for name, output in outputs.items() if output is not None
    }
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

    def flat(key: str, value: Any) -> Tensor:
        value = torch.as_tensor(value).to(rows.device)
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

    if name == "log_probs" and mask is None:
        raise ValueError(
            "from_padded needs mask with log_probs: nothing else says which tokens are trained"
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
    vectors |= {"sampling_log_probs": sampling_log_probs, "ref_log_probs": ref_log_probs}
    keywords |= {key: flat(key, value) for key, value in vectors.items() if value is not None}
    trained = None if mask is None else flat("mask", mask).bool()
    if name == "log_probs":
        return keywords | {"mask": trained}
    keywords["labels"] = flat("labels", labels)
    if trained is not None:
        keywords["labels"] = torch.where(trained, keywords["labels"], -1)
    return keywords
