"""Every number of a published table is that of the raw data in benchmarks/data."""

import csv
import re
import statistics
from collections import defaultdict
from math import inf
from pathlib import Path

import numpy as np
import pytest

from pgtoolkit.comparison import text_report
from pgtoolkit.comparison.compared_runs import Compared, RunGroup
from pgtoolkit.comparison.groups import _axes, _ranked, _sample
from pgtoolkit.comparison.measures import AXES, DOCUMENTS, Goal, Reached
from pgtoolkit.comparison.statistics import Comparisons
from pgtoolkit.runs.find import Run

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"
FAMILIES = ("grpo", "gspo")
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")

Row = dict[str, str]


def rows(*names: str) -> list[Row]:
    """Return the rows of all tables of these names."""
    all_rows = []
    for name in names:
        with (DATA / f"{name}.csv").open(newline="") as file:
            all_rows += csv.DictReader(file)
    return all_rows


def groups(table: list[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of each combination of values of the keys."""
    by_values = defaultdict(list)
    for row in table:
        by_values[tuple(row[key] for key in keys)].append(row)
    return by_values


def values(table: list[Row], column: str) -> list[float]:
    return [float(row[column]) for row in table]


def comparison(table: list[Row], metric: str, base: tuple[str, ...] = ()) -> Compared:
    """Return the table as `pgtk compare --reach=METRIC=0.9` sorts and tests it.

    base: loss and aggregation of the configuration that stands first; by default the best.
    """
    goal = Goal(metric, 0.9, "", 0.0, 64.0, (64.0, 19200.0))
    compared_groups = []
    axes = {
        axis: f"{name}_to_{metric}_0.9"
        for axis, name in AXES.items()
        if f"{name}_to_{metric}_0.9" in table[0]
    }
    for key, rows_of_group in groups(table, "loss", "aggregation").items():
        reached = [
            Reached(
                {axis: float(row[to]) for axis, to in axes.items() if row[to]},
                {axis: float(row[axis]) for axis in axes},
                float(row[DOCUMENTS]),
                float(row.get(f"mean_{metric}", 0)),
                float(row[f"final_{metric}"]),
            )
            for row in rows_of_group
        ]
        runs = [
            Run(
                "",
                "",
                "done",
                config={"seed": row["seed"]},
                columns={axis: np.array([float(row[axis])]) for axis in axes},
            )
            for row in rows_of_group
        ]
        compared_groups.append(
            RunGroup(dict(zip(("loss", "aggregation"), key, strict=True)), runs, runs, reached)
        )
    of_all = [reached for group in compared_groups for reached in group.reached]
    limit = min((run.measured_to for run in of_all if DOCUMENTS not in run.to), default=inf)
    compared = Compared(
        goal,
        _axes(goal, of_all),
        limit,
        limit + goal.apart,
        ["loss", "aggregation"],
        [],
        {},
        compared_groups,
        compared_groups[0],
        Comparisons([]),
        [],
        [],
    )
    ranked = _ranked(compared)
    compared.groups = sorted(ranked, key=lambda group: tuple(group.values.values()) != base)
    compared.name_groups()
    compared.comparisons = Comparisons([_sample(compared, group, []) for group in compared.groups])
    return compared


def cell(compared: Compared, *key: str) -> str:
    """Return the documents that a configuration needs, and how many of its seeds reached the
    threshold if some did not."""
    group = next(group for group in compared.groups if tuple(group.values.values()) == key)
    num_arrived = compared.arrived(group)
    num_seeds = len(group.reached)
    arrived = f" ({num_arrived} of {num_seeds})" if num_arrived < num_seeds else ""
    return text_report.spent(compared, group, DOCUMENTS) + arrived


def test_the_documents_of_loss_by_aggregation_are_those_of_its_runs():
    compared = comparison(rows("loss_by_aggregation"), "exact_match")
    for family in FAMILIES:
        cells = [cell(compared, family, aggregation) for aggregation in AGGREGATIONS]
        assert f"| `{family}` | {' | '.join(cells)} |" in (ROOT / "sweeps/README.md").read_text()


@pytest.mark.parametrize(
    ("table", "machine"),
    [
        ("loss_by_aggregation", "machine of this page"),
        ("loss_by_aggregation_second_machine", "the other"),
    ],
)
def test_the_exact_match_of_loss_by_aggregation_is_that_of_its_runs(table, machine):
    by_configuration = groups(rows(table), "loss", "aggregation")
    for family in FAMILIES:
        finals = [
            values(by_configuration[family, aggregation], "final_exact_match")
            for aggregation in AGGREGATIONS
        ]
        cells = [f"{statistics.fmean(x):.2f} ± {statistics.stdev(x):.2f}" for x in finals]
        assert (
            f"| `{family}`, {machine} | {' | '.join(cells)} |"
            in (ROOT / "sweeps/README.md").read_text()
        )


def test_the_comparison_of_loss_by_aggregation_is_that_of_its_runs():
    """The page has a row for each configuration, without its curve, and a row for each pair with
    the first of the sweep."""
    compared = comparison(rows("loss_by_aggregation"), "exact_match", base=("grpo", "sample_mean"))
    page = re.sub(" +", " ", (ROOT / "docs/comparing.md").read_text())
    for row in text_report.group_rows(compared):
        assert " ".join(row) in page
    assert f"adjusted for {len(compared.comparisons)} pairs" in " ".join(page.split())
    for line in text_report.difference_rows(compared, compared.comparisons.against(0)):
        assert " ".join(line).strip() in page


def test_the_table_of_the_follow_up_is_that_of_its_runs():
    table = rows("loss_by_aggregation", "loss_by_aggregation_more_seeds")
    table = [row for row in table if row["aggregation"] in ("sample_mean", "constant")]
    compared = comparison(table, "reward")
    page = (ROOT / "docs/experiments.md").read_text()
    for group in compared.groups:
        family, aggregation = group.values.values()
        reached = (
            f"{compared.arrived(group)} of 6 | {text_report.spent(compared, group, DOCUMENTS)}"
        )
        assert f"| `{family}` | `{aggregation}` | {reached} |" in page
    for place, first in enumerate(compared.groups):
        differences = text_report.difference_rows(compared, compared.comparisons.against(place))
        for second, _, difference, interval, p, seeds, *_ in differences[1:]:
            assert (
                f"| {second} | {first.label} | {difference} | {interval} | {p} | {seeds} |" in page
            )


@pytest.mark.parametrize("name", ["loss_by_aggregation", "clip_range", "metrics_cost"])
def test_the_cost_of_a_sweep_is_that_of_its_runs(name):
    table = rows(name)
    page = (ROOT / "sweeps/README.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith(f"| `pgtk sweep {name}`"))
    minutes = round(sum(values(table, "cpu_seconds")) / 60)
    assert line.endswith(f"| {len(table)} | {text_report.plural(minutes, 'minute')} |")


def test_the_numbers_of_the_clip_range_are_those_of_its_runs():
    by_width = sorted(
        groups(rows("clip_range"), "loss.epsilon_low").items(), key=lambda item: float(item[0][0])
    )
    page = " ".join((ROOT / "sweeps/README.md").read_text().split())
    matches = [
        f"{statistics.fmean(values(table, 'final_exact_match')):.2f}" for _, table in by_width
    ]
    outside = [
        f"{100 * statistics.fmean(values(table, 'clipped_ratio_fraction')):.0f}"
        for _, table in by_width
    ]
    assert f"exact match {', '.join(matches)}" in page
    assert f"{', '.join(outside[:3])} and {outside[3]} % of the documents" in page


RATE = "optimizer.learning_rate"


@pytest.mark.parametrize(
    ("name", "keys", "columns"),
    [
        ("learning_rate_by_aggregation", (RATE, "aggregation"), AGGREGATIONS),
        ("staleness", ("loss", RATE, "rollout.lag"), ("0", "4", "16")),
        ("docs_per_step", ("accumulation.docs_per_step",), ("32", "64", "128", "256")),
    ],
)
def test_the_exact_match_of_two_seeds_is_that_of_their_runs(name, keys, columns):
    page = (ROOT / "sweeps/README.md").read_text()
    page = page[page.index(f"**{name}.**") :]
    for line in groups(rows(name), *keys[:-1]).values():
        of_column = groups(line, keys[-1])
        cells = [
            ", ".join(f"{x:.2f}" for x in values(of_column[column,], "final_exact_match"))
            for column in columns
        ]
        assert f" | {' | '.join(cells)} |" in page


def test_the_cost_of_metrics_is_that_of_its_runs():
    page = " ".join((ROOT / "sweeps/README.md").read_text().split())
    none, basic, entropy = (
        row["cpu_seconds"]
        for level in ("none", "basic", "with_entropy")
        for row in rows("metrics_cost")
        if row["metrics.level"] == level
    )
    assert (
        f"{none} s of CPU time with `none`, {basic} s with `basic` and {entropy} s with "
        "`with_entropy`"
    ) in page


def test_the_numbers_within_a_batch_are_those_of_its_steps():
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
                written = (
                    f"{median:.0e}".replace("e-0", "e-") if "e-" in cell else f"{median:.{digits}f}"
                )
                assert cell.strip() == written
