"""Every number of a published table is what the raw data in benchmarks/data says."""

import csv
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from pgtoolkit.comparison.statistics import mean_and_std
from pgtoolkit.comparison.terminal import plural, spread

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"
FAMILIES, AGGREGATIONS = ("grpo", "gspo"), ("sample_mean", "prompt_mean", "token_mean", "constant")


def rows(*names):
    """The rows of the tables of these names, one after the other."""
    found = []
    for name in names:
        with (DATA / f"{name}.csv").open(newline="") as file:
            found += csv.DictReader(file)
    return found


def groups(table, *keys):
    """The rows of each combination of values of the keys."""
    found = defaultdict(list)
    for row in table:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def values(table, column):
    return [float(row[column]) for row in table]


@pytest.mark.parametrize(
    ("file", "table", "machine"),
    [
        ("README.md", "loss_by_aggregation", ""),
        ("sweeps/README.md", "loss_by_aggregation", ""),
        ("docs/experiments.md", "loss_by_aggregation", ", machine of this page"),
        ("docs/experiments.md", "loss_by_aggregation_second_machine", ", the other"),
    ],
)
def test_exact_match_of_loss_by_aggregation(file, table, machine):
    by_configuration = groups(rows(table), "loss", "aggregation")
    for family in FAMILIES:
        finals = [values(by_configuration[family, one], "final_exact_match") for one in AGGREGATIONS]
        cells = [f"{statistics.fmean(one):.2f} ± {statistics.stdev(one):.2f}" for one in finals]
        assert f"| `{family}`{machine} | {' | '.join(cells)} |" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("file", "tables"),
    [
        ("docs/experiments.md", ["loss_by_aggregation"]),
        ("docs/experiments.md", ["loss_by_aggregation", "loss_by_aggregation_more_seeds"]),
    ],
)
def test_comparisons(file, tables):
    """A row per configuration as in the printed table, the curve left out."""
    table, page = rows(*tables), re.sub(" +", " ", (ROOT / file).read_text())
    if len(tables) > 1:
        table = [row for row in table if row["aggregation"] in ("sample_mean", "constant")]
    for key, runs in groups(table, "loss", "aggregation").items():
        pairs = [mean_and_std(values(runs, name)) for name in ("final_reward", "best_reward")]
        reached = [spread(pair, "{:.3f}".format) for pair in pairs]
        assert " ".join([*key, str(len(runs)), *reached]) in page


@pytest.mark.parametrize("name", ["loss_by_aggregation", "clip_range", "metrics_cost"])
def test_cost_of_a_sweep(name):
    table, page = rows(name), (ROOT / "sweeps/README.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith(f"| `pgtk sweep {name}`"))
    minutes = round(sum(values(table, "cpu_seconds")) / 60)
    assert line.endswith(f"| {len(table)} | {plural(minutes, 'minute')} |")


def test_clip_range():
    by_width = sorted(groups(rows("clip_range"), "loss.epsilon_low").items(), key=lambda one: float(one[0][0]))
    page = " ".join((ROOT / "sweeps/README.md").read_text().split())
    matches = [f"{statistics.fmean(values(table, 'final_exact_match')):.2f}" for _, table in by_width]
    outside = [f"{100 * statistics.fmean(values(table, 'clipped_ratio_fraction')):.0f}" for _, table in by_width]
    assert f"exact match {', '.join(matches)}" in page
    assert f"{', '.join(outside[:3])} and {outside[3]} % of the documents" in page


def test_metrics_cost():
    page = " ".join((ROOT / "sweeps/README.md").read_text().split())
    none, basic, entropy = (
        row["cpu_seconds"]
        for level in ("none", "basic", "with_entropy")
        for row in rows("metrics_cost")
        if row["metrics.level"] == level
    )
    assert f"{none} s of CPU time with `none`, {basic} s with `basic` and {entropy} s with `with_entropy`" in page


def test_clip_fractions_within_a_batch():
    page = (ROOT / "docs/metrics.md").read_text()
    for (loss,), steps in groups(rows("within_a_batch"), "loss").items():
        by_place = groups(steps, "place")
        start = page.index(f"| `loss={loss}`")
        lines = [line.split("|")[2:6] for line in page[start:].splitlines()[:4]]
        read = (
            lambda row: float(row["clipped_ratio_fraction"]),
            lambda row: float(row["clipped_low_fraction"]) + float(row["clipped_high_fraction"]),
            lambda row: float(row["kl_new_old"]),
            lambda row: float(row["effective_sample_size"]),
        )
        for cells, value in zip(lines, read, strict=True):
            medians = [statistics.median(map(value, by_place[place,])) for place in "1234"]
            for cell, median in zip(cells, medians, strict=True):
                digits = len(cell.strip().partition(".")[2])
                written = f"{median:.0e}".replace("e-0", "e-") if "e-" in cell else f"{median:.{digits}f}"
                assert cell.strip() == written
