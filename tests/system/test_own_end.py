"""Code of the user cannot end the process in silence, and leaves nothing that its end waits for."""

import subprocess
import sys
import time

import pytest

BEGINNING = """
import ctypes, os, sys, threading, time
from pgtoolkit.system.own_end import OwnEnd, end, refuse_silent_ends
refuse_silent_ends()
"""

CASES = {
    # The program after BEGINNING: its status, and what it prints.
    "os._exit(0)": (1, "OwnEnd: os._exit(0) would end the process in silence"),
    "os.execv('/bin/true', ['true'])": (1, "OwnEnd: os.execv('/bin/true', ['true']) would end"),
    "os.execlp('true', 'true')": (1, "OwnEnd: os.execv("),
    "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(9)": (
        1,
        "a thread of your code has called os._exit(0)",
    ),
    "ctypes.CDLL(None).exit(0)": (-6, "Fatal Python error: Aborted"),
    "if os.fork() == 0: os._exit(0)\nend(os.wait()[1])": (0, ""),
    "if os.fork() == 0: sys.exit(0)\nend(os.wait()[1])": (0, ""),
    "sys.exit(0)": (0, ""),
    "threading.Thread(target=time.sleep, args=(300,)).start(); end(3)": (3, ""),
    "from concurrent.futures import *; ThreadPoolExecutor().submit(time.sleep, 300); end(0)": (
        0,
        "",
    ),
    "from concurrent.futures import *; print(ThreadPoolExecutor().submit(abs, -3)); end(0)": (
        0,
        "returned int",
    ),
}


@pytest.mark.parametrize("program", CASES)
def test_only_pgtoolkit_ends_the_process(program):
    status, printed = CASES[program]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert printed in done.stdout + done.stderr
    assert time.monotonic() - started < 100
