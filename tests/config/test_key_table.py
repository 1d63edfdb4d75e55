"""Digest, comparison, resume, absolute paths and the places where a file may name code follow the
declaration of each key; the tests are made from the schema."""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pgtoolkit.config.across import CHANGES, CONDITIONS, DEFAULTS
from pgtoolkit.config.compose import compose
from pgtoolkit.config.defaults import Computed
from pgtoolkit.config.keys import KEYS, evaluated_keys, ignored
from pgtoolkit.config.names import changed, digest, plain_config, retrained
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.rules.executed import named_commands, named_functions
from pgtoolkit.config.saved import cannot_change, record_of, typed
from pgtoolkit.config.schema import OPTIONS, SCHEMAS, Config
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.kl import FULL_KINDS, KINDS
from pgtoolkit.system.conditions import holds, parts, singles, value_of
from pgtoolkit.system.declared import Key
from pgtoolkit.system.report import Report
from pgtoolkit.training.loss_settings import AggregationMode, KLKind

NEEDED = {
    "loss/custom": ["loss.path=my_module.MyFamily"],
    "model/huggingface": ["model.path=hub/name"],
    "task/reasoning_gym": ["task.dataset=chain_sum"],
    "task/prompts": ["task.path=x.jsonl"],
    "task/conversation": ["task.environment=my_module.Environment"],
    "rollout/recorded": ["rollout.path=rows.jsonl"],
}
IDS = [f"{key.schema or 'top'}.{key.leaf}" for key in KEYS]


def overrides_of(schema: str) -> list[str]:
    """Return overrides that choose the option of a schema, and set the keys that it needs."""
    choice = [schema.replace("/", "=")] if "/" in schema else []
    return choice + NEEDED.get(schema, [])


def conditions_of(declared: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of a declaration."""
    for attribute in ("learns", "last_counts", "machine", "fixed_if", "only_if"):
        condition = declared.get(attribute)
        if condition and isinstance(condition, str):
            yield from singles(condition)


def test_a_part_declares_conditions_on_keys_of_its_own_group_alone():
    for name, schema in SCHEMAS.items():
        for field in fields(schema):
            keys = [parts(condition)[0] for condition in conditions_of(field.metadata)]
            groups = {key.partition(".")[0] for key in keys}
            assert groups <= {name.partition("/")[0]}, f"{name}.{field.name}"
            assert not isinstance(field.metadata.get("default"), Computed), f"{name}.{field.name}"


def test_what_holds_across_groups_holds_of_keys_that_exist():
    names = {key.name for key in KEYS} | {f"{key.schema}.{key.leaf}" for key in KEYS}
    assert {*CONDITIONS, *DEFAULTS} <= names
    assert all(name in OPTIONS[group] for group, name in (option.split("/") for option in CHANGES))
    for declared in CONDITIONS.values():
        assert {parts(condition)[0] for condition in conditions_of(declared)} <= names


def plain_of(schema: str, *more: str) -> dict[str, Any]:
    """Return the plain configuration with the option of a schema."""
    return copy.deepcopy(composed(*overrides_of(schema), *more))


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    return plain_config(compose([*overrides]).config)


def other_value(key: Key, value: Any) -> Any:
    """Return another value of a key; no rule sees it here."""
    if key.free:
        return {"other": {"verifier": "my_module.score"}}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["other"] if isinstance(value, list) else f"{value}-other"


def with_other_value(config: dict[str, Any], key: Key) -> dict[str, Any]:
    """Return the configuration with another value of a key."""
    config = copy.deepcopy(config)
    group = config[key.group] if key.group else config
    group[key.leaf] = other_value(key, group[key.leaf])
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
def test_a_key_changes_digest_and_comparison_exactly_if_it_changes_learning(key):
    config = plain_of(key.schema)
    after = with_other_value(config, key)
    learns = key.learns
    if not isinstance(learns, bool):
        learns = holds(learns, config) or holds(learns, after)
    assert (digest(config) != digest(after)) is learns
    names = changed(config, after)
    assert bool(names) is learns
    assert all(name.startswith(key.name) for name in names)
    assert key.name not in LEARNS[not learns]


def test_every_key_declares_what_it_changes_of_a_measured_number():
    """A new key has to say it: for one that changes only what is learned, `Alters.nothing`."""
    assert [key.name for key in KEYS if key.alters is None] == []


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        ([], True),
        (["rollout=recorded", "rollout.path=rows.jsonl", "evaluation.every=1"], False),
    ],
)
def test_the_sampler_changes_the_digest_unless_it_writes_for_evaluation_alone(overrides, differs):
    transformers = plain_config(compose([*overrides, "sampler=transformers"]).config)
    vllm = plain_config(compose([*overrides, "sampler=vllm"]).config)
    assert (digest(transformers) != digest(vllm)) is differs


@pytest.mark.parametrize("key", [key for key in KEYS if key.fixed and key.added])
def test_a_checkpoint_older_than_a_fixed_key_means_its_default(key):
    config = plain_of(key.schema)
    record = {name: value for name, value in record_of(config).items() if name != key.name}
    assert [*cannot_change(record, config, set())] == []


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_a_resume_refuses_another_value_exactly_if_the_key_is_fixed(key):
    more = ["rollout.lag=1"] * (key.schema != "rollout/recorded")
    more += ["kl=k3", "kl.target=1"] * (key.group == "kl")
    config = plain_of(key.schema, "evaluation.every=1", *more)
    after = with_other_value(config, key)
    problems = [*cannot_change(config, after, set())]
    assert [place for place, _ in problems][:1] == (
        [key.group if key.option else key.name] if key.fixed else []
    )
    assert all(
        f"A run is continued as it was: {key.fixed}. Use a new run." in problem
        for _, problem in problems
    )
    if key.fixed_if:  # it may change while its condition does not hold
        config = plain_of(key.schema)
        assert [*cannot_change(config, with_other_value(config, key), set())] == []


def test_a_resume_accepts_another_path_if_the_contents_are_known_to_be_the_same():
    config = plain_of("rollout/recorded")
    after = copy.deepcopy(config)
    after["rollout"]["path"] = "/moved/rows.jsonl"
    assert len([*cannot_change(config, after, set())]) == 1
    assert [*cannot_change(config, after, {"rollout.path"})] == []


@pytest.mark.parametrize(
    "key",
    [key for key in KEYS if key.type.startswith("str") and not key.option],
    ids=lambda key: key.name,
)
def test_a_path_is_made_absolute_exactly_if_the_key_reads_or_writes_it(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").touch()
    config = plain_of(key.schema)
    config[key.group][key.leaf] = "there"
    made = value_of(absolute_paths(typed(config, "config.yaml")), key.name)
    is_place = key.reads or key.writes
    assert made == (str(tmp_path / "there") if is_place else "there") or key.name == "tracking.uri"


@pytest.mark.parametrize(
    "key", [key for key in KEYS if not key.option], ids=lambda key: f"{key.schema}.{key.leaf}"
)
def test_a_key_names_code_exactly_if_its_declaration_says_so(key):
    config = with_other_value(plain_of(key.schema), key)
    kinds = {
        "function": (named_functions, "my_module.score"),
        "command": (named_commands, "my_command"),
    }
    for kind, (named_in, value) in kinds.items():
        named = {name for name in named_in(config) if name.startswith(key.name)}
        if key.type.startswith("str"):
            config[key.group][key.leaf] = value
            named = {name for name in named_in(config) if name == key.name}
        elif key.gathers and kind == "function":
            config[key.group][key.leaf] = {"mine": {"path": value}}
            named = named_in(config).keys() & {f"{key.name}.mine.path"}
        assert bool(named) is (key.code == kind)


def set_condition(config: Config, condition: str, is_met: bool) -> None:
    """Give the key of a single condition a value with which it holds, or does not. Its type may be
    wrong, which no rule sees here."""
    name, operator, expected = parts(condition)
    if operator == ">":
        value = float(expected) + is_met
    elif is_met is (operator == "="):
        value = expected
    else:
        value = "tiny" if name == "model.name" else "other"
    group, _, leaf = name.rpartition(".")
    set_frozen(value_of(config, group), leaf, value)


def set_frozen(group: object, leaf: str, value: Any) -> None:
    """Set a field of a frozen dataclass, or add one of another option."""
    object.__setattr__(group, leaf, value)


OF_GROUPS = {field.metadata.get("only_if", "") for field in Config.__dataclass_fields__.values()}
OF_KEYS = [key for key in KEYS if key.only_if not in OF_GROUPS or key.name == "task.num_digits"]


@pytest.mark.slow
@pytest.mark.parametrize("key", OF_KEYS, ids=lambda key: f"{key.schema}.{key.leaf}")
def test_a_value_other_than_the_default_is_refused_while_a_condition_of_the_key_does_not_hold(key):
    config = compose(overrides_of(key.schema)).config
    default = value_of(config, key.name)
    conditions = key.only_if.split(" or ")[0].split(" and ")

    for value in (default, other_value(key, default)):
        for lacking in (None, *conditions):
            set_frozen(value_of(config, key.group), key.leaf, value)
            for condition in conditions:
                set_condition(config, condition, condition != lacking)
            report = Report(
                default_of=lambda name: default if name == key.name else value_of(config, name)
            )
            ignored(config, report)
            refusals = [text for text in report.problems if text.startswith(f"{key.name}=")]
            assert len(refusals) == (value != default and lacking is not None)
            assert all((key.why or " It has no effect while ") in text for text in refusals)


def test_evaluate_takes_keys_of_task_and_sampler_and_none_of_training():
    assert {"task", "sampler", "trainer.device", "evaluation.sets"} <= {*evaluated_keys("run")}
    assert {"model", "seed", "rollout.temperature", "experiment"} <= {*evaluated_keys("model")} - {
        *evaluated_keys("run")
    }
    assert not {"loss.name", "optimizer.learning_rate", "trainer.max_steps", "evaluation.every"} & {
        *evaluated_keys("model")
    }


def test_conditions_of_keys_name_keys_that_exist_and_no_key_is_declared_twice():
    names = {key.name for key in KEYS}
    for key in KEYS:
        for condition in filter(
            None, (key.fixed_if, key.only_if, key.learns if isinstance(key.learns, str) else "")
        ):
            for single in singles(condition):
                assert single.replace("!=", "=").replace(">", "=").partition("=")[0] in names
    assert len(KEYS) == len({(key.name, key.schema) for key in KEYS})


def test_enumerations_of_the_schema_are_the_kinds_of_kl_and_of_aggregation():
    assert tuple(KLKind) == ("none", *KINDS, *FULL_KINDS)
    assert tuple(AggregationMode) == tuple(AGGREGATIONS)


_RECORDED = ("rollout=recorded", "rollout.path=rows.jsonl")


@pytest.mark.parametrize(
    ("typed", "changes", "expected"),
    [
        ((), ("trainer.max_steps=9", "trainer.checkpoint_every=3", "tracking=none"), []),
        ((), ("kernel=torch", "metrics=none", "trainer.device=cpu", "model.compile=false"), []),
        ((), ("accumulation.max_tokens=64", "loss.num_splits=2"), []),
        ((), ("parallelism=ddp", "sampler.processes=1", "evaluation.every=3"), []),
        ((), ("loss=kimi",), ["loss"]),
        ((), ("loss.epsilon_low=0.1", "kl=k3"), ["loss.epsilon_low", "kl"]),
        ((), ("seed=1", "trainer.max_bad_steps=5"), ["seed"]),
        (("optimizer.schedule=cosine",), ("trainer.max_steps=9",), ["trainer.max_steps"]),
        (_RECORDED, ("rollout.epochs=2",), []),
        ((*_RECORDED, "accumulation.last_step=carry"), ("rollout.epochs=2",), ["rollout.epochs"]),
        (("accumulation=fixed",), ("accumulation.max_tokens=64",), ["accumulation.max_tokens"]),
    ],
)
def test_a_run_goes_on_with_other_values_of_keys_that_leave_its_training_as_it_is(
    typed, changes, expected
):
    assert [*retrained(composed(*typed), composed(*typed, *changes))] == expected
