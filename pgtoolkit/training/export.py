"""A checkpoint in a folder of its own: as a Hugging Face model with a card on how it came about
(`pgtk export`), or as a run that goes on from there (`pgtk resume --step`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch

from pgtoolkit.config.evaluation_sets import watched
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_run import HuggingFaceModelConfig, NumberType, TinyModelConfig
from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.records import (
    best_checkpoint,
    read_config,
    read_data,
    read_drift,
    read_resolved,
    storage,
)
from pgtoolkit.system.model_folder import ADAPTER_SETTINGS, load_config
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal, shell_path
from pgtoolkit.system.yaml_text import to_yaml
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.prompts import scored_by_nobody
from pgtoolkit.tracking.description import description_of
from pgtoolkit.training.checkpoint import (
    list_checkpoints,
    load_newest,
    read_checkpoint,
    refuse_lost_checkpoint,
    settings_of,
    step_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN = ("checkpoints", "status.json", "curves.png", "*.log", ".lock", ".hydra")
"""What a run has for itself alone."""


def export(run_dir: Path, folder: Path, best: bool = False) -> int:
    """Write the run's newest checkpoint to `folder`, all of it or nothing; returns the checkpoint's
    step.

    best: write the one with the highest evaluation.best instead.

    The folder holds the checkpoint's model, its weights in the number type that training began
    with, and README.md; transformers loads it to the same logits (in bfloat16: rounded). LoRA's
    adapters are merged into the model that model.path names. Raises ConfigError if there is no
    checkpoint or the folder has files, StorageError if it cannot be written.
    """
    use = f"pgtk export {run_dir} {folder}"
    if not is_run(run_dir):
        raise not_a_run(use, run_dir, "a run directory")
    refuse_occupied(use, folder)
    state = saved_state(run_dir, use, best=best)
    config = saved_config(run_dir)
    config = dataclasses.replace(config, task=scored_by_nobody(config.task))
    with _whole(folder) as whole:
        whole.mkdir()
        _write_model(config, state, whole)
        (whole / "README.md").write_text(card(config, run_dir, state["step"]), encoding="utf-8")
        for file in whole.iterdir():
            file.chmod(0o644)  # what safetensors writes is its owner's alone
    return state["step"]


def branch(parent: Path, step: int, folder: Path) -> None:
    """Make `folder` a run that stands where the parent stood after this step, which `train` can
    resume.

    It has the parent's checkpoint, history and configuration as of that step (a resume takes away
    the rows of later ones), and names the parent in status.json. The parent is only read. All or
    nothing is written. Raises ConfigError for a step without a checkpoint or a folder that has
    files, StorageError where the disk refuses, or the checkpoint is damaged.
    """
    checkpoint = saved_state(parent, f"pgtk resume {shell_path(parent)}", step)["path"]
    if folder.resolve().is_relative_to(parent.resolve()):
        raise ConfigError(
            refusal(
                setting=f"hydra.run.dir={folder}",
                needs=f"a folder outside {parent}",
                got=folder,
                reason="A run in another would be taken for a part of it.",
                use=f"hydra.run.dir={shell_path(parent)}-{step}",
            )
        )
    refuse_occupied(f"hydra.run.dir={folder}", folder)
    check_rows(parent, checkpoint)
    with _whole(folder) as whole:
        shutil.copytree(parent, whole, ignore=shutil.ignore_patterns(*_OWN))
        shutil.copytree(checkpoint, whole / "checkpoints" / checkpoint.name)
        drift = read_drift(parent)
        config = read_resolved(parent)
        for entry in reversed(drift):
            for key, (before, _) in entry["changes"].items() if entry["step"] > step else ():
                _put_back(config, key, before)
        _take_back_data(whole, step)
        earlier = [json.dumps(entry) + "\n" for entry in drift if entry["step"] <= step]
        (whole / "drift.jsonl").write_text("".join(earlier), encoding="utf-8")
        (whole / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        with RunDirectory(whole) as run:
            place = f"{parent.resolve()}, step {step}"
            run.set_status("interrupted", step, f"made of {place}", saved=step, parent=place)


def _put_back(config: dict, key: str, value: Any) -> None:
    """Set a dotted key of nested dictionaries."""
    *groups, leaf = key.split(".")
    for name in groups:
        config = config.setdefault(name, {})
    config[leaf] = value


def _take_back_data(run_dir: Path, step: int) -> None:
    """Let data.json say what the steps up to this one were made with, and what was accepted for
    those behind it."""
    data = read_data(run_dir)
    accepted = data.pop("accepted", [])
    for entry in reversed(accepted):
        if entry["step"] > step:
            data |= entry["before"]
    if earlier := [entry for entry in accepted if entry["step"] <= step]:
        data["accepted"] = earlier
    if accepted:
        (run_dir / "data.json").write_text(json.dumps(data, indent=1) + "\n")


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Where to make what becomes `folder`, new or empty, once it is whole. StorageError where the
    disk refuses."""
    with storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            whole = Path(temporary) / "whole"
            yield whole
            os.replace(whole, folder)


def saved_state(run_dir: Path, use: str, step: int | None = None, best: bool = False) -> dict:
    """A run's checkpoint of this step, or the best, or else the newest. Raises ConfigError where
    there is none.

    use: the command, for what is said.
    """
    folder = run_dir / "checkpoints"
    if best:
        row = best_checkpoint(run_dir, watched(read_resolved(run_dir)))
        if row is None:
            raise ConfigError(
                refusal(
                    setting=f"{use} --best",
                    needs="a run with evaluations and checkpoints",
                    got="none",
                    reason="A run keeps one by evaluation.best, from its first evaluation after a "
                    "step on.",
                    use=use,
                )
            )
        step = row["step"]
    if step is None:
        if (state := load_newest(folder)) is not None:
            return state
        refuse_lost_checkpoint(run_dir, use)
    if problem := lacks_checkpoint(run_dir, use, step):
        raise ConfigError(problem)
    path = folder / f"step-{step:06d}"
    try:
        return read_checkpoint(path)
    except Exception as error:  # of damaged files its parsers each raise their own
        raise StorageError(
            f"the checkpoint {path} is damaged: {first_line(error)}. Use another one."
        ) from error


def lacks_checkpoint(
    run_dir: Path, use: str, step: int | None, most: float = math.inf
) -> str | None:
    """What is said of a run without a checkpoint of this step; most: trainer.max_steps, where it is
    to be continued."""
    there = [step_of(checkpoint) for checkpoint in list_checkpoints(run_dir / "checkpoints")]
    if step in there:
        return None
    if not there:
        return refusal(
            setting=use,
            needs="a checkpoint",
            got="none",
            reason="A run saves one every trainer.checkpoint_every steps and at its end.",
            use=f"pgtk resume {shell_path(run_dir)}",
        )
    more = f" trainer.max_steps={2 * there[-1]}" if there[-1] >= most else ""
    return refusal(
        setting=f"{use} --step={step}",
        needs=f"one of the steps with a checkpoint, {', '.join(map(str, there))}",
        got=step,
        reason="The run keeps trainer.keep_checkpoints of them, and the best.",
        use=f"--step={there[-1]}{more}",
    )


def refuse_occupied(use: str, folder: Path) -> None:
    """Raises ConfigError for a folder with files."""
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    if count or (folder.exists() and not folder.is_dir()):
        got = f"one with {count} {'entry' if count == 1 else 'entries'}" if count else "a file"
        raise ConfigError(
            f"{use} needs a new or empty folder (got {got}). Nothing is overwritten. Use "
            f"{folder}-2."
        )


def _write_model(config: Config, state: dict, folder: Path) -> None:
    """The checkpoint's Hugging Face folder, its weights in the number type that its configuration
    names."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    checkpoint = state["path"]
    try:
        model = (
            _whole_model(checkpoint)
            if state.get("base_digest") is None
            else _merged_model(config, state)
        )
    except ConfigError:  # about the model that the adapters belong to
        raise
    except Exception as error:  # of damaged files its many parsers each raise their own
        raise StorageError(
            f"the checkpoint {checkpoint} is damaged: transformers cannot load it "
            f"({first_line(error)}). Remove it to export the one before."
        ) from error
    model.save_pretrained(folder)
    for name, data in settings_of(checkpoint).items():
        if not (folder / name).exists() and name != ADAPTER_SETTINGS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)


def _whole_model(checkpoint: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {
        "trust_remote_code": False,
        "local_files_only": True,
        "use_safetensors": True,
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", output_loading_info=True, **options
    )
    model, report = loaded
    if lacks := sorted(report["missing_keys"]):
        raise ValueError(f"{lacks[0]} is missing")
    return model


def _merged_model(config: Config, state: dict) -> PreTrainedModel:
    """The run's own model, read in float32, with a checkpoint's adapters in its weights."""
    from pgtoolkit.model.lora import merge
    from pgtoolkit.model.setup import build_policy
    from pgtoolkit.training.state import load_weights

    assert isinstance(config.model, HuggingFaceModelConfig)
    policy = build_policy(
        dataclasses.replace(config.model, dtype=NumberType.float32), None, on_gpu=False
    )
    load_weights(policy, state)
    merge(policy.model)
    dtype: torch.dtype = load_config(config.model.path).dtype or torch.float32
    model: Any = policy.model  # whose `to` transformers types wrongly
    return model.to(dtype)


def card(config: Config, run_dir: Path, step: int) -> str:
    """README.md: what was trained how, and how to load it; export.md is its template."""
    described, (resolved, overrides) = description_of(run_dir), read_config(run_dir)
    base = ""
    # of the hub
    if (
        isinstance(config.model, HuggingFaceModelConfig)
        and not Path(config.model.path).is_absolute()
    ):
        base = f"base_model: {config.model.path}\n"
    prompt = '"..."'  # a place to put one
    # which would run its code
    if isinstance(config.model, TinyModelConfig) and config.task.name != "conversation":
        prompt = json.dumps(make_task(config.task, config.seed).prompt(0).text)
    filled = {
        "base": base,
        "name": described.run_name,
        "loss": chosen(config, "loss"),
        "aggregation": config.aggregation.reducer or config.aggregation.mode.value,
        "seed": config.seed,
        "task": config.task.name,
        "step": step,
        "max_steps": config.trainer.max_steps,
        "prompt": prompt,
        "overrides": redact(" ".join(overrides)) or "none",
        "code": described.tags.get("git_commit", "unknown"),
        "configuration": redact(to_yaml(resolved)).rstrip(),
    }
    return Template(
        files("pgtoolkit.training").joinpath("export.md").read_text(encoding="utf-8")
    ).substitute(filled)
