"""Signals to the command as a process: its exit status, and a run directory that can be resumed to
the same bits."""

import shlex
import signal
import subprocess
import sys
import time

import pytest
from builders.commands import Command
from builders.runs import SHORT, assert_equal, checkpoint_of, last_of_each_key, metrics_of, run

from pgtoolkit.cli import main
from pgtoolkit.runs.records import read_status

LONG = ("trainer.max_steps=400", "trainer.checkpoint_every=1000")


@pytest.mark.slow
def test_a_run_that_a_signal_stopped_resumes_bit_equal_to_one_that_was_never_stopped(
    tmp_path, monkeypatch
):
    command = Command(tmp_path, *SHORT, *LONG)
    command.wait_for_steps(3)
    command.process.send_signal(signal.SIGTERM)
    shown = command.end()
    assert command.process.returncode == 75, shown
    assert "resume" in shown
    assert "Traceback" not in shown
    status = read_status(tmp_path / "run")
    assert (status["state"], status["reason"]) == ("interrupted", "SIGTERM")
    last = status["step"] + 2
    assert last >= 5
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "run", f"trainer.max_steps={last}", "trainer.checkpoint_every=1"]) == 0
    assert read_status(tmp_path / "run")["state"] == "done"
    uninterrupted = run(tmp_path / "uninterrupted", f"trainer.max_steps={last}")
    assert metrics_of(tmp_path / "run") == metrics_of(uninterrupted)
    assert_equal(checkpoint_of(tmp_path / "run", last), checkpoint_of(uninterrupted, last))


@pytest.mark.parametrize(("start", "status", "step"), [("", 75, 2), ("nohup ", 0, 3)])
def test_a_terminal_that_is_closed_stops_a_run_unless_nohup_started_it(
    tmp_path, start, status, step
):
    script = (
        "import os, signal; from pgtoolkit.training.recorder import Recorder, log; from "
        "pgtoolkit.cli import main\n"
    )
    script += (
        "log.info = lambda line, **_: line.startswith('step 2/') and os.kill(os.getpid(), "
        "signal.SIGHUP)\n"
    )
    script += "import sys; sys.exit(main())"
    words = [*last_of_each_key(*SHORT, "trainer.max_steps=3"), f"hydra.run.dir={tmp_path / 'run'}"]
    command = start + shlex.join([sys.executable, "-c", script, *words])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        # The default action, even if nohup started the tests.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert (done.returncode, read_status(tmp_path / "run")["step"]) == (status, step), done.stderr
    assert ("stopped as asked (SIGHUP) after step 2; saved up to step 2" in done.stderr) == (
        status == 75
    )


INTERRUPTED_WHILE_IT_WRITES = """
import io, os, signal, sys
from pgtoolkit.cli import main

class Terminal(io.FileIO):
    def write(self, text):
        if b"step   3/" in bytes(text):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Terminal(1, "w")))
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_while_a_line_is_written_stops_after_the_step_without_a_traceback(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED_WHILE_IT_WRITES, *last_of_each_key(*SHORT, *LONG)]
    command += [f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert "SIGINT: finishing this step, then saving\n" in done.stdout
    assert read_status(tmp_path / "run")["step"] == 3


INTERRUPTED_IN_A_FINALIZER = """
import os, signal, sys
from pgtoolkit.cli import main
from pgtoolkit.assembly import train

class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def build(*arguments, real=train.build):
    Interrupting()
    return real(*arguments)

train.build = build
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_whose_exception_python_drops_stops_the_run_before_its_first_step(tmp_path):
    command = [
        sys.executable,
        "-c",
        INTERRUPTED_IN_A_FINALIZER,
        *last_of_each_key(*SHORT, "trainer.max_steps=3"),
    ]
    command += [f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 75, done.stderr
    assert "Exception ignored" in done.stderr
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["reason"]) == ("interrupted", 0, "SIGINT")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGTERM, "imports"), (signal.SIGINT, "build")]
)
def test_a_signal_before_the_first_step_leaves_a_run_that_resumes(
    tmp_path, monkeypatch, number, moment
):
    command = Command(tmp_path, *SHORT, *LONG)
    # The folder is made before the imports, the configuration is written after them.
    sign = tmp_path / "run" / ("." if moment == "imports" else "config.yaml")
    command.wait_for(sign.exists)
    time.sleep(0.2 if moment == "imports" else 0)
    command.process.send_signal(number)
    shown = command.end()
    assert command.process.returncode == 75, shown
    assert "Traceback" not in shown
    assert "resume run" in shown
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["reason"]) == ("interrupted", 0, number.name)
    if moment == "imports":
        monkeypatch.chdir(tmp_path)
        assert main(["resume", "run", "trainer.max_steps=2"]) == 0
        assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_second_interrupt_acts_at_once_and_leaves_a_run_that_resumes(tmp_path):
    command = Command(
        tmp_path, *SHORT, *LONG, "rollout.prompts_per_batch=64", "accumulation.docs_per_step=256"
    )
    command.wait_for_steps(2)
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: "finishing this step" in command.log.read_text())
    command.process.send_signal(signal.SIGINT)
    shown = command.end()
    assert command.process.returncode == 75, shown
    assert "saved up to step" in shown
    assert "Traceback" not in shown
    assert read_status(tmp_path / "run")["state"] == "interrupted"


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_each_row_once(tmp_path, monkeypatch):
    # SIGKILL leaves rows after the last checkpoint, which the resumed run writes again.
    command = Command(tmp_path, *SHORT, "trainer.max_steps=400", "trainer.checkpoint_every=4")
    command.wait_for_steps(6)
    command.kill()
    assert read_status(tmp_path / "run")["state"] == "running"
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "run", "trainer.max_steps=9"]) == 0
    steps = [row["step"] for row in metrics_of(tmp_path / "run")]
    assert steps == list(range(1, 10))


def test_a_numerical_failure_exits_with_4_and_names_the_documents_of_skipped_steps(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    broken = [
        "optimizer.learning_rate=1e5",
        "optimizer.weight_decay=10",
        "accumulation.docs_per_step=4",
    ]
    overrides = last_of_each_key(*SHORT, *broken, "optimizer.warmup_steps=0")
    assert main([*overrides, "hydra.run.dir=run"]) == 4
    printed = capsys.readouterr()
    assert "not finite" in printed.err
    assert "prompt 2, completion 0" in printed.out
    assert read_status(tmp_path / "run")["state"] == "failed"
    rows = metrics_of(tmp_path / "run")
    assert all(abs(value) < float("inf") for row in rows for value in row.values())
