"""Runs over several nodes: two nodes train like one process, also with a server that runs
already."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.commands import ENVIRONMENT
from builders.forked import ForkedPython
from builders.parallel_runs import run_on_ranks
from builders.processes import free_port
from builders.runs import last_of_each_key, metrics_of, with_model
from builders.shared_servers import save_llama
from builders.vllm_servers import COMMAND
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from pgtoolkit.system import child

PAGE = (Path(__file__).parents[2] / "docs/rollouts.md").read_text()


def train_on_two_nodes(folder: Path, *overrides: str) -> Path:
    """Train with two launchers of torchrun, one for each node, with a rank each.

    The launchers, and the ranks that they start, are forked: they need no imports.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
        "-m",
        "pgtoolkit.cli",
    ]
    command += [
        *last_of_each_key(*overrides, "parallelism.data_parallel=2"),
        f"hydra.run.dir={folder}/run",
    ]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_handler, "Popen", ForkedPython)
        nodes = [ForkedPython(command, cwd=folder, env=ENVIRONMENT, **streams) for _ in range(2)]
    shown = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], shown
    lines = [text.count("step 3/3") for text in shown]
    assert sorted(lines) == [0, 1], shown  # rank 0 alone writes them
    return folder / "run"


def assert_same_metrics(folder: Path, expected: Path) -> None:
    """Assert that two runs have the same rewards, losses, tokens and gradients but for rounding."""
    rows = metrics_of(folder)
    expected_rows = metrics_of(expected)
    assert len(rows) == len(expected_rows) > 0
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for key in ("reward", "loss", "num_tokens", "grad_norm"):
            assert row[key] == pytest.approx(expected_row[key], rel=1e-4, abs=1e-6), key


@contextlib.contextmanager
def running_server(model: Path, port: int) -> Iterator[str]:
    """Run a server as the page starts one, and yield its address."""
    section = PAGE.partition("## Running servers")[2]
    typed = (
        re.search(r"vllm serve FOLDER (.*?)```", section, flags=re.DOTALL)
        .group(1)
        .replace("\\\n", " ")
    )
    command = f"{COMMAND} serve {model} --port {port} {typed}".replace("bfloat16", "float32")
    server = child.subprocess.Popen(  # of `forked_children`
        shlex.split(command), env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}, start_new_session=True
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 9)
        server.wait()


@pytest.mark.slow
def test_two_nodes_with_a_server_that_runs_already_train_as_one_process_does(tmp_path):
    model = save_llama(tmp_path / "model")
    settings = with_model(model, "trainer.device=cpu", "model.dtype=float32", "trainer.max_steps=3")
    settings += [
        "sampler=vllm",
        "sampler.start_seconds=170",
        f"sampler.weights_folder={tmp_path}/weights",
    ]
    with running_server(model, free_port()) as url:
        on_two_nodes = train_on_two_nodes(
            tmp_path, *settings, f"sampler.urls=[{url}]", "parallelism=fsdp"
        )
        expected = run_on_ranks(tmp_path / "one", [*settings, f"sampler.urls=[{url}]"])
    assert_same_metrics(on_two_nodes, expected)
    assert list((tmp_path / "weights").iterdir()) == []
