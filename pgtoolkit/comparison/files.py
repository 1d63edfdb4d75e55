"""The comparison as files: a table of its runs (CSV), a page (HTML) and a picture (PNG)."""

from __future__ import annotations

from pathlib import Path

from pgtoolkit.comparison import charts
from pgtoolkit.comparison.groups import Compared
from pgtoolkit.comparison.html import html
from pgtoolkit.comparison.tables import runs_table


def write(compared: Compared, kind: str, path: Path, command: str) -> None:
    """Write one file; kind: csv, html or png. command: what has made the page."""
    if kind == "png":
        charts.write_png(compared, path)
    elif kind == "csv":
        runs_table(compared).to_csv(path, index=False, lineterminator="\n")
    else:
        path.write_text(html(compared, command), encoding="utf-8")
