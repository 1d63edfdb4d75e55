"""A run's completions as a table of MLflow, on a real store, by MLflow's own reader."""

import math

import mlflow
from builders.stores import start, train
from mlflow import MlflowClient

from pgtoolkit.runs.completions import FOLDER, CompletionRow, write_completions
from pgtoolkit.tracking import description
from pgtoolkit.tracking.description import TABLE, table_of
from pgtoolkit.tracking.mlflow_run import sync


def row(step, name, reward=0.5, completion="4", **more):
    return CompletionRow(step, name, "2+2=", completion, reward, **more)


def write(run, name, rows):
    write_completions(run.path / FOLDER / f"{name}.parquet", rows)


def loaded(monkeypatch, uri, tracker):
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", uri)
    experiment = tracker.info["experiment_id"]
    name = MlflowClient(uri).get_experiment(experiment).name
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", name)
    return mlflow.load_table(TABLE, run_ids=[tracker.info["run_id"]])


def test_mlflow_has_them_as_a_table_that_grows_with_the_run(uri, run, monkeypatch):
    write(run, "steps_000001-000100", [row(1, "a", advantage=0.25, rewards={"form": 1.0}), row(2, "b", math.inf)])
    tracker = start(uri, run)
    train(run, 1, 2)
    assert tracker.finish("interrupted") == []
    run.set_status("interrupted", 2)
    found = loaded(monkeypatch, uri, tracker)
    assert found["name"].tolist() == ["a", "b"]
    assert found["advantage"].tolist()[0] == 0.25
    assert found["reward/form"].tolist()[0] == 1.0
    write(run, "evaluation_held_out_000002", [row(2, "p", completion="\x1b[2J" + "x" * 3000)])
    run.close()
    for _ in range(2):  # delivered again, nothing is doubled
        sync(run.path)
        found = loaded(monkeypatch, uri, tracker)
        assert found["set"].tolist() == ["held_out", "training", "training"]
    assert found["completion"][0].startswith("<U+001B>[2Jxxx")
    assert len(found["completion"][0]) < 2100
    tags = MlflowClient(uri).get_run(tracker.info["run_id"]).data.tags
    assert tags["mlflow.loggedArtifacts"] == '[{"path": "completions.json", "type": "table"}]'


def test_the_table_is_no_larger_than_a_page_can_show(run, monkeypatch):
    assert table_of(run.path) is None
    monkeypatch.setattr(description, "MOST_COMPLETIONS", 10)
    write(run, "steps_000001-000100", [row(step, f"p{step}") for step in range(1, 41)])
    write(run, "evaluation_a_000000", [row(0, f"q{i}") for i in range(4)])
    found = table_of(run.path)
    assert [(line[0], line[1]) for line in found["data"]] == [
        *(("a", 0) for _ in range(4)),
        *(("training", step) for step in (8, 16, 24, 32, 40)),
    ]
    assert len(found["data"][0]) == len(found["columns"])


def test_completions_that_cannot_be_read_are_said_to_be_missing_and_hide_nothing_else(uri, run):
    write(run, "steps_000001-000100", [row(1, "a")])
    (run.path / FOLDER / "steps_000001-000100.parquet").write_bytes(b"damaged")
    tracker = start(uri, run)
    train(run, 1, 1)
    assert tracker.finish("done") == ["completions"]
    assert MlflowClient(uri).get_run(tracker.info["run_id"]).info.status == "FINISHED"
