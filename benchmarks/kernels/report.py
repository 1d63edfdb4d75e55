"""Prints the rows of a benchmark as a table, and writes them as CSV and as a chart."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.kernels.sections import Row

_HEADER = (
    f"{'':20s}{'':22s}{'loss':10s}{'tokens':>7s}{'vocab':>8s}{'ms':>10s}{'':>15s}{'share':>7s}"
    f"{'extra MB':>10s}  errors"
)

_TITLES = {"logits": "given logits", "head": "LM head + loss", "families": "every family"}
"""The title of each section in the chart."""


def heading(section: str) -> str:
    title = {
        "logits": (
            "Given logits, forward + backward; share of the copy rate on the bytes that must move"
        ),
        "head": (
            "LM head + loss, forward + backward; share: time of the three plain products over "
            "the row's"
        ),
        "families": (
            "Every family, forward + backward; share: its time over grpo's (by document, "
            "given logits: gspo's)"
        ),
    }[section]
    return f"\n{title}\n{_HEADER}"


def line(row: Row) -> str:
    unit = "GB/s" if row.section == "logits" else "TFLOP/s"
    rate = ""
    if row.rate is not None:
        rate = f"{row.rate:.0f} {unit}" if row.rate >= 10 else f"{row.rate:.2g} {unit}"
    share = "" if row.share is None else f"{100 * row.share:.1f}%"
    extra = "" if row.extra_megabytes is None else f"{row.extra_megabytes:.0f}"
    errors = (
        ""
        if row.loss_error is None
        else f"  loss {row.loss_error:.1e}, gradient {row.gradient_error:.1e}"
    )
    return (
        f"{row.name:20s}{row.case:22s}{row.loss:10s}{row.tokens:7d}{row.vocabulary:8d}"
        f"{row.milliseconds:10.3f}{rate:>15s}{share:>7s}{extra:>10s}{errors}"
    )


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0].dictionary()))
        writer.writeheader()
        writer.writerows(row.dictionary() for row in rows)


def write_chart(rows: list[Row], path: Path, title: str) -> None:
    """One bar for each row of the largest vocabulary and the smallest number of tokens, a panel for
    each section."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = list(dict.fromkeys(row.section for row in rows))
    figure, axes = pyplot.subplots(1, len(sections), figsize=(8 * len(sections), 7), squeeze=False)
    for axis, section in zip(axes[0], sections, strict=True):
        of_section = [row for row in rows if row.section == section]
        largest = max(row.vocabulary for row in of_section)
        fewest = min(row.tokens for row in of_section if row.vocabulary == largest)
        shown = [row for row in of_section if (row.vocabulary, row.tokens) == (largest, fewest)][
            ::-1
        ]
        labels = [f"{row.name}, {row.case} ({row.loss})" for row in shown]
        colors = ["tab:blue" if row.loss == "grpo" else "tab:orange" for row in shown]
        bars = axis.barh(range(len(shown)), [row.milliseconds for row in shown], color=colors)
        axis.bar_label(bars, [f"{row.milliseconds:.3g}" for row in shown], padding=3, fontsize=7)
        axis.set_yticks(range(len(shown)), labels, fontsize=7)
        axis.set_xscale("log")
        axis.set_xlabel("milliseconds, forward + backward")
        axis.set_title(f"{_TITLES[section]}: {fewest} tokens, vocabulary {largest}", fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
