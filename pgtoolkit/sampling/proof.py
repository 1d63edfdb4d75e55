"""Proofs that a server samples from the weights that it was given: its log-probs are compared with
the trainer's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pgtoolkit.batch import pack_sampled
from pgtoolkit.document import SampledDocument
from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling.server_api import LOST
from pgtoolkit.sampling.trained_policy import TrainedPolicy

_TEXT_TOKENS = 256
"""Most tokens of the text."""
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Mean absolute difference that is allowed, by the type that the body computes in: far above
rounding, and far below the difference that other weights make."""
_MOVED = 0.02
"""Fraction of the tolerance. Where the trainer's log-probs of the text have changed by more than
this, a server whose own are equal to the last bit still has the old weights: that does not happen
by chance."""


class Proof:
    """Checks after each version of the weights that every server's log-probs of a fixed text are
    the trainer's, and have changed with them.

    trained: the module in training.
    prompts: token ids of prompts of the task, of which the text is made.
    room: most tokens of a document.
    tolerance: mean absolute difference that is allowed; None: by the coarser of the two number
        types.
    dtype: the number type of the servers.
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
        self.text = [token for prompt in prompts for token in prompt][: min(_TEXT_TOKENS, room - 1)]
        self._version = 0
        self._trainer: Tensor | None = None
        self._servers: dict[str, Tensor] = {}

    def check(self, urls: list[str], scores: list[Tensor], trainer: Tensor, version: int) -> None:
        """Raise SamplerLost where a server does not have the weights of this version.

        scores: each server's log-probs of the text. trainer: those of `log_probs`, by the weights
            of this version.
        """
        moved = 0.0 if self._trainer is None else (trainer - self._trainer).abs().mean().item()
        for url, server in zip(urls, scores, strict=True):
            fault = (
                f"the sampling server {url} does not sample from the weights of version {version}"
            )
            if moved > _MOVED * self.tolerance and torch.equal(server, self._servers[url]):
                raise SamplerLost(
                    f"{fault}, but still from those of version {self._version}: its log-probs of "
                    "a text have not changed by a bit, and the trainer's have changed by "
                    f"{moved:.2g} on average. The new weights did not reach it: does it see "
                    f"sampler.weights_folder? Start it again. {LOST}"
                )
            difference = (server.double() - trainer).abs()
            if not difference.mean() <= self.tolerance:
                raise SamplerLost(
                    f"{fault}: the log-probs of a text differ from the trainer's by "
                    f"{difference.mean():.2g} on average and {difference.max():.2g} at most, and "
                    f"sampler.tolerance={self.tolerance:g} allows less on average. It has old or "
                    f"partly old weights, or those of another model. {LOST}"
                )
        self._version = version
        self._trainer = trainer
        self._servers = dict(zip(urls, scores, strict=True))

    def check_kept(self, url: str, scores: Tensor) -> None:
        """Raise SamplerLost where a server has other weights than at the last `check`.

        scores: its log-probs of the text now.
        """
        changed = (scores - self._servers[url]).abs().mean().item()
        if not changed <= self.tolerance:
            raise SamplerLost(
                f"the sampling server {url} got other weights than those of version "
                f"{self._version} while it sampled: its log-probs of a text changed by "
                f"{changed:.2g} on average. Does another run use it? A server is for one run at a "
                f"time. {LOST}"
            )

    def log_probs(self) -> Tensor:
        """Return the (S - 1,) float64 log-probs of the text's tokens from the second on.

        They come from the forward pass that training uses. All ranks call this together.
        """
        document = SampledDocument(
            tokens=torch.tensor(self.text),
            loss_mask=torch.arange(len(self.text)) >= 1,
            group=0,
            name="the proof of a version",
        )
        micro_batch = pack_sampled([document])
        return self._trained.log_probs(micro_batch, 1.0).cpu()[micro_batch.labels >= 0].double()


def check_batch(sampled: Tensor, trainer: Tensor, tolerance: float, kept_share: float) -> None:
    """Raise SamplerLost where the log-probs that servers gave are not the trainer's of the same
    tokens.

    sampled, trainer: (N,), of the servers and of the trainer.
    kept_share: the least probability that the tokens have together which a server's log-probs are
        relative to, where the trainer's are not; 1 where both are alike. They may exceed the
        trainer's by up to -log(kept_share).
    """
    below = (trainer - sampled).clamp(min=0)
    allowed = -math.log(kept_share) if kept_share > 0 else math.inf
    above = (sampled - trainer - allowed).clamp(min=0)
    difference = below + above
    mean = difference.mean().item()
    largest = difference.max().item()
    if not mean <= tolerance:
        raise SamplerLost(
            "the sampling servers wrote a batch that the trainer's weights would not: the "
            f"log-probs of {len(sampled)} tokens differ from the trainer's by {mean:.2g} on "
            f"average and {largest:.2g} at most, and sampler.tolerance={tolerance:g} allows less "
            "on average. The servers saw another prompt, sampled by another temperature, used an "
            "old prefix cache, or gave log-probs from before the temperature (start them with "
            f"--logprobs-mode processed_logprobs). The batch is not trained. {LOST}"
        )
