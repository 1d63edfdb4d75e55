"""The table of keys: digest, comparison, resume, absolute paths and what a file may name follow
each declaration."""

import copy
import functools
from pathlib import Path

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.key import holds, parts, singles, value_of
from pgtoolkit.config.keys import KEYS, evaluated_keys, ignored
from pgtoolkit.config.names import changed, digest, plain_config
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.rules.executed import named_commands, named_functions
from pgtoolkit.config.saved import cannot_change, typed
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import AggregationMode, KLKind
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.kl import FULL_KINDS, KINDS
from pgtoolkit.system.report import Report

NEEDED = {
    "loss/custom": ["loss.path=my_module.MyFamily"],
    "model/huggingface": ["model.path=hub/name"],
    "task/reasoning_gym": ["task.dataset=chain_sum"],
    "task/prompts": ["task.path=x.jsonl"],
    "task/conversation": ["task.environment=my_module.Environment"],
    "rollout/recorded": ["rollout.path=rows.jsonl"],
}
IDS = [f"{key.schema or 'top'}.{key.leaf}" for key in KEYS]


def of_option(schema, *more):
    """The plain configuration with the option of a schema."""
    chosen = (schema.replace("/", "="),) if "/" in schema else ()
    return copy.deepcopy(composed(*chosen, *NEEDED.get(schema, ()), *more))


@functools.cache
def composed(*overrides):
    return plain_config(compose([*overrides]).config)


def other(key, value):
    """Another value of a key, which no rule looks at here."""
    if key.free:
        return {"other": {"verifier": "my_module.score"}}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["other"] if isinstance(value, list) else f"{value}-other"


def with_other(config, key):
    config = copy.deepcopy(config)
    place = config[key.group] if key.group else config
    place[key.leaf] = other(key, place[key.leaf])
    return config


LEARNS = {
    True: {
        "seed",
        "loss.epsilon_low",
        "rollout.stop",
        "rollout.lag",
        "sampler.seeded",
        "trainer.max_steps",
    },
    False: {
        "parallelism.timeout_seconds",
        "parallelism.shard",
        "evaluation.every",
        "sampler.urls",
        "tracking.uri",
    },
}


@pytest.mark.parametrize(
    "key", [key for key in KEYS if not key.option], ids=lambda key: f"{key.schema}.{key.leaf}"
)
def test_digest_and_comparison_follow_learns(key):
    config = of_option(key.schema)
    after = with_other(config, key)
    learns = key.learns
    if not isinstance(learns, bool):
        learns = holds(learns, config) or holds(learns, after)
    assert (digest(config) != digest(after)) is learns
    names = changed(config, after)
    assert bool(names) is learns
    assert all(name.startswith(key.name) for name in names)
    assert key.name not in LEARNS[not learns]


def test_the_sampler_learns_only_where_it_writes_what_is_trained():
    sampled, recorded = ([], ["rollout=recorded", "rollout.path=rows.jsonl", "evaluation.every=1"])
    for overrides, differ in ((sampled, True), (recorded, False)):
        configs = [
            plain_config(compose([*overrides, f"sampler={name}"]).config)
            for name in ("transformers", "vllm")
        ]
        assert (digest(configs[0]) != digest(configs[1])) is differ


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_a_resume_follows_fixed(key):
    more = ["rollout.lag=1"] * (key.schema != "rollout/recorded")
    config = of_option(key.schema, "evaluation.every=1", *more)
    after = with_other(config, key)
    problems = [*cannot_change(config, after, set())]
    assert [place for place, _ in problems][:1] == (
        [key.group if key.option else key.name] if key.fixed else []
    )
    assert all(
        f"A run is continued as it was: {key.fixed}. Use a new run." in problem
        for _, problem in problems
    )
    if key.fixed_if:  # where its condition does not hold
        config = of_option(key.schema)
        assert [*cannot_change(config, with_other(config, key), set())] == []


def test_files_may_lie_elsewhere_where_their_contents_are_known():
    config = of_option("rollout/recorded")
    after = copy.deepcopy(config)
    after["rollout"]["path"] = "/moved/rows.jsonl"
    assert len([*cannot_change(config, after, set())]) == 1
    assert [*cannot_change(config, after, {"rollout.path"})] == []


@pytest.mark.parametrize(
    "key",
    [key for key in KEYS if key.type.startswith("str") and not key.option],
    ids=lambda key: key.name,
)
def test_paths_follow_reads_and_writes(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").touch()
    config = of_option(key.schema)
    config[key.group][key.leaf] = "there"
    made = value_of(absolute_paths(typed(config, "config.yaml")), key.name)
    is_place = key.reads or key.writes
    assert made == (str(tmp_path / "there") if is_place else "there") or key.name == "tracking.uri"


@pytest.mark.parametrize(
    "key", [key for key in KEYS if not key.option], ids=lambda key: f"{key.schema}.{key.leaf}"
)
def test_only_keys_that_say_so_name_code(key):
    config = with_other(of_option(key.schema), key)
    kinds = {
        "function": (named_functions, "my_module.score"),
        "command": (named_commands, "my_command"),
    }
    for kind, (named_in, value) in kinds.items():
        named = {name for name in named_in(config) if name.startswith(key.name)}
        if key.type.startswith("str"):
            config[key.group][key.leaf] = value
            named = {name for name in named_in(config) if name == key.name}
        assert bool(named) is (key.code == kind)


def put(config, condition, is_met):
    """Give the key of a single condition a value with which it holds, or does not; a text does for
    every type here."""
    name, operator, expected = parts(condition)
    other = "tiny" if name == "model.name" else "other"
    value = (
        float(expected) + is_met
        if operator == ">"
        else expected
        if is_met is (operator == "=")
        else other
    )
    group, _, leaf = name.rpartition(".")
    set_in(value_of(config, group), leaf, value)


def set_in(group, leaf, value):
    """Set what is frozen, also a key of another option."""
    object.__setattr__(group, leaf, value)


OF_GROUPS = {field.metadata.get("only_if", "") for field in Config.__dataclass_fields__.values()}
OF_KEYS = [key for key in KEYS if key.only_if not in OF_GROUPS or key.name == "task.num_digits"]


@pytest.mark.parametrize("key", OF_KEYS, ids=lambda key: f"{key.schema}.{key.leaf}")
def test_a_value_without_effect_is_refused(key):
    """Another value than the usual one where a condition does not hold; where all do nothing is
    said of it."""
    chosen = (
        [key.schema.replace("/", "="), *NEEDED.get(key.schema, [])] if "/" in key.schema else []
    )
    config = compose(chosen).config
    usual, conditions = value_of(config, key.name), key.only_if.split(" or ")[0].split(" and ")

    for value in (usual, other(key, usual)):
        for lacking in (None, *conditions):
            set_in(value_of(config, key.group), key.leaf, value)
            for condition in conditions:
                put(config, condition, condition != lacking)
            report = Report(
                usual=lambda name: usual if name == key.name else value_of(config, name)
            )
            ignored(config, report)
            told = [problem for problem in report.problems if problem.startswith(f"{key.name}=")]
            assert len(told) == (value != usual and lacking is not None)
            assert all((key.why or " It has no effect while ") in problem for problem in told)


def test_what_pgtk_evaluate_takes():
    assert {"task", "sampler", "trainer.device", "evaluation.sets"} <= {*evaluated_keys("run")}
    assert {"model", "seed", "rollout.temperature", "experiment"} <= {*evaluated_keys("model")} - {
        *evaluated_keys("run")
    }
    assert not {"loss.name", "optimizer.learning_rate", "trainer.max_steps", "evaluation.every"} & {
        *evaluated_keys("model")
    }


def test_every_declaration_is_one_of_the_key_and_names_keys_that_there_are():
    names = {key.name for key in KEYS}
    for key in KEYS:
        for condition in filter(
            None, (key.fixed_if, key.only_if, key.learns if isinstance(key.learns, str) else "")
        ):
            for single in singles(condition):
                assert single.replace("!=", "=").replace(">", "=").partition("=")[0] in names
    assert len(KEYS) == len({(key.name, key.schema) for key in KEYS})


def test_options_that_are_spelled_out_for_types_are_those_of_the_losses():
    assert tuple(KLKind) == ("none", *KINDS, *FULL_KINDS)
    assert tuple(AggregationMode) == tuple(AGGREGATIONS)
