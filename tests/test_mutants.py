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
from mutants_of_dumps import MUTANTS_OF_DUMPS
from mutants_of_evaluation import MUTANTS_OF_EVALUATION
from mutants_of_keys import MUTANTS_OF_KEYS
from mutants_of_lora import MUTANTS_OF_LORA
from mutants_of_losses import MUTANTS_OF_LOSSES, MUTANTS_ON_A_GPU
from mutants_of_penalties import MUTANTS_OF_PENALTIES
from mutants_of_prompts import MUTANTS_OF_PROMPTS
from mutants_of_ranks import MUTANTS_OF_RANKS
from mutants_of_rollouts import MUTANTS_OF_ROLLOUTS
from mutants_of_runs import MUTANTS_OF_RUNS
from mutants_of_samples import MUTANTS_OF_SAMPLES
from mutants_of_servers import MUTANTS_OF_SERVERS
from mutants_of_tokens import MUTANTS_OF_TOKENS
from mutants_of_training import MUTANTS_OF_TRAINING

REPOSITORY = Path(__file__).parents[1]
ASSERTIONS = {"AssertionError", "Failed"}  # the latter of pytest.raises


@dataclass(frozen=True)
class Mutant:
    """A mistake as a change of text in one file, and the tests of which each must fail by an assertion.

    edits: old text -> new text; the old must occur exactly once.
    """

    name: str
    file: str
    edits: dict[str, str]
    caught_by: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        for old, new in self.edits.items():
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times in {self.file}"
            text = text.replace(old, new)
        return text


MUTANTS = [
    Mutant(*row)
    for row in (
        *MUTANTS_OF_COMPARISON,
        *MUTANTS_OF_DUMPS,
        *MUTANTS_OF_EVALUATION,
        *MUTANTS_OF_KEYS,
        *MUTANTS_OF_LORA,
        *MUTANTS_OF_LOSSES,
        *MUTANTS_OF_PENALTIES,
        *MUTANTS_OF_PROMPTS,
        *MUTANTS_OF_RANKS,
        *MUTANTS_OF_ROLLOUTS,
        *MUTANTS_OF_RUNS,
        *MUTANTS_OF_SAMPLES,
        *MUTANTS_OF_SERVERS,
        *MUTANTS_OF_TOKENS,
        *MUTANTS_OF_TRAINING,
    )
]
ON_A_GPU = [pytest.param(Mutant(*row), marks=pytest.mark.gpu) for row in MUTANTS_ON_A_GPU]

# Run in a copy of the package. Imports what the package imports from elsewhere once, and nothing of its own; then forks
# for every line of tests that it reads, and leaves in result.json what pytest found.
SERVER = """
import compileall, gc, importlib, json, os, pkgutil, py_compile, sys
import hypothesis, lightning, matplotlib.pyplot, mlflow, pytest, torch, transformers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

class Record:
    def __init__(self):
        self.failed = []

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None:
            names = [kind.__name__ for kind in call.excinfo.type.__mro__]
            self.failed.append([item.nodeid, call.when, names, str(call.excinfo.value)[:300]])

def own(name):
    return name.partition(".")[0] == "pgtoolkit"

def forked(function, *arguments):
    if os.fork() == 0:
        try:
            with open("result.json", "w") as file:
                json.dump(function(*arguments), file)
        finally:
            os._exit(0)
    os.wait()

def imported():
    import pgtoolkit
    for module in pkgutil.walk_packages(pgtoolkit.__path__, "pgtoolkit."):
        importlib.import_module(module.name)
    return [name for name in sys.modules if not own(name)]

def run(tests):
    sys.stdout = sys.stderr = open("output.txt", "w")
    record = Record()
    options = ["-q", "--disable-plugin-autoload", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *tests], plugins=[record])
    sys.stdout.flush()
    files = [module.__file__ for name, module in sys.modules.items() if own(name)]
    return {"status": int(status), "failed": record.failed, "files": files}

# By its contents, not by its time, so that a change within a second is seen.
compileall.compile_dir("pgtoolkit", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
forked(imported)
for name in json.load(open("result.json")):
    importlib.import_module(name)
gc.freeze()  # what a fork collects is only its own
for line in sys.stdin:
    forked(run, json.loads(line))
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Server:
    """A process that runs tests in `folder`, a copy of the package. Starting it takes as long as a few mutants do."""

    folder: Path
    process: subprocess.Popen

    def run(self, tests) -> dict:
        """What pytest finds in the copy, once it is sure that the copy and nothing else was tested."""
        (self.folder / "result.json").unlink(missing_ok=True)
        print(json.dumps([*tests]), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"
        result = json.loads((self.folder / "result.json").read_text())
        assert result["files"], "pgtoolkit was not imported"
        assert all(Path(file).is_relative_to(self.folder) for file in result["files"]), result["files"]
        return result

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "test_mutants.py", "images")
    for name in ("pgtoolkit", "conf", "docs", "tests"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(folder)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield Server(folder, process)
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_each_mistake_fits_into_the_code_and_leaves_a_program():
    for mutant in (*MUTANTS, *(Mutant(*row) for row in MUTANTS_ON_A_GPU)):
        text = mutant.applied_to((REPOSITORY / "pgtoolkit" / mutant.file).read_text())
        if mutant.file.endswith(".py"):
            compile(text, mutant.name, "exec")


@pytest.mark.mutants
def test_without_a_mutation_the_named_tests_pass(server):
    tests = sorted({test for mutant in MUTANTS for test in mutant.caught_by})
    assert server.run(tests)["status"] == 0, server.output


@pytest.fixture
def mutated(server, mutant):
    """The server's copy, with the mistake in it."""
    file = server.folder / "pgtoolkit" / mutant.file
    original = file.read_text()
    file.write_text(mutant.applied_to(original))
    yield server
    file.write_text(original)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", [*MUTANTS, *ON_A_GPU], ids=lambda mutant: mutant.name)
def test_the_mistake_is_caught(mutated, mutant):
    result = mutated.run(mutant.caught_by)
    assert result["status"] == pytest.ExitCode.TESTS_FAILED, mutated.output
    for test in mutant.caught_by:
        reasons = [(when, set(names)) for name, when, names, _ in result["failed"] if name.startswith(test)]
        assert reasons, f"{test} did not notice"
        # A fixture may look afterwards, too: what is said at the end of a test is its assertion as well.
        assert any(when == "call" for when, _ in reasons), result["failed"]
        assert all(when in ("call", "teardown") and names & ASSERTIONS for when, names in reasons), result["failed"]
