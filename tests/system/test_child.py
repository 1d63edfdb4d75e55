"""Child processes: how they end, with their parent or before it, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from builders.commands import wait_until

from pgtoolkit.system.child import Child, end_all, under_guard

STUBBORN = """
import os, signal, subprocess, sys, time

def stay(number, frame):
    sys.stdout.write("asked to end\\n")  # in one write: other programs append to the same file
    sys.stdout.flush()

signal.signal(signal.SIGTERM, stay)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.pid}.")
while True:
    time.sleep(600)
"""
"""Ignores SIGTERM, and has a child of its own."""

LEAVING = """
import os, signal, subprocess, sys, time
# Where these tests run in the background it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
shell = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
left = subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout.strip()
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {left}.")
exec(sys.argv[2])
"""
"""Leaves a process behind in a session of its own, whose parent has ended; then executes its second
argument."""

ORDERLY = """
import signal, sys, threading, time
from pgtoolkit.system.child import channel_to_parent, follow_parent, parent_has_ended

def say(line):
    sys.stdout.write(line + "\\n")  # in one write: other programs append to the same file
    sys.stdout.flush()

def save(number, frame):
    say(f"saved: {parent_has_ended.is_set()}")
    sys.exit(7)

signal.signal(signal.SIGTERM, save)
follow_parent(channel_to_parent())
say("begun")
while True:
    time.sleep(0.01)
"""
"""A program of ours, which saves."""

PARENT = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pgtoolkit.system.child import Child
commands, log = json.loads(sys.argv[1]), Path(sys.argv[2])
children = [Child(command, log=log) for command in commands]
connections = [child.connection() for child in children]
if os.fork() == 0:  # shares the channels, unless they are closed in it
    os.setsid()
    for child in children:
        child.end()
    time.sleep(600)
print(*(child.pid for child in children), flush=True)
sys.stdin.readline()
"""
"""Starts children, and a fork of itself which outlives it; ends once it has read a line."""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_in(file: Path) -> list[int]:
    """Return the numbers of processes that a program has written."""
    wait_until(lambda: file.exists() and file.read_text().endswith("."), 30)
    return [int(pid) for pid in file.read_text().rstrip(".").split()]


def python(program: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


@pytest.mark.parametrize("is_killed", [True, False])
def test_children_end_with_their_parent(tmp_path, is_killed):
    """Also a child that ignores SIGTERM, and the descendants of a child. A program of ours saves
    first."""
    log = tmp_path / "log"
    commands = [
        under_guard(python(STUBBORN, tmp_path / "stubborn"), 0.5),
        under_guard(python(LEAVING, tmp_path / "leaving", "time.sleep(600)"), 0),
        [sys.executable, "-c", ORDERLY],
    ]
    parent = subprocess.Popen(
        python(PARENT, json.dumps(commands), log),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    forked = [child.pid for child in psutil.Process(parent.pid).children() if child.pid not in pids]
    try:
        pids += pids_in(tmp_path / "stubborn") + pids_in(tmp_path / "leaving")
        wait_until(lambda: "begun" in log.read_text(), 30)
        assert len(pids) == 7
        assert all(map(lives, pids))
        if is_killed:
            parent.kill()
        parent.stdin.write("\n")
        parent.stdin.close()
        parent.wait(30)
        wait_until(lambda: not any(map(lives, pids)), 30)
        assert sorted(log.read_text().splitlines()) == ["asked to end", "begun", "saved: True"]
        assert all(map(lives, forked))
        assert len(forked) == 1
    finally:
        for pid in pids + forked:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_guarded_process_is_ended_with_all_its_descendants(tmp_path):
    """It is asked first, and killed after its time; another one need not be waited for."""
    log = tmp_path / "log"
    stubborn = Child(under_guard(python(STUBBORN, tmp_path / "stubborn"), 0.2), log=log)
    leaving = Child(
        under_guard(python(LEAVING, tmp_path / "leaving", "time.sleep(600)"), 0), log=log
    )
    pids = pids_in(tmp_path / "stubborn") + pids_in(tmp_path / "leaving")
    assert all(map(lives, pids))
    assert (stubborn.poll(), leaving.wait(0.01)) == (None, None)
    end_all([stubborn, leaving], 20)
    assert not any(map(lives, [*pids, stubborn.pid, leaving.pid]))
    assert log.read_text() == "asked to end\n"
    assert (stubborn.poll(), leaving.poll()) == (-signal.SIGKILL, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_a_guarded_process_that_ends_leaves_nothing_and_its_status_is_known(tmp_path, then, status):
    child = Child(under_guard(python(LEAVING, tmp_path / "pids", then), 0))
    process, left = pids_in(tmp_path / "pids")
    assert child.wait(30) == child.poll() == status
    assert not lives(process)
    assert not lives(left)
    assert child.end() == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_guard_outlives_a_signal_to_its_job_until_its_process_has_ended(tmp_path, number):
    """Nor is its program deaf to it: by the signal it ends here, and so does the guard then."""
    child = Child(under_guard(python(LEAVING, tmp_path / "pids", "time.sleep(600)"), 0))
    process, left = pids_in(tmp_path / "pids")
    child.send_signal(number)
    time.sleep(0.2)
    assert child.poll() is None
    assert lives(process)
    os.kill(process, number)
    assert child.wait(30) in (-number, 1)  # Python's own end after KeyboardInterrupt
    assert not lives(left)
    child.end()


def test_a_guarded_process_ends_when_its_guard_is_killed(tmp_path):
    child = Child(under_guard(python(STUBBORN, tmp_path / "pids"), 0))
    process, of_process = pids_in(tmp_path / "pids")
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    wait_until(lambda: not lives(process), 30)
    child.end()
    wait_until(lambda: not lives(of_process), 30)


def test_a_program_of_ours_gets_sigterm_before_it_is_killed(tmp_path):
    log = tmp_path / "log"
    orderly = Child([sys.executable, "-c", ORDERLY], log=log)
    deaf = Child(python(STUBBORN, tmp_path / "pids"), log=log)
    pids = pids_in(tmp_path / "pids")
    wait_until(lambda: "begun" in log.read_text(), 30)
    deaf.send_signal(signal.SIGTERM)
    wait_until(lambda: "asked to end" in log.read_text(), 30)
    assert (orderly.end(20), deaf.end(0.1)) == (7, -signal.SIGKILL)
    assert log.read_text().splitlines()[-1] == "saved: True"
    wait_until(lambda: not any(map(lives, pids)), 30)


ANSWERING = """
import os, sys
from pgtoolkit.system.child import channel_to_parent, stay_under_guard
channel = stay_under_guard() if len(sys.argv) > 1 else channel_to_parent()
print("standard output", [os.getsid(0) == os.getpid(), sys.stdin.read()])
print("standard error", file=sys.stderr)
for line in channel.makefile("r"):
    channel.sendall(f"{os.environ['NUMBER']} {line}".encode())
os._exit(4)
"""


@pytest.mark.parametrize("guarded", [(), ("under guard",)])
def test_a_child_has_its_own_session_its_log_and_its_channel(tmp_path, guarded):
    environment = {**os.environ, "NUMBER": "17"}
    log = tmp_path / "log"
    log.write_text("before\n")
    child = Child(python(ANSWERING, *guarded), environment, log)
    assert os.getsid(child.pid) == child.pid
    child.channel.sendall(b"one\ntwo\n")
    answers = child.channel.makefile("r")
    assert [answers.readline(), answers.readline()] == ["17 one\n", "17 two\n"]
    status = child.end(10)
    # A guard may end the child before the child sees the end of its channel.
    assert status == 4 or (guarded and status == -signal.SIGKILL)
    assert sorted(log.read_text().splitlines()) == [
        "before",
        "standard error",
        f"standard output [{not guarded}, '']",
    ]


def test_a_quiet_child_writes_its_errors_to_the_log(tmp_path):
    child = Child(
        python("import sys; print('out'); print('error', file=sys.stderr)"),
        None,
        tmp_path / "log",
        True,
    )
    assert child.wait(30) == 0
    assert (tmp_path / "log").read_text() == "error\n"
    child.end()


def test_threads_that_end_a_child_together_close_its_connections_once():
    """A connection that two threads close raises in one of them, or closes another's file."""
    children = [Child(["true"]) for _ in range(5)]
    connections = [child.connection() for child in children for _ in range(40)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for child in children:
            with ThreadPoolExecutor(8) as threads:
                assert [*threads.map(lambda _, c=child: c.end(5), range(8))] == [0] * 8
    finally:
        sys.setswitchinterval(interval)
    assert all(connection.closed for connection in connections)
