"""The description of a run that trackers get: its keys that change what is learned, as typed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.errors import StorageError
from pgtoolkit.runs import records
from pgtoolkit.runs.provenance import code_of, commit_text
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.description import LONGEST_TAG, Dataset, Description
from pgtoolkit.tracking.store import parameter_name, text_of


def description_of(run_dir: Path, equation: Sequence[str] = ()) -> Description:
    """Return the description of a run that has written its configuration.

    equation: the lines that define its loss, where they are known.
    """
    config, overrides = records.read_config(run_dir)
    chosen = records.chosen_files(config, overrides)
    status = records.read_status(run_dir)
    provenance = records.known_provenance(run_dir)
    settings = as_typed(dict(leaves(config)))
    code = code_of(provenance)
    tags = {
        "family": settings.get("loss.name"),
        "aggregation": settings.get("aggregation.reducer") or settings.get("aggregation.mode"),
        "seed": settings.get("seed"),
        "sweep": status.get("sweep"),
        "parent": status.get("parent"),
        "run_directory": str(run_dir),
        "pgtk.id": status.get("id"),
        "git_commit": " ".join(commit_text(*pair) for pair in code) or None,
        # MLflow's table shows it in the column "Version".
        "mlflow.source.git.commit": code[0][0] if code else None,
        "resumed": " ".join(start["time"] for start in provenance.get("resumed", [])) or None,
    }
    run_name = str(settings.get("tracking.run_name") or run_dir.name)
    if status.get("sweep") and not settings.get("tracking.run_name"):
        # The folders of a sweep end with a digest of the configuration, which the parameters show.
        run_name = re.sub("-[0-9a-f]{8}$", "", run_dir.name)
    return Description(
        run_name=run_name,
        settings={**_typed_settings(config), **chosen},
        params=flatten(config) | chosen,
        tags={
            key: text_of(key, value, LONGEST_TAG)
            for key, value in tags.items()
            if value is not None
        },
        dataset=_dataset_of(config, run_dir),
        note=redact("\n".join(["```", *equation, "```"])) if equation else "",
    )


def _dataset_of(config: JsonObject, run_dir: Path) -> Dataset | None:
    """Return what a run trains on; None for a configuration without a task, and where data.json,
    which has the digests, is damaged."""
    try:
        data = records.read_data(run_dir)
    except StorageError:
        return None
    is_recorded = config.get("rollout", {}).get("name") == "recorded"
    group = "rollout" if is_recorded else "task"
    settings = config.get(group)
    if not settings:
        return None
    path = settings.get("path")
    made_from = data.get(f"{group}.path") or [settings, config.get("seed")]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:8]
    name = settings.get("name") if path is None else Path(str(path)).name
    return Dataset(str(name), digest, None if path is None else redact(str(path)))


def _typed_settings(config: dict) -> dict[str, str | float]:
    """Return the keys that change what is learned: numbers and truth values, the rest as texts."""
    settings = {}
    for key, value in leaves(config):
        if changes_learning(key, config):
            settings[key] = value if isinstance(value, int | float) else text_of(key, value)
    return settings


def flatten(config: dict) -> dict[str, str]:
    """Return a nested configuration as MLflow's parameters, written as overrides are.

    Long texts are cut, and keys that do not change what is learned are left out. The artifact
    config.yaml has all of them.
    """
    settings = as_typed(
        {key: value for key, value in leaves(config) if changes_learning(key, config)}
    )
    return {parameter_name(key): text_of(key, value) for key, value in settings.items()}
