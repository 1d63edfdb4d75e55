"""Processes that torchrun or srun started: what those other than rank 0 do, and how a refusal of rank 0 ends them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.ranks.environment import joined

if TYPE_CHECKING:
    from omegaconf import DictConfig


def follow(overrides: list[str], config_dir: str | None) -> int:
    """A rank other than 0: the same run, whose directory rank 0 chooses."""
    from pgtoolkit.launch.processes import launch

    if (config := _seen_by_all(overrides, config_dir)) is None:
        return ConfigError.exit_status  # rank 0 says why
    launch(config, Path(), overrides=overrides)
    return 0


def told(error: PgtoolkitError, overrides: list[str], config_dir: str | None, starts: bool = True) -> PgtoolkitError:
    """The error, once ranks that have not met it, and wait for rank 0, have ended with it.

    starts: False where none of them waits.
    """
    if starts and joined() is not None and (config := _seen_by_all(overrides, config_dir)) is not None:
        from pgtoolkit.launch.processes import launch

        with contextlib.suppress(PgtoolkitError):
            launch(config, Path(), refused=error)
    return error


def _seen_by_all(overrides: list[str], config_dir: str | None) -> DictConfig | None:
    """The configuration as each of the ranks composes it; None if it has problems that each of them sees."""
    from omegaconf import open_dict

    from pgtoolkit.config.compose import compose
    from pgtoolkit.config.paths import make_absolute
    from pgtoolkit.config.validate import validate

    composed = compose(overrides, config_dir)
    if composed.problems or validate(composed.config).problems:
        return None
    with open_dict(composed.config):
        composed.config.pop("hydra")
    make_absolute(composed.config)
    return composed.config
