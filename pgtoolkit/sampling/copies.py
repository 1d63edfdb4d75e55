"""Sampling by processes of ours, each with a copy of the policy: they are given the weights, and
share the requests."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig
from pgtoolkit.errors import ConfigError, PgtoolkitError, SamplerLost
from pgtoolkit.model.policy import Policy, torch_type
from pgtoolkit.ranks.agreement import failing_together, gather_objects, pickled
from pgtoolkit.ranks.environment import visible
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.copy_process import Answer, Complete, Load, Start
from pgtoolkit.sampling.samplers import SameProcesses, Sampler, check_sampled
from pgtoolkit.sampling.server_api import LOST
from pgtoolkit.sampling.server_process import last_words, own_environment
from pgtoolkit.sampling.weights_folder import WeightsFolder
from pgtoolkit.system.child import Child, end_all
from pgtoolkit.system.report import refusal

log = logging.getLogger("pgtoolkit")

_PROGRAM = """
import json, signal, sys
sys.path[:] = json.loads(sys.argv[1])
from multiprocessing.connection import Connection
from pgtoolkit.system.child import stay_under_guard
channel = stay_under_guard()
# These may be sent to all processes of a job. The process that trains then saves, and still needs
# this one.
job_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, job_signals)
from pgtoolkit.sampling.copy_process import serve
serve(Connection(channel.detach()))
"""
"""The program of such a process. Its guard forks before the large imports, and so stays small."""

_END_SECONDS = 15
"""Seconds in which guards, which kill their processes at once, must have ended."""


class CopySampler:
    """Samples by processes that hold copies of the policy, on other GPUs or on the CPU.

    Each rank has its share of the processes, and has them complete its requests. A request draws
    the same tokens, whichever process completes it, except for rounding, which depends on what else
    is completed at the same time.

    policy: the one in training. run_dir: the folder for the logs.
    Raises ConfigError for a model that cannot be sampled token by token, and on several machines.
    """

    tolerance = None

    def __init__(self, config: Config, policy: Policy, layout: Layout, run_dir: Path):
        assert isinstance(config.sampler, TransformersSamplerConfig)
        check_sampled(policy, config.sampler)
        hosts = gather_objects(socket.gethostname(), layout.world_group)
        with failing_together(layout):
            if len(set(hosts)) > 1:
                raise ConfigError(
                    refusal(
                        setting="sampler.gpus",
                        needs="ranks of one machine",
                        got=f"{len(set(hosts))} machines",
                        reason="The processes get the weights through shared memory.",
                        use="sampler.gpus=null",
                    )
                )
        self._policy = policy
        self._layout = layout
        self._run_dir = run_dir
        self._ways = [config]
        self._dtype = torch_type(config.sampler.dtype, policy.compute_dtype)
        self._folder = WeightsFolder.of_ranks(layout, None, run_dir, self._dtype)
        self._processes: list[_CopyProcess] = []
        self._version: int | None = None

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Give every process these weights; called by every rank at the same time.

        The first call starts the processes.
        """
        with failing_together(self._layout):
            if not self._processes:
                self._start()
            for process in self._processes:
                process.finish_loading()  # the folder may not change while it is read
        if version == self._version:
            return
        with failing_together(self._layout):
            self._folder.write(weights(), self._layout, lambda folder: None)
        assert self._folder.path is not None
        with failing_together(self._layout):
            for process in self._processes:
                process.load(self._folder.path, version)
        self._version = version

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        return self.complete_in(0, requests, more)

    def complete_in(self, way: int, requests: list[Request], more: bool) -> list[Completion]:
        """Deal the requests out to the processes, which complete their shares at the same time.

        Of n processes, number i gets the requests i, i + n, i + 2 n and so on.
        """
        num_processes = len(self._processes)
        sent = [dataclasses.replace(request, prompt=None) for request in requests]
        shares = [sent[number::num_processes] for number in range(num_processes)]
        waiting: dict[Connection, int] = {}
        for number, (process, share) in enumerate(zip(self._processes, shares, strict=True)):
            process.finish_loading()
            if share:
                process.send(Complete(way, share))
                waiting[process.connection] = number
        by_request: list[list[Completion]] = [[] for _ in requests]
        while waiting:
            for connection in wait(list(waiting)):
                number = waiting.pop(cast("Connection", connection))
                completions = iter(self._processes[number].completions())
                for place, request in enumerate(shares[number]):
                    by_request[number + place * num_processes] = [
                        next(completions) for _ in range(request.completions)
                    ]
        return [completion for completions in by_request for completion in completions]

    def sampling_otherwise(
        self, rollout: PolicyRolloutConfig, settle: Callable[[], object]
    ) -> Sampler:
        """Return a sampler that samples as `rollout` says, by the same processes.

        settle: waits for the completions that are being sampled for training. Called before the
            processes are started.
        """
        self._ways.append(dataclasses.replace(self._ways[0], rollout=rollout))
        return SameProcesses(self, len(self._ways) - 1, settle)

    def close(self) -> None:
        end_all([process.child for process in self._processes], _END_SECONDS)
        self._folder.remove()

    def _start(self) -> None:
        """Start this rank's processes."""
        config = self._ways[0]
        assert isinstance(config.sampler, TransformersSamplerConfig)
        copies = copies_of(config)
        on_gpu = config.sampler.gpus is not None
        start = Start(
            policy=self._policy.description(self._dtype),
            configs=self._ways,
            device="cuda" if on_gpu else "cpu",
            num_threads=torch.get_num_threads(),
        )
        for number in range(self._layout.rank, len(copies), self._layout.world_size):
            gpu = visible([copies[number]]) if on_gpu else ""
            file = self._run_dir / ("sampler.log" if len(copies) == 1 else f"sampler-{number}.log")
            device = f"on GPU {gpu}" if on_gpu else "on the CPU"
            log.info(f"starting a process that samples {device}; its log: {file}")
            process = _CopyProcess(gpu, file, device)
            self._processes.append(process)
            process.send(start)


class _CopyProcess:
    """A process with a copy of the policy, until its guard is ended.

    gpu: the one that it sees, as CUDA_VISIBLE_DEVICES names it; empty for none. device: the same
        for messages, such as "on the CPU".
    """

    def __init__(self, gpu: str, log_file: Path, device: str):
        environment = own_environment() | {"CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
        self.child = Child(command, environment, log_file)
        self.connection = self.child.connection()
        self._log_file = log_file
        self._device = device
        self._is_loading = False

    def load(self, folder: Path, version: int) -> None:
        """Have the process read the weights in a folder; `finish_loading` waits until it has."""
        self.send(Load(folder, version))
        self._is_loading = True

    def finish_loading(self) -> None:
        if self._is_loading:
            self._answer()
        self._is_loading = False

    def completions(self) -> list[Completion]:
        """Wait for the completions that the process was asked for."""
        answer = self._answer()
        assert answer is not None
        return answer

    def send(self, message: Start | Load | Complete) -> None:
        """Send a message; raises SamplerLost where the process has ended."""
        try:
            self.connection.send_bytes(pickled(message))
        except OSError as error:
            raise self._lost() from error

    def _answer(self) -> list[Completion] | None:
        """Wait for the answer to the oldest message without one; raise it where it is an error."""
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if isinstance(answer, PgtoolkitError):
            raise answer
        return answer

    def _lost(self) -> SamplerLost:
        status = self.child.wait(_END_SECONDS)
        if status is None:
            fault = "does not answer"
        elif status >= 0:
            fault = f"ended with status {status}"
        else:
            fault = f"was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            fault += " (the system does so when memory runs out)"
        return SamplerLost(
            f"the process that samples {self._device} {fault}. {last_words(self._log_file)} {LOST}"
        )
