"""Imports run downward from room to room, and large libraries are loaded only where they are
needed."""

import ast
import collections
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pgtoolkit
from benchmarks import rooms
from benchmarks.rooms import parsed

PACKAGE = Path(__file__).parents[1] / "pgtoolkit"
ORDER = (
    *("errors", "completion", "document", "batch"),
    *("losses", "families", "corrections", "kl", "kernels"),
    *("api", "testing", "adapters"),
    *("ranks", "system", "runs"),
    *("tasks", "model", "sampling", "rollouts", "tracking", "training"),
    *("config", "assembly"),
    *("comparison", "launch", "experiment", "cli", "command", "__main__"),
)
"""Rooms and the files at the top, from the bottom up: each may import those before it. So no part
of a run knows the configuration."""

HEAVY = {"torch", "triton", "lightning", "mlflow", "transformers"}
TORCH = HEAVY - {"mlflow"}
LIGHT = {"errors", "system", "runs", "config", "tracking", "cli"}
"""These load none of the large libraries as they are imported, so that the command starts fast."""

ALSO_LIGHT = (
    "losses.aggregation",
    "losses.checks",
    "losses.corrections",
    "losses.families",
    "losses.family",
    "losses.function",
    "losses.group_families",
    "losses.adaptive_kl",
    "losses.kl",
    "ranks.environment",
    "tasks.settings",
    "tasks.signatures",
    "model.architectures",
    "model.misfits",
    "model.settings",
    "sampling.settings",
    "rollouts.batch_counts",
    "rollouts.recorded_folder",
    "rollouts.rules",
    "rollouts.settings",
    "rollouts.whole_steps",
    "training.loss_settings",
    "training.settings",
    "assembly.continuing",
    "assembly.early_stop",
    "assembly.inputs",
    "assembly.machine",
    "model.weight_files",
    "assembly.run_description",
    "assembly.summary",
    "assembly.sync",
    "assembly.without_effect",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def module(file: Path) -> str:
    """Return the dotted name of a file within the package."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(file) for file in FILES}


def room(name: str) -> str:
    return name.partition(".")[0]


def is_light(name: str) -> bool:
    return room(name) in {*LIGHT, "launch"} or name in ALSO_LIGHT


@functools.cache
def imports(file: Path, module_level_only: bool = False) -> set[str]:
    """Return the dotted names that a file imports."""
    tree = parsed(file)
    nodes = _outside_functions(tree) if module_level_only else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _outside_functions(node):
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not (
            for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ):
            yield child
            yield from _outside_functions(child)


def modules_of_package(names: set[str]) -> set[str]:
    """Return those of the names that are of the package, as names of its modules."""
    inside = {name.removeprefix("pgtoolkit.") for name in names if name.startswith("pgtoolkit.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in inside} - {""}


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_imports_run_downward():
    places = {name: place for place, name in enumerate(ORDER)}
    for file in FILES:
        if file.parent != PACKAGE or file.stem in ORDER:
            place = places[room(module(file))]
            imported = modules_of_package(imports(file))
            assert [name for name in imported if places[room(name)] > place] == [], file


def test_few_functions_take_the_whole_configuration():
    """Outside of the rooms that compose one and start runs; others take the groups they need."""
    takers = []
    for file in FILES:
        if room(module(file)) in ("config", "launch"):
            continue
        for node in ast.walk(parsed(file)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            annotations = [a.annotation for a in arguments if a.annotation is not None]
            names = [n.id for a in annotations for n in ast.walk(a) if isinstance(n, ast.Name)]
            if "Config" in names:
                takers.append(f"{module(file)}.{node.name}")
    assert len(takers) <= 25, takers
    assert {room(taker) for taker in takers} == {"assembly", "comparison"}


def test_no_imports_form_a_circle():
    """Imports within functions and for types count as well."""
    waiting = {module(file): modules_of_package(imports(file)) - {module(file)} for file in FILES}
    free = {""}
    while free:
        free = {name for name, needed in waiting.items() if not needed & waiting.keys()}
        waiting = {name: needed for name, needed in waiting.items() if name not in free}
    assert waiting == {}


def test_the_top_of_the_package_has_only_these_files():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    public = {"api", "families", "corrections", "kl", "testing", "experiment"}
    below_the_rooms = {"errors", "completion", "document", "batch"}
    assert files == {"__init__", "__main__", "cli", "command", *below_the_rooms, *public}


def test_no_two_files_have_one_name():
    counts = collections.Counter(file.stem for file in FILES if file.stem != "__init__")
    repeated = {name for name, count in counts.items() if count > 1}
    # at the top and in losses/, under one public name; and each room has its settings
    assert repeated == {"families", "corrections", "kl", "settings"}


@pytest.mark.slow
def test_the_public_names_are_imported_as_they_are_documented():
    code = """
import sys
from pgtoolkit.kl import KL
import pgtoolkit.corrections
import pgtoolkit.losses.kl
from pgtoolkit.families import Cispo
assert pgtoolkit.kl is pgtoolkit.losses.kl and pgtoolkit.kl.KL is KL
assert pgtoolkit.families.Cispo is Cispo and pgtoolkit.corrections.TokenTruncate
assert {"policy_loss", "testing", "StepTotals", "__version__"} <= set(dir(pgtoolkit))
assert not hasattr(pgtoolkit, "polcy_loss")
assert "torch" not in sys.modules
assert {name for name in dir(pgtoolkit) if not hasattr(pgtoolkit, name)} == set()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("polcy_loss", r"no attribute 'polcy_loss'\. Did you mean 'policy_loss'\?$"),
        ("from_paded", r"Did you mean 'from_padded'\?$"),
        ("Trainer", r"no attribute 'Trainer'\. It has PolicyLoss, StepTotals, corrections"),
        ("__wrapped__", r"no attribute '__wrapped__'$"),
    ],
)
def test_an_unknown_public_name_is_answered_with_the_nearest(wrong, message):
    with pytest.raises(AttributeError, match=message):
        getattr(pgtoolkit, wrong)


@pytest.mark.parametrize(
    ("scripts", "is_other"), [("[console_scripts]\npgtk = pgtoolkit.cli:main\n", False), ("", True)]
)
def test_beside_another_projects_package_of_its_name_nothing_starts(tmp_path, scripts, is_other):
    """Unless that is an older installation of this one, which has the command pgtk."""
    folder = tmp_path / "pgtoolkit-0.27.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pgtoolkit\nVersion: 0.27.0\n")
    (folder / "entry_points.txt").write_text(scripts)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"}
    code = "import pgtoolkit, sys, {0}; sys.argv = ['pgtk', '--version']; {1}"
    library = code.format("pgtoolkit.errors", "pgtoolkit.kl")
    command = code.format("pgtoolkit.command", "sys.exit(pgtoolkit.command.main())")
    for program, status in ((library, 1), (command, 2)):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert done.returncode == (status if is_other else 0), done.stderr
        assert (
            "this environment has the package pgtoolkit 0.27.0, another project's" in done.stderr
        ) == is_other


def test_type_checkers_see_the_public_names():
    tree = parsed(PACKAGE / "__init__.py")
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = {alias.name for node in block.body for alias in node.names}
    assert names == set(pgtoolkit.__all__)
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_every_file_begins_with_a_sentence():
    for file in FILES:
        assert re.match(r".{12,300}\.$", rooms.purpose(file)), file


def test_the_picture_of_the_rooms_is_drawn_from_the_imports():
    """`python -m benchmarks.rooms` draws it anew."""
    page = rooms.PAGE.read_text()
    assert page == rooms.with_picture(page)
    arrows = re.findall(r"^  (\w+) --> (\w+)$", page, flags=re.MULTILINE)
    assert all(ORDER.index(above) > ORDER.index(below) for above, below in arrows)
    rooms_drawn = {room for arrow in arrows for room in arrow}
    assert rooms_drawn == {file.parent.name for file in PACKAGE.glob("*/__init__.py")}


def test_the_command_line_starts_without_the_heavy_libraries():
    for file in FILES:
        if is_light(module(file)):
            names = imports(file, module_level_only=True)
            assert roots(names) & HEAVY == set(), file
            assert {name for name in modules_of_package(names) if not is_light(name)} == set(), file


def test_check_and_explain_import_none_of_the_heavy_libraries():
    code = """
import sys
from pgtoolkit.cli import main
main(["explain", "gspo"])
main(["check", "experiment=dapo"])
heavy = {"torch", "lightning", "mlflow", "transformers", "numpy", "pyarrow", "huggingface_hub"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "one ratio per document" in done.stdout
    assert done.stdout.endswith("\n[]\n")


def test_the_losses_load_torch_and_what_torch_loads_alone():
    """Names of modules at the top, without those of Python itself."""
    code = """
import sys
import torch
def names():
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
before = names()
import pgtoolkit; pgtoolkit.policy_loss
print(*sorted(names() - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pgtoolkit\n"


def of_rooms(*names: str) -> list[Path]:
    return [file for file in FILES if room(module(file)) in names]


def test_losses_and_kernels_know_only_torch():
    for file in of_rooms("losses", "kernels"):
        assert roots(imports(file)) & (HEAVY | {"hydra", "omegaconf", "numpy"}) <= {
            "torch",
            "triton",
        }, file


DOOR = {
    "config/compose.py": "lets Hydra compose, and gives a Config",
    "config/sweeps.py": "does the same for the jobs of a sweep",
    "config/hydra_files.py": "tells Hydra of the schema and of files",
    "config/hydra_keys.py": "reads the node `hydra`",
    "config/hydra_command.py": "has Hydra answer --cfg, --info and the Tab key",
    "config/composable.py": "makes of the schema what OmegaConf can change",
    "config/resolve.py": "resolves what was composed",
    "config/overrides.py": "reads overrides in Hydra's grammar",
    "config/refusals.py": "says what is wrong with them",
    "config/refused_keys.py": "says what is wrong with the keys that they name",
    "config/meant_keys.py": "finds the keys that are meant in a composed configuration",
    "config/repaired_words.py": "finds the overrides that are meant in one",
    "config/own_files.py": "reads files of the user's before Hydra does",
}
"""Files that import Hydra or OmegaConf, and why. They return a frozen Config or plain values."""


def test_hydra_ends_where_the_configuration_is_composed():
    users = [file for file in FILES if roots(imports(file)) & {"hydra", "omegaconf"}]
    assert {str(file.relative_to(PACKAGE)) for file in users} == DOOR.keys()


@pytest.mark.slow
def test_a_run_and_a_job_of_a_sweep_load_no_hydra_and_may_find_transformers_imported():
    code = (
        "import sys, transformers, pgtoolkit.launch.worker, pgtoolkit.assembly.train, "
        "pgtoolkit.launch.ranks, pgtoolkit.launch.forks;"
        "print(sorted({'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_kernels_named_for_it_import_triton():
    users = [file for file in FILES if "triton" in roots(imports(file))]
    assert {file.parent.name for file in users} == {"kernels"}
    assert {file.name.partition("_")[0] for file in users} == {"triton"}


def test_run_directories_and_tracking_know_no_torch():
    for file in of_rooms("runs", "tracking"):
        of_loggers = {"lightning"} if file.name == "logger_records.py" else set()
        assert roots(imports(file)) & TORCH == of_loggers, file


@pytest.mark.slow
def test_a_run_skips_imports_of_libraries_that_can_still_be_imported_later():
    script = """
import gc, json, sys
import pgtoolkit.launch, pgtoolkit.assembly.train
from pgtoolkit.tracking.store import client_of
client_of("http://127.0.0.1:9")
names = ("torchmetrics", "scipy", "pandas", "fastapi", "lightning", "mlflow")
loaded = [name for name in names if name in sys.modules]
looked_at, left_alone = len(gc.get_objects()), gc.get_freeze_count()
import torchmetrics, scipy.optimize, pandas, fastapi
names = [torchmetrics.MeanMetric.__module__, fastapi.FastAPI.__name__]
print(json.dumps([loaded, gc.isenabled(), looked_at < left_alone / 10, *names]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    expected = [["lightning", "mlflow"], True, True, "torchmetrics.aggregation", "FastAPI"]
    assert json.loads(done.stdout) == expected, done.stderr
    assert done.stderr == ""


def test_lightning_is_imported_for_training_and_for_its_loggers():
    users = {file.name for file in FILES if "lightning" in roots(imports(file))}
    assert users == {"frameworks.py", "logger_records.py"}


def test_the_rules_are_asked_where_a_command_begins():
    """Nothing behind these commands builds a report of its own."""
    users = {
        module(file) for file in FILES if "config.validate" in modules_of_package(imports(file))
    }
    assert users == {"launch.check", "launch.evaluate", "comparison.tokens", "config.translate"}
    reports = {
        file
        for file in of_rooms("model", "sampling", "rollouts", "tasks")
        if "Report(" in file.read_text()
    }
    reports |= {
        file
        for file in of_rooms("assembly")
        if file.stem not in ("inputs", "machine") and "Report(" in file.read_text()
    }
    assert reports == set()
