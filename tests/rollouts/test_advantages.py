"""Advantages of one group against their definitions, written as loops."""

import math
import statistics

import numpy as np
import pytest
import torch
from builders.runs import SHORT, last_of_each_key, module_and_loader
from hypothesis import assume, given
from hypothesis import strategies as st

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.advantages import ESTIMATORS, MAX_REWARD, gdpo, group_advantages, over_batch

# Of subnormal rewards the mean may be 0, by which nothing can be divided.
REWARDS = st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=12)


def test_worked_example():
    rewards = [0.0, 1.0, 0.5, 0.5]
    deviation = math.sqrt(0.5 / 3)
    assert group_advantages("dr_grpo", rewards) == [-0.5, 0.5, 0.0, 0.0]
    assert group_advantages("rloo", rewards) == pytest.approx([-2 / 3, 2 / 3, 0, 0], abs=1e-15)
    assert group_advantages("max_rl", rewards) == [-1.0, 1.0, 0.0, 0.0]
    assert group_advantages("batch_std", rewards) == [-0.5, 0.5, 0.0, 0.0]
    assert group_advantages("pass_at_k", rewards) == [0.0, 0.5, 0.0, 0.0]
    assert group_advantages("pass_at_k", [0.0, 1.0, 0.5, 1.0]) == [0.0] * 4
    expected = [-0.5 / (deviation + 1e-6), 0.5 / (deviation + 1e-6), 0, 0]
    assert group_advantages("grpo", rewards) == pytest.approx(expected, abs=1e-15)


@given(REWARDS)
def test_advantages_are_those_of_their_definitions(rewards):
    # equal ones give 0, whatever the rounding: see below
    assume(max(rewards) - min(rewards) > 1e-6)
    mean = statistics.fmean(rewards)
    size = max(abs(reward) for reward in rewards) + 1
    assert group_advantages("dr_grpo", rewards) == pytest.approx(
        [r - mean for r in rewards], abs=1e-12 * size
    )
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    expected = [r - o for r, o in zip(rewards, others, strict=True)]
    assert group_advantages("rloo", rewards) == pytest.approx(expected, abs=1e-12 * size)
    if min(rewards) >= 0:
        expected = [(r - mean) / mean for r in rewards]
        assert group_advantages("max_rl", rewards) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    others = [max(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    # leave one out: 0 where another one is as good
    expected = [max(rewards) - other for other in others]
    assert group_advantages("pass_at_k", rewards) == expected
    deviation = statistics.stdev(rewards)
    expected = [(r - mean) / (deviation + 1e-6) for r in rewards]
    # The rounding of the mean is divided by a deviation that may be as small as epsilon.
    assert group_advantages("grpo", rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 7.3, 1e11])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(estimator, reward, size):
    groups = [group_advantages(estimator, [reward] * size, range(size))] * 2
    assert over_batch(estimator, groups, [[reward] * size] * 2) == [[0.0] * size] * 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rewards_that_differ_by_rounding_are_equal(estimator):
    """As sums of weighted scores do; 1e-6 apart is equal, and more is not."""
    for rewards in ([0.1 + 0.2, 0.3], [0.0, 1e-6]):
        groups = [group_advantages(estimator, rewards, [1, 1])]
        assert over_batch(estimator, groups, [rewards]) == [[0.0, 0.0]]
    rewards = [0.0, 1.1e-6]
    [[low, high]] = over_batch(estimator, [group_advantages(estimator, rewards, [1, 1])], [rewards])
    assert high > low or (estimator == "none" and high == low == 0)


def test_a_group_of_one_has_no_advantage_or_is_refused():
    assert group_advantages("grpo", [0.7]) == [0.0]
    assert group_advantages("dr_grpo", [0.7]) == [0.0]
    for estimator in ("rloo", "pass_at_k"):
        with pytest.raises(DataError, match=f"{estimator} compares a completion with .* no others"):
            group_advantages(estimator, [0.7])


def test_a_batch_is_divided_by_the_deviation_of_its_rewards():
    """Of the rewards themselves, also between groups, and not of what is left without each group's
    mean."""
    rewards, groups = [[0.0, 1.0], [5.0, 7.0]], [[-0.5, 0.5], [-1.0, 1.0]]
    deviation = statistics.stdev([0.0, 1.0, 5.0, 7.0]) + 1e-6
    assert over_batch("batch_std", groups, rewards) == [
        [one / deviation for one in group] for group in groups
    ]
    assert over_batch("batch_std", [[0.0, 0.0]], [[2.0, 2.0]]) == [[0.0, 0.0]]
    for name in set(ESTIMATORS) - {
        "batch_std",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    }:
        assert over_batch(name, groups, rewards) == groups


OF_A_GROUP = st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 50)), min_size=2, max_size=5)
GROUPS = st.lists(OF_A_GROUP, min_size=1, max_size=4)
"""Rewards and lengths."""


def whitened(groups):
    """In loops: every completion counts once."""
    count = mean = square = 0.0
    for group in groups:
        for one in group:
            count, mean = count + 1, mean + one
    flat = [one for group in groups for one in group]
    if max(flat) - min(flat) <= 1e-6:
        return [[0.0] * len(group) for group in groups]
    mean /= count
    for group in groups:
        for one in group:
            square += (one - mean) ** 2
    return [
        [(one - mean) / ((square / (count - 1)) ** 0.5 + 1e-6) for one in group] for group in groups
    ]


def assert_close(found, expected, tolerance=1e-6):
    for one, two in zip(found, expected, strict=True):
        # a rounded mean may be divided by 1e-6
        assert one == pytest.approx(two, rel=tolerance, abs=tolerance)


@given(GROUPS)
def test_reinforce_plus_plus_is_whitened_over_the_batch(groups):
    rewards, baseline = [[reward for reward, _ in group] for group in groups], []
    for group in rewards:
        are_equal = max(group) - min(group) <= 1e-6
        baseline.append(
            [0.0 if are_equal else reward - sum(group) / len(group) for reward in group]
        )
    for name, expected in (
        ("reinforce_plus_plus", rewards),
        ("reinforce_plus_plus_baseline", baseline),
    ):
        parts = [group_advantages(name, group) for group in rewards]
        assert_close(over_batch(name, parts, rewards), whitened(expected))


@given(GROUPS)
def test_opo_weighs_the_baseline_by_lengths(groups):
    for group in groups:
        weighted = tokens = 0.0
        for reward, length in group:
            weighted, tokens = weighted + reward * length, tokens + length
        rewards, lengths = [[*column] for column in zip(*group, strict=True)]
        expected = [reward - weighted / tokens for reward in rewards]
        if max(rewards) - min(rewards) <= 1e-6:
            expected = [0.0] * len(rewards)
        assert group_advantages("opo", rewards, lengths) == pytest.approx(
            expected, rel=1e-9, abs=1e-12
        )


@given(GROUPS)
def test_gdpo_normalises_each_score_in_its_group(groups):
    """Of two verifiers, of weights 2 and -0.5."""
    expected, parts, scores = [], [], []
    for group in groups:
        both = [[score for score, _ in group], [float(length) for _, length in group]]
        row = [0.0] * len(group)
        for values, weight in zip(both, (2.0, -0.5), strict=True):
            mean = sum(values) / len(values)
            deviation = (sum((x - mean) ** 2 for x in values) / (len(values) - 1)) ** 0.5
            for i, x in enumerate(values):
                are_equal = max(values) - min(values) <= 1e-6
                row[i] += 0.0 if are_equal else weight * (x - mean) / (deviation + 1e-6)
        expected.append(row)
        parts.append(gdpo(both, (2.0, -0.5)))
        scores.append(both[0])
    assert_close(parts, expected)
    assert_close(over_batch("gdpo", parts, scores), whitened(expected))


def test_worked_examples_of_a_batch():
    """Two groups of rewards 1, 0 and 3, 3, of lengths 3, 1 and 5, 7."""
    rewards, lengths = [[1.0, 0.0], [3.0, 3.0]], [[3, 1], [5, 7]]
    assert [group_advantages("opo", *both) for both in zip(rewards, lengths, strict=True)] == [
        [0.25, -0.75],
        [0, 0],
    ]
    deviation = 1.5  # of 1, 0, 3, 3, whose mean is 1.75: the root of 6.75 / 3
    parts = [group_advantages("reinforce_plus_plus", group) for group in rewards]
    expected = [[-0.75 / deviation, -1.75 / deviation], [1.25 / deviation] * 2]
    assert_close(over_batch("reinforce_plus_plus", parts, rewards), expected)
    parts = [group_advantages("reinforce_plus_plus_baseline", group) for group in rewards]
    assert_close(
        over_batch("reinforce_plus_plus_baseline", parts, rewards),
        [[1.5**0.5, -(1.5**0.5)], [0, 0]],
        1e-5,
    )
    parts = [gdpo([[1.0, 0.0], [0.0, 4.0]], (1.0, 2.0)), gdpo([[3.0, 3.0], [1.0, 1.0]], (1.0, 2.0))]
    assert_close(parts, [[-(0.5**0.5), 0.5**0.5], [0, 0]], 1e-5)
    assert_close(over_batch("gdpo", parts, rewards), [[-(1.5**0.5), 1.5**0.5], [0, 0]], 1e-5)


def test_max_rl_of_a_mean_that_is_barely_above_zero():
    assert group_advantages("max_rl", [2e-6, 0.0, 0.0, 0.0]) == [3, -1, -1, -1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (math.nan, "nan; it must be finite"),
        (-math.inf, "-inf; it must be finite"),
        (1e200, "1e+200; it must lie within -1e+12 and 1e+12"),
        (-1e39, "-1e+39; it must lie within -1e+12 and 1e+12"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named(estimator, bad, reason):
    with pytest.raises(DataError) as caught:
        group_advantages(estimator, [0.0, bad, 1.0])
    assert str(caught.value) == f"the reward of completion 1 of 3 is {reason}"


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(
    st.lists(st.sampled_from([-MAX_REWARD, -1e-300, 0.0, 1.0, MAX_REWARD]), min_size=2, max_size=9)
)
def test_advantages_and_their_squares_are_finite_in_float32(estimator, rewards):
    advantages = np.array(group_advantages(estimator, rewards)).astype(np.float32)
    assert np.isfinite(advantages**2).all()


def test_max_rl_needs_rewards_that_are_not_negative():
    with pytest.raises(DataError, match=r"needs rewards >= 0 \(got -0.5\)"):
        group_advantages("max_rl", [1.0, -0.5])
    assert group_advantages("max_rl", [0.0, 0.0]) == [0.0, 0.0]


def test_none_trains_on_penalties_alone(caplog):
    """Of completions of other rewards: the gradient is that of the entropy bonus, and nobody misses
    a signal."""
    chosen = "advantage=none", "entropy.coefficient=0.1", "loss=grpo", "aggregation=token_mean"
    module, loader = module_and_loader(
        *last_of_each_key(
            *SHORT, *chosen, "aggregation.divisor=null", "optimizer.max_grad_norm=null"
        )
    )
    step = next(iter(loader))
    loader.source.close()
    assert len({document.reward for document in step.documents}) > 1
    weights, total = {name: x.detach().clone() for name, x in module.model.named_parameters()}, 0
    module.training_step(step, 0)
    for document in step.documents:
        weights = {name: x.requires_grad_() for name, x in weights.items()}
        logits = torch.func.functional_call(module.model, weights, (document.tokens[None],)).logits[
            0, :-1
        ]
        log_probs = logits[document.loss_mask[1:]].log_softmax(-1)
        total = total + 0.1 * (log_probs.exp() * log_probs).sum() / step.totals.num_tokens
    expected = torch.autograd.grad(total, [*weights.values()])
    for found, gradient in zip(module.model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, gradient, rtol=0, atol=1e-9)
    assert max(gradient.abs().max() for gradient in expected) > 1e-4
    assert "every advantage" not in caplog.text
