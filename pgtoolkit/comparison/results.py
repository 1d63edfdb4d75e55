"""Runs and their comparison for Python: frames of pandas, figures, and tables for notebooks."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pgtoolkit.config.keys import shown
from pgtoolkit.config.own_code import with_defaults
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs import find
from pgtoolkit.runs.completion_files import completion_files
from pgtoolkit.runs.modules import COPIES
from pgtoolkit.runs.records import read_evaluations, reading_file
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import in_words, nearest, shell_path
from pgtoolkit.system.safe_text import legible

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from pgtoolkit.comparison.compared_runs import Compared


class UnknownKey(ConfigError, KeyError):
    """A key that a configuration does not have."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the message, as the command would print it."""
        return [legible(redact(in_words(self)))]


class Values(dict[str, object]):
    """Name of a key -> its value. An unknown key is refused with the nearest one."""

    def __missing__(self, key: object) -> NoReturn:
        group, _, leaf = str(key).rpartition(".")
        of_group = [name for name in self if name.startswith(f"{group}.")]
        leaves = [name for name in self if name.rpartition(".")[2] == leaf]
        meant = nearest(str(key), of_group or leaves or self)
        use = "pgtk --help, which has the groups" if meant is None else repr(meant)
        raise UnknownKey(f"Unknown key {key!r}. Use {use}.")


@dataclass(frozen=True, eq=False)
class Run:
    """A run as its directory shows it now. `load` reads it anew.

    path: its directory.
    status: done, running, interrupted, failed, pruned, killed, incomplete, pending or unreadable.
    reason: why it is in that state, or None.
    step: the steps that it has made.
    config: name of a key -> its value, as in docs/keys.md.
    """

    path: Path
    status: str
    reason: str | None
    step: int
    config: Values = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @functools.cached_property
    def metrics(self) -> pandas.DataFrame:
        """The rows of metrics.jsonl, one for each step."""
        import pandas

        return pandas.DataFrame(read_metrics(self.path / "metrics.jsonl")).astype({"step": int})

    @functools.cached_property
    def evaluations(self) -> pandas.DataFrame:
        """The rows of evaluations.jsonl, one for each set of prompts at each evaluated step."""
        import pandas

        return pandas.DataFrame(read_evaluations(self.path))

    @functools.cached_property
    def samples(self) -> pandas.DataFrame:
        """The completions that the run kept, one a row; `set` is `training` or an evaluation set's
        name."""
        import pandas

        frames = []
        for file in completion_files(self.path):
            with reading_file(file.path):
                frames.append(pandas.read_parquet(file.path).assign(set=file.set))
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def figure(self) -> Figure:
        """Return the curves of the run."""
        from pgtoolkit.tracking.curves import figure_of

        return figure_of(read_metrics(self.path / "metrics.jsonl"), legible(self.name))

    def _repr_html_(self) -> str:
        return _runs_as_html([self])


class Runs(tuple[Run, ...]):
    """Runs in the order of their names."""

    def __repr__(self) -> str:
        rows = [[textwrap.shorten(str(cell), 100) for cell in row] for row in _rows(self)]
        return legible("\n".join(aligned([_HEADER, *rows]))) if rows else "no runs"

    def figure(self, panels: str | None = None) -> Figure:
        """Return the figure of their comparison, see `Comparison.figure`."""
        from pgtoolkit.comparison.groups import compare
        from pgtoolkit.comparison.measures import runs_with

        runs = runs_with(None, None, [str(run.path) for run in self])
        return Comparison(compare(runs)).figure(panels)

    def _repr_html_(self) -> str:
        return _runs_as_html(self)


def shown_values(values: Mapping[str, object]) -> Values:
    """Return values, as `with_defaults` returns them, by the names of keys that users type."""
    return Values((shown(key), value) for key, value in values.items())


def run_in(path: Path) -> Run:
    record = find.read_run(path, ())
    config = shown_values(with_defaults(record.config, path / COPIES, record.trained_with))
    return Run(path, record.state, record.reason, record.step, config)


def runs_below(path: str) -> Runs:
    return Runs(map(run_in, find.run_directories("load", [path])))


class Comparison:
    """Results of runs over seeds, and whether they differ, as `pgtk compare` says it."""

    def __init__(self, compared: Compared):
        self._compared = compared

    @property
    def table(self) -> pandas.DataFrame:
        """A row for each configuration: its mean with interval, n, and how it differs from its
        base."""
        import pandas

        from pgtoolkit.comparison.reports import configuration_rows

        header, *rows = configuration_rows(self._compared)
        return pandas.DataFrame(rows, columns=[str(name) for name in header])

    def figure(self, panels: str | None = None) -> Figure:
        """Return the curves, and the means with their intervals, in the size of a paper's page.

        panels: such as `"means"` or `"steps,means"`, of documents, steps, seconds, means, and with
            `best_of` tried. A figure of one panel is a column wide. Raises ConfigError for others.
        """
        from pgtoolkit.comparison.figure import figure_of

        return figure_of(self._compared, None if panels is None else str(panels))

    def __str__(self) -> str:
        from pgtoolkit.comparison.text_report import render_comparison

        return render_comparison(self._compared)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from pgtoolkit.comparison.reports import html_parts

        lead, parts = html_parts(self._compared)
        return "\n".join([*lead, *parts])


def _runs_as_html(runs: Sequence[Run]) -> str:
    from pgtoolkit.comparison.reports import table_as_html

    return table_as_html([_HEADER, *_rows(runs)])


_HEADER = ["run", "status", "steps", "folder", "reason"]


def _rows(runs: Sequence[Run]) -> list[list[object]]:
    """Return what a table says of each run, by _HEADER."""
    return [
        [run.name, run.status, run.step, shell_path(run.path), " ".join((run.reason or "").split())]
        for run in runs
    ]
