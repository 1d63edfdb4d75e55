"""Pictures are drawn in their own settings, whatever matplotlib's are, and one that fails is a
line. Files that cannot be written are refused before the work."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from builders.refusals import refusal

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.output_files import refuse_unwritable, unwritable
from pgtoolkit.system.pictures import own_settings, saying_why_not_drawn
from pgtoolkit.tracking.curves import plot_curves

COLUMNS = {"step": np.arange(1.0, 4), "reward": np.arange(3.0)}
DRAW = """
import sys
from pathlib import Path
import numpy as np
from pgtoolkit.tracking.curves import plot_curves
columns = {"step": np.arange(1.0, 4), "reward": np.arange(3.0)}
plot_curves(columns, Path(sys.argv[1]), "title")
import matplotlib
"""


def drawn(path: Path, title: str = "title") -> bytes:
    """Return the picture of three steps."""
    plot_curves(COLUMNS, path, title)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
        ("MPLBACKEND", "no_backend"),
        ("MATPLOTLIBRC", "broken"),
    ],
)
def test_variables_with_which_matplotlib_cannot_be_imported_change_no_picture(
    tmp_path, name, value
):
    (tmp_path / "broken").write_bytes(b"font.family: \xff\xfe\n")
    path = tmp_path / "other.png"
    environment = os.environ | {name: value}
    command = [sys.executable, "-c", DRAW, str(path)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    assert path.read_bytes() == drawn(tmp_path / "curves.png")


@pytest.mark.parametrize(
    "settings",
    [
        {"text.usetex": True},
        {"font.family": "No Such Font", "axes.facecolor": "black"},
        {"savefig.bbox": "tight", "savefig.dpi": 5, "backend": "module://none"},
    ],
)
def test_the_user_s_settings_change_no_picture_and_stay_as_they_were(tmp_path, settings):
    path = tmp_path / "curves.png"
    expected = drawn(path)
    with matplotlib.rc_context():
        matplotlib.rcParams.update(settings)
        assert drawn(path) == expected
        assert {name: matplotlib.rcParams[name] for name in settings} == {
            name: ["No Such Font"] if name == "font.family" else value
            for name, value in settings.items()
        }
    matplotlib.rcParams["backend"] = "agg"


@pytest.mark.parametrize("title", ["$\\frac$", "a_b^{$x$", "50% \\begin", "$$", "\u4e2d"])
def test_a_title_is_no_formula(tmp_path, title):
    assert drawn(tmp_path / "curves.png", title)[:4] == b"\x89PNG"


def test_a_title_of_two_lines_is_one(tmp_path):
    one = drawn(tmp_path / "curves.png", "first second")
    assert drawn(tmp_path / "curves.png", "first\nsecond") == one


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError(28, "No space left on device"),
            "No space left on device. Make room on its disk: ",
        ),
        (RuntimeError("latex could not be found\nand more"), "latex could not be found"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_picture_that_fails_is_a_line_with_its_name_and_the_reason(tmp_path, error, reason):
    lines = []
    path = tmp_path / "my picture.png"
    with saying_why_not_drawn(path, lines.append), own_settings():
        raise error
    (line,) = lines
    assert line.startswith(f"the picture '{path}' was not drawn: {reason}")
    assert ("df -h /" in line) == isinstance(error, OSError)


def test_all_files_that_cannot_be_written_are_refused_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    files = {
        "--html": Path("missing/page.html"),
        "--csv": Path("file/table.csv"),
        "--runs-csv": Path("folder"),
        "--figure": Path("picture.gif"),
        "--other-figure": Path("picture.PDF"),
        "--latex": Path("picture.PDF"),
        "--third-figure": Path("clip_0.1"),
        "--json": Path("clip_0.1.json"),
        "--other-json": Path("clip_0.1.json"),
        "--tex": Path("clip_0.2"),
        "--other-tex": Path("clip_0.2"),
    }
    with pytest.raises(ConfigError) as refused:
        refuse_unwritable(files, pictures=("--figure", "--other-figure", "--third-figure"))
    lost = "It would be lost after all the work."
    assert str(refused.value).splitlines() == [
        "--html=missing/page.html needs a folder that exists (got missing: no such folder). "
        f"{lost} Use --html=page.html.",
        f"--csv=file/table.csv needs a folder that exists (got file: a file). {lost} "
        "Use --csv=table.csv.",
        f"--runs-csv=folder needs the name of a file (got a folder). {lost} Use "
        "--runs-csv=folder/file.csv.",
        "--figure=picture.gif needs a name that ends in .png, .jpg, .pdf, .svg (got picture.gif). "
        "The end of the name is the format of the picture. Use --figure=picture.png.",
        "--latex=picture.PDF needs another file than --other-figure (got picture.PDF). "
        "One would be written over the other. Use --latex=picture-2.PDF.",
        "--third-figure=clip_0.1 needs a name that ends in .png, .jpg, .pdf, .svg (got clip_0.1). "
        "The end of the name is the format of the picture. Use --third-figure=clip_0.1.png.",
        "--other-json=clip_0.1.json needs another file than --json (got clip_0.1.json). "
        "One would be written over the other. Use --other-json=clip_0.1-2.json.",
        "--other-tex=clip_0.2 needs another file than --tex (got clip_0.2). "
        "One would be written over the other. Use --other-tex=clip_0.2-2.",
    ]
    assert unwritable("--html=", Path("new.html")) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "no_run", "--html=missing/page.html"),
        ("samples", "no_run", "--html=missing/page.html"),
        ("tokens", "no_run", "--html=missing/page.html"),
        ("solutions", "missing/new.jsonl", "task=sums"),
    ],
)
def test_a_command_refuses_its_file_before_it_reads_a_run(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert "needs a folder that exists (got missing: no such folder)" in refusal(capsys, *words)
