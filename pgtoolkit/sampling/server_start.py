"""Which servers sample for a run: those it joins, or those it starts, and on which GPUs."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from pathlib import Path

import torch

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, SamplerLost
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.server_api import Plan
from pgtoolkit.sampling.server_client import Server
from pgtoolkit.sampling.server_process import Guard, reserve_port
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

_HOST = "127.0.0.1"
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


class Servers:
    """The servers of a run, on rank 0: started from a folder by its guard, or joined, and once up the same for all."""

    def __init__(self, api: Vllm, config: Config, plan: Plan, folder: Path, guard: Guard, run_dir: Path):
        self._api, self._config, self._plan = api, config, plan
        self._folder, self._guard, self._run_dir = folder, guard, run_dir
        self._seconds = config.sampler.answer_seconds
        self._said = time.monotonic()
        # A port is open to everybody on the machine.
        self.key = os.environ.get(api.KEY) or (secrets.token_hex(16) if plan.gpus else None)
        self.all = [Server(api, url, self._seconds, key=self.key) for url in config.sampler.urls]
        self._start_more()

    def are_up(self) -> bool:
        """Whether all answer by now. Raises SamplerLost if one has ended, or sampler.start_seconds are over."""
        waiting = [server for server in self.all if not server.is_up()]
        now, limit = time.monotonic(), self._config.sampler.start_seconds
        if waiting and now - self._begin > limit:
            raise SamplerLost(
                f"the sampling server {waiting[0].url} does not answer within sampler.start_seconds={limit}. "
                f"{waiting[0].last_words()}"
            )
        if waiting and now - self._said > _PROGRESS_SECONDS:
            self._said = now
            where = f"{waiting[0].url}, of at most {limit} s"
            log.info(f"waiting for the sampling server {where}: {now - self._begin:.0f} s")
        if waiting:
            return False
        return not self._start_more()

    def _start_more(self) -> bool:
        """Start those that come next; whether there were any."""
        self._begin = time.monotonic()
        numbers = range(len(self._plan.gpus))[len(self.all) :][: self._plan.at_once]
        for number in numbers:
            self.all.append(self._start(number))
        return bool(numbers)

    def _start(self, number: int) -> Server:
        reserved, plan, name = reserve_port(), self._plan, self._config.sampler.name
        port, gpus = reserved.getsockname()[1], plan.gpus[number]
        log_file = self._run_dir / (f"{name}-{number}.log" if len(plan.gpus) > 1 else f"{name}.log")
        command = self._api.command(self._config, self._folder, plan, _HOST, port)
        # Where this process has a variable already, its value holds.
        variables = {variable: os.environ.get(variable, value) for variable, value in self._api.VARIABLES.items()}
        variables[self._api.KEY] = self.key  # which is its owner's alone to read there, other than in its arguments
        variables |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        where = "" if gpus is None else f" on GPU {gpus}"
        log.info(f"starting a sampling server{where}; its log: {log_file}")
        process = self._guard.start(command, variables, log_file, reserved)
        return Server(self._api, f"http://{_HOST}:{port}", self._seconds, process, self.key)
