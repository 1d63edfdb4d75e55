"""Data sets by their names on the hub, read from the cache of `datasets`, which writes it here from
local files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("datasets")
NAME = "openai/gsm8k"
WRITE = """
import datasets, sys
for config in ("main", "socratic"):
    datasets.load_dataset(sys.argv[1], config)
"""


@pytest.fixture(scope="module")
def cache_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables that name a cache of two configurations, each with two splits."""
    folder = tmp_path_factory.mktemp("hub")
    source = folder / "gsm8k"
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
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", WRITE, str(source)], env=environment, check=True, capture_output=True
    )
    # The folder of a data set of the hub differs only in its name.
    (folder / "cache" / "gsm8k").rename(folder / "cache" / "openai___gsm8k")
    return environment


PROGRAM = """
import json, sys
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.prompt_rows import prompt_files
from pgtoolkit.training.machine import check_machine
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
"""


@pytest.fixture(scope="module")
def read_prompts(
    cache_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list]:
    """Return a function that gives (path, problems, rows) for each list of overrides, without the
    network and with this cache."""

    def read(*cases: list[str]) -> list:
        folder = tmp_path_factory.mktemp("empty")
        command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
        process = subprocess.run(
            command,
            env=cache_environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr
        assert "Hugging Face Hub" not in process.stderr  # `datasets` itself prints nothing.
        return [json.loads(line) for line in process.stdout.splitlines()]

    return read


GSM8K = [
    f"task.path={NAME}",
    "task.prompt_field=question",
    "task.answer_pattern='#### (.*)'",
    "task.verifier=last_number",
]
CASES = {
    (
        "task.config=main",
    ): f"task.split=null with task.path={NAME} with task.config=main needs one of train, test",
    (
        "task.config=main",
        "task.split='train[:2]'",
    ): f"task.split=train[:2] with task.path={NAME} with task.config=main",
    ("task.split=train",): "Please specify which configuration to reload from the cache",
    (
        "task.config=other",
        "task.split=train",
    ): "Available configs in the cache: ['main', 'socratic']",
    (
        "task.path=openai/nothing",
    ): "needs a data set of the Hugging Face hub, or of its cache on this machine (got ",
    (
        "task.path=openai/nothing.jsonl",
    ): "task.path=openai/nothing.jsonl needs an existing file, folder or glob",
    (
        "task.path=.",
        "task.config=main",
    ): "task.config=main needs task.path=OWNER/NAME of a data set on the hub",
}


def test_a_data_set_is_read_by_its_name_configuration_and_split(read_prompts):
    main, other, test = read_prompts(
        [*GSM8K, "task.config=main", "task.split=train"],
        [*GSM8K, "task.config=socratic", "task.split=train"],
        [*GSM8K, "task.config=main", "task.split=test"],
    )
    expected = {"main train": 4, "socratic train": 4, "main test": 2}
    for (path, problems, rows), (start, count) in zip(
        (main, other, test), expected.items(), strict=True
    ):
        assert path == NAME
        assert problems == []
        split = start.split()[1]
        assert rows == [
            [f"{start} {i} + 1,233?", f"{i + 1233:,}", f"gsm8k-{split}.arrow:{i + 1}"]
            for i in range(count)
        ]


def test_missing_configurations_splits_and_data_sets_are_refused_with_the_reason(read_prompts):
    # A case with a path gets no second one, which would be refused.
    outcomes = read_prompts(
        *([*GSM8K["task.path" in overrides[0] :], *overrides] for overrides in CASES)
    )
    for (path, problems, rows), expected in zip(outcomes, CASES.values(), strict=True):
        assert expected in problems[0], path
        assert rows == []
