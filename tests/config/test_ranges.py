"""Every number of the configuration has a range: both ends are accepted, and values beyond it are
refused with a value that is accepted."""

import math
import re

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.keys import KEYS, fits, values_in_words
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.resolve import in_range
from pgtoolkit.config.saved import typed
from pgtoolkit.config.validate import validated
from pgtoolkit.system.declared import Key

NEEDED = {
    "rollout/recorded": ["rollout.path=pyproject.toml"],
    "aggregation": ["aggregation=constant"],
}
NEEDED["task/guess"] = ["rollout.max_completion_length=66"]
"""Further overrides without which an option is refused before its numbers are."""


NUMBERS = [key for key in KEYS if key.type.startswith(("int", "float"))]


def problems_of(key: Key, value: float | str) -> list[str]:
    """Return the problems of a key with this value of it."""
    option = [key.schema.replace("/", "=")] if "/" in key.schema else []
    composed = compose([*option, *NEEDED.get(key.schema, []), f"{key.name}={value}"])
    problems = validated(composed)[1].problems
    return [problem for problem in problems if problem.startswith(f"{key.name}=")]


def is_in_range(key: Key, value: float | str) -> bool:
    """Return whether no problem says that the value is outside of the key's range."""
    return not any(values_in_words(key) in problem for problem in problems_of(key, value))


@pytest.mark.slow
@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: f"{key.schema}.{key.leaf}")
def test_both_ends_of_a_range_are_accepted_and_values_beyond_it_refused(key):
    least, greatest = key.range
    assert -math.inf < least < greatest < math.inf
    assert is_in_range(key, least)
    assert is_in_range(key, greatest)
    if key.type.startswith("int"):
        beyond = (least - 1, greatest + 1)
    else:
        beyond = (least - (abs(least) / 100 or 1e-9), greatest + (abs(greatest) / 100 or 1e-9))
    for value in beyond:
        (problem,) = problems_of(key, value)
        assert f"needs {values_in_words(key)} (got " in problem
    suggested = re.search(rf" Use {key.name}=([^ \n]*)\.$", problem)[1]
    assert suggested in (str(least), str(greatest)) or is_in_range(key, suggested)
    for value in (10**400, math.nan, math.inf, -math.inf, 1e308, True, "1", [], {}):
        assert not fits(key, value)


def test_a_number_of_a_file_is_refused_like_a_typed_one(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\noptimizer:\n  learning_rate: 1e38\n"
    )
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    composed = compose(["experiment=mine"])
    (problem,) = validated(composed)[1].problems
    assert problem.startswith("optimizer.learning_rate: 1e+38 in ")
    assert "mine.yaml needs a number from 1e-12 to 100000 (got 1e+38). " in problem
    assert problem.endswith(" Use optimizer: {learning_rate: 0.001}.")


def test_a_refusal_of_a_saved_number_suggests_the_default_of_the_saved_options():
    values = plain_config(compose(["aggregation=constant", "loss=grpo"]).config)
    values["loss"]["epsilon_low"] = 7.0
    values["aggregation"]["divisor"] = 1e300
    problems: dict[str, str] = {}
    in_range(typed(values, "config.yaml"), problems, {})
    divisor, epsilon = sorted(problems.values())
    assert divisor.endswith("Use aggregation.divisor=7.")
    assert epsilon.endswith("Use loss.epsilon_low=0.2.")
