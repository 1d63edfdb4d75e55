"""What a run was trained with beside its configuration: values over steps, and digests of the
user's own modules."""

import pytest

from pgtoolkit.runs.history import in_words, spans
from pgtoolkit.runs.modules import module_digests


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ([(0, "a")], 6, "a"),
        ([(0, "a"), (4, "b")], 6, "a to step 4, then b"),
        ([(0, "a"), (2, "b"), (4, 0.5)], 6, "a to step 2, then b to step 4, then 0.5"),
        # No step was made with what was changed before the first or after the last one.
        ([(0, "a"), (0, "b")], 6, "b"),
        ([(0, "a"), (6, "b")], 6, "a"),
        ([(0, "a"), (5, "b")], 6, "a to step 5, then b"),
        # Changed again at the same step, or from an earlier checkpoint: the steps in between are
        #   made again.
        ([(0, "a"), (4, "b"), (4, "c")], 6, "a to step 4, then c"),
        ([(0, "a"), (4, "b"), (4, "a")], 6, "a"),
        ([(0, "a"), (4, "b"), (2, "c")], 6, "a to step 2, then c"),
        ([(0, "a"), (2, "b"), (4, "b")], 6, "a to step 2, then b"),
        ([(0, "a"), (2, "b"), (4, "a")], 6, "a to step 2, then b to step 4, then a"),
        ([(0, 1), (0, 2)], 0, 2),
    ],
)
def test_values_are_those_that_steps_were_made_with(changes, steps, expected):
    assert in_words(spans(changes, steps)) == expected


OWN = {
    "rewards": (
        "import json\nimport numpy\nfrom scales import one\n\ndef right(a, b):\n    return "
        "one.SCALE\n"
    ),
    "scales/__init__": "",
    "scales/one": "from . import two\nfrom .two import HALF\nSCALE = 2 * HALF\n",
    "scales/two": "HALF = 0.5\n\ndef lazily():\n    import late\n",
    "scales/unused": "x = 1\n",
    "late": "class C:\n    '''Says what it is.'''\n    y = 1\n",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    for name, text in OWN.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_modules_are_those_that_are_named_with_their_imports(own):
    found = module_digests(["rewards"])
    assert [*found] == ["late", "rewards", "scales", "scales.one", "scales.two"]
    assert all(len(digest) == 8 for digest in found.values())
    assert [*module_digests(["scales.two"])] == ["late", "scales", "scales.two"]
    assert module_digests(["nowhere", "scales.nothing", "pgtoolkit.losses.families", "math"]) == {}
    # named, but Python's: its imports are not followed
    assert [*module_digests(["statistics"])] == ["statistics"]


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("late", "# A comment.\nclass C:\n    '''Says something else.'''\n\n    y = (1)\n", []),
        ("late", "class C:\n    y = 1\n", []),
        ("late", "class C:\n    y = 2\n", ["late"]),
        ("late", "class C:\n    '''Says what it is.'''\n    z = 'y'\n    y = 1\n", ["late"]),
        ("scales/two", OWN["scales/two"].replace("0.5", "0.25"), ["scales.two"]),
        ("scales/unused", "x = 2\n", []),
    ],
)
def test_statements_change_a_digest_and_comments_do_not(own, name, text, changed):
    before = module_digests(["rewards"])
    (own / f"{name}.py").write_text(text)
    after = module_digests(["rewards"])
    assert [module for module in before if before[module] != after[module]] == changed


def test_code_that_cannot_be_parsed_is_left_out(own):
    (own / "late.py").write_text("def (")
    assert "late" not in module_digests(["rewards"])
