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


def build(folder: Path, *options: str) -> dict[str, bytes]:
    """Return the files of the wheel that is built into `folder`."""
    command = [sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", folder]
    succeed(*command, REPOSITORY)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def wheel(dist):
    return build(dist, "--wheel")


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
    assert build(tmp_path) == wheel
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        tops = {Path(name).parts[1] for name in source.getnames()}
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
    script = "import pgtoolkit.config.files as c; print(c.__file__, c.config_directory())"
    paths = succeed(sys.executable, "-c", script, **options).split()
    assert paths == [
        str(target / "pgtoolkit" / "config" / "files.py"),
        str(target / "pgtoolkit" / "conf"),
    ]
    page = succeed(target / "bin" / "pgtk", "check", "loss=gspo", "aggregation=constant", **options)
    assert "gspo" in page
    assert "constant" in page
    page = succeed(target / "bin" / "pgtk", "check", "sweep", "metrics_cost", **options)
    assert "Sweep of 3 runs" in page
    assert "one ratio per document" in succeed(
        target / "bin" / "pgtk", "explain", "gspo", **options
    )
    assert "a column of recorded rollouts" in succeed(
        target / "bin" / "pgtk", "explain", "trajectory", **options
    )
    assert "experiment" in succeed(target / "bin" / "pgtk", "--help", **options)
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
