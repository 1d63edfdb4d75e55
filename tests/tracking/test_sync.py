"""`pgtk sync` delivers the rows of a run directory to MLflow once; loads of the machine follow.

The numbers are read back from the store.
"""

import time

import pytest
from builders.refusals import refusal
from builders.stores import CONFIG, append_steps, metric_history, start_tracker
from mlflow import MlflowClient

from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.assembly.sync import sync
from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import read_status
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.tracking.mlflow_run import MlflowRecord


@pytest.mark.slow
def test_sync_delivers_the_missing_rows_of_a_killed_run_once(uri, run):
    tracker = start_tracker(uri, run, experiment="killed")
    append_steps(run, 1, 3)
    tracker.finish("failed")
    run.set_status("running", 3)  # as SIGKILL leaves it
    append_steps(run, 4, 9)
    with pytest.raises(ConfigError, match="needs to be free"):
        sync(run.path, uri)
    run.close()
    assert "6 rows delivered" in sync(run.path)  # the store is known from status.json
    assert "nothing was missing" in sync(run.path)
    assert "9 rows delivered" in sync(run.path, f"sqlite:///{run.path.parent}/other.db", "copies")
    saved = MlflowClient(uri).get_run(tracker.info["run_id"])
    assert metric_history(uri, saved.info.run_id) == [(step, step / 8) for step in range(1, 10)]
    assert saved.info.status == "KILLED"
    assert saved.info.end_time == round(1000 * read_metrics(run.metrics_path)["time"][-1])


def test_sync_of_a_run_without_mlflow_needs_a_store_and_makes_one_run_there(uri, run, capsys):
    run.write_config(CONFIG | {"tracking": {"name": "none", "experiment": None}}, [])
    append_steps(run, 1, 5)
    run.set_status("done", 5)
    run.close()
    assert (
        "needs a store (got tracking=none). The run was made without MLflow. Use --uri="
    ) in refusal(capsys, "sync", run.path)
    for message in ("5 rows delivered", "nothing was missing"):
        assert main(["sync", str(run.path), "--uri", uri, "--experiment", "afterwards"]) == 0
        assert message in capsys.readouterr().out
    client = MlflowClient(uri)
    (saved,) = client.search_runs([client.get_experiment_by_name("afterwards").experiment_id])
    assert saved.info.status == "FINISHED"
    assert saved.info.run_name == "run"
    assert metric_history(uri, saved.info.run_id) == [(step, step / 8) for step in range(1, 6)]


def test_sync_delivers_the_other_runs_where_one_is_damaged(uri, tmp_path, capsys):
    for name in ("1-first", "2-damaged", "3-last"):
        with RunDirectory(tmp_path / name) as run:
            run.write_config(CONFIG, [])
            append_steps(run, 1, 2)
            run.set_status("done", 2)
    (tmp_path / "2-damaged" / "status.json").write_text("{")
    assert main(["sync", str(tmp_path), f"--uri={uri}"]) == 6
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert "2-damaged/status.json is damaged (" in line
    assert "1-first: 2 rows" in output.out
    assert "2-damaged" not in output.out
    assert "3-last: 2 rows" in output.out


def test_a_resumed_run_continues_the_curves_of_the_load_of_the_machine(uri, run, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    run.write_config(CONFIG, [])
    num_values_before = 0
    for _ in range(2):
        run.set_status("running", 0)
        tracker = MlflowRecord(uri, "tests", system_metrics=True)
        tracker.start(run.path, description_of(run.path))
        time.sleep(1)
        assert tracker.finish("done") == []
        values = metric_history(
            uri, tracker.info["run_id"], "system/system_memory_usage_percentage"
        )
        assert len(values) > num_values_before
        assert [step for step, _ in values] == list(range(len(values)))
        assert all(0 < value < 100 for _, value in values)
        num_values_before = len(values)


def test_a_run_whose_status_names_the_mlflow_run_of_another_gets_a_new_one(uri, run, tmp_path):
    """A directory in which two runs were trained has such a status."""
    first = start_tracker(uri, run, experiment="mixed")
    append_steps(run, 1, 8)
    first.finish("done")
    with RunDirectory(tmp_path / "other") as other:
        other.set_status("running", 0, mlflow=first.info)
        second = start_tracker(uri, other, experiment="mixed")
        append_steps(other, 1, 10)
        assert second.finish("done") == []
    assert second.info["run_id"] != first.info["run_id"]
    assert len(metric_history(uri, first.info["run_id"])) == 8
    assert metric_history(uri, second.info["run_id"]) == [(step, step / 8) for step in range(1, 11)]
    assert (
        MlflowClient(uri).get_run(first.info["run_id"]).data.tags["pgtk.id"]
        != read_status(other.path)["id"]
    )
