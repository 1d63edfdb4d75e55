"""Rows of `config/test_keys.py`: the servers that sampler=vllm starts or joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders.runs import config_of, sampler_of

from keys import key, settings
from pgtoolkit.completion import Request
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.sampling.server_api import plan_servers
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.training.build import build


def sampler(folder: Path, *overrides: str):
    config = config_of(*settings("sampler=vllm", *overrides))
    module, loader = build(config, run_dir=folder)
    return module, sampler_of(loader)


def planned(*overrides: str):
    config = config_of(*settings("sampler=vllm", *overrides))
    return plan_servers(config, ONE_PROCESS, "float32", 24, Vllm.FIXED_MEMORY)


def command(*overrides: str) -> list[str]:
    config = config_of(*settings("sampler=vllm", *overrides))
    return Vllm().command(config, Path("folder"), planned(*overrides), "127.0.0.1", 1)


def option(name: str, *overrides: str) -> str:
    arguments = command(*overrides)
    return arguments[arguments.index(name) + 1]


@key("sampler/vllm.arguments", "sampler/vllm.gpu_memory_share", "sampler/vllm.max_sequences")
def arguments():
    assert command("sampler.arguments=['--enforce-eager','--x=1']")[-2:] == [
        "--enforce-eager",
        "--x=1",
    ]
    assert [
        option("--gpu-memory-utilization", f"sampler.gpu_memory_share={x}") for x in ("0.2", "1")
    ] == ["0.2", "1.0"]
    assert [option("--max-num-seqs", f"sampler.max_sequences={count}") for count in (8, 300)] == [
        "8",
        "300",
    ]


@key("sampler/vllm.gpus", "sampler/vllm.tensor_parallel")
def gpus(monkeypatch):
    for told, names in ((None, "0123"), ("9,8,7,6", "9876")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if told:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
        assert planned("sampler.gpus=[1,3]").gpus == [names[1], names[3]]
        assert planned("sampler.gpus=[1,3]", "sampler.tensor_parallel=2").gpus == [
            f"{names[1]},{names[3]}"
        ]
    assert (
        option("--tensor-parallel-size", "sampler.gpus=[1,3]", "sampler.tensor_parallel=2") == "2"
    )
    assert option("--tensor-parallel-size", "sampler.gpus=[1,3]") == "1"


@key("sampler/vllm.servers_per_gpu")
def servers_per_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, share, front_ends in ((1, "0.6", 4), (3, "0.2", 1)):
        own = (
            "sampler.gpus=[1,2]",
            f"sampler.servers_per_gpu={count}",
            "sampler.gpu_memory_share=0.6",
        )
        assert planned(*own).gpus == ["1", "2"] * count
        assert planned(*own).at_once == 2
        assert float(option("--gpu-memory-utilization", *own)) == pytest.approx(float(share))
        assert f"--api-server-count={front_ends}" in command(*own)
    assert planned("sampler.servers_per_gpu=2").gpus == [None, None]
    fixed = "sampler.arguments=['--kv-cache-memory-bytes=1G']"
    assert [planned("sampler.servers_per_gpu=2", *more).at_once for more in ((), (fixed,))] == [
        1,
        2,
    ]


@key("sampler/vllm.dtype")
def dtype(tmp_path):
    """The servers' number type, and that of the weights that they are given; a run in float32
    tolerates bfloat16's."""
    for value, expected, tolerance in (("auto", "float32", 0.01), ("bfloat16", "bfloat16", 0.1)):
        _, found = sampler(tmp_path, f"sampler.dtype={value}")
        assert found._plan.number_type == expected
        assert found._folder.dtype == getattr(torch, expected)
        assert found.tolerance == tolerance


@key("sampler/vllm.seeded")
def seeded(tmp_path):
    for value, expected in (("true", 77), ("false", None)):
        _, found = sampler(tmp_path, f"sampler.seeded={value}")
        assert (
            Vllm().completions(Request([1, 2], 3, seed=77), found._ways[0], "salt")[1].get("seed")
            == expected
        )
