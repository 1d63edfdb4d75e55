"""The proof that a server samples from the weights it was given: its log-probs against the trainer's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pgtoolkit.batch import Document
from pgtoolkit.errors import SamplerLost
from pgtoolkit.rollouts.packing import pack
from pgtoolkit.rollouts.samplers import Completion, Request
from pgtoolkit.rollouts.vllm_client import LOST, Sampling

_COMPLETIONS, _TOKENS = 8, 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the mean difference, by what the body computes in: far above rounding, far below what other weights give."""
_MOVED = 0.02
"""Part of the tolerance by which the trainer's log-probs change at least, where a server's not changing tells that it
still has the weights of before: equal to the last bit they are by chance never."""


@dataclass(frozen=True)
class _Answer:
    version: int
    tokens: list[list[int]]
    sampled: Tensor
    trained: Tensor


class Proof:
    """A few short completions of one prompt, sampled by a server and scored by the trainer, after each version.

    The request is the same each time. It is sampled at the run's temperature, and from all tokens, since top_p would
    leave the trainer's log-probs other than the server's.
    trained: the `PolicyInTraining`. tolerance: of the mean absolute difference; None: by the number type.
    """

    def __init__(self, trained: Any, sampling: Sampling, prompt: list[int], tolerance: float | None):
        self._trained = trained
        self._tolerance = _TOLERANCE[trained.policy.compute_dtype] if tolerance is None else tolerance
        self._last: dict[str, _Answer] = {}
        self.request = Request(prompt, _COMPLETIONS, seed=1)
        self.sampling = replace(sampling, top_p=1.0, max_tokens=min(_TOKENS, sampling.max_tokens), seeded=True)

    def check(self, urls: list[str], found: list[list[Completion]], version: int) -> None:
        """Raises SamplerLost where what a server sampled does not have the trainer's log-probs.

        found: the completions of each server. The trainer has the weights of this version; its ranks all call this.
        """
        trained = self._log_probs([completion for several in found for completion in several])
        for url, completions in zip(urls, found, strict=True):
            sampled = torch.cat([completion.log_probs for completion in completions])
            own, trained = trained[: len(sampled)], trained[len(sampled) :]
            answer = _Answer(version, [completion.tokens.tolist() for completion in completions], sampled, own)
            self._check(url, answer)
            self._last[url] = answer

    def _check(self, url: str, answer: _Answer) -> None:
        difference = (answer.sampled - answer.trained).abs()
        mean, largest = difference.mean().item(), difference.max().item()
        last = self._last.get(url)
        what = f"the sampling server {url} does not sample from the weights of version {answer.version}"
        if last is not None and last.tokens == answer.tokens and torch.equal(last.sampled, answer.sampled):
            moved = (last.trained - answer.trained).abs().mean().item()
            if moved > _MOVED * self._tolerance:
                raise SamplerLost(
                    f"{what}, but still from those of version {last.version}: it answers to the last bit as it did, "
                    f"and the trainer's log-probs have changed by {moved:.2g} on average. The new weights did not "
                    f"reach it: does it see sampler.weights_folder? Start it again. {LOST}"
                )
        if not mean <= self._tolerance:
            raise SamplerLost(
                f"{what}: the log-probs of {len(difference)} tokens differ from the trainer's by {mean:.2g} on average "
                f"and {largest:.2g} at most, where sampler.tolerance={self._tolerance:g} is allowed on average. Old or "
                "partly old weights, another model, another temperature, an old prefix cache, or log-probs from before "
                f"the temperature look so: start it with --logprobs-mode processed_logprobs. {LOST}"
            )

    def _log_probs(self, completions: list[Completion]) -> Tensor:
        """Of all tokens of the completions, one after the other, by the forward pass that training uses."""
        prompt = torch.tensor(self.request.tokens)
        documents = []
        for completion in completions:
            tokens, count = torch.cat([prompt, completion.tokens]), len(completion.tokens)
            documents.append(
                Document(
                    tokens=tokens,
                    loss_mask=torch.arange(len(tokens)) >= len(prompt),
                    old_log_probs=completion.log_probs,
                    advantages=torch.zeros(count),
                    group=0,
                    name="the proof of a version",
                )
            )
        micro_batch = pack(documents, [0] * len(documents))
        return self._trained.log_probs(micro_batch).cpu()[micro_batch.labels >= 0]
