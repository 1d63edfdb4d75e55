"""A run that goes on from a checkpoint of another, in a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import read_drift, read_resolved, read_status, storage
from pgtoolkit.system.shell import shell_path
from pgtoolkit.training.export import refuse_occupied, saved_state

_COPIED = ("overrides.yaml", "provenance.json", "data.json", "recorded_index.npz", "metrics.jsonl", "evaluations.jsonl")
"""Files of a run as they are; a resume takes away the rows of later steps."""


def branch(parent: Path, step: int, folder: Path) -> None:
    """Make `folder` a run that stands where the parent stood after this step, which `train` can resume.

    It has the parent's checkpoint, history and configuration as of that step, and names the parent in status.json.
    The parent is only read. All or nothing is written. Raises ConfigError for a step without a checkpoint or a folder
    that has files, StorageError where the disk refuses, or the checkpoint is damaged.
    """
    use = f"pgtk resume {shell_path(parent)}"
    checkpoint = saved_state(parent, use, step)["path"]
    refuse_occupied(f"hydra.run.dir={folder}", folder)
    with storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            whole = Path(temporary) / "whole"
            shutil.copytree(checkpoint, whole / "checkpoints" / checkpoint.name)
            for name in [name for name in _COPIED if (parent / name).exists()]:
                shutil.copy2(parent / name, whole)
            if (parent / "completions").is_dir():
                shutil.copytree(parent / "completions", whole / "completions")
            drift = read_drift(parent)
            if earlier := [one for one in drift if one["step"] <= step]:
                (whole / "drift.jsonl").write_text("".join(json.dumps(one) + "\n" for one in earlier))
            config = OmegaConf.create(read_resolved(parent))
            for changes in [one["changes"] for one in reversed(drift) if one["step"] > step]:
                for key, (before, _) in changes.items():
                    OmegaConf.update(config, key, before, force_add=True)
            (whole / "config.yaml").write_text(OmegaConf.to_yaml(config))
            origin = {"run": str(parent.resolve()), "id": read_status(parent).get("id"), "step": step}
            with RunDirectory(whole) as run:
                run.set_status("interrupted", step, f"made of step {step} of {parent}", saved=step, parent=origin)
            os.replace(whole, folder)  # takes the place of an empty folder, too
