"""Checks that this machine has what a configuration needs, before anything is made.

Large libraries are imported only where the configuration needs what they alone know.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
from pathlib import Path

from pgtoolkit.assembly.inputs import (
    check_inputs,
    check_models,
    check_recorded_rollouts,
    errors_added_to,
)
from pgtoolkit.config.across import DEFAULTS
from pgtoolkit.config.defaults import ByWeights
from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.models import has_window, sizes
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.rules.executed import imports
from pgtoolkit.config.rules.loss_terms import notes_of_own_family
from pgtoolkit.config.rules.run import no_triton
from pgtoolkit.config.schema import Config, Sampler
from pgtoolkit.model.misfits import (
    FLASH_ATTENTION,
    beyond_flash_attention,
    flash_attention_version,
)
from pgtoolkit.model.settings import HuggingFaceModelSettings, ModelSettings, ParallelismSettings
from pgtoolkit.ranks.environment import AXES, joined, visible, world_size
from pgtoolkit.rollouts.settings import RolloutSettings
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.sampling.settings import TransformersSamplerSettings, VllmSamplerSettings
from pgtoolkit.system.imports import import_metrics
from pgtoolkit.system.plain_files import cannot_hold_files
from pgtoolkit.system.report import Report, refusal, text
from pgtoolkit.tracking.settings import TrackingSettings
from pgtoolkit.tracking.store_address import absolute_uri, experiment_of, sqlite_path
from pgtoolkit.tracking.store_file import problem_of_store
from pgtoolkit.tracking.wandb_settings import ignored_files, problem_of_settings
from pgtoolkit.training.settings import Device, KernelSettings, OptimizerSettings

_SMALL_MODEL = 500_000_000
"""Weights of a model, at most, that is taken for as small as the study's."""

_PROCESSES_PER_CORE = 16
"""A configuration of more processes is a typing mistake, and would fill the machine's memory before
anybody could stop it."""

_GROUPS = {"hydra", *(key.name.partition(".")[0] for key in KEYS)}

_GROUPS_OF_LOSS = (
    "loss",
    "aggregation",
    "correction",
    "advantage",
    "kl",
    "entropy",
    "critic",
    "accumulation",
)
"""What the loss is made of, and what decides on the fields of recorded rows that it needs."""


def check_machine(config: Config, report: Report) -> None:
    """Add to a report what this machine lacks, and what is wrong with the files that a run reads.

    What reads keys that are refused already is not tried. Nor is code of the user's in a
    configuration that the rules refuse: nobody may have typed it.
    """
    # Of a word that is no key, nobody knows which of the keys below it was meant to set.
    is_accepted = not report.is_refused
    is_clear = is_accepted or all(map(_is_of_known_group, report.problems))
    may_import = is_accepted or (is_clear and not imports(config))
    is_loss_refused = report.concerns(*_GROUPS_OF_LOSS)
    device = config.trainer.device
    if not report.concerns("kernel"):
        report.problems += lacking_devices(device, config.kernel)
    _check_compiler(config.model, device, report)
    _note_attention(config.model, device, report)
    _note_learning_rate(config.model, config.optimizer, report)
    _check_processes(config.parallelism, report)
    if not report.concerns("rollout"):
        _check_folder(config.rollout, report)
    if not report.concerns("tracking"):
        _check_tracking(config.tracking, report)
    if needs_sampler(config) and not report.concerns("sampler"):
        _check_samplers(config.sampler, device, report)
    check_models(config, report, may_import, is_clear)
    if is_clear:
        check_inputs(config, report, may_import)
    if is_accepted and config.advantage.path is not None:
        from pgtoolkit.assembly.recorded_rollouts import estimator_of

        with errors_added_to(report):
            estimator_of(config.advantage, config.rollout, config.task)
    if is_accepted and config.optimizer.path is not None:
        from pgtoolkit.training.own_optimizer import check_own_optimizer

        with errors_added_to(report):
            parallelism = config.parallelism
            is_sharded = parallelism.shard or parallelism.tensor_parallel > 1
            check_own_optimizer(config.optimizer, is_sharded)
    if is_accepted and config.callbacks.own:
        import_metrics()
        from pgtoolkit.training.callbacks import own_parts

        with errors_added_to(report):
            own_parts(config.callbacks.own)
    is_recorded = config.rollout.name == "recorded"
    has_own_code = config.aggregation.reducer is not None or config.loss.name == "custom"
    is_tried = is_recorded or (has_own_code and is_accepted)
    if not is_tried or not may_import or is_loss_refused:
        return
    from pgtoolkit.assembly.loss import loss_of, note_on_advantages

    with errors_added_to(report):
        loss = loss_of(config)
        note = note_on_advantages(loss, chosen(config, "loss"), chosen(config, "advantage"))
        if note is not None:
            report.note(note)
        if config.loss.name == "custom":
            notes_of_own_family(config, loss.family, report)
        if is_recorded and not report.concerns("rollout", "model"):
            check_recorded_rollouts(config, loss, report)


def _is_of_known_group(problem: str) -> bool:
    """Return whether a problem begins with a key, an option or an unknown key of a group."""
    group = re.match(r"(?:Unknown key ')?(\w*)", problem)
    return group is not None and group[1] in _GROUPS


def lacking_devices(device: Device, kernel: KernelSettings) -> list[str]:
    """Return the problems of settings that ask for a GPU where there is none."""
    if not (device == "cuda" or kernel.needs_gpu):
        return []
    import torch

    if torch.cuda.is_available():
        return []
    problems = []
    if device == "cuda":
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
    if kernel.needs_gpu and device != "cpu":
        problems.append(no_triton("none"))
    return problems


def _check_compiler(model: ModelSettings, device: Device, report: Report) -> None:
    """Refuse torch.compile on a CPU without a C++ compiler; for a GPU it needs none."""
    if model.compile is not True:
        return
    import torch

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    compiler = os.environ.get("CXX", "g++")
    if on_cpu and shutil.which(compiler) is None:
        report.refuse(
            setting="model.compile=true",
            needs="a C++ compiler on a CPU",
            got=f"no {compiler}",
            reason="torch.compile writes C++ there.",
            use="model.compile=false",
        )


def _note_attention(model: ModelSettings, device: Device, report: Report) -> None:
    """Note what FlashAttention 4 does not serve for, where it is installed."""
    version = flash_attention_version()
    if version is None or device == "cpu" or not isinstance(model, HuggingFaceModelSettings):
        return
    import torch

    if not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    known = sizes(model)
    head_width = None if known is None else known.head
    problem = beyond_flash_attention(capability, head_width, has_window(model))
    if problem is not None:
        report.note(f"PyTorch's attention takes the place of {FLASH_ATTENTION}'s: {problem}.")


def _note_learning_rate(model: ModelSettings, optimizer: OptimizerSettings, report: Report) -> None:
    """Note the default learning rate of a model that is far smaller than those it suits."""
    rate = DEFAULTS["optimizer.learning_rate"]
    assert isinstance(rate, ByWeights)
    known = sizes(model)
    if known is None or known.weights > _SMALL_MODEL or optimizer.name != "adamw":
        return
    if optimizer.learning_rate == rate.trained:
        report.note(
            f"optimizer.learning_rate={rate.trained:g} is for models of billions of weights. One "
            "of 135 million learned next to nothing by it in 240 steps, and much at ten times the "
            "rate (docs/study.md): `pgtk sweep rate_range`, with your other keys, looks for one."
        )


def _check_processes(parallelism: ParallelismSettings, report: Report) -> None:
    """Refuse more processes than this machine has room for, where pgtk starts them itself."""
    cores = os.cpu_count() or 1
    limit = _PROCESSES_PER_CORE * cores
    size = world_size(parallelism)
    if joined() is not None or size <= limit:
        return
    sizes = {axis: getattr(parallelism, axis) for axis in AXES}
    axis = next(axis for axis, axis_size in sizes.items() if axis_size != 1)
    report.refuse(
        setting=f"parallelism.{axis}={sizes[axis]}",
        needs=f"at most {limit} processes on this machine",
        got=f"{size} of them",
        reason=f"pgtk starts all of them here, and this machine has {cores} CPU cores.",
        use="torchrun or srun over several machines, or smaller sizes",
    )


def _check_folder(rollout: RolloutSettings, report: Report) -> None:
    """Refuse a folder for rollouts that the run could not make."""
    save_path = getattr(rollout, "save_path", None)
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


def _check_tracking(tracking: TrackingSettings, report: Report) -> None:
    """Refuse an MLflow store or a wandb account that the run could not write to."""
    if "wandb" in (tracking.name, *tracking.also):
        problem = problem_of_settings()
        if problem:
            report.problems.append(problem)
        for path in ignored_files():
            report.note(
                f"{path} in the current folder is not read: whoever wrote it would choose the "
                "server that gets the run and the API key. wandb's variables and "
                "~/.config/wandb/settings are."
            )
    if tracking.name == "mlflow":
        store = sqlite_path(absolute_uri(tracking.uri))
        experiment = experiment_of("mlflow", tracking.experiment)
        problem = problem_of_store(store, experiment) if store else None
        if problem:
            report.problems.append(problem)


def _check_samplers(sampler: Sampler, device: Device, report: Report) -> None:
    """Refuse servers and processes that sample, where their program or their GPUs are missing."""
    if getattr(sampler, "urls", None):
        return
    if (
        isinstance(sampler, TransformersSamplerSettings)
        and sampler.processes
        and device != "cpu"
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
        isinstance(sampler, VllmSamplerSettings)
        and shutil.which(shlex.split(sampler.executable)[0]) is None
    ):
        report.refuse(
            setting=f"sampler.executable={sampler.executable}",
            needs="a program that exists",
            got="none",
            reason="vLLM needs other versions of libraries, so it has an environment of its own.",
            use="sampler.executable=ENVIRONMENT/bin/vllm, sampler.urls=[http://HOST:PORT], or "
            "sampler=transformers",
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


@functools.cache
def visible_gpus() -> list[str]:
    """Return the name in CUDA_VISIBLE_DEVICES of each GPU that torch sees."""
    import torch

    return [visible([number]) for number in range(torch.cuda.device_count())]
