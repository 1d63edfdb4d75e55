"""Verifiers for the tests: well-behaved ones and ones with faults.

Their processes import this file: it imports nothing large.
"""

import ctypes
import os
import subprocess
import sys
import time


def right(completion: str, answer: str) -> bool:
    return completion == answer


def length(completion: str, answer: str) -> int:
    return len(completion)


def sometimes(completion: str, answer: str) -> float | None:
    """Return no score for a completion that begins with a 2."""
    return None if completion.startswith("2") else len(completion) - 5.0


def silent(completion: str, answer: str) -> None:
    return None


def block() -> None:
    """Wait in C without end, with the interpreter's lock held, so that no signal handler and no
    other thread runs.

    It locks a mutex twice, since a signal would end a sleep.
    """
    mutex = ctypes.create_string_buffer(64)  # of zeros, as PTHREAD_MUTEX_INITIALIZER
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


is_warm = False


def scripted(completion: str, answer: str) -> float | None:
    """Execute the completion: a verb, and its argument."""
    global is_warm
    verb, _, rest = completion.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
    elif verb == "cold":  # The first call of a process is slow.
        time.sleep(0 if is_warm else float(rest))
    elif verb == "none":
        return None
    elif verb == "nan":
        return float("nan")
    elif verb == "block":
        block()
    elif verb == "crash":
        ctypes.string_at(0)
    elif verb == "exit":
        os._exit(int(rest))
    elif verb == "fork":  # Two processes return.
        os.fork()
        return float(rest)
    elif verb == "quit":
        sys.exit(rest)
    elif verb == "raise":
        raise ValueError(rest)
    elif verb == "child":
        # A child process outlives a verifier that is killed alone.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(rest, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        block()
    elif verb == "leave":
        # A process in a new session, whose parent has ended.
        started = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
        with open(rest, "w") as file:
            file.write(subprocess.run(["sh", "-c", started], capture_output=True, text=True).stdout)
    elif verb == "modules":
        large = ("torch", "numpy", "pyarrow", "omegaconf", "transformers")
        return sum(name in sys.modules for name in large)
    elif verb == "pid":
        return os.getpid()
    is_warm = True
    return 1.0
