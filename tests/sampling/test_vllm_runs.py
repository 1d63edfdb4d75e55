"""Runs with sampler=vllm and the small server of the tests: their metrics, their resumes, and the
processes and files that they leave."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from builders.parallel_runs import lost_sampler_of_rank, run_on_ranks
from builders.processes import world
from builders.runs import (
    SHORT,
    assert_equal,
    at_step,
    checkpoint_of,
    config_of,
    copy_as_of,
    last_of_each_key,
    metrics_of,
    run,
)
from builders.vllm_servers import COMMAND, ServerCommand, all_ended, processes_of

from pgtoolkit.cli import main
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
SAMPLING = "rollout.old_log_probs=sampling"
ENDLESS = ("trainer.max_steps=100000", "trainer.keep_checkpoints=2")


def noting(path: Path) -> str:
    """Return the override with which the server notes its calls in a file."""
    return f"sampler.executable={COMMAND} --marks {path}"


def noted_requests(path: Path) -> list[str]:
    """Return the requests for completions that a server has noted; others score a text."""
    lines = path.read_text().splitlines()
    return [line for line in lines if line.startswith("complete ") and line != "complete score"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of six steps; `marks` beside it has the calls of its server."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run(folder / "run", *VLLM, SAMPLING, noting(folder / "marks"))


def test_the_first_update_of_a_batch_has_ratios_of_one(uninterrupted):
    """Its weights are those that sampled the batch; a batch has two updates."""
    rows = metrics_of(uninterrupted)
    assert len(rows) == 6
    for row in rows[::2]:
        assert abs(row["ratio_new_old"] - 1) < 1e-4
        assert abs(row["max_ratio_new_old"] - 1) < 1e-4
        assert row["kl_new_old"] < 1e-7
    assert max(abs(row["max_ratio_new_old"] - 1) for row in rows[1::2]) > 1e-3


def test_a_run_leaves_no_server_and_keeps_its_log(uninterrupted):
    assert "engine" in (uninterrupted / "vllm.log").read_text()
    assert processes_of(uninterrupted) == []
    assert "starting a sampling server" in (uninterrupted / "run.log").read_text()


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(uninterrupted, tmp_path):
    resumed = copy_as_of(uninterrupted, 3, tmp_path / "run")
    run(resumed, *VLLM, SAMPLING, resume=True)
    assert metrics_of(resumed) == metrics_of(uninterrupted)
    assert_equal(checkpoint_of(resumed, 6)["model"], checkpoint_of(uninterrupted, 6)["model"])


def test_evaluations_by_the_same_server_do_not_change_the_training(uninterrupted, tmp_path):
    """They have another length, and the weights of their step."""
    marks = tmp_path / "marks"
    evaluated = run(
        tmp_path / "run",
        *VLLM,
        SAMPLING,
        "evaluation.every=1",
        "evaluation.prompts_per_set=3",
        "evaluation.max_completion_length=2",
        "evaluation.sets.a.num_digits=1",
        noting(marks),
    )
    assert metrics_of(evaluated) == metrics_of(uninterrupted)
    rows = read_evaluations(evaluated)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    for row in rows:
        name = f"evaluation_a_{row['step']:06d}.parquet"
        completions = read_completions(evaluated / "completions" / name)
        assert {completion.version for completion in completions} == {row["step"]}
        assert max(completion.tokens for completion in completions) <= 2
    requests = noted_requests(marks)
    assert len(requests) == 3 * 4 + 7 * 3
    assert len(set(requests)) == len(requests)  # each evaluation has its own seeds


def test_a_run_that_lost_its_server_loses_no_step(uninterrupted, tmp_path):
    """The server ends after eight calls, four for each batch: the third batch finds none."""
    folder = tmp_path / "run"
    overrides = (*VLLM, SAMPLING, "trainer.checkpoint_every=1000")
    dying = f"sampler.executable={COMMAND} --fault dies --after 8"
    with pytest.raises(SamplerLost, match=r"ended with status 1.* Continue with: .*pgtk resume"):
        run(folder, *overrides, dying)
    status = read_status(folder)
    assert status["state"] == "failed"
    assert status["step"] == 4
    assert "SamplerLost: the sampling server" in status["reason"]
    run(folder, *overrides, resume=True)
    assert metrics_of(folder) == metrics_of(uninterrupted)


def test_a_run_that_is_killed_leaves_no_server_and_no_weights(tmp_path):
    """Rank 0 has started the server; the command alone is killed."""
    folder = f"sampler.weights_folder={tmp_path}/weights"
    command = ServerCommand(tmp_path, *SHORT, *VLLM, *ENDLESS, "parallelism=ddp", folder)
    command.wait_for_steps(3)
    processes = processes_of(command.directory)
    weights = command.weights()
    assert len(processes) == 2
    assert list((tmp_path / "weights").iterdir()) == [weights]
    command.kill()
    assert all_ended(processes)
    deadline = time.monotonic() + 10
    while weights.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not weights.exists()


def test_ctrl_c_ends_the_run_after_its_step_and_the_server(tmp_path, monkeypatch):
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    folder = tmp_path / "run"
    assert main([*last_of_each_key(*SHORT, *VLLM), f"hydra.run.dir={folder}"]) == 75
    assert read_status(folder)["step"] == 3
    assert processes_of(folder) == []


def test_a_server_ends_with_its_guard_and_the_run_reports_it(tmp_path):
    command = ServerCommand(tmp_path, *SHORT, *VLLM, *ENDLESS)
    command.wait_for_steps(3)
    guard, *server = command.server_processes()
    guard.kill()
    assert command.process.wait(60) == 5
    assert all_ended(server)
    assert "ended with status" in command.log.read_text()


def test_two_ranks_share_two_servers(uninterrupted, tmp_path):
    """They learn what one process learns with one server: a prompt has its seed, whichever rank
    asks whichever server."""
    settings = [*SHORT, *VLLM, SAMPLING, "sampler.servers_per_gpu=2"]
    folder = run_on_ranks(
        tmp_path / "run",
        last_of_each_key(*settings, noting(tmp_path / "marks-PORT")),
        seconds=300,
        data_parallel=2,
    )
    assert processes_of(folder) == []
    for row, expected in zip(metrics_of(folder), metrics_of(uninterrupted), strict=True):
        for key in ("reward", "loss", "ratio_new_old", "num_tokens", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    python_path = [os.environ.get("PYTHONPATH"), str(Vllm.MODULES)]
    requests_of_servers = []
    for marks in tmp_path.glob("marks-*"):
        lines = marks.read_text().splitlines()
        starts = [line for line in lines if line.split()[0] == "start"]
        assert starts == lines[:1]
        assert lines.count("/collective_rpc load_from_memory") == 3
        assert lines.count("complete score") == 3
        _, _, path = json.loads(lines[0].removeprefix("start "))
        assert path == os.pathsep.join(filter(None, python_path))
        requests_of_servers.append(noted_requests(marks))
    first, second = requests_of_servers
    assert len(first) == len(second) == 6  # three batches of four prompts
    assert sorted(first + second) == sorted(noted_requests(uninterrupted.parent / "marks"))


def test_a_fault_that_a_rank_meets_ends_all_ranks_with_one_message(tmp_path):
    """Rank 0 prints an error that all ranks raise, see test_ranks_start.py."""
    faulty = f"sampler.executable={COMMAND} --fault foreign_token --after 6"
    config = config_of(*SHORT, *VLLM, "parallelism=ddp", faulty)
    errors = world(2).run(lost_sampler_of_rank, config, tmp_path / "run", seconds=200)
    for message, on_all_ranks in errors:
        assert message == errors[0][0]
        assert on_all_ranks
    assert errors[0][0].count("it sampled token") == 1
    assert "Continue with: " in errors[0][0]
    assert processes_of(tmp_path / "run") == []
