"""What the tests cost: CPU seconds by folder, of pytest's processes and of those that they started.

`pytest --cpu-seconds=GOAL` prints a table at the end, with the goal beside the sum; the goals stand
in the Makefile. Counted is, from the setup of each test to its teardown, the time of pytest's
processes, of their children that have ended, and of the processes that tests share: the server that
forks and the ranks, each with the test that uses it. Not counted are pytest's own start, the
collection of the tests, and children of others that were killed.
"""

import os
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest

STARTED = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-seconds",
        type=int,
        metavar="GOAL",
        help="print the CPU seconds of the tests by folder, beside this goal",
    )


def pytest_configure(config):
    if config.getoption("cpu_seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(config.getoption("cpu_seconds")))


def spent() -> float:
    """Return the CPU seconds of this process and of its children that have ended, and those of the
    server that forks processes for tests, and of its processes, those that still run included."""
    seconds = sum(os.times()[:4])
    server = forkserver._forkserver._forkserver_pid
    if server is not None:
        running = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        seconds += sum(map(_spent_by, [server, *running]))
    return seconds


def _spent_by(pid: int | str) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended, and its parent knows its time
        return 0.0
    ticks = state.rpartition(b")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def pytest_runtest_setup(item):
    item.stash[STARTED] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and STARTED in item.stash:
        report.user_properties.append(("cpu_seconds", spent() - item.stash[STARTED]))
    return report


class Table:
    """Adds up what each test reports, also from workers, and prints the sums at the end."""

    def __init__(self, goal: int):
        self.goal = goal
        self.tests = Counter()
        self.seconds = Counter()

    def pytest_runtest_logreport(self, report):
        seconds = dict(report.user_properties).get("cpu_seconds")
        if seconds is None:
            return
        path = report.nodeid.split("::")[0]
        folder = os.path.dirname(path)
        self.tests[folder] += 1
        self.seconds[folder] += seconds

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("CPU seconds")
        for folder, seconds in self.seconds.most_common():
            terminalreporter.line(f"{folder:20} {self.tests[folder]:6} tests {seconds:8.0f} s")
        tests = self.tests.total()
        seconds = self.seconds.total()
        terminalreporter.line(f"{'all':20} {tests:6} tests {seconds:8.0f} s, goal {self.goal} s")
