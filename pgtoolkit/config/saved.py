"""A configuration that was saved before: with its types again, and what of it a resumed run cannot change."""

from __future__ import annotations

import os
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.overrides import FREE_FORM
from pgtoolkit.config.paths import DATA, absolute, make_absolute
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.runs.files import read_resolved

_SHAPE = ("num_layers", "hidden_size", "max_positions", "num_heads", "path", "random_weights")
_SHAPE += ("lora_rank", "lora_alpha", "lora_targets")
_BATCH = "the position in the data is counted in batches of this size"
_AHEAD = "the checkpoint holds batches that were sampled ahead by these numbers"
FIXED = {
    **dict.fromkeys(["model", *(f"model.{key}" for key in _SHAPE)], "the checkpoint holds the weights of this model"),
    "seed": "prompts and the order of the data come from this seed",
    "task": "the position in the data belongs to this task",
    "rollout": "the position in the data belongs to this source",
    "rollout.path": "the position in the data belongs to these files",
    "rollout.shuffle": "the position in the data belongs to this order",
    **dict.fromkeys(("rollout.prompts_per_batch", "rollout.group_size"), _BATCH),
    **dict.fromkeys(("rollout.lag", "rollout.max_staleness"), _AHEAD),
    "experiment": "an experiment is chosen when a run starts",
    "debug": "a debugging run is chosen when a run starts",
}
"""What a checkpoint cannot be continued without, and why; with a task, all of its keys."""

_SAMPLED = ("temperature", "top_p", "max_completion_length")
MEASURED = tuple(
    f"evaluation.{key}" for key in ("prompts_per_set", "completions_per_prompt", *_SAMPLED, "seed", "sets")
)
"""What must stay, too, once a run is evaluated."""

STEPS = ("accumulation", "accumulation.docs_per_step", "accumulation.last_step")
"""What must stay, too, where batches are sampled ahead: how many steps lie before one."""

HOW_SCORED = ("task.verifier_processes", "task.verifier_seconds")
"""Keys of a task that say how its verifier is run, not what it is."""

_PROMPTS = {"chat": "never", "system_prompt": None, "max_prompt_length": None}
ADDED_LATER = {
    "kl": {"kind": "none", "coefficient": None, "reference": None},
    "entropy": {"coefficient": 0.0},
    "model/huggingface": {"lora_rank": None, "lora_alpha": 32.0, "lora_targets": ["all-linear"]},
    "parallelism": {"shard": False, "timeout_seconds": 300},
    "rollout/policy": {"lag": 0, "max_staleness": None, "stop": [], "keep_completions": 0},
    "task/prompts": {"split": None, "verifiers": {}, "verifier_processes": 0, "verifier_seconds": None} | _PROMPTS,
    "task/reasoning_gym": _PROMPTS,
    "evaluation": {
        **{"every": 0, "prompts_per_set": 128, "completions_per_prompt": 4, "temperature": None, "top_p": None},
        **{"max_completion_length": None, "seed": 1_000_000_000, "sets": {}, "best": "pass@1"},
    },
    "tracking": {"system_metrics": False},
    "trainer": {"accept_changed_data": False, "stop_at": None},
}
"""Keys that older runs were saved without, by group or option, with the values that continue them as they were."""

GROUPS_ADDED_LATER = {
    "correction": {"name": "none"},
    "sampler": {"name": "transformers", "max_sequences": None, "static_cache": None},
}
"""The same for whole groups: what a saved option lacks of them belongs to another option."""


def saved_config(run_dir: Path) -> DictConfig:
    """The configuration that a run was started with. Raises ConfigError where there is none, or an unknown one."""
    if not os.path.lexists(run_dir / "config.yaml"):
        got = "no such directory" if not run_dir.is_dir() else "a directory without config.yaml"
        raise ConfigError(
            f"pgtk resume {run_dir} needs a run directory (got {got}). A run writes its configuration there when it "
            "starts. Use a directory below outputs/."
        )
    config = typed(read_resolved(run_dir), f"{run_dir}/config.yaml")
    make_absolute(config)  # as older runs did not
    config.trainer.accept_changed_data = False
    return config


def typed(values: dict, file: str) -> DictConfig:
    """The values saved in a file, in the schema of their options, so that they are checked as at the start."""
    config = OmegaConf.structured(Config)
    try:
        values = GROUPS_ADDED_LATER | values
        for group in {schema.partition("/")[0] for schema in SCHEMAS if "/" in schema}:
            config[group] = OmegaConf.structured(SCHEMAS[f"{group}/{values[group]['name']}"])
        config.evaluation = OmegaConf.structured(SCHEMAS["evaluation"])
        OmegaConf.set_struct(config, True)
        for key, option in FREE_FORM.items():
            if option is None or values[key.partition(".")[0]]["name"] == option:
                OmegaConf.update(config, key, {})
                OmegaConf.set_struct(OmegaConf.select(config, key), False)
        chosen = {f"{group}/{one.get('name')}" for group, one in values.items() if isinstance(one, dict)}
        later = [{key.partition("/")[0]: ADDED_LATER[key]} for key in ADDED_LATER if "/" not in key or key in chosen]
        return OmegaConf.merge(config, *later, values)
    except (KeyError, TypeError, OmegaConfBaseException) as error:
        reason = first_line(error) if isinstance(error, OmegaConfBaseException) else f"it has no {error}"
        raise ConfigError(
            f"{file} does not fit this version of pgtoolkit: {reason}. Use the version that "
            "provenance.json names, or start a new run."
        ) from error


def cannot_change(config: DictConfig, override: Override, movable: set[str]) -> str | None:
    """The problem with an override of what must stay as it is; movable: keys whose files may lie elsewhere now."""
    key, value = override.key_or_group, override.value()
    if isinstance(value, str) and (key in DATA or key in movable):
        value = absolute(key if key in DATA else "task.path", value)
    why = FIXED.get("task" if key.startswith("task.") and key not in HOW_SCORED else key)
    if key in STEPS and any(OmegaConf.select(config, f"rollout.{name}") for name in ("lag", "max_staleness")):
        why = _AHEAD
    if key.startswith(MEASURED) and config.evaluation.every > 0:
        why = "its evaluations so far would not compare with those to come"
    group = OmegaConf.select(config, key)
    option = group.get("name") if OmegaConf.is_dict(group) else None
    if why is None or key in movable or value == OmegaConf.select(config, key) or (option and value == option):
        return None
    before = option or OmegaConf.select(config, key, default="none")
    needs = f"needs to stay as the run began (got {value!r}, was {before})"
    return f"{override.input_line} {needs}. A run is continued as it was: {why}. Use a new run."
