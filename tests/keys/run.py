"""Tests of single keys (see `keys`): the processes of a run, its length, and what it leaves
behind."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders.processes import free_port
from builders.runs import config_of
from builders.stores import append_steps, metric_history
from builders.threads import on_ranks
from mlflow import MlflowClient

from keys import key_test
from keys.small_runs import SMALL, module_of, recorded_steps, rows_file, settings
from pgtoolkit.assembly.build import accelerator, begin
from pgtoolkit.assembly.train import _start_records
from pgtoolkit.config.counts import samples_async
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.worker import _process_group
from pgtoolkit.model import fixed_order
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.environment import Rank
from pgtoolkit.ranks.layout import AXES, Layout
from pgtoolkit.runs.directory import RunDirectory

WORKER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
)


def process_group(
    monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> AbstractContextManager[Layout]:
    """Return what a worker enters in a world of one process: real process groups, and their
    layout."""
    for name in WORKER_VARIABLES:
        # The worker sets these variables; monkeypatch restores what it has set once itself.
        monkeypatch.setenv(name, "lo")
    rank = Rank(0, 1, 0, "127.0.0.1", free_port())
    return _process_group(config_of(*SMALL, *overrides), rank)


def policies_of_two_ranks(folder: Path, *overrides: str, **sizes: int) -> list[Policy]:
    """Return the policy of each rank, spread as `sizes` (data_parallel=2, for one) say."""
    recorded = ("rollout=recorded", f"rollout.path={rows_file(folder)}", "metrics=none")
    config = config_of(*settings(*recorded, *overrides))
    # Made once: the threads would draw its weights from one random state.
    policy = module_of("metrics=none").policy

    def spread_on(rank: int) -> Policy:
        return parallelize(
            copy.deepcopy(policy),
            Layout.of_world("cpu", 60, **sizes),
            config.parallelism,
            config.accumulation.max_tokens,
        )

    return on_ranks(2, spread_on)


def num_local_weights(policy: Policy) -> int:
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in policy.model.parameters()]
    return sum(weight.numel() for weight in weights)


def accelerator_of(config: Config) -> str:
    return accelerator(config.trainer.device, config.kernel)


@key_test(*(f"parallelism.{axis}" for axis in AXES))
def a_worker_asks_for_as_many_processes_as_the_axes_need(key: str, monkeypatch: pytest.MonkeyPatch):
    axis = key.split(".")[1]
    shape = tuple(2 if name == axis else 1 for name in AXES)
    with pytest.raises(ValueError, match=re.escape(f"{shape} needs 2 processes")):
        process_group(monkeypatch, f"{key}=2").__enter__()
    dist.destroy_process_group()


@key_test("parallelism.shard", "parallelism.sequence_parallel")
def shard_divides_the_weights_and_sequence_parallel_the_tokens_of_the_norms(tmp_path: Path):
    """Where tokens are divided, the gradients of norms are partial sums."""
    num_weights = sum(weight.numel() for weight in module_of().model.parameters())
    for value, share in (("false", 1), ("true", 1 / 2)):
        overrides = ("parallelism=ddp", f"parallelism.shard={value}")
        policies = policies_of_two_ranks(tmp_path, *overrides, data_parallel=2)
        counts = [num_local_weights(policy) for policy in policies]
        assert counts == [pytest.approx(share * num_weights, rel=0.1)] * 2
    for value, expected in (("false", False), ("true", True)):
        overrides = ("parallelism=tensor", f"parallelism.sequence_parallel={value}")
        for policy in policies_of_two_ranks(tmp_path, *overrides, tensor_parallel=2):
            assert ("transformer.ln_f.weight" in policy.partial) is expected


@key_test("parallelism.timeout_seconds")
def every_process_group_has_the_timeout(monkeypatch: pytest.MonkeyPatch):
    for seconds in (17, 23):
        with process_group(monkeypatch, f"parallelism.timeout_seconds={seconds}") as layout:
            groups = [
                layout.world_group,
                *layout.mesh.get_all_groups(),
                layout.loss_mesh.get_group(),
            ]
            timeouts = {
                group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                for group in groups
            }
        assert timeouts == {seconds}


@key_test("trainer.max_steps")
def a_run_ends_after_max_steps(tmp_path: Path):
    for number in (2, 5):
        steps = recorded_steps(tmp_path, f"trainer.max_steps={number}", "rollout.epochs=9")
        assert len(steps) == number


@key_test("trainer.device")
def the_device_is_the_cpu_a_gpu_or_what_there_is():
    has_gpu = torch.cuda.is_available()
    for device, expected in (("cpu", "cpu"), ("auto", "gpu" if has_gpu else "cpu")):
        assert accelerator_of(config_of(*settings(f"trainer.device={device}"))) == expected
    config = config_of("trainer.device=cuda")
    if has_gpu:
        assert accelerator_of(config) == "gpu"
    else:
        with pytest.raises(ConfigError, match=r"trainer\.device=cuda needs a GPU"):
            accelerator_of(config)


@key_test("trainer.num_threads")
def torch_computes_with_num_threads():
    before = torch.get_num_threads()
    try:
        for number in (2, 1):
            module_of(f"trainer.num_threads={number}")
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


@key_test("trainer.deterministic")
def embeddings_add_up_their_gradient_in_a_fixed_order_if_the_run_is_deterministic():
    """A run that samples while it trains is not, unless asked."""
    asynchronous = [
        "rollout=policy",
        "task=reverse",
        "rollout.max_staleness=7",
        "rollout.old_log_probs=sampling",
    ]
    embedding = torch.nn.Embedding(2, 2)
    fixed_order.switch_on(embedding)
    for value, overrides, expected in (
        ("true", [], True),
        ("false", [], False),
        ("auto", [], True),
        ("auto", asynchronous, False),
    ):
        config = config_of(f"trainer.deterministic={value}", *overrides)
        begin(config.seed, config.trainer, samples_async(config))
        out = embedding(torch.tensor([1]))
        is_deterministic = []

        def record(_: object, is_deterministic: list[bool] = is_deterministic) -> None:
            is_deterministic.append(torch.are_deterministic_algorithms_enabled())

        out.grad_fn.register_prehook(record)
        out.sum().backward()
        assert is_deterministic == [expected]


def tracked_run(folder: Path, config: Config, before_the_end: Callable = lambda: None) -> list:
    """Return the trackers of a run of two steps, each of which has finished without a complaint."""
    with RunDirectory(folder) as run:
        run.write_config(plain_config(config), [])
        run.set_status("running", 0)
        trackers = []
        _start_records(config.tracking, run, trackers, [])
        append_steps(run, 1, 2)
        before_the_end()
        assert [tracker.finish("done") for tracker in trackers] == [[] for _ in trackers]
    return trackers


@key_test("tracking.also")
def a_run_is_also_followed_by_further_trackers(tmp_path: Path, uri: str):
    """It is in MLflow, and its directory has TensorBoard's files."""
    pytest.importorskip("tensorboard")
    overrides = ("tracking=mlflow", f"tracking.uri={uri}", "tracking.also=[tensorboard]")
    trackers = tracked_run(tmp_path / "run", config_of(*settings(*overrides)))
    assert len(trackers) == 2
    assert metric_history(uri, trackers[0].info["run_id"]) == [(1, 1 / 8), (2, 2 / 8)]
    assert [*(tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")]


@key_test(
    "tracking.name",
    "tracking.uri",
    "tracking.experiment",
    "tracking.run_name",
    "tracking.system_metrics",
)
def a_run_is_in_its_store_and_experiment_under_its_name_and_in_no_other_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
):
    """MLflow's default store would be below the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    assert tracked_run(tmp_path / "untracked", config_of(*settings("tracking=none"))) == []
    client = MlflowClient(uri)
    for number, has_system_metrics in ((1, False), (2, True)):
        config = config_of(
            *settings(
                "tracking=mlflow",
                f"tracking.uri={uri}",
                f"tracking.experiment=keys {number}",
                f"tracking.run_name=run-{number}",
                f"tracking.system_metrics={str(has_system_metrics).lower()}",
            )
        )
        # MLflow needs a moment to measure the system, if it is to.
        trackers = tracked_run(tmp_path / f"run {number}", config, lambda: time.sleep(1))
        assert len(trackers) == 1
        experiment = client.get_experiment_by_name(f"keys {number}")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_name == f"run-{number}"
        assert metric_history(uri, run.info.run_id) == [(1, 1 / 8), (2, 2 / 8)]
        assert any(name.startswith("system/") for name in run.data.metrics) is has_system_metrics
    assert not Path("outputs").exists()
