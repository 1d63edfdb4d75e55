"""Verifiers in processes: whatever a verifier does, its time is bounded and the others continue."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from builders.commands import wait_until
from builders.runs import SHORT, config_of, metrics_of

from pgtoolkit.assembly.train import train
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.tasks import process_pool
from pgtoolkit.tasks.process_pool import CRASH, TIMEOUT, Failure, Processes
from pgtoolkit.tasks.reward_functions import Question
from pgtoolkit.tasks.scoring import verifier_pool
from pgtoolkit.tasks.verifiers import Named

SCRIPTED = "tasks.verifiers_for_tests.scripted"
TESTS = Path(__file__).parents[1]


def questions(*completions: str, answer: str = "42", number: int = 0) -> list[Question]:
    return [Question(number, text, answer, f"the completion {text!r}") for text in completions]


@pytest.fixture
def make_verifiers() -> Iterator[Callable[..., Processes]]:
    """Give a function that makes verifiers in processes; check at the end that all have ended."""
    created = []

    def make(num_processes: int = 2, seconds: float = 1.0, *names: str) -> Processes:
        named = [Named("task.verifier", name) for name in names or [SCRIPTED]]
        created.append(verifier_pool(named, num_processes, seconds))
        return created[-1]

    yield make
    workers = [worker for verifiers in created for worker in verifiers._workers]
    pids = [worker.process.pid for worker in workers if worker.process]
    for verifiers in created:
        verifiers.close()
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_ended(pids: Sequence[int], seconds: float = 20) -> bool:
    """Wait up to `seconds` for all processes to end; return whether they have."""
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def test_scores_of_processes_are_those_of_one_process_in_the_same_order(make_verifiers):
    texts = [f"{'x' * (i % 7)}{i}" for i in range(50)]
    names = ["exact_match", "tasks.verifiers_for_tests.length"]
    asked = []
    for text in texts:
        for number in range(2):
            asked += questions(text, answer="xx2", number=number)
    in_process = verifier_pool([Named("task.verifier", name) for name in names]).answers(asked)
    assert in_process == [
        score for text in texts for score in (float(text == "xx2"), float(len(text)))
    ]
    for num_processes in (1, 3):
        verifiers = make_verifiers(num_processes, 20, *names)
        assert verifiers.answers(asked) == in_process
        assert verifiers.answers(asked[:3]) == in_process[:3]
        assert verifiers.answers([]) == []
        assert all(worker.process for worker in verifiers._workers)


def test_a_process_loads_no_large_library_and_is_used_again(make_verifiers):
    verifiers = make_verifiers(1, 20)
    assert verifiers.answers(questions("modules")) == [0.0]
    first = verifiers.answers(questions("pid"))
    second = verifiers.answers(questions("pid"))
    assert first == second != [os.getpid()]


def test_a_further_question_does_not_end_a_working_process(make_verifiers):
    """On busy cores the kernel may report a question that the process has read already."""
    verifiers = make_verifiers(1, 20)
    verifiers.answers(questions("42"))
    [worker] = verifiers._workers
    for question in questions("sleep 0.3", "42"):
        worker._connection.send(question)
        time.sleep(0.1)
    assert [worker._connection.recv()[0] for _ in range(2)] == ["answer", "answer"]


@pytest.mark.slow
def test_a_verifier_that_hangs_gives_no_score(make_verifiers):
    late = Failure(TIMEOUT, "gave no answer within task.verifier_seconds=2")
    answers = make_verifiers(1, 2.0).answers(questions("a", "block", "b", "block", "c"))
    assert answers == [1.0, late, 1.0, late, 1.0]


@pytest.mark.parametrize(("verb", "status"), [("crash", "SIGSEGV"), ("exit 0", "status 0")])
def test_a_verifier_that_ends_its_process_gives_no_score(make_verifiers, verb, status):
    answers = make_verifiers(2, 20).answers(questions(verb, "a", verb, "b"))
    ended = Failure(CRASH, f"ended its process: {status}")
    assert answers == [ended, 1.0, ended, 1.0]


@pytest.mark.slow
def test_the_first_call_of_a_process_has_the_time_of_a_start(make_verifiers, monkeypatch):
    """It may import large modules; beyond the time of a start it is a failure too."""
    verifiers = make_verifiers(1, 0.5)
    assert verifiers.answers(questions("cold 2", "cold 2", "block", "cold 2")) == [
        1.0,
        1.0,
        Failure(TIMEOUT, "gave no answer within task.verifier_seconds=0.5"),
        1.0,  # from a new process, whose first call this is
    ]
    monkeypatch.setattr(process_pool, "START_SECONDS", 4)
    assert make_verifiers(1, 0.5).answers(questions("block")) == [
        Failure(TIMEOUT, "gave no answer within the 4 seconds that the first call of a process has")
    ]


def test_a_verifier_that_forks_answers_once(make_verifiers):
    forks = questions(*(f"fork {number}" for number in range(8)))
    assert make_verifiers(1).answers(forks) == [*range(8)]


def test_an_exception_is_the_same_error_as_in_one_process(make_verifiers):
    asked = questions("a", "raise second", "sleep 0.3", "quit fourth")
    with pytest.raises(DataError) as in_process:
        verifier_pool([Named("task.verifier", SCRIPTED)]).answers(asked)
    verifiers = make_verifiers(2, 20)
    with pytest.raises(DataError) as in_processes:
        verifiers.answers(asked)
    message = str(in_process.value)
    assert str(in_processes.value) == message
    assert message.startswith(
        f"task.verifier={SCRIPTED} raised ValueError on the completion 'raise second':"
    )
    assert message.endswith("ValueError: second")
    assert verifiers.answers(questions("a")) == [1.0]
    with pytest.raises(DataError, match="raised SystemExit on the completion 'quit fourth'"):
        verifiers.answers(asked[3:])


def test_a_verifier_that_cannot_be_imported_is_refused(make_verifiers, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import ctypes\nctypes.string_at(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path, needs in (
        ("no_such_package.f", "a function that can be imported"),
        ("broken_module.f", r"a process that imports it \(got one that ended: SIGSEGV\)"),
    ):
        with pytest.raises(ConfigError, match=f"task.verifier={path} needs {needs}"):
            make_verifiers(1, 1.0, path).answers(questions("a"))


def test_the_limit_of_seconds_does_not_count_a_slow_import(make_verifiers, tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import time\ntime.sleep(3)\ndef f(completion, answer):\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_verifiers(1, 2.0, "slow_module.f").answers(questions("a")) == [1.0]


def test_an_import_within_a_call_is_not_counted(make_verifiers, tmp_path, monkeypatch):
    """It may come with any completion, not only with the first one of a process."""
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(3)\n")
    (tmp_path / "loads_late.py").write_text(
        "import importlib, time\n"
        "def f(completion, answer):\n"
        "    if completion == 'load':\n"
        "        importlib.import_module('slow_to_load')\n"
        "    if completion == 'hang':\n"
        "        time.sleep(60)\n"
        "    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    late = Failure(TIMEOUT, "gave no answer within task.verifier_seconds=1.5")
    verifiers = make_verifiers(1, 1.5, "loads_late.f")
    assert verifiers.answers(questions("a", "load", "hang", "load")) == [1.0, 1.0, late, 1.0]


def test_processes_that_a_verifier_has_started_end(make_verifiers, tmp_path):
    """Its children end after its time, and processes that it has left behind with the run."""
    verifiers = make_verifiers(1, 3.0)
    late = Failure(TIMEOUT, "gave no answer within task.verifier_seconds=3")
    assert verifiers.answers(questions("a", f"child {tmp_path / 'pids'}")) == [1.0, late]
    assert all_ended([int(pid) for pid in (tmp_path / "pids").read_text().split()])
    assert verifiers.answers(questions(f"leave {tmp_path / 'left'}")) == [1.0]
    left = [int((tmp_path / "left").read_text())]
    assert is_running(*left)
    verifiers.close()
    assert all_ended(left)


PARENT = """
import signal, sys
# A shell makes its background processes ignore this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pgtoolkit.tasks.reward_functions import Question
from pgtoolkit.tasks.scoring import verifier_pool
from pgtoolkit.tasks.verifiers import Named
verifiers = verifier_pool([Named("task.verifier", "tasks.verifiers_for_tests.scripted")], 3, 600)
texts = (f"leave {sys.argv[3]}", "sleep 0.3", "sleep 0.3")
verifiers.answers([Question(0, text, "", "it") for text in texts])
print(*(worker.process.pid for worker in verifiers._workers), flush=True)
if sys.argv[1].startswith("busy"):
    texts = ("block", f"child {sys.argv[2]}", "sleep 600")
    verifiers.answers([Question(0, text, "", "it") for text in texts])
"""


@pytest.mark.parametrize(
    ("state", "number"),
    [("busy", 9), ("busy", 2), ("idle", None)],  # None: it ends by itself
)
def test_no_process_outlives_the_training_process(tmp_path, state, number):
    """Also if it is killed while verifiers block in C and have child processes."""
    arguments = [
        sys.executable,
        "-c",
        PARENT,
        f"{state} {number}",
        str(tmp_path / "pids"),
        str(tmp_path / "left"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        pids.append(int((tmp_path / "left").read_text()))
        if state == "busy":
            file = tmp_path / "pids"
            wait_until(lambda: file.exists() and len(file.read_text().split()) == 2, seconds=60)
            pids += map(int, file.read_text().split())
            assert all(map(is_running, pids))
        if number is not None:
            parent.send_signal(number)
        parent.wait(60)
    try:
        assert all_ended(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@pytest.fixture
def scored_twice(tmp_path: Path) -> list[str]:
    """Return the settings of a run whose completions two verifiers score."""
    rows = [{"prompt": f"{i}{i}=", "answer": str(i)} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    length = "{verifier: tasks.verifiers_for_tests.length, weight: 0.25}"
    several = (
        f"task.verifiers={{right: {{verifier: tasks.verifiers_for_tests.right}}, length: {length}}}"
    )
    short = [setting for setting in SHORT if not setting.startswith("task.")]
    return [
        *short,
        "task=prompts",
        f"task.path={tmp_path / 'p.jsonl'}",
        "task.verifier=null",
        several,
    ]


def test_a_run_with_verifier_processes_has_the_metrics_of_one_without(scored_twice, tmp_path):
    """The metrics are the same, but for those of failed processes."""
    train(config_of(*scored_twice), tmp_path / "plain")
    several = config_of(*scored_twice, "task.verifier_processes=2", "task.verifier_seconds=30")
    train(several, tmp_path / "processes")
    plain = metrics_of(tmp_path / "plain")
    for row, row_of_processes in zip(plain, metrics_of(tmp_path / "processes"), strict=True):
        failures = {"verifier_timeout_fraction": 0, "verifier_crash_fraction": 0}
        assert row_of_processes == row | failures
        weighted = row["reward/right"] + 0.25 * row["reward/length"]
        assert row["reward"] == pytest.approx(weighted, abs=1e-12)
        assert row["reward/length"] > 0.5
        assert row["exact_match"] == row["reward/right"]
