"""The run directory: configuration, status, metrics and provenance of one run, safe against a kill at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import numbers
import os
import socket
import time
import uuid
from enum import Enum
from pathlib import Path
from typing import Any

from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.redaction import redact

STATES = ("running", "done", "failed", "interrupted")

_log = logging.getLogger(__name__)


class RunDirectory:
    """One run's directory, held by one process at a time.

    Opening it takes an exclusive lock that the operating system drops when the process ends, however it ends.
    Files: config.yaml, overrides.yaml, drift.jsonl (after a resume that changed keys), provenance.json, status.json,
    metrics.jsonl.

    Raises ConfigError if another process holds the directory, StorageError if it cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        self.metrics_path = self.path / "metrics.jsonl"
        self._metrics_file = None
        with _storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(self.path)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and let go of the lock. A second call does nothing."""
        self._close_metrics()
        if self._lock_file.closed:
            return
        # Closing alone would leave the lock with processes forked from this one, such as data workers.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        self._lock_file.close()

    def write_config(self, resolved: dict, overrides: list[str], step: int = 0) -> dict[str, list]:
        """Write config.yaml and overrides.yaml; on a resume return what changed, {key: [old, new]}.

        The changes are also added to drift.jsonl, with the time and the step the run resumes at. Overrides of a
        resume are added to those of the first start; of two for one key the later stays, and another option of a
        group takes the place of the group's keys.
        """
        config_path = self.path / "config.yaml"
        resolved = plain(resolved)
        drift = {}
        with _storage(config_path):
            if config_path.exists():
                old_config, old_overrides = read_config(self.path)
                drift = config_drift(old_config, resolved)
                given = {_override_key(override) for override in overrides}
                overrides = [*(old for old in old_overrides if not _replaced(old, given)), *overrides]
            if drift:
                with (self.path / "drift.jsonl").open("a") as file:
                    file.write(json.dumps({"time": _now(), "step": step, "changes": drift}) + "\n")
            write_atomically(self.path / "overrides.yaml", _to_yaml(list(overrides)))
            write_atomically(config_path, _to_yaml(resolved))  # last: it says that both are there
        return drift

    def write_provenance(self, provenance: dict) -> None:
        """Write provenance.json; that of a resume goes into the list `resumed` of the first."""
        path = self.path / "provenance.json"
        with _storage(path):
            if path.exists():
                first = json.loads(path.read_text())
                first.setdefault("resumed", []).append(provenance)
                provenance = first
            write_atomically(path, json.dumps(provenance, indent=2) + "\n")

    def set_status(
        self, state: str, step: int, reason: str | None = None, mlflow: dict | None = None, sweep: str | None = None
    ) -> None:
        """Replace status.json in one piece; metrics appended before are on the disk when it says so.

        state: one of STATES. step: optimizer steps done. mlflow: `MlflowTracker.info`, and sweep: the name of
        the sweep that the run belongs to, are kept once given, as is `id`, which tells this
        run from all others wherever it is copied.
        """
        if state not in STATES:
            raise ValueError(f"state {state!r} is not one of {', '.join(STATES)}")
        path = self.path / "status.json"
        before = read_status(self.path)
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
        }
        with _storage(path):
            if self._metrics_file:
                os.fsync(self._metrics_file.fileno())
            write_atomically(path, json.dumps(status, indent=2) + "\n")

    def append_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Add one line to metrics.jsonl: `step`, `time` (seconds since 1970) and the finite values; ints stay ints."""
        row = {"step": step, "time": round(time.time(), 3), **_finite(metrics)}
        with _storage(self.metrics_path):
            if not self._metrics_file:
                self._mend_metrics()
                self._metrics_file = self.metrics_path.open("a")
            self._metrics_file.write(json.dumps(row) + "\n")
            self._metrics_file.flush()

    def read_metrics(self) -> list[dict[str, float]]:
        """Every row of metrics.jsonl, oldest first. A torn last line, left by a kill, is passed over.

        Raises StorageError for a broken line anywhere else.
        """
        return read_metrics(self.metrics_path)

    def drop_metrics_after(self, step: int) -> None:
        """Take away the rows of later steps, in one piece: a resumed run writes them anew."""
        self._close_metrics()
        with _storage(self.metrics_path):
            if self.metrics_path.exists():
                self._write_metrics([row for row in self.read_metrics() if row["step"] <= step])

    def _mend_metrics(self) -> None:
        # A torn last line would swallow the row appended after it.
        if self.metrics_path.exists() and not self.metrics_path.read_bytes().endswith(b"\n"):
            self._write_metrics(self.read_metrics())

    def _write_metrics(self, rows: list[dict]) -> None:
        write_atomically(self.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))

    def _close_metrics(self) -> None:
        if self._metrics_file:
            self._metrics_file.close()
            self._metrics_file = None


def read_config(run_dir: str | Path) -> tuple[dict, list[str]]:
    """(configuration, overrides) of a run, from config.yaml and overrides.yaml."""
    path = Path(run_dir)
    with _storage(path / "config.yaml"):
        return _read_yaml(path / "config.yaml"), _read_yaml(path / "overrides.yaml")


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """A run's status.json, or {} before its first. A killed run still says `running`, though its lock is free."""
    path = Path(run_dir) / "status.json"
    with _storage(path):
        text = path.read_text() if path.exists() else "{}"
    try:
        return json.loads(text)
    except ValueError as error:
        raise StorageError(f"{path} is damaged ({error}); delete it to go on") from error


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, as `RunDirectory.read_metrics` gives them, without holding the run."""
    with _storage(path):
        lines = path.read_bytes().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "step" not in row:
                raise ValueError("not a row of metrics")
        except ValueError as error:
            if number < len(lines):
                raise StorageError(f"{path}:{number} is damaged ({error}); delete the line to go on") from error
        else:
            rows.append(row)
    return rows


def config_drift(old: dict, new: dict) -> dict[str, list]:
    """The keys whose values differ, dotted: {key: [old value, new value]}, None where a key is missing."""
    old_leaves, new_leaves = dict(leaves(old)), dict(leaves(new))
    return {
        key: [old_leaves.get(key), new_leaves.get(key)]
        for key in [*old_leaves, *(key for key in new_leaves if key not in old_leaves)]
        if old_leaves.get(key) != new_leaves.get(key)
    }


def leaves(config: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """The nested configuration as (dotted key, plain value) pairs, in order."""
    pairs = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            pairs += leaves(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", plain(value)))
    return pairs


def plain(value: Any) -> Any:
    """The value in the types JSON and YAML know: enums by value, paths as text, tuples as lists."""
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    return str(value) if isinstance(value, Path) else value


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a kill at any moment, finds the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    # The rename itself must reach the disk before anyone builds on it.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _finite(metrics):
    row = {}
    for name, value in metrics.items():
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
        if math.isfinite(value):
            row[name] = value
    return row


def is_held(run_dir: Path) -> bool:
    """Whether a living process holds this run directory."""
    try:
        with (run_dir / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _lock(path):
    file = (path / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"run directory {path} needs to be free (got: in use by {holder}). Two processes would mix their "
            "metrics and checkpoints. Wait for it or stop it, or train in another directory."
        ) from None
    except OSError as error:
        _log.warning("%s cannot be locked (%s); make sure that no other process uses it", path, error.strerror)
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


@contextlib.contextmanager
def _storage(path):
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be read or written: {error.strerror or error}") from error


def _replaced(override, given):
    key = _override_key(override)
    return key in given or key.partition(".")[0] in given


def _override_key(override):
    return override.partition("=")[0].lstrip("+~")


def _to_yaml(value):
    # OmegaConf's writer quotes what its reader would take for a number, such as the text "1e-3"; PyYAML's does not.
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(value))


def _read_yaml(path):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path))


def _now():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
