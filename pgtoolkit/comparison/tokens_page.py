"""The tokens of a step under several losses as one self-contained HTML page; tokens.html is its
template."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from pgtoolkit.comparison.tokens import Inspected
from pgtoolkit.comparison.tokens_losses import CLIPS, LossOnStep
from pgtoolkit.document import Document
from pgtoolkit.system.safe_text import legible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FULL_COLOUR = 0.99
"""The quantile of the tokens' numbers that gets the full colour."""


def html(inspected: Inspected, command: str) -> str:
    """Return the page. command: shown as the one that made it."""
    documents = inspected.made.step.documents
    ends = np.cumsum([document.num_trained for document in documents]).tolist()
    parts = [
        slice(end - document.num_trained, end)
        for document, end in zip(documents, ends, strict=True)
    ]
    data = {
        "title": legible(
            f"What the loss did to each token of step {inspected.number} of {inspected.name}"
        ),
        "facts": list(map(legible, inspected.facts)),
        "command": legible(command),
        "clips": CLIPS,
        "trained": inspected.made.step.totals.num_tokens,
        "common": list(inspected.common),
        "scales": _scales(inspected.common),
        "columns": [_column(column) for column in inspected.columns],
        "prefix": inspected.prefix,
        "documents": [
            _facts(document, [column.vectors["clip"][part] for column in inspected.columns])
            for document, part in zip(documents, parts, strict=True)
        ],
        "texts": _texts(inspected.made.module.policy.tokenizer, documents),
    }
    packed = []
    for number, (document, part) in enumerate(zip(documents, parts, strict=True)):
        content = _packed(document, part, inspected)
        packed.append(f'<script type="text/plain" id="document-{number}">{content}</script>')
    page = files("pgtoolkit.comparison").joinpath("tokens.html").read_text(encoding="utf-8")
    head, end = page.split("@DATA@")
    # Only "<" could end a script element.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    element = f'<script type="application/json" id="data">{text}</script>'
    return "\n".join([head, element, *packed, end])


def _column(column: LossOnStep) -> dict:
    """Return what the page shows of a loss, but for the numbers of its tokens."""
    return {
        "label": column.label,
        "lines": column.lines,
        "total": column.total,
        "cut": column.count("below, cut", "above, cut"),
        "capped": column.count("below, capped", "above, capped"),
        "vectors": list(column.vectors),
        "scales": _scales(column.vectors),
    }


def _scales(vectors: dict[str, np.ndarray]) -> dict[str, float]:
    """Return {name: the size that gets the full colour}; for ratios and factors it is the size of
    the logarithm."""
    scales = {}
    for name, values in vectors.items():
        if name != "clip" and len(values):
            if name in ("ratio", "factor"):
                values = np.log(np.maximum(values, 1e-30))
            scales[name] = float(np.quantile(np.abs(values), _FULL_COLOUR))
    return scales


def _facts(document: Document, clips: list[np.ndarray]) -> dict:
    """Return what the list of documents shows of a document.

    clips: for each loss, the places in CLIPS of the document's trained tokens.
    """
    cut = [CLIPS.index(name) for name in ("below, cut", "above, cut")]
    equal = document.num_trained and bool((document.advantages == document.advantages[0]).all())
    return {
        "name": legible(document.name),
        "reward": document.reward,
        "advantage": float(document.advantages[0]) if equal else None,
        "tokens": document.num_tokens,
        "trained": document.num_trained,
        "cut": [int(np.isin(numbers, cut).sum()) for numbers in clips],
    }


def _packed(document: Document, part: slice, inspected: Inspected) -> str:
    """Return a document's tokens and numbers in the order in which the page reads them, compressed,
    as base64.

    part: the document's trained tokens among those of the step.
    """
    vectors = list(inspected.common.values())
    for column in inspected.columns:
        vectors += column.vectors.values()
    arrays = [document.tokens.numpy().astype("<u4"), document.loss_mask.numpy().astype("u1")]
    arrays += [
        values[part].astype("u1" if values.dtype == np.uint8 else "<f4") for values in vectors
    ]
    # All first bytes of an array, then all second ones: they are more alike, and so compress
    # better.
    planes = [array.view("u1").reshape(len(array), array.itemsize).T.tobytes() for array in arrays]
    return base64.b64encode(gzip.compress(b"".join(planes), 6, mtime=0)).decode()


def _texts(tokenizer: PreTrainedTokenizerBase, documents: list[Document]) -> dict[int, str]:
    """Return {token id: its text as it can be shown} of all tokens that occur and have a text."""
    ids = sorted({token for document in documents for token in document.tokens.tolist()})
    texts = {token: _text(tokenizer, token) for token in ids}
    return {token: legible(text) for token, text in texts.items() if text}


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> str | None:
    """Return the text of a token, or its name in the vocabulary where it is only part of a
    character.

    None for an id that the vocabulary does not have.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return None
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(name, str)  # of a single id, as is the text
    assert isinstance(text, str)
    if "\ufffd" in text:
        return name
    # SentencePiece marks a space by "\u2581", and its decoders leave out a space at the start of a
    # text.
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text
