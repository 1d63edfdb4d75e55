"""Every command that opens a run directory refuses it if a link or a pipe is inside, and writes
nothing outside of it."""

import os
import shutil
from pathlib import Path

import pytest
from builders.runs import run

from pgtoolkit.cli import main
from pgtoolkit.system.plain_files import remove, write_atomically
from pgtoolkit.system.report import shortest_path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(
        tmp_path_factory.mktemp("links") / "run",
        "trainer.max_steps=1",
        "rollout.keep_completions=1",
    )


COMMANDS = {
    "resume": ("{run}", "trainer.max_steps=2"),
    "sync": ("{run}", "--uri=sqlite:///{top}/mlflow.db"),
    "export": ("{run}", "{top}/model"),
    "evaluate": ("{run}",),
    "samples": ("{run}",),
    "tokens": ("{run}", "--html={top}/page.html"),
    "compare": ("{run}",),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.yaml", "link"),
        ("curves.png", "pipe"),
        ("checkpoints/step-000001/model.safetensors", "link"),
    ],
)
def test_a_run_directory_with_a_link_or_a_pipe_is_refused(run_dir, tmp_path, capsys, name, kind):
    folder = tmp_path / "run"
    outside = tmp_path / "outside"
    shutil.copytree(run_dir, folder)
    remove(folder / name)
    outside.write_text("{}\n")
    (folder / name).symlink_to(outside) if kind == "link" else os.mkfifo(folder / name)
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for command, arguments in COMMANDS.items():
        paths = [argument.format(run=folder, top=tmp_path) for argument in arguments]
        status = main([command, *paths])
        message = f"{folder / name} needs to be a plain file or a folder (got a {kind})"
        assert message in capsys.readouterr().err, command
        # For compare it is a refusal that none of the runs can be read.
        assert status == (2 if command == "compare" else 6)
    assert sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_run_directory_may_itself_be_a_link(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "disk" / "run")
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    (tmp_path / "run").symlink_to(tmp_path / "outputs" / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert main(["compare", str(tmp_path / "outputs" / "run")]) == 0


def test_a_path_is_shown_from_here_or_from_the_root_and_never_through_a_folder_above(
    tmp_path, monkeypatch
):
    (tmp_path / "a").mkdir()
    (tmp_path / "..b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    shown = [shortest_path(path) for path in ("x/y", "../b", tmp_path, ".", tmp_path / "a" / "x")]
    assert shown == ["x/y", f"{tmp_path}/b", f"{tmp_path}", ".", "x"]
    monkeypatch.chdir(tmp_path)
    assert shortest_path("..b") == "..b"


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path):
    write_atomically(tmp_path / "file", "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    write_atomically(path, "text")
    assert path.is_fifo()
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_an_error_of_writing_names_the_file_itself(tmp_path):
    path = tmp_path / "missing" / "page.html"
    with pytest.raises(FileNotFoundError) as error:
        write_atomically(path, "text")
    assert error.value.filename == str(path)
