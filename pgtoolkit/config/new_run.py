"""The command of a new run like one that was made before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.runs.records import known_provenance, read_config
from pgtoolkit.system.report import key_of, shortest_path
from pgtoolkit.tracking.next_commands import pgtk_command


def new_run_command(run_dir: str | Path, changes: Sequence[str]) -> str:
    """Return the command of a new run like this one, with other overrides.

    Those that they replace are left out, and so are the run's name and the folder of its recorded
    rollouts, which is occupied now.
    """
    _, overrides = read_config(run_dir)
    left_out = {key_of(change) for change in changes} | {"rollout.save_path", "tracking.run_name"}
    arguments = [*changes]
    for override in overrides:
        key = key_of(override)
        if key not in left_out and key.partition(".")[0] not in left_out:
            arguments.append(override)
    return pgtk_command(*with_own_options(run_dir), *arguments)


def with_own_options(run_dir: str | Path) -> list[str]:
    """Return the flag that names the folder with the user's own options, if the run was started
    with one."""
    provenance = known_provenance(Path(run_dir))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    arguments, _ = parser.parse_known_args(provenance.get("command", [])[1:])
    if not arguments.config_dir:
        return []
    folder = Path(provenance.get("directory", ""), arguments.config_dir)
    return [f"--config-dir={shortest_path(folder)}"]
