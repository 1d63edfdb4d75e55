"""The place of this process among those that a launcher (torchrun, srun) started, from the
environment that it set."""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass

from pgtoolkit.errors import ConfigError

AXES = ("pipeline_parallel", "data_parallel", "sequence_data_parallel", "tensor_parallel")
"""The axes that work is spread over, as keys of the configuration. Neighbouring ranks are
neighbours in the last."""

JOBS_ON_GPU = "PGTK_JOBS_ON_GPU"
"""The variable by which a launcher tells its jobs how many of them share a GPU."""

BYTES_OF_CUDA = 700_000_000
"""Bytes of a GPU that CUDA takes for each process: its context, kernels and workspaces."""


def world_size(sizes: object) -> int:
    """Return the number of processes that share a step.

    sizes: has the AXES as attributes, as the group `parallelism` of a configuration does.
    """
    return math.prod(getattr(sizes, axis) for axis in AXES)


@dataclass(frozen=True)
class Rank:
    """The place of a process among all of them.

    number: of this process among world_size. local: its number among those of this machine.
    address, port: of rank 0.
    """

    number: int
    world_size: int
    local: int
    address: str
    port: int


def joined() -> Rank | None:
    """Return the place that a launcher gave this process; None where it was started alone.

    Raises ConfigError for an environment that makes no sense.
    """
    environment = os.environ
    if _number("WORLD_SIZE", 1) > 1 and "RANK" in environment:
        number = _number("RANK", 0)
        size = _number("WORLD_SIZE", 1)
        if number >= size:
            raise _refusal("RANK", number, f"a rank below WORLD_SIZE={size}")
        return Rank(
            number=number,
            world_size=size,
            local=_number("LOCAL_RANK", number),
            address=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=_number("MASTER_PORT", 29500),
        )
    # SLURM_PROCID alone does not tell: the script that sbatch runs has it, too. Only srun sets the
    # number of tasks of a step.
    if _number("SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environment:
        job_hosts = environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        hosts = environment.get("SLURM_STEP_NODELIST", job_hosts)
        return Rank(
            number=_number("SLURM_PROCID", 0),
            world_size=_number("SLURM_STEP_NUM_TASKS", 1),
            local=_number("SLURM_LOCALID", 0),
            address=environment.get("MASTER_ADDR", first_host(hosts)),
            # The same on all nodes, and another for each job and step.
            port=_number(
                "MASTER_PORT",
                20000 + _digits("SLURM_JOB_ID") * 7 % 10000 + _digits("SLURM_STEP_ID"),
            ),
        )
    return None


def node() -> str:
    """Return a name for the node of this process; to torchrun one machine may be several nodes."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def visible(gpus: list[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that is to see these GPUs.

    gpus: their numbers, as torch gives them in this process.
    """
    visible_here = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible_here.split(",") if visible_here else None
    return ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM list of nodes, such as `gpu[03-05,7],login`."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.partition(",")[0]
    return name + rest[: len(rest) - len(rest.lstrip("0123456789"))]


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "").strip() or str(default)
    if not re.fullmatch(r"[0-9]+", value):
        raise _refusal(variable, value, "a whole number >= 0")
    return int(value)


def _refusal(variable: str, value: object, needs: str) -> ConfigError:
    reason = "A launcher such as torchrun sets it for each process."
    use = (
        f"the launcher's value, or unset {variable} and WORLD_SIZE, and pgtk starts the "
        "processes itself"
    )
    return ConfigError(f"{variable}={value} needs {needs} (got {value}). {reason} Use {use}.")


def _digits(variable: str) -> int:
    return int(re.sub(r"\D", "", os.environ.get(variable, "")) or 0)
