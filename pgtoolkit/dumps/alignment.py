"""Whether each recorded log-prob is that of its own token: told by documents that begin alike, or by a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pgtoolkit.batch import Document
from pgtoolkit.config.schema import Config
from pgtoolkit.model.build import build_policy
from pgtoolkit.packing import pack
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.training.build import accelerator
from pgtoolkit.training.module import PolicyGradientModule

OWN, NEXT, BEFORE = 0, 1, -1
WHOSE = {NEXT: "of the next token", BEFORE: "of the token before"}
"""Whose log-prob stands at a token's place, where it is not its own."""

ENOUGH = 8
"""Places that it takes to tell."""
FITS = 0.1
"""Mean absolute log-ratio up to which a model counts as the policy that sampled: bfloat16 makes half of it."""

LOG_PROBS = "old_log_probs", "sampling_log_probs"

_TEMPERATURES = 2.0 ** np.linspace(-1, 1, 29)
"""Multiples of the configured temperature, at which the model's log-probs are compared with the recorded ones."""


@dataclass
class Branches:
    """Places at which two documents part: the last token they share, and the first they differ in.

    Under one policy the log-probs of a shared token are equal and those of different tokens are not. So log-probs of
    the next token differ already at the last shared one, and those of the token before are still equal at the first
    different one. shared, differing: absolute differences at these places. values: log-probs there, for their scale.
    """

    name: str
    shared: list[float] = field(default_factory=list)
    differing: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, group: Sequence[Document]) -> None:
        """group: documents of one prompt, all with these log-probs. Those of other weights tell nothing."""
        # Each with the next in the order of their tokens, with which it shares most.
        for one, other in itertools.pairwise(sorted(group, key=lambda document: document.tokens.tolist())):
            length = min(one.num_tokens, other.num_tokens)
            different = (one.tokens[:length] != other.tokens[:length]).nonzero()
            place = int(different[0]) if len(different) else 0
            both_trained = all(document.loss_mask[place - 1 : place + 1].all() for document in (one, other))
            if one.model_version == other.model_version and place > 1 and both_trained:
                first, second = (self._at(document, place) for document in (one, other))
                self.shared.append(abs(first[0] - second[0]))
                self.differing.append(abs(first[1] - second[1]))
                self.values += first

    def _at(self, document: Document, place: int) -> list[float]:
        trained = int(document.loss_mask[:place].sum())
        return getattr(document, self.name)[trained - 1 : trained + 1].tolist()

    @property
    def shift(self) -> int | None:
        """OWN, NEXT or BEFORE; None where too few places tell."""
        if len(self.shared) < ENOUGH:
            return None
        shared, differing = float(np.median(self.shared)), float(np.median(self.differing))
        spread = float(np.std(self.values))  # a tenth of it is more than engines differ by
        if differing > 2 * shared + 0.1 * spread:
            return OWN
        return NEXT if shared > 0.25 * spread else BEFORE

    @property
    def evidence(self) -> str:
        """What `shift` is told by."""
        return (
            f"where two documents of a prompt part ({len(self.shared)} places), the last shared token's differ by "
            f"{np.median(self.shared):.2g} and the first different token's by {np.median(self.differing):.2g} (medians)"
        )


@dataclass
class Shifts:
    """The recorded log-probs beside others of the same tokens: their correlation as they stand, and one place off."""

    pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, recorded: np.ndarray, others: np.ndarray) -> None:
        """(N,) each, of the trained tokens of a document in order."""
        self.pairs.append((recorded, others))

    def __str__(self) -> str:
        return "-1, 0, +1: " + ", ".join(f"{self._correlation(shift):.3f}" for shift in (BEFORE, OWN, NEXT))

    @property
    def shift(self) -> int | None:
        """Where the correlation is clearly highest; None where no place fits or too few tokens tell."""
        found = {shift: np.nan_to_num(self._correlation(shift), nan=-1.0) for shift in (BEFORE, OWN, NEXT)}
        second, best = sorted(found.values())[-2:]
        enough = sum(len(recorded) for recorded, _ in self.pairs) >= 2 * ENOUGH
        return max(found, key=found.get) if enough and best > 0.5 and best > second + 0.1 else None

    def _correlation(self, shift: int) -> float:
        """NaN where nothing varies."""
        ahead, behind = max(0, shift), max(0, -shift)
        mine = np.concatenate([recorded[behind : len(recorded) - ahead] for recorded, _ in self.pairs])
        others = np.concatenate([other[ahead : len(other) - behind] for _, other in self.pairs])
        if len(mine) < 2 or not mine.std() or not others.std():
            return float("nan")
        return float(np.corrcoef(mine, others)[0, 1])


class Judge:
    """The model of a configuration, which says what the log-probs of recorded tokens are."""

    def __init__(self, config: Config):
        from transformers.utils import logging

        logging.disable_progress_bar()
        on_gpu = accelerator(config) == "gpu"
        self._module = PolicyGradientModule(config, build_policy(config.model, None, on_gpu), ONE_PROCESS)
        self._module.to("cuda" if on_gpu else "cpu")
        self.vocabulary_size = self._module.policy.vocabulary_size
        self.max_positions = self._module.policy.max_positions
        self.temperature = config.rollout.temperature
        self.temperatures = self.temperature * _TEMPERATURES

    @torch.no_grad()
    def log_probs(self, document: Document) -> np.ndarray:
        """(1 + temperatures, N) of the trained tokens, by the forward pass that training uses; first at its own."""
        micro_batch = pack([document], [0]).counted().to(self._module.device)
        inputs, at = self._module.policy.loss_inputs(micro_batch), [self.temperature, *self.temperatures]
        found = [self._module.log_probs_of(inputs, micro_batch, float(temperature))[0] for temperature in at]
        return torch.stack(found)[:, micro_batch.labels >= 0].double().cpu().numpy()


class Judged:
    """What a model makes of the log-probs `name` of some documents, each with trained tokens.

    shifts: see there. differences: (N,) of each document, the model's log-prob less the recorded one, which is the log
    of the first ratio. difference: of all documents, one after the other.
    """

    def __init__(self, name: str, judge: Judge, documents: Sequence[Document]):
        self.name, self.judge, self.shifts = name, judge, Shifts()
        self.differences, self._errors = [], 0.0
        for document in documents:
            recorded, at_all = getattr(document, name).double().numpy(), judge.log_probs(document)
            self.shifts.add(recorded, at_all[0])
            self.differences.append(at_all[0] - recorded)
            self._errors = self._errors + np.square(at_all[1:] - recorded).sum(1)
        self.difference = np.concatenate(self.differences)

    @property
    def size(self) -> float:
        """Mean absolute difference of a token's log-prob."""
        return float(np.abs(self.difference).mean())

    @property
    def verdict(self) -> tuple[bool, str, str]:
        """(whether the log-probs are the model's at its temperature, what they are, what to do about it)."""
        name, temperature, best, gaps = self.name, self.judge.temperature, self.best_temperature, self.difference
        ratio = np.exp(self.differences[0]).mean()
        facts = f"(correlations at places {self.shifts}; first document's mean ratio {ratio:.4f})"
        if self.shifts.shift in WHOSE:
            return False, f"{name} are those {WHOSE[self.shifts.shift]} {facts}.", ""
        first = np.mean([abs(gap[0]) for gap in self.differences])
        rest = np.concatenate([gap[1:] for gap in self.differences])
        fits = self.size <= FITS and not first > 10 * self.size + FITS
        is_near = self.size <= 1e-3 or abs(np.log(best / temperature)) <= 0.02
        if self._improves and not (fits and is_near):
            what = f"{name} fit the model at a temperature of {best:.2f}, not at rollout.temperature={temperature:g}."
            advice = (
                f"Use rollout.temperature={best:.2f} if they were sampled at that; else they were taken before "
                "dividing by the temperature: record them after it."
            )
            return False, what, advice
        if fits:
            return True, f"{name} are the model's {facts}.", ""
        cause = "Other weights sampled them, or another model"
        if len(rest) and np.abs(rest).mean() <= FITS:
            cause = f"The first trained token's differ by {first:.2g}, the others by {np.abs(rest).mean():.2g}: the "
            cause += "mask begins within the prompt"
        elif (gaps < 1e-3).mean() > 0.95 and gaps.mean() < -0.02:
            share = f"{100 * (gaps < 1e-3).mean():.3g} %"
            cause = f"{share} of the tokens were recorded with more than the model's log-prob: top_p or top_k has cut "
            cause += "the distribution and renormalised it"
        return False, f"{name} are not the model's {facts}. {cause}.", ""

    @property
    def best_temperature(self) -> float:
        """At which the recorded log-probs fit the model best, by least squares; beyond the range its end."""
        place = int(np.argmin(self._errors))
        logs = np.log(self.judge.temperatures)
        if place in (0, len(logs) - 1):
            return float(np.exp(logs[place]))
        before, here, after = self._errors[place - 1 : place + 2]
        return float(np.exp(logs[place] + (logs[1] - logs[0]) * (before - after) / (2 * (before - 2 * here + after))))

    @property
    def _improves(self) -> bool:
        """Whether another temperature explains most of the squared differences."""
        return float(np.min(self._errors)) < 0.25 * float(np.square(self.difference).sum())
