"""Samples by servers of vLLM: gives them each version of the weights, proves that it came, and shares out requests."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pgtoolkit.config.schema import Config, PolicyRolloutConfig
from pgtoolkit.ranks.agreement import failing_together, gather
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.sampling.vllm_client import Sampling, Server
from pgtoolkit.sampling.vllm_proof import Proof
from pgtoolkit.sampling.vllm_start import Servers, plan
from pgtoolkit.sampling.weights_folder import WeightsFolder, whole
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.tasks.completion import Completion, Request
from pgtoolkit.tasks.stops import StopStrings

_IN_FLIGHT = 256
"""Requests under way at each server: with the fewest completions a request can have, as many as it samples at once."""


class VllmSampler:
    """Completions from servers that share the requests; every rank has one, and rank 0 starts and fills the servers.

    trained: the `PolicyInTraining`. prompts: token ids of some prompts of the task, for the proof of each version.
    room: most tokens of a document. write_settings: writes the files of the model's folder but for the weights.
    run_dir: where the logs go.
    """

    def __init__(
        self,
        config: Config,
        trained: Any,
        layout: Layout,
        prompts: list[list[int]],
        room: int,
        write_settings: Callable[[Path], None],
        run_dir: Path,
    ):
        policy, own = trained.policy, config.sampler
        self._config, self._layout, self._run_dir = config, layout, run_dir
        self._write_settings = write_settings
        self._sampling = Sampling(
            temperature=config.rollout.temperature,
            top_p=1.0 if config.rollout.top_p is None else config.rollout.top_p,
            max_tokens=config.rollout.max_completion_length,
            ends=end_tokens(policy.model.generation_config, policy.tokenizer),
            stops=StopStrings(config.rollout.stop, policy.tokenizer),
            vocabulary_size=policy.vocabulary_size,
            seeded=own.seeded,
        )
        self._proof = Proof(trained, self._sampling, prompts, room, own.tolerance)
        self.tolerance = self._proof.tolerance
        parent = None if own.weights_folder is None else Path(own.weights_folder)
        self._folder = WeightsFolder(parent, run_dir, policy.compute_dtype, for_others=bool(own.urls))
        self._plan = plan(config, layout, str(policy.compute_dtype).removeprefix("torch."), room)
        self._servers: list[Server] = []
        self._run_name = ""
        self._version: int | None = None
        self._asleep = False

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Called by every rank at the same time. The first call starts the servers, from a folder of these weights."""
        new, first = version != self._version, not self._servers
        with failing_together(self._layout):
            if self._plan.sleeps:
                torch.cuda.empty_cache()  # the servers are about to take back the memory that they gave
            if new:
                tensors = whole(weights())
                if self._layout.rank == 0:
                    self._write(tensors)
        if first:
            self._start()
        with failing_together(self._layout):
            if self._layout.rank == 0:
                load = new and not (first and self._plan.gpus)
                self._at_once([lambda server=server: self._wake(server, load) for server in self._servers])
        self._asleep = False
        if new:
            self._version = version
            self._prove()

    def complete(self, requests: list[Request], sampling: Sampling | None = None) -> list[Completion]:
        """Those of all requests, which are all under way at once; where servers sleep, called by every rank.

        sampling: None for the way of training.
        """
        deadline, count, sampling = self._deadline(), len(self._servers), sampling or self._sampling
        shared = [(self._servers[(i + self._layout.rank) % count], one) for i, one in enumerate(requests)]
        found = self._at_once(
            [
                lambda server=server, one=one: server.complete(one, sampling, self._salt, self._version, deadline)
                for server, one in shared
            ]
        )
        if self._config.sampler.urls and self._layout.rank == 0:  # to others', another run may have given its weights
            self._at_once([lambda server=server: self._check_kept(server) for server in self._servers])
        if self._plan.sleeps:
            self._put_to_sleep()
        return [completion for several in found for completion in several]

    def sampling_otherwise(self, rollout: PolicyRolloutConfig, settle: Callable[[], object]) -> Sampler:
        """Samples by the same servers as `rollout` says; settle: waits for what training is having sampled."""
        top_p = 1.0 if rollout.top_p is None else rollout.top_p
        more = {"temperature": rollout.temperature, "top_p": top_p, "max_tokens": rollout.max_completion_length}
        return _SameServers(self, dataclasses.replace(self._sampling, **more), settle)

    def close(self) -> None:
        """Ends the servers that were started here, and leaves alone those that were joined."""
        self._folder.remove()  # first: a kill in the meantime would leave it in memory for good
        for server in self._servers:
            server.close()

    @property
    def _salt(self) -> str:
        """What a server has cached of a prompt is used with the same weights alone."""
        return f"{self._run_name}-{self._version}"

    def _deadline(self) -> float:
        return time.monotonic() + self._config.sampler.answer_seconds

    def _write(self, tensors: dict[str, Tensor]) -> None:
        if self._folder.path is None:
            self._folder.make(sum(tensor.nbytes for tensor in tensors.values()), self._write_settings)
        self._folder.fill(tensors)

    def _start(self) -> None:
        """Until all servers answer; ranks other than 0 are told where."""
        started = None
        with failing_together(self._layout):
            if self._layout.rank == 0:
                started = Servers(self._config, self._plan, self._folder.path, self._run_dir)
                self._servers = started.all  # from here on `close` ends them
        up = False
        while not up:
            with failing_together(self._layout):
                up = started is not None and started.are_up()
            # However long it takes, no rank waits long for another.
            up = gather(up, self._layout.world_group)[0]
            time.sleep(0 if up else 0.2)
        urls = [server.url for server in self._servers]
        run_name, key = self._folder.path and self._folder.path.name, started and started.key
        self._run_name, urls, key = gather((run_name, urls, key), self._layout.world_group)[0]
        seconds = self._config.sampler.answer_seconds
        self._servers = self._servers or [Server(url, seconds, key=key) for url in urls]

    def _wake(self, server: Server, load: bool) -> None:
        """load: and give it the weights that lie in the folder, before it takes the rest of its memory back."""
        deadline = self._deadline()
        if self._asleep:
            server.post("/wake_up?tags=weights", deadline)
        if load:
            server.reload(self._folder.path, deadline)
        if self._asleep:
            server.post("/wake_up?tags=kv_cache", deadline)
        if load:
            server.post("/reset_prefix_cache", deadline)

    def _put_to_sleep(self) -> None:
        with failing_together(self._layout):
            pass  # until every rank has its completions
        with failing_together(self._layout):
            if self._layout.rank == 0:
                deadline = self._deadline()
                self._at_once(
                    [lambda server=server: server.post("/sleep?level=1", deadline) for server in self._servers]
                )
        self._asleep = True

    def _prove(self) -> None:
        found = None
        with failing_together(self._layout):
            if self._layout.rank == 0:
                found = self._at_once([lambda server=server: self._probe(server) for server in self._servers])
        found = gather(found, self._layout.world_group)[0]
        with failing_together(self._layout):
            self._proof.check([server.url for server in self._servers], found, self._version)

    def _probe(self, server: Server) -> tuple[Tensor, list[Completion]]:
        """One after the other, so that nothing else is computed beside the text, and it comes out the same twice."""
        deadline, proof = self._deadline(), self._proof
        scores = server.score(proof.text, self._salt, deadline)
        return scores, server.complete(proof.request, proof.sampling, self._salt, self._version, deadline)

    def _check_kept(self, server: Server) -> None:
        scores = server.score(self._proof.text, self._salt, self._deadline())
        self._proof.check_kept(server.url, scores)

    def _at_once(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """What the calls return, in their order; the first error that one of them raises, at once."""
        waiting, done = deque(enumerate(calls)), SimpleQueue()

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    number, call = waiting.popleft()
                    try:
                        done.put((number, call(), None))
                    except BaseException as error:
                        done.put((number, None, error))

        # Not the threads of an executor: an interrupted run would wait for them at its end.
        for _ in range(min(len(calls), _IN_FLIGHT * max(1, len(self._servers)))):
            threading.Thread(target=work, daemon=True).start()
        results = [None] * len(calls)
        for _ in calls:
            number, result, error = done.get()
            if error is not None:
                waiting.clear()
                raise error
            results[number] = result
        return results


class _SameServers:
    """A sampler by the servers of another one, which starts and ends them."""

    def __init__(self, owner: VllmSampler, sampling: Sampling, settle: Callable[[], object]):
        self._owner, self._sampling, self._settle = owner, sampling, settle
        self.tolerance = owner.tolerance

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        self._settle()  # servers have one version of the weights at a time
        self._owner.publish(weights, version)

    def complete(self, requests: list[Request]) -> list[Completion]:
        return self._owner.complete(requests, self._sampling)

    def close(self) -> None:
        """Nothing here is its own."""
