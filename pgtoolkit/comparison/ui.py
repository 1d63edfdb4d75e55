"""MLflow's pages on this machine: its server started with the right store, and stopped with all its
processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.system.child import Child, under_guard
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import plural, say
from pgtoolkit.tracking.next_commands import compare_url, start_url, table_url, ui_url
from pgtoolkit.tracking.store import (
    VIEW,
    client_of,
    raising_storage_errors,
    require_store,
    view_of,
)
from pgtoolkit.tracking.store_address import absolute_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

_HOST = "127.0.0.1"
_SECONDS_TO_STOP = 10
_SECONDS_BETWEEN_CALLS = 0.2


def show_store(uri: str | None, port: int) -> int:
    """Show the store until Ctrl-C or SIGTERM; returns 0 then.

    A store that is a server shows its pages itself: only their addresses are printed.
    Raises ConfigError where there is no store or no free port, StorageError if MLflow cannot read
    it or ends by itself.
    """
    store = absolute_uri(uri)
    address = f"http://{_HOST}:{port}"
    require_store(
        store,
        f"--uri={uri}" if uri else "pgtk ui",
        "pgtk, which trains a first run, pgtk ui in the directory of earlier ones, or "
        "--uri=sqlite:///PATH/mlflow.db",
    )
    if store.startswith("http"):
        with raising_storage_errors(store, "Nothing is shown."):
            say(_addresses(client_of(store), store))
        say(f"The server {store} shows these pages itself; nothing is started here.")
        return 0
    _check_port(port)
    with raising_storage_errors(store, "Nothing is shown."):
        say(_addresses(client_of(store), address))
    environment = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONWARNINGS": "ignore",  # of the packages of its server
    } | os.environ
    # Without it a profile.py of the current directory hides Python's own.
    environment |= {"PYTHONSAFEPATH": "1"}
    # One worker and no job runner: ready in 7 s instead of 37 s.
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", _HOST, "--port", str(port), "--backend-store-uri", store]
    # Its other lines say what is said here.
    command += ["--uvicorn-opts", "--log-level warning"]
    # SIGHUP comes when the terminal is closed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # Quiet, since the server prints a line for each request.
    server = Child(under_guard(command, _SECONDS_TO_STOP), environment, is_quiet=True)
    try:
        say(f"MLflow starts with {store}; its pages open once it answers, in some seconds.")
        status = None
        while status is None and not _answers(port):
            status = server.wait(_SECONDS_BETWEEN_CALLS)
        if status is None:
            say(f"MLflow answers at {address}; Ctrl-C ends it.")
            status = server.wait()
        raise StorageError(
            f"MLflow's server for {redact(store)} ended with status {status}; above it says why."
        )
    except KeyboardInterrupt:
        return 0
    finally:
        server.end(2 * _SECONDS_TO_STOP)


def _check_port(port: int) -> None:
    """Refuse a port that is in use, since the server there would answer in the place of ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port={port} needs a free port of {_HOST}, from 1 to 65535 (got: "
                f"{str(error).rstrip('.')}). Use --port={_free_port()}."
            ) from error


def _answers(port: int) -> bool:
    """Return whether a server listens on the port."""
    with socket.socket() as caller:
        return caller.connect_ex((_HOST, port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _addresses(client: MlflowClient, address: str) -> str:
    """Return lines with the newest run, the newest sweep, and the addresses of their charts.

    Where the newest run is a job, those of its sweep are enough: on the pages of its experiment it
    is folded below the sweep's run, without curves.
    """
    newest = _runs(client, "")
    if not newest:
        return f"{start_url(address)} (no runs yet)"
    lines = []
    info = newest[0].info
    if "sweep" not in newest[0].data.tags:
        lines += [
            f"newest run    {info.run_name}",
            f"charts        {ui_url(address, info.experiment_id)}",
        ]
        if _has_view(client, info.experiment_id, VIEW):
            lines.append(f"table         {table_url(address, info.experiment_id)}")
    swept = _runs(client, "tags.sweep LIKE '%'")
    if swept:
        sweep = swept[0].data.tags["sweep"]
        # In the order of their start.
        jobs = [run.info for run in swept if run.data.tags["sweep"] == sweep][::-1]
        experiments = sorted({job.experiment_id for job in jobs})
        lines += [
            f"newest sweep  {sweep} ({plural(len(jobs), 'run')})",
            f"compare       {compare_url(address, experiments, [job.run_id for job in jobs])}",
            f"charts        {ui_url(address, experiments[0], sweep=sweep)}",
        ]
        if _has_view(client, experiments[0], view_of(sweep)):
            lines.append(f"table         {table_url(address, experiments[0], sweep)}")
    return "\n".join(lines)


def _has_view(client: MlflowClient, experiment_id: str, name: str) -> bool:
    """Return whether an experiment keeps a view: runs of an earlier version have none."""
    return f"mlflow.sharedViewState.{name}" in client.get_experiment(experiment_id).tags


def _runs(client: MlflowClient, condition: str) -> list[MlflowRun]:
    """Return the newest runs that meet the condition, newest first, without sweeps' summaries."""
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(
        ids, condition, max_results=1000, order_by=["attributes.start_time DESC"]
    )
    return [run for run in runs if "sweep_summary" not in run.data.tags]
