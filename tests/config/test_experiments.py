"""Every file in conf/experiment and conf/debug: its header is its command, and the run it describes takes a step."""

import json
import math
import re
import shlex

import pytest
import torch
import yaml
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import checkpoint_of, config_of
from omegaconf import OmegaConf, open_dict

from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import config_directory
from pgtoolkit.config.validate import validate
from pgtoolkit.training.train import train

FILES = {
    file.stem: file for folder in ("experiment", "debug") for file in sorted((config_directory() / folder).glob("*"))
}
CHOSEN = {
    "cispo": ("cispo", "token_mean"),
    "dppo": ("dppo", "token_mean"),
    "kimi": ("kimi", "token_mean"),
    "reinforce": ("reinforce", "constant"),
    "sft": ("reinforce", "token_mean"),
    "vespo": ("vespo", "token_mean"),
    "dapo": ("grpo", "token_mean"),
    "dr_grpo": ("grpo", "constant"),
    "gmpo": ("gmpo", "sample_mean"),
    "grpo": ("grpo", "sample_mean"),
    "gspo_paper": ("gspo", "sample_mean"),
    "icepop": ("grpo", "sample_mean"),
    "luspo": ("gspo", "constant"),
    "prompt_mean": ("grpo", "prompt_mean"),
    "rloo": ("grpo", "constant"),
    "sapo": ("sapo", "sample_mean"),
    "on_policy": ("gspo", "sample_mean"),
    "short": ("gspo", "sample_mean"),
}
SMALL = (
    "tracking=none",
    "trainer.max_steps=1",
    "rollout.prompts_per_batch=3",
    "rollout.group_size=4",
    "rollout.max_completion_length=4",
    "task.num_digits=3",
    "model.hidden_size=16",
    "model.num_layers=1",
    "optimizer.warmup_steps=0",
)


def command_of(name: str) -> list[str]:
    """The overrides of the command in the second line of the file."""
    program, *overrides = shlex.split(FILES[name].read_text().splitlines()[1].removeprefix("#"))
    assert program == "pgtk"
    return overrides


def plain(overrides: list[str]) -> dict:
    """What the overrides compose to, every value resolved."""
    composed = compose(overrides)
    assert composed.problems == []
    with open_dict(composed.config):
        del composed.config["hydra"]
    return OmegaConf.to_container(composed.config, resolve=True, enum_to_str=True)


def written_out(file) -> list[str]:
    """The overrides that a person without the file would have to type: its options, then its single keys."""
    body = yaml.safe_load(file.read_text())
    options = [entry.popitem() for entry in body.pop("defaults")]
    assert all(re.fullmatch(r"override /\w+", group) for group, _ in options)
    single = [f"{group}.{key}={value}" for group, keys in body.items() for key, value in keys.items()]
    return [f"{group.removeprefix('override /')}={option}" for group, option in options] + single


def test_the_table_above_names_every_file():
    assert CHOSEN.keys() == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_the_command_of_the_header_is_the_file_and_nothing_else(name):
    assert plain(command_of(name)) == plain(written_out(FILES[name])) != plain([])


@pytest.mark.parametrize("name", FILES)
def test_it_takes_a_step(name, tmp_path):
    overrides = [*command_of(name), *SMALL]
    if name == "sft":
        row = good_row(token_ids=[4, 3, 2, 1, 0], reward=..., old_log_probs=..., group_id=...)
        rows = write_jsonl(tmp_path / "rollouts.jsonl", [row] * 12)
        overrides = [one for one in overrides if not one.startswith("rollout.")] + [f"rollout.path={rows}"]
    config = config_of(*overrides)
    assert validate(config).problems == []
    train(config, tmp_path, overrides=overrides)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["num_documents"] == min(12, config.accumulation.docs_per_step)
    assert {"loss", "grad_norm", "new_logprobs"} <= row.keys()
    assert ("ratio_new_old" in row) == ("reward" in row) == (name != "sft")
    assert all(math.isfinite(value) for value in row.values()), row
    assert ("entropy" in row) is (name == "on_policy")
    assert row.get("ratio_new_old", 1) == pytest.approx(1, abs=1e-6)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (saved["loss"]["name"], saved["aggregation"]["mode"]) == CHOSEN[name]
    assert all(torch.isfinite(weight).all() for weight in checkpoint_of(tmp_path, 1)["model"].values())
