"""Every key of the configuration acts as it says: changed, the number that it configures changes as
it should.

The functions that change a key are in tests/keys/, whose head says how their table works.
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
    importlib.import_module(f"keys.{name}")  # enters its functions into KEY_TESTS

from keys import KEY_TESTS, TESTED_ELSEWHERE  # noqa: E402

from pgtoolkit.config.keys import KEYS  # noqa: E402

NAMES = [f"{key.schema}.{key.leaf}".lstrip(".") for key in KEYS]
PASSED = set()
"""Functions that test all of their keys together, and have passed."""


@pytest.mark.parametrize("key", NAMES)
def test_the_key_has_a_test(key):
    if key in TESTED_ELSEWHERE:
        test = TESTED_ELSEWHERE[key]
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), test
        return
    assert key in KEY_TESTS, (
        f"{key} is new: write a function in tests/keys/ that changes it and sees its number change"
    )


@pytest.mark.slow
@pytest.mark.parametrize("key", [name for name in NAMES if name in KEY_TESTS])
def test_the_key_acts(key, request):
    function = KEY_TESTS[key]
    if function in PASSED:
        return
    arguments = {
        name: key if name == "key" else request.getfixturevalue(name)
        for name in inspect.signature(function).parameters
    }
    function(**arguments)
    if "key" not in arguments:
        PASSED.add(function)


def test_every_entry_is_of_a_key_of_the_schema_and_none_has_two():
    assert KEY_TESTS.keys() | TESTED_ELSEWHERE.keys() <= set(NAMES)
    assert not KEY_TESTS.keys() & TESTED_ELSEWHERE.keys()
