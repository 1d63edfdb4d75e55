"""Samples by servers: gives them each version of the weights, proves that it came, and shares out
requests."""

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
from typing import Any

import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.config.schema_samplers import VllmSamplerConfig
from pgtoolkit.errors import SamplerLost
from pgtoolkit.model.policy import torch_type
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.proof import Proof
from pgtoolkit.sampling.samplers import SameProcesses, Sampler
from pgtoolkit.sampling.server_api import Sampling, plan_servers
from pgtoolkit.sampling.server_client import Server
from pgtoolkit.sampling.server_process import (
    ServerProcess,
    end_servers,
    own_environment,
    reserve_port,
)
from pgtoolkit.sampling.trained_policy import TrainedPolicy
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.sampling.weights_folder import WeightsFolder
from pgtoolkit.system.background import in_background
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.tasks.stops import StopStrings

log = logging.getLogger("pgtoolkit")

_PROGRESS_SECONDS = 15
_IN_FLIGHT = 256
"""Requests under way at each server: with the fewest completions a request can have, as many as it
samples at once."""


class ServerSampler:
    """Completions from servers that share the requests; every rank has one, and rank 0 starts and
    fills the servers.

    api: the words of the servers. trained: the module in training. prompts: token ids of some
        prompts of the task, for
    the proof of each version. room: most tokens of a document. write_settings: writes the files of
        the model's folder
    but for the weights. run_dir: where the logs go.
    """

    def __init__(
        self,
        api: Vllm,
        config: Config,
        trained: TrainedPolicy,
        layout: Layout,
        prompts: list[list[int]],
        room: int,
        write_settings: Callable[[Path], None],
        run_dir: Path,
    ):
        policy, chosen, rollout = trained.policy, config.sampler, config.rollout
        assert isinstance(chosen, VllmSamplerConfig)
        assert isinstance(rollout, PolicyRolloutConfig)
        self._chosen = chosen
        self._api, self._config, self._layout, self._run_dir = api, config, layout, run_dir
        self._write_settings = write_settings
        of_training = Sampling(
            temperature=rollout.temperature,
            top_p=1.0 if rollout.top_p is None else rollout.top_p,
            max_tokens=rollout.max_completion_length,
            ends=end_tokens(policy.model.generation_config, policy.tokenizer),
            stops=StopStrings(rollout.stop, policy.tokenizer),
            vocabulary_size=policy.vocabulary_size,
            seeded=chosen.seeded,
        )
        self._ways = [of_training]
        dtype = torch_type(chosen.dtype, policy.compute_dtype)
        self._proof = Proof(trained, prompts, room, chosen.tolerance, dtype)
        self.tolerance = self._proof.tolerance
        parent = None if chosen.weights_folder is None else Path(chosen.weights_folder)
        self._folder = WeightsFolder.of_ranks(layout, parent, run_dir, dtype, bool(chosen.urls))
        self._plan = plan_servers(api, config, layout, str(dtype).removeprefix("torch."), room)
        # A port is open to everybody on the machine.
        self._key = os.environ.get(api.KEY) or (secrets.token_hex(16) if self._plan.gpus else None)
        self._servers = [self._server(url) for url in chosen.urls]
        self._processes: list[ServerProcess] = []
        self._version: int | None = None
        self._asleep = False

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Called by every rank at the same time. The first call starts the servers, from a folder
        of these weights."""
        new, first, log_probs = version != self._version, self._version is None, None
        with failing_together(self._layout):
            if new:
                self._folder.write(weights(), self._layout, self._write_settings)
        if new and self._plan.sleeps:
            log_probs = self._proof.log_probs()
        with failing_together(self._layout):
            if self._plan.sleeps:
                # the servers are about to take back the memory that they gave
                torch.cuda.empty_cache()
        if first:
            self._start()
        # What sleeps has lost its weights. What was started just now has these, and is given them
        # all the same, so that it takes hold of the folder before the first step.
        load = partial(self._wake, load=new or self._asleep)
        loading = in_background(partial(self._of_each, load)) if self._layout.rank == 0 else None
        if new and log_probs is None:
            log_probs = self._proof.log_probs()  # while the servers load
        with failing_together(self._layout):
            if loading is not None:
                loading.result()
        self._asleep = False
        if new:
            assert log_probs is not None
            self._version = version
            self._prove(log_probs, version)

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        return self.complete_in(0, requests, more)

    def complete_in(self, way: int, requests: list[Request], more: bool) -> list[Completion]:
        """Those of all requests, which are all under way at once; where servers sleep, called by
        every rank."""
        deadline, count, sampling = self._deadline(), len(self._servers), self._ways[way]
        calls = [
            partial(
                self._servers[(number + self._layout.rank) % count].complete,
                *(request, sampling, self._salt, self._version, deadline),
            )
            for number, request in enumerate(requests)
        ]
        completions = _at_once(calls, _IN_FLIGHT * count)
        # to others', another run may have given its weights
        if self._chosen.urls and self._layout.rank == 0:
            self._of_each(lambda server: self._proof.check_kept(server.url, self._score(server)))
        if self._plan.sleeps and not more:
            self._put_to_sleep()
        return [completion for several in completions for completion in several]

    def sampling_otherwise(
        self, rollout: PolicyRolloutConfig, settle: Callable[[], object]
    ) -> Sampler:
        """Samples by the same servers as `rollout` says; settle: waits for what training is having
        sampled."""
        top_p = 1.0 if rollout.top_p is None else rollout.top_p
        sampling = dataclasses.replace(
            self._ways[0],
            temperature=rollout.temperature,
            top_p=top_p,
            max_tokens=rollout.max_completion_length,
        )
        self._ways.append(sampling)
        return SameProcesses(self, len(self._ways) - 1, settle)

    def close(self) -> None:
        """Ends the servers that were started here, and leaves alone those that were joined."""
        end_servers(self._processes)
        self._folder.remove()
        for server in self._servers:
            server.close()

    @property
    def _salt(self) -> str:
        """What a server has cached of a prompt is used with the same weights alone."""
        return f"{self._path.name}-{self._version}"

    @property
    def _path(self) -> Path:
        """Of the folder with the weights, once they were published."""
        assert self._folder.path is not None
        return self._folder.path

    def _deadline(self) -> float:
        return time.monotonic() + self._chosen.answer_seconds

    def _start(self) -> None:
        """Until all servers answer; ranks other than 0 are told where."""
        layout, numbers = self._layout, range(len(self._plan.gpus))
        for begin in range(0, max(1, len(numbers)), max(1, self._plan.at_once)):
            with failing_together(layout):
                if layout.rank == 0:
                    for number in numbers[begin : begin + self._plan.at_once]:
                        self._servers.append(self._started(number))
            began = told = time.monotonic()
            while True:
                with failing_together(layout):
                    waiting = (
                        [server for server in self._servers if not server.is_up()]
                        if layout.rank == 0
                        else []
                    )
                    seconds, limit = time.monotonic() - began, self._chosen.start_seconds
                    if waiting and seconds > limit:
                        raise SamplerLost(
                            f"the sampling server {waiting[0].url} does not answer within "
                            f"sampler.start_seconds={limit}. {waiting[0].last_words()}"
                        )
                if waiting and time.monotonic() - told > _PROGRESS_SECONDS:
                    told = time.monotonic()
                    where = f"{waiting[0].url}, of at most {limit} s"
                    log.info(f"waiting for the sampling server {where}: {seconds:.0f} s")
                # However long it takes, no rank waits long for another.
                if not gather_objects(len(waiting), layout.world_group)[0]:
                    break
                time.sleep(0.2)
        urls = [server.url for server in self._servers]
        self._key, urls = gather_objects((self._key, urls), layout.world_group)[0]
        if layout.rank > 0:
            self._servers = [self._server(url) for url in urls]

    def _server(self, url: str, process: ServerProcess | None = None) -> Server:
        return Server(self._api, url, self._chosen.answer_seconds, process, self._key)

    def _started(self, number: int) -> Server:
        """The server of this number, which is not up yet."""
        reserved, gpus, name, host = (
            reserve_port(),
            self._plan.gpus[number],
            self._chosen.name,
            "127.0.0.1",
        )
        port = reserved.getsockname()[1]
        log_file = self._run_dir / (
            f"{name}-{number}.log" if len(self._plan.gpus) > 1 else f"{name}.log"
        )
        command = self._api.command(self._config, self._path, self._plan, host, port)
        # Where this process has a variable already, its value holds.
        variables = {
            variable: os.environ.get(variable, value)
            for variable, value in self._api.VARIABLES.items()
        }
        assert self._key is not None
        # which is its owner's alone to read there, other than in its arguments
        variables[self._api.KEY] = self._key
        variables |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        paths = [own_environment().get("PYTHONPATH"), self._api.MODULES and str(self._api.MODULES)]
        variables |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        where = "" if gpus is None else f" on GPU {gpus}"
        log.info(f"starting a sampling server{where}; its log: {log_file}")
        process = ServerProcess(command, variables, log_file, reserved)
        self._processes.append(process)
        return self._server(f"http://{host}:{port}", process)

    def _wake(self, server: Server, load: bool) -> None:
        """load: and give it the weights that lie in the folder, before it takes the rest of its
        memory back."""
        deadline = self._deadline()
        if self._asleep:
            server.post(self._api.wake("weights"), deadline)
        if load:
            server.post(self._api.load(self._path, self._config), deadline)
        if self._asleep:
            server.post(self._api.wake("cache"), deadline)
        if load:
            server.post(self._api.forget(), deadline)

    def _put_to_sleep(self) -> None:
        with failing_together(self._layout):
            pass  # until every rank has its completions
        with failing_together(self._layout):
            if self._layout.rank == 0:
                deadline = self._deadline()
                self._of_each(lambda server: server.post(self._api.sleep(), deadline))
        self._asleep = True

    def _prove(self, log_probs: Tensor, version: int) -> None:
        scores = None
        with failing_together(self._layout):
            if self._layout.rank == 0:
                scores = self._of_each(self._score)
        scores = gather_objects(scores, self._layout.world_group)[0]
        with failing_together(self._layout):
            self._proof.check([server.url for server in self._servers], scores, log_probs, version)

    def _score(self, server: Server) -> Tensor:
        return server.score(self._proof.text, self._salt, self._deadline())

    def _of_each(self, function: Callable[[Server], Any]) -> list[Any]:
        return _at_once([partial(function, server) for server in self._servers], len(self._servers))


def _at_once(calls: list[Callable[[], Any]], most: int) -> list[Any]:
    """What the calls return, in their order, at most so many under way; the first error that one
    raises, at once."""
    waiting, results, lock = deque(enumerate(calls)), [None] * len(calls), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                number, call = waiting.popleft()
            results[number] = call()

    # Not the threads of an executor: an interrupted run would wait for them at its end.
    for worker in as_completed([in_background(work) for _ in range(min(len(calls), most))]):
        if worker.exception() is not None:
            waiting.clear()
        worker.result()
    return results
