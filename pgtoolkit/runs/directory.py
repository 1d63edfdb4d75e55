"""The run directory: configuration, status, metrics and provenance of one run, safe against a kill
at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import numbers
import os
import shlex
import socket
import time
import uuid
import zlib
from pathlib import Path
from typing import Any, TextIO

from pgtoolkit.errors import ConfigError, PgtoolkitError, StorageError
from pgtoolkit.runs import records
from pgtoolkit.runs.checksums import checksum
from pgtoolkit.runs.series import rows_until
from pgtoolkit.system.plain_files import naming, overwrite, write_atomically
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import key_of
from pgtoolkit.system.yaml_text import to_yaml

_log = logging.getLogger(__name__)

BELONGS_TO_A_RUN = ("config.yaml", "status.json", "metrics.jsonl", "checkpoints", "completions")
"""What lies in a directory only once a run has begun there."""


def occupied_by(run_dir: Path, more: tuple[str, ...] = ()) -> str | None:
    """What of a run, or of `more`, lies in this directory already; None where another one may
    begin."""
    return next(
        (name for name in (*BELONGS_TO_A_RUN, *more) if os.path.lexists(run_dir / name)), None
    )


def occupied(setting: str, run_dir: Path, by: str) -> str:
    """The refusal of a run in such a directory."""
    path = shlex.quote(str(run_dir))
    begun = (run_dir / "config.yaml").is_file()
    resume = (
        f"pgtk resume {path} to continue that run, pgtk continue {path} in a script that is "
        "repeated, or "
    )
    return (
        f"{setting} needs a directory without a run (got one with {by}). A second run would mix "
        "its configuration and metrics with the checkpoints of the first. Use "
        f"{resume if begun else ''}another directory."
    )


class RunDirectory:
    """One run's directory, held by one process at a time.

    Opening it takes an exclusive lock that the operating system drops when the process ends,
    however it ends.
    Files: config.yaml, overrides.yaml, drift.jsonl (after a resume that changed keys),
        provenance.json, data.json
    (digests of the data, by `record_data`), status.json, metrics.jsonl, evaluations.jsonl.

    new: a run begins, and no other has begun there.
    Raises ConfigError if another process holds the directory, or it is not new; StorageError if it
    cannot be written.
    """

    def __init__(self, path: str | Path, new: bool = False):
        self.path = Path(path).resolve()
        self.metrics_path = self.path / "metrics.jsonl"
        self.evaluations_path = self.path / "evaluations.jsonl"
        # checksums of the files of rows as this process left them
        self._written: dict[Path, dict[str, int]] = {}
        with records.storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            reason = "Two processes would mix their metrics and checkpoints."
            self._lock_file = lock(self.path, "run directory", reason, "train in another directory")
        if new and (by := occupied_by(self.path)):
            self.close()
            raise ConfigError(occupied(f"the run directory {self.path}", self.path, by))

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock. A second call does nothing."""
        if self._lock_file.closed:
            return
        # Closing alone would leave the lock with processes forked from this one, such as data
        # workers.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        self._lock_file.close()

    def write_config(self, resolved: dict, overrides: list[str], step: int = 0) -> dict[str, list]:
        """Write config.yaml and overrides.yaml; on a resume return what changed, {key: [old, new]}.

        The changes are also added to drift.jsonl, with the time and the step the run resumes at.
        Overrides of a resume are added to those of the first start; of two for one key the later
        stays, and another option of a group takes the place of the group's keys.
        """
        config_path = self.path / "config.yaml"
        resolved = records.plain(resolved)
        drift = {}
        if config_path.exists():
            old_config, old_overrides = records.read_config(self.path)
            drift = config_drift(old_config, resolved)
            given = {key_of(override) for override in overrides}
            kept = (
                old
                for old in old_overrides
                if not {key_of(old), key_of(old).partition(".")[0]} & given
            )
            overrides = [*kept, *overrides]
        if drift:
            with (self.path / "drift.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": _now(), "step": step, "changes": drift}) + "\n")
        write_atomically(self.path / "overrides.yaml", to_yaml(list(overrides)))
        write_atomically(config_path, to_yaml(resolved))  # last: it says that both are there
        return drift

    def write_provenance(self, provenance: dict) -> None:
        """Write provenance.json; that of a resume goes into the list `resumed` of the first."""
        if first := records.read_provenance(self.path):
            first.setdefault("resumed", []).append(provenance)
            provenance = first
        write_atomically(self.path / "provenance.json", json.dumps(provenance, indent=2) + "\n")

    def set_status(
        self,
        state: str,
        step: int,
        reason: str | None = None,
        mlflow: dict | None = None,
        sweep: str | None = None,
        saved: int | None = None,
        parent: str | None = None,
    ) -> None:
        """Replace status.json in one piece; metrics appended before are on the disk when it says
        so.

        state: one of STATES. step: optimizer steps done. Kept once given are mlflow:
            `MlflowTracker.info`; sweep: the
        name of the sweep that the run belongs to; saved: the step of the newest checkpoint; parent:
        the run that this one continues, and the step; and `id`, which a run shares with its copies
        alone.
        """
        before = records.read_status(self.path)
        status = {
            "id": before.get("id") or uuid.uuid4().hex,
            "state": state,
            "step": step,
            "reason": reason and redact(reason),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": before.get("started", _now()),
            "updated": _now(),
            "mlflow": mlflow or before.get("mlflow"),
            "sweep": sweep or before.get("sweep"),
            "saved": before.get("saved", 0) if saved is None else saved,
            "parent": parent or before.get("parent"),
        }
        if self.metrics_path.exists():
            with self.metrics_path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())
        path, content = self.path / "status.json", json.dumps(status, indent=2) + "\n"
        try:
            write_atomically(path, content)
        except (
            OSError
        ):  # a full disk has no room for a second file; what lies there must not say that it runs
            with contextlib.suppress(OSError):
                overwrite(path, content)
            raise

    def append_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Add one line to metrics.jsonl: `step`, `time` (seconds since 1970) and the finite values;
        ints stay ints."""
        row: dict[str, float] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            if math.isfinite(value):
                row[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        self._append(self.metrics_path, [row])

    def append_evaluations(self, rows: list[dict[str, Any]]) -> None:
        """Add the rows of one step to evaluations.jsonl, on the disk once this returns; see
        runs/records.py."""
        self._append(self.evaluations_path, rows, durable=True)

    def _append(self, path: Path, rows: list[dict], durable: bool = False) -> None:
        """durable: what the file holds is on the disk afterwards.

        Raises StorageError where rows have gone, or came, that this process has not written.
        """
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with naming(path), path.open("ab") as file:
            size = os.fstat(file.fileno()).st_size
            before = self._written.get(path) or checksum(path)
            if size != before["bytes"]:
                raise StorageError(
                    f"{path} needs the {before['bytes']} bytes that this run has written (got "
                    f"{size}). It was deleted or changed during the run, and what it lacks is "
                    "lost. Use pgtk resume to continue from the newest checkpoint without it."
                )
            file.write(data)
            file.flush()
            self._written[path] = {
                "bytes": size + len(data),
                "crc32": zlib.crc32(data, before["crc32"]),
            }
            if durable:
                os.fsync(file.fileno())

    def checksums(self) -> dict[str, dict[str, int]]:
        """Return the checksums of the files of rows, by name; the rows are on the disk
        afterwards."""
        checksums = {}
        for path in (self.metrics_path, self.evaluations_path):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                checksums[path.name] = self._written.get(path) or checksum(path)
        return checksums

    def drop_metrics_after(self, step: int, kept: int | None = None) -> None:
        """Take away the rows of later steps, and one that a kill has torn: a resumed run writes
        them anew.

        kept: bytes of the metrics' rows up to the step, by `rows_until`, where they have been
            counted.
        """
        files = (
            (self.metrics_path, records.METRICS_ROW, kept),
            (self.evaluations_path, records.EVALUATION_ROW, None),
        )
        for path, shape, size in files:
            self._written.pop(path, None)
            if path.exists():
                os.truncate(path, rows_until(path, step, shape)[1] if size is None else size)


def config_drift(old: dict, new: dict) -> dict[str, list]:
    """The keys whose values differ, dotted: {key: [old value, new value]}, None where a key is
    missing."""
    before, after = dict(records.leaves(old)), dict(records.leaves(new))
    pairs = {key: [before.get(key), after.get(key)] for key in before | after}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def is_held(run_dir: Path) -> bool:
    """Whether a living process holds this run directory."""
    try:
        with (run_dir / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def record_end(
    run_dir: Path, state: str, reason: str, after: tuple[str, ...] = ("running",)
) -> None:
    """How a run ended, in its status.json and run.log, where the process that wrote to it could not
    say so itself.

    after: the states that are replaced. Nothing happens while another process holds the directory,
        where there is none,
    or where it cannot be written.
    """
    with contextlib.suppress(PgtoolkitError, OSError):
        if records.read_status(run_dir).get("state") not in after:
            return
        with RunDirectory(run_dir) as run:
            run.set_status(state, records.read_status(run_dir)["step"], reason)
            with (run.path / "run.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 ERROR {redact(reason)}\n")


def lock(folder: Path, kind: str, reason: str, use: str) -> TextIO:
    """The file `.lock` of a folder, by which it is held until the file is closed, or this process
    ends in whatever way.

    Raises ConfigError with the rest of the sentence where another process holds it.
    """
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"{kind} {folder} needs to be free (got: in use by {holder}). {reason} Wait for it or "
            f"stop it, or {use}."
        ) from None
    except OSError as error:
        _log.warning(
            "%s cannot be locked (%s); make sure that no other process uses it",
            folder,
            error.strerror,
        )
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _now():
    return time.strftime(records.TIME)
