"""What any server of completions is asked for and answers, and which are started, apart from the
words of vLLM."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch

from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.config.schema_samplers import VllmSamplerConfig
from pgtoolkit.errors import ConfigError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.environment import visible
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.stops import StopStrings

LOST = "Nothing that was trained is lost."


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    ends: token ids that end a completion; stops: texts that do. vocabulary_size: entries of the
        trainer's.
    seeded: whether each request passes on its seed.
    """

    temperature: float
    top_p: float
    max_tokens: int
    ends: list[int]
    stops: StopStrings
    vocabulary_size: int
    seeded: bool


@dataclass(frozen=True)
class Choice:
    """One completion as a server gives it, of any JSON; `Server` checks it.

    finish_reason: "stop" or "length". stop_text: the stop string that ended it, if one did.
    """

    tokens: Any
    log_probs: Any
    finish_reason: Any
    stop_text: Any


@dataclass(frozen=True)
class Plan:
    """What to start: for each server the GPUs it sees, as CUDA_VISIBLE_DEVICES has them (None:
    all).

    at_once: how many of them, the first on each of the GPUs, then the second on each: while a
        server measures its need
    of memory, it takes what others on its GPU allocate for its own. sleeps: whether the servers are
    on the GPUs that train, and give their memory back while they do. number_type, room: of the
    model, and most tokens of a document.
    """

    gpus: list[str | None]
    at_once: int
    sleeps: bool
    number_type: str
    room: int


Call = tuple[str, dict | None]
"""A path, and the JSON that is posted to it."""


def plan_servers(api: Any, config: Config, layout: Layout, number_type: str, room: int) -> Plan:
    """Which servers a run starts, by the words of `api`; none where it joins some. Called by every
    rank."""
    chosen = config.sampler
    assert isinstance(chosen, VllmSamplerConfig)
    assert isinstance(config.rollout, PolicyRolloutConfig)
    if chosen.urls:
        return Plan([], 0, False, number_type, room)
    on_gpu = torch.cuda.is_available() and config.trainer.device != "cpu"
    ranks = gather_objects(
        (socket.gethostname(), torch.cuda.current_device() if on_gpu else None), layout.world_group
    )
    with failing_together(layout):
        if len({host for host, _ in ranks}) > 1:
            reason = (
                "A run on several machines starts no servers: they would all be on the "
                "machine of rank 0."
            )
            raise ConfigError(
                refusal(
                    "sampler.urls=[]", "running servers", "none", reason, "sampler.urls=[URL,...]"
                )
            )
    if chosen.gpus is not None:
        size = chosen.tensor_parallel
        gpus: list[str | None] = [
            visible(chosen.gpus[i : i + size]) for i in range(0, len(chosen.gpus), size)
        ]
    else:
        gpus = (
            [visible([device]) for device in sorted({device for _, device in ranks})]
            if on_gpu
            else [None]
        )
    # While documents are sampled as others are trained on, there is no time to sleep.
    sleeps = on_gpu and chosen.gpus is None and config.rollout.max_staleness is None
    measures = not any(argument.startswith(api.FIXED_MEMORY) for argument in chosen.arguments)
    servers = gpus * chosen.servers_per_gpu
    return Plan(servers, len(gpus if measures else servers), sleeps, number_type, room)
