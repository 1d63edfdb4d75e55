"""Rows of `config/test_keys.py`: the task."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import sys
import time
import types

import pytest
import torch

from keys import key, module_of
from keys.rollouts import prompt_of, sampled
from pgtoolkit.completion import Completion
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.tasks.verifiers import Response


def task_of(*overrides):
    module = module_of(*overrides)
    return make_task(module.config.task, module.config.seed)


TALK = ("task=conversation", "task.environment=tasks.environments_for_tests.Counting")
ROOM = ("rollout.max_completion_length=40", "accumulation.max_tokens=64")
KINDS = (
    "reverse",
    "chain_sum",
    "shortest_path",
    "reasoning_gym",
    "prompts",
    "conversation",
    "guess",
    "sums",
)


@key(*(f"task/{name}.name" for name in KINDS))
def task_name(tmp_path, monkeypatch):
    stand_in_gym(monkeypatch)
    found = (
        task_of(),
        task_of("task=reasoning_gym", "task.dataset=sums"),
        task_of(*prompts(tmp_path)),
    )
    assert [type(task).__name__ for task in found] == [
        "ReverseTask",
        "ReasoningGymTask",
        "PromptsTask",
    ]
    room = [
        "rollout.max_completion_length=70",
        "model.max_positions=192",
        "accumulation.max_tokens=192",
    ]
    found = task_of("task=chain_sum", *room), task_of("task=shortest_path", *room)
    assert [type(task).__name__ for task in found] == ["ChainSumTask", "ShortestPathTask"]
    found = task_of("task=guess", *room), task_of(*TALK)
    assert [task.prompt(0).text for task in found] == ["0-9?", f"{seed_of(0, 0) % 10}="]
    assert task_of("task=sums", *room).prompt(0).text.startswith("What is ")


def stand_in_gym(monkeypatch) -> None:
    """For the package, an extra, so that what it is asked for is seen: its questions name data set
    and options."""

    class Data(list):
        def score_answer(self, answer, entry):
            if answer == "broken":
                raise KeyError(answer)
            return float(answer == entry["answer"])

    def create_dataset(name, seed, size, terms=0, long=None):
        questions = [f"{name} {seed} {terms} {i}" + 30 * "!" * (i == long) for i in range(size)]
        return Data(
            {"question": question, "answer": f"{i}"} for i, question in enumerate(questions)
        )

    package, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    package.__spec__ = importlib.machinery.ModuleSpec("reasoning_gym", None)
    package.create_dataset, factory.DATASETS = create_dataset, {"sums": None, "dice": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@key("task/reasoning_gym.dataset", "task/reasoning_gym.options")
def reasoning_gym(monkeypatch):
    stand_in_gym(monkeypatch)
    for dataset, terms, size in (("sums", 3, 2), ("dice", 5, 3)):
        options = [
            "task=reasoning_gym",
            f"task.dataset={dataset}",
            f"task.options={{terms: {terms}, size: {size}}}",
        ]
        module, documents = sampled(*options, "seed=6")
        expected = [f"{dataset} 6 {terms} {i % size}" for i in range(4)]
        assert [prompt_of(module, document) for document in documents[::4]] == expected


def prompts(folder, name="prompts.jsonl", offset=0) -> list[str]:
    rows = [
        {"prompt": f"{i}?", "answer": i, "question": f"{i}!", "solution": -i}
        for i in range(offset, offset + 4)
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["task=prompts", f"task.path={folder / name}"]


@key("task/prompts.path", "task/prompts.prompt_field", "task/prompts.split")
def prompts_path(tmp_path):
    first, second = prompts(tmp_path), prompts(tmp_path, "others.jsonl", offset=5)
    (tmp_path / "data").mkdir()
    prompts(tmp_path / "data", "train.jsonl"), prompts(tmp_path / "data", "test.jsonl", offset=6)
    for chosen, expected in (
        (first, "0? 1? 2? 3?"),
        (second, "5? 6? 7? 8?"),
        ([*second, "task.prompt_field=question"], "5! 6! 7! 8!"),
        (["task=prompts", f"task.path={tmp_path / 'data'}", "task.split=test"], "6? 7? 8? 9?"),
    ):
        module, documents = sampled(*chosen)
        assert sorted({prompt_of(module, document) for document in documents}) == expected.split()


@key(
    *("task/reasoning_gym.too_long", "task/prompts.too_long"),
    *("task/reasoning_gym.max_prompt_length", "task/prompts.max_prompt_length"),
)
def too_long(tmp_path, monkeypatch):
    """A document has room for 24 tokens, four of them the completion's; or for 64, and for a prompt
    as is typed."""
    stand_in_gym(monkeypatch)
    gym = ["task=reasoning_gym", "task.dataset=sums", "task.options={long: 1, size: 4}"]
    file = prompts(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as added:
        added.write(json.dumps({"prompt": 30 * "7", "answer": 7}))
    room = ["accumulation.max_tokens=64", "model.max_positions=64"]
    for chosen, longest, expected in (
        (gym, 40, "sums 0 0 0|sums 0 0 2|sums 0 0 3"),
        (file, 30, "0?|1?|2?|3?"),
    ):
        sampled(*chosen, *room, f"task.max_prompt_length={longest}")
        for limit in ([], [*room, f"task.max_prompt_length={longest - 1}"]):
            with pytest.raises(DataError, match=r"task\.too_long=skip"):
                sampled(*chosen, *limit, "task.too_long=refuse")
            module, documents = sampled(*chosen, *limit, "task.too_long=skip")
            assert sorted(
                {prompt_of(module, document) for document in documents}
            ) == expected.split("|")


def scores(texts, *overrides):
    """Of completions of the prompt whose answer is 3 and whose solution is -3."""
    task = task_of(*overrides)
    prompt = next(found for found in map(task.prompt, range(4)) if found.text == "3?")
    return [task.score(prompt, text, True).reward for text in texts]


@key("task/prompts.answer_field")
def answer_field(tmp_path):
    assert scores(["3", "-3"], *prompts(tmp_path)) == [1, 0]
    assert scores(["3", "-3"], *prompts(tmp_path), "task.answer_field=solution") == [0, 1]


@key("task/prompts.answer_pattern")
def answer_pattern(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": f"#### {i} or\n####  {-i} "} for i in range(4)]
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["task=prompts", f"task.path={tmp_path / 'worked.jsonl'}"]
    assert scores(["-3", rows[3]["answer"]], *own) == [0, 1]
    assert scores(["-3", rows[3]["answer"]], *own, "task.answer_pattern='#### (.*)'") == [1, 0]
    with pytest.raises(
        DataError, match=r"worked\.jsonl:1:answer: needs a text in which task\.answer_pattern="
    ):
        task_of(*own, "task.answer_pattern='x=(.*)'")


def half_of_length(completion, answer):
    return len(completion + answer) / 2


@key("task/prompts.verifier", "task/prompts.pattern")
def verifier(tmp_path):
    texts, chosen = ["3", "x=3", "y=3"], prompts(tmp_path)
    assert scores(texts, *chosen) == [1, 0, 0]
    assert scores(texts, *chosen, "task.verifier=keys.tasks.half_of_length") == [1, 2, 2]
    for letter, expected in (("x", [0, 1, 0]), ("y", [0, 0, 1])):
        pattern = f"task.pattern='{letter}=(.*)'"
        assert scores(texts, *chosen, "task.verifier=regular_expression", pattern) == expected


@key("task/prompts.verifiers")
def verifiers(tmp_path):
    """The reward is the sum of weight x score; the first says what an exact match is."""
    chosen = [*prompts(tmp_path), "task.verifier=null"]
    several = (
        "{right: {verifier: exact_match}, %s: {verifier: keys.tasks.half_of_length, weight: %s}}"
    )
    for name, weight in (("long", 0.5), ("other", -3)):
        task = task_of(*chosen, f"task.verifiers={several % (name, weight)}")
        prompt = next(found for found in map(task.prompt, range(4)) if found.text == "3?")
        right, wrong = task.score(prompt, "3", True), task.score(prompt, "123", True)
        assert (right.reward, right.exact_match) == (1 + weight * 1, True)
        assert (wrong.reward, wrong.exact_match) == (weight * 2, False)
        assert wrong.measures == {"reward/right": 0, f"reward/{name}": 2}


@key("task/prompts.verifier_processes", "task/prompts.verifier_seconds")
def verifier_processes(tmp_path):
    own = [*prompts(tmp_path), "task.verifier=tasks.verifiers_for_tests.scripted"]
    assert scores(["pid", "pid"], *own) == [os.getpid()] * 2
    for number in (1, 2):
        task = task_of(*own, f"task.verifier_processes={number}", "task.verifier_seconds=2")
        try:
            task.score(task.prompt(0), "pid", True)  # the first call of a process has more time
            found = task.scores(
                [Response(task.prompt(0), text, True) for text in ("sleep 30", "pid", "pid")]
            )
        finally:
            task.close()
        assert [score.reward is None for score in found] == [True, False, False]
        assert [score.measures["verifier_timeout_fraction"] for score in found] == [1, 0, 0]
        assert os.getpid() not in {score.reward for score in found}


FAILURES = [
    f"task/{name}.{key}" for name in KINDS[3:6] for key in ("verifier_failure", "failure_score")
]


@key(*FAILURES, "task/reasoning_gym.verifier_processes", "task/reasoning_gym.verifier_seconds")
def verifier_failure(tmp_path, monkeypatch):
    stand_in_gym(monkeypatch)
    talk_of = (
        TALK[0],
        "task.environment=tasks.environments_for_tests.Odd",
        "task.options={values: {score: null}}",
    )
    silent = [*prompts(tmp_path), "task.verifier=tasks.verifiers_for_tests.scripted"]
    fixed = "task.verifier_failure=score"
    for chosen, expected in (([], None), ([fixed], 0.0), ([fixed, "task.failure_score=-2"], -2.0)):
        task = task_of(*talk_of, *chosen)
        assert [score.reward for score in task.score_conversations([talk(task, 1)])] == [expected]
        assert scores(["none", "nan", "1"], *silent, *chosen) == [expected, expected, 1]
        task = task_of("task=reasoning_gym", "task.dataset=sums", *chosen)
        assert task.score(task.prompt(0), "broken", True).reward == expected
    processes = ["task.verifier_processes=1", "task.verifier_seconds=9"]
    with contextlib.closing(task_of("task=reasoning_gym", "task.dataset=sums", *processes)) as task:
        assert (task._scorers.processes, task._scorers.seconds) == (1, 9.0)


@key("task/conversation.environment", "task/conversation.options")
def environment():
    for more, says in (
        ([], "+1"),
        (["task.environment=tasks.environments_for_tests.Endless"], "+"),
    ):
        assert talk(task_of(*TALK[:1], *(more or TALK[1:])), 1).messages[-1]["content"] == says
    for rounds in (1, 3):
        assert talk(task_of(*TALK, f"task.options={{rounds: {rounds}}}"), 9).turns == rounds + 1


def talk(task, turns):
    """A conversation of so many turns, or of those that it lasts."""
    (one,) = task.begin([task.prompt(0)])
    while one.end is None and one.turns < turns:
        one.add_turn(Completion(torch.tensor([0]), torch.tensor([0.0]), "stop", 0), "x")
        (message,) = task.reply([one])
        if message is not None:
            one.add([1], False, message)
    return one


@key("task/conversation.max_turns", "task/guess.max_turns")
def max_turns():
    for kind in (TALK, ("task=guess", "task.numbers=1000000")):
        for number in (1, 2):
            task = task_of(*kind, *ROOM, f"task.max_turns={number}")
            (one,) = task.begin([task.prompt(0)])
            for _ in range(number):
                one.add_turn(Completion(torch.tensor([0]), torch.tensor([0.0]), "stop", 0), "0")
                task.reply([one])
            assert (one.turns, one.end) == (number, "max_turns")


@key("task/guess.numbers")
def numbers():
    for number in (2, 50):
        task = task_of("task=guess", *ROOM, f"task.numbers={number}")
        hidden = {
            one.environment._number for one in task.begin([task.prompt(i) for i in range(200)])
        }
        assert (min(hidden) < number / 10, number * 0.9 - 1 < max(hidden) < number) == (True, True)


@key(*(f"task/conversation.{name}" for name in ("path", "split", "prompt_field", "answer_field")))
def conversation_rows(tmp_path):
    (tmp_path / "data").mkdir()
    prompts(tmp_path, "train.jsonl"), prompts(tmp_path / "data", "train.jsonl", offset=5)
    file, folder = (f"task.path={tmp_path / name}" for name in ("train.jsonl", "data"))
    for chosen, expected in (
        ([file], "0?0 1?1 2?2 3?3"),
        ([file, "task.prompt_field=question", "task.answer_field=solution"], "0!0 1!-1 2!-2 3!-3"),
        ([folder, "task.split=train"], "5?5 6?6 7?7 8?8"),
    ):
        begun = (task := task_of(*TALK, *chosen)).begin([task.prompt(i) for i in range(4)])
        asked = [one.environment.prompt for one in begun]
        assert sorted(prompt.text + prompt.answer for prompt in asked) == expected.split()


@key("task/conversation.environment_processes", "task/conversation.environment_seconds")
def environment_processes():
    fails = f"task.options={{fail: sleep reply, at: {seed_of(0, 0) % 10}}}"
    for number, seconds in ((1, 0.5), (2, 1)):
        own = f"task.environment_processes={number}", f"task.environment_seconds={seconds}"
        with contextlib.closing(task_of(*TALK, fails, *own)) as task:
            began = time.monotonic()
            assert talk(task, 2).end == "timeout"
            assert time.monotonic() - began > seconds


@key("task/conversation.too_long", "task/conversation.max_prompt_length")
def too_long_to_begin(tmp_path):
    rows = [{"prompt": "x" * (20 * (i == 1)) + "?", "answer": i} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [
        *TALK,
        f"task.path={tmp_path / 'prompts.jsonl'}",
        "accumulation.max_tokens=64",
        "model.max_positions=64",
    ]
    sampled(*own, "task.max_prompt_length=23")
    with pytest.raises(DataError, match=r"prompts\.jsonl:2 has 23.*task\.too_long=skip"):
        sampled(*own, "task.max_prompt_length=22", "task.too_long=refuse")
    module, documents = sampled(*own, "task.max_prompt_length=22", "task.too_long=skip")
    assert {prompt_of(module, document)[0] for document in documents} == {"?"}
