"""Reward functions of the user: they get the arguments that their parameters name, TRL's run
unchanged, and failures of servers that they ask are handled."""

import asyncio
import contextlib
import errno
import gc
import http
import http.server
import json
import re
import signal
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tasks import rewards_for_tests

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Completion
from pgtoolkit.config.keys import option_values
from pgtoolkit.errors import ConfigError, DataError, VerifierLost
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.tasks.chat_template import ChatTemplate
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.retries import Retries
from pgtoolkit.tasks.reward_functions import TrainerState
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.settings import PromptsTaskSettings
from pgtoolkit.tasks.tasks import Score, Task

MINE = "tasks.rewards_for_tests."
ROWS = [
    {"prompt": "ab?", "answer": 1, "level": 3, "tags": ["x"]},
    {
        "prompt": [{"role": "user", "content": "abcd?"}],
        "answer": 22,
        "level": 4,
        "tags": ["x", "y"],
    },
]


@pytest.fixture
def task_of(tmp_path: Path) -> Iterator[Callable[..., Task]]:
    """Give a function that makes the task of a file with `rows`, scored by the named verifiers.

    All tasks are closed at the end.
    """
    with contextlib.ExitStack() as stack:

        def make(*names: str, rows: Sequence[dict] = ROWS, **changes: object) -> Task:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            values = option_values("task", "prompts") | {"path": str(path)}
            values["verifiers"] = {
                f"v{number}": {"verifier": name} for number, name in enumerate(names)
            }
            if len(names) == 1:
                values |= {"verifier": names[0], "verifiers": {}}
            task = make_task(PromptsTaskSettings(**(values | changes)), 0)
            stack.callback(task.close)
            return task

        yield make


def scores_of(task: Task, texts: Sequence[str]) -> list[Score]:
    """Score a text for each row, in the order of the file."""
    prompts = list(task.rows())
    responses = [Response(prompt, text, True) for prompt, text in zip(prompts, texts, strict=True)]
    return task.scores(responses)


def rewards_of(task: Task, texts: Sequence[str]) -> list[float | None]:
    return [score.reward for score in scores_of(task, texts)]


EXPECTED = {
    "in_another_order": [3 - 10, 4 - 20],
    "of_prompt_and_row": [30 + 3, 100 + 50 + 4],
    "takes_anything": [1 + 10 + 0.3, 2 + 20 + 0.4],
    "by_position": [0, 0],
    "longest_of_the_batch": [0, 1],
    "of_a_batch": [3 + 1, 4 + 22],
    "progress": [1, 22],
}
"""The scores by each function of the texts `xyz` and `wxyz`, before the first step."""


def scores_before_the_first_step(task: Task) -> list[Score]:
    state = TrainerState(global_step=0, max_steps=7)
    responses = [
        Response(prompt, text, True, trainer_state=state)
        for prompt, text in zip(task.rows(), ["xyz", "wxyz"], strict=True)
    ]
    return task.scores(responses)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_function_gets_the_arguments_that_its_parameters_name(task_of, name):
    scores = scores_before_the_first_step(task_of(MINE + name))
    assert [score.reward for score in scores] == pytest.approx(EXPECTED[name])


def test_functions_in_a_process_get_the_arguments_that_their_parameters_name(task_of):
    names = [MINE + name for name in EXPECTED]
    task = task_of(*names, verifier_processes=1, verifier_seconds=60)
    scores = scores_before_the_first_step(task)
    for number, (name, expected) in enumerate(EXPECTED.items()):
        measured = [score.measures[f"reward/v{number}"] for score in scores]
        assert measured == pytest.approx(expected), name


def test_trainer_state_counts_the_steps_of_the_weights_that_sampled(task_of):
    task = task_of(MINE + "progress", rows=[{"prompt": "?", "answer": 1}])
    tokenized = TokenizedTask(task, character_tokenizer(None), [95], max_steps=8)
    completion = Completion(torch.tensor([0, 1]), torch.zeros(2), "length", model_version=6)
    (score,) = tokenized.scores([task.prompt(0)], [completion])
    assert score.reward == 6 / 8 + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("characters", 2),  # TRL decodes "ab", and verl does
        ("verl_short", 2),
        ("in_another_order", 2 + len("<think>") - 10),
    ],
)
def test_functions_of_other_trainers_get_no_special_tokens_as_there(task_of, name, expected):
    row = {"prompt": "?", "answer": "x"}
    tokenizer = character_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    ids = tokenizer("a<think>b", add_special_tokens=False).input_ids
    assert len(ids) == 3
    end = tokenizer.eos_token_id
    tokens = torch.tensor([*ids, end])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for chat in (None, ChatTemplate(tokenizer)):
        tokenized = TokenizedTask(task_of(MINE + name, rows=[row]), tokenizer, [end], chat)
        prompt = tokenized.task.prompt(0)
        (score,) = tokenized.scores([prompt], [Completion(tokens, torch.zeros(4), "stop", 0)])
        assert score.reward == expected


def test_unknown_parameters_and_missing_columns_are_refused(task_of):
    with pytest.raises(
        ConfigError, match=r"parameters among completion, answer, prompt, row.*got confused\(prompt"
    ):
        task_of(MINE + "confused")
    rows = [ROWS[0], {"prompt": "?", "answer": 1}]
    with pytest.raises(
        DataError,
        match=r"needs a column level in every row.*\(got prompt, answer at rows\.jsonl:2\)",
    ):
        task_of(MINE + "only_even", rows=rows)


def test_a_list_with_too_few_scores_is_refused(task_of):
    with pytest.raises(
        DataError, match=r"too_few must return a list of 2 scores.*\(got 1 of them\)"
    ):
        scores_of(task_of(MINE + "too_few"), ["", ""])


def test_logged_values_are_kept_under_the_name_of_the_verifier(task_of):
    scores = scores_of(task_of("exact_match", MINE + "longest_of_the_batch"), ["1", "x"])
    assert [score.measures["verifier/v1/mean_level"] for score in scores] == [3.5] * 2
    assert [score.logged for score in scores] == [{"v1/level": "3"}, {"v1/level": "4"}]
    alone = scores_of(task_of(MINE + "longest_of_the_batch"), ["1", "x"])
    assert [score.logged for score in alone] == [{"level": "3"}, {"level": "4"}]


def test_a_logged_column_with_too_few_values_is_refused(task_of):
    with pytest.raises(
        DataError,
        match=r"log_extra of .* needs 2 values of length, one for each .*\(got 1 of them\)",
    ):
        scores_of(task_of(MINE + "logs_too_few"), ["", ""])


def test_none_is_left_out_of_the_sum_of_scores(task_of):
    """Like TRL a task adds up the other scores; without any, the completion has failed. The first
    verifier alone decides what is right."""
    rows = [{"prompt": f"{level}?", "answer": 1, "level": level} for level in range(3)]
    scores = scores_of(task_of(MINE + "only_odd", MINE + "only_even", rows=rows), ["a", "b", "c"])
    assert [(score.reward, score.exact_match) for score in scores] == [
        (1.0, None),
        (0.5, False),
        (1.0, None),
    ]
    assert [sorted(score.measures) for score in scores] == [
        ["reward/v1"],
        ["reward/v0"],
        ["reward/v1"],
    ]
    alone = scores_of(task_of(MINE + "only_even", rows=rows), ["a", "b", "c"])
    assert [(score.reward, score.failed) for score in alone] == [
        (1.0, False),
        (None, True),
        (1.0, False),
    ]


def test_a_function_gets_columns_of_parquet_as_plain_lists(task_of, tmp_path):
    columns = {
        "prompt": ["a?", "bc?"],
        "answer": [1, 2],
        "level": [5, 6],
        "tags": [["x"], ["y", "z"]],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    task = task_of(MINE + "takes_anything", path=str(tmp_path / "rows.parquet"))
    assert [prompt.row for prompt in task.rows()] == [
        {"prompt": "a?", "answer": 1, "level": 5, "tags": ["x"]},
        {"prompt": "bc?", "answer": 2, "level": 6, "tags": ["y", "z"]},
    ]
    assert rewards_of(task, ["", ""]) == [1 + 10, 2 + 10]


CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}{{ "
    "'[assistant]' }}"
)


def test_reward_functions_of_trl_run_unchanged(task_of, tmp_path, monkeypatch):
    """Sampled completions with a chat template get the scores of calls like TRL's trainer's."""
    pytest.importorskip("math_verify")
    rewards = pytest.importorskip("trl.rewards")
    (tmp_path / "trl_rewards.py").write_text(
        "from trl.rewards import get_cosine_scaled_reward\n"
        "from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment\n"
        "cosine = get_cosine_scaled_reward(max_len=40)\n"
        "repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5)\n"
        "overlong = get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=20)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = [
        "trl.rewards.accuracy_reward",
        "trl.rewards.reasoning_accuracy_reward",
        "trl.rewards.think_format_reward",
    ]
    names += [f"trl_rewards.{name}" for name in ("cosine", "repetition", "overlong")]
    rows = [
        {"prompt": "Half of one?", "answer": "x", "solution": r"$\frac{1}{2}$"},
        {"prompt": "Two?", "answer": "x", "solution": "$2$"},
        {"prompt": "Unreadable?", "answer": "x", "solution": ""},
    ]
    tokenizer = character_tokenizer(None)
    tokenizer.chat_template = CHAT
    end = tokenizer.eos_token_id
    task = task_of(*names, rows=rows)
    tokenized = TokenizedTask(task, tokenizer, [end], ChatTemplate(tokenizer, "Be brief."))
    texts = [
        r"<think>a half</think> \boxed{\frac{1}{2}}",
        "so so so so so $3$",
        "<think>what?</think>",
    ]
    tokens = [[*tokenizer(text, add_special_tokens=False).input_ids, end] for text in texts]
    completions = [
        Completion(torch.tensor(ids), torch.zeros(len(ids)), "stop", 0) for ids in tokens
    ]
    scores = tokenized.scores(list(task.rows()), completions)

    as_in_trl = {
        "prompts": [
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["prompt"]}]
            for row in rows
        ],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": tokens,
        "solution": [row["solution"] for row in rows],
        "answer": ["x"] * 3,
    }
    functions = [
        rewards.accuracy_reward,
        rewards.reasoning_accuracy_reward,
        rewards.think_format_reward,
        rewards.get_cosine_scaled_reward(max_len=40),
        rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5),
        rewards.get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=20),
    ]
    for number, function in enumerate(functions):
        expected = function(**as_in_trl)
        measured = [score.measures.get(f"reward/v{number}") for score in scores]
        assert measured == expected, names[number]
    # The scores differ between the texts.
    assert [score.measures.get("reward/v0") for score in scores] == [1.0, 0.0, None]
    totals = [sum(value for value in score.measures.values()) for score in scores]
    assert [score.reward for score in scores] == pytest.approx(totals)


def test_calls_of_an_async_function_wait_concurrently_up_to_the_limit(task_of):
    rows = [{"prompt": f"{number}?", "answer": 40 - number} for number in range(8)]
    for limit in (3, 100):
        rewards_for_tests.max_waiting = 0
        task = task_of(MINE + "waits", rows=rows, verifier_concurrency=limit)
        assert rewards_of(task, "01234567") == list(range(8))
        assert rewards_for_tests.max_waiting == min(limit, 8)


def test_a_function_that_hangs_has_failed_and_the_others_continue(task_of):
    limits = {"verifier_processes": 1, "verifier_seconds": 0.5}
    scores = scores_of(task_of(MINE + "never", **limits), ["hang", "x"])
    assert [(score.reward, score.failed) for score in scores] == [(None, True), (1.0, False)]
    assert [score.measures["verifier_timeout_fraction"] for score in scores] == [1.0, 0.0]
    task = task_of(MINE + "slow_batch", **limits)
    assert rewards_of(task, ["x", "x"]) == [1.0, 1.0]  # The first call of a process has more time.
    scores = scores_of(task, ["hang", "x"])
    assert [score.measures["verifier_timeout_fraction"] for score in scores] == [1.0, 1.0]


@pytest.fixture
def server():
    """Give a server that fails with each of its `failures` first; `calls` counts all calls."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.calls += 1
            failure = self.server.failures.pop(0) if self.server.failures else None
            if failure == "drop":
                self.connection.close()
                return
            self.send_response(failure if isinstance(failure, int) else 200)
            self.end_headers()
            page = b"<html><h1>502 Bad Gateway</h1></html>"
            self.wfile.write(page if failure == "page" else b'{"score": 0.75}')

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.calls = 0
        http_server.failures = []
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield http_server
        http_server.shutdown()


ASKING = ["asks_a_server", "asks_a_server_async", "asks_for_a_batch"]


AT_ONCE = {"verifier_retry_seconds": 0}


@pytest.mark.parametrize("name", ASKING)
def test_a_failing_server_is_asked_again_as_often_as_the_key_says(task_of, server, name):
    rows = ROWS[:1]
    text = f"{server.server_port}/score"
    server.failures = ["drop", 503, "page", 429]
    task = task_of(MINE + name, rows=rows, verifier_retries=4, **AT_ONCE)
    assert rewards_of(task, [text]) == [0.75]
    assert server.calls == 5
    for failure in (500, "page"):
        server.failures = [failure] * 2
        with pytest.raises(VerifierLost, match="call was made again 1 time, and none was ans"):
            scores_of(task_of(MINE + name, rows=rows, verifier_retries=1, **AT_ONCE), [text])
    assert server.calls == 9


def test_a_server_that_fails_at_random_is_lost_once_several_answered_calls_fail_again(
    task_of, server
):
    rows = [{"prompt": f"{number}?", "answer": 1} for number in range(3)]
    texts = [f"{server.server_port}/score"] * 3
    task = task_of(MINE + "asks_a_server", rows=rows, verifier_retries=1, **AT_ONCE)
    # The third call fails twice, then one that was answered, then both of these but for the last.
    until_it_is_probed = [200, 200, 503, 503, 503]
    server.failures = [*until_it_is_probed, 503, 503, 503, 200]
    assert [score.reward for score in scores_of(task, texts)] == [0.75, 0.75, None]
    assert server.calls == 9
    server.failures = [*until_it_is_probed, 503, 503, 503, 503]
    with pytest.raises(VerifierLost) as caught:
        scores_of(task, texts)
    assert server.calls == 18
    assert str(caught.value).partition("Service Unavailable. ")[2] == (
        "Each call was made again 1 time: 1 of 3 calls failed, and then so did 2 calls that it had "
        "answered before. Start the server, or use task.verifier_retries=5 and "
        "task.verifier_retry_seconds=0.5 to wait for it up to 102 seconds."
    )


@pytest.mark.parametrize("name", ["asks_a_server", "asks_for_a_batch"])
def test_a_server_that_is_asked_once_in_a_while_is_probed_by_what_it_answered_earlier(
    task_of, server, name
):
    texts = [f"{server.server_port}/score"]
    task = task_of(MINE + name, rows=ROWS[:1], verifier_retries=1, **AT_ONCE)
    assert rewards_of(task, texts) == [0.75]
    server.failures = [503, 503, 200]  # the last one answers the question of before
    assert rewards_of(task, texts) == [None]
    server.failures = [503, 503, 503, 503, 503]
    with pytest.raises(VerifierLost, match="and then so did 1 call that it had answered before"):
        scores_of(task, texts)
    assert server.calls == 1 + 3 + 5


def test_each_wait_is_four_times_the_one_before_up_to_a_minute():
    assert Retries(3, 0.5).waits() == [0.5, 2, 8]
    assert Retries(6, 2).waits() == [2, 8, 32, 60, 60, 60]
    assert Retries(2, 90).waits() == [90, 90]
    assert Retries(10_000, 0.5).waits()[-1] == 60


@pytest.mark.parametrize("name", ASKING)
def test_a_server_that_refuses_is_asked_once_and_refused_in_one_line(task_of, server, name):
    server.failures = [401]
    with pytest.raises(DataError) as caught:
        scores_of(task_of(MINE + name, rows=ROWS[:1]), [f"{server.server_port}/score"])
    problem = str(caught.value)
    assert (
        f"task.verifier={MINE}{name} is refused by the server that it asks: HTTPError: HTTP "
        "Error 401"
    ) in problem
    assert "\n" not in problem
    assert server.calls == 1


@pytest.mark.parametrize("name", ASKING[:2])
def test_a_server_that_is_down_loses_the_verifier(task_of, server, name):
    server.shutdown()
    server.server_close()
    texts = [f"{server.server_port}/score"] * 6
    rows = [{"prompt": f"{number}?", "answer": 1} for number in range(6)]
    task = task_of(MINE + name, rows=rows, **AT_ONCE)
    with pytest.raises(VerifierLost) as caught:
        scores_of(task, texts)
    assert (
        "could not reach the server that it asks: URLError: <urlopen error [Errno 111] Connection "
        "refused>"
    ) in str(caught.value)
    assert "\n" not in str(caught.value)


class _Busy(Exception):
    code = http.HTTPStatus.SERVICE_UNAVAILABLE


class _Own(BaseException):
    pass


def _caused() -> RuntimeError:
    error = RuntimeError("the judge failed")
    error.__cause__ = ConnectionResetError()
    return error


def _answer_of(module: str, text: str) -> ValueError:
    """Return the error of an answer that the code of this module reads as JSON."""
    names = {"__name__": module, "json": json}
    try:
        exec("def read(text):\n    return json.loads(text)", names)
        names["read"](text)
    except ValueError as error:
        return error
    raise AssertionError


FAILURES = {
    "cancelled": asyncio.CancelledError,
    "unreachable": lambda: OSError(errno.EHOSTUNREACH, "No route to host"),
    "no network": lambda: OSError(errno.ENETUNREACH, "Network is unreachable"),
    "tls": lambda: ssl.SSLError(1, "record layer failure"),
    "group": lambda: ExceptionGroup("calls", [ConnectionError(), TimeoutError()]),
    "groups in a group": lambda: BaseExceptionGroup(
        "calls", [ExceptionGroup("more", [ssl.SSLEOFError()]), asyncio.CancelledError()]
    ),
    "no Exception": _Own,
    "cut off": lambda: asyncio.IncompleteReadError(b"", 3),
    "status of an enum": _Busy,
    "caused by one": _caused,
    "late": TimeoutError,
    "no json": lambda: _answer_of("httpx._models", "oops"),
    "a page": lambda: _answer_of("mine", " <!DOCTYPE html><p>"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_of_a_judge_is_tried_again(task_of, kind):
    for name in ("fails", "fails_async"):
        rewards_for_tests.failures = {"bad": [FAILURES[kind]() for _ in range(3)]}
        task = task_of(MINE + name, **AT_ONCE)
        assert rewards_of(task, ["a", "bad"]) == [1.0, 1.0]
        # One completion that always fails is no end of the judge.
        rewards_for_tests.failures = {"bad": [FAILURES[kind]() for _ in range(4)]}
        scores = scores_of(task, ["a", "bad"])
        assert [(score.reward, score.failed) for score in scores] == [(1.0, False), (None, True)]


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "no such file", "x"),
        SystemExit(0),
        KeyboardInterrupt(),
        ExceptionGroup("calls", [ConnectionError(), KeyError("a fault")]),
        json.JSONDecodeError("a completion that the function reads as JSON", "<think>", 0),
    ],
    ids=repr,
)
def test_a_fault_of_the_function_ends_the_run(task_of, error):
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # as training has one of its own
    try:
        for name in ("fails", "fails_async"):
            rewards_for_tests.failures = {"bad": [error]}
            with pytest.raises(DataError, match=f"raised {type(error).__name__} on the completion"):
                scores_of(task_of(MINE + name, **AT_ONCE), ["a", "bad"])
    finally:
        signal.signal(signal.SIGINT, handler)


def test_calls_beside_one_that_is_refused_are_neither_begun_nor_printed(task_of, caplog):
    """Three calls are awaited at a time: all of them fail at once, and none of the others begins,
    such as a connection that nobody would wait for. asyncio prints no traceback of theirs."""
    texts = [f"bad {number}" for number in range(9)]
    rewards_for_tests.failures = {text: [ZeroDivisionError("refused")] for text in texts}
    limits = {"verifier_concurrency": 3, **AT_ONCE}
    task = task_of(MINE + "fails_async", rows=ROWS[:1] * 9, **limits)
    with pytest.raises(DataError, match="refused"):
        scores_of(task, texts)
    gc.collect()
    assert sum(map(bool, rewards_for_tests.failures.values())) == 6
    assert "never retrieved" not in caplog.text


def test_a_limit_of_seconds_holds_whatever_an_async_function_does(task_of):
    """The others are scored, also where the whole event loop stands still."""
    limits = {"verifier_processes": 2, "verifier_seconds": 0.5, "verifier_retries": 0}
    task = task_of(MINE + "misbehaves", rows=ROWS * 3, **limits)
    started = time.monotonic()
    texts = ["a", "block", "thread", "catch", "exit", "b"]
    scores = scores_of(task, texts)
    assert time.monotonic() - started < 40
    assert [score.reward for score in scores] == [1.0, None, None, None, None, 1.0]
    timeouts = [score.measures["verifier_timeout_fraction"] for score in scores]
    assert timeouts == [0, 1, 1, 1, 0, 0]
    assert [score.measures["verifier_crash_fraction"] for score in scores] == [0, 0, 0, 0, 1, 0]


class _Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)


def test_a_client_of_a_module_outlives_the_trial_of_its_function(task_of):
    """Its connection belongs to one event loop, which the tasks of a process share."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rewards_for_tests.connections[:] = [server.server_address[1]]
        for score in ("0.25", "0.5"):
            task = task_of(MINE + "keeps_its_connection", rows=ROWS[:1])
            assert rewards_of(task, [score]) == [float(score)]
            task.close()
        rewards_for_tests.connections[0][1].close()
        server.shutdown()


def test_compute_score_of_verl_runs_as_it_is(task_of):
    rows = [
        {
            "prompt": f"{number}?",
            "data_source": f"source {number}",
            "reward_model": {"style": "rule", "ground_truth": number},
            "extra_info": {"index": number},
        }
        for number in range(2)
    ]
    names = ["verl", "verl_short", "verl_async", "verl_batch"]
    for name in names:
        assert rewards_of(task_of(MINE + name, rows=rows), ["a", "bc"]) == [1.0, 3.0], name
    answered = [{"prompt": "?", "answer": "x", "extra_info": None}]
    with pytest.raises(DataError, match="needs a column data_source in every row"):
        task_of(MINE + "verl", rows=answered)
    assert rewards_of(task_of(MINE + "verl_short", rows=answered), ["abc"]) == [3.0]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gives_dictionary", "return result['score']"),
        ("gives_list", "float(value[0])"),
        ("gives_tensor", "gives_tensor returned tensor([1., 1.]); a verifier returns a bool or"),
        ("gives_array", "gives_array returned array([1., 1.]); a verifier returns a bool or"),
        ("gives_tensors_of_a_batch", "batch returned tensor([1., 1.]); a verifier returns a bool"),
        ("gives_coroutine", "write async def, and return await"),
        ("gives_text", "float(text)"),
        ("gives_function", "Return what it gives when it is called"),
        ("gives_dictionary_of_a_batch", "return result['rewards']"),
        ("gives_coroutines_of_a_batch", "write async def"),
        ("gives_number_of_a_batch", "Return a list of numbers"),
    ],
)
def test_a_value_that_is_no_score_is_answered_with_what_to_write(task_of, name, advice):
    with pytest.raises(DataError, match=re.escape(advice)):
        scores_of(task_of(MINE + name), ["a", "b"])


def test_a_score_above_1_is_noted_once_with_what_to_write(task_of, caplog):
    verifiers = {
        "length": {"verifier": MINE + "length", "weight": 0.1},
        "more": {"verifier": MINE + "by_position"},
    }
    rows = [{"prompt": f"{number}?", "answer": "x"} for number in range(2)]
    task = task_of("exact_match", rows=rows, verifier=None, verifiers=verifiers)
    scores = scores_of(task, ["abc", "d"])
    assert [score.exact_match for score in scores] == [True, True]
    assert scores_of(task, ["abc", "d"]) == scores
    assert [record.getMessage() for record in caplog.records] == [
        f"note: task.verifiers.length.verifier={MINE}length gives 3 to the completion 'abc' of "
        "the prompt at rows.jsonl:1, whose answer is 'x'. Every score of 1 or more counts as "
        "right, in exact_match and pass@k. If only the highest score is right, divide by it: "
        "return score / 3, if 3 is the highest."
    ]


def test_a_tensor_of_one_element_is_a_score(task_of):
    assert rewards_of(task_of(MINE + "gives_tensor"), ["scalar"] * 2) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("Judge", "a line such as score = Judge() in tasks.rewards_for_tests, and task.verifier="),
        ("yields", "return in place of yield"),
        ("yields_async", "return in place of yield"),
    ],
)
def test_a_class_and_a_generator_are_refused(task_of, name, use):
    with pytest.raises(ConfigError, match=re.escape(use)):
        task_of(MINE + name)
