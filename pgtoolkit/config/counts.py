"""Counts that follow from a configuration: tokens of a document, documents of a step, steps of a
batch, how early a batch is sampled, and by how many processes."""

from __future__ import annotations

from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig, RolloutConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig
from pgtoolkit.config.schema_step import AccumulationConfig
from pgtoolkit.config.schema_tasks import GeneratedTaskConfig


def longest_document(config: Config) -> tuple[int | None, int | None]:
    """Return the tokens (of the prompt, of the completion) of the longest document.

    Each is None where only the data knows it.
    """
    completion = config.rollout.max_completion_length
    if config.rollout.name != "policy":
        return None, completion
    if not isinstance(config.task, GeneratedTaskConfig):
        return getattr(config.task, "max_prompt_length", None), completion
    if config.model.name != "tiny":
        return None, completion
    prompt, answer = config.task.longest
    template = config.kl.reference_prompt
    if template is not None:
        # The tiny model has a token per character; `answer` counts the end of the sequence too.
        reference_prompt = template.format(prompt=" " * prompt, answer=" " * (answer - 1))
        prompt = max(prompt, len(reference_prompt))
    return prompt, completion


def tokens_at_least(config: Config) -> int:
    """Return the fewest tokens that the longest document can have.

    Where the limit of completions cuts off the longest answer, which is refused, the answer counts.
    """
    prompt, completion = longest_document(config)
    counts_characters = config.model.name == "tiny" and config.rollout.name == "policy"
    if counts_characters and isinstance(config.task, GeneratedTaskConfig):
        completion = max(completion or 1, config.task.longest[1])
    return (prompt or 1) + (completion or 1)


def documents_per_batch(rollout: RolloutConfig) -> int | None:
    """Return the documents of a batch of rollouts; None for recorded ones."""
    if not isinstance(rollout, PolicyRolloutConfig):
        return None
    return rollout.prompts_per_batch * rollout.group_size


def documents_per_step(config: Config) -> int:
    """Return the most documents of a step; 0 where a step is a number of micro-batches."""
    docs_per_step = config.accumulation.docs_per_step
    batch_size = documents_per_batch(config.rollout)
    if batch_size is None or config.accumulation.last_step == "carry":
        return docs_per_step
    return min(docs_per_step, batch_size)


def steps_of(documents: int, accumulation: AccumulationConfig) -> int:
    """Return the steps that this many documents of one batch make.

    accumulation: with docs_per_step > 0, and last_step short or drop.
    """
    docs_per_step = accumulation.docs_per_step
    if accumulation.last_step == "drop":
        return documents // docs_per_step
    return -(-documents // docs_per_step)


def steps_before(
    number: int, position: int, batch_size: int, accumulation: AccumulationConfig
) -> int:
    """Return the steps from the one that begins at `position` to the one that begins batch
    `number`, which comes after the batch of `position`.

    position: where a step begins, in documents. accumulation: with docs_per_step > 0.
    """
    if accumulation.last_step == "carry":
        return (number * batch_size - position) // accumulation.docs_per_step
    steps_in_this_batch = steps_of(batch_size - position % batch_size, accumulation)
    batches_between = number - position // batch_size - 1
    return steps_in_this_batch + batches_between * steps_of(batch_size, accumulation)


def steps_ahead(rollout: PolicyRolloutConfig, accumulation: AccumulationConfig) -> int:
    """Return how many steps before the one that begins it each batch is sampled.

    The first batches are sampled when the run starts. With `max_staleness` the number keeps the
    last step of a batch within the limit, and is at most the steps of a batch: then a batch is
    sampled while the one before it is trained.
    """
    if rollout.max_staleness is None:
        return rollout.lag
    steps_per_batch = steps_of(rollout.prompts_per_batch * rollout.group_size, accumulation)
    return min(rollout.max_staleness - (steps_per_batch - 1), steps_per_batch)


def samples_ahead(rollout: RolloutConfig) -> bool:
    """Return whether completions are sampled before earlier updates are made."""
    if not isinstance(rollout, PolicyRolloutConfig):
        return False
    return rollout.lag > 0 or rollout.max_staleness is not None


def samples_async(config: Config) -> bool:
    """Return whether the process that makes the updates samples completions during them."""
    is_ahead = getattr(config.rollout, "max_staleness", None) is not None
    return config.sampler.name == "transformers" and is_ahead and not copies_of(config)


def copies_of(config: Config) -> list[int]:
    """Return the GPU of each process that samples from a copy of the weights, or its number on the
    CPU; empty without such processes."""
    sampler = config.sampler
    if not isinstance(sampler, TransformersSamplerConfig):
        return []
    return list(range(sampler.processes)) if sampler.gpus is None else sampler.gpus
