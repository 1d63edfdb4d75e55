"""Advantages by the values of a critic, by loops and as verl has them."""

import math

import pytest
import torch

from pgtoolkit.batch import Document
from pgtoolkit.config.schema_loss import AdvantageConfig, AdvantageEstimator
from pgtoolkit.errors import DataError
from pgtoolkit.kl import KL
from pgtoolkit.losses import reference_terms
from pgtoolkit.rollouts.gae import gae, with_gae

MASKS = ("0011101", "01", "0111111111", "00000", "010101", "0010000001")
"""Documents of several turns among them; the fourth is not trained at all."""


def batch(seed=0, masks=MASKS):
    """Documents with rewards, and values of their trained tokens in float64."""
    random = torch.Generator().manual_seed(seed)
    documents, values = [], []
    for number, digits in enumerate(masks):
        mask = torch.tensor([digit == "1" for digit in digits])
        count = int(mask.sum())
        drawn = torch.randn(4, count, generator=random, dtype=torch.float64)
        documents.append(
            Document(
                tokens=torch.arange(len(mask)),
                loss_mask=mask,
                old_log_probs=-1 - drawn[0].abs(),
                ref_log_probs=-1 - drawn[1].abs(),
                advantages=torch.zeros(count),
                group=number,
                name=f"document {number}",
                reward=float(torch.randn((), generator=random)),
            )
        )
        values.append(drawn[2])
    return documents, values


def settings(gamma=1.0, gae_lambda=0.95, whiten=True):
    return AdvantageConfig(AdvantageEstimator.gae, None, gamma, gae_lambda, whiten)


def at_places(document, vector):
    """The numbers of the trained tokens at their places in the document, 0 elsewhere."""
    return torch.zeros(len(document.tokens), dtype=torch.float64).masked_scatter(
        document.loss_mask, vector.double()
    )


@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0), (0.0, 0.5)]
)
@pytest.mark.parametrize("penalty", [None, KL("k2", 0.3)])
def test_advantages_and_returns_are_those_of_the_specification(gamma, gae_lambda, penalty):
    """The penalty of a token stays with it; the completion's reward is that of its last trained
    token."""
    documents, values = batch()
    found = with_gae(documents, values, settings(gamma, gae_lambda, whiten=False), penalty)
    for document, known, result in zip(documents, values, found, strict=True):
        rewards = [0.0] * len(document.tokens)
        places = document.loss_mask.nonzero()[:, 0].tolist()
        for number, place in enumerate(places if penalty else ()):
            gap = float(document.old_log_probs[number] - document.ref_log_probs[number])
            rewards[place] -= 0.3 * gap**2 / 2
        if places:
            rewards[places[-1]] += document.reward
        trained = document.loss_mask.tolist()
        expected = reference_terms.gae(
            rewards, at_places(document, known).tolist(), trained, gamma, gae_lambda
        )
        assert result.advantages.tolist() == pytest.approx(
            [expected[place][0] for place in places], rel=1e-6, abs=1e-6
        )
        assert result.returns.tolist() == pytest.approx(
            [expected[place][1] for place in places], rel=1e-6, abs=1e-6
        )
        assert torch.equal(result.values, known)
        assert result.reward == document.reward


def verls_gae(rewards, values, mask, gamma, gae_lambda):
    """Return the advantages and returns of verl's `compute_gae_advantage_return`, (documents,
    places) each.

    Written anew after verl/trainer/ppo/core_algos.py and verl/utils/torch_functional.py at b178a3c.
    """
    following_value = following_advantage = torch.zeros(len(values), dtype=values.dtype)
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
def test_the_numbers_are_verls(gamma, gae_lambda):
    documents, values = batch(seed=1)
    width = max(len(document.tokens) for document in documents)
    rows = torch.zeros(3, len(documents), width, dtype=torch.float64)
    for row, (document, known) in enumerate(zip(documents, values, strict=True)):
        length = len(document.tokens)
        rows[0, row, :length] = at_places(document, known)
        rows[2, row, :length] = document.loss_mask.double()
        if document.num_trained:
            rows[1, row, int(document.loss_mask.nonzero().max())] = document.reward
    mask = rows[2] > 0
    advantages, returns = verls_gae(rows[1], rows[0], mask, gamma, gae_lambda)
    found = with_gae(documents, values, settings(gamma, gae_lambda), None)
    torch.testing.assert_close(
        torch.cat([d.advantages for d in found]).double(), advantages[mask], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        torch.cat([d.returns for d in found]).double(), returns[mask], rtol=1e-5, atol=1e-6
    )


def test_without_discount_an_advantage_is_the_rest_of_the_rewards_less_the_value():
    rewards, values = [0.0, -0.5, 0.25, 2.0], [0.3, -0.1, 0.7, 0.2]
    expected = [math.fsum(rewards[place:]) - values[place] for place in range(4)]
    assert gae(rewards, values, 1.0, 1.0) == pytest.approx(expected, abs=1e-12)


def test_whitening_counts_each_token_that_has_a_loss_once():
    """Documents that nobody could score, and those of groups that are left out, have no part in
    it."""
    documents, values = batch()
    left_out = [Document(**vars(documents[2]) | {"left_out": True}), values[2] * 50]
    failed = [Document(**vars(documents[0]) | {"reward": None, "score_failed": True}), values[0]]
    plain = with_gae(documents, values, settings(), None)
    found = with_gae(
        [*documents, left_out[0], failed[0]], [*values, left_out[1], failed[1]], settings(), None
    )
    for document, expected in zip(found, plain, strict=False):
        assert torch.equal(document.advantages, expected.advantages)
    numbers = torch.cat([document.advantages for document in plain]).double()
    assert float(numbers.mean()) == pytest.approx(0, abs=1e-6)
    assert float(numbers.var()) == pytest.approx(1, rel=1e-6)
    assert found[-1].advantages.tolist() == [0.0] * found[-1].num_trained


def test_a_reward_that_is_no_number_is_named():
    documents, values = batch()
    documents[1] = Document(**vars(documents[1]) | {"reward": math.nan})
    with pytest.raises(DataError, match=r"^the reward of document 1 is nan; it must be finite$"):
        with_gae(documents, values, settings(), None)
