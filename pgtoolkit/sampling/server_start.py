"""Which servers sample for a run: those it joins, or those it starts, and on which GPUs."""

from __future__ import annotations

import logging
import os
import socket
import time

import torch

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, SamplerLost
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.server_api import Plan
from pgtoolkit.sampling.server_client import Server
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

_PROGRESS_SECONDS = 15


def plan(api: Vllm, config: Config, layout: Layout, number_type: str, room: int) -> Plan:
    """Of this configuration; called by every rank."""
    chosen = config.sampler
    if chosen.urls:
        return Plan([], 0, False, number_type, room)
    on_gpu = torch.cuda.is_available() and config.trainer.device != "cpu"
    ranks = gather_objects((socket.gethostname(), torch.cuda.current_device() if on_gpu else None), layout.world_group)
    with failing_together(layout):
        if len({host for host, _ in ranks}) > 1:
            reason = "A run on several machines starts no servers: they would all be on the machine of rank 0."
            raise ConfigError(refusal("sampler.urls=[]", "running servers", "none", reason, "sampler.urls=[URL,...]"))
    if chosen.gpus is not None:
        size = chosen.tensor_parallel
        gpus = [_visible(chosen.gpus[i : i + size]) for i in range(0, len(chosen.gpus), size)]
    else:
        gpus = [_visible([device]) for device in sorted({device for _, device in ranks})] if on_gpu else [None]
    # While documents are sampled as others are trained on, there is no time to sleep.
    sleeps = on_gpu and chosen.gpus is None and config.rollout.max_staleness is None
    measures = not any(argument.startswith(api.FIXED_MEMORY) for argument in chosen.arguments)
    servers = gpus * chosen.servers_per_gpu
    return Plan(servers, len(gpus if measures else servers), sleeps, number_type, room)


def _visible(gpus: list[int]) -> str:
    """GPUs as torch numbers them here, as a process must be told of them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else None
    return ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)


class Waiting:
    """For servers to be up, at most so many seconds; it says so every now and then."""

    def __init__(self, servers: list[Server], seconds: int):
        self._servers, self._seconds = servers, seconds
        self._began = self._told = time.monotonic()

    def is_over(self) -> bool:
        """Whether all answer by now. Raises SamplerLost if one has ended, or the seconds are over."""
        waiting, now = [server for server in self._servers if not server.is_up()], time.monotonic()
        if waiting and now - self._began > self._seconds:
            raise SamplerLost(
                f"the sampling server {waiting[0].url} does not answer within sampler.start_seconds={self._seconds}. "
                f"{waiting[0].last_words()}"
            )
        if waiting and now - self._told > _PROGRESS_SECONDS:
            self._told = now
            where = f"{waiting[0].url}, of at most {self._seconds} s"
            log.info(f"waiting for the sampling server {where}: {now - self._began:.0f} s")
        return not waiting
