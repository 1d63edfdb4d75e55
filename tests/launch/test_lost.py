"""Runs that lose a node, their disk or their data, and `pgtk continue`: the status and the exit say
so, and what was saved is continued."""

from __future__ import annotations

import json
import os
import shlex
import signal

import pytest
from builders.commands import ENVIRONMENT, wait_until
from builders.processes import ForkedProcess, free_port
from builders.refusals import refusal
from builders.runs import SHORT, at_step, last_of_each_key, metrics_of, run
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.runs.records import read_status


@pytest.mark.slow
def test_a_lost_node_is_named_in_the_log_and_the_status_of_the_run(tmp_path):
    """Two ranks without a common parent, as on two nodes. The first is killed."""
    port = free_port()
    overrides = last_of_each_key(
        *SHORT, "parallelism=ddp", "trainer.max_steps=100000", "trainer.checkpoint_every=1000"
    )
    ranks = []
    for rank in range(2):
        place = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks.append(
            ForkedProcess(
                [*overrides, f"hydra.run.dir={tmp_path / 'run'}"],
                tmp_path,
                ENVIRONMENT | {name: str(value) for name, value in place.items()},
                tmp_path / f"rank-{rank}",
            )
        )
    rows = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, 120)
    ranks[0].send_signal(signal.SIGKILL)
    assert ranks[1].wait(60) == 5
    errors = (tmp_path / "rank-1").read_text()
    reason = "rank 1 waited for another process, which ended or did not answer within"
    assert errors.count("pgtk: error: ") == errors.count(reason) == 1
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed"
    assert reason in status["reason"]
    assert (tmp_path / "run" / "run.log").read_text().count(f"ERROR RankLost: {reason}") == 1


def test_a_directory_without_a_configuration_is_free_for_a_run(tmp_path, monkeypatch):
    """A kill during the imports leaves such a directory, and so does a refused run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("run.log", "data.json", "overrides.yaml", "provenance.json"):
        (tmp_path / "run" / name).write_text("{}")
    overrides = last_of_each_key(*SHORT, "trainer.max_steps=1", "hydra.run.dir=run")
    assert main(overrides) == 0
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1]


OVERRIDES = last_of_each_key(*SHORT, "trainer.max_steps=4", "trainer.checkpoint_every=2")


def test_continue_starts_a_run_and_continues_it_after_a_signal_bit_equal_to_an_uninterrupted_run(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGXCPU))
        assert main(["continue", "my run", *OVERRIDES]) == 75
    status = read_status(tmp_path / "my run")
    assert (status["state"], status["reason"], status["step"]) == ("interrupted", "SIGXCPU", 3)
    assert main(["continue", "my run", *OVERRIDES]) == 0
    uninterrupted = run(tmp_path / "uninterrupted", *OVERRIDES)
    assert metrics_of(tmp_path / "my run") == metrics_of(uninterrupted)
    assert not (tmp_path / "my run" / "drift.jsonl").exists()


def test_a_resume_of_a_finished_run_says_how_to_train_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "finished", *last_of_each_key(*OVERRIDES, "trainer.max_steps=2"))
    capsys.readouterr()
    assert main(["resume", "finished"]) == 0
    assert "pgtk resume finished trainer.max_steps=4" in capsys.readouterr().err
    assert main(["resume", "finished", "trainer.max_steps=4"]) == 0
    assert read_status(tmp_path / "finished")["step"] == 4


def test_continue_changes_nothing_of_a_run_that_is_done_or_has_another_configuration(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "my run", *OVERRIDES)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "my run").rglob("*")}
    capsys.readouterr()
    assert main(["continue", "my run", *OVERRIDES]) == 0
    assert capsys.readouterr().out == "my run is done: nothing is left to train.\n"
    message = refusal(capsys, "continue", "my run", *last_of_each_key(*OVERRIDES, "seed=5"))
    # A resume would refuse another seed as well, so only another directory is suggested.
    assert message.endswith(
        "(got one with seed=0, not 5). A run is continued as it was. Use another directory.\n"
    )
    message = refusal(capsys, "continue", "my run", *OVERRIDES, "loss=grpo")
    command = shlex.split(message.partition("Use another directory, or ")[2].removesuffix(".\n"))
    arguments = ["--step=4", "hydra.run.dir='my run-4'", "loss=grpo", "trainer.max_steps=8"]
    assert command[1:] == ["resume", "my run", *arguments]
    assert main(["continue", "seed=5"]) == 2
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "my run").rglob("*")} == before


DISK_FILLED_AT_STEP_2 = """
import ctypes, os, subprocess, sys
from pathlib import Path
from pgtoolkit.cli import main
from pgtoolkit.runs.directory import RunDirectory

folder, *words = sys.argv[1:]
user, group = os.getuid(), os.getgid()
# Namespaces of its own for users and file systems, in which this process may mount one.
if ctypes.CDLL(None).unshare(0x10020000) != 0:
    sys.exit(77)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder]).returncode:
    sys.exit(77)
os.chdir(folder)

written = RunDirectory.append_metrics

def append_metrics(self, step, metrics):
    written(self, step, metrics)
    if step == 2:
        with open("filled", "wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError:
                pass

RunDirectory.append_metrics = append_metrics
status = main(words)
print(Path("run/status.json").read_text())
sys.exit(status)
"""


@pytest.mark.slow
def test_the_status_of_a_run_on_a_full_disk_is_failed(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    program = tmp_path / "program.py"
    program.write_text(DISK_FILLED_AT_STEP_2)
    printed = tmp_path / "printed"
    overrides = last_of_each_key(*SHORT, "trainer.keep_checkpoints=1")
    words = [str(disk), *overrides, "hydra.run.dir=run"]
    exit_status = ForkedProcess(words, tmp_path, ENVIRONMENT, printed, str(program)).wait(120)
    if exit_status == 77:
        pytest.skip("no file system can be mounted here")
    shown = printed.read_text()
    assert exit_status == 6, shown
    assert "pgtk: error: " in shown
    assert "No space left on device" in shown
    status = json.loads(shown[shown.rindex("\n{\n") :])
    assert status["state"] == "failed"
    assert "No space left on device" in status["reason"]


def test_a_resume_writes_to_no_outside_folder_that_only_the_run_s_file_names(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = run(tmp_path / "run", "trainer.max_steps=1", "rollout.save_path=elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / "kept")
    message = refusal(capsys, "resume", "run", "trainer.max_steps=3")
    place = f"rollout.save_path={tmp_path}/elsewhere"
    assert f"{place} needs to be typed (got it from the run's file)" in message
    assert not (tmp_path / "elsewhere").exists()
    assert main(["resume", "run", "trainer.max_steps=3", place]) == 0
    assert (tmp_path / "elsewhere").is_dir()
    assert f"resume run {place} trainer.max_steps=6" in capsys.readouterr().out
    config = OmegaConf.load(folder / "config.yaml")
    config.rollout.save_path = str(folder / "inside")
    OmegaConf.save(config, folder / "config.yaml")
    assert main(["resume", "run", "trainer.max_steps=5"]) == 0


def test_data_that_ends_before_the_last_step_ends_the_run_which_can_be_resumed_with_more_epochs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "token_ids": [1, 2, 3],
            "loss_mask": [False, True, True],
            "old_log_probs": [0.0, -1.0, -1.0],
            "advantage": 1.0,
        }
        for _ in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorded = [
        "tracking=none",
        "rollout=recorded",
        "rollout.path=rows.jsonl",
        "advantage=given",
        "model.hidden_size=32",
        "accumulation.docs_per_step=8",
        "trainer.max_steps=5",
        "aggregation=token_mean",
    ]
    assert main([*recorded, "hydra.run.dir=run"]) == 0
    printed = capsys.readouterr().out
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"]) == ("done", 3)
    assert (
        status["reason"]
        == "the data ended after step 3 of 5: rollout.epochs=1 is how often it is read"
    )
    assert status["reason"] in printed
    assert "resume run rollout.epochs=2\n" in printed
    assert main(["resume", "run", "rollout.epochs=2"]) == 0
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert read_status(tmp_path / "run")["reason"] is None
