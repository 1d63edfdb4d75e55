"""MLflow's credentials go to a server that was typed, not to one that a file of somebody else's names."""

import shlex
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from builders.runs import SHORT, config_of
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.launch.check import check, problems
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.next_commands import resume_command, sync_command

TOKEN = "MLFLOW_TRACKING_TOKEN"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Its address; it keeps what it was shown in `shown`, and answers nobody's question."""
    shown = []

    class Asked(BaseHTTPRequestHandler):
        def do_POST(self):
            shown.append(self.headers.get("Authorization"))
            self.send_error(500)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with HTTPServer(("127.0.0.1", 0), Asked) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", shown
        listening.shutdown()


@pytest.fixture
def theirs(server, tmp_path):
    """A run of somebody's, which says that it is tracked there."""
    short = [one for one in SHORT if one != "tracking=none"]
    with RunDirectory(tmp_path / "run") as run:
        run.write_config(OmegaConf.to_container(config_of(*short, f"tracking.uri={server[0]}"), resolve=True), [])
        run.append_metrics(1, {"loss": 0.5})
        run.set_status("interrupted", 1)
    return tmp_path / "run"


def said(uri, use, what=TOKEN):
    return (
        f"tracking.uri={uri} needs to be typed (got it from a file). What {what} holds would be sent there. "
        f"Use {use}={uri} if you trust it."
    )


def test_a_run_of_somebodys_gets_no_credentials(server, theirs, monkeypatch, capsys):
    uri, shown = server
    monkeypatch.setenv(TOKEN, "secret")
    assert main(["sync", "run"]) == 2
    assert capsys.readouterr().err == f"pgtk: error: {said(uri, '--uri')}\n"
    assert main(["resume", "run"]) == 2
    assert capsys.readouterr().err == f"pgtk: error: {said(uri, 'tracking.uri')}\n"
    assert shown == []
    assert main(["sync", "run", f"--uri={uri}"]) == 6
    assert set(shown) == {"Bearer secret"}
    assert compose([f"tracking.uri={uri}"], run_dir=theirs).problems == []
    assert compose(["tracking=none"], run_dir=theirs).problems == []
    assert shlex.split(sync_command(theirs))[1:] == ["sync", "run", f"--uri={uri}"]
    assert shlex.split(resume_command(theirs))[1:] == ["resume", "run", f"tracking.uri={uri}"]


def test_without_credentials_or_at_ones_own_server_nothing_is_typed_again(server, theirs, monkeypatch, tmp_path):
    uri, _ = server
    assert compose([], run_dir=theirs).problems == []
    assert shlex.split(sync_command(theirs))[1:] == ["sync", "run"]
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\nmlflow_tracking_username = me\n")
    assert compose([], run_dir=theirs).problems == [said(uri, "tracking.uri", "~/.mlflow/credentials")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert compose([], run_dir=theirs).problems == []


def test_a_file_of_a_sweep_gets_no_credentials(server, monkeypatch, tmp_path):
    uri, _ = server
    monkeypatch.setenv(TOKEN, "secret")
    (tmp_path / "mine.yaml").write_text(f"defaults: [config, _self_]\ntracking: {{uri: '{uri}'}}\n")
    assert problems(check(["seed=1,2"], True, sweep_file=tmp_path / "mine.yaml")) == [said(uri, "tracking.uri")]
    assert problems(check(["seed=1,2", f"tracking.uri={uri}"], True, sweep_file=tmp_path / "mine.yaml")) == []
    assert problems(check([f"tracking.uri={uri}"])) == []
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/x.yaml").write_text(f"# @package _global_\ntracking: {{uri: '{uri}'}}\n")
    assert problems(check(["experiment=x"], config_dir="conf")) == [said(uri, "tracking.uri")]
