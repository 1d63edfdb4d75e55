"""Advantages of a batch by a function of the user, against the same formula on the documents of a
step, and by several verifiers (gdpo)."""

import itertools
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from builders.parts import ACCUMULATION, ROLLOUT, TASK, short_loader, short_module
from builders.rollout_rows import all_documents, good_row, recorded_rollouts, write_jsonl

from pgtoolkit.assembly.recorded_rollouts import estimator_of as estimator_of_settings
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.advantages import ESTIMATORS, Shape, gdpo, over_batch
from pgtoolkit.rollouts.estimator import Attempt, Estimator
from pgtoolkit.rollouts.settings import (
    AdvantageEstimator,
    AdvantageSettings,
    OldLogProbs,
    PolicyRolloutSettings,
    Uninformative,
)
from pgtoolkit.tasks.settings import PromptsTaskSettings

FUNCTIONS = """
import random
import numpy as np

def by_length(rewards, *, lengths, measures):
    flat = [reward for group in rewards for reward in group]
    mean = sum(flat) / len(flat)
    return [(np.array(group) - mean) * sizes for group, sizes in zip(rewards, lengths)]

def format_scores(rewards, *, measures, **others):
    return [[measured["reward/format"] for measured in group] for group in measures]

def centred(rewards, **others):
    return [np.array(group) - np.mean(group) for group in rewards]

def without_lengths(rewards):
    return rewards

def flat(rewards, **others):
    return [reward for group in rewards for reward in group]

def a_number_per_group(rewards, **others):
    return [[max(group)] for group in rewards]

def not_finite(rewards, **others):
    with np.errstate(invalid="ignore"):
        return [(np.array(group) - np.mean(group)) / np.std(group) for group in rewards]

def less_the_first_group(rewards, **others):
    return [[reward - rewards[0][1] for reward in group] for group in rewards]

def drawn(rewards, **others):
    return [[random.random() for reward in group] for group in rewards]

def too_large(rewards, **others):
    return [[10**400 for reward in group] for group in rewards]

def failing(rewards, **others):
    raise KeyError("format")
"""


def estimator_of(path: str, rollout: PolicyRolloutSettings = ROLLOUT) -> Estimator:
    """Return the estimator of a function of one's own."""
    settings = AdvantageSettings(estimator=AdvantageEstimator.custom, path=path)
    return estimator_of_settings(settings, rollout, TASK)


@pytest.fixture(autouse=True)
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the user's functions into a module that can be imported; return its name."""
    name = f"advantages_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_users_function_gets_all_groups_of_a_batch(module_name):
    loader = short_loader(
        short_module(),
        replace(ROLLOUT, old_log_probs=OldLogProbs.sampling),
        replace(ACCUMULATION, docs_per_step=16),
        estimator=estimator_of(f"{module_name}.by_length"),
    )
    documents = next(iter(loader)).documents
    mean = sum(document.reward for document in documents) / 16
    for document in documents:
        expected = [(document.reward - mean) * document.num_trained] * document.num_trained
        assert document.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert len({document.num_trained for document in documents}) > 1
    assert len({document.reward for document in documents}) > 1


def test_a_users_function_gets_each_trajectory_of_recorded_rollouts_once(module_name, tmp_path):
    """Two groups; the first trajectory of each is two documents, of 3 and 2 trained tokens."""
    rows = []
    for group in range(2):
        for trajectory, reward, trained in ((0, 1.0, 3), (0, 1.0, 2), (1, group, 1)):
            mask = [place >= 5 - trained for place in range(5)]
            row = good_row(loss_mask=mask, group_id=group, trajectory=trajectory, reward=reward)
            rows.append(row)
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    estimator = estimator_of(f"{module_name}.by_length")
    documents = all_documents(recorded_rollouts(path, estimator))
    advantages = [float(document.advantages[0]) for document in documents]
    # The mean reward is 0.75; the trajectories of a group have 5 trained tokens and 1.
    assert advantages == pytest.approx([1.25, 1.25, -0.75, 1.25, 1.25, 0.25])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("without_lengths", "called as without_lengths(rewards, *, lengths, measures)"),
        (
            "flat",
            "needs a finite number within -1e+12 and 1e+12 for each completion of each group "
            "(got [0.0, 0.25,",
        ),
        (
            "a_number_per_group",
            "(got [1, 1, 1, 1] numbers where there are [4, 4, 4, 4] completions)",
        ),
        ("not_finite", "(got [nan])"),
        ("too_large", "for each completion of each group (got [[1000"),
        ("less_the_first_group", "needs the same advantages in whichever order the groups come"),
        ("drawn", "needs the same advantages in whichever order the groups come"),
        (
            "failing",
            "raised KeyError on 4 groups, the first with the rewards [0.0, 0.25, 0.5, 0.0]:",
        ),
    ],
)
def test_a_function_that_gives_no_usable_advantages_is_refused_before_the_run(
    module_name, function, problem
):
    with pytest.raises(ConfigError) as refusal:
        estimator_of(f"{module_name}.{function}")
    assert problem in str(refusal.value).replace("np.float64(nan)", "nan")
    assert f"advantage={module_name}.{function}" in str(refusal.value)


def test_a_function_that_fails_on_a_batch_is_refused_with_the_rewards(module_name):
    # Trying the function before the run gives every measure that it asks for.
    estimator = estimator_of(f"{module_name}.format_scores")
    group = [Attempt(reward, 2, {"reward/format": reward / 2}) for reward in (0.0, 1.0)]
    assert estimator.advantages([group, group], refuse=None) == [[0.0, 0.5]] * 2
    with pytest.raises(
        DataError, match=r"raised KeyError on 1 groups, the first with the rewards \[0.5\]"
    ):
        estimator.advantages([[Attempt(0.5, 2, {})]], refuse=None)


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("rollout.uninformative=drop", {"uninformative": Uninformative.drop}),
        ("rollout.max_sampling_rounds=2", {"max_sampling_rounds": 2}),
    ],
)
def test_a_function_that_rewards_equal_groups_is_refused_where_these_are_taken_out(
    module_name, setting, change
):
    rollout = replace(ROLLOUT, **change)
    with pytest.raises(ConfigError) as refusal:
        estimator_of(f"{module_name}.format_scores", rollout)
    assert (
        f"format_scores needs advantages of 0 for a group of equal rewards, with {setting} "
        "(got [0.5, 0.5, 0.5, 0.5] for rewards of 0.5)"
    ) in str(refusal.value)
    estimator_of(f"{module_name}.centred", rollout)


def test_a_reward_that_is_not_finite_is_reported_with_its_group(module_name):
    estimator = estimator_of(f"{module_name}.format_scores")
    problems = []
    groups = [[Attempt(float("nan"), 1, {"reward/format": 1.0})]]
    estimator.advantages(groups, lambda group, problem: problems.append((group, problem)))
    assert problems == [(0, "the reward of completion 0 of 1 is nan; it must be finite")]


def test_gdpo_reads_the_score_of_each_verifier_and_its_weight():
    verifiers = {
        "right": {"verifier": "exact_match", "weight": 2},
        "digits": {"verifier": "regular_expression", "pattern": "(.)", "weight": -1},
        "letters": {"verifier": "regular_expression", "pattern": "(.)"},  # has the weight 1
    }
    settings = AdvantageSettings(estimator=AdvantageEstimator.gdpo)
    names = ("reward/right", "reward/digits", "reward/letters")
    scores = [
        [(1.0, 0.0, 0.25), (0.0, 1.0, 0.0), (0.0, 0.5, 1.0)],
        [(1.0, 1.0, 0.25), (1.0, 0.0, 0.0), (1.0, 0.0, 1.0)],
    ]
    groups = [
        [Attempt(9.0, 1, dict(zip(names, triple, strict=True))) for triple in group]
        for group in scores
    ]

    task = PromptsTaskSettings(path="prompts.jsonl", verifiers=verifiers)
    estimator = estimator_of_settings(settings, ROLLOUT, task)
    advantages = estimator.advantages(groups, refuse=None)

    parts = []
    for group in scores:
        of_verifiers = [list(column) for column in zip(*group, strict=True)]
        parts.append(gdpo(of_verifiers, (2.0, -1.0, 1.0)))
    assert advantages == over_batch("gdpo", parts, [])
    assert advantages[0][0] > 0 > advantages[0][1]
    assert len(set(itertools.chain.from_iterable(advantages))) == 6


def test_gdpo_compares_with_each_verifier_the_completions_that_it_scores():
    """Against the definition in plain loops; None: the verifier does not score the completion."""
    groups = [
        [{"a": 1.0, "b": 0.0}, {"a": 0.0}, {"b": 4.0}, {"a": 0.5, "b": 1.0}, None],
        [{"a": 1.0}, {"b": 2.0}],
        [{"a": 6e-34, "b": 1e12}, {"a": 0.0, "b": -1e12}],
    ]
    weights = {"a": 2.0, "b": -0.5}
    attempts = [
        [Attempt(None, 1) if scores is None else Attempt(9.0, 1, scores) for scores in group]
        for group in groups
    ]
    expected = []
    for group in groups:
        for scores in group:
            total = 0.0
            for name, weight in weights.items():
                known = [other[name] for other in group if other and name in other]
                is_compared = scores is not None and name in scores and len(known) > 1
                if not is_compared or max(known) - min(known) <= 1e-6:
                    continue
                deviation = statistics.stdev(known) + 1e-6
                total += weight * (scores[name] - statistics.fmean(known)) / deviation
            expected.append(None if scores is None else total)
    scored = [total for total in expected if total is not None]
    mean = statistics.fmean(scored)
    deviation = statistics.stdev(scored) + 1e-6
    white = [0.0 if total is None else (total - mean) / deviation for total in expected]

    advantages = Estimator("gdpo", weights).advantages(attempts, refuse=None)

    assert list(itertools.chain.from_iterable(advantages)) == pytest.approx(white, abs=1e-12)


def test_rewards_are_shaped_as_in_areal_before_the_penalty_and_the_baseline():
    """AReaL: (R + bias) scale, then the clip, then the group's norm; KL comes after the clip here,
    too. A signal is judged on the task's rewards."""
    generator = random.Random(3)
    shape = Shape(shift=-0.3, scale=4.0, reward_clip=1.5, clip_low=-0.8, clip_high=0.9)
    groups = [
        [Attempt(generator.choice((0.0, 0.2, 1.0)), 3, {}, -generator.random()) for _ in range(6)]
        for _ in range(5)
    ]
    groups.append([Attempt(0.9, 3), Attempt(1.0, 3)])  # equal once they are clipped
    expected = []
    for group in groups:
        shaped = []
        for attempt in group:
            reward = (attempt.reward - 0.3) * 4.0
            reward = max(-1.5, min(1.5, reward))
            shaped.append(reward + (attempt.kl_reward or 0.0))
        mean = sum(shaped) / len(shaped)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in shaped) / (len(shaped) - 1))
        for x in shaped:
            expected.append(max(-0.8, min(0.9, (x - mean) / (deviation + 1e-6))))
    estimator = Estimator("grpo", shape=shape)
    advantages = list(itertools.chain.from_iterable(estimator.advantages(groups, refuse=None)))
    assert advantages == pytest.approx(expected, abs=1e-12)
    assert min(expected) == -0.8
    assert max(expected) == 0.9
    assert advantages[-2:] == [0.0, 0.0]
    assert estimator.has_signal(groups[-1])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_clip_makes_no_number_of_a_reward_that_is_not_finite(reward):
    problems = []
    estimator = Estimator("dr_grpo", shape=Shape(reward_clip=1.0))
    estimator.advantages(
        [[Attempt(reward, 1), Attempt(0.0, 1)]], lambda *seen: problems.append(seen)
    )
    assert len(problems) == 1
    assert f"is {reward}; it must be finite" in problems[0][1]


def test_gdpo_shapes_the_scores_of_each_verifier():
    shape = Shape(shift=0.5, scale=2.0, reward_clip=2.0)
    groups = [[Attempt(9.0, 1, {"a": a, "b": b}) for a, b in ((0, 3), (0.25, 0), (7, -9))]]
    shaped = [[Attempt(9.0, 1, {"a": a, "b": b}) for a, b in ((1, 2), (1.5, 1), (2, -2))]]
    weights = {"a": 2.0, "b": -0.5}
    advantages = Estimator("gdpo", weights, shape=shape).advantages(groups, refuse=None)
    assert advantages == Estimator("gdpo", weights).advantages(shaped, refuse=None)


COMPARING = sorted({*ESTIMATORS, "gdpo"} - {"none", "reinforce_plus_plus"})


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_has_a_signal_where_the_estimator_gives_it_advantages(name):
    rewards = [
        [1.0, 0.0, 0.5, 0.5],
        [1.0, 1.0, 0.0, None],  # two are the best
        [0.1 + 0.2, 0.3, None, None],
        [1e12, 1e12 - 0.01, 1e12, None],  # less than the rounding of sums
        [1.0, None, None, None],
        [None] * 4,
    ]
    # Their sums are equal, and the deviations are not.
    parts = [
        {"a": 2.0, "b": 0.0, "c": 0.0},
        {"a": 0.0, "b": 1.0, "c": 1.0},
        {"a": 0.0, "b": 2.0, "c": 0.0},
    ]
    groups = [
        [Attempt(reward, 2, {} if reward is None else {"a": reward}) for reward in group]
        for group in rewards
    ]
    groups.append([Attempt(2.0, 2, measures) for measures in parts])
    estimator = Estimator(name, dict.fromkeys("abc", 1.0) if name == "gdpo" else {})
    # Each beside a group that advantages over a batch need.
    other = [Attempt(reward, 1, {"a": reward}) for reward in (0.0, 1.0, 3.0)]
    for group in groups:
        advantages, _ = estimator.advantages([group, other], refuse=None)
        has_advantage = max(map(abs, advantages)) > 1e-9
        assert estimator.has_signal(group) == has_advantage, group
