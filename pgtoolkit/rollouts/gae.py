"""Advantages of single tokens, from the values of a critic: generalised advantage estimation.

arXiv 1506.02438.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.losses.kl import KL
from pgtoolkit.rollouts.advantages import Shape, reward_problem
from pgtoolkit.rollouts.settings import AdvantageSettings

_EPSILON = 1e-8
"""Added to the variance by which advantages are whitened."""


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> list[float]:
    """Return the advantages of a completion's trained tokens, in float64 (arXiv 1506.02438,
    equation 16).

    With r_t the reward of token t and V_t the value of the state in which it was drawn,

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l}

    where t counts trained tokens alone, across the turns of a conversation, and the value after the
    last token is 0.
    """
    advantages = [0.0] * len(rewards)
    following_value = 0.0
    following_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        advantages[t] = delta + gamma * gae_lambda * following_advantage
        following_value = values[t]
        following_advantage = advantages[t]
    return advantages


def whitened(advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of a batch less their mean, over their standard deviation.

    Every token counts once. The variance is the sample's, with n - 1, and has 1e-8 added. Fewer
    than two tokens stay as they are.
    """
    flat = [advantage for of_document in advantages for advantage in of_document]
    if len(flat) < 2:
        return [list(of_document) for of_document in advantages]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((advantage - mean) ** 2 for advantage in flat) / (len(flat) - 1)
    scale = 1 / math.sqrt(variance + _EPSILON)
    return [[(advantage - mean) * scale for advantage in of_document] for of_document in advantages]


def with_gae(
    documents: list[Document], values: list[Tensor], settings: AdvantageSettings, penalty: KL | None
) -> list[Document]:
    """Return the documents of a batch with advantages, values and returns.

    values: (N,) of each document's trained tokens. penalty: subtracted from the reward of each
        token; None: nothing is.

    Documents that take no part in the loss, since nobody could score them, do not count when
    advantages are whitened. Raises DataError for a reward that cannot be used.
    """
    advantages = [
        _document_advantages(document, of_document, settings, penalty)
        for document, of_document in zip(documents, values, strict=True)
    ]
    returns = [
        (torch.tensor(of_document, dtype=torch.float64) + baseline.double()).float()
        for of_document, baseline in zip(advantages, values, strict=True)
    ]
    if settings.whiten:
        advantages = _whitened_where_counted(documents, advantages)
    shape = Shape.of(settings)
    advantages = [
        [shape.advantage(advantage) for advantage in of_document] for of_document in advantages
    ]
    return [
        replace(
            document,
            advantages=torch.tensor(of_document, dtype=torch.float32),
            values=values[place],
            returns=returns[place],
        )
        for place, (document, of_document) in enumerate(zip(documents, advantages, strict=True))
    ]


def _document_advantages(
    document: Document, values: Tensor, settings: AdvantageSettings, penalty: KL | None
) -> list[float]:
    """Return the advantage of each trained token; 0 for all if nobody could score the document."""
    if document.reward is None:
        return [0.0] * document.num_trained
    reward = Shape.of(settings).reward(document.reward)
    rewards = _token_rewards(document, reward, penalty)
    return gae(rewards, values.double().tolist(), settings.gamma, settings.gae_lambda)


def _whitened_where_counted(
    documents: list[Document], advantages: list[list[float]]
) -> list[list[float]]:
    """Return the advantages, whitened over the documents that take part in the loss."""
    counted = [place for place, document in enumerate(documents) if not document.is_excluded]
    white = whitened([advantages[place] for place in counted])
    result = list(advantages)
    for place, of_document in zip(counted, white, strict=True):
        result[place] = of_document
    return result


def _token_rewards(document: Document, reward: float, penalty: KL | None) -> list[float]:
    """Return the reward of each trained token: the completion's reward at the last one, less each
    token's penalty."""
    problem = reward_problem(reward)
    if problem is not None:
        raise DataError(f"the reward of {document.name} {problem}")
    rewards = [0.0] * document.num_trained
    if penalty is not None:
        assert document.old_log_probs is not None
        assert document.ref_log_probs is not None
        terms = penalty.of_samples(document.old_log_probs.double(), document.ref_log_probs.double())
        rewards = [-term for term in terms.tolist()]
    if rewards:
        rewards[-1] += reward
    return rewards
