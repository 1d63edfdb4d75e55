"""Prompts from folders of Hugging Face data sets, from chats in every kind of file, and from verl's
columns.

The folders are written here in the format of `datasets`; one test compares with those that the
package writes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.tasks.prompt_rows import read_prompts

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "6 * 7?"}]


def table(numbers: Sequence[int]) -> pa.Table:
    messages = [[{"role": "user", "content": f"{i}!"}] for i in numbers]
    return pa.table(
        {"prompt": [f"{i}?" for i in numbers], "messages": messages, "answer": [*numbers]}
    )


def save_to_disk(folder: Path, *shards: list[int], split: str | None = None) -> Path:
    """Write a folder like `save_to_disk` of `datasets`.

    It holds Arrow streams of a few batches, and a state that names them.
    """
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, numbers in zip(names, shards, strict=True):
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table([0]).schema) as stream,
        ):
            stream.write_table(table(numbers), 2)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_split": split,
        "_format_type": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def texts(path: Path, split: str | None = None, field: str = "prompt") -> list[str]:
    return [row.text for row in read_prompts(str(path), split, field, "answer")]


def test_a_saved_data_set_is_read_in_the_order_of_its_files(tmp_path):
    folder = save_to_disk(tmp_path / "saved", [5, 3, 9], [1, 2])
    rows = read_prompts(str(folder), None, "prompt", "answer")
    assert [row.text for row in rows] == ["5?", "3?", "9?", "1?", "2?"]
    assert [row.answer for row in rows] == ["5", "3", "9", "1", "2"]
    assert [row.place for row in rows[2:4]] == [
        "data-00000-of-00002.arrow:3",
        "data-00001-of-00002.arrow:1",
    ]
    assert {row.messages for row in rows} == {None}
    (folder / "cache-123.arrow").write_bytes(b"a cache that datasets has left")
    assert texts(folder) == ["5?", "3?", "9?", "1?", "2?"]


def test_a_saved_data_set_with_splits_needs_task_split(tmp_path):
    for name, numbers in (("train", [1, 2]), ("test", [3])):
        save_to_disk(tmp_path / "both" / name, numbers)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts(tmp_path / "both", "train") == ["1?", "2?"]
    assert texts(tmp_path / "both", "test") == ["3?"]
    assert texts(tmp_path / "both" / "test") == ["3?"]
    for split in (None, "validation"):
        with pytest.raises(ConfigError) as error:
            texts(tmp_path / "both", split)
        assert str(error.value) == (
            f"task.split={split or 'null'} with task.path={tmp_path / 'both'} needs one of train, "
            f"test (got {split or 'null'}). These are the splits that it has. Use "
            "task.split=train or task.split=test."
        )


def test_a_split_that_would_be_ignored_is_refused(tmp_path):
    train_split = save_to_disk(tmp_path / "train", [1], split="train")
    without_split = save_to_disk(tmp_path / "without", [1])
    assert texts(train_split, "train") == texts(train_split) == ["1?"]
    with pytest.raises(ConfigError, match=r"needs train \(got test\)"):
        texts(train_split, "test")
    with pytest.raises(ConfigError, match=r"needs null \(got train\)"):
        texts(without_split, "train")
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "1?", "answer": 1}\n')
    with pytest.raises(ConfigError, match=r"needs null \(got train\)"):
        texts(file, "train")


def test_an_incomplete_saved_data_set_is_refused(tmp_path):
    folder = save_to_disk(tmp_path / "saved", [1, 2, 3, 4], [5])
    file = folder / "data-00000-of-00002.arrow"
    complete = file.read_bytes()
    # The first lacks only the mark of the end, and no row.
    for damaged in (complete[:-8], complete[: len(complete) // 2], b""):
        file.write_bytes(damaged)
        with pytest.raises(
            DataError, match=r"data-00000-of-00002\.arrow is not a complete Arrow stream"
        ):
            texts(folder)
    file.unlink()
    with pytest.raises(
        DataError, match=r"lacks data-00000-of-00002\.arrow, which its state\.json names"
    ):
        texts(folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(DataError, match="An old version of datasets kept an order beside the rows"):
        texts(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        texts(folder)


def hub(folder: Path, *names: str) -> Path:
    """Write a folder like a download from the hub; file i has the prompt `i?`."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(table([i]), folder / name)
        else:
            (folder / name).write_text(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002-1a2b.parquet",
                "data/test.parquet",
            ],
            "train",
            2,
        ),
        (["train.jsonl", "test.jsonl"], "train", 1),
        (
            [
                "default/train/0000.parquet",
                "default/train/0001.parquet",
                "default/test/0000.parquet",
            ],
            "train",
            2,
        ),
        (
            ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
            "train_sft",
            1,
        ),
    ],
)
def test_a_downloaded_split_is_recognised_by_its_file_names(tmp_path, names, split, expected):
    folder = hub(tmp_path / "hub", *names)
    assert texts(folder, split) == [f"{i}?" for i in range(expected)]
    with pytest.raises(ConfigError, match=r"task\.split=prefs with task\.path=.* needs "):
        texts(folder, "prefs")


def test_a_folder_of_several_splits_needs_task_split(tmp_path):
    with pytest.raises(ConfigError, match=r" Use task\.split=test or task\.split=train\."):
        texts(hub(tmp_path / "flat", "train.jsonl", "test.jsonl"))
    with pytest.raises(ConfigError, match=r" Use task\.split=train\."):
        texts(hub(tmp_path / "deep", "data/train-00000-of-00001.parquet"))
    assert texts(hub(tmp_path / "own", "hard.jsonl", "easy.jsonl")) == ["1?", "0?"]


def test_several_data_sets_in_one_folder_are_refused(tmp_path):
    folder = hub(
        tmp_path / "gsm",
        "main/train-00000-of-00001.parquet",
        "socratic/train-00000-of-00001.parquet",
    )
    with pytest.raises(ConfigError) as error:
        texts(folder, "train")
    assert str(error.value) == (
        f"task.path={folder} needs one data set (got 2). The split is in main, socratic. Use "
        f"task.path={folder}/main."
    )
    assert texts(folder / "socratic", "train") == ["1?"]


def test_chats_are_read_from_every_kind_of_file(tmp_path):
    folder = save_to_disk(tmp_path / "saved", [7])
    assert read_prompts(str(folder), None, "messages", "answer")[0].messages == (
        {"role": "user", "content": "7!"},
    )
    extra = pa.table(
        {"prompt": [[*CHAT, {"role": "user", "content": "?", "name": "me"}]], "answer": [42]}
    )
    pq.write_table(extra, tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": CHAT, "answer": 42}) + "\n")
    (row,) = read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")
    assert row.text == "6 * 7?"
    assert row.messages == tuple(CHAT)
    (row,) = read_prompts(str(tmp_path / "p.parquet"), None, "prompt", "answer")
    assert row.text == "?"
    assert row.messages == (*CHAT, {"role": "user", "content": "?", "name": "me"})


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (
            [{"role": "user"}],
            "needs chat messages whose role and content are texts (got {'role': 'user'})",
        ),
        (
            [{"role": "user", "content": ["a"]}],
            "needs chat messages whose role and content are texts",
        ),
        (
            [*CHAT, {"role": "assistant", "content": "42"}],
            "needs a last message that the model is to answer",
        ),
        ([{"role": "user", "content": ""}], "needs a last message that the model is to answer"),
    ],
    ids=["no content", "parts", "answered", "empty"],
)
def test_prompts_that_are_not_chats_are_refused_with_their_row(tmp_path, prompt, reason):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt, "answer": 1}) + "\n")
    with pytest.raises(DataError) as error:
        read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")
    assert f"p.jsonl:1:prompt: {reason}" in str(error.value)


def test_folders_that_the_datasets_package_has_saved_are_read(tmp_path):
    """The package itself writes them, if it is installed."""
    datasets = pytest.importorskip("datasets")
    complete = datasets.Dataset(table([*range(7)]))
    complete.save_to_disk(tmp_path / "sharded", num_shards=3)
    assert texts(tmp_path / "sharded") == [f"{i}?" for i in range(7)]
    # It stores an order other than that of the rows.
    chosen = complete.shuffle(seed=1).filter(lambda row: row["answer"] != 3)
    chosen.save_to_disk(tmp_path / "chosen")
    assert texts(tmp_path / "chosen") == list(chosen["prompt"])
    datasets.DatasetDict({"train": complete, "test": chosen}).save_to_disk(tmp_path / "both")
    assert texts(tmp_path / "both", "test", "messages") == [
        messages[0]["content"] for messages in chosen["messages"]
    ]
    with pytest.raises(ConfigError, match="needs one of train, test"):
        texts(tmp_path / "both")


def test_numeric_answers_are_written_as_a_model_writes_them(tmp_path):
    """Integers in a column of floats, as pandas stores integers with a gap, have no point."""
    numbers = [42.0, -3.0, 0.5, 1e15, 1e22, 0.1]
    expected = ["42", "-3", "0.5", "1000000000000000", "1e+22", "0.1"]
    of_float32 = [*expected[:3], "999999986991104", "1e+22", "0.1"]
    for kind, answers in ((pa.float64(), expected), (pa.float32(), of_float32)):
        columns = {"prompt": ["?"] * 6, "answer": pa.array(numbers, kind)}
        pq.write_table(pa.table(columns), tmp_path / "p.parquet")
        rows = read_prompts(str(tmp_path / "p.parquet"), None, "prompt", "answer")
        assert [row.answer for row in rows] == answers
    lines = [
        json.dumps({"prompt": "?", "answer": number}) for number in (42.0, 42, 3.140000104904174)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    rows = read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")
    assert [row.answer for row in rows] == ["42", "42", "3.140000104904174"]


def test_the_columns_of_verl_are_read(tmp_path):
    """The prompt is a list of messages, the answer a field of `reward_model`."""
    truths = [{"style": "rule", "ground_truth": text} for text in ("42", "7")]
    columns = {
        "data_source": ["a/b"] * 2,
        "prompt": [CHAT] * 2,
        "ability": ["math"] * 2,
        "reward_model": truths,
    }
    pq.write_table(pa.table(columns | {"extra_info": [{"index": 0}] * 2}), tmp_path / "v.parquet")
    rows = read_prompts(str(tmp_path / "v.parquet"), None, "prompt", "answer")
    assert [(row.text, row.messages, row.answer) for row in rows] == [
        ("6 * 7?", tuple(CHAT), "42"),
        ("6 * 7?", tuple(CHAT), "7"),
    ]
    pq.write_table(pa.table(columns | {"answer": ["1", "2"]}), tmp_path / "v.parquet")
    rows = read_prompts(str(tmp_path / "v.parquet"), None, "prompt", "answer")
    assert [row.answer for row in rows] == ["1", "2"]
    # Here another column is asked for.
    with pytest.raises(DataError, match=r"v.parquet:1:solution: is missing"):
        read_prompts(str(tmp_path / "v.parquet"), None, "prompt", "solution")


def test_rows_with_tools_are_refused(tmp_path):
    row = {"prompt": CHAT, "answer": "42"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row | {"tools": []}))
    assert len(read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")) == 1
    (tmp_path / "p.jsonl").write_text(json.dumps(row | {"tools": [{"name": "calculator"}]}))
    with pytest.raises(
        DataError, match=r"p.jsonl:1:tools: has tools, which are not handed to the chat template"
    ):
        read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")
