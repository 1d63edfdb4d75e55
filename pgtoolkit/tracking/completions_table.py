"""Some of a run's completions as a table of MLflow's, which its pages show, search and sort."""

from __future__ import annotations

import math
from pathlib import Path

from pgtoolkit.runs.completions import COLUMNS, completion_files, some_completions
from pgtoolkit.system.legible import legible, shortened

TABLE = "completions.json"
"""The artifact."""

MOST_COMPLETIONS = 500
MOST_CHARACTERS = 2000
"""Of each text: what a page of MLflow still shows in a moment. All of them are in the run directory."""


def table_of(run_dir: Path) -> dict[str, list] | None:
    """`columns`, and `data` with a list for each completion, as `mlflow.log_table` writes them; None of none."""
    files = completion_files(run_dir)
    sets = dict.fromkeys(file.set for file in files)
    found = []
    for name in sets:
        own = [file for file in files if file.set == name]
        found += [(name, row) for row in some_completions(own, MOST_COMPLETIONS // len(sets))[0]]
    if not found:
        return None
    parts = list(dict.fromkeys(part for _, row in found for part in row.rewards))
    columns = ["set", *COLUMNS, *(f"reward/{part}" for part in parts)]
    cells = [[name, *(getattr(row, key) for key in COLUMNS), *map(row.rewards.get, parts)] for name, row in found]
    return {"columns": [*map(legible, columns)], "data": [[*map(_shown, row)] for row in cells]}


def _shown(value):
    if isinstance(value, str):
        return shortened(legible(value), MOST_CHARACTERS)
    return None if isinstance(value, float) and not math.isfinite(value) else value
