"""Compares the ways to use several GPUs: estimates the seconds of an iteration from the model's
config.json alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pgtoolkit.config.counts import documents_per_step, longest_document, steps_of
from pgtoolkit.config.key import with_values
from pgtoolkit.config.memory import memory_use
from pgtoolkit.config.models import Sizes, sizes
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.ranks.environment import AXES
from pgtoolkit.system.report import text

# Rates of an H100, as measured with models of 0.5 to 7.6 billion weights: see docs/rollouts.md.
_UPDATE_RATE = 4.7e14
"""Operations a second in the matrix products of an update."""
_SAMPLING_RATE = 5e14
"""Operations a second in the matrix products of sampling many completions at once."""
_BANDWIDTH = 3e12
"""Bytes a second at which weights, and cached keys and values, are read."""
_SECONDS_PER_LAYER = 45e-6
"""Seconds of a layer for each token, however few completions: its kernels follow one another."""
_SECONDS_PER_TOKEN_OF_VLLM = 50e-6
"""Seconds that a vLLM server takes for each token of each completion: its own work on one core."""
_BETWEEN_GPUS = 2e11
"""Bytes a second at which gradients are summed."""
_TO_HOST = 4e10
"""Bytes a second at which weights are handed over."""
_PROMPT_SHARE = 0.25
"""Tokens of a prompt whose length only the data knows, per token of the longest completion."""
_BETWEEN_STEPS = 0.08
"""Seconds of an iteration in which nothing is sampled or updated: rewards, documents, records."""


@dataclass(frozen=True)
class Way:
    """A way to use GPUs. settings: what to type, empty for one GPU. seconds: of an iteration."""

    settings: str
    seconds: float


def ways(config: Config, gpus: int, memory: float) -> list[Way]:
    """Return the ways in which this many GPUs can train, the fastest first.

    gpus, memory: how many there are, and the bytes of each.

    There is at most one way of each kind, the fastest: on one GPU; on ranks that sample themselves;
    with GPUs for copies of the weights; with GPUs for servers. The list is empty where ways cannot
    be compared: for a model of unknown sizes, recorded rollouts, batches without a fixed number of
    steps, and ranks that divide a model.
    """
    model_sizes = sizes(config.model)
    if model_sizes is None or _divides_model(config):
        return []
    if not isinstance(config.rollout, PolicyRolloutConfig) or not _has_counted_steps(config):
        return []
    steps = steps_of(_documents(config), config.accumulation)
    if steps == 0:
        return []
    alternatives = [
        [_on_one_gpu(config, model_sizes, memory)],
        [_on_ranks(config, model_sizes, gpus, memory)],
        [_with_copies(config, model_sizes, ranks, gpus, memory) for ranks in range(1, gpus)],
        [_with_servers(config, model_sizes, ranks, gpus, memory) for ranks in range(1, gpus)],
    ]
    fastest = []
    for candidates in alternatives:
        possible = [way for way in candidates if way is not None]
        if possible:
            fastest.append(min(possible, key=lambda way: way.seconds))
    return sorted(fastest, key=lambda way: way.seconds)


def ways_in_words(config: Config, gpus: int, memory: float) -> Iterator[str]:
    """Yield lines for `pgtk check`: one for each way, the fastest first."""
    possible = ways(config, gpus, memory)
    if len(possible) < 2:
        return
    yield (
        "estimated seconds of an iteration (sampling and all steps of a batch), with completions "
        "of full length, by the rates of an H100:"
    )
    for way in possible:
        yield f"{way.seconds:.2g} s  {way.settings or 'one GPU'}"
    if "max_staleness" in possible[0].settings:
        yield (
            "documents are then up to rollout.max_staleness updates older than the weights that "
            "they train: docs/rollouts.md"
        )


def _divides_model(config: Config) -> bool:
    axes = [axis for axis in AXES if axis != "data_parallel"]
    return config.parallelism.shard or any(getattr(config.parallelism, axis) > 1 for axis in axes)


def _has_counted_steps(config: Config) -> bool:
    return config.accumulation.docs_per_step > 0 and config.accumulation.last_step != "carry"


def _on_one_gpu(config: Config, model_sizes: Sizes, memory: float) -> Way | None:
    return _in_turn(config, model_sizes, 1, memory)


def _on_ranks(config: Config, model_sizes: Sizes, gpus: int, memory: float) -> Way | None:
    return _in_turn(config, model_sizes, gpus, memory) if gpus > 1 else None


def _in_turn(config: Config, model_sizes: Sizes, ranks: int, memory: float) -> Way | None:
    """Return the way in which each rank samples, then trains; None where memory is too small."""
    use = memory_use(_trained_on(config, ranks), memory)
    if use is None or use.peak > memory:
        return None
    seconds = _sampling(config, model_sizes, ranks) + _update(config, model_sizes, ranks)
    return Way(_data_parallel(ranks), seconds + _BETWEEN_STEPS)


def _with_copies(
    config: Config, model_sizes: Sizes, ranks: int, gpus: int, memory: float
) -> Way | None:
    """Return the way whose other GPUs sample from copies of the weights, or None if impossible."""
    samplers = gpus - ranks
    if samplers % ranks or not _fits_update(config, ranks, memory):
        return None
    numbers = list(range(ranks, gpus))
    use = memory_use(with_values(_trained_on(config, ranks), {"sampler.gpus": numbers}), memory)
    if use is None or use.peak > memory:
        return None
    sampling = _sampling(config, model_sizes, samplers)
    settings = f"{_data_parallel(ranks)} sampler.gpus={text(numbers)} {_ahead(config)}".strip()
    return Way(settings, _overlapped(config, model_sizes, ranks, sampling))


def _with_servers(
    config: Config, model_sizes: Sizes, ranks: int, gpus: int, memory: float
) -> Way | None:
    """Return the way whose other GPUs sample with servers of vLLM, or None if impossible."""
    if not _fits_update(config, ranks, memory):
        return None
    sampling = _sampling_by_vllm(config, model_sizes, gpus - ranks)
    settings = (
        f"{_data_parallel(ranks)} sampler=vllm sampler.gpus={text(list(range(ranks, gpus)))} "
        f"{_ahead(config)}"
    )
    return Way(settings.strip(), _overlapped(config, model_sizes, ranks, sampling))


def _trained_on(config: Config, ranks: int) -> Config:
    """Return the configuration with this many ranks, which sample themselves."""
    values = {"parallelism.data_parallel": ranks, "sampler.gpus": None}
    if config.sampler.name == "transformers":
        values["sampler.processes"] = 0
    return with_values(config, values)


def _fits_update(config: Config, ranks: int, memory: float) -> bool:
    use = memory_use(_trained_on(config, ranks), memory)
    return use is not None and sum(use.always.values()) + sum(use.update.values()) <= memory


def _data_parallel(ranks: int) -> str:
    return "" if ranks == 1 else f"parallelism=ddp parallelism.data_parallel={ranks}"


def _ahead(config: Config) -> str:
    """Return what to type so that a batch is sampled while the one before it is trained."""
    steps = steps_of(_documents(config), config.accumulation)
    return f"rollout.max_staleness={2 * steps - 1} rollout.old_log_probs=sampling"


def _overlapped(config: Config, model_sizes: Sizes, ranks: int, sampling: float) -> float:
    """Return the seconds of an iteration that samples and updates at the same time."""
    handed_over = 2 * model_sizes.weights / _TO_HOST
    return max(sampling, _update(config, model_sizes, ranks)) + handed_over + _BETWEEN_STEPS


def _documents(config: Config) -> int:
    assert isinstance(config.rollout, PolicyRolloutConfig)  # `ways` looks at no other
    return config.rollout.prompts_per_batch * config.rollout.group_size


def _longest_tokens(config: Config) -> tuple[float, float]:
    """Return the tokens of the longest prompt (perhaps estimated) and the longest completion."""
    prompt, completion = longest_document(config)
    assert completion is not None  # rollout=policy has a length
    return _PROMPT_SHARE * completion if prompt is None else prompt, completion


def _update(config: Config, model_sizes: Sizes, ranks: int) -> float:
    """Return the seconds of all steps of a batch."""
    prompt, completion = _longest_tokens(config)
    documents = _documents(config)
    tokens = documents * min(config.accumulation.max_tokens, prompt + completion)
    # The forward pass and the gradients of inputs take 2 each, and so do the gradients of weights
    # and the repeated forward pass, where there are any.
    operations = 4 if config.model.lora_rank else 6
    operations += 2 if config.model.gradient_checkpointing else 0
    steps = math.ceil(documents / documents_per_step(config))
    sum_of_gradients = 0.0
    if ranks > 1 and not config.model.lora_rank:
        sum_of_gradients = 4 * model_sizes.weights / _BETWEEN_GPUS
    products = operations * model_sizes.weights * tokens / ranks / _UPDATE_RATE
    return products + steps * sum_of_gradients


def _sampling(config: Config, model_sizes: Sizes, gpus: int) -> float:
    """Return the seconds of a batch's completions, by the default sampler on this many GPUs."""
    assert isinstance(config.rollout, PolicyRolloutConfig)
    prompt, completion = _longest_tokens(config)
    number_size = 4 if config.model.dtype == "float32" else 2
    rows = math.ceil(config.rollout.prompts_per_batch / gpus) * config.rollout.group_size
    mean_length = prompt + completion / 2
    cached = rows * mean_length * model_sizes.layers * model_sizes.cached * number_size
    products = max(
        number_size * model_sizes.weights / _BANDWIDTH,
        2 * model_sizes.weights * rows / _SAMPLING_RATE,
    )
    seconds_of_layers = model_sizes.layers * _SECONDS_PER_LAYER
    return completion * (seconds_of_layers + cached / _BANDWIDTH + products)


def _sampling_by_vllm(config: Config, model_sizes: Sizes, servers: int) -> float:
    """Return the seconds of a batch's completions, by this many servers of vLLM."""
    _, completion = _longest_tokens(config)
    tokens = _documents(config) * completion
    work_of_servers = tokens / servers * _SECONDS_PER_TOKEN_OF_VLLM
    return max(_sampling(config, model_sizes, servers), work_of_servers)
