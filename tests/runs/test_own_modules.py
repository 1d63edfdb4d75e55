"""A run keeps copies of the user's modules: redacted, once for each version, and never imported."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders.runs import metrics_of, run

from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs import modules
from pgtoolkit.runs.modules import keep_copies, module_digests
from pgtoolkit.runs.records import read_drift

ADVANTAGES = """
import shares

# A comment.
def shifted(rewards, *, lengths, measures):
    password = "hunter2"
    return [[reward - 0.5 + shares.MORE for reward in group] for group in rewards]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Enter a folder with a module of advantages, wins, and another that it imports, shares."""
    (tmp_path / "wins.py").write_text(ADVANTAGES)
    (tmp_path / "shares.py").write_text("import json\nimport numpy\nMORE = 0.0\n")
    monkeypatch.chdir(tmp_path)
    # Folders of other tests may have modules of the same names.
    others = str(tmp_path.parent)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(others)])
    return tmp_path


@pytest.fixture
def forget_imports() -> Iterator[Callable[[], None]]:
    """Return a function that forgets both modules, as a new process would."""

    def forget() -> None:
        for name in ("wins", "shares"):
            sys.modules.pop(name, None)

    forget()
    yield forget
    forget()


def copies_in(code: Path) -> list[str]:
    return sorted(file.name for file in code.iterdir())


def modules_copied_to(code: Path) -> list[str]:
    return [name.partition("-")[0] for name in copies_in(code)]


def train(run_dir: Path, max_steps: int, resume: bool = False) -> Path:
    return run(run_dir, "advantage=wins.shifted", f"trainer.max_steps={max_steps}", resume=resume)


def test_a_run_keeps_its_modules_by_their_digests_without_secrets(folder, forget_imports):
    run_dir = train(folder / "run", 1)
    digests = json.loads((run_dir / "provenance.json").read_text())["modules"]
    assert digests == module_digests(["wins"])
    assert [*digests] == ["shares", "wins"]
    assert copies_in(run_dir / "code") == [
        f"{name}-{digest}.py" for name, digest in digests.items()
    ]
    copied = (run_dir / "code" / f"wins-{digests['wins']}.py").read_text()
    first_line, text = copied.split("\n", 1)
    assert first_line == (
        f"# A copy of {folder / 'wins.py'}, for the record: nothing imports it. Secrets are hidden "
        "as ***."
    )
    assert text == ADVANTAGES.replace('"hunter2"', "***")


def test_a_run_without_modules_of_the_user_has_no_folder_of_code(tmp_path):
    assert not (run(tmp_path / "run", "trainer.max_steps=1") / "code").exists()


def test_a_resume_imports_the_original_and_copies_it_where_it_has_changed(folder, forget_imports):
    run_dir = train(folder / "run", 1)
    before = copies_in(run_dir / "code")
    (folder / "wins.py").write_text(ADVANTAGES.replace("A comment", "Another comment"))
    forget_imports()
    train(run_dir, 2, resume=True)
    assert copies_in(run_dir / "code") == before
    assert [entry["changes"] for entry in read_drift(run_dir)] == [{"trainer.max_steps": [1, 2]}]
    old_digest = module_digests(["shares"])["shares"]
    (folder / "shares.py").write_text("MORE = 100.0\n")
    forget_imports()
    train(run_dir, 3, resume=True)
    after = copies_in(run_dir / "code")
    assert len(after) == 3
    assert set(before) < set(after)
    change = {"shares": [old_digest, module_digests(["shares"])["shares"]]}
    assert (read_drift(run_dir)[-1]["step"], read_drift(run_dir)[-1]["code"]) == (2, change)
    notes = [line for line in (run_dir / "run.log").read_text().splitlines() if "note:" in line]
    of_code = [note for note in notes if "has changed since the run's last start" in note]
    assert len(of_code) == 1
    copy = f"code/shares-{old_digest}.py"
    new = "steps after 2 are made with the new code. That of the steps before is"
    assert f"the code of shares has changed since the run's last start: {new} {copy} " in of_code[0]
    assert (run_dir / "code" / f"shares-{old_digest}.py").is_file()
    # At a ratio of 1 the loss is minus the mean advantage, which the changed module moves by 100.
    losses = [abs(row["loss"]) for row in metrics_of(run_dir)]
    assert max(losses[:2]) < 1
    assert losses[2] > 50
    assert not any(str(run_dir) in place for place in sys.path)


LOSS = "def loss(log_probs, advantages):\n    return -log_probs * advantages"


@pytest.mark.parametrize("uncounted", [False, True])
def test_a_resume_within_a_batch_says_from_which_step_on_changed_code_acts(
    folder, forget_imports, uncounted
):
    """The batch of four steps keeps its advantages; that of the loss acts at once."""
    (folder / "mine.py").write_text(f"{LOSS}\n")
    settings = [
        "advantage=wins.shifted",
        "loss=mine.loss",
        "rollout.prompts_per_batch=8",
        "rollout.group_size=2",
        f"accumulation.docs_per_step={3 if uncounted else 4}",
        "trainer.checkpoint_every=2",
    ]
    run_dir = run(folder / "run", *settings, "trainer.max_steps=2")
    (folder / "shares.py").write_text("MORE = 100.0\n")
    (folder / "mine.py").write_text(f"{LOSS} * 2\n")
    sys.modules.pop("mine")
    forget_imports()
    run(run_dir, *settings, "trainer.max_steps=7", resume=True)
    sys.modules.pop("mine")
    entry = read_drift(run_dir)[-1]
    assert entry["code"].keys() == {"mine", "shares"}
    assert entry["code_acts_after"] == {"mine": 2, "shares": None if uncounted else 4}
    log = (run_dir / "run.log").read_text()
    start = "has changed since the run's last start: steps"
    after = "of further batches of rollouts" if uncounted else "after 4"
    assert f"code of mine {start} after 2 are made with the new code. That" in log
    assert f"code of shares {start} {after}, and evaluations after step 2, are made with" in log
    largest = [row["max_advantage"] for row in metrics_of(run_dir)]
    of_old = 6 if uncounted else 4  # 16 documents, in steps of 3 or 4
    assert [advantage > 50 for advantage in largest] == of_old * [False] + (7 - of_old) * [True]


def test_a_resume_without_the_original_is_refused(folder, forget_imports, monkeypatch, capsys):
    run_dir = train(folder / "run", 1)
    for name in ("wins.py", "shares.py"):
        (folder / name).unlink()
    forget_imports()
    with pytest.raises(ConfigError, match="No module named 'wins'"):
        train(run_dir, 2, resume=True)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(folder)])
    assert main(["resume", str(run_dir), "trainer.max_steps=2"]) == 2
    refused = capsys.readouterr().err
    assert "No module named 'wins'" in refused
    place = f"was started in {folder}, where its code may be"
    assert f"{place}: cd {folder} && pgtk resume" in refused
    # A verifier is what an evaluation imports.
    overrides = ["evaluation.sets.more.task=prompts", "evaluation.sets.more.path=rows.jsonl"]
    overrides += ["evaluation.sets.more.verifier=wins.shifted"]
    Path("rows.jsonl").write_text('{"prompt": "12=", "answer": "21"}\n')
    assert main(["evaluate", str(run_dir), *overrides]) == 2
    command = f"pgtk evaluate {run_dir} {' '.join(overrides)}"
    assert f"{place}: PYTHONPATH={folder} {command}\n" in capsys.readouterr().err


def test_modules_that_are_large_or_named_like_secrets_are_reported_instead_of_copied(folder):
    (folder / "shares.py").write_text("import my_secrets, large\nMORE = 0.0\n")
    (folder / "my_secrets.py").write_text("KEY = 1\n")
    (folder / "large.py").write_text(f"rows = '{'x' * modules.MOST_BYTES}'\n")
    left_out = keep_copies(folder / "code", ["wins"])
    assert modules_copied_to(folder / "code") == ["shares", "wins"]
    assert left_out == [
        f"code/ has no copy of the module large, which has {modules.MOST_BYTES + 10} bytes, "
        f"more than {modules.MOST_BYTES}",
        "code/ has no copy of the module my_secrets, which has the name of a file of secrets",
    ]


def test_copies_end_where_all_modules_together_are_too_large(folder, monkeypatch):
    size = len((folder / "shares.py").read_bytes())
    monkeypatch.setattr(modules, "MOST_BYTES_IN_ALL", size)
    (left_out,) = keep_copies(folder / "code", ["wins"])
    assert "wins" in left_out
    assert modules_copied_to(folder / "code") == ["shares"]


def test_a_module_of_the_current_directory_is_copied_instead_of_an_installed_one(folder):
    """The same module is imported; among Python's own modules it is Python's."""
    (folder / "lightning.py").write_text("x = 1\n")
    (folder / "statistics.py").write_text("x = 1\n")
    assert keep_copies(folder / "code", ["lightning", "statistics"]) == []
    assert modules_copied_to(folder / "code") == ["lightning"]


def test_installed_modules_are_not_copied(tmp_path):
    installed = ["statistics", "numpy.linalg", "pgtoolkit.losses.families"]
    assert keep_copies(tmp_path / "code", installed) == []
    assert not (tmp_path / "code").exists()
