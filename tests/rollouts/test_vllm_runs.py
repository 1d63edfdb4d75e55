"""Whole runs with sampler=vllm, against a small server of vLLM's protocol: what they learn, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.runs import SHORT, checkpoint_of, copy_as_of, metrics_of, once, run
from builders.vllm_servers import COMMAND, gone, processes_of

from pgtoolkit.errors import SamplerLost
from pgtoolkit.runs.completions import read_completions
from pgtoolkit.runs.directory import read_status
from pgtoolkit.runs.files import read_evaluations

pytestmark = pytest.mark.slow  # servers are processes

PGTK = Path(sys.executable).with_name("pgtk")
VLLM = ("sampler=vllm", f"sampler.executable={COMMAND}", "trainer.device=cpu", "rollout.stop=['99']")
ENDLESS = ("trainer.max_steps=100000", "trainer.keep_checkpoints=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps, with the log-probs that the server has sampled with."""
    return run(tmp_path_factory.mktemp("whole") / "run", *VLLM, "rollout.old_log_probs=sampling")


def test_the_first_ratio_is_one(whole):
    rows = metrics_of(whole)
    assert len(rows) == 6
    for row in rows[::2]:  # of the two steps of a batch the first is that of the policy that sampled it
        assert abs(row["ratio_new_old"] - 1) < 1e-4
        assert abs(row["max_ratio_new_old"] - 1) < 1e-4
        assert row["kl_new_old"] < 1e-7
    assert max(abs(row["max_ratio_new_old"] - 1) for row in rows[1::2]) > 1e-3


def test_a_run_leaves_no_server_and_keeps_its_log(whole):
    assert "engine" in (whole / "vllm.log").read_text()
    assert processes_of(whole) == []
    assert "starting a sampling server" in (whole / "run.log").read_text()


def test_a_resumed_run_goes_on_to_the_last_bit(whole, tmp_path):
    cut = copy_as_of(whole, 3, tmp_path / "run")
    run(cut, *VLLM, "rollout.old_log_probs=sampling", resume=True)
    assert metrics_of(cut) == metrics_of(whole)
    found, expected = (checkpoint_of(folder, 6)["model"] for folder in (cut, whole))
    assert all(bool((found[name] == weight).all()) for name, weight in expected.items())


def test_evaluations_by_the_same_servers_leave_the_training_as_it_is(whole, tmp_path):
    """With a length of their own; the servers get the weights of every evaluation."""
    more = ("evaluation.every=1", "evaluation.prompts_per_set=3", "evaluation.max_completion_length=2")
    found = run(tmp_path / "run", *VLLM, "rollout.old_log_probs=sampling", *more, "evaluation.sets.a.num_digits=1")
    assert metrics_of(found) == metrics_of(whole)
    rows = read_evaluations(found)
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows:
        completions = read_completions(found / "completions" / f"evaluation_a_{row['step']:06d}.parquet")
        assert {one.version for one in completions} == {row["step"]}
        assert max(one.tokens for one in completions) <= 2


def test_a_lost_server_loses_no_step(whole, tmp_path):
    """After four calls each for two batches, and one to prove each, the third batch finds no server."""
    folder, lost = tmp_path / "run", f"sampler.executable={COMMAND} --fault dies --after 12"
    more = ("rollout.old_log_probs=sampling", "trainer.checkpoint_every=1000")
    with pytest.raises(SamplerLost, match=r"ended with status 1.* Continue with: .*pgtk resume"):
        run(folder, *VLLM, *more, lost)
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("failed", 4)
    assert "SamplerLost: the sampling server" in status["reason"]
    run(folder, *VLLM, *more, resume=True)
    assert metrics_of(folder) == metrics_of(whole)


class Command:
    """`pgtk` with the short settings in `folder`/run."""

    def __init__(self, folder: Path, *overrides: str):
        self.directory, self.log = folder / "run", folder / "terminal"
        settings = once(*SHORT, *VLLM, f"hydra.run.dir={self.directory}", *overrides)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        with self.log.open("w") as file:
            self.process = subprocess.Popen([PGTK, *settings], cwd=folder, stdout=file, stderr=file, env=environment)

    def steps(self) -> int:
        rows = self.directory / "metrics.jsonl"
        return len(rows.read_text().splitlines()) if rows.exists() else 0

    def wait_for_steps(self, count: int, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while self.steps() < count:
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def folders(self) -> list[Path]:
        return [path for path in (self.directory.parent / "weights").glob("pgtk-weights-*") if path.exists()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_leaves_no_server(tmp_path, ranks):
    more = ("parallelism=ddp",) if ranks > 1 else ()
    command = Command(tmp_path, *ENDLESS, *more, f"sampler.weights_folder={tmp_path}/weights")
    command.wait_for_steps(3)
    assert len(processes_of(command.directory)) == 2
    assert len(command.folders()) == 1
    command.process.kill()
    command.process.wait()
    assert gone(command.directory)
    deadline = time.monotonic() + 10
    while command.folders() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert command.folders() == []


@pytest.mark.slow
def test_ctrl_c_ends_the_step_and_then_the_server(tmp_path):
    command = Command(tmp_path, *ENDLESS)
    command.wait_for_steps(3)
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(60) == 75
    assert processes_of(command.directory) == []


@pytest.mark.slow
def test_the_guard_itself_may_be_killed(tmp_path):
    command = Command(tmp_path, *ENDLESS)
    command.wait_for_steps(3)
    server = next(process for process in processes_of(command.directory) if "serve" in process.cmdline())
    server.parent().kill()
    assert command.process.wait(60) == 5
    assert gone(command.directory)
    assert "ended with status" in command.log.read_text()


@pytest.mark.slow
def test_two_ranks_share_a_server(tmp_path):
    """They learn what one process learns: each prompt has its seed, whoever asks."""
    marks = tmp_path / "marks"
    folders = []
    for name, more in (("one", ()), ("two", ("parallelism=ddp",))):
        (tmp_path / name).mkdir()
        own = f"sampler.executable={COMMAND} --marks {marks}-{name}"
        command = Command(tmp_path / name, *more, "rollout.old_log_probs=sampling", own)
        assert command.process.wait(200) == 0, command.log.read_text()
        folders.append(command.directory)
    first, second = (metrics_of(folder) for folder in folders)
    for one, two in zip(first, second, strict=True):
        for key in ("reward", "loss", "ratio_new_old", "num_tokens", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-6), key
    starts, syncs, asked = ([], [], [])
    for name in ("one", "two"):
        lines = Path(f"{marks}-{name}").read_text().splitlines()
        starts.append(sum(line.startswith("start") for line in lines))
        syncs.append(lines.count("/collective_rpc"))
        asked.append(sorted(line for line in lines if line.startswith("complete")))
    assert starts == [1, 1]
    assert syncs == [2, 2]
    assert asked[0] == asked[1]
    variables, _, path = json.loads(Path(f"{marks}-two").read_text().splitlines()[0][6:])
    assert variables["RANK"] is None
    assert path == (os.environ.get("PYTHONPATH") or "")
    assert processes_of(folders[1]) == []


@pytest.mark.slow
def test_a_fault_that_one_rank_meets_ends_all_with_one_message(tmp_path):
    own = f"sampler.executable={COMMAND} --fault foreign_token --after 6"
    command = Command(tmp_path, "parallelism=ddp", own)
    assert command.process.wait(200) == 5
    said = command.log.read_text()
    assert said.count("it sampled token") == 1
    assert "Continue with: " in said
    assert processes_of(command.directory) == []
