"""A run of several processes of which one is killed, stopped, frozen or started wrongly ends in
time, with the reason in its status.

Every case is the command with real processes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from builders.commands import ENVIRONMENT, ForkedCommand
from builders.parallel_runs import resume_until_signal
from builders.processes import ForkedProcess, free_port, world
from builders.runs import SHORT, config_of, last_of_each_key, metrics_of

pytestmark = pytest.mark.slow
LONG = (
    "parallelism=ddp",
    "trainer.max_steps=100000",
    "trainer.checkpoint_every=5",
    "trainer.keep_checkpoints=2",
)


class Run(ForkedCommand):
    """A command that trains on two ranks."""

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        started = "pgtoolkit.launch.worker"
        return [child for child in children if child.name() == "rank" or started in child.cmdline()]

    def rank(self, number: int) -> psutil.Process:
        return sorted(self.workers(), key=psutil.Process.create_time)[number]

    def kill(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children():
                child.kill()
        super().kill()


def listening_addresses(pid: int) -> list[str]:
    """Return the addresses at which a process listens to the network."""
    connections = psutil.Process(pid).net_connections("inet")
    return [
        connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a run and waits for its first steps; the runs end with the
    test."""
    runs = []

    def begin(*words: str, steps: int = 2) -> Run:
        runs.append(Run(tmp_path, *words, environment={"TMPDIR": str(tmp_path)}))
        runs[-1].wait_for_steps(steps)
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def test_a_signal_stops_all_ranks_after_the_same_step_and_the_run_can_be_resumed(start):
    """The signal goes to the command, and in the resumed run to one rank alone."""
    run = start(*SHORT, *LONG)
    run.process.send_signal(signal.SIGINT)
    shown = run.end(60)
    assert run.process.returncode == 75, shown
    assert "pgtk: stopped as asked (SIGINT) after step" in shown
    assert "Continue with:" in shown
    assert "Traceback" not in shown
    assert (run.status["state"], run.status["reason"]) == ("interrupted", "SIGINT")
    first = run.status["step"]
    assert (run.directory / "checkpoints" / f"step-{first:06d}" / "manifest.json").exists()

    config = config_of(*SHORT, *LONG)
    messages = world(2).run(resume_until_signal, config, run.directory, first + 2)
    last = run.status["step"]
    assert (run.status["state"], run.status["reason"]) == ("interrupted", "SIGTERM")
    assert [message.count(f"(SIGTERM) after step {last};") for message in messages] == [1, 1]
    rows = metrics_of(run.directory)
    assert len(rows) == last >= first + 2
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["documents_seen"] for row in rows] == [
        8 * number for number in range(1, len(rows) + 1)
    ]


@pytest.mark.starts_python
def test_ctrl_c_as_soon_as_workers_exist_leaves_no_traceback(start):
    """A terminal sends it to all processes at once, while the interpreter of a worker starts."""
    run = start(*SHORT, *LONG, steps=0)
    run.wait_for(run.workers)
    time.sleep(0.2)
    for process in (run.process, *run.workers()):
        process.send_signal(signal.SIGINT)
    shown = run.end(60)
    assert run.process.returncode == 75, shown
    assert "Traceback" not in shown
    assert "pgtk resume" in shown


def test_a_run_listens_on_the_loopback_interface_alone_and_names_a_killed_rank(start):
    """The killed rank is 0, which would have written the status itself."""
    run = start(*SHORT, *LONG)
    addresses = []
    for process in (run.process, *run.workers()):
        addresses += listening_addresses(process.pid)
    assert len(addresses) > 2  # the store, and gloo in each worker
    assert set(addresses) == {"127.0.0.1"}
    run.rank(0).kill()
    shown = run.end(60)
    assert run.process.returncode == 5, shown
    assert "pgtk: error: rank 0 was ended by SIGKILL" in shown
    assert shown.count("pgtk: error") == 1
    assert "Traceback" not in shown
    assert run.status["state"] == "failed"
    assert "rank 0 was ended by SIGKILL" in run.status["reason"]


def test_a_frozen_rank_ends_the_run_within_the_timeout(start):
    run = start(*SHORT, *LONG, "parallelism.timeout_seconds=4")
    began = time.monotonic()
    run.rank(1).suspend()
    shown = run.end(60)
    assert run.process.returncode == 5, shown
    assert "rank 1 did not answer within parallelism.timeout_seconds=4 and was ended" in shown
    assert time.monotonic() - began < 30
    assert run.status["state"] == "failed"


def test_workers_whose_command_was_killed_save_and_end(start):
    run = start(*SHORT, *LONG)
    children = psutil.Process(run.process.pid).children()
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    for process in alive:
        process.kill()
    assert alive == []
    assert (run.status["state"], run.status["reason"]) == ("interrupted", "the end of its launcher")


def start_rank(folder: Path, rank: int, world_size: int, port: int) -> ForkedProcess:
    """Start a rank of two that train in folder/run, as torchrun starts it; it prints into
    folder/rank-N."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    overrides = last_of_each_key(*SHORT, "parallelism=ddp", "trainer.max_steps=2")
    return ForkedProcess(
        [*overrides, f"hydra.run.dir={folder / 'run'}"],
        folder,
        ENVIRONMENT | {name: str(value) for name, value in variables.items()},
        folder / f"rank-{rank}",
    )


def test_a_wrong_number_of_ranks_is_refused(tmp_path):
    rank = start_rank(tmp_path, 0, 3, free_port())
    assert rank.wait(60) == 2
    printed = (tmp_path / "rank-0").read_text()
    assert "WORLD_SIZE=3 needs the product of the parallel sizes, 2 = " in printed
    assert not (tmp_path / "run").exists()


def test_ranks_of_a_launcher_refuse_a_directory_that_has_a_run(tmp_path):
    """Rank 0 alone sees that the directory is taken, and both end. test_nodes.py has ranks of a
    launcher that train together."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    port = free_port()
    ranks = [start_rank(tmp_path, rank, 2, port) for rank in range(2)]
    statuses = [rank.wait(120) for rank in ranks]
    printed = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert statuses == [2, 2], printed
    assert "needs a directory without a run (got one with config.yaml)" in printed[0]
    assert printed[1] == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1", "run"]
