"""`pgtk compare` of made-up runs: their groups, its page and its files, with numbers worked out by
hand. Thresholds and areas are in test_measures.py, significance in test_statistics.py."""

import csv
import io
import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders.refusals import refusal
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.comparison.charts import COLORS, mean_curve, style
from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.figure import figure_of, picture
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.statistics import Comparison
from pgtoolkit.comparison.text_report import (
    difference_and_interval,
    group_rows,
    number_format,
    render_comparison,
    short_count,
    tried_rows,
)
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs
from pgtoolkit.runs.series import best, final
from pgtoolkit.tracking.progress import WIDTH

STEPS = 20


def save(
    folder: Path,
    loss: str,
    seed: int,
    end: float,
    state: str = "done",
    steps: int = STEPS,
    rise: int = STEPS - 2,
    reason: str | None = None,
    grad_norm: float = 1.0,
    **more: object,
) -> Path:
    """Write a run whose reward is 0 for `rise` steps, and `end` after them.

    more: groups of its configuration.
    """
    config = {
        "seed": seed,
        "loss": {"name": loss, "epsilon_low": 0.2 if loss == "grpo" else 3e-4},
        "trainer": {"max_steps": STEPS, "checkpoint_every": seed + 1},
        "tracking": {"run_name": folder.name},
        **more,
    }
    with RunDirectory(folder) as run:
        run.write_config(config, [f"loss={loss}", f"seed={seed}"])
        for step in range(1, steps + 1):
            reward = end if step > rise else 0.0
            metrics = {
                "reward": reward,
                "documents_seen": 8 * step,
                "kl": 1e-5 * step,
                "grad_norm": grad_norm,
            }
            metrics["num_tokens"] = 50
            run.append_metrics(step, metrics)
        run.set_status(state, steps, reason)
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write three seeds of two losses.

    Every seed of gspo ends at 0.9 or above, so the threshold is nine tenths of the way to that,
    0.81. The run 2-grpo-2 never reaches it.
    """
    ends = {"grpo": ((0.9, 12), (0.92, 14), (0.4, 16)), "gspo": ((0.9, 8), (0.94, 10), (0.98, 12))}
    number = 0
    for loss, values in ends.items():
        for seed, (end, rise) in enumerate(values):
            save(tmp_path / f"{number}-{loss}-{seed}", loss, seed, end, rise=rise)
            number += 1
    return tmp_path


def page(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the output of a comparison that succeeds."""
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def unwrapped_page(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the output of a comparison as one line, with single spaces."""
    return " ".join(page(capsys, *arguments).split())


def test_a_run_whose_configuration_lacks_a_key_is_left_out(sweep, capsys):
    for name, key, state in (("0-grpo-0", "trainer", "done"), ("3-gspo-0", "seed", "failed")):
        path = sweep / name / "config.yaml"
        config = OmegaConf.load(path)
        del config[key]
        OmegaConf.save(config, path)
        with RunDirectory(sweep / name) as run:
            run.set_status(state, 20)
    text = unwrapped_page(capsys, sweep)
    assert "0-grpo-0/config.yaml is damaged (it lacks trainer.max_steps)" in text
    assert "3-gspo-0/config.yaml is damaged (it lacks seed)" in text
    assert "0.960" in text  # the mean of the two runs of gspo that are left


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0.4, "0"),
        (-0.4, "0"),
        (12345.6, "12,346"),
        (99_999.4, "99,999"),
        (99_999.6, "100k"),
        (999_600, "1M"),
        (-1.234e6, "-1.23M"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_counts_from_100_000_on_are_shown_in_thousands_or_millions(count, shown):
    assert short_count(count) == shown


def test_no_number_that_is_written_as_0_has_a_sign(sweep):
    compared = compare(find_runs([str(sweep)]), "reward")
    pair = Comparison(0, 1, (3, 3), (0.5, 0.4996), True, -0.0004, (-0.0006, 0.0004))
    assert difference_and_interval(pair, number_format(compared)) == ("0.000", "[-0.001, 0.000]")
    assert difference_and_interval(pair, short_count) == ("0", "[0, 0]")


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((-0.031, -0.00008), "[-0.031, -0.000]"),
        ((0.00008, 0.031), "[+0.000, +0.031]"),
        ((-0.031, 0.00008), "[-0.031, 0.000]"),
        ((0.0, 0.031), "[0.000, +0.031]"),
    ],
)
def test_an_interval_that_does_not_hold_0_has_the_same_sign_at_both_ends(sweep, ends, shown):
    compared = compare(find_runs([str(sweep)]), "reward")
    pair = Comparison(0, 1, (3, 3), (0.5, 0.5), True, 0.0, ends)
    assert difference_and_interval(pair, number_format(compared))[1] == shown


def test_runs_that_differ_only_in_the_seed_are_one_group(sweep):
    compared = compare(find_runs([str(sweep)]), "reward")
    assert compared.keys == ["loss"]
    assert compared.following == ["loss.epsilon_low"]
    assert compared.common == {"trainer.max_steps": STEPS}
    assert [group.label for group in compared.groups] == ["grpo", "gspo"]
    grpo, gspo = compared.groups
    assert gspo.final == (pytest.approx(0.94), pytest.approx(0.04))
    assert grpo.final == (pytest.approx(0.74), pytest.approx(0.29461839725))
    # The last run never reaches the threshold in its 160 documents, and is measured every 8.
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [
        [104, 120, 168],
        [72, 88, 104],
    ]
    (pair,) = compared.comparisons
    assert (pair.paired, pair.difference) == (True, pytest.approx(-128 / 3))
    # The differences are 32, 32 and 64: t = (128 / 3) / (32 / 3) = 4 with 2 degrees of freedom.
    assert pair.p == pytest.approx(1 - 4 / 18**0.5)


def test_page_has_a_row_for_each_configuration_and_its_test_against_the_first_of_the_sweep(
    sweep, capsys
):
    text = page(capsys, sweep)
    lines = text.splitlines()
    assert lines[0].startswith(
        "6 runs (6 counted) of 2 configurations, which differ in loss (and so in loss.epsilon_low)"
    )
    assert lines[2].startswith(
        "loss  reached  documents  tokens  seconds  mean           final          curve"
    )
    assert lines[3].startswith("grpo  2 of 3   ≥131       ≥800    ")
    assert lines[4].startswith("gspo  3 of 3   88 ± 16    550     ")
    assert "  0.467 ± 0.079  0.940 ± 0.040  ▁" in lines[4]
    words = " ".join(text.split())
    assert "reward is measured on the prompts of training" in words
    assert (
        "nine tenths of the way from 0, the mean start, to 0.9, as high as a configuration ends "
        "with"
    ) in words
    assert (
        "≥: a seed that did not reach it counts as 168 documents, before which none of these is "
        "measured again, with its cost until the limit. So the mean is a lower bound"
    ) in words
    assert "Documents to reward 0.81, t-test, paired by seed, two-sided:" in words
    assert (
        "against grpo (n = 3) n difference interval p seeds better test verdict gspo 3 ≤-43"
        in words
    )
    # Of the nine pairs of runs gspo is better in eight; the ninth, 104 and 104, counts half. So
    # it is better in 8.5 / 9 = 0.94.
    assert "≤-43 [-64, -32] 0.057 4 0.94 paired unknown" in words
    assert "A difference with one such mean is a bound, too (≥ or ≤); with two (~) it may" in words
    assert "with 3 it holds the true difference in about 75 of 100 cases, with 5 in 85" in words
    assert max(map(len, lines)) <= WIDTH


@pytest.fixture
def of_long_labels(tmp_path: Path) -> Compared:
    """Compare two seeds of three configurations whose values are too many for 100 columns."""
    long = "my_package.aggregations.by_the_root_of_lengths"
    for place, (loss, mode) in enumerate((("grpo", "sample_mean"), ("gspo", "a"), ("gspo", "b"))):
        for seed in (0, 1):
            settings = {"aggregation": {"mode": mode if loss == "grpo" else f"{long}_{mode}"}}
            end = 0.8 + 0.05 * place + 0.0123 * seed
            save(tmp_path / f"{place}-{seed}", loss, seed, end, rise=9 + seed, **settings)
    return compare(find_runs([str(tmp_path)]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def cells(line: str) -> list[str]:
    return re.split("  +", line.strip())


def test_no_cell_of_a_table_is_cut_in_a_pipe(of_long_labels, capsys):
    lines = render_comparison(of_long_labels).splitlines()
    (header,) = [place for place, line in enumerate(lines) if line.startswith("loss  ")]
    for row, group in zip(group_rows(of_long_labels), lines[header:], strict=False):
        assert cells(group)[:-1] == row
    pairs = of_long_labels.comparisons.against(0)
    rows = [line for line in lines if line.endswith(("unknown", "better", "worse"))]
    labels = [of_long_labels.groups[pair.second].label for pair in pairs]
    assert [cells(row)[0] for row in rows] == labels
    assert "…" not in "".join(lines)


def test_rows_of_a_narrow_terminal_have_numbers_in_the_place_of_labels(of_long_labels, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "90")
    lines = render_comparison(of_long_labels).splitlines()
    assert max(map(len, lines)) <= WIDTH
    (header,) = [place for place, line in enumerate(lines) if cells(line)[0] == "reached"]
    num_keys = len(of_long_labels.keys)
    for number in (1, 2, 3):
        row = group_rows(of_long_labels)[number]
        found = cells(lines[header + number])
        assert found[:-1] == [str(number), *row[num_keys:]]
        assert re.fullmatch("[▁▂▃▄▅▆▇█]{9}", found[-1])
    text = " ".join(" ".join(lines).split())
    assert "1: loss=grpo, aggregation=sample_mean 2:" in text
    for number, group in enumerate(of_long_labels.groups, 1):
        assert f" {number}: loss={group.words[0]}" in text
    assert "against 1: grpo, sample_mean (n = 2)" in text
    tested = [cells(line)[:2] for line in lines if line.endswith(("unknown", "better", "worse"))]
    assert tested == [["2", "2"], ["3", "2"]]


def test_a_wide_terminal_has_the_labels_in_full(of_long_labels, monkeypatch):
    piped = render_comparison(of_long_labels)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "220")
    assert render_comparison(of_long_labels) == piped


def test_single_seeds_get_no_test_and_no_interval(tmp_path, capsys):
    save(tmp_path / "a", "grpo", 0, 0.5)
    save(tmp_path / "b", "gspo", 0, 0.6)
    text = page(capsys, tmp_path / "a", tmp_path / "b")
    assert "gspo  1 of 1   152" in text
    assert "needs 2 seeds" in text
    assert "±  " not in text
    assert "interval:" not in text
    alone = page(capsys, tmp_path / "a")
    assert "Nothing to compare: one configuration has runs that count." in alone


def test_a_metric_without_a_threshold_is_compared_by_its_final_values(sweep, capsys):
    text = unwrapped_page(capsys, sweep, "--metric=kl")
    assert "loss seeds mean final" in text
    assert "More than seed noise? Final kl, t-test, two-sided:" in text
    assert "No threshold" not in text
    save(sweep / "flat" / "0", "grpo", 0, 0.0)
    flat = unwrapped_page(capsys, sweep / "flat")
    assert "No threshold: no configuration ends higher with every seed than the runs start." in flat


def test_reach_sets_the_threshold(sweep, capsys):
    lines = page(capsys, sweep, "--reach=reward=0.93").splitlines()
    assert lines[3].startswith("grpo  0 of 3   ≥168")
    assert lines[4].startswith("gspo  2 of 3   ≥120")  # (168 + 88 + 104) / 3


def test_excluded_runs_are_named_with_the_reason_on_the_page_and_in_the_table_of_runs(
    sweep, capsys
):
    save(sweep / "20-failed", "grpo", 7, 0.0, "failed", steps=5, reason="ValueError: no\nmore")
    save(sweep / "21-killed", "gspo", 8, 0.0, "running", steps=6)
    save(sweep / "22-again", "gspo", 0, 0.9, rise=8)
    shutil.copytree(sweep / "0-grpo-0", sweep / "24-broken")
    (sweep / "24-broken" / "config.yaml").write_text("a: [")
    with RunDirectory(save(sweep / "25-now", "grpo", 9, 0.0, "running", steps=3)):
        text = page(capsys, sweep, sweep / "0-grpo-0", "--runs-csv", sweep / "runs.csv")
    assert "(6 counted) of 2 configurations" in text
    assert "20-failed: failed at step 5 of 20, reward 0.000 so far: ValueError: no more" in text
    assert "21-killed: killed at step 6 of 20" in text
    assert "0-gspo" not in text.split("Excluded from averages")[0]
    assert "3-gspo-0: same configuration and seed as 22-again, which is newer" in text
    assert "24-broken: unreadable: " in text
    assert "25-now: running at step 3 of 20" in text
    assert "gspo  3 of 3   88 ± 16 " in text
    with (sweep / "runs.csv").open() as file:
        rows = {row["run"].rpartition("/")[2]: row for row in csv.DictReader(file)}
    assert len(rows) == 11
    counted = rows["5-gspo-2"]
    assert (counted["loss"], counted["seed"], counted["counted"]) == ("gspo", "2", "yes")
    assert float(counted["final_reward"]) == pytest.approx(0.98)
    assert float(counted["documents_to_reward_0.81"]) == 104
    assert float(counted["tokens_to_reward_0.81"]) == 13 * 50
    never_reached = rows["2-grpo-2"]
    assert never_reached["documents_to_reward_0.81"] == ""
    assert never_reached["documents_seen"] == "160"
    killed = rows["21-killed"]
    assert killed["mean_reward"] == ""  # it has not seen as many documents as the others
    assert (killed["state"], killed["counted"]) == ("killed", "no")
    assert rows["24-broken"]["state"] == "unreadable"


def test_different_code_and_length_of_runs_are_noted(sweep, capsys):
    assert "Note" not in page(capsys, sweep)
    (sweep / "0-grpo-0" / "provenance.json").write_text('{"git": [{"commit": "a", "diff": ""}]}')
    save(sweep / "9-longer", "grpo", 9, 0.5, steps=2 * STEPS)
    text = page(capsys, sweep)
    assert "Note: the runs come from different code" in text
    assert "Note: the runs are of different length (160, 320 documents)" in text


def test_curves_are_means_over_seeds_by_documents_and_by_time(sweep):
    runs = find_runs([str(sweep / "0-grpo-0"), str(sweep / "1-grpo-1")])
    for factor, run in enumerate(runs, 1):
        run.columns["reward"] = factor * run.columns["documents_seen"]
        run.columns["seconds"] = factor * run.columns["step"]
    points = mean_curve(runs, "reward", "documents_seen").T
    assert (points[0][0], points[-1][0]) == (8, 160)
    for documents, mean, low, high in points:
        assert (low, mean, high) == pytest.approx((documents, 1.5 * documents, 2 * documents))
    by_time = mean_curve(runs, "reward", "seconds").T
    # The first run lasts from second 1 to 20, the other from 2 to 40.
    assert (by_time[0][0], by_time[-1][0]) == (2, 20)
    assert by_time[-1][2:] == pytest.approx((160.0, 160.0))
    # A place at which no run was measured would get a marker. Second 3 is between two of a run.
    assert by_time[:, 0].tolist() == [*range(2, 21)]
    for run in runs:
        run.columns["reward"][[1, 2, 3, 5, 9, 12]] = np.nan
    measured = mean_curve(runs, "reward", "documents_seen")[0]
    assert measured.tolist() == [
        8 * step for step in range(1, 21) if step not in (2, 3, 4, 6, 10, 13)
    ]


def test_the_pause_before_a_resume_does_not_count_as_time(sweep):
    folder = sweep / "0-grpo-0"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["time"] = 1000.0 + row["step"] + (5000 if row["step"] > 10 else 0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_runs([str(folder)])[0].last("seconds") == pytest.approx(5019)
    (folder / "provenance.json").write_text('{"resumed": [{"time": "1970-01-01T01:40:05+0000"}]}')
    assert find_runs([str(folder)])[0].last("seconds") == pytest.approx(19)


def test_html_report_loads_nothing_and_has_the_numbers_of_the_page(sweep, capsys):
    save(sweep / "7-<b>&", "gspo", 9, 0.0, "interrupted", steps=9, reason="SIGTERM")
    page(capsys, sweep, "--html", sweep / "r.html", "--figure", sweep / "r.png")
    text = (sweep / "r.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)|src=", text)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    for kind, count in (("mean", 4), ("band", 4), ("run", 2), ("threshold", 2)):
        assert text.count(f'<g id="{kind}-') == count
    assert "currentColor" in text  # readable on light and dark pages
    assert "#000000" not in text
    assert "7-&lt;b&gt;&amp;: interrupted at step 9 of 20" in text
    cells = re.findall("<td>(.*?)</td>", text)
    assert {"0.940 ± 0.040", "2 of 3", "≥131", "≤-43", "[-64, -32]", "0.057", "paired"} <= set(
        cells
    )
    assert (sweep / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


FINAL = "--metric=final:reward"
"""With it gspo ends at 0.9, 0.94 and 0.98, grpo at 0.9, 0.92 and 0.4."""


def test_csv_has_a_row_for_each_configuration_with_its_interval_and_test(sweep, capsys):
    page(capsys, sweep, FINAL, "--csv", sweep / "r.csv")
    with (sweep / "r.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (second["label"], second["loss"]) == ("gspo", "gspo")
    assert (first["n"], first["verdict"]) == ("3", "base")
    assert first["mean_bound"] == second["difference_bound"] == ""  # of final values none is one
    assert float(second["mean"]) == pytest.approx(0.94)
    assert float(second["std"]) == pytest.approx(0.04)
    # Three seeds are drawn in 27 ways. One of them has the lowest mean, 0.9, and one the highest,
    # 0.98: each more than 2.5 %.
    assert [float(second[end]) for end in ("mean_low", "mean_high")] == pytest.approx([0.9, 0.98])
    assert first["difference"] == first["p"] == first["against"] == ""
    assert (second["against"], second["measured"], second["verdict"]) == (
        "grpo",
        "Final reward",
        "unknown",
    )
    assert float(second["difference"]) == pytest.approx(0.94 - 0.74)
    # The closed form of Student's distribution with two degrees of freedom.
    t = 0.2 / np.std([0, -0.02, -0.58], ddof=1) * np.sqrt(3)
    assert float(second["p"]) == pytest.approx(1 - t / np.sqrt(2 + t**2))
    assert [float(second[end]) for end in ("difference_low", "difference_high")] == pytest.approx(
        [0.0, 0.58]
    )


def test_latex_table_has_a_row_for_each_configuration(sweep, capsys):
    page(capsys, sweep, FINAL, "--against=loss=gspo", "--latex", sweep / "r.tex")
    lines = (sweep / "r.tex").read_text().splitlines()
    assert [line for line in lines if line.startswith("% mean: ")] == [
        "% mean: over seeds, of reward over the last tenth of a run's steps."
    ]
    assert any("with 3 it holds the true difference in about 75 of 100" in line for line in lines)
    assert "% unknown: nothing was shown, not even that there is no difference." in lines
    table = [line for line in lines if not line.startswith("%")]
    assert table == [
        r"\begin{tabular}{lrrrrrl}",
        r"\toprule",
        r"configuration & n & mean & difference & interval & p & verdict \\",
        r"\midrule",
        r"gspo & 3 & 0.940 & -- & -- & -- & base \\",
        r"grpo & 3 & 0.740 & $-$0.200 & [$-$0.580, 0.000] & 0.403 & unknown \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    page(capsys, sweep, "--margin=40", "--latex", sweep / "r.tex")
    by_documents = (sweep / "r.tex").read_text()
    # As on the page, since a seed came to no end.
    assert r"grpo & 2 of 3 & $\geq$131 & -- & -- & -- & -- & base \\" in by_documents
    row = r"gspo & 3 of 3 & 88 & $\leq$$-$43 & [$-$64, $-$32] & 0.057 & -- & unknown \\"
    assert row in by_documents
    assert r"\begin{tabular}{lrrrrrrl}" in by_documents
    assert (
        "% seeds, better and test of each difference: pgtk compare without --latex" in by_documents
    )
    (mean,) = re.findall("^% mean: .*", by_documents, re.MULTILINE)
    assert mean.startswith(
        "% mean: over seeds, of the documents that it took to come to reward 0.81,"
    )
    assert (
        "% ≥: a seed that did not reach it counts as 168 documents, before which none of these is "
        in by_documents
    )


def test_a_mean_and_a_difference_that_are_bounds_are_marked_wherever_they_stand(sweep, capsys):
    """grpo comes to 0.81 with two seeds of three; to 0.93 it comes with none, gspo with two."""
    compared = compare(find_runs([str(sweep)]))
    assert compared.groups[0].label == "grpo"
    for reach, mark in (("0.81", "≤"), ("0.93", "~")):
        options = (f"--reach=reward={reach}", "--csv", sweep / "r.csv", "--html", sweep / "r.html")
        report = json.loads(page(capsys, sweep, *options, "--json"))
        bounds = [row["mean_bound"] for row in report["configurations"]]
        assert bounds == ["≥", None if mark == "≤" else "≥"]
        assert report["pairs"][0]["difference_bound"] == mark
        with (sweep / "r.csv").open() as file:
            rows = [*csv.DictReader(file)]
        assert [row["mean_bound"] for row in rows] == [bound or "" for bound in bounds]
        assert [row["difference_bound"] for row in rows] == ["", mark]
        html = (sweep / "r.html").read_text()
        assert html.count('<g id="bound">') == len([*filter(None, bounds)])
        assert len(re.findall(f"<td>{mark}-", html)) == 1
    page(capsys, sweep, FINAL, "--html", sweep / "r.html")
    assert '<g id="bound">' not in (sweep / "r.html").read_text()


def test_json_has_configurations_pairs_and_excluded_runs(sweep, capsys):
    save(sweep / "20-failed", "grpo", 7, 0.0, "failed", steps=5, reason="ValueError")
    report = json.loads(page(capsys, sweep, FINAL, "--json"))
    configurations = report["configurations"]
    assert [(row["label"], row["n"], row["verdict"]) for row in configurations] == [
        ("grpo", 3, "base"),
        ("gspo", 3, "unknown"),
    ]
    assert configurations[1]["of_runs"] == pytest.approx([0.9, 0.94, 0.98])
    (pair,) = report["pairs"]
    assert (pair["first"], pair["second"], pair["paired"]) == ("grpo", "gspo", True)
    assert pair["difference"] == pytest.approx(0.2)
    assert report["keys"] == ["loss"]
    assert report["excluded"][0]["why"].startswith("failed at step 5 of 20")


def test_a_label_of_the_user_names_its_configuration_in_tables_and_pictures(sweep, capsys):
    label = "--label=loss=gspo=ours"
    svg = sweep / "r.svg"
    printed = page(capsys, sweep, FINAL, label, "--json", "--figure", svg)
    assert [row["label"] for row in json.loads(printed)["configurations"]] == ["grpo", "ours"]
    drawn = svg.read_text()
    assert ">ours</text>" in drawn
    assert "gspo" not in drawn
    assert "against ours (n = 3)" in page(capsys, sweep, FINAL, label, "--against=loss=gspo")


def choose(run: Path, *overrides: str) -> None:
    """Let a run have these overrides."""
    (run / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))


@pytest.fixture
def of_experiments(sweep: Path) -> Path:
    """Return runs of two experiments: paper_a chooses grpo, paper_b gspo."""
    for run in sweep.iterdir():
        paper = "paper_a" if "grpo" in run.name else "paper_b"
        choose(run, f"experiment={paper}", f"seed={run.name[-1]}")
    return sweep


def test_configurations_have_the_names_of_the_experiments_that_were_swept(of_experiments, capsys):
    """Their keys follow from these: the loss, and the lower clip of this module's `save`."""
    compared = compare(find_runs([str(of_experiments)]))
    assert compared.keys == ["experiment"]
    assert compared.following == ["loss", "loss.epsilon_low"]
    assert [group.label for group in compared.groups] == ["paper_a", "paper_b"]
    text = unwrapped_page(
        capsys, of_experiments, "--against=experiment=paper_b", "--label=experiment=paper_a=Old"
    )
    assert "against paper_b (n = 3)" in text
    assert (
        "Old against paper_b: they differ in experiment, and so in loss (grpo, not gspo), "
        "loss.epsilon_low (0.2, not 0.0003)." in text
    )


def test_one_configuration_without_an_experiment_leaves_the_others_their_names(of_experiments):
    for run in of_experiments.glob("*grpo*"):
        choose(run, "seed=0")
    compared = compare(find_runs([str(of_experiments)]), against="experiment=none")
    assert [group.label for group in compared.groups] == ["none", "paper_b"]


@pytest.mark.parametrize("override", ["seed=0", "experiment=another"])
def test_a_configuration_without_a_name_or_with_two_has_the_names_of_its_keys(
    of_experiments, override
):
    choose(of_experiments / "1-grpo-1", override)
    compared = compare(find_runs([str(of_experiments)]))
    assert compared.keys == ["loss"]


def test_an_experiment_and_a_key_name_the_configurations_of_both(two_rates, tmp_path):
    folder = shutil.copytree(two_rates, tmp_path / "runs")
    for run in folder.iterdir():
        choose(run, f"experiment={'paper_a' if run.name < '2' else 'paper_b'}")
    compared = compare(find_runs([str(folder)]), best_of="optimizer.learning_rate")
    assert compared.keys == ["experiment", "optimizer.learning_rate"]


def test_a_label_of_an_unknown_value_is_refused(sweep, capsys):
    message = refusal(capsys, "compare", sweep, "--label=loss=gsop=ours")
    assert "--label loss=gsop=ours needs KEY=VALUE=NAME" in message
    assert "These are loss=grpo, loss=gspo. Use --label loss=gspo=ours." in message
    assert "Use --label loss=grpo=mine." in refusal(capsys, "compare", sweep, "--label=grpo=mine")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (
            ["loss=grpo=ours", "loss=gspo=ours"],
            "--label loss=gspo=ours needs a name that no other value has (got that of loss=grpo). "
            "Two rows of the tables would look the same. Use --label loss=gspo=ours-gspo.",
        ),
        (["loss=gspo=grpo"], "--label loss=gspo=grpo needs a name that no other value has"),
        (
            ["loss=grpo=a", "loss=grpo=b"],
            "--label loss=grpo=b needs to be the only name of loss=grpo (got a before it).",
        ),
    ],
)
def test_labels_that_leave_two_rows_alike_are_refused(sweep, capsys, labels, expected):
    assert expected in refusal(capsys, "compare", sweep, *(f"--label={label}" for label in labels))


def test_labels_may_exchange_the_names_of_two_values(sweep):
    runs = find_runs([str(sweep)])
    swapped = compare(runs, "final:reward", labels=["loss=grpo=gspo", "loss=gspo=grpo"])
    assert {group.label for group in swapped.groups} == {"grpo", "gspo"}


@pytest.mark.slow
def test_picture_has_an_interval_for_each_configuration_and_is_the_same_when_drawn_again(sweep):
    compared = compare(find_runs([str(sweep)]), "final:reward")
    drawn = picture(compared, "svg")
    assert set(re.findall(r"interval-\d", drawn.decode())) == {"interval-0", "interval-1"}
    assert picture(compared, "svg") == drawn
    assert picture(compared, "pdf") == picture(compared, "pdf")


def many(compared: Compared, count: int) -> Compared:
    """Return the comparison with this number of configurations, of long names."""
    groups = [
        replace(compared.groups[2 * n // count], label=f"gspo, prompt_mean, optimizer {n}")
        for n in range(count)
    ]
    result = replace(compared, groups=groups)
    result.comparisons.samples = [
        compared.comparisons.samples[2 * n // count] for n in range(count)
    ]
    return result


def drawn_texts(figure: Figure) -> list[Text]:
    """Return the texts that are seen: not those of ticks beyond the ends of an axis."""
    beyond = set()
    for axes in figure.axes:
        for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = axis.get_major_ticks()
            beyond |= {tick.label1 for tick in ticks if not ends[0] <= tick.get_loc() <= ends[1]}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text not in beyond]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def extent_of_mark(mark: Line2D) -> Bbox:
    """Return the extent in pixels of a line of one point, as large as its marker alone is."""
    (x, y) = mark.get_transform().transform(mark.get_xydata())[0]
    half = mark.get_markersize() * mark.get_figure(root=True).dpi / 72 / 2
    return Bbox([[x - half, y - half], [x + half, y + half]])


@pytest.mark.parametrize("count", [2, 6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("panels", "width"),
    [(None, 6.9), ("steps", 3.3), ("means", 3.3), ("documents,means", 6.9)],
)
def test_a_figure_is_a_column_or_a_page_wide_and_its_words_overlap_nowhere(
    sweep, panels, width, count
):
    figure = figure_of(many(compare(find_runs([str(sweep)])), count), panels)
    assert figure.get_figwidth() == width
    assert figure.get_figheight() < (11.5 if panels == "means" else 9.5)
    texts = drawn_texts(figure)
    said = " ".join(text.get_text().replace("\n", " ") for text in texts)
    named = said.count("gspo, prompt_mean, optimizer ")
    assert named == (count if count < 60 or panels != "steps" else 19)
    assert (f"and {count - named} more" in said) == (named < count)
    # On average gspo ends at 0.94, and nine tenths of the way to its worst run is 0.81.
    if panels == "means":
        assert "dot: mean over 3 runs; bar: its 95% interval; stroke: a run; " in said
        assert said.count("a run that never came to the threshold counts as 168") == 1
    else:
        assert "line: mean over 3 runs; band: from the lowest to the highest; dotted: the" in said
    assert {text.get_fontsize() for text in texts} == {8}
    boxes = [text.get_window_extent() for text in texts]
    page = figure.bbox
    for box in boxes:
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
    for one, other in itertools.combinations(boxes, 2):
        lower = min(one.x1, other.x1) - max(one.x0, other.x0)
        assert lower < 1 or min(one.y1, other.y1) - max(one.y0, other.y0) < 1
    marks = [line for line in figure.findobj(Line2D) if line.get_gid() == "bound"]
    assert len(marks) == (count / 2 if panels != "steps" else 0)  # grpo has a seed that never came
    boxes = [extent_of_mark(mark) for mark in marks]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    beside = [line for mark in marks[:1] for line in mark.axes.lines if line not in marks]
    points = [line.get_window_extent() for line in beside]
    assert not any(mark.overlaps(point) for mark, point in itertools.product(boxes, points))
    heights = [axes.get_position().height * figure.get_figheight() for axes in figure.axes]
    assert min(heights) > (0.25 if panels == "means" else 1.2)


def lightness_and_hue(linear: np.ndarray) -> np.ndarray:
    """Return L*, a* and b* of a colour of linear sRGB (CIE 1976, white D65)."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratios = to_xyz @ linear.clip(0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_of_a_figure_differ_in_grey_and_for_colour_blind_eyes():
    """Of protanopes, deuteranopes and tritanopes (Machado, Oliveira and Fernandes 2009)."""
    seen = {
        "normal": np.eye(3),
        "prot": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "deut": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        "trit": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    }
    levels = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in COLORS])
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    for matrix in seen.values():
        colors = [lightness_and_hue(np.array(matrix) @ color) for color in linear]
        for one, other in itertools.combinations(colors, 2):
            assert np.linalg.norm(one - other) > 25  # 2 can just be told apart
    lightness = sorted(lightness_and_hue(color)[0] for color in linear)
    assert np.diff(lightness).min() > 10
    assert lightness[-1] < 80  # on white paper


def test_a_hundred_and_fifty_configurations_look_each_different():
    looks = [style(place) for place in range(150)]
    assert len({(one["color"], one["marker"], one["markerfacecolor"]) for one in looks}) == 150


def test_the_end_of_a_picture_s_name_is_its_format(sweep, tmp_path, capsys):
    for name, start in (("a.jpg", b"\xff\xd8\xff"), ("a.pdf", b"%PDF-"), ("a.png", b"\x89PNG")):
        page(capsys, sweep, "--figure", tmp_path / name, "--panels=means")
        assert (tmp_path / name).read_bytes().startswith(start)
    message = refusal(capsys, "compare", sweep, "--figure", "c.gif")
    assert message == (
        "pgtk: error: --figure=c.gif needs a name that ends in .png, .jpg, .pdf, .svg (got c.gif). "
        "The end of the name is the format of the picture. Use --figure=c.png.\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--panels=means,rewards", "--figure=a.png"],
            "--panels=means,rewards needs names of panels: documents, steps, seconds, means, tried "
            "(got rewards). The figure has no other. Use --panels=means.",
        ),
        (
            ["--panels=tried", "--figure=a.png"],
            "--panels=tried needs --best-of (got none). tried shows the values of its key. Use "
            "--panels=means, or --best-of with a key.",
        ),
        (
            ["--panels=means"],
            "--panels=means needs --figure or --html (got neither). It names the panels of their "
            "picture. Use --figure=compare.pdf --panels=means.",
        ),
    ],
)
def test_panels_that_a_figure_cannot_have_are_refused(sweep, capsys, words, expected):
    assert refusal(capsys, "compare", sweep, *words) == f"pgtk: error: {expected}\n"


def test_a_picture_that_cannot_be_drawn_is_a_line_and_no_status(
    sweep, tmp_path, capsys, monkeypatch
):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    png = tmp_path / "a.png"
    html = tmp_path / "b.html"
    assert main(["compare", str(sweep), "--figure", str(png), "--html", str(html)]) == 0
    lines = capsys.readouterr().err.splitlines()
    for path, line in zip((html, png), lines, strict=True):
        assert f"note: the picture {path} was not drawn: No space left on device. Make" in line
    assert not png.exists()
    assert (
        "was not drawn: No space left on device. Make room on its disk: df -h" in html.read_text()
    )


def test_legend_names_a_function_of_the_user_by_its_path_and_leaves_out_custom(tmp_path):
    estimators = [("grpo", None), ("custom", "mine.own_answers"), ("custom", "mine.shuffled")]
    for number, (name, path) in enumerate(estimators):
        advantage = {"estimator": name} | ({"path": path} if path else {})
        for seed in range(2):
            save(
                tmp_path / f"{number}-{seed}", "grpo", seed, 0.5 + number / 10, advantage=advantage
            )
    groups = compare(find_runs([str(tmp_path)]), "reward").groups
    assert {group.label for group in groups} == {"grpo", "mine.own_answers", "mine.shuffled"}


def test_control_characters_in_the_texts_of_a_run_reach_no_terminal_and_no_page(tmp_path, capsys):
    """Every text of a run has an escape sequence, a mark of direction, a formula and a tag."""
    hostile = "\x1b]0;x\x07 \u202egro.elpmaxe $\\frac$ <b>"
    for seed, loss in enumerate((hostile, "grpo")):
        name = f"run-{seed}-{hostile if seed else ''}"
        folder = save(tmp_path / name, loss, seed, 0.5, more={hostile: loss})
        save(tmp_path / f"failed-{seed}", loss, seed, 0.5, "failed", reason=hostile)
        (folder / "provenance.json").write_text(
            json.dumps({"git": [], "packages": {hostile: loss}})
        )
    html = tmp_path / "page.html"
    png = tmp_path / "page.png"
    runs = [str(path) for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert main(["compare", *runs, "--html", str(html), "--figure", str(png)]) == 0
    assert main(["compare", *runs[-2:]]) == 0
    assert main(["compare", *runs, f"--metric={hostile}"]) == 2
    assert main(["resume", str(tmp_path / hostile)]) == 2
    assert main(["export", str(tmp_path / hostile), str(tmp_path / "model")]) == 2
    terminal = capsys.readouterr()
    for text in (terminal.out, terminal.err, html.read_text()):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "U+202E" in text
    assert "&lt;U+202E&gt;gro.elpmaxe $\\frac$ &lt;b&gt;" in html.read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'\">" in html.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "got nowhere: no such folder"),
        (["{sweep}", "--metric", "rewrd"], "Use --metric=reward."),
        (["{sweep}", "--reach", "reward=nan"], "--reach=reward=nan needs METRIC=NUMBER."),
        (
            ["{sweep}", "--best-of=seed"],
            "--best-of=seed needs a key that tells the runs apart. These are loss.",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    sweep, tmp_path_factory, monkeypatch, capsys, arguments, expected
):
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    message = refusal(capsys, "compare", *(argument.format(sweep=sweep) for argument in arguments))
    assert expected in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("norm", "note"),
    [
        (0.0, "grad_norm is 0 with gspo and 1 with grpo. Clipping"),
        (2.0, None),
        (2.1, "grad_norm is 1 with grpo and 2.1 with gspo, 2.1 times"),
    ],
)
def test_gradient_norms_that_differ_by_more_than_a_factor_of_two_are_noted(
    tmp_path, capsys, norm, note
):
    for seed in range(2):
        save(tmp_path / f"a{seed}", "grpo", seed, 0.5)
        save(tmp_path / f"b{seed}", "gspo", seed, 0.5, grad_norm=norm)
    text = unwrapped_page(capsys, tmp_path)
    if note is None:
        assert "grad_norm" not in text
    else:
        assert note in text
        assert "different lengths" in text


@pytest.fixture(scope="module")
def two_rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two losses at two learning rates, two seeds each.

    grpo is better at the lower rate, gspo at the higher. 0.63 is the threshold.
    """
    folder = tmp_path_factory.mktemp("two_rates")
    ends = {("grpo", 1e-4): 0.7, ("grpo", 1e-3): 0.2, ("gspo", 1e-4): 0.3, ("gspo", 1e-3): 0.6}
    for number, ((loss, rate), end) in enumerate(ends.items()):
        for seed in range(2):
            optimizer = {"learning_rate": rate}
            save(folder / f"{number}-{seed}", loss, seed, end + seed / 100, optimizer=optimizer)
    return folder


def test_best_of_a_key_compares_each_configuration_at_its_best_value(two_rates):
    compared = compare(find_runs([str(two_rates)]), "reward", "optimizer.learning_rate")
    values = [tuple(group.values.values()) for group in compared.groups]
    assert values == [("grpo", 1e-4), ("gspo", 1e-3)]
    assert [group.final[0] for group in compared.groups] == pytest.approx([0.705, 0.605])
    assert len(compared.comparisons) == 1
    assert compared.left_out == []
    assert [group.tried["0.001"].final[0] for group in compared.groups] == pytest.approx(
        [0.205, 0.605]
    )


def test_best_of_values_that_only_rounding_tells_apart_is_the_first(tmp_path):
    for rate, end in ((1e-4, 0.11830357142857148), (1e-3, 0.1183035714285715)):
        for loss in ("grpo", "gspo"):
            save(tmp_path / f"{loss}-{rate}", loss, 0, end, optimizer={"learning_rate": rate})
    runs = find_runs([str(tmp_path)])
    compared = compare(runs, "final:reward", "optimizer.learning_rate")
    first = runs[0].config["optimizer.learning_rate"]
    assert {group.values["optimizer.learning_rate"] for group in compared.groups} == {first}


def test_page_of_best_of_notes_best_values_at_the_edge_of_those_tried(two_rates, capsys):
    text = unwrapped_page(capsys, two_rates, "--best-of=optimizer.learning_rate")
    assert (
        "Documents to reward 0.63 by optimizer.learning_rate, mean over seeds (number of runs): "
        "loss 0.0001 0.001 grpo"
    ) in text
    assert (
        "gspo, 0.001: this is the highest optimizer.learning_rate tried, and one beyond may be "
        "better"
    ) in text
    assert "grpo, 0.0001: this is the lowest" in text
    assert "chosen by the same runs that are compared" in text


@pytest.mark.parametrize("key", ["optimizer.learning_rate", "loss"])
def test_configurations_differ_in_loss_and_rate_whichever_the_best_is_taken_of(
    two_rates, capsys, key
):
    assert unwrapped_page(capsys, two_rates, f"--best-of={key}").startswith(
        "4 runs (4 counted) of 2 configurations, which differ in loss, optimizer.learning_rate "
        "(and so in loss.ep"
    )


def test_best_of_against_a_base_puts_the_base_first_and_shows_all_values_tried(two_rates):
    against = compare(
        find_runs([str(two_rates)]), "final:reward", "optimizer.learning_rate", against="loss=gspo"
    )
    assert [group.values["loss"] for group in against.groups] == ["gspo", "grpo"]
    assert tried_rows(against) == [
        ["loss", "0.0001", "0.001"],
        ["gspo", "0.305", "0.605"],
        ["grpo", "0.705", "0.205"],
    ]
    drawn = picture(against, "svg").decode()
    assert "tried-0" in drawn
    assert "tried-1" in drawn


def test_final_is_the_mean_of_the_last_tenth_and_best_the_highest_mean_of_a_tenth():
    values = [0.0] * 10 + [1.0, 3.0] + [0.0] * 6 + [0.5, 0.7]
    assert final(values) == pytest.approx(0.6)
    assert best(values) == pytest.approx(2.0)
    assert (final([3.0]), best([3.0])) == (3.0, 3.0)


def test_the_legend_of_long_names_stays_within_the_picture(tmp_path):
    for number in range(4):
        more = {"advantage": {"path": f"a_module_with_a_long_name.of_functions.function_{number}"}}
        save(tmp_path / str(number), "grpo", 0, 0.5, **more)
    drawn = picture(compare(find_runs([str(tmp_path)]), "final:reward"), "svg").decode()
    # matplotlib places a text by its attribute x or by a translation.
    places = re.findall(
        r'<text [^>]*x="([-\d.]+)"[^>]*>a_module|<text [^>]*translate\(([-\d.]+) [^>]*>a_module',
        drawn,
    )
    assert len(places) == 4
    assert min(float(x or translation) for x, translation in places) > 0
