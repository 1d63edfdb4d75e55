"""What the files of a run directory say: read and checked, or refused with the file's name and the way to go on."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import numbers
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from pgtoolkit.errors import StorageError, first_line
from pgtoolkit.losses.checks import is_whole
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.yaml_text import parse_yaml

STATES = ("running", "done", "failed", "interrupted")
TIME = "%Y-%m-%dT%H:%M:%S%z"
"""How times are written, but for those of metrics, which are seconds since 1970."""

_UNPARSED = (ValueError, RecursionError, OverflowError)
"""What a text that is no JSON, or not what the file is for, raises."""


def read_config(run_dir: str | Path) -> tuple[dict, list[str]]:
    """(configuration, overrides) of a run, from config.yaml and overrides.yaml."""
    advice = "It repeats what was typed; config.yaml has the whole configuration. Write [] into it to go on."
    config = read_resolved(run_dir)
    return config, _parsed(Path(run_dir) / "overrides.yaml", advice, _overrides)


def read_resolved(run_dir: str | Path) -> dict:
    """The configuration of a run, from config.yaml alone."""
    advice = "Metrics and checkpoints are in other files. Put back a copy of it, such as the one in MLflow."
    return _parsed(Path(run_dir) / "config.yaml", advice, _config)


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """A run's status.json, or {} before its first. A killed run still says `running`, though its lock is free."""
    advice = "Configuration, metrics and checkpoints are in other files; delete it to go on."
    return _object_of(Path(run_dir) / "status.json", advice, _STATUS)


def read_provenance(run_dir: Path) -> dict:
    """provenance.json; {} where there is none. Raises StorageError if it is damaged."""
    advice = "It says where the run came from, and nothing else depends on it; delete it to go on."
    return _object_of(run_dir / "provenance.json", advice, _PROVENANCE)


def known_provenance(run_dir: Path) -> dict:
    """The same for those who can do without: {} also where it is damaged."""
    try:
        return read_provenance(run_dir)
    except StorageError:
        return {}


def read_data(run_dir: Path) -> dict:
    """data.json, the digests of the data that a run reads; {} where there is none."""
    return _object_of(run_dir / "data.json", "Delete it to go on without its comparison.", _DATA)


def read_sweep(folder: Path) -> dict:
    """sweep.json of a sweep's folder: `name`, `command` and `jobs`; {} where there is none."""
    advice = "Delete it to go on; the runs are known by their directories."
    return _object_of(folder / "sweep.json", advice, _SWEEP)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl: `step` and numbers, of which those that are not finite are left out.

    A torn last line, left by a kill, is passed over. Raises StorageError for a broken line anywhere else.
    """
    rows = _objects_of(path, _ROW)
    return [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of evaluations.jsonl, see runs/evaluations.py; none where there is no such file."""
    return _objects_of(run_dir / "evaluations.jsonl", {"set": str, **_ROW})


def write_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a metrics.jsonl or evaluations.jsonl, in one piece."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_drift(run_dir: Path) -> list[dict[str, Any]]:
    """The changes that resumes made to the configuration: `step` and `changes`, {key: [old, new]}, of each."""
    return _objects_of(run_dir / "drift.jsonl", _DRIFT)


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """What the operating system refuses, as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be read or written: {error.strerror or error}") from error


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


def _content(path: Path) -> bytes | None:
    """The content of a file; None where there is none."""
    with storage(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _parsed(path: Path, advice: str, parse: Callable[[bytes], Any], default: Any = None) -> Any:
    """What `parse` makes of a file; advice: what is whole and how to go on where it is damaged.

    default: for where there is no file; without one that is an error.
    """
    data = _content(path)
    if data is None and default is None:
        raise StorageError(f"{path} is missing. {advice}")
    if data is None:
        return default
    try:
        return parse(data)
    except _UNPARSED as error:
        raise StorageError(f"{path} is damaged ({first_line(error)}). {advice}") from error


def _object_of(path: Path, advice: str, shape: dict) -> dict:
    """The JSON object in a file, checked; {} where there is no file."""
    return _parsed(path, advice, lambda data: _object(data, shape), default={})


def _objects_of(path: Path, shape: dict) -> list[dict]:
    """The JSON objects in the lines of a file, checked, but for a torn last one; none where there is no file."""
    data = _content(path) or b""
    objects, lines = [], data.splitlines()
    torn = len(lines) if not data.endswith(b"\n") else None
    for number, line in enumerate(lines, start=1):
        try:
            objects.append(_object(line, shape))
        except _UNPARSED as error:
            if number != torn:
                why = f"{path}:{number} is damaged ({first_line(error)}); delete the line to go on"
                raise StorageError(why) from error
    return objects


def _object(data: bytes, shape: dict) -> dict:
    found = json.loads(data)
    _check(found, shape)
    return found


@functools.lru_cache(maxsize=16)
def _parsed_yaml(data: bytes) -> Any:
    """Not to be changed. A run reads its own configuration again and again."""
    return parse_yaml(data)


def _yaml(data: bytes) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(_parsed_yaml(data))


def _config(data: bytes) -> dict:
    if re.search(rb"\$\{.*\$\{", data):  # of which ten in each of ten lines stand for gigabytes, too
        raise ValueError("a line has several ${...}, and a run writes values")
    config = _yaml(data)
    _check(config, dict)
    # OmegaConf takes nothing, and null, for no keys, and a text for keys without values.
    if data.strip() != b"{}" and all(value is None for value in config.values()):
        raise ValueError("not keys with values")
    return config


def _overrides(data: bytes) -> list[str]:
    overrides = _yaml(data)
    _check(overrides, [str])
    if not overrides and data.strip() != b"[]":
        raise ValueError("not a list of overrides")
    return overrides


def _check(value: Any, shape: Any, name: str = "content") -> None:
    """ValueError if a JSON value does not have a shape: a type, or a function that is true of it; a list of the shape
    of all items; a dictionary of the shapes of its keys, where `key?` may be missing or null, and str is any other.
    """
    kind = type(shape) if isinstance(shape, (dict, list)) else shape
    if not (isinstance(value, kind) if isinstance(kind, type) else kind(value)):
        raise ValueError(f"its {name} is not what pgtk writes there")
    if isinstance(shape, list):
        for item in value:
            _check(item, shape[0], name)
    elif isinstance(shape, dict):
        shapes = {key.strip("?"): own for key, own in shape.items() if key is not str}
        for key in shapes | (value if str in shape else {}):
            if value.get(key) is not None or f"{key}?" not in shape:
                _check(value.get(key), shapes.get(key, shape.get(str)), key)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _is_number(value: Any) -> bool:
    # OverflowError for a whole number that no float can hold
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value) is not None


def _is_time(value: Any) -> bool:
    return bool(datetime.strptime(str(value), TIME))


_STATUS = {"state": STATES.__contains__, "step": _is_count, "started?": _is_time, "mlflow?": {str: str}}
_STATUS["saved?"] = _is_count
_STATUS |= dict.fromkeys(("id?", "reason?", "sweep?"), str)
_ROW = {"step": _is_count, str: _is_number}
_DRIFT = {"step": _is_count, "changes": {str: lambda pair: isinstance(pair, list) and len(pair) == 2}}
_START = {"git?": [{"commit?": str, "diff": str}], "gpus?": [dict], "packages?": {str: str}, "memory_bytes?": int}
_PROVENANCE = {**_START, "resumed?": [{**_START, "time": _is_time}]}
_DATA = {"accepted?": list, str: {str: dict}}
_SWEEP = {"name": str, "command": list, "jobs": [{"name": str, "directory": str, "status": str}]}
