"""One job of a sweep: a process of its own (`python -m pgtoolkit.launch.job FILE`), or in another launcher's."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pgtoolkit.config.names import name_in, plain_config
from pgtoolkit.config.paths import make_absolute
from pgtoolkit.config.saved import typed
from pgtoolkit.errors import Interrupted, PgtoolkitError, unusable
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.runs.directory import read_status
from pgtoolkit.system.report import print_error
from pgtoolkit.tracking.signals import stop_signals_recorded


def run(config: DictConfig, directory: Path, overrides: list[str], sweep: str) -> None:
    """Train the job in its directory: from its newest checkpoint if it was begun before; nothing if it is done."""
    if begun := (directory / "config.yaml").is_file():
        refuse_another(directory, plain_config(config))
    if begun and read_status(directory).get("state") == "done":
        return
    with stop_signals_recorded(config, directory, overrides, sweep):
        from pgtoolkit.launch.processes import Job, launch

        launch(Job(config, directory, begun, overrides, sweep))


def run_elsewhere(config: DictConfig) -> None:
    """The job that a launcher other than ours runs, such as SLURM's; its run directory says what became of it."""
    run_dir, overrides = named_by_hydra(config)
    try:
        run(config, run_dir, overrides, Path(HydraConfig.get().sweep.dir).name)
    except Interrupted as stop:
        # Ends a sweep too, whose launcher goes on after any other exception.
        raise SystemExit(print_error(stop)) from None
    except PgtoolkitError as error:
        print_error(error)


def named_by_hydra(config: DictConfig) -> tuple[Path, list[str]]:
    """Give the run that Hydra has begun its name and absolute paths; returns its directory and overrides."""
    hydra = HydraConfig.get()
    config.tracking.run_name = name_in(hydra, config.tracking.run_name)
    make_absolute(config)
    return Path(hydra.runtime.output_dir), list(hydra.overrides.task)


def main(argv: list[str]) -> int:
    """Run the job that the launcher wrote into a file; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
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
