"""What makes runs hard to compare."""

from __future__ import annotations

import numpy as np

from pgtoolkit.comparison.compared import Compared
from pgtoolkit.runs.find import HELD_OUT
from pgtoolkit.system.report import is_number, text

_SCALES_APART = 2
"""By how much gradients may differ in length before it is noted."""


def notes_of(compared: Compared) -> list[str]:
    """What makes the runs hard to compare, each in a sentence without its full stop."""
    notes, counted = [], [run for group in compared.groups for run in group.counted]
    if len({run.code for run in counted}) > 1:
        notes.append("the runs come from different code: `pgtk diff RUN_A RUN_B` says what changed")
    lengths = {run.step for run in counted if not run.collapsed}
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
    if key := compared.best_of:
        most = "fewest" if compared.by_documents else "highest"
        notes.append(
            f"of each configuration the {key} with the {most} {compared.measured[0].lower()}{compared.measured[1:]} "
            "is shown. It was chosen by the same runs that are compared, which flatters a configuration that has more "
            "values of it, or noisier ones: further seeds of the chosen ones tell"
        )
        for group in compared.groups:
            ran, best = [value for value in compared.tried if value in group.tried], text(group.values[key])
            if len(ran) > 1 and is_number(group.values[key]) and best in (ran[0], ran[-1]):
                end = "lowest" if best == ran[0] else "highest"
                notes.append(f"{group.label}: this is the {end} {key} tried, and one beyond may be better")
    return notes + _scale_notes(compared.groups)


def _scale_notes(groups):
    """What is to know of gradients of different lengths."""
    norms = {}
    for group in groups:
        if values := [run.values("grad_norm") for run in group.counted if "grad_norm" in run.columns]:
            norms[group.label] = float(np.median(np.concatenate(values)))
    if len(norms) < 2 or max(norms.values()) <= _SCALES_APART * min(norms.values()):
        return []
    low, high = min(norms, key=norms.get), max(norms, key=norms.get)
    times = f", {norms[high] / norms[low]:.3g} times as much" if norms[low] > 0 else ""
    return [
        f"the gradients are of different lengths: the median grad_norm is {norms[low]:.3g} with {low} and "
        f"{norms[high]:.3g} with {high}{times}. Clipping to optimizer.max_grad_norm and AdamW's epsilon then act on "
        "them differently, and one learning rate need not suit both: docs/comparing.md"
    ]
