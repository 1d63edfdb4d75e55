"""The summary run of a sweep in an MLflow store."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import needed_for
from pgtoolkit.comparison.reports import write
from pgtoolkit.comparison.text_report import render_comparison
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.find import find_runs
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.store import open_store, raising_storage_errors, search_literal
from pgtoolkit.tracking.store_address import absolute_uri


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
        condition = f"tags.sweep = {search_literal(name)} and tags.sweep_summary = 'true'"
        run = next(iter(client.search_runs([experiment_id], condition, max_results=1)), None)
        if run is None:
            tags = {"sweep": name, "sweep_summary": "true"}
            run = client.create_run(experiment_id, run_name=name, tags=tags)
        client.set_tag(run.info.run_id, "mlflow.note.content", note)
        for file in (sweep_folder / "sweep.json", *sorted(Path(temporary).iterdir())):
            client.log_artifact(run.info.run_id, str(file))
        finished = all(job["status"] in ("done", "pruned") for job in sweep["jobs"])
        client.set_terminated(run.info.run_id, status="FINISHED" if finished else "FAILED")
    return {"uri": redact(store), "experiment_id": experiment_id, "run_id": run.info.run_id}


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
