"""Counts that follow from settings: documents and steps of a batch, and how early it is sampled."""

from __future__ import annotations

from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    PolicyRolloutSettings,
    RolloutSettings,
)


def documents_per_batch(rollout: RolloutSettings) -> int | None:
    """Return the documents of a batch of rollouts; None for recorded ones."""
    if not isinstance(rollout, PolicyRolloutSettings):
        return None
    return rollout.prompts_per_batch * rollout.group_size


def steps_of(documents: int, accumulation: AccumulationSettings) -> int:
    """Return the steps that this many documents of one batch make in a pass.

    accumulation: with docs_per_step > 0, and last_step short or drop.
    """
    docs_per_step = accumulation.docs_per_step
    if accumulation.last_step == "drop":
        return documents // docs_per_step
    return -(-documents // docs_per_step)


def steps_of_batch(rollout: PolicyRolloutSettings, accumulation: AccumulationSettings) -> int:
    """Return the steps that a batch of rollouts makes, in all of its passes.

    accumulation: as for `steps_of`.
    """
    documents = rollout.prompts_per_batch * rollout.group_size
    return rollout.passes * steps_of(documents, accumulation)


def steps_before(
    number: int,
    position: int,
    batch_size: int,
    accumulation: AccumulationSettings,
    passes: int = 1,
    passes_done: int = 0,
) -> int:
    """Return the steps from the one that begins at `position` to the one that begins batch
    `number`, which comes after the batch of `position`.

    position: where a step begins, in documents. accumulation: with docs_per_step > 0.
    passes: over each batch. passes_done: over the batch of `position` before the step.
    """
    if accumulation.last_step == "carry":
        return (number * batch_size - position) // accumulation.docs_per_step
    steps_in_this_pass = steps_of(batch_size - position % batch_size, accumulation)
    batches_between = number - position // batch_size - 1
    passes_between = batches_between * passes + passes - 1 - passes_done
    return steps_in_this_pass + passes_between * steps_of(batch_size, accumulation)


def steps_ahead(rollout: PolicyRolloutSettings, accumulation: AccumulationSettings) -> int:
    """Return how many steps before the one that begins it each batch is sampled.

    The first batches are sampled when the run starts. With `max_staleness` the number keeps the
    last step of a batch within the limit, and is at most the steps of a batch: then a batch is
    sampled while the one before it is trained.
    """
    if rollout.max_staleness is None:
        return rollout.lag
    steps_per_batch = steps_of_batch(rollout, accumulation)
    return min(rollout.max_staleness - (steps_per_batch - 1), steps_per_batch)


def samples_ahead(rollout: RolloutSettings) -> bool:
    """Return whether completions are sampled before earlier updates are made."""
    if not isinstance(rollout, PolicyRolloutSettings):
        return False
    return rollout.lag > 0 or rollout.max_staleness is not None


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to the limit."""
    return [2**i for i in range(limit.bit_length())]


def tokens_of_group(size: int, prompt: int, completion: int) -> tuple[int, int]:
    """Return the tokens that are computed of a prompt with `size` completions, all of these
    lengths: where they share the prompt, and where each has its own."""
    return prompt + size * completion, size * (prompt + completion)


def saves_a_fifth(shared: int, alone: int) -> bool:
    """Return whether a fifth or more of the tokens of documents need not be computed, so that
    model.share_prompts=auto shares them.

    alone: the tokens of all documents. shared: those that are computed where documents share.
    """
    return 5 * shared <= 4 * alone
