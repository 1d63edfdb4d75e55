"""conf/: its defaults, written from the schema, and experiments that can change everything."""

from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum

import hydra
import pytest
import yaml
from omegaconf import DictConfig, Node, OmegaConf, open_dict

from pgtoolkit.config.api_page import api_page
from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import config_directory, options
from pgtoolkit.config.hydra_files import compose_choices, reading_as_pgtk
from pgtoolkit.config.keys import KEYS, option_values
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import PARAMETERS
from pgtoolkit.config.pages import files
from pgtoolkit.config.resolve import default_in
from pgtoolkit.config.schema import Config, default_options
from pgtoolkit.config.validate import validate, validated
from pgtoolkit.launch.check import check
from pgtoolkit.losses.corrections import CORRECTIONS, Correction
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import Family, configured
from pgtoolkit.runs.records import plain
from pgtoolkit.system.conditions import value_of
from pgtoolkit.system.declared import REQUIRED
from pgtoolkit.system.report import Report
from pgtoolkit.system.yaml_text import to_yaml

GROUPS = {
    group: names for group, names in options().items() if group not in ("experiment", "debug")
}


def test_default_configuration_is_the_main_job():
    config = compose([]).config
    expected = {
        "loss.name": "gspo",
        "loss.epsilon_low": 3e-4,
        "loss.epsilon_high": 4e-4,
        "rollout.prompts_per_batch": 32,
        "rollout.group_size": 8,
        "accumulation.docs_per_step": 64,
        "optimizer.learning_rate": 1e-3,
        "optimizer.beta2": 0.95,
        "optimizer.warmup_steps": 10,
        "advantage.estimator": "dr_grpo",
        "task.num_digits": 6,
        "trainer.max_steps": 300,
    }
    assert {key: value_of(config, key) for key in expected} == expected
    assert validate(config)[1].problems == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_steps=3"],
        ["loss.epsilon_high=0.28", "experiment=dapo", "seed=1", "tracking=none"],
        ["debug=short", "loss=grpo", "loss.epsilon_high=${loss.epsilon_low}", "hydra.run.dir=x"],
    ],
)
def test_the_configuration_that_is_checked_and_run_is_the_one_that_hydra_composes(overrides):
    checked = check(overrides)
    with hydra.initialize_config_dir(str(config_directory()), version_base="1.3"):
        composed = hydra.compose("config", overrides, return_hydra_config=True)
    assert len(checked.composed.overrides) == len(
        [override for override in overrides if not override.startswith("hydra")]
    )
    assert str(checked.directory).rpartition("-")[2] == composed.hydra.run.dir.rpartition("-")[2]
    with open_dict(composed):
        del composed["hydra"]
    assert plain_config(checked.config) == plain(OmegaConf.to_container(composed, resolve=True))


def described(node: Node, path: str = "") -> Iterator[tuple]:
    """Yield of a node and of each below it what OmegaConf knows of it."""
    known = node._metadata
    flags = [node._get_flag(flag) for flag in ("struct", "readonly", "allow_objects")]
    is_open = isinstance(node, DictConfig) and not (node._is_none() or node._is_missing())
    value = [*node] if is_open else node._content if hasattr(node, "_content") else node._value()
    yield path, str(known.ref_type), str(known.object_type), known.optional, flags, value
    if is_open:
        for name in node:
            yield from described(node._get_node(name), f"{path}.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("place", range(max(map(len, GROUPS.values()))))
def test_what_the_tests_put_together_of_options_is_what_hydra_composes(place):
    """Each option of each group is chosen once, beside others than in tests/conftest.py."""
    choices = [
        f"{group}={names[(place + number) % len(names)]}"
        for number, (group, names) in enumerate(GROUPS.items())
    ]
    together = compose_choices(choices)
    with (
        reading_as_pgtk(),
        hydra.initialize_config_dir(str(config_directory()), version_base="1.3"),
    ):
        composed = hydra.compose("config", choices, return_hydra_config=True)
    composed.hydra.runtime.cwd = together.hydra.runtime.cwd
    for group in PARAMETERS:  # open for a file's parameters of the class, which are gathered later
        OmegaConf.set_struct(composed[group], None)
    assert [*described(together)] == [*described(composed)]


DOWNLOADED = ["model=huggingface", "model.path=hub/name"]


def test_defaults_depend_on_whether_the_model_was_trained_before():
    def rate_and_lengths(*overrides: str) -> tuple[float, int, int]:
        config = compose(list(overrides)).config
        lengths = (config.rollout.max_completion_length, config.accumulation.max_tokens)
        return config.optimizer.learning_rate, *lengths

    typed = ["optimizer.learning_rate=3e-5", "accumulation=fixed"]
    assert rate_and_lengths() == (1e-3, 7, 512)
    assert rate_and_lengths(*DOWNLOADED) == (1e-6, 256, 4096)
    assert rate_and_lengths(*DOWNLOADED, "model.random_weights=true") == (1e-3, 7, 512)
    assert rate_and_lengths(*DOWNLOADED, *typed) == (3e-5, 256, 4096)
    assert rate_and_lengths(*DOWNLOADED, "debug=short") == (1e-6, 256, 1024)
    for overrides in (DOWNLOADED, [*DOWNLOADED, "debug=short"]):
        assert validated(compose(overrides))[1] == Report()


@pytest.mark.parametrize(
    ("overrides", "divisor"),
    [(DOWNLOADED, 256), ([], 7), (["rollout.max_completion_length=9"], 9)],
)
def test_the_divisor_of_constant_is_the_longest_completion(overrides, divisor):
    config = compose([*overrides, "loss=gspo", "aggregation=constant"]).config
    assert config.aggregation.divisor == divisor


def test_the_bounds_of_dppo_depend_on_its_divergence():
    def bounds(*overrides: str) -> tuple[float, float]:
        loss = compose(["loss=dppo", *overrides]).config.loss
        return loss.delta_low, loss.delta_high

    binary_kl = "loss.divergence=binary_kl"
    assert bounds() == bounds("loss.divergence=total_variation") == (0.2, 0.2)
    assert bounds(binary_kl) == (0.05, 0.05)
    assert bounds(binary_kl, "loss.delta_high=0.1") == (0.05, 0.1)
    squared = "loss.divergence=squared_log_ratio"
    assert bounds(squared, "loss.delta_high=0.1") == (None, 0.1)
    jobs = check(["loss=dppo", "loss.divergence=total_variation,binary_kl"], multirun=True).runs
    assert [job.config.loss.delta_low for job in jobs] == [0.2, 0.05]


def objects_with_defaults() -> Iterator[tuple[str, Family | Correction, dict[str, object]]]:
    """Yield (group, family or correction made in Python, the parameters that it was given): by its
    name alone, and with each name of a parameter that takes names."""
    for group, kinds in (("loss", FAMILIES), ("correction", CORRECTIONS)):
        for name, kind in kinds.items():
            yield group, kind(), {"name": name}
            for parameter in fields(kind):
                if not isinstance(parameter.default, StrEnum):
                    continue
                for value in type(parameter.default):
                    more: dict[str, object] = {parameter.name: value}
                    if value == "worst":
                        more["factor"] = "one"  # it has no factor of the document
                    if value == "squared_log_ratio":
                        more |= {"delta_low": 0.3, "delta_high": 0.4}  # it has no usual bounds
                    if value in ("k2", "k3"):
                        more["threshold"] = 0.1  # it has no usual one
                        if "factor" in {field.name for field in fields(kind)}:
                            more["factor"] = "one"
                    yield group, kind(**more), {"name": name, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "made", "typed"),
    [
        pytest.param(*case, id="-".join(map(str, case[2].values())))
        for case in objects_with_defaults()
    ],
)
def test_families_and_corrections_have_the_same_defaults_in_python(group, made, typed):
    name, *more = [f"{group}.{key}={value}" for key, value in typed.items()]
    config = compose([name.replace(".name", ""), *more]).config
    kinds = FAMILIES if group == "loss" else CORRECTIONS
    assert configured(getattr(config, group), kinds) == made


def test_a_resume_keeps_the_saved_learning_rate_unless_the_optimizer_is_typed(tmp_path):
    saved = plain_config(compose([*DOWNLOADED, "optimizer.learning_rate=1e-3"]).config)
    (tmp_path / "config.yaml").write_text(to_yaml(saved))
    assert compose([], run_dir=tmp_path).config.optimizer.learning_rate == 1e-3
    assert compose(["optimizer=adamw"], run_dir=tmp_path).config.optimizer.learning_rate == 1e-6


def test_an_experiment_can_change_every_top_level_key(tmp_path, monkeypatch):
    mine = tmp_path / "experiment" / "mine.yaml"
    other = {
        group: next(option for option in names if option != default_options()[group])
        for group, names in options().items()
        if len(names) > 1 and group in default_options()
    }
    single = {"parallelism": "data_parallel", "optimizer": "warmup_steps", "trainer": "max_steps"}
    single |= {"entropy": "coefficient", "evaluation": "every", "critic": "clip"}
    assert {*other, *single, "callbacks", "seed"} == set(Config.__dataclass_fields__)
    body = {
        "defaults": [{f"override /{group}": option} for group, option in other.items()],
        "seed": 17,
        "callbacks": {"mine": {"_target_": "mine.Callback"}},
    }
    body |= {group: {key: 17} for group, key in single.items()}
    mine.parent.mkdir()
    mine.write_text("# @package _global_\n" + yaml.safe_dump(body, sort_keys=False))

    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    composed = compose(["experiment=mine"])
    assert [problem.partition(" ")[0] for problem in composed.problems] == [
        "model.path",
        "task.environment",
        "rollout.path",
    ]
    config = composed.config
    assert config.callbacks.own == {"mine": {"path": "mine.Callback"}}
    assert {group: composed.choices[group] for group in other} == other
    assert [value_of(config, f"{group}.{key}") for group, key in single.items()] == [17] * len(
        single
    )
    assert config.seed == 17
    assert compose(["experiment=mine", "seed=3"]).config.seed == 3


def test_conf_and_tables_of_docs_are_written_from_declarations():
    texts = files()
    for file, text in texts.items():
        assert file.read_text() == text, f"{file}: python -m pgtoolkit.config.pages writes it anew"
    written = {file for file in texts if file.suffix == ".yaml"}
    by_hand = {
        file
        for group in ("experiment", "debug")
        for file in config_directory().glob(f"{group}/*.yaml")
    }
    assert written | by_hand == {
        *config_directory().glob("*.yaml"),
        *config_directory().glob("[!h]*/*.yaml"),
    }


@pytest.mark.slow
def test_an_option_gives_each_key_the_value_that_hydra_reads_from_its_file():
    """The schema's declarations, resolved by its rules, equal the files in conf/, read by
    OmegaConf."""
    for group, option in [(group, option) for group, names in GROUPS.items() for option in names]:
        config = compose_choices([f"{group}={option}"])
        declared = option_values(group, option)
        assert {*declared} == {*config[group]}
        for leaf, value in declared.items():
            if value == REQUIRED:
                assert OmegaConf.is_missing(config[group], leaf)
            else:
                assert default_in(config, f"{group}.{leaf}") == config[group][leaf], (
                    group,
                    option,
                    leaf,
                )


def test_every_key_has_a_meaning_that_is_a_sentence():
    assert [key.name for key in KEYS if not key.option and not key.help] == []
    assert all(key.help.endswith((".", ")", "]")) for key in KEYS if not key.option)


def test_the_page_of_python_shows_a_field_with_its_default_and_no_declaration():
    page = api_page()
    assert "\n    high: float = 5.0\n" in page
    assert "parameter(" not in page


def test_the_page_of_python_shows_how_a_class_is_made():
    module = api_page().partition("### pgtoolkit.training.module.PolicyGradientModule")[2]
    assert "module.PolicyGradientModule(\n    policy: Policy,\n    loss: Loss," in module
    assert "LearningRate" not in module  # a private attribute
