"""Tests of the tests: for each wrong function of `mutants/`, in place of a right one, a test fails.

`pytest -m mutants` runs these alone.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from mutants import VARIABLE, all_mutants

REPOSITORY = Path(__file__).parents[1]

# The server imports everything once. For every line that it reads, [a mutant or null, tests], it
# forks, runs the tests, and writes the names of those that failed.
SERVER = """
import gc, importlib, json, os, pkgutil, sys
import hypothesis, lightning, matplotlib.pyplot, mlflow, pytest, torch, transformers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
import mutants, pgtoolkit

# The first test that fails by an assertion under a mutant ends the run. Other errors do not count:
# they may come from the mutant itself.
class Record:
    def __init__(self, is_mutant):
        self.failed = []
        self.is_mutant = is_mutant

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None and call.excinfo.typename != "Skipped":
            names = [kind.__name__ for kind in call.excinfo.type.__mro__]
            if {"AssertionError", "Failed"} & {*names}:  # the latter of pytest.raises
                self.failed.append(item.nodeid)
                item.session.shouldstop = "noticed" if self.is_mutant else False
            elif not self.is_mutant:
                self.failed.append(item.nodeid)

def run(name, tests):
    sys.stdout = sys.stderr = open(sys.argv[1] + "/output.txt", "w")
    for number in (1, 2):  # what a test's own forks write is no answer of the server
        os.dup2(sys.stdout.fileno(), number)
    os.environ[mutants.VARIABLE] = name or ""
    mutants.apply_named()
    record = Record(name is not None)
    options = ["-q", "--disable-plugin-autoload", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    pytest.main([*options, *tests], plugins=[record])
    with open(sys.argv[1] + "/result.json", "w") as file:
        json.dump(record.failed, file)
    sys.stdout.flush()

for module in pkgutil.walk_packages(pgtoolkit.__path__, "pgtoolkit."):
    importlib.import_module(module.name)
mutants.all_mutants()
gc.freeze()  # Forks then collect only their own objects.
for line in sys.stdin:
    if os.fork() == 0:
        try:
            run(*json.loads(line))
        finally:
            os._exit(0)
    os.wait()
    print("done", flush=True)
"""


class Server:
    """A process that runs tests under a mutant, in a fork of a process that has all imports."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.noticed: set[str] = set()
        site = folder / "site"
        site.mkdir()
        # Processes that the tests start apply the mutant too.
        (site / "sitecustomize.py").write_text("import mutants; mutants.apply_named()\n")
        places = [str(site), str(REPOSITORY / "tests"), str(REPOSITORY)]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": os.pathsep.join(places)},
        )

    def run(self, name: str | None, tests: Iterable[str]) -> list[str]:
        """Run tests under a mutant (None: without); return the tests that failed."""
        (self.folder / "result.json").unlink(missing_ok=True)
        print(json.dumps([name, [*tests]]), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"
        assert (self.folder / "result.json").exists(), self.output
        return json.loads((self.folder / "result.json").read_text())

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("mutants"))
    yield started
    assert started.noticed
    # Without a mutant the same tests pass.
    assert started.run(None, sorted(started.noticed)) == [], started.output
    started.process.stdin.close()
    assert started.process.wait(timeout=60) == 0


def positional_parameters(wrong: Callable) -> list[str] | None:
    """Return the names of the target's parameters that a wrong function takes; None if it takes
    any."""
    parameters = inspect.signature(wrong).parameters.values()
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters][1:]


def test_each_mutant_has_a_target_with_its_parameters():
    mutants = all_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 100
    for mutant in mutants:
        target = mutant.place()[2]  # AttributeError if the name is gone: name its new place.
        right = getattr(target, "__func__", getattr(target, "fget", target))
        names = positional_parameters(mutant.wrong)
        if inspect.isfunction(right) and names is not None:
            num_parameters = len(inspect.signature(right).parameters)
            assert len(names) == num_parameters, f"{mutant.name} takes {names}"


@pytest.mark.mutants
@pytest.mark.timeout(1800)  # several folders of tests, if the last of them notices
@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_some_test_fails_under_the_mutant(server, mutant):
    assert mutant.name not in os.environ.get(VARIABLE, "")
    quick = ["-m", "not slow", *mutant.nearest_tests()]
    noticed = server.run(mutant.name, quick) or server.run(mutant.name, mutant.tests())
    assert noticed, server.output
    server.noticed |= set(noticed)
