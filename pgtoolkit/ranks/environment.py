"""Which process this is among those that a launcher (torchrun, srun) started, from the environment
it set."""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass
from typing import Any

from pgtoolkit.errors import ConfigError

AXES = ("pipeline_parallel", "data_parallel", "sequence_data_parallel", "tensor_parallel")
"""What work is spread over, as the keys of the configuration; neighbouring ranks are neighbours in
the last."""


def world_size(sizes: Any) -> int:
    """How many processes share a step; sizes: has the axes as attributes, as the group
    `parallelism` does."""
    return math.prod(getattr(sizes, axis) for axis in AXES)


@dataclass(frozen=True)
class Rank:
    """number: this process's among world_size; local: among those of this machine. address, port:
    where rank 0 is."""

    number: int
    world_size: int
    local: int
    address: str
    port: int


def joined() -> Rank | None:
    """The place a launcher gave this process; None where it was started alone. ConfigError if it
    makes no sense."""
    found = os.environ
    if _number("WORLD_SIZE", 1) > 1 and "RANK" in found:
        number, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if number >= size:
            raise _refusal("RANK", number, f"a rank below WORLD_SIZE={size}")
        address, port = found.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 29500)
        return Rank(number, size, _number("LOCAL_RANK", number), address, port)
    # srun alone sets the number of tasks of a step; the script that sbatch runs has SLURM_PROCID
    # too.
    if _number("SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in found:
        hosts = found.get("SLURM_STEP_NODELIST", found.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        return Rank(
            number=_number("SLURM_PROCID", 0),
            world_size=_number("SLURM_STEP_NUM_TASKS", 1),
            local=_number("SLURM_LOCALID", 0),
            address=found.get("MASTER_ADDR", first_host(hosts)),
            # The same on all nodes, and another for each job and step.
            port=_number(
                "MASTER_PORT",
                20000 + _digits("SLURM_JOB_ID") * 7 % 10000 + _digits("SLURM_STEP_ID"),
            ),
        )
    return None


def node() -> str:
    """The machine of this process; torchrun counts them itself, and two of its may be one."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def visible(gpus: list[int]) -> str:
    """GPUs as torch numbers them here, as CUDA_VISIBLE_DEVICES is to name them to a process."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else None
    return ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)


def first_host(nodes: str) -> str:
    """The first name of a SLURM list of nodes, such as `gpu[03-05,7],login`."""
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
