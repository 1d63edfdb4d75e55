"""conf/: its defaults, each key with a value and one comment, and experiments that can change everything."""

import re

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from pgtoolkit.config.compose import _compose_cached, compose
from pgtoolkit.config.files import config_directory, default_options, options
from pgtoolkit.config.keys import KEYS, _files, values_of
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.launch.check import check
from pgtoolkit.system.report import Report


def test_the_default_is_the_main_job():
    config = compose([]).config
    assert (config.loss.name, config.loss.epsilon_low, config.loss.epsilon_high) == ("gspo", 3e-4, 4e-4)
    assert config.rollout.prompts_per_batch * config.rollout.group_size == 32 * 8
    assert config.accumulation.docs_per_step == 64
    assert (config.optimizer.learning_rate, config.optimizer.beta2, config.optimizer.warmup_steps) == (1e-3, 0.95, 10)
    assert (config.advantage.estimator, config.task.num_digits, config.trainer.max_steps) == ("dr_grpo", 6, 300)
    assert resolve_and_validate(config)[1].problems == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_steps=3"],
        ["loss.epsilon_high=0.28", "experiment=dapo", "seed=1", "tracking=none"],
        ["debug=short", "loss=grpo", "loss.epsilon_high=${loss.epsilon_low}", "hydra.output_subdir=.hydra"],
    ],
)
def test_what_is_checked_and_run_is_what_hydra_composes(overrides):
    _compose_cached.cache_clear()  # which keeps the current directory of its first caller
    checked = check(overrides).runs[0].config
    with hydra.initialize_config_dir(str(config_directory()), version_base="1.3"):
        composed = hydra.compose("config", overrides, return_hydra_config=True)
    assert OmegaConf.to_container(checked) == OmegaConf.to_container(composed)


def test_defaults_depend_on_whether_the_model_was_trained_before():
    def chosen(*overrides):
        config = compose(list(overrides)).config
        lengths = (config.rollout.max_completion_length, config.accumulation.max_tokens)
        return config.optimizer.learning_rate, *lengths

    downloaded = ["model=huggingface", "model.path=hub/name"]
    assert chosen() == (1e-3, 7, 512)
    assert chosen(*downloaded) == (1e-6, 256, 4096)
    assert chosen(*downloaded, "model.random_weights=true") == (1e-3, 7, 512)
    assert chosen(*downloaded, "optimizer.learning_rate=3e-5", "accumulation=fixed") == (3e-5, 256, 4096)
    assert chosen(*downloaded, "debug=short") == (1e-6, 256, 1024)
    for overrides, divisor in ((downloaded, 256), ([], 7), (["rollout.max_completion_length=9"], 9)):
        assert compose([*overrides, "loss=gspo", "aggregation=constant"]).config.aggregation.divisor == divisor
    for overrides in (downloaded, [*downloaded, "debug=short"]):
        assert resolve_and_validate(compose(overrides).config)[1] == Report()


def test_an_older_run_is_continued_at_its_own_rate(tmp_path):
    old = plain_config(compose(["model=huggingface", "model.path=hub/name", "optimizer.learning_rate=1e-3"]).config)
    OmegaConf.save(OmegaConf.create(old), tmp_path / "config.yaml")
    assert compose([], run_dir=tmp_path).config.optimizer.learning_rate == 1e-3
    assert compose(["optimizer=adamw"], run_dir=tmp_path).config.optimizer.learning_rate == 1e-6


GROUPS = {group: names for group, names in options().items() if group not in ("experiment", "debug")}


def test_an_experiment_can_change_every_top_level_key(tmp_path):
    mine = tmp_path / "experiment" / "mine.yaml"
    other = {
        group: next(option for option in names if option != default_options()[group])
        for group, names in options().items()
        if len(names) > 1 and group in default_options()
    }
    single = {"parallelism": "data_parallel", "optimizer": "warmup_steps", "trainer": "max_steps"}
    single |= {"entropy": "coefficient", "evaluation": "every"}
    assert {*other, *single, "seed"} == set(Config.__dataclass_fields__)
    body = {"defaults": [{f"override /{group}": option} for group, option in other.items()], "seed": 17}
    body |= {group: {key: 17} for group, key in single.items()}
    mine.parent.mkdir()
    mine.write_text("# @package _global_\n" + yaml.safe_dump(body, sort_keys=False))

    composed = compose(["experiment=mine"], tmp_path)
    assert composed.problems == []
    config = composed.config
    choices = config.hydra.runtime.choices
    assert {group: choices[group] for group in other} == other
    assert [config[group][key] for group, key in single.items()] == [17] * len(single)
    assert config.seed == 17
    assert compose(["experiment=mine", "seed=3"], tmp_path).config.seed == 3


def test_an_option_gives_each_key_of_its_schema_a_value():
    for group, option in [(group, option) for group, names in GROUPS.items() for option in names]:
        schema = group if group in SCHEMAS else f"{group}/{option}"
        assert set(values_of(group, option)) - {"defaults"} == {key.leaf for key in KEYS if key.schema == schema}


def test_a_comment_stands_once_for_each_key():
    for key in KEYS:
        group, _, option = key.schema.partition("/")
        files = sorted((config_directory() / group).glob("*.yaml")) if group in SCHEMAS else _files(group, option)
        files = files if group else [config_directory() / "config.yaml"]
        commented = [file for file in files if re.search(rf"^#.*\n{key.leaf}:", file.read_text(), re.MULTILINE)]
        assert len(commented) == (not key.option), (key.name, commented)
