"""Reads the files of a run directory; a damaged one is refused by its name, with the reason."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, TypeGuard, TypeVar

from pgtoolkit.errors import StorageError, first_line, refused_by_disk
from pgtoolkit.runs.former import (
    overrides_without_auto_compile,
    with_later_groups,
    without_auto_compile,
)
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.yaml_text import plain_yaml

_Kind = TypeVar("_Kind")

Shape = type | UnionType | Callable[[object], bool] | list | dict
"""What a value has to be, see `expect`."""

STATES = ("running", "done", "failed", "interrupted", "pruned")
TIME = "%Y-%m-%dT%H:%M:%S%z"
"""The format of times. Only those of metrics are seconds since 1970."""


def read_config(run_dir: str | Path) -> tuple[dict, list[str]]:
    """Return (configuration, overrides) of a run, from config.yaml and overrides.yaml."""
    overrides = _read_yaml(Path(run_dir) / "overrides.yaml", list)
    return read_resolved(run_dir), overrides_without_auto_compile(overrides, Path(run_dir))


def read_resolved(run_dir: str | Path) -> dict:
    """Return the configuration of a run, from config.yaml."""
    config = _read_yaml(Path(run_dir) / "config.yaml", dict)
    return with_later_groups(without_auto_compile(config, Path(run_dir)))


def chosen_files(config: Mapping[str, object], overrides: Iterable[object]) -> dict[str, str]:
    """Return the overrides that chose a file whose name is in no key, such as experiment=dapo.

    config: dotted keys with their values. overrides: texts; a damaged file may have other values.
    """
    groups = {name.partition(".")[0] for name in config}
    chosen = {}
    for override in map(str, overrides):
        group, _, option = override.lstrip("+").partition("=")
        group = group.partition("@")[0]
        # Another name with a dot is a key of another version.
        if option and "." not in group and group not in groups:
            chosen[group] = option
    return chosen


def read_chosen_files(run_dir: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the `chosen_files` of a run; {} where its overrides.yaml cannot be read."""
    try:
        return chosen_files(config, _read_yaml(run_dir / "overrides.yaml", list))
    except StorageError:
        return {}


def read_leaves(run_dir: Path) -> JsonObject:
    """Return the configuration of a run as dotted keys with their values.

    Groups that runs have in common are parsed once, so the values must not be changed.
    """
    path = run_dir / "config.yaml"
    with storage(path):
        # One part for each top-level key, behind an empty one.
        parts = re.split(rb"(?m)^(?=\w+:)", path.read_bytes())
    try:
        groups = [_leaves_of_group(part) for part in parts[1:]]
        is_complete = not parts[0] and parts[-1].endswith(b"\n")
        has_repeated_key = len({part.partition(b":")[0] for part in parts}) < len(parts)
        if is_complete and not has_repeated_key:
            of_later_groups = dict(leaves(with_later_groups({})))
            return of_later_groups | {key: value for pairs in groups for key, value in pairs}
    except ValueError:  # read_resolved raises an error that says what is wrong with the file
        pass
    return dict(leaves(read_resolved(run_dir)))


@functools.lru_cache(2**12)
def _leaves_of_group(text: bytes) -> list[tuple[str, object]]:
    """Return the leaves of one top-level key. Raises ValueError for any other text."""
    value = plain_yaml(text)
    if not isinstance(value, dict) or [*value] != [text.partition(b":")[0].decode()]:
        raise ValueError
    return leaves(value)


def read_status(run_dir: str | Path) -> JsonObject:
    """Return a run's status.json, or {} before its first.

    The status of a killed run is still `running`, though its lock is free.
    """
    return _read_object(Path(run_dir) / "status.json", _STATUS)


def read_provenance(run_dir: Path) -> dict:
    """Return provenance.json; {} where there is none. Raises StorageError if it is damaged."""
    return _read_object(run_dir / "provenance.json", _PROVENANCE)


def known_provenance(run_dir: Path) -> dict:
    """Return provenance.json; {} also where it is damaged, for callers that can do without."""
    try:
        return read_provenance(run_dir)
    except StorageError:
        return {}


def read_data(run_dir: Path) -> dict:
    """Return data.json, the digests of the data that a run reads; {} where there is none."""
    return _read_object(run_dir / "data.json", _DATA)


def read_sweep(folder: Path) -> dict:
    """Return sweep.json of a sweep's folder: `name`, `command` and `jobs`; {} where there is none.

    sweep.jsonl has what became of jobs since: each line replaces an entry of `jobs`.
    """
    sweep = _read_object(folder / "sweep.json", _SWEEP)
    if sweep:
        rows = [*sweep["jobs"], *_read_rows(folder / "sweep.jsonl", _JOB)]
        sweep["jobs"] = [*{row["directory"]: row for row in rows}.values()]
    return sweep


def command_of_sweep(folder: Path) -> str | None:
    """Return the command that starts a sweep or goes on with it, by its folder; None for another
    folder, and for a sweep that was started without a command."""
    command = read_sweep(folder).get("command")
    return shlex.join(command) if command else None


def read_evaluations(run_dir: Path) -> list[JsonObject]:
    """Return what a run scored on held-out prompts, the rows of evaluations.jsonl, if there are
    any.

    Each line is a JSON object for one set of prompts at one step. The lines of a step are written
    together, before the checkpoint of that step. A resume drops those of later steps than its own.
    Step 0 is before the first update.

        {"step": 20, "time": 1763800000.1, "documents": 1280, "set": "held_out", "prompts": 128,
         "completions_per_prompt": 4, "avg": 0.41, "avg_error": 0.02, "pass@1": 0.12,
         "pass@1_error": 0.02, "pass@2": 0.19, "pass@2_error": 0.03, "length": 6.9, "truncated":
         0.01, "seconds": 1.3}

    documents: seen in training by then.
    avg: mean reward, of a prompt over its completions, then over prompts.
    pass@k: the unbiased estimate of the probability that one of k completions is an exact match:
        the mean over prompts of 1 - C(n - c, k) / C(n, k), where c of a prompt's n completions
        match (arXiv 2107.03374).
    NAME_error: the standard error of that mean, over prompts; missing where there is one prompt.
    length: mean tokens of a completion.
    truncated: the share of completions that did not end by themselves.
    seconds: the time that it took, between the times of this step's row of metrics.jsonl and of the
        next one.
    Further numbers are means of the verifiers' measures, such as reward/NAME.
    """
    return _read_rows(run_dir / "evaluations.jsonl", EVALUATION_ROW)


def best_of(
    rows: list[JsonObject], watched: tuple[str, str], steps: Container[int]
) -> JsonObject | None:
    """Return the row with the highest value among those of these steps; None where there is none.

    Of rows with equal values, such as a pass@1 of 0 while nothing succeeds, the one with the
    highest avg is best, and of these the latest.

    watched: the name of the set, and of the number.
    """
    name, number = watched
    rows = [row for row in rows if row["set"] == name and number in row and row["step"] in steps]
    return max(rows, key=lambda row: (row[number], row["avg"], row["step"]), default=None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first; none where there is no such folder.

    Raises StorageError where the folder cannot be read.
    """
    with storage(folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
    return sorted((folder / name for name in names if re.fullmatch(r"step-\d+", name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in ascending order."""
    return [step_of(path) for path in list_checkpoints(run_dir / "checkpoints")]


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the folder of a run's newest checkpoint, damaged or not."""
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    return checkpoints[-1] if checkpoints else None


def read_saved_rows(checkpoint: Path) -> dict[str, dict[str, int]]:
    """Return, by file name, size and CRC-32 that the files of rows had when a checkpoint was saved.

    Empty for a checkpoint that has not recorded them.
    """
    return _read_object(checkpoint / "manifest.json", _MANIFEST).get("rows", {})


def best_checkpoint(run_dir: Path, watched: tuple[str, str] | None) -> JsonObject | None:
    """Return the row of the best among the steps that a run has a checkpoint of.

    watched: the name of the set, and of the number. None where there is no such row, or no number
    to compare.
    """
    if watched is None:
        return None
    return best_of(read_evaluations(run_dir), watched, checkpoint_steps(run_dir))


def read_drift(run_dir: Path) -> list[JsonObject]:
    """Return the changes that resumes made to the configuration.

    Each has a `step`, and `changes` as {key: [old, new]}; where code of the user's own was changed,
    too, `code` as {module: [old digest, new digest]}, and `code_acts_after` as {module: step}, a
    later one than `step` where the checkpoint has rollouts that were made with the old code, None
    where it is not known which.
    """
    return _read_rows(run_dir / "drift.jsonl", _DRIFT)


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Raise an OSError in the block as StorageError."""
    try:
        yield
    except OSError as error:
        raise refused_by_disk(path, error) from error


@contextlib.contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """Raise a StorageError for an OSError in the block, and for a damaged file."""
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
            raise StorageError(
                f"{path} is damaged ({first_line(error)}). Put it back, from a backup."
            ) from error


def leaves(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    """Return a nested configuration as (dotted key, plain value) pairs, in order."""
    pairs = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            pairs += leaves(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", plain(value)))
    return pairs


def plain(value: object) -> Any:
    """Return a value in types of JSON and YAML: enums by value, paths as text, tuples as lists."""
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    return str(value) if isinstance(value, Path) else value


def _read_object(path: Path, shape: dict) -> dict:
    """Return the JSON object in a file, checked; {} where there is no file."""
    with reading_file(path):
        return _parse(path.read_bytes(), shape) if path.exists() else {}


def parse_row(line: bytes, shape: dict, path: Path, number: int) -> JsonObject:
    """Return the JSON object in a line of a file, checked. number: of the line."""
    with reading_file(Path(f"{path}:{number}")):
        return _parse(line, shape)


def _read_rows(path: Path, shape: dict) -> list[JsonObject]:
    """Return the JSON objects in the lines of a file, checked.

    A torn last line is left out. The list is empty where there is no file.
    """
    with storage(path):
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [parse_row(line, shape, path, number) for number, line in enumerate(lines, start=1)]


def _parse(data: bytes, shape: dict) -> JsonObject:
    value = json.loads(data)
    expect(value, shape)
    return value


def _read_yaml(path: Path, kind: type[_Kind]) -> _Kind:
    with reading_file(path):
        data = path.read_bytes()
        # Ten interpolations in each of ten lines would expand to gigabytes.
        if re.search(rb"\$\{.*\$\{", data):
            raise ValueError("a line has several ${...}, and a run writes values")
        value = copy.deepcopy(_parsed(data))
        if not data.endswith(b"\n"):  # half of a file may still be valid YAML
            raise ValueError("its last line is torn")
        expect(value, kind)
        return value


@functools.lru_cache(16)
def _parsed(text: bytes) -> Any:
    """Return what a YAML text says, parsed once: a run reads its own files several times."""
    return plain_yaml(text)


def expect(value: object, shape: Shape, name: str = "content") -> None:
    """Raise ValueError if a value does not have the shape that pgtk writes.

    shape: a type; a function that returns whether a value is right; a list with the shape of all
        items; or a dictionary with the shapes of its keys, where `key?` may be missing and str
        stands for any other key.
    name: of the value, for the error.
    """
    kind = type(shape) if isinstance(shape, (dict, list)) else shape
    is_right = isinstance(value, kind) if isinstance(kind, (type, UnionType)) else kind(value)
    if not is_right:
        raise ValueError(f"its {name} is not what pgtk writes there")
    if isinstance(shape, list):
        assert isinstance(value, list)  # since it is right
        for item in value:
            expect(item, shape[0], name)
    elif isinstance(shape, dict):
        assert isinstance(value, dict)
        shapes = {key.strip("?"): expected for key, expected in shape.items() if key is not str}
        keys = shapes | value if str in shape else shapes
        for key in keys:
            is_optional = f"{key}?" in shape
            if key in value or not is_optional:
                expect(value.get(key), shapes[key] if key in shapes else shape[str], key)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    math.isfinite(value)  # It raises OverflowError for a whole number that no float can hold.
    return True


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


def _is_time(value: object) -> bool:
    return bool(datetime.strptime(str(value), TIME))


def _are_texts(value: object) -> bool:
    """Return whether a value is empty, or a dictionary of texts. Raises ValueError for others."""
    if value:
        expect(value, {str: str})
    return True


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


_STATUS = {
    "state": STATES.__contains__,
    "step": is_count,
    "saved?": is_count,
    "started?": _is_time,
    "id?": str,
    "mlflow?": _are_texts,
    "reason?": str | None,
    "sweep?": str | None,
    "parent?": str | None,
}
METRICS_ROW = {"step": is_count, str: is_number}
EVALUATION_ROW = {
    "set": str,
    "prompts": is_count,
    "avg": is_number,
    "pass@1": _is_share,
    **METRICS_ROW,
}
_DRIFT = {"step": is_count, "changes": {str: _is_pair}, "code?": {str: _is_pair}}
_START = {
    "git?": [{"commit?": str | None, "diff": str}],
    "gpus?": [dict],
    "packages?": {str: str},
    "memory_bytes?": int,
    "command?": [str],
    "directory?": str,
    "step?": is_count,
    "modules?": {str: str},
    "evaluation_modules?": {str: str},
}
_PROVENANCE = {**_START, "resumed?": [{**_START, "time": _is_time}]}
_CHECKSUM = {"bytes": is_count, "crc32": is_count}
_MANIFEST = {"rows?": {"metrics.jsonl?": _CHECKSUM, "evaluations.jsonl?": _CHECKSUM}}
_FILES = {str: {str: dict}}
_DATA = {"accepted?": [{"step": is_count, "before": _FILES}], **_FILES}
_JOB = {"name": str, "directory": str, "status": str}
_SWEEP = {"name": str, "command": list, "jobs": [_JOB]}
