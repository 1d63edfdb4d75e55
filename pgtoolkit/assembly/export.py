"""Puts a checkpoint in a folder of its own: as a Hugging Face model with a card (`pgtk export`), or
as a run that continues from there (`pgtk resume --step`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, cast

import torch

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.assembly.merged_adapter import is_adapter, write_merged
from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.config.evaluation_sets import watched
from pgtoolkit.config.keys import shown
from pgtoolkit.config.names import decides_training, without_options
from pgtoolkit.config.own_code import chosen
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.model.lora import merge
from pgtoolkit.model.mixture import save_published
from pgtoolkit.model.settings import (
    HuggingFaceModelSettings,
    ModelSettings,
    NumberType,
    TinyModelSettings,
)
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.settings import RecordedRolloutSettings
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.history import trained_with
from pgtoolkit.runs.records import (
    best_checkpoint,
    checkpoint_steps,
    known_provenance,
    leaves,
    read_config,
    read_data,
    read_drift,
    read_resolved,
    read_status,
    storage,
)
from pgtoolkit.system.model_folder import (
    ADAPTER_SETTINGS,
    load_config,
    load_tokenizer,
    models_inside,
)
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import plural, refusal, shell_path, text
from pgtoolkit.system.yaml_text import to_yaml
from pgtoolkit.tasks.prompts import scored_by_nobody
from pgtoolkit.tasks.settings import Chat, TaskSettings
from pgtoolkit.training.checkpoint import (
    load_newest,
    read_checkpoint,
    refuse_lost_checkpoint,
    settings_of,
)
from pgtoolkit.training.state import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("pgtoolkit")

_NOT_COPIED = ("checkpoints", "status.json", "curves.png", "*.log", ".lock", ".hydra")
"""Files of a run that a branch of it does not get."""


def export(run_dir: Path, folder: Path, best: bool = False) -> int | None:
    """Write the run's newest checkpoint to `folder`, and return its step.

    run_dir: or a folder with LoRA's adapters of TRL or peft, which are merged into their model; it
        has no step.

    The folder holds README.md and the checkpoint's model, with weights in the number type that
    training began with. transformers loads it to the same logits, up to rounding in bfloat16.
    LoRA's adapters are merged into the model that model.path names.

    best: write the checkpoint with the highest evaluation.best instead.
    Either the whole folder is written or nothing. Raises ConfigError if there is no checkpoint or
    the folder has files, StorageError if it cannot be written.
    """
    use = f"pgtk export {run_dir} {folder}"
    if is_adapter(run_dir) and not best:
        refuse_occupied(use, folder)
        with _written_whole(folder) as new_folder:
            write_merged(use, run_dir, new_folder)
        return None
    if not is_run(run_dir):
        checkpoints = [*filter(is_adapter, models_inside(run_dir))]
        if checkpoints:
            newest = f"pgtk export {shell_path(checkpoints[-1])} {shell_path(folder)}"
            reason = "Each of them is a model of its own."
            needs = "a run directory, or a folder of adapters"
            raise ConfigError(refusal(use, needs, "checkpoints in its folders", reason, newest))
        raise not_a_run(use, run_dir, "a run directory")
    refuse_occupied(use, folder)
    state = saved_state(run_dir, use, best=best)
    config = saved_config(run_dir)
    config = dataclasses.replace(config, task=scored_by_nobody(config.task))
    with _written_whole(folder) as new_folder:
        new_folder.mkdir()
        _write_model(config.model, state, new_folder)
        text = card(config, run_dir, state["step"], _template_in(new_folder))
        (new_folder / "README.md").write_text(text, encoding="utf-8")
        for file in new_folder.iterdir():
            file.chmod(0o644)  # safetensors makes files that only their owner can read
    return state["step"]


def branch(parent: Path, step: int, folder: Path) -> None:
    """Make `folder` a run in the state of the parent after this step, which `train` can resume.

    It has the parent's checkpoint, history and configuration of that step, and names the parent in
    status.json. It has rows of later steps, too, which a resume drops. The parent is only read.
    Either the whole folder is written or nothing. Raises ConfigError for a step without a
    checkpoint or a folder that has files, StorageError where the disk refuses or the checkpoint is
    damaged.
    """
    checkpoint = saved_state(parent, f"pgtk resume {shell_path(parent)}", step)["path"]
    if folder.resolve().is_relative_to(parent.resolve()):
        raise ConfigError(
            refusal(
                setting=f"hydra.run.dir={folder}",
                needs=f"a folder outside {parent}",
                got=folder,
                reason="A run inside another would be taken for a part of it.",
                use=f"hydra.run.dir={shell_path(parent)}-{step}",
            )
        )
    refuse_occupied(f"hydra.run.dir={folder}", folder)
    check_rows(parent, checkpoint)
    with _written_whole(folder) as new_run:
        shutil.copytree(parent, new_run, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        shutil.copytree(checkpoint, new_run / "checkpoints" / checkpoint.name)
        _write_earlier_config(parent, step, new_run)
        _revert_data(new_run, step)
        with RunDirectory(new_run) as run:
            place = f"{parent.resolve()}, step {step}"
            run.set_status("interrupted", step, f"made of {place}", saved=step, parent=place)


def _write_earlier_config(parent: Path, step: int, run_dir: Path) -> None:
    """Write config.yaml and drift.jsonl of the parent without the changes of later resumes."""
    drift = read_drift(parent)
    config = read_resolved(parent)
    for entry in reversed(drift):
        if entry["step"] > step:
            for key, (old_value, _) in entry["changes"].items():
                _set_key(config, key, old_value)
    earlier_lines = [json.dumps(entry) + "\n" for entry in drift if entry["step"] <= step]
    (run_dir / "drift.jsonl").write_text("".join(earlier_lines), encoding="utf-8")
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


def _set_key(config: dict, key: str, value: object) -> None:
    """Set a dotted key of nested dictionaries."""
    *groups, leaf = key.split(".")
    for name in groups:
        config = config.setdefault(name, {})
    config[leaf] = value


def _revert_data(run_dir: Path, step: int) -> None:
    """Undo in data.json the changes of data that were accepted after a step."""
    data = read_data(run_dir)
    accepted = data.pop("accepted", [])
    for entry in reversed(accepted):
        if entry["step"] > step:
            data |= entry["before"]
    earlier = [entry for entry in accepted if entry["step"] <= step]
    if earlier:
        data["accepted"] = earlier
    if accepted:
        (run_dir / "data.json").write_text(json.dumps(data, indent=1) + "\n")


@contextlib.contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """Yield a path at which to make what becomes `folder`, new or empty, after the block.

    Raises StorageError where the disk refuses.
    """
    with storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            unfinished = Path(temporary) / "folder"
            yield unfinished
            os.replace(unfinished, folder)


def saved_state(run_dir: Path, use: str, step: int | None = None, best: bool = False) -> dict:
    """Return the state in a run's checkpoint of this step, or in the best, or else in the newest.

    use: the command, for messages. Raises ConfigError where there is no such checkpoint, and
    StorageError for a damaged one.
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
                    reason="A run keeps the best checkpoint by evaluation.best, from its first "
                    "evaluation after a step on.",
                    use=use,
                )
            )
        step = row["step"]
    if step is None:
        state = load_newest(folder)
        if state is not None:
            saved = read_status(run_dir).get("saved", 0)
            if state["step"] < saved and not (folder / f"step-{saved:06d}").exists():
                log.warning(
                    f"note: the checkpoint of step {saved}, which the run has saved, was deleted: "
                    f"this is the one of step {state['step']}."
                )
            return state
        refuse_lost_checkpoint(run_dir, use)
    problem = lacks_checkpoint(run_dir, use, step)
    if problem:
        raise ConfigError(problem)
    path = folder / f"step-{step:06d}"
    try:
        return read_checkpoint(path)
    except StorageError:
        raise
    except Exception as error:  # each parser of damaged files raises errors of its own
        raise StorageError(
            f"the checkpoint {path} is damaged: {first_line(error)}. Use another checkpoint."
        ) from error


def lacks_checkpoint(
    run_dir: Path, use: str, step: int | None, max_steps: float = math.inf
) -> str | None:
    """Return the problem with a run that has no checkpoint of this step; None if it has one.

    max_steps: trainer.max_steps, where the run is to be continued.
    """
    saved_steps = checkpoint_steps(run_dir)
    if step in saved_steps:
        return None
    if not saved_steps:
        return refusal(
            setting=use,
            needs="a checkpoint",
            got="none",
            reason="A run saves one every trainer.checkpoint_every steps and at its end.",
            use=f"pgtk resume {shell_path(run_dir)}",
        )
    newest = saved_steps[-1]
    use_step = f"--step={newest}"
    if newest >= max_steps:
        use_step += f" trainer.max_steps={2 * newest}"
    return refusal(
        setting=f"{use} --step={step}",
        needs=f"one of the steps with a checkpoint, {', '.join(map(str, saved_steps))}",
        got=step,
        reason="The run keeps trainer.keep_checkpoints of them, and the best.",
        use=use_step,
    )


def refuse_occupied(use: str, folder: Path) -> None:
    """Raise ConfigError for a folder with files, and for a file. use: the command."""
    if folder.is_dir():
        count = len(list(folder.iterdir()))
        if count == 0:
            return
        got = f"one with {plural(count, 'entry')}"
    elif folder.exists():
        got = "a file"
    else:
        return
    raise ConfigError(
        f"{use} needs a new or empty folder (got {got}). Nothing is overwritten. Use {folder}-2."
    )


def _write_model(settings: ModelSettings, state: dict, folder: Path) -> None:
    """Write the checkpoint's Hugging Face folder, in the number type that training began with."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    checkpoint = state["path"]
    try:
        if state.get("base_digest") is None:
            model = _full_model(checkpoint)
        else:
            model = _merged_model(settings, state)
    except ConfigError:  # about the model that the adapters belong to
        raise
    except Exception as error:  # each parser of damaged files raises errors of its own
        raise StorageError(
            f"the checkpoint {checkpoint} is damaged: transformers cannot load it "
            f"({first_line(error)}). Delete it to export the one before."
        ) from error
    save_published(model, folder)
    for name, data in settings_of(checkpoint).items():
        if not (folder / name).exists() and name != ADAPTER_SETTINGS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)


def _full_model(checkpoint: Path) -> PreTrainedModel:
    """Load a checkpoint that holds all weights."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype="auto",
        output_loading_info=True,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
    )
    model, report = cast("tuple[PreTrainedModel, dict]", loaded)  # with output_loading_info
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return model


def _merged_model(settings: ModelSettings, state: dict) -> PreTrainedModel:
    """Load the run's model in float32, and merge a checkpoint's adapters into its weights."""
    assert isinstance(settings, HuggingFaceModelSettings)
    in_float32 = dataclasses.replace(settings, dtype=NumberType.float32)
    policy = build_policy(in_float32, None, on_gpu=False)
    load_weights(policy, state)
    merge(policy.model)
    dtype = load_config(settings.path).dtype or torch.float32
    assert not isinstance(dtype, str)  # since transformers makes a torch.dtype of a name
    return policy.model.to(dtype)  # pyright: ignore[reportArgumentType]  (transformers' types)


def _template_in(folder: Path) -> str | None:
    """Return the chat template of the tokenizer in a folder; None without one."""
    tokenizer = load_tokenizer(str(folder))
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def card(config: Config, run_dir: Path, step: int, chat_template: str | None) -> str:
    """Return README.md of an exported model, by the template export.md.

    It says what was trained and how, with which chat template, and how to load the model.
    chat_template: of its tokenizer; None without one.
    """
    description = description_of(run_dir)
    resolved, overrides = read_config(run_dir)
    base_model = ""
    if isinstance(config.model, HuggingFaceModelSettings):
        is_of_hub = not Path(config.model.path).is_absolute()
        if is_of_hub:
            base_model = f"base_model: {config.model.path}\n"
    prompt = '"..."'
    # The first prompt of a conversation would come from the user's code, which is not run here.
    if isinstance(config.model, TinyModelSettings) and config.task.name != "conversation":
        prompt = json.dumps(make_task(config.task, config.seed).prompt(0).text)
    chat = getattr(config.task, "chat", Chat.never)
    if isinstance(config.rollout, RecordedRolloutSettings):
        chat = config.rollout.chat
    use = f'tokenizer({prompt}, return_tensors="pt")'
    template_of_run = "None: the model was trained on texts as they are."
    if chat == Chat.auto and chat_template is not None:
        use = _use_of_template(config.task)
        template_of_run = (
            "Prompts went through this template, which is that of the tokenizer here:\n\n"
            f"````jinja\n{chat_template.rstrip()}\n````"
        )
    values = {
        "base": base_model,
        "chat_template": template_of_run,
        "name": description.run_name,
        "loss": chosen(config, "loss"),
        "aggregation": config.aggregation.reducer or config.aggregation.mode.value,
        "seed": config.seed,
        "task": config.task.name,
        "step": step,
        "max_steps": config.trainer.max_steps,
        "changes": _changes_on_the_way(run_dir, step, resolved),
        "encoded": use,
        "overrides": redact(" ".join(overrides)) or "none",
        "code": description.tags.get("git_commit", "unknown"),
        "configuration": redact(to_yaml(resolved)).rstrip(),
    }
    template = files("pgtoolkit.assembly").joinpath("export.md").read_text(encoding="utf-8")
    return Template(template).substitute(values)


def _changes_on_the_way(run_dir: Path, step: int, config: dict) -> str:
    """Return a sentence on the keys whose values were others for some of the steps; "" for none.

    step: the last one. config: that of config.yaml.
    """
    history = trained_with(run_dir, known_provenance(run_dir), step)
    values = dict(leaves(config))
    changed = {
        shown(name): text(value)
        for name, value in history.items()
        if name in values and value != values[name] and decides_training(name, config)
    }
    words = [f"{name}={value}" for name, value in without_options(changed).items()]
    return f" Their training changed on the way: {'; '.join(words)}." if words else ""


def _use_of_template(task: TaskSettings) -> str:
    """Return Python code that makes the tokens of a chat, as the prompts of the run became them."""
    messages = [{"role": "user", "content": "..."}]
    system = getattr(task, "system_prompt", None)
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    arguments = {"add_generation_prompt": True, **getattr(task, "chat_arguments", {})}
    arguments |= {"return_tensors": "pt", "return_dict": True}
    keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"tokenizer.apply_chat_template({messages!r}, {keywords})"
