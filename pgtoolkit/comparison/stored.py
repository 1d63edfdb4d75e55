"""Runs of an MLflow store, by experiment or by sweep: their files are downloaded and read as those on the disk are."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pgtoolkit.config.paths import absolute_uri
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import Run, is_run, read_run
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.store import client_of, raising_storage_errors, require_store, search_literal

_FILES = ("config.yaml", "provenance.json", "status.json", "metrics.jsonl", "evaluations.jsonl")
_MOST_RUNS = 50_000  # as many as MLflow gives at once


def stored_runs(uri: str, names: Sequence[str]) -> list[Run]:
    """The runs of the experiments or sweeps of these names, in the order they were started.

    Raises ConfigError for a name without runs, StorageError if the store does not answer.
    """
    store = absolute_uri(uri)
    require_store(store, f"--uri={uri}", "--uri=sqlite:///PATH/mlflow.db or --uri=http://HOST:PORT")
    with raising_storage_errors(store, "Nothing was compared. Start the server or use another --uri."):
        client = client_of(store)
        experiments = {found.name: found.experiment_id for found in client.search_experiments()}
        found = {}
        for name in names:
            runs = _found(client, experiments, name)
            if not runs:
                raise _nothing(client, experiments, store, name)
            found |= {run.info.run_id: run for run in runs}
        ordered = sorted(found.values(), key=lambda run: (run.info.start_time, run.info.run_name))
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            return list(pool.map(lambda run: _read(client, run, Path(folder)), ordered))


def _found(client, experiments, name):
    ids = [experiments[name]] if name in experiments else list(experiments.values())
    condition = "" if name in experiments else f"tags.sweep = {search_literal(name)}"
    runs = client.search_runs(ids, condition, max_results=_MOST_RUNS)
    return [run for run in runs if "sweep_summary" not in run.data.tags]


def _nothing(client, experiments, store, name):
    runs = client.search_runs(list(experiments.values()), max_results=_MOST_RUNS)
    sweeps = dict.fromkeys(run.data.tags["sweep"] for run in runs if "sweep" in run.data.tags)
    known = [
        f"{what} {', '.join(names)}" for what, names in (("sweeps", sweeps), ("experiments", experiments)) if names
    ]
    return ConfigError(
        f"pgtk compare {name} needs a sweep or an experiment of {redact(store)} (got no run of that name). "
        f"It has the {' and the '.join(known) or 'experiments of no run'}. Use one of them."
    )


def _read(client, run, top: Path) -> Run:
    """The run as the store has it; of one that goes on, whose metrics.jsonl is not there yet, the latest values."""
    info, goes_on = run.info, run.info.status == "RUNNING"
    folder = top / info.run_id
    folder.mkdir()
    # A resumed run that goes on still has the files of the stop before.
    wanted = set(_FILES) - ({"status.json", "metrics.jsonl", "evaluations.jsonl"} if goes_on else set())
    for name in wanted & {file.path for file in client.list_artifacts(info.run_id)}:
        client.download_artifacts(info.run_id, name, str(folder))
    latest = [metric for metric in run.data.to_proto().metrics if "/" not in metric.key]
    if goes_on and latest:
        newest = max(latest, key=lambda metric: metric.step)
        row = {"step": newest.step, "time": newest.timestamp / 1000} | {metric.key: metric.value for metric in latest}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    if is_run(folder):
        read = read_run(folder)
    else:
        read = Run(folder, "", "unreadable", "its config.yaml is not in the store; pgtk sync delivers it")
    read.path, read.name = f"{info.run_name} ({info.run_id})", info.run_name
    read.state = "running" if goes_on and read.state == "killed" else read.state
    return read
