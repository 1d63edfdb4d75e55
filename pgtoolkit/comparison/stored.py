"""MLflow stores: runs read from one as those on the disk are, and the summary run of a sweep written to one."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import needed_for
from pgtoolkit.config.paths import absolute_uri
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.find import Run, find_runs, is_run, read_run
from pgtoolkit.runs.records import read_sweep
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.store import client_of, open_store, raising_storage_errors, require_store, search_literal

_FILES = (
    *("config.yaml", "provenance.json", "data.json", "drift.jsonl"),
    *("status.json", "metrics.jsonl", "evaluations.jsonl"),
)
_MOST_RUNS = 50_000  # as many as MLflow gives at once


def stored_runs(uri: str, names: Sequence[str], metrics: Collection[str] | None) -> list[Run]:
    """The runs of the experiments or sweeps of these names, in the order they were started.

    metrics: those that are read, see `read_metrics`.
    Raises ConfigError for a name without runs, StorageError if the store does not answer.
    """
    store = absolute_uri(uri)
    require_store(store, f"--uri={uri}", "--uri=sqlite:///PATH/mlflow.db or --uri=http://HOST:PORT")
    with raising_storage_errors(store, "Nothing was compared. Start the server or use another --uri."):
        client = client_of(store)
        experiments = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
        stored = {}
        for name in names:
            ids = [experiments[name]] if name in experiments else list(experiments.values())
            condition = "" if name in experiments else f"tags.sweep = {search_literal(name)}"
            runs = client.search_runs(ids, condition, max_results=_MOST_RUNS)
            if not runs:
                raise ConfigError(
                    f"pgtk compare {name} needs a sweep or an experiment of {redact(store)} (got no run of that name). "
                    f"It has the experiments {', '.join(experiments)}. Use one of them."
                )
            stored |= {run.info.run_id: run for run in runs if "sweep_summary" not in run.data.tags}
        ordered = sorted(stored.values(), key=lambda run: (run.info.start_time, run.info.run_name))
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            return list(pool.map(lambda run: _read(client, run, Path(folder), metrics), ordered))


def _read(client, run, top: Path, metrics: Collection[str] | None) -> Run:
    """The run as the store has it; of one that goes on the metrics.jsonl is not there yet."""
    info, goes_on = run.info, run.info.status == "RUNNING"
    folder = top / info.run_id
    folder.mkdir()
    # A resumed run that goes on still has the files of the stop before.
    wanted = set(_FILES) - ({"status.json", "metrics.jsonl", "evaluations.jsonl"} if goes_on else set())
    for name in wanted & {file.path for file in client.list_artifacts(info.run_id)}:
        client.download_artifacts(info.run_id, name, str(folder))
    if is_run(folder):
        read = read_run(folder, metrics)
    else:
        read = Run(folder, "", "unreadable", "its config.yaml is not in the store; pgtk sync delivers it")
    read.path, read.name = f"{info.run_name} ({info.run_id})", info.run_name
    read.state = "running" if goes_on and read.state == "killed" else read.state
    return read


def publish(sweep_folder: Path, uri: str | None, experiment: str) -> dict[str, str]:
    """Make the summary run of the sweep in this folder, or bring it up to date; returns uri, experiment_id, run_id.

    It is named after the sweep and has the tags `sweep` and `sweep_summary`; its artifacts are sweep.json and the
    comparison as page, table and picture, its description is the comparison as the terminal shows it. While no job
    has a reward, there is sweep.json alone, and the description says why.
    Raises StorageError for a folder without a whole sweep.json, or a store that does not answer.
    """
    if not (sweep := read_sweep(sweep_folder)):
        raise StorageError(f"{sweep_folder}/sweep.json cannot be read: there is none")
    name, store = sweep["name"], absolute_uri(uri)
    with (
        tempfile.TemporaryDirectory() as temporary,
        raising_storage_errors(store, f"Sweep {name} has no summary there; its folder has it all."),
    ):
        note = _write_report(sweep_folder, name, Path(temporary))
        client, experiment_id = open_store(store, experiment)
        known = f"tags.sweep = {search_literal(name)} and tags.sweep_summary = 'true'"
        run = next(iter(client.search_runs([experiment_id], known, max_results=1)), None)
        if run is None:
            tags = {"sweep": name, "sweep_summary": "true"}
            run = client.create_run(experiment_id, run_name=name, tags=tags)
        client.set_tag(run.info.run_id, "mlflow.note.content", note)
        for file in (sweep_folder / "sweep.json", *sorted(Path(temporary).iterdir())):
            client.log_artifact(run.info.run_id, str(file))
        finished = all(job["status"] == "done" for job in sweep["jobs"])
        client.set_terminated(run.info.run_id, status="FINISHED" if finished else "FAILED")
    return {"uri": redact(store), "experiment_id": experiment_id, "run_id": run.info.run_id}


def _write_report(sweep_folder: Path, name: str, folder: Path) -> str:
    """The comparison as files; returns it in Markdown."""
    from pgtoolkit.comparison.reports import write
    from pgtoolkit.comparison.terminal import render_comparison

    try:
        compared = compare(find_runs([str(sweep_folder)], needed_for(None)))
    except ConfigError as error:
        return f"No comparison yet: {error}"
    text = render_comparison(compared)
    (folder / "comparison.txt").write_text(text + "\n", encoding="utf-8")
    for file in ("comparison.html", "comparison.png", "runs.csv"):
        write(compared, file[-4:].strip("."), folder / file, f"pgtk compare {name}")
    return f"```\n{text}\n```"
