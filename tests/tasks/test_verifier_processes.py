"""Verifiers in processes of their own: whatever one of them does, its time is bounded and the rest
goes on."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.runs import SHORT, config_of, copy_as_of, metrics_of

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.tasks import process_pool
from pgtoolkit.tasks.process_pool import CRASH, TIMEOUT, Failure
from pgtoolkit.tasks.reward_functions import Question
from pgtoolkit.tasks.scoring import verifier_pool
from pgtoolkit.tasks.verifiers import Named
from pgtoolkit.training.train import train

SCRIPTED = "tasks.verifiers_for_tests.scripted"
TESTS = Path(__file__).parents[1]


def questions(*completions, answer="42", number=0):
    return [Question(number, text, answer, f"the completion {text!r}") for text in completions]


@pytest.fixture
def processes():
    """Makes verifiers in processes, all of which are gone in the end."""
    made = []

    def make(number=2, seconds=1.0, *names):
        named = [Named("task.verifier", name) for name in names or [SCRIPTED]]
        made.append(verifier_pool(named, number, seconds))
        return made[-1]

    yield make
    pids = [worker.process.pid for one in made for worker in one._workers if worker.process]
    for one in made:
        one.close()
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=20):
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def test_scores_are_those_of_one_process_in_their_order(processes):
    texts = [f"{'x' * (i % 7)}{i}" for i in range(50)]
    names = ["exact_match", "tasks.verifiers_for_tests.length"]
    asked = [
        one for text in texts for i in range(2) for one in questions(text, answer="xx2", number=i)
    ]
    here = verifier_pool([Named("task.verifier", name) for name in names]).answers(asked)
    assert here == [score for text in texts for score in (float(text == "xx2"), float(len(text)))]
    for number in (1, 3):
        found = processes(number, 20, *names)
        assert found.answers(asked) == here
        assert found.answers(asked[:3]) == here[:3]
        assert found.answers([]) == []
        assert all(worker.process for worker in found._workers)


def test_a_process_starts_without_the_large_libraries_and_is_used_again(processes):
    found = processes(1, 20)
    assert found.answers(questions("modules")) == [0.0]
    first, second = found.answers(questions("pid")), found.answers(questions("pid"))
    assert first == second != [os.getpid()]


def test_a_question_ends_no_process_that_is_at_work(processes):
    """As the kernel may tell of one that has been read already, where cores are busy."""
    found = processes(1, 20)
    found.answers(questions("42"))
    [worker] = found._workers
    for question in questions("sleep 0.3", "42"):
        worker._connection.send(question)
        time.sleep(0.1)
    assert [worker._connection.recv()[0] for _ in range(2)] == ["answer", "answer"]


def test_a_verifier_that_hangs_scores_nothing_and_the_rest_goes_on(processes):
    start, late = (
        time.monotonic(),
        Failure(TIMEOUT, "gave no answer within task.verifier_seconds=2"),
    )
    found = processes(1, 2.0).answers(questions("a", "spin", "b", "spin", "c"))
    assert found == [1.0, late, 1.0, late, 1.0]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("verb", "how"), [("crash", "SIGSEGV"), ("exit 0", "status 0")])
def test_a_verifier_that_ends_its_process_scores_nothing_and_the_rest_goes_on(processes, verb, how):
    found = processes(2, 20).answers(questions(verb, "a", verb, "b"))
    ended = Failure(CRASH, f"ended its process: {how}")
    assert found == [ended, 1.0, ended, 1.0]


def test_the_first_call_of_a_process_has_the_time_of_a_start(processes, monkeypatch):
    """It may import what the others find there; after that time it is a failure, too."""
    found = processes(1, 0.5)
    assert found.answers(questions("cold 2", "cold 2", "spin", "cold 2")) == [
        1.0,
        1.0,
        Failure(TIMEOUT, "gave no answer within task.verifier_seconds=0.5"),
        1.0,  # of another process, which starts cold again
    ]
    monkeypatch.setattr(process_pool, "START_SECONDS", 4)
    assert processes(1, 0.5).answers(questions("spin")) == [
        Failure(TIMEOUT, "gave no answer within the 4 seconds that the first call of a process has")
    ]


def test_a_verifier_that_comes_back_twice_answers_once(processes):
    assert processes(1).answers(questions(*(f"fork {i}" for i in range(8)))) == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]


def test_an_exception_is_an_error_as_in_one_process(processes):
    asked = questions("a", "raise second", "sleep 0.3", "quit fourth")
    with pytest.raises(DataError) as here:
        verifier_pool([Named("task.verifier", SCRIPTED)]).answers(asked)
    found = processes(2, 20)
    with pytest.raises(DataError) as there:
        found.answers(asked)
    assert str(there.value) == str(here.value)
    assert str(here.value).startswith(
        f"task.verifier={SCRIPTED} raised ValueError on the completion 'raise second':"
    )
    assert str(here.value).endswith("ValueError: second")
    assert found.answers(questions("a")) == [1.0]
    with pytest.raises(DataError, match="raised SystemExit on the completion 'quit fourth'"):
        found.answers(asked[3:])


def test_a_verifier_that_cannot_be_imported(processes, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import ctypes\nctypes.string_at(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path, needs in (
        ("no_such_package.f", "a function that can be imported"),
        ("broken_module.f", r"a process that imports it \(got one that ended: SIGSEGV\)"),
    ):
        with pytest.raises(ConfigError, match=f"task.verifier={path} needs {needs}"):
            processes(1, 1.0, path).answers(questions("a"))


def test_a_module_that_imports_slowly_has_its_time(processes, tmp_path, monkeypatch):
    """The limit is that of an answer."""
    (tmp_path / "slow_module.py").write_text(
        "import time\ntime.sleep(3)\ndef f(completion, answer):\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert processes(1, 2.0, "slow_module.f").answers(questions("a")) == [1.0]


def test_what_a_verifier_started_ends_with_it(processes, tmp_path):
    """After its time, and what it has left behind when the run ends."""
    found = processes(1, 3.0)
    late = Failure(TIMEOUT, "gave no answer within task.verifier_seconds=3")
    assert found.answers(questions("a", f"child {tmp_path / 'pids'}")) == [1.0, late]
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
    assert found.answers(questions(f"leave {tmp_path / 'left'}")) == [1.0]
    left = [int((tmp_path / "left").read_text())]
    assert is_running(*left)
    found.close()
    assert gone(left)


PARENT = """
import signal, sys
# A shell ignores it for what it starts in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pgtoolkit.tasks.reward_functions import Question
from pgtoolkit.tasks.scoring import verifier_pool
from pgtoolkit.tasks.verifiers import Named
found = verifier_pool([Named("task.verifier", "tasks.verifiers_for_tests.scripted")], 3, 600)
texts = (f"leave {sys.argv[3]}", "sleep 0.3", "sleep 0.3")
found.answers([Question(0, text, "", "it") for text in texts])
print(*(worker.process.pid for worker in found._workers), flush=True)
if sys.argv[1].startswith("busy"):
    texts = ("spin", f"child {sys.argv[2]}", "sleep 600")
    found.answers([Question(0, text, "", "it") for text in texts])
"""


@pytest.mark.parametrize(
    ("state", "number"),
    [("busy", 9), ("busy", 2), ("idle", None)],  # None: it comes to its end
)
def test_no_process_outlives_the_one_that_trains(tmp_path, state, number):
    """Also where it is killed while verifiers spin in C, with the processes that they have
    started."""
    arguments = [
        sys.executable,
        "-c",
        PARENT,
        f"{state} {number}",
        str(tmp_path / "pids"),
        str(tmp_path / "left"),
    ]
    where = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=where
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        pids.append(int((tmp_path / "left").read_text()))
        if state == "busy":
            end = time.monotonic() + 60
            while (
                len((tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else [])
                < 2
            ):
                assert time.monotonic() < end
                time.sleep(0.05)
            pids += map(int, (tmp_path / "pids").read_text().split())
            assert all(map(is_running, pids))
        if number is not None:
            parent.send_signal(number)
        parent.wait(60)
    try:
        assert gone(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@pytest.fixture
def scored_twice(tmp_path):
    """Overrides of a run whose completions two verifiers score."""
    rows = [{"prompt": f"{i}{i}=", "answer": str(i)} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    length = "{verifier: tasks.verifiers_for_tests.length, weight: 0.25}"
    several = (
        f"task.verifiers={{right: {{verifier: tasks.verifiers_for_tests.right}}, length: {length}}}"
    )
    short = [one for one in SHORT if not one.startswith("task.")]
    return [
        *short,
        "task=prompts",
        f"task.path={tmp_path / 'p.jsonl'}",
        "task.verifier=null",
        several,
    ]


def test_a_run_with_processes_is_the_run_without(scored_twice, tmp_path):
    """The same metrics, and those of the verifiers beside them; also where it was killed within a
    batch."""
    train(config_of(*scored_twice), tmp_path / "plain")
    train(
        config_of(*scored_twice), copy_as_of(tmp_path / "plain", 1, tmp_path / "cut"), resume=True
    )
    several = config_of(*scored_twice, "task.verifier_processes=2", "task.verifier_seconds=30")
    train(several, tmp_path / "processes")
    plain = metrics_of(tmp_path / "plain")
    assert metrics_of(tmp_path / "cut") == plain
    for here, there in zip(plain, metrics_of(tmp_path / "processes"), strict=True):
        assert there == here | {"verifier_timeout_fraction": 0, "verifier_crash_fraction": 0}
        assert here["reward"] == pytest.approx(
            here["reward/right"] + 0.25 * here["reward/length"], abs=1e-12
        )
        assert here["reward/length"] > 0.5
        assert here["exact_match"] == here["reward/right"]
