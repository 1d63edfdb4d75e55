"""MLflow on real stores and servers: rows arrive once, and no failure of a store stops training."""

import contextlib
import hashlib
import json
import logging
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.processes import free_port
from builders.rights import without_rights_of_root
from builders.runs import config_of
from builders.runs import run as train_run
from builders.stores import CONFIG, append_steps, metric_history, start_tracker
from mlflow import MlflowClient

from pgtoolkit.assembly.run_description import _dataset_of, description_of, flatten
from pgtoolkit.assembly.sync import sync
from pgtoolkit.comparison.sweep_summary import begin
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.plan import equation
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import read_status
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.report import program
from pgtoolkit.tracking import record
from pgtoolkit.tracking.description import Dataset
from pgtoolkit.tracking.mlflow_run import MlflowRecord
from pgtoolkit.tracking.signals import StopSignal
from pgtoolkit.tracking.store import client_of, open_store

CONFIG_WITH_NAME = {
    "seed": 3,
    "loss": {"name": "gspo", "epsilon_low": 3e-4},
    "aggregation": {"mode": "constant", "divisor": None, "reducer": None},
    "fp32": True,
    "o": {"a@b": 1},
    "tracking": {"run_name": "name", "uri": None},
    "trainer": {"max_steps": 500, "keep_checkpoints": 2},
}


def test_the_configuration_and_tags_of_a_run_arrive(uri, run):
    run.write_provenance(
        {"git": [{"commit": "c" * 40, "diff": ""}, {"commit": "d" * 40, "diff": "+line"}]}
    )
    tracker = start_tracker(uri, run, config=CONFIG_WITH_NAME, sweep="a sweep")
    assert tracker.finish("done") == []
    saved = MlflowClient(uri).get_run(tracker.info["run_id"])
    assert saved.info.run_name == "name"
    assert saved.data.params == {
        "seed": "3",
        "loss.name": "gspo",
        "loss.epsilon_low": "0.0003",
        "aggregation.mode": "constant",
        "aggregation.divisor": "null",
        "aggregation.reducer": "null",
        "fp32": "true",
        "o.a_b": "1",
        "trainer.max_steps": "500",
    }
    tags = {
        key: value
        for key, value in saved.data.tags.items()
        if key not in ("pgtk.id", "mlflow.runName")
    }
    assert tags == {
        "family": "gspo",
        "aggregation": "constant",
        "seed": "3",
        "sweep": "a sweep",
        "git_commit": "cccccccccccc dddddddddddd+" + hashlib.sha256(b"+line").hexdigest()[:8],
        "mlflow.source.git.commit": "c" * 40,
        "run_directory": str(run.path),
    }


def test_a_run_has_its_data_set_and_equation_and_is_nested_below_its_sweep(uri, run):
    begin("rates", uri, "tests", ["optimizer.learning_rate"])
    config = config_of("task.num_digits=3")
    run.write_config(plain_config(config), [])
    run.set_status("running", 0, sweep="rates")
    for _ in range(2):  # a resume changes none of it
        tracker = MlflowRecord(uri, "tests")
        tracker.start(run.path, description_of(run.path, equation(config)))
        tracker.finish("interrupted")
    client = MlflowClient(uri)
    saved = client.get_run(tracker.info["run_id"])
    assert saved.data.tags["mlflow.note.content"].startswith("```\ngspo, ")
    assert "w_t = " in saved.data.tags["mlflow.note.content"]
    client.delete_tag(saved.info.run_id, "mlflow.note.content")
    run.close()
    sync(run.path, uri)
    assert client.get_run(saved.info.run_id).data.tags == saved.data.tags
    parent = client.get_run(saved.data.tags["mlflow.parentRunId"])
    assert (parent.info.run_name, parent.info.status) == ("rates", "RUNNING")
    (data,) = saved.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.source_type) == ("reverse", "code")
    tags = client.get_experiment(saved.info.experiment_id).tags
    columns = json.loads(tags["mlflow.sharedViewState.pgtk-rates"])["selectedColumns"]
    assert columns == [
        "params.`optimizer.learning_rate`",
        "metrics.`reward`",
        "metrics.`exact_match`",
        "metrics.`loss`",
    ]


def test_prompts_of_other_contents_are_another_data_set(tmp_path):
    config = {"seed": 1, "task": {"name": "prompts", "path": "/data/math.jsonl"}, "rollout": {}}

    def dataset_of(config: dict, digest: str) -> Dataset:
        data = {"task.path": {"math.jsonl": {"bytes": 3, "sha256": digest}}}
        (tmp_path / "data.json").write_text(json.dumps(data))
        return _dataset_of(config, tmp_path)

    first = dataset_of(config, "ab")
    assert (first.name, first.source) == ("math.jsonl", "/data/math.jsonl")
    assert dataset_of(config, "cd").digest != first.digest
    # The seed chooses among prompts that are made, not the contents of a file.
    assert dataset_of({**config, "seed": 2}, "ab") == first


def test_the_metrics_and_files_of_a_run_arrive_and_its_first_end_stays(uri, run):
    run.write_provenance({"git": []})
    tracker = start_tracker(uri, run)
    append_steps(run, 1, 500)
    (run.path / "curves.png").write_text("picture")
    assert tracker.finish("done") == []
    assert tracker.finish("failed") == []

    saved = MlflowClient(uri).get_run(tracker.info["run_id"])
    assert saved.info.status == "FINISHED"
    assert saved.info.end_time == round(1000 * read_metrics(run.metrics_path)["time"][-1])
    assert metric_history(uri, saved.info.run_id) == [(step, step / 8) for step in range(1, 501)]
    main_name = metric_history(uri, saved.info.run_id, "Main/2 loss")
    assert main_name == metric_history(uri, saved.info.run_id)
    by_documents = metric_history(uri, saved.info.run_id, "loss_by_documents")
    assert by_documents == [(64 * step, step / 8) for step in range(1, 501)]
    assert "time" not in saved.data.metrics
    artifacts = (
        Path(uri.removeprefix("sqlite:///")).parent / "artifacts" / saved.info.run_id / "artifacts"
    )
    assert (artifacts / "curves.png").read_text() == "picture"
    assert {path.name for path in artifacts.iterdir()} == {
        "config.yaml",
        "overrides.yaml",
        "provenance.json",
        "status.json",
        "metrics.jsonl",
        "curves.png",
    }


def test_a_resumed_run_has_each_step_once_and_the_parameters_of_its_start(uri, run):
    tracker = start_tracker(uri, run)
    append_steps(run, 1, 10)
    tracker.finish("interrupted")
    run_id = tracker.info["run_id"]
    # The checkpoint is of step 7, so that 8 to 10 are trained a second time.
    run.drop_metrics_after(7)
    tracker = start_tracker(uri, run, config=CONFIG | {"seed": 2})
    assert tracker.info["run_id"] == run_id
    assert MlflowClient(uri).get_run(run_id).info.status == "RUNNING"
    append_steps(run, 8, 15)
    tracker.finish("done")
    assert metric_history(uri, run_id) == [(step, step / 8) for step in range(1, 16)]
    assert len(metric_history(uri, run_id, "reward_by_documents")) == 15
    saved = MlflowClient(uri).get_run(run_id)
    assert saved.data.params["seed"] == "1"
    assert saved.data.tags["seed"] == "2"


def test_ten_metrics_have_charts_that_stand_first_and_the_held_out_share_is_one(uri, run):
    numbers = ["reward", "exact_match", "loss", "kl_new_old", "clipped_ratio_fraction"]
    numbers += ["grad_norm", "completion_length", "truncated_fraction", "tokens_per_second"]
    tracker = start_tracker(uri, run)
    run.append_metrics(1, {**dict.fromkeys([*numbers, "entropy"], 0.5), "lag": 1.0})
    evaluation = {"step": 1, "time": 1.0, "set": "held_out", "pass@1": 0.25, "pass@2": 0.3}
    run.append_evaluations([evaluation])
    tracker.finish("done")
    saved = MlflowClient(uri).get_run(tracker.info["run_id"]).data.metrics
    main = {name: value for name, value in saved.items() if name.startswith("Main/")}
    held_out = {"Main/5 held_out pass_at_1": 0.25}
    numbers.insert(5, "")
    expected = {f"Main/{place} {name}": 0.5 for place, name in enumerate(numbers) if name}
    assert main == expected | held_out


def test_non_finite_values_never_reach_mlflow(uri, run):
    run.metrics_path.write_text(
        '{"step": 1, "time": 5, "loss": NaN, "reward": Infinity, "kl_new_old": 0.5}\n'
    )
    tracker = start_tracker(uri, run)
    tracker.finish("done")
    assert MlflowClient(uri).get_run(tracker.info["run_id"]).data.metrics == {
        "kl_new_old": 0.5,
        "Main/3 kl_new_old": 0.5,
    }


@pytest.mark.slow
def test_rows_that_a_process_appended_right_before_it_ended_are_delivered(uri, run):
    code = (
        "import sys; from pgtoolkit.tracking.mlflow_run import MlflowRecord\n"
        "from pgtoolkit.assembly.run_description import description_of\n"
        "from pgtoolkit.runs.directory import RunDirectory\n"
        "run = RunDirectory(sys.argv[2]); t = MlflowRecord(sys.argv[1], 'tests')\n"
        "run.write_config({}, []); t.start(run.path, description_of(run.path))\n"
        "print(t.info['run_id'], flush=True)\n"
        "for step in range(1, 51): run.append_metrics(step, {'loss': step / 8})\n"
        "raise SystemExit(3)"
    )
    run.close()
    process = subprocess.run(
        [sys.executable, "-c", code, uri, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.returncode == 3
    run_id = process.stdout.strip()
    assert metric_history(uri, run_id) == [(step, step / 8) for step in range(1, 51)]


def test_a_server_that_is_down_is_refused_at_once(run):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=r"tracking\.uri=http://\*\*\*@127.*refused\. Training has not"
    ):
        start_tracker(f"http://me:hunter2@127.0.0.1:{port}", run)
    assert time.monotonic() - began < 10


@contextlib.contextmanager
def trickling_server() -> Iterator[str]:
    """Yield the address of a server that sends its answers byte by byte, each within a timeout."""

    def answer(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.recv(1 << 16)
            for byte in b"HTTP/1.1 200 OK\r\nX-Slowly: " + 10_000 * b"x":
                client.sendall(bytes([byte]))
                time.sleep(0.1)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_a_server_that_does_not_answer_in_time_is_asked_again_before_it_is_refused(
    run, monkeypatch, caplog
):
    # The timeout is for each byte; an answer has four times as long.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with trickling_server() as slow:
        began = time.monotonic()
        with pytest.raises(
            StorageError, match=r"no complete answer within 4 s, .* Training has not started"
        ):
            start_tracker(slow, run)
        assert 12 < time.monotonic() - began < 40
    assert caplog.text.count("no complete answer within 4 s, which is") == 1
    assert "asking again for 12 s" in caplog.text


def test_a_store_that_is_busy_for_longer_than_a_call_may_take_is_waited_for(
    uri, run, monkeypatch, caplog
):
    client_of(uri).search_experiments()  # makes the store
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "0.5")
    busy = sqlite3.connect(uri.removeprefix("sqlite:///"), check_same_thread=False)
    busy.execute("BEGIN EXCLUSIVE")
    threading.Timer(4, busy.rollback).start()
    tracker = start_tracker(uri, run)
    append_steps(run, 1, 2)
    assert tracker.finish("done") == []
    assert metric_history(uri, tracker.info["run_id"]) == [(1, 1 / 8), (2, 2 / 8)]
    assert caplog.text.count("asking again for 6 s") == 1


@pytest.mark.slow
def test_a_server_that_becomes_slow_delays_neither_steps_nor_the_end(uri, run, monkeypatch):
    """Rows that it did not take are delivered by `pgtk sync` once it answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    tracker = start_tracker(uri, run)
    with trickling_server() as slow:
        tracker._client = client_of(slow)
        began = time.monotonic()
        append_steps(run, 1, 3)
        assert time.monotonic() - began < 1
        # Files have arrived if the folder of the store was known before the server became slow.
        assert set(tracker.finish("interrupted")) - {"artifacts", "completions"} == {
            "metrics",
            "the end of the run",
        }
        assert time.monotonic() - began < 8
    monkeypatch.undo()
    run.set_status("interrupted", 3, "SIGTERM")
    run.close()
    assert ": 3 rows delivered" in sync(run.path)
    assert metric_history(uri, tracker.info["run_id"]) == [(step, step / 8) for step in range(1, 4)]


def test_a_deleted_experiment_is_refused_with_the_command_that_restores_it(uri, run):
    tracker = start_tracker(uri, run, experiment="gone")
    tracker.finish("done")
    MlflowClient(uri).delete_experiment(tracker.info["experiment_id"])
    with pytest.raises(StorageError) as refused:
        start_tracker(uri, run, experiment="gone")
    command = f"{program('mlflow')} experiments restore -x {tracker.info['experiment_id']}"
    assert f"`MLFLOW_TRACKING_URI={shlex.quote(uri)} {command}`" in str(refused.value)


@pytest.mark.slow
def test_a_store_that_fails_during_a_run_gives_one_warning_and_gets_all_rows(
    tmp_path, run, caplog, monkeypatch
):
    monkeypatch.setattr(record, "_SECONDS_BETWEEN_DELIVERIES", 0.1)
    monkeypatch.setattr(record, "_LONGEST_PAUSE", 0.2)
    database = tmp_path / "own" / "mlflow.db"
    tracker = start_tracker(f"sqlite:///{database}", run)
    moved = database.rename(database.with_name("away.db"))
    database.mkdir()  # nothing can be opened under this name now
    tracker._client._tracking_client.store.engine.dispose()
    append_steps(run, 1, 20, pause=0.1)
    with caplog.at_level(logging.INFO, logger="pgtoolkit"):
        database.rmdir()
        moved.rename(database)
        tracker.finish("done")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["Nothing is lost" in record.getMessage() for record in warnings] == [True]
    assert len(metric_history(f"sqlite:///{database}", tracker.info["run_id"])) == 20


def start_server(store: str, port: int) -> subprocess.Popen:
    """Start MLflow's server of a store, and wait until it accepts connections."""
    command = [
        str(Path(sys.executable).parent / "mlflow"),
        "server",
        f"--backend-store-uri={store}",
        f"--port={port}",
        "--workers=1",
    ]
    server = subprocess.Popen(
        command,
        # where it puts artifacts of experiments that it makes itself
        cwd=Path(store.removeprefix("sqlite:///")).parent,
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.2)
    raise AssertionError("mlflow server did not come up")


class Way:
    """The way to a server: its own port, which nobody listens to while the way is closed.

    It stands for the start of a further server after each outage, which would take seconds.
    """

    def __init__(self, port_of_server: int):
        self.port = free_port()
        self._port_of_server = port_of_server
        self.open()

    def open(self) -> None:
        self._clients: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections from here on, and end those that there are."""
        self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._listening.close()
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                self._clients.append(client)
                server = socket.create_connection(("127.0.0.1", self._port_of_server))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, sender: socket.socket, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sender.recv(1 << 16):
                receiver.sendall(data)
        with contextlib.suppress(OSError):
            receiver.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_server_outage_neither_stops_training_nor_loses_metrics(uri, run, caplog):
    open_store(uri, "tests")  # by this process, so that artifacts do not pass through the server
    port_of_server = free_port()
    server = start_server(uri, port_of_server)
    way = Way(port_of_server)
    port = way.port
    try:
        append_steps(run, 1, 300)  # more than MLflow takes in one call
        tracker = start_tracker(f"http://127.0.0.1:{port}", run)
        append_steps(run, 301, 310, pause=0.1)
        way.close()
        began = time.monotonic()
        append_steps(run, 311, 320, pause=0.2)
        assert time.monotonic() - began < 5
        way.open()
        append_steps(run, 321, 330)
        tracker.finish("done")
        assert metric_history(uri, tracker.info["run_id"]) == [
            (step, step / 8) for step in range(1, 331)
        ]
        assert caplog.text.count("Nothing is lost") == 1

        tracker = start_tracker(f"http://127.0.0.1:{port}", run)
        append_steps(run, 331, 332)
    finally:
        way.close()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert tracker.finish("interrupted") == ["metrics", "the end of the run"]
    run.set_status("interrupted", 332, "SIGTERM")
    run.close()
    with pytest.raises(StorageError, match="Nothing was lost"):
        sync(run.path, f"http://127.0.0.1:{port}")
    assert ": 2 rows delivered (sqlite:///" in sync(run.path, uri)
    assert metric_history(uri, tracker.info["run_id"]) == [
        (step, step / 8) for step in range(1, 333)
    ]
    assert MlflowClient(uri).get_run(tracker.info["run_id"]).info.status == "KILLED"


def test_flatten_hides_secrets_and_cuts_long_text():
    values = {
        "hf_token": "hunter2",
        "uri": "http://u:hunter2@h/x",
        "long": "x" * 9000,
        "list": [1, 2],
    }
    flat = flatten({"a": values})
    assert flat["a.hf_token"] == "***"
    assert flat["a.uri"] == "http://***@h/x"
    assert len(flat["a.long"]) == 500
    assert flat["a.list"] == "[1,2]"


@pytest.mark.parametrize(
    ("function", "error"),
    [("plot_curves", StopSignal("SIGTERM")), ("read_metrics", ValueError("not a number"))],
)
def test_nothing_at_the_end_of_a_run_changes_its_status_in_mlflow(
    uri, tmp_path, monkeypatch, function, error
):
    def fail(*_: object) -> None:
        raise error

    folder = tmp_path / "run"
    monkeypatch.setattr(f"pgtoolkit.assembly.train.{function}", fail)
    is_stopped = isinstance(error, StopSignal)
    expected = pytest.raises(StopSignal) if is_stopped else contextlib.nullcontext()
    with expected:
        train_run(folder, "tracking=mlflow", f"tracking.uri={uri}", "trainer.max_steps=1")
    status = read_status(folder)
    assert status["state"] == "done"
    saved = MlflowClient(uri).get_run(status["mlflow"]["run_id"])
    assert saved.info.status == "FINISHED"
    assert saved.data.metrics["documents_seen"] == 8


def test_a_file_that_cannot_be_read_keeps_no_metrics_from_a_store(uri, run):
    tracker = start_tracker(uri, run)
    append_steps(run, 1, 3)
    tracker.finish("interrupted")
    run.set_status("done", 5)
    append_steps(run, 4, 5)
    (run.path / "data.json").write_text("{}")
    (run.path / "data.json").chmod(0)
    run.close()
    with pytest.raises(StorageError) as raised, without_rights_of_root():
        sync(run.path)
    assert "MLflow still lacks artifacts of " in str(raised.value)
    assert f"{run.path}/data.json cannot be read or written: Permission denied" in str(raised.value)
    saved = MlflowClient(uri).get_run(tracker.info["run_id"])
    assert (saved.data.metrics["loss"], saved.info.status) == (5 / 8, "FINISHED")
