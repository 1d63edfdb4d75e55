"""Digests of the prompts, recorded rollouts and model folders that a run reads, to see changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.config.evaluation_sets import HeldOut, held_out_sets, is_on
from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.settings import HuggingFaceModelSettings, ModelSettings
from pgtoolkit.rollouts.recorded_index import RecordedIndex, read_index
from pgtoolkit.rollouts.settings import RecordedRolloutSettings
from pgtoolkit.runs.records import read_data, storage
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.tasks.prompt_rows import prompt_files
from pgtoolkit.tasks.row_files import find_files
from pgtoolkit.tasks.settings import ConversationTaskSettings, PromptsTaskSettings, TaskSettings
from pgtoolkit.training.loss_settings import KLSettings
from pgtoolkit.training.settings import CriticSettings

FileDigest = dict[str, int | str]
"""{"bytes": size, "sha256": digest}, with "sampled": True for a large file of a model."""

Digests = dict[str, FileDigest]
"""Digests of the files of one key, by their paths below the folder that holds them all."""

WHOLE_BYTES = 64 * 2**20
"""Of a larger file of a model only samples are read, so that terabytes of weights take seconds."""

_SAMPLES = 64
_SAMPLE_BYTES = 2**16
_END_BYTES = 2**20

log = logging.getLogger("pgtoolkit")


def record_data(run_dir: Path, config: Config, step: int | None) -> None:
    """Write the digests of the run's data to its data.json, as {key: Digests}.

    Digests of recorded rollouts are compared here, but `record_rollouts` adds them to a new run.

    step: after which the run is continued; None where it starts.
    Raises ConfigError if the run is continued with changed data, unless
    `trainer.accept_changed_data`. Then the data before are added to the list `accepted`.
    """
    models = model_paths(config.model, config.kl, config.critic)
    sets = held_out_sets(config) if is_on(config) and config.evaluation.sets else ()
    tasks = tasks_with_files(config.task, sets)
    current = digests(models, tasks)
    if step is not None and isinstance(config.rollout, RecordedRolloutSettings):
        files = find_files(config.rollout.path, "rollout.path")
        current["rollout.path"] = _digests(files, sampled=False, index=read_index(run_dir))
    before = read_data(run_dir) if step is not None else {}
    accepted = before.pop("accepted", [])
    changes = {}
    history = {}
    for key, files in before.items():
        is_removed_set = key.startswith("evaluation.") and key not in current
        now = current.get(key, {})
        accepted_of_key = [(entry["step"], entry["before"].get(key)) for entry in accepted]
        history[key] = _steps_with(files, step or 0, accepted_of_key)
        difference = _difference(history[key][-1].files, now)
        if difference and _difference(files, now) and not is_removed_set:
            changes[key] = difference
    if changes:
        assert step is not None  # a run that starts has no data before
        if not config.trainer.accept_changed_data:
            values = {"rollout.path": getattr(config.rollout, "path", None), **models}
            values |= {key: task.path for key, task in tasks.items()}
            refusals = [
                _refusal(key, values[key], history[key], current.get(key, {})) for key in changes
            ]
            raise ConfigError("\n".join(refusals))
        for key, difference in changes.items():
            log.warning(f"note: from step {step + 1} on {key} has other contents: {difference}.")
        accepted.append({"step": step, "before": {key: before[key] for key in changes}})
    content: dict[str, object] = {**current}
    if accepted:
        content["accepted"] = accepted
    _write(run_dir, content)


def record_rollouts(run_dir: Path, index: RecordedIndex) -> None:
    """Add the digests of recorded rollouts to the run's data.json.

    Raises DataError where it has other digests of these files.
    """
    data = read_data(run_dir)
    current = index.digests()
    difference = _difference(data.get("rollout.path", current), current)
    if difference:
        raise DataError(
            f"rollout.path needs files that do not change while they are read (got {difference}). "
            "Start the run again."
        )
    _write(run_dir, data | {"rollout.path": current})


def _write(run_dir: Path, content: Mapping[str, object]) -> None:
    path = run_dir / "data.json"
    with storage(path):
        write_atomically(path, json.dumps(content, indent=1) + "\n")


def digests(
    models: Mapping[str, str],
    tasks: Mapping[str, PromptsTaskSettings | ConversationTaskSettings],
) -> dict[str, Digests]:
    """Return the digests of the files that each key names, but for recorded rollouts.

    models, tasks: by the keys of their paths.
    Files of prompts are read as a whole. A model folder counts with all its files but hidden ones
    and README.md. Of a file larger than WHOLE_BYTES, the digest is of the first and the last MiB
    and of 64 blocks of 64 KiB between them. Of a model of the Hugging Face hub nothing is read.
    """
    files = {key: _model_files(Path(path)) for key, path in models.items() if Path(path).is_dir()}
    for key, task in tasks.items():
        assert task.path is not None
        files[key] = prompt_files(task.path, task.split, getattr(task, "config", None))
    return {key: _digests(paths, sampled=key in models) for key, paths in files.items()}


def model_paths(model: ModelSettings, kl: KLSettings, critic: CriticSettings) -> dict[str, str]:
    """Return the folders, or names on the hub, of all models of a run by their keys."""
    paths = {}
    if isinstance(model, HuggingFaceModelSettings):
        paths["model.path"] = model.path
    if kl.reference is not None and kl.reference not in NO_FOLDER:
        paths["kl.reference"] = kl.reference
    if critic.path is not None:
        paths["critic.path"] = critic.path
    return paths


def _model_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(".") and file.name != "README.md"
    )


def tasks_with_files(
    task: TaskSettings, sets: Iterable[HeldOut]
) -> dict[str, PromptsTaskSettings | ConversationTaskSettings]:
    """Return the tasks that read prompts from files, by the keys of their paths.

    sets: of evaluation.sets.
    """
    tasks: dict[str, TaskSettings] = {"task.path": task}
    tasks |= {f"evaluation.sets.{held_out.name}.path": held_out.task for held_out in sets}
    return {
        key: task
        for key, task in tasks.items()
        if isinstance(task, PromptsTaskSettings | ConversationTaskSettings)
        and task.path is not None
    }


def _digests(paths: list[Path], sampled: bool, index: RecordedIndex | None = None) -> Digests:
    """Return the digests of files.

    sampled: whether only samples of large files are read.
    index: of the run. It has the digests of files whose size and time have not changed.
    """
    common = os.path.commonpath([path.absolute().parent for path in paths]) if paths else ""
    result = {}
    for path in paths:
        name = os.path.relpath(path.absolute(), common)
        if index is not None and index.knows(name, path):
            result[name] = index.digests()[name]
        else:
            result[name] = _digest(path, sampled)
    return result


def _digest(path: Path, sampled: bool) -> FileDigest:
    """Return size and SHA-256 of a file. Raises DataError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not sampled or size <= WHOLE_BYTES:
                return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            starts = range(_END_BYTES, size - _END_BYTES, (size - 2 * _END_BYTES) // _SAMPLES)
            first_block = (0, _END_BYTES)
            last_block = (size - _END_BYTES, -1)
            blocks_between = [(start, _SAMPLE_BYTES) for start in starts]
            digest = hashlib.sha256()
            for start, length in (first_block, *blocks_between, last_block):
                file.seek(start)
                digest.update(file.read(length))
            return {"bytes": size, "sha256": digest.hexdigest(), "sampled": True}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


class _Steps(NamedTuple):
    """Steps of a run that were made with the same data."""

    first: int
    last: int
    files: Digests

    def __str__(self) -> str:
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}"


def _steps_with(
    files: Digests, step: int, accepted: Iterable[tuple[int, Digests | None]]
) -> list[_Steps]:
    """Return with which data of a key a run has made its steps; at least one entry.

    files: the newest data. step: the last one. accepted: the step after which a change was
        accepted, and the data before; None where those of the key have not changed.
    """
    changes = [(last, before) for last, before in accepted if before is not None]
    result: list[_Steps] = []
    for last, data in [*changes, (step, files)]:
        first = result[-1].last + 1 if result else 1
        if last >= first:  # otherwise the run ended before a checkpoint with these data
            result.append(_Steps(first, min(last, step), data))
    return result or [_Steps(1, step, files)]


def _difference(before: Digests, now: Digests) -> str:
    """Return in words which files have changed; "" if none has. A single file may have another
    name."""
    if len(before) == len(now) == 1 and {*before} != {*now}:
        is_same = [*before.values()] == [*now.values()]
        (old_name,) = before
        (new_name,) = now
        return "" if is_same else f"{new_name}, with other contents than {old_name}"
    changes = {
        "changed": [name for name in before if name in now and before[name] != now[name]],
        "missing": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    phrases = []
    for change, names in changes.items():
        if names:
            further = ", …" if len(names) > 3 else ""
            phrases.append(f"{', '.join(names[:3])}{further} {change}")
    return "; ".join(phrases)


def _refusal(key: str, value: object, history: list[_Steps], now: Digests) -> str:
    """Return the refusal of data that are not those of the last steps.

    history: see `_steps_with`.
    """
    *earlier, newest = history
    difference = _difference(newest.files, now)
    if not earlier:
        return (
            f"{key}={value} needs the contents that the run began with (got {difference}). "
            f"Its first {newest.last} steps were made with those. Restore them, or use "
            "trainer.accept_changed_data=true."
        )
    same = [str(steps) for steps in earlier if not _difference(steps.files, now)]
    others = [str(steps) for steps in earlier if _difference(steps.files, now)]
    steps_made = [f"{' and '.join(same)} with those that are there now"] if same else []
    steps_made += [f"{' and '.join(others)} with others"] if others else []
    return (
        f"{key}={value} needs the contents that {newest} had (got {difference}). Since a change "
        f"was accepted, the run has gone on with those; it made {', '.join(steps_made)}. Restore "
        f"those of {newest}, or use trainer.accept_changed_data=true."
    )
