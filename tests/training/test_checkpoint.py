"""Checkpoints: whole or absent, newest readable first, nothing executed on loading."""

import os
import pickle
import random
import signal
import subprocess
import sys

import numpy
import pytest
import torch
from runs import state

from pgtoolkit.errors import StorageError
from pgtoolkit.training.checkpoint import load_newest, random_state, save_checkpoint, set_random_state
from pgtoolkit.training.disk import list_checkpoints


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 100):
        save_checkpoint(tmp_path, step, state(step), keep=2)
    assert names(tmp_path) == ["step-000010.ckpt", "step-000100.ckpt"]
    assert load_newest(tmp_path) == state(100) | {"path": tmp_path / "step-000100.ckpt"}


def test_steps_beyond_a_million_are_newer_than_those_before(tmp_path):
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save_checkpoint(tmp_path, step, state(step), keep=2)
        assert load_newest(tmp_path)["step"] == step
    assert names(tmp_path) == ["step-1000000.ckpt", "step-1000001.ckpt"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newest_one_takes_no_place_of_those_that_are_kept(tmp_path, keep, caplog):
    for step in (4, 5):
        save_checkpoint(tmp_path, step, state(step), keep=2)
    for path in (tmp_path / "step-000006.ckpt", tmp_path / "step-000010.ckpt", tmp_path / ".step-000007.ckpt.tmp"):
        path.write_bytes(b"PK")
    (tmp_path / "step-000011").mkdir()
    assert load_newest(tmp_path)["step"] == 5
    save_checkpoint(tmp_path, 6, state(6), keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005.ckpt", "step-000006.ckpt"][-keep:]
    assert load_newest(tmp_path)["step"] == 6


@pytest.mark.parametrize("key", ["step", "num_updates", "num_skipped_steps", "documents_seen", "data", "random"])
@pytest.mark.parametrize("damage", ["missing", "of another type"])
def test_a_checkpoint_without_what_each_has_is_passed_over(tmp_path, key, damage, caplog):
    save_checkpoint(tmp_path, 1, state(1), keep=2)
    changed = state(2) | {key: "text"}
    if damage == "missing":
        del changed[key]
    save_checkpoint(tmp_path, 2, changed, keep=2)
    assert load_newest(tmp_path)["step"] == 1
    assert f"step-000002.ckpt cannot be read and is passed over: its {key} is " in caplog.text


def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(tmp_path):
    save_checkpoint(tmp_path, 1, state(1), keep=2)
    save_checkpoint(tmp_path, 2, state(2, format=2), keep=2)
    with pytest.raises(StorageError, match=r"step-000002.ckpt is of format 2, .* Nothing is damaged. Use the version"):
        load_newest(tmp_path)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog):
    save_checkpoint(tmp_path, 1, state(1), keep=5)
    newest = save_checkpoint(tmp_path, 2, state(2, x=torch.zeros(1000)), keep=5)
    newest.write_bytes(newest.read_bytes()[:700])
    assert load_newest(tmp_path)["step"] == 1
    assert "step-000002.ckpt" in caplog.text


@pytest.mark.parametrize("damage", ["empty", "one byte"])
def test_no_damage_passes_for_a_checkpoint(tmp_path, damage, caplog):
    save_checkpoint(tmp_path, 1, state(1), keep=5)
    newest = save_checkpoint(tmp_path, 2, state(2, x=torch.arange(1000)), keep=5)
    data = bytearray(newest.read_bytes())
    place = data.find(torch.arange(500, 510).numpy().tobytes())
    assert place > 0
    data[place] ^= 1
    newest.write_bytes(b"" if damage == "empty" else bytes(data))
    assert load_newest(tmp_path)["step"] == 1
    assert "step-000002.ckpt" in caplog.text


def test_no_checkpoint_is_none_and_nothing_but_damaged_ones_is_an_error(tmp_path):
    assert load_newest(tmp_path) is None
    (tmp_path / "step-000001.ckpt").write_bytes(b"PK")
    with pytest.raises(StorageError, match="none of the 1"):
        load_newest(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    with (tmp_path / "step-000001.ckpt").open("wb") as file:
        torch.save(state(1, x=Malicious()), file, pickle_module=pickle)
    with pytest.raises(StorageError):
        load_newest(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_killed_in_the_middle_of_saving(tmp_path):
    """The kernel kills the process at byte 100 000 of a checkpoint, once a new one and once the newest again."""
    script = (
        "import pathlib, resource, signal, sys, torch\n"
        "from pgtoolkit.training.checkpoint import save_checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "save_checkpoint(pathlib.Path(sys.argv[1]), int(sys.argv[2]), {'x': torch.zeros(10**6)}, keep=1)\n"
    )
    whole = save_checkpoint(tmp_path, 1, state(1, x=torch.arange(9)), keep=1).read_bytes()
    for step in ("1", "2"):
        killed = subprocess.run([sys.executable, "-c", script, str(tmp_path), step], timeout=120)
        assert killed.returncode == -signal.SIGXFSZ
        assert [(path.name, path.read_bytes()) for path in list_checkpoints(tmp_path)] == [("step-000001.ckpt", whole)]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """The file size limit makes the write fail half way, as a full disk does."""
    script = (
        "import resource, signal, sys, torch, pathlib\n"
        "from pgtoolkit.training.checkpoint import save_checkpoint\n"
        "from pgtoolkit.errors import StorageError\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    save_checkpoint(folder, 2, {'step': 2, 'x': torch.zeros(10**6)}, keep=1)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    save_checkpoint(tmp_path, 1, state(1), keep=1)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "cannot be written: [Errno 27]" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.ckpt"]
    assert load_newest(tmp_path)["step"] == 1


def test_random_state_round_trip(tmp_path):
    save_checkpoint(tmp_path, 1, state(1, random=random_state()), keep=1)
    first = torch.rand(3), numpy.random.rand(3), random.random()
    set_random_state(load_newest(tmp_path)["random"])
    again = torch.rand(3), numpy.random.rand(3), random.random()
    assert torch.equal(first[0], again[0])
    assert (first[1] == again[1]).all()
    assert first[2] == again[2]
