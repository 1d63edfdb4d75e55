"""Links and pipes inside a run directory: the commands that open one refuse it; nothing outside is
written or sent."""

import os
import shutil

import pytest
from builders.runs import run

from pgtoolkit.cli import main
from pgtoolkit.system.plain_files import remove, write_atomically


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
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
def test_a_run_directory_with_a_link_or_a_pipe_is_refused(trained, tmp_path, capsys, name, kind):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(trained, folder)
    remove(folder / name)
    outside.write_text("{}\n")
    (folder / name).symlink_to(outside) if kind == "link" else os.mkfifo(folder / name)
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for command, arguments in COMMANDS.items():
        status = main([command, *(one.format(run=folder, top=tmp_path) for one in arguments)])
        said = capsys.readouterr().err
        assert f"{folder / name} needs to be a plain file or a folder (got a {kind})" in said, (
            command
        )
        assert status == (2 if command == "compare" else 6)  # which needs one run that can be read
    assert sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_run_directory_may_itself_be_a_link(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "disk" / "run")
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    (tmp_path / "run").symlink_to(tmp_path / "outputs" / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert main(["compare", str(tmp_path / "outputs" / "run")]) == 0


def test_replacing_keeps_what_was_there_when_it_fails(tmp_path):
    write_atomically(tmp_path / "file", "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]
