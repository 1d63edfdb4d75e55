"""Settings every test shares: Triton's interpreter where there is no GPU, one thread, no hub,
examples untimed."""

import copy
import functools
import inspect
import os
from pathlib import Path

# Set before anything imports triton: its language module reads the variable once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

from pgtoolkit.runs.directory import RunDirectory


def quicken_interpreter():
    """At every call of a function Triton's looks through its whole language for what to replace:
    half of its time.

    The names are the same each time.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names_in(package):
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, builder, *scope):
        for name in names_in(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch_builtin


def quicken_hydra():
    """At every composition it parses all files anew, and puts together for each what a default in
    its list could stand
    for: half of its time. Those of conf/ stay as they are, and only an interpolation stands for
        anything."""
    from hydra._internal import defaults_list
    from hydra._internal.config_repository import ConfigRepository, ObjectType

    load, make, kept = ConfigRepository.load_config, defaults_list._create_interpolation_map, {}
    shipped = f"{Path(__file__).parents[1]}/conf"

    def load_config(repository, config_path):
        source = repository._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.path != shipped:
            return load(repository, config_path)
        if config_path not in kept:
            kept[config_path] = load(repository, config_path)
        return copy.deepcopy(kept[config_path])

    def interpolation_map(overrides, defaults, self_added):
        return (
            make(overrides, defaults, self_added)
            if any(one.is_interpolation() for one in defaults)
            else None
        )

    ConfigRepository.load_config, defaults_list._create_interpolation_map = (
        load_config,
        interpolation_map,
    )


quicken_hydra()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    quicken_interpreter()

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # no test survives a power failure
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Drawing its curves is a third of what a short run takes: left white where no test looks at
    them."""
    if item.path.parent.name in ("comparison", "tracking", "tests"):
        return (yield)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FigureCanvasAgg, "draw", lambda canvas: canvas.get_renderer())
        return (yield)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    """One store for the tests that do not need one of their own: creating it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path / "run") as opened:
        yield opened
