"""The variables of trackers choose store, experiment, project and name, unless a key is typed; what
is not followed is said."""

import pytest

from pgtoolkit.assembly.sync import sync
from pgtoolkit.assembly.train import _record_in
from pgtoolkit.cli import main
from pgtoolkit.config.rules.executed import credentials
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.check import check, notes, problems
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.logger_records import WandbRecord
from pgtoolkit.tracking.mlflow_run import MlflowRecord
from pgtoolkit.tracking.next_commands import ui_command

DEFAULT = "sqlite:///{here}/outputs/mlflow.db"
STORE = {"MLFLOW_TRACKING_URI": "sqlite:///of_environment.db"}
SERVER = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
EXPERIMENT = {"MLFLOW_EXPERIMENT_NAME": "of_environment"}
PROJECT = {"WANDB_PROJECT": "of_wandb"}
TO_STORE = "MLFLOW_TRACKING_URI: metrics go to sqlite:///of_environment.db."
TO_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME: the experiment is of_environment."
TO_PROJECT = "WANDB_PROJECT: the project is of_wandb."


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Enter a folder, in which wandb keeps its records in the run directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "typed", "uri", "experiments", "said"),
    [
        ({}, [], DEFAULT, ["pgtoolkit"], []),
        (STORE, [], "sqlite:///{here}/of_environment.db", ["pgtoolkit"], [TO_STORE]),
        (STORE, ["tracking.uri=sqlite:///my.db"], "sqlite:///{here}/my.db", ["pgtoolkit"], []),
        (
            SERVER | EXPERIMENT,
            [],
            "http://127.0.0.1:9",
            ["of_environment"],
            ["MLFLOW_TRACKING_URI: metrics go to http://127.0.0.1:9.", TO_EXPERIMENT],
        ),
        (EXPERIMENT, ["tracking.experiment=pgtoolkit"], DEFAULT, ["pgtoolkit"], []),
        (PROJECT | EXPERIMENT | STORE, ["tracking=wandb"], None, ["of_wandb"], [TO_PROJECT]),
        (PROJECT, [], DEFAULT, ["pgtoolkit"], []),
        (
            PROJECT | EXPERIMENT,
            ["tracking.also=[wandb]"],
            DEFAULT,
            ["of_environment", "of_wandb"],
            [TO_EXPERIMENT, TO_PROJECT],
        ),
        (
            PROJECT | EXPERIMENT,
            ["tracking.also=[wandb]", "tracking.experiment=mine"],
            DEFAULT,
            ["mine", "mine"],
            [],
        ),
        (STORE | EXPERIMENT, ["tracking=none"], None, [], []),
        (
            {"MLFLOW_TRACKING_URI": "databricks"},
            [],
            "databricks",
            ["pgtoolkit"],
            ["MLFLOW_TRACKING_URI: metrics go to databricks."],
        ),
        (STORE | EXPERIMENT, ["tracking=tensorboard"], None, [], []),
        (
            {"MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_RUN_ID": "8", "WANDB_RUN_ID": "9"},
            [],
            DEFAULT,
            ["pgtoolkit"],
            [
                "MLFLOW_EXPERIMENT_ID is not followed here. Use MLFLOW_EXPERIMENT_NAME or "
                "tracking.experiment.",
                "MLFLOW_RUN_ID is not followed here. Use pgtk resume RUN, since a run is its "
                "directory.",
            ],
        ),
        (
            {"WANDB_DIR": "elsewhere", "WANDB_RESUME": "must", "WANDB_DISABLED": "true"},
            ["tracking=wandb"],
            None,
            ["pgtoolkit"],
            [
                "WANDB_RESUME is not followed here. Use pgtk resume RUN, since a run is its "
                "directory.",
                "WANDB_DISABLED is not followed here. Use tracking=none.",
                "WANDB_DIR is not followed here. Use hydra.run.dir=FOLDER, since the record lies "
                "in the run's directory.",
            ],
        ),
    ],
)
def test_a_run_goes_where_the_variables_say_unless_a_key_is_typed(
    here, monkeypatch, environment, typed, uri, experiments, said
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    checked = check(typed)
    assert problems(checked) == []
    assert [note for note in notes(checked) if note.startswith(("MLFLOW", "WANDB"))] == said
    settings = checked.named_config.tracking
    assert settings.uri == (uri and uri.format(here=here))
    trackers = [name for name in (settings.name, *settings.also) if name in ("mlflow", "wandb")]
    records = [_record_in(name, settings) for name in trackers]
    named = [
        record.experiment if isinstance(record, MlflowRecord) else record._project
        for record in records
    ]
    assert named == experiments
    if len(set(experiments)) == 1:  # so that a job elsewhere, without the variables, has it
        assert settings.experiment == experiments[0]


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("mlruns", "needs sqlite:///FILE, http(s)://HOST:PORT or a database (got mlruns)"),
        ("file:///x", "needs sqlite:///FILE, http(s)://HOST:PORT or a database (got file:///x)"),
        ("sqlite:///.", "needs a file, not a folder (got sqlite:///.)"),
        ("http://me:hunter2@h:1", "MLFLOW_TRACKING_URI needs to hold no secret"),
    ],
)
def test_an_address_of_the_environment_that_cannot_be_used_is_refused(
    monkeypatch, capsys, address, problem
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for command in (["check"], ["-m", "seed=1,2"], []):
        assert main(command) == 2
        printed = capsys.readouterr()
        assert problem in printed.out + printed.err
        assert "hunter2" not in printed.out + printed.err
    assert problems(check(["tracking.uri=sqlite:///outputs/mlflow.db"])) == []
    if "hunter2" not in address:
        assert main(["ui"]) == 2


def test_the_command_of_a_store_that_a_variable_names_names_it_too(here, monkeypatch):
    assert ui_command(None).endswith("pgtk ui")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert ui_command(None).endswith("ui --uri=sqlite:///other.db")
    assert ui_command("sqlite:///outputs/mlflow.db").endswith("--uri=sqlite:///outputs/mlflow.db")


def test_credentials_for_the_server_of_the_environment_are_announced(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "x")
    config = check([]).config
    assert config is not None
    line = "sends MLFLOW_TRACKING_TOKEN to https://mlflow.example.org (MLFLOW_TRACKING_URI)"
    assert credentials(config) == [line]


def test_a_run_without_a_store_is_delivered_to_that_of_the_environment(here, monkeypatch):
    with RunDirectory(here / "run", new=True) as run:
        run.write_config({"tracking": {"name": "none", "experiment": None}}, [])
        run.set_status("done", 0)
    with pytest.raises(ConfigError, match=r"needs a store \(got tracking=none\)"):
        sync(here / "run")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(Exception, match=r"MLflow at tracking\.uri=http://127\.0\.0\.1:9 failed"):
        sync(here / "run")


def test_the_name_of_wandb_s_variable_is_taken_unless_one_is_typed(here, monkeypatch):
    from pgtoolkit.assembly.run_description import description_of

    monkeypatch.setenv("WANDB_NAME", "of wandb")
    for typed, name in (([], "of wandb"), (["tracking.run_name=mine"], "mine")):
        with RunDirectory(here / name, new=True) as run:
            run.write_config({"tracking": {"run_name": "mine"}}, typed)
            run.set_status("running", 0)
        record = WandbRecord("project", False)
        record._run_dir = here / name
        assert record._name(description_of(here / name)) == name
