"""Rules on where a run's file has a command send or write: only where somebody typed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from pgtoolkit.config.keys import plain_value
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.runs.records import leaves, read_status
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, text
from pgtoolkit.tracking.store_address import DEFAULT_STORE, absolute_uri, sqlite_path


def addresses_not_typed(
    config: object, run_dir: Path, typed: Iterable[tuple[str, object]]
) -> list[str]:
    """Return a problem for each address that a run's file names and the user has not typed.

    typed: the keys that were typed, with their values.
    """
    values = dict(pair for key, value in typed for pair in leaves({key: value}))
    return [
        refusal(
            setting=f"{key}={redact(text(address))}",
            needs="to be typed",
            got="it from the run's file",
            reason="The run would be sent there, which the file of a run does not decide.",
            use=f"{key}=ADDRESS on the command line",
        )
        for key, address in named_addresses(config, run_dir).items()
        # A reference in place of the value could stand for any address.
        if key not in values or "${" in str(values[key])
    ]


def named_addresses(config: object, run_dir: Path) -> dict[str, str | list[str]]:
    """Return key -> address, or a list of them, for those that have to be typed."""
    named: dict[str, str | list[str]] = {}
    if plain_value(config, "tracking.name") == "mlflow":
        uri = plain_value(config, "tracking.uri")
        if not may_be_used(uri, run_dir):
            named["tracking.uri"] = uri
    if plain_value(config, "sampler.name") == "vllm":
        urls = plain_value(config, "sampler.urls")
        if urls:
            named["sampler.urls"] = urls
    return named


def may_be_used(uri: str | None, run_dir: Path) -> bool:
    """Return whether a store that only the file of a run names may get the run.

    It may where it is the default one, or that of MLFLOW_TRACKING_URI, or a file on this machine
    that has the run already: so somebody has typed it before.
    """
    address = absolute_uri(uri)
    named = {absolute_uri(DEFAULT_STORE), absolute_uri(None).rstrip("/")}
    if address.rstrip("/") in named:
        return True
    path = sqlite_path(address)
    return path is not None and _has_run(path, run_dir)


def _has_run(store: Path, run_dir: Path) -> bool:
    """Return whether an MLflow store in a file has the run of this directory."""
    try:
        number = read_status(run_dir).get("id")
        address = f"file:{quote(str(store))}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=1)) as database:
            query = "SELECT 1 FROM tags WHERE key = 'pgtk.id' AND value = ?"
            return bool(number) and database.execute(query, [str(number)]).fetchone() is not None
    except (PgtoolkitError, sqlite3.Error):  # it is missing, damaged, locked or no such store
        return False
