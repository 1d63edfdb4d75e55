"""Shows a run on the terminal and in its log: first lines, a line for each step, the summary."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgtoolkit.runs.loss_metrics import OVER_ALL_DOCUMENTS
from pgtoolkit.runs.series import mean, without_rounding
from pgtoolkit.system.plain_files import JsonObject

if TYPE_CHECKING:
    from pgtoolkit.tracking.renewed_line import RenewedLine, ToldLine

log = logging.getLogger("pgtoolkit")

WIDTH = 100
"""Columns of a page for the terminal."""

_UNKNOWN = "?"

_TIME_LEFT = "the time left until `trainer.max_steps`, by the pace so far"

_BARS = "▁▂▃▄▅▆▇█"

# The format of each metric's field. All fields have fixed widths, so that the lines of a run align.
_FIELDS = {
    "loss": "loss {:z6.0e}",
    "ratio_new_old": "ratio {:6.4f}",
    "kl_new_old": "kl {:5.0e}",
    "clipped_ratio_fraction": "clip {:4.0%}",
    "reward": "reward {:z4.2f}",
    "exact_match": "exact {:4.0%}",
    "tokens_per_second": "{} tok/s",
}

# The fields on a terminal, the most important first, since a narrow one has no room for all.
_RENEWED_FIELDS = {
    "loss": "loss {:z9.2e}",
    "reward": "reward {:z4.2f}",
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
        self._renewed: RenewedLine | ToldLine | None = None

    def begin(self, step: int) -> None:
        """Show that this many steps are done."""
        from pgtoolkit.tracking.renewed_line import progress_line

        self._renewed = progress_line(self._max_steps, step)
        if self._renewed is not None:
            self._renewed.show(step, [self._line.position(step)])

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step just finished."""
        log.info(self._line.line(step, metrics), extra={"is_renewed": self._renewed is not None})
        if self._renewed is not None:
            self._renewed.show(step, self._line.renewed(step, metrics))

    def end(self) -> None:
        """End the line of a terminal, and leave it there."""
        if self._renewed is not None:
            self._renewed.close()
        self._renewed = None

    def above(self, text: str) -> bytes:
        """Return a line for the handler of a signal, which writes past this process's streams."""
        start = "" if self._renewed is None else self._renewed.before_text
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


def shown_as() -> Iterator[tuple[str, str, str]]:
    """Yield (word, metric, meaning) for the words on the line of a step; either of the last two is
    empty."""
    for name, field_format in _FIELDS.items():
        yield re.sub(r"\{.*?\}", "", field_format).strip(), name, ""
    yield "ETA", "", _TIME_LEFT
    yield "left", "", _TIME_LEFT


def _fields(formats: dict[str, str], metrics: dict[str, float]) -> list[str]:
    """Return the metrics in their formats, with the means of single verifiers after the reward.

    Means over documents are those over the documents with a trained token.
    """
    fields = []
    empty = metrics.get("num_empty_documents", 0)
    documents = metrics.get("num_documents", 0)
    times = documents / (documents - empty) if documents > empty else 1
    for name, field_format in formats.items():
        if name in metrics:
            value = metrics[name] * (times if name in OVER_ALL_DOCUMENTS else 1)
            shown = _short_count(value) if name == "tokens_per_second" else value
            fields.append(field_format.format(shown))
        if name == "reward":
            fields += [
                f"{metric.removeprefix('reward/')} {value:z4.2f}"
                for metric, value in metrics.items()
                if metric.startswith("reward/")
            ]
    return fields


def entry(label: str, text: str) -> str:
    """Return one of the first or last lines of a run."""
    return f"{label:<12} {text}"


def evaluation_line(row: JsonObject, max_steps: int, is_best: bool) -> str:
    """Return the line on an evaluation of one set of prompts. row: of evaluations.jsonl."""
    step = f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"
    set_name = f"{row['set']}{' (best)' if is_best else ''}:"
    pass_at_k = [name for name in row if name.startswith("pass@") and not name.endswith("_error")]
    names = dict.fromkeys((pass_at_k[0], pass_at_k[-1], "avg"))
    numbers = [_with_error(name, row) for name in names]
    length = f"length {row['length']:.1f}"
    words = [step, set_name, *numbers, length, *failed_scores(row)]
    return " ".join([*words, f"{row['seconds']:.1f} s"])


def failed_scores(row: JsonObject) -> list[str]:
    """Return words on the completions of an evaluation that could not be scored, if there are some.

    row: of evaluations.jsonl.
    """
    share = row.get("failed_score_fraction", 0)
    return [f"{share:.0%} of scores failed"] if share else []


def _with_error(name: str, row: JsonObject) -> str:
    error = row.get(f"{name}_error")
    return f"{name} {row[name]:z.3f}" + ("" if error is None else f"±{error:.3f}")


def sparkline(values: list[float], width: int = 40, span: tuple[float, float] | None = None) -> str:
    """Return values as bars, averaged into at most `width` of them.

    span: the values of the lowest and the highest bar; None: the range of the averages.
    """
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)] if width else []
    means = [mean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    low, high = span or (min(means, default=0), max(means, default=0))
    height_of_all = float(without_rounding(high - low, max(abs(low), abs(high)))) or 1
    heights = [(min(max(average, low), high) - low) / height_of_all for average in means]
    return "".join(_BARS[round((len(_BARS) - 1) * height)] for height in heights)


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
