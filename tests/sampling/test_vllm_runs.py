"""Whole runs with sampler=vllm, against a small server of vLLM's protocol: what they learn, and
what they leave."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from builders.runs import SHORT, checkpoint_of, copy_as_of, metrics_of, run
from builders.vllm_servers import COMMAND, ServerCommand, all_ended, processes_of

from pgtoolkit.errors import SamplerLost
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations, read_status
from pgtoolkit.sampling.vllm import Vllm

pytestmark = pytest.mark.slow  # servers are processes

VLLM = (
    "sampler=vllm",
    f"sampler.executable={COMMAND}",
    "trainer.device=cpu",
    "rollout.stop=['99']",
)
ENDLESS = ("trainer.max_steps=100000", "trainer.keep_checkpoints=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps, with the log-probs that the server has sampled with; beside it what the
    server noted."""
    folder = tmp_path_factory.mktemp("whole")
    own = f"sampler.executable={COMMAND} --marks {folder}/marks"
    return run(folder / "run", *VLLM, "rollout.old_log_probs=sampling", own)


def test_the_first_ratio_is_one(whole):
    rows = metrics_of(whole)
    assert len(rows) == 6
    # of the two steps of a batch the first is that of the policy that sampled it
    for row in rows[::2]:
        assert abs(row["ratio_new_old"] - 1) < 1e-4
        assert abs(row["max_ratio_new_old"] - 1) < 1e-4
        assert row["kl_new_old"] < 1e-7
    assert max(abs(row["max_ratio_new_old"] - 1) for row in rows[1::2]) > 1e-3


def test_proximal_ratios_are_to_the_weights_that_a_batch_begins_with(tmp_path):
    """Of completions of weights of two updates before, which the correction sees."""
    chosen = (
        "rollout.lag=2",
        "rollout.old_log_probs=proximal",
        "correction=token_truncate",
        "loss=grpo",
    )
    rows = metrics_of(run(tmp_path / "run", *VLLM, *chosen))
    assert [row["staleness"] for row in rows] == [0, 1, 2, 3, 2, 3]
    for row in rows[::2]:
        assert abs(row["max_ratio_new_old"] - 1) < 1e-5
    assert rows[0]["max_difference_old_sampling"] < 1e-4
    assert min(row["max_difference_old_sampling"] for row in rows[2:]) > 1e-3


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
    more = (
        "evaluation.every=1",
        "evaluation.prompts_per_set=3",
        "evaluation.max_completion_length=2",
    )
    more += (
        "evaluation.sets.a.num_digits=1",
        f"sampler.executable={COMMAND} --marks {tmp_path}/marks",
    )
    found = run(tmp_path / "run", *VLLM, "rollout.old_log_probs=sampling", *more)
    assert metrics_of(found) == metrics_of(whole)
    rows = read_evaluations(found)
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows:
        completions = read_completions(
            found / "completions" / f"evaluation_a_{row['step']:06d}.parquet"
        )
        assert {one.version for one in completions} == {row["step"]}
        assert max(one.tokens for one in completions) <= 2
    seeds = prompts_of((tmp_path / "marks").read_text().splitlines())
    assert len(seeds) == len({*seeds}) == 3 * 4 + 7 * 3  # each evaluation draws anew


def test_a_lost_server_loses_no_step(whole, tmp_path):
    """After four calls each for two batches the third finds no server."""
    folder, lost = tmp_path / "run", f"sampler.executable={COMMAND} --fault dies --after 8"
    more = ("rollout.old_log_probs=sampling", "trainer.checkpoint_every=1000")
    with pytest.raises(SamplerLost, match=r"ended with status 1.* Continue with: .*pgtk resume"):
        run(folder, *VLLM, *more, lost)
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("failed", 4)
    assert "SamplerLost: the sampling server" in status["reason"]
    run(folder, *VLLM, *more, resume=True)
    assert metrics_of(folder) == metrics_of(whole)


def started(folder: Path, *overrides: str) -> ServerCommand:
    return ServerCommand(folder, *SHORT, *VLLM, *overrides)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_leaves_no_server(tmp_path, ranks):
    more = ("parallelism=ddp",) if ranks > 1 else ()
    command = started(tmp_path, *ENDLESS, *more, f"sampler.weights_folder={tmp_path}/weights")
    command.wait_for_steps(3)
    server, weights = processes_of(command.directory), command.weights()
    assert len(server) == 2
    assert [weights] == [*(tmp_path / "weights").iterdir()]
    command.kill()
    assert all_ended(server)
    deadline = time.monotonic() + 10
    while weights.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not weights.exists()


def test_ctrl_c_ends_the_step_and_then_the_server(tmp_path):
    command = started(tmp_path, *ENDLESS)
    command.wait_for_steps(3)
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(60) == 75
    assert processes_of(command.directory) == []


def test_the_guard_itself_may_be_killed(tmp_path):
    command = started(tmp_path, *ENDLESS)
    command.wait_for_steps(3)
    guard, *server = command.server_processes()
    guard.kill()
    assert command.process.wait(60) == 5
    assert all_ended(server)
    assert "ended with status" in command.log.read_text()


def test_two_ranks_share_two_servers(whole, tmp_path):
    """They learn what one process learns with one server: each prompt has its seed, whoever asks
    whom."""
    own = f"sampler.executable={COMMAND} --marks {tmp_path}/marks-PORT"
    more = ("parallelism=ddp", "rollout.old_log_probs=sampling", "sampler.servers_per_gpu=2")
    command = started(tmp_path, *more, own)
    assert command.process.wait(200) == 0, command.log.read_text()
    for one, two in zip(metrics_of(whole), metrics_of(command.directory), strict=True):
        for key in ("reward", "loss", "ratio_new_old", "num_tokens", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-6), key
    asked = []
    for marks in tmp_path.glob("marks-*"):
        lines = marks.read_text().splitlines()
        assert [line.split()[0] for line in lines].count("start") == 1
        assert lines.count("/collective_rpc load_from_memory") == 3
        assert lines.count("complete score") == 3
        variables, _, path = json.loads(lines[0][6:])
        assert variables["RANK"] is None
        assert path == os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(Vllm.MODULES)])
        )
        asked.append(prompts_of(lines))
    assert [len(lines) for lines in asked] == [6, 6]  # of three batches of four prompts
    assert sorted(asked[0] + asked[1]) == sorted(
        prompts_of((whole.parent / "marks").read_text().splitlines())
    )
    assert processes_of(command.directory) == []


def prompts_of(noted: list[str]) -> list[str]:
    """The requests of training among what a server has noted; others score a text."""
    return [line for line in noted if line.startswith("complete ") and line != "complete score"]


def test_a_fault_that_one_rank_meets_ends_all_with_one_message(tmp_path):
    own = f"sampler.executable={COMMAND} --fault foreign_token --after 6"
    command = started(tmp_path, "parallelism=ddp", own)
    assert command.process.wait(200) == 5
    said = command.log.read_text()
    assert said.count("it sampled token") == 1
    assert "Continue with: " in said
    assert processes_of(command.directory) == []
