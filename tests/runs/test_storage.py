"""A file that the system does not let us read is refused before anything is changed, by a line that
names it and says what shows the cause; once it is mended, the run goes on to the same bits."""

import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest
from builders.rights import without_rights_of_root
from builders.runs import (
    assert_equal,
    checkpoint_of,
    checkpoint_state,
    metrics_of,
    run,
    save_state,
)

from pgtoolkit.cli import main
from pgtoolkit.errors import StorageError, refused_by_disk
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import read_run
from pgtoolkit.runs.records import list_checkpoints, read_status
from pgtoolkit.training.checkpoint import load_newest


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("finished") / "run", "trainer.max_steps=2")


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a run, but for its log."""
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.log"
    }


NEWEST = "checkpoints/step-000002"


@pytest.mark.parametrize("name", ["checkpoints", NEWEST, f"{NEWEST}/training/state.json"])
def test_a_checkpoint_that_cannot_be_read_is_no_deleted_or_damaged_one(
    finished, tmp_path, capsys, name
):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = contents(folder)
    commands = (["resume", str(folder), "trainer.max_steps=3"], ["export", str(folder), "model"])
    mode = (folder / name).stat().st_mode
    (folder / name).chmod(0)
    try:
        for command in commands:
            with without_rights_of_root():
                assert main(command) == 6
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{folder / name}" in line
            assert "cannot be read or written: Permission denied. Let this user read" in line
            assert "namei -l " in line
    finally:
        (folder / name).chmod(mode)
    assert contents(folder) == before
    if name == NEWEST:
        assert main(commands[0]) == 0
        expected = run(tmp_path / "undisturbed", "trainer.max_steps=3")
        assert metrics_of(folder) == metrics_of(expected)
        assert_equal(checkpoint_of(folder, 3), checkpoint_of(expected, 3))


def test_a_resume_of_a_finished_run_changes_no_file(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for _ in range(2):
        assert main(["resume", str(folder)]) == 0
        assert "is done, after 2 steps: nothing is left to train" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times


def test_a_run_without_its_configuration_is_told_as_such(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "config.yaml").unlink()
    model = str(tmp_path / "model")
    for command in ("resume", "evaluate", "compare", "doctor", "samples", "tokens", "sync"):
        assert main([command, str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"Somebody has deleted {folder / 'config.yaml'}. Use the same command after" in line
    assert main(["export", str(folder), model]) == 2
    assert "Somebody has deleted" in capsys.readouterr().err


def test_a_run_whose_lock_cannot_be_read_is_not_said_to_be_killed(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    with RunDirectory(folder) as directory:
        directory.set_status("running", 2)
        assert read_run(folder).state == "running"
        (folder / ".lock").chmod(0)
        with without_rights_of_root():
            run_as_read = read_run(folder)
    assert run_as_read.state == "unreadable"
    assert f"{folder}/.lock cannot be read or written: Permission denied" in run_as_read.reason


def test_a_comparison_without_metrics_names_their_files(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert main(["compare", str(folder)]) == 2
    assert f"{folder}/metrics.jsonl. Put them back, from a backup" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_deleted_is_set_aside_and_the_new_one_counts(tmp_path):
    """Its owner has locked the old one, and renaming it needs only the folder above."""
    for step in (1, 2):
        path = save_state(tmp_path, checkpoint_state(step))
    (path / "training").chmod(0o555)
    with without_rights_of_root():
        saved = save_state(tmp_path, checkpoint_state(2))
    assert load_newest(tmp_path)["path"] == saved
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]
    (aside,) = tmp_path.glob(".step-*")
    (aside / "training").chmod(0o755)


def test_a_run_that_goes_back_from_a_damaged_checkpoint_can_be_stopped_and_resumed(
    finished, tmp_path, monkeypatch
):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / NEWEST / "manifest.json").write_text("{")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("pgtoolkit.training.recorder.save_checkpoint", fail)
        assert main(["resume", str(folder)]) == 6
    shutil.rmtree(folder / NEWEST)
    assert read_status(folder)["saved"] == 1
    assert main(["resume", str(folder)]) == 0
    assert_equal(checkpoint_of(folder, 2), checkpoint_of(finished, 2))


def test_checkpoints_that_are_deleted_during_a_run_are_told(tmp_path, monkeypatch, capsys):
    append_metrics = RunDirectory.append_metrics

    def delete_before_step_3(directory: RunDirectory, step: int, metrics: dict) -> None:
        append_metrics(directory, step, metrics)
        if step == 3:
            shutil.rmtree(directory.path / "checkpoints/step-000001")

    monkeypatch.setattr(RunDirectory, "append_metrics", delete_before_step_3)
    run(tmp_path / "run", "trainer.max_steps=3")
    assert capsys.readouterr().out.count("checkpoints lacks step-000001, which somebody") == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "namei -l /dev"),
        (errno.EROFS, "findmnt -T /dev"),
        (errno.ENOSPC, "df -h /dev"),
        (errno.EPERM, "lsattr -d /dev"),
        (errno.EIO, "dmesg"),
        (errno.EBADF, "Bad file descriptor"),
    ],
)
def test_an_error_of_the_system_names_the_file_and_what_shows_the_cause(number, advice):
    error = refused_by_disk("/dev/no/such", OSError(number, os.strerror(number)))
    assert isinstance(error, StorageError)
    assert str(error).startswith("/dev/no/such cannot be read or written: ")
    assert advice in str(error)
