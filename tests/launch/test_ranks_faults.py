"""A run of several processes of which one is killed, stopped, frozen or started wrongly ends in
time, with the reason in its status.

Every case is the installed command with real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from builders.commands import PGTK, Command
from builders.runs import SHORT, last_of_each_key, metrics_of
from builders.stores import free_port

pytestmark = pytest.mark.slow
LONG = (
    "parallelism=ddp",
    "trainer.max_steps=100000",
    "trainer.checkpoint_every=5",
    "trainer.keep_checkpoints=2",
)


class Run(Command):
    """A command that trains on two ranks."""

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "worker" in " ".join(child.cmdline())]

    def rank(self, number: int) -> psutil.Process:
        return next(worker for worker in self.workers() if worker.environ()["RANK"] == str(number))

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
    """The signal goes to one rank alone, and in the resumed run to the command."""
    run = start(*SHORT, *LONG)
    os.kill(run.rank(1).pid, signal.SIGTERM)
    shown = run.end(60)
    assert run.process.returncode == 75, shown
    assert "pgtk: stopped as asked (SIGTERM) after step" in shown
    assert "Continue with:" in shown
    assert "Traceback" not in shown
    assert (run.status["state"], run.status["reason"]) == ("interrupted", "SIGTERM")
    first = run.status["step"]
    assert (run.directory / "checkpoints" / f"step-{first:06d}" / "manifest.json").exists()

    run = start("resume", "run", steps=first + 2)
    run.process.send_signal(signal.SIGINT)
    shown = run.end(60)
    assert run.process.returncode == 75, shown
    assert run.status["reason"] == "SIGINT"
    rows = metrics_of(run.directory)
    assert len(rows) == run.status["step"] >= first + 2
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["documents_seen"] for row in rows] == [
        8 * number for number in range(1, len(rows) + 1)
    ]


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


def start_rank(folder: Path, rank: int, world_size: int, port: int) -> subprocess.Popen[str]:
    """Start a rank of two that train in folder/run, as torchrun starts it."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    overrides = last_of_each_key(*SHORT, "parallelism=ddp", "trainer.max_steps=2")
    return subprocess.Popen(
        [PGTK, *overrides, f"hydra.run.dir={folder / 'run'}"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: str(value) for name, value in variables.items()},
    )


def run_two_ranks(folder: Path) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the exit statuses of two ranks, and output and errors of each."""
    port = free_port()
    ranks = [start_rank(folder, rank, 2, port) for rank in range(2)]
    printed = [rank.communicate(timeout=120) for rank in ranks]
    return [rank.returncode for rank in ranks], printed


def test_a_wrong_number_of_ranks_is_refused(tmp_path):
    rank = start_rank(tmp_path, 0, 3, free_port())
    _, errors = rank.communicate(timeout=60)
    assert rank.returncode == 2
    assert "WORLD_SIZE=3 needs the product of the parallel sizes, 2 = " in errors
    assert not (tmp_path / "run").exists()


def test_ranks_of_a_launcher_refuse_a_directory_that_has_a_run(tmp_path):
    """Rank 0 alone sees that the directory is taken, and both end. test_nodes.py has ranks of a
    launcher that train together."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    statuses, ((_, errors), others) = run_two_ranks(tmp_path)
    assert statuses == [2, 2], errors + others[1]
    assert "needs a directory without a run (got one with config.yaml)" in errors
    assert others == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
