"""The last lines of a run: its curves in short, its files, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pgtoolkit.assembly.continuing import (
    counterpart_command,
    has_counterpart,
    left_out_of_counterpart,
    training_on_command,
)
from pgtoolkit.assembly.without_effect import without_effect
from pgtoolkit.config.defaults import ByScores
from pgtoolkit.config.evaluation_sets import watched
from pgtoolkit.runs.records import best_checkpoint, read_evaluations, read_resolved, read_status
from pgtoolkit.runs.series import Columns, final, first, values
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import plural, shell_path
from pgtoolkit.tracking.progress import entry, failed_scores, sparkline
from pgtoolkit.tracking.record import Record


def run_summary(metrics: Columns, run_dir: Path, records: Sequence[Record] = ()) -> str:
    """Return the last lines of a run: its curves in short, its files, and what to type next.

    metrics: the columns of metrics.jsonl.
    """
    config = read_resolved(run_dir)
    status = read_status(run_dir)
    reason = status.get("reason") or ""
    lines = [_rise(name, metrics) for name in ("reward", "exact_match")]
    if not any(lines):
        lines = [_rise("loss", metrics)]
    best = best_checkpoint(Path(run_dir), watched(config))
    number = ByScores().resolve(config)
    lines += _held_out_lines(read_evaluations(Path(run_dir)), number, best)
    lines.append(reason)
    lines += [entry("no effect", sentence) for sentence in without_effect(config, metrics)]
    entries = [entry("run", shell_path(run_dir))]
    parent = status.get("parent")
    if parent:
        entries.append(entry("continues", parent))
    curves = Path(run_dir) / "curves.png"
    if curves.exists():
        entries.append(entry("curves", shell_path(curves)))
    for record in records:
        entries += record.entries()
    changes = _changes_to_go_on(metrics, config, reason)
    entries.append(entry("resume", training_on_command(Path(run_dir), changes)))
    comparisons = []
    if has_counterpart(run_dir):
        comparisons.append(counterpart_command(run_dir))
        comparisons += filter(None, [left_out_of_counterpart(run_dir)])
    comparisons += filter(None, (record.charts() for record in records))
    entries += [entry("" if place else "compare", text) for place, text in enumerate(comparisons)]
    return "\n".join([*filter(None, lines), *entries])


def _changes_to_go_on(metrics: Columns, config: dict, reason: str) -> JsonObject:
    """Return the values of keys with which a finished run goes on. reason: of its end, "" for
    none."""
    if "rollout.epochs=" in reason:
        return {"rollout.epochs": 2 * config["rollout"]["epochs"]}
    if "rollout.retire_at=" in reason:
        return {"rollout.retire_at": None}
    if "a callback of your own" in reason:
        return {"callbacks.own": {}}
    if reason:
        return {"trainer.stop_at": None}
    if len(metrics["step"]):
        return {"trainer.max_steps": 2 * int(metrics["step"][-1])}
    return {}


def _held_out_lines(rows: list[JsonObject], number: str, best: JsonObject | None) -> Iterator[str]:
    """Yield a line on a number of each set over the run, such as pass@1.

    best: the row of the best checkpoint.
    """
    for name in dict.fromkeys(row["set"] for row in rows):
        set_rows = [row for row in rows if row["set"] == name]
        values_of_set = [row[number] for row in set_rows]
        last = set_rows[-1]
        note = f"; best checkpoint: step {best['step']}" if best and best["set"] == name else ""
        failed = "".join(f", {words}" for words in failed_scores(last))
        span = None if number == "avg" else (0, 1)
        yield (
            f"{name:<12} {values_of_set[0]:z.3f} -> {values_of_set[-1]:z.3f}  "
            f"{sparkline(values_of_set, span=span)}  ({number} of {last['prompts']} held-out "
            f"prompts, ± {last.get(f'{number}_error', 0):.3f}{failed}{note})"
        )


def _rise(name: str, metrics: Columns) -> str:
    """Return the line on how a metric went over the run; "" where it has no value."""
    series = values(metrics, name)
    if not series:
        return ""
    # A fraction is drawn between 0 and 1, or one success in a thousand would be a peak.
    bars = sparkline(series, span=(0, 1) if name == "exact_match" else None)
    ends = f"{first(series):z.3f} -> {final(series):z.3f}"
    label = name.replace("_", " ")
    return f"{label:<12} {ends}  {bars}  (first and last tenth of {plural(len(series), 'step')})"
