"""Every number of the configuration has a range: both ends are accepted, and values beyond it are
refused with a value that is accepted."""

import itertools
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


NUMBERS = {
    schema: [*keys]
    for schema, keys in itertools.groupby(
        sorted(
            (key for key in KEYS if key.type.startswith(("int", "float"))),
            key=lambda key: key.schema,
        ),
        key=lambda key: key.schema,
    )
}
"""The keys of each option, or of each group that has none, whose values are numbers."""


def problems_of(values: dict[Key, float | str]) -> dict[Key, list[str]]:
    """Return the problems of each key, where these keys of an option have these values at once."""
    schema = next(iter(values)).schema
    option = [schema.replace("/", "=")] if "/" in schema else []
    typed = [f"{key.name}={value}" for key, value in values.items()]
    composed = compose([*option, *NEEDED.get(schema, []), *typed])
    problems = validated(composed)[1].problems
    return {
        key: [problem for problem in problems if problem.startswith(f"{key.name}=")]
        for key in values
    }


def outside(values: dict[Key, float | str]) -> list[str]:
    """Return the keys for which a problem says that the value is outside of the range."""
    return [
        key.name
        for key, problems in problems_of(values).items()
        if any(values_in_words(key) in problem for problem in problems)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("keys", NUMBERS.values(), ids=NUMBERS)
def test_both_ends_of_a_range_are_accepted_and_values_beyond_it_refused(keys):
    below = {}
    above = {}
    for key in keys:
        least, greatest = key.range
        assert -math.inf < least < greatest < math.inf
        is_whole = key.type.startswith("int")
        below[key] = least - 1 if is_whole else least - (abs(least) / 100 or 1e-9)
        above[key] = greatest + 1 if is_whole else greatest + (abs(greatest) / 100 or 1e-9)
        for value in (10**400, math.nan, math.inf, -math.inf, 1e308, True, "1", [], {}):
            assert not fits(key, value)
    assert outside({key: key.range[0] for key in keys}) == []
    assert outside({key: key.range[1] for key in keys}) == []
    for values in (below, above):
        suggested = {}
        for key, problems in problems_of(values).items():
            (problem,) = problems
            assert f"needs {values_in_words(key)} (got " in problem
            suggested[key] = re.search(rf" Use {key.name}=([^ \n]*)\.$", problem)[1]
        assert outside(suggested) == []


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
