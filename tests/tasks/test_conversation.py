"""Conversations: their tokens, messages and scores, faults of environments, and how they end."""

import contextlib
import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Completion, Prompt
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.group_rollouts import as_completion
from pgtoolkit.tasks import process_pool
from pgtoolkit.tasks.conversation import Conversation, ConversationTask
from pgtoolkit.tasks.environments import Guess
from pgtoolkit.tasks.process_pool import Failure
from pgtoolkit.tasks.settings import ConversationTaskSettings, GuessTaskSettings
from pgtoolkit.tasks.shuffle import seed_of

COUNTING = "tasks.environments_for_tests.Counting"


def task_of(environment: str = COUNTING, seed: int = 0, **settings: object) -> ConversationTask:
    return make_task(ConversationTaskSettings(environment=environment, **settings), seed)


def talk(task: ConversationTask, texts: Sequence[str], index: int = 0) -> Conversation:
    """Return a conversation in which the policy answers with these texts, of two tokens each, until
    it ends."""
    (conversation,) = task.begin([task.prompt(index)])
    for number, text in enumerate(texts):
        written = Completion(torch.tensor([number, 9]), torch.tensor([-0.5, -1.0]), "stop", 7)
        conversation.add_turn(written, text)
        if conversation.end is not None:
            break
        (message,) = task.reply([conversation])
        if message is None:
            break
        conversation.add([5, 5, 5], False, message)
    return conversation


def test_a_conversation_has_its_sampled_and_environment_tokens_messages_and_score():
    task = task_of(options={"rounds": 1})
    prompt = task.prompt(3)
    assert prompt.seed == seed_of(0, 3)
    assert prompt.index == 3
    assert prompt.place == "prompt 3"
    assert prompt.messages == ({"role": "user", "content": f"{prompt.seed % 10}="},)
    conversation = talk(task, ["a", "bc", "never"], 3)
    completion = as_completion(conversation)
    assert completion.tokens.tolist() == [0, 9, 5, 5, 5, 1, 9]
    assert completion.drawn.tolist() == [True, True, False, False, False, True, True]
    assert completion.log_probs.tolist() == [-0.5, -1] * 2
    assert completion.finish_reason == "stop"
    assert completion.model_version == 7
    assert [(message["role"], message["content"]) for message in conversation.messages] == [
        ("user", prompt.text),
        ("assistant", "a"),
        ("user", "+1"),
        ("assistant", "bc"),
    ]
    (score,) = task.score_conversations([conversation])
    assert score.reward == 2
    assert score.exact_match
    assert score.measures == {
        "ended_by_environment_fraction": 1,
        "ended_by_max_turns_fraction": 0,
        "ended_by_length_fraction": 0,
        "turns": 2,
        "environment_tokens": 3,
        "environment/answers": 2,
        "environment/seen": 2,
    }


def test_the_last_turn_gets_no_answer():
    """The environment still gets the last turn, and may end the conversation with it."""
    conversation = talk(task_of(max_turns=2), ["a", "b", "c"])
    assert conversation.turns == 2
    assert conversation.end == "max_turns"
    assert len(conversation.environment.seen) == 2
    assert len(conversation.messages) == 4
    conversation = talk(task_of(max_turns=2, options={"rounds": 1}), ["a", "b", "c"])
    assert conversation.turns == 2
    assert conversation.end == "environment"


def test_a_prompt_of_a_file_starts_with_the_same_seed_in_every_pass(tmp_path):
    rows = [{"prompt": f"{i}:", "answer": i} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = task_of(path=str(tmp_path / "prompts.jsonl"), seed=4)
    assert task.num_prompts == 5
    rows = {prompt.place: prompt for prompt in task.rows()}
    assert [prompt.text for prompt in rows.values()] == [
        f"{i}:{seed_of(4, i) % 10}=" for i in range(5)
    ]
    for index in range(12):
        prompt = task.prompt(index)
        row = rows[prompt.place]
        assert prompt.index == index
        assert prompt.text == row.text
        assert prompt.seed == row.seed
        assert talk(task, [], index).environment.prompt.answer == prompt.answer
    assert {task.prompt(index).place for index in range(5, 10)} == {*rows}
    task.drop({1})
    assert {task.prompt(index).answer for index in range(8)} == {"0", "2", "3", "4"}


SEED = seed_of(0, 0) % 10


@pytest.mark.parametrize("method", ["start", "reply", "score"])
@pytest.mark.parametrize(
    "more", [{}, {"environment_processes": 1, "environment_seconds": 30}], ids=["", "own"]
)
def test_the_error_of_an_environment_names_the_prompt_and_the_method(method, more):
    task = task_of(options={"fail": f"raise {method}", "at": SEED, "rounds": 1}, **more)
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
            {"start": []},
            r"start .* must return a list of .* \(got \[\]\), in the conversation on prompt 0",
        ),
        ({"start": [{"role": "user"}]}, r"start .* a list of \{'role': TEXT, 'content': TEXT\}"),
        (
            {"start": [{"role": "assistant", "content": "x"}]},
            "start .* of which the policy answers the last",
        ),
        (
            {"reply": [1]},
            r"reply .* \{'role': TEXT, 'content': TEXT\} of another role than assistant, or None",
        ),
        (
            {"reply": {"role": "assistant", "content": "x"}},
            r"of another role than assistant, or None \(got \{'role': 'assistant'",
        ),
        ({"score": 1}, r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ({"score": [".nan", {}]}, r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ({"score": [0, {"a": "none"}]}, r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ({"score": [10**400, {}]}, r"score .* \(reward, \{NAME: NUMBER\}\)"),
        ({"score": [1, {"a b": 1}]}, r"score .* letters, digits and underscores \(got 'a b'\)"),
    ],
)
def test_return_values_of_a_wrong_form_are_refused(values, needs):
    task = task_of("tasks.environments_for_tests.Odd", options={"values": values})
    with pytest.raises(DataError, match=needs):
        task.score_conversations([talk(task, ["a"])])


def test_a_reward_above_1_is_noted_with_what_to_write(caplog):
    environment = "tasks.environments_for_tests.Odd"
    task = task_of(environment, options={"values": {"score": [10, {}]}})
    assert task.score_conversations([talk(task, ["a"])] * 2)[1].exact_match is True
    (note,) = [record.getMessage() for record in caplog.records]
    assert note.startswith(f"note: score of task.environment={environment} gives 10 to the conv")
    assert note.endswith("divide by it: return score / 10, if 10 is the highest.")


def test_measures_with_other_names_than_before_are_refused():
    task = task_of("tasks.environments_for_tests.Odd")
    conversation = talk(task, ["a"])
    conversation.environment.values["score"] = (np.float32(0.5), {"a": np.int64(1)})
    score = task.score_conversations([conversation])[0]
    assert score.reward == 0.5
    assert score.measures["environment/a"] == 1
    with pytest.raises(
        DataError, match=r"score .* the same names each time, here \['a'\] \(got \(1, \{\}\)\)"
    ):
        task.score_conversations([talk(task, ["a"])])
    other = task_of("tasks.environments_for_tests.Odd")
    other.score_conversations([talk(other, ["a"])])
    with pytest.raises(DataError, match=r"the same names each time, here \[\] "):
        other.score_conversations([conversation])


def test_an_environment_that_starts_differently_within_a_group_is_refused():
    with pytest.raises(
        DataError, match=r"as before, since a group answers one prompt: draw random numbers by"
    ):
        talk(
            task_of("tasks.environments_for_tests.Odd", options={"moody": True}),
            ["a"],
        )


@pytest.mark.parametrize(
    ("environment", "options", "needs"),
    [
        (
            "tasks.environments_for_tests.Mute",
            {},
            "methods start, reply, score .got none named reply, score.",
        ),
        (
            "tasks.environments_for_tests.Nothing",
            {},
            "a class in the module tasks.environments_for_tests",
        ),
        (
            "tasks.environments_for_tests.INSTANCE",
            {},
            r"Unpicklable, Mute\. Use task.environment=.*\.Mute\.",
        ),
        (COUNTING, {"turns": 3}, r"Use task\.options that fit Counting\(rounds=2"),
    ],
)
def test_an_unusable_environment_class_is_refused(environment, options, needs):
    with pytest.raises(ConfigError, match=needs):
        task_of(environment, options=options).prompt(0)


def test_environments_in_processes_give_the_same_scores():
    texts = ["a", "bcd", "e"]
    in_process = task_of()
    (expected,) = in_process.score_conversations([talk(in_process, texts, 5)])
    in_processes = task_of(environment_processes=2, environment_seconds=30)
    with contextlib.closing(in_processes):
        (score,) = in_processes.score_conversations([talk(in_processes, texts, 5)])
    assert score.reward == expected.reward == 1
    failures = {"environment_timeout_fraction": 0, "environment_crash_fraction": 0}
    assert score.measures == expected.measures | failures


def test_an_environment_that_cannot_be_pickled_is_refused_in_processes():
    limits = {"environment_processes": 2, "environment_seconds": 30}
    task = task_of("tasks.environments_for_tests.Unpicklable", **limits)
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
def test_a_conversation_whose_environment_fails_ends_alone(verb, kind, method, caplog):
    limits = {"environment_processes": 1, "environment_seconds": 1}
    task = task_of(options={"fail": f"{verb} {method}", "at": SEED}, **limits)
    other = next(index for index in range(9) if seed_of(0, index) % 10 != SEED)
    with contextlib.closing(task):
        conversations = [talk(task, ["a", "b", "c"], index) for index in (0, other)]
        lost, kept = task.score_conversations(conversations)
    assert lost.reward is None
    assert not lost.exact_match
    assert lost.failed
    assert kept.reward == 1
    assert not kept.failed
    assert lost.measures[f"environment_{kind}_fraction"] == 1
    assert kept.measures[f"environment_{kind}_fraction"] == 0
    assert lost.measures["ended_by_environment_fraction"] == 0
    assert f"note: {method} of task.environment={COUNTING} " in caplog.text
    left_out = (
        "1 of 2 completions is out of training and of mean rewards (task.verifier_failure=exclude)"
    )
    assert f"For this reason {left_out}" in caplog.text


def test_each_call_that_hangs_costs_its_own_time_limit():
    """Also the first call of a process that replaces another one."""
    limits = {"environment_processes": 1, "environment_seconds": 0.5}
    task = task_of(options={"fail": "sleep reply", "at": SEED}, **limits)
    with contextlib.closing(task):
        conversations = [talk(task, ["a"]) for _ in range(3)]
    assert {conversation.failure for conversation in conversations} == {
        Failure("timeout", "gave no answer within task.environment_seconds=0.5")
    }


def test_a_conversation_whose_environment_does_not_begin_has_one_turn_and_no_score(tmp_path):
    """Its prompt is known from an earlier start."""
    limits = {"environment_processes": 1, "environment_seconds": 20}
    flag = tmp_path / "flag"
    exits = "tasks.environments_for_tests.ExitsLater"
    task = task_of(exits, options={"flag": str(flag)}, **limits)
    with contextlib.closing(task):
        task.prompt(0)
        flag.touch()
        lost = talk(task, ["a", "b"])
        flag.unlink()
        kept = talk(task, ["a", "bc"])
        scores = task.score_conversations([lost, kept])
    assert (lost.end, lost.turns) == ("crash", 1)
    assert lost.failure.reason == "ended its process: status 3"
    assert [(score.reward, score.failed) for score in scores] == [(None, True), (2, False)]


def test_a_start_that_takes_too_long_ends_the_run(monkeypatch):
    # The first call of a process has this time.
    monkeypatch.setattr(process_pool, "START_SECONDS", 5)
    limits = {"environment_processes": 1, "environment_seconds": 0.5}
    task = task_of(options={"fail": "sleep start", "at": SEED}, **limits)
    expected = (
        r"start of .* must return in time, .* \(got 'gave no answer within the 5 seconds .*'\), in "
        "the conversation on prompt 0"
    )
    with contextlib.closing(task), pytest.raises(DataError, match=expected):
        task.prompt(0)


def test_bisection_wins_the_guessing_game_within_its_turns():
    task = make_task(GuessTaskSettings(numbers=100, max_turns=7), 0)
    assert task.prompt(0).text == "0-99?"
    for index in range(30):
        (conversation,) = task.begin([task.prompt(index)])
        low = 0
        high = 99
        while conversation.end is None:
            middle = (low + high) // 2
            conversation.add_turn(
                Completion(torch.tensor([0]), torch.tensor([0.0]), "stop", 0), f"is it {middle}?"
            )
            (message,) = task.reply([conversation])
            if message is not None:
                conversation.add([0], False, message)
                if message["content"] == "higher":
                    low = middle + 1
                else:
                    high = middle - 1
        (score,) = task.score_conversations([conversation])
        assert score.reward == 1
        assert conversation.end == "environment"
        assert middle == conversation.environment._number


def test_a_wrong_guess_is_rewarded_by_half_of_its_nearness():
    guess = Guess(11)
    guess.start(Prompt("", "", 0, "", seed=5))
    guess._number = 4
    for answer, reward in (("4", 1), ("no", 0), ("6 or 4", 0.4), ("11", 0), ("10", 0.2), ("²", 0)):
        assert guess.score([{"role": "assistant", "content": answer}]) == (reward, {})
