"""A run that goes on from a checkpoint of another, in a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import read_drift, read_resolved, storage
from pgtoolkit.system.report import refusal
from pgtoolkit.system.shell import shell_path
from pgtoolkit.training.export import refuse_occupied, saved_state

_OWN = ("checkpoints", "status.json", "curves.png", "*.log", ".lock", ".hydra")
"""What a run has for itself alone."""


def branch(parent: Path, step: int, folder: Path) -> None:
    """Make `folder` a run that stands where the parent stood after this step, which `train` can resume.

    It has the parent's checkpoint, history and configuration as of that step (a resume takes away the rows of later
    ones), and names the parent in status.json. The parent is only read. All or nothing is written. Raises ConfigError
    for a step without a checkpoint or a folder that has files, StorageError where the disk refuses, or the checkpoint
    is damaged.
    """
    checkpoint = saved_state(parent, f"pgtk resume {shell_path(parent)}", step)["path"]
    if folder.resolve().is_relative_to(parent.resolve()):
        place = f"hydra.run.dir={shell_path(parent)}-{step}"
        reason = "A run in another would be taken for a part of it."
        raise ConfigError(refusal(f"hydra.run.dir={folder}", f"a folder outside {parent}", folder, reason, place))
    refuse_occupied(f"hydra.run.dir={folder}", folder)
    with storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            whole = shutil.copytree(parent, Path(temporary) / "whole", ignore=shutil.ignore_patterns(*_OWN))
            shutil.copytree(checkpoint, whole / "checkpoints" / checkpoint.name)
            drift, config = read_drift(parent), OmegaConf.create(read_resolved(parent))
            for entry in reversed(drift):
                for key, (before, _) in entry["changes"].items() if entry["step"] > step else ():
                    OmegaConf.update(config, key, before, force_add=True)
            earlier = [json.dumps(entry) + "\n" for entry in drift if entry["step"] <= step]
            (whole / "drift.jsonl").write_text("".join(earlier))
            (whole / "config.yaml").write_text(OmegaConf.to_yaml(config))
            with RunDirectory(whole) as run:
                place = f"{parent.resolve()}, step {step}"
                run.set_status("interrupted", step, f"made of {place}", saved=step, parent=place)
            os.replace(whole, folder)  # takes the place of an empty folder, too
