"""Held-out prompts among those of recorded rows are counted by check and as a run begins, and
refused by evaluate where they are all of a set."""

import numpy as np
import pytest
from builders.refusals import refusal
from builders.rollout_rows import recorded_config, write_jsonl, write_parquet
from rollouts.test_conversations import CHATML, conversations_of
from training.test_evaluation import write_questions
from training.test_supervised import SMALL

from pgtoolkit.cli import main
from pgtoolkit.completion import Prompt
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.recorded_prompts import checksums_before_trained, num_among
from pgtoolkit.tasks.chat_template import ChatTemplate
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.settings import TooLong
from pgtoolkit.tasks.tasks import Task

SAID = "prompts of evaluation set test are also prompts of training"


def texts_of(numbers: range) -> list[dict]:
    return [{"prompt": f"{number}=", "completion": str(number)} for number in numbers]


def tokens_of(numbers: range) -> list[dict]:
    """Return the same rows by the tokens that the tiny model gives these characters, in order."""
    alphabet = "0123456789="
    rows = []
    for number in numbers:
        tokens = [alphabet.index(character) for character in f"{number}={number}"]
        mask = [place > len(str(number)) for place in range(len(tokens))]
        rows.append({"token_ids": tokens, "loss_mask": mask})
    return rows


@pytest.mark.parametrize("rows_of", [texts_of, tokens_of])
def test_held_out_prompts_of_recorded_rows_are_noticed(tmp_path, monkeypatch, capsys, rows_of):
    monkeypatch.chdir(tmp_path)
    write_questions(tmp_path / "all.jsonl", range(12))
    write_questions(tmp_path / "test.jsonl", (4, 5, 8, 9, 10))
    write_questions(tmp_path / "seen.jsonl", (7, 3))
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows/0.jsonl", rows_of(range(6)))
    write_parquet(tmp_path / "rows/1.parquet", rows_of(range(6, 9)))
    settings = [
        *(setting for setting in SMALL if not setting.startswith("trainer.max_steps")),
        "trainer.max_steps=1",
        "rollout.path=rows",
        "task=prompts",
        "task.path=all.jsonl",
        "evaluation.every=1",
        "evaluation.completions_per_prompt=1",
        "evaluation.max_completion_length=2",
        "evaluation.sets.test.path=test.jsonl",
        "hydra.run.dir=run",
    ]
    assert main(["check", *settings]) == 0
    assert f"  3 of the 5 {SAID}" in capsys.readouterr().out
    assert main(settings) == 0
    assert f"note: 3 of the 5 {SAID}" in capsys.readouterr().out

    assert main(["evaluate", "run"]) == 0
    assert f"note: 3 of the 5 {SAID}" in capsys.readouterr().out
    error = refusal(capsys, "evaluate", "run", "--on", "seen.jsonl")
    assert "(got set seen: " in error
    assert "Use --on FILE with other prompts, or --training-prompts to evaluate on these." in error
    assert main(["evaluate", "run", "--on", "seen.jsonl", "--training-prompts"]) == 0
    assert "Warning: evaluated on training prompts (seen)." in capsys.readouterr().out
    write_questions(tmp_path / "unseen.jsonl", (9, 10, 11))
    assert main(["evaluate", "run", "--on", "unseen.jsonl"]) == 0
    assert "training" not in capsys.readouterr().out

    (tmp_path / "run/recorded_index.npz").unlink()
    assert main(["evaluate", "run", "--on", "seen.jsonl"]) == 0
    assert "is not known: run/recorded_index.npz is missing" in capsys.readouterr().out


def test_check_counts_the_first_rows_and_says_so(tmp_path, capsys):
    write_questions(tmp_path / "all.jsonl", range(10))
    write_questions(tmp_path / "test.jsonl", (4, 5, 2005))
    write_jsonl(tmp_path / "rows.jsonl", texts_of(range(2010)))
    settings = [
        *SMALL,
        f"rollout.path={tmp_path}/rows.jsonl",
        "task=prompts",
        f"task.path={tmp_path}/all.jsonl",
        "evaluation.every=1",
        "evaluation.max_completion_length=2",
        f"evaluation.sets.test.path={tmp_path}/test.jsonl",
    ]
    assert main(["check", *settings]) == 0
    assert f"  At least 2 of the 3 {SAID}" in capsys.readouterr().out


ENVIRONMENT = "environment=tasks.environments_for_tests.Counting"


def test_check_compares_the_files_of_conversations_with_each_other_and_with_prompts(
    tmp_path, capsys
):
    write_questions(tmp_path / "train.jsonl", range(6))
    write_questions(tmp_path / "test.jsonl", (4, 5, 8))
    path = f"path: {tmp_path}/test.jsonl"
    sets = f"{{test: {{{path}}}, single: {{task: prompts, {path}}}}}"
    settings = [
        "tracking=none",
        "task=conversation",
        f"task.{ENVIRONMENT}",
        f"task.path={tmp_path}/train.jsonl",
        "evaluation.every=1",
        f"evaluation.sets={sets}",
    ]
    assert main(["check", *settings]) == 0
    said = capsys.readouterr().out
    assert f"2 of the 3 {SAID}" in said
    assert f"2 of the 3 {SAID.replace('test', 'single')}" in said


class Asked(Task):
    """Asks these prompts."""

    def __init__(self, prompts: list[Prompt]):
        self.prompts = prompts

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index]


def asked(*contents: str) -> Prompt:
    """Return a prompt of a chat in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(contents)
    turns = zip(roles, contents, strict=False)
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Prompt(contents[-1], "", 0, "here", messages)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And 7 * 7?"},
    {"role": "assistant", "content": "49"},
]


@pytest.mark.parametrize(("trained", "expected"), [("all", 2), ("last", 1)])
def test_each_trained_turn_of_a_conversation_answers_a_prompt(tmp_path, trained, expected):
    """Whatever the system message; a row that is left out has asked nothing."""
    tokenizer, conversations = conversations_of(CHATML, trained)
    long = [{"role": "user", "content": "why?" * 40}, {"role": "assistant", "content": "so"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK}, {"messages": long}])
    rollouts = RecordedRollouts(
        recorded_config(path, trained_turns=conversations.trained, too_long=TooLong.skip),
        Estimator("given"),
        len(tokenizer),
        max_tokens=120,
        reads_old_log_probs=False,
        tokenizer=lambda: (tokenizer, [0]),
    )
    assert rollouts.batch_size == 1
    prompts = [
        asked("6 * 7?"),
        asked("6 * 7?", "42.", "And 7 * 7?"),
        asked("And 7 * 7?"),
        asked("?"),
        asked("why?" * 40),
    ]
    for system in ("Be brief.", None):
        task = TokenizedTask(Asked(prompts), tokenizer, [0], ChatTemplate(tokenizer, system))
        assert num_among(rollouts.index.prompts.tolist(), task, len(prompts)) == expected


def test_the_checksum_of_a_later_turn_is_that_of_all_tokens_before_it():
    tokens = np.array([4, 5, 6, 7, 8, 9])
    mask = np.array([False, False, True, False, False, True])
    expected = [checksums_before_trained(tokens, np.arange(6) == end)[0] for end in (2, 5)]
    assert checksums_before_trained(tokens, mask) == expected
