"""The proof that a server samples from the weights it was given: its log-probs against the trainer's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pgtoolkit.batch import Document
from pgtoolkit.errors import SamplerLost
from pgtoolkit.packing import pack
from pgtoolkit.sampling.vllm_client import LOST, Sampling
from pgtoolkit.tasks.completion import Completion, Request

_COMPLETIONS, _TOKENS, _TEXT = 8, 16, 256
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""Of the mean difference, by what the body computes in: far above rounding, far below what other weights give."""
_MOVED = 0.02
"""Part of the tolerance by which the trainer's log-probs of a text change at least, where a server's not changing tells
that it still has the weights of before: equal to the last bit they are by chance never."""
_BEYOND_NOISE, _CLEARLY = 3, 0.5
"""How many times their difference from the server's the trainer's log-probs have to change before the two versions can
be told apart; and up to which part of its distance from the new version a server's are those of the old one."""


@dataclass(frozen=True)
class _Scores:
    """Of the text, by a server and by the trainer, (S - 1,) each."""

    version: int
    server: Tensor
    trainer: Tensor


class Proof:
    """After each version of the weights, what a server makes of them is compared with what the trainer does.

    A few short completions of one prompt, sampled at the run's temperature, have to have the trainer's log-probs; they
    are sampled from all tokens, since top_p would leave those other than the server's. And the log-probs of a fixed
    text, before any temperature, have to move with the trainer's.
    trained: the `PolicyInTraining`. prompts: token ids of prompts of the task. room: most tokens of a document.
    tolerance: of the mean absolute difference; None: by the number type.
    """

    def __init__(self, trained: Any, sampling: Sampling, prompts: list[list[int]], room: int, tolerance: float | None):
        self._trained = trained
        self.tolerance = _TOLERANCE[trained.policy.compute_dtype] if tolerance is None else tolerance
        self._last: dict[str, _Scores] = {}
        self._anchors: dict[str, _Scores] = {}
        self.request = Request(prompts[0], _COMPLETIONS, seed=1)
        how = {
            "temperature": sampling.temperature or 1.0,
            "top_p": 1.0,
            "seeded": True,
        }  # 0: the likeliest, of no chance
        self.sampling = replace(sampling, max_tokens=min(_TOKENS, sampling.max_tokens), **how)
        self.text = [token for prompt in prompts for token in prompt][: min(_TEXT, room - 1)]

    def check(self, urls: list[str], found: list[tuple[Tensor, list[Completion]]], version: int) -> None:
        """Raises SamplerLost where a server does not have the weights of this version, which the trainer has.

        found: of each server the log-probs of the text, and the completions. All ranks call this together.
        """
        prompt = self.request.tokens
        tokens = [prompt + completion.tokens.tolist() for _, completions in found for completion in completions]
        sampled = self._log_probs(tokens, len(prompt), self.sampling.temperature)
        text = self._log_probs([self.text], 1, 1.0)
        for url, (server, completions) in zip(urls, found, strict=True):
            own = torch.cat([completion.log_probs for completion in completions])
            expected, sampled = sampled[: len(own)], sampled[len(own) :]
            what = f"the sampling server {url} does not sample from the weights of version {version}"
            self._check_movement(what, url, _Scores(version, server.double(), text.double()))
            self._check_difference(what, (own - expected).abs())

    def check_kept(self, url: str, scores: Tensor) -> None:
        """Raises SamplerLost where a server has other weights than when they were checked; scores: of the text, now."""
        last = self._last[url]
        changed = (scores.double() - last.server).abs().mean().item()
        if not changed <= self.tolerance:
            raise SamplerLost(
                f"the sampling server {url} got other weights than those of version {last.version} while it sampled: "
                f"its log-probs of a text changed by {changed:.2g} on average. Does another run use it? A server is "
                f"for one run at a time. {LOST}"
            )

    def _check_movement(self, what: str, url: str, now: _Scores) -> None:
        last, anchor = self._last.get(url, now), self._anchors.setdefault(url, now)
        self._last[url] = now
        moved = (now.trainer - last.trainer).abs().mean().item()
        if torch.equal(now.server, last.server) and moved > _MOVED * self.tolerance:
            raise SamplerLost(
                f"{what}, but still from those of version {last.version}: it answers to the last bit as it did, and "
                f"the trainer's log-probs have changed by {moved:.2g} on average. {_NOT_ARRIVED}"
            )
        if _distance(now.trainer, anchor.trainer) <= _BEYOND_NOISE * _distance(anchor.server, anchor.trainer):
            return
        old, new = _distance(now.server, anchor.trainer), _distance(now.server, now.trainer)
        if old < _CLEARLY * new:
            raise SamplerLost(
                f"{what}: its log-probs are {new:.2g} from the trainer's of that version, and {old:.2g} from those of "
                f"version {anchor.version}. {_NOT_ARRIVED}"
            )
        self._anchors[url] = now

    def _check_difference(self, what: str, difference: Tensor) -> None:
        mean, largest = difference.mean().item(), difference.max().item()
        if not mean <= self.tolerance:
            raise SamplerLost(
                f"{what}: the log-probs of {len(difference)} tokens differ from the trainer's by {mean:.2g} on average "
                f"and {largest:.2g} at most, where sampler.tolerance={self.tolerance:g} is allowed on average. Old or "
                "partly old weights, another model, another temperature, an old prefix cache, or log-probs from before "
                f"the temperature look so: start it with --logprobs-mode processed_logprobs. {LOST}"
            )

    def _log_probs(self, texts: list[list[int]], first: int, temperature: float) -> Tensor:
        """Of all tokens from `first` on, one text after the other, by the forward pass that training uses."""
        documents = [
            Document(
                tokens=torch.tensor(tokens),
                loss_mask=torch.arange(len(tokens)) >= first,
                old_log_probs=torch.zeros(len(tokens) - first),
                advantages=torch.zeros(len(tokens) - first),
                group=0,
                name="the proof of a version",
            )
            for tokens in texts
        ]
        micro_batch = pack(documents, [0] * len(documents))
        return self._trained.log_probs(micro_batch, temperature).cpu()[micro_batch.labels >= 0]


def check_batch(sampled: Tensor, trainer: Tensor, tolerance: float, top_p: float | None) -> None:
    """Raises SamplerLost where the log-probs that servers gave are not the trainer's of the same tokens, (N,) each.

    top_p: those of a server are of the tokens that it keeps, which have this probability or more together.
    """
    below, above = (trainer - sampled).clamp(min=0), (sampled - trainer + math.log(top_p or 1.0)).clamp(min=0)
    difference = below + above
    mean, largest = difference.mean().item(), difference.max().item()
    if not mean <= tolerance:
        raise SamplerLost(
            f"the sampling servers wrote a batch that the trainer's weights would not: the log-probs of {len(sampled)} "
            f"tokens differ from the trainer's by {mean:.2g} on average and {largest:.2g} at most, where "
            f"sampler.tolerance={tolerance:g} is allowed on average. Another prompt, a temperature that is ignored, or "
            f"log-probs from before the temperature look so. The batch is not trained. {LOST}"
        )


_NOT_ARRIVED = f"The new weights did not reach it: does it see sampler.weights_folder? Start it again. {LOST}"


def _distance(one: Tensor, other: Tensor) -> float:
    """Root of the mean squared difference."""
    return (one - other).square().mean().sqrt().item()
