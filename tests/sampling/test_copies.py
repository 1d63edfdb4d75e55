"""Runs that sample in processes with copies of the weights: metrics and weights are those of a run
that samples in its own process, and no process is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from builders.commands import ForkedCommand, wait_until
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import run_on_ranks
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
    with_model,
)
from builders.vllm_servers import all_ended

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.config.validate import validate
from pgtoolkit.errors import NumericalError
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations, read_status

AHEAD = ("rollout.old_log_probs=sampling", "trainer.device=cpu", "trainer.deterministic=true")
LAG = (*AHEAD, "rollout.lag=2")
COPY = (*AHEAD, "rollout.max_staleness=3", "sampler.processes=1")
"""LAG and COPY both sample a batch, of two steps, when training on the batch before it begins."""
EVALUATED = (
    "evaluation.every=3",
    "evaluation.prompts_per_set=3",
    "evaluation.max_completion_length=2",
    "evaluation.sets.a.num_digits=1",
)
CONVERSATION = (
    "task=conversation",
    "task.environment=tasks.environments_for_tests.Counting",
    "rollout.max_completion_length=16",
    "accumulation.max_tokens=64",
    "task.options={rounds: 1}",
    f"rollout.stop={[*'abcdefghijklm012345']}",
)


@pytest.fixture(scope="module")
def lagging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that samples in its own process, a batch ahead."""
    return run(tmp_path_factory.mktemp("lagging") / "run", *LAG, *EVALUATED)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run, sampled by a process with a copy of the weights."""
    return run(tmp_path_factory.mktemp("copied") / "run", *COPY, *EVALUATED)


def assert_equal_runs(run_dir: Path, expected: Path) -> None:
    """Assert that two runs have learned and measured the same, to the last bit."""
    assert metrics_of(run_dir) == metrics_of(expected)
    for part in ("model", "optimizer"):
        assert_equal(checkpoint_of(run_dir, 6)[part], checkpoint_of(expected, 6)[part])
    assert evaluations_of(run_dir) == evaluations_of(expected)


def evaluations_of(run_dir: Path) -> list[dict]:
    """Return a run's evaluations without times."""
    return [
        {name: value for name, value in row.items() if name not in ("time", "seconds")}
        for row in read_evaluations(run_dir)
    ]


def test_a_copy_in_another_process_samples_as_the_model_to_the_bit(lagging, copied):
    """To the last bit, evaluations between batches included. The process has ended afterwards."""
    assert_equal_runs(copied, lagging)
    assert [row["staleness"] for row in metrics_of(copied)] == [0, 1, 2, 3, 2, 3]
    children = psutil.Process().children(recursive=True)
    assert [child for child in children if child.name() == "copy"] == []
    completions = read_completions(copied / "completions" / "evaluation_a_000003.parquet")
    assert {completion.version for completion in completions} == {3}


@pytest.mark.slow
def test_a_resumed_run_with_a_copy_is_the_uninterrupted_one_to_the_bit(lagging, copied, tmp_path):
    resumed = copy_as_of(copied, 3, tmp_path / "run")
    run(resumed, *COPY, *EVALUATED, resume=True)
    assert_equal_runs(resumed, lagging)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora_rank=2",),
        ("model.dtype=bfloat16", "sampler.static_cache=true"),
    ],
)
def test_a_copy_of_a_hugging_face_model_samples_as_the_model(tmp_path, overrides):
    """Except with adapters: the copy has their sum with the frozen weights, which rounds in another
    way than the two products."""
    folder = save_with_tokenizer(small_llama(3), tmp_path / "model")
    for name, settings in (("lag", LAG), ("copy", COPY)):
        settings = with_model(folder, *settings, *overrides, "optimizer.learning_rate=0.01")
        train(config_of(*settings), tmp_path / name)
    rows = metrics_of(tmp_path / "copy")
    expected = metrics_of(tmp_path / "lag")
    if "model.lora_rank=2" in overrides:
        for row, expected_row in zip(rows, expected, strict=True):
            assert row["new_logprobs"] == pytest.approx(expected_row["new_logprobs"], abs=1e-4)
            assert row["num_tokens"] == expected_row["num_tokens"]
    else:
        assert rows == expected


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", ["false", "true"])
def test_a_copy_on_another_gpu_samples_as_the_model_to_the_bit(tmp_path, compiles):
    """To the last bit, evaluations included, by CUDA graphs and Triton's kernels in bfloat16."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = save_with_tokenizer(small_llama(3), tmp_path / "model")
    base = with_model(folder, *EVALUATED, f"model.compile={compiles}")
    ahead = [setting for setting in AHEAD if setting != "trainer.device=cpu"]
    train(config_of(*base, *ahead, "rollout.lag=2"), tmp_path / "lag")
    train(
        config_of(*base, *ahead, "rollout.max_staleness=3", "sampler.gpus=[1]"), tmp_path / "copy"
    )
    assert_equal_runs(tmp_path / "copy", tmp_path / "lag")


@pytest.mark.slow
def test_a_copy_samples_the_conversations_of_the_model(tmp_path):
    base = [
        setting
        for setting in SHORT
        if not setting.startswith("task.") and setting.split("=")[0] not in str(CONVERSATION)
    ]
    for name, settings in (("lag", LAG), ("copy", COPY)):
        train(config_of(*base, *settings, *CONVERSATION), tmp_path / name)
    assert metrics_of(tmp_path / "copy") == metrics_of(tmp_path / "lag")
    assert max(row["turns"] for row in metrics_of(tmp_path / "copy")) > 1


@pytest.mark.slow
def test_several_processes_share_the_prompts_of_a_batch(lagging, tmp_path):
    """They draw the same tokens; rounding depends on what is completed at the same time."""
    run_dir = run(tmp_path / "run", *COPY, *EVALUATED, "sampler.processes=2")
    logs = sorted(file.name for file in run_dir.glob("sampler*.log"))
    assert logs == ["sampler-0.log", "sampler-1.log"]
    for row, other in zip(metrics_of(run_dir), metrics_of(lagging), strict=True):
        assert row["reward"] == other["reward"]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)


@pytest.mark.slow
def test_each_rank_has_its_own_process(tmp_path):
    once = "trainer.checkpoint_every=6"
    for name, settings in (("lag", LAG), ("copy", (*COPY, "sampler.processes=2"))):
        run_on_ranks(tmp_path / name, [*SHORT, *settings, once], data_parallel=2)
    assert len([*(tmp_path / "copy").glob("sampler*.log")]) == 2
    assert metrics_of(tmp_path / "copy") == metrics_of(tmp_path / "lag")


@pytest.mark.slow
def test_weights_that_are_not_finite_end_the_run(tmp_path):
    module, loader = build(config_of(*SHORT, *COPY), run_dir=tmp_path)
    with torch.no_grad():
        module.policy.head.weight[3] = torch.nan
    try:
        with pytest.raises(NumericalError, match="probabilities are not finite"):
            loader.source.document(0)
    finally:
        loader.source.close()


def copies_below(pid: int) -> list[psutil.Process]:
    """Return the guard of a run's copy, and the process that it guards."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name() == "copy"]


class CopyCommand(ForkedCommand):
    """A run without end, with a process that samples."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        endless = ("trainer.max_steps=100000", "trainer.keep_checkpoints=2")
        super().__init__(folder, *SHORT, *COPY, *endless, *overrides)

    def copies(self) -> list[psutil.Process]:
        return copies_below(self.process.pid)

    def weights(self) -> set[Path]:
        return {
            Path(file.path).parent
            for file in self.copies()[-1].memory_maps()
            if "pgtk-weights-" in file.path
        }


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process_and_no_weights(tmp_path):
    command = CopyCommand(tmp_path)
    command.wait_for_steps(3)
    copies = command.copies()
    (weights,) = command.weights()
    assert len(copies) == 2
    assert weights.is_dir()
    command.kill()
    assert all_ended(copies)
    wait_until(lambda: not weights.exists(), 10)


@pytest.mark.slow
def test_a_run_whose_sampling_process_is_killed_loses_no_step(tmp_path):
    """test_vllm_runs.py kills the guard, which servers have too."""
    command = CopyCommand(tmp_path, "trainer.checkpoint_every=1000000")
    command.wait_for_steps(3)
    copies = command.copies()
    copies[-1].kill()
    assert command.process.wait(60) == 5
    assert all_ended(copies)
    output = " ".join(command.log.read_text().split())
    assert "the process that samples on the CPU was ended by SIGKILL" in output
    assert "Continue with: " in output
    status = read_status(command.directory)
    assert status["state"] == "failed"
    assert status["step"] == status["saved"]
    assert status["step"] >= 3


@pytest.mark.slow
def test_ctrl_c_ends_the_run_after_its_step_and_the_copy(tmp_path, monkeypatch):
    """A scheduler's signal goes to all processes of a job."""
    copies = []

    def interrupt() -> None:
        copies.extend(copies_below(os.getpid()))
        for process in copies:
            process.send_signal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 3, interrupt)
    overrides = last_of_each_key(*SHORT, *COPY)
    assert main([*overrides, f"hydra.run.dir={tmp_path / 'run'}"]) == 75
    assert read_status(tmp_path / "run")["step"] == 3
    assert len(copies) == 2
    assert all_ended(copies)


def test_keys_of_copies_that_contradict_each_other_are_refused():
    def problems(*overrides: str) -> str:
        return " ".join(validate(config_of(*SHORT, *overrides))[1].problems)

    two_ranks = "parallelism.data_parallel=2"
    assert problems(*AHEAD, "rollout.max_staleness=3", "sampler.processes=1") == ""
    assert (
        problems(
            "trainer.deterministic=true", "sampler.gpus=[1]", "rollout.max_staleness=3", AHEAD[0]
        )
        == ""
    )
    assert "trainer.deterministic=true needs" in problems(*AHEAD, "rollout.max_staleness=3")
    assert "a multiple of the 2 processes that train (got 1)" in problems(
        "sampler.processes=1", two_ranks
    )
    assert "numbers from 2 on (got 1)" in problems("sampler.gpus=[1,2]", two_ranks)
    assert "each once (got [1,1])" in problems("sampler.gpus=[1,1]")
    assert "sampler.processes=1 needs sampler.gpus=null" in problems(
        "sampler.gpus=[1]", "sampler.processes=1"
    )
    assert "sampler.gpus=[1] needs trainer.device other" in problems(
        "sampler.gpus=[1]", "trainer.device=cpu"
    )
    recorded = [setting for setting in SHORT if not setting.startswith(("rollout", "task"))]
    for unused in ("sampler.gpus=[1]", "sampler.processes=1"):
        config = config_of(*recorded, "rollout=recorded", "rollout.path=x.jsonl", unused)
        assert f"{unused} needs rollout=policy" in " ".join(validate(config)[1].problems)
