"""Shows a run on the terminal and in its log: first lines, a line for each step, the summary."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.config.evaluation_sets import watched
from pgtoolkit.runs.records import (
    Row,
    best_checkpoint,
    read_evaluations,
    read_resolved,
    read_status,
)
from pgtoolkit.runs.series import Columns, final, first, mean, values
from pgtoolkit.system.report import plural, shell_path
from pgtoolkit.system.terminal import output
from pgtoolkit.tracking import next_commands

if TYPE_CHECKING:
    from pgtoolkit.tracking.renewed_line import RenewedLine

log = logging.getLogger("pgtoolkit")

WIDTH = 100
"""Columns of a page for the terminal."""

ERASE_LINE = "\r\x1b[K"
"""Moves the cursor to the beginning of a terminal's line, and erases the line."""

_UNKNOWN = "?"

_BARS = "▁▂▃▄▅▆▇█"

# The format of each metric's field. All fields have fixed widths, so that the lines of a run align.
_FIELDS = {
    "loss": "loss {:6.0e}",
    "ratio_new_old": "ratio {:6.4f}",
    "kl_new_old": "kl {:5.0e}",
    "clipped_ratio_fraction": "clip {:4.0%}",
    "reward": "reward {:4.2f}",
    "exact_match": "exact {:4.0%}",
    "tokens_per_second": "{} tok/s",
}

# The fields on a terminal, the most important first, since a narrow one has no room for all.
_RENEWED_FIELDS = {
    "loss": "loss {:9.2e}",
    "reward": "reward {:4.2f}",
    "exact_match": "exact {:4.0%}",
    "tokens_per_second": "{} tok/s",
}


class Progress:
    """Shows each step of a run: as a line in its log, and on a terminal by a line that renews
    itself.

    max_steps: the run's last step.
    """

    def __init__(self, max_steps: int):
        self._line = ProgressLine(max_steps)
        self._max_steps = max_steps
        self._renewed: RenewedLine | None = None

    def begin(self, step: int) -> None:
        """Show that this many steps are done."""
        from pgtoolkit.tracking.renewed_line import RenewedLine, is_terminal

        if is_terminal(output()):
            self._renewed = RenewedLine(self._max_steps, step)
            self._renewed.show(step, [self._line.position(step)])

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step just finished."""
        log.info(self._line.line(step, metrics), extra={"is_renewed": self._renewed is not None})
        if self._renewed is not None:
            self._renewed.show(step, self._line.renewed(step, metrics))

    def end(self) -> None:
        """Leave the line of a terminal as it is, and end it."""
        if self._renewed is not None:
            self._renewed.close()
        self._renewed = None

    def above(self, text: str) -> bytes:
        """Return a line for the handler of a signal, which writes past this process's streams."""
        start = "" if self._renewed is None else ERASE_LINE
        return f"{start}{text}\n".encode()


class ProgressLine:
    """Writes the line of each step, with the time left at the pace since the first line.

    max_steps: the run's last step.
    """

    def __init__(self, max_steps: int):
        self._max_steps = max_steps
        self._first: tuple[int, float] | None = None

    def line(self, step: int, metrics: dict[str, float]) -> str:
        """Return the line in a file for a step just finished, without metrics that are missing."""
        time_left = self._time_left(step)
        return " ".join([self.position(step), *_fields(_FIELDS, metrics), f"ETA {time_left:>5}"])

    def renewed(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Return the fields of the line on a terminal, the most important first."""
        fields = [self.position(step)]
        time_left = self._time_left(step)
        if time_left != _UNKNOWN:
            fields.append(f"{time_left} left")
        return fields + _fields(_RENEWED_FIELDS, metrics)

    def position(self, step: int) -> str:
        digits = len(str(self._max_steps))
        return f"step {step:>{digits}}/{self._max_steps}"

    def _time_left(self, step: int) -> str:
        now = time.monotonic()
        # The clock starts at the end of the first step, which takes longer: imports, allocators,
        # compilation.
        self._first = self._first or (step, now)
        first_step, start = self._first
        if step == first_step and step < self._max_steps:
            return _UNKNOWN
        seconds_per_step = (now - start) / max(1, step - first_step)
        return duration(seconds_per_step * (self._max_steps - step))


def _fields(formats: dict[str, str], metrics: dict[str, float]) -> list[str]:
    """Return the metrics in their formats, with the means of single verifiers after the reward."""
    fields = []
    for name, field_format in formats.items():
        if name in metrics:
            value = metrics[name]
            shown = _short_count(value) if name == "tokens_per_second" else value
            fields.append(field_format.format(shown))
        if name == "reward":
            fields += [
                f"{metric.removeprefix('reward/')} {value:4.2f}"
                for metric, value in metrics.items()
                if metric.startswith("reward/")
            ]
    return fields


def entry(label: str, text: str) -> str:
    """Return one of the first or last lines of a run."""
    return f"{label:<12} {text}"


def mlflow_entries(info: dict[str, str]) -> list[str]:
    """Return the lines on a run's page in MLflow. info: `MlflowTracker.info`."""
    command = next_commands.ui_command(info["uri"])
    page = next_commands.ui_url(info["uri"], info["experiment_id"], info["run_id"])
    return [entry("MLflow", command), entry("", page)] if command else [entry("MLflow", page)]


def evaluation_line(row: Row, max_steps: int, is_best: bool) -> str:
    """Return the line on an evaluation of one set of prompts. row: of evaluations.jsonl."""
    step = f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"
    set_name = f"{row['set']}{' (best)' if is_best else ''}:"
    pass_at_k = [name for name in row if name.startswith("pass@") and not name.endswith("_error")]
    names = dict.fromkeys((pass_at_k[0], pass_at_k[-1], "avg"))
    numbers = [_with_error(name, row) for name in names]
    length = f"length {row['length']:.1f}"
    return " ".join([step, set_name, *numbers, length, f"{row['seconds']:.1f} s"])


def _with_error(name: str, row: Row) -> str:
    error = row.get(f"{name}_error")
    return f"{name} {row[name]:.3f}" + ("" if error is None else f"±{error:.3f}")


def summary(
    metrics: Columns,
    run_dir: Path,
    mlflow: dict[str, str] | None,
    records: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the last lines of a run: its curves in short, its files, and what to type next.

    metrics: the columns of metrics.jsonl.
    mlflow: `MlflowTracker.info`, or None without MLflow.
    records: other trackers, each with the command or the address that shows its record.
    """
    config = read_resolved(run_dir)
    status = read_status(run_dir)
    reason = status.get("reason") or ""
    lines = [_rise(name, metrics) for name in ("reward", "exact_match")]
    if not any(lines):
        lines = [_rise("loss", metrics)]
    best = best_checkpoint(Path(run_dir), watched(config))
    lines += _held_out_lines(read_evaluations(Path(run_dir)), best)
    lines.append(reason)
    entries = [entry("run", shell_path(run_dir))]
    parent = status.get("parent")
    if parent:
        entries.append(entry("continues", parent))
    curves = Path(run_dir) / "curves.png"
    if curves.exists():
        entries.append(entry("curves", shell_path(curves)))
    if mlflow:
        entries += mlflow_entries(mlflow)
    entries += [entry(label, command) for label, command in records]
    overrides = _overrides_to_continue(metrics, config, reason)
    entries.append(entry("resume", next_commands.resume_command(run_dir, overrides)))
    comparisons = []
    if next_commands.has_counterpart(run_dir):
        comparisons.append(next_commands.counterpart_command(run_dir))
    if mlflow:
        comparisons.append(next_commands.ui_url(mlflow["uri"], mlflow["experiment_id"]))
    labels = ["compare", ""]
    entries += [entry(label, text) for label, text in zip(labels, comparisons, strict=False)]
    return "\n".join([*filter(None, lines), *entries])


def _overrides_to_continue(metrics: Columns, config: dict, reason: str) -> list[str]:
    """Return the overrides with which a finished run goes on. reason: of its end, "" for none."""
    if "rollout.epochs=" in reason:
        return [f"rollout.epochs={2 * config['rollout']['epochs']}"]
    if "rollout.retire_at=" in reason:
        return ["rollout.retire_at=null"]
    if "a callback of your own" in reason:
        return ["callbacks.own={}"]
    if reason:
        return ["trainer.stop_at=null"]
    if len(metrics["step"]):
        return [f"trainer.max_steps={2 * int(metrics['step'][-1])}"]
    return []


def _held_out_lines(rows: list[Row], best: Row | None) -> Iterator[str]:
    """Yield a line on the pass@1 of each set over the run. best: the row of the best checkpoint."""
    for name in dict.fromkeys(row["set"] for row in rows):
        set_rows = [row for row in rows if row["set"] == name]
        shares = [row["pass@1"] for row in set_rows]
        last = set_rows[-1]
        note = f"; best checkpoint: step {best['step']}" if best and best["set"] == name else ""
        yield (
            f"{name:<12} {shares[0]:.3f} -> {shares[-1]:.3f}  {sparkline(shares, span=(0, 1))}  "
            f"(pass@1 of {last['prompts']} held-out prompts, ± {last.get('pass@1_error', 0):.3f}"
            f"{note})"
        )


def sparkline(values: list[float], width: int = 40, span: tuple[float, float] | None = None) -> str:
    """Return values as bars, averaged into at most `width` of them.

    span: the values of the lowest and the highest bar; None: the range of the averages.
    """
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)] if width else []
    means = [mean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    low, high = span or (min(means, default=0), max(means, default=0))
    heights = [(min(max(average, low), high) - low) / ((high - low) or 1) for average in means]
    return "".join(_BARS[round((len(_BARS) - 1) * height)] for height in heights)


def _rise(name: str, metrics: Columns) -> str:
    """Return the line on how a metric went over the run; "" where it has no value."""
    series = values(metrics, name)
    if not series:
        return ""
    # A fraction is drawn between 0 and 1, or one success in a thousand would be a peak.
    bars = sparkline(series, span=(0, 1) if name == "exact_match" else None)
    ends = f"{first(series):.3f} -> {final(series):.3f}"
    label = name.replace("_", " ")
    return f"{label:<12} {ends}  {bars}  (first and last tenth of {plural(len(series), 'step')})"


def _short_count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:2.0f}{unit}"
    return f"{value:3.0f}"


def duration(seconds: float) -> str:
    """Return a time as 0:09, 9:36 or, from an hour on, 8h19."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{seconds:02}"
