"""Advantages of groups and of batches, against their definitions written as loops.

One test trains a step, to show that `advantage=none` leaves the gradient to the penalties.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.parts import OPTIMIZER, ROLLOUT, short_loader, short_module
from hypothesis import assume, given
from hypothesis import strategies as st

from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import Grpo
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.advantages import ESTIMATORS, MAX_REWARD, gdpo, group_advantages, over_batch
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.settings import AdvantageEstimator
from pgtoolkit.training.surprises import Surprises

WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}

# The mean of subnormal rewards may be 0, by which nothing can be divided.
REWARDS = st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=12)


def test_worked_example_of_a_group():
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
def test_advantages_of_a_group_are_those_of_their_definitions(rewards):
    # Equal rewards give 0, whatever the rounding: a test of their own below.
    assume(max(rewards) - min(rewards) > 1e-6)
    mean = statistics.fmean(rewards)
    centred = [reward - mean for reward in rewards]
    rounding = 1e-12 * (max(abs(reward) for reward in rewards) + 1)
    others = [rewards[:place] + rewards[place + 1 :] for place in range(len(rewards))]

    assert group_advantages("dr_grpo", rewards) == pytest.approx(centred, abs=rounding)

    expected = [
        reward - statistics.fmean(rest) for reward, rest in zip(rewards, others, strict=True)
    ]
    assert group_advantages("rloo", rewards) == pytest.approx(expected, abs=rounding)

    if min(rewards) >= 0:
        expected = [difference / mean for difference in centred]
        assert group_advantages("max_rl", rewards) == pytest.approx(expected, rel=1e-9, abs=1e-9)

    # The largest reward less the largest without this completion: 0 where another is as good.
    expected = [max(rewards) - max(rest) for rest in others]
    expected = [difference if difference > 1e-6 else 0.0 for difference in expected]
    assert group_advantages("pass_at_k", rewards) == expected

    deviation = statistics.stdev(rewards)
    expected = [difference / (deviation + 1e-6) for difference in centred]
    # The rounding of the mean is divided by a deviation that may be as small as epsilon.
    assert group_advantages("grpo", rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 7.3, 1e11])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(estimator, reward, size):
    groups = [group_advantages(estimator, [reward] * size, range(size))] * 2
    assert over_batch(estimator, groups, [[reward] * size] * 2) == [[0.0] * size] * 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rewards_at_most_1e_6_apart_are_equal_and_others_are_not(estimator):
    """Sums of weighted scores differ by as much through rounding."""
    for rewards in ([0.1 + 0.2, 0.3], [0.0, 1e-6]):
        groups = [group_advantages(estimator, rewards, [1, 1])]
        assert over_batch(estimator, groups, [rewards]) == [[0.0, 0.0]]
    rewards = [0.0, 1.1e-6]
    [[low, high]] = over_batch(estimator, [group_advantages(estimator, rewards, [1, 1])], [rewards])
    if estimator == "none":
        assert high == low == 0
    else:
        assert high > low


def test_a_group_of_one_completion_has_no_advantage_or_is_refused():
    assert group_advantages("grpo", [0.7]) == [0.0]
    assert group_advantages("dr_grpo", [0.7]) == [0.0]
    for estimator in ("rloo", "pass_at_k"):
        with pytest.raises(DataError, match=f"{estimator} compares a completion with .* no others"):
            group_advantages(estimator, [0.7])


def test_batch_std_divides_by_the_deviation_of_all_rewards_and_others_do_not():
    """The deviation is that of the rewards themselves, between groups too, not of the centred
    ones."""
    rewards = [[0.0, 1.0], [5.0, 7.0]]
    groups = [[-0.5, 0.5], [-1.0, 1.0]]
    deviation = statistics.stdev([0.0, 1.0, 5.0, 7.0]) + 1e-6
    expected = [[-0.5 / deviation, 0.5 / deviation], [-1.0 / deviation, 1.0 / deviation]]
    assert over_batch("batch_std", groups, rewards) == expected
    assert over_batch("batch_std", [[0.0, 0.0]], [[2.0, 2.0]]) == [[0.0, 0.0]]
    for estimator in set(ESTIMATORS) - {"batch_std"} - WHITENED:
        assert over_batch(estimator, groups, rewards) == groups


COMPLETIONS = st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 50)), min_size=2, max_size=5)
GROUPS = st.lists(COMPLETIONS, min_size=1, max_size=4)
"""Groups of completions; each completion is its reward and its length."""


def are_equal(values: list[float]) -> bool:
    return max(values) - min(values) <= 1e-6


def whitened(groups: list[list[float]]) -> list[list[float]]:
    """Return the numbers less their mean, over their sample deviation plus 1e-6, in loops."""
    count = 0
    total = 0.0
    for group in groups:
        for value in group:
            count += 1
            total += value
    if are_equal([value for group in groups for value in group]):
        return [[0.0] * len(group) for group in groups]
    mean = total / count
    squares = 0.0
    for group in groups:
        for value in group:
            squares += (value - mean) ** 2
    deviation = (squares / (count - 1)) ** 0.5 + 1e-6
    return [[(value - mean) / deviation for value in group] for group in groups]


def assert_close(
    groups: Sequence[list[float]], expected: Sequence[list[float]], tolerance: float = 1e-6
) -> None:
    for group, expected_group in zip(groups, expected, strict=True):
        # A rounded mean may have been divided by 1e-6.
        assert group == pytest.approx(expected_group, rel=tolerance, abs=tolerance)


@given(GROUPS)
def test_reinforce_plus_plus_is_whitened_over_the_batch(groups):
    rewards = [[reward for reward, _ in group] for group in groups]
    parts = [group_advantages("reinforce_plus_plus", group) for group in rewards]
    assert_close(over_batch("reinforce_plus_plus", parts, rewards), whitened(rewards))


@given(GROUPS)
def test_reinforce_plus_plus_baseline_is_centred_by_group_and_whitened_over_the_batch(groups):
    rewards = [[reward for reward, _ in group] for group in groups]
    centred = []
    for group in rewards:
        mean = sum(group) / len(group)
        centred.append([0.0 if are_equal(group) else reward - mean for reward in group])
    parts = [group_advantages("reinforce_plus_plus_baseline", group) for group in rewards]
    batch = over_batch("reinforce_plus_plus_baseline", parts, rewards)
    assert_close(batch, whitened(centred))


@given(GROUPS)
def test_opo_weighs_the_baseline_by_lengths(groups):
    for group in groups:
        rewards = [reward for reward, _ in group]
        lengths = [length for _, length in group]
        weighted = 0.0
        for reward, length in group:
            weighted += reward * length
        expected = [reward - weighted / sum(lengths) for reward in rewards]
        if are_equal(rewards):
            expected = [0.0] * len(rewards)
        advantages = group_advantages("opo", rewards, lengths)
        assert advantages == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(GROUPS)
def test_gdpo_normalises_the_scores_of_each_verifier_in_the_group(groups):
    """Two verifiers, with the weights 2 and -0.5."""
    expected = []
    advantages = []
    rewards = []
    for group in groups:
        scores = [[score for score, _ in group], [float(length) for _, length in group]]
        sums = [0.0] * len(group)
        for values, weight in zip(scores, (2.0, -0.5), strict=True):
            mean = sum(values) / len(values)
            squares = sum((value - mean) ** 2 for value in values)
            deviation = (squares / (len(values) - 1)) ** 0.5
            for place, value in enumerate(values):
                if not are_equal(values):
                    sums[place] += weight * (value - mean) / (deviation + 1e-6)
        expected.append(sums)
        advantages.append(gdpo(scores, (2.0, -0.5)))
        rewards.append(scores[0])
    assert_close(advantages, expected)
    assert_close(over_batch("gdpo", advantages, rewards), whitened(expected))


def test_worked_examples_of_a_batch():
    """Two groups of rewards 1, 0 and 3, 3, of lengths 3, 1 and 5, 7."""
    rewards = [[1.0, 0.0], [3.0, 3.0]]
    assert group_advantages("opo", rewards[0], [3, 1]) == [0.25, -0.75]
    assert group_advantages("opo", rewards[1], [5, 7]) == [0, 0]

    deviation = 1.5  # of 1, 0, 3, 3, whose mean is 1.75: the root of 6.75 / 3
    parts = [group_advantages("reinforce_plus_plus", group) for group in rewards]
    expected = [[-0.75 / deviation, -1.75 / deviation], [1.25 / deviation] * 2]
    assert_close(over_batch("reinforce_plus_plus", parts, rewards), expected)

    parts = [group_advantages("reinforce_plus_plus_baseline", group) for group in rewards]
    batch = over_batch("reinforce_plus_plus_baseline", parts, rewards)
    assert_close(batch, [[1.5**0.5, -(1.5**0.5)], [0, 0]], 1e-5)

    parts = [gdpo([[1.0, 0.0], [0.0, 4.0]], (1.0, 2.0)), gdpo([[3.0, 3.0], [1.0, 1.0]], (1.0, 2.0))]
    assert_close(parts, [[-(0.5**0.5), 0.5**0.5], [0, 0]], 1e-5)
    assert_close(over_batch("gdpo", parts, rewards), [[-(1.5**0.5), 1.5**0.5], [0, 0]], 1e-5)


def test_max_rl_divides_by_a_mean_barely_above_zero():
    assert group_advantages("max_rl", [2e-6, 0.0, 0.0, 0.0]) == [3, -1, -1, -1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (math.nan, "nan; it must be finite"),
        (-math.inf, "-inf; it must be finite"),
        (1e200, "1e+200; it must lie within -1e+12 and 1e+12"),
        (-1e39, "-1e+39; it must lie within -1e+12 and 1e+12"),
    ],
)
def test_a_reward_that_is_not_finite_or_too_large_is_refused_by_its_place(
    estimator, reward, reason
):
    with pytest.raises(DataError) as refusal:
        group_advantages(estimator, [0.0, reward, 1.0])
    assert str(refusal.value) == f"the reward of completion 1 of 3 is {reason}"


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(
    st.lists(st.sampled_from([-MAX_REWARD, -1e-300, 0.0, 1.0, MAX_REWARD]), min_size=2, max_size=9)
)
def test_advantages_and_their_squares_are_finite_in_float32(estimator, rewards):
    advantages = np.array(group_advantages(estimator, rewards)).astype(np.float32)
    assert np.isfinite(advantages**2).all()


def test_max_rl_refuses_negative_rewards():
    with pytest.raises(DataError, match=r"needs rewards >= 0 \(got -0.5\)"):
        group_advantages("max_rl", [1.0, -0.5])
    assert group_advantages("max_rl", [0.0, 0.0]) == [0.0, 0.0]


def test_advantage_none_trains_on_penalties_alone(caplog):
    """Completions of different rewards give the gradient of the entropy bonus, and no warning about
    a missing signal."""
    loss = Loss(Grpo(), aggregation_of("token_mean"), metrics="basic", entropy_coefficient=0.1)
    module = short_module(loss, optimizer=replace(OPTIMIZER, max_grad_norm=None))
    module.surprises = Surprises("grpo", ROLLOUT, AdvantageEstimator.none)
    step = next(iter(short_loader(module, estimator=Estimator("none"))))
    assert len({document.reward for document in step.documents}) > 1
    weights = {
        name: weight.detach().clone().requires_grad_()
        for name, weight in module.model.named_parameters()
    }

    module.training_step(step, 0)

    total = torch.zeros(())
    for document in step.documents:
        inputs = (document.tokens[None],)
        logits = torch.func.functional_call(module.model, weights, inputs).logits[0, :-1]
        log_probs = logits[document.loss_mask[1:]].log_softmax(-1)
        total = total + 0.1 * (log_probs.exp() * log_probs).sum() / step.totals.num_tokens
    expected = torch.autograd.grad(total, [*weights.values()])
    for weight, gradient in zip(module.model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=1e-9)
    assert max(gradient.abs().max() for gradient in expected) > 1e-4
    assert "every advantage" not in caplog.text
