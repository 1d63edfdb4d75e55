"""Which way to use several GPUs makes an iteration shortest, estimated from the model's config.json
alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pgtoolkit.config.key import with_values
from pgtoolkit.config.memory import memory_plan
from pgtoolkit.config.models import Sizes, sizes
from pgtoolkit.config.plan import documents_per_step, longest_document, steps_of
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.ranks.environment import AXES
from pgtoolkit.system.report import text

# Of an H100, as measured with models of 0.5 to 7.6 billion weights: see docs/rollouts.md.
_UPDATE_RATE = 4.7e14
"""Operations a second of the products of an update."""
_SAMPLING_RATE = 5e14
"""The same of a token of many completions."""
_BANDWIDTH = 3e12
"""Bytes a second, of weights and of cached keys and values."""
_SECONDS_PER_LAYER = 45e-6
"""Of a token, however few completions: its kernels follow one another."""
_SECONDS_PER_TOKEN_OF_VLLM = 50e-6
"""Of a server of vLLM for each token of each completion: its own work on one core."""
_BETWEEN_GPUS = 2e11
"""Bytes a second at which gradients are summed."""
_TO_HOST = 4e10
"""Bytes a second at which weights are handed over."""
_PROMPT_SHARE = 0.25
"""Of a prompt whose length only the data knows: its tokens against those of the longest
completion."""
_BETWEEN_STEPS = 0.08
"""Seconds of an iteration in which neither is done: rewards, documents, records."""


@dataclass(frozen=True)
class Way:
    """A way to use GPUs. settings: what to type for it, empty for one GPU. seconds: of an
    iteration."""

    settings: str
    seconds: float


def ways(c: Config, gpus: int, memory: float) -> list[Way]:
    """Return the ways in which so many GPUs, of so many bytes each, can train, the fastest first.

    Of one GPU, ranks that sample themselves, copies and servers on GPUs of their own each the
    fastest way. Empty where
    they cannot be compared: for models that are not known, rollouts that are not sampled, batches
        whose steps are not
    counted, and ranks that divide a model.
    """
    shape = sizes(c.model)
    rollout = c.rollout
    others = [axis for axis in AXES if axis != "data_parallel"]
    divides = c.parallelism.shard or any(getattr(c.parallelism, axis) > 1 for axis in others)
    counted = c.accumulation.docs_per_step > 0 and c.accumulation.last_step != "carry"
    if shape is None or divides or not counted or not isinstance(rollout, PolicyRolloutConfig):
        return []
    steps = steps_of(rollout.prompts_per_batch * rollout.group_size, c.accumulation)
    if steps == 0:
        return []
    ahead = f"rollout.max_staleness={2 * steps - 1} rollout.old_log_probs=sampling"
    by_kind: dict[str, list[Way]] = {"one": [], "ranks": [], "copies": [], "servers": []}
    for ranks in range(1, gpus + 1):
        alone = {"parallelism.data_parallel": ranks, "sampler.gpus": None, "sampler.processes": 0}
        if c.sampler.name == "vllm":
            alone = {"parallelism.data_parallel": ranks, "sampler.gpus": None}
        plan = memory_plan(with_values(c, alone), memory)
        if plan is None or sum(plan.always.values()) + sum(plan.update.values()) > memory:
            continue
        parallel = "" if ranks == 1 else f"parallelism=ddp parallelism.data_parallel={ranks}"
        update = _update(c, shape, ranks)
        if ranks in (1, gpus) and plan.most <= memory:
            in_turn = _sampling(c, shape, ranks) + update + _BETWEEN_STEPS
            by_kind["one" if ranks == 1 else "ranks"].append(Way(parallel, in_turn))
        samplers = gpus - ranks
        if samplers == 0:
            continue
        numbers = list(range(ranks, gpus))
        own = f"sampler.gpus={text(numbers)}"
        plan_of_copies = memory_plan(with_values(c, alone | {"sampler.gpus": numbers}), memory)
        handed_over = 2 * shape.weights / _TO_HOST
        if samplers % ranks == 0 and plan_of_copies is not None and plan_of_copies.most <= memory:
            longer = max(_sampling(c, shape, samplers), update) + handed_over + _BETWEEN_STEPS
            by_kind["copies"].append(Way(f"{parallel} {own} {ahead}".strip(), longer))
        longer = max(_sampling_by_vllm(c, shape, samplers), update) + handed_over + _BETWEEN_STEPS
        by_kind["servers"].append(Way(f"{parallel} sampler=vllm {own} {ahead}".strip(), longer))
    fastest = [min(of_kind, key=lambda way: way.seconds) for of_kind in by_kind.values() if of_kind]
    return sorted(fastest, key=lambda way: way.seconds)


def ways_in_words(c: Config, gpus: int, memory: float) -> Iterator[str]:
    """Yield lines for `pgtk check`: one for each way, the fastest first."""
    known = ways(c, gpus, memory)
    if len(known) < 2:
        return
    yield (
        "estimated seconds of an iteration (sampling and all steps of a batch), completions of "
        "full length, by the rates of an H100:"
    )
    for way in known:
        yield f"{way.seconds:.2g} s  {way.settings or 'one GPU'}"
    if "max_staleness" in known[0].settings:
        yield (
            "with rollout.max_staleness documents are as many updates old as it says at most: "
            "docs/rollouts.md"
        )


def _tokens_of(c: Config) -> tuple[float, float]:
    """Tokens of the longest prompt and completion, as far as they are known."""
    prompt, completion = longest_document(c)
    assert completion is not None  # of rollout=policy
    return _PROMPT_SHARE * completion if prompt is None else prompt, completion


def _update(c: Config, shape: Sizes, ranks: int) -> float:
    """Seconds of all steps of a batch."""
    prompt, completion = _tokens_of(c)
    assert isinstance(c.rollout, PolicyRolloutConfig)
    documents = c.rollout.prompts_per_batch * c.rollout.group_size
    tokens = documents * min(c.accumulation.max_tokens, prompt + completion)
    # Forward, the gradients of inputs and of weights, and the forward pass again where it is not
    # kept.
    operations = 4 if c.model.lora_rank else 6
    operations += 2 if c.model.gradient_checkpointing else 0
    steps = math.ceil(documents / documents_per_step(c))
    summed = 0.0 if ranks == 1 or c.model.lora_rank else 4 * shape.weights / _BETWEEN_GPUS
    return operations * shape.weights * tokens / ranks / _UPDATE_RATE + steps * summed


def _sampling(c: Config, shape: Sizes, gpus: int) -> float:
    """Seconds of a batch's completions, by the default sampler on so many GPUs."""
    prompt, completion = _tokens_of(c)
    assert isinstance(c.rollout, PolicyRolloutConfig)
    number = 4 if c.model.dtype == "float32" else 2
    rows = math.ceil(c.rollout.prompts_per_batch / gpus) * c.rollout.group_size
    places = prompt + completion / 2
    cached = rows * places * shape.layers * shape.cached * number / _BANDWIDTH
    products = max(number * shape.weights / _BANDWIDTH, 2 * shape.weights * rows / _SAMPLING_RATE)
    return completion * (shape.layers * _SECONDS_PER_LAYER + cached + products)


def _sampling_by_vllm(c: Config, shape: Sizes, servers: int) -> float:
    _, completion = _tokens_of(c)
    assert isinstance(c.rollout, PolicyRolloutConfig)
    tokens = c.rollout.prompts_per_batch * c.rollout.group_size * completion
    return max(_sampling(c, shape, servers), tokens / servers * _SECONDS_PER_TOKEN_OF_VLLM)
