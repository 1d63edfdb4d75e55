"""Completions as one HTML page that needs nothing else; samples.html is its template."""

from __future__ import annotations

import json
import math
import re
from html import escape
from importlib.resources import files

from pgtoolkit.inspection.samples import Kept, facts
from pgtoolkit.runs.completions import CompletionRow, some_completions
from pgtoolkit.system.legible import legible, shortened

MOST_COMPLETIONS = 2000
MOST_CHARACTERS = 8000
"""Of each text. More completions, or longer ones, make a page that no browser likes."""


def html(kept: list[Kept], step: int | None, run: str, command: str) -> str:
    """The page of these sets. step: of this one alone. command: what has made the page."""
    most, total, rows = MOST_COMPLETIONS // len(kept), 0, []
    for one in kept:
        found, number = some_completions(one.files, most, step)
        rows, total = [*rows, *(_plain(one.set, row) for row in found)], total + number
    count = f"{total:,} completions"
    if len(rows) < total:
        count = f"{len(rows):,} of {count}: some prompts, spread evenly, with all of theirs"
    data = {"about": legible(f"{run}: {count}"), "rows": rows}
    # Whatever a model has written, nothing in it ends the script's element.
    written = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = files(__package__).joinpath("samples.html").read_text(encoding="utf-8")
    return re.sub("@(COMMAND|DATA)@", lambda found: written if found[1] == "DATA" else escape(legible(command)), page)


def _plain(name: str, row: CompletionRow) -> dict:
    texts = {key: getattr(row, key) for key in ("prompt", "completion", "answer")}
    return {
        **{key: text and shortened(legible(text), MOST_CHARACTERS) for key, text in texts.items()},
        **{"set": name, "step": row.step, "name": legible(row.name), "tokens": row.tokens, "facts": facts(row)},
        "reward": row.reward if math.isfinite(row.reward) else None,
    }
