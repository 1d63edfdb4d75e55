"""`pgtk solutions` writes rows that experiment=sft trains on, of problems that are not held out."""

import json
import re

import pytest
from builders.runs import module_and_loader

from pgtoolkit.cli import main
from pgtoolkit.tasks.generated import is_held_out
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.tasks.tasks import ReverseTask


def solutions(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Return the output of the command, or the message of a refusal if the status is not 0."""
    assert main(["solutions", *map(str, arguments)]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_rows_are_worked_answers_which_sft_trains_on_as_prompt_and_completion(tmp_path, capsys):
    file = tmp_path / "train.jsonl"
    task = ("task=sums", "task.num_digits=1", "seed=7")
    printed = solutions(capsys, file, *task, "--count", 300)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    different = len({row["prompt"] for row in rows})
    assert different < len(rows) == 300
    assert printed.startswith(f"300 rows of task=sums with seed 7, {different} of them different: ")
    for row in rows:
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        assert row["completion"] == str(first + second)
        assert not is_held_out(row["prompt"])
    module, loader = module_and_loader(
        *(
            "experiment=sft",
            f"rollout.path={file}",
            "task=sums",
            "trainer.device=cpu",
            "tracking=none",
        )
    )
    decode = module.policy.tokenizer.decode
    for row, document in zip(rows, next(iter(loader)).documents, strict=False):
        assert decode(document.tokens[~document.loss_mask]) == row["prompt"]
        assert decode(document.tokens[document.loss_mask]) == row["completion"] + "<end>"


def test_numbers_that_an_evaluation_holds_out_by_default_are_not_written(tmp_path, capsys):
    solutions(capsys, tmp_path / "s.jsonl", "task=reverse", "task.num_digits=3", "--count", 500)
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    task = ReverseTask(ReverseTaskSettings(name="reverse", num_digits=3), 10**9)
    held_out = {task.prompt(number).text for number in range(128)}
    assert len(rows) == 500
    assert not held_out & {row["prompt"] for row in rows}


def test_each_prompt_of_a_file_is_written_once(tmp_path, capsys):
    chat = [{"role": "user", "content": "7 * 7?"}]
    asked = [{"prompt": "6 * 7?", "answer": 42}, {"prompt": chat, "answer": "49"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    solutions(capsys, tmp_path / "s.jsonl", "task=prompts", f"task.path={tmp_path / 'p.jsonl'}")
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    answer = [{"role": "assistant", "content": "49"}]
    expected = [{"prompt": "6 * 7?", "completion": "42"}, {"prompt": chat, "completion": answer}]
    assert sorted(rows, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows.jsonl", "loss=grpo"], "loss=grpo needs to be the task, a key of it, or the seed"),
        (["rows.csv"], "OUT=rows.csv needs a name that ends in .jsonl (got rows.csv)."),
        (["there.jsonl"], "(got one that exists). Nothing is written over. Use there-2.jsonl."),
        (["rows.jsonl", "task=sums", "task.num_terms=1"], "task.num_terms=1 needs"),
        (["rows.jsonl", "task=prompts"], "task.path needs a value"),
    ],
)
def test_solutions_that_cannot_be_written_are_refused(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    assert message in solutions(capsys, *arguments, status=2)
    assert not (tmp_path / "rows.jsonl").exists()
