"""Rows of `config/test_keys.py`: how a run is spread over processes, how long it goes on, and what
it leaves behind."""

from __future__ import annotations

import copy
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders.runs import config_of
from builders.stores import append_steps, metric_history
from builders.threads import on_ranks
from mlflow import MlflowClient

from keys import SMALL, key, module_of, recorded, rows_file, settings
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.worker import _process_group
from pgtoolkit.model import fixed_order
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.environment import Rank
from pgtoolkit.ranks.layout import AXES, Layout
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.training.build import accelerator, begin
from pgtoolkit.training.train import _start_trackers


def as_one_process(monkeypatch, *overrides):
    """The layout that a worker makes of the configuration in a world of one process, by real
    process groups."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.setenv(name, "lo")  # so that they are put back
    config = config_of(*SMALL, *overrides)
    return _process_group(config, Rank(0, 1, 0, "127.0.0.1", port))


def on_two_ranks(folder, *overrides, **sizes):
    """By rank: the policy, and its number of weights."""
    chosen = ("rollout=recorded", f"rollout.path={rows_file(folder)}", "metrics=none", *overrides)
    config = config_of(*settings(*chosen))
    # made once: threads would draw its weights from one random state
    whole = module_of("metrics=none").policy

    def built(rank):
        policy = parallelize(copy.deepcopy(whole), Layout.of_world("cpu", 60, **sizes), config)
        weights = [p.to_local() if hasattr(p, "to_local") else p for p in policy.model.parameters()]
        return policy, sum(weight.numel() for weight in weights)

    return on_ranks(2, built)


@key(*(f"parallelism.{axis}" for axis in AXES))
def parallel_sizes(key, monkeypatch):
    """A worker asks for the configured layout."""
    axis = key.split(".")[1]
    shape = tuple(2 if name == axis else 1 for name in AXES)
    with pytest.raises(
        ValueError, match=f"{shape} needs 2 processes".replace("(", r"\(").replace(")", r"\)")
    ):
        as_one_process(monkeypatch, f"{key}=2").__enter__()
    dist.destroy_process_group()


@key("parallelism.shard", "parallelism.sequence_parallel")
def shards(tmp_path):
    """Of the weights; and of the tokens between the matrices, so that gradients of norms are
    partial sums."""
    for value, share in (("false", 1), ("true", 1 / 2)):
        chosen = ("parallelism=ddp", f"parallelism.shard={value}")
        counts = [count for _, count in on_two_ranks(tmp_path, *chosen, data_parallel=2)]
        whole = sum(weight.numel() for weight in module_of().model.parameters())
        assert counts == [pytest.approx(share * whole, rel=0.1)] * 2
        chosen = ("parallelism=tensor", f"parallelism.sequence_parallel={value}")
        for policy, _ in on_two_ranks(tmp_path, *chosen, tensor_parallel=2):
            assert ("transformer.ln_f.weight" in policy.partial) is (value == "true")


@key("parallelism.timeout_seconds")
def timeout_seconds(monkeypatch):
    for seconds in (17, 23):
        with as_one_process(monkeypatch, f"parallelism.timeout_seconds={seconds}") as layout:
            groups = [
                layout.world_group,
                *layout.mesh.get_all_groups(),
                layout.loss_mesh.get_group(),
            ]
            found = {
                group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                for group in groups
            }
        assert found == {seconds}


@key("trainer.max_steps")
def max_steps(tmp_path):
    for number in (2, 5):
        assert len(recorded(tmp_path, f"trainer.max_steps={number}", "rollout.epochs=9")) == number


@key("trainer.device")
def device():
    has_gpu = torch.cuda.is_available()
    for name, expected in (("cpu", "cpu"), ("auto", "gpu" if has_gpu else "cpu")):
        assert accelerator(module_of(f"trainer.device={name}").config) == expected
    asking = config_of("trainer.device=cuda")
    if has_gpu:
        assert accelerator(asking) == "gpu"
    else:
        with pytest.raises(ConfigError, match=r"trainer\.device=cuda needs a GPU"):
            accelerator(asking)


@key("trainer.num_threads")
def num_threads():
    before = torch.get_num_threads()
    try:
        for number in (2, 1):
            module_of(f"trainer.num_threads={number}")
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


@key("trainer.deterministic")
def deterministic():
    beside = [
        "rollout=policy",
        "task=reverse",
        "rollout.max_staleness=7",
        "rollout.old_log_probs=sampling",
    ]
    embedding = torch.nn.Embedding(2, 2)
    fixed_order.switch_on(embedding)
    for chosen, expected in (
        (["true"], True),
        (["false"], False),
        (["auto"], True),
        (["auto", *beside], False),
    ):
        begin(config_of(f"trainer.deterministic={chosen[0]}", *chosen[1:]))
        seen, out = [], embedding(torch.tensor([1]))
        out.grad_fn.register_prehook(
            lambda _, seen=seen: seen.append(torch.are_deterministic_algorithms_enabled())
        )
        out.sum().backward()
        assert seen == [expected]


@key("tracking.also")
def further_trackers(tmp_path, uri):
    """What a run leaves in MLflow, and beside it in its directory."""
    pytest.importorskip("tensorboard")
    config = config_of(
        *settings("tracking=mlflow", f"tracking.uri={uri}", "tracking.also=[tensorboard]")
    )
    with RunDirectory(tmp_path / "run") as run:
        run.write_config(plain_config(config), [])
        run.set_status("running", 0)
        trackers = []
        _start_trackers(config, run, trackers)
        append_steps(run, 1, 2)
        assert [tracker.finish("done") for tracker in trackers] == [[], []]
    assert metric_history(uri, trackers[0].info["run_id"]) == [(1, 1 / 8), (2, 2 / 8)]
    assert [*(tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")]


@key(
    "tracking.name",
    "tracking.uri",
    "tracking.experiment",
    "tracking.run_name",
    "tracking.system_metrics",
)
def tracking(tmp_path, monkeypatch, uri):
    """What three runs leave in the store, and none in the default one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    chosen = {"untracked": ["tracking=none"]}
    for number in (1, 2):
        own = [
            f"tracking.uri={uri}",
            f"tracking.experiment=keys {number}",
            f"tracking.run_name=run-{number}",
        ]
        chosen[f"run {number}"] = [
            "tracking=mlflow",
            *own,
            f"tracking.system_metrics={str(number == 2).lower()}",
        ]
    for name, overrides in chosen.items():
        config = config_of(*settings(*overrides))
        with RunDirectory(tmp_path / name) as run:
            run.write_config(plain_config(config), [])
            run.set_status("running", 0)
            trackers = []
            _start_trackers(config, run, trackers)
            append_steps(run, 1, 2)
            assert len(trackers) == (0 if name == "untracked" else 1)
            for tracker in trackers:
                time.sleep(1)  # of which MLflow measures something
                assert tracker.finish("done") == []
    client = MlflowClient(uri)
    names = {
        experiment.name: experiment.experiment_id for experiment in client.search_experiments()
    }
    for number in (1, 2):
        (found,) = client.search_runs([names[f"keys {number}"]])
        assert found.info.run_name == f"run-{number}"
        assert metric_history(uri, found.info.run_id) == [(1, 1 / 8), (2, 2 / 8)]
        assert any(name.startswith("system/") for name in found.data.metrics) is (number == 2)
    assert not Path("outputs").exists()
