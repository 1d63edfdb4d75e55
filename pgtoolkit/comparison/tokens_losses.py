"""Numbers of each token of a step under a loss, computed by the code that trains."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.comparison.tokens_step import MadeStep, MeasuredMicroBatch
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.measure import clips
from pgtoolkit.losses.objective import Loss, Objective
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.training.whole_step import (
    of_whole_step,
    whole_step,
    with_kept_tokens,
    with_mean_factor,
    with_rewards,
    with_signs,
)

CLIPS = (
    "inside",
    "below, unchanged",
    "below, capped",
    "below, cut",
    "above, unchanged",
    "above, capped",
    "above, cut",
    "clamped",
)
"""Effects of a family's bounds on a token, by number.

Below or above the bounds the coefficient is unchanged where the advantage has the other sign,
capped where the weight stays at the bound, or cut to 0; a token of weight 0 has none to change.
Clamped: the log-ratio lies beyond plus or minus 20.
"""


@dataclass(frozen=True)
class LossOnStep:
    """One loss on a step. label: the overrides that choose it. lines: its equation.

    total: the step's loss, as training adds it up.
    vectors: by name, one number per trained token of the step in the order of its documents,
        float32 but for clip:
        ratio: the token's, or its document's where the family's scope is the document.
        clip: uint8, a place in CLIPS.
        weight: w_t, without the factor of a correction.
        factor: that factor, 0 for a token that entropy.top_fraction leaves out; missing where there
            is neither.
        coefficient: c_t, the derivative of the step's loss by the token's log-prob, without the
            entropy bonus.
        share: the token's part of the step's loss, with the penalty and the bonus.
    """

    loss: Loss
    total: float
    vectors: dict[str, np.ndarray]
    label: str = ""
    lines: list[str] = field(default_factory=list)

    def count(self, *clips: str) -> int:
        """Return how many tokens have one of these effects of CLIPS."""
        return int(np.isin(self.vectors["clip"], [CLIPS.index(clip) for clip in clips]).sum())


def loss_on_step(made: MadeStep, loss: Loss) -> LossOnStep:
    """Return the loss on the step's documents.

    Raises ConfigError if they lack what the loss reads, DataError for numbers that are not finite.
    """
    parts = [_numbers(loss, piece, made) for piece in _pieces(made, loss)]
    names = parts[0].keys()
    vectors = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return LossOnStep(loss, float(vectors["share"].astype(np.float64).sum()), vectors)


def common_vectors(made: MadeStep) -> dict[str, np.ndarray]:
    """Return the numbers of the step's trained tokens that do not depend on the loss.

    {name: float32 vector}:
        advantage.
        new_log_prob: under the weights before the step's update.
        entropy: of the policy.
        old_log_prob, sampling_log_prob, ref_log_prob: where they are known.
        difference: the old log-prob less the sampling one.
    """
    parts = [_common(piece, made.has_old_log_probs) for piece in made.pieces]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _common(piece: MeasuredMicroBatch, with_old: bool) -> dict[str, np.ndarray]:
    """Return `common_vectors` of a micro-batch. with_old: whether its old log-probs are the data's,
    not copies of the new ones."""
    tokens = piece.micro_batch
    trained = tokens.labels >= 0
    vectors = {"advantage": tokens.advantages, "new_log_prob": piece.log_probs}
    old = tokens.old_log_probs
    assert old is not None  # `_Watch` sets them
    if with_old:
        vectors["old_log_prob"] = old
    if tokens.sampling_log_probs is not None:
        vectors["sampling_log_prob"] = tokens.sampling_log_probs
        vectors["difference"] = old - tokens.sampling_log_probs
    if tokens.ref_log_probs is not None:
        vectors["ref_log_prob"] = tokens.ref_log_probs
    vectors["entropy"] = piece.entropy
    return {name: _of_trained(values, trained) for name, values in vectors.items()}


class _Piece(NamedTuple):
    """A part of the step as a loss reads it.

    log_probs, entropy: (T,).
    totals: of the step, with those that the loss asks for.
    is_whole_step: True if it is all of the step, for a loss that depends on all of it.
    """

    tokens: Tokens
    log_probs: Tensor
    entropy: Tensor
    totals: StepTotals
    is_whole_step: bool

    def objective(self, loss: Loss) -> Objective:
        dtype = self.log_probs.dtype
        return make_objective(self.tokens, self.totals, loss, dtype, Ranks(), self.is_whole_step)


def _pieces(made: MadeStep, loss: Loss) -> list[_Piece]:
    """Return the step's micro-batches, with the rewards and totals that the loss asks for.

    For a loss of the whole step it is one piece in float64, as in the first pass of training.
    Raises ConfigError if the documents lack what the loss reads.
    """
    _check_groups(made, loss)
    step = replace(made.step, micro_batches=[piece.micro_batch for piece in made.pieces])
    step = with_rewards(step, loss, Layout(), made.shape)
    step = with_signs(step, loss, Layout())
    step = with_mean_factor(step, loss.correction, Layout())
    _check_documents(step.micro_batches[0], made, loss)
    log_probs = [piece.log_probs for piece in made.pieces]
    entropies = [piece.entropy for piece in made.pieces]
    of_step = whole_step(step, log_probs, Layout(), entropies)
    if loss.entropy_top_fraction is not None:
        step, of_step, _ = with_kept_tokens(step, of_step, loss)
    if not of_whole_step(loss):
        parts = zip(step.micro_batches, log_probs, entropies, strict=True)
        return [_Piece(*part, step.totals, is_whole_step=False) for part in parts]
    assert of_step.entropy is not None
    log_probs = of_step.log_probs.double()
    return [
        _Piece(of_step.tokens, log_probs, of_step.entropy.double(), step.totals, is_whole_step=True)
    ]


def _numbers(loss: Loss, piece: _Piece, made: MadeStep) -> dict[str, np.ndarray]:
    """Return `LossOnStep.vectors` of a piece."""
    log_probs = piece.log_probs
    objective = piece.objective(loss)
    objective.check_finite(log_probs)
    losses, coefficients = objective.losses_and_coefficients(log_probs)
    terms = objective.token_terms(log_probs)
    penalties = objective.penalties
    vectors = {
        "clip": _clips(loss, piece, made),
        "weight": penalties.weights,
        "coefficient": coefficients,
        "share": losses,
    }
    if penalties.bonus:
        vectors["share"] = losses + penalties.by_entropy * piece.entropy
    if made.has_old_log_probs:
        vectors["ratio"] = terms.ratio
    corrected = objective.factors or terms.factors
    if corrected is not None:
        vectors["factor"] = corrected.values
    kept = piece.tokens.factors
    if kept is not None:
        vectors["factor"] = kept.to(losses.dtype) * vectors.get("factor", 1.0)
    return {name: _of_trained(values, objective.mask) for name, values in vectors.items()}


def _clips(loss: Loss, piece: _Piece, made: MadeStep) -> Tensor:
    """Return (T,) uint8 places in CLIPS, of the family alone, since a correction may make a
    gradient 0 too."""
    log_probs = piece.log_probs
    objective = piece.objective(replace(loss, correction=None))
    if not (made.has_old_log_probs and loss.family.reads_old_log_probs):
        return torch.zeros_like(log_probs, dtype=torch.uint8)
    terms = objective.token_terms(log_probs)
    low, high, cut_low, cut_high = clips(objective, log_probs)
    # As in CLIPS: 1 is unchanged, 2 capped and 3 cut below the bounds, and 3 more above them.
    effect = torch.where(terms.slope == 0, 3, 2)
    has_weight = objective.weights != 0
    below = torch.where(cut_low & has_weight, effect, low.long())
    above = torch.where(cut_high & has_weight, effect, high.long())
    places = torch.where(above > 0, above + 3, below)
    return torch.where(terms.clamped, CLIPS.index("clamped"), places).to(torch.uint8)


def _of_trained(values: Tensor, trained: Tensor) -> np.ndarray:
    values = values[trained]
    if values.dtype != torch.uint8:
        values = values.float()
    return values.numpy()


def _check_groups(made: MadeStep, loss: Loss) -> None:
    """Refuse a loss of groups that the step does not have."""
    family = loss.family
    asked = family.asked if isinstance(family, FunctionFamily) else frozenset()
    if made.has_groups or not (loss.needs_whole_groups or "group_rewards" in asked):
        return
    instead = "aggregation=token_mean" if loss.aggregation.needs_groups else "loss=grpo"
    raise _lacks(loss, ["group_id"], [instead])


def _check_documents(tokens: Tokens, made: MadeStep, loss: Loss) -> None:
    """Refuse a loss that reads numbers which the step's documents do not have, or whose part in a
    token is none of the token's.

    tokens: of one of the step's micro-batches.
    """
    if loss.kl is not None and loss.full_kl:
        raise ConfigError(
            f"kl={loss.kl.kind} needs the whole vocabulary at each token (got log-probs of the "
            "tokens that were written). Its part of the loss is no number of one token. Use "
            "kl=k3_ratio, or kl=none."
        )
    family = loss.family
    missing: dict[str, list[str]] = {}  # field -> overrides of losses that do not read it
    if loss.reads_old_log_probs and not made.has_old_log_probs:
        missing["old_log_probs"] = ["loss=reinforce", "correction=none", "kl=none"]
    if loss.needs_sampling_log_probs and tokens.sampling_log_probs is None:
        missing["sampling_log_probs"] = ["correction=none"]
    if loss.kl is not None and tokens.ref_log_probs is None:
        missing["ref_log_probs"] = ["kl=none"]
    if isinstance(family, FunctionFamily):
        needed = family.asked - family.may_lack
        for name in ("rewards", "group_rewards", "sampling_log_probs", "ref_log_probs"):
            if name in needed and getattr(tokens, name) is None:
                missing.setdefault(name, []).append("loss=grpo")
        if family.level == "step" and tokens.trajectory_index is not None:
            raise ConfigError(
                f"loss={family.name} needs documents that are one attempt at a prompt each (got "
                "trajectories of several). It depends on whole groups. Use loss=grpo."
            )
    if missing:
        # Each once: several fields may be missing for the same key.
        overrides = dict.fromkeys(itertools.chain.from_iterable(missing.values()))
        raise _lacks(loss, missing, overrides)


def _lacks(loss: Loss, missing: Iterable[str], overrides: Iterable[str]) -> ConfigError:
    """Return the error for fields that the step's documents lack.

    overrides: what does not read them.
    """
    return ConfigError(
        f"loss={loss.family.name} with this aggregation, correction and kl needs "
        f"{', '.join(missing)} of every document (got some without). Use {' '.join(overrides)}."
    )
