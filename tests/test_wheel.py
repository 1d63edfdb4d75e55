"""The wheel has the package, conf/ and sweeps/ and nothing else, and its command works outside of
the repository."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def succeed(*command, **options) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BUILD = """
import importlib, sys, tomllib
with open("pyproject.toml", "rb") as file:
    backend = tomllib.load(file)["build-system"]["build-backend"]
getattr(importlib.import_module(backend), sys.argv[1])(sys.argv[2])
"""
"""What `python -m build` does, which starts a process for each of several questions."""


def build(project: Path, what: str, folder: Path) -> None:
    """Build a wheel ("build_wheel") or a source archive ("build_sdist") of a project into
    `folder`."""
    succeed(sys.executable, "-c", BUILD, what, folder, cwd=project)


def files_of_wheel(folder: Path) -> dict[str, bytes]:
    """Return the files of the only wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def wheel(dist):
    build(REPOSITORY, "build_wheel", dist)
    return files_of_wheel(dist)


def test_the_wheel_has_the_package_its_configuration_and_nothing_else(wheel):
    files = {
        str(file.relative_to(REPOSITORY)): file.read_bytes()
        for folder in ("pgtoolkit", "conf", "sweeps")
        for file in (REPOSITORY / folder).rglob("*")
        if file.is_file() and file.parent.name != "__pycache__"
    }
    moved = ("conf/", "sweeps/")
    expected = {
        f"pgtoolkit/{name}" if name.startswith(moved) else name: files[name] for name in files
    }
    data = {
        "pgtoolkit/conf/config.yaml",
        "pgtoolkit/conf/experiment/dapo.yaml",
        "pgtoolkit/sweeps/clip_range.yaml",
    }
    assert data < expected.keys()
    assert {name: data for name, data in wheel.items() if ".dist-info/" not in name} == expected


def test_the_page_of_the_wheel_names_all_extras_and_has_only_full_links(wheel):
    """It is called pgtk, and its description, which no repository surrounds, leads nowhere within
    one."""
    (metadata,) = [data.decode() for name, data in wheel.items() if name.endswith("/METADATA")]
    head, _, page = metadata.partition("\n\n")
    assert "Name: pgtk\n" in head
    assert "Classifier: Typing :: Typed" in head
    assert page == (REPOSITORY / "docs" / "wheel.md").read_text()
    assert not re.search(r"\]\((?!https?://)", page)
    extras = set(re.findall(r"^Provides-Extra: ([\w-]+)$", head, re.MULTILINE))
    assert set(re.findall(r"[`k]\[([\w-]+)\]", page)) == extras - {"test", "bench", "docs"}


def test_a_wheel_built_from_the_source_archive_is_the_same(wheel, tmp_path):
    build(REPOSITORY, "build_sdist", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        tops = {Path(name).parts[1] for name in source.getnames()}
        source.extractall(tmp_path, filter="data")
    (project,) = (path for path in tmp_path.iterdir() if path.is_dir())
    build(project, "build_wheel", tmp_path)
    assert files_of_wheel(tmp_path) == wheel
    assert {
        "pgtoolkit",
        "conf",
        "sweeps",
        "tests",
        "pyproject.toml",
        "LICENSE",
        "README.md",
    } <= tops
    assert not tops & {"outputs", "multirun", "dist", "build", ".venv", ".git"}


def test_the_installed_command_works_from_anywhere(wheel, dist, tmp_path):
    (file,) = dist.glob("*.whl")
    target = tmp_path / "installed"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",  # few of its modules are imported here
    ]
    succeed(*pip, "--target", target, file)
    options = {"cwd": elsewhere, "env": os.environ | {"PYTHONPATH": str(target)}}
    words = ["check sweep metrics_cost", "explain gspo", "explain trajectory", "--help"]
    script = (
        "import pgtoolkit.cli, pgtoolkit.config.files as files\n"
        "print(files.__file__, files.config_directory())\n"
        f"print([pgtoolkit.cli.main(typed.split()) for typed in {words}])"
    )
    page = succeed(sys.executable, "-c", script, **options)
    assert page.splitlines()[0].split() == [
        str(target / "pgtoolkit" / "config" / "files.py"),
        str(target / "pgtoolkit" / "conf"),
    ]
    assert page.endswith("\n[0, 0, 0, 0]\n")
    for shown in (
        "Sweep of 3 runs",
        "one ratio per document",
        "a column of recorded rollouts",
        "experiment",
    ):
        assert shown in page
    page = succeed(target / "bin" / "pgtk", "check", "loss=gspo", "aggregation=constant", **options)
    assert "gspo" in page
    assert "constant" in page
    assert succeed(target / "bin" / "pgtk", "--version", **options) == "pgtk 0.1.0\n"
    assert list(elsewhere.iterdir()) == []

    # The other project of our package's name, whose files have replaced two of ours.
    for file in ("__init__.py", "errors.py"):
        (target / "pgtoolkit" / file).write_text("")
    metadata = target / "pgtoolkit-0.27.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pgtoolkit\nVersion: 0.27.0\n")
    done = subprocess.run(
        [target / "bin" / "pgtk", "check"], capture_output=True, text=True, **options
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "pgtk: error: this environment has the package pgtoolkit 0.27.0, another project's"
    )
