"""golden_refusals.txt lists configurations with their outcome: refused for these keys, or accepted
with this number of notes. Each still has it. Each row of the table of rules refuses one of them,
and accepts each of the ways out that it tells to type. The parts that a configuration describes
meet the rules where it does."""

import functools
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from pgtoolkit.assembly.build import build
from pgtoolkit.config.compose import Composed, compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.plan import plan_sections
from pgtoolkit.config.rules.rule import Rule
from pgtoolkit.config.rules.table import TABLE
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validate, validated
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.rules import ROWS
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.system.report import Report, key_of
from pgtoolkit.training.fitting_parts import check_parts

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


def sections() -> list[tuple[str, list[str]]]:
    """Return the title and the lines of each part of the list."""
    lines = Path(__file__).with_name("golden_refusals.txt").read_text().splitlines()[4:]
    parts = [[*part] for is_blank, part in groupby(lines, lambda line: not line) if not is_blank]
    return [
        (title.lstrip("# "), rows) for (title,), rows in zip(parts[::2], parts[1::2], strict=True)
    ]


@pytest.fixture(scope="module")
def named_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a current directory with the files and models that the lines name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("named"))
        _write_files()
        yield


def _write_files() -> None:
    Path("FILE").touch()
    for name, shape in MODELS.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(LLAMA | shape))
    Path("FOLDER").mkdir()
    Path("FOLDER/other").touch()


@functools.cache
def compose_line(overrides: str) -> Composed:
    """Compose overrides, once.

    Those in brackets are what a run began with, which the others resume.
    """
    if not overrides.startswith("["):
        return compose(overrides.split())
    began, _, changed = overrides[1:].partition("] ")
    run_dir = Path("run", str(abs(hash(began))))
    if not run_dir.exists():
        with RunDirectory(run_dir) as run:
            run.write_config(plain_config(compose(began.split()).config), [])
    return compose(changed.split(), run_dir=run_dir)


def subject(problem: str) -> str:
    """Return the part of a problem before its verb, mostly a key, without the value."""
    unknown = re.match("Unknown key '(.*?)'", problem)
    if unknown:
        return unknown[1]
    setting = problem.partition(" needs " if " needs " in problem else ": ")[0]
    return setting if setting.startswith("=") else setting.partition("=")[0]


def outcome(overrides: str) -> str:
    """Return the outcome of overrides in the words of the list."""
    _, report = validated(compose_line(overrides))
    for problem in report.problems:
        assert "\n" not in problem
        of_hydra = problem.startswith(("the configuration cannot be composed: ", "Unknown key '"))
        assert of_hydra or all(part in problem for part in (" needs ", "(got ", " Use ")), problem
    if report.problems:
        return "refused: " + ", ".join(subject(problem) for problem in report.problems)
    count = len(report.notes)
    if count == 0:
        return "accepted"
    return f"accepted, {count} note{'s' if count > 1 else ''}"


LONG = ("Rules between keys", "A run that is continued", "What overrides may be")
"""The beginnings of titles of long parts."""


@pytest.mark.parametrize(
    ("title", "rows"),
    [
        pytest.param(title, rows, marks=[pytest.mark.slow] if title.startswith(LONG) else [])
        for title, rows in sections()
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_every_configuration_of_the_list_is_refused_or_accepted_as_it_says(
    named_files, title, rows
):
    listed = [row.partition(" -> ")[0] for row in rows]
    assert [f"{overrides} -> {outcome(overrides)}" for overrides in listed] == rows


@pytest.mark.slow
@pytest.mark.usefixtures("named_files")
def test_each_row_refuses_a_configuration_and_accepts_its_ways_out():
    lines = [line.partition(" -> ") for _, rows in sections() for line in rows]
    refused = [line for line, _, outcome in lines if outcome.startswith("refused: ")]
    configs = {line: compose_line(line).config for line in refused if not line.startswith("[")}
    defaults = compose([]).config
    for line in configs:
        composed = compose_line(line)
        if composed.config is not None:  # `pgtk check` shows the plan of what it refuses, too
            assert plan_sections(validated(composed)[0], defaults, line.split())
    for rule in TABLE:
        report = Report()
        found = None
        for line, config in configs.items():
            if config is not None:
                rule(config, report)
            if report.problems:
                found = line
                break
        assert found is not None, f"golden_refusals.txt has no line for {rule}"
        for way_out in (rule.use or rule.needs).replace("FOLDER", "hub/name").split(" or "):
            typed = way_out.split()
            others = [word for word in found.split() if key_of(word) not in map(key_of, typed)]
            composed = compose_line(" ".join([*others, *typed]))
            assert composed.problems == [], f"{found} {way_out}"
            _, report = validate(composed.config, composed.choices)
            assert report.problems == [], f"{found} {way_out}"


def refusal_of_parts(config: Config) -> str | None:
    """Return how the parts of a configuration are refused as they would be in Python; None where
    they fit. Skips, by LookupError, what names files and code that are not there."""
    try:
        module, loader = build(config)
    except (AssertionError, ConfigError, DataError, TypeError) as error:
        raise LookupError(f"{error}") from error
    except ValueError as error:  # of rollouts, which check what they are made of
        return str(error)
    try:
        check_parts(module, loader)
    except ConfigError as error:
        return str(error)
    finally:
        loader.source.close()
    return None


NOT_OF_PARTS = ("kl.reference!=initial", "parallelism.")
"""Parts of a row that Python does not know, or that need processes."""


@pytest.mark.slow
@pytest.mark.usefixtures("named_files")
def test_parts_meet_a_rule_where_their_configuration_does():
    lines = [line.partition(" -> ") for _, rows in sections() for line in rows]
    configs = {
        line: (compose_line(line).config, outcome)
        for line, _, outcome in lines
        if not line.startswith("[") and "rollout=recorded" not in line
    }
    num_fitting = 0
    refused: set[str] = set()
    for line, (config, outcome) in configs.items():
        if config is None:
            continue
        rows = []
        for row in ROWS:
            report = Report()
            Rule.of(row)(config, report)
            if report.problems and not row.needs.startswith(NOT_OF_PARTS):
                rows.append(row.when)
        if not rows and not outcome.startswith("accepted"):
            continue
        try:
            problem = refusal_of_parts(config)
        except LookupError:
            continue
        assert (problem is not None) is bool(rows), f"{line}: {problem}"
        num_fitting += problem is None
        refused.update(rows)
    assert num_fitting > 150
    assert len(refused) >= 25
