"""Data sets by their names on the hub, out of the cache that datasets keeps, which is written here
by itself."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("datasets")
NAME = "openai/gsm8k"
WRITE = """
import datasets, sys
for config in ("main", "socratic"):
    datasets.load_dataset(sys.argv[1], config)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The cache after a download of two configurations, each with a training and a test split."""
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
    # A data set of the hub lies there below its owner's name, else alike.
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
def found(cache, tmp_path_factory):
    """What each list of overrides comes to, without the network and with this cache."""

    def look(*cases):
        folder = tmp_path_factory.mktemp("empty")
        command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
        done = subprocess.run(
            command, env=cache, cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "Hugging Face Hub" not in done.stderr  # the package is told to be quiet
        return [json.loads(line) for line in done.stdout.splitlines()]

    return look


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


def test_a_data_set_by_its_name(found):
    main, other, test = found(
        [*GSM8K, "task.config=main", "task.split=train"],
        [*GSM8K, "task.config=socratic", "task.split=train"],
        [*GSM8K, "task.config=main", "task.split=test"],
    )
    expected = {"main train": 4, "socratic train": 4, "main test": 2}
    for (path, problems, rows), (start, count) in zip(
        (main, other, test), expected.items(), strict=True
    ):
        assert path == NAME  # from whichever directory
        assert problems == []
        split = start.split()[1]
        assert rows == [
            [f"{start} {i} + 1,233?", f"{i + 1233:,}", f"gsm8k-{split}.arrow:{i + 1}"]
            for i in range(count)
        ]


def test_what_is_not_there_is_refused_with_the_reason(found):
    # The first of two paths is left out, which would be refused for itself.
    outcomes = found(*([*GSM8K["task.path" in overrides[0] :], *overrides] for overrides in CASES))
    for (path, problems, rows), expected in zip(outcomes, CASES.values(), strict=True):
        assert expected in problems[0], path
        assert rows == []
