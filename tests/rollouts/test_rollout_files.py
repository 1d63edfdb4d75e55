"""Damaged and ill-formed rollout files are refused before training, with place and reason."""

import json
import math
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from builders.rollout_rows import (
    VOCABULARY_SIZE,
    good_row,
    recorded_config,
    recorded_rollouts,
    write_jsonl,
    write_parquet,
)

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.parsed_rows import parse_row
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.rows import Rules

NAN = math.nan
INFINITY = math.inf


def refusal(path: Path, estimator: str = "dr_grpo", **options) -> str:
    """Return the message with which recorded rollouts are refused, by exit status 3."""
    with pytest.raises(DataError) as error:
        recorded_rollouts(path, estimator, **options)
    assert error.value.exit_status == 3
    return str(error.value)


BAD = {
    "token_ids": [
        (..., "is missing; the row has loss_mask"),
        (
            [1, 2, 3, 4, 100],
            "needs tokens of the vocabulary, 0 to 99 (got 100 at position 4). ",
        ),
        ([1, 2, 3, 4], "has 5 entries and token_ids has 4"),
        ([], "is empty"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "needs a list of integers"),
        ([1, 2, None, 4, 5], "needs a list of integers"),
        (7, "needs a list of integers (got 7)"),
    ],
    "loss_mask": [
        ([True] * 5, "is true for the first token"),
        ([0, 0, 1, 2, 1], "is 2 at position 3"),
        ([0.0, 0.0, 0.5, 1.0, 1.0], "needs a list of true and false"),
        ([False, True], "has 2 entries and token_ids has 5"),
    ],
    "old_log_probs": [
        (..., "is missing"),
        ([0, 0, NAN, -1, -1], "is nan at position 2, which is trained"),
        ([0, 0, -1, -1e300, -1], "is -inf at position 3, which is trained"),
        ([0, 0, -1, -1, 0.0011], "is 0.0011 at position 4; a log-prob is at most 0"),
        ([0.0, 0.0, -1.0], "has 3 entries and token_ids has 5"),
        (["a", "b"], "needs a list of numbers"),
    ],
    "sampling_log_probs": [([0, 0, -1, -INFINITY, -1], "is -inf at position 3, which is trained")],
    "reward": [
        (NAN, "needs a finite number (got nan)"),
        (True, "needs a finite number (got True)"),
        (-1e39, "is -1e+39; it must lie within -1e+12 and 1e+12"),
    ],
    "group_id": [
        (..., "is missing"),
        (1.5, "needs an integer or a text"),
        ("", "needs an integer or a text"),
    ],
    "model_version": [(0.5, "needs an integer")],
    "truncated": [(1, "needs true or false")],
}
"""Bad values of each field with their reasons. A value of ... means that the field is missing; the
first trained token is at position 2."""

CASES = [(field, value, reason) for field, cases in BAD.items() for value, reason in cases]


def assert_named(message: str, row: str, reason: str) -> None:
    """Assert that a line of the message gives this reason for this row."""
    assert any(line.startswith(f"  {row}:") and reason in line for line in message.splitlines())


@pytest.mark.parametrize(("field", "value", "reason"), CASES, ids=lambda value: repr(value)[:30])
def test_a_bad_value_in_jsonl_is_refused_by_its_row(tmp_path, field, value, reason):
    rows = [good_row(0), good_row(1, **{field: value}), good_row(2)]
    assert_named(refusal(write_jsonl(tmp_path / "r.jsonl", rows)), "r.jsonl:2", reason)


@pytest.mark.parametrize(("field", "value", "reason"), CASES, ids=lambda value: repr(value)[:30])
def test_a_bad_value_in_parquet_is_refused_by_its_row(tmp_path, field, value, reason):
    """A column has one type: where the bad value has another, every row has it."""
    path = tmp_path / "r.parquet"
    rows = [good_row(0), good_row(1), good_row(2)]
    bad = {field: None if value is ... else value}
    if value is True:  # pyarrow would make 1 of it
        write_parquet(path, [row | bad for row in rows])
    else:
        try:
            write_parquet(path, [rows[0], rows[1] | bad, rows[2]])
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            write_parquet(path, [row | bad for row in rows])
    # The value in parentheses, and what follows a semicolon, depend on the type of the column.
    beginning = reason.partition(" (got")[0].partition(";")[0]
    assert_named(refusal(path), "r.parquet:2", beginning)


def test_the_digest_of_a_row_depends_on_every_field():
    log_probs = [0, 0, -1, -2, -3]
    changes = [
        {},
        {"sampling_log_probs": log_probs},
        {"reward": 0.75},
        {"group_id": "0"},
        {"id": "x"},
        {"loss_mask": [False, False, True, True, False]},
        {"old_log_probs": log_probs},
        {"ref_log_probs": log_probs},
        {"model_version": 1},
        {"truncated": True},
        {"exact_match": True},
    ]
    rules = Rules(VOCABULARY_SIZE)
    digests = [parse_row(good_row(1, **change), rules).digest() for change in changes]
    assert len(set(digests)) == len(changes)


def test_unusual_values_that_have_a_meaning_are_accepted(tmp_path):
    """Numbers of prompt tokens are not read, ids are made texts, and unknown fields ignored."""
    unusual = good_row(
        1,
        sampling_log_probs=[NAN, None, -2, -3, -0.5],
        old_log_probs=[None, NAN, -1, -1e-30, 1e-3],
        loss_mask=[0, 0, 1, 1, 1],
        reward=1,
        group_id="a",
        id=7,
        model_version=3,
        truncated=False,
        exact_match=None,
        text="is ignored",
    )
    rows = [unusual, "", good_row(2, group="a", reward=0)]
    rollouts = recorded_rollouts(write_jsonl(tmp_path / "r.jsonl", rows))
    first = rollouts.document(0)
    assert first.old_log_probs.tolist() == pytest.approx([-1, -1e-30, 1e-3])
    assert first.sampling_log_probs.tolist() == [-2, -3, -0.5]
    assert first.advantages.tolist() == [0.5, 0.5, 0.5]
    assert first.name == "7"
    assert first.reward == 1.0
    assert first.model_version == 3
    assert first.truncated is False
    assert first.exact_match is None
    second = rollouts.document(1)
    assert second.sampling_log_probs is None
    assert second.name == "r.jsonl:3"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not a JSON object (got list)"),
        ('{"reward": 1, "reward": 2}', "the key 'reward' appears twice"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1") + "\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (json.dumps(good_row(1)).replace("0.25", "1e400"), "needs a finite number (got inf)"),
        (json.dumps(good_row(1)).replace("0.25", "9" * 400), "needs a finite number"),
        (
            json.dumps(good_row(1)).replace("[7,", f"[{2**70},"),
            "needs a list of integers (got values of type object",
        ),
    ],
    ids=range(8),
)
def test_a_line_that_is_not_a_row_is_refused(tmp_path, line, reason):
    message = refusal(write_jsonl(tmp_path / "r.jsonl", [good_row(0), line, good_row(2)]))
    assert reason in message
    assert "r.jsonl:2" in message


def test_a_problem_of_many_rows_is_one_line_and_the_first_ten_others_are_listed(tmp_path):
    rows = [good_row(number, reward=NAN if number % 2 else 0.0) for number in range(60)]
    message = refusal(write_jsonl(tmp_path / "r.jsonl", rows))
    assert message.splitlines() == [
        "the recorded rollouts cannot be trained on: 30 problems",
        "  r.jsonl:2:reward: needs a finite number (got nan); the same in 29 rows more: 4, 6, 8, "
        "10, 12, 14, 16, 18 and 21 more",
    ]
    assert "1 problem\n" in refusal(write_jsonl(tmp_path / "r.jsonl", rows[:3]))
    different = [good_row(number, old_log_probs=[0] * (number + 9)) for number in range(12)]
    message = refusal(write_jsonl(tmp_path / "r.jsonl", different))
    assert "10 problems or more, the first are" in message
    lines = [int(line.split(":")[1]) for line in message.splitlines()[1:]]
    assert lines == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_problems_of_rows_groups_and_trajectories_come_together(tmp_path):
    """A wrong row counts in its group all the same, and is not compared with its trajectory."""
    rows = [
        good_row(0, 0, id="x"),
        good_row(1, 0, reward=NAN),
        good_row(2, 1),
        good_row(3, 1, token_ids=[0, 1, 2, 3, VOCABULARY_SIZE]),
        good_row(4, 2),
        good_row(5, ...),
        good_row(6, 3, trajectory=1),
        good_row(7, 3, trajectory=1, id="x"),
        good_row(8, 3),
        good_row(9, 4, trajectory=1),
        good_row(10, 4, trajectory=1, reward="good"),
        good_row(11, 4),
        "{",
    ]
    path = write_jsonl(tmp_path / "r.jsonl", rows)
    message = refusal(path, group_size=2)
    places = [line.split()[0] for line in message.splitlines()[1:]]
    assert places == [
        "r.jsonl:2:reward:",
        "r.jsonl:11:reward:",  # the same kind of problem
        "r.jsonl:4:token_ids:",
        "r.jsonl:8:id:",
        "r.jsonl:13:",
        "r.jsonl:8:reward:",  # not that of its trajectory
        "r.jsonl:6:group_id:",  # missing
        "r.jsonl:5:group_id:",  # a group of one
    ]
    # Without a size of groups, the estimator refuses the group of one document.
    assert "r.jsonl:5:group_id: rloo compares" in refusal(path, "rloo")


def test_rows_of_an_unknown_vocabulary_may_have_any_token_from_0_on(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(0, token_ids=[0, 1, 2, 3, -5])])
    config = recorded_config(path)
    with pytest.raises(DataError, match=r"of the vocabulary, 0 and more \(got -5 at position 4\)"):
        RecordedRollouts(config, Estimator("dr_grpo"), vocabulary_size=None)


def test_rows_beyond_the_limits_of_the_run_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(0), good_row(1, length=8)])
    rollouts = recorded_rollouts(path, max_tokens=8, max_completion_length=6)
    assert rollouts.num_documents == 2
    assert "r.jsonl:2:token_ids: has 8 tokens and at most 7 fit" in refusal(path, max_tokens=7)
    assert "r.jsonl:2:loss_mask: trains 6 tokens" in refusal(path, max_completion_length=5)


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [
        (..., ":1:advantage: is missing"),
        (NAN, "finite"),
        (1e300, ":1:advantage: is 1e+300; it must lie within -1e+12 and 1e+12"),
        (
            [0, 0, 1, -1e38, 1],
            ":1:advantage: at position 3 is -1e+38; it must lie within -1e+12 and 1e+12",
        ),
        ([0, 0, 1, 1e300, 1], "position 3"),
        ([0, 0, 1, INFINITY, 1], "position 3"),
        ([1], "1 entries"),
    ],
)
def test_a_bad_given_advantage_is_refused(tmp_path, advantage, reason):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(advantage=advantage)])
    assert reason in refusal(path, "given")


def test_given_advantages_are_of_a_document_or_of_each_token(tmp_path):
    path = tmp_path / "r.jsonl"
    of_document = good_row(advantage=0.5, reward=..., group_id=4)
    of_tokens = good_row(advantage=[None, NAN, 1, -2, 3], group_id=4)
    write_jsonl(path, [of_document, of_tokens])
    rollouts = recorded_rollouts(path, "given", needs=("group_id",))
    assert rollouts.document(0).advantages.tolist() == [0.5, 0.5, 0.5]
    assert rollouts.document(1).advantages.tolist() == [1, -2, 3]


def test_a_group_id_that_only_some_rows_have_is_refused(tmp_path):
    rows = [good_row(advantage=0.5), good_row(advantage=1, group_id=...)]
    message = refusal(write_jsonl(tmp_path / "r.jsonl", rows), "given")
    assert "r.jsonl:2:group_id: is missing; other rows have one" in message


def test_an_id_that_two_rows_have_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [good_row(0, id="x"), good_row(1, id="y"), good_row(2)])
    write_jsonl(tmp_path / "b.jsonl", [good_row(3, id="z"), good_row(4, id="x")])
    assert "b.jsonl:2:id: is 'x' like that of a.jsonl:1" in refusal(tmp_path)


def test_missing_and_empty_files_are_refused(tmp_path):
    (tmp_path / "dump.pt").write_bytes(b"")
    assert "got a folder with dump.pt" in refusal(tmp_path)
    assert "got dump.pt" in refusal(tmp_path / "dump.pt")
    missing = refusal(tmp_path / "no" / "such.jsonl")
    assert "needs .jsonl or .parquet files (got no such file)" in missing
    assert "got no such file" in refusal(tmp_path / "*.jsonl")
    (tmp_path / "e.jsonl").write_text("\n\n")
    assert "at least one row (got none in e.jsonl)" in refusal(tmp_path)
    (tmp_path / "e.parquet").write_bytes(b"")
    assert "e.parquet is not a complete Parquet file" in refusal(tmp_path / "e.parquet")


TWO_ROWS = [good_row(number, id=f"é{number}") for number in range(2)]


def test_a_jsonl_file_cut_off_within_a_row_is_refused(tmp_path):
    """At any byte: é has two."""
    path = write_jsonl(tmp_path / "r.jsonl", TWO_ROWS)
    data = path.read_bytes()
    end_of_first = data.index(b"\n")
    num_rows = {end_of_first: 1, end_of_first + 1: 1, len(data) - 1: 2}
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        if length in num_rows:
            assert recorded_rollouts(path).num_documents == num_rows[length]
        else:
            assert "the file ends within this row" in refusal(path)


def test_a_parquet_file_cut_off_anywhere_is_refused(tmp_path):
    path = write_parquet(tmp_path / "r.parquet", TWO_ROWS)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert "not a complete Parquet file" in refusal(path)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_is_refused_where_a_file_has_page_checksums(tmp_path, checksums):
    """Without them a flipped bit of a number makes another number, which nobody can notice."""
    path = write_parquet(
        tmp_path / "r.parquet",
        [good_row(number, old_log_probs=[0, 0, -0.5, -0.5, -0.5]) for number in range(2)],
        checksums=checksums,
        use_dictionary=False,
        compression="none",
    )
    assert recorded_rollouts(path).document(0).old_log_probs.tolist() == [-0.5] * 3
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack("<3d", -0.5, -0.5, -0.5))
    data[place + 6] ^= 0x10
    path.write_bytes(data)
    if checksums:
        assert "r.parquet is not a complete Parquet file, truncated or damaged" in refusal(path)
    else:
        assert recorded_rollouts(path).document(0).old_log_probs.tolist() == [-1.0, -0.5, -0.5]


def test_row_groups_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "r.parquet", [good_row(number) for number in range(100)])
    monkeypatch.setattr("pgtoolkit.tasks.row_files.MAX_ROW_GROUP_BYTES", 1000)
    assert "Row groups are read whole" in refusal(path)


def test_the_example_of_the_documentation_can_be_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    example = page.partition("## Recorded rollouts")[2].split("```json\n")[1].split("```")[0]
    path = write_jsonl(tmp_path / "r.jsonl", [example.strip()])
    assert recorded_rollouts(path).document(0).num_trained == 3
