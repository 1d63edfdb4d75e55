"""The file of a store alone shows whether a run could deliver to it.

The problems are those for which MLflow would stop the run; their commands are run by a shell.
"""

import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from builders.stores import start_tracker
from mlflow import MlflowClient

from pgtoolkit.errors import StorageError
from pgtoolkit.launch.check import check, problems
from pgtoolkit.system.report import program, shell_path
from pgtoolkit.tracking.store import open_store
from pgtoolkit.tracking.store_address import sqlite_path
from pgtoolkit.tracking.store_file import _newest_revision, problem_of_store


@pytest.fixture(scope="module")
def prepared_store(uri) -> Path:
    """Return a store with the experiments `tests` and, deleted, `removed`, made once."""
    client, _ = open_store(uri, "tests")
    client.delete_experiment(client.create_experiment("removed"))
    return sqlite_path(uri)


@pytest.fixture
def store(prepared_store, tmp_path) -> Path:
    return Path(shutil.copy(prepared_store, tmp_path / "mlflow.db"))


def uri_of(store: Path) -> str:
    return f"sqlite:///{store}"


def set_revision(store: Path, revision: str) -> None:
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])


def test_a_store_that_a_run_can_use_has_no_problem(store, tmp_path):
    before = store.read_bytes()
    assert problem_of_store(store, "tests") is None
    assert problem_of_store(tmp_path / "new/folder/mlflow.db", "tests") is None
    assert store.read_bytes() == before
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.starts_python  # in a fork the tables are those that were made before
def test_a_run_that_is_stopped_while_the_store_is_made_leaves_none_that_lacks_tables(tmp_path):
    store = tmp_path / "mlflow.db"
    unfinished = tmp_path / ".mlflow.db.unfinished"
    program = f"from pgtoolkit.tracking.store import open_store; open_store('{uri_of(store)}', 'x')"
    with subprocess.Popen([sys.executable, "-c", program]) as maker:
        while not unfinished.exists() or not unfinished.stat().st_size:
            assert maker.poll() is None
            time.sleep(0.01)
        maker.kill()
    assert not store.exists()
    open_store(uri_of(store), "tests")
    assert problem_of_store(store, "tests") is None
    assert not unfinished.exists()
    assert _newest_revision() is not None


def test_a_store_of_an_older_mlflow_needs_the_command_that_upgrades_it(store, run):
    older = "75868b020152"  # before the newest revision of MLflow 3.17
    set_revision(store, older)
    problem = problem_of_store(store, "tests")
    assert f"(got the older revision {older})" in problem
    file = shell_path(store)
    assert (
        f"{file}.{older} && {program('mlflow')} db upgrade {shlex.quote(uri_of(store))}`" in problem
    )
    with pytest.raises(StorageError) as refused:
        start_tracker(uri_of(store), run)
    assert f"{program('mlflow')} db upgrade {shlex.quote(uri_of(store))}`" in str(refused.value)


def test_a_store_of_a_newer_mlflow_is_a_problem(store):
    set_revision(store, "f" * 12)
    assert "A newer MLflow has changed them." in problem_of_store(store, "tests")


@pytest.mark.slow
def test_the_command_for_a_deleted_experiment_restores_it(store):
    problem = problem_of_store(store, "removed")
    command = problem.partition("`")[2].partition("`")[0]
    assert command.startswith(f"MLFLOW_TRACKING_URI={shlex.quote(uri_of(store))} ")
    words = command.replace(f" {program('mlflow')} ", f" {shlex.quote(sys.executable)} -m mlflow ")
    assert subprocess.run(["bash", "-c", words], capture_output=True, timeout=120).returncode == 0
    assert MlflowClient(uri_of(store)).get_experiment_by_name("removed").lifecycle_stage == "active"
    assert problem_of_store(store, "removed") is None


@pytest.mark.parametrize("damage", ["text", "page", "proc"])
def test_a_file_that_is_no_store_is_a_problem_of_check(store, damage, monkeypatch):
    monkeypatch.chdir(store.parent)
    path = store
    if damage == "text":
        store.write_text("no database " * 500)
    elif damage == "page":
        content = bytearray(store.read_bytes())
        content[100:4096] = b"\xff" * 3996
        store.write_bytes(content[:-4096])
    else:
        path = Path("/proc/none/mlflow.db")
    (problem,) = problems(check([f"tracking.uri=sqlite:///{path}"]))
    assert problem.startswith("tracking.uri=sqlite:///")
    assert problem == problem_of_store(path, "pgtoolkit")
