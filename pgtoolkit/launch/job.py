"""One job of a sweep, in a process of its own: `python -m pgtoolkit.launch.job FILE`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from omegaconf import DictConfig

from pgtoolkit.config.names import plain_config
from pgtoolkit.config.saved import typed
from pgtoolkit.errors import Interrupted, PgtoolkitError, unusable
from pgtoolkit.launch.processes import train_on_processes
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.launch.worker import Training
from pgtoolkit.ranks.environment import joined, world_size
from pgtoolkit.runs.directory import is_held, read_status
from pgtoolkit.system.report import print_error, say
from pgtoolkit.system.shell import shortest_path
from pgtoolkit.tracking.signals import STOP_SIGNALS

_SECONDS_TO_BECOME_FREE = 600
"""For a process whose launcher was killed, which finishes its step and saves."""


def run(config: DictConfig, directory: Path, overrides: list[str], sweep: str | None = None) -> None:
    """Train in the directory: from its newest checkpoint if a run was begun there before; nothing if it is done."""
    wait_until_free(directory)
    if begun := (directory / "config.yaml").is_file():
        refuse_another(directory, plain_config(config))
        if read_status(directory).get("state") == "done":
            say(f"{shortest_path(directory)} is done: nothing is left to train")
            return
    train_on_processes(Training(config, directory, begun, overrides, sweep))


def wait_until_free(directory: Path) -> None:
    """Another process may still hold the directory; one that does not let go is named when training begins."""
    if joined() is not None or not is_held(directory):
        return  # of several ranks another one may hold it already
    say(f"waiting for another process that still runs {shortest_path(directory)}")
    end = time.monotonic() + _SECONDS_TO_BECOME_FREE
    while is_held(directory) and time.monotonic() < end:
        time.sleep(0.2)


def main(argv: list[str]) -> int:
    """Run the job that the launcher wrote into a file; returns the exit status."""
    for number in STOP_SIGNALS:
        signal.signal(number, _leave)
    threading.Thread(target=_stop_with_launcher, daemon=True).start()
    job = json.loads(Path(argv[0]).read_text())
    sys.argv = job["command"]  # what provenance.json names
    try:
        config = typed(job["config"], argv[0])
        # The imports of training take seconds; an exception amid them, such as a signal's, breaks modules.
        alone = world_size(config.parallelism) == 1
        importlib.import_module("pgtoolkit.training.train" if alone else "torch.distributed")
        run(config, Path(job["directory"]), job["overrides"], job["sweep"])
    except (PgtoolkitError, OSError) as error:
        return print_error(unusable(error) if isinstance(error, OSError) else error)
    except KeyboardInterrupt:
        return Interrupted.exit_status
    return 0


def _leave(number, frame):
    # Nothing has begun that would have to be saved.
    os._exit(Interrupted.exit_status)


def _stop_with_launcher():
    """Stop in an orderly way when the launcher ends, even if it was killed: the pipe to it closes then."""
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
