"""Conversations: what an environment is asked and told, what it may do wrong, and what ends one."""

import contextlib
import json

import numpy as np
import pytest
import torch
from builders.runs import config_of

from pgtoolkit.completion import Completion, Prompt
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.group_rollouts import as_completion
from pgtoolkit.tasks import process_pool
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.shuffle import seed_of

COUNTING = "tasks.environments_for_tests.Counting"


def task_of(*overrides, environment=COUNTING, seed=0):
    settings = ["task=conversation", f"task.environment={environment}", *overrides]
    return make_task(config_of(*settings).task, seed)


def talk(task, texts, index=0):
    """A conversation in which the policy says these, as long as it goes on; two tokens each, and
    their log-prob."""
    (one,) = task.begin([task.prompt(index)])
    for number, text in enumerate(texts):
        written = Completion(torch.tensor([number, 9]), torch.tensor([-0.5, -1.0]), "stop", 7)
        one.add_turn(written, text)
        (message,) = task.reply([one])
        if message is None:
            break
        one.add([5, 5, 5], False, message)
    return one


def test_a_conversation_is_what_was_drawn_and_said():
    task = task_of("task.options={rounds: 1}")
    prompt = task.prompt(3)
    assert (prompt.seed, prompt.index, prompt.place) == (seed_of(0, 3), 3, "prompt 3")
    assert prompt.messages == ({"role": "user", "content": f"{prompt.seed % 10}="},)
    one = talk(task, ["a", "bc", "never"], 3)
    found = as_completion(one)
    assert found.tokens.tolist() == [0, 9, 5, 5, 5, 1, 9]
    assert found.drawn.tolist() == [True, True, False, False, False, True, True]
    assert (found.log_probs.tolist(), found.finish_reason, found.model_version) == (
        [-0.5, -1] * 2,
        "stop",
        7,
    )
    said = ("user", prompt.text), ("assistant", "a"), ("user", "+1"), ("assistant", "bc")
    assert [(message["role"], message["content"]) for message in one.messages] == [*said]
    (score,) = task.score_conversations([one])
    assert (score.reward, score.exact_match) == (2, True)
    ends = {
        "ended_by_environment_fraction": 1,
        "ended_by_max_turns_fraction": 0,
        "ended_by_length_fraction": 0,
    }
    counted = {"turns": 2, "environment_tokens": 3, "environment/answers": 2, "environment/seen": 2}
    assert score.measures == ends | counted


def test_the_last_turn_is_answered_by_nobody():
    """The environment is asked all the same: it may say that the conversation was over."""
    one = talk(task_of("task.max_turns=2"), ["a", "b", "c"])
    assert (one.turns, one.end, len(one.environment.seen), len(one.messages)) == (
        2,
        "max_turns",
        2,
        4,
    )
    one = talk(task_of("task.max_turns=2", "task.options={rounds: 1}"), ["a", "b", "c"])
    assert (one.turns, one.end) == (2, "environment")


def test_prompts_of_files_begin_alike_whenever_they_come(tmp_path):
    rows = [{"prompt": f"{i}:", "answer": i} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = task_of(f"task.path={tmp_path / 'prompts.jsonl'}", seed=4)
    assert task.num_prompts == 5
    rows = {prompt.place: prompt for prompt in task.rows()}
    assert [prompt.text for prompt in rows.values()] == [
        f"{i}:{seed_of(4, i) % 10}=" for i in range(5)
    ]
    for index in range(12):
        found = task.prompt(index)
        assert (found.index, found.text, found.seed) == (
            index,
            rows[found.place].text,
            rows[found.place].seed,
        )
        assert talk(task, [], index).environment.prompt.answer == found.answer
    assert {task.prompt(index).place for index in range(5, 10)} == {*rows}
    task.drop({1})
    assert {task.prompt(index).answer for index in range(8)} == {"0", "2", "3", "4"}


SEED = seed_of(0, 0) % 10


@pytest.mark.parametrize("method", ["start", "reply", "score"])
@pytest.mark.parametrize(
    "more", [[], ["task.environment_processes=1", "task.environment_seconds=30"]], ids=["", "own"]
)
def test_an_error_says_which_prompt_and_which_method(method, more):
    task = task_of(f"task.options={{fail: raise {method}, at: {SEED}, rounds: 1}}", *more)
    last = {
        "start": "",
        "reply": ", whose last message is 'x'",
        "score": ", whose last message is 'ab'",
    }[method]
    expected = (
        rf"{method} of task.environment={COUNTING} raised ValueError on the conversation on "
        r"prompt 0 .seed \d+."
    )
    with (
        contextlib.closing(task),
        pytest.raises(DataError, match=expected + last + ":(?s:.)*ValueError: broken"),
    ):
        task.score_conversations([talk(task, ["x", "ab"])])


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        (
            "start: []",
            r"start .* must return a list of .* \(got \[\]\), in the conversation on prompt 0",
        ),
        ("start: [{role: user}]", r"start .* a list of \{'role': TEXT, 'content': TEXT\}"),
        ("start: [{role: assistant, content: x}]", "start .* of which the policy answers the last"),
        (
            "reply: [1]",
            r"reply .* \{'role': TEXT, 'content': TEXT\} of another role than assistant, or None",
        ),
        (
            "reply: {role: assistant, content: x}",
            r"of another role than assistant, or None \(got \{'role': 'assistant'",
        ),
        ("score: 1", r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ("score: [.nan, {}]", r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ("score: [0, {a: none}]", r"score .* \(reward, \{NAME: NUMBER\}\)"),
        (f"score: [1{400 * '0'}, {{}}]", r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ("score: [1, {a b: 1}]", r"score .* letters, digits and underscores \(got 'a b'\)"),
    ],
)
def test_what_is_returned_has_its_form(values, needs):
    task = task_of(
        f"task.options={{values: {{{values}}}}}", environment="tasks.environments_for_tests.Odd"
    )
    with pytest.raises(DataError, match=needs):
        task.score_conversations([talk(task, ["a"])])


def test_measures_have_the_same_names_each_time():
    task = task_of(environment="tasks.environments_for_tests.Odd")
    one = talk(task, ["a"])
    one.environment.values["score"] = (np.float32(0.5), {"a": np.int64(1)})
    score = task.score_conversations([one])[0]
    assert (score.reward, score.measures["environment/a"]) == (0.5, 1)
    with pytest.raises(
        DataError, match=r"score .* the same names each time, here \['a'\] \(got \(1, \{\}\)\)"
    ):
        task.score_conversations([talk(task, ["a"])])
    other = task_of(environment="tasks.environments_for_tests.Odd")
    other.score_conversations([talk(other, ["a"])])
    with pytest.raises(DataError, match=r"the same names each time, here \[\] "):
        other.score_conversations([one])


def test_a_group_answers_one_prompt():
    with pytest.raises(
        DataError, match=r"as before, since a group answers one prompt: draw random numbers by"
    ):
        talk(
            task_of("task.options={moody: true}", environment="tasks.environments_for_tests.Odd"),
            ["a"],
        )


@pytest.mark.parametrize(
    ("environment", "options", "needs"),
    [
        (
            "tasks.environments_for_tests.Mute",
            "{}",
            "methods start, reply, score .got none named reply, score.",
        ),
        (
            "tasks.environments_for_tests.Nothing",
            "{}",
            "a class in the module tasks.environments_for_tests",
        ),
        (
            "tasks.environments_for_tests.INSTANCE",
            "{}",
            r"Unpicklable, Mute\. Use task.environment=.*\.class\.",
        ),
        (COUNTING, "{turns: 3}", r"Use task\.options that fit Counting\(rounds=2"),
    ],
)
def test_a_class_that_is_none_is_refused(environment, options, needs):
    with pytest.raises(ConfigError, match=needs):
        task_of(f"task.options={options}", environment=environment).prompt(0)


def test_processes_give_what_this_process_gives():
    texts, own = ["a", "bcd", "e"], ["task.environment_processes=2", "task.environment_seconds=30"]
    here, there = task_of(), task_of(*own)
    try:
        (expected,), (found,) = (
            task.score_conversations([talk(task, texts, 5)]) for task in (here, there)
        )
        assert found.reward == expected.reward == 1
        assert found.measures == expected.measures | {
            "environment_timeout_fraction": 0,
            "environment_crash_fraction": 0,
        }
    finally:
        there.close()


def test_an_environment_that_processes_cannot_keep():
    own = ["task.environment_processes=2", "task.environment_seconds=30"]
    task = task_of(*own, environment="tasks.environments_for_tests.Unpicklable")
    with (
        contextlib.closing(task),
        pytest.raises(
            DataError, match=r"pickling .*not with task\.environment_processes=0.*raised"
        ),
    ):
        task.prompt(0)


@pytest.mark.parametrize(
    ("verb", "kind"), [("sleep", "timeout"), ("crash", "crash"), ("exit", "crash")]
)
@pytest.mark.parametrize("method", ["reply", "score"])
def test_a_conversation_without_an_answer_ends_and_the_others_go_on(verb, kind, method, caplog):
    own = ["task.environment_processes=1", "task.environment_seconds=1"]
    task = task_of(f"task.options={{fail: {verb} {method}, at: {SEED}}}", *own)
    other = next(index for index in range(9) if seed_of(0, index) % 10 != SEED)
    try:
        lost, kept = task.score_conversations(
            [talk(task, ["a", "b", "c"], index) for index in (0, other)]
        )
    finally:
        task.close()
    assert (lost.reward, lost.exact_match, lost.failed) == (None, False, True)
    assert (kept.reward, kept.failed) == (1, False)
    assert (
        lost.measures[f"environment_{kind}_fraction"],
        kept.measures[f"environment_{kind}_fraction"],
    ) == (1, 0)
    assert lost.measures["ended_by_environment_fraction"] == 0
    assert f"note: {method} of task.environment={COUNTING} " in caplog.text
    left_out = (
        "1 of 2 completions is out of training and of mean rewards (task.verifier_failure=exclude)"
    )
    assert f"For this reason {left_out}" in caplog.text


def test_a_start_without_an_answer_ends_the_run(monkeypatch):
    monkeypatch.setattr(process_pool, "START_SECONDS", 5)  # which the first call of a process has
    own = ["task.environment_processes=1", "task.environment_seconds=0.5"]
    task = task_of(f"task.options={{fail: sleep start, at: {SEED}}}", *own)
    expected = (
        r"start of .* must return in time: .* \(got 'timeout'\), in the conversation on prompt 0"
    )
    with contextlib.closing(task), pytest.raises(DataError, match=expected):
        task.prompt(0)


def test_a_number_is_found_by_halves():
    task = make_task(config_of("task=guess", "task.numbers=100", "task.max_turns=7").task, 0)
    assert task.prompt(0).text == "0-99?"
    for index in range(30):
        (one,), low, high = task.begin([task.prompt(index)]), 0, 99
        while one.end is None:
            middle = (low + high) // 2
            one.add_turn(
                Completion(torch.tensor([0]), torch.tensor([0.0]), "stop", 0), f"is it {middle}?"
            )
            (message,) = task.reply([one])
            if message is not None:
                one.add([0], False, message)
                low, high = (
                    (middle + 1, high) if message["content"] == "higher" else (low, middle - 1)
                )
        (score,) = task.score_conversations([one])
        assert (score.reward, one.end, middle) == (1, "environment", one.environment._number)


def test_a_miss_is_worth_half_of_how_near_it_came():
    from pgtoolkit.tasks.environments import Guess

    guess = Guess(11)
    guess.start(Prompt("", "", 0, "", seed=5))
    guess._number = 4
    for said, reward in (("4", 1), ("no", 0), ("6 or 4", 0.4), ("11", 0), ("10", 0.2), ("²", 0)):
        assert guess.score([{"role": "assistant", "content": said}]) == (reward, {})
