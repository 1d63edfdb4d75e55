"""The rules on what a step computes: loss, aggregation, advantages, accumulation."""

from __future__ import annotations

import re
from typing import Any

from pgtoolkit.losses.families import Family, configured
from pgtoolkit.system.functions import is_findable, kind_of
from pgtoolkit.system.report import Report, text


def loss(c: Any, report: Report) -> None:
    splits, family = c.loss.num_splits, family_of_config(c)
    if family is None and c.loss.path is not None:
        importable(report, "loss.path", str(c.loss.path), "It is imported when the run starts.")
        report.note(f"loss.path={c.loss.path} takes the place of the families that come with pgtoolkit.")
    for note in family.notes() if family is not None else ():
        report.note(note)
    if family is not None and family.by_document and splits != 1:
        reason = "The sequence ratio is exp of a mean over the whole document, and pieces do not recombine."
        report.refuse(f"loss={c.loss.name}", "loss.num_splits=1", splits, reason, "loss.num_splits=1")
    elif splits > 1 and c.kernel.implementation == "fused_linear":
        setting, needs = f"loss.num_splits={splits}", "materialised logits"
        reason = "The fused head cuts its own pieces, as large as kernel.logits_memory_mb allows."
        report.refuse(setting, needs, "kernel=fused_linear", reason, "kernel=torch or loss.num_splits=1")


def family_of_config(c: Any) -> Family | None:
    """The family of a configuration; None for one of the user's own, which only a run imports."""
    return None if c.loss.name == "custom" else configured(c.loss)


def aggregation(c: Any, report: Report) -> None:
    mode, divisor, reducer = c.aggregation.mode, c.aggregation.divisor, c.aggregation.reducer
    if mode == "constant" and divisor is None:
        reason = "aggregation=constant divides by it; it must not depend on the data."
        use = f"aggregation.divisor={c.rollout.max_completion_length or 'LONGEST_COMPLETION'}"
        report.refuse("aggregation.divisor=null", "a number", None, reason, use)
    if mode != "constant" and divisor is not None:
        reason = "It would be ignored: only aggregation=constant divides by it."
        use = "aggregation=constant or aggregation.divisor=null"
        report.refuse(f"aggregation.divisor={text(divisor)}", "aggregation=constant", mode, reason, use)
    if reducer is not None:
        importable(report, "aggregation.reducer", str(reducer), "It is imported when the run starts.")
        report.note(f"aggregation.reducer={reducer} takes the place of aggregation={mode}.")
    family = family_of_config(c)
    if family is not None and family.by_document and mode != "sample_mean" and reducer is None:
        report.note(f"loss={c.loss.name} with aggregation={mode} weights a document by its number of trained tokens.")


def importable(report: Report, key: str, path: str, reason: str, alternatives: str = "") -> None:
    """Refuse what cannot be the dotted path of a function or class, as far as can be told without importing it."""
    needs, use = f"{alternatives}a dotted path to a {kind_of(key)}", f"{key}=package.module.{kind_of(key)}"
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path):
        report.refuse(f"{key}={path}", needs, path, reason, use)
    elif not is_findable(path):
        report.refuse(f"{key}={path}", needs, f"no module {path.partition('.')[0]}", reason, use)


def advantage(c: Any, report: Report) -> None:
    estimator, size = c.advantage.estimator, c.rollout.group_size
    if estimator == "given" and c.rollout.name == "policy":
        reason = "Advantages can only be given with recorded rollouts."
        report.refuse("advantage=given", "rollout=recorded", "rollout=policy", reason, "advantage=dr_grpo")
    if estimator != "given" and size == 1:
        reason = "With one completion there is nothing to compare it with: the advantage is 0 or undefined."
        report.refuse(f"advantage={estimator}", "rollout.group_size >= 2", size, reason, "rollout.group_size=8")


def accumulation(c: Any, report: Report) -> None:
    docs, fixed = c.accumulation.docs_per_step, c.accumulation.micro_batches_per_step
    tokens, last = c.accumulation.max_tokens, c.accumulation.last_step
    if docs == 0 and fixed is None:
        reason = "With docs_per_step=0 a step is a fixed number of micro-batches."
        needs, use = "accumulation.micro_batches_per_step >= 1", "accumulation=fixed"
        report.refuse("accumulation.docs_per_step=0", needs, fixed, reason, use)
    if docs > 0 and fixed is not None:
        reason = "It would be ignored: documents are counted, not micro-batches."
        setting, use = f"accumulation.micro_batches_per_step={fixed}", "accumulation.micro_batches_per_step=null"
        report.refuse(setting, "accumulation.docs_per_step=0", docs, reason, use)
    if (longest := tokens_at_least(c)) > tokens:
        setting = f"accumulation.max_tokens={tokens}"
        reason = "A document is never split over micro-batches, so the longest must fit into one."
        needs = f"at least the longest document, {longest} tokens"
        report.refuse(setting, needs, tokens, reason, f"accumulation.max_tokens={longest}")
    if c.aggregation.mode == "prompt_mean":
        _prompt_mean(c, docs, report)
    if c.rollout.name == "policy" and docs > 0:
        _steps_per_batch(c, docs, last, report)


def _prompt_mean(c: Any, docs: int, report: Report) -> None:
    size = c.rollout.group_size or 1
    reason = "A prompt's mean needs all its completions in one step."
    if docs == 0:
        use = "accumulation=dynamic"
        report.refuse("aggregation=prompt_mean", "accumulation.docs_per_step > 0", docs, reason, use)
    elif docs % size:
        needs = f"accumulation.docs_per_step to be a multiple of the group size {size}"
        use = f"accumulation.docs_per_step={max(1, round(docs / size)) * size}"
        report.refuse("aggregation=prompt_mean", needs, docs, reason, use)


def _steps_per_batch(c: Any, docs: int, last: str, report: Report) -> None:
    batch = c.rollout.prompts_per_batch * c.rollout.group_size
    if docs > batch and last == "drop":
        reason = "No batch of rollouts fills a step, so every one would be dropped."
        needs = f"accumulation.docs_per_step <= {batch}, the documents of a batch"
        report.refuse("accumulation.last_step=drop", needs, docs, reason, f"accumulation.docs_per_step={batch}")
    elif docs > batch and last == "short":
        report.note(f"accumulation.docs_per_step={docs} is never reached: a batch of rollouts has {batch} documents.")
    elif batch % docs:
        what = {
            "short": f"the last step of every batch has only {batch % docs}",
            "drop": f"the last {batch % docs} documents of every batch are not trained on",
            "carry": "some steps mix documents of two batches, sampled by different policies",
        }[last]
        report.note(f"accumulation.docs_per_step={docs} does not divide the {batch} documents of a batch: {what}.")
    elif docs == batch and not (c.rollout.lag or c.rollout.max_staleness):
        report.note(
            "one optimizer step per batch of rollouts: every ratio is 1, nothing is clipped, and the losses differ "
            "only in their weights."
        )


def longest_document(config: Any) -> tuple[int | None, int | None]:
    """(prompt, completion) tokens of the longest document, each None where only the data knows."""
    prompt = None
    if config.task.name == "reverse" and config.model.name == "tiny" and config.rollout.name == "policy":
        prompt = config.task.num_digits + 1
    return prompt, config.rollout.max_completion_length


def tokens_at_least(config: Any) -> int:
    """Tokens that the longest document has at least."""
    return sum(tokens or 1 for tokens in longest_document(config))
