"""Data sets by their names on the hub, read from the cache of `datasets`, which writes it here from
local files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")
NAME = "openai/gsm8k"


def write_source(source: Path) -> None:
    """Write the files of a data set of two configurations, each with two splits."""
    header = ["---", "configs:"]
    for config in ("main", "socratic"):
        (source / config).mkdir(parents=True)
        header += [f"- config_name: {config}", "  data_files:"]
        for split, count in (("train", 4), ("test", 2)):
            rows = [
                {
                    "question": f"{config} {split} {i} + 1,233?",
                    "answer": f"It is {i} more.\n#### {i + 1233:,}",
                }
                for i in range(count)
            ]
            (source / config / f"{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
            header += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (source / "README.md").write_text("\n".join([*header, "---", ""]))


PROGRAM = """
import datasets, json, os, sys, time
for name in ("main", "socratic"):
    datasets.load_dataset(sys.argv[2], name)
# The folder of a data set of the hub differs only in its name.
cache = os.environ["HF_DATASETS_CACHE"]
os.rename(f"{cache}/gsm8k", f"{cache}/openai___gsm8k")
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.tasks.prompt_rows import prompt_files
from pgtoolkit.assembly.machine import check_machine
pauses = []
time.sleep = pauses.append
for overrides in json.loads(sys.argv[1]):
    common = ["task=prompts", "rollout.max_completion_length=9", "tracking=none"]
    composed = compose([*common, *overrides])
    config, report = validated(composed)
    report.notes.clear()
    if not report.problems:
        check_machine(config, report)
    rows = []
    if not report.problems:
        prompts = make_task(config.task, 0).rows()
        rows = [[prompt.text, prompt.answer, prompt.place] for prompt in prompts]
    print(json.dumps([config.task.path, report.problems, rows]))
assert not pauses, "The hub is asked again."
"""


COLUMNS = (
    "task.prompt_field=question",
    "task.answer_pattern='#### (.*)'",
    "task.verifier=last_number",
)
GSM8K = (f"task.path={NAME}", *COLUMNS)
READ = [
    # configuration, split, number of prompts
    ("main", "train", 4),
    ("socratic", "train", 4),
    ("main", "test", 2),
]
REFUSED = [
    # overrides, a part of the problem
    (
        (*GSM8K, "task.config=main"),
        f"task.split=null with task.path={NAME} with task.config=main needs one of train, test",
    ),
    (
        (*GSM8K, "task.config=main", "task.split='train[:2]'"),
        f"task.split=train[:2] with task.path={NAME} with task.config=main",
    ),
    (
        (*GSM8K, "task.split=train"),
        "Please specify which configuration to reload from the cache",
    ),
    (
        (*GSM8K, "task.config=other", "task.split=train"),
        "Available configs in the cache: ['main', 'socratic']",
    ),
    (
        (*COLUMNS, "task.path=openai/nothing"),
        "needs a data set of the Hugging Face hub, or of its cache on this machine (got "
        "Couldn't reach 'openai/nothing' on the Hub (OfflineModeIsEnabled)). There is no such "
        "folder here, so it is taken for a name on the hub. The hub, http://127.0.0.1:9, does not "
        "answer. ",
    ),
    (
        (*COLUMNS, "task.path=openai/nothing.jsonl"),
        "task.path=openai/nothing.jsonl needs an existing file, folder or glob",
    ),
    (
        (*COLUMNS, "task.path=.", "task.config=main"),
        "task.config=main needs task.path=OWNER/NAME of a data set on the hub",
    ),
]


def overrides_of(config: str, split: str) -> tuple[str, ...]:
    return (*GSM8K, f"task.config={config}", f"task.split={split}")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list]:
    """Return (path, problems, rows) for all cases, by their overrides.

    One process writes the cache, and reads them all from an empty directory, with a hub that does
    not answer.
    """
    folder = tmp_path_factory.mktemp("hub")
    write_source(folder / "gsm8k")
    environment = os.environ | {
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    cases = [overrides_of(config, split) for config, split, _ in READ]
    cases += [overrides for overrides, _ in REFUSED]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases), str(folder / "gsm8k")],
        env=environment,
        cwd=tmp_path_factory.mktemp("empty"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr  # The hub is asked once for each name.
    assert "Hugging Face Hub" not in process.stderr  # `datasets` itself prints nothing.
    lines = process.stdout.splitlines()
    return {case: json.loads(line) for case, line in zip(cases, lines, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "split", "count"), READ)
def test_a_data_set_is_read_by_its_name_configuration_and_split(outcomes, config, split, count):
    path, problems, rows = outcomes[overrides_of(config, split)]
    assert path == NAME
    assert problems == []
    assert rows == [
        [f"{config} {split} {i} + 1,233?", f"{i + 1233:,}", f"gsm8k-{split}.arrow:{i + 1}"]
        for i in range(count)
    ]


@pytest.mark.parametrize(("overrides", "problem"), REFUSED)
def test_missing_configurations_splits_and_data_sets_are_refused(outcomes, overrides, problem):
    _, problems, rows = outcomes[overrides]
    assert problem in problems[0]
    assert rows == []
