"""One job of a sweep, in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from omegaconf import DictConfig

from pgtoolkit.config.names import plain_config
from pgtoolkit.config.saved import typed
from pgtoolkit.errors import Interrupted, PgtoolkitError, unusable
from pgtoolkit.launch.processes import train_on_processes
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.launch.worker import Training
from pgtoolkit.ranks.environment import joined
from pgtoolkit.runs.directory import is_held
from pgtoolkit.runs.records import read_status
from pgtoolkit.system.report import print_error, say, shortest_path

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


def run_file(file: Path) -> int:
    """Run the job that the launcher wrote into a file; returns the exit status."""
    job = json.loads(file.read_text())
    sys.argv = job["command"]  # what provenance.json names
    try:
        run(typed(job["config"], str(file)), Path(job["directory"]), job["overrides"], job["sweep"])
    except (PgtoolkitError, OSError) as error:
        return print_error(unusable(error) if isinstance(error, OSError) else error)
    except KeyboardInterrupt:
        return Interrupted.exit_status
    return 0
