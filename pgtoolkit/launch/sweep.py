"""A sweep's folder: its jobs, what became of them, and the files sweep.json and sweep.jsonl that say so."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from pgtoolkit.config.compose import name_directories
from pgtoolkit.config.keys import shown
from pgtoolkit.config.names import changed, digest, name_in, plain_values
from pgtoolkit.config.paths import make_absolute
from pgtoolkit.config.saved import fixed_keys
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.directory import is_held, lock
from pgtoolkit.runs.records import read_config, read_status, read_sweep, storage
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import shell_path, text

LOCAL = "hydra_plugins.pgtk_launcher.LocalLauncher"
"""The launcher whose jobs run on this machine."""


@dataclass
class Job:
    """One job. directory: its run directory, relative to the sweep's folder, which is its name, too.

    values: the configuration as it was checked. run_name: what the run is called.
    status: pending, running, done, failed or interrupted. seconds: spent so far.
    """

    directory: str
    overrides: list[str]
    values: Config
    run_name: str | None = None
    status: str = "pending"
    reason: str | None = None
    step: int = 0
    seconds: float = 0.0

    @property
    def config(self) -> dict:
        """The resolved configuration in plain types, whose files are the same from every directory."""
        config = plain_values(self.values)
        config["tracking"]["run_name"] = self.run_name
        make_absolute(config)
        return config

    @property
    def row(self) -> dict:
        """Its entry of sweep.json."""
        row = {name: value for name, value in vars(self).items() if name not in ("values", "run_name")}
        return {"name": self.directory, "log": self.log} | row

    @property
    def log(self) -> str:
        """The file with what its process printed, relative to the sweep's folder."""
        return f"{self.directory}/output.log"

    def update_from(self, folder: Path) -> None:
        """Take over what the run directory says; raises PgtoolkitError if another configuration lies there."""
        directory = folder / self.directory
        self.status, self.reason, self.step = "pending", None, 0
        if (directory / "config.yaml").is_file():
            refuse_another(directory, self.config)
            status = read_status(directory)
            self.status, self.reason = status.get("state", "interrupted"), status.get("reason")
            self.step = status.get("step", 0)
        if is_held(directory):
            self.status, self.reason = "running", None
        elif self.status == "running":
            self.status, self.reason = "interrupted", "its process was killed"


def refuse_another(directory: Path, config: dict) -> None:
    """ConfigError if a run of another configuration has begun in a job's directory. Relative paths start here."""
    for key, (before, now) in changed(read_config(directory)[0], config).items():
        if isinstance(before, str) and str(Path.cwd() / before) == now:
            continue
        fixed = key in [one.name for one in fixed_keys(config)]
        resumed = "" if fixed else f", or pgtk resume {shell_path(directory)} {shown(key)}={text(now)}"
        raise ConfigError(
            f"{directory} needs to be free for this run (got one with {shown(key)}={text(before)}, not {text(now)}). "
            f"A run is continued as it was. Use another directory{resumed}."
        )


@dataclass
class Sweep:
    """folder: holds sweep.json and the jobs' run directories. command: what was typed.

    unnamed: keys that are the same in all jobs, and therefore in no job's name. jobs: of this command, by their
    directories. earlier: what sweep.json said of jobs before, those of other commands among them.
    """

    folder: Path
    command: list[str]
    unnamed: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    earlier: dict[str, dict] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    def plan(self, config: DictConfig, values: Config, number: int) -> Job:
        """The job of a configuration, as composed (with its node `hydra`) and resolved; not among `jobs` yet."""
        hydra, known = config.hydra, digest(plain_values(values))
        with open_dict(hydra):
            hydra.job.num, hydra.job.id = number, str(number)
        hydra.job.config.override_dirname.exclude_keys = list(self.unnamed)
        name = name_in(hydra, values.tracking.run_name)
        directory = hydra.sweep._get_node("subdir")._value()
        for resolver, value in (("${pgtk.run_name:}", name), ("${pgtk.digest:}", known)):
            directory = directory.replace(resolver, value)
        if "${" in directory:
            hydra.mode, hydra.sweep.dir = RunMode.MULTIRUN, str(self.folder)
            name_directories(hydra, self.unnamed)
            directory = str(hydra.sweep.subdir)
        directory = os.path.normpath(directory)
        if not (self.folder / directory).exists():
            # Where something else varied, the same configuration had another name.
            directory = self._by_digest.get(known, directory)
        return Job(directory, list(hydra.overrides.task), values, name)

    @functools.cached_property
    def _by_digest(self) -> dict[str, str]:
        """Digest -> the directory in this folder whose name ends with it, as it was when a job was first looked for."""
        names = sorted(path.name for path in self.folder.glob("*-????????"))
        return {name[-8:]: name for name in reversed(names)}

    def save(self) -> None:
        """Write sweep.json in one piece."""
        jobs = [*(self.earlier | {job.directory: job.row for job in self.jobs.values()}).values()]
        content = {"name": self.name, "command": self.command, "jobs": jobs}
        with storage(path := self.folder / "sweep.json"):
            write_atomically(path, json.dumps(content, indent=1) + "\n")
            path.with_suffix(".jsonl").unlink(missing_ok=True)

    def add(self, *jobs: Job) -> None:
        """Write down what became of jobs since, without the others: see `read_sweep`."""
        with storage(path := self.folder / "sweep.jsonl"), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(job.row) + "\n" for job in jobs))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other launchers out of it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = lock(self.folder, "sweep", "Two would start every job twice.", "use another hydra.sweep.dir")
        except OSError as error:
            raise StorageError(
                f"the sweep's folder {self.folder} cannot be made: {error.strerror or error}. "
                "Choose another with hydra.sweep.dir=..."
            ) from error
        with file:
            self.earlier = {row["directory"]: row for row in read_sweep(self.folder).get("jobs", [])}
            yield
