"""The Parquet files of completions: what is written is read back, whole or not at all."""

import dataclasses
import math

import pyarrow.parquet as pq
import pytest

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.completion_files import (
    CompletionFile,
    CompletionRow,
    completion_files,
    read_completions,
)
from pgtoolkit.runs.completion_files import write_completions as write

ROW = CompletionRow(
    3,
    "a.jsonl:12",
    "6 * 7 =",
    "42",
    1.1,
    {"answer": 1.0, "boxed": 0.5},
    -0.25,
    2,
    "length",
    7,
    "42",
)
ROW = dataclasses.replace(ROW, logged={"judge/reason": "short"})
EVALUATED = CompletionRow(0, "prompt 0", "é=\x1b[31m", "\x00<b>\n\u202e", 0.0)


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "completions" / "evaluation_held_out_000200.parquet"
    write(path, [ROW, EVALUATED])
    assert read_completions(path) == [ROW, EVALUATED]
    assert pq.read_table(path)["reward/boxed"].to_pylist() == [0.5, None]
    assert pq.read_table(path)["logged/judge/reason"].to_pylist() == ["short", None]
    write(path, [])
    assert read_completions(path) == []
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_files_name_tells_its_set_and_steps(tmp_path):
    names = [
        "evaluation_a_b_000010.parquet",
        "evaluation_a_b_9.parquet",
        "steps_000101-000200.parquet",
    ]
    for name in [*names, ".steps_000001-000100.parquet.tmp", "notes.txt", "evaluation_7.parquet"]:
        (tmp_path / "completions").mkdir(exist_ok=True)
        (tmp_path / "completions" / name).touch()
    found = [("a_b", 9, 9, 1), ("a_b", 10, 10, 0), ("training", 101, 200, 2)]
    expected = [
        CompletionFile(*one, tmp_path / "completions" / names[place]) for *one, place in found
    ]
    assert completion_files(tmp_path) == expected
    assert completion_files(tmp_path / "completions") == []


def test_what_looks_like_a_secret_is_hidden_and_what_is_no_text_replaced(tmp_path):
    path = tmp_path / "completions" / "evaluation_a_1.parquet"
    row = CompletionRow(
        1, "\udcff.jsonl:1", "password=hunter2", "hf_abcdefghijklmnopqrstuv1", math.inf
    )
    write(path, [dataclasses.replace(row, logged={"api_key": "hunter2", "length": "3"})])
    (found,) = read_completions(path)
    assert found.logged == {"api_key": "***", "length": "3"}
    assert (found.name, found.prompt, found.completion) == ("?.jsonl:1", "password=***", "***")
    assert found.reward == math.inf


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "completions" / "evaluation_a_1.parquet"
    write(path, [ROW] * 50)
    whole, table = path.read_bytes(), pq.read_table(path)
    for change in (
        lambda: path.write_bytes(whole[: len(whole) // 2]),
        lambda: path.write_bytes(whole[:50] + bytes([whole[50] ^ 255]) + whole[51:]),
        lambda: pq.write_table(table.drop_columns(["reward"]), path),
    ):
        change()
        with pytest.raises(
            StorageError, match=r"evaluation_a_1\.parquet (is damaged \(|cannot be read)"
        ):
            read_completions(path)
