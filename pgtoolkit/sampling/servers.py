"""Sampling by servers: they are given each version of the weights, prove that they have it, and
share the requests."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.errors import SamplerLost
from pgtoolkit.model.policy import torch_type
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.proof import Proof
from pgtoolkit.sampling.samplers import SameProcesses, Sampler
from pgtoolkit.sampling.server_api import ServerSampling, plan_servers
from pgtoolkit.sampling.server_client import Server
from pgtoolkit.sampling.server_process import (
    ServerProcess,
    end_servers,
    own_environment,
    reserve_port,
)
from pgtoolkit.sampling.settings import SamplingSettings, VllmSamplerSettings
from pgtoolkit.sampling.trained_policy import TrainedPolicy
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.sampling.weights_folder import WeightsFolder
from pgtoolkit.system.background import in_background
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.tasks.stops import StopStrings

log = logging.getLogger("pgtoolkit")

T = TypeVar("T")

_HOST = "127.0.0.1"
_PROGRESS_SECONDS = 15
"""Seconds between two messages while servers start."""
_IN_FLIGHT = 256
"""Requests under way at each server: enough to keep it busy where a request asks for one
completion."""


class ServerSampler:
    """Samples by servers that share the requests.

    Every rank has such a sampler; rank 0 starts the servers and gives them the weights.

    api: the words of the servers. trained: the module in training.
    seed: of the servers.
    on_gpu: whether servers that are started may compute on the GPUs of this machine.
    is_async: whether completions are asked for while the model is trained, so that no server can
        sleep meanwhile.
    prompts: token ids of some prompts of the task, for the proof of each version.
    room: most tokens of a document.
    write_settings: writes the files of the model's folder, except the weights.
    run_dir: the folder for the logs.
    """

    def __init__(
        self,
        api: Vllm,
        sampling: SamplingSettings,
        settings: VllmSamplerSettings,
        trained: TrainedPolicy,
        layout: Layout,
        prompts: list[list[int]],
        room: int,
        write_settings: Callable[[Path], None],
        run_dir: Path,
        *,
        seed: int,
        on_gpu: bool,
        is_async: bool,
    ):
        policy = trained.policy
        self._settings = settings
        self._api = api
        self._seed = seed
        self._layout = layout
        self._run_dir = run_dir
        self._write_settings = write_settings
        assert sampling.max_completion_length is not None
        of_training = ServerSampling(
            temperature=sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            max_tokens=sampling.max_completion_length,
            ends=end_tokens(policy.model.generation_config, policy.tokenizer),
            stops=StopStrings(sampling.stop, policy.tokenizer),
            vocabulary_size=policy.vocabulary_size,
            seeded=settings.seeded,
            keep_top=sampling.likeliest,
            top_k=sampling.top_k,
        )
        self._ways = [of_training]
        dtype = torch_type(settings.dtype, policy.compute_dtype)
        self._proof = Proof(trained, prompts, room, settings.tolerance, dtype)
        self.tolerance = self._proof.tolerance
        parent = None if settings.weights_folder is None else Path(settings.weights_folder)
        self._folder = WeightsFolder.of_ranks(
            layout, parent, run_dir, dtype, for_others=bool(settings.urls), published=True
        )
        number_type = str(dtype).removeprefix("torch.")
        self._plan = plan_servers(
            settings,
            layout,
            number_type,
            room,
            api.FIXED_MEMORY,
            on_gpu=on_gpu,
            is_async=is_async,
        )
        # Servers ask for a key, since their ports are open to everybody on the machine.
        self._key = os.environ.get(api.KEY) or (secrets.token_hex(16) if self._plan.gpus else None)
        self._servers = [self._server(url) for url in settings.urls]
        self._processes: list[ServerProcess] = []
        self._version: int | None = None
        self._asleep = False

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Give the servers these weights, and have them prove it; called by every rank at the same
        time.

        The first call starts the servers, from a folder of these weights.
        """
        is_new = version != self._version
        is_first = self._version is None
        log_probs = None
        with failing_together(self._layout):
            if is_new:
                self._folder.write(weights(), self._layout, self._write_settings)
        if is_new and self._plan.sleeps:
            log_probs = self._proof.log_probs()
        with failing_together(self._layout):
            if self._plan.sleeps:
                # The servers are about to take back the memory that they gave.
                torch.cuda.empty_cache()
        if is_first:
            self._start()
        # A server that slept has lost its weights. A server that has just started has these
        # weights, and still loads them again, to map the folder before the first step.
        load = partial(self._wake, load=is_new or self._asleep)
        loading = in_background(partial(self._of_each, load)) if self._layout.rank == 0 else None
        if is_new and log_probs is None:
            log_probs = self._proof.log_probs()  # while the servers load
        with failing_together(self._layout):
            if loading is not None:
                loading.result()
        self._asleep = False
        if is_new:
            assert log_probs is not None
            self._version = version
            self._prove(log_probs, version)

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        return self.complete_in(0, requests, more)

    def complete_in(self, way: int, requests: list[Request], more: bool) -> list[Completion]:
        """Return the completions of all requests, which the servers complete at the same time.

        Where the servers sleep, every rank calls this.
        """
        deadline = self._deadline()
        num_servers = len(self._servers)
        sampling = self._ways[way]
        assert self._version is not None
        calls = [
            partial(
                self._servers[(number + self._layout.rank) % num_servers].complete,
                *(request, sampling, self._salt, self._version, deadline),
            )
            for number, request in enumerate(requests)
        ]
        by_request = _at_once(calls, _IN_FLIGHT * num_servers)
        # Another run may have given its weights to servers that this one has only joined.
        if self._settings.urls and self._layout.rank == 0:
            self._of_each(lambda server: self._proof.check_kept(server.url, self._score(server)))
        if self._plan.sleeps and not more:
            self._put_to_sleep()
        return [completion for completions in by_request for completion in completions]

    def sampling_otherwise(
        self, sampling: SamplingSettings, settle: Callable[[], object]
    ) -> Sampler:
        """Return a sampler that samples as `sampling` says, by the same servers.

        settle: waits for the completions that are being sampled for training.
        """
        assert sampling.max_completion_length is not None
        way = dataclasses.replace(
            self._ways[0],
            temperature=sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            max_tokens=sampling.max_completion_length,
            keep_top=sampling.likeliest,
            top_k=sampling.top_k,
        )
        self._ways.append(way)
        return SameProcesses(self, len(self._ways) - 1, settle)

    def close(self) -> None:
        """End the servers that were started here, and leave those alone that were joined."""
        end_servers(self._processes)
        self._folder.remove()
        for server in self._servers:
            server.close()

    @property
    def _salt(self) -> str:
        """Return a text that differs for each version: a server uses what it has cached of a prompt
        only with the same text."""
        return f"{self._path.name}-{self._version}"

    @property
    def _path(self) -> Path:
        """Return the folder with the weights, once they were published."""
        assert self._folder.path is not None
        return self._folder.path

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.answer_seconds

    def _start(self) -> None:
        """Start the servers, wait until all answer, and tell the other ranks their addresses."""
        layout = self._layout
        numbers = range(len(self._plan.gpus))
        for begin in range(0, max(1, len(numbers)), max(1, self._plan.at_once)):
            with failing_together(layout):
                if layout.rank == 0:
                    for number in numbers[begin : begin + self._plan.at_once]:
                        self._servers.append(self._start_server(number))
            self._wait_until_up()
        urls = [server.url for server in self._servers]
        self._key, urls = gather_objects((self._key, urls), layout.world_group)[0]
        if layout.rank > 0:
            self._servers = [self._server(url) for url in urls]

    def _wait_until_up(self) -> None:
        """Wait until the servers answer that rank 0 has started or joined; called by every rank.

        Raises SamplerLost where a server needs more than sampler.start_seconds.
        """
        layout = self._layout
        limit = self._settings.start_seconds
        began = time.monotonic()
        last_message = began
        while True:
            with failing_together(layout):
                waiting: list[Server] = []
                if layout.rank == 0:
                    waiting = [server for server in self._servers if not server.is_up()]
                seconds = time.monotonic() - began
                if waiting and seconds > limit:
                    raise SamplerLost(
                        f"the sampling server {waiting[0].url} does not answer within "
                        f"sampler.start_seconds={limit}. {waiting[0].last_words()}"
                    )
            if waiting and time.monotonic() - last_message > _PROGRESS_SECONDS:
                last_message = time.monotonic()
                log.info(
                    f"waiting for the sampling server {waiting[0].url}, of at most {limit} s: "
                    f"{seconds:.0f} s"
                )
            # The ranks meet in each round, so that none waits long for another.
            if not gather_objects(len(waiting), layout.world_group)[0]:
                break
            time.sleep(0.2)

    def _server(self, url: str, process: ServerProcess | None = None) -> Server:
        return Server(self._api, url, self._settings.answer_seconds, process, self._key)

    def _start_server(self, number: int) -> Server:
        """Start the server of this number, and return it before it is up."""
        reserved = reserve_port()
        port = reserved.getsockname()[1]
        gpus = self._plan.gpus[number]
        name = self._settings.name
        is_only = len(self._plan.gpus) == 1
        log_file = self._run_dir / (f"{name}.log" if is_only else f"{name}-{number}.log")
        has_stops = bool(self._ways[0].stops)
        command = self._api.command(
            self._settings, self._seed, has_stops, self._path, self._plan, _HOST, port
        )
        place = "" if gpus is None else f" on GPU {gpus}"
        log.info(f"starting a sampling server{place}; its log: {log_file}")
        process = ServerProcess(command, self._variables(gpus), log_file, reserved)
        self._processes.append(process)
        return self._server(f"http://{_HOST}:{port}", process)

    def _variables(self, gpus: str | None) -> dict[str, str]:
        """Return variables for the environment of a server that sees these GPUs; None: all."""
        # Where this process has a variable already, its value holds.
        variables = {
            variable: os.environ.get(variable, value)
            for variable, value in self._api.VARIABLES.items()
        }
        assert self._key is not None
        # Other users can read a process's arguments, but not its environment.
        variables[self._api.KEY] = self._key
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpus
        paths = [own_environment().get("PYTHONPATH"), self._api.MODULES and str(self._api.MODULES)]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return variables

    def _wake(self, server: Server, load: bool) -> None:
        """Wake a server that sleeps. load: and have it load the weights that lie in the folder,
        before it takes the rest of its memory back."""
        deadline = self._deadline()
        if self._asleep:
            server.post(self._api.wake("weights"), deadline)
        if load:
            server.post(self._api.load(self._path, self._settings), deadline)
        if self._asleep:
            server.post(self._api.wake("cache"), deadline)
        if load:
            server.post(self._api.forget(), deadline)

    def _put_to_sleep(self) -> None:
        with failing_together(self._layout):
            pass  # every rank waits here until all have their completions
        with failing_together(self._layout):
            if self._layout.rank == 0:
                deadline = self._deadline()
                self._of_each(lambda server: server.post(self._api.sleep(), deadline))
        self._asleep = True

    def _prove(self, log_probs: Tensor, version: int) -> None:
        """Check on every rank that the servers have this version; log_probs: the trainer's."""
        scores: list[Tensor] = []
        with failing_together(self._layout):
            if self._layout.rank == 0:
                scores = self._of_each(self._score)
        scores = gather_objects(scores, self._layout.world_group)[0]
        with failing_together(self._layout):
            self._proof.check([server.url for server in self._servers], scores, log_probs, version)

    def _score(self, server: Server) -> Tensor:
        return server.score(self._proof.text, self._salt, self._deadline())

    def _of_each(self, function: Callable[[Server], T]) -> list[T]:
        """Call a function for all servers at the same time; return its results, by server."""
        return _at_once([partial(function, server) for server in self._servers], len(self._servers))


def _at_once(calls: list[Callable[[], T]], limit: int) -> list[T]:
    """Return the results of the calls, in their order, with at most `limit` under way.

    The first error of a call is raised at once, and no further call begins.
    """
    waiting = deque(enumerate(calls))
    results: dict[int, T] = {}
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                number, call = waiting.popleft()
            results[number] = call()

    # An interrupted run would wait at its end for the threads of an executor, not for these.
    for worker in as_completed([in_background(work) for _ in range(min(len(calls), limit))]):
        if worker.exception() is not None:
            waiting.clear()
        worker.result()
    return [results[number] for number in range(len(calls))]
