"""What the files of a run directory say: read and checked, or refused with the file's name and the way to go on."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from pgtoolkit.errors import StorageError, first_line
from pgtoolkit.losses.checks import is_whole
from pgtoolkit.system.plain_files import open_to_read

STATES = ("running", "done", "failed", "interrupted")
TIME = "%Y-%m-%dT%H:%M:%S%z"
"""How times are written, but for those of metrics, which are seconds since 1970."""

UNPARSED = (ValueError, RecursionError, UnicodeError)
"""What a text that is no JSON raises."""


def read_config(run_dir: str | Path) -> tuple[dict, list[str]]:
    """(configuration, overrides) of a run, from config.yaml and overrides.yaml."""
    path = Path(run_dir) / "overrides.yaml"
    use = "It repeats what was typed; config.yaml has the whole configuration. Write [] into it to go on."
    config = read_resolved(run_dir)
    return config, _checked(path, use, lambda data: _texts(_yaml(data, list, "not a list of overrides")))


def read_resolved(run_dir: str | Path) -> dict:
    """The configuration of a run, from config.yaml alone."""
    use = "Metrics and checkpoints are in other files. Put back a copy of it, such as the one in MLflow."
    return _checked(Path(run_dir) / "config.yaml", use, lambda data: _keys(_yaml(data, dict, "not keys with values")))


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """A run's status.json, or {} before its first. A killed run still says `running`, though its lock is free."""
    path = Path(run_dir) / "status.json"
    use = "Configuration, metrics and checkpoints are in other files; delete it to go on."
    return _checked(path, use, lambda data: _status(_object(data)), missing={})


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl: `step` and numbers, of which those that are not finite are left out.

    A torn last line, left by a kill, is passed over. Raises StorageError for a broken line anywhere else.
    """
    return _lines(path, _row)


def read_drift(run_dir: Path) -> list[dict[str, Any]]:
    """The changes that resumes made to the configuration: `step` and `changes`, {key: [old, new]}, of each."""
    return _lines(run_dir / "drift.jsonl", _drift)


def read_provenance(run_dir: Path) -> dict:
    """provenance.json; {} where there is none. Raises StorageError if it is damaged."""
    use = "It says where the run came from, and nothing else depends on it; delete it to go on."
    return _checked(run_dir / "provenance.json", use, lambda data: _provenance(_object(data)), missing={})


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


def known_provenance(run_dir: Path) -> dict:
    """The same for those who can do without: {} also where it is damaged."""
    try:
        return read_provenance(run_dir)
    except StorageError:
        return {}


def read_data(run_dir: Path) -> dict:
    """data.json, the digests of the data that a run reads; {} where there is none, as in older runs."""
    use = "Delete it to go on without its comparison."
    return _checked(run_dir / "data.json", use, lambda data: _data(_object(data)), missing={})


def read_sweep(folder: Path) -> dict:
    """sweep.json of a sweep's folder: `name`, `command` and `jobs`; {} where there is none."""
    use = "Delete it to go on; the runs are known by their directories."
    return _checked(folder / "sweep.json", use, lambda data: _sweep(_object(data)), missing={})


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """What the operating system refuses, as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be read or written: {error.strerror or error}") from error


def _checked(path: Path, use: str, parse: Callable[[bytes], Any], missing: Any = None) -> Any:
    """What `parse` makes of the file; `use` says what is whole and how to go on where it is damaged."""
    try:
        with storage(path), open_to_read(path) as file:
            return parse(file.read())
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        if missing is None:
            raise StorageError(f"{path} is missing. {use}") from error
        return missing
    except (*UNPARSED, _NotSo) as error:
        raise StorageError(f"{path} is damaged ({first_line(error)}). {use}") from error


class _NotSo(Exception):
    """The content is not what the file is for; str() says why."""


def _object(data: bytes) -> dict:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise _NotSo("not a JSON object")
    return found


def _yaml(data: bytes, kind: type, reason: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        text = data.decode()
        found = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError, OSError, AssertionError, AttributeError, TypeError) as error:
        raise _NotSo(first_line(error)) from error
    # OmegaConf takes nothing, and null, for no keys.
    _need(isinstance(found, kind) and (bool(found) or text.strip() in ("{}", "[]")), reason)
    return found


def _keys(config: dict) -> dict:
    _need(not config or any(value is not None for value in config.values()), "not keys with values")  # but a text
    return config


def _texts(values: list) -> list[str]:
    _need(all(isinstance(value, str) for value in values), "not a list of overrides")
    return values


def _status(status: dict) -> dict:
    if status:
        _need(status.get("state") in STATES, f"its state is not one of {', '.join(STATES)}")
        _need(_is_count(status.get("step")), "its step is not a whole number")
        for key in ("id", "reason", "started", "sweep"):
            _need(isinstance(status.get(key), str | None), f"its {key} is not a text")
        mlflow = status.get("mlflow") or {}
        _need(_is_map(mlflow, str), "its mlflow is not made of texts")
        if started := status.get("started"):
            datetime.strptime(started, TIME)
    return status


def _lines(path: Path, check: Callable[[dict], dict]) -> list[dict]:
    try:
        with storage(path), open_to_read(path) as file:
            data = file.read()
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    rows, lines = [], data.splitlines()
    torn = len(lines) if not data.endswith(b"\n") else None
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(check(_object(line)))
        except (*UNPARSED, OverflowError, _NotSo) as error:
            if number != torn:
                raise StorageError(
                    f"{path}:{number} is damaged ({first_line(error)}); delete the line to go on"
                ) from error
    return rows


def _row(row: dict) -> dict:
    _need(_is_count(row.get("step")), "its step is not a whole number")
    for name, value in row.items():
        _need(isinstance(value, numbers.Real) and not isinstance(value, bool), f"its {name} is not a number")
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _drift(entry: dict) -> dict:
    _need(_is_count(entry.get("step")), "its step is not a whole number")
    changes = entry.get("changes")
    _need(_is_map(changes, list) and all(len(pair) == 2 for pair in changes.values()), "not keys with two values each")
    return entry


def _provenance(first: dict) -> dict:
    resumed = first.get("resumed", [])
    _need(isinstance(resumed, list) and all(isinstance(one, dict) for one in resumed), "its resumes are not objects")
    for one in resumed:
        datetime.strptime(str(one.get("time")), TIME)
    for one in (first, *resumed):
        for key in ("git", "gpus"):
            listed = one.get(key, [])
            _need(isinstance(listed, list) and all(isinstance(item, dict) for item in listed), f"its {key} is no list")
        for repository in one.get("git", []):
            _need(isinstance(repository.get("commit"), str | None), "a commit is not a text")
            _need(isinstance(repository.get("diff"), str), "a repository has no diff")
        _need(_is_map(one.get("packages", {}), str), "its packages are not texts")
        _need(isinstance(one.get("memory_bytes", 0), int), "its memory is not a number")
    return first


def _data(recorded: dict) -> dict:
    for key, files in recorded.items():
        _need(
            isinstance(files, list) if key == "accepted" else _is_map(files, dict), f"its {key} is not made of digests"
        )
    return recorded


def _sweep(sweep: dict) -> dict:
    jobs = sweep.get("jobs")
    known = isinstance(sweep.get("name"), str) and isinstance(sweep.get("command"), list) and isinstance(jobs, list)
    _need(known and all(_is_job(job) for job in jobs), "not the name, command and jobs of a sweep")
    return sweep


def _is_job(job: Any) -> bool:
    names = ("name", "directory", "status")
    return isinstance(job, dict) and all(isinstance(job.get(key), str) for key in names)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _is_map(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise _NotSo(reason)
