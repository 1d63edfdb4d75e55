"""`pgtk ui` starts the real MLflow server at the newest run, and leaves no process behind."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from builders.processes import free_port
from builders.refusals import refusal

from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.cli import main
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.mlflow_run import MlflowRecord


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Write two runs into the default store; return what the newer one knows of it."""
    monkeypatch.chdir(tmp_path)
    for name in ("older", "newer"):
        with RunDirectory(tmp_path / f"run-{name}") as run:
            run.write_config({"tracking": {"run_name": None}}, [])
            run.set_status("running", 0)
            tracker = MlflowRecord(None, name)
            tracker.start(run.path, description_of(run.path))
            tracker.finish("done")
    return tracker.info


@pytest.mark.slow
def test_ui_opens_the_newest_run_and_leaves_no_process_behind(store, tmp_path, capsys):
    port = free_port()
    command = [sys.executable, "-m", "pgtoolkit.cli", "ui", "--port", str(port)]
    with (
        (tmp_path / "errors.txt").open("w") as errors,
        subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            answers = f"MLflow answers at {address}; Ctrl-C ends it.\n"
            lines = [*iter(server.stdout.readline, answers)]
            assert lines[0] == "newest run    run-newer\n"
            runs = f"{address}/#/experiments/{store['experiment_id']}/runs"
            page = f"{runs}?compareRunsMode=CHART&workflowType=machine_learning"
            assert lines[1] == f"charts        {page}\n"
            assert urllib.request.urlopen(address, timeout=60).status == 200
            assert main(["ui", f"--uri={address}", f"--port={port}"]) == 0
            printed = capsys.readouterr().out.splitlines(keepends=True)
            assert printed[:3] == lines[:3]
            assert "shows these pages itself" in printed[3]
            children = subprocess.run(
                ["pgrep", "-P", str(server.pid)], capture_output=True, text=True
            ).stdout.split()
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=30) == 0
        finally:
            server.terminate()  # so that a failure does not wait for it
    assert len(children) == 1
    # MLflow prints this line whatever it is told.
    (line,) = (tmp_path / "errors.txt").read_text().splitlines()
    assert line.startswith("[MLflow] Security middleware enabled")
    with pytest.raises(ProcessLookupError):
        os.killpg(int(children[0]), 0)  # the server's whole group
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=5)


def line_of_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that refuses these arguments."""
    (line,) = refusal(capsys, "ui", *arguments).splitlines()
    return line


def test_a_missing_store_is_refused_and_not_created(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "got outputs/mlflow.db: no such file" in line_of_refusal(capsys)
    assert not (tmp_path / "outputs").exists()


def test_a_port_that_is_not_a_number_or_not_free_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store.db").touch()
    assert "argument --port: '5x' is no whole number >= 1" in line_of_refusal(capsys, "--port=5x")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        message = line_of_refusal(capsys, "--port", str(port), "--uri=sqlite:///store.db")
    assert (
        f"--port={port} needs a free port of 127.0.0.1, from 1 to 65535 (got: [Errno 98] "
        "Address already in use). Use --port=" in message
    )
