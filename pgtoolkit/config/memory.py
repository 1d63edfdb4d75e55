"""What each GPU will hold, estimated from the model's config.json alone, and the cheapest change that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pgtoolkit.config.evaluation_sets import samples
from pgtoolkit.config.key import with_values
from pgtoolkit.config.models import Sizes, sizes, sizes_of, tiny_sizes
from pgtoolkit.config.plan import copies_of, longest_document, samples_beside
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_run import HuggingFaceModelConfig
from pgtoolkit.errors import ConfigError
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.system.report import refusal, text

_TRAINED = {"weights": 4, "gradients": 4, "moments": 8}  # bytes of each number; AdamW has two moments

_OF_CUDA = 0.7e9
"""Bytes that CUDA takes for each process: its context, kernels and workspaces."""


@dataclass(frozen=True)
class Plan:
    """Bytes of one GPU by what they are for: all the time, in an update, and while completions are sampled.

    copies: of a GPU of `sampler.gpus`.
    """

    always: dict[str, float]
    update: dict[str, float]
    sampling: dict[str, float]
    copies: dict[str, float]

    @property
    def most(self) -> float:
        of_training = sum(self.always.values()) + max(sum(self.update.values()), sum(self.sampling.values()))
        return max(of_training, sum(self.copies.values()))


def memory_plan(c: Config, gpu: float | None = None) -> Plan | None:
    """gpu: bytes of each, by which the head's logits go. None where the model is not known."""
    shape = tiny_sizes(c.model, c.task) if c.model.name == "tiny" else sizes(c.model)
    if shape is None:
        return None
    p, number, rank = c.parallelism, 4 if c.model.dtype == "float32" else 2, c.model.lora_rank
    ranks = p.tensor_parallel * p.pipeline_parallel
    ranks *= p.data_parallel * p.sequence_data_parallel if p.shard else 1
    always = {name: size * shape.weights / ranks for name, size in _TRAINED.items()}
    if rank is not None:
        adapters = rank * shape.linear * shape.layers * sum(_TRAINED.values())
        always = {"frozen weights": number * shape.weights / ranks, "adapters": adapters / ranks}
    if c.kl.needs_model and not (rank and c.kl.reference == "initial"):
        teacher = None if c.kl.reference == "initial" else sizes_of(c.kl.reference)
        of_weight = number if c.kl.update_every is None else 4
        always["reference"] = of_weight * (teacher or shape).weights / ranks
    if c.advantage.estimator == "gae":
        body = sizes_of(c.critic.path) if c.critic.path else None
        body = body or shape
        tables = body.table * (body.tables - 1)  # of a head of its own, which one value takes the place of
        always["critic"] = sum(_TRAINED.values()) * (body.weights - tables) / ranks
    sampled = {"auto": number, "float32": 4}.get(c.sampler.dtype, 2)
    sampling: dict[str, float] = {}
    copies: dict[str, float] = {}
    if samples(c) and copies_of(c):
        copies = _sampling(c, shape, sampled) | {"copy": sampled * shape.weights}
    elif samples(c) and c.sampler.name == "transformers":
        sampling = _sampling(c, shape, sampled)
    beside = samples_beside(c)
    if sampling and (ranks > 1 or min(number, sampled) < 4 or rank is not None or beside):
        sampling["copy"] = sampled * shape.weights
    if beside:  # completions are sampled during updates
        always, sampling = always | sampling, {}
    return Plan(always, _update(c, shape, number, gpu), sampling, copies)


def _sampling(c: Config, shape: Sizes, number: int) -> dict[str, float]:
    prompt, completion = (tokens or 1 for tokens in longest_document(c))
    if c.rollout.name == "policy":
        rows, group = c.rollout.prompts_per_batch, c.rollout.group_size
    else:  # evaluation alone samples
        rows, group = c.evaluation.prompts_per_set, c.evaluation.completions_per_prompt
    rows *= group
    processes = len(copies_of(c)) or world_size(c.parallelism)
    rows = min(math.ceil(rows / processes), c.sampler.max_sequences or rows)
    length = min(c.accumulation.max_tokens, prompt + completion)
    if getattr(c.task, "max_turns", 1) > 1:  # a short conversation may go on beside a long one
        length += completion
    prompts = min(65536, math.ceil(rows / group) * prompt) * (3 * shape.inner + 4 * shape.width) * number
    cache = rows * length * shape.layers * shape.cached * number
    return {"keys and values": cache, "prompts": prompts, "logits": 4 * rows * shape.vocabulary}


def _update(c: Config, shape: Sizes, number: int, gpu: float | None) -> dict[str, float]:
    """Of the longest micro-batch: what a layer keeps for its backward pass, as measured on H200s."""
    p = c.parallelism
    lora = c.model.lora_rank is not None
    prompt, completion = longest_document(c)
    tokens = c.accumulation.max_tokens
    if c.accumulation.docs_per_step and prompt and completion:
        documents = math.ceil(c.accumulation.docs_per_step / p.data_parallel)
        tokens = min(tokens, documents * (prompt + completion))
    tokens /= p.sequence_data_parallel
    inner, width = shape.inner / p.tensor_parallel, shape.width
    width /= p.tensor_parallel if p.sequence_parallel else 1
    kept = (number if lora else 4) * width if c.model.gradient_checkpointing else number * (4 * inner + 11 * width)
    logits = (c.kernel.logits_memory_mb or max(512, (gpu or 80e9) / 2**26)) * 2**20
    logits = min(logits, 4 * tokens * shape.vocabulary / p.tensor_parallel)
    found = {"hidden states": tokens * kept * shape.layers / p.pipeline_parallel}
    found["a layer or logits"] = max(tokens * number * (8 * inner + 10 * width), logits)
    if c.model.dtype == "float16" and not lora and not p.shard:  # of a scaled loss, which is not added in place
        found["the head's gradient"] = 4 * shape.table / p.tensor_parallel
    if p.shard:  # embedding and head stay together beside the head's gradient, two layers and one's gradient
        gathered = (shape.tables + (not lora)) * shape.table + 3 * shape.layer
        found["gathered weights"] = (number if lora else 4) * gathered / p.tensor_parallel
    return found


def memory_lines(c: Config, gpu: float | None) -> Iterator[str]:
    """Lines for `pgtk check`. gpu: bytes of each GPU, None where there is none."""
    if (found := memory_plan(c, gpu)) is None:
        return
    for name, parts in vars(found).items():
        if parts:
            yield f"{name}: {' + '.join(f'{part} {size / 1e9:.3g}' for part, size in parts.items())} GB"
    yield f"at most about {found.most / 1e9:.3g} GB on each GPU{f', which has {gpu / 1e9:.3g}' if gpu else ''}"
    if gpu and found.most > gpu:
        yield f"use {_remedy(c, gpu)}"


def of_process(c: Config, gpu: float) -> float:
    """Bytes that a process takes of a GPU of so many at most; of an unknown model those of CUDA alone."""
    return _OF_CUDA + (found.most if (found := memory_plan(c, gpu)) else 0)


def refuse_overflow(c: Config, gpu: float) -> None:
    """ConfigError where a GPU of so many bytes has no room for what is certain, before anything is loaded."""
    if (found := memory_plan(c, gpu)) is None:
        return
    certain = ("copy", "keys and values")
    least = sum(found.always.values()) + sum(found.sampling.get(name, 0) for name in certain)
    least = max(least, sum(found.copies.get(name, 0) for name in certain))
    if least > gpu:
        needs, reason = f"{least / 1e9:.3g} GB of each GPU", "pgtk check lists what they hold."
        setting = f"model={c.model.name}"
        if isinstance(c.model, HuggingFaceModelConfig):
            setting = f"model.path={c.model.path}"
        raise ConfigError(refusal(setting, needs, f"{gpu / 1e9:.3g}", reason, _remedy(c, gpu)))


def _remedy(c: Config, gpu: float) -> str:
    """The cheapest change after which a GPU of so many bytes is enough."""
    for change in _changes(c):
        plan = memory_plan(with_values(c, change), gpu)
        if plan is not None and plan.most <= gpu:
            settings = " ".join(f"{key}={text(value)}" for key, value in change.items())
            return f"{settings}, which takes {plan.most / 1e9:.3g} GB"
    return "more GPUs or a smaller model"


def _changes(c: Config) -> Iterator[dict[str, Any]]:
    """What costs little first: time, then GPUs, then that fewer weights are trained."""
    first = {} if c.model.gradient_checkpointing or c.model.name == "tiny" else {"model.gradient_checkpointing": True}
    rooms, longest = [c.accumulation.max_tokens // k for k in (2, 4, 8)], sum(x or 1 for x in longest_document(c))
    cheap = [first, *(first | {"accumulation.max_tokens": room} for room in rooms if room >= max(longest, 1024))]
    if samples(c) and c.sampler.name == "transformers":
        cheap.append(cheap[-1] | {"sampler.max_sequences": 32})
    spread = [{}]
    if world_size(c.parallelism) == c.parallelism.data_parallel:
        spread += [{"parallelism.shard": True, "parallelism.data_parallel": 2**k} for k in range(1, 7)]
    for adapters in [{}] if c.model.lora_rank or c.model.random_weights else [{}, {"model.lora_rank": 16}]:
        yield from (adapters | ranks | change for ranks in spread for change in cheap)
