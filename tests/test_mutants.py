"""Tests of the tests: functions of the package are replaced by wrong ones (`mutants/`), and each is
noticed.

`pytest -m mutants` runs these alone.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import VARIABLE, all_mutants

REPOSITORY = Path(__file__).parents[1]

# Imports everything once; then forks for every line that it reads, [a mutant or null, tests], and
# writes what failed.
SERVER = """
import gc, importlib, json, os, pkgutil, sys
import hypothesis, lightning, matplotlib.pyplot, mlflow, pytest, torch, transformers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
import mutants, pgtoolkit

# The first test that notices a mutant by an assertion ends the others; another error may be the
# mutant's own.
class Record:
    def __init__(self, is_mutant):
        self.failed, self.is_mutant = [], is_mutant

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
gc.freeze()  # what a fork collects is only its own
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
    """A process that runs tests under a mutant, in a fork of what has imported everything."""

    def __init__(self, folder):
        self.folder, self.noticed = folder, set()
        site = folder / "site"
        site.mkdir()
        # of what the tests start
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

    def run(self, name, tests):
        """Return the tests that failed."""
        (self.folder / "result.json").unlink(missing_ok=True)
        print(json.dumps([name, [*tests]]), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"
        assert (self.folder / "result.json").exists(), self.output
        return json.loads((self.folder / "result.json").read_text())

    @property
    def output(self):
        return (self.folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Server(tmp_path_factory.mktemp("mutants"))
    yield started
    assert started.noticed
    # without a mutant they pass
    assert started.run(None, sorted(started.noticed)) == [], started.output
    started.process.stdin.close()
    assert started.process.wait(timeout=60) == 0


def parameters(wrong):
    """Names of what a function takes by position, without the right one; None where it takes
    any."""
    taken = inspect.signature(wrong).parameters.values()
    return (
        None
        if any(one.kind == one.VAR_POSITIONAL for one in taken)
        else [one.name for one in taken][1:]
    )


def test_each_mutant_has_a_place():
    found = all_mutants()
    assert len({one.name for one in found}) == len(found) >= 100
    for one in found:
        place = one.place()[2]  # AttributeError where a name is gone: find what took its place
        right = getattr(place, "__func__", getattr(place, "fget", place))
        if inspect.isfunction(right) and (given := parameters(one.wrong)) is not None:
            assert len(given) == len(inspect.signature(right).parameters), (
                f"{one.name} takes {given}"
            )


@pytest.mark.mutants
@pytest.mark.timeout(1800)  # several folders of tests, where the last of them notices
@pytest.mark.parametrize("one", all_mutants(), ids=lambda one: one.name)
def test_the_mistake_is_noticed(server, one):
    assert one.name not in os.environ.get(VARIABLE, "")
    quick = ["-m", "not slow", *one.nearest_tests()]
    noticed = server.run(one.name, quick) or server.run(one.name, one.tests())
    assert noticed, server.output
    server.noticed |= set(noticed)
