"""`pgtk export`: a run's newest checkpoint as a Hugging Face folder, with a card that says how it came about."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.comparison.runs import is_run, not_a_run
from pgtoolkit.config.compose import compose
from pgtoolkit.config.schema import (
    Config,
    HuggingFaceModelConfig,
    PolicyRolloutConfig,
    PromptsTaskConfig,
    TinyModelConfig,
)
from pgtoolkit.errors import ConfigError, StorageError, first_line
from pgtoolkit.model.policy import Policy, build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.samplers import sampling_settings
from pgtoolkit.rollouts.tasks import make_task
from pgtoolkit.runs.directory import read_config, read_metrics, read_status
from pgtoolkit.runs.series import best, final
from pgtoolkit.system.model_folder import load_config
from pgtoolkit.system.plain_files import open_to_read
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.description import describe
from pgtoolkit.tracking.next_commands import shell_path
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.sharded_checkpoint import read_tensors

_SHOWN = ("reward", "exact_match", "loss", "kl_new_old", "completion_length")
"""Metrics that the card lists, as far as the run has them."""


def export(run_dir: Path, folder: Path) -> int:
    """Write the run's newest checkpoint to `folder`, all of it or nothing; returns the checkpoint's step.

    The folder holds the weights as safetensors, in the number type that they were trained from, the tokenizer, the
    sampling settings as generation config, README.md and, if there is one, the run's curves.png; transformers loads it
    to the same logits (in bfloat16: rounded).
    Raises ConfigError if there is no checkpoint or the folder has files, StorageError if it cannot be written.
    """
    use = f"pgtk export {run_dir} {folder}"
    if not is_run(run_dir):
        raise not_a_run(use, run_dir, "a run directory")
    _refuse_occupied(use, folder)
    state = load_newest(run_dir / "checkpoints")
    if state is None:
        raise ConfigError(
            f"{use} needs a checkpoint (got none). A run saves one every trainer.checkpoint_every steps and at its "
            f"end. Use pgtk resume {shell_path(run_dir)}."
        )
    config = _config(run_dir)
    policy = _policy(config)
    _load(policy.model, state)
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        _write(policy, config, run_dir, state["step"], temporary)
        temporary.chmod(0o755)  # temporary folders, and what safetensors writes, are their owner's alone
        for file in temporary.iterdir():
            file.chmod(0o644)
        os.replace(temporary, folder)  # takes the place of an empty folder, too
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return state["step"]


def _refuse_occupied(use, folder):
    if not folder.is_dir():
        got = "a file" if folder.exists() else None
    else:
        count = len(list(folder.iterdir()))
        got = f"one with {count} {'entry' if count == 1 else 'entries'}" if count else None
    if got:
        raise ConfigError(f"{use} needs a new or empty folder (got {got}). Nothing is overwritten. Use {folder}-2.")


def _config(run_dir: Path) -> Config:
    try:
        config = OmegaConf.to_object(compose([], run_dir=run_dir).config)
    except OmegaConfBaseException as error:  # a key that this version has and the run's had not
        raise ConfigError(
            f"{run_dir}/config.yaml does not fit this version of pgtoolkit: {first_line(error)}. Use the version that "
            "provenance.json names."
        ) from error
    if isinstance(config.task, PromptsTaskConfig):
        # Nothing is scored here, and a verifier of somebody's own would run their code.
        config.task.verifier, config.task.pattern = "exact_match", None
    return config


def _policy(config: Config) -> Policy:
    model = config.model
    if isinstance(model, HuggingFaceModelConfig):
        # The weights come from the checkpoint; of the folder or hub only configuration and tokenizer are needed.
        model = dataclasses.replace(model, random_weights=True, gradient_checkpointing=False)
    alphabet = make_task(config.task, config.seed).alphabet if isinstance(model, TinyModelConfig) else None
    return build_policy(model, alphabet, on_gpu=False)


def _load(model, state: dict) -> None:
    """Put the weights of a checkpoint, of one process or of several, into a whole model."""
    try:
        if "model" in state:
            model.load_state_dict(state["model"])
        else:
            targets = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
            read_tensors(state["path"], lambda _: targets, ONE_PROCESS)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise StorageError(
            f"the checkpoint {state['path']} does not fit the model of config.yaml: {reason}. One of the two is not as "
            "the run wrote it. Remove the checkpoint to export the one before, or put back the run's config.yaml."
        ) from error


def _write(policy: Policy, config: Config, run_dir: Path, step: int, folder: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, tokenizer, rollout = policy.model, policy.tokenizer, config.rollout
    sizes = (rollout.top_p, rollout.max_completion_length) if isinstance(rollout, PolicyRolloutConfig) else ()
    model.generation_config = sampling_settings(model, tokenizer, rollout.temperature, *sizes)
    model.config.use_cache = True
    model.to(_number_type(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with contextlib.suppress(FileNotFoundError), open_to_read(run_dir / "curves.png") as picture:
        (folder / "curves.png").write_bytes(picture.read())
    (folder / "README.md").write_text(card(config, run_dir, step), encoding="utf-8")


def _number_type(config: Config) -> torch.dtype:
    """That of the weights which training began with: it keeps them in float32, whatever they came in."""
    model = config.model
    if not isinstance(model, HuggingFaceModelConfig) or model.random_weights:
        return torch.float32
    return load_config(model.path).dtype or torch.float32


def card(config: Config, run_dir: Path, step: int) -> str:
    """README.md: what was trained how, what it reached, and how to load it."""
    described, status = describe(run_dir), read_status(run_dir)
    resolved, overrides = read_config(run_dir)
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] <= step]
    aggregation = config.aggregation.reducer or config.aggregation.mode.value
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if isinstance(config.model, HuggingFaceModelConfig) and not Path(config.model.path).exists():
        header.append(f"base_model: {config.model.path}")
    header += ["tags:", "- pgtoolkit", "- policy-gradient", f"- {config.loss.name}", "---"]
    seen = f", {rows[-1]['documents_seen']:,} documents" if rows and "documents_seen" in rows[-1] else ""
    lines = [
        *header,
        f"# {described.run_name}",
        "",
        f"Trained by reinforcement learning with pgtoolkit: loss {config.loss.name}, aggregation {aggregation}, "
        f"seed {config.seed}, task {config.task.name}. These are the weights after step {step} of "
        f"{config.trainer.max_steps}{seen}; the run is {status.get('state', 'unknown')}.",
        "",
        *_results(rows),
        *(["![Curves of the run](curves.png)", ""] if (run_dir / "curves.png").exists() else []),
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # where this file lies',
        'tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")',
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        f'prompt = tokenizer({_prompt(config)}, return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**prompt)[0], skip_special_tokens=True))",
        "```",
        "",
        "## Configuration",
        "",
        f"Overrides: `{redact(' '.join(overrides)) or 'none'}`. Code: {described.tags.get('git_commit', 'unknown')}.",
        "",
        "```yaml",
        redact(OmegaConf.to_yaml(OmegaConf.create(resolved))).rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _results(rows):
    found = {name: [row[name] for row in rows if name in row] for name in _SHOWN}
    if not any(found.values()):
        return []
    table = [
        f"| {name} | {values[0]:.4g} | {final(values):.4g} | {best(values):.4g} |"
        for name, values in found.items()
        if values
    ]
    return [
        "## Results",
        "",
        "| metric | first step | last tenth of the steps | highest tenth |",
        "|---|---|---|---|",
        *table,
        "",
    ]


def _prompt(config: Config) -> str:
    """A prompt as a literal: of the task where that is short and known, else a place to put one."""
    if isinstance(config.model, TinyModelConfig):
        return json.dumps(make_task(config.task, config.seed).prompt(0).text)
    return '"..."'
