"""Comparisons that were planned: a base, blocks, a margin, and runs that collapsed."""

import csv
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
from builders.studies import four_losses

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import margin_of
from pgtoolkit.comparison.statistics import Comparisons, Sample
from pgtoolkit.runs.find import Run, find_runs

PASS = "evaluation/held_out/pass@1"


def run_of(values, seed=0, metric=PASS, state="done", reason=None, **config):
    """A run with a value every 10 documents from 0 on."""
    steps = np.arange(float(len(values)))
    config = {"seed": seed, "trainer.max_steps": 9, **config}
    columns = {
        "step": steps,
        "documents_seen": 10 * steps,
        "tokens_seen": 30 * steps,
        "seconds": steps,
    }
    columns |= {"time": steps, metric: np.array(values, float)}
    return Run(
        "/", f"{config.get('loss.name')}-{seed}", state, reason, len(values) - 1, config, columns
    )


def arms(ends, **config):
    """Runs that rise to these ends, a list of seeds for each loss."""
    return [
        run_of([0.2, 0.3, end], seed, **{"loss.name": loss, **config})
        for loss, values in ends.items()
        for seed, end in enumerate(values)
    ]


def test_area_and_final_are_compared_where_they_are_asked_for():
    runs = [
        run_of([0.0, 1.0, 0.4], 0, **{"loss.name": "a"}),
        run_of([0.0, 0.2, 0.8], 0, **{"loss.name": "b"}),
    ]
    area, final = compare(runs, f"area:{PASS}"), compare(runs, f"final:{PASS}")
    assert [group.label for group in area.groups] == ["a", "b"]
    assert [group.label for group in final.groups] == ["b", "a"]
    assert next(iter(area.comparisons)).difference == pytest.approx(
        (0.1 + 0.5) / 2 - (0.5 + 0.7) / 2
    )
    assert next(iter(final.comparisons)).difference == pytest.approx(0.4 - 0.8)
    assert not area.by_documents
    assert compare(runs, PASS).goal.threshold is not None


@pytest.mark.parametrize(("count", "taken"), [(3, 1), (8, 2), (9, 3), (11, 3), (60, 3)])
def test_final_is_the_mean_of_the_last_evaluations(count, taken):
    values = [n**2 / 4000 for n in range(count)]
    (group,) = compare([run_of(values)], f"final:{PASS}").groups
    assert group.final[0] == pytest.approx(np.mean(values[-taken:]))


def test_contrasts_are_with_the_base_that_differs_in_nothing_else():
    runs = [
        run
        for lag in (0, 8)
        for run in arms(
            {"grpo": [0.5, 0.6, 0.7], "gspo": [0.52, 0.61, 0.74], "cispo": [0.9, 0.9, 0.8]},
            **{"rollout.lag": lag},
        )
    ]
    compared = compare(runs, f"final:{PASS}", against="loss=grpo")
    labels = [group.label for group in compared.groups]
    assert sorted(labels[:2]) == ["grpo, 0", "grpo, 8"]
    planned = {
        (labels[pair.first], labels[pair.second])
        for pair in compared.comparisons
        if not pair.exploratory
    }
    assert planned == {
        (f"grpo, {lag}", f"{loss}, {lag}") for lag in (0, 8) for loss in ("gspo", "cispo")
    }
    assert compared.comparisons.tested == 4
    assert all(pair.difference > 0 for pair in compared.comparisons if not pair.exploratory)


def test_each_arm_at_its_best_rate_is_compared_with_the_base_at_its_own():
    rates = {("grpo", 1e-3): 0.7, ("grpo", 2e-3): 0.5, ("gspo", 1e-3): 0.4, ("gspo", 2e-3): 0.6}
    runs = [
        run_of(
            [0.0, 0.1, end + seed / 100],
            seed,
            **{"loss.name": loss, "optimizer.learning_rate": rate},
        )
        for (loss, rate), end in rates.items()
        for seed in range(3)
    ]
    (pair,) = compare(
        runs, f"final:{PASS}", "optimizer.learning_rate", against="loss=grpo"
    ).comparisons
    assert (pair.exploratory, pair.difference) == (False, pytest.approx(-0.1))


def test_blocks_are_checkpoints_and_seeds():
    """The checkpoints differ by 0.4, the losses by 0.01, 0.01, 0.02 and 0.02 within the blocks."""
    ends = {
        ("a", "grpo"): [0.3, 0.34],
        ("a", "gspo"): [0.31, 0.35],
        ("b", "grpo"): [0.7, 0.72],
        ("b", "gspo"): [0.72, 0.74],
    }
    runs = [
        run_of([0.0, 0.1, end], seed, **{"loss.name": loss, "model.path": path})
        for (path, loss), values in ends.items()
        for seed, end in enumerate(values)
    ]
    compared = compare(runs, f"final:{PASS}", over="model.path", against="loss=grpo", margin="0.03")
    assert compared.keys == ["loss"]
    assert [group.label for group in compared.groups] == ["grpo", "gspo"]
    assert [len(group.counted) for group in compared.groups] == [4, 4]
    (pair,) = compared.comparisons
    assert (pair.paired, pair.counts, pair.difference) == (True, (4, 4), pytest.approx(0.015))
    # t = 0.015 / (0.00577 / 2) = 5.196 with 3 degrees of freedom
    assert pair.p == pytest.approx(0.0138, abs=1e-4)
    assert pair.improvement == pytest.approx((3 + 3.5) / 8)  # of 4 pairs of each checkpoint
    runs.pop()
    (pair,) = compare(runs, f"final:{PASS}", over="model.path").comparisons
    assert (pair.paired, pair.counts, pair.difference) == (True, (3, 3), pytest.approx(0.04 / 3))
    # t = 0.01333 / (0.00577 / 3**0.5) = 4 with 2 degrees of freedom
    assert pair.p == pytest.approx(0.0572, abs=1e-4)
    runs.pop()
    (pair,) = compare(runs[:1] + runs[2:], f"final:{PASS}", over="model.path").comparisons
    assert (pair.counts, pair.p) == ((1, 1), None)  # one block is left that both have
    (pair,) = Comparisons(
        [Sample({("a", 0): 0.3, ("a", 1): 0.4}), Sample({("b", 0): 0.3, ("b", 1): 0.5})]
    )
    # by scipy
    assert (pair.paired, pair.counts, pair.p) == (False, (2, 2), pytest.approx(0.7117, abs=1e-4))


def test_blocks_of_other_prompts_are_not_paired():
    """The values of the test above, where p is 0.014: a key of the task that follows from the loss
    tells them apart."""
    ends = {"grpo": [[0.3, 0.34], [0.7, 0.72]], "gspo": [[0.31, 0.35], [0.72, 0.74]]}
    runs = []
    for loss, by_path in ends.items():
        for path, values in zip("ab", by_path, strict=True):
            for seed, end in enumerate(values):
                task = {"task.name": "reverse", "task.num_digits": 6 if loss == "grpo" else 4}
                runs.append(
                    run_of([0.0, 0.1, end], seed, **{"loss.name": loss, "model.path": path}, **task)
                )
    compared = compare(runs, f"final:{PASS}", over="model.path")
    (pair,) = compared.comparisons
    groups = [np.ravel(ends[group.values["loss"]]) for group in compared.groups]
    expected = scipy.stats.ttest_ind(groups[0], groups[1], equal_var=False).pvalue
    assert (pair.paired, pair.counts) == (False, (4, 4))
    assert pair.p == pytest.approx(expected)
    assert expected == pytest.approx(0.93, abs=0.01)


@pytest.mark.parametrize("base", [-2.0, 2.0])
def test_a_margin_in_percent_is_of_the_size_of_the_mean(base):
    """Rewards may be penalties: 10 % of -2 is 0.2 on either side, as of 2."""
    assert margin_of("10%", base) == pytest.approx(0.2)
    assert margin_of("0.1", base) == 0.1
    one = base + np.array([-0.04, 0.0, 0.01, 0.03])
    other = base + np.array([-0.02, 0.03, 0.01, 0.05])
    samples = [
        Sample({(seed,): float(value) for seed, value in enumerate(values)})
        for values in (one, other)
    ]
    (pair,) = Comparisons(samples, "10%")
    bound = 0.1 * abs(one.mean())
    lower = scipy.stats.ttest_rel(other + bound, one, alternative="greater").pvalue
    upper = scipy.stats.ttest_rel(other - bound, one, alternative="less").pvalue
    assert pair.equal_p == pytest.approx(max(lower, upper))
    assert pair.equal_p < 0.01


def test_a_collapsed_run_stays_at_the_last_tenth_of_what_it_measured_in_training():
    """Of 40 steps the last four, 0.3 on average, from document 400 to the 800 of the other, and at
    its end."""
    steps = np.arange(1.0, 81)
    runs = []
    for seed, count in ((0, 80), (1, 40)):
        values = np.linspace(0.2, 0.6, count)
        values[-4:] = 0.7, 0.1, 0.2, 0.2
        columns = {"step": steps[:count], "documents_seen": 10 * steps[:count], "reward": values}
        config = {"seed": seed, "trainer.max_steps": 80}
        state, reason = (
            ("done", None) if seed == 0 else ("failed", "NumericalError: 3 steps in a row")
        )
        runs.append(Run("/", f"run-{seed}", state, reason, count, config, columns))
    bad = runs[1].columns["reward"].copy()
    (group,) = compare(runs, "area:reward").groups
    area = sum((a + b) / 2 * 10 for a, b in pairwise(bad)) + 0.3 * 400
    assert group.reached[1].mean == pytest.approx(area / 790)
    assert group.reached[1].final == pytest.approx(0.3)
    assert group.reached[0].final == pytest.approx(np.mean(runs[0].columns["reward"][-8:]))


def test_a_run_that_collapsed_stays_where_it_ended():
    """It has seen half as much, and neither shortens what the others are compared over nor is left
    out."""
    bad = run_of(
        [0.2, 0.4, 0.1],
        1,
        state="failed",
        reason="NumericalError: 3 steps in a row",
        **{"loss.name": "a"},
    )
    broken = run_of([0.2, 0.9], 2, state="failed", reason="OSError: no space", **{"loss.name": "a"})
    runs = [run_of([0.2, 0.4, 0.6, 0.6, 0.6], 0, **{"loss.name": "a"}), bad, broken]
    compared = compare(runs, f"area:{PASS}")
    assert compared.goal.span == (0, 40)
    assert [one.mean for one in compared.groups[0].reached] == pytest.approx(
        [0.5, (0.3 + 0.25 + 0.1 + 0.1) / 4]
    )
    assert compared.groups[0].reached[1].final == pytest.approx(0.1)
    assert "collapsed, and not dropped: a-1" in compared.notes[0]
    assert [run.name for run, _ in compared.left_out] == ["a-2"]
    found = compare(runs, reach=f"{PASS}=0.5")
    assert found.spent(found.groups[0], "documents_seen") == [20, 40]


@pytest.fixture
def study(tmp_path):
    return four_losses(tmp_path)


def test_a_planned_comparison(study, capsys):
    options = [f"--metric=final:{PASS}", "--against=loss=grpo", "--margin=0.02"]
    assert main(["compare", str(study), *options, "--runs-csv", str(study / "r.csv")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Final evaluation/held_out/pass@1, t-test, paired by seed, two-sided, and two one-sided "
        "ones for equality"
    ) in said
    assert "within 0.02, p adjusted for 3 planned pairs (Holm):" in said
    assert "gspo 4 +0.002 [+0.001, +0.003] 0.033 4 0.69 <0.001 paired equal within 0.02" in said
    assert "cispo 4 +0.100 [+0.092, +0.107] <0.001 2 1.00 1.000 paired better" in said
    assert "3 other pairs: exploratory, p not adjusted" in said
    assert "IQM: of the final values" in said
    with (study / "r.csv").open() as rows:
        assert len(list(csv.DictReader(rows))) == 16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--against", "loss=gpro"], "No configuration has it; of loss there are"),
        (
            ["--against", "lag=1"],
            "--against=lag needs a key that tells the runs apart. These are loss.",
        ),
        (["--over", "model.path"], "--over=model.path needs a key that tells the runs apart."),
        (
            ["--over", "los"],
            "--over=los needs a key that tells the runs apart. These are loss. Use",
        ),
        (["--margin", "-1"], "--margin=-1 needs a number > 0, or one with %"),
        (["--margin", "nan%"], "--margin=nan% needs a number > 0"),
        (["--metric", "area:rewrd"], "Use --metric=reward."),
    ],
)
def test_bad_input_is_one_message(study, capsys, arguments, expected):
    assert main(["compare", str(study), *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.splitlines()) == 1


def test_a_page_has_the_exploratory_pairs(study, capsys):
    page = study / "page.html"
    assert (
        main(
            [
                "compare",
                str(study),
                f"--metric=final:{PASS}",
                "--against=loss=grpo",
                "--html",
                str(page),
            ]
        )
        == 0
    )
    assert page.read_text().count("exploratory: ") == 3
    assert find_runs([str(study)])[0].state == "done"
