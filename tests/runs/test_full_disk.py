"""A disk on which no file can grow any further, wherever the run meets it: one message and status
6."""

import resource

import pytest
from builders.runs import SHORT, last_of_each_key

from pgtoolkit.cli import main

SMALL = last_of_each_key(*SHORT, "trainer.max_steps=1", "hydra.run.dir=run")


@pytest.mark.parametrize(
    ("length", "last_file", "named"),
    [
        (0, ".lock", "run"),
        (1000, "data.json", "run/config.yaml"),
        (20_000, "checkpoints", "/run/"),
    ],
)
def test_a_full_disk_is_one_message(tmp_path, monkeypatch, capsys, length, last_file, named):
    """length: the bytes that a file may have, beyond which the operating system refuses as on a
    full disk."""
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        status = main(SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr()
    assert status == 6, said.err
    (line,) = [line for line in said.err.splitlines() if not line.startswith("note: ")]
    assert line.startswith("pgtk: error: ")
    assert "File too large" in line
    assert named in line
    assert "Traceback" not in said.out
    assert (tmp_path / "run" / last_file).exists()
