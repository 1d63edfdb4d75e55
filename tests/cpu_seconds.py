"""What the tests cost: CPU seconds by folder, of pytest's processes and of those that they started.

`pytest --cpu-seconds=GOAL` prints a table at the end, with the goal beside the sum.
"""

import os
from collections import Counter
from multiprocessing import forkserver

import psutil
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
    """Return the CPU seconds of this process, of its children that have ended, and of the server
    that forks processes for tests, with those of its processes that have ended."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    server = forkserver._forkserver._forkserver_pid
    if server is not None:
        seconds += sum(psutil.Process(server).cpu_times()[:4])
    return seconds


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
