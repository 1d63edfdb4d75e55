"""The program of a process that samples from a copy of the policy, for the process that started it.

Messages and answers are pickled objects on its channel: first a `Start`, which has no answer, then
any number of `Load` and `Complete`, each with one answer. An error that a user can mend is sent as
the answer; any other error ends the process, and its traceback is in the log.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.model.policy import PolicyDescription
from pgtoolkit.model.setup import prepare_torch
from pgtoolkit.ranks.agreement import pickled
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import SamplingSettings, TransformersSamplerSettings
from pgtoolkit.sampling.vllm_worker.pgtk_vllm_worker import FromMemory
from pgtoolkit.system.report import say


@dataclass(frozen=True)
class Start:
    """The first message: the policy, and the ways to sample from it.

    settings: of each sampler.
    device: "cuda" or "cpu".
    num_threads: of PyTorch, on which the order of a sum may depend.
    """

    policy: PolicyDescription
    ways: list[SamplingSettings]
    settings: TransformersSamplerSettings
    device: str
    num_threads: int


@dataclass(frozen=True)
class Load:
    """Asks to read the weights of this version from a folder; answered, with None, once they have
    been read."""

    folder: Path
    version: int


@dataclass(frozen=True)
class Complete:
    """Asks to complete these requests with the weights that were loaded last; answered by a list of
    `Completion`.

    way: the place of the settings to sample by in `Start.ways`.
    """

    way: int
    requests: list[Request]


Answer = list[Completion] | PgtoolkitError | None


class _Copy(FromMemory):
    """The policy of this process and its samplers; it reads weights as a worker of vLLM does."""

    def __init__(self, start: Start):
        self.device = torch.device(start.device)
        self._policy = start.policy.build(self.device)
        if start.policy.compute_dtype == torch.float32:
            # The model in training needs gradients, and without this process it would be sampled
            # itself in this type. For weights that need a gradient PyTorch may choose another
            # kernel, whose results differ in the last digit.
            self._policy.model.requires_grad_(True)
        self._samplers = [
            TransformersSampler(self._policy, sampling, start.settings, is_copy=True)
            for sampling in start.ways
        ]

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._policy.load(dict(weights_iterator))

    def answer(self, message: Load | Complete) -> Answer:
        try:
            if isinstance(message, Complete):
                return self._samplers[message.way].complete(message.requests)
            self.load_from_memory(str(message.folder))
            for sampler in self._samplers:
                sampler.publish(self._policy.weights, message.version)
        except PgtoolkitError as error:
            return error
        return None


def answer_calls(channel: Connection) -> None:
    """Answer until the channel is closed."""
    start: Start = pickle.loads(channel.recv_bytes())
    prepare_torch(start.num_threads)
    policy = _Copy(start)
    # transformers warns of padding, which a mask hides. This comes after its import, which sets a
    # level, and is the same in the process that trains.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    while True:
        try:
            message: Load | Complete = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        began = time.perf_counter()
        answer = policy.answer(message)
        say(f"{_named(message)}: {time.perf_counter() - began:.3f} s", error=True)
        channel.send_bytes(pickled(answer))


def _named(message: Load | Complete) -> str:
    if isinstance(message, Load):
        return f"weights of version {message.version}"
    return f"{sum(request.completions for request in message.requests)} completions"
