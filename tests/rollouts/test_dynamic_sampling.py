"""DAPO's dynamic sampling and its punishment of long completions."""

import json
from dataclasses import replace

import pytest
import torch
from builders.runs import assert_equal, checkpoint_of, copy_as_of, metrics_of, run

from pgtoolkit.batch import Document
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.rollouts.group_rollouts import overlong_penalty, resample_uninformative


def group(number, *rewards, task_rewards=None):
    """The documents of one prompt."""
    task_rewards = task_rewards or [None] * len(rewards)
    one = torch.ones(1)
    return [
        Document(
            torch.tensor([1, 2]),
            torch.tensor([False, True]),
            one,
            one,
            number,
            "",
            reward=a,
            task_reward=b,
        )
        for a, b in zip(rewards, task_rewards, strict=True)
    ]


def filled(rewards, further, rounds):
    """(numbers of the groups that are left, how many were asked for each time, their metric)."""
    asked, left = [], [group(i, *pair) for i, pair in enumerate([*rewards, *further])]
    groups = [left.pop(0) for _ in rewards]

    def sample(count):
        asked.append(count)
        return [left.pop(0) for _ in range(count)]

    found = resample_uninformative(groups, sample, rounds)
    metrics = data_metrics([document for one in found for document in one], 0)
    return [one[0].group for one in found], asked, metrics.get("dropped_prompt_fraction")


NONE, ALL, SOME = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)
ROUNDED = (0.3, 0.1 + 0.2)


@pytest.mark.parametrize(
    ("rewards", "further", "rounds", "left", "asked", "dropped"),
    [
        ([SOME, SOME], [], 5, [0, 1], [], 0.0),  # nothing to replace
        ([NONE, SOME, ALL], [SOME, SOME], 2, [1, 3, 4], [2], 2 / 5),
        # a second time, for what is missing
        ([NONE, SOME, ALL], [SOME, NONE, SOME], 5, [1, 3, 5], [2, 1], 3 / 6),
        # rounds are over: the earliest stays
        ([NONE, SOME, ALL], [SOME, NONE, ALL], 3, [0, 1, 3], [2, 1], 3 / 6),
        ([NONE, ALL], [NONE, ALL], 2, [0, 1], [2], 2 / 4),
        # equal but for the rounding of weighted scores
        ([ROUNDED, SOME], [SOME], 2, [1, 2], [1], 1 / 3),
        ([NONE, SOME, ALL], [], 1, [0, 1, 2], [], None),  # off
    ],
)
def test_what_is_dropped_and_what_stays(rewards, further, rounds, left, asked, dropped):
    assert filled(rewards, further, rounds) == (left, asked, pytest.approx(dropped))


def test_what_is_taken_off_for_the_length_does_not_make_a_group_worth_keeping():
    wrong = group(0, -1.0, -0.5, task_rewards=[0.0, 0.0])
    right = group(1, 0.5, 0.5, task_rewards=[1.0, 0.5])
    further = group(2, 0.0, 1.0, task_rewards=[0.0, 1.0])
    found = resample_uninformative([wrong, right], lambda count: [further], 2)
    assert [one[0].group for one in found] == [1, 2]


def test_with_exact_match_a_prompt_that_nobody_answered_is_dropped():
    """Whatever parts of its completions are right; and of one that some answered the rewards may
    even be equal."""
    groups = [group(0, 0.0, 0.5), group(1, 1.0, 1.0), group(2, 0.25, 1.0)]
    right = [[False, False], [False, True], [True, False]]
    for one, matches in zip(groups, right, strict=True):
        one[:] = [
            replace(document, exact_match=match)
            for document, match in zip(one, matches, strict=True)
        ]
    for mixed, kept in (("reward", [0, 2]), ("exact_match", [1, 2])):
        found = resample_uninformative(groups[:2], lambda count: groups[2:], 2, mixed)
        assert [one[0].group for one in found] == kept


def test_the_punishment_is_that_of_the_paper():
    """Eq. 13 with 20480 tokens at most, of which 4096 are the buffer."""
    for length, expected in (
        (1, 0),
        (16384, 0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20480, -1),
        (20500, -1),
    ):
        assert overlong_penalty(length, 20480, 4096, 1.0) == expected
        assert overlong_penalty(length, 20480, 4096, 0.5) == expected / 2
    assert overlong_penalty(5, 5, 5, 1.0) == -1
    assert overlong_penalty(1, 5, 5, 1.0) == -0.2


DAPO = (
    *(
        "experiment=dapo",
        "rollout.overlong_buffer=2",
        "rollout.max_sampling_rounds=3",
        "aggregation=token_mean",
    ),
    *("rollout.group_size=2", "accumulation.docs_per_step=4", "trainer.max_steps=5"),
)


def test_a_resumed_run_samples_what_it_would_have_sampled(tmp_path):
    """From the middle and from the end of a batch: prompts are counted, not batches."""
    whole = run(tmp_path / "whole", *DAPO)
    rows = metrics_of(whole)
    assert max(row["dropped_prompt_fraction"] for row in rows) > 0
    assert min(row["overlong_penalty"] for row in rows) < 0
    for step in (2, 3):
        resumed = copy_as_of(whole, step, tmp_path / f"from {step}")
        run(resumed, *DAPO, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 5)["model"], checkpoint_of(whole, 5)["model"])
    state = json.loads(
        (whole / "checkpoints" / "step-000005" / "training" / "state.json").read_text()
    )
    # three batches of four prompts, and those that were dropped
    assert state["data"]["source"]["next_prompt"] > 12
