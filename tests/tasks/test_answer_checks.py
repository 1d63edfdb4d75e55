"""Answers that their own verifier does not accept are named before a run starts."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from pgtoolkit.assembly.inputs import DataProblem, _try_tokens
from pgtoolkit.assembly.machine import check_machine
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.tasks.answer_checks import can_capture, notes_on_rows
from pgtoolkit.tasks.settings import PromptsTaskSettings


def checked(
    tmp_path: Path, answers: Sequence[object], *overrides: str
) -> tuple[list[str], list[str]]:
    """Return the problems and notes of a run with these answers on this machine."""
    rows = [
        json.dumps({"prompt": f"{number}?", "answer": answer})
        for number, answer in enumerate(answers)
    ]
    # Each call needs a new path: the outcome of a check is cached by it.
    file = Path(tempfile.mkdtemp(dir=tmp_path), "p.jsonl")
    file.write_text("\n".join(rows) + "\n")
    task = ["task=prompts", f"task.path={file}", *overrides]
    composed = compose([*task, "rollout.max_completion_length=20", "tracking=none"])
    config, report = validated(composed)
    assert report.problems == []
    report.notes.clear()
    check_machine(config, report)
    return report.problems, report.notes


DIGITS = ("task.verifier=regular_expression", r"task.pattern='is (\d+)'")


@pytest.mark.parametrize(
    ("pattern", "answer", "possible"),
    [
        (r"is (\d+)", "42", True),
        (r"is (\d+)", " 42\n", True),
        (r"is (\d+)", "1,234", False),
        (r"is (\d+)", "42.0", False),
        (r"is(?: it)? \((\d+)\)[)(]", "42", True),
        (r"[](]x([^)]+)\)", "a(b", True),
        (r"[](]x([^)]+)\)", "a)b", False),
        (r"(?i)(?P<answer>yes|no)", "YES", True),
        (r"(?P<answer>yes|no)", "YES", False),
        (r"####(\s-?\d+)", "-5", True),
        (r"answer: (.*)", "two\nlines", False),
        (r"(?s)answer: (.*)", "two\nlines", True),
        (r"((?<=\$)\d+)", "5", True),
        (r"(a(?:b|(?:c))d)", "acd", True),
    ],
)
def test_can_capture_says_whether_the_group_can_give_the_answer(pattern, answer, possible):
    assert can_capture(pattern, answer) is possible


def test_answers_that_the_group_cannot_capture_are_noted(tmp_path):
    problems, notes = checked(tmp_path, ["1,234", 42, "x"], *DIGITS)
    assert problems == []
    assert notes == [
        r"task.pattern=is (\d+) accepts no completion for 2 of the first 3 answers, whose "
        r"completions all score 0: "
        "'1,234' at p.jsonl:1, 'x' at p.jsonl:3. Mend these answers, or use another task.pattern."
    ]
    assert checked(tmp_path, ["1", 42.0, 3], *DIGITS) == ([], [])


def test_the_prompts_of_a_file_are_tried_once_for_all_seeds(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "12", "answer": "1"}\n')
    task = ["task=prompts", f"task.path={file}", "task.verifier=exact_match", "tracking=none"]
    before = _try_tokens.cache_info()
    for seed in (1, 2, 3):
        config, report = validated(compose([*task, f"seed={seed}"]))
        check_machine(config, report)
        assert report.problems == []
    assert _try_tokens.cache_info().misses == before.misses + 1
    assert _try_tokens.cache_info().hits == before.hits + 2


def test_answers_without_a_number_are_noted_for_last_number(tmp_path):
    problems, (note,) = checked(tmp_path, ["1,234", "none"], "task.verifier=last_number")
    assert problems == []
    assert note.startswith(
        "task.verifier=last_number accepts no completion for 1 of the first 2 answers"
    )
    assert "'none' at p.jsonl:2" in note
    (problem,), _ = checked(tmp_path, ["none"], "task.verifier=last_number")
    assert problem.startswith(
        "task.verifier=last_number needs answers that it can read (got none at p.jsonl:1"
    )


def test_a_run_without_any_capturable_answer_is_refused(tmp_path):
    (problem,), notes = checked(tmp_path, ["x"] * 150, *DIGITS)
    assert problem == (
        r"task.pattern=is (\d+) needs answers that its group can capture (got x at p.jsonl:1, and "
        r"no other is one). "
        "Every completion would score 0. Use another task.pattern."
    )
    assert isinstance(problem, DataProblem)
    assert notes == []
    # One answer far behind the first hundred can be captured.
    problems, (note,) = checked(tmp_path, ["x"] * 149 + ["1"], *DIGITS)
    assert problems == []
    assert "100 of the first 100 answers" in note
    several = (
        r"task.verifiers={right: {verifier: exact_match}, form: {verifier: "
        r"regular_expression, pattern: '(\d+)'}}"
    )
    problems, (note,) = checked(tmp_path, ["x"], several)
    assert problems == []
    assert note.startswith(
        r"task.verifiers.form.pattern=(\d+) accepts no completion for 1 of the first 1 answers"
    )


def test_answers_of_several_lines_are_noted_for_exact_match(tmp_path):
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
    problems, notes = checked(tmp_path, ["72\n", solution, solution])
    assert problems == []
    assert notes == [
        "task.verifier=exact_match asks a completion for the whole answer, word for word, and 2 of "
        f"the first 3 answers have several lines, first that at p.jsonl:2: {solution!r}. Keep only "
        "the final answer of worked solutions."
    ]


def test_answers_that_math_verify_cannot_read_are_noted(tmp_path):
    pytest.importorskip("math_verify")
    problems, (note,) = checked(
        tmp_path, [r"3\sqrt{2}", "$$", "$x+1$"], "task.verifier=math_verify"
    )
    assert problems == []
    assert note.startswith(
        "task.verifier=math_verify accepts no completion for 1 of the first 3 answers"
    )
    assert "'$$' at p.jsonl:2. Mend these answers." in note
    (problem,), _ = checked(tmp_path, ["$$"], "task.verifier=math_verify")
    assert "needs answers that it can read (got $$ at p.jsonl:1, and no other is one)" in problem


def test_a_users_reward_function_is_tried_and_refused_if_it_fails(tmp_path, monkeypatch):
    (tmp_path / "tried_rewards.py").write_text(
        "calls = []\n"
        "def boxed(completion, answer):\n    calls.append(answer)\n    return completion == '<' + "
        "answer + '>'\n"
        "def right(completion, answer):\n    return completion == answer\n"
        "def broken(completion, answer):\n    return {}[answer]\n"
        "def from_2_to_10(completion, answer):\n    return 10 if completion == answer else 2\n"
        "def of_a_batch(completions, answer, **others):\n    return [0.0 for _ in "
        "completions[1:]]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    answers = [str(number) for number in range(50)]
    problems, (note,) = checked(tmp_path, answers, "task.verifier=tried_rewards.boxed")
    assert problems == []
    assert note == (
        "task.verifier=tried_rewards.boxed does not count a completion that repeats its answer as "
        "right, for 10 of the first 10 answers: '0' at p.jsonl:1, '1' at p.jsonl:2, '2' at "
        "p.jsonl:3 and 7 more. Only a score of 1 or more does. That is as it should be if it "
        "expects a form around the answer."
    )
    import tried_rewards  # This test has written it.

    assert tried_rewards.calls == answers[:10]
    assert checked(tmp_path, answers, "task.verifier=tried_rewards.right") == ([], [])
    assert checked(tmp_path, answers, "task.verifier=tried_rewards.from_2_to_10") == (
        [],
        [
            "task.verifier=tried_rewards.from_2_to_10 gives 10 to the answer '0' at p.jsonl:1 as "
            "the completion. Every score of 1 or more counts as right, in exact_match and pass@k. "
            "If only the highest score is right, divide by it: return score / 10, if 10 is the "
            "highest."
        ],
    )
    for name, failure in (
        ("broken", "KeyError: '0'"),
        ("of_a_batch", "must return a list of 10 scores"),
    ):
        (problem,), notes = checked(tmp_path, answers, f"task.verifier=tried_rewards.{name}")
        assert isinstance(problem, DataProblem)
        assert "must score every text, and fails on an answer as the completion. " in problem
        assert failure in problem
        assert notes == []
        second = (
            f"task.verifiers={{right: {{verifier: exact_match}}, form: {{verifier: "
            f"tried_rewards.{name}}}}}"
        )
        (problem,), _ = checked(tmp_path, answers, second)
        assert f"task.verifiers.form.verifier=tried_rewards.{name} must score every text" in problem
    bonus = "task.verifiers={right: {verifier: exact_match}, form: {verifier: tried_rewards.boxed}}"
    # A verifier beside the first one need not accept an answer.
    assert checked(tmp_path, answers, bonus) == ([], [])


def test_answers_that_are_the_prompt_or_contradict_another_row_are_noted(tmp_path, monkeypatch):
    (tmp_path / "read_rewards.py").write_text(
        "def reads(completion, answer):\n    return 1.0\n"
        "def reads_none(completion, prompt):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own = "task.verifier=read_rewards.reads"
    other = f"{own}_none"
    _, notes = checked(tmp_path, ["7"], own, "task.answer_field=prompt")
    assert notes == [
        "task.answer_field=prompt is the column of the prompts, so the answer that "
        f"{own} reads is the prompt itself. Use the column of the answers, or leave the parameter "
        "out of a function that does not use it."
    ]
    assert checked(tmp_path, ["7"], other, "task.answer_field=prompt") == ([], [])
    file = tmp_path / "contradicting.jsonl"
    pairs = [("1+1=", 2), ("1+2=", 3), ("1+1=", 2), ("1+1=", 4), ("1+2=", 5)]
    file.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    for verifier, expected in (
        (
            own,
            [
                "2 rows have another answer than an earlier row with the same prompt, first '1+1=' "
                "at contradicting.jsonl:4: '4', and '2' at contradicting.jsonl:1. What is right "
                "for the one is wrong for the other: mend or remove one of them."
            ],
        ),
        (other, []),
    ):
        settings = PromptsTaskSettings(path=str(file), verifier=verifier.partition("=")[2])
        task = make_task(settings, 0)
        assert notes_on_rows(task, "answer", is_prompt=False) == expected


def test_answers_on_which_a_function_gives_no_score_are_noted_with_what_happened(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    function = "verifiers_for_tests.scripted"
    processes = ("task.verifier_processes=1", "task.verifier_seconds=1")
    answers = ["ok", "none", "exit 3", "sleep 60", "nan", "none again"]
    problems, notes = checked(tmp_path, answers, f"task.verifier={function}", *processes)
    assert problems == []
    happened = (
        ("returned None", 2, "'none' at p.jsonl:2, 'none again' at p.jsonl:6"),
        ("ended its process: status 3", 1, "'exit 3' at p.jsonl:3"),
        ("gave no answer within task.verifier_seconds=1", 1, "'sleep 60' at p.jsonl:4"),
        ("returned nan", 1, "'nan' at p.jsonl:5"),
    )
    assert notes == [
        f"task.verifier={function} {reason}, for {count} of the first 6 answers as the "
        f"completion: {which}. Such a completion has no score: task.verifier_failure says what "
        "becomes of it."
        for reason, count, which in happened
    ]
    # A function of TRL's form leaves such a completion to the others.
    (tmp_path / "of_trl.py").write_text("def silent(completions, **row): return [None, 1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for beside, consequence in (
        ("", "Such a completion has no score: "),
        (", more: {verifier: exact_match}", "Other verifiers may score such a completion; "),
    ):
        verifiers = f"task.verifiers={{right: {{verifier: of_trl.silent}}{beside}}}"
        _, (note,) = checked(tmp_path, ["a", "b"], verifiers, *processes)
        assert f"'a' at p.jsonl:1. {consequence}task.verifier_failure says" in note
    # One beside the first may return None, but not end its process.
    beside = f"task.verifiers={{right: {{verifier: exact_match}}, more: {{verifier: {function}}}}}"
    assert checked(tmp_path, ["none"], beside, *processes) == ([], [])
    problems, (note,) = checked(tmp_path, ["exit 3"], beside, *processes)
    assert problems == []
    assert note.startswith(f"task.verifiers.more.verifier={function} ended its process: status 3,")
    # A run would end where nothing is scored in time. No call is made again: it asks no server.
    (problem,), _ = checked(tmp_path, ["sleep 60"] * 2, f"task.verifier={function}", *processes)
    assert problem == (
        f"task.verifier={function} gave no answer within task.verifier_seconds=1, and scored none "
        "of 2 completions. Use a larger task.verifier_seconds if it needs more time. Without "
        "that the run would end."
    )


def test_a_judge_that_is_down_is_refused_in_one_line_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "down_judge.py").write_text(
        "import urllib.request\ncalls = []\n"
        "async def judge(completion, answer):\n"
        "    calls.append(answer)\n"
        "    return urllib.request.urlopen('http://127.0.0.1:1').status\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    retries = ("task.verifier_retries=1", "task.verifier_retry_seconds=0")
    (problem,), _ = checked(tmp_path, ["7", "8"], "task.verifier=down_judge.judge", *retries)
    assert problem == (
        "task.verifier=down_judge.judge could not reach the server that it asks: URLError: "
        "<urlopen error [Errno 111] Connection refused>. Each call was made again 1 time, and none "
        "was answered. Start the server, or use task.verifier_retries=5 and "
        "task.verifier_retry_seconds=0.5 to wait for it up to 102 seconds. Without that the run "
        "would end."
    )
    import down_judge  # This test has written it.

    assert down_judge.calls == ["7", "7"]  # A failed call is tried once more.


def test_functions_of_trls_form_are_tried_with_the_arguments_of_the_run(tmp_path, monkeypatch):
    """Completions are texts, not messages, without a chat template."""
    (tmp_path / "tried_batches.py").write_text(
        "seen = []\n"
        "def score(completions, prompts, completion_ids, **others):\n"
        "    seen.append((completions, prompts, [len(ids) > 0 for ids in completion_ids]))\n"
        "    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert checked(tmp_path, ["7", "8"], "task.verifier=tried_batches.score") == ([], [])
    import tried_batches  # This test has written it.

    assert tried_batches.seen == [(["7", "8"], ["0?", "1?"], [True, True])]


def test_prompts_of_verl_are_read_and_ignored_columns_are_noted(tmp_path):
    truth = {"style": "rule", "ground_truth": "42"}
    row = {
        "data_source": "openai/gsm8k",
        "prompt": "6 * 7?",
        "ability": "math",
        "reward_model": truth,
    }
    (tmp_path / "v.jsonl").write_text(json.dumps(row | {"extra_info": {"index": 0}}))
    settings = (
        "task=prompts",
        f"task.path={tmp_path / 'v.jsonl'}",
        "rollout.max_completion_length=20",
        "tracking=none",
    )
    composed = compose([*settings])
    config, report = validated(composed)
    report.notes.clear()
    check_machine(config, report)
    assert report.problems == []
    assert report.notes == [
        "v.jsonl has prompts as verl writes them: the answer is reward_model.ground_truth. "
        "data_source, by which verl chooses how to score, ability and extra_info are not read: "
        "task.verifier decides how to score."
    ]
