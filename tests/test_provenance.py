"""Provenance: the code's state, nothing secret, and no torch."""

import json
import os
import subprocess
import sys

import pytest

from pgtoolkit.tracking import provenance
from pgtoolkit.tracking.provenance import collect, redact


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True)
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


def test_a_large_diff_is_cut(repository, monkeypatch):
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 1000)
    (repository / "code.py").write_text("y\n" * 5000)
    dirty = of(repository, collect(["pgtk"]))
    assert (len(dirty["diff"]), dirty["diff_truncated"]) == (1000, True)


def test_repositories_without_commit_and_directories_without_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in [found["path"] for found in collect([])["git"]]
    git(tmp_path, "init")
    empty = of(tmp_path, collect([]))
    assert (empty["commit"], empty["diff"]) == (None, "")


def test_a_repository_cannot_run_its_own_programs(repository):
    for key in ("core.fsmonitor", "diff.external"):
        git(repository, "config", key, f"touch {repository}/ran")
    (repository / "code.py").write_text("x = 2\n")
    collect([])
    assert not (repository / "ran").exists()


def test_nothing_secret_is_kept(repository, monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "hunter2-environment")
    command = ["pgtk", "tracking.uri=http://me:hunter2@host:5000/x", "hf_token=hunter2", "loss=gspo"]
    text = json.dumps(collect(command))
    assert "hunter2" not in text
    assert "tracking.uri=http://***@host:5000/x" in text
    assert "loss=gspo" in text


def test_redact_leaves_ordinary_text_alone():
    for text in ("accumulation.max_tokens=4096", "num_tokens: 3", "user@host", "a/b:c", "kernel=torch"):
        assert redact(text) == text
    assert redact("model.api_key=abc seed=1") == "model.api_key=*** seed=1"


def test_packages_and_machine():
    collected = collect(["pgtk", "seed=1"])
    assert collected["packages"]["omegaconf"].startswith("2.")
    assert collected["command"] == ["pgtk", "seed=1"]
    assert collected["cpus"]["machine"] == os.cpu_count()
    assert collected["memory_bytes"] > 1e8
    assert json.loads(json.dumps(collected)) == collected


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert collect([])["gpus"] == [{"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "570.1"}] * 2
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert collect([])["gpus"] == []


def test_tracking_imports_no_torch():
    code = (
        "import sys, pgtoolkit.tracking.provenance as p, pgtoolkit.tracking.run_directory, "
        "pgtoolkit.tracking.mlflow_store, pgtoolkit.tracking.plots, pgtoolkit.tracking.progress; p.collect([]);"
        "print([name for name in ('torch', 'mlflow', 'matplotlib', 'hydra') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
