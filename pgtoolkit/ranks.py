"""Which process this is among those that a launcher (torchrun, srun) started, from the environment it set."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """number: this process's among world_size; local: among those of this machine. address, port: where rank 0 is."""

    number: int
    world_size: int
    local: int
    address: str
    port: int


def joined() -> Rank | None:
    """The place that a launcher gave this process; None where it was started alone."""
    found = os.environ
    if int(found.get("WORLD_SIZE", "1")) > 1 and "RANK" in found:
        number, size = int(found["RANK"]), int(found["WORLD_SIZE"])
        address, port = found.get("MASTER_ADDR", "127.0.0.1"), int(found.get("MASTER_PORT", "29500"))
        return Rank(number, size, int(found.get("LOCAL_RANK", number)), address, port)
    # srun alone sets the number of tasks of a step; the script that sbatch runs has SLURM_PROCID too.
    if int(found.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in found:
        hosts = found.get("SLURM_STEP_NODELIST", found.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        return Rank(
            number=int(found["SLURM_PROCID"]),
            world_size=int(found["SLURM_STEP_NUM_TASKS"]),
            local=int(found.get("SLURM_LOCALID", "0")),
            address=found.get("MASTER_ADDR", first_host(hosts)),
            # The same on all nodes, and another for each job and step.
            port=int(found.get("MASTER_PORT", 20000 + _digits("SLURM_JOB_ID") * 7 % 10000 + _digits("SLURM_STEP_ID"))),
        )
    return None


def first_host(nodes: str) -> str:
    """The first name of a SLURM list of nodes, such as `gpu[03-05,7],login`."""
    name, bracket, rest = re.match(r"([^,\[]*)(\[?)(.*)", nodes).groups()
    return name + re.match(r"\d+", rest).group() if bracket else name


def _digits(variable: str) -> int:
    return int(re.sub(r"\D", "", os.environ.get(variable, "")) or 0)
