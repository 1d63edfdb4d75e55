"""The requests and answers of any server of completions, and the plan of servers to start."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch

from pgtoolkit.errors import ConfigError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.environment import visible
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.settings import VllmSamplerSettings
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.stops import StopStrings

Json = Any
"""The JSON of an answer, or a part of it, which nobody has checked yet."""

LOST = "Nothing that was trained is lost."
"""The last sentence of messages about a lost sampler."""


@dataclass(frozen=True)
class ServerSampling:
    """The settings that completions are sampled by.

    ends: token ids that end a completion. stops: texts that end one.
    vocabulary_size: number of tokens of the trainer's model.
    seeded: whether the server gets the seed of each request.
    top_k: None for all tokens.
    keep_top: likeliest tokens that it gives beside each token.
    """

    temperature: float
    top_p: float
    max_tokens: int
    ends: list[int]
    stops: StopStrings
    vocabulary_size: int
    seeded: bool
    keep_top: int = 0
    top_k: int | None = None

    @property
    def names_kept(self) -> bool:
        """Return True if the likeliest tokens are those that truncated sampling keeps."""
        is_truncated = self.top_p < 1 or self.top_k is not None
        return is_truncated and self.keep_top > 0 and self.temperature > 0


@dataclass(frozen=True)
class Choice:
    """One completion as a server gives it: any JSON, which `Server` checks.

    tokens, log_probs: a list of numbers each, of equal length.
    finish_reason: "stop" or "length". stop_text: the stop string that ended it, if one did.
    top: for each token a list of pairs, of a token and its log-prob: the likeliest ones, and
        perhaps the token itself; None unless they were asked for.
    """

    tokens: Json
    log_probs: Json
    finish_reason: object
    stop_text: object
    top: Json = None


@dataclass(frozen=True)
class ServerPlan:
    """The servers to start.

    gpus: for each server the GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; None: all. The
        first servers of all GPUs come first, then the second ones, and so on.
    at_once: number of servers that may start at the same time. A server that measures its need of
        memory would count what another one on its GPU allocates.
    sleeps: whether the servers are on the GPUs that train, and give their memory back meanwhile.
    number_type: of the model, such as "bfloat16". room: most tokens of a document.
    """

    gpus: list[str | None]
    at_once: int
    sleeps: bool
    number_type: str
    room: int


Call = tuple[str, dict | None]
"""A path, and the JSON that is posted to it."""


def plan_servers(
    settings: VllmSamplerSettings,
    layout: Layout,
    number_type: str,
    room: int,
    memory_option: str,
    *,
    on_gpu: bool,
    is_async: bool,
) -> ServerPlan:
    """Return the servers that a run starts; none where it joins some. Called by every rank.

    memory_option: the server's option without which it measures how much memory is free.
    on_gpu, is_async: see `ServerSampler`.
    Raises ConfigError on several machines.
    """
    if settings.urls:
        return ServerPlan([], 0, False, number_type, room)
    on_gpu = on_gpu and torch.cuda.is_available()
    ranks = gather_objects(
        (socket.gethostname(), torch.cuda.current_device() if on_gpu else None), layout.world_group
    )
    with failing_together(layout):
        if len({host for host, _ in ranks}) > 1:
            raise ConfigError(
                refusal(
                    setting="sampler.urls=[]",
                    needs="running servers",
                    got="none",
                    reason="A run on several machines starts no servers: they would all be on the "
                    "machine of rank 0.",
                    use="sampler.urls=[URL,...]",
                )
            )
    gpus: list[str | None]
    if settings.gpus is not None:
        size = settings.tensor_parallel
        starts = range(0, len(settings.gpus), size)
        gpus = [visible(settings.gpus[start : start + size]) for start in starts]
    elif on_gpu:
        devices = {device for _, device in ranks if device is not None}
        gpus = [visible([device]) for device in sorted(devices)]
    else:
        gpus = [None]
    # Asynchronous sampling goes on while the GPUs train, and leaves no time to sleep.
    sleeps = on_gpu and settings.gpus is None and not is_async
    measures = not any(argument.startswith(memory_option) for argument in settings.arguments)
    servers = gpus * settings.servers_per_gpu
    return ServerPlan(
        gpus=servers,
        at_once=len(gpus if measures else servers),
        sleeps=sleeps,
        number_type=number_type,
        room=room,
    )
