"""The command of a new run like one that was made before."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.config.files import sweep_files
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import known_provenance, read_config, read_status
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import key_of, shortest_path
from pgtoolkit.tracking.next_commands import pgtk_command


def new_run_command(run_dir: str | Path, changes: Sequence[str]) -> str:
    """Return the command of a new run like this one, with other overrides.

    Those that they replace are left out, and so are the run's name and the folder of its recorded
    rollouts, which is occupied now. For a job of a sweep's file it is that sweep with the values of
    the job, since only the file has what all of its jobs share.
    """
    run_dir = Path(run_dir)
    sweep, end = sweep_of_file(run_dir)
    if sweep and is_value_left_out(run_dir, changes):
        sweep.append(WITHOUT_VALUES)
    flag = own_options_flag(known_provenance(_first_of(run_dir)))
    return pgtk_command(*sweep, *flag, *new_run_overrides(run_dir, changes), *end)


WITHOUT_VALUES = "hydra.sweeper.params=null"
"""Leaves out the values that a sweep's file goes through: those that are typed are all."""


def new_run_overrides(run_dir: Path, changes: Sequence[str]) -> list[str]:
    """Return the overrides of `new_run_command`."""
    _, overrides = read_config(run_dir)
    return [*changes, *(each for each in overrides if not _is_left_out(each, changes))]


def is_value_left_out(run_dir: Path, changes: Sequence[str]) -> bool:
    """Return whether a key of a run has no value in `new_run_overrides`."""
    _, overrides = read_config(run_dir)
    changed = {key_of(override) for override in changes}
    return any(_is_left_out(each, changes) and key_of(each) not in changed for each in overrides)


def _is_left_out(override: str, changes: Sequence[str]) -> bool:
    left_out = {key_of(change) for change in changes} | {"rollout.save_path", "tracking.run_name"}
    key = key_of(override)
    return key in left_out or key.partition(".")[0] in left_out


def own_options_flag(provenance: JsonObject) -> list[str]:
    """Return the flag that names the folder with the user's own options, if the run of this
    provenance was started with one."""
    folder, _ = _started_with(provenance)
    if not folder:
        return []
    return [f"--config-dir={shortest_path(Path(provenance.get('directory', ''), folder))}"]


def sweep_of_file(run_dir: Path) -> tuple[list[str], list[str]]:
    """Return the words before and after the overrides of a job that a sweep's file describes; none
    for another run."""
    first = _first_of(run_dir)
    provenance = known_provenance(first)
    _, words = _started_with(provenance)
    if len(words) < 2 or words[0] != "sweep":
        return [], []
    file = sweep_files().get(words[1]) or Path(provenance.get("directory", ""), words[1])
    name = words[1] if words[1] in sweep_files() else shortest_path(file)
    end = []
    searches = any("optuna_search" in word for word in words)
    if not searches and file.is_file():
        searches = b"optuna_search" in file.read_bytes()
    if searches:
        end.append("hydra/sweeper=basic")
    if (first.parent / "sweep.json").is_file():
        end.append(f"hydra.sweep.dir={shortest_path(first.parent)}")
    return ["sweep", name], end


def _first_of(run_dir: Path) -> Path:
    """Return the run that a run goes on from, if it is a branch, and that one from, and so on, as
    far as their files can be read."""
    with contextlib.suppress(StorageError):
        parent = read_status(run_dir).get("parent")
        while parent:
            run_dir = Path(parent.rpartition(", step ")[0])
            parent = read_status(run_dir).get("parent")
    return run_dir


def _started_with(provenance: JsonObject) -> tuple[str | None, list[str]]:
    """Return the folder with the user's own options, and the other words of a run's command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    arguments, words = parser.parse_known_args(provenance.get("command", [])[1:])
    return arguments.config_dir, words
