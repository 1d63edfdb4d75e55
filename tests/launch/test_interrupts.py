"""Signals to the command: its exit status, and a run directory that can be resumed.

test_lost.py resumes a run that a signal stopped to the same bits.
"""

import io
import os
import signal
import sys
import time

import pytest
from builders.commands import Command, ForkedCommand
from builders.runs import SHORT, last_of_each_key, metrics_of

from pgtoolkit.assembly import train
from pgtoolkit.cli import main
from pgtoolkit.runs.records import read_status
from pgtoolkit.training import recorder

LONG = ("trainer.max_steps=400", "trainer.checkpoint_every=1000")


@pytest.mark.parametrize(("ignored", "status", "step"), [(False, 75, 2), (True, 0, 3)])
def test_a_terminal_that_is_closed_stops_a_run_unless_nohup_started_it(
    tmp_path, monkeypatch, capsys, ignored, status, step
):
    """A run that nohup starts ignores the signal from its first moment."""

    def close_terminal(line: str, **_: object) -> None:
        if line.startswith("step 2/"):
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(recorder.log, "info", close_terminal)
    words = [*last_of_each_key(*SHORT, "trainer.max_steps=3"), f"hydra.run.dir={tmp_path / 'run'}"]
    # A handler that fails takes the place of the default action, which would end the tests.
    unheard = signal.SIG_IGN if ignored else lambda *_: pytest.fail("the run has no handler")
    before = signal.signal(signal.SIGHUP, unheard)
    try:
        assert main(words) == status
        assert signal.getsignal(signal.SIGHUP) == unheard
    finally:
        signal.signal(signal.SIGHUP, before)
    assert read_status(tmp_path / "run")["step"] == step
    message = "stopped as asked (SIGHUP) after step 2; saved up to step 2"
    assert (message in capsys.readouterr().err) == (not ignored)


class InterruptedWriter(io.FileIO):
    """A terminal where Ctrl-C is pressed while the line of step 3 is written."""

    def write(self, text):
        if b"step   3/" in bytes(text):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_a_signal_while_a_line_is_written_stops_after_the_step_without_a_traceback(
    tmp_path, monkeypatch, capfd
):
    written = InterruptedWriter(tmp_path / "terminal", "w")
    with io.TextIOWrapper(io.BufferedWriter(written)) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        words = [*last_of_each_key(*SHORT, *LONG), f"hydra.run.dir={tmp_path / 'run'}"]
        assert main(words) == 75
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    assert (
        "SIGINT: finishing this step, then saving\n" in printed.out
    )  # past the buffer, which is in use
    assert read_status(tmp_path / "run")["step"] == 3


class Interrupting:
    """Sends SIGINT when it is deleted, where Python drops the exception of a handler."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_signal_while_a_run_is_built_stops_it_before_its_first_step(
    tmp_path, monkeypatch, is_dropped
):
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)

    def build(*arguments: object, real=train.build, **keywords: object) -> object:
        if is_dropped:
            Interrupting()
        else:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **keywords)

    monkeypatch.setattr(train, "build", build)
    overrides = last_of_each_key(*SHORT, "trainer.max_steps=3")
    assert main([*overrides, f"hydra.run.dir={tmp_path / 'run'}"]) == 75
    assert len(dropped) == is_dropped
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["reason"]) == ("interrupted", 0, "SIGINT")


@pytest.mark.slow
def test_a_signal_during_the_imports_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    command = Command(tmp_path, *SHORT, *LONG)
    command.wait_for((tmp_path / "run").exists)  # the folder is made before the imports
    time.sleep(0.2)
    command.process.send_signal(signal.SIGTERM)
    shown = command.end()
    assert command.process.returncode == 75, shown
    assert "Traceback" not in shown
    assert "resume run" in shown
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["reason"]) == ("interrupted", 0, "SIGTERM")
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "run", "trainer.max_steps=2"]) == 0
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_second_interrupt_acts_at_once_and_leaves_a_run_that_resumes(tmp_path):
    command = ForkedCommand(
        tmp_path, *SHORT, *LONG, "rollout.prompts_per_batch=32", "accumulation.docs_per_step=128"
    )
    command.wait_for_steps(1)
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
    command = ForkedCommand(tmp_path, *SHORT, "trainer.max_steps=400", "trainer.checkpoint_every=4")
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
