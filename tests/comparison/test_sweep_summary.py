"""A sweep in a real MLflow store: its summary run, and the addresses that `pgtk ui` prints."""

import json
import shutil
from pathlib import Path

import pytest
from builders.stores import metric_history
from mlflow import MlflowClient

from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.cli import main
from pgtoolkit.comparison.sweep_summary import begin, publish
from pgtoolkit.comparison.ui import _addresses
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.directory import RunDirectory, lock
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.mlflow_run import MlflowRecord

STEPS = 20


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def sweep(uri: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a sweep of two losses by two seeds, with a run that failed and a job that never began,
    into a folder and into the store."""
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
        overrides = ["trainer.device=cpu", f"loss={loss}", f"seed={seed}"]
        job = {"directory": directory, "status": state, "reason": reason}
        jobs.append({"name": directory, "overrides": overrides, **job})
    jobs.append(
        {"name": "x", "directory": "loss-gspo_seed-3-0123abc3", "status": "pending", "reason": None}
        | {"overrides": ["trainer.device=cpu", "loss=gspo", "seed=3"]}
    )
    (folder / "sweep.json").write_text(
        json.dumps({"name": "by_loss", "command": ["pgtk"], "jobs": jobs})
    )
    return folder


def _save(
    folder: Path, uri: str, loss: str, seed: int, end: float, state: str, reason: str | None
) -> None:
    """Write a run whose reward is 0, and `end` in its last two steps."""
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
        tracker = MlflowRecord(uri, "experiment of one")
        tracker.start(run.path, description_of(run.path))
        run.set_status("running", 0, mlflow=tracker.info)
        for step in range(1, STEPS + 1):
            run.append_metrics(
                step,
                {"reward": end if step > STEPS - 2 else 0.0, "documents_seen": 8 * step, "kl": 0.1},
            )
        run.set_status(state, STEPS, reason)
        tracker.finish(state)


@pytest.mark.slow
def test_ui_prints_the_addresses_of_the_newest_sweep(sweep, uri):
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment of one")
    jobs = client.search_runs(
        [experiment.experiment_id], "tags.sweep = 'by_loss' and tags.seed LIKE '%'"
    )
    lines = _addresses(client, "http://h").splitlines()
    page = f"http://h/#/experiments/{experiment.experiment_id}/runs?"
    view = "workflowType=machine_learning&viewStateShareKey=pgtk"
    # The newest run is a job, which is folded on the pages of its experiment.
    assert lines[0] == "newest sweep  by_loss (5 runs)"
    assert lines[1].startswith("compare       http://h/#/compare-runs?runs=")
    assert all(job.info.run_id in lines[1] for job in jobs)
    assert lines[2].startswith(f"charts        {page}compareRunsMode=CHART")
    # By their time the jobs would be folded below the sweep's run, without curves.
    assert lines[2].endswith("&orderByKey=metrics.%60reward%60&orderByAsc=false")
    assert redact(lines[2]) == lines[2]
    begin("by_loss", uri, "experiment of one", ["loss.name"])
    assert _addresses(client, "http://h").splitlines()[3] == f"table         {page}{view}-by_loss"


def test_compare_takes_a_sweep_by_its_name_and_names_its_jobs_that_never_began(
    sweep, capsys, monkeypatch
):
    monkeypatch.chdir(sweep.parents[2])
    assert main(["compare", "by_loss"]) == 0
    printed = capsys.readouterr().out
    assert "(4 counted)" in printed
    assert "loss-gspo_seed-3-0123abc3: has not begun" in printed


@pytest.mark.slow
def test_the_summary_run_has_the_table_and_reports_and_is_updated_by_the_next(sweep, uri, tmp_path):
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
    of_sweep = client.search_runs([info["experiment_id"]], "tags.sweep = 'by_loss'")
    # Jobs that began before the sweep had a run are nested below it at the end.
    parents = [run.data.tags.get("mlflow.parentRunId") for run in of_sweep]
    assert sorted(parents, key=bool) == [None, *[info["run_id"]] * 5]
    by_name = {run.info.run_name: run.data.params for run in of_sweep}
    assert sorted(by_name)[:2] == ["by_loss", "loss-grpo_seed-0"]
    # As the page that compares runs sorts them: by the numbers of their letters.
    first, second, third = sorted(by_name["loss-grpo_seed-0"])[:3]
    assert (first, second) == ("Sweep/loss.name", "Sweep/seed")
    assert third.islower()
    assert by_name["loss-gspo_seed-1"]["Sweep/loss.name"] == "gspo"
    assert by_name["loss-gspo_seed-1"]["Sweep/seed"] == "1"

    copy = shutil.copytree(sweep, tmp_path / "copy")
    state = json.loads((copy / "sweep.json").read_text())
    for job in state["jobs"]:
        job["status"] = "done"
    (copy / "sweep.json").write_text(json.dumps(state))
    assert publish(copy, uri, "experiment of one") == info
    assert client.get_run(info["run_id"]).info.status == "FINISHED"


def test_a_summary_needs_a_sweep_and_a_store(sweep, tmp_path):
    with pytest.raises(StorageError, match=r"sweep\.json cannot be read"):
        publish(tmp_path, "sqlite:///x.db", "e")
    with pytest.raises(StorageError, match="Sweep by_loss has no summary there"):
        publish(sweep, "http://127.0.0.1:1", "e")
    with pytest.raises(StorageError, match="The jobs of sweep by_loss are nested at its end"):
        begin("by_loss", "http://127.0.0.1:1", "e", ["seed"])


@pytest.mark.slow
def test_a_sweep_that_is_delivered_afterwards_is_the_one_that_was_tracked(
    sweep, uri, tmp_path, capsys
):
    begin("by_loss", uri, "experiment of one", ["loss.name", "seed"])
    publish(sweep, uri, "experiment of one")
    other = f"sqlite:///{tmp_path}/other.db"
    assert main(["sync", str(sweep), f"--uri={other}", "--experiment=experiment of one"]) == 0
    assert _runs_in(other) == _runs_in(uri)
    assert len(_runs_in(other)) == 7  # with the columns of its table
    with lock(sweep, "sweep", "It goes on.", "wait"):
        assert main(["sync", str(sweep / "loss-grpo_seed-0-0123abc0"), f"--uri={other}"]) == 2
    assert "Its own end delivers its summary." in capsys.readouterr().err


def _runs_in(uri: str) -> dict[str, tuple]:
    """Return what the store has of each run, by its name, with the name of its parent."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment of one")
    runs = client.search_runs([experiment.experiment_id])
    name_of = {run.info.run_id: run.info.run_name for run in runs}
    described = {}
    for run in runs:
        tags = {**run.data.tags}
        parent = name_of.get(tags.pop("mlflow.parentRunId", None))
        files = sorted(file.path for file in client.list_artifacts(run.info.run_id))
        numbers = {name: metric_history(uri, run.info.run_id, name) for name in ("reward", "kl")}
        content = (run.data.params, run.data.metrics, tags, numbers, files)
        described[run.info.run_name] = (run.info.status, parent, content)
    views = {key: value for key, value in experiment.tags.items() if "sharedViewState" in key}
    return {**described, "views": views}
