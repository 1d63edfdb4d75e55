"""What becomes of a run of several processes when one of them is killed, stopped, frozen or started
wrongly.

Every case is the installed command with real processes, and bounded in time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import psutil
import pytest
from builders.commands import PGTK, Command
from builders.runs import SHORT, last_of_each_key, metrics_of

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


def listening(process: int) -> list:
    return [
        one
        for one in psutil.Process(process).net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]


@pytest.fixture
def start(tmp_path):
    runs = []

    def begin(*words: str, steps: int = 2) -> Run:
        runs.append(Run(tmp_path, *words, environment={"TMPDIR": str(tmp_path)}))
        runs[-1].wait_for_steps(steps)
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def test_a_signal_stops_all_ranks_after_the_same_step_and_the_run_goes_on(start):
    """First to one rank alone, then, in the resumed run, to the command."""
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
    """To all at once, as a terminal sends it; a worker's interpreter is still starting."""
    run = start(*SHORT, *LONG, steps=0)
    run.wait_for(run.workers)
    time.sleep(0.2)
    for process in (run.process, *run.workers()):
        process.send_signal(signal.SIGINT)
    shown = run.end(60)
    assert run.process.returncode == 75, shown
    assert "Traceback" not in shown
    assert "pgtk resume" in shown


def test_a_killed_rank_ends_the_run_with_its_name(start):
    """Rank 0, which cannot write down itself how it ended. Until then nothing listened to the
    network."""
    run = start(*SHORT, *LONG)
    sockets = [one for process in (run.process, *run.workers()) for one in listening(process.pid)]
    assert len(sockets) > 2  # the store, and gloo in each worker
    assert {one.laddr.ip for one in sockets} == {"127.0.0.1"}
    run.rank(0).kill()
    shown = run.end(60)
    assert run.process.returncode == 5, shown
    assert "pgtk: error: rank 0 was ended by SIGKILL" in shown
    assert shown.count("pgtk: error") == 1
    assert "Traceback" not in shown
    assert run.status["state"] == "failed"
    assert "rank 0 was ended by SIGKILL" in run.status["reason"]


def test_a_frozen_rank_ends_the_run_in_time(start):
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


def test_ranks_of_a_launcher_train_together_and_a_wrong_number_of_them_is_refused(tmp_path):
    """As torchrun starts them: one environment for each."""

    def begin(rank: int, size: int, *overrides: str) -> subprocess.Popen:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = os.environ | {name: str(value) for name, value in place.items()}
        return subprocess.Popen(
            [
                PGTK,
                *last_of_each_key(*SHORT, *overrides, "trainer.max_steps=2"),
                f"hydra.run.dir={tmp_path / 'run'}",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wrong = begin(0, 3, "parallelism=ddp")
    _, errors = wrong.communicate(timeout=60)
    assert wrong.returncode == 2
    assert "WORLD_SIZE=3 needs the product of the parallel sizes, 2 = " in errors
    assert not (tmp_path / "run").exists()
    ranks = [begin(rank, 2, "parallelism=ddp") for rank in range(2)]
    (shown, errors), (others, other_errors) = (
        process.communicate(timeout=120) for process in ranks
    )
    assert [process.returncode for process in ranks] == [0, 0], errors + other_errors
    assert shown.count("step 2/2") == 1
    assert (others, other_errors) == ("", "")
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    # Now rank 0 alone sees that the directory is taken.
    ranks = [begin(rank, 2, "parallelism=ddp") for rank in range(2)]
    (_, errors), others = (process.communicate(timeout=120) for process in ranks)
    assert [process.returncode for process in ranks] == [2, 2], errors + others[1]
    assert "needs a directory without a run (got one with config.yaml)" in errors
    assert others == ("", "")
