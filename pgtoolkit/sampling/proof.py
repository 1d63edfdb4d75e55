"""The proofs that a server samples from the weights it was given: its log-probs against the
trainer's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pgtoolkit.batch import Document, pack
from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling.server_api import LOST
from pgtoolkit.sampling.trained_policy import TrainedPolicy

_TEXT = 256
"""Tokens of the text at most."""
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Of the mean difference, by what the body computes in: far above rounding, far below what other
weights give."""
_MOVED = 0.02
"""Part of the tolerance by which the trainer's log-probs of a text change at least, where a
server's not changing tells
that it still has the weights of before: equal to the last bit they are by chance never."""


class Proof:
    """After each version of the weights a server's log-probs of a fixed text are the trainer's, and
    move with them.

    trained: the module in training. prompts: token ids of prompts of the task. room: most tokens of
        a document.
    tolerance: of the mean absolute difference; None: by the coarser number type of the two. dtype:
        that of the servers.
    """

    def __init__(
        self,
        trained: TrainedPolicy,
        prompts: list[list[int]],
        room: int,
        tolerance: float | None,
        dtype: torch.dtype,
    ):
        self._trained = trained
        coarser = max(_TOLERANCE[trained.policy.compute_dtype], _TOLERANCE[dtype])
        self.tolerance = coarser if tolerance is None else tolerance
        self.text = [token for prompt in prompts for token in prompt][: min(_TEXT, room - 1)]
        self._version = 0
        self._trainer: Tensor | None = None
        self._servers: dict[str, Tensor] = {}

    def check(self, urls: list[str], scores: list[Tensor], trainer: Tensor, version: int) -> None:
        """Raises SamplerLost where a server does not have the weights of this version, which the
        trainer has.

        scores: of each server the log-probs of the text; trainer: those of `log_probs`.
        """
        moved = 0.0 if self._trainer is None else (trainer - self._trainer).abs().mean().item()
        for url, server in zip(urls, scores, strict=True):
            fault = (
                f"the sampling server {url} does not sample from the weights of version {version}"
            )
            if moved > _MOVED * self.tolerance and torch.equal(server, self._servers[url]):
                raise SamplerLost(
                    f"{fault}, but still from those of version {self._version}: it answers to the "
                    f"last bit as it did, and the trainer's log-probs have changed by {moved:.2g} "
                    "on average. The new weights did not reach it: does it see "
                    f"sampler.weights_folder? Start it again. {LOST}"
                )
            difference = (server.double() - trainer).abs()
            if not difference.mean() <= self.tolerance:
                raise SamplerLost(
                    f"{fault}: the log-probs of a text differ from the trainer's by "
                    f"{difference.mean():.2g} on average and {difference.max():.2g} at most, where "
                    f"sampler.tolerance={self.tolerance:g} is allowed on average. Old or partly "
                    f"old weights, or those of another model, look so. {LOST}"
                )
        self._version, self._trainer, self._servers = (
            version,
            trainer,
            dict(zip(urls, scores, strict=True)),
        )

    def check_kept(self, url: str, scores: Tensor) -> None:
        """Raises SamplerLost where a server has other weights than when they were checked; scores:
        of the text, now."""
        changed = (scores - self._servers[url]).abs().mean().item()
        if not changed <= self.tolerance:
            raise SamplerLost(
                f"the sampling server {url} got other weights than those of version "
                f"{self._version} while it sampled: its log-probs of a text changed by "
                f"{changed:.2g} on average. Does another run use it? A server is for one run at a "
                f"time. {LOST}"
            )

    def log_probs(self) -> Tensor:
        """(S - 1,) float64 of the text's tokens from the second on, by the forward pass that
        training uses.

        All ranks call this together.
        """
        count = len(self.text) - 1
        document = Document(
            tokens=torch.tensor(self.text),
            loss_mask=torch.arange(len(self.text)) >= 1,
            old_log_probs=torch.zeros(count),
            advantages=torch.zeros(count),
            group=0,
            name="the proof of a version",
        )
        micro_batch = pack([document])
        return self._trained.log_probs(micro_batch, 1.0).cpu()[micro_batch.labels >= 0].double()


def check_batch(sampled: Tensor, trainer: Tensor, tolerance: float, top_p: float | None) -> None:
    """Raises SamplerLost where the log-probs that servers gave are not the trainer's of the same
    tokens, (N,) each.

    top_p: those of a server are of the tokens that it keeps, which have this probability or more
        together.
    """
    below, above = (
        (trainer - sampled).clamp(min=0),
        (sampled - trainer + math.log(top_p or 1.0)).clamp(min=0),
    )
    difference = below + above
    mean, largest = difference.mean().item(), difference.max().item()
    if not mean <= tolerance:
        raise SamplerLost(
            "the sampling servers wrote a batch that the trainer's weights would not: the "
            f"log-probs of {len(sampled)} tokens differ from the trainer's by {mean:.2g} on "
            f"average and {largest:.2g} at most, where sampler.tolerance={tolerance:g} is allowed "
            "on average. Another prompt, another temperature, an old prefix cache, or log-probs "
            "from before the temperature (start it with --logprobs-mode processed_logprobs) look "
            f"so. The batch is not trained. {LOST}"
        )
