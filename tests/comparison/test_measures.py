"""Measures of a run, a threshold and an area, and the default threshold and metric of a comparison:
against plain loops and values worked out by hand."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.headline import chosen_metric
from pgtoolkit.comparison.measures import Goal, goal_of, reached
from pgtoolkit.comparison.notes import length_notes
from pgtoolkit.comparison.reports import as_json
from pgtoolkit.comparison.text_report import difference_rows, group_rows, render_comparison
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import Run, find_runs
from pgtoolkit.runs.records import best_of

HELD_OUT = "evaluation/held_out/pass@1"


def run_of(
    values: Sequence[float],
    metric: str = "exact_match",
    step: int = 10,
    seed: int = 0,
    **config: object,
) -> Run:
    """Return a finished run that sees `step` documents and 3 tokens a step."""
    config = {"seed": seed, "trainer.max_steps": 5, **config}
    steps = np.arange(1.0, len(values) + 1)
    columns = {
        "step": steps,
        "documents_seen": step * steps,
        "tokens_seen": 3 * steps,
        "seconds": 0 * steps,
    }
    return Run(
        "/", "name", "done", None, len(values), config, columns | {metric: np.array(values, float)}
    )


def test_several_passes_over_the_same_documents_are_one_point_of_a_curve():
    """Two batches of two steps, which are trained again in pass two."""
    run = run_of([1, 2, 3, 4, 5, 6, 7, 8], metric="kl_new_old", **{"rollout.passes": 2})
    run.columns["documents_seen"] = np.array([4.0, 8, 8, 8, 12, 16, 16, 16])
    run.columns[HELD_OUT] = np.array([np.nan, 0.1, np.nan, 0.3, np.nan, 0.5, np.nan, 0.7])
    assert run.points("documents_seen", "kl_new_old").tolist() == [[4, 8, 12, 16], [1, 3, 5, 7]]
    assert run.points("step", "kl_new_old").tolist() == [[*range(1, 9)], [*range(1, 9)]]
    assert run.points("documents_seen", HELD_OUT).tolist() == [[8, 8, 16, 16], [0.1, 0.3, 0.5, 0.7]]
    found = reached(run, Goal("kl_new_old", 3.0, "", 0.0, 0.0, (4.0, 16.0)))
    assert found.to == {"documents_seen": 8, "tokens_seen": 12, "seconds": 0.0}
    assert found.mean == 4
    found = reached(run, Goal(HELD_OUT, 0.3, "", 0.0, 0.0, (8.0, 16.0)))
    assert found.to == {"documents_seen": 8, "tokens_seen": 12, "seconds": 0.0}
    found = reached(run, Goal(HELD_OUT, 0.5, "", 0.0, 0.0, (8.0, 16.0)))
    assert found.to == {"documents_seen": 16, "tokens_seen": 18, "seconds": 0.0}


@pytest.mark.parametrize(("steps", "noted"), [(4, []), (6, ["2, 3 steps of one pass"])])
def test_lengths_are_compared_by_the_steps_of_one_pass_where_prompts_are_dropped(steps, noted):
    once = run_of([0.5] * 2)
    twice = run_of([0.5] * steps, **{"rollout.passes": 2})
    for run in (once, twice):
        run.columns["dropped_group_fraction"] = np.full(run.step, 0.25)
    notes = length_notes([once, twice])
    assert [text for text in noted if text not in notes[0]] == []
    assert len(notes) == len(noted)


def first_reaching_step(
    values: list[float], documents: int, window: int, threshold: float
) -> int | None:
    """Return the first step at which the mean over the last `window` documents reaches the
    threshold, by plain loops.

    documents: of each step.
    """
    for step in range(1, len(values) + 1):
        in_window = [
            values[earlier - 1]
            for earlier in range(1, step + 1)
            if documents * step - window < documents * earlier
        ]
        if not in_window:
            in_window = [values[step - 1]]
        if documents * step >= window and sum(in_window) / len(in_window) >= threshold:
            return step
    return None


@pytest.mark.parametrize("window", [0, 5, 40])
def test_a_threshold_is_reached_by_the_mean_over_the_last_documents(window):
    draw = random.Random(window)
    for _ in range(20):
        values = [draw.random() * n / 30 for n in range(30)]
        measured = reached(run_of(values), Goal("exact_match", 0.5, "", window, 0.0, (10, 300)))
        step = first_reaching_step(values, 10, window, 0.5)
        if step is None:
            assert measured.to == {}
        else:
            expected = {"documents_seen": 10 * step, "tokens_seen": 3 * step, "seconds": 0.0}
            assert measured.to == expected
        assert measured.seen == {"documents_seen": 300, "tokens_seen": 90, "seconds": 0.0}


def test_the_mean_is_the_area_over_the_goal_s_documents_and_none_for_a_shorter_run():
    run = run_of([0.0, 0.1, 0.5, 0.7, 0.9])
    goal = Goal("exact_match", None, "", 0, 0, (15, 40))
    # Trapezoids from document 15 to 40:
    # (0.05 + 0.1) / 2 * 5, (0.1 + 0.5) / 2 * 10 and (0.5 + 0.7) / 2 * 10.
    assert reached(run, goal).mean == pytest.approx((0.375 + 3 + 6) / 25)
    assert reached(run_of([0.0, 0.1, 0.5]), goal).mean is None
    assert reached(run, Goal("exact_match", None, "", 0, 0, (50, 50))).mean == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("metric", "curves", "threshold", "why"),
    [
        # The default, if both seeds of a configuration reach it.
        ("exact_match", [[[0, 0.95], [0, 0.9]], [[0, 0.5]]], 0.9, "the default for a share"),
        # In each configuration a seed does not reach the default.
        (
            "exact_match",
            [[[0.1, 0.95], [0.3, 0.8]], [[0.2, 0.99], [0.2, 0.1]]],
            0.74,
            "from 0.2, the mean start, to 0.8, as",
        ),
        # A reward may have any unit.
        ("reward", [[[-1, 99]], [[1, 50]]], 89.1, "from 0, the mean start, to 99"),
        ("reward", [[[-2, -1]]], -1.1, "from -2, the mean start, to -1"),
        # As many digits as the threshold needs to lie between start and end.
        ("reward", [[[-1010, -1003]]], -1003.7, ""),
        ("reward", [[[1000, 1000.5]]], 1000.45, ""),
        (HELD_OUT, [[[0, 1]]], 0.9, "the default for a share"),
        ("evaluation/held_out/avg", [[[0, 1]]], 0.9, "from 0, the mean start, to 1"),
        # No run rises.
        ("exact_match", [[[0.5, 0.5]]], None, ""),
        # A higher value is not better.
        ("evaluation/held_out/pass@1_error", [[[0, 1]]], None, ""),
        ("completion_length", [[[0, 1]]], None, ""),
    ],
)
def test_default_threshold_is_nine_tenths_or_a_value_that_a_configuration_reaches(
    metric, curves, threshold, why
):
    groups = [[run_of(curve, metric) for curve in group] for group in curves]
    goal = goal_of(groups, metric, None)
    assert goal.threshold == threshold
    assert why in goal.why
    assert goal_of(groups, metric, 0.25).threshold == 0.25


def two_groups(
    first: list[tuple[int, list[float]]], second: list[tuple[int, list[float]]]
) -> list[Run]:
    """Return the runs of two losses, each made of a seed and its values."""
    return [
        run_of(values, seed=seed, loss=name)
        for name, group in (("a", first), ("b", second))
        for seed, values in group
    ]


def test_a_run_that_never_reaches_the_threshold_counts_one_measurement_more_than_all():
    # Values that rise to 1 after so many steps as their place in the list.
    rise = [[0.0] * n + [1.0] * (5 - n) for n in range(6)]
    compared = compare(
        two_groups([(0, rise[1]), (1, rise[3])], [(0, rise[3]), (1, rise[5])]), "exact_match"
    )
    assert (compared.limit, compared.goal.apart) == (50, 10)
    assert compared.axes == ["documents_seen", "tokens_seen", "seconds"]
    a, b = compared.groups
    assert compared.spent(a, "documents_seen") == [20, 40]
    assert compared.arrived(a) == 2
    assert compared.spent(b, "documents_seen") == [40, 60]
    assert compared.spent(b, "tokens_seen") == [12, 15]
    assert compared.arrived(b) == 1
    assert next(iter(compared.comparisons)).difference == 20


def test_a_run_that_never_reaches_counts_as_no_more_than_the_next_measurement_of_any():
    """Runs that are measured every 10 documents and every 40: beside each other, those that miss
    the threshold count as 90, where the first of them would be measured again after 80."""
    often = [(0, [0.0] * 6 + [1.0] * 2), (1, [0.0] * 8)]
    seldom = [run_of([0.0, 0.0], step=40, seed=seed, loss="seldom") for seed in (0, 1)]
    reach = "exact_match=0.9"
    alone = compare(two_groups(often, []), reach=reach)
    assert compare(seldom, reach=reach).after_limit == 120
    compared = compare([*two_groups(often, []), *seldom], reach=reach)
    assert alone.after_limit == compared.after_limit == 90
    spent = {group.label: compared.spent(group, "documents_seen") for group in compared.groups}
    assert spent == {"a": [70, 90], "seldom": [90, 90]}
    assert compared.goal.apart == 40
    assert "exact_match is measured every 10 to 40 documents" in compared.notes[-1]


def test_a_run_is_followed_to_its_last_measurement_and_no_further():
    """Evaluated every 20 documents, and ended 10 after the second evaluation."""
    runs = [run_of([0.0] * 5, loss="a"), run_of([0.0] * 5, loss="b")]
    for run in runs:
        run.columns[HELD_OUT] = np.array([np.nan, 0.0, np.nan, 0.0, np.nan])
    compared = compare(runs, reach=f"{HELD_OUT}=0.5")
    assert (compared.limit, compared.after_limit) == (40, 60)


@pytest.mark.parametrize(("share", "noted"), [(0.01, 1), (0.03, 0)])
def test_a_share_that_is_almost_zero_is_said_with_the_score_to_compare(share, noted):
    """One step of four has the share: its mean over the run is 0.0025, or 0.0075."""
    runs = [run_of([0.0, 0.0, share, 0.0], loss=name) for name in ("a", "b")]
    for run in runs:
        run.columns["reward"] = np.array([0.1, 0.2, 0.3, 0.4])
    metric, notes = chosen_metric([[run] for run in runs])
    assert metric == "exact_match"
    assert notes == noted * [
        "exact_match is almost 0 in every run (a mean of at most 0.0025), so it hardly tells them "
        "apart: --metric=reward compares the mean score"
    ]


LATE = [0.0] * 8 + [1.0] * 2


def test_a_run_that_ended_since_it_reached_the_threshold_does_not_limit_the_others():
    compared = compare(
        two_groups([(0, [0.0, 1.0])], [(0, LATE)]), "exact_match", reach="exact_match=0.9"
    )
    assert compared.limit == float("inf")
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [[20], [90]]


def test_a_threshold_that_is_reached_at_the_limit_itself_is_better_than_never():
    runs = two_groups([(0, [0, 0, 1]), (1, [0, 0, 1])], [(0, [0, 0, 0]), (1, [0, 0, 0])])
    # All that reach it take longer than the others, which never do.
    for run in runs[:2]:
        run.columns["tokens_seen"] = 5 * run.columns["step"]
        del run.columns["seconds"]
    compared = compare(runs, None, reach="exact_match=0.9", margin="20")
    assert compared.axes == ["documents_seen", "tokens_seen"]  # not one that some runs lack
    assert [compared.arrived(group) for group in compared.groups] == [2, 0]
    (pair,) = compared.comparisons
    assert (pair.difference, pair.improvement, pair.p, pair.equal_p) == (10, 1, None, None)
    # The second is higher with certainty, and better never: fewer are better.
    (written,) = json.loads(as_json(compared))["pairs"]
    assert (written["difference"], written["better"]) == (10, 0)
    assert "improvement" not in written
    header, cells = difference_rows(compared, compared.comparisons)[:2]
    assert cells[header.index("better")] == "0.00"
    reached, never = group_rows(compared)[1:]
    assert reached[1:4] == ["2 of 2", "30 ± 0", "15"]
    assert never[1:4] == ["0 of 2", "≥40", "≥9"]
    assert (
        "measured every 10 documents, so what it takes to come to 0.9 is known to within 10"
        in (compared.notes[0])
    )


def test_runs_that_never_reach_the_threshold_are_not_equal_and_a_note_says_what_to_compare():
    runs = two_groups([(0, [0, 0.1]), (1, [0, 0.2])], [(0, [0, 0.3]), (1, [0, 0.2])])
    compared = compare(runs, None, reach="exact_match=0.9", margin="20")
    (pair,) = compared.comparisons
    assert (pair.difference, pair.equal_p) == (0, None)
    assert difference_rows(compared, [pair])[1][-1] == "unknown"
    assert compared.notes == [
        "no seed reached exact_match 0.9, so documents tell nothing here: "
        "--metric=final:exact_match compares the ends, and a lower --reach the way to it"
    ]


def test_a_margin_finer_than_the_measurements_is_refused():
    runs = two_groups([(0, [0, 1]), (1, [0, 1])], [(0, [0.1, 1]), (1, [0.1, 1])])
    for margin in ("9", "40%"):  # 40% of 20 documents
        with pytest.raises(ConfigError) as error:
            compare(runs, None, reach="exact_match=0.9", margin=margin)
        assert str(error.value) == (
            f"--margin={margin} needs at least 10 documents (got {margin}). exact_match is "
            "measured every 10 documents, so what it takes to come to the threshold is known no "
            "better. Use --margin=10, or --metric=final:exact_match."
        )
    compared = compare(runs, None, reach="exact_match=0.9", margin="10")
    assert difference_rows(compared, [*compared.comparisons])[1][-1] == "equal within 10 documents"


def test_a_run_that_ends_early_below_the_threshold_limits_the_others():
    compared = compare(two_groups([(0, [0.0, 0.5])], [(0, LATE)]), None, reach="exact_match=0.9")
    assert compared.limit == 20
    assert [compared.arrived(group) for group in compared.groups] == [0, 0]
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [[30], [30]]
    assert [compared.spent(group, "tokens_seen") for group in compared.groups] == [[6], [6]]


def test_of_runs_that_never_reach_the_threshold_the_shortest_limits_all():
    # Runs of 30 and of 50 documents miss the threshold; the third reaches it after 40.
    late = [0.0, 0.0, 0.0, 1.0, 1.0]
    compared = compare(
        two_groups([(0, [0.0] * 3), (1, [0.0] * 5)], [(0, late)]), None, reach="exact_match=0.9"
    )
    assert compared.limit == 30
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [
        [40, 40],
        [40],
    ]
    assert [compared.spent(group, "tokens_seen") for group in compared.groups] == [[9, 9], [9]]
    assert [compared.arrived(group) for group in compared.groups] == [0, 0]


def test_the_mean_is_taken_over_what_every_run_has_seen():
    longer = run_of([0.0, 0.2, 0.4, 0.6, 0.8], loss="a")
    later = run_of([0.0, 0.1, 0.2], step=15, loss="b")
    goal = goal_of([[longer], [later]], "exact_match", None)
    assert goal.span == (15, 45)
    assert goal.window == 45 / 50
    compared = compare([longer, later], "exact_match")
    means = sorted(group.reached[0].mean for group in compared.groups)
    # Trapezoids from document 15 to 45. The longer run has 0.1 at 15, 0.2 at 20, 0.4 at 30, 0.6 at
    # 40 and 0.7 at 45; the other rises from 0 to 0.2.
    assert means == pytest.approx([0.1, (0.15 * 5 + 0.3 * 10 + 0.5 * 10 + 0.65 * 5) / 30])


def pairings(runs: list[Run]) -> list[bool]:
    """Return of each pair whether it is paired."""
    return [pair.paired for pair in compare(runs, "exact_match").comparisons]


def test_runs_are_paired_by_seed_if_seeds_and_prompts_are_the_same():
    runs = two_groups([(0, [0, 1]), (1, [0, 0.9])], [(1, [0, 0.8]), (0, [0, 0.7])])
    assert pairings(runs) == [True]
    for run in runs:
        run.config |= {
            "task.name": "reverse",
            "task.num_digits": 6,
            "task.verifier_processes": 2 if run.config["loss"] == "a" else 0,
        }
    assert pairings(runs) == [True]
    for run in runs[:2]:
        run.config["task.num_digits"] = 4
    assert pairings(runs) == [False]
    assert pairings(two_groups([(0, [0, 1]), (1, [0, 0.9])], [(0, [0, 0.8])])) == [False]


def save(
    folder: Path,
    loss: str,
    seed: int,
    held_out: tuple[float, ...] = (),
    **more: object,
) -> None:
    """Write a run of 4 steps of 8 documents, a second each.

    held_out: pass@1 before the first step, after step 2 and after step 4, of two evaluation sets.
    more: groups of its configuration.
    """
    config = {"seed": seed, "loss": {"name": loss}, "trainer": {"max_steps": 4}, **more}
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        write_rows(run.metrics_path, training_rows(evaluated=bool(held_out)))
        if held_out:
            write_rows(folder / "evaluations.jsonl", evaluation_rows(held_out))
        run.set_status("done", 4)


def training_rows(evaluated: bool) -> list[dict]:
    rows = []
    time = 1000.0
    for step in range(1, 5):
        # The evaluations after step 2 take the 50 s between its row and the next.
        time += 51 if step == 3 and evaluated else 1
        counts = {"documents_seen": 8 * step, "num_tokens": 10 * step}
        shares = {"reward": 0.1 * step, "exact_match": 0.2 * step}
        rows.append({"step": step, "time": time, **counts, **shares})
    return rows


def evaluation_rows(held_out: tuple[float, ...]) -> list[dict]:
    rows = []
    for step, value in zip((0, 2, 4), held_out, strict=True):
        for name in ("held_out", "longer"):
            counts = {"documents": 8 * step, "prompts": 4, "completions_per_prompt": 2}
            scores = {"avg": value / 2, "avg_error": 0.1, "pass@1": value, "pass@1_error": 0.1}
            costs = {"time": 1.0, "length": 7.0, "seconds": 25.0}
            rows.append({"step": step, "set": name, **counts, **scores, **costs})
    return rows


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two seeds of grpo and of gspo; all but the first seed of gspo reach 0.9."""
    folder = tmp_path_factory.mktemp("evaluated")
    save(folder / "a0", "grpo", 0, (0.0, 0.5, 0.95))
    save(folder / "a1", "grpo", 1, (0.0, 0.92, 0.94))
    save(folder / "b0", "gspo", 0, (0.0, 0.1, 0.2))
    save(folder / "b1", "gspo", 1, (0.0, 0.2, 0.91))
    return folder


def test_runs_are_compared_by_held_out_pass_at_1_if_all_have_it(evaluated):
    compared = compare(find_runs([str(evaluated)]))
    assert (compared.metric, compared.goal.threshold, compared.goal.window) == (HELD_OUT, 0.9, 0)
    assert compared.goal.span == (0, 32)
    assert [group.label for group in compared.groups] == ["grpo", "gspo"]
    assert compared.groups[0].reached[0].mean == pytest.approx((0.25 * 16 + 0.725 * 16) / 32)
    other = "evaluation/longer/avg"
    assert compare(find_runs([str(evaluated)]), other).metric == other


def test_time_of_evaluations_does_not_count_as_training(evaluated):
    compared = compare(find_runs([str(evaluated)]))
    spent = {
        axis: [compared.spent(group, axis) for group in compared.groups]
        for axis in ("documents_seen", "tokens_seen", "seconds")
    }
    assert spent["documents_seen"] == [[32, 16], [48, 32]]
    assert spent["tokens_seen"] == [[100, 30], [100, 100]]
    # Seconds since the first row, without the 2 x 25 s that the evaluations after step 2 took.
    assert spent["seconds"] == [[3, 1], [3, 3]]


def test_page_and_table_of_runs_have_the_held_out_metric(evaluated, tmp_path, capsys):
    assert main(["compare", str(evaluated), "--runs-csv", str(tmp_path / "runs.csv")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{HELD_OUT} is measured on held-out prompts" in printed
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row[f"documents_to_{HELD_OUT}_0.9"] for row in rows] == ["32", "16", "", "32"]


def test_runs_of_which_some_have_no_evaluation_are_compared_by_training(tmp_path):
    save(tmp_path / "a0", "grpo", 0, (0.0, 0.5, 0.95))
    save(tmp_path / "b0", "gspo", 0)
    compared = compare(find_runs([str(tmp_path)]))
    assert compared.metric == "exact_match"
    assert "1 of 2 finished runs have evaluation/held_out/pass@1" in compared.notes[0]
    assert [len(group.counted) for group in compared.groups] == [1, 1]
    (note,) = compare(find_runs([str(tmp_path / "b0")])).notes
    assert note.startswith("exact_match is measured every 8 documents")


@pytest.fixture
def without_matches() -> list[Run]:
    """Return two runs whose reward rises and whose exact_match stays 0."""
    runs = two_groups([(0, [0.0] * 9)], [(0, [0.0] * 9)])
    for run in runs:
        run.columns["reward"] = 0.1 * run.columns["step"]
    return runs


def test_runs_are_compared_by_reward_if_exact_match_is_0_in_all_of_them(without_matches):
    groups = [[run] for run in without_matches]
    assert chosen_metric(groups) == (
        "reward",
        ["exact_match is 0 in every run: the runs are compared by reward"],
    )
    without_matches[0].columns["exact_match"][3] = 0.2
    failed = run_of([0.5], "reward")  # it lacks exact_match, but it is not counted
    failed.state = "failed"
    assert chosen_metric([*groups, [failed]]) == ("exact_match", [])
    for run in without_matches:
        run.columns |= dict.fromkeys(("exact_match", "reward"), 0 * run.columns["step"])
    assert chosen_metric(groups) == ("exact_match", [])


def test_a_number_of_some_runs_is_not_said_to_be_0_in_every_run(without_matches):
    first, second = without_matches
    del second.columns["exact_match"]
    for run in (first, second):
        run.columns[HELD_OUT] = run.columns["step"] * np.nan
    first.columns[HELD_OUT][-1] = 0
    assert chosen_metric([[first], [second]]) == (
        "reward",
        [
            f"{HELD_OUT} and exact_match are 0 in the 1 of 2 runs that has a value: the runs are "
            "compared by reward"
        ],
    )


def test_a_run_that_ends_before_the_others_are_measured_is_left_out():
    """Runs of 64 documents a step, beside one that ends at 8."""
    rising = [0.1 * step for step in range(1, 10)]
    runs = [run_of(rising, "reward", 64, seed, **{"loss.name": "grpo"}) for seed in (0, 1)]
    runs += [run_of(rising[:7], "reward", 64, 0, **{"loss.name": "gspo"})]
    alone = compare(runs, "reward")
    short = run_of([0.5], "reward", 8, 1, **{"loss.name": "gspo"})
    compared = compare([*runs, short], "reward")
    assert compared.left_out == [
        (
            short,
            "too short to be compared with the others: it ends at 8 documents, and another is "
            "first measured at 64. Leave it out, or train it for more steps",
        )
    ]
    assert compared.goal == alone.goal
    assert compared.goal.span == (64, 448)
    assert group_rows(compared) == group_rows(alone)
    # One run that is measured late does not shut out those that have ended before.
    late = run_of([np.nan] * 9 + [0.5], "reward", 64, 1, **{"loss.name": "gspo"})
    compared = compare([*runs, late], "reward")
    assert [run for run, _ in compared.left_out] == [late]
    assert "first measured at 640 documents" in compared.left_out[0][1]
    assert compared.goal == alone.goal


def test_a_threshold_that_only_a_longer_run_reached_is_not_called_reached_by_none():
    rising = [0.1 * step for step in range(1, 10)]
    low = [0.1] * 4
    runs = [
        run_of(values, "reward", 64, seed, **{"loss.name": loss})
        for loss, values in (("grpo", rising), ("gspo", low))
        for seed in (0, 1)
    ]
    (note,) = [note for note in compare(runs, reach="reward=0.8").notes if "no seed" in note]
    assert note.startswith(
        "no seed reached reward 0.8 within 256 documents, as far as all without it were measured, "
        "so documents tell nothing here"
    )
    (note,) = [note for note in compare(runs, reach="reward=2").notes if "no seed" in note]
    assert note.startswith("no seed reached reward 2, so documents tell nothing here")


def test_the_curve_of_a_share_is_drawn_between_0_and_1_and_a_reward_between_its_ends(
    without_matches,
):
    without_matches[0].columns["exact_match"][3] = 0.2
    assert "▁▁▁▁▁▁▁▁▁" in render_comparison(compare(without_matches))
    assert "█" in render_comparison(compare(without_matches, "reward"))


def test_best_evaluation_is_by_its_metric_then_by_its_reward_then_the_latest():
    values = [(2, 0.0, 0.008), (4, 0.0, 0.0), (6, 0.0, 0.0)]
    rows = [
        {"set": "held_out", "step": step, "pass@1": share, "avg": avg}
        for step, share, avg in values
    ]
    assert best_of(rows, ("held_out", "pass@1"), {2, 4, 6})["step"] == 2
    assert best_of(rows, ("held_out", "pass@1"), {4, 6})["step"] == 6
    rows[1]["pass@1"] = 0.1
    assert best_of(rows, ("held_out", "pass@1"), {2, 4, 6})["step"] == 4
    assert best_of(rows, ("held_out", "avg"), {2, 4, 6})["step"] == 2
    assert best_of(rows, ("other", "pass@1"), {2, 4, 6}) is None


def test_runs_with_other_held_out_prompts_are_no_seeds_and_no_repeats_of_each_other(capsys):
    """Two seeds, each trained twice, the second time with another evaluation.seed."""

    def run(loss: str, seed: int, evaluation_seed: int, end: float) -> Run:
        keys = {"loss.name": loss, "evaluation.seed": evaluation_seed, "evaluation.every": 1}
        ends = [end, end + 0.01 * seed, end]
        made = run_of(ends, HELD_OUT, seed=seed, **keys)
        made.columns["exact_match"] = made.columns[HELD_OUT]
        return made

    runs = [run("grpo", seed, asked, 0.5 + 0.2 * asked) for seed in (0, 1) for asked in (0, 1)]
    compared = compare(runs, f"final:{HELD_OUT}")
    assert compared.keys == ["evaluation.seed"]
    found = {group.label: (len(group.counted), group.final[0]) for group in compared.groups}
    assert found == {"0": (2, pytest.approx(0.5)), "1": (2, pytest.approx(0.7))}
    assert compared.left_out == []
    text = " ".join(render_comparison(compared).split())
    assert "of 2 configurations, which differ in evaluation.seed" in text
    assert "no common measure" in text
    assert "such as by pgtk evaluate / evaluation.seed=0" in text
    # What was trained is the same, so by a number of training these are repeats.
    assert len(compare(runs, "final:exact_match").left_out) == 2
    # Of two losses those with the same prompts are compared, ...
    runs += [run("gspo", seed, asked, 0.6 + 0.1 * asked) for seed in (0, 1) for asked in (0, 1)]
    compared = compare(runs)
    assert compared.metric == HELD_OUT
    assert [pair.is_common for pair in compared.comparisons].count(True) == 2
    # ... or all, prompts by prompts, where the user says that they are a block of each.
    blocks = compare(runs, f"final:{HELD_OUT}", over="evaluation.seed")
    (pair,) = blocks.comparisons
    assert (pair.paired, pair.counts, pair.is_common) == (True, (4, 4), True)
    assert pair.difference == pytest.approx(0.05)


@pytest.mark.parametrize(("trained", "num_groups"), [(1.0, 1), (0.7, 2)])
def test_a_setting_of_evaluation_that_is_null_is_that_of_training(trained, num_groups):
    keys = {"evaluation.every": 1, "rollout.temperature": trained}
    runs = [
        run_of([0.5] * 3, HELD_OUT, seed=seed, **keys, **{"evaluation.temperature": temperature})
        for seed, temperature in enumerate((None, 1.0))
    ]
    compared = compare(runs, f"final:{HELD_OUT}")
    assert len(compared.groups) == num_groups
    assert not [note for note in compared.notes if "evaluat" in note and num_groups == 1]


def test_a_single_high_step_reaches_no_threshold():
    lucky = run_of([0.0, 0.0, 0.0, 1.0, 0.0])
    assert reached(lucky, Goal("exact_match", 0.9, "", 30, 0.0, (10, 50))).to == {}


@pytest.mark.parametrize("value", [0.7, 1e6 + 0.2])
def test_rounding_of_the_mean_of_equal_values_does_not_miss_the_threshold(value):
    equal = run_of([value] * 5)
    measured = reached(equal, Goal("exact_match", value, "", 30, 0.0, (10, 50)))
    assert measured.to["documents_seen"] == 30


def test_a_rise_by_rounding_alone_has_no_threshold():
    run = run_of([0.11830357142857148] * 10 + [0.1183035714285715] * 10, "reward")
    assert goal_of([[run]], "reward", None).threshold is None
