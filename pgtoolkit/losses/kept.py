"""Log-probs over the tokens that truncated sampling has kept.

Sampling by top_p or top_k draws from the tokens of a set S alone, renormalised. The log-prob of a
label y in training is then taken over the same set, whatever the policy has learned since:

    p = z_y - log sum_{v in S} exp(z_v)        with z the logits over the temperature

so that the sampler's own log-prob is the old one. Its derivative by the logit of v, times the
temperature, is onehot(y) - softmax_S in S, and 0 elsewhere.

T is the number of positions, k the most tokens of a set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pgtoolkit.losses.centering import CenteredRows


@dataclass(frozen=True)
class KeptSets:
    """The set S of each position of a piece of a step.

    ids: (T, k) int64, the tokens of S; -1 where unused, and where masked.
    is_label: (T, k) bool, True at the label.
    known: (T,) bool, False where S is all of the vocabulary.
    wrong: (T,) bool, True where S lacks the label, or has a token twice.
    """

    ids: Tensor
    is_label: Tensor
    known: Tensor
    wrong: Tensor

    @classmethod
    def of(cls, ids: Tensor | None, labels: Tensor) -> KeptSets | None:
        """Return the sets of ids (T, k) integers, of labels (T,); None without ids.

        Without an id at a position, S is all of the vocabulary there.
        """
        if ids is None:
            return None
        ids = torch.where((labels >= 0).unsqueeze(-1), ids.long(), -1)
        is_label = (ids == labels.unsqueeze(-1)) & (ids >= 0)
        known = (ids >= 0).any(-1)
        in_order = ids.sort(-1).values
        twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        wrong = known & (~is_label.any(-1) | twice.any(-1))
        return cls(ids, is_label, known, wrong)

    def take(self, rows: Tensor) -> KeptSets:
        """Return the sets of some rows."""
        return replace(self, **{name: vector[rows] for name, vector in vars(self).items()})

    def renormalised(self, log_probs: Tensor, of_ids: Tensor) -> tuple[Tensor, KeptRows]:
        """Return the log-probs (T,) over S of the labels, and what the gradient needs.

        They are NaN where S is wrong, or has a token outside of the vocabulary.
        log_probs: (T,), those over the vocabulary. of_ids: (T, k), the same of the tokens of S.
        """
        known = self.known.unsqueeze(-1)
        used = self.ids >= 0
        # A finite number where no token is used, so that no NaN arises there.
        scores = torch.where(used, of_ids, -torch.inf).masked_fill(~known, 0.0)
        over_set = scores.log_softmax(-1)
        of_label = torch.where(self.is_label, over_set, 0.0).sum(-1)
        of_label = torch.where(self.wrong, torch.nan, of_label)
        probabilities = torch.where(used, over_set.exp(), 0.0)
        rows = KeptRows(self, probabilities)
        return torch.where(self.known, of_label, log_probs), rows


@dataclass(frozen=True)
class KeptRows:
    """The softmax over S of each row of logits.

    probabilities: (T, k), of the tokens of S; 0 where unused.
    """

    sets: KeptSets
    probabilities: Tensor

    def gradient(self, coefficients: Tensor) -> tuple[Tensor, CenteredRows]:
        """Return what `torch_passes.backward` gets in the place of the coefficients of log-probs.

        coefficients: (T,) c_t. The result has (T,) c_t of the positions whose S is the vocabulary,
        and the derivatives at the tokens of S of all others.
        """
        sets = self.sets
        of_sets = torch.where(sets.known, coefficients, 0.0)
        on_ids = of_sets.unsqueeze(-1) * (sets.is_label.to(coefficients.dtype) - self.probabilities)
        nowhere_else = torch.zeros_like(coefficients)
        rest = torch.where(sets.known, 0.0, coefficients)
        return rest, CenteredRows(sets.ids, on_ids.contiguous(), nowhere_else)
