"""A sweep's folder: its jobs, what became of them, and the files sweep.json and sweep.jsonl that
say so."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pgtoolkit.config.key import with_values
from pgtoolkit.config.keys import shown
from pgtoolkit.config.names import changed, plain_config
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.saved import fixed_keys
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.directory import is_held, lock
from pgtoolkit.runs.records import read_config, read_status, read_sweep, storage
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import shell_path, text


@dataclass
class Job:
    """One job. directory: its run directory, relative to the sweep's folder, which is its name,
    too.

    checked: the configuration as it was checked. run_name: what the run is called.
    status: pending, running, done, failed or interrupted. seconds: spent so far.
    """

    directory: str
    overrides: list[str]
    checked: Config
    run_name: str | None = None
    status: str = "pending"
    reason: str | None = None
    step: int = 0
    seconds: float = 0.0

    @property
    def config(self) -> Config:
        """The configuration as the run begins with it: with its name, and paths that mean the same
        from everywhere."""
        return absolute_paths(with_values(self.checked, {"tracking.run_name": self.run_name}))

    @property
    def row(self) -> dict:
        """Its entry of sweep.json."""
        row = {
            name: value for name, value in vars(self).items() if name not in ("checked", "run_name")
        }
        return {"name": self.directory, "log": self.log} | row

    @property
    def log(self) -> str:
        """The file with what its process printed, relative to the sweep's folder."""
        return f"{self.directory}/output.log"

    def update_from(self, folder: Path) -> None:
        """Take over what the run directory says; raises PgtoolkitError if another configuration
        lies there."""
        directory = folder / self.directory
        self.status, self.reason, self.step = "pending", None, 0
        if (directory / "config.yaml").is_file():
            refuse_another(directory, plain_config(self.config))
            status = read_status(directory)
            self.status, self.reason = status.get("state", "interrupted"), status.get("reason")
            self.step = status.get("step", 0)
        if is_held(directory):
            self.status, self.reason = "running", None
        elif self.status == "running":
            self.status, self.reason = "interrupted", "its process was killed"


def refuse_another(directory: Path, config: dict) -> None:
    """ConfigError if a run of another configuration has begun in a job's directory. Relative paths
    start here."""
    for key, (before, now) in changed(read_config(directory)[0], config).items():
        if isinstance(before, str) and str(Path.cwd() / before) == now:
            continue
        fixed = key in [one.name for one in fixed_keys(config)]
        resumed = (
            "" if fixed else f", or pgtk resume {shell_path(directory)} {shown(key)}={text(now)}"
        )
        raise ConfigError(
            f"{directory} needs to be free for this run (got one with {shown(key)}={text(before)}, "
            f"not {text(now)}). A run is continued as it was. Use another directory{resumed}."
        )


@dataclass
class Sweep:
    """folder: holds sweep.json and the jobs' run directories. command: what was typed.

    jobs: of this command, by their directories.
    earlier: what sweep.json said of jobs before, those of other commands among them.
    """

    folder: Path
    command: list[str]
    jobs: dict[str, Job] = field(default_factory=dict)
    earlier: dict[str, dict] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    def plan(
        self, config: Config, overrides: list[str], run_name: str, directory: str, digest: str
    ) -> Job:
        """Return the job of a configuration, which is not among `jobs` yet.

        directory: where it belongs by its name. digest: of the configuration.
        """
        if not (self.folder / directory).exists():
            # Where something else varied, the same configuration had another name.
            directory = self._by_digest.get(digest, directory)
        return Job(directory, overrides, config, run_name)

    @functools.cached_property
    def _by_digest(self) -> dict[str, str]:
        """Digest -> the directory in this folder whose name ends with it, as it was when a job was
        first looked for."""
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
