"""What runs reach, and how a threshold is found and missed: against plain loops and values worked
out by hand."""

import csv
import json
import random

import numpy as np
import pytest

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import Goal, chosen_metric, goal_of, reached
from pgtoolkit.comparison.text_report import render_comparison
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import Run, find_runs
from pgtoolkit.runs.records import best_of

HELD_OUT = "evaluation/held_out/pass@1"


def run_of(values, metric="exact_match", step=10, seed=0, tokens=3, **config):
    """A finished run that sees `step` documents a step."""
    config = {"seed": seed, "trainer.max_steps": 5, **config}
    steps = np.arange(1.0, len(values) + 1)
    columns = {
        "step": steps,
        "documents_seen": step * steps,
        "tokens_seen": tokens * steps,
        "seconds": 0 * steps,
    }
    return Run(
        "/", "name", "done", None, len(values), config, columns | {metric: np.array(values, float)}
    )


def first_place(values, step, window, threshold):
    """The first step whose mean over the documents of the last `window` reaches the threshold, by
    plain loops."""
    for n in range(1, len(values) + 1):
        taken = [values[m - 1] for m in range(1, n + 1) if step * n - window < step * m] or [
            values[n - 1]
        ]
        if step * n >= window and sum(taken) / len(taken) >= threshold:
            return n
    return None


@pytest.mark.parametrize("window", [0, 5, 40])
def test_a_threshold_is_reached_by_the_mean_over_the_last_documents(window):
    draw = random.Random(window)
    for _ in range(20):
        values = [draw.random() * n / 30 for n in range(30)]
        run = run_of(values)
        n = first_place(values, 10, window, 0.5)
        found = reached(run, Goal("exact_match", 0.5, "", window, (10, 300)))
        assert found.to == (
            {"documents_seen": 10 * n, "tokens_seen": 3 * n, "seconds": 0.0} if n else {}
        )
        assert found.seen == {"documents_seen": 300, "tokens_seen": 90, "seconds": 0.0}


def test_the_mean_is_the_area_over_what_all_have_seen():
    """Trapezoids from document 15 to 40: (0.05 + 0.1) / 2 * 5, (0.1 + 0.5) / 2 * 10 and (0.5 + 0.7)
    / 2 * 10."""
    run = run_of([0.0, 0.1, 0.5, 0.7, 0.9])
    goal = Goal("exact_match", None, "", 0, (15, 40))
    assert reached(run, goal).mean == pytest.approx((0.375 + 3 + 6) / 25)
    assert reached(run_of([0.0, 0.1, 0.5]), goal).mean is None  # it has not come as far
    assert reached(run, Goal("exact_match", None, "", 0, (50, 50))).mean == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("metric", "curves", "threshold", "why"),
    [
        # a share that one configuration reaches with both seeds
        ("exact_match", [[[0, 0.95], [0, 0.9]], [[0, 0.5]]], 0.9, "the default for a share"),
        # which takes every seed
        (
            "exact_match",
            [[[0.1, 0.95], [0.3, 0.8]], [[0.2, 0.99], [0.2, 0.1]]],
            0.74,
            "from 0.2, the mean start, to 0.8, as",
        ),
        # of a reward nobody knows the unit
        ("reward", [[[-1, 99]], [[1, 50]]], 89.1, "from 0, the mean start, to 99"),
        ("reward", [[[-2, -1]]], -1.1, "from -2, the mean start, to -1"),
        # in as many digits as it takes to lie between the two
        ("reward", [[[-1010, -1003]]], -1003.7, ""),
        ("reward", [[[1000, 1000.5]]], 1000.45, ""),
        (HELD_OUT, [[[0, 1]]], 0.9, "the default for a share"),
        ("evaluation/held_out/avg", [[[0, 1]]], 0.9, "from 0, the mean start, to 1"),
        # nothing rises; more of it is not better
        ("exact_match", [[[0.5, 0.5]]], None, ""),
        ("evaluation/held_out/pass@1_error", [[[0, 1]]], None, ""),
        ("completion_length", [[[0, 1]]], None, ""),
    ],
)
def test_a_threshold_that_fits(metric, curves, threshold, why):
    groups = [[run_of(curve, metric) for curve in group] for group in curves]
    goal = goal_of(groups, metric, None)
    assert goal.threshold == threshold
    assert why in goal.why
    assert goal_of(groups, metric, 0.25).threshold == 0.25


def two_groups(one, other, **config):
    return [
        run_of(values, seed=seed, loss=name)
        for name, group in (("a", one), ("b", other))
        for seed, values in group
    ]


def test_a_run_that_never_reaches_the_threshold_counts_with_what_was_looked_at():
    """Never left out, and never as if it had reached it: 20 and 40 documents against 40 and at
    least 50."""
    rise = [[0.0] * n + [1.0] * (5 - n) for n in range(6)]
    compared = compare(
        two_groups([(0, rise[1]), (1, rise[3])], [(0, rise[3]), (1, rise[5])]), "exact_match"
    )
    assert compared.limits == {"documents_seen": 50, "tokens_seen": 15, "seconds": 0.0}
    a, b = compared.groups
    assert (compared.spent(a, "documents_seen"), compared.arrived(a, "documents_seen")) == (
        [20, 40],
        2,
    )
    assert (compared.spent(b, "documents_seen"), compared.arrived(b, "documents_seen")) == (
        [40, 50],
        1,
    )
    assert next(iter(compared.comparisons)).difference == 15


def test_a_run_that_ends_early_limits_the_others_unless_it_has_reached_the_threshold():
    """As with trainer.stop_at: a run that ended because it was there says nothing of how far to
    look."""
    long = [0.0] * 8 + [1.0] * 2
    there = compare(
        two_groups([(0, [0.0, 1.0])], [(0, long)]), "exact_match", reach="exact_match=0.9"
    )
    assert there.limits["documents_seen"] == float("inf")
    assert [there.spent(group, "documents_seen") for group in there.groups] == [[20], [90]]
    for run in (both := two_groups([(0, [0.0, 0.0, 1.0])], [(0, [0.0] * 3)])):
        del run.columns["seconds"], run.columns["tokens_seen"]
    # at the limit itself, and on the axes that all have
    exactly = compare(both, None, reach="exact_match=0.9")
    assert exactly.limits == {"documents_seen": 30}
    assert sorted(exactly.arrived(group, "documents_seen") for group in exactly.groups) == [0, 1]
    short = compare(two_groups([(0, [0.0, 0.5])], [(0, long)]), None, reach="exact_match=0.9")
    assert short.limits["documents_seen"] == 20
    assert [short.arrived(group, "documents_seen") for group in short.groups] == [0, 0]
    assert [short.spent(group, "documents_seen") for group in short.groups] == [[20], [20]]


def test_of_runs_that_never_arrive_the_shortest_limits_all():
    """A run of 30 documents and one of 50 miss the threshold: what the third did in 40 is not
    within the limit."""
    late = [0.0, 0.0, 0.0, 1.0, 1.0]
    compared = compare(
        two_groups([(0, [0.0] * 3), (1, [0.0] * 5)], [(0, late)]), None, reach="exact_match=0.9"
    )
    assert compared.limits == {"documents_seen": 30, "tokens_seen": 9, "seconds": 0.0}
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [
        [30],
        [30, 30],
    ]
    assert [compared.arrived(group, "documents_seen") for group in compared.groups] == [0, 0]


def test_the_mean_is_taken_over_what_every_run_has_seen():
    longer = run_of([0.0, 0.2, 0.4, 0.6, 0.8], loss="a")
    later = run_of([0.0, 0.1, 0.2], step=15, loss="b")
    goal = goal_of([[longer], [later]], "exact_match", None)
    assert goal.span == (15, 45)
    assert goal.window == 45 / 50
    compared = compare([longer, later], "exact_match")
    means = sorted(group.reached[0].mean for group in compared.groups)
    # Trapezoids over 15 to 45: 0.1 to 0.2 at 20, 0.4 at 30, 0.6 at 40, 0.7 at 45; and 0 to 0.1 to
    #   0.2.
    assert means == pytest.approx([0.1, (0.15 * 5 + 0.3 * 10 + 0.5 * 10 + 0.65 * 5) / 30])


def test_seeds_are_paired_where_their_prompts_are_the_same():
    runs = two_groups([(0, [0, 1]), (1, [0, 0.9])], [(1, [0, 0.8]), (0, [0, 0.7])])
    assert compare(runs, "exact_match").comparisons.paired == {True}
    for run in runs:
        run.config |= {
            "task.name": "reverse",
            "task.num_digits": 6,
            "task.verifier_processes": 2 if run.config["loss"] == "a" else 0,
        }
    assert compare(runs, "exact_match").comparisons.paired == {True}
    for run in runs[:2]:
        run.config["task.num_digits"] = 4
    assert compare(runs, "exact_match").comparisons.paired == {False}
    assert compare(
        two_groups([(0, [0, 1]), (1, [0, 0.9])], [(0, [0, 0.8])]), "exact_match"
    ).comparisons.paired == {False}


def save(folder, loss, seed, held_out=None, **more):
    """A run of 4 steps of 8 documents, a second each; held_out: pass@1 before the first step, after
    2 and after 4."""
    config = {"seed": seed, "loss": {"name": loss}, "trainer": {"max_steps": 4}, **more}
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        rows, time = [], 1000.0
        for step in range(1, 5):
            # The evaluation after step 2 takes 50 s, which lie between its row and the next.
            time += 51 if step == 3 and held_out else 1
            shares = {"reward": 0.1 * step, "exact_match": 0.2 * step}
            rows.append(
                {
                    "step": step,
                    "time": time,
                    "documents_seen": 8 * step,
                    "num_tokens": 10 * step,
                    **shares,
                }
            )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [
            {
                "step": step,
                "time": 1.0,
                "documents": 8 * step,
                "set": name,
                "prompts": 4,
                "completions_per_prompt": 2,
            }
            | {
                "avg": value / 2,
                "avg_error": 0.1,
                "pass@1": value,
                "pass@1_error": 0.1,
                "length": 7.0,
                "seconds": 25.0,
            }
            for step, value in zip((0, 2, 4), held_out or (), strict=False)
            for name in ("held_out", "longer")
        ]
        if lines:
            (folder / "evaluations.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
        run.set_status("done", 4)


def test_held_out_metrics_come_first_and_their_time_is_no_training(tmp_path, capsys):
    save(tmp_path / "a0", "grpo", 0, [0.0, 0.5, 0.95])
    save(tmp_path / "a1", "grpo", 1, [0.0, 0.92, 0.94])
    save(tmp_path / "b0", "gspo", 0, [0.0, 0.1, 0.2])
    save(tmp_path / "b1", "gspo", 1, [0.0, 0.2, 0.91])
    compared = compare(find_runs([str(tmp_path)]))
    assert (compared.metric, compared.goal.threshold, compared.goal.window) == (HELD_OUT, 0.9, 0)
    assert [group.label for group in compared.groups] == ["grpo", "gspo"]
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [
        [32, 16],
        [32, 32],
    ]
    # Seconds since the first row, without the 2 x 25 s that the evaluation of step 2 took.
    assert [compared.spent(group, "seconds") for group in compared.groups] == [[3, 1], [3, 3]]
    assert [compared.spent(group, "tokens_seen") for group in compared.groups] == [
        [100, 30],
        [100, 100],
    ]
    assert compared.goal.span == (0, 32)
    assert compared.groups[0].reached[0].mean == pytest.approx((0.25 * 16 + 0.725 * 16) / 32)
    assert main(["compare", str(tmp_path), "--runs-csv", str(tmp_path / "runs.csv")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{HELD_OUT} is measured on held-out prompts" in said
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row[f"documents_to_{HELD_OUT}_0.9"] for row in rows] == ["32", "16", "", "32"]
    assert (
        compare(find_runs([str(tmp_path)]), "evaluation/longer/avg").metric
        == "evaluation/longer/avg"
    )


def test_without_held_out_metrics_in_every_run_none_is_left_out(tmp_path):
    save(tmp_path / "a0", "grpo", 0, [0.0, 0.5, 0.95])
    save(tmp_path / "b0", "gspo", 0)
    compared = compare(find_runs([str(tmp_path)]))
    assert compared.metric == "exact_match"
    assert "1 of 2 finished runs have evaluation/held_out/pass@1" in compared.notes[0]
    assert [len(group.counted) for group in compared.groups] == [1, 1]
    assert compare(find_runs([str(tmp_path / "b0")])).notes == []


def test_a_share_that_is_zero_throughout_is_not_what_runs_are_compared_by(tmp_path, capsys):
    """Unless reward tells no more. A share is drawn against 0 and 1: of 0.02 nothing is to be
    seen."""
    runs = two_groups([(0, [0.0] * 9)], [(0, [0.0] * 9)])
    for run in runs:
        run.columns["reward"] = 0.1 * run.columns["step"]
    assert chosen_metric(runs) == (
        "reward",
        ["exact_match is 0 in every run: they are compared by reward"],
    )
    runs[0].columns["exact_match"][3] = 0.02
    broken = run_of([0.5], "reward")
    broken.state = "failed"  # which has no say where others are done
    assert chosen_metric([*runs, broken]) == ("exact_match", [])
    assert "▁▁▁▁▁▁▁▁▁" in render_comparison(compare(runs))
    assert "█" in render_comparison(compare(runs, "reward"))
    for run in runs:
        run.columns |= dict.fromkeys(("exact_match", "reward"), 0 * run.columns["step"])
    assert chosen_metric(runs) == ("exact_match", [])


def test_of_equal_evaluations_the_one_with_the_higher_reward_is_the_best(tmp_path):
    """A pass@1 of 0 throughout, whose mean reward once was 0.008: a later 0 is not the best."""
    values = [(2, 0.0, 0.008), (4, 0.0, 0.0), (6, 0.0, 0.0)]
    rows = [
        {"set": "held_out", "step": step, "pass@1": share, "avg": avg}
        for step, share, avg in values
    ]
    assert best_of(rows, ("held_out", "pass@1"), {2, 4, 6})["step"] == 2
    assert best_of(rows, ("held_out", "pass@1"), {4, 6})["step"] == 6  # all else equal, the latest
    rows[1]["pass@1"] = 0.1
    assert best_of(rows, ("held_out", "pass@1"), {2, 4, 6})["step"] == 4
    assert best_of(rows, ("held_out", "avg"), {2, 4, 6})["step"] == 2
    assert best_of(rows, ("other", "pass@1"), {2, 4, 6}) is None


def test_runs_that_were_evaluated_differently_are_noted(tmp_path):
    for seed in range(2):
        save(
            tmp_path / str(seed),
            "grpo",
            seed,
            [0.0, 0.5, 0.9],
            evaluation={"seed": seed, "every": 2, "best": None},
        )
    notes = compare(find_runs([str(tmp_path)])).notes
    assert "the runs were evaluated differently (evaluation.seed)" in notes[0]
    compared = compare(find_runs([str(tmp_path)]), "exact_match")
    assert not compared.notes


def test_one_lucky_step_reaches_nothing_and_a_mean_of_equal_values_is_not_missed_by_rounding():
    lucky = run_of([0.0, 0.0, 0.0, 1.0, 0.0])
    assert reached(lucky, Goal("exact_match", 0.9, "", 30, (10, 50))).to == {}
    equal = run_of([0.1] * 5)
    assert reached(equal, Goal("exact_match", 0.1, "", 30, (10, 50))).to["documents_seen"] == 30
