"""Every key of the configuration acts as it says: changed, the number that it configures changes as it should.

The rows are in keys_of_*.py. The table is made from the schema, so that a new key without a row fails.
"""

import dataclasses
import inspect

import pytest

HELPERS = (
    *("keys", "keys_of_the_step", "keys_of_penalties", "keys_of_the_model", "keys_of_rollouts", "keys_of_servers"),
    *("keys_of_tasks", "keys_of_a_run", "keys_of_evaluation"),
)
pytest.register_assert_rewrite(*HELPERS)

for name in HELPERS[1:]:
    __import__(name)  # enters its rows

from keys import ROWS  # noqa: E402

from pgtoolkit.config.schema import SCHEMAS, Config  # noqa: E402

KEYS = [field.name for field in dataclasses.fields(Config) if field.name not in {key.split("/")[0] for key in SCHEMAS}]
KEYS += [f"{group}.{field.name}" for group, schema in SCHEMAS.items() for field in dataclasses.fields(schema)]
SEEN = set()


@pytest.mark.parametrize("key", KEYS)
def test_the_key_acts(key, request):
    assert key in ROWS, f"{key} is new: write a function that changes it and sees its number change, in keys_of_*.py"
    names = inspect.signature(ROWS[key]).parameters
    if "key" in names or ROWS[key] not in SEEN:  # what shows several keys at once runs once
        ROWS[key](**{name: key if name == "key" else request.getfixturevalue(name) for name in names})
        SEEN.add(ROWS[key])


def test_no_row_is_left_of_a_key_that_is_gone():
    assert ROWS.keys() <= set(KEYS)
