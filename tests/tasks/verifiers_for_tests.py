"""Verifiers that behave in the ways that verifiers do; imported by their processes, so nothing large."""

import ctypes
import os
import subprocess
import sys
import time


def right(completion, answer):
    return completion == answer


def length(completion, answer):
    return len(completion)


def scripted(completion, answer):
    """Does what the completion says."""
    verb, _, rest = completion.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
    elif verb == "spin":  # in C, holding the interpreter's lock: no signal handler and no thread of Python's runs
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
    elif verb == "leave":  # a process behind
        with open(rest, "w") as file:
            file.write(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
    elif verb == "modules":
        return sum(name in sys.modules for name in ("torch", "numpy", "pyarrow", "omegaconf", "transformers"))
    elif verb == "pid":
        return os.getpid()
    return 1.0
