"""What to know of a comparison besides its numbers: why runs are in no mean, what makes them hard to compare."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from pgtoolkit.comparison.runs import HELD_OUT, Run
from pgtoolkit.runs.series import final

if TYPE_CHECKING:
    from pgtoolkit.comparison.groups import Compared

_SCALES_APART = 2
"""By how much gradients may differ in length before it is noted."""


def why_not_counted(run: Run, metric: str | None = None) -> str:
    """The reason, with what the run has reached of the metric so far."""
    if metric and run.state == "done":
        return f"has no {metric}"
    if run.state == "pending":
        return "has not begun"
    if run.state == "unreadable":
        return f"unreadable: {run.reason}"
    why = f"{run.state} at step {run.step}"
    if "trainer.max_steps" in run.config:
        why += f" of {run.config['trainer.max_steps']}"
    so_far = run.values(metric) if metric else []
    why += f", {metric} {final(so_far):.3f} so far" if so_far else ""
    return why + (f": {' '.join(run.reason.split())}" if run.reason else "")


def notes_on(compared: Compared) -> list[str]:
    """Each in a sentence without its full stop."""
    notes, counted = [], [run for group in compared.groups for run in group.counted]
    if len({run.code for run in counted}) > 1:
        notes.append("the runs come from different code: `pgtk diff RUN_A RUN_B` says what changed")
    lengths = {run.step for run in counted}
    if len(lengths) > 1:
        steps = ", ".join(map(str, sorted(lengths)))
        notes.append(f"the runs are of different length ({steps} steps): their ends do not compare, the mean does")
    if compared.metric.startswith(HELD_OUT):
        keys = {key for run in counted for key in run.config if key.startswith("evaluation.")} - {"evaluation.best"}
        if names := sorted(key for key in keys if len({repr(run.config.get(key)) for run in counted}) > 1):
            notes.append(
                f"the runs were evaluated differently ({', '.join(names)}): on other prompts, with other "
                "settings, or at other steps"
            )
    return notes + _scale_notes(compared.groups)


def _scale_notes(groups):
    """What is to know of gradients of different lengths."""
    norms = {}
    for group in groups:
        if values := [value for run in group.counted for value in run.values("grad_norm")]:
            norms[group.label] = statistics.median(values)
    if len(norms) < 2 or max(norms.values()) <= _SCALES_APART * min(norms.values()):
        return []
    low, high = min(norms, key=norms.get), max(norms, key=norms.get)
    times = f", {norms[high] / norms[low]:.3g} times as much" if norms[low] > 0 else ""
    return [
        f"the gradients are of different lengths: the median grad_norm is {norms[low]:.3g} with {low} and "
        f"{norms[high]:.3g} with {high}{times}. Clipping to optimizer.max_grad_norm and AdamW's epsilon then act on "
        "them differently, and one learning rate need not suit both: docs/comparing.md"
    ]
