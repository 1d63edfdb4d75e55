"""Every number of the configuration has a range: both ends are taken, what lies beyond is
refused."""

import math
import re

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.keys import KEYS, fits, values_in_words
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.resolve import in_range
from pgtoolkit.config.saved import typed
from pgtoolkit.config.validate import validated

NEEDED = {
    "rollout/recorded": ["rollout.path=pyproject.toml"],
    "aggregation": ["aggregation=constant"],
}
NEEDED |= {
    f"task/{name}": ["rollout.max_completion_length=66"]
    for name in ("chain_sum", "shortest_path", "guess")
}
"""What an option needs besides, for a number of it to be looked at."""


NUMBERS = [key for key in KEYS if key.type.startswith(("int", "float"))]


def choice(key):
    """The overrides that choose the option of a key."""
    chosen = [key.schema.replace("/", "=")] if "/" in key.schema else []
    return chosen + NEEDED.get(key.schema, [])


def refused(chosen, key, value):
    """The problems of one key with this value."""
    composed = compose([*chosen, f"{key}={value}"])
    return [one for one in validated(composed)[1].problems if one.startswith(f"{key}=")]


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: f"{key.schema}.{key.leaf}")
def test_both_ends_are_taken_and_beyond_is_refused(key):
    chosen, (least, most) = choice(key), key.range
    assert -math.inf < least < most < math.inf
    for value in (least, most):
        assert not any(values_in_words(key) in one for one in refused(chosen, key.name, value))
    whole = key.type.startswith("int")
    beyond = (least - 1, most + 1) if whole else (least - abs(least) / 100 or -1e-9, most * 1.01)
    for value in beyond:
        (problem,) = refused(chosen, key.name, value)
        assert f"needs {values_in_words(key)} (got " in problem
    use = re.search(rf" Use {key.name}=([^ \n]*)\.$", problem)[1]
    assert not any(values_in_words(key) in one for one in refused(chosen, key.name, use))
    for value in (10**400, math.nan, math.inf, -math.inf, 1e308, True, "1", [], {}):
        assert not fits(key, value)


def test_a_number_of_a_file_is_refused_like_a_typed_one(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\noptimizer:\n  learning_rate: 1e38\n"
    )
    composed = compose(["experiment=mine"], tmp_path)
    (problem,) = validated(composed)[1].problems
    assert problem.startswith(
        "optimizer.learning_rate=1e+38 needs a number from 1e-12 to 100000 (got 1e+38). "
    )
    assert problem.endswith(" Use optimizer.learning_rate=0.001.")


def test_a_resumed_run_knows_the_defaults_without_the_choices():
    values = plain_config(compose(["aggregation=constant", "loss=grpo"]).config)
    values["loss"]["epsilon_low"] = 7.0
    values["aggregation"]["divisor"] = 1e300
    problems: dict[str, str] = {}
    in_range(typed(values, "config.yaml"), problems, {})
    divisor, epsilon = sorted(problems.values())
    assert divisor.endswith("Use aggregation.divisor=7.")
    assert epsilon.endswith("Use loss.epsilon_low=0.2.")
