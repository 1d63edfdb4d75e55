"""The provenance of a run has the state of its code and machine, and no secret.

Repositories are made by git, and the collected state is compared with them.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.runs.provenance import collect
from pgtoolkit.system.redaction import redact


def git(directory: Path, *arguments: str) -> str:
    """Run git, and return its output."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    process = subprocess.run(
        ["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return process.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Enter a repository with one commit of code.py."""
    git(tmp_path, "init", "-b", "work")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def collected_state(repository: Path) -> dict | None:
    """Return what is collected of a repository; None if it is not among the repositories."""
    states = {state["path"]: state for state in collect(["pgtk"])["git"]}
    return states.get(str(repository))


def test_a_repository_has_its_commit_branch_and_uncommitted_changes(repository):
    clean = collected_state(repository)
    assert clean["commit"] == git(repository, "rev-parse", "HEAD")
    assert clean["branch"] == "work"
    assert clean["diff"] == ""
    assert clean["untracked"] == []
    (repository / "code.py").write_text("x = 2\n")
    (repository / "new.py").write_text("secret")
    dirty = collected_state(repository)
    assert dirty["diff"].endswith("-x = 1\n+x = 2\n")
    assert dirty["diff_truncated"] is False
    assert dirty["untracked"] == ["new.py"]


def test_a_repository_without_commits_has_none_and_a_plain_directory_is_no_repository(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert collected_state(tmp_path) is None
    git(tmp_path, "init")
    state = collected_state(tmp_path)
    assert state["commit"] is None
    assert state["diff"] == ""


def test_a_diff_has_neither_secrets_nor_files_named_like_secrets(repository):
    names = [
        ".env",
        ".env.local",
        "deep/prod.env",
        "key.PEM",
        "Secrets/all.yaml",
        "aws_credentials",
        "id_rsa",
    ]
    (repository / "deep").mkdir()
    (repository / "Secrets").mkdir()
    for name in names:
        (repository / name).write_text("A=1\n")
    git(repository, "add", "-f", ".")
    git(repository, "commit", "-m", "second")
    for name in names:
        (repository / name).write_text("A=hunter2\n")
    (repository / "code.py").write_text("x = 2\npassword = 'hunter2'\n")
    state = collected_state(repository)
    assert "hunter2" not in json.dumps(state)
    assert state["diff"].endswith("+x = 2\n+password = ***\n")
    assert sorted(state["diff_left_out"]) == sorted(names)


@pytest.mark.parametrize(
    "text",
    [
        "http://me:hunter2@host:5000/x",
        "http://me:hun/ter2@host/x",
        "http://me:hun@ter2@host/x",
        "http://hunter2@host/x",
        "postgresql+psycopg2://me:hunter2@db/x",
        "https://host/x?a=1&passwd=hunter2",
        "https://host?access_token=hunter2&b=1",
        "https://host?X-Amz-Signature=hunter2#f",
        "https://host?key=hunter2",
        "model.api_key=hunter2 seed=1",
        '"password": "hunter2 hunter2"',
        "{'api_key': 'hunter2'}",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        "MLFLOW_TRACKING_TOKEN=hunter2",
        "pwd = hunter2",
        "token: hunter2",
        "task.options.token=hunter",
        'eos_token="hunter"',
        "Authorization: Bearer hunter2",
        "mysql --password hunter2",
        'sampler.arguments=["--api-key","hunter2"]',
        "['--hf-token', 'hunter2']",
        "arguments:\n- --api-key\n- hunter2\n- --enforce-eager",
        "hf_hunter2hunter2hunter2",
        "ghp_hunter2hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_redact_hides_the_common_forms_of_secrets(text):
    hidden = redact(text)
    assert "***" in hidden
    assert "hunter" not in hidden
    assert "ter2" not in hidden
    assert redact(hidden) == hidden


def test_redact_leaves_ordinary_text_alone():
    for text in (
        "accumulation.max_tokens=4096",
        "num_tokens: 3",
        "num_token = 3",
        "user@host",
        "a/b:c",
        "kernel=torch",
        "aggregation=token_mean",
        "token = tokenizer.pad_token",
        "f(token=tokenizer.pad_token)",
        "key=value needs",
        "https://github.com/actions/checkout@v4",
        "http://host:5000/a@v1",
        "sqlite:///outputs/mlflow.db",
        "http://host/?runs=1&metric=reward#/experiments/1",
        "arguments:\n- --skip-tokenizer-init\n- --max-tokens\n- 5",
    ):
        assert redact(text) == text
    assert redact("model.api_key=abc seed=1") == "model.api_key=*** seed=1"


def test_a_secret_in_the_configuration_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for override in (
        "tracking.uri='http://h?passwd=hunter2'",
        "sampler.arguments=['--api-key','hunter2']",
    ):
        assert "hunter2" not in refusal(capsys, override)
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\necho 'NVIDIA H200, 143771 MiB, 570.1'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (
        collect([])["gpus"]
        == [{"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "570.1"}] * 2
    )
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert collect([])["gpus"] == []


def test_neither_environment_nor_secrets_of_the_command_are_collected(repository, monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "hunter2-environment")
    command = [
        "pgtk",
        "tracking.uri=http://me:hunter2@host:5000/x",
        "hf_token=hunter2",
        "loss=gspo",
    ]
    collected = collect(command)
    # The repository of pgtoolkit itself may have uncommitted tests that name the secret.
    collected["git"] = [state for state in collected["git"] if state["path"] == str(repository)]
    text = json.dumps(collected)
    assert "hunter2" not in text
    assert "tracking.uri=http://***@host:5000/x" in text
    assert "loss=gspo" in text
