"""What MLflow is told of a run besides its metrics, completions as a table among it, from the run directory alone."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.runs import records
from pgtoolkit.runs.completions import COLUMNS, completion_files, some_completions
from pgtoolkit.runs.provenance import code_of
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.legible import legible, shortened
from pgtoolkit.tracking.store import flatten, text_of

_LONGEST_TAG = 4000

TABLE = "completions.json"
"""The artifact with some of the completions, which MLflow's pages show, search and sort."""

MOST_COMPLETIONS = 500
MOST_CHARACTERS = 2000
"""Of each text: what a page of MLflow still shows in a moment. All of them are in the run directory."""


class Description(NamedTuple):
    """Of one run, as texts."""

    run_name: str
    params: dict[str, str]
    tags: dict[str, str]


def describe(run_dir: Path) -> Description:
    """The description of a run that has written its configuration."""
    config, _ = records.read_config(run_dir)
    status = records.read_status(run_dir)
    provenance = records.known_provenance(run_dir)
    settings, code = dict(leaves(config)), code_of(provenance)
    tags = {
        "family": settings.get("loss.name"),
        "aggregation": settings.get("aggregation.reducer") or settings.get("aggregation.mode"),
        "seed": settings.get("seed"),
        "sweep": status.get("sweep"),
        "run_directory": str(run_dir),
        "pgtk.id": status.get("id"),
        "git_commit": " ".join(_commit(*pair) for pair in code) or None,
        "mlflow.source.git.commit": code[0][0] if code else None,  # the column "Version" of MLflow's table
        "resumed": " ".join(start["time"] for start in provenance.get("resumed", [])) or None,
        **_drift(run_dir),
    }
    # In a sweep the folder's name ends with digits that stand for the configuration; here the parameters say it.
    folder = re.sub("-[0-9a-f]{8}$", "", run_dir.name) if status.get("sweep") else run_dir.name
    return Description(
        run_name=settings.get("tracking.run_name") or folder,
        params=flatten(config),
        tags={key: text_of(key, value, _LONGEST_TAG) for key, value in tags.items() if value is not None},
    )


def _commit(commit, changes):
    """The commit in short, with a digest of what was not committed: equal exactly for equal code."""
    digest = f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return f"{(commit or 'none')[:12]}{digest}"


def _drift(run_dir):
    """Tag `drift` with every change in words, and per key `now.KEY` with its newest value."""
    tags, lines = {}, []
    for entry in records.read_drift(run_dir):
        for key, (old, new) in entry["changes"].items():
            lines.append(f"{key}: {text_of(key, old)} -> {text_of(key, new)} (step {entry['step']})")
            tags[f"now.{key}"] = text_of(key, new)
    return {"drift": ", ".join(lines), **tags} if lines else {}


def table_of(run_dir: Path) -> dict[str, list] | None:
    """`columns`, and `data` with a list for each completion, as `mlflow.log_table` writes them; None of none."""
    found, _ = some_completions(completion_files(run_dir), MOST_COMPLETIONS)
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
