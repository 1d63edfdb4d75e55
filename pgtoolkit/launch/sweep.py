"""A run with the findings of its checks and its status, and a sweep with its files sweep.json and
sweep.jsonl."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.assembly.continuing import going_on_command
from pgtoolkit.config.keys import OPTION_KEYS, OWN_CODE, default, shown
from pgtoolkit.config.names import changed, digest, plain_config
from pgtoolkit.config.own_code import chosen, short_name
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.saved import fixed_keys
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.directory import is_held, lock
from pgtoolkit.runs.records import leaves, read_config, read_status, read_sweep, storage
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import Report, free_path, shell_path, text

if TYPE_CHECKING:  # which load Hydra, and the ranks of a run need none
    from pgtoolkit.config.compose import Composed
    from pgtoolkit.config.sweeps import SweepConfig


@dataclass
class PlannedRun:
    """A run, alone or as a job of a sweep: the findings of its checks, and how far it has come.

    overrides: as they were typed for it.
    composed: its configuration, as the rules leave it, with its name and directory.
    report: the problems and notes of all checks, those of `composed` included.
    refused_anywhere: True if it has problems on every machine, not only on this one.
    status: of a job: pending, running, done, failed, interrupted, or pruned: stopped early by a
        search.
    reason: why it failed or was interrupted.
    step: the last step that is saved.
    seconds: time spent so far.
    """

    overrides: list[str]
    composed: Composed
    report: Report
    refused_anywhere: bool = False
    status: str = "pending"
    reason: str | None = None
    step: int = 0
    seconds: float = 0.0

    @property
    def config(self) -> Config:
        """Return the configuration, of a run for which one could be composed."""
        assert self.composed.config is not None
        return self.composed.config

    @property
    def named_config(self) -> Config:
        """Return the configuration that the run begins with: with its name, and absolute paths."""
        return absolute_paths(with_values(self.config, {"tracking.run_name": self.composed.name}))

    @property
    def directory(self) -> str:
        """Return the run directory, of a job relative to the sweep's folder, where it is its name.

        Only a run whose directory could be composed has one.
        """
        assert self.composed.directory is not None
        return self.composed.directory

    @property
    def row(self) -> dict[str, object]:
        """Return the entry of a job in sweep.json."""
        return {
            "name": self.directory,
            "log": self.log,
            "directory": self.directory,
            "overrides": self.composed.overrides,
            "status": self.status,
            "reason": self.reason,
            "step": self.step,
            "seconds": self.seconds,
        }

    @property
    def log(self) -> str:
        """Return the file with the output of its process, relative to the sweep's folder."""
        return f"{self.directory}/output.log"

    def update_from(self, folder: Path) -> None:
        """Read status, reason and step from the run directory of a job.

        folder: the sweep's.
        Raises PgtoolkitError if a run of another configuration lies there.
        """
        directory = folder / self.directory
        self.status = "pending"
        self.reason = None
        self.step = 0
        if (directory / "config.yaml").is_file():
            refuse_another(directory, plain_config(self.named_config))
            status = read_status(directory)
            self.status = status.get("state", "interrupted")
            self.reason = status.get("reason")
            self.step = status.get("saved", status.get("step", 0))
        if is_held(directory):
            self.status = "running"
            self.reason = None
        elif self.status == "running":
            self.status = "interrupted"
            self.reason = "its process was killed"


def refuse_another(directory: Path, config: dict) -> None:
    """Raise ConfigError if a run of another configuration has begun in the directory.

    Relative paths of that run start in the current directory.
    """
    changes = {}
    saved = read_config(directory)[0]
    for key, (before, now) in changed(saved, config).items():
        if not isinstance(before, str) or str(Path.cwd() / before) != now:
            changes[key] = (before, now)
    if not changes:
        return
    key, (before, now) = next(iter(changes.items()))
    group = key.partition(".")[0]
    if group in OWN_CODE and key in (OPTION_KEYS[group], OWN_CODE[group].name):
        options = chosen(dict(leaves(saved)), group), chosen(dict(leaves(config)), group)
        if options[0] != options[1]:
            key = OPTION_KEYS[group]
            before, now = options
    use = "another directory"
    if (directory.parent / "sweep.json").is_file():
        folder = shell_path(free_path(str(directory.parent)))
        use = f"hydra.sweep.dir={folder} to train all of this sweep there"
    made = read_status(directory).get("step", 0)
    steps = changes.get("trainer.max_steps", (0, made))[1]
    if steps < made:
        use += f", or move {shell_path(directory)} to another folder to train this run anew"
    elif changes.keys().isdisjoint(fixed.name for fixed in fixed_keys(config)):
        use += f", or {going_on_command(directory, _as_typed(changes, config))}"
    raise ConfigError(
        f"{directory} needs to be free for this run (got one with {shown(short_name(key))}="
        f"{text(before)}, not {text(now)}). A run is continued as it was. Use {use}."
    )


def _as_typed(changes: dict[str, tuple], config: dict) -> dict[str, object]:
    """Return the new values of keys, without those that follow from another option of a group."""
    return {
        key: now
        for key, (_, now) in changes.items()
        if OPTION_KEYS.get(key.rpartition(".")[0], key) not in {*changes} - {key}
        or now != default(config, key)
    }


@dataclass
class Sweep:
    """A sweep that was checked: its runs, and its folder with the jobs of one command.

    config: the configuration of the sweep as a whole.
    command: the words that were typed.
    report: problems and notes that concern all runs together, those of `config` included.
    has_folder: whether the folder is known and can be written.
    runs: those that would be trained; of a search, the corners of its space.
    jobs: the first run of each configuration, by its directory in the folder.
    earlier: entries that sweep.json had before, also of jobs of other commands.
    announced: the code of the user's own that was announced.
    """

    config: SweepConfig
    command: list[str]
    report: Report = field(default_factory=Report)
    has_folder: bool = False
    runs: list[PlannedRun] = field(default_factory=list)
    jobs: dict[str, PlannedRun] = field(default_factory=dict)
    earlier: dict[str, dict] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        """Return the folder of sweep.json and of the jobs' run directories, where it is known."""
        assert self.config.folder is not None
        return self.config.folder

    @property
    def name(self) -> str:
        return self.folder.name

    def job_of(self, run: PlannedRun) -> PlannedRun | None:
        """Return the job of a run's configuration; None if problems keep it from being one."""
        if run.report.problems or run.composed.directory is None:
            return None
        return self.jobs.get(run.directory)

    def directory_of(self, run: PlannedRun) -> str:
        """Return the directory of a run in the folder, that of an earlier job where one had it."""
        if (self.folder / run.directory).exists():
            return run.directory
        # A sweep over other keys gave the same configuration another name.
        return self._by_digest.get(digest(plain_config(run.config)), run.directory)

    @functools.cached_property
    def _by_digest(self) -> dict[str, str]:
        """Return the directories by the digest at the end of their names, listed once."""
        names = sorted(path.name for path in self.folder.glob("*-????????"))
        return {name[-8:]: name for name in reversed(names)}

    def save(self) -> None:
        """Write sweep.json in one piece, with the entries of all jobs."""
        rows = self.earlier | {job.directory: job.row for job in self.jobs.values()}
        content = {"name": self.name, "command": self.command, "jobs": list(rows.values())}
        path = self.folder / "sweep.json"
        with storage(path):
            write_atomically(path, json.dumps(content, indent=1) + "\n")
            path.with_suffix(".jsonl").unlink(missing_ok=True)

    def add(self, *jobs: PlannedRun) -> None:
        """Append the new entries of these jobs to sweep.jsonl, which `read_sweep` reads as well."""
        path = self.folder / "sweep.jsonl"
        with storage(path), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(job.row) + "\n" for job in jobs))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other launchers out of it inside the block."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = lock(
                self.folder,
                "sweep",
                "Two would start every job twice.",
                "use another hydra.sweep.dir",
            )
        except OSError as error:
            raise StorageError(
                f"the sweep's folder {self.folder} cannot be made: {error.strerror or error}. "
                "Choose another with hydra.sweep.dir=..."
            ) from error
        with file:
            self.earlier = {
                row["directory"]: row for row in read_sweep(self.folder).get("jobs", [])
            }
            yield
