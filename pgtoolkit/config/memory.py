"""What each GPU will hold, estimated from the model's config.json alone, and the cheapest change
that makes it fit."""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgtoolkit.config.evaluation_sets import samples
from pgtoolkit.config.key import with_values
from pgtoolkit.config.models import Sizes, sizes, sizes_of, tiny_sizes
from pgtoolkit.config.plan import copies_of, longest_document, samples_beside
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_run import HuggingFaceModelConfig
from pgtoolkit.config.schema_tasks import ChatTaskConfig, PromptsTaskConfig, SumsTaskConfig
from pgtoolkit.errors import ConfigError
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.system.report import refusal, text

# bytes of each number; AdamW has two moments
_TRAINED = {"weights": 4, "gradients": 4, "moments": 8}

_OF_CUDA = 0.7e9
"""Bytes that CUDA takes for each process: its context, kernels and workspaces."""

_TEMPLATE = 28
"""Tokens that a chat template writes around a prompt, a short system message of its own among
them."""

_MOST_READ = 2**22
"""Bytes of the largest file of prompts that is read for the length of its prompts."""


@dataclass(frozen=True)
class Plan:
    """Bytes of one GPU by what they are for: all the time, in an update, and while completions are
    sampled.

    copies: of a GPU of `sampler.gpus`.
    """

    always: dict[str, float]
    update: dict[str, float]
    sampling: dict[str, float]
    copies: dict[str, float]

    @property
    def most(self) -> float:
        of_training = sum(self.always.values()) + max(
            sum(self.update.values()), sum(self.sampling.values())
        )
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
        # of a head of its own, which one value takes the place of
        tables = body.table * (body.tables - 1)
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
    prompts = (
        min(65536, math.ceil(rows / group) * prompt) * (3 * shape.inner + 4 * shape.width) * number
    )
    cache = rows * length * shape.layers * shape.cached * number
    return {"keys and values": cache, "prompts": prompts, "logits": 4 * rows * shape.vocabulary}


def _update(c: Config, shape: Sizes, number: int, gpu: float | None) -> dict[str, float]:
    """Return what the longest micro-batch takes: what a layer keeps for its backward pass, as
    measured on H100s."""
    p = c.parallelism
    lora = c.model.lora_rank is not None
    tokens = c.accumulation.max_tokens
    prompt = _likely_prompt(c)
    completion = longest_document(c)[1]
    if c.accumulation.docs_per_step and prompt and completion:
        documents = math.ceil(c.accumulation.docs_per_step / p.data_parallel)
        tokens = min(tokens, documents * (prompt + completion))
    tokens /= p.sequence_data_parallel
    inner = shape.inner / p.tensor_parallel
    width = shape.width
    width /= p.tensor_parallel if p.sequence_parallel else 1
    kept = number * (5 * inner + 12 * width)
    if c.model.gradient_checkpointing:
        kept = (number if lora else 4) * width
    logits = (c.kernel.logits_memory_mb or max(512, (gpu or 80e9) / 2**26)) * 2**20
    logits = min(logits, 4 * tokens * shape.vocabulary / p.tensor_parallel)
    update = {"hidden states": tokens * kept * shape.layers / p.pipeline_parallel}
    update["a layer or logits"] = max(tokens * number * (8 * inner + 10 * width), logits)
    # of a scaled loss, which is not added in place
    if c.model.dtype == "float16" and not lora and not p.shard:
        update["the head's gradient"] = 4 * shape.table / p.tensor_parallel
    # embedding and head stay together beside the head's gradient, two layers and one's gradient
    if p.shard:
        gathered = (shape.tables + (not lora)) * shape.table + 3 * shape.layer
        update["gathered weights"] = (number if lora else 4) * gathered / p.tensor_parallel
    return update


def _likely_prompt(c: Config) -> int | None:
    """Return the tokens of the longest prompt: known, or likely by its text; None where only the
    data knows."""
    known = longest_document(c)[0]
    if known is not None or c.rollout.name != "policy" or not isinstance(c.task, ChatTaskConfig):
        return known
    if isinstance(c.task, SumsTaskConfig):
        tokens = _likely_tokens(c.task.longest_prompt)
    elif isinstance(c.task, PromptsTaskConfig):
        file = Path(c.task.path)
        if file.suffix != ".jsonl" or not file.is_file() or file.stat().st_size > _MOST_READ:
            return None
        tokens = _longest_in(file, c.task.prompt_field, file.stat().st_mtime_ns)
        if tokens is None:
            return None
    else:
        return None
    if c.task.chat == "never":
        return tokens
    return tokens + _TEMPLATE + _likely_tokens(c.task.system_prompt or "")


@functools.cache
def _longest_in(file: Path, field: str, _changed: int) -> int | None:
    """Return the likely tokens of the longest prompt of a JSONL file; None where a row has none, or
    is none."""
    longest = 0
    try:
        for line in file.read_bytes().splitlines():
            prompt = json.loads(line)[field]
            messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
            longest = max(longest, sum(_likely_tokens(message["content"]) for message in messages))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # the task says what is wrong with its file
    return longest


def _likely_tokens(words: str) -> int:
    """Return a token for each digit, as most tokenizers have it, and one for three bytes of other
    text."""
    digits = sum(map(str.isdecimal, words))
    return digits + math.ceil((len(words.encode()) - digits) / 3)


def memory_lines(c: Config, gpu: float | None) -> Iterator[str]:
    """Lines for `pgtk check`. gpu: bytes of each GPU, None where there is none."""
    if (found := memory_plan(c, gpu)) is None:
        return
    for name, parts in vars(found).items():
        if parts:
            yield (
                f"{name}: "
                f"{' + '.join(f'{part} {size / 1e9:.3g}' for part, size in parts.items())} GB"
            )
    yield (
        f"at most about {found.most / 1e9:.3g} GB on each "
        f"GPU{f', which has {gpu / 1e9:.3g}' if gpu else ''}"
    )
    if gpu and found.most > gpu:
        yield f"use {_remedy(c, gpu)}"


def of_process(c: Config, gpu: float) -> float:
    """Bytes that a process takes of a GPU of so many at most; of an unknown model those of CUDA
    alone."""
    return _OF_CUDA + (found.most if (found := memory_plan(c, gpu)) else 0)


def max_tokens_for(c: Config, room: float, gpu: float) -> int | None:
    """Return the most tokens of a micro-batch with which a process takes no more than `room` bytes
    of a GPU of so many.

    It is a multiple of 256 that has room for the longest document as far as that is known; None
    where there is none, or where fewer tokens would make other steps.
    """
    if not c.accumulation.docs_per_step:
        return None
    longest = (_likely_prompt(c) or 1) + (longest_document(c)[1] or 1)
    counts = range(256 * math.ceil(longest / 256), c.accumulation.max_tokens + 1, 256)

    def taken(tokens: int) -> float:
        return of_process(with_values(c, {"accumulation.max_tokens": tokens}), gpu)

    fitting = bisect.bisect_right(counts, room, key=taken)
    return counts[fitting - 1] if fitting else None


def refuse_overflow(c: Config, gpu: float) -> None:
    """ConfigError where a GPU of so many bytes has no room for what is certain, before anything is
    loaded."""
    if (found := memory_plan(c, gpu)) is None:
        return
    certain = ("copy", "keys and values")
    least = sum(found.always.values()) + sum(found.sampling.get(name, 0) for name in certain)
    least = max(least, sum(found.copies.get(name, 0) for name in certain))
    if least > gpu:
        setting = f"model={c.model.name}"
        if isinstance(c.model, HuggingFaceModelConfig):
            setting = f"model.path={c.model.path}"
        raise ConfigError(
            refusal(
                setting=setting,
                needs=f"{least / 1e9:.3g} GB of each GPU",
                got=f"{gpu / 1e9:.3g}",
                reason="pgtk check lists what they hold.",
                use=_remedy(c, gpu),
            )
        )


def _remedy(c: Config, gpu: float) -> str:
    """The cheapest change after which a GPU of so many bytes is enough."""
    for change in _changes(c):
        plan = memory_plan(with_values(c, change), gpu)
        if plan is not None and plan.most <= gpu:
            settings = " ".join(f"{key}={text(value)}" for key, value in change.items())
            return f"{settings}, which takes {plan.most / 1e9:.3g} GB"
    return "more GPUs or a smaller model"


def _changes(c: Config) -> Iterator[dict[str, Any]]:
    """Yield what costs little first: time, then GPUs, then that fewer weights are trained."""
    first: dict[str, Any] = {}
    if not c.model.gradient_checkpointing and c.model.name != "tiny":
        first["model.gradient_checkpointing"] = True
    least = max(1024, sum(tokens or 1 for tokens in longest_document(c)))
    cheap = [first]
    for parts in (2, 4, 8) if c.accumulation.docs_per_step else ():
        room = c.accumulation.max_tokens // parts
        if room >= least:
            cheap.append(first | {"accumulation.max_tokens": room})
    if samples(c) and c.sampler.name == "transformers":
        cheap.append(cheap[-1] | {"sampler.max_sequences": 32})
    spread = [{}]
    if world_size(c.parallelism) == c.parallelism.data_parallel:
        spread += [
            {"parallelism.shard": True, "parallelism.data_parallel": 2**k} for k in range(1, 7)
        ]
    for adapters in (
        [{}] if c.model.lora_rank or c.model.random_weights else [{}, {"model.lora_rank": 16}]
    ):
        yield from (adapters | ranks | change for ranks in spread for change in cheap)
