"""Sweeps in an MLflow store: their summary run, and the pages that pgtk ui prints of them."""

import json
import shutil

import pytest
from mlflow import MlflowClient

from pgtoolkit.cli import main
from pgtoolkit.comparison.sweep_summary import publish
from pgtoolkit.comparison.ui import _addresses
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.mlflow_run import MlflowTracker

STEPS = 20


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def sweep(uri, tmp_path_factory):
    """Two losses by two seeds, one more run that failed, and a job that never began; in the store,
    too."""
    folder = tmp_path_factory.mktemp("cwd") / "outputs" / "sweeps" / "by_loss"
    jobs = []
    for loss, seed, end, state in (
        ("grpo", 0, 0.25, "done"),
        ("grpo", 1, 0.5, "done"),
        ("gspo", 0, 0.875, "done"),
        ("gspo", 1, 0.9375, "done"),
        ("gspo", 2, 0.75, "failed"),
    ):
        directory = f"loss-{loss}_seed-{seed}-0123abc{seed}"
        reason = "StorageError: disk full" if state == "failed" else None
        _save(folder / directory, uri, loss, seed, end, state, reason)
        jobs.append({"name": directory, "directory": directory, "status": state, "reason": reason})
    jobs.append(
        {"name": "x", "directory": "loss-gspo_seed-3-0123abc3", "status": "pending", "reason": None}
    )
    (folder / "sweep.json").write_text(
        json.dumps({"name": "by_loss", "command": ["pgtk"], "jobs": jobs})
    )
    return folder


def _save(folder, uri, loss, seed, end, state, reason):
    config = {
        "seed": seed,
        "loss": {"name": loss, "epsilon_low": 0.2 if loss == "grpo" else 3e-4, "epsilon_high": 0.3},
        "aggregation": {"mode": "constant", "divisor": None},
        "trainer": {"max_steps": STEPS, "device": "cpu"},
        "tracking": {"run_name": None},
    }
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        run.write_provenance({"git": [{"commit": "c" * 40, "diff": ""}]})
        run.set_status("running", 0, sweep="by_loss")
        tracker = MlflowTracker(uri, "experiment of one")
        tracker.start(run.path)
        run.set_status("running", 0, mlflow=tracker.info)
        for step in range(1, STEPS + 1):
            run.append_metrics(
                step,
                {"reward": end if step > STEPS - 2 else 0.0, "documents_seen": 8 * step, "kl": 0.1},
            )
        run.set_status(state, STEPS, reason)
        tracker.finish(state)


def page(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_pgtk_ui_prints_the_pages_of_the_newest_sweep(sweep, uri):
    client = MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "experiment of one"]
    jobs = client.search_runs(
        [experiment.experiment_id], "tags.sweep = 'by_loss' and tags.seed LIKE '%'"
    )
    lines = _addresses(client, "http://h").splitlines()
    assert lines[2] == "newest sweep  by_loss (5 runs)"
    assert lines[3].startswith("compare       http://h/#/compare-runs?runs=")
    assert all(job.info.run_id in lines[3] for job in jobs)
    assert lines[4].startswith(
        "charts        "
        f"http://h/#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART"
    )


def test_a_sweep_is_found_by_its_name_and_its_jobs_are_complete(sweep, capsys, monkeypatch):
    monkeypatch.chdir(sweep.parents[2])
    said = page(capsys, "by_loss")
    assert "(4 counted)" in said
    assert "loss-gspo_seed-3-0123abc3: has not begun" in said


def test_the_summary_run_carries_table_and_report_and_is_kept_up_to_date(sweep, uri, tmp_path):
    info = publish(sweep, uri, "experiment of one")
    client = MlflowClient(uri)
    run = client.get_run(info["run_id"])
    assert (run.info.run_name, run.info.status) == ("by_loss", "FAILED")
    assert (run.data.tags["sweep"], run.data.tags["sweep_summary"]) == ("by_loss", "true")
    assert "0.906 ± 0.044" in run.data.tags["mlflow.note.content"]
    names = {file.path for file in client.list_artifacts(info["run_id"])}
    assert names == {
        "sweep.json",
        "comparison.html",
        "comparison.txt",
        "comparison.png",
        "runs.csv",
    }
    found = client.search_runs([info["experiment_id"]], "tags.sweep = 'by_loss'")
    assert sorted(one.info.run_name for one in found)[:2] == ["by_loss", "loss-grpo_seed-0"]

    copy = shutil.copytree(sweep, tmp_path / "copy")
    for job in (content := json.loads((copy / "sweep.json").read_text()))["jobs"]:
        job["status"] = "done"
    (copy / "sweep.json").write_text(json.dumps(content))
    assert publish(copy, uri, "experiment of one") == info
    assert client.get_run(info["run_id"]).info.status == "FINISHED"


def test_a_summary_needs_a_sweep_and_a_store(sweep, tmp_path):
    with pytest.raises(StorageError, match=r"sweep\.json cannot be read"):
        publish(tmp_path, "sqlite:///x.db", "e")
    with pytest.raises(StorageError, match="Sweep by_loss has no summary there"):
        publish(sweep, "http://127.0.0.1:1", "e")
