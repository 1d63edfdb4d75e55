"""The runs of a comparison as a table of pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgtoolkit.comparison.groups import Compared
from pgtoolkit.comparison.measures import AXES, reached
from pgtoolkit.runs.series import best
from pgtoolkit.system.report import text

if TYPE_CHECKING:
    from pandas import DataFrame


def runs_table(compared: Compared) -> DataFrame:
    """A row per run, unfinished ones too: what varies, seed, state, whether it is in the means, what it reached.

    `documents_to_METRIC_THRESHOLD` and its like are empty where that was not reached in the `documents_seen`.
    """
    from pandas import DataFrame

    goal, rows = compared.goal, []
    to = {axis: f"{AXES[axis]}_to_{goal.metric}_{goal.threshold:g}" for axis in compared.limits}
    values = {name: f"{name}_{goal.metric}" for name in ("mean", "final", "best")}
    for group in compared.groups:
        for run in group.runs:
            row = {"run": run.path, **{key: text(value) for key, value in group.values.items()}}
            row |= {"seed": run.config["seed"], "state": run.state, "counted": "no", "step": run.step}
            row["counted"] = "yes" if run in group.counted else "no"
            if found := run.values(goal.metric):
                one = reached(run, goal)
                row |= {to[axis]: one.to[axis] for axis in to if axis in one.to} | one.seen
                row |= zip(values.values(), (one.mean, one.final, best(found)), strict=True)
            rows.append(row)
    unread = [run for run, _ in compared.left_out if not run.config]
    rows += [{"run": run.path, "state": run.state, "counted": "no"} for run in unread]
    fixed = ["run", *compared.keys, "seed", "state", "counted", "step"]
    return DataFrame(rows, columns=[*fixed, *to.values(), *values.values(), *AXES], dtype=object)
