"""Advantages of single tokens by the values of a critic: generalised advantage estimation (arXiv
1506.02438)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pgtoolkit.batch import Document
from pgtoolkit.config.schema_loss import AdvantageConfig
from pgtoolkit.errors import DataError
from pgtoolkit.losses.kl import KL
from pgtoolkit.rollouts.advantages import reward_problem

_EPSILON = 1e-8
"""Added to the variance by which advantages are whitened."""


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> list[float]:
    """Return the advantages of a completion's trained tokens, in float64 (arXiv 1506.02438,
    equation 16).

    With r_t the reward of token t and V_t the value of the state in which it was drawn,

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l}

    where t counts trained tokens, those of other turns passed over, and the value after the last
    one is 0.
    """
    advantages = [0.0] * len(rewards)
    following_value = following_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        advantages[t] = delta + gamma * gae_lambda * following_advantage
        following_value = values[t]
        following_advantage = advantages[t]
    return advantages


def whitened(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of a batch less their mean, over their standard deviation.

    Every token counts once. The variance is the sample's, with n - 1, and has 1e-8 added. Fewer
    than two tokens stay.
    """
    flat = [advantage for of_document in advantages for advantage in of_document]
    if len(flat) < 2:
        return [[*of_document] for of_document in advantages]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((advantage - mean) ** 2 for advantage in flat) / (len(flat) - 1)
    scale = 1 / math.sqrt(variance + _EPSILON)
    return [[(advantage - mean) * scale for advantage in of_document] for of_document in advantages]


def with_gae(
    documents: list[Document], values: list[Tensor], config: AdvantageConfig, penalty: KL | None
) -> list[Document]:
    """Return the documents of a batch with advantages, values and returns.

    values: (N,) of each document's trained tokens. penalty: what is taken off the reward of each
        token, where it is.
    Documents that take no part in the loss, since nobody could score them or their group is left
    out, have no part in what advantages are whitened by. Raises DataError for a reward that cannot
    be used.
    """
    advantages = []
    for document, of_document in zip(documents, values, strict=True):
        if document.reward is None:
            advantages.append([0.0] * document.num_trained)
            continue
        rewards = _token_rewards(document, penalty)
        advantages.append(
            gae(rewards, of_document.double().tolist(), config.gamma, config.gae_lambda)
        )
    returns = [
        (torch.tensor(of_document, dtype=torch.float64) + known.double()).float()
        for of_document, known in zip(advantages, values, strict=True)
    ]
    if config.whiten:
        counted = [
            place for place, document in enumerate(documents) if not _is_without_loss(document)
        ]
        for place, white in zip(
            counted, whitened([advantages[place] for place in counted]), strict=True
        ):
            advantages[place] = white
    return [
        replace(
            document,
            advantages=torch.tensor(of_document, dtype=torch.float32),
            values=known,
            returns=learned,
        )
        for document, of_document, known, learned in zip(
            documents, advantages, values, returns, strict=True
        )
    ]


def _token_rewards(document: Document, penalty: KL | None) -> list[float]:
    """Return the reward of each trained token: the completion's at its last one, less the penalty
    of each."""
    assert document.reward is not None
    if problem := reward_problem(document.reward):
        raise DataError(f"the reward of {document.name} {problem}")
    rewards = [0.0] * document.num_trained
    if penalty is not None:
        assert document.old_log_probs is not None
        assert document.ref_log_probs is not None
        terms = penalty.of_samples(document.old_log_probs.double(), document.ref_log_probs.double())
        rewards = [-term for term in terms.tolist()]
    if rewards:
        rewards[-1] += document.reward
    return rewards


def _is_without_loss(document: Document) -> bool:
    return document.left_out or document.is_excluded
