"""Recorded rollouts as a source of documents: their order, groups, trajectories and advantages,
against the rows that were written."""

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.documents import document_of
from builders.rollout_rows import (
    all_documents,
    assert_documents_equal,
    good_row,
    recorded_rollouts,
    write_jsonl,
    write_parquet,
)

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.advantages import group_advantages
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.settings import AccumulationSettings
from pgtoolkit.rollouts.step_loader import StepLoader

SCATTERED = [0, 1, 0, 2, 1, 0, 3, 3, 2, 0, 1]
"""The groups of rows whose groups are not in one piece."""


def rewards_of(rollouts: RecordedRollouts) -> list[float]:
    return [document.reward for document in all_documents(rollouts)]


def groups_of(rollouts: RecordedRollouts) -> list[int]:
    return [document.group for document in all_documents(rollouts)]


def rows_of(groups: Sequence[int | str], **changes) -> list[dict]:
    """Return a row for each of these group ids, of 3 to 6 tokens."""
    return [
        good_row(number, group, length=3 + number % 4, **changes)
        for number, group in enumerate(groups)
    ]


@pytest.mark.parametrize(
    ("write", "name"), [(write_jsonl, "r.jsonl"), (write_parquet, "r.parquet")]
)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "batch_std"])
def test_groups_come_in_one_piece_with_advantages_of_all_their_rewards(
    tmp_path, write, name, estimator
):
    rows = rows_of([f"g{group}" for group in SCATTERED])
    read = all_documents(recorded_rollouts(write(tmp_path / name, rows), estimator))
    divisor = 1.0
    if estimator == "batch_std":
        divisor = statistics.stdev(row["reward"] for row in rows) + 1e-6
    expected = []
    for group in range(4):
        numbers = [number for number, other in enumerate(SCATTERED) if other == group]
        advantages = group_advantages(estimator, [rows[number]["reward"] for number in numbers])
        for number, advantage in zip(numbers, advantages, strict=True):
            row = rows[number]
            mask = torch.tensor(row["loss_mask"])
            document = document_of(
                torch.tensor(row["token_ids"]),
                mask,
                old_log_probs=torch.tensor(row["old_log_probs"])[mask],
                advantages=advantage / divisor,
                group=group,
                name=f"{name}:{number + 1}",
                reward=row["reward"],
            )
            expected.append(document)
    for document, expected_document in zip(read, expected, strict=True):
        assert_documents_equal(expected_document, document)


@pytest.mark.parametrize(
    ("column", "type_of_column"),
    [
        ("token_ids", pa.large_list(pa.uint16())),
        ("old_log_probs", pa.list_(pa.float64())),
        ("loss_mask", pa.list_(pa.int8())),
        ("group_id", pa.string()),
        ("reward", pa.float32()),
    ],
)
def test_columns_may_have_the_types_of_other_writers(tmp_path, column, type_of_column):
    rows = rows_of(SCATTERED, text="x" * 100)
    expected = all_documents(recorded_rollouts(write_jsonl(tmp_path / "r.jsonl", rows)))
    table = pa.Table.from_pylist(rows)
    place = table.schema.get_field_index(column)
    table = table.set_column(place, column, table.column(column).cast(type_of_column))
    path = tmp_path / "r.parquet"
    pq.write_table(table, path, row_group_size=3, write_page_checksum=True)
    for document, expected_document in zip(
        all_documents(recorded_rollouts(path)), expected, strict=True
    ):
        assert_documents_equal(expected_document, document, but=["name"])


def test_epochs_without_shuffling_repeat_the_data(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of(SCATTERED * 3))
    rewards = rewards_of(recorded_rollouts(path, epochs=2))
    assert rewards == rewards_of(recorded_rollouts(path)) * 2


def test_every_epoch_is_the_data_once_and_shuffled_by_groups(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of(SCATTERED * 3))
    rollouts = recorded_rollouts(path, epochs=3, shuffle=True, seed=1)
    read = all_documents(rollouts)
    epochs = [read[:33], read[33:66], read[66:]]
    orders = [[document.reward for document in epoch] for epoch in epochs]
    for order in orders:
        assert sorted(order) == sorted(rewards_of(recorded_rollouts(path)))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for epoch in epochs:  # each group once, in one piece, its documents in the order of the file
        groups = [document.group for document in epoch]
        pieces = [group for group, _ in itertools.groupby(groups)]
        assert len(pieces) == len(set(pieces)) == 4
        for document, following in itertools.pairwise(epoch):
            if document.group == following.group:
                assert document.reward < following.reward
    assert len({document.group for document in read}) == 12
    assert len({document.name for document in read}) == 99
    assert [rollouts.batch_end(position) for position in (0, 32, 33, 98)] == [33, 33, 66, 99]


def test_the_order_depends_on_the_seed_alone(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of(SCATTERED * 3))
    rewards = rewards_of(recorded_rollouts(path, epochs=3, shuffle=True, seed=1))
    assert rewards_of(recorded_rollouts(path, epochs=3, shuffle=True, seed=1)) == rewards
    assert rewards_of(recorded_rollouts(path, epochs=3, shuffle=True, seed=2)) != rewards


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 1):
        rows = [good_row(number, number), good_row(number, number)]
        write_jsonl(tmp_path / f"batch-{number}.jsonl", rows)
    (tmp_path / ".batch-3.jsonl.tmp").write_text("{")
    expected = [0.25, 0.25, 0.5, 0.5, 2.5, 2.5]
    assert rewards_of(recorded_rollouts(tmp_path)) == expected
    assert rewards_of(recorded_rollouts(tmp_path / "batch-*.jsonl")) == expected
    assert recorded_rollouts(tmp_path).document(5).name == "batch-10.jsonl:2"


def test_without_group_ids_group_size_makes_the_groups(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(i, group_id=...) for i in range(6)])
    with pytest.raises(DataError, match=r"r\.jsonl:1:group_id: is missing.*rollout\.group_size"):
        recorded_rollouts(path)
    assert groups_of(recorded_rollouts(path, group_size=3)) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(
        DataError, match=r"6 documents, which is no multiple of rollout\.group_size=4"
    ):
        recorded_rollouts(path, group_size=4)


def test_without_group_ids_and_group_size_each_document_is_a_group_of_its_own(tmp_path):
    """Unless the loss needs groups."""
    rows = [good_row(i, group_id=..., advantage=1.0) for i in range(6)]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    with pytest.raises(DataError, match="group_id: is missing"):
        recorded_rollouts(path, "given", needs=("group_id",))
    rollouts = recorded_rollouts(path, "given")
    assert not rollouts.has_groups
    assert groups_of(rollouts) == [0, 1, 2, 3, 4, 5]


def test_a_loss_by_the_sign_of_advantages_needs_one_for_each_row(tmp_path):
    advantages = [[9.0, 9.0, 0.5, 0.5, 0.5], 0.5, [0.0, 0.0, 0.5, 0.25, 0.5]]
    rows = [good_row(i, advantage=advantage) for i, advantage in enumerate(advantages)]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    assert recorded_rollouts(path, "given").num_documents == 3
    assert recorded_rollouts(path, one_advantage=True).num_documents == 3  # made of rewards
    with pytest.raises(DataError, match=r"is 0\.5 and 0\.25 at .*prompt_mean") as raised:
        recorded_rollouts(path, "given", one_advantage=True)
    assert str(raised.value).count("r.jsonl:3:advantage") == 1
    assert "r.jsonl:1:" not in str(raised.value)


def test_groups_of_another_size_than_group_size_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of([5, 5, 6, 5, 6]))
    with pytest.raises(
        DataError, match=r"r\.jsonl:1:group_id: is 5, a group of 3 documents; rollout\.group_size=2"
    ):
        recorded_rollouts(path, group_size=2)
    with pytest.raises(
        DataError, match=r"r\.jsonl:3:group_id: is 6, a group of 2 documents; rollout\.group_size=3"
    ):
        recorded_rollouts(path, group_size=3)


def test_a_group_for_which_the_estimator_is_not_defined_is_refused_by_its_row(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of([0, 1, 0]))
    with pytest.raises(DataError, match=r"r\.jsonl:2:group_id: rloo compares"):
        recorded_rollouts(path, "rloo")


def test_groups_in_several_files_give_a_note(tmp_path, caplog):
    write_jsonl(tmp_path / "r.jsonl", rows_of([0, 1, 0]))
    write_jsonl(tmp_path / "s.jsonl", rows_of([0, 0]))
    assert recorded_rollouts(tmp_path).has_groups
    assert "1 groups have documents in several files" in caplog.text


def rows_of_trajectories(*fields: tuple) -> list[dict]:
    """Return a row for each (group id, trajectory, reward); ... leaves a field out."""
    return [
        good_row(number, group_id=group, trajectory=trajectory, reward=reward)
        for number, (group, trajectory, reward) in enumerate(fields)
    ]


TRAJECTORIES = rows_of_trajectories(
    (0, 5, 1.0),
    (0, 5, 1.0),
    (1, 5, 2.0),
    (0, ..., 0.0),
    (0, 5, 1.0),
    (1, 8, 0.0),
    (1, 5, 2.0),
    (1, ..., 4.0),
)
"""Trajectory 5 of group 0 is not that of group 1: an id is of its group."""


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("dr_grpo", (0.5, -0.5), (0, -2, 2)),
        ("rloo", (1, -1), (0, -3, 3)),
        ("batch_std", (0.5, -0.5), (0, -2, 2)),
        ("pass_at_k", (1, 0), (0, 0, 2)),
        ("opo", (0.25, -0.75), (0, -2, 2)),
    ],
)
def test_reward_and_baseline_count_a_trajectory_once(tmp_path, estimator, first, second):
    """first, second: the advantages of the trajectories of each group. In the first, rewards 1, 1,
    1, 0 have the mean 0.5, since the first three are of one trajectory."""
    path = write_jsonl(tmp_path / "r.jsonl", TRAJECTORIES)
    rollouts = recorded_rollouts(path, estimator)
    read = all_documents(rollouts)
    rows = [int(document.name.split(":")[1]) - 1 for document in read]
    assert rows == [0, 1, 4, 3, 2, 6, 5, 7]
    trajectories = [document.trajectory for document in read]
    assert trajectories == [0, 0, 0, None, 2, 2, 5, None]
    divisor = 1.0
    if estimator == "batch_std":
        divisor = statistics.stdev([1, 0, 2, 0, 4]) + 1e-6
    expected = [first[0]] * 3 + [first[1]] + [second[0]] * 2 + [second[1], second[2]]
    advantages = [float(document.advantages[0]) for document in read]
    assert advantages == pytest.approx([number / divisor for number in expected], rel=1e-6)
    # The prompts of these rows differ, which is another note.
    notes = [note for note in rollouts.index.notes if "different prompts" not in note]
    assert len(notes) == 1
    assert notes[0].startswith("8 documents are 5 trajectories")


def test_each_epoch_has_its_own_trajectories_each_in_one_piece(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", TRAJECTORIES)
    read = all_documents(recorded_rollouts(path, epochs=2, shuffle=True))
    for epoch, of_epoch in enumerate((read[:8], read[8:])):
        trajectories = [
            document.trajectory for document in of_epoch if document.trajectory is not None
        ]
        assert sorted(trajectories) == [8 * epoch + first for first in (0, 0, 0, 2, 2, 5)]
        assert len(list(itertools.groupby(trajectories))) == 3


def test_the_documents_of_a_trajectory_must_have_the_same_reward_and_exact_match(tmp_path):
    path = tmp_path / "r.jsonl"
    write_jsonl(path, rows_of_trajectories((0, "a", 1.0), (0, "b", 0.5), (0, "a", 0.5)))
    with pytest.raises(
        DataError,
        match=r"r\.jsonl:3:reward: is not that of r\.jsonl:1, a row of the same trajector",
    ):
        recorded_rollouts(path)
    first, second = rows_of_trajectories((0, 1, ...), (0, 1, ...))
    first |= {"advantage": 1.0, "exact_match": True}
    second |= {"advantage": 1.0, "exact_match": False}
    with pytest.raises(DataError, match=r"r\.jsonl:2:exact_match: is not that of r\.jsonl:1"):
        recorded_rollouts(write_jsonl(path, [first, second]), "given")


def test_trajectories_that_the_loss_does_not_take_are_refused_by_their_rows(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", TRAJECTORIES)
    with pytest.raises(
        DataError, match=r"r\.jsonl:1:trajectory: is given.*or use loss=grpo"
    ) as got:
        recorded_rollouts(path, instead_of_parts="loss=grpo")
    assert "the same in 5 rows more" in str(got.value)


def test_a_trajectory_that_is_neither_an_integer_nor_a_text_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of_trajectories((0, 1.5, 1.0)))
    with pytest.raises(DataError, match=r"r\.jsonl:1:trajectory: needs an integer or a text"):
        recorded_rollouts(path)


def test_group_size_counts_trajectories(tmp_path):
    path = tmp_path / "r.jsonl"
    rows = [row | {"group_id": None} for row in TRAJECTORIES[:2] + TRAJECTORIES[3:5]]
    assert groups_of(recorded_rollouts(write_jsonl(path, rows), group_size=2)) == [0] * 4
    with pytest.raises(
        DataError, match=r"has no group_id and 2 trajectories, which is no multiple of .*size=4"
    ):
        recorded_rollouts(path, group_size=4)
    with pytest.raises(
        DataError, match=r"group_id: is 0, a group of 2 trajectories; rollout\.group_size=4"
    ):
        recorded_rollouts(write_jsonl(path, TRAJECTORIES), group_size=4)


def test_without_groups_each_trajectory_of_each_file_is_a_group(tmp_path):
    rows = [row | {"group_id": None, "advantage": 1.0} for row in TRAJECTORIES[:2]]
    write_jsonl(tmp_path / "r.jsonl", rows)
    write_jsonl(tmp_path / "s.jsonl", [*rows, good_row(group_id=..., advantage=2)])
    read = all_documents(recorded_rollouts(tmp_path, "given"))
    assert [document.group for document in read] == [0, 0, 1, 1, 2]
    assert [document.trajectory for document in read] == [0, 0, 2, 2, None]


def test_steps_hold_complete_trajectories_of_recorded_rollouts(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", TRAJECTORIES)
    accumulation = AccumulationSettings(docs_per_step=2, max_tokens=8)
    totals = [step.totals for step in StepLoader(recorded_rollouts(path), accumulation, False, 99)]
    assert [of_step.num_documents for of_step in totals] == [3, 3, 2]
    assert [of_step.tokens_per_trajectory.tolist() for of_step in totals] == [[9], [3, 6], [3, 3]]


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "in place": lambda path, other: path.write_bytes(other.read_bytes()),
    "replaced": lambda path, other: os.replace(other, path),
    "emptied": lambda path, other: path.write_bytes(b""),
    "removed": lambda path, other: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_in_use_is_refused(tmp_path, suffix, change):
    """The other file has the same size, and other rewards."""

    def write(name: str, rows: list[dict]) -> Path:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "jsonl":
            return write_jsonl(path, rows)
        return write_parquet(path, rows, use_dictionary=False, compression="none")

    rows = [good_row(number, number // 2) for number in range(4)]
    path = write("r", rows)
    other = write(
        "other", [row | {"reward": rows[number - 1]["reward"]} for number, row in enumerate(rows)]
    )
    rollouts = recorded_rollouts(path)
    CHANGES[change](path, other)
    for position in range(4):
        with pytest.raises(DataError, match=rf"^r\.{suffix} was changed while it was in use\."):
            rollouts.document(position)


def test_data_without_a_trained_token_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    rows = [good_row(number, loss_mask=[0] * 5) for number in range(3)]
    with pytest.raises(
        DataError,
        match=r"r\.jsonl needs a trained token \(got 3 documents whose loss_mask is false",
    ):
        recorded_rollouts(write_jsonl(path, rows))
    assert recorded_rollouts(write_jsonl(path, [*rows, good_row(3)])).num_documents == 4
