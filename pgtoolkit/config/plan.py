"""Says what a configuration would do: its equation, the step's arithmetic, and what differs from the defaults."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pgtoolkit.config.rules.step import family_of_config, longest_document
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import is_number, is_whole, text

MEBIBYTE = 2**20

ADVANTAGES = {
    "grpo": "(reward - mean of the group) / standard deviation of the group",
    "dr_grpo": "reward - mean of the group",
    "rloo": "reward - mean of the other completions of the group",
    "given": "as recorded with the rollouts",
}


def run_name(overrides: list[str], defaults: dict[str, str] | None = None) -> str:
    """What differs from the defaults, as the name of a directory: letters, digits, '.', '_', '-', at most 80.

    overrides: as typed. defaults: group -> its default option, to be left out of the name.
    """
    pairs = [override.lstrip("+~").partition("=")[::2] for override in overrides]
    chosen = {key for key, _ in pairs}
    words = {}
    for key, value in pairs:
        if key.split(".")[0].split("/")[0] in ("hydra", "tracking"):
            continue
        if (defaults or {}).get(key) == value and not chosen & {"experiment", "debug"}:
            continue
        if f"{key}.path" in chosen:  # the path says it: model=huggingface model.path=Qwen/Qwen3-0.6B
            continue
        leaf = key if key.endswith(".options") else key.rpartition(".")[2]
        if leaf.endswith("path"):  # of a sweep, several
            value = "-".join(Path(path).name for path in value.strip("'\"").split(","))
        words[key] = _safe(value if key == "experiment" or leaf == "path" else f"{leaf}-{value}")
    name = "_".join(filter(None, words.values())) or "default"
    if len(name) > 80:
        # Cut at the end, which is then what it is trained on: runs more often differ in how.
        ordered = sorted(words, key=lambda key: key.split(".")[0] in ("model", "task", "rollout"))
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{'_'.join(filter(None, map(words.get, ordered)))[:73]}-{digest}"
    return name


def _safe(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-.")


def describe(config: Any, defaults: Any) -> list[tuple[str, list[str]]]:
    """(title, lines) of each section of the plan. config, defaults: plain namespaces of the resolved configurations."""
    return [
        ("Loss", equation(config)),
        ("Step", list(arithmetic(config))),
        ("Logits", [logits_memory(config)]),
        ("Changed from the defaults", list(differences(config, defaults)) or ["nothing"]),
    ]


def equation(config: Any) -> list[str]:
    """The loss of a step, with its numbers."""
    loss, aggregation = config.loss, config.aggregation
    family, weighting = family_of_config(config), AGGREGATIONS[aggregation.mode]
    weight, where = weighting.equation, weighting.where
    if aggregation.reducer is not None:
        weight, where = f"{aggregation.reducer}(...)", f"in the place of aggregation={aggregation.mode}"
    return [
        f"{loss.name}, {aggregation.mode}: sum over trained tokens of w_t l_t",
        f"l_t = {f'{loss.path}(...)' if family is None else family.equation}",
        f"w_t = {weight},  {where.format(divisor=text(aggregation.divisor))}",
        f"advantage ({config.advantage.estimator}): {ADVANTAGES[config.advantage.estimator]}",
    ]


def arithmetic(config: Any) -> Iterator[str]:
    """Documents, micro-batches and steps."""
    rollout, accumulation, steps = config.rollout, config.accumulation, config.trainer.max_steps
    docs, room = accumulation.docs_per_step, accumulation.max_tokens
    batch = None
    if rollout.name == "policy" and _counts(rollout.prompts_per_batch, rollout.group_size):
        prompts, size = rollout.prompts_per_batch, rollout.group_size
        batch = prompts * size
        yield f"rollouts: {prompts} prompts x {size} completions = {batch} documents a batch"
    prompt, completion = longest_document(config)
    longest = prompt + completion if _counts(prompt, completion) else None
    if longest:
        yield f"longest document: prompt {prompt} + completion {completion} = {longest} tokens"
    else:
        yield f"longest document: known once the data is read; it must fit in {text(room)} tokens"
    yield from processes(config.parallelism)
    if not _counts(room):
        return
    ranks = config.parallelism.data_parallel if _counts(config.parallelism.data_parallel) else 1
    if docs == 0:
        yield f"step: {text(accumulation.micro_batches_per_step)} micro-batches of at most {room} tokens"
    elif _counts(docs):
        taken = min(docs, batch) if batch and accumulation.last_step != "carry" else docs
        line = f"step: {taken} documents"
        if longest and room >= longest:
            share = -(-taken // ranks)
            line += f", in {-(-share // (room // longest))} micro-batches of at most {room} tokens"
            line += " on each data rank" if ranks > 1 else ""
        yield line + (f"; {_steps(batch, taken, accumulation.last_step)}" if batch else "")
        if _counts(steps):
            yield f"run: at most {steps} steps, {steps * taken} documents"


DEALT = {
    "data_parallel": "documents dealt to {} ranks, about as many tokens to each",
    "sequence_data_parallel": "tokens of each micro-batch to {}",
    "tensor_parallel": "matrices and vocabulary to {}",
    "pipeline_parallel": "layers to {} stages",
}


def processes(parallelism: Any) -> Iterator[str]:
    """How many share a step, where it is more than one, and what of it each gets."""
    sizes = {axis: getattr(parallelism, axis) for axis in DEALT}
    if _counts(*sizes.values()) and math.prod(sizes.values()) > 1:
        dealt = [DEALT[axis].format(size) for axis, size in sizes.items() if size > 1]
        yield f"processes: {math.prod(sizes.values())}; {', '.join(dealt)}"


def documents(config: Any) -> int | None:
    """Documents that a run trains on at most; None where the configuration does not tell."""
    docs, steps, rollout = config.accumulation.docs_per_step, config.trainer.max_steps, config.rollout
    if not _counts(docs, steps):
        return None
    if rollout.name != "policy" or config.accumulation.last_step == "carry":
        return steps * docs
    counted = _counts(rollout.prompts_per_batch, rollout.group_size)
    return steps * min(docs, rollout.prompts_per_batch * rollout.group_size) if counted else None


def _steps(batch: int, taken: int, last_step: str) -> str:
    steps = {"short": -(-batch // taken), "drop": batch // taken}.get(last_step, batch / taken)
    return f"{steps:g} steps per batch of rollouts"


def logits_memory(config: Any) -> str:
    """The largest piece of logits that exists at once."""
    vocabulary, room = vocabulary_size(config.model, config.task), config.accumulation.max_tokens
    if vocabulary is None or not _counts(room):
        return "unknown until the model is loaded"
    half = config.model.name == "huggingface" and config.model.dtype == "bfloat16" and not config.model.fp32_lm_head
    size = 2 if half else 4
    whole = room * vocabulary * size / MEBIBYTE
    line = f"{room} tokens x {vocabulary} entries of the vocabulary x {size} bytes = {whole:.3g} MiB per micro-batch"
    limit = config.kernel.logits_memory_mb
    fused = config.kernel.implementation in ("auto", "fused_linear") and config.loss.num_splits == 1
    if fused and limit is None:
        return line + ", a piece at a time, as large as the device's memory allows"
    if fused and is_number(limit):
        return line + (f", of which at most {limit} MiB exist at once" if whole > limit else ", in one piece")
    if _counts(config.loss.num_splits) and config.loss.num_splits > 1:
        return line + f", in {config.loss.num_splits} splits"
    return line


def vocabulary_size(model: Any, task: Any) -> int | None:
    """Entries of the model's vocabulary, where that is known without loading it."""
    if model.name == "tiny":
        return {"reverse": 12, "reasoning_gym": 97}.get(task.name)  # a file of prompts has its own characters
    size = model_settings(model.path).get("vocab_size")
    return size if _counts(size) else None


def differences(config: Any, defaults: Any, prefix: str = "") -> Iterator[str]:
    """One line for each key whose value is not the default's."""
    before = vars(defaults) if defaults is not None else {}
    for key, value in vars(config).items():
        if hasattr(value, "__dict__"):
            yield from differences(value, before.get(key), f"{prefix}{key}.")
        elif key not in before:
            yield f"{prefix}{key} = {text(value)}"
        elif before[key] != value:
            yield f"{prefix}{key} = {text(value)} (default {text(before[key])})"


def _counts(*values: Any) -> bool:
    return all(is_whole(value) and value >= 1 for value in values)
