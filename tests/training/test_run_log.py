"""No code of the user's that changes Python's logging or streams makes a run mute, and a disk that
does not take the log hides no error."""

import contextlib
import os
from pathlib import Path

import pytest
from builders.processes import ForkedProcess

from pgtoolkit.errors import StorageError
from pgtoolkit.training.run_log import log, logging_to

SCRIPT = """
import io, logging, logging.config, os, sys, warnings
from pathlib import Path
from pgtoolkit.system.report import say
from pgtoolkit.system.terminal import flush_streams, prepare_streams
from pgtoolkit.training.run_log import logging_to

class Failing(logging.Logger):
    def _log(self, *arguments, **keywords):
        raise RuntimeError

def close(*streams):
    for stream in streams:
        stream.close()

def set_streams(stream):
    sys.stdout = sys.stderr = stream

def for_each_logger(change):
    for name in list(logging.root.manager.loggerDict):
        change(logging.getLogger(name))

CHANGES = {
    "nothing": lambda: None,
    "dictConfig": lambda: logging.config.dictConfig({"version": 1}),
    "disable": lambda: logging.disable(logging.CRITICAL),
    "levels": lambda: for_each_logger(lambda logger: logger.setLevel(logging.CRITICAL)),
    "no handlers": lambda: for_each_logger(lambda logger: logger.handlers.clear()),
    "filters": lambda: for_each_logger(lambda logger: logger.addFilter(lambda record: False)),
    "basicConfig": lambda: logging.basicConfig(force=True, level=logging.CRITICAL),
    "logger class": lambda: logging.setLoggerClass(Failing),
    "records": lambda: logging.setLogRecordFactory(lambda *_, **__: 1 / 0),
    "shutdown": lambda: logging.shutdown(),
    "raiseExceptions": lambda: setattr(logging, "raiseExceptions", False),
    "another stream": lambda: set_streams(io.StringIO()),
    "no stream": lambda: set_streams(None),
    "closed stdout": lambda: close(sys.stdout),
    "closed stderr": lambda: close(sys.stderr),
    "all closed": lambda: close(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__),
}
# From Python 3.12 on a fork beside threads, of which PyTorch has some, is warned of.
warnings.simplefilter("ignore", DeprecationWarning)
for name, change in CHANGES.items():
    if os.fork() == 0:
        os.dup2(os.open(f"{name}.out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        prepare_streams()
        log = logging.getLogger("pgtoolkit")
        with logging_to(Path(f"{name}.log")):
            log.info("step 1")
            change()
            kept = open("kept", "w")  # it must not get the number of a stream
            log.info("step %d", 2)
            log.warning("note")
            say("said", error=True)
            os.write(1, b"written\\n")
        flush_streams()
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> tuple:
    """Return the folder in which each change of SCRIPT has left what it printed, and the statuses
    of their processes."""
    folder = tmp_path_factory.mktemp("changes")
    (folder / "script.py").write_text(SCRIPT)
    log = folder / "statuses"
    process = ForkedProcess([], folder, dict(os.environ), log, str(folder / "script.py"))
    assert process.wait(120) == 0, log.read_text()
    return folder, log.read_text().splitlines()


def test_no_change_of_logging_or_streams_makes_a_run_mute(outcomes):
    folder, statuses = outcomes
    assert len(statuses) == 16
    mute = []
    for line in statuses:
        name, _, status = line.rpartition(" ")
        printed = (folder / f"{name}.out").read_text()
        logged = (folder / f"{name}.log").read_text().splitlines()
        ends = [line.split(maxsplit=2)[2] for line in logged]
        if (
            status != "0"
            or printed != "step 1\nstep 2\nnote\nsaid\nwritten\n"
            or ends != ["INFO step 1", "INFO step 2", "WARNING note"]
        ):
            mute.append(name)
    assert mute == []
    assert (folder / "kept").read_text() == ""


def test_a_disk_that_takes_no_line_of_the_log_is_said_once_and_hides_no_error(capsys):
    real_error = StorageError("the real one")
    with contextlib.suppress(StorageError), logging_to(Path("/dev/full")):
        for number in range(3):
            log.info("step %d", number)
        raise real_error
    printed = capsys.readouterr()
    assert printed.out == "step 0\nstep 1\nstep 2\n"
    assert printed.err == "pgtk: warning: /dev/full lacks lines: No space left on device\n"
