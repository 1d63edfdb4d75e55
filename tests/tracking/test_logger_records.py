"""Runs recorded with Weights & Biases (offline) and TensorBoard, read back from their files."""

import json
import os
import re
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
from builders.processes import ForkedProcess, free_port
from builders.stores import CONFIG, append_steps

from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import read_status
from pgtoolkit.system.plain_files import refuse_links
from pgtoolkit.tracking import logger_records
from pgtoolkit.tracking.logger_records import TensorBoardRecord, WandbRecord
from pgtoolkit.tracking.wandb_settings import (
    ignored_files,
    problem_of_settings,
    settings_of_user,
)

SETTINGS = {
    **CONFIG,
    "task": {"path": "https://me:hunter2@example.org/prompts.jsonl", "shuffle": True},
    "tracking": {"run_name": "a name"},
}
FLAT = {
    "seed": 1,
    "loss.name": "gspo",
    "loss.epsilon_low": 3e-4,
    "aggregation.mode": "sample_mean",
    "task.path": "https://***@example.org/prompts.jsonl",
    "task.shuffle": True,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(params=["tensorboard", "wandb"])
def kind(request) -> str:
    pytest.importorskip(request.param)
    return request.param


def record_of(kind: str) -> WandbRecord | TensorBoardRecord:
    return WandbRecord("a project", False) if kind == "wandb" else TensorBoardRecord()


def run_python(code: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run code in a process that does not use the service of wandb that this one has started;
    return its exit status and what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    program = folder / "program.py"
    program.write_text(code)
    log = folder / "printed"
    process = ForkedProcess([*arguments], Path.cwd(), environment, log, str(program))
    return process.wait(200), log.read_text()


def start_record(
    kind: str, run: RunDirectory, **keywords: object
) -> WandbRecord | TensorBoardRecord:
    run.write_config(SETTINGS, [])
    run.set_status("running", 0, **keywords)
    record = record_of(kind)
    record.start(run.path, description_of(run.path), "Training has not started.")
    return record


def evaluation_row(step: int, share: float) -> dict:
    return {
        "step": step,
        "time": 5.0,
        "documents": 64 * step,
        "set": "held_out",
        "prompts": 8,
        "pass@1": share,
    }


def history(kind: str, run: RunDirectory, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of a metric in the order in which the record got them."""
    if kind == "tensorboard":
        return [(event.step, event.value) for event in events(run).Scalars(name)]
    rows = [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(run)
        if record.HasField("history")
    ]
    return [(row["trainer/global_step"], row[name]) for row in rows if name in row]


def events(run: RunDirectory):
    # The tests of wandb need no TensorBoard.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.path / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    return accumulator


def wandb_records(run: RunDirectory) -> list:
    """Return the records of the file of wandb in a run directory, once its process has ended it."""
    (path,) = run.path.glob("wandb/offline-run-*/*.wandb")
    for _ in range(300):
        records = read_wandb_file(path.read_bytes())
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def read_wandb_file(data: bytes) -> list:
    """Return the records of a file in the format of LevelDB's log."""
    # The tests of TensorBoard need no wandb.
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    position = 7
    record = b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, part = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            break  # still being written
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # all of a record, or its last part
            records.append(Record.FromString(record))
            record = b""
    return records


def recorded_run(kind: str, run: RunDirectory) -> WandbRecord | TensorBoardRecord:
    """Return the record of a run of 40 steps with two evaluations, which is done."""
    record = start_record(kind, run, sweep="a sweep")
    run.append_evaluations([evaluation_row(0, 0.25)])
    append_steps(run, 1, 40)
    run.append_evaluations([evaluation_row(40, 0.75)])
    assert record.finish("done") == []
    return record


@pytest.mark.slow
def test_metrics_and_evaluations_of_a_run_are_recorded_without_secrets(kind, run):
    recorded_run(kind, run)
    assert_no_secret_and_no_link(run.path / kind)
    assert history(kind, run, "loss") == [(step, step / 8) for step in range(1, 41)]
    assert history(kind, run, "evaluation/held_out/pass_at_1") == [(0, 0.25), (40, 0.75)]
    assert history(kind, run, "final/loss") == [(40, (37 + 38 + 39 + 40) / 4 / 8)]


def test_tensorboard_has_the_configuration_and_curves_over_documents(run):
    pytest.importorskip("tensorboard")
    record = recorded_run("tensorboard", run)
    assert history("tensorboard", run, "loss_by_documents") == [
        (64 * step, step / 8) for step in range(1, 41)
    ]
    assert record.shown_by == f"tensorboard --logdir {run.path}/tensorboard"
    assert hyperparameters_of_tensorboard(run) == FLAT


def test_wandb_has_the_configuration_names_and_documents_of_a_run(run):
    pytest.importorskip("wandb")
    tracker = recorded_run("wandb", run)
    assert history("wandb", run, "documents_seen") == [(step, 64 * step) for step in range(1, 41)]
    records = wandb_records(run)
    (opened,) = [record.run for record in records if record.HasField("run")]
    assert opened.project == "a project"
    assert opened.run_group == "a sweep"
    assert opened.display_name == "a name"
    assert opened.run_id == read_status(run.path)["id"]
    config = {
        update.key: json.loads(update.value_json)
        for record in records
        if record.HasField("config")
        for update in record.config.update
    }
    config.pop("_wandb", None)  # of wandb itself, if it is written already
    assert config == {**FLAT, "run_directory": str(run.path)}
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    (folder,) = run.path.glob("wandb/offline-run-*")
    assert tracker.shown_by == f"wandb sync {folder}"


def hyperparameters_of_tensorboard(run: RunDirectory) -> dict[str, object]:
    # The tests of wandb need no TensorBoard.
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events(run).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def assert_no_secret_and_no_link(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert not path.is_symlink()
        assert b"hunter2" not in path.read_bytes()
        assert os.environ["WANDB_API_KEY"].encode() not in path.read_bytes()


@pytest.mark.slow
def test_steps_that_are_trained_again_after_a_kill_are_recorded_once(kind, run, tmp_path):
    start_and_die = (
        "import os, sys, time; sys.path.insert(0, 'tests')\n"
        "from builders.stores import append_steps\n"
        "from tracking.test_logger_records import start_record\n"
        "from pgtoolkit.runs.directory import RunDirectory\n"
        "run = RunDirectory(sys.argv[2]); start_record(sys.argv[1], run)\n"
        "append_steps(run, 1, 9); time.sleep(2.5); os.kill(os.getpid(), 9)"
    )
    run.close()
    assert run_python(start_and_die, tmp_path, kind, str(run.path))[0] == -signal.SIGKILL

    run.drop_metrics_after(6)
    record = record_of(kind)
    record.start(run.path, description_of(run.path))
    for step in range(7, 13):
        run.append_metrics(step, {"loss": 100.0 + step})
    assert record.finish("interrupted") == []
    first_six = [(step, step / 8) for step in range(1, 7)]
    assert history(kind, run, "loss") == first_six + [(step, 100.0 + step) for step in range(7, 13)]
    if kind == "wandb":
        records = wandb_records(run)
        ids = {record.run.run_id for record in records if record.HasField("run")}
        assert ids == {read_status(run.path)["id"]}
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [255]


def test_a_record_that_cannot_be_opened_is_refused_before_the_first_step(run):
    pytest.importorskip("tensorboard")
    (run.path / "tensorboard").write_text("no folder")
    with pytest.raises(
        StorageError, match=r"^TensorBoard failed: .*\. Training has not started\.$"
    ):
        start_record("tensorboard", run)


@pytest.mark.slow
def test_a_run_whose_tracker_breaks_continues_after_one_note(run, tmp_path):
    pytest.importorskip("wandb")
    kill_wandb = (
        "import logging, sys, time, psutil; sys.path.insert(0, 'tests')\n"
        "from builders.stores import append_steps\n"
        "from tracking.test_logger_records import start_record\n"
        "from pgtoolkit.runs.directory import RunDirectory\n"
        "logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "run = RunDirectory(sys.argv[1]); record = start_record('wandb', run)\n"
        "append_steps(run, 1, 3); time.sleep(1.5)\n"
        "for child in psutil.Process().children(recursive=True): child.kill()\n"
        "time.sleep(0.5); append_steps(run, 4, 9); time.sleep(2.5); append_steps(run, 10, 12)\n"
        "print(record.finish('done'))"
    )
    run.close()
    _, printed = run_python(kill_wandb, tmp_path, str(run.path))
    assert "[]" in printed.splitlines(), printed
    assert printed.count("WARNING wandb failed: ") == 1
    assert printed.count("It gets no more rows of this run. Nothing is lost") == 1
    assert len(run.metrics_path.read_text().splitlines()) == 12


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["tracking=wandb"],
            r'needs the package wandb \(got not installed\). .* Use pip install "pgtk\[wandb\]"',
        ),
        (
            ["tracking.also=[tensorboard]"],
            r"also=\[tensorboard\] needs the package .* Use pip install",
        ),
        (["tracking.also=[comet]"], r"tracking\.also=\[comet\] needs wandb or tensorboard"),
        (["tracking.also=[mlflow]"], r"tracking\.also=\[mlflow\] needs wandb or tensorboard"),
        (
            ["tracking=none", "tracking.also=[wandb]"],
            "tracking.also=.* Use tracking=tensorboard or tracking.also=",
        ),
        (
            ["tracking=tensorboard", "tracking.experiment=x"],
            "tracking.experiment=x needs tracking=mlflow or wandb",
        ),
        (
            ["tracking=wandb", "tracking.uri=http://h:1"],
            "tracking.uri=http://h:1 needs tracking=mlflow",
        ),
    ],
)
def test_a_tracker_that_cannot_record_is_refused_before_the_run(overrides, problem, monkeypatch):
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda package: False)
    _, report = validated(compose(overrides))
    assert any(re.search(problem, text) for text in report.problems), report.problems


def test_a_tracker_that_is_named_twice_is_refused(monkeypatch):
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda package: True)
    for overrides in (["tracking=wandb", "tracking.also=[wandb]"], ["tracking.also=[wandb,wandb]"]):
        (problem,) = validated(compose(overrides))[1].problems
        assert "needs each tracker once" in problem
    assert validated(compose(["tracking=wandb", "tracking.also=[tensorboard]"]))[1].problems == []


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "dryrun"}, None),
        ({"WANDB_MODE": "online", "WANDB_API_KEY": "0123456789" * 4}, None),
        (
            {"WANDB_MODE": "online"},
            "wandb needs an API key (got none). The run is sent to https://wandb.example.org.",
        ),
        (
            {"WANDB_MODE": "online", "WANDB_API_KEY": "short"},
            "wandb needs a whole API key (got API key must have 40+ characters, has 5.).",
        ),
        ({"WANDB_MODE": "disabled"}, "wandb needs WANDB_MODE online or offline (got disabled)."),
        ({"WANDB_MODE": "nonsense"}, "wandb needs another WANDB_MODE (got nonsense). Input should"),
        ({"WANDB_BASE_URL": "foo"}, "wandb needs another WANDB_BASE_URL (got foo)."),
        ({"WANDB_INIT_TIMEOUT": "abc"}, "wandb needs another WANDB_INIT_TIMEOUT (got abc)."),
        ({"WANDB_RUN_ID": "a/b"}, "wandb needs other settings (got Run ID cannot contain the"),
        ({"WANDB_SWEEP_ID": "abc"}, "wandb needs no WANDB_SWEEP_ID in the environment (got abc)."),
    ],
)
def test_a_wandb_that_cannot_record_is_a_problem_before_the_run(environment, problem, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY")
    for name, value in {"WANDB_BASE_URL": "https://wandb.example.org", **environment}.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # it reads the environment once
    found = problem_of_settings()
    wandb.teardown()
    assert (found or "").startswith(problem or "")
    assert (found is None) == (problem is None)


def test_a_file_in_the_current_folder_names_no_server_of_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(
        "[default]\nbase_url = https://evil.example.org\nentity = evil\n"
    )
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # it reads the file once
    settings = settings_of_user()
    wandb.teardown()
    assert "evil" not in settings.base_url
    assert settings.entity is None
    assert [str(path) for path in ignored_files()] == ["wandb/settings"]


def test_a_wandb_that_does_not_answer_leaves_a_directory_that_can_be_used(run, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(logger_records, "_SECONDS_TO_START", 2.0)
    wandb.teardown()
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"^wandb failed: .* Training has not started\.$"):
        start_record("wandb", run)
    assert time.monotonic() - begun < 30
    refuse_links(run.path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    recorded_run("wandb", run)
    assert history("wandb", run, "loss")[-1] == (40, 5.0)


def test_a_folder_of_tensorboard_that_is_removed_is_one_note(run, caplog, capfd):
    pytest.importorskip("tensorboard")
    record = start_record("tensorboard", run)
    shutil.rmtree(run.path / "tensorboard")
    append_steps(run, 1, 3)
    assert record.finish("done") == []
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert warning == (
        f"TensorBoard failed: {run.path}/tensorboard was removed. It gets no more rows of this "
        f"run. Nothing is lost: metrics are kept in {run.path}/metrics.jsonl, and a resumed run "
        "delivers what is missing."
    )
    assert "Traceback" not in capfd.readouterr().err
