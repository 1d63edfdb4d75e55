"""Checks that this machine has what a configuration needs, before anything is made.

Large libraries are imported only where the configuration needs what they alone know.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from pathlib import Path

from pgtoolkit.assembly.inputs import check_inputs, check_recorded_rollouts, errors_added_to
from pgtoolkit.config import memory
from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.paths import absolute_uri, cannot_hold_files, sqlite_path
from pgtoolkit.config.rules.run import no_triton
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig, VllmSamplerConfig
from pgtoolkit.ranks.environment import AXES, joined, visible, world_size
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.system.imports import import_metrics
from pgtoolkit.system.report import Report, refusal, text
from pgtoolkit.tracking.store_file import problem_of_store
from pgtoolkit.tracking.wandb_settings import ignored_files, problem_of_settings

_PROCESSES_PER_CORE = 16
"""A configuration of more processes is a typing mistake, and would fill the machine's memory before
anybody could stop it."""


def check_machine(config: Config, report: Report) -> None:
    """Add to a report what this machine lacks, and what is wrong with the files that a run reads.

    A configuration that the rules refuse is not tried: that might import code that nobody has
    typed.
    """
    if report.problems:
        return
    report.problems += lacking_devices(config)
    _check_compiler(config, report)
    _check_processes(config, report)
    _check_places(config, report)
    _check_samplers(config, report)
    check_inputs(config, report)
    if config.advantage.path is not None:
        from pgtoolkit.rollouts.estimator import Estimator

        with errors_added_to(report):
            Estimator.of(config)
    if config.callbacks.own:
        import_metrics()
        from pgtoolkit.training.callbacks import own_parts

        with errors_added_to(report):
            own_parts(config.callbacks.own)
    is_recorded = config.rollout.name == "recorded"
    has_own_code = config.aggregation.reducer is not None or config.loss.name == "custom"
    if is_recorded or has_own_code:
        from pgtoolkit.assembly.loss import loss_of

        with errors_added_to(report):
            loss = loss_of(config)
            if is_recorded:
                check_recorded_rollouts(config, loss, report)


def lacking_devices(config: Config) -> list[str]:
    """Return the problems of a configuration that asks for a GPU where there is none."""
    if not (config.trainer.device == "cuda" or config.kernel.needs_gpu):
        return []
    import torch

    if torch.cuda.is_available():
        return []
    problems = []
    if config.trainer.device == "cuda":
        problems.append(
            refusal(
                setting="trainer.device=cuda",
                needs="a GPU that torch can use",
                got="none",
                reason="Its driver or torch's CUDA build is missing.",
                use="trainer.device=auto",
            )
        )
    # With trainer.device=cpu the rule on kernels has refused it already.
    if config.kernel.needs_gpu and config.trainer.device != "cpu":
        problems.append(no_triton("none"))
    return problems


def _check_compiler(config: Config, report: Report) -> None:
    """Refuse torch.compile on a CPU without a C++ compiler; for a GPU it needs none."""
    if config.model.compile is not True:
        return
    import torch

    on_cpu = config.trainer.device == "cpu" or not torch.cuda.is_available()
    compiler = os.environ.get("CXX", "g++")
    if on_cpu and shutil.which(compiler) is None:
        report.refuse(
            setting="model.compile=true",
            needs="a C++ compiler on a CPU",
            got=f"no {compiler}",
            reason="torch.compile writes C++ there.",
            use="model.compile=auto",
        )


def _check_processes(config: Config, report: Report) -> None:
    """Refuse more processes than this machine has room for, where pgtk starts them itself."""
    cores = os.cpu_count() or 1
    limit = _PROCESSES_PER_CORE * cores
    size = world_size(config.parallelism)
    if joined() is not None or size <= limit:
        return
    sizes = {axis: getattr(config.parallelism, axis) for axis in AXES}
    axis = next(axis for axis, axis_size in sizes.items() if axis_size != 1)
    report.refuse(
        setting=f"parallelism.{axis}={sizes[axis]}",
        needs=f"at most {limit} processes on this machine",
        got=f"{size} of them",
        reason=f"pgtk starts all of them here, and this machine has {cores} CPU cores.",
        use="torchrun or srun over several machines, or smaller sizes",
    )


def _check_places(config: Config, report: Report) -> None:
    """Refuse a folder, an MLflow store or a wandb account that the run could not write to."""
    save_path = getattr(config.rollout, "save_path", None)
    if save_path:
        obstacle = cannot_hold_files(Path(save_path).expanduser())
        if obstacle:
            report.refuse(
                setting=f"rollout.save_path={save_path}",
                needs="a place where folders can be made",
                got=obstacle,
                reason="It becomes a folder with one file per batch.",
                use="rollout.save_path=recorded_rollouts",
            )
    if "wandb" in (config.tracking.name, *config.tracking.also):
        problem = problem_of_settings()
        if problem:
            report.problems.append(problem)
        for path in ignored_files():
            report.note(
                f"{path} in the current folder is not read: whoever wrote it would choose the "
                "server that gets the run and the API key. wandb's variables and "
                "~/.config/wandb/settings are."
            )
    if config.tracking.name == "mlflow":
        assert config.tracking.experiment is not None
        store = sqlite_path(absolute_uri(config.tracking.uri))
        problem = problem_of_store(store, config.tracking.experiment) if store else None
        if problem:
            report.problems.append(problem)


def _check_samplers(config: Config, report: Report) -> None:
    """Refuse servers and processes that sample, where their program or their GPUs are missing."""
    sampler = config.sampler
    if not needs_sampler(config) or getattr(sampler, "urls", None):
        return
    if (
        isinstance(sampler, TransformersSamplerConfig)
        and sampler.processes
        and config.trainer.device != "cpu"
        and gpu_memory()
    ):
        report.refuse(
            setting=f"sampler.processes={sampler.processes}",
            needs="a machine without a GPU",
            got="one with a GPU",
            reason="These processes sample on the CPU, and training would be on the GPU.",
            use="sampler.gpus=[1]",
        )
    if (
        isinstance(sampler, VllmSamplerConfig)
        and shutil.which(shlex.split(sampler.executable)[0]) is None
    ):
        report.refuse(
            setting=f"sampler.executable={sampler.executable}",
            needs="a program that exists",
            got="none",
            reason="vLLM needs other versions of libraries, so it has an environment of its own.",
            use="sampler.executable=ENVIRONMENT/bin/vllm, or sampler.urls=[http://HOST:PORT]",
        )
    if sampler.gpus:
        count = len(visible_gpus())
        if max(sampler.gpus) >= count:
            without = " sampler.processes=1" if sampler.name == "transformers" and not count else ""
            report.refuse(
                setting=f"sampler.gpus={text(sampler.gpus)}",
                needs="GPUs of this machine",
                got=f"{count} of them",
                reason="They are numbered from 0, as torch sees them.",
                use=f"sampler.gpus=null{without}",
            )


def jobs_on_gpus(config: Config, jobs_per_gpu: int, report: Report) -> None:
    """Refuse more jobs on each GPU than it has room for, by the estimate of `pgtk check`."""
    if report.problems:
        return
    setting = f"hydra.launcher.jobs_per_gpu={jobs_per_gpu}"
    if config.trainer.device == "cpu" or not visible_gpus():
        report.refuse(
            setting=setting,
            needs="a GPU",
            got="trainer.device=cpu" if config.trainer.device == "cpu" else "none",
            reason="It counts jobs on each GPU of this machine.",
            use=f"hydra.launcher.n_jobs={jobs_per_gpu}",
        )
        return
    num_processes = _num_processes(config)
    if num_processes > 1 or (needs_sampler(config) and config.sampler.name == "vllm"):
        report.refuse(
            setting=setting,
            needs="jobs of one process, which samples by itself",
            got=f"{num_processes} processes" if num_processes > 1 else "sampler=vllm",
            reason="Each job sees one GPU, and shares it.",
            use="hydra.launcher.jobs_per_gpu=null",
        )
        return
    gpu_bytes = gpu_memory()
    if not gpu_bytes:
        return
    job_bytes = memory.bytes_of_process(config, gpu_bytes)
    jobs_that_fit = max(1, int(gpu_bytes / job_bytes))
    if jobs_per_gpu > jobs_that_fit:
        use = f"hydra.launcher.jobs_per_gpu={jobs_that_fit}"
        max_tokens = memory.max_tokens_for(config, gpu_bytes / jobs_per_gpu, gpu_bytes)
        if max_tokens:
            use += f", or accumulation.max_tokens={max_tokens}"
        report.refuse(
            setting=setting,
            needs=f"{jobs_per_gpu} times {job_bytes / 1e9:.3g} GB of each GPU",
            got=f"{gpu_bytes / 1e9:.3g}",
            reason="Its jobs share this memory.",
            use=use,
        )


def _num_processes(config: Config) -> int:
    """Return the number of processes that train, and of those that sample for them."""
    num_samplers = len(copies_of(config)) if needs_sampler(config) else 0
    return world_size(config.parallelism) + num_samplers


@functools.cache
def visible_gpus() -> list[str]:
    """Return the name in CUDA_VISIBLE_DEVICES of each GPU that torch sees."""
    import torch

    return [visible([number]) for number in range(torch.cuda.device_count())]
