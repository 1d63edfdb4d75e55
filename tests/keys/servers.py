"""Tests of single keys (see `keys`): the servers that sampler=vllm starts or joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders.runs import config_of, sampler_of

from keys import key_test
from keys.small_runs import settings
from pgtoolkit.assembly.build import build
from pgtoolkit.completion import Request
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.sampling.server_api import ServerPlan, plan_servers
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm


def sampler_with(folder: Path, *overrides: str) -> ServerSampler:
    config = config_of(*settings("sampler=vllm", *overrides))
    _, loader = build(config, run_dir=folder)
    return sampler_of(loader)


def plan_of(*overrides: str) -> ServerPlan:
    config = config_of(*settings("sampler=vllm", *overrides))
    return plan_servers(
        config.sampler,
        ONE_PROCESS,
        "float32",
        24,
        Vllm.FIXED_MEMORY,
        on_gpu=config.trainer.device != "cpu",
        is_async=config.rollout.max_staleness is not None,
    )


def command(*overrides: str) -> list[str]:
    """Return the command that starts the first server."""
    config = config_of(*settings("sampler=vllm", *overrides))
    return Vllm().command(
        config.sampler,
        config.seed,
        bool(config.rollout.stop),
        Path("folder"),
        plan_of(*overrides),
        "127.0.0.1",
        1,
    )


def option(name: str, *overrides: str) -> str:
    """Return the value of an option of that command."""
    arguments = command(*overrides)
    return arguments[arguments.index(name) + 1]


@key_test("sampler/vllm.arguments", "sampler/vllm.gpu_memory_share", "sampler/vllm.max_sequences")
def arguments_memory_share_and_max_sequences_stand_in_the_command():
    arguments = command("sampler.arguments=['--enforce-eager','--x=1']")
    assert arguments[-2:] == ["--enforce-eager", "--x=1"]
    for typed, expected in (("0.2", "0.2"), ("1", "1.0")):
        override = f"sampler.gpu_memory_share={typed}"
        assert option("--gpu-memory-utilization", override) == expected
    for count in (8, 300):
        assert option("--max-num-seqs", f"sampler.max_sequences={count}") == str(count)


@key_test("sampler/vllm.gpus", "sampler/vllm.tensor_parallel")
def servers_get_the_gpus_of_these_numbers_alone_or_tensor_parallel(monkeypatch: pytest.MonkeyPatch):
    """The numbers count the GPUs of CUDA_VISIBLE_DEVICES."""
    gpus = "sampler.gpus=[1,3]"
    parallel = "sampler.tensor_parallel=2"
    for visible, names in ((None, "0123"), ("9,8,7,6", "9876")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert plan_of(gpus).gpus == [names[1], names[3]]
        assert plan_of(gpus, parallel).gpus == [f"{names[1]},{names[3]}"]
    assert option("--tensor-parallel-size", gpus, parallel) == "2"
    assert option("--tensor-parallel-size", gpus) == "1"


@key_test("sampler/vllm.servers_per_gpu")
def servers_of_one_gpu_share_its_memory_and_start_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
):
    """They start at once where each has a fixed amount of memory."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, memory_share, num_front_ends in ((1, 0.6, 4), (3, 0.2, 1)):
        overrides = (
            "sampler.gpus=[1,2]",
            f"sampler.servers_per_gpu={count}",
            "sampler.gpu_memory_share=0.6",
        )
        assert plan_of(*overrides).gpus == ["1", "2"] * count
        assert plan_of(*overrides).at_once == 2
        assert float(option("--gpu-memory-utilization", *overrides)) == pytest.approx(memory_share)
        assert f"--api-server-count={num_front_ends}" in command(*overrides)
    two_servers = "sampler.servers_per_gpu=2"
    fixed_memory = "sampler.arguments=['--kv-cache-memory-bytes=1G']"
    assert plan_of(two_servers).gpus == [None, None]
    assert plan_of(two_servers).at_once == 1
    assert plan_of(two_servers, fixed_memory).at_once == 2


@key_test("sampler/vllm.dtype")
def servers_and_their_weights_have_the_dtype(tmp_path: Path):
    """A run in float32 tolerates the log-probs of a sampler in bfloat16."""
    for value, dtype, tolerance in (("auto", "float32", 0.01), ("bfloat16", "bfloat16", 0.1)):
        sampler = sampler_with(tmp_path, f"sampler.dtype={value}")
        assert sampler._plan.number_type == dtype
        assert sampler._folder.dtype == getattr(torch, dtype)
        assert sampler.tolerance == tolerance


@key_test("sampler/vllm.seeded")
def a_request_carries_its_seed_if_asked(tmp_path: Path):
    for value, seed in (("true", 77), ("false", None)):
        sampler = sampler_with(tmp_path, f"sampler.seeded={value}")
        request = Request([1, 2], 3, seed=77)
        body = Vllm().completions(request, sampler._ways[0], "salt")[1]
        assert body.get("seed") == seed
