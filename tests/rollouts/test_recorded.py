"""Recorded rollouts as a source: order, groups, advantages, resume."""

import os
import statistics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders.rollout_rows import (
    all_documents,
    assert_documents_equal,
    good_row,
    recorded_rollouts,
    write_jsonl,
    write_parquet,
)

from pgtoolkit.batch import Document
from pgtoolkit.config.schema_step import AccumulationConfig, LastStep
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.advantages import group_advantages
from pgtoolkit.rollouts.steps import StepLoader

SCATTERED = [0, 1, 0, 2, 1, 0, 3, 3, 2, 0, 1]


def rewards(rollouts):
    return [document.reward for document in all_documents(rollouts)]


def rows_of(groups, **changes):
    return [good_row(i, group, length=3 + i % 4, **changes) for i, group in enumerate(groups)]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "batch_std"])
def test_groups_stand_together_with_advantages_from_all_their_rewards(tmp_path, write, estimator):
    rows = rows_of([f"g{group}" for group in SCATTERED])
    path = write(tmp_path / f"r.{write.__name__.removeprefix('write_')}", rows)
    read = all_documents(recorded_rollouts(path, estimator))
    order = [i for group in range(4) for i, other in enumerate(SCATTERED) if other == group]
    divisor = (
        statistics.stdev(row["reward"] for row in rows) + 1e-6 if estimator == "batch_std" else 1.0
    )
    assert len(read) == len(order)
    for document, index in zip(read, order, strict=True):
        members = [i for i, other in enumerate(SCATTERED) if other == SCATTERED[index]]
        advantages = group_advantages(estimator, [rows[i]["reward"] for i in members])
        mask = torch.tensor(rows[index]["loss_mask"])
        expected = Document(
            tokens=torch.tensor(rows[index]["token_ids"]),
            loss_mask=mask,
            old_log_probs=torch.tensor(rows[index]["old_log_probs"])[mask],
            advantages=torch.full((int(mask.sum()),), advantages[members.index(index)] / divisor),
            group=SCATTERED[index],
            name=f"{path.name}:{index + 1}",
            reward=rows[index]["reward"],
        )
        assert_documents_equal(expected, document)


def test_row_groups_and_columns_of_other_writers(tmp_path):
    rows = rows_of(SCATTERED, text="x" * 100)
    expected = all_documents(recorded_rollouts(write_jsonl(tmp_path / "r.jsonl", rows)))
    table = pa.Table.from_pylist(rows)
    for number, (name, kind) in enumerate(
        [
            ("token_ids", pa.large_list(pa.uint16())),
            ("old_log_probs", pa.list_(pa.float64())),
            ("loss_mask", pa.list_(pa.int8())),
            ("group_id", pa.string()),
            ("reward", pa.float32()),
        ]
    ):
        column = table.column(name).cast(kind)
        changed = table.set_column(table.schema.get_field_index(name), name, column)
        pq.write_table(
            changed, tmp_path / f"{number}.parquet", row_group_size=3, write_page_checksum=True
        )
        for first, second in zip(
            expected, all_documents(recorded_rollouts(tmp_path / f"{number}.parquet")), strict=True
        ):
            assert_documents_equal(first, second, but=["name"])


def test_every_epoch_is_the_data_once_and_shuffled_by_groups(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows_of(SCATTERED * 3))
    plain = recorded_rollouts(path, epochs=2)
    assert rewards(plain)[:33] == rewards(plain)[33:]
    rollouts = recorded_rollouts(path, epochs=3, shuffle=True, seed=1)
    epochs = [all_documents(rollouts)[33 * e : 33 * (e + 1)] for e in range(3)]
    orders = [[document.reward for document in epoch] for epoch in epochs]
    assert (
        sorted(orders[0])
        == sorted(orders[1])
        == sorted(orders[2])
        == sorted(rewards(recorded_rollouts(path)))
    )
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert rewards(recorded_rollouts(path, epochs=3, shuffle=True, seed=1)) == [
        *orders[0],
        *orders[1],
        *orders[2],
    ]
    assert rewards(recorded_rollouts(path, epochs=3, shuffle=True, seed=2)) != [
        *orders[0],
        *orders[1],
        *orders[2],
    ]
    for epoch in epochs:  # each group once, in one piece, its documents in the order of the file
        groups = [document.group for document in epoch]
        runs = [group for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
        assert len(runs) == len(set(runs)) == 4
        assert all(
            epoch[i].reward < epoch[i + 1].reward for i in range(32) if groups[i] == groups[i + 1]
        )
    assert len({document.group for epoch in epochs for document in epoch}) == 12
    assert len({document.name for epoch in epochs for document in epoch}) == 99
    assert [rollouts.batch_end(position) for position in (0, 32, 33, 98)] == [33, 33, 66, 99]


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 1):
        write_jsonl(
            tmp_path / f"batch-{number}.jsonl", [good_row(number, number), good_row(number, number)]
        )
    (tmp_path / ".batch-3.jsonl.tmp").write_text("{")
    expected = [0.25, 0.25, 0.5, 0.5, 2.5, 2.5]
    assert (
        rewards(recorded_rollouts(tmp_path))
        == rewards(recorded_rollouts(tmp_path / "batch-*.jsonl"))
        == expected
    )
    assert recorded_rollouts(tmp_path).document(5).name == "batch-10.jsonl:2"


def test_group_ids_and_group_size(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    write_jsonl(path, [good_row(i, group_id=...) for i in range(6)])
    with pytest.raises(DataError, match=r"r\.jsonl:1:group_id: is missing.*rollout\.group_size"):
        recorded_rollouts(path)
    assert [
        document.group for document in all_documents(recorded_rollouts(path, group_size=3))
    ] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    with pytest.raises(
        DataError, match=r"6 documents, which is no multiple of rollout\.group_size=4"
    ):
        recorded_rollouts(path, group_size=4)
    write_jsonl(path, [good_row(i, group_id=..., advantage=1.0) for i in range(6)])
    with pytest.raises(DataError, match="group_id: is missing"):
        recorded_rollouts(path, "given", needs=("group_id",))
    alone = recorded_rollouts(path, "given")
    assert not alone.has_groups
    assert [document.group for document in all_documents(alone)] == list(range(6))
    write_jsonl(path, rows_of([5, 5, 6, 5, 6]))
    with pytest.raises(
        DataError, match=r"r\.jsonl:1:group_id: is 5, a group of 3 documents; rollout\.group_size=2"
    ):
        recorded_rollouts(path, group_size=2)
    with pytest.raises(
        DataError, match=r"r\.jsonl:3:group_id: is 6, a group of 2 documents; rollout\.group_size=3"
    ):
        recorded_rollouts(path, group_size=3)
    with pytest.raises(DataError, match=r"r\.jsonl:2:group_id: rloo compares"):
        recorded_rollouts(write_jsonl(path, rows_of([0, 1, 0])), "rloo")
    write_jsonl(tmp_path / "s.jsonl", rows_of([0, 0]))
    assert recorded_rollouts(tmp_path).has_groups
    assert "1 groups have documents in several files" in caplog.text


def parts(*rows, **changes):
    """A row for each (group, trajectory, reward); ... leaves a field out."""
    names = "group_id", "trajectory", "reward"
    return [
        good_row(i, **dict(zip(names, row, strict=True)), **changes) for i, row in enumerate(rows)
    ]


THREE_PARTS = [
    (0, 5, 1.0),
    (0, 5, 1.0),
    (1, 5, 2.0),
    (0, ..., 0.0),
    (0, 5, 1.0),
    (1, 8, 0.0),
    (1, 5, 2.0),
    (1, ..., 4.0),
]
THREE_PARTS = parts(*THREE_PARTS)


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
def test_reward_and_baseline_count_an_attempt_once(tmp_path, estimator, first, second):
    """Rewards 1, 1, 1, 0 with three parts of one attempt have the mean 0.5; an id is of its
    group."""
    path = write_jsonl(tmp_path / "r.jsonl", THREE_PARTS)
    divisor = statistics.stdev([1, 0, 2, 0, 4]) + 1e-6 if estimator == "batch_std" else 1.0
    rollouts = recorded_rollouts(path, estimator)
    # as they are here
    notes = [note[:30] for note in rollouts.index.notes if "different prompts" not in note]
    assert notes == ["8 documents are 5 trajectories"]
    read = all_documents(rollouts)
    assert [int(d.name.split(":")[1]) - 1 for d in read] == [0, 1, 4, 3, 2, 6, 5, 7]
    assert [d.trajectory for d in read] == [0, 0, 0, None, 2, 2, 5, None]
    wanted = [first[0]] * 3 + [first[1]] + [second[0]] * 2 + [*second[1:]]
    assert [float(d.advantages[0]) for d in read] == pytest.approx(
        [x / divisor for x in wanted], rel=1e-6
    )
    for epoch in (0, 1):
        again = all_documents(recorded_rollouts(path, estimator, epochs=2, shuffle=True))[
            8 * epoch :
        ][:8]
        named = [d.trajectory for d in again if d.trajectory is not None]
        assert sorted(named) == [8 * epoch + x for x in (0, 0, 0, 2, 2, 5)]
        # each in one piece
        assert len([x for i, x in enumerate(named) if i == 0 or named[i - 1] != x]) == 3


def test_the_documents_of_an_attempt_have_one_reward(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", parts((0, "a", 1.0), (0, "b", 0.5), (0, "a", 0.5)))
    with pytest.raises(
        DataError,
        match=r"r\.jsonl:3:reward: is not that of r\.jsonl:1, a row of the same trajector",
    ):
        recorded_rollouts(path)
    rows = [
        row | {"advantage": 1.0, "exact_match": i == 0}
        for i, row in enumerate(parts(*[(0, 1, ...)] * 2))
    ]
    with pytest.raises(DataError, match=r"r\.jsonl:2:exact_match: is not that of r\.jsonl:1"):
        recorded_rollouts(write_jsonl(path, rows), "given")
    with pytest.raises(DataError, match=r"r\.jsonl:1:trajectory: needs an integer or a text"):
        recorded_rollouts(write_jsonl(path, parts((0, 1.5, 1.0))))


def test_the_group_size_counts_attempts(tmp_path):
    path = write_jsonl(
        tmp_path / "r.jsonl",
        [row | {"group_id": None} for row in THREE_PARTS[:2] + THREE_PARTS[3:5]],
    )
    assert [d.group for d in all_documents(recorded_rollouts(path, group_size=2))] == [0] * 4
    with pytest.raises(
        DataError, match=r"has no group_id and 2 trajectories, which is no multiple of .*size=4"
    ):
        recorded_rollouts(path, group_size=4)
    with pytest.raises(
        DataError, match=r"group_id: is 0, a group of 2 trajectories; rollout\.group_size=4"
    ):
        recorded_rollouts(write_jsonl(path, THREE_PARTS), group_size=4)
    # Where nothing asks for groups each attempt is its own, and ids are a file's.
    rows = [row | {"group_id": None, "advantage": 1.0} for row in THREE_PARTS[:2]]
    write_jsonl(tmp_path / "r.jsonl", rows)
    write_jsonl(tmp_path / "s.jsonl", [*rows, good_row(group_id=..., advantage=2)])
    alone = all_documents(recorded_rollouts(tmp_path, "given"))
    assert [(d.group, d.trajectory) for d in alone] == [(0, 0), (0, 0), (1, 2), (1, 2), (2, None)]


def test_steps_hold_whole_attempts_of_recorded_rollouts(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", THREE_PARTS)
    loader = StepLoader(
        recorded_rollouts(path), AccumulationConfig(2, 8, None, LastStep.short), False, 99
    )
    found = [
        (step.totals.num_documents, step.totals.tokens_per_trajectory.tolist()) for step in loader
    ]
    assert found == [(3, [9]), (3, [3, 6]), (2, [3, 3])]


CHANGES = {
    "in place": lambda path, other: path.write_bytes(other.read_bytes()),
    "replaced": lambda path, other: os.replace(other, path),
    "emptied": lambda path, other: path.write_bytes(b""),
    "removed": lambda path, other: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_file_that_changes_while_it_is_in_use(tmp_path, write, change):
    """Its rows have other rewards, at the same size."""
    suffix = write.__name__.removeprefix("write_")
    rows = [good_row(i, i // 2) for i in range(4)]
    options = {} if suffix == "jsonl" else {"use_dictionary": False, "compression": "none"}
    path = write(tmp_path / f"r.{suffix}", rows, **options)
    others = [row | {"reward": rows[i - 1]["reward"]} for i, row in enumerate(rows)]
    other = write(tmp_path / f"other.{suffix}", others, **options)
    rollouts = recorded_rollouts(path)
    CHANGES[change](path, other)
    for position in range(4):
        with pytest.raises(DataError, match=rf"^r\.{suffix} was changed while it was in use\."):
            rollouts.document(position)


def test_data_without_a_trained_token_are_refused(tmp_path):
    rows = [good_row(i, loss_mask=[0] * 5) for i in range(3)]
    with pytest.raises(
        DataError,
        match=r"r\.jsonl needs a trained token \(got 3 documents whose loss_mask is false",
    ):
        recorded_rollouts(write_jsonl(tmp_path / "r.jsonl", rows))
    assert (
        recorded_rollouts(write_jsonl(tmp_path / "r.jsonl", [*rows, good_row(3)])).num_documents
        == 4
    )
