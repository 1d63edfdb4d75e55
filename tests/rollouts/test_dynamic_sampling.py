"""DAPO's dynamic sampling, with scripted groups and in a resumed run, and its penalty for long
completions, against the paper's numbers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders.documents import document_of
from builders.runs import assert_equal, checkpoint_of, copy_as_of, metrics_of, run

from pgtoolkit.document import Document
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.group_rollouts import (
    overlong_penalty,
    resample_uninformative,
    small_rewards_note,
)

DR_GRPO = Estimator("dr_grpo")


def group(
    number: int, *rewards: float, task_rewards: Sequence[float | None] | None = None
) -> list[Document]:
    """Return the documents of one prompt, one for each reward."""
    return [
        document_of(2, group=number, reward=reward, task_reward=task_reward)
        for reward, task_reward in zip(rewards, task_rewards or [None] * len(rewards), strict=True)
    ]


def numbers_of(groups: list[list[Document]]) -> list[int]:
    return [documents[0].group for documents in groups]


NONE = (0.0, 0.0)
ALL = (1.0, 1.0)
SOME = (0.0, 1.0)
ROUNDED = (0.3, 0.1 + 0.2)


@pytest.mark.parametrize(
    ("rewards", "further", "rounds", "kept", "asked", "dropped"),
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
def test_groups_of_equal_rewards_are_replaced_until_the_rounds_are_over(
    rewards, further, rounds, kept, asked, dropped
):
    """asked: the number of groups sampled in each further round. dropped: the share."""
    groups = [group(number, *pair) for number, pair in enumerate([*rewards, *further])]
    remaining = groups[len(rewards) :]
    counts = []

    def sample(count: int) -> list[list[Document]]:
        counts.append(count)
        return [remaining.pop(0) for _ in range(count)]

    result, share = resample_uninformative(groups[: len(rewards)], sample, rounds, DR_GRPO)

    assert numbers_of(result) == kept
    assert counts == asked
    assert share == pytest.approx(dropped)


def test_a_penalty_for_length_does_not_make_a_group_informative():
    wrong = group(0, -1.0, -0.5, task_rewards=[0.0, 0.0])
    right = group(1, 0.5, 0.5, task_rewards=[1.0, 0.5])
    further = group(2, 0.0, 1.0, task_rewards=[0.0, 1.0])
    kept, _ = resample_uninformative([wrong, right], lambda count: [further], 2, DR_GRPO)
    assert numbers_of(kept) == [1, 2]


@pytest.mark.parametrize(("mixed", "kept"), [("reward", [0, 2]), ("exact_match", [1, 2])])
def test_mixed_chooses_between_rewards_and_exact_matches(mixed, kept):
    """Group 0 has different rewards and no exact match; group 1 equal rewards and one match."""
    groups = [group(0, 0.0, 0.5), group(1, 1.0, 1.0), group(2, 0.25, 1.0)]
    matches = [[False, None], [False, True], [True, False]]  # None: nobody knows
    groups = [
        [
            replace(document, exact_match=is_match)
            for document, is_match in zip(documents, group_matches, strict=True)
        ]
        for documents, group_matches in zip(groups, matches, strict=True)
    ]
    result, _ = resample_uninformative(groups[:2], lambda count: groups[2:], 2, DR_GRPO, mixed)
    assert numbers_of(result) == kept


@pytest.mark.parametrize(
    ("rewards", "at_most"),
    [
        ([(0.0, 6.6e-34), (0.0, 2e-7)], "2e-07"),
        ([(0.0, 6.6e-34), (0.0, 0.0)], "6.6e-34"),
        ([(0.0, 2e-7), (0.0, 1.0)], None),
        ([ROUNDED, (1.0, 1.0)], None),
        ([NONE, ALL], None),
    ],
)
def test_rewards_that_differ_too_little_to_teach_are_noted(rewards, at_most):
    groups = [group(number, *pair) for number, pair in enumerate(rewards)]
    note = small_rewards_note(groups)
    if at_most is None:
        assert note == ""
    else:
        assert f"differ within its prompts by at most {at_most}, and" in note


def test_the_overlong_penalty_is_that_of_the_paper():
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
    "experiment=dapo",
    "rollout.overlong_buffer=2",
    "rollout.max_sampling_rounds=3",
    "aggregation=token_mean",
    "rollout.group_size=2",
    "accumulation.docs_per_step=4",
    "trainer.max_steps=5",
)


@pytest.mark.slow
def test_a_resumed_run_samples_the_prompts_of_the_uninterrupted_run(tmp_path):
    """Resumed within a batch and at its end. The state counts prompts, since batches have different
    numbers of them."""
    uninterrupted = run(tmp_path / "uninterrupted", *DAPO)
    rows = metrics_of(uninterrupted)
    assert max(row["dropped_prompt_fraction"] for row in rows) > 0
    assert min(row["overlong_penalty"] for row in rows) < 0
    last = checkpoint_of(uninterrupted, 5)
    for step in (2, 3):
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        run(resumed, *DAPO, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 5)["model"], last["model"])
    # Three batches of four prompts, and those that were dropped.
    assert last["data"]["source"]["next_prompt"] > 12
