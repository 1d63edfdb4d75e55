"""The tokens of a step under several losses as one HTML page that needs nothing else; tokens.html is its template."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files

import numpy as np

from pgtoolkit.batch import Document
from pgtoolkit.comparison.tokens import Inspected
from pgtoolkit.comparison.tokens_losses import CLIPS
from pgtoolkit.system.legible import legible

_FULL = 0.99
"""Share of the tokens below the number that has the full colour."""


def html(inspected: Inspected, command: str) -> str:
    """The page. command: what has made it."""
    documents = inspected.made.step.documents
    ends = np.cumsum([document.num_trained for document in documents]).tolist()
    parts = [slice(end - document.num_trained, end) for document, end in zip(documents, ends, strict=True)]
    data = {
        "title": legible(f"What the loss did to each token: step {inspected.number} of {inspected.name}"),
        "facts": list(map(legible, inspected.facts)),
        "command": legible(command),
        "clips": CLIPS,
        "trained": inspected.made.step.totals.num_tokens,
        "common": list(inspected.common),
        "scales": _scales(inspected.common),
        "columns": [
            {
                "label": column.label,
                "lines": column.lines,
                "total": column.total,
                "cut": column.count("below, cut", "above, cut"),
                "capped": column.count("below, capped", "above, capped"),
                "vectors": list(column.vectors),
                "scales": _scales(column.vectors),
            }
            for column in inspected.columns
        ],
        "own": inspected.own,
        "documents": [
            _facts(document, [column.vectors["clip"][part] for column in inspected.columns])
            for document, part in zip(documents, parts, strict=True)
        ],
        "texts": _texts(inspected.made.module.policy.tokenizer, documents),
    }
    packed = [
        f'<script type="text/plain" id="document-{number}">{_packed(document, part, inspected)}</script>'
        for number, (document, part) in enumerate(zip(documents, parts, strict=True))
    ]
    page = files("pgtoolkit.comparison").joinpath("tokens.html").read_text(encoding="utf-8")
    head, end = page.split("@DATA@")
    # Within a script element nothing but "<" could end it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    element = f'<script type="application/json" id="data">{text}</script>'
    return "\n".join([head, element, *packed, end])


def _scales(vectors: dict[str, np.ndarray]) -> dict[str, float]:
    """By name, the number that gets the full colour; of ratios and factors the log of it."""
    scales = {}
    for name, values in vectors.items():
        if name != "clip" and len(values):
            sizes = np.abs(np.log(np.maximum(values, 1e-30)) if name in ("ratio", "factor") else values)
            scales[name] = float(np.quantile(sizes, _FULL))
    return scales


def _facts(document: Document, clips: list[np.ndarray]) -> dict:
    """What the list of documents shows."""
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
    """A document's tokens and numbers in the order that the page reads them."""
    vectors = [*inspected.common.values(), *(v for column in inspected.columns for v in column.vectors.values())]
    arrays = [document.tokens.numpy().astype("<u4"), document.loss_mask.numpy().astype("u1")]
    arrays += [values[part].astype("u1" if values.dtype == np.uint8 else "<f4") for values in vectors]
    planes = [array.view("u1").reshape(len(array), array.itemsize).T.tobytes() for array in arrays]
    return base64.b64encode(gzip.compress(b"".join(planes), 6, mtime=0)).decode()


def _texts(tokenizer, documents: list[Document]) -> dict[int, str]:
    """The text of each token that occurs, as it can be shown; none for an id without."""
    ids = sorted({token for document in documents for token in document.tokens.tolist()})
    return {token: legible(text) for token in ids if (text := _text(tokenizer, token))}


def _text(tokenizer, token: int) -> str | None:
    """The text of one token alone; its name in the vocabulary where it is a part of a character only."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return None
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        return name
    # SentencePiece's mark of a space, which decoders leave out at the start of a text.
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text
