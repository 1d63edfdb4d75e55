"""The runs of a comparison as a table of pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgtoolkit.comparison import terminal
from pgtoolkit.comparison.groups import Compared
from pgtoolkit.runs.series import best, final
from pgtoolkit.system.report import text

if TYPE_CHECKING:
    from pandas import DataFrame


def runs_table(compared: Compared) -> DataFrame:
    """A row per run, unfinished ones too: what varies, seed, state, whether it is in the means, what it reached."""
    from pandas import DataFrame

    metric, rows = compared.metric, []
    reached = [f"final_{metric}", f"{terminal.best_word(metric)}_{metric}"]
    for group in compared.groups:
        values = {key: text(value) for key, value in group.values.items()}
        for run in group.runs:
            last, counted = run.rows[-1] if run.rows else {}, "yes" if run in group.counted else "no"
            row = {"run": run.path, **values, "seed": run.config["seed"], "state": run.state, "counted": counted}
            if found := run.values(metric):
                row |= zip(reached, (final(found), best(found)), strict=True)
            if "seconds" in last:
                row["seconds"] = round(last["seconds"], 3)
            rows.append(row | {"step": run.step, "documents_seen": last.get("documents_seen")})
    unread = [run for run, _ in compared.left_out if not run.config]
    rows += [{"run": run.path, "state": run.state, "counted": "no"} for run in unread]
    columns = ["run", *compared.keys, "seed", "state", "counted", "step", *reached, "documents_seen", "seconds"]
    return DataFrame(rows, columns=columns, dtype=object)
