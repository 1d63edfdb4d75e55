"""What is shown of a run: its first lines, a line per step or one that renews itself, and the
summary at its end."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.config.evaluation_sets import watched
from pgtoolkit.runs.records import best_checkpoint, read_evaluations, read_resolved, read_status
from pgtoolkit.runs.series import Columns, final, first, mean, values
from pgtoolkit.system.report import plural, shell_path
from pgtoolkit.tracking import next_commands

if TYPE_CHECKING:
    from pgtoolkit.tracking.renewed_line import RenewedLine

log = logging.getLogger("pgtoolkit")

WIDTH = 100
"""Most columns of a page for the terminal."""

ERASE_LINE = "\r\x1b[K"
"""Puts the cursor at the beginning of a terminal's line, and erases it."""

_UNKNOWN = "?"

_BARS = "▁▂▃▄▅▆▇█"

# Metric, format of its field. All fields are of fixed width, so that the lines of a run align.
_FIELDS = {
    "loss": "loss {:6.0e}",
    "ratio_new_old": "ratio {:6.4f}",
    "kl_new_old": "kl {:5.0e}",
    "clipped_ratio_fraction": "clip {:4.0%}",
    "reward": "reward {:4.2f}",
    "exact_match": "exact {:4.0%}",
    "tokens_per_second": "{} tok/s",
}

# The same on a terminal: the most important first, since a narrow one has no room for all.
_RENEWED_FIELDS = {
    "loss": "loss {:9.2e}",
    "reward": "reward {:4.2f}",
    "exact_match": "exact {:4.0%}",
    "tokens_per_second": "{} tok/s",
}


class Progress:
    """Shows each step of a run by a line in its log, and on a terminal by one line that renews
    itself, in its place.

    max_steps: the run's last step.
    """

    def __init__(self, max_steps: int):
        self._line = ProgressLine(max_steps)
        self._max_steps = max_steps
        self._renewed: RenewedLine | None = None

    def begin(self, step: int) -> None:
        """Show that the run stands after this step."""
        from pgtoolkit.tracking.renewed_line import RenewedLine, is_terminal

        if is_terminal(sys.stdout):
            self._renewed = RenewedLine(self._max_steps, step)
            self._renewed.show(step, [self._line.position(step)])

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step just finished."""
        log.info(self._line.line(step, metrics), extra={"is_renewed": self._renewed is not None})
        if self._renewed is not None:
            self._renewed.show(step, self._line.renewed(step, metrics))

    def end(self) -> None:
        """Leave the line as it was last, if there is one."""
        if self._renewed is not None:
            self._renewed.close()
        self._renewed = None

    def above(self, text: str) -> bytes:
        """Return a line as it is written past the streams of this process, by the handler of a
        signal."""
        return f"{'' if self._renewed is None else ERASE_LINE}{text}\n".encode()


class ProgressLine:
    """The line of each step, with the time left by the pace since the first line; max_steps is the
    run's last step."""

    def __init__(self, max_steps: int):
        self._max_steps = max_steps
        self._first: tuple[int, float] | None = None

    def line(self, step: int, metrics: dict[str, float]) -> str:
        """Return the line of a step just finished, in a file; what metrics lacks is left out."""
        left = self._left(step)
        return " ".join([self.position(step), *_fields(_FIELDS, metrics), f"ETA {left:>5}"])

    def renewed(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Return the fields of the line on a terminal, the most important first."""
        left = self._left(step)
        known = [] if left == _UNKNOWN else [f"{left} left"]
        return [self.position(step), *known, *_fields(_RENEWED_FIELDS, metrics)]

    def position(self, step: int) -> str:
        digits = len(str(self._max_steps))
        return f"step {step:>{digits}}/{self._max_steps}"

    def _left(self, step: int) -> str:
        now = time.monotonic()
        # The first step of a process warms up (imports, allocators, compilation), so its end is
        # where the clock starts.
        self._first = self._first or (step, now)
        first_step, began = self._first
        if step == first_step and step < self._max_steps:
            return _UNKNOWN
        return duration((now - began) / max(1, step - first_step) * (self._max_steps - step))


def _fields(forms: dict[str, str], metrics: dict[str, float]) -> list[str]:
    """Return each metric that there is in its form, the means of single verifiers after that of the
    reward."""
    fields = []
    for name, form in forms.items():
        if name in metrics:
            value = _count(metrics[name]) if name == "tokens_per_second" else metrics[name]
            fields.append(form.format(value))
        if name == "reward":
            fields += [
                f"{metric.removeprefix('reward/')} {value:4.2f}"
                for metric, value in metrics.items()
                if metric.startswith("reward/")
            ]
    return fields


def entry(label: str, text: str) -> str:
    """Return a line of the first or the last lines of a run."""
    return f"{label:<12} {text}"


def mlflow_entries(info: dict[str, str]) -> list[str]:
    """Return lines that say how a run is seen in MLflow. info: `MlflowTracker.info`."""
    command = next_commands.ui_command(info["uri"])
    page = next_commands.ui_url(info["uri"], info["experiment_id"], info["run_id"])
    return [entry("MLflow", command), entry("", page)] if command else [entry("MLflow", page)]


def evaluation_line(row: dict, max_steps: int, is_best: bool) -> str:
    """What was measured on one set of prompts; row: of evaluations.jsonl."""
    ks = [name for name in row if name.startswith("pass@") and not name.endswith("_error")]
    fields = [
        (
            f"step {row['step']:>{len(str(max_steps))}}/{max_steps} "
            f"{row['set']}{' (best)' if is_best else ''}:"
        )
    ]
    fields += [_with_error(name, row) for name in dict.fromkeys((ks[0], ks[-1], "avg"))]
    return " ".join([*fields, f"length {row['length']:.1f}", f"{row['seconds']:.1f} s"])


def _with_error(name: str, row: dict) -> str:
    error = row.get(f"{name}_error")
    return f"{name} {row[name]:.3f}" + ("" if error is None else f"±{error:.3f}")


def summary(
    recorded: Columns,
    run_dir: Path,
    mlflow: dict[str, str] | None,
    records: Iterable[tuple[str, str]] = (),
) -> str:
    """The end of a run in a few lines: what rose, on held-out prompts too, where everything lies,
    what to type next.

    recorded: the columns of metrics.jsonl. mlflow: `MlflowTracker.info`, or None without MLflow.
        records: other
    trackers, with what shows their record.
    """
    rises = [_rise(name, recorded) for name in ("reward", "exact_match")]
    lines = [*filter(None, rises)] or [_rise("loss", recorded)]
    lines += _held_out(
        read_evaluations(Path(run_dir)),
        best_checkpoint(Path(run_dir), watched(read_resolved(run_dir))),
    )
    lines.append(reached := read_status(run_dir).get("reason") or "")
    entries = [entry("run", shell_path(run_dir))]
    if parent := read_status(run_dir).get("parent"):
        entries.append(entry("continues", parent))
    if (curves := Path(run_dir) / "curves.png").exists():
        entries.append(entry("curves", shell_path(curves)))
    if mlflow:
        entries += mlflow_entries(mlflow)
    entries += [entry(label, command) for label, command in records]
    more = [f"trainer.max_steps={2 * int(recorded['step'][-1])}"] if len(recorded["step"]) else []
    if "rollout.epochs=" in reached:
        more = [f"rollout.epochs={2 * read_resolved(run_dir)['rollout']['epochs']}"]
    elif "rollout.retire_at=" in reached:
        more = ["rollout.retire_at=null"]
    elif reached:
        more = ["trainer.stop_at=null"]
    entries.append(entry("resume", next_commands.resume_command(run_dir, more)))
    compare = [next_commands.ui_url(mlflow["uri"], mlflow["experiment_id"])] if mlflow else []
    if next_commands.has_counterpart(run_dir):
        compare.insert(0, next_commands.counterpart_command(run_dir))
    entries += [entry(label, text) for label, text in zip(["compare", ""], compare, strict=False)]
    return "\n".join([*filter(None, lines), *entries])


def _held_out(rows: list[dict], best: dict | None) -> Iterator[str]:
    """Of each set its pass@1 over the evaluations of the run; best: the row of the best
    checkpoint."""
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        shares = [row["pass@1"] for row in own]
        kept = f"; best checkpoint: step {best['step']}" if best and best["set"] == name else ""
        yield (
            f"{name:<12} {shares[0]:.3f} -> {shares[-1]:.3f}  {sparkline(shares, span=(0, 1))}  "
            f"(pass@1 of {own[-1]['prompts']} held-out prompts, ± "
            f"{own[-1].get('pass@1_error', 0):.3f}{kept})"
        )


def sparkline(values: list[float], width: int = 40, span: tuple[float, float] | None = None) -> str:
    """The values as bars, averaged into at most `width` of them; span: the lowest and highest bar,
    else their range."""
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)] if width else []
    means = [mean(values[first:last]) for first, last in itertools.pairwise(cuts)]
    low, high = span or (min(means, default=0), max(means, default=0))
    heights = [(min(max(average, low), high) - low) / ((high - low) or 1) for average in means]
    return "".join(_BARS[round((len(_BARS) - 1) * height)] for height in heights)


def _rise(name, recorded):
    series = values(recorded, name)
    if not series:
        return ""
    # A fraction is drawn against 0 and 1: one success in a thousand is not a peak.
    bars = sparkline(series, span=(0, 1) if name == "exact_match" else None)
    ends, label = f"{first(series):.3f} -> {final(series):.3f}", name.replace("_", " ")
    return f"{label:<12} {ends}  {bars}  (first and last tenth of {plural(len(series), 'step')})"


def _count(value):
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:2.0f}{unit}"
    return f"{value:3.0f}"


def duration(seconds: float) -> str:
    """Return a time as 0:09, 9:36 or, from an hour on, 8h19."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{seconds:02}"
