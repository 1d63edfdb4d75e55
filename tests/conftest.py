"""Settings of all tests: Triton's interpreter where there is no GPU, a single thread, no hub, and
no time limit for hypothesis's examples."""

import contextlib
import gc
import os
import sys

# Set before anything imports triton: its language module reads the variable once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from builders.forked import forked_children
from builders.processes import start_server, stop_worlds
from builders.quickened import (
    PICTURES,
    quicken_compositions,
    quicken_git,
    quicken_hydra,
    quicken_interpreter,
    quicken_logs,
    quicken_models,
    quicken_processes,
    quicken_stores,
)

import pgtoolkit.launch  # noqa: F401  (Lightning is then imported as for the command)
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.system.terminal import forget_streams

pytest_plugins = ["cpu_seconds"]

quicken_processes()
quicken_logs()
quicken_git()
quicken_hydra()
quicken_compositions()
quicken_stores()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    quicken_interpreter()

torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


PATH = (*sys.path,)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    with contextlib.ExitStack() as block:
        patch = block.enter_context(pytest.MonkeyPatch.context())
        block.enter_context(forked_children(not item.get_closest_marker("starts_python")))
        if "pgtoolkit.assembly.train" in sys.modules:
            train = sys.modules["pgtoolkit.assembly.train"]
            patch.setattr(train, "plot_curves", PICTURES.plot_curves)
        result = yield
    if nextitem is None or nextitem.path != item.path:
        stop_worlds()
        os.chdir(item.config.invocation_params.dir)
        sys.path[:] = PATH  # without the folders of own code, where later tests would find some
    forget_streams()  # those of a process of pgtk, which a test may have been for a while
    return result


FOLDERS = (
    "launch",
    "sampling",
    "training",
    "tracking",
    "runs",
    "tasks",
    "system",
    "ranks",
    "kernels",
    "losses",
    "rollouts",
    "model",
    "adapters",
    "comparison",
    "tests",
    "config",
)
"""The order of the folders with several workers; `tests` stands for the files directly in tests/.

Of two workers each begins with a half. Both halves begin with tests that start processes and end
with short ones: the last tests decide how long a worker waits for the other, and those that a
worker takes over from the end of the other's half share no server or run with tests before them.
"""


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # one of several workers
        places = {folder: place for place, folder in enumerate(FOLDERS)}
        items.sort(key=lambda item: places.get(item.path.parent.name, len(FOLDERS)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    quicken_models()  # if a test has imported transformers
    gc.freeze()  # a million objects of tests and imports, none of which is garbage
    if not torch.cuda.is_available():
        start_server()  # with all imports of the tests, and no thread of one


@pytest.fixture(scope="module", autouse=True)
def forget_own_code(tmp_path_factory):
    """Forget the modules that the tests of a file have written: those of a later file may have the
    same names."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in tuple(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    """Return the store of all tests that need none for themselves: creating it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path / "run") as opened:
        yield opened
