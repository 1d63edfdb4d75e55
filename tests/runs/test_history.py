"""Values that a run was trained with over its steps, and digests of the user's modules."""

from pathlib import Path

import pytest

from pgtoolkit.runs.history import in_words, spans
from pgtoolkit.runs.modules import module_digests


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ([(0, "a")], 6, "a"),
        ([(0, "a"), (4, "b")], 6, "a to step 4, then b"),
        ([(0, "a"), (2, "b"), (4, 0.5)], 6, "a to step 2, then b to step 4, then 0.5"),
        # A change before the first step holds for all; one after the last step for none.
        ([(0, "a"), (0, "b")], 6, "b"),
        ([(0, "a"), (6, "b")], 6, "a"),
        ([(0, "a"), (5, "b")], 6, "a to step 5, then b"),
        # A second change at the same step or from an earlier checkpoint replaces the first.
        ([(0, "a"), (4, "b"), (4, "c")], 6, "a to step 4, then c"),
        ([(0, "a"), (4, "b"), (4, "a")], 6, "a"),
        ([(0, "a"), (4, "b"), (2, "c")], 6, "a to step 2, then c"),
        ([(0, "a"), (2, "b"), (4, "b")], 6, "a to step 2, then b"),
        ([(0, "a"), (2, "b"), (4, "a")], 6, "a to step 2, then b to step 4, then a"),
        ([(0, 1), (0, 2)], 0, 2),
    ],
)
def test_a_history_has_the_values_that_steps_were_made_with(changes, steps, expected):
    assert in_words(spans(changes, steps)) == expected


MODULES = {
    "rewards": (
        "import json\nimport numpy\nfrom scales import one\n\ndef right(a, b):\n    return "
        "one.SCALE\n"
    ),
    "scales/__init__": "",
    "scales/one": "from . import two\nfrom .two import HALF\nSCALE = 2 * HALF\n",
    "scales/two": "HALF = 0.5\n\ndef lazily():\n    import late\n",
    "scales/unused": "x = 1\n",
    "late": "class C:\n    '''A docstring.'''\n    y = 1\n",
}
"""The user's modules: rewards imports scales.one, which imports scales.two, which imports late."""


@pytest.fixture
def modules(tmp_path, monkeypatch) -> Path:
    """Enter a folder with the modules."""
    for name, text in MODULES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_digests_are_of_the_named_modules_and_of_the_users_modules_that_they_import(modules):
    digests = module_digests(["rewards"])
    assert [*digests] == ["late", "rewards", "scales", "scales.one", "scales.two"]
    assert all(len(digest) == 8 for digest in digests.values())
    assert [*module_digests(["scales.two"])] == ["late", "scales", "scales.two"]
    assert module_digests(["nowhere", "scales.nothing", "pgtoolkit.losses.families", "math"]) == {}
    # A named module of Python itself; its imports are not followed.
    assert [*module_digests(["statistics"])] == ["statistics"]


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("late", "# A comment.\nclass C:\n    '''Another one.'''\n\n    y = (1)\n", []),
        ("late", "class C:\n    y = 1\n", []),
        ("late", "class C:\n    y = 2\n", ["late"]),
        ("late", "class C:\n    '''A docstring.'''\n    z = 'y'\n    y = 1\n", ["late"]),
        ("scales/two", MODULES["scales/two"].replace("0.5", "0.25"), ["scales.two"]),
        ("scales/unused", "x = 2\n", []),
    ],
)
def test_statements_change_a_digest_and_comments_do_not(modules, name, text, changed):
    before = module_digests(["rewards"])
    (modules / f"{name}.py").write_text(text)
    after = module_digests(["rewards"])
    assert [module for module in before if before[module] != after[module]] == changed


def test_a_module_that_cannot_be_parsed_has_no_digest(modules):
    (modules / "late.py").write_text("def (")
    assert "late" not in module_digests(["rewards"])
