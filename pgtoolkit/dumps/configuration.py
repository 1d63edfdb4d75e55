"""The configuration of a command that looks at recorded rollouts: what was typed, on the defaults."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf, open_dict

from pgtoolkit.config.compose import compose
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validate
from pgtoolkit.errors import ConfigError


def configured(path: str, overrides: Sequence[str]) -> Config:
    """As `pgtk rollout=recorded rollout.path=PATH OVERRIDES` would train; ConfigError with all problems."""
    composed = compose([*reading(path), *overrides])
    problems = list(composed.problems)
    if composed.config is not None:
        problems += validate(composed.config).problems
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    with open_dict(composed.config):
        composed.config.pop("hydra", None)
    return OmegaConf.to_object(composed.config)


def reading(path: str) -> tuple[str, str]:
    """The overrides that read recorded rollouts from a path, whatever characters it has."""
    quoted = path.replace("\\", "\\\\").replace("'", "\\'")
    return "rollout=recorded", f"rollout.path='{quoted}'"
