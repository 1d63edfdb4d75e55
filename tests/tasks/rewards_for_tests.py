"""Reward functions of every supported form.

The processes of verifiers import this file: it imports nothing large.
"""

import asyncio
import contextlib
import json
import os
import time
import urllib.request

num_waiting = 0
max_waiting = 0


def in_another_order(answer, completion):
    return len(completion) - 10 * len(answer)


def of_prompt_and_row(completion, prompt, row):
    is_chat = isinstance(prompt, list)
    asked = prompt[-1]["content"] if is_chat else prompt
    return 100 * is_chat + 10 * len(asked) + row["level"]


def takes_anything(completion, **others):
    return len(others["row"]["tags"]) + 10 * len(others["answer"]) + len(completion) / 10


def by_position(text, gold):
    return float(text == gold)


def confused(prompt, text):
    return 0.0


def longest_of_the_batch(completions, level, missing=None, **others):
    """Give 1 to the longest completions of a batch."""
    assert missing is None
    assert sorted(others) == [
        "answer",
        "completion_ids",
        "log_extra",
        "log_metric",
        "prompts",
        "tags",
        "trainer_state",
    ]
    others["log_metric"]("mean_level", sum(level) / len(level))
    others["log_extra"]("level", level)
    longest = max(map(len, completions))
    return [len(completion) == longest for completion in completions]


def logs_its_text(completions, log_extra, **others):
    log_extra("text", completions)
    return [0.0] * len(completions)


def characters(completions, **others):
    return [
        len(completion if isinstance(completion, str) else completion[-1]["content"])
        for completion in completions
    ]


def logs_too_few(completions, log_extra, **others):
    log_extra("length", [len(completions[0])])
    return [0.0] * len(completions)


def progress(prompts, completions, trainer_state, answer):
    return [trainer_state.global_step / trainer_state.max_steps + gold for gold in answer]


def only_even(completions, level, **others):
    return [1.0 if number % 2 == 0 else None for number in level]


def only_odd(completions, level, **others):
    return [0.5 if number % 2 == 1 else None for number in level]


def too_few(completions, **others):
    return [1.0]


async def waits(completion, answer):
    global num_waiting, max_waiting
    num_waiting += 1
    max_waiting = max(max_waiting, num_waiting)
    await asyncio.sleep(float(answer) / 1000)
    num_waiting -= 1
    return float(completion)


async def never(completion, answer):
    if completion == "hang":
        await asyncio.sleep(600)
    return 1.0


async def of_a_batch(completions, answer, **others):
    await asyncio.sleep(0)
    return [len(completion) + gold for completion, gold in zip(completions, answer, strict=True)]


def _ask(completion):
    """Ask the server that the completion names, such as `8080/score`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{completion}", timeout=10) as answer:
        return json.load(answer)["score"]


def asks_a_server(completion, answer):
    return _ask(completion)


async def asks_a_server_async(completion, answer):
    return await asyncio.to_thread(_ask, completion)


connections = []
"""The port of a server, then the connection that `keeps_its_connection` has made to it."""


async def keeps_its_connection(completion, answer):
    """Return the server's score by the connection of the first call, as an HTTP client does."""
    if isinstance(connections[0], int):
        connections[0] = await asyncio.open_connection("127.0.0.1", connections[0])
    reader, writer = connections[0]
    writer.write(completion.encode() + b"\n")
    return float(await reader.readline())


def asks_for_a_batch(completions, **others):
    return [_ask(completion) for completion in completions]


def slow_batch(completions, **others):
    time.sleep(600 if "hang" in completions else 0)
    return [1.0] * len(completions)


failures = {}
"""Completion -> the exceptions that its next calls raise."""


def fails(completion, answer):
    if failures.get(completion):
        raise failures[completion].pop()
    return 1.0


async def fails_async(completion, answer):
    return fails(completion, answer)


async def misbehaves(completion, answer):
    if completion == "block":
        time.sleep(600)
    elif completion == "thread":
        await asyncio.to_thread(time.sleep, 600)
    elif completion == "exit":
        os._exit(0)
    while completion == "catch":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
    return 1.0


def verl(data_source, solution_str, ground_truth, extra_info, method="strict", **kwargs):
    assert data_source == f"source {ground_truth}"
    assert extra_info == {"index": ground_truth}
    assert kwargs == {}
    return {"score": len(solution_str) + ground_truth, "acc": True}


def verl_short(solution_str, ground_truth, format_score=0.0, score=1.0):
    return len(solution_str) + (0 if ground_truth == "x" else ground_truth)


async def verl_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return verl(data_source, solution_str, ground_truth, extra_info)


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return list(map(verl, data_sources, solution_strs, ground_truths, extra_infos))


def length(completion, answer):
    return len(completion)


def gives_dictionary(completion, answer):
    return {"text": "good", "score": 1.0}


def gives_list(completion, answer):
    return [0.5, 0.25]


def gives_tensor(completion, answer):
    import torch

    return torch.tensor(0.5) if completion == "scalar" else torch.ones(2)


def gives_array(completion, answer):
    import numpy as np

    return np.ones(2)


def gives_tensors_of_a_batch(completions, **others):
    import torch

    return torch.ones(len(completions), 2)


def gives_coroutine(completion, answer):
    return never(completion, answer)


def gives_text(completion, answer):
    return "0.5"


def gives_function(completion, answer):
    return gives_text


def gives_dictionary_of_a_batch(completions, **others):
    return {"rewards": [1.0] * len(completions)}


def gives_coroutines_of_a_batch(completions, **others):
    return [never(completion, "") for completion in completions]


def gives_number_of_a_batch(completions, **others):
    return 1.0


class Judge:
    def __call__(self, completion, answer):
        return 1.0


def yields(completion, answer):
    yield 1.0


async def yields_async(completion, answer):
    yield 1.0


judge_calls_left = 10**9
"""Calls that `judge` and `judge_async` answer, before they reach nobody any more."""


def judge(completion, answer):
    global judge_calls_left
    judge_calls_left -= 1
    if judge_calls_left < 0:
        raise OSError(113, "No route to host")
    return (len(completion) + len(answer)) % 4 / 3


async def judge_async(completion, answer):
    return judge(completion, answer)


def faulty_judge(completion, answer):
    try:
        return judge(completion, answer)
    except OSError:
        raise KeyError(completion) from None
