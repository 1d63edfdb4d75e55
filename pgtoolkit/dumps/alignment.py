"""Whether recorded log-probs are those of their own tokens, by others of the same tokens: a model's, or the file's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pgtoolkit.batch import Document, pack
from pgtoolkit.config.compose import compose
from pgtoolkit.config.overrides import reading
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.build import build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.training.build import accelerator
from pgtoolkit.training.module import PolicyGradientModule

LOG_PROBS = "old_log_probs", "sampling_log_probs"

ANY_TOKEN = 2**31 - 1
"""Size of a vocabulary that has every token."""
COMPARED_TOKENS = 2**17
"""Tokens whose two log-probs are compared with each other."""
_ENOUGH = 16
"""Tokens without which nothing is concluded."""
_FITS = 0.1
"""Mean absolute log-ratio up to which a model counts as the policy that sampled: bfloat16 makes half of it."""


class Comparison:
    """Recorded log-probs of some documents beside other log-probs of the same tokens.

    pairs: of each document (recorded, other), each (N,) of its trained tokens in order, with a token in all.
    size: mean absolute difference of a token's log-prob. correlations: at the places -1, 0, +1.
    """

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]):
        self.pairs = pairs
        self.size = float(np.abs(np.concatenate([other - recorded for recorded, other in pairs])).mean())
        self.fits = self.size <= _FITS
        self.correlations = [self._correlation(shift) for shift in (-1, 0, 1)]

    @property
    def whose(self) -> str | None:
        """To which tokens the recorded ones belong, where those are clearly not their own; None where too few tell."""
        correlations = np.nan_to_num(self.correlations, nan=-1.0)
        _, second, best = np.sort(correlations)
        if sum(len(recorded) for recorded, _ in self.pairs) < _ENOUGH or best <= 0.5 or best <= second + 0.1:
            return None
        return ("of the token before", None, "of the next token")[int(correlations.argmax())]

    def __str__(self) -> str:
        correlations = ", ".join(f"{correlation:.3f}" for correlation in self.correlations)
        ratio = np.exp(np.subtract(*self.pairs[0][::-1])).mean()
        return f"(correlations at places -1, 0, +1: {correlations}; first document's mean ratio {ratio:.4f})"

    def _correlation(self, shift: int) -> float:
        """Of each recorded log-prob with the other of the token so many places on; NaN where nothing varies."""
        ahead, behind = max(0, shift), max(0, -shift)
        recorded = np.concatenate([values[behind : len(values) - ahead] for values, _ in self.pairs])
        others = np.concatenate([values[ahead : len(values) - behind] for _, values in self.pairs])
        if len(recorded) < 2 or not recorded.std() or not others.std():
            return float("nan")
        return float(np.corrcoef(recorded, others)[0, 1])


def configured(path: str, overrides: Sequence[str]) -> Config:
    """As `pgtk rollout=recorded rollout.path=PATH OVERRIDES` would train; ConfigError with all problems."""
    config, report = validated(compose([*reading(path), *overrides]))
    if report.problems:
        raise ConfigError("\n".join(dict.fromkeys(report.problems)))
    return config


def recorded_pair(document: Document) -> tuple[np.ndarray, np.ndarray] | None:
    """The document's sampling and old log-probs, (N,) float64 each, where it has both for a token."""
    known = [getattr(document, name) for name in LOG_PROBS]
    if not document.num_trained or any(values is None for values in known):
        return None
    old, sampling = (values.double().numpy() for values in known)
    return sampling, old


class SamplingPolicy:
    """The model of a configuration, which says what the log-probs of recorded tokens are at its temperature."""

    def __init__(self, config: Config):
        from transformers.utils import logging

        logging.disable_progress_bar()
        on_gpu = accelerator(config) == "gpu"
        self._module = PolicyGradientModule(config, build_policy(config.model, None, on_gpu), ONE_PROCESS)
        self._module.to("cuda" if on_gpu else "cpu")
        self.vocabulary_size = self._module.policy.vocabulary_size
        self.max_positions = self._module.policy.max_positions

    def compare(self, documents: Sequence[Document]) -> Iterator[tuple[str, list[Document], Comparison]]:
        """Of each kind of log-probs: its name, the documents that have it, and these beside the model's.

        Raises DataError for a token that the model does not have.
        """
        others = [self._log_probs(document) for document in documents]
        for name in LOG_PROBS:
            known = [pair for pair in zip(documents, others, strict=True) if getattr(pair[0], name) is not None]
            if known:
                pairs = [(getattr(document, name).double().numpy(), other) for document, other in known]
                yield name, [document for document, _ in known], Comparison(pairs)

    @torch.no_grad()
    def _log_probs(self, document: Document) -> np.ndarray:
        """(N,) of the trained tokens, by the forward pass that training uses."""
        if (largest := int(document.tokens.max())) >= self.vocabulary_size:
            raise DataError(
                f"{document.name} needs token ids of the model's vocabulary, below {self.vocabulary_size} (got "
                f"{largest}). Another model wrote it. Use model.path of the policy that sampled."
            )
        micro_batch = pack([document]).counted().to(self._module.device)
        return self._module.log_probs(micro_batch)[micro_batch.labels >= 0].double().cpu().numpy()
