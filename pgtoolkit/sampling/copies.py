"""Sampling by other processes of pgtoolkit, each with a copy of the policy.

They run `copy_process.py`. All get the same weights, and each completes a share of the requests.
"""

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
from pgtoolkit.errors import ConfigError, PgtoolkitError, SamplerLost
from pgtoolkit.model.policy import Policy, torch_type
from pgtoolkit.ranks.agreement import failing_together, gather_objects, pickled
from pgtoolkit.ranks.environment import visible
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.copy_process import Answer, Complete, Load, Start
from pgtoolkit.sampling.samplers import SameProcesses, Sampler, check_sampled
from pgtoolkit.sampling.server_api import LOST
from pgtoolkit.sampling.server_process import last_words, own_environment
from pgtoolkit.sampling.settings import SamplingSettings, TransformersSamplerSettings
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
# A scheduler may send one of these signals to all processes of a job. The process that trains then
# saves, and still needs this one.
job_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, job_signals)
from pgtoolkit.sampling.copy_process import answer_calls
answer_calls(Connection(channel.detach()))
"""
"""The program of a process with a copy. Its guard stays behind in `stay_under_guard`, before the
large imports, and so stays small."""

_END_SECONDS = 15
"""The time that a process and its guard have to end: more than enough, since the guard kills the
process at once."""


class CopySampler:
    """A `Sampler` whose processes hold copies of the policy, on other GPUs or on the CPU.

    Each rank starts its share of the processes, and they complete the requests of this rank. A
    request gets the same tokens from every process, but for rounding: that depends on the other
    requests which a process completes at the same time.

    policy: the one in training. run_dir: the folder for the logs.
    Raises ConfigError for a model that cannot be sampled token by token, and on several machines.
    """

    tolerance = None  # no limit, see `Sampler`

    def __init__(
        self,
        policy: Policy,
        sampling: SamplingSettings,
        settings: TransformersSamplerSettings,
        layout: Layout,
        run_dir: Path,
    ):
        check_sampled(policy, settings)
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
        self._ways = [sampling]  # the first is that of training
        self._settings = settings
        self._dtype = torch_type(settings.dtype, policy.compute_dtype)
        self._folder = WeightsFolder.of_ranks(
            layout, parent=None, fallback=run_dir, dtype=self._dtype
        )
        self._processes: list[_CopyProcess] = []
        self._version: int | None = None

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Give every process these weights, unless it has this version already.

        Every rank calls this at the same time. The first call starts the processes. They may still
        be reading the weights when it returns; `complete_in` waits for that.
        """
        with failing_together(self._layout):
            if not self._processes:
                self._start()
            for process in self._processes:
                process.finish_loading()  # the folder must not change while it is read
        if version == self._version:
            return
        with failing_together(self._layout):
            # No other files are put into the folder: `Start` describes the model.
            self._folder.write(weights(), self._layout, write_settings=lambda folder: None)
        assert self._folder.path is not None
        with failing_together(self._layout):
            for process in self._processes:
                process.load(self._folder.path, version)
        self._version = version

    def _start(self) -> None:
        """Start the processes of this rank."""
        copies = self._settings.copies  # the number of a GPU for each process, if there are GPUs
        on_gpu = self._settings.gpus is not None
        start = Start(
            policy=self._policy.description(self._dtype),
            ways=self._ways,
            settings=self._settings,
            device="cuda" if on_gpu else "cpu",
            num_threads=torch.get_num_threads(),
        )
        for number in range(self._layout.rank, len(copies), self._layout.world_size):
            gpu = visible([copies[number]]) if on_gpu else ""
            place = f"on GPU {gpu}" if on_gpu else "on the CPU"
            log_name = "sampler.log" if len(copies) == 1 else f"sampler-{number}.log"
            log_file = self._run_dir / log_name
            log.info(f"starting a process that samples {place}; its log: {log_file}")
            process = _CopyProcess(gpu, log_file, place)
            self._processes.append(process)
            process.send(start)

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        return self.complete_in(0, requests, more)

    def complete_in(self, way: int, requests: list[Request], more: bool) -> list[Completion]:
        """Return the completions of the requests, in their order, as `Sampler.complete` does.

        The processes complete their shares at the same time. Of n processes, number i gets the
        requests i, i + n, i + 2 n and so on.
        way: the place in `_ways` of the settings to sample by.
        more: has no effect, since the processes keep their copies until `close`.
        """
        num_processes = len(self._processes)
        # The prompt is for scoring, which is done in this process.
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
                completions = self._processes[number].completions()
                by_request[number::num_processes] = _split_by_request(completions, shares[number])
        return [completion for completions in by_request for completion in completions]

    def sampling_otherwise(
        self, sampling: SamplingSettings, settle: Callable[[], object]
    ) -> Sampler:
        """Return a sampler that samples as `sampling` says, by the same processes.

        This must be called before the first `publish`: a process gets all ways when it is
        started.
        settle: waits for the completions that are being sampled for training; see `SameProcesses`.
        """
        self._ways.append(sampling)
        return SameProcesses(self, len(self._ways) - 1, settle)

    def close(self) -> None:
        end_all([process.child for process in self._processes], _END_SECONDS)
        self._folder.remove()


def _split_by_request(
    completions: list[Completion], requests: list[Request]
) -> list[list[Completion]]:
    """Return the completions of each request; `completions` has those of all, one after another."""
    remaining = iter(completions)
    return [[next(remaining) for _ in range(request.completions)] for request in requests]


class _CopyProcess:
    """The other end of a process with a copy of the policy: messages to it, and its answers.

    gpu: the only GPU that the process sees, as CUDA_VISIBLE_DEVICES names it; empty for none.
    place: where it samples, for messages, such as "on the CPU".
    """

    def __init__(self, gpu: str, log_file: Path, place: str):
        environment = own_environment() | {"CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
        self.child = Child(command, environment, log_file)
        self.connection = self.child.connection()
        self._log_file = log_file
        self._place = place
        self._is_loading = False

    def load(self, folder: Path, version: int) -> None:
        """Ask the process to read the weights in a folder; `finish_loading` waits until it has."""
        self.send(Load(folder, version))
        self._is_loading = True

    def finish_loading(self) -> None:
        """Wait until the process has read the weights, if it was asked to."""
        if self._is_loading:
            self._receive()
        self._is_loading = False

    def completions(self) -> list[Completion]:
        """Return the completions of a `Complete` that was sent, once the process has answered."""
        answer = self._receive()
        assert answer is not None
        return answer

    def send(self, message: Start | Load | Complete) -> None:
        """Send a message to the process. Raises SamplerLost if it has ended."""
        try:
            self.connection.send_bytes(pickled(message))
        except OSError as error:
            raise self._lost_error() from error

    def _receive(self) -> list[Completion] | None:
        """Return the next answer; answers come in the order of the messages.

        Raises the answer if it is an error, and SamplerLost if the process has ended.
        """
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost_error() from error
        if isinstance(answer, PgtoolkitError):
            raise answer
        return answer

    def _lost_error(self) -> SamplerLost:
        """Return the error that says how the process has ended, and what it printed last."""
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
            f"the process that samples {self._place} {fault}. {last_words(self._log_file)} {LOST}"
        )
