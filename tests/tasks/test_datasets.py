"""Prompts from folders as downloaded from the Hugging Face hub, and chats."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.tasks.prompt_rows import read_prompts

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "6 * 7?"}]


def table(numbers):
    messages = [[{"role": "user", "content": f"{i}!"}] for i in numbers]
    return pa.table({"prompt": [f"{i}?" for i in numbers], "messages": messages, "answer": [*numbers]})


def texts(path, split=None, field="prompt"):
    return [row.text for row in read_prompts(str(path), split, field, "answer")]


def hub(folder, *names):
    """A folder as downloaded: of file i the prompt `i?`."""
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
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002-1a2b.parquet", "data/test.parquet"],
            "train",
            2,
        ),
        (["train.jsonl", "test.jsonl"], "train", 1),
        (["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"], "train", 2),
        (["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"], "train_sft", 1),
    ],
)
def test_the_split_of_a_data_set_of_the_hub_is_known_by_its_names(tmp_path, names, split, expected):
    folder = hub(tmp_path / "hub", *names)
    assert texts(folder, split) == [f"{i}?" for i in range(expected)]
    with pytest.raises(ConfigError, match=r"task\.split=prefs with task\.path=.* needs "):
        texts(folder, "prefs")


def test_a_folder_of_several_splits_is_not_read_as_a_whole(tmp_path):
    with pytest.raises(ConfigError, match=r" Use task\.split=test or task\.split=train\."):
        texts(hub(tmp_path / "flat", "train.jsonl", "test.jsonl"))
    with pytest.raises(ConfigError, match=r" Use task\.split=train\."):
        texts(hub(tmp_path / "deep", "data/train-00000-of-00001.parquet"))
    own = hub(tmp_path / "own", "hard.jsonl", "easy.jsonl")
    assert texts(own) == ["1?", "0?"]
    for path in (own, own / "easy.jsonl"):  # a split that would be ignored
        with pytest.raises(ConfigError, match=r"needs null \(got train\).*Use task\.split=null\."):
            texts(path, "train")


def test_several_data_sets_in_one_folder_are_not_mixed(tmp_path):
    folder = hub(tmp_path / "gsm", "main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet")
    with pytest.raises(ConfigError) as error:
        texts(folder, "train")
    assert str(error.value) == (
        f"task.path={folder} needs one data set (got 2). The split is in main, socratic. Use task.path={folder}/main."
    )
    assert texts(folder / "socratic", "train") == ["1?"]


def test_chats_are_read_from_every_kind_of_file(tmp_path):
    extra = pa.table({"prompt": [[*CHAT, {"role": "user", "content": "?", "name": "me"}]], "answer": [42]})
    pq.write_table(extra, tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": CHAT, "answer": 42}) + "\n")
    (row,) = read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")
    assert (row.text, row.messages) == ("6 * 7?", tuple(CHAT))
    (row,) = read_prompts(str(tmp_path / "p.parquet"), None, "prompt", "answer")
    assert (row.text, row.messages) == ("?", (*CHAT, {"role": "user", "content": "?", "name": "me"}))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (["hi"], "needs a text or a list of chat messages (got ['hi'])"),
        ([{"role": "user"}], "needs chat messages whose role and content are texts (got {'role': 'user'})"),
        ([{"role": "user", "content": ["a"]}], "needs chat messages whose role and content are texts"),
        ([*CHAT, {"role": "assistant", "content": "42"}], "needs a last message that the model is to answer"),
        ([{"role": "user", "content": ""}], "needs a last message that the model is to answer"),
    ],
    ids=["texts", "no content", "parts", "answered", "empty"],
)
def test_what_is_no_chat_is_refused_with_its_row(tmp_path, prompt, reason):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt, "answer": 1}) + "\n")
    with pytest.raises(DataError) as error:
        read_prompts(str(tmp_path / "p.jsonl"), None, "prompt", "answer")
    assert f"p.jsonl:1:prompt: {reason}" in str(error.value)
