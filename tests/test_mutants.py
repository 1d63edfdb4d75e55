"""Tests of the tests: typical mistakes, most of them shipped by somebody, made in a copy of the package, are caught.

`pytest -m mutants` runs these alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutants_of_comparison import MUTANTS_OF_COMPARISON
from mutants_of_keys import MUTANTS_OF_KEYS
from mutants_of_lora import MUTANTS_OF_LORA
from mutants_of_losses import MUTANTS_OF_LOSSES, MUTANTS_ON_A_GPU
from mutants_of_penalties import MUTANTS_OF_PENALTIES
from mutants_of_prompts import MUTANTS_OF_PROMPTS
from mutants_of_ranks import MUTANTS_OF_RANKS
from mutants_of_rollouts import MUTANTS_OF_ROLLOUTS
from mutants_of_runs import MUTANTS_OF_RUNS
from mutants_of_training import MUTANTS_OF_TRAINING

REPOSITORY = Path(__file__).parents[1]
ASSERTIONS = {"AssertionError", "Failed"}  # the latter of pytest.raises
pytestmark = pytest.mark.mutants


@dataclass(frozen=True)
class Mutant:
    """A mistake as a change of text in one file, and the tests of which each must fail by an assertion.

    edits: old text -> new text; the old must occur exactly once.
    """

    name: str
    file: str
    edits: dict[str, str]
    caught_by: tuple[str, ...]


MUTANTS = [
    Mutant(*row)
    for row in (
        *MUTANTS_OF_COMPARISON,
        *MUTANTS_OF_KEYS,
        *MUTANTS_OF_LORA,
        *MUTANTS_OF_LOSSES,
        *MUTANTS_OF_PENALTIES,
        *MUTANTS_OF_PROMPTS,
        *MUTANTS_OF_RANKS,
        *MUTANTS_OF_ROLLOUTS,
        *MUTANTS_OF_RUNS,
        *MUTANTS_OF_TRAINING,
    )
]
ON_A_GPU = [pytest.param(Mutant(*row), marks=pytest.mark.gpu) for row in MUTANTS_ON_A_GPU]

# Loads what takes seconds once, nothing of pgtoolkit, then forks for every line `folder, tests ...` that it reads and
# answers with what pytest found in that folder.
SERVER = """
import json, os, sys
import hypothesis, lightning, matplotlib.pyplot, mlflow, pytest, torch, transformers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

class Record:
    def __init__(self):
        self.failed = []

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None:
            names = [kind.__name__ for kind in call.excinfo.type.__mro__]
            self.failed.append([item.nodeid, call.when, names, str(call.excinfo.value)[:300]])

def run(folder, tests):
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    sys.stdout = sys.stderr = open("output.txt", "w")
    record = Record()
    options = ["-q", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *tests], plugins=[record])
    files = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "pgtoolkit"]
    with open("result.json", "w") as file:
        json.dump({"status": int(status), "failed": record.failed, "files": files}, file)
    sys.stdout.flush()

for line in sys.stdin:
    folder, *tests = json.loads(line)
    if os.fork() == 0:
        try:
            run(folder, tests)
        finally:
            os._exit(0)
    os.wait()
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def server():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    yield process
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def copy_to(folder: Path) -> Path:
    for name in ("pgtoolkit", "conf", "docs", "tests"):
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "test_mutants.py", "images")
        )
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def run_tests(server, folder: Path, tests) -> dict:
    """What pytest finds in the copy, once it is sure that the copy and nothing else was tested."""
    print(json.dumps([str(folder), *tests]), file=server.stdin, flush=True)
    assert server.stdout.readline() == "done\n"
    result = json.loads((folder / "result.json").read_text())
    assert result["files"], "pgtoolkit was not imported"
    assert all(Path(file).is_relative_to(folder) for file in result["files"]), result["files"]
    return result


def test_without_a_mutation_the_named_tests_pass(server, tmp_path):
    tests = sorted({test for mutant in MUTANTS for test in mutant.caught_by})
    folder = copy_to(tmp_path)
    result = run_tests(server, folder, tests)
    assert result["status"] == 0, (folder / "output.txt").read_text()


@pytest.mark.parametrize("mutant", [*MUTANTS, *ON_A_GPU], ids=lambda mutant: mutant.name)
def test_the_mistake_is_caught(server, tmp_path, mutant):
    folder = copy_to(tmp_path)
    file = folder / "pgtoolkit" / mutant.file
    text = file.read_text()
    for old, new in mutant.edits.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {mutant.file}"
        text = text.replace(old, new)
    file.write_text(text)
    result = run_tests(server, folder, mutant.caught_by)
    assert result["status"] == pytest.ExitCode.TESTS_FAILED, (folder / "output.txt").read_text()
    for test in mutant.caught_by:
        reasons = [(when, set(names)) for name, when, names, _ in result["failed"] if name.startswith(test)]
        assert reasons, f"{test} did not notice"
        # A fixture may look afterwards, too: what is said at the end of a test is its assertion as well.
        assert any(when == "call" for when, _ in reasons), result["failed"]
        assert all(when in ("call", "teardown") and names & ASSERTIONS for when, names in reasons), result["failed"]
