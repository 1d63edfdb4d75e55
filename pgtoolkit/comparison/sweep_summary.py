"""The run of a sweep in an MLflow store: its jobs are nested below it, and it has their summary."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import needed_for
from pgtoolkit.comparison.reports import write
from pgtoolkit.comparison.text_report import render_comparison
from pgtoolkit.config.keys import OPTION_KEYS
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.find import find_runs
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.store import (
    NOTE,
    PARENT,
    jobs_of_sweep,
    offer_view,
    open_store,
    parameter_name,
    raising_storage_errors,
    run_of_sweep,
    view_of,
)
from pgtoolkit.tracking.store_address import absolute_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient


def publish(sweep_folder: Path, uri: str | None, experiment: str) -> dict[str, str]:
    """Make the summary run of the sweep in this folder, or bring it up to date. Return its uri,
    experiment_id and run_id.

    It is named after the sweep and has the tags `sweep` and `sweep_summary`. Its artifacts are
    sweep.json and the comparison as page, table and picture; its description is the comparison as
    the terminal shows it. While no job has a reward, the only artifact is sweep.json, and the
    description says why. Raises StorageError for a folder without a complete sweep.json, or a store
    that does not answer.
    """
    sweep = read_sweep(sweep_folder)
    if not sweep:
        raise StorageError(f"{sweep_folder}/sweep.json cannot be read: there is none")
    name = sweep["name"]
    store = absolute_uri(uri)
    with (
        tempfile.TemporaryDirectory() as temporary,
        raising_storage_errors(store, f"Sweep {name} has no summary there; its folder has it all."),
    ):
        note = _write_report(sweep_folder, name, Path(temporary))
        client, experiment_id = open_store(store, experiment)
        run_id = _run_of(client, experiment_id, name)
        keys = _varying(sweep["jobs"])
        offer_view(client, experiment_id, view_of(name), keys, name)
        _complete_jobs(client, experiment_id, name, run_id, keys)
        client.set_tag(run_id, NOTE, note)
        for file in (sweep_folder / "sweep.json", *sorted(Path(temporary).iterdir())):
            client.log_artifact(run_id, str(file))
        finished = all(job["status"] in ("done", "pruned") for job in sweep["jobs"])
        client.set_terminated(run_id, status="FINISHED" if finished else "FAILED")
    return {"uri": redact(store), "experiment_id": experiment_id, "run_id": run_id}


def begin(name: str, uri: str | None, experiment: str, keys: list[str]) -> None:
    """Make the run of a sweep before its jobs, which nest themselves below it.

    name: of the sweep. keys: those that vary, the columns of its table.
    Raises StorageError for a store that does not answer.
    """
    store = absolute_uri(uri)
    with raising_storage_errors(store, f"The jobs of sweep {name} are nested at its end."):
        client, experiment_id = open_store(store, experiment)
        client.update_run(_run_of(client, experiment_id, name), status="RUNNING")
        offer_view(client, experiment_id, view_of(name), keys, name)


def _run_of(client: MlflowClient, experiment_id: str, name: str) -> str:
    """Return the id of a sweep's run, which is made where there is none."""
    run = run_of_sweep(client, experiment_id, name)
    if run is None:
        tags = {"sweep": name, "sweep_summary": "true"}
        run = client.create_run(experiment_id, run_name=name, tags=tags)
    return run.info.run_id


def _varying(jobs: list[dict]) -> list[str]:
    """Return the names of MLflow's parameters that jobs of a sweep set to different values."""
    values: dict[str, list[str]] = {}
    for job in jobs:
        for override in job.get("overrides", []):
            key, _, value = override.partition("=")
            values.setdefault(key.lstrip("+"), []).append(value)
    return [
        parameter_name(OPTION_KEYS.get(key, key))
        for key, of_jobs in values.items()
        if len(of_jobs) < len(jobs) or len({*of_jobs}) > 1
    ]


def _complete_jobs(
    client: MlflowClient, experiment_id: str, name: str, run_id: str, keys: list[str]
) -> None:
    """Give the jobs of a sweep what they could not know when they began.

    They are nested below its run, which was not there where the store did not answer the sweep, or
    where they trained before runs were nested. The parameters that differ between jobs stand a
    second time as Sweep/KEY: MLflow's page that compares runs sorts names, capital letters first.
    """
    from mlflow.entities import Param, RunTag

    token = None
    while True:
        jobs = client.search_runs([experiment_id], jobs_of_sweep(name), page_token=token)
        for job in jobs:
            known = job.data.params
            params = [
                Param(f"Sweep/{key}", known[key])
                for key in keys
                if key in known and f"Sweep/{key}" not in known
            ]
            tags = [] if PARENT in job.data.tags else [RunTag(PARENT, run_id)]
            if params or tags:
                client.log_batch(job.info.run_id, params=params, tags=tags)
        token = jobs.token
        if not token:
            return


def _write_report(sweep_folder: Path, name: str, folder: Path) -> str:
    """Write the comparison's files into the folder.

    Return the comparison in Markdown, or a sentence on why there is none.
    """
    try:
        compared = compare(find_runs([str(sweep_folder)], needed_for(None)))
    except ConfigError as error:
        return f"No comparison yet: {error}"
    text = render_comparison(compared)
    (folder / "comparison.txt").write_text(text + "\n", encoding="utf-8")
    for file in ("comparison.html", "comparison.png", "runs.csv"):
        kind = {"comparison.html": "html", "comparison.png": "figure"}.get(file, "runs_csv")
        write(compared, kind, folder / file, f"pgtk compare {name}")
    return f"```\n{text}\n```"
