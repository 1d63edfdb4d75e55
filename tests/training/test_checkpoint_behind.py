"""A thread writes checkpoints while training goes on: each holds the values of its step, none is
promised before it is whole, and what the disk refuses ends the run."""

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from builders.runs import (
    assert_equal,
    at_step,
    checkpoint_of,
    checkpoint_state,
    contents_of,
    run,
)
from safetensors.torch import save_file

from pgtoolkit.errors import Interrupted, StorageError
from pgtoolkit.runs.records import checkpoint_steps, list_checkpoints, read_status
from pgtoolkit.training import checkpoint, recorder
from pgtoolkit.training.checkpoint import MOMENTS, WEIGHTS, load_newest, save_behind
from pgtoolkit.training.recorder import Recorder


def no_settings(folder: Path) -> None:
    """Write nothing beside the weights."""


def test_a_checkpoint_holds_the_values_of_its_step_while_they_change(tmp_path, monkeypatch):
    """They are changed while the thread writes the 64 MB of the first file."""
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 1)
    weights = {"large": torch.zeros(2**24), "small": torch.zeros(3), "column": torch.zeros(3, 2).T}
    moments = {"small.exp_avg": torch.zeros(3), "small.step": torch.zeros(())}
    documents = [{"tokens": torch.zeros(4)}]
    state = checkpoint_state(1, documents=documents)
    future = save_behind(tmp_path, state, {WEIGHTS: weights, MOMENTS: moments}, no_settings, 1)
    was_whole = future.done()
    for tensor in (*weights.values(), *moments.values(), documents[0]["tokens"]):
        tensor += 1
    documents.clear()
    state["num_updates"] = 99
    path = future.result()
    assert not was_whole
    contents = contents_of(path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    assert_equal(contents["model"], zeros)
    assert_equal(contents["optimizer"], {name: torch.zeros_like(moments[name]) for name in moments})
    assert contents["num_updates"] == 1
    assert_equal(contents["documents"], [{"tokens": torch.zeros(4)}])


def test_a_run_writes_the_same_checkpoints_behind_and_where_no_memory_is_left(
    tmp_path, monkeypatch
):
    """The last one is written at once in any case."""
    written_behind = []

    def record_step_and_save(folder, state, *arguments):
        written_behind.append(state["step"])
        return save_behind(folder, state, *arguments)

    monkeypatch.setattr(recorder, "save_behind", record_step_and_save)
    behind = run(tmp_path / "behind", "trainer.max_steps=3")
    assert written_behind == [1, 2]
    monkeypatch.setattr(checkpoint, "available_bytes", lambda: 1000)
    at_once = run(tmp_path / "at_once", "trainer.max_steps=3")
    assert written_behind == [1, 2]
    for step in (1, 2, 3):
        assert_equal(checkpoint_of(behind, step), checkpoint_of(at_once, step))


def test_status_promises_a_checkpoint_only_once_it_is_whole(tmp_path):
    folder = tmp_path / "run"
    has_ended = threading.Event()
    seen = set()

    def watch() -> None:
        while not has_ended.is_set():
            saved = read_status(folder).get("saved", 0)
            seen.add((saved, tuple(checkpoint_steps(folder))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run(folder, "trainer.max_steps=5")
    finally:
        has_ended.set()
        watcher.join()
    assert len({saved for saved, _ in seen}) > 3
    assert [(saved, steps) for saved, steps in seen if saved and saved not in steps] == []
    assert read_status(folder)["saved"] == 5


@pytest.fixture
def limit() -> Iterator[Callable[[], None]]:
    """Return a function after which no file may be as large as that of the weights.

    So a write fails half way, as on a full disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_the_disk_refuses_a_thread_ends_the_run_and_the_one_before_stays(
    tmp_path, monkeypatch, limit
):
    folder = tmp_path / "run"

    def limit_after_step_1() -> None:
        while not (folder / "checkpoints/step-000001").exists():
            time.sleep(0.01)
        limit()

    at_step(monkeypatch, 2, limit_after_step_1)
    with pytest.raises(StorageError) as raised:
        run(folder, "trainer.max_steps=9")
    assert "step-000002 cannot be written: " in str(raised.value)
    assert "File too large. Earlier ones are intact. Continue with: " in str(raised.value)
    status = read_status(folder)
    assert (status["state"], status["saved"]) == ("failed", 1)
    assert status["step"] in (2, 3)
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-000001"]
    assert load_newest(folder / "checkpoints")["step"] == 1


def test_what_the_disk_refuses_a_thread_as_the_run_is_stopped_is_reported(
    tmp_path, monkeypatch, limit
):
    folder = tmp_path / "run"

    def limit_and_stop() -> None:
        limit()
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 1, limit_and_stop)
    with pytest.raises(StorageError, match="step-000001 cannot be written: "):
        run(folder)
    status = read_status(folder)
    assert (status["state"], status["step"], status["saved"]) == ("failed", 1, 0)


def test_a_disk_that_fails_as_a_file_of_tensors_is_flushed_is_reported(tmp_path, monkeypatch):
    """Each file of tensors is flushed by a thread of its own."""
    fsync = os.fsync

    def fail_for_weights(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("model-00001-00001.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_weights)
    weights = {"x": torch.zeros(3)}
    future = save_behind(tmp_path, checkpoint_state(1), {WEIGHTS: weights}, no_settings, keep=1)
    with pytest.raises(StorageError, match="step-000001 cannot be written: Input/output error"):
        future.result()
    assert os.listdir(tmp_path) == []


def test_a_run_that_fails_waits_for_the_checkpoint_before(tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def fail_after_step_1(recorder: Recorder, *_: object) -> None:
        if recorder.step == 1:
            raise RuntimeError("of the user's")

    monkeypatch.setattr(Recorder, "on_train_batch_start", fail_after_step_1)
    with pytest.raises(RuntimeError, match="of the user's"):
        run(folder)
    assert os.listdir(folder / "checkpoints") == ["step-000001"]
    status = read_status(folder)
    assert (status["state"], status["saved"]) == ("failed", 1)


def test_a_second_interrupt_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    """A slow disk takes the weights of step 1 only after both."""
    folder = tmp_path / "run"
    training_thread = threading.current_thread()

    def interrupt_twice_and_save(tensors: dict, path: Path, *metadata: object) -> None:
        if threading.current_thread() is not training_thread and path.name.startswith("model"):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
        save_file(tensors, path, *metadata)

    monkeypatch.setattr(checkpoint, "save_file", interrupt_twice_and_save)
    stopped = r"stopped as asked \(a second SIGINT\) after step \d; saved up to step 1\. Continue"
    with pytest.raises(Interrupted, match=stopped):
        run(folder)
    assert os.listdir(folder / "checkpoints") == ["step-000001"]
    status = read_status(folder)
    assert (status["state"], status["saved"]) == ("interrupted", 1)
