"""What the files of a run directory say: read and checked, or refused with the file's name and what
is wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Container, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any

from pgtoolkit.errors import StorageError, first_line
from pgtoolkit.system.yaml_text import plain_yaml

STATES = ("running", "done", "failed", "interrupted")
TIME = "%Y-%m-%dT%H:%M:%S%z"
"""How times are written, but for those of metrics, which are seconds since 1970."""


def read_config(run_dir: str | Path) -> tuple[dict, list[str]]:
    """(configuration, overrides) of a run, from config.yaml and overrides.yaml."""
    return read_resolved(run_dir), _yaml(Path(run_dir) / "overrides.yaml", list)


def read_resolved(run_dir: str | Path) -> dict:
    """The configuration of a run, from config.yaml alone."""
    return _yaml(Path(run_dir) / "config.yaml", dict)


def read_leaves(run_dir: Path) -> dict[str, Any]:
    """The same as dotted keys with their values, not to be changed: what runs have in common is
    parsed once."""
    path = run_dir / "config.yaml"
    with storage(path):
        groups = re.split(rb"(?m)^(?=\w+:)", path.read_bytes())
    try:
        found = [_leaves_of_group(group) for group in groups[1:]]
        is_whole = not groups[0] and groups[-1].endswith(b"\n")
        if is_whole and len({group.partition(b":")[0] for group in groups}) == len(groups):
            return {key: value for pairs in found for key, value in pairs}
    except ValueError:  # what is wrong with the whole is said below
        pass
    return dict(leaves(read_resolved(run_dir)))


@functools.lru_cache(2**12)
def _leaves_of_group(text: bytes) -> list[tuple[str, Any]]:
    """Of one top-level key and its value. Raises ValueError where the text is anything else."""
    value = plain_yaml(text)
    if not isinstance(value, dict) or [*value] != [text.partition(b":")[0].decode()]:
        raise ValueError
    return leaves(value)


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """A run's status.json, or {} before its first. A killed run still says `running`, though its
    lock is free."""
    return _object(Path(run_dir) / "status.json", _STATUS)


def read_provenance(run_dir: Path) -> dict:
    """provenance.json; {} where there is none. Raises StorageError if it is damaged."""
    return _object(run_dir / "provenance.json", _PROVENANCE)


def known_provenance(run_dir: Path) -> dict:
    """The same for those who can do without: {} also where it is damaged."""
    try:
        return read_provenance(run_dir)
    except StorageError:
        return {}


def read_data(run_dir: Path) -> dict:
    """data.json, the digests of the data that a run reads; {} where there is none."""
    return _object(run_dir / "data.json", _DATA)


def read_sweep(folder: Path) -> dict:
    """sweep.json of a sweep's folder: `name`, `command` and `jobs`; {} where there is none.

    What became of jobs since it was written is in sweep.jsonl: a line is an entry of `jobs` in
        place of an earlier one.
    """
    if sweep := _object(folder / "sweep.json", _SWEEP):
        rows = [*sweep["jobs"], *_rows(folder / "sweep.jsonl", _JOB)]
        sweep["jobs"] = [*{row["directory"]: row for row in rows}.values()]
    return sweep


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """What a run scored on held-out prompts, the rows of evaluations.jsonl; none where there is no
    such file.

    A line is a JSON object: one set of prompts at one step. Those of a step are written together,
        before the checkpoint
    of that step, and a resume takes away those of later steps than its own. Step 0 is before the
    first update.

        {"step": 20, "time": 1763800000.1, "documents": 1280, "set": "held_out", "prompts": 128,
         "completions_per_prompt": 4, "avg": 0.41, "avg_error": 0.02, "pass@1": 0.12,
         "pass@1_error": 0.02, "pass@2": 0.19, "pass@2_error": 0.03, "length": 6.9, "truncated":
         0.01, "seconds": 1.3}

    documents: seen in training by then. avg: mean reward, of a prompt over its completions, then
        over prompts. pass@k:
    the unbiased estimate of the probability that one of k completions is an exact match: the mean
    over prompts of 1 - C(n - c, k) / C(n, k), where c of a prompt's n completions are (arXiv
    2107.03374). NAME_error: the standard error of that mean, over prompts; missing where there is
    one prompt. length: mean tokens of a completion. truncated:
    share that did not end by itself. seconds: that it took, which lie between the times of this
        step's row of
    metrics.jsonl and of the next one. Further numbers are means of what the verifiers measure, such
    as reward/NAME.
    """
    return _rows(run_dir / "evaluations.jsonl", EVALUATION_ROW)


def best_of(
    rows: list[dict[str, Any]], watched: tuple[str, str], steps: Container[int]
) -> dict[str, Any] | None:
    """The row with the highest value among those of these steps; None without any.

    Of equal ones, such as a pass@1 of 0 while nothing succeeds, that with the highest avg; of these
    the latest.

    watched: the name of the set, and of the number.
    """
    name, number = watched
    rows = [row for row in rows if row["set"] == name and number in row and row["step"] in steps]
    return max(rows, key=lambda row: (row[number], row["avg"], row["step"]), default=None)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps that a run has a checkpoint of, in their order."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the folder of a run's newest checkpoint, damaged or not."""
    steps = checkpoint_steps(run_dir)
    return run_dir / "checkpoints" / f"step-{steps[-1]:06d}" if steps else None


def read_saved_rows(checkpoint: Path) -> dict[str, dict[str, int]]:
    """Return size and CRC-32 of the files of rows when a checkpoint was saved, by their names.

    Empty for a checkpoint without them.
    """
    return _object(checkpoint / "manifest.json", _MANIFEST).get("rows", {})


def best_checkpoint(run_dir: Path, watched: tuple[str, str] | None) -> dict[str, Any] | None:
    """The row of the best step that a run has a checkpoint of; None without any, or without a
    number to go by."""
    if watched is None:
        return None
    return best_of(read_evaluations(run_dir), watched, checkpoint_steps(run_dir))


def read_drift(run_dir: Path) -> list[dict[str, Any]]:
    """The changes that resumes made to the configuration: `step` and `changes`, {key: [old, new]},
    of each."""
    return _rows(run_dir / "drift.jsonl", _DRIFT)


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """What the operating system refuses, as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read or written: {error.strerror or error}"
        ) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """As `storage`; what the reader of a damaged file raises becomes a StorageError, too."""
    with storage(path):
        try:
            yield
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise StorageError(f"{path} is damaged ({first_line(error)})") from error


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


def _object(path: Path, shape: dict) -> dict:
    """The JSON object in a file, checked; {} where there is no file."""
    with reading(path):
        return _parsed(path.read_bytes(), shape) if path.exists() else {}


def parse_row(line: bytes, shape: dict, path: Path, number: int) -> dict:
    """The JSON object in a line of a file, checked; number: of the line."""
    with reading(Path(f"{path}:{number}")):
        return _parsed(line, shape)


def _rows(path: Path, shape: dict) -> list[dict]:
    """The JSON objects in the lines of a file, checked, but for a torn last one; none where there
    is no file."""
    with storage(path):
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [parse_row(line, shape, path, number) for number, line in enumerate(lines, start=1)]


def _parsed(data: bytes, shape: dict) -> dict:
    value = json.loads(data)
    expect(value, shape)
    return value


def _yaml(path: Path, kind: type) -> Any:
    with reading(path):
        data = path.read_bytes()
        # of which ten in each of ten lines stand for gigabytes, too
        if re.search(rb"\$\{.*\$\{", data):
            raise ValueError("a line has several ${...}, and a run writes values")
        value = plain_yaml(data)
        if not data.endswith(b"\n"):  # half of a file may be YAML, too
            raise ValueError("its last line is torn")
        expect(value, kind)
        return value


def expect(value: Any, shape: Any, name: str = "content") -> None:
    """ValueError if a value does not have a shape: a type, or a function that is true of it; a list
    of the shape of all items; a dictionary of the shapes of its keys, where `key?` may be missing,
    and str is any other.
    """
    kind = type(shape) if isinstance(shape, (dict, list)) else shape
    if not (isinstance(value, kind) if isinstance(kind, (type, UnionType)) else kind(value)):
        raise ValueError(f"its {name} is not what pgtk writes there")
    if isinstance(shape, list):
        for item in value:
            expect(item, shape[0], name)
    elif isinstance(shape, dict):
        shapes = {key.strip("?"): expected for key, expected in shape.items() if key is not str}
        for key in shapes | (value if str in shape else {}):
            if key in value or f"{key}?" not in shape:
                expect(value.get(key), shapes.get(key, shape.get(str)), key)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    # OverflowError for a whole number that no float can hold
    return type(value) in (int, float) and math.isfinite(value) is not None


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _is_time(value: Any) -> bool:
    return bool(datetime.strptime(str(value), TIME))


_STATUS = {
    "state": STATES.__contains__,
    "step": is_count,
    "saved?": is_count,
    "started?": _is_time,
    "id?": str,
}
_STATUS |= {"mlflow?": lambda info: not info or expect(info, {str: str}) is None}
_STATUS |= {"reason?": str | None, "sweep?": str | None, "parent?": str | None}
METRICS_ROW = {"step": is_count, str: is_number}
EVALUATION_ROW = {
    "set": str,
    "prompts": is_count,
    "avg": is_number,
    "pass@1": _is_share,
    **METRICS_ROW,
}
_DRIFT = {
    "step": is_count,
    "changes": {str: lambda pair: isinstance(pair, list) and len(pair) == 2},
}
_START = {"git?": [{"commit?": str | None, "diff": str}], "gpus?": [dict], "packages?": {str: str}}
_START |= {"memory_bytes?": int, "command?": [str], "directory?": str}
_START |= {"step?": is_count, "modules?": {str: str}, "evaluation_modules?": {str: str}}
_PROVENANCE = {**_START, "resumed?": [{**_START, "time": _is_time}]}
_CHECKSUM = {"bytes": is_count, "crc32": is_count}
_MANIFEST = {"rows?": {"metrics.jsonl?": _CHECKSUM, "evaluations.jsonl?": _CHECKSUM}}
_FILES = {str: {str: dict}}
_DATA = {"accepted?": [{"step": is_count, "before": _FILES}], **_FILES}
_JOB = {"name": str, "directory": str, "status": str}
_SWEEP = {"name": str, "command": list, "jobs": [_JOB]}
