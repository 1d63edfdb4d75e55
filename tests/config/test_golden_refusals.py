"""golden_refusals.txt: which configurations are refused for which keys, and which are accepted with
how many notes."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.validate import validated
from pgtoolkit.runs.directory import RunDirectory

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
MODELS = {
    "LLAMA": {"vocab_size": 100},
    "TIED": {"vocab_size": 100, "tie_word_embeddings": True},
    "BLOOM": {"vocab_size": 100, "model_type": "bloom"},
    "SMALL": {"vocab_size": 9},
}


def sections():
    """(title, its lines) of each part of the list."""
    lines = Path(__file__).with_name("golden_refusals.txt").read_text().splitlines()[4:]
    parts = [[*part] for blank, part in groupby(lines, lambda line: not line) if not blank]
    return [
        (title.lstrip("# "), rows) for (title,), rows in zip(parts[::2], parts[1::2], strict=True)
    ]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A current directory with what the lines name."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    for name, shape in MODELS.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(LLAMA | shape))
    Path("FOLDER").mkdir()
    Path("FOLDER/other").touch()


def composed(overrides):
    """The configuration as typed, or in that of a run that began with those in brackets."""
    if not overrides.startswith("["):
        return compose(overrides.split())
    began, _, changed = overrides[1:].partition("] ")
    run_dir = Path("run", str(abs(hash(began))))
    if not run_dir.exists():
        with RunDirectory(run_dir) as run:
            run.write_config(plain_config(compose(began.split()).config), [])
    return compose(changed.split(), run_dir=run_dir)


def subject(problem):
    """What a problem is about, mostly a key."""
    if unknown := re.match("Unknown key '(.*?)'", problem):
        return unknown[1]
    return problem.partition(" needs " if " needs " in problem else ": ")[0]


def outcome(overrides):
    """What the list says of them."""
    found = composed(overrides)
    _, report = validated(found)
    problems, notes = report.problems, report.notes
    for problem in problems:
        assert "\n" not in problem
        other = problem.startswith(("the configuration cannot be composed: ", "Unknown key '"))
        assert other or all(part in problem for part in (" needs ", "(got ", " Use ")), problem
    keys = [subject(problem) for problem in problems]
    if problems:
        return "refused: " + ", ".join(
            key if key.startswith("=") else key.partition("=")[0] for key in keys
        )
    return "accepted" + (f", {len(notes)} note{'s' * (len(notes) > 1)}" if notes else "")


@pytest.mark.parametrize(
    ("title", "rows"), sections(), ids=lambda value: value[:20] if isinstance(value, str) else ""
)
def test_what_is_refused_and_what_is_accepted(places, title, rows):
    found = [
        f"{overrides} -> {outcome(overrides)}"
        for overrides in (row.partition(" -> ")[0] for row in rows)
    ]
    assert found == rows
