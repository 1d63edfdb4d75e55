"""Estimates the memory of each GPU from the model's config.json alone, and the cheapest change that
makes a run fit."""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pgtoolkit.config.counts import copies_of, longest_document, samples_async, tokens_at_least
from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.models import (
    Sizes,
    computes_again,
    experts_with_adapters,
    in_one_piece,
    shares_prompts,
    sizes,
    sizes_of,
    tiny_sizes,
    why_not_by_memory,
)
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.settings import HuggingFaceModelSettings
from pgtoolkit.ranks.environment import BYTES_OF_CUDA, world_size
from pgtoolkit.rollouts.batch_counts import saves_a_fifth, tokens_of_group
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.report import refusal, text
from pgtoolkit.tasks.settings import ChatTaskSettings, PromptsTaskSettings, SumsTaskSettings

_TRAINED = {"weights": 4, "gradients": 4}
"""Bytes for each trained weight, in float32."""

_TOKENS_OF_TEMPLATE = 28
"""Tokens that a chat template writes around a prompt, with a short system message of its own."""

_LARGEST_FILE = 2**22
"""Bytes of the largest file of prompts that is read for the length of its prompts."""

_MOST_PROMPT_TOKENS = 65536
"""Tokens of prompts that the sampler takes through the model at once."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one GPU by their purpose: all the time, during an update, and while completions are
    sampled.

    copies: bytes on a GPU of `sampler.gpus`, which holds a copy of the weights.
    """

    always: dict[str, float]
    update: dict[str, float]
    sampling: dict[str, float]
    copies: dict[str, float]

    @property
    def peak(self) -> float:
        """The most bytes that any of the GPUs holds."""
        phases = (sum(self.update.values()), sum(self.sampling.values()))
        of_training = sum(self.always.values()) + max(phases)
        return max(of_training, sum(self.copies.values()))


def memory_use(config: Config, gpu: float | None = None) -> MemoryUse | None:
    """Return what a GPU will hold; None where the sizes of the model are not known.

    gpu: bytes of each GPU, which decide how large a piece of the logits is.
    """
    if config.model.name == "tiny":
        model_sizes = tiny_sizes(config.model, config.task)
    else:
        model_sizes = sizes(config.model)
    if model_sizes is None:
        return None
    number_size = 4 if config.model.dtype == "float32" else 2
    sampled_size = {"auto": number_size, "float32": 4}.get(config.sampler.dtype, 2)
    always = _always(config, model_sizes, number_size)
    copy = sampled_size * model_sizes.weights
    sampling: dict[str, float] = {}
    copies: dict[str, float] = {}
    if needs_sampler(config) and copies_of(config):
        copies = _sampling(config, model_sizes, sampled_size) | {"copy": copy}
    elif needs_sampler(config) and config.sampler.name == "transformers":
        sampling = _sampling(config, model_sizes, sampled_size)
    is_async = samples_async(config)
    is_half = min(number_size, sampled_size) < 4
    has_adapters = config.model.lora_rank is not None
    if sampling and (_ranks_per_model(config) > 1 or is_half or has_adapters or is_async):
        sampling["copy"] = copy
    if is_async:  # completions are sampled during updates
        always = always | sampling
        sampling = {}
    return MemoryUse(always, _update(config, model_sizes, number_size, gpu), sampling, copies)


def _ranks_per_model(config: Config) -> int:
    """Return over how many ranks the weights of one model are spread."""
    parallelism = config.parallelism
    ranks = parallelism.tensor_parallel * parallelism.pipeline_parallel
    if parallelism.shard:
        ranks *= parallelism.data_parallel * parallelism.sequence_data_parallel
    return ranks


def _always(config: Config, model_sizes: Sizes, number_size: int) -> dict[str, float]:
    """Return the bytes of the policy, its optimizer, the reference and the critic.

    number_size: bytes of a number of the forward pass.
    """
    ranks = _ranks_per_model(config)
    rank = config.model.lora_rank
    bytes_each = sum(_TRAINED.values())
    if rank is None:
        always = {name: size * model_sizes.weights / ranks for name, size in _TRAINED.items()}
        always["moments"] = _moments(config, model_sizes.matrices, model_sizes.weights) / ranks
    else:
        adapted = experts_with_adapters(config.model)
        of_experts = sum(size for name, size in model_sizes.experts.items() if name in adapted)
        adapters = rank * (model_sizes.linear + of_experts) * model_sizes.layers
        frozen = number_size * model_sizes.weights
        trained = bytes_each * adapters + _moments(config, adapters, adapters)
        always = {"frozen weights": frozen / ranks, "adapters": trained / ranks}
    is_initial = config.kl.reference == "initial"
    if config.kl.needs_model and not (rank and is_initial):
        reference_sizes = (None if is_initial else sizes_of(config.kl.reference)) or model_sizes
        bytes_per_weight = number_size if config.kl.update_every is None else 4
        always["reference"] = bytes_per_weight * reference_sizes.weights / ranks
    if config.advantage.estimator == "gae":
        body = (sizes_of(config.critic.path) if config.critic.path else None) or model_sizes
        # One value takes the place of a head with its own matrix.
        weights = body.weights - body.table * (body.tables - 1)
        moments = _moments(config, body.matrices, weights)
        always["critic"] = (bytes_each * weights + moments) / ranks
    return always


def _moments(config: Config, matrices: float, weights: float) -> float:
    """Return the bytes of the optimizer's moments of trained weights.

    AdamW has two in float32, and Muon one of the matrices between embedding and head.
    matrices: how many of the weights are in such matrices.
    """
    one_moment = matrices if config.optimizer.name == "muon" else 0
    return 8 * weights - 4 * one_moment


def _sampling(config: Config, model_sizes: Sizes, number_size: int) -> dict[str, float]:
    """Return the bytes that sampling takes beside the weights."""
    prompt, completion = (tokens or 1 for tokens in longest_document(config))
    if config.rollout.name == "policy":
        prompts = config.rollout.prompts_per_batch
        group_size = config.rollout.group_size
    else:  # evaluation alone samples
        prompts = config.evaluation.prompts_per_set
        group_size = config.evaluation.completions_per_prompt
    completions = prompts * group_size
    processes = len(copies_of(config)) or world_size(config.parallelism)
    at_once = config.sampler.max_sequences or completions
    rows = min(math.ceil(completions / processes), at_once)
    length = min(config.accumulation.max_tokens, prompt + completion)
    if getattr(config.task, "max_turns", 1) > 1:
        # A short conversation may go on in the same batch as a long one.
        length += completion
    prompt_tokens = min(_MOST_PROMPT_TOKENS, math.ceil(rows / group_size) * prompt)
    cached = rows * length * model_sizes.layers * model_sizes.cached
    return {
        "keys and values": cached * number_size,
        "prompts": prompt_tokens * (3 * model_sizes.inner + 4 * model_sizes.width) * number_size,
        "logits": 4 * rows * model_sizes.vocabulary,
    }


def _update(
    config: Config, model_sizes: Sizes, number_size: int, gpu: float | None
) -> dict[str, float]:
    """Return the bytes that the longest micro-batch takes: what a layer keeps for its backward pass
    was measured on H100s."""
    parallelism = config.parallelism
    tensor_parallel = parallelism.tensor_parallel
    has_adapters = config.model.lora_rank is not None
    tokens, keys = _largest_micro_batch(config)
    further_keys = number_size * (keys - tokens) * model_sizes.cached
    inner = model_sizes.inner / tensor_parallel
    width = model_sizes.width / (tensor_parallel if parallelism.sequence_parallel else 1)
    kept = tokens * number_size * (5 * inner + 12 * width) + further_keys
    if computes_again(config):
        kept = tokens * (number_size if has_adapters else 4) * width
    elif in_one_piece(config):
        results = 2 * model_sizes.query + model_sizes.cached + width + 2 * inner
        kept = tokens * (4 * width + number_size * results)
    logits = (config.kernel.logits_memory_mb or max(512, (gpu or 80e9) / 2**26)) * 2**20
    logits = min(logits, 4 * tokens * model_sizes.vocabulary / tensor_parallel)
    layers = model_sizes.layers / parallelism.pipeline_parallel
    update = {"hidden states": kept * layers}
    a_layer = tokens * number_size * (8 * inner + 10 * width) + 2 * further_keys
    update["a layer or logits"] = max(a_layer, logits)
    if config.model.dtype == "float16" and not has_adapters and not parallelism.shard:
        # The gradient of a scaled loss is not added in place.
        update["the head's gradient"] = 4 * model_sizes.table / tensor_parallel
    if parallelism.shard:
        # Embedding and head are held together with the head's gradient, two layers and the
        # gradient of one.
        tables = model_sizes.tables + (0 if has_adapters else 1)
        gathered = tables * model_sizes.table + 3 * model_sizes.layer
        bytes_gathered = (number_size if has_adapters else 4) * gathered
        update["gathered weights"] = bytes_gathered / tensor_parallel
    return update


def _largest_micro_batch(config: Config) -> tuple[float, float]:
    """Return the tokens that a rank computes of the largest micro-batch, and the keys that they
    see, which are more where completions share their prompt."""
    tokens = config.accumulation.max_tokens
    prompt = _likely_prompt(config)
    completion = longest_document(config)[1]
    keys_of_token = 1.0
    if prompt and completion:
        size = _completions_that_share(config, prompt, completion)
        shared, alone = tokens_of_group(size, prompt, completion)
        keys_of_token = alone / shared
        if config.accumulation.docs_per_step:
            ranks = config.parallelism.data_parallel
            documents = math.ceil(config.accumulation.docs_per_step / ranks)
            of_step = math.ceil(documents / size) * prompt + documents * completion
            tokens = min(tokens, of_step)
    here = tokens / config.parallelism.sequence_data_parallel
    return here, here * keys_of_token


def _completions_that_share(config: Config, prompt: int, completion: int) -> int:
    """Return how many completions share a prompt in training, if all have these lengths."""
    share = shares_prompts(config)
    if share is False or not isinstance(config.rollout, PolicyRolloutSettings):
        return 1
    size = config.rollout.group_size
    if share == "auto":
        in_half = config.trainer.device != "cpu" and config.model.dtype != "float32"
        share = in_half and saves_a_fifth(*tokens_of_group(size, prompt, completion))
    return size if share else 1


def _likely_prompt(config: Config) -> int | None:
    """Return the tokens of the longest prompt, known or estimated from its text; None where only
    the data knows."""
    known = longest_document(config)[0]
    task = config.task
    if known is not None or config.rollout.name != "policy":
        return known
    if not isinstance(task, ChatTaskSettings):
        return known
    tokens = None
    if isinstance(task, SumsTaskSettings):
        tokens = _likely_tokens(task.longest_prompt)
    elif isinstance(task, PromptsTaskSettings):
        tokens = _longest_prompt_of(Path(task.path), task.prompt_field)
    if tokens is None or task.chat == "never":
        return tokens
    return tokens + _TOKENS_OF_TEMPLATE + _likely_tokens(task.system_prompt or "")


def _longest_prompt_of(file: Path, field: str) -> int | None:
    """Return the likely tokens of a file's longest prompt; None unless it is a small JSONL file."""
    if file.suffix != ".jsonl" or not file.is_file() or file.stat().st_size > _LARGEST_FILE:
        return None
    return _longest_prompt_of_jsonl(file, field, file.stat().st_mtime_ns)


@functools.cache
def _longest_prompt_of_jsonl(file: Path, field: str, _changed: int) -> int | None:
    """Return the likely tokens of the longest prompt; None if a row cannot be read, or has no
    prompt.

    _changed: the file's time of change, so that a file that was changed is read again.
    """
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
    """Estimate the tokens of a text: one for each digit, as in most tokenizers, and one for three
    bytes of the rest."""
    digits = sum(map(str.isdecimal, words))
    return digits + math.ceil((len(words.encode()) - digits) / 3)


def memory_lines(config: Config, gpu: float | None) -> Iterator[str]:
    """Yield lines for `pgtk check`. gpu: bytes of each GPU, None where there is none."""
    is_on_cpu = gpu is None and config.trainer.device != "cuda"
    if is_on_cpu:
        config = with_values(config, {"trainer.device": "cpu"})
    use = memory_use(config, gpu)
    if use is None:
        return
    for name, parts in vars(use).items():
        if parts:
            sizes_of_parts = [f"{part} {size / 1e9:.3g}" for part, size in parts.items()]
            yield f"{name}: {' + '.join(sizes_of_parts)} GB"
    line = f"at most about {use.peak / 1e9:.3g} GB"
    if is_on_cpu:
        yield f"{line} of memory in each process, on the CPU"
        return
    yield f"{line} on each GPU, which has {gpu / 1e9:.3g}" if gpu else f"{line} on each GPU"
    if config.model.gradient_checkpointing == "auto":
        yield _keeping(config, use, gpu)
    if gpu and use.peak > gpu:
        yield f"use {_remedy(config, gpu)}"


def _keeping(config: Config, use: MemoryUse, gpu: float | None) -> str:
    """Return what `model.gradient_checkpointing=auto` is for this run, whose memory is given."""
    reason = why_not_by_memory(config)
    if reason:
        return f"model.gradient_checkpointing=auto is false here, since {reason}"
    keeping = memory_use(with_values(config, {"model.gradient_checkpointing": False}), gpu)
    assert keeping is not None
    return (
        f"layers keep up to {(keeping.peak - use.peak) / 1e9:.3g} GB more from the second step on, "
        "as far as the GPU has them"
    )


def bytes_of_process(config: Config, gpu: float) -> float:
    """Return the most bytes of a GPU that a process takes; of an unknown model those of CUDA alone.

    gpu: bytes of the GPU.
    """
    use = memory_use(config, gpu)
    return BYTES_OF_CUDA + (0 if use is None else use.peak)


def max_tokens_for(config: Config, room: float, gpu: float) -> int | None:
    """Return the most tokens of a micro-batch with which a process takes at most `room` bytes.

    gpu: bytes of the GPU.

    The result is a multiple of 256 in which the longest document fits, as far as its length is
    known. It is None where there is no such number, and where fewer tokens would change the steps.
    """
    if not config.accumulation.docs_per_step:
        return None
    longest = (_likely_prompt(config) or 1) + (longest_document(config)[1] or 1)
    counts = range(256 * math.ceil(longest / 256), config.accumulation.max_tokens + 1, 256)

    def bytes_with(tokens: int) -> float:
        return bytes_of_process(with_values(config, {"accumulation.max_tokens": tokens}), gpu)

    fitting = bisect.bisect_right(counts, room, key=bytes_with)
    return counts[fitting - 1] if fitting else None


def refuse_overflow(config: Config, gpu: float) -> None:
    """Raise ConfigError if a GPU of `gpu` bytes cannot hold what is certain to be there, before
    anything is loaded."""
    use = memory_use(config, gpu)
    if use is None:
        return
    certain = ("copy", "keys and values")
    of_training = sum(use.always.values()) + sum(use.sampling.get(name, 0) for name in certain)
    of_copies = sum(use.copies.get(name, 0) for name in certain)
    needed = max(of_training, of_copies)
    if needed > gpu:
        setting = f"model={config.model.name}"
        if isinstance(config.model, HuggingFaceModelSettings):
            setting = f"model.path={config.model.path}"
        raise ConfigError(
            refusal(
                setting=setting,
                needs=f"{needed / 1e9:.3g} GB of each GPU",
                got=f"{gpu / 1e9:.3g}",
                reason="pgtk check lists what they hold.",
                use=_remedy(config, gpu),
            )
        )


def _remedy(config: Config, gpu: float) -> str:
    """Return the cheapest change after which a GPU of `gpu` bytes is enough, in words."""
    for change in _changes(config):
        use = memory_use(with_values(config, change), gpu)
        if use is not None and use.peak <= gpu:
            settings = " ".join(f"{key}={text(value)}" for key, value in change.items())
            return f"{settings}, which takes {use.peak / 1e9:.3g} GB"
    return "more GPUs or a smaller model"


def _changes(config: Config) -> Iterator[dict[str, bool | int]]:
    """Yield values of keys that save memory, cheapest first: they cost time, then GPUs, then train
    fewer weights."""
    first: dict[str, bool | int] = {}
    if not computes_again(config) and config.model.name != "tiny":
        first["model.gradient_checkpointing"] = True
    fewest_tokens = max(1024, tokens_at_least(config))
    slower = [first]
    for parts in (2, 4, 8) if config.accumulation.docs_per_step else ():
        max_tokens = config.accumulation.max_tokens // parts
        if max_tokens >= fewest_tokens:
            slower.append(first | {"accumulation.max_tokens": max_tokens})
    if needs_sampler(config) and config.sampler.name == "transformers":
        slower.append(slower[-1] | {"sampler.max_sequences": 32})
    spread: list[dict[str, bool | int]] = [{}]
    if world_size(config.parallelism) == config.parallelism.data_parallel:
        for exponent in range(1, 7):
            ranks = 2**exponent
            spread.append({"parallelism.shard": True, "parallelism.data_parallel": ranks})
    adapters: list[dict[str, bool | int]] = [{}]
    if not (config.model.lora_rank or config.model.random_weights):
        adapters.append({"model.lora_rank": 16})
    for fewer_weights in adapters:
        for more_gpus in spread:
            for more_time in slower:
                yield fewer_weights | more_gpus | more_time
