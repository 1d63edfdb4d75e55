"""What a run reads from outside of its directory: prompts, recorded rollouts, model folders;
whether they changed."""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
from pathlib import Path

from pgtoolkit.config.evaluation_sets import held_out_sets, is_on
from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import RecordedRolloutConfig
from pgtoolkit.config.schema_run import HuggingFaceModelConfig
from pgtoolkit.config.schema_tasks import ConversationTaskConfig, PromptsTaskConfig, TaskConfig
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.recorded_index import RecordedIndex, read_index
from pgtoolkit.runs.records import read_data, storage
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.tasks.prompt_rows import prompt_files
from pgtoolkit.tasks.row_files import find_files

WHOLE_BYTES = 64 * 2**20
"""A larger file of a model is looked at in samples: weights of terabytes take seconds."""

_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_END_BYTES = 2**20

log = logging.getLogger("pgtoolkit")


def record_data(run_dir: Path, config: Config, step: int | None) -> None:
    """Keep the digests of the run's data in its data.json: {key: {file: {"bytes", "sha256"}}}.

    Those of recorded rollouts are compared here; `record_rollouts` adds them where the run starts.
    step: that the run is continued from; None where it starts. Raises ConfigError if it is
        continued with other data
    than were recorded, unless `trainer.accept_changed_data`; the data before are then added to the
    list `accepted`.
    """
    current = digests(config)
    if step is not None and isinstance(config.rollout, RecordedRolloutConfig):
        files = find_files(config.rollout.path, "rollout.path")
        current["rollout.path"] = _digests(files, sampled=False, index=read_index(run_dir))
    before = read_data(run_dir) if step is not None else {}
    accepted = before.pop("accepted", [])
    read = {
        key: files
        for key, files in before.items()
        if key in current or not key.startswith("evaluation.")
    }
    changes = {key: _difference(files, current.get(key, {})) for key, files in read.items()}
    changes = {key: difference for key, difference in changes.items() if difference}
    if changes:
        assert step is not None  # a run that starts has no data before
        if not config.trainer.accept_changed_data:
            refusals = [
                _refusal(config, key, step, difference) for key, difference in changes.items()
            ]
            raise ConfigError("\n".join(refusals))
        for key, difference in changes.items():
            log.warning(f"note: from step {step + 1} on {key} has other contents: {difference}.")
        accepted.append({"step": step, "before": {key: before[key] for key in changes}})
    content = current | ({"accepted": accepted} if accepted else {})
    _write(run_dir, content)


def record_rollouts(run_dir: Path, index: RecordedIndex) -> None:
    """Add the digests of recorded rollouts, as the run reads them. DataError where data.json has
    others."""
    data, current = read_data(run_dir), index.digests()
    if difference := _difference(data.get("rollout.path", current), current):
        raise DataError(
            f"rollout.path needs files that stay as they are (got {difference}). Start the run "
            "again."
        )
    _write(run_dir, data | {"rollout.path": current})


def _write(run_dir: Path, content: dict) -> None:
    with storage(path := run_dir / "data.json"):
        write_atomically(path, json.dumps(content, indent=1) + "\n")


def digests(config: Config) -> dict[str, dict[str, dict]]:
    """By key: the files that it names, by their paths below the folder that holds them all; without
    recorded rollouts.

    Prompts are read whole. Of a model folder all files count that lie in it, but for hidden ones
    and README.md; of one larger than WHOLE_BYTES its size, the first and the last MiB, and 64
    blocks of 64 KiB between them. A model of the Hugging Face hub is known by its name alone.
    """
    files: dict[str, list[Path]] = {}
    models = (
        {"model.path": config.model.path}
        if isinstance(config.model, HuggingFaceModelConfig)
        else {}
    )
    if config.kl.reference is not None and config.kl.reference not in NO_FOLDER:
        models["kl.reference"] = config.kl.reference
    if config.critic.path is not None:
        models["critic.path"] = config.critic.path
    for key, path in models.items():
        if (folder := Path(path)).is_dir():
            inside = [
                file
                for file in folder.iterdir()
                if not file.name.startswith(".") and file.name != "README.md"
            ]
            files[key] = sorted(file for file in inside if file.is_file())
    prompts = _prompts(config)
    for key, task in prompts.items():
        assert task.path is not None
        files[key] = prompt_files(task.path, task.split, getattr(task, "config", None))
    return {key: _digests(paths, sampled=key in models) for key, paths in files.items()}


def _prompts(config: Config) -> dict[str, PromptsTaskConfig | ConversationTaskConfig]:
    """By the key of their path: the tasks that read prompts from files."""
    held_out = held_out_sets(config) if is_on(config) and config.evaluation.sets else ()
    tasks: dict[str, TaskConfig] = {"task.path": config.task}
    tasks |= {f"evaluation.sets.{chosen.name}.path": chosen.task for chosen in held_out}
    return {
        key: task
        for key, task in tasks.items()
        if isinstance(task, PromptsTaskConfig | ConversationTaskConfig) and task.path is not None
    }


def _digests(
    paths: list[Path], sampled: bool, index: RecordedIndex | None = None
) -> dict[str, dict]:
    """index: of the run; what it knows of a file whose size and time have not changed is not
    computed again."""
    common = os.path.commonpath([path.absolute().parent for path in paths]) if paths else ""
    names = {os.path.relpath(path.absolute(), common): path for path in paths}
    known = (
        {}
        if index is None
        else {name: index.digests()[name] for name in names if index.knows(name, names[name])}
    )
    return {name: known.get(name) or _digest(path, sampled) for name, path in names.items()}


def _digest(path: Path, sampled: bool) -> dict:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not sampled or size <= WHOLE_BYTES:
                return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            digest = hashlib.sha256()
            between = range(_END_BYTES, size - _END_BYTES, (size - 2 * _END_BYTES) // _SAMPLES)
            for start, length in [
                (0, _END_BYTES),
                *((b, _SAMPLE_BYTES) for b in between),
                (size - _END_BYTES, -1),
            ]:
                file.seek(start)
                digest.update(file.read(length))
            return {"bytes": size, "sha256": digest.hexdigest(), "sampled": True}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _difference(before: dict, now: dict) -> str:
    """What of some files changed, in words; nothing if they are the same."""
    kinds = {
        "changed": [name for name in before if name in now and before[name] != now[name]],
        "missing": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    shown = {
        kind: ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        for kind, names in kinds.items()
        if names
    }
    return "; ".join(f"{names} {kind}" for kind, names in shown.items())


def _refusal(config: Config, key: str, step: int, difference: str) -> str:
    task = _prompts(config).get(key)
    value = operator.attrgetter(key)(config) if task is None else task.path
    return (
        f"{key}={value} needs the contents that the run began with (got {difference}). "
        f"Its first {step} steps were made with those. Restore them, or use "
        "trainer.accept_changed_data=true."
    )
