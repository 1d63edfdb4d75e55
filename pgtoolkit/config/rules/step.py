"""The rules on the documents of a step, and on how it is spread over processes."""

from __future__ import annotations

from pgtoolkit.config.counts import tokens_at_least
from pgtoolkit.config.models import measures_prompts, shape, vocabulary_size
from pgtoolkit.config.own_code import chosen, family_of_config
from pgtoolkit.config.schema import Config
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.model.misfits import misfits
from pgtoolkit.ranks.environment import AXES, joined, world_size
from pgtoolkit.rollouts.batch_counts import documents_per_batch, samples_ahead, steps_of
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.rollouts.whole_steps import misfits_of_function, misfits_of_groups
from pgtoolkit.system.report import Report


def accumulation(c: Config, report: Report) -> None:
    _size_of_step(c, report)
    longest = tokens_at_least(c)
    if longest > c.accumulation.max_tokens and not measures_prompts(c):
        report.refuse_value(
            key="accumulation.max_tokens",
            value=c.accumulation.max_tokens,
            needs=f"at least the longest document, {longest} tokens",
            reason="A document is never split over micro-batches, so the longest must fit into "
            "one.",
            better=longest,
        )
    docs = c.accumulation.docs_per_step
    group_size = c.rollout.group_size or 1
    if AGGREGATIONS[c.aggregation.mode].needs_groups:
        reason = "A prompt's mean needs all its completions in one step."
        setting = f"aggregation={c.aggregation.mode}"
        report.problems += misfits_of_groups(setting, docs, group_size, reason)
    family = family_of_config(c)
    if isinstance(family, FunctionFamily):
        report.problems += misfits_of_function(
            f"loss={c.loss.name}", family, docs, group_size, c.correction.name
        )
    batch = documents_per_batch(c.rollout)
    if batch is not None and docs > 0:
        _steps_per_batch(c, batch, docs, report)
    if family is not None:
        notes_on_ratios(c, family, report)


def notes_on_ratios(c: Config, family: Family, report: Report) -> None:
    """Note what updates between sampling and a step do to the ratios of a loss.

    family: of the configuration; of a loss of the user's own once it is imported.
    """
    rollout = c.rollout
    batch = documents_per_batch(rollout)
    if not isinstance(rollout, PolicyRolloutSettings) or batch is None:
        return
    if family.reads_old_log_probs and rollout.passes > 1:
        report.note(
            f"rollout.passes={rollout.passes}: ratios compare with log-probs from before the first "
            "pass over a batch, so that clips act from pass two on, also where a batch is one step."
        )
    docs = c.accumulation.docs_per_step
    last = c.accumulation.last_step
    if docs == 0 or (docs > batch and last == "drop"):
        return
    if _is_on_policy(c, batch):
        _note_on_policy(c, family, max(1, docs // batch) if last == "carry" else 1, report)
    elif not compares_log_probs(family) and c.advantage.estimator != "none":
        report.note(
            f"loss={chosen(c, 'loss')} has no ratio: nothing corrects for updates between sampling "
            "and a step. It is made for one step per batch of rollouts and no rollout.lag."
        )


def compares_log_probs(family: Family) -> bool:
    """Return whether a loss may compare the policy with the one that sampled, by any log-probs."""
    if isinstance(family, FunctionFamily):
        return bool(family.asked & {"log_ratio", "old_log_probs", "sampling_log_probs"})
    return family.reads_old_log_probs


def _note_on_policy(c: Config, family: Family, num_batches: int, report: Report) -> None:
    """Note that every ratio is 1. num_batches: those of a step."""
    # Batches that one step carries together are sampled before it.
    batches = "batch" if num_batches == 1 else f"{num_batches} batches"
    sentence = f"one optimizer step per {batches} of rollouts: every ratio is 1, nothing is clipped"
    is_surrogate = not isinstance(family, FunctionFamily) and c.loss.name in FAMILIES
    if is_surrogate:
        report.note(f"{sentence}, and the losses differ only in their weights.")
    elif family.reads_old_log_probs:
        report.note(f"{sentence}.")


def _size_of_step(c: Config, report: Report) -> None:
    """Refuse a step with two sizes."""
    docs = c.accumulation.docs_per_step
    micro_batches = c.accumulation.micro_batches_per_step
    default = report.default_of("accumulation.micro_batches_per_step")
    if docs and micro_batches and micro_batches == default:  # other values are refused as ignored
        report.refuse(
            setting="accumulation=fixed",
            needs="accumulation.docs_per_step=0",
            got=docs,
            reason="A step then has that many documents.",
            use="accumulation=dynamic",
        )


def _is_on_policy(c: Config, batch: int) -> bool:
    """Return whether no update comes between the sampling of a completion and its step.

    batch: documents of a batch of rollouts.
    """
    assert isinstance(c.rollout, PolicyRolloutSettings)  # recorded rollouts have no batches
    if c.rollout.passes > 1 or samples_ahead(c.rollout):
        return False
    if c.accumulation.last_step == "carry":
        return c.accumulation.docs_per_step % batch == 0
    return steps_of(batch, c.accumulation) <= 1


def _steps_per_batch(c: Config, batch: int, docs: int, report: Report) -> None:
    last = c.accumulation.last_step
    if docs > batch and last == "drop":
        report.refuse(
            setting="accumulation.last_step=drop",
            needs=f"accumulation.docs_per_step <= {batch}, the documents of a batch",
            got=docs,
            reason="No batch of rollouts fills a step, so every one would be dropped.",
            use=f"accumulation.docs_per_step={batch}",
        )
        return
    if docs > batch and last == "short":
        effect = f"is never reached: a batch of rollouts has {batch} documents"
        report.note(f"accumulation.docs_per_step={docs} {effect}.")
    elif batch % docs and not (last == "carry" and docs % batch == 0):
        effects = {
            "short": f"the last step of every batch has only {batch % docs}",
            "drop": f"the last {batch % docs} documents of every batch are not trained on",
            "carry": "some steps mix documents of two batches, sampled by different policies",
        }
        reason = f"does not divide the {batch} documents of a batch"
        report.note(f"accumulation.docs_per_step={docs} {reason}: {effects[last]}.")


def parallelism(c: Config, report: Report) -> None:
    """Check the sizes of parallelism against each other, a launcher's processes, and the model."""
    p = c.parallelism
    sizes = {name: getattr(p, name) for name in AXES}
    report.problems += misfits(sizes, p.shard, shape(c.model), vocabulary_size(c.model, c.task))
    _processes_of_launcher(c, report)


def _processes_of_launcher(c: Config, report: Report) -> None:
    """Refuse a launcher's number of processes that is not the product of the sizes."""
    rank = joined()
    product = world_size(c.parallelism)
    if rank is None or rank.world_size == product:
        return
    factors = " x ".join(f"{name}={getattr(c.parallelism, name)}" for name in AXES)
    report.refuse(
        setting=f"WORLD_SIZE={rank.world_size}",
        needs=f"the product of the parallel sizes, {product} = {factors}",
        got=rank.world_size,
        reason="Every process has one place in the layout.",
        use=f"as many processes, or without a launcher such as torchrun pgtk starts {product} "
        "itself",
    )
