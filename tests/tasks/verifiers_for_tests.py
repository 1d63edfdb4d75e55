"""Verifiers that behave in the ways that verifiers do; imported by their processes, so nothing
large."""

import ctypes
import os
import subprocess
import sys
import time


def right(completion, answer):
    return completion == answer


def length(completion, answer):
    return len(completion)


def sometimes(completion, answer):
    """No score for a completion that begins with a 2."""
    return None if completion.startswith("2") else len(completion) - 5.0


def silent(completion, answer):
    return None


is_warm = False


def scripted(completion, answer):
    """Does what the completion says."""
    global is_warm
    verb, _, rest = completion.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
    elif verb == "cold":  # the first call of a process takes its time
        time.sleep(0 if is_warm else float(rest))
    elif verb == "none":
        return None
    elif verb == "nan":
        return float("nan")
    elif (
        verb == "spin"
    ):  # in C, holding the interpreter's lock: no signal handler and no thread of Python's runs
        sum(range(10**12))
    elif verb == "crash":
        ctypes.string_at(0)
    elif verb == "exit":
        os._exit(int(rest))
    elif verb == "fork":  # two processes go on from here
        os.fork()
        return float(rest)
    elif verb == "quit":
        sys.exit(rest)
    elif verb == "raise":
        raise ValueError(rest)
    elif verb == "child":  # a process of its own, which outlives a verifier that is killed alone
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(rest, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        sum(range(10**12))
    elif verb == "leave":  # a process behind, in a session of its own, whose parent has ended
        started = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
        with open(rest, "w") as file:
            file.write(subprocess.run(["sh", "-c", started], capture_output=True, text=True).stdout)
    elif verb == "modules":
        return sum(
            name in sys.modules
            for name in ("torch", "numpy", "pyarrow", "omegaconf", "transformers")
        )
    elif verb == "pid":
        return os.getpid()
    is_warm = True
    return 1.0
