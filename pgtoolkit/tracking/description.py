"""What MLflow is told of a run besides its metrics, read from the run directory alone."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pgtoolkit.runs import files
from pgtoolkit.runs.files import leaves
from pgtoolkit.runs.provenance import code_of
from pgtoolkit.tracking.store import flatten, text_of

_LONGEST_TAG = 4000


@dataclass
class Description:
    """Of one run. identity: the same for a run and its copies; run_id: its MLflow run, as far as it has one,
    in the store of this address.

    start_time: milliseconds since 1970, or None.
    """

    run_name: str
    params: dict[str, str]
    tags: dict[str, str]
    identity: str | None
    run_id: str | None
    store: str | None
    start_time: int | None


def describe(run_dir: Path) -> Description:
    """The description of a run that has written its configuration."""
    config, _ = files.read_config(run_dir)
    status = files.read_status(run_dir)
    provenance = files.known_provenance(run_dir)
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
    started, mlflow = status.get("started"), status.get("mlflow") or {}
    return Description(
        run_name=settings.get("tracking.run_name") or folder,
        params=flatten(config),
        tags={key: text_of(key, value, _LONGEST_TAG) for key, value in tags.items() if value is not None},
        identity=status.get("id"),
        run_id=mlflow.get("run_id"),
        store=mlflow.get("uri"),
        start_time=int(datetime.strptime(started, files.TIME).timestamp() * 1000) if started else None,
    )


def _commit(commit, changes):
    """The commit in short, with a digest of what was not committed: equal exactly for equal code."""
    digest = f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return f"{(commit or 'none')[:12]}{digest}"


def _drift(run_dir):
    """Tag `drift` with every change in words, and per key `now.KEY` with its newest value."""
    tags, lines = {}, []
    for entry in files.read_drift(run_dir):
        for key, (old, new) in entry["changes"].items():
            lines.append(f"{key}: {text_of(key, old)} -> {text_of(key, new)} (step {entry['step']})")
            tags[f"now.{key}"] = text_of(key, new)
    return {"drift": ", ".join(lines), **tags} if lines else {}
