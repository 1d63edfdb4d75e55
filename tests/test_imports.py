"""Imports point inward: who may know whom."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pgtoolkit"
HEAVY = {"torch", "triton", "lightning", "mlflow", "transformers"}
LIGHT_FILES = (
    "plain_files",
    "cli",
    "check",
    "completion",
    "compose",
    "conf_files",
    "config",
    "defaults",
    "errors",
    "functions",
    "imports",
    "machine",
    "model_folder",
    "paths",
    "plan",
    "redaction",
    "ranks",
    "refusals",
    "resume",
    "validate",
)
LIGHT = [PACKAGE / f"{name}.py" for name in LIGHT_FILES]
TORCHLESS = ("losses/aggregation", "losses/checks", "losses/families", "tracking/run_files")
"""What they may know of other folders: names, equations and checks, and the files of a run."""
LIGHT += [PACKAGE / f"{name}.py" for name in TORCHLESS]
LIGHT += [file for folder in ("rules", "multirun") for file in sorted((PACKAGE / folder).glob("*.py"))]


def imports(file: Path, module_level_only: bool = False) -> set[str]:
    """Dotted names of what a file imports."""
    tree = ast.parse(file.read_text())
    nodes = _outside_functions(tree) if module_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _outside_functions(node):
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not (for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield child
            yield from _outside_functions(child)


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def python_files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("file", LIGHT, ids=lambda file: file.name)
def test_the_command_line_starts_without_the_heavy_libraries(file):
    assert roots(imports(file, module_level_only=True)) & HEAVY == set()
    own = {name for name in imports(file, module_level_only=True) if name.startswith("pgtoolkit.")}
    allowed = {f"pgtoolkit.{name}" for name in (*LIGHT_FILES, "rules", "multirun", "__version__")}
    if file.parent.name == "multirun":
        allowed |= {"pgtoolkit.tracking"}  # reads and writes run directories; of it, only what MLflow needs is heavy
    light = tuple(f"pgtoolkit.{name.replace('/', '.')}." for name in TORCHLESS)
    own = {name for name in own if not f"{name}.".startswith(light)}
    assert {name for name in own if ".".join(name.split(".")[:2]) not in allowed} == set()


@pytest.mark.parametrize("file", [*python_files("losses"), *python_files("kernels")], ids=lambda file: file.name)
def test_losses_and_kernels_know_only_torch(file):
    names = imports(file)
    own = {name for name in names if name.startswith("pgtoolkit")}
    allowed = ("pgtoolkit.losses", "pgtoolkit.kernels", "pgtoolkit.batch", "pgtoolkit.errors")
    assert {name for name in own if not name.startswith(allowed)} == set()
    assert roots(names) & (HEAVY | {"hydra", "omegaconf", "numpy"}) <= {"torch", "triton"}


def test_only_the_kernels_named_for_it_import_triton():
    users = [file for file in PACKAGE.rglob("*.py") if "triton" in roots(imports(file))]
    assert {file.parent.name for file in users} == {"kernels"}
    assert {file.name.partition("_")[0] for file in users} == {"triton"}


@pytest.mark.parametrize("file", python_files("tracking"), ids=lambda file: file.name)
def test_tracking_knows_no_torch(file):
    assert roots(imports(file)) & {"torch", "triton", "lightning", "transformers"} == set()
    own = {name for name in imports(file) if name.startswith("pgtoolkit.")}
    outside = ("pgtoolkit.losses", "pgtoolkit.kernels", "pgtoolkit.rollouts", "pgtoolkit.training", "pgtoolkit.batch")
    own = {name for name in own if not name.startswith(("pgtoolkit.losses.families.", "pgtoolkit.losses.checks."))}
    assert {name for name in own if name.startswith(outside)} == set()


@pytest.mark.parametrize("file", python_files("rollouts"), ids=lambda file: file.name)
def test_rollouts_know_nothing_of_training(file):
    inner = ("pgtoolkit.losses", "pgtoolkit.kernels")
    outside = (*inner, "pgtoolkit.training", "pgtoolkit.tracking", "lightning", "mlflow")
    assert {name for name in imports(file) if name.startswith(outside)} == set()


def test_a_run_loads_nothing_that_others_need_of_its_libraries():
    script = """
import gc, json, sys
import pgtoolkit.training.train
from pgtoolkit.tracking.store import client_of
client_of("http://127.0.0.1:9")
names = ("torchmetrics", "scipy", "pandas", "fastapi", "lightning", "mlflow")
loaded = [name for name in names if name in sys.modules]
looked_at, left_alone = len(gc.get_objects()), gc.get_freeze_count()
import torchmetrics, scipy.optimize, pandas, fastapi
found = [torchmetrics.MeanMetric.__module__, fastapi.FastAPI.__name__]
print(json.dumps([loaded, gc.isenabled(), looked_at < left_alone / 10, *found]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent)
    expected = [["lightning", "mlflow"], True, True, "torchmetrics.aggregation", "FastAPI"]
    assert json.loads(done.stdout) == expected, done.stderr


def test_lightning_is_imported_in_one_place():
    users = [file.name for file in PACKAGE.rglob("*.py") if "lightning" in roots(imports(file))]
    assert users == ["frameworks.py"]


def test_the_walk_sees_what_it_should(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text("import a.b\nif True:\n    from c import d\ndef f():\n    import e\n")
    assert imports(file) == {"a.b", "c.d", "e"}
    assert imports(file, module_level_only=True) == {"a.b", "c.d"}
