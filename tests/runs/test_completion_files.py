"""Files of completions: rows are read as they were written, and damaged files are refused."""

import dataclasses
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.completion_files import (
    CompletionFile,
    CompletionRow,
    completion_files,
    read_completions,
    write_completions,
)

TRAINED_ROW = CompletionRow(
    step=3,
    name="a.jsonl:12",
    prompt="6 * 7 =",
    completion="42",
    reward=1.1,
    exact_match=True,
    rewards={"answer": 1.0, "boxed": 0.5},
    advantage=-0.25,
    tokens=2,
    finish_reason="length",
    version=7,
    answer="42",
    logged={"judge/reason": "short"},
)
EVALUATED_ROW = CompletionRow(
    step=0, name="prompt 0", prompt="é=\x1b[31m", completion="\x00<b>\n\u202e", reward=0.0
)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "completions" / "evaluation_a_1.parquet"


def test_rows_are_read_as_they_were_written(path):
    write_completions(path, [TRAINED_ROW, EVALUATED_ROW])
    assert read_completions(path) == [TRAINED_ROW, EVALUATED_ROW]
    assert pq.read_table(path)["reward/boxed"].to_pylist() == [0.5, None]
    assert pq.read_table(path)["logged/judge/reason"].to_pylist() == ["short", None]
    write_completions(path, [])
    assert read_completions(path) == []
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_of_an_earlier_version_says_of_no_completion_that_it_is_right(path):
    write_completions(path, [TRAINED_ROW])
    pq.write_table(pq.read_table(path).drop_columns(["exact_match", "score_failed"]), path)
    assert read_completions(path) == [dataclasses.replace(TRAINED_ROW, exact_match=None)]


def test_the_name_of_a_file_has_its_set_and_steps(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for name in (
        "evaluation_a_b_000010.parquet",
        "evaluation_a_b_9.parquet",
        "steps_000101-000200.parquet",
        ".steps_000001-000100.parquet.tmp",
        "notes.txt",
        "evaluation_7.parquet",
    ):
        (folder / name).touch()
    assert completion_files(tmp_path) == [
        CompletionFile("a_b", 9, 9, folder / "evaluation_a_b_9.parquet"),
        CompletionFile("a_b", 10, 10, folder / "evaluation_a_b_000010.parquet"),
        CompletionFile("training", 101, 200, folder / "steps_000101-000200.parquet"),
    ]
    assert completion_files(folder) == []


def test_secrets_are_hidden_and_bytes_that_are_no_text_replaced(path):
    row = CompletionRow(
        step=1,
        name="\udcff.jsonl:1",
        prompt="password=hunter2",
        completion="hf_abcdefghijklmnopqrstuv1",
        reward=math.inf,
        logged={"api_key": "hunter2", "length": "3"},
    )
    write_completions(path, [row])
    assert read_completions(path) == [
        dataclasses.replace(
            row,
            name="?.jsonl:1",
            prompt="password=***",
            completion="***",
            logged={"api_key": "***", "length": "3"},
        )
    ]


def cut_in_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def invert_a_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 255]) + data[51:])


def drop_the_rewards(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["reward"]), path)


@pytest.mark.parametrize("damage", [cut_in_half, invert_a_byte, drop_the_rewards])
def test_a_damaged_file_is_refused(path, damage):
    write_completions(path, [TRAINED_ROW] * 50)
    damage(path)
    with pytest.raises(
        StorageError, match=r"evaluation_a_1\.parquet (is damaged \(|cannot be read)"
    ):
        read_completions(path)
