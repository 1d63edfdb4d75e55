"""The configuration of a run that is continued: as it was saved, changed by overrides under the same checks."""

from __future__ import annotations

import os
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import override_problems
from pgtoolkit.config.compose import FREE_FORM, Composed, apply, compose_choices, parse, register
from pgtoolkit.config.files import options
from pgtoolkit.config.paths import DATA, absolute, make_absolute
from pgtoolkit.config.rules import credentials, executed
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.runs.files import read_data, read_resolved

_SHAPE = ("", ".num_layers", ".hidden_size", ".max_positions", ".num_heads", ".path", ".random_weights")
_BATCH = "the position in the data is counted in batches of this size"
FIXED = {
    **{f"model{key}": "the checkpoint holds the weights of this model" for key in _SHAPE},
    "seed": "prompts and the order of the data come from this seed",
    "task": "the position in the data belongs to this task",
    "rollout": "the position in the data belongs to this source",
    "rollout.path": "the position in the data belongs to these files",
    "rollout.shuffle": "the position in the data belongs to this order",
    "rollout.prompts_per_batch": _BATCH,
    "rollout.group_size": _BATCH,
    "experiment": "an experiment is chosen when a run starts",
    "debug": "a debugging run is chosen when a run starts",
}
"""What a checkpoint cannot be continued without, and why; with a task, all of its keys."""

LATER = {
    "parallelism": {"shard": False, "timeout_seconds": 300},
    "tracking": {"system_metrics": False},
    "trainer": {"accept_changed_data": False},
}
"""Keys that older runs were saved without, with the values that continue them as they were."""


def compose_resumed(run_dir: Path, overrides: list[str]) -> Composed:
    """The configuration saved in run_dir with `overrides`, and their problems; ConfigError if it cannot be read."""
    register()
    groups, config = options(), typed(_saved(run_dir), f"{run_dir}/config.yaml")
    make_absolute(config)  # as older runs did not
    config.trainer.accept_changed_data = False
    movable = set(read_data(run_dir))  # keys whose contents are known, so that they may lie elsewhere now
    parsed, problems = parse(overrides)
    problems += override_problems.given_twice(parsed)
    for override in parsed:
        key = override.key_or_group
        if problem := override_problems.wrong_form(override, groups) or _fixed(config, override, movable):
            problems.append(problem)
        elif key in groups and not isinstance(override.value(), dict):
            if problem := override_problems.unknown_option(override, groups[key]):
                problems.append(problem)
            else:
                config[key] = compose_choices([override.input_line])[key]
        else:
            problems += apply(config, key, override.value(), groups)
    make_absolute(config)
    problems += executed.functions(config, parsed)
    problems += credentials.of_configuration(config, executed.words_of(parsed))
    return Composed(config, problems)


def _saved(run_dir: Path) -> dict:
    file = run_dir / "config.yaml"
    if not os.path.lexists(file):
        got = "no such directory" if not run_dir.is_dir() else "a directory without config.yaml"
        raise ConfigError(
            f"pgtk resume {run_dir} needs a run directory (got {got}). A run writes its configuration there when it "
            "starts. Use a directory below outputs/."
        )
    return read_resolved(run_dir)


def typed(saved: dict, file: str) -> DictConfig:
    """The values saved in a file, in the schema of their options, so that overrides are checked as at the start."""
    config = OmegaConf.structured(Config)
    try:
        for group in {schema.partition("/")[0] for schema in SCHEMAS if "/" in schema}:
            config[group] = OmegaConf.structured(SCHEMAS[f"{group}/{saved[group]['name']}"])
        OmegaConf.set_struct(config, True)
        for key, option in FREE_FORM.items():
            if saved[key.partition(".")[0]]["name"] == option:
                OmegaConf.update(config, key, {})
                OmegaConf.set_struct(OmegaConf.select(config, key), False)
        return OmegaConf.merge(config, LATER, saved)
    except (KeyError, TypeError, OmegaConfBaseException) as error:
        reason = first_line(error) if isinstance(error, OmegaConfBaseException) else f"it has no {error}"
        raise ConfigError(
            f"{file} does not fit this version of pgtoolkit: {reason}. Use the version that "
            "provenance.json names, or start a new run."
        ) from error


def _fixed(config: DictConfig, override: Override, movable: set[str]) -> str | None:
    key, value = override.key_or_group, override.value()
    if key in DATA and isinstance(value, str):
        value = absolute(key, value)
    why = FIXED.get("task" if key.startswith("task.") else key)
    if why is None or key in movable or value == OmegaConf.select(config, key):
        return None
    if isinstance(value, str) and value == OmegaConf.select(config, f"{key}.name"):
        return None
    before = OmegaConf.select(config, f"{key}.name", default=OmegaConf.select(config, key, default="none"))
    reason = f"A run is continued as it was: {why}."
    return (
        f"{override.input_line} needs to stay as the run began (got {value!r}, was {before}). {reason} Use a new run."
    )
