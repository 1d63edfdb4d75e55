"""Hydra's way in to the launchers of sweeps: Hydra takes plug-ins only from the package `hydra_plugins`.

Hydra runs this file before it is known as a module, so that annotations cannot be put off to later here.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf


@dataclass
class LocalLauncherConfig:
    _target_: str
    n_jobs: int
    jobs_per_gpu: int | None
    fail_fast: bool


ConfigStore.instance().store(group="hydra/launcher", name="local_schema", node=LocalLauncherConfig, provider="pgtk")


class _Launcher(Launcher):
    """See `pgtoolkit.launch.multirun.CheckedJobs`. settings: keys of hydra.launcher."""

    def __init__(self, fail_fast: bool, **settings: Any):
        self._fail_fast, self._settings = fail_fast, settings
        self._started = functools.cache(self._engine)  # once: a sweeper that searches launches many times

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: Any) -> None:
        self._jobs = hydra_context.config_loader

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self._jobs.run(job_overrides, initial_job_idx, self._started, self._fail_fast)


class LocalLauncher(_Launcher):
    """On this machine. settings: n_jobs, jobs_per_gpu."""

    def _engine(self):
        from pgtoolkit.launch.engines import LocalEngine

        return LocalEngine(**self._settings)


class RayLauncher(_Launcher):
    """On a Ray cluster. settings: ray, with init and remote."""

    def _engine(self):
        from pgtoolkit.launch.engines import RayEngine

        return RayEngine(**OmegaConf.to_container(OmegaConf.create(self._settings["ray"]), resolve=True))


class SlurmLauncher(_Launcher):
    """Through submitit. settings: cluster, submitit_folder, max_num_timeout, and what its executor takes."""

    def _engine(self):
        from pgtoolkit.launch.engines import SubmititEngine

        settings = OmegaConf.to_container(OmegaConf.create(self._settings), resolve=True)
        named = {name: settings.pop(name) for name in ("cluster", "submitit_folder", "max_num_timeout")}
        return SubmititEngine(**named, parameters=settings)
