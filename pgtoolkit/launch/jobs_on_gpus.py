"""Finds out if the GPUs of this machine have room for several jobs each."""

from __future__ import annotations

from pgtoolkit.assembly.machine import visible_gpus
from pgtoolkit.config import memory
from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.schema import Config
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.system.report import Report


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
