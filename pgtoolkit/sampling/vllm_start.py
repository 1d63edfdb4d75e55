"""Which servers of vLLM sample for a run: those it joins, or those it starts, on which GPUs, with which arguments."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, SamplerLost
from pgtoolkit.ranks.agreement import failing_together, gather
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.server_process import ServerProcess, reserve_port
from pgtoolkit.sampling.vllm_client import V2_RUNNER, Server
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

_PROGRESS_SECONDS = 15
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it there is no way to give it other weights
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which would compile itself at the start
    "VLLM_NO_USAGE_STATS": "1",
    V2_RUNNER: "1",  # draws tokens with seeds as fast as without
}
"""Where this process has one of them already, its value holds."""
_FRONT_ENDS = 4
"""Processes of the servers on a GPU that take requests and write answers, while one computes."""
_FIXED = "--kv-cache-memory-bytes"
"""The option that says how much memory a server takes for keys and values, which it measures otherwise."""


@dataclass(frozen=True)
class Plan:
    """What to start: for each server the GPUs it sees, as CUDA_VISIBLE_DEVICES has them (None: all), and its command.

    at_once: how many of them, the first on each of the GPUs, then the second on each: while a server measures its need
    of memory, it takes what others on its GPU allocate for its own. sleeps: whether the servers are on the GPUs that
    train, and give their memory back while they do.
    """

    gpus: list[str | None]
    at_once: int
    arguments: list[str]
    sleeps: bool


def plan(config: Config, layout: Layout, number_type: str, room: int) -> Plan:
    """Of this configuration; called by every rank. number_type, room: of the model, and most tokens of a document."""
    own = config.sampler
    if own.urls:
        return Plan([], 0, [], False)
    on_gpu = torch.cuda.is_available() and config.trainer.device != "cpu"
    ranks = gather((socket.gethostname(), torch.cuda.current_device() if on_gpu else None), layout.world_group)
    with failing_together(layout):
        if len({host for host, _ in ranks}) > 1:
            reason = "A run on several machines starts no servers: only those of rank 0's machine would be its own."
            raise ConfigError(refusal("sampler.urls=[]", "running servers", "none", reason, "sampler.urls=[URL,...]"))
    if own.gpus is not None:
        size = own.tensor_parallel
        gpus = [_visible(own.gpus[i : i + size]) for i in range(0, len(own.gpus), size)]
    else:
        gpus = [_visible([device]) for device in sorted({device for _, device in ranks})] if on_gpu else [None]
    # While documents are sampled as others are trained on, there is no time to sleep.
    sleeps = on_gpu and own.gpus is None and config.rollout.max_staleness is None
    options = {
        "dtype": number_type,
        "logprobs-mode": "processed_logprobs",
        "max-model-len": room,
        "max-num-seqs": own.max_sequences,
        "gpu-memory-utilization": own.gpu_memory_share / own.servers_per_gpu,
        "tensor-parallel-size": own.tensor_parallel,
        "generation-config": "vllm",
        "seed": config.seed,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    arguments += [
        f"--api-server-count={max(1, _FRONT_ENDS // own.servers_per_gpu)}",
        *([] if config.rollout.stop else ["--skip-tokenizer-init"]),  # text alone needs one
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
        *(["--enable-sleep-mode"] if sleeps else []),
    ]
    measures = not any(argument.startswith(_FIXED) for argument in own.arguments)
    servers = gpus * own.servers_per_gpu
    return Plan(servers, len(gpus if measures else servers), [*arguments, *own.arguments], sleeps)


def _visible(gpus: list[int]) -> str:
    """GPUs as torch numbers them here, as a process must be told of them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else None
    return ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)


class Servers:
    """The servers of a run, on rank 0: started from a folder, or joined, and once up the same for all."""

    def __init__(self, config: Config, chosen: Plan, folder: Path, run_dir: Path):
        self._config, self._plan, self._folder, self._run_dir = config.sampler, chosen, folder, run_dir
        self._said = time.monotonic()
        # A port is open to everybody on the machine.
        self.key = os.environ.get("VLLM_API_KEY") or (secrets.token_hex(16) if chosen.gpus else None)
        self.all = [Server(url, self._config.answer_seconds, key=self.key) for url in self._config.urls]
        self._start_more()

    def are_up(self) -> bool:
        """Whether all answer by now. Raises SamplerLost if one has ended, or sampler.start_seconds are over."""
        waiting = [server for server in self.all if not server.is_up()]
        now, limit = time.monotonic(), self._config.start_seconds
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
        for server in self.all[len(self._config.urls) :]:
            server.check_folder(self._folder, now + self._config.answer_seconds)
        return not self._start_more()

    def _start_more(self) -> bool:
        """Start those that come next; whether there were any."""
        self._begin = time.monotonic()
        numbers = range(len(self._plan.gpus))[len(self.all) :][: self._plan.at_once]
        for number in numbers:
            self.all.append(self._start(number))
        return bool(numbers)

    def _start(self, number: int) -> Server:
        reserved, gpus = reserve_port(), self._plan.gpus[number]
        port = reserved.getsockname()[1]
        log_file = self._run_dir / (f"vllm-{number}.log" if len(self._plan.gpus) > 1 else "vllm.log")
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [*shlex.split(self._config.executable), "serve", str(self._folder), *address, *self._plan.arguments]
        variables = {name: os.environ.get(name, value) for name, value in _VARIABLES.items()}
        variables["VLLM_API_KEY"] = self.key  # which is its owner's alone to read there, other than in its arguments
        variables |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        where = "" if gpus is None else f" on GPU {gpus}"
        log.info(f"starting a sampling server{where}; its log: {log_file}")
        process = ServerProcess(command, variables, log_file, reserved)
        return Server(f"http://127.0.0.1:{port}", self._config.answer_seconds, process, self.key)
