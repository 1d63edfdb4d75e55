"""Files of prompts that cannot be used are refused in one line for each kind of problem, and what
the line says to type works."""

import gzip
import json
import shlex
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgtoolkit.errors import DataError
from pgtoolkit.tasks.prompt_rows import read_prompts

ROW = {"prompt": "1+1=", "answer": "2"}
CHAT = [{"role": "user", "content": "1+1="}]
ASKED = 'say "a,b"\nand c'


def refusal(path: Path | str) -> list[str]:
    """Return the lines by which a file is refused."""
    with pytest.raises(DataError) as refused:
        read_prompts(str(path), None, "prompt", "answer")
    return str(refused.value).splitlines()


def written(path: Path, *rows: object, count: int = 1) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * count))
    return path


def test_wrong_columns_of_every_row_are_one_line_that_names_the_right_ones(tmp_path):
    path = written(tmp_path / "p.jsonl", {"question": "1+1=", "solution": "2"}, count=20)
    title, prompt, answer, *advice = refusal(path)
    assert title.endswith("40 problems")
    there = "is missing; the row has question, solution"
    more = "; the same in 19 rows more: 2, 3, 4, 5, 6, 7, 8, 9 and 11 more"
    assert prompt == f"  p.jsonl:1:prompt: {there}{more}"
    assert answer == f"  p.jsonl:1:answer: {there}{more}"
    assert advice == [
        "  20 of the 20 rows read lack prompt. Use task.prompt_field=question.",
        "  20 of the 20 rows read lack answer. Use task.answer_field=solution.",
    ]
    assert len(read_prompts(str(path), None, "question", "solution")) == 20


def test_no_other_column_is_named_for_a_few_rows_that_lack_theirs(tmp_path):
    """The name `solution` resembles `question`, the column of the prompts."""
    row = {"question": "1+1=", "solution": "2", "level": "easy"}
    lacks_answer = {"question": "1+1=", "level": "easy"}
    is_chat = {"messages": CHAT, "solution": "2"}
    for rows, advice in (
        (
            [lacks_answer],
            ["1 of the 10 rows read lacks solution. Write its answer there, or remove the row."],
        ),
        (
            [is_chat, is_chat],
            ["2 of the 11 rows read lack question. Write their prompts there, or remove the rows."],
        ),
        (
            [lacks_answer] * 10,
            [
                "10 of the 19 rows read lack solution. Use task.answer_field=question where the "
                "verifier reads no answer."
            ],
        ),
        ([is_chat] * 10, ["10 of the 19 rows read lack question. Use task.prompt_field=messages."]),
    ):
        path = written(tmp_path / "p.jsonl", *[row] * 9, *rows)
        with pytest.raises(DataError) as refused:
            read_prompts(str(path), None, "question", "solution")
        lines = str(refused.value).splitlines()
        assert [line.strip() for line in lines if "rows read" in line] == advice
        assert "Use" not in "".join(line for line in lines if "rows read" not in line)


@pytest.mark.parametrize("prompt", ["1+1=", CHAT], ids=["text", "chat"])
def test_prompts_without_answers_are_told_what_to_type_and_read_with_it(tmp_path, prompt):
    path = written(tmp_path / "p.jsonl", {"prompt": prompt, "source": 3})
    assert refusal(path)[1:] == [
        "  p.jsonl:1:answer: is missing; the row has prompt, source",
        "  1 of the 1 row read lacks answer. Use task.answer_field=prompt where the verifier reads "
        "no answer.",
    ]
    (read,) = read_prompts(str(path), None, "prompt", "prompt")
    assert (read.text, read.answer) == ("1+1=", "1+1=")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("  ", "needs a text or a list of chat messages (got '  ')"),
        (json.dumps(CHAT), "needs a list of chat messages (got a text that spells one"),
        (str(CHAT), "needs a list of chat messages (got a text that spells one"),
        ([{"role": "user", "content": " "}], "needs a last message that the model is to answer"),
        ([{"role": "human", "content": "1"}], "needs the role 'user' of chat templates (got 'hum"),
        ([{"role": "User", "content": "1"}], "needs the role 'user' of chat templates (got 'User"),
    ],
)
def test_a_prompt_that_a_model_would_misread_is_refused(tmp_path, value, reason):
    lines = refusal(written(tmp_path / "p.jsonl", ROW, ROW | {"prompt": value}))
    assert len(lines) == 2
    assert lines[1].startswith(f"  p.jsonl:2:prompt: {reason}")
    for text in ("[1, 2]", 'Mend: [{"role": "user"}]', "{'a': 1}"):
        path = written(tmp_path / "p.jsonl", ROW | {"prompt": text})
        assert read_prompts(str(path), None, "prompt", "answer")[0].text == text


@pytest.mark.parametrize("value", [["2", "two"], {"target": "2"}, [], "  "])
def test_an_answer_that_is_no_text_is_refused(tmp_path, value):
    lines = refusal(written(tmp_path / "p.jsonl", ROW | {"answer": value}, count=20))
    needs = "a text (got" if isinstance(value, str) else "one text or number (got"
    assert len(lines) == 2
    assert lines[1].startswith(f"  p.jsonl:1:answer: needs {needs} {value!r}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a b.csv", '\ufeffprompt,answer\n"say ""a,b""\nand c",007\n'),
        ("p.tsv", 'prompt\tanswer\n"say ""a,b""\nand c"\t007\n'),
        ("p.json", json.dumps([{"prompt": ASKED, "answer": "007"}], indent=1)),
        ("p.ndjson", json.dumps({"prompt": ASKED, "answer": "007"}) + "\n"),
        ("p.jsonl.gz", None),
    ],
)
def test_the_command_that_converts_a_file_works(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    if content is None:
        row = {"prompt": ASKED, "answer": "007"}
        Path(name).write_bytes(gzip.compress(json.dumps(row).encode()))
    else:
        Path(name).write_text(content, encoding="utf-8")
    (line,) = refusal(name)
    assert line.startswith(f"task.path={name} needs .jsonl or .parquet files (got {name}). ")
    command = line.partition(": ")[2]
    subprocess.run(["bash", "-c", command], check=True)
    (new,) = Path().glob("*.jsonl")
    (prompt,) = read_prompts(str(new), None, "prompt", "answer")
    assert (prompt.text, prompt.answer) == (ASKED, "007")
    if name.endswith((".csv", ".tsv", ".json")):  # The new file exists now, and stays.
        assert refusal(name)[0].endswith(f"{shlex.quote(new.stem + '-2.jsonl')}")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (json.dumps([ROW, ROW]).encode(), "a list over the whole file"),
        (json.dumps(ROW, indent=1).encode(), "an object over several lines"),
        (json.dumps(ROW).encode("utf-16"), "UTF-16; `iconv -f UTF-16 -t UTF-8"),
        (json.dumps(ROW).encode("utf-16-le"), "UTF-16; `iconv -f UTF-16LE"),
        (gzip.compress(b"{}", mtime=0), "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "the pointer of Git LFS; `git lfs pull`"),
        (b"<!doctype html>\n<html>", "a page of HTML or XML"),
        (b"PAR1....", "Parquet; rename it"),
    ],
)
def test_another_content_under_the_name_of_jsonl_is_named(tmp_path, content, got):
    (tmp_path / "p.jsonl").write_bytes(content)
    (line,) = refusal(tmp_path / "p.jsonl")
    assert line.startswith(f"p.jsonl needs an object in each line (got {got}")


def test_columns_of_one_name_are_refused(tmp_path):
    columns = [pa.array([text]) for text in ("1", "3", "2")]
    table = pa.Table.from_arrays(columns, names=["prompt", "prompt", "answer"])
    pq.write_table(table, tmp_path / "p.parquet")
    (line,) = refusal(tmp_path / "p.parquet")
    assert line.startswith("p.parquet has the column 'prompt' twice.")


def test_a_folder_without_rows_says_where_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("d/x").mkdir(parents=True)
    written(Path("d/x/p.jsonl"), ROW)
    (line,) = refusal("d")
    assert line.endswith("Use 'd/**/*.jsonl' for the files in its folders.")
    assert len(read_prompts("d/**/*.jsonl", None, "prompt", "answer")) == 1
