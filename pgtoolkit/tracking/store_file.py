"""Checks an MLflow store in a file of this machine without MLflow, whose import takes seconds."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from pgtoolkit.errors import first_line
from pgtoolkit.system.plain_files import cannot_hold_files
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import program, refusal, shell_path, shortest_path
from pgtoolkit.tracking.store_address import DEFAULT_STORE, sqlite_path


def problem_of_store(path: Path, experiment: str) -> str | None:
    """Return why a run could not deliver to the store in this file; None where it could.

    path: absolute. The file may be missing, since MLflow makes it.
    experiment: the name of the run's.
    """
    setting = f"tracking.uri=sqlite:///{shortest_path(path)}"
    other_store = "tracking.uri=sqlite:///outputs/other.db, or tracking=none"
    obstacle = cannot_hold_files(path.parent)
    if obstacle:
        return refusal(
            setting=setting,
            needs="a folder where files can be made",
            got=obstacle,
            reason="MLflow writes its store there.",
            use=other_store,
        )
    if not path.exists():
        return None
    if not os.access(path, os.W_OK):
        return refusal(
            setting=setting,
            needs="a file that can be written",
            got="none",
            reason="Metrics are delivered there.",
            use=other_store,
        )
    try:
        revision, deleted_id = _read(path, experiment)
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):  # another process writes to it, for which MLflow waits
            return None
        return refusal(
            setting=setting,
            needs="an MLflow store",
            got=first_line(error),
            reason="It is damaged, or another kind of file. Every run directory keeps its "
            "metrics, and `pgtk sync` delivers them again.",
            use=other_store,
        )
    uri = f"sqlite:///{path}"
    if path == sqlite_path(DEFAULT_STORE) and has_other_tables(path):
        return other_tables(setting)
    if revision is not None and _newest_revision() not in (None, revision):
        return out_of_date(setting, uri, revision)
    if deleted_id is not None:
        return deleted_experiment(experiment, uri, str(deleted_id))
    return None


def has_other_tables(path: Path) -> bool:
    """Return whether a database is in use by another program than MLflow."""
    with _reading(path) as store:
        tables = _tables(store)
    return bool(tables) and "alembic_version" not in tables


def other_tables(setting: str) -> str:
    """Return the problem with a database at the default place that another program uses."""
    return refusal(
        setting=setting,
        needs="a store of MLflow's, or no file",
        got="a database with other tables",
        reason="It lies where runs have their store by default, and MLflow would add its tables.",
        use="tracking.uri=sqlite:///outputs/other.db, or tracking=none",
    )


def out_of_date(setting: str, uri: str, revision: str) -> str:
    """Return the problem with a store that has the tables of another version of MLflow.

    revision: of its tables, as MLflow's migrations name it.
    """
    installed = importlib.metadata.version("mlflow")
    needs = f"a store with the tables of the installed MLflow {installed}"
    if revision not in _revisions():
        return refusal(
            setting=setting,
            needs=needs,
            got=f"revision {revision}, unknown to it",
            reason="A newer MLflow has changed them.",
            use="that version of MLflow, or another tracking.uri",
        )
    upgrade = f"{program('mlflow')} db upgrade {shlex.quote(redact(uri))}"
    if uri.startswith("sqlite:///"):
        file = shell_path(uri.removeprefix("sqlite:///"))
        upgrade = f"cp {file} {file}.{revision} && {upgrade}"
    return refusal(
        setting=setting,
        needs=needs,
        got=f"the older revision {revision}",
        reason="MLflow changes them only when asked; no run may write to the store meanwhile.",
        use=f"`{upgrade}`",
    )


def deleted_experiment(experiment: str, uri: str, number: str) -> str:
    """Return the problem with an experiment that was deleted from a store. number: its id."""
    # With the address, since mlflow would look in another store.
    restore = (
        f"MLFLOW_TRACKING_URI={shlex.quote(redact(uri))} {program('mlflow')} experiments "
        f"restore -x {number}"
    )
    return refusal(
        setting=f"tracking.experiment={experiment}",
        needs="an experiment that is not deleted",
        got="a deleted one",
        reason="MLflow takes no runs for it, and its name is not free.",
        use=f"another name, or `{restore}`",
    )


def _read(path: Path, experiment: str) -> tuple[str | None, int | None]:
    """Return the revision of a store's tables, and the id of the experiment if it was deleted."""
    with _reading(path) as store:
        tables = _tables(store)
        if not {"alembic_version", "experiments"} <= tables:
            return None, None  # a new database, in which MLflow makes the tables
        revision = store.execute("SELECT version_num FROM alembic_version").fetchone()
        query = (
            "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'deleted'"
        )
        deleted = store.execute(query, [experiment]).fetchone()
    return revision and revision[0], deleted and deleted[0]


def _reading(path: Path) -> closing[sqlite3.Connection]:
    """Return a connection that changes nothing, and is closed after its block."""
    address = f"file:{quote(str(path))}?mode=ro"
    return closing(sqlite3.connect(address, uri=True, timeout=1))


def _tables(store: sqlite3.Connection) -> set[str]:
    names = store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name for (name,) in names}


@functools.cache
def _revisions() -> dict[str, str | None]:
    """Return the revisions of tables that the installed MLflow knows, each with its predecessor."""
    package = importlib.util.find_spec("mlflow")
    if package is None or package.origin is None:
        return {}
    folder = Path(package.origin).parent / "store" / "db_migrations" / "versions"
    pattern = re.compile(r"^(revision|down_revision)\s*=\s*['\"](\w+)['\"]", re.MULTILINE)
    scripts = [
        dict(pattern.findall(file.read_text(encoding="utf-8"))) for file in folder.glob("*.py")
    ]
    return {
        script["revision"]: script.get("down_revision")
        for script in scripts
        if "revision" in script
    }


def _newest_revision() -> str | None:
    """Return the last revision; None where MLflow's migrations have another form than expected."""
    without_successor = set(_revisions()) - set(_revisions().values())
    return without_successor.pop() if len(without_successor) == 1 else None
