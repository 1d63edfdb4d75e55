"""The run directory, which stays whole when the run is killed at any moment."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from pgtoolkit.errors import ConfigError, PgtoolkitError, StorageError
from pgtoolkit.runs import records
from pgtoolkit.runs.checksums import checksum
from pgtoolkit.runs.former import with_later_groups
from pgtoolkit.runs.series import rows_until
from pgtoolkit.system.plain_files import JsonObject, naming, overwrite, write_atomically
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import key_of
from pgtoolkit.system.yaml_text import to_yaml

_log = logging.getLogger("pgtoolkit")

BELONGS_TO_A_RUN = ("config.yaml", "status.json", "metrics.jsonl", "checkpoints", "completions")
"""Files and folders that a directory has only once a run has begun there."""


def occupied_by(run_dir: Path, more: tuple[str, ...] = ()) -> str | None:
    """Return a file of a run, or of `more`, that a directory has; None where a run may begin."""
    for name in (*BELONGS_TO_A_RUN, *more):
        if os.path.lexists(run_dir / name):
            return name
    return None


def occupied(setting: str, run_dir: Path, by: str) -> str:
    """Return the refusal of a run in a directory that has the file `by` of another one."""
    path = shlex.quote(str(run_dir))
    resume = ""
    if (run_dir / "config.yaml").is_file():
        resume = (
            f"pgtk resume {path} to continue that run, pgtk continue {path} in a script that is "
            "repeated, or "
        )
    return (
        f"{setting} needs a directory without a run (got one with {by}). A second run would mix "
        "its configuration and metrics with the checkpoints of the first. Use "
        f"{resume}another directory."
    )


_RECORD = (
    "config.yaml",
    "overrides.yaml",
    "drift.jsonl",
    "provenance.json",
    "data.json",
    "status.json",
)
"""Files that say what a run was and how it ended."""


class RunDirectory:
    """The directory of one run, held by one process at a time.

    Opening it takes an exclusive lock, which the operating system releases when the process ends,
    however it ends.
    Files: config.yaml, overrides.yaml, drift.jsonl (after a resume that changed keys or own code),
    provenance.json, data.json (digests of the data, by `record_data`), status.json, metrics.jsonl,
    evaluations.jsonl.

    new: a new run begins, so the directory must not have another one.
    Raises ConfigError if another process holds the directory or it is not new, StorageError if it
    cannot be written.
    """

    def __init__(self, path: str | Path, new: bool = False):
        self.path = Path(path).resolve()
        self.metrics_path = self.path / "metrics.jsonl"
        self.evaluations_path = self.path / "evaluations.jsonl"
        # Checksums of the files of rows, as this process has left them.
        self._written: dict[Path, dict[str, int]] = {}
        self._finished: dict[str, str | None] = {}
        with records.storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            reason = "Two processes would mix their metrics and checkpoints."
            self._lock_file = lock(self.path, "run directory", reason, "train in another directory")
        name = occupied_by(self.path) if new else None
        if name is not None:
            self.close()
            raise ConfigError(occupied(f"the run directory {self.path}", self.path, name))

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._lock_file.closed:
            return
        # Closing the file is not enough: processes forked from this one would keep the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        self._lock_file.close()

    def keep_finished(self) -> None:
        """Keep the record of a finished run in memory, for `restore_finished`."""
        if records.read_status(self.path).get("state") == "done":
            for name in _RECORD:
                path = self.path / name
                self._finished[name] = path.read_text("utf-8") if path.exists() else None

    def restore_finished(self) -> bool:
        """Write the record of a finished run back; return whether there is one."""
        for name, content in self._finished.items():
            if content is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                write_atomically(self.path / name, content)
        return bool(self._finished)

    def write_config(
        self,
        resolved: dict,
        overrides: list[str],
        step: int = 0,
        code: Mapping[str, list[str]] = {},
        code_acts_after: Mapping[str, int | None] = {},
    ) -> dict[str, list]:
        """Write config.yaml and overrides.yaml; return what a resume changed, {key: [old, new]}.

        The changes are also added to drift.jsonl, with the time and the step from which the run is
        resumed. Overrides of a resume are added to those of the first start. They replace earlier
        ones of the same key, and an override of a group replaces those of the group's keys.

        code: the user's own modules that have changed, {module: [old digest, new digest]}.
        code_acts_after: the step after which each of them acts; None where it is not known.
        """
        config_path = self.path / "config.yaml"
        resolved = records.plain(resolved)
        drift = {}
        if config_path.exists():
            old_config, old_overrides = records.read_config(self.path)
            drift = config_drift(old_config, with_later_groups(resolved))
            new_keys = {key_of(override) for override in overrides}
            kept = []
            for override in old_overrides:
                key = key_of(override)
                group = key.partition(".")[0]
                if key not in new_keys and group not in new_keys:
                    kept.append(override)
            overrides = [*kept, *overrides]
        if drift or code:
            entry = {"time": _now(), "step": step, "changes": drift}
            if code:
                entry |= {"code": code, "code_acts_after": dict(code_acts_after)}
            with (self.path / "drift.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        write_atomically(self.path / "overrides.yaml", to_yaml(list(overrides)))
        # Last: where there is a config.yaml, both files are there.
        write_atomically(config_path, to_yaml(resolved))
        return drift

    def write_provenance(self, provenance: dict) -> None:
        """Write provenance.json; that of a resume goes into the list `resumed` of the first."""
        first = records.read_provenance(self.path)
        if first:
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
        """Replace status.json, whole or not at all, once the metrics of earlier steps are on the
        disk.

        state: one of STATES.
        step: optimizer steps done.
        reason: why the run is in this state.
        The others keep their earlier values where they are None:
        mlflow: `MlflowRecord.info`.
        sweep: the name of the sweep that the run belongs to.
        saved: the step of the newest checkpoint.
        parent: the run that this one continues, and the step.
        So does `id`, which a run shares only with its copies.
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
        path = self.path / "status.json"
        content = json.dumps(status, indent=2) + "\n"
        try:
            write_atomically(path, content)
        except OSError:
            # A full disk has no room for a second file, but the old status may say `running`.
            with contextlib.suppress(OSError):
                overwrite(path, content)
            raise

    def append_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Add a row to metrics.jsonl: `step`, `time` (seconds since 1970) and the finite values.

        Integers stay integers.
        """
        row: dict[str, float] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            if math.isfinite(value):
                row[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        self._append(self.metrics_path, [row])

    def append_evaluations(self, rows: list[JsonObject]) -> None:
        """Add the rows of one step to evaluations.jsonl; they are on the disk once this returns.

        rows: see `records.read_evaluations`.
        """
        self._append(self.evaluations_path, rows, durable=True)

    def _append(self, path: Path, rows: list[JsonObject], durable: bool = False) -> None:
        """Add rows to a file.

        durable: the rows are on the disk once this returns.
        Raises StorageError where another process has removed or added rows.
        """
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with naming(path), path.open("ab") as file:
            size = os.fstat(file.fileno()).st_size
            before = self._written.get(path) or checksum(path)
            if size != before["bytes"]:
                raise StorageError(
                    f"{path} needs the {before['bytes']} bytes that this run has written (got "
                    f"{size}). It was deleted or changed during the run, and its missing rows are "
                    "lost. pgtk resume continues from the newest checkpoint without them."
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
        """Return the checksums of the files of rows, by name, once the rows are on the disk."""
        checksums = {}
        for path in (self.metrics_path, self.evaluations_path):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                checksums[path.name] = self._written.get(path) or checksum(path)
        return checksums

    def drop_metrics_after(self, step: int, kept_bytes: int | None = None) -> None:
        """Delete the rows of later steps, which a resumed run writes again, and a torn last row.

        kept_bytes: size of the metrics' rows up to the step, by `rows_until`, if it is known.
        """
        files = (
            (self.metrics_path, records.METRICS_ROW, kept_bytes),
            (self.evaluations_path, records.EVALUATION_ROW, None),
        )
        for path, shape, size in files:
            self._written.pop(path, None)
            if path.exists():
                if size is None:
                    _, size = rows_until(path, step, shape)
                os.truncate(path, size)


def config_drift(old: dict, new: dict) -> dict[str, list]:
    """Return the dotted keys whose values differ: {key: [old value, new value]}.

    The value of a missing key is None.
    """
    old_leaves = dict(records.leaves(old))
    new_leaves = dict(records.leaves(new))
    pairs = {key: [old_leaves.get(key), new_leaves.get(key)] for key in old_leaves | new_leaves}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def is_held(run_dir: Path) -> bool:
    """Return whether a living process holds this run directory.

    Raises StorageError where its lock cannot be opened: then nobody can tell.
    """
    path = run_dir / ".lock"
    if not path.exists():
        return False
    with records.storage(path):
        file = path.open("rb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # Some network file systems have no locks.
            return False
    return False


def record_end(
    run_dir: Path, state: str, reason: str, after: tuple[str, ...] = ("running",)
) -> None:
    """Record in status.json and run.log how a run ended, if its process could not do so itself.

    after: the states to replace. Nothing happens where another process holds the directory, where
    there is none, or where it cannot be written.
    """
    with contextlib.suppress(PgtoolkitError, OSError):
        if records.read_status(run_dir).get("state") not in after:
            return
        with RunDirectory(run_dir) as run:
            run.set_status(state, records.read_status(run_dir)["step"], reason)
            with (run.path / "run.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 ERROR {redact(reason)}\n")


def lock(folder: Path, kind: str, reason: str, use: str) -> TextIO:
    """Lock a folder, and return its open file `.lock`.

    The lock is held until the file is closed or this process ends, however it ends.
    kind: of the folder. reason, use: for the error's message.
    Raises ConfigError where another process holds the folder.
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
        # Some network file systems have no locks.
        _log.warning(
            f"{folder} cannot be locked ({error.strerror}); make sure that no other process uses it"
        )
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _now() -> str:
    return time.strftime(records.TIME)
