"""Every key of the configuration acts as it says: changed, the number that it configures changes as
it should.

The rows are in tests/keys/. The table is made from the schema, so that a new key without a row
fails.
"""

import importlib
import inspect
from pathlib import Path

import pytest

MODULES = (
    "step",
    "penalties",
    "critic",
    "model",
    "rollouts",
    "servers",
    "tasks",
    "run",
    "evaluation",
)
pytest.register_assert_rewrite("keys", *(f"keys.{name}" for name in MODULES))

for name in MODULES:
    importlib.import_module(f"keys.{name}")  # enters its rows

from keys import ROWS, SEEN_BY  # noqa: E402

from pgtoolkit.config.keys import KEYS  # noqa: E402

NAMES = [f"{key.schema}.{key.leaf}".lstrip(".") for key in KEYS]
SEEN = set()


@pytest.mark.parametrize("key", NAMES)
def test_the_key_acts(key, request):
    if key in SEEN_BY:
        file, _, name = SEEN_BY[key].partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), SEEN_BY[key]
        return
    assert key in ROWS, (
        f"{key} is new: write a function in tests/keys/ that changes it and sees its number change"
    )
    names = inspect.signature(ROWS[key]).parameters
    if "key" in names or ROWS[key] not in SEEN:  # what shows several keys at once runs once
        ROWS[key](
            **{name: key if name == "key" else request.getfixturevalue(name) for name in names}
        )
        SEEN.add(ROWS[key])


def test_no_row_is_left_of_a_key_that_is_gone():
    assert ROWS.keys() | SEEN_BY.keys() <= set(NAMES)
    assert not ROWS.keys() & SEEN_BY.keys()
