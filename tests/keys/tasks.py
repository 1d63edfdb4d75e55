"""Tests of single keys (see `keys`): the task, by its prompts and the rewards of completions."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.runs import config_of

from keys import key_test
from keys.rollouts import module_and_first_batch, prompt_of
from keys.small_runs import settings
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Completion, Prompt
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.conversation import Conversation, ConversationTask
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.tasks.tasks import Task

TASKS = (
    "reverse",
    "reasoning_gym",
    "prompts",
    "conversation",
    "guess",
    "sums",
)
COUNTING = ("task=conversation", "task.environment=tasks.environments_for_tests.Counting")
ROOM_FOR_TURNS = ("rollout.max_completion_length=40", "accumulation.max_tokens=64")


def task_of(*overrides: str) -> Task:
    config = config_of(*settings(*overrides))
    return make_task(config.task, config.seed)


def conversation_task_of(*overrides: str) -> ConversationTask:
    task = task_of(*overrides)
    assert isinstance(task, ConversationTask)
    return task


def write_rows(file: Path, rows: list[dict]) -> str:
    """Write a file of prompts, and return its path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def prompts_file(folder: Path, name: str = "prompts.jsonl", first: int = 0) -> str:
    """Write four prompts from "{first}?" on, whose answers are their numbers; return the path."""
    rows = [
        {"prompt": f"{i}?", "answer": i, "question": f"{i}!", "solution": -i}
        for i in range(first, first + 4)
    ]
    return write_rows(folder / name, rows)


def prompts_task(folder: Path) -> list[str]:
    return ["task=prompts", f"task.path={prompts_file(folder)}"]


def prompts_of(*overrides: str) -> set[str]:
    """Return the prompts of the first batch of a run."""
    module, documents = module_and_first_batch(*overrides)
    return {prompt_of(module, document) for document in documents}


def prompt_with_answer_3(task: Task) -> Prompt:
    return next(prompt for prompt in map(task.prompt, range(4)) if prompt.text == "3?")


def rewards(completions: list[str], *overrides: str) -> list[float | None]:
    """Return the rewards of completions of the prompt whose answer is 3, and its solution -3."""
    task = task_of(*overrides)
    prompt = prompt_with_answer_3(task)
    return [task.score(prompt, completion, True).reward for completion in completions]


def replace_reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the package, which is an extra, by one whose questions name the data set and the
    options that it was asked for."""

    class DataSet(list):
        def score_answer(self, answer: str, entry: dict) -> float:
            if answer == "broken":
                raise KeyError(answer)
            return float(answer == entry["answer"])

    def create_dataset(
        name: str, seed: int, size: int, terms: int = 0, long: int | None = None
    ) -> DataSet:
        """long: the number of a question that is longer by 30 characters."""
        entries = DataSet()
        for i in range(size):
            question = f"{name} {seed} {terms} {i}" + 30 * "!" * (i == long)
            entries.append({"question": question, "answer": f"{i}"})
        return entries

    package: Any = types.ModuleType("reasoning_gym")
    package.__spec__ = importlib.machinery.ModuleSpec("reasoning_gym", None)
    package.create_dataset = create_dataset
    factory: Any = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": None, "dice": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@key_test(*(f"task/{name}.name" for name in TASKS))
def the_task_is_that_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace_reasoning_gym(monkeypatch)
    room = (
        "rollout.max_completion_length=70",
        "model.max_positions=192",
        "accumulation.max_tokens=192",
    )
    for overrides, expected in (
        ([], "ReverseTask"),
        (["task=reasoning_gym", "task.dataset=sums"], "ReasoningGymTask"),
        (prompts_task(tmp_path), "PromptsTask"),
    ):
        assert type(task_of(*overrides)).__name__ == expected
    assert task_of("task=guess", *room).prompt(0).text == "0-9?"
    assert task_of(*COUNTING).prompt(0).text == f"{seed_of(0, 0) % 10}="
    assert task_of("task=sums", *room).prompt(0).text.startswith("What is ")


@key_test("task/reasoning_gym.dataset", "task/reasoning_gym.options")
def reasoning_gym_is_asked_for_the_data_set_with_its_options(monkeypatch: pytest.MonkeyPatch):
    replace_reasoning_gym(monkeypatch)
    for dataset, terms, size in (("sums", 3, 2), ("dice", 5, 3)):
        module, documents = module_and_first_batch(
            "task=reasoning_gym",
            f"task.dataset={dataset}",
            f"task.options={{terms: {terms}, size: {size}}}",
            "seed=6",
        )
        expected = [f"{dataset} 6 {terms} {i % size}" for i in range(4)]
        assert [prompt_of(module, document) for document in documents[::4]] == expected


@key_test("task/prompts.path", "task/prompts.prompt_field", "task/prompts.split")
def prompts_are_those_of_the_file_the_split_and_the_field(tmp_path: Path):
    first = prompts_file(tmp_path)
    second = prompts_file(tmp_path, "others.jsonl", first=5)
    folder = tmp_path / "data"
    folder.mkdir()
    prompts_file(folder, "train.jsonl")
    prompts_file(folder, "test.jsonl", first=6)
    for overrides, expected in (
        ([f"task.path={first}"], "0? 1? 2? 3?"),
        ([f"task.path={second}"], "5? 6? 7? 8?"),
        ([f"task.path={second}", "task.prompt_field=question"], "5! 6! 7! 8!"),
        ([f"task.path={folder}", "task.split=test"], "6? 7? 8? 9?"),
    ):
        assert prompts_of("task=prompts", *overrides) == set(expected.split())


@key_test(
    "task/reasoning_gym.too_long",
    "task/prompts.too_long",
    "task/reasoning_gym.max_prompt_length",
    "task/prompts.max_prompt_length",
)
def longer_prompts_than_the_limit_are_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A document has room for 24 tokens, four of them the completion's; or for 64, and the prompt
    has a limit of its own."""
    replace_reasoning_gym(monkeypatch)
    gym = ["task=reasoning_gym", "task.dataset=sums", "task.options={long: 1, size: 4}"]
    prompts = prompts_task(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": 30 * "7", "answer": 7}))
    room = ["accumulation.max_tokens=64", "model.max_positions=64"]
    for task, longest, others in (
        (gym, 40, {"sums 0 0 0", "sums 0 0 2", "sums 0 0 3"}),
        (prompts, 30, {"0?", "1?", "2?", "3?"}),
    ):
        prompts_of(*task, *room, f"task.max_prompt_length={longest}")
        for limit in ([], [*room, f"task.max_prompt_length={longest - 1}"]):
            with pytest.raises(DataError, match=r"task\.too_long=skip"):
                prompts_of(*task, *limit, "task.too_long=refuse")
            assert prompts_of(*task, *limit, "task.too_long=skip") == others


@key_test("task/prompts.answer_field")
def the_answer_stands_in_the_answer_field(tmp_path: Path):
    prompts = prompts_task(tmp_path)
    assert rewards(["3", "-3"], *prompts) == [1, 0]
    assert rewards(["3", "-3"], *prompts, "task.answer_field=solution") == [0, 1]


@key_test("task/prompts.answer_pattern")
def the_answer_is_the_last_match_of_the_answer_pattern(tmp_path: Path):
    """A row without a match is refused."""
    rows = [{"prompt": f"{i}?", "answer": f"#### {i} or\n####  {-i} "} for i in range(4)]
    prompts = ["task=prompts", f"task.path={write_rows(tmp_path / 'worked.jsonl', rows)}"]
    completions = ["-3", rows[3]["answer"]]
    assert rewards(completions, *prompts) == [0, 1]
    assert rewards(completions, *prompts, "task.answer_pattern='#### (.*)'") == [1, 0]
    with pytest.raises(
        DataError, match=r"worked\.jsonl:1:answer: needs a text in which task\.answer_pattern="
    ):
        task_of(*prompts, "task.answer_pattern='x=(.*)'")


def half_of_length(completion: str, answer: str) -> float:
    """Score a completion: a verifier of the user."""
    return len(completion + answer) / 2


@key_test("task/prompts.verifier", "task/prompts.pattern")
def the_verifier_gives_the_reward(tmp_path: Path):
    completions = ["3", "x=3", "y=3"]
    prompts = prompts_task(tmp_path)
    assert rewards(completions, *prompts) == [1, 0, 0]
    assert rewards(completions, *prompts, "task.verifier=keys.tasks.half_of_length") == [1, 2, 2]
    for letter, expected in (("x", [0, 1, 0]), ("y", [0, 0, 1])):
        pattern = ("task.verifier=regular_expression", f"task.pattern='{letter}=(.*)'")
        assert rewards(completions, *prompts, *pattern) == expected


@key_test("task/prompts.verifiers")
def the_reward_is_the_weighted_sum_of_several_verifiers(tmp_path: Path):
    """The first verifier says what an exact match is."""
    for name, weight in (("long", 0.5), ("other", -3)):
        right = "right: {verifier: exact_match}"
        second = f"{name}: {{verifier: keys.tasks.half_of_length, weight: {weight}}}"
        verifiers = f"task.verifiers={{{right}, {second}}}"
        task = task_of(*prompts_task(tmp_path), "task.verifier=null", verifiers)
        prompt = prompt_with_answer_3(task)
        score = task.score(prompt, "3", True)
        assert score.reward == 1 + weight * 1
        assert score.exact_match is True
        score = task.score(prompt, "123", True)
        assert score.reward == weight * 2
        assert score.exact_match is False
        assert score.measures == {"reward/right": 0, f"reward/{name}": 2}


@key_test("task/prompts.verifier_processes", "task/prompts.verifier_seconds")
def verifiers_run_in_this_process_or_in_others_where_a_call_has_a_time_limit(tmp_path: Path):
    scripted = [*prompts_task(tmp_path), "task.verifier=tasks.verifiers_for_tests.scripted"]
    assert rewards(["pid", "pid"], *scripted) == [os.getpid()] * 2
    for number in (1, 2):
        limits = (f"task.verifier_processes={number}", "task.verifier_seconds=2")
        with contextlib.closing(task_of(*scripted, *limits)) as task:
            prompt = task.prompt(0)
            task.score(prompt, "pid", True)  # the first call of a process has more time
            responses = [Response(prompt, text, True) for text in ("sleep 30", "pid", "pid")]
            scores = task.scores(responses)
        assert [score.reward is None for score in scores] == [True, False, False]
        assert [score.measures["verifier_timeout_fraction"] for score in scores] == [1, 0, 0]
        assert os.getpid() not in {score.reward for score in scores}


def conversation_of(task: ConversationTask, num_turns: int) -> Conversation:
    """Return a conversation after `num_turns` turns, or after its end if that comes earlier."""
    (conversation,) = task.begin([task.prompt(0)])
    while conversation.end is None and conversation.turns < num_turns:
        turn = Completion(torch.tensor([0]), torch.tensor([0.0]), "stop", 0)
        conversation.add_turn(turn, "x")
        (message,) = task.reply([conversation])
        if message is not None:
            conversation.add([1], False, message)
    return conversation


@key_test(
    *(
        f"task/{name}.{key}"
        for name in ("reasoning_gym", "prompts", "conversation")
        for key in ("verifier_failure", "failure_score")
    ),
    "task/reasoning_gym.verifier_processes",
    "task/reasoning_gym.verifier_seconds",
)
def a_completion_that_has_no_score_is_left_out_or_gets_the_failure_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replace_reasoning_gym(monkeypatch)
    without_score = (
        "task=conversation",
        "task.environment=tasks.environments_for_tests.Odd",
        "task.options={values: {score: null}}",
    )
    scripted = [*prompts_task(tmp_path), "task.verifier=tasks.verifiers_for_tests.scripted"]
    gym = ("task=reasoning_gym", "task.dataset=sums")
    for failure, expected in (
        ([], None),
        (["task.verifier_failure=score"], 0.0),
        (["task.verifier_failure=score", "task.failure_score=-2"], -2.0),
    ):
        task = conversation_task_of(*without_score, *failure)
        (score,) = task.score_conversations([conversation_of(task, 1)])
        assert score.reward == expected
        assert rewards(["none", "nan", "1"], *scripted, *failure) == [expected, expected, 1]
        task = task_of(*gym, *failure)
        assert task.score(task.prompt(0), "broken", True).reward == expected
    limits = ("task.verifier_processes=1", "task.verifier_seconds=9")
    with contextlib.closing(task_of(*gym, *limits)) as task:
        assert task._scorers.processes == 1
        assert task._scorers.seconds == 9.0


@key_test("task/conversation.environment", "task/conversation.options")
def the_environment_gets_its_options_and_answers():
    endless = "task.environment=tasks.environments_for_tests.Endless"
    for overrides, answer in ((COUNTING, "+1"), (("task=conversation", endless), "+")):
        conversation = conversation_of(conversation_task_of(*overrides), 1)
        assert conversation.messages[-1]["content"] == answer
    for rounds in (1, 3):
        task = conversation_task_of(*COUNTING, f"task.options={{rounds: {rounds}}}")
        assert conversation_of(task, 9).turns == rounds + 1


@key_test("task/conversation.max_turns", "task/guess.max_turns")
def a_conversation_ends_after_max_turns():
    for overrides in (COUNTING, ("task=guess", "task.numbers=1000000")):
        for number in (1, 2):
            task = conversation_task_of(*overrides, *ROOM_FOR_TURNS, f"task.max_turns={number}")
            (conversation,) = task.begin([task.prompt(0)])
            for _ in range(number):
                assert conversation.end is None
                turn = Completion(torch.tensor([0]), torch.tensor([0.0]), "stop", 0)
                conversation.add_turn(turn, "0")
                task.reply([conversation])
            assert conversation.turns == number
            assert conversation.end == "max_turns"


@key_test("task/guess.numbers")
def the_number_to_guess_is_below_numbers():
    for count in (2, 50):
        task = conversation_task_of("task=guess", *ROOM_FOR_TURNS, f"task.numbers={count}")
        conversations = task.begin([task.prompt(i) for i in range(200)])
        hidden = {conversation.environment._number for conversation in conversations}
        assert min(hidden) < count / 10
        assert count * 0.9 - 1 < max(hidden) < count


@key_test(
    "task/conversation.path",
    "task/conversation.split",
    "task/conversation.prompt_field",
    "task/conversation.answer_field",
)
def conversations_start_from_prompts_and_answers_of_a_file(tmp_path: Path):
    file = prompts_file(tmp_path, "train.jsonl")
    folder = tmp_path / "data"
    folder.mkdir()
    prompts_file(folder, "train.jsonl", first=5)
    fields = ("task.prompt_field=question", "task.answer_field=solution")
    for overrides, expected in (
        ([f"task.path={file}"], "0?0 1?1 2?2 3?3"),
        ([f"task.path={file}", *fields], "0!0 1!-1 2!-2 3!-3"),
        ([f"task.path={folder}", "task.split=train"], "5?5 6?6 7?7 8?8"),
    ):
        task = conversation_task_of(*COUNTING, *overrides)
        conversations = task.begin([task.prompt(i) for i in range(4)])
        prompts = [conversation.environment.prompt for conversation in conversations]
        assert sorted(prompt.text + prompt.answer for prompt in prompts) == expected.split()


@key_test("task/conversation.environment_processes", "task/conversation.environment_seconds")
def an_environment_that_takes_longer_than_its_seconds_ends_the_conversation():
    fails = f"task.options={{fail: sleep reply, at: {seed_of(0, 0) % 10}}}"
    for number, seconds in ((1, 0.5), (2, 1)):
        limits = (
            f"task.environment_processes={number}",
            f"task.environment_seconds={seconds}",
        )
        with contextlib.closing(conversation_task_of(*COUNTING, fails, *limits)) as task:
            start = time.monotonic()
            assert conversation_of(task, 2).end == "timeout"
            assert time.monotonic() - start > seconds


@key_test("task/conversation.too_long", "task/conversation.max_prompt_length")
def conversations_that_start_with_more_than_the_limit_are_refused_or_skipped(tmp_path: Path):
    """The second of four begins with 23 tokens."""
    rows = [{"prompt": "x" * (20 * (i == 1)) + "?", "answer": i} for i in range(4)]
    overrides = [
        *COUNTING,
        f"task.path={write_rows(tmp_path / 'prompts.jsonl', rows)}",
        "accumulation.max_tokens=64",
        "model.max_positions=64",
    ]
    prompts_of(*overrides, "task.max_prompt_length=23")
    with pytest.raises(DataError, match=r"prompts\.jsonl:2 has 23.*task\.too_long=skip"):
        prompts_of(*overrides, "task.max_prompt_length=22", "task.too_long=refuse")
    prompts = prompts_of(*overrides, "task.max_prompt_length=22", "task.too_long=skip")
    assert {prompt[0] for prompt in prompts} == {"?"}
