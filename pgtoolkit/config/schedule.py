"""When each batch of rollouts is sampled: so many steps ahead of the step that begins it.

Steps are counted, of which each makes one update of the weights; one that is skipped (`num_skipped_steps`) makes none,
and what was sampled before it is then one update less old.
"""

from __future__ import annotations

from pgtoolkit.config.schema import AccumulationConfig, PolicyRolloutConfig


def steps_of(documents: int, accumulation: AccumulationConfig) -> int:
    """Steps that so many documents of one batch last; accumulation: docs_per_step > 0, last_step short or drop."""
    docs = accumulation.docs_per_step
    return documents // docs if accumulation.last_step == "drop" else -(-documents // docs)


def steps_before(number: int, position: int, batch_size: int, accumulation: AccumulationConfig) -> int:
    """Steps from the one that begins at `position` to the one that begins batch `number`, a later batch than its own.

    position: in documents, where a step begins. accumulation: docs_per_step > 0.
    """
    if accumulation.last_step == "carry":
        return (number * batch_size - position) // accumulation.docs_per_step
    left = steps_of(batch_size - position % batch_size, accumulation)
    return left + (number - position // batch_size - 1) * steps_of(batch_size, accumulation)


def steps_ahead(rollout: PolicyRolloutConfig, accumulation: AccumulationConfig) -> int:
    """How many steps ahead of the one that begins it each batch is sampled, at the earliest at the start of the run.

    rollout: of rollout=policy. With `max_staleness` they are as many as keep the last step of the batch within it, and
    at most those of one batch: then one batch is sampled while the one before it is trained.
    """
    if rollout.max_staleness is None:
        return rollout.lag
    own = steps_of(rollout.prompts_per_batch * rollout.group_size, accumulation)
    return min(rollout.max_staleness - (own - 1), own)
