"""Commands that a run prints, and names that a shell expands, do what they say when typed."""

import json
import shlex
import subprocess

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main

MINE = "# @package _global_\nseed: 3\n"


def words_of_bash(command: str) -> list[str]:
    """Return the words that bash gives to the program of a command."""
    script = f"printf '%s\\0' {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[1:-1]


@pytest.mark.slow
def test_the_commands_that_a_run_prints_succeed_in_bash(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my, options" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(MINE)
    words = [
        "--config-dir=my, options",
        "experiment=mine",
        "debug=short",
        "trainer.max_steps=1",
        'rollout.save_path="a=b, c"',
        "hydra.run.dir='my=run, 1'",
    ]
    assert main(words) == 0
    printed = [line[13:] for line in capsys.readouterr().out.splitlines()]
    commands = [line for line in printed if "pgtk " in line.partition("'")[0]]
    second_words = [shlex.split(command)[1] for command in commands]
    assert second_words == ["resume", "--config-dir=my, options"], printed
    for command in commands:
        assert main(words_of_bash(command)) == 0, command
    assert "loss" in capsys.readouterr().out


def test_compare_skips_files_of_a_sweep_among_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "sweep" / "0-seed-1"
    job.mkdir(parents=True)
    (job / "config.yaml").write_text("seed: 1\ntrainer: {max_steps: 1}\n")
    (job / "status.json").write_text('{"state": "done", "step": 1}')
    (job / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    sweep = {"name": "sweep", "command": [], "jobs": []}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(sweep))
    assert main(["compare", "sweep/0-seed-1", "sweep/sweep.json"]) == 0
    assert capsys.readouterr().err == "note: skipped, since there is no run: sweep/sweep.json\n"
    message = (
        "pgtk compare sweep/sweep.json needs a run directory, a folder that holds runs, or a "
        "sweep's name"
    )
    assert message in refusal(capsys, "compare", "sweep/sweep.json")
