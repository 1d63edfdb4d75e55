"""Copies of the user's own modules in a run directory: redacted, once for each version, and never
imported."""

import json
import sys

import pytest
from builders.runs import metrics_of, run

from pgtoolkit.errors import ConfigError
from pgtoolkit.runs import modules
from pgtoolkit.runs.modules import keep_copies, module_digests

ADVANTAGES = """
import shares

# A comment.
def shifted(rewards, *, lengths, measures):
    password = "hunter2"
    return [[reward - 0.5 + shares.MORE for reward in group] for group in rewards]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current directory, with a module of advantages and another that it imports."""
    (tmp_path / "wins.py").write_text(ADVANTAGES)
    (tmp_path / "shares.py").write_text("import json\nimport numpy\nMORE = 0.0\n")
    monkeypatch.chdir(tmp_path)
    # directories of other tests, which may have a module of the same name
    others = str(tmp_path.parent)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(others)])
    return tmp_path


@pytest.fixture
def imported_anew(monkeypatch):
    """Forget what was imported, as a new process would."""

    def forget() -> None:
        for name in ("wins", "shares"):
            sys.modules.pop(name, None)

    forget()
    yield forget
    forget()


def copies(folder):
    return sorted(file.name for file in (folder / "code").iterdir())


def test_a_run_keeps_its_modules_by_their_digests_without_secrets(own, imported_anew):
    folder = run(own / "run", "advantage=wins.shifted", "trainer.max_steps=1")
    digests = json.loads((folder / "provenance.json").read_text())["modules"]
    assert digests == module_digests(["wins"])
    assert [*digests] == ["shares", "wins"]
    assert copies(folder) == [f"{name}-{digest}.py" for name, digest in digests.items()]
    kept = (folder / "code" / f"wins-{digests['wins']}.py").read_text()
    first, rest = kept.split("\n", 1)
    assert first == (
        f"# A copy of {own / 'wins.py'}, for the record: nothing imports it. Secrets are hidden "
        "as ***."
    )
    assert rest == ADVANTAGES.replace('"hunter2"', "***")
    assert not (run(own / "usual", "trainer.max_steps=1") / "code").exists()


def test_a_resume_runs_the_original_and_adds_a_copy_where_it_has_changed(own, imported_anew):
    folder = run(own / "run", "advantage=wins.shifted", "trainer.max_steps=1")
    before = copies(folder)
    (own / "wins.py").write_text(ADVANTAGES.replace("A comment", "Another comment"))
    imported_anew()
    run(folder, "advantage=wins.shifted", "trainer.max_steps=2", resume=True)
    assert copies(folder) == before
    (own / "shares.py").write_text("MORE = 100.0\n")
    imported_anew()
    run(folder, "advantage=wins.shifted", "trainer.max_steps=3", resume=True)
    assert len(copies(folder)) == 3
    assert set(before) < set(copies(folder))
    # The loss is minus the mean of the advantages at a ratio of 1: the changed module makes it what
    #   it is.
    losses = [row["loss"] for row in metrics_of(folder)]
    assert max(map(abs, losses[:2])) < 1 < 50 < abs(losses[2])
    assert not any(str(folder) in place for place in sys.path)


def test_without_the_original_nothing_takes_its_place(own, imported_anew):
    folder = run(own / "run", "advantage=wins.shifted", "trainer.max_steps=1")
    for name in ("wins.py", "shares.py"):
        (own / name).unlink()
    imported_anew()
    with pytest.raises(ConfigError, match="No module named 'wins'"):
        run(folder, "advantage=wins.shifted", "trainer.max_steps=2", resume=True)


def test_what_is_large_or_named_as_secrets_is_left_out_and_said(own, monkeypatch):
    (own / "shares.py").write_text("import my_secrets, large\nMORE = 0.0\n")
    (own / "my_secrets.py").write_text("KEY = 1\n")
    (own / "large.py").write_text(f"rows = '{'x' * modules.MOST_BYTES}'\n")
    left_out = keep_copies(own / "code", ["wins"])
    assert [name.partition("-")[0] for name in copies(own)] == ["shares", "wins"]
    assert left_out == [
        f"code/ has no copy of the module large, which has {modules.MOST_BYTES + 10} bytes, "
        f"more than {modules.MOST_BYTES}",
        "code/ has no copy of the module my_secrets, which has the name of a file of secrets",
    ]
    monkeypatch.setattr(modules, "MOST_BYTES_IN_ALL", len((own / "shares.py").read_bytes()))
    assert len(keep_copies(own / "other", ["wins"])) == 3
    assert [
        name.partition("-")[0] for name in sorted(file.name for file in (own / "other").iterdir())
    ] == ["shares"]


def test_a_module_of_the_current_directory_comes_before_an_installed_one_of_its_name(own, tmp_path):
    """As it does where it is imported; of Python's own modules Python's."""
    (own / "lightning.py").write_text("x = 1\n")
    (own / "statistics.py").write_text("x = 1\n")
    assert keep_copies(own / "code", ["lightning", "statistics"]) == []
    assert [name.partition("-")[0] for name in copies(own)] == ["lightning"]


def test_what_is_installed_is_not_copied(tmp_path):
    assert (
        keep_copies(tmp_path / "code", ["statistics", "numpy.linalg", "pgtoolkit.losses.families"])
        == []
    )
    assert not (tmp_path / "code").exists()
