"""A full disk ends a run in one line with status 6, whichever file cannot grow any further.

A limit of the operating system on the size of a file stands for the disk.
"""

import resource

import pytest
from builders.runs import SHORT, last_of_each_key

from pgtoolkit.cli import main

SMALL = last_of_each_key(*SHORT, "trainer.max_steps=1", "hydra.run.dir=run")


@pytest.mark.parametrize(
    ("max_bytes", "last_file", "named_file"),
    [
        (0, ".lock", "run"),
        (1000, "data.json", "run/config.yaml"),
        (20_000, "checkpoints", "/run/"),
    ],
)
def test_a_full_disk_ends_a_run_in_one_line(
    tmp_path, monkeypatch, capsys, max_bytes, last_file, named_file
):
    monkeypatch.chdir(tmp_path)
    # Without git no file holds the uncommitted changes of this repository, however large they are.
    monkeypatch.setenv("PATH", "")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        status = main(SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    output = capsys.readouterr()
    assert status == 6, output.err
    (line,) = [line for line in output.err.splitlines() if not line.startswith("note: ")]
    assert line.startswith("pgtk: error: ")
    assert "File too large" in line
    assert named_file in line
    # There is no earlier one, and what has begun is continued by a command.
    assert "Earlier ones" not in line
    assert ("Continue with: " in line) == (last_file == "checkpoints")
    assert "Traceback" not in output.out
    assert (tmp_path / "run" / last_file).exists()
