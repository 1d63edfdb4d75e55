"""MLflow's pages on this machine: its server started with the right store, and stopped with all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from pgtoolkit.config.paths import absolute_uri
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.next_commands import compare_url, ui_url
from pgtoolkit.tracking.store import quoted, refuse_missing

_HOST = "127.0.0.1"
_SECONDS_TO_START = 120
_SECONDS_TO_STOP = 10
_MOST_RUNS = 1000
"""What MLflow lists at once."""


def serve(uri: str | None, port: str) -> int:
    """Show the store until Ctrl-C or SIGTERM; returns 0 then.

    Raises ConfigError where there is no store or no free port, StorageError if MLflow ends by itself.
    """
    store, number = _store(uri), _free_port(port)
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"} | os.environ
    # One worker and no job runner: ready in 7 s instead of 37 s.
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", _HOST, "--port", str(number)]
    with tempfile.TemporaryFile() as log, _signals_as_interrupts():
        # A session of its own: what the server starts ends with it, and only once, by `_stop`.
        server = subprocess.Popen(
            [*command, "--backend-store-uri", store],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            print(f"MLflow starts with {redact(store)}; Ctrl-C ends it.", flush=True)
            address = f"http://{_HOST}:{number}"
            if _is_ready(server, address):
                print(_pages(address), flush=True)
                server.wait()
            raise StorageError(_end(server, store, log))
        except KeyboardInterrupt:
            return 0
        finally:
            _stop(server)


def _store(uri):
    store = absolute_uri(uri)
    if store.startswith("http"):
        raise ConfigError(
            f"--uri={redact(store)} needs a database (got a server). A server shows its own pages. "
            f"Use a browser: {redact(store)}."
        )
    setting = f"--uri={uri}" if uri else "pgtk ui"
    refuse_missing(store, setting, "pgtk ui there, or --uri=sqlite:///PATH/mlflow.db")
    return store


def _free_port(text):
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"--port={text} needs a whole number from 1 to 65535. Use --port=5000.")
    port = int(text)
    if reason := _why_not(port):
        other = next((p for p in range(max(port, 1024) + 1, 65536) if not _why_not(p)), 5000)
        raise ConfigError(f"--port={port} needs a free port of {_HOST} (got: {reason}). Use --port={other}.")
    return port


def _why_not(port):
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            return error.strerror
    return None


def _is_ready(server, address):
    """Wait for the server; False if it ends first."""
    end = time.monotonic() + _SECONDS_TO_START
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.2)
    return False


def _pages(address):
    """The addresses worth opening: the charts of the newest run's experiment, and those of the newest sweep."""
    try:
        experiments = _ask(address, "experiments/search", {"max_results": _MOST_RUNS}).get("experiments", [])
        ids = [experiment["experiment_id"] for experiment in experiments]
        runs = _runs(address, ids, "")
        swept = [run for run in _runs(address, ids, "tags.sweep LIKE '%'") if not _is_summary(run)][:1]
        sweep = swept and _tag(swept[0], "sweep")
        jobs = _runs(address, ids, f"tags.sweep = {quoted(sweep)}") if sweep else []
    except (OSError, ValueError) as error:
        return f"{address} (its runs could not be listed: {error})"
    newest = next((run["info"] for run in runs if not _is_summary(run)), None)
    if newest is None:
        return f"{address} (no runs yet)"
    lines = [
        f"newest run    {newest['run_name']}",
        f"charts        {ui_url(address, newest['experiment_id'])}",
    ]
    if jobs:
        jobs = [run["info"] for run in jobs if not _is_summary(run)][::-1]  # as they were started
        of = sorted({job["experiment_id"] for job in jobs})
        lines += [
            f"newest sweep  {sweep} ({len(jobs)} runs)",
            f"compare       {compare_url(address, of, [job['run_id'] for job in jobs])}",
            f"charts        {ui_url(address, of[0], sweep=sweep)}",
        ]
    return "\n".join(lines)


def _runs(address, ids, condition):
    """The newest runs that meet the condition, newest first."""
    order = ["attributes.start_time DESC"]
    body = {"experiment_ids": ids, "filter": condition, "order_by": order, "max_results": _MOST_RUNS}
    return _ask(address, "runs/search", body).get("runs", []) if ids else []


def _is_summary(run):
    return _tag(run, "sweep_summary") is not None


def _tag(run, name):
    return next((tag["value"] for tag in run["data"].get("tags", []) if tag["key"] == name), None)


def _ask(address, path, body):
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _end(server, store, log):
    status = server.poll()
    ended = f"did not answer within {_SECONDS_TO_START} s" if status is None else f"ended with status {status}"
    log.seek(0)
    said = redact(log.read().decode(errors="replace")).strip().splitlines()[-5:]
    return f"MLflow's server for {redact(store)} {ended}. Its last lines:\n" + "\n".join(f"  {line}" for line in said)


def _stop(server):
    """End the server and all it has started."""
    for number, seconds in ((signal.SIGTERM, _SECONDS_TO_STOP), (signal.SIGKILL, _SECONDS_TO_STOP)):
        # Its group lives on while any of its processes does, even where the first has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        end = time.monotonic() + seconds
        while _group_lives(server) and time.monotonic() < end:
            time.sleep(0.05)


def _group_lives(server):
    server.poll()
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _signals_as_interrupts():
    """SIGTERM and a closed terminal end the server as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
