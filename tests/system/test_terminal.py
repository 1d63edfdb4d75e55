"""What reaches a terminal that cannot show everything, is closed, is full, or is no longer read."""

import os
import shlex
import subprocess
import sys

import pytest

PREPARED = """
import logging, sys, warnings
from pgtoolkit.system.report import say
from pgtoolkit.system.terminal import Terminal, flush_streams, prepare_streams, status_of_output
prepare_streams()
log = logging.getLogger("x")
log.addHandler(Terminal())
"""


def output_of(script: str, redirection: str = "", **environment: str) -> tuple[str, str, int]:
    """Return standard output, standard error and status of a process that runs a script."""
    command = (
        f"{shlex.join([sys.executable, '-c', PREPARED + script])} {redirection}; exit "
        f"${{PIPESTATUS[0]}}"
    )
    process = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return process.stdout.decode("latin-1"), process.stderr.decode("latin-1"), process.returncode


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["latin-1", "C"],
)
def test_a_character_that_the_encoding_lacks_is_a_question_mark(environment):
    script = (
        r"say('a \u2581\u2588 b'); log.warning('c \u2581 d'); print('e \u2581 f'); say('g "
        r"\u2581 h', error=True)"
    )
    out, err, status = output_of(script, **environment)
    assert (out, err, status) == ("a ?? b\nc ? d\ne ? f\n", "g ? h\n", 0)


@pytest.mark.parametrize(
    ("redirection", "out", "err"),
    [
        ("| head -n 1", "line 0\n", ""),
        (">&-", "", ""),
        (
            "> /dev/full",
            "",
            "pgtk: warning: standard output cannot be written: No space left on device\n",
        ),
        (">&- 2>&-", "", ""),
    ],
)
def test_a_command_goes_on_when_a_stream_is_gone(redirection, out, err):
    """No traceback for a line, none at the end of Python, and no other status."""
    script = (
        "[log.warning('line %d', i) for i in range(20000)]; print('from a library'); "
        "flush_streams()"
    )
    assert output_of(script, redirection) == (out, err, 0)


def test_a_closed_stream_writes_to_no_other_file(tmp_path):
    output_of(f"file = open({str(tmp_path / 'data')!r}, 'w'); say('stray'); file.close()", ">&-")
    assert (tmp_path / "data").read_text() == ""


@pytest.mark.parametrize(("redirection", "status"), [("", 3), ("> /dev/full", 6), (">&-", 3)])
def test_the_status_of_a_command_tells_that_its_output_was_lost(redirection, status):
    assert output_of("say('page'); sys.exit(status_of_output(3))", redirection)[2] == status


def test_escape_sequences_in_a_warning_of_a_library_do_not_reach_the_terminal():
    _, err, _ = output_of("warnings.warn('Glyph 27 (\\x1b[31m) is missing')")
    assert "Glyph 27 (<U+001B>[31m) is missing" in err
    assert "\x1b" not in err
