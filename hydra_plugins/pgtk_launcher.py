"""Hydra's way in to the launcher of sweeps: Hydra takes plug-ins only from the package `hydra_plugins`.

Hydra runs this file before it is known as a module, so that annotations cannot be put off to later here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LocalLauncherConfig:
    _target_: str
    n_jobs: int
    fail_fast: bool


ConfigStore.instance().store(group="hydra/launcher", name="local_schema", node=LocalLauncherConfig, provider="pgtk")


class LocalLauncher(Launcher):
    """Every job in a fresh process on this machine; see `pgtoolkit.launch.jobs`."""

    def __init__(self, n_jobs: int, fail_fast: bool):
        self._n_jobs = n_jobs
        self._fail_fast = fail_fast
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: Any) -> None:
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from pgtoolkit.launch.jobs import launch

        load = self._context.config_loader.load_sweep_config
        configs = [load(self._config, list(overrides)) for overrides in job_overrides]
        return launch(self._config, configs, initial_job_idx, self._n_jobs, self._fail_fast)
