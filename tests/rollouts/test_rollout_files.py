"""Damaged and ill-formed rollout files: refused before training, with the place and the reason."""

import json
import math
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from builders.rollout_rows import VOCABULARY_SIZE, good_row, write_jsonl, write_parquet
from builders.rollout_rows import recorded_rollouts as load

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.parsed_rows import parse_row
from pgtoolkit.rollouts.rows import Rules

NAN, INFINITY = math.nan, math.inf


def refused(path, estimator="dr_grpo", **changes):
    with pytest.raises(DataError) as error:
        load(path, estimator, **changes)
    assert error.value.exit_status == 3
    return str(error.value)


BAD = {  # field: [(value or ... to leave it out, reason)]; position 2 is the first that is trained
    "token_ids": [
        (..., "is missing; the row has loss_mask"),
        ([1, 2, 3, 4, 100], "is 100 at position 4; the vocabulary is 0 to 99"),
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
CASES = [(field, value, reason) for field, cases in BAD.items() for value, reason in cases]


@pytest.mark.parametrize(("field", "value", "reason"), CASES, ids=lambda value: repr(value)[:30])
def test_every_kind_of_bad_value_is_named(tmp_path, field, value, reason):
    """In one row among many; of a column of a Parquet file that cannot have two types, in every
    row."""
    rows = [good_row(0), good_row(1, **{field: value}), good_row(2)]
    message = refused(write_jsonl(tmp_path / "r.jsonl", rows))
    assert any(line.startswith("  r.jsonl:2:") and reason in line for line in message.splitlines())
    reason, wrong = reason.split(" (got")[0], None if value is ... else value
    wrongs = [rows[0], good_row(1, **{field: wrong}), rows[2]]
    try:
        write_parquet(
            tmp_path / "r.parquet",
            [row | {field: True} for row in rows] if value is True else wrongs,
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        write_parquet(tmp_path / "r.parquet", [row | {field: wrong} for row in rows])
    found = refused(tmp_path / "r.parquet").splitlines()
    assert any(line.startswith("  r.parquet:2:") and reason.split(";")[0] in line for line in found)


def test_a_row_with_any_other_value_has_another_checksum():
    changes = [
        {},
        {"sampling_log_probs": [0, 0, -1, -2, -3]},
        {"reward": 0.75},
        {"group_id": "0"},
        {"id": "x"},
    ]
    changes += [
        {"loss_mask": [False, False, True, True, False]},
        {"old_log_probs": [0, 0, -1, -2, -3]},
    ]
    changes += [
        {"ref_log_probs": [0, 0, -1, -2, -3]},
        {"model_version": 1},
        {"truncated": True},
        {"exact_match": True},
    ]
    digests = [parse_row(good_row(1, **one), Rules(VOCABULARY_SIZE)).digest() for one in changes]
    assert len(set(digests)) == len(changes)


def test_good_rows_are_not_refused(tmp_path):
    odd = good_row(1, sampling_log_probs=[NAN, None, -2, -3, -0.5])
    odd |= good_row(
        1,
        old_log_probs=[None, NAN, -1, -1e-30, 1e-3],
        loss_mask=[0, 0, 1, 1, 1],
        reward=1,
        group_id="a",
    )
    odd |= {
        "id": 7,
        "model_version": 3,
        "truncated": False,
        "exact_match": None,
        "text": "is ignored",
    }
    source = load(write_jsonl(tmp_path / "r.jsonl", [odd, "", good_row(2, group="a", reward=0)]))
    first = source.document(0)
    assert first.old_log_probs.tolist() == pytest.approx([-1, -1e-30, 1e-3])
    assert first.sampling_log_probs.tolist() == [-2, -3, -0.5]
    assert source.document(1).sampling_log_probs is None
    assert first.advantages.tolist() == [0.5, 0.5, 0.5]
    assert (first.name, first.reward, first.model_version, first.truncated) == ("7", 1.0, 3, False)
    assert (first.exact_match, source.document(1).name) == (None, "r.jsonl:3")


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
def test_lines_that_are_no_rows(tmp_path, line, reason):
    message = refused(write_jsonl(tmp_path / "r.jsonl", [good_row(0), line, good_row(2)]))
    assert reason in message
    assert "r.jsonl:2" in message


def test_the_first_ten_problems_are_listed(tmp_path):
    rows = [good_row(i, reward=NAN if i % 2 else 0.0) for i in range(60)]
    message = refused(write_jsonl(tmp_path / "r.jsonl", rows))
    assert "10 problems or more" in message
    assert [line.split(":")[1] for line in message.splitlines()[1:]] == [
        str(2 * i) for i in range(1, 11)
    ]
    assert "1 problem\n" in refused(write_jsonl(tmp_path / "r.jsonl", rows[:3]))


def test_rows_beyond_the_limits_of_the_run_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(0), good_row(1, length=8)])
    assert load(path, max_tokens=8, max_completion_length=6).num_documents == 2
    assert "r.jsonl:2:token_ids: has 8 tokens and at most 7 fit" in refused(path, max_tokens=7)
    assert "r.jsonl:2:loss_mask: trains 6 tokens" in refused(path, max_completion_length=5)


def test_given_advantages_are_needed_and_checked(tmp_path):
    path = tmp_path / "r.jsonl"
    assert ":1:advantage: is missing" in refused(write_jsonl(path, [good_row()]), "given")
    for value, reason in [
        (NAN, "finite"),
        (1e300, ":1:advantage: is 1e+300; it must lie within -1e+12 and 1e+12"),
        (
            [0, 0, 1, -1e38, 1],
            ":1:advantage: at position 3 is -1e+38; it must lie within -1e+12 and 1e+12",
        ),
        ([0, 0, 1, 1e300, 1], "position 3"),
        ([0, 0, 1, INFINITY, 1], "position 3"),
        ([1], "1 entries"),
    ]:
        assert reason in refused(write_jsonl(path, [good_row(advantage=value)]), "given")
    rows = [
        good_row(advantage=0.5, reward=...),
        good_row(advantage=[None, NAN, 1, -2, 3], group_id=...),
    ]
    assert "r.jsonl:2:group_id: is missing; other rows have one" in refused(
        write_jsonl(path, rows), "given"
    )
    source = load(
        write_jsonl(path, [row | {"group_id": 4} for row in rows]), "given", needs=("group_id",)
    )
    assert source.document(0).advantages.tolist() == [0.5, 0.5, 0.5]
    assert source.document(1).advantages.tolist() == [1, -2, 3]


def test_ids_are_unique(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [good_row(0, id="x"), good_row(1, id="y"), good_row(2)])
    write_jsonl(tmp_path / "b.jsonl", [good_row(3, id="z"), good_row(4, id="x")])
    assert "b.jsonl:2:id: is 'x' like that of a.jsonl:1" in refused(tmp_path)


def test_missing_and_empty_files_are_refused(tmp_path):
    (tmp_path / "dump.pt").write_bytes(b"")
    assert "got a folder with dump.pt" in refused(tmp_path)
    assert "got dump.pt" in refused(tmp_path / "dump.pt")
    assert "needs .jsonl or .parquet files (got no such file)" in refused(
        tmp_path / "no" / "such.jsonl"
    )
    assert "got no such file" in refused(tmp_path / "*.jsonl")
    (tmp_path / "e.jsonl").write_text("\n\n")
    assert "at least one row (got none in e.jsonl)" in refused(tmp_path)
    (tmp_path / "e.parquet").write_bytes(b"")
    assert "e.parquet is not a complete Parquet file" in refused(tmp_path / "e.parquet")


def test_a_file_cut_off_at_any_byte_is_refused(tmp_path):
    rows = [good_row(i, id=f"é{i}") for i in range(2)]
    whole = write_jsonl(tmp_path / "r.jsonl", rows).read_bytes()
    first = whole.index(b"\n")
    for length in range(1, len(whole)):
        (tmp_path / "r.jsonl").write_bytes(whole[:length])
        if length in (first, first + 1, len(whole) - 1):  # whole rows remain
            assert load(tmp_path / "r.jsonl").num_documents == (1 if length <= first + 1 else 2)
        else:
            assert "the file ends within this row" in refused(tmp_path / "r.jsonl")
    whole = write_parquet(tmp_path / "r.parquet", rows).read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "r.parquet").write_bytes(whole[:length])
        assert "not a complete Parquet file" in refused(tmp_path / "r.parquet")


def test_page_checksums_are_verified_where_a_file_has_them(tmp_path):
    """Without them the file is read all the same, and a flipped bit of a number is another
    number."""
    rows = [good_row(i, old_log_probs=[0, 0, -0.5, -0.5, -0.5]) for i in range(2)]
    for checksums in (True, False):
        path = write_parquet(
            tmp_path / "r.parquet",
            rows,
            checksums=checksums,
            use_dictionary=False,
            compression="none",
        )
        assert load(path).document(0).old_log_probs.tolist() == [-0.5] * 3
        whole, number = bytearray(path.read_bytes()), struct.pack("<3d", -0.5, -0.5, -0.5)
        whole[whole.index(number) + 6] ^= 0x10
        path.write_bytes(whole)
        if checksums:
            assert "r.parquet is not a complete Parquet file, truncated or damaged" in refused(path)
        else:
            assert load(path).document(0).old_log_probs.tolist() == [-1.0, -0.5, -0.5]


def test_huge_row_groups_are_refused(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "r.parquet", [good_row(i) for i in range(100)])
    monkeypatch.setattr("pgtoolkit.tasks.row_files.MAX_ROW_GROUP_BYTES", 1000)
    assert "Row groups are read whole" in refused(path)


def test_the_example_of_the_documentation(tmp_path):
    words = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    example = words.split("```json\n")[1].split("```")[0]
    assert load(write_jsonl(tmp_path / "r.jsonl", [example.strip()])).document(0).num_trained == 3
