"""Provenance: the code's state, nothing secret, and no torch."""

import json
import os
import subprocess

import pytest

from pgtoolkit.cli import main
from pgtoolkit.runs.provenance import collect
from pgtoolkit.system.redaction import redact


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    git(tmp_path, "init", "-b", "work")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(path, collected):
    return next(found for found in collected["git"] if found["path"] == str(path))


def test_uncommitted_changes_are_kept(repository):
    clean = of(repository, collect(["pgtk"]))
    assert clean["commit"] == git(repository, "rev-parse", "HEAD")
    assert (clean["branch"], clean["diff"], clean["untracked"]) == ("work", "", [])
    (repository / "code.py").write_text("x = 2\n")
    (repository / "new.py").write_text("secret")
    dirty = of(repository, collect(["pgtk"]))
    assert dirty["diff"].endswith("-x = 1\n+x = 2\n")
    assert (dirty["diff_truncated"], dirty["untracked"]) == (False, ["new.py"])


def test_repositories_without_commit_and_directories_without_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in [found["path"] for found in collect([])["git"]]
    git(tmp_path, "init")
    empty = of(tmp_path, collect([]))
    assert (empty["commit"], empty["diff"]) == (None, "")


def test_secrets_of_tracked_files_stay_where_they_are(repository):
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
    dirty = of(repository, collect([]))
    assert "hunter2" not in json.dumps(dirty)
    assert dirty["diff"].endswith("+x = 2\n+password = ***\n")
    assert sorted(dirty["diff_left_out"]) == sorted(names)


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
        *(
            "accumulation.max_tokens=4096",
            "num_tokens: 3",
            "num_token = 3",
            "user@host",
            "a/b:c",
            "kernel=torch",
        ),
        *(
            "aggregation=token_mean",
            "token = tokenizer.pad_token",
            "f(token=tokenizer.pad_token)",
            "key=value needs",
        ),
        *(
            "https://github.com/actions/checkout@v4",
            "http://host:5000/a@v1",
            "sqlite:///outputs/mlflow.db",
        ),
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
        assert main([override]) == 2
        assert "hunter2" not in capsys.readouterr().err
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


def test_nothing_secret_is_kept(repository, monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "hunter2-environment")
    command = [
        "pgtk",
        "tracking.uri=http://me:hunter2@host:5000/x",
        "hf_token=hunter2",
        "loss=gspo",
    ]
    text = json.dumps(collect(command))
    assert "hunter2" not in text
    assert "tracking.uri=http://***@host:5000/x" in text
    assert "loss=gspo" in text
