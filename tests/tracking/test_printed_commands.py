"""The commands that a run prints, taken from its output and run by a shell."""

import os
import shlex
import subprocess
import sys

import pytest

from pgtoolkit.cli import main

MINE = "# @package _global_\nseed: 3\n"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a line of bash in tmp_path, where pgtk is this one."""
    program = tmp_path / "bin" / "pgtk"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pgtoolkit.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def run(line):
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.slow
def test_what_a_run_prints_runs_as_typed(tmp_path, shell, capsys):
    folder = tmp_path / "my, options" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(MINE)
    typed = [
        "--config-dir=my, options",
        "experiment=mine",
        "debug=short",
        "trainer.max_steps=1",
        'rollout.save_path="a=b, c"',
        "hydra.run.dir='my=run, 1'",
    ]
    assert main(typed) == 0
    printed = [line[13:] for line in capsys.readouterr().out.splitlines()]
    pgtk = [line for line in printed if "pgtk " in line.partition("'")[0]]
    assert [shlex.split(line)[1] for line in pgtk] == ["resume", "--config-dir=my, options", "compare"], printed
    for line in pgtk:
        done = shell(line)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert "loss" in done.stdout
    assert "2 runs" in done.stdout, done.stdout


def test_compare_takes_all_that_a_shell_finds_in_a_sweep(tmp_path, shell):
    job = tmp_path / "sweep" / "0-seed-1"
    job.mkdir(parents=True)
    (job / "config.yaml").write_text("seed: 1\ntrainer: {max_steps: 1}\n")
    (job / "status.json").write_text('{"state": "done", "step": 1}')
    (job / "overrides.yaml").write_text("[seed=1]\n")
    (job / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    (tmp_path / "sweep" / "a.log").touch()
    done = shell("pgtk compare sweep/*")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "note: passed over, there is no run: sweep/a.log sweep/sweep.json\n"
    done = shell("pgtk compare sweep/*.log")
    assert done.returncode == 2
    assert "pgtk compare sweep/a.log needs a run directory, a folder that holds runs, or a sweep's name" in done.stderr
