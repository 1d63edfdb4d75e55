"""The rules on when batches are sampled: rollout.lag and rollout.max_staleness."""

from __future__ import annotations

from typing import Any

from pgtoolkit.config.schedule import steps_of
from pgtoolkit.system.report import Report


def schedule(c: Any, report: Report) -> None:
    if c.rollout.name != "policy":
        return
    lag, most = c.rollout.lag, c.rollout.max_staleness
    if lag and most is not None:
        reason = "The one says how old documents are, the other how old they may become."
        use = "rollout.lag=0 or rollout.max_staleness=null"
        report.refuse(f"rollout.lag={lag}", "rollout.max_staleness=null", most, reason, use)
    elif lag or most is not None:
        setting = f"rollout.lag={lag}" if lag else f"rollout.max_staleness={most}"
        if c.accumulation.docs_per_step == 0:
            reason = "How many steps of so many micro-batches lie before a batch is not known ahead."
            report.refuse(setting, "accumulation.docs_per_step > 0", 0, reason, "accumulation=dynamic")
        elif most is not None:
            _overlap(c, setting, report)


def _overlap(c: Any, setting: str, report: Report) -> None:
    """Training and sampling at the same time."""
    most, last, old = c.rollout.max_staleness, c.accumulation.last_step, c.rollout.old_log_probs
    if old != "sampling":
        reason = "When a batch is there, the weights that wrote it are gone; others would give another ratio."
        report.refuse(setting, "rollout.old_log_probs=sampling", old, reason, "rollout.old_log_probs=sampling")
    if last == "carry":
        reason = "Where a step is of two batches, the second is needed before the first is used up."
        report.refuse(setting, "accumulation.last_step=short or drop", last, reason, "accumulation.last_step=short")
        return
    own = steps_of(c.rollout.prompts_per_batch * c.rollout.group_size, c.accumulation)
    if most < own:
        needs, reason = f"at least the {own} steps of a batch", "Below it, there is nothing to train meanwhile."
        report.refuse(setting, needs, most, reason, f"rollout.max_staleness={2 * own - 1}")
    elif most > (longest := 2 * own - 1):
        report.note(
            f"{setting}: no document is trained more than {longest} updates after the weights that wrote it, since "
            f"one batch is sampled while the one before, of {own} steps, is trained."
        )
