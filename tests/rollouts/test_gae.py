"""Advantages by the values of a critic (gae): against loops in float64, and against verl."""

import math
from dataclasses import replace

import pytest
import torch
from builders.documents import document_of
from torch import Tensor

from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.kl import KL
from pgtoolkit.losses import reference_terms
from pgtoolkit.rollouts.gae import gae, with_gae
from pgtoolkit.rollouts.settings import AdvantageEstimator, AdvantageSettings

MASKS = ("0011101", "01", "0111111111", "00000", "010101", "0010000001")
"""The loss masks of the documents. Some have several turns; the fourth has no trained token."""


def documents_and_values(seed: int = 0) -> tuple[list[Document], list[Tensor]]:
    """Return documents with rewards, and the values of their trained tokens in float64."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    values = []
    for number, digits in enumerate(MASKS):
        mask = torch.tensor([digit == "1" for digit in digits])
        count = int(mask.sum())
        drawn = torch.randn(4, count, generator=generator, dtype=torch.float64)
        documents.append(
            document_of(
                len(mask),
                mask,
                old_log_probs=-1 - drawn[0].abs(),
                ref_log_probs=-1 - drawn[1].abs(),
                group=number,
                name=f"document {number}",
                reward=float(torch.randn((), generator=generator)),
            )
        )
        values.append(drawn[2])
    return documents, values


def settings(
    gamma: float = 1.0, gae_lambda: float = 0.95, whiten: bool = True
) -> AdvantageSettings:
    return AdvantageSettings(
        estimator=AdvantageEstimator.gae, gamma=gamma, gae_lambda=gae_lambda, whiten=whiten
    )


def at_places(document: Document, vector: Tensor) -> Tensor:
    """Return the numbers of the trained tokens at their places in the document, 0 elsewhere."""
    zeros = torch.zeros(len(document.tokens), dtype=torch.float64)
    return zeros.masked_scatter(document.loss_mask, vector.double())


@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0), (0.0, 0.5)]
)
@pytest.mark.parametrize("penalty", [None, KL("k2", 0.3)])
def test_advantages_and_returns_are_those_of_the_specification(gamma, gae_lambda, penalty):
    """A token keeps its penalty; the reward of the completion is that of its last trained token."""
    documents, values = documents_and_values()
    results = with_gae(documents, values, settings(gamma, gae_lambda, whiten=False), penalty)
    for document, of_document, result in zip(documents, values, results, strict=True):
        places = document.loss_mask.nonzero()[:, 0].tolist()
        rewards = [0.0] * len(document.tokens)
        if penalty is not None:
            gaps = (document.old_log_probs - document.ref_log_probs).tolist()
            for place, gap in zip(places, gaps, strict=True):
                rewards[place] -= 0.3 * gap**2 / 2
        if places:
            rewards[places[-1]] += document.reward
        known = at_places(document, of_document).tolist()
        trained = document.loss_mask.tolist()
        expected = reference_terms.gae(rewards, known, trained, gamma, gae_lambda)
        advantages = [expected[place][0] for place in places]
        returns = [expected[place][1] for place in places]
        assert result.advantages.tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-6)
        assert result.returns.tolist() == pytest.approx(returns, rel=1e-6, abs=1e-6)
        assert torch.equal(result.values, of_document)
        assert result.reward == document.reward


def verls_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of verl's `compute_gae_advantage_return`, (documents,
    places) each.

    Written anew after verl/trainer/ppo/core_algos.py and verl/utils/torch_functional.py at b178a3c.
    """
    following_value = torch.zeros(len(values), dtype=values.dtype)
    following_advantage = following_value
    columns = []
    for place in reversed(range(values.shape[1])):
        trained = mask[:, place]
        advantage = rewards[:, place] + gamma * following_value - values[:, place]
        advantage = advantage + gamma * gae_lambda * following_advantage
        following_value = torch.where(trained, values[:, place], following_value)
        following_advantage = torch.where(trained, advantage, following_advantage)
        columns.insert(0, following_advantage)
    advantages = torch.stack(columns, 1)
    returns = advantages + values
    variance, mean = torch.var_mean(advantages[mask], correction=1)
    return (advantages - mean) * torch.rsqrt(variance + 1e-8), returns


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0)])
def test_advantages_and_returns_are_those_of_verl(gamma, gae_lambda):
    documents, values = documents_and_values(seed=1)
    width = max(len(document.tokens) for document in documents)
    value_rows = torch.zeros(len(documents), width, dtype=torch.float64)
    reward_rows = torch.zeros_like(value_rows)
    mask = torch.zeros(len(documents), width, dtype=torch.bool)
    for row, (document, of_document) in enumerate(zip(documents, values, strict=True)):
        length = len(document.tokens)
        value_rows[row, :length] = at_places(document, of_document)
        mask[row, :length] = document.loss_mask
        if document.num_trained:
            last = int(document.loss_mask.nonzero().max())
            reward_rows[row, last] = document.reward
    expected, expected_returns = verls_gae(reward_rows, value_rows, mask, gamma, gae_lambda)

    results = with_gae(documents, values, settings(gamma, gae_lambda), None)

    advantages = torch.cat([result.advantages for result in results]).double()
    returns = torch.cat([result.returns for result in results]).double()
    torch.testing.assert_close(advantages, expected[mask], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, expected_returns[mask], rtol=1e-5, atol=1e-6)


def test_without_discount_an_advantage_is_the_sum_of_later_rewards_less_the_value():
    rewards = [0.0, -0.5, 0.25, 2.0]
    values = [0.3, -0.1, 0.7, 0.2]
    expected = [math.fsum(rewards[place:]) - values[place] for place in range(4)]
    assert gae(rewards, values, 1.0, 1.0) == pytest.approx(expected, abs=1e-12)


def test_rewards_and_whitened_advantages_are_shaped():
    documents, values = documents_and_values()
    shape = {"reward_shift": 0.5, "reward_scale": 3.0, "reward_clip": 2.0}
    shaped = [
        replace(document, reward=max(-2.0, min(2.0, (document.reward + 0.5) * 3)))
        for document in documents
    ]
    expected = with_gae(shaped, values, settings(), None)
    bounded = replace(settings(), **shape, clip_low=-0.5, clip_high=0.25)
    for made, plain in zip(with_gae(documents, values, bounded, None), expected, strict=True):
        assert torch.equal(made.advantages, plain.advantages.clamp(-0.5, 0.25))
        assert torch.equal(made.returns, plain.returns)


def test_whitening_is_over_the_tokens_that_have_a_loss():
    """Documents whose score failed do not count."""
    documents, values = documents_and_values()
    failed = replace(documents[0], reward=None, score_failed=True)
    plain = with_gae(documents, values, settings(), None)
    more = with_gae([*documents, failed], [*values, values[0]], settings(), None)
    for document, expected in zip(more[: len(plain)], plain, strict=True):
        assert torch.equal(document.advantages, expected.advantages)
    numbers = torch.cat([document.advantages for document in plain]).double()
    assert float(numbers.mean()) == pytest.approx(0, abs=1e-6)
    assert float(numbers.var()) == pytest.approx(1, rel=1e-6)
    assert more[-1].advantages.tolist() == [0.0] * more[-1].num_trained


def test_a_reward_that_is_not_finite_is_refused_by_its_document():
    documents, values = documents_and_values()
    documents[1] = replace(documents[1], reward=math.nan)
    with pytest.raises(DataError, match=r"^the reward of document 1 is nan; it must be finite$"):
        with_gae(documents, values, settings(), None)
