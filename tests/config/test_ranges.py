"""Every number of the configuration has a range: both ends are taken, what lies beyond is refused."""

import math

import pytest

from pgtoolkit.config.compose import compose, compose_choices
from pgtoolkit.config.keys import KEYS, describe, fits
from pgtoolkit.config.saved import typed
from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.config.validate import validate

NEEDED = {"rollout/recorded": ["rollout.path=pyproject.toml"], "aggregation": ["aggregation=constant"]}
"""What an option needs besides, for a number of it to be looked at."""


NUMBERS = [key for key in KEYS if key.type.startswith(("int", "float"))]


def choice(key):
    """The overrides that choose the option of a key."""
    chosen = [key.schema.replace("/", "=")] if "/" in key.schema else []
    return chosen + NEEDED.get(key.schema, [])


def refused(chosen, key, value):
    """The problems of one key with this value."""
    composed = compose([*chosen, f"{key}={value}"])
    return [one for one in composed.problems + validate(composed.config).problems if one.startswith(f"{key}=")]


def test_every_number_has_a_range():
    assert len(NUMBERS) >= 40
    for key in NUMBERS:
        least, most = key.range
        assert math.isfinite(least), key
        assert math.isfinite(most), key
        assert least < most, key


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: f"{key.schema}.{key.leaf}")
def test_both_ends_are_taken_and_beyond_is_refused(key):
    chosen, (least, most) = choice(key), key.range
    for value in (least, most):
        assert not any(describe(key) in one for one in refused(chosen, key.name, value))
    whole = key.type.startswith("int")
    beyond = (least - 1, most + 1) if whole else (least * 0.99 or -1e-9, most * 1.01)
    for value in beyond:
        (problem,) = refused(chosen, key.name, value)
        assert f"needs {describe(key)} (got " in problem
        assert f" Use {key.name}=" in problem
        assert "\n" not in problem
    for value in (10**400, math.nan, math.inf, -math.inf, 1e308, True, "1", [], {}):
        assert not fits(key, value)


def test_what_made_no_sense_is_refused():
    found = [
        *refused([], "optimizer.learning_rate", "1e38"),
        *refused([], "rollout.temperature", "1e-30"),
        *refused(["loss=grpo"], "loss.epsilon_high", "1e308"),
        *refused([], "optimizer.epsilon", "1e30"),
        *refused([], "optimizer.max_grad_norm", "1e-300"),
        *refused([], "trainer.num_threads", "100000"),
        *refused([], "parallelism.timeout_seconds", "1e20"),
        *refused([], "accumulation.docs_per_step", "-1"),
        *refused([], "optimizer.weight_decay", "nan"),
        *refused([], "optimizer.beta1", -(10**400)),
    ]
    parts = [(one.partition(" needs ")[0], one.partition(" needs ")[2].partition(" (got ")[0]) for one in found]
    assert parts == [
        ("optimizer.learning_rate=1e+38", "a number from 1e-12 to 100000"),
        ("rollout.temperature=1e-30", "a number from 0.01 to 100"),
        ("loss.epsilon_high=1e+308", "a number from 1e-09 to 1000000000"),
        ("optimizer.epsilon=1e+30", "a number from 1e-30 to 10000"),
        ("optimizer.max_grad_norm=1e-300", "a number from 1e-06 to 1000000000 or null"),
        ("trainer.num_threads=100000", "a whole number from 1 to 1024 or null"),
        ("parallelism.timeout_seconds=1e+20", "a whole number from 1 to 604800"),
        ("accumulation.docs_per_step=-1", "a whole number from 0 to 1000000"),
        ("optimizer.weight_decay=nan", "a number from 0 to 10"),
        ("optimizer.beta1=-inf", "a number from 0 to 0.999999"),
    ]
    mends = [one.rpartition(" Use ")[2] for one in found]
    assert mends[0] == "optimizer.learning_rate=0.001."
    assert mends[2] == "loss.epsilon_high=0.2."
    assert mends[5:8] == [
        "trainer.num_threads=1.",
        "parallelism.timeout_seconds=300.",
        "accumulation.docs_per_step=64.",
    ]


def test_a_dictionary_without_keys_is_refused_for_every_key():
    config = compose_choices([])
    keys = [f"{group}.{key}" for group in SCHEMAS if group in config for key in config[group]] + ["seed", *config]
    for key in sorted(set(keys) - {"hydra", "evaluation.sets"}):  # the latter is one, and may be empty
        assert refused([], key, "{}") != [], key


def test_a_number_of_a_file_is_refused_like_a_typed_one(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptimizer:\n  learning_rate: 1e38\n")
    composed = compose(["experiment=mine"], tmp_path)
    (problem,) = composed.problems + validate(composed.config).problems
    assert problem.startswith("optimizer.learning_rate=1e+38 needs a number from 1e-12 to 100000 (got 1e+38). ")
    assert problem.endswith(" Use optimizer.learning_rate=0.001.")


def test_a_resumed_run_knows_the_defaults_without_the_choices():
    config = compose(["aggregation=constant", "loss=grpo"]).config
    values = {group: config[group] for group in config if group != "hydra"}
    resumed = typed(values, "config.yaml")
    resumed.loss.epsilon_low = 7.0
    resumed.aggregation.divisor = 1e300
    divisor, epsilon = sorted(validate(resumed).problems)
    assert divisor.endswith("Use aggregation.divisor=7.")
    assert epsilon.endswith("Use loss.epsilon_low=0.2.")
