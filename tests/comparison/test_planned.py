"""Planned comparisons: with a base, over blocks, within a margin, and of runs that collapsed.
p values are those of scipy or worked out by hand."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from builders.refusals import refusal
from builders.studies import four_losses

from pgtoolkit.cli import main
from pgtoolkit.comparison.figure import figure_of
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import margin_of
from pgtoolkit.comparison.reports import _latex, as_json, configurations, html_parts
from pgtoolkit.comparison.results import Comparison
from pgtoolkit.comparison.seed_noise import noise_of
from pgtoolkit.comparison.statistics import LEVEL, Comparisons, Sample
from pgtoolkit.comparison.text_report import of_shared_runs, render_comparison, tried_rows
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import Run

PASS = "evaluation/held_out/pass@1"


def run_of(
    values: Sequence[float],
    seed: int = 0,
    state: str = "done",
    reason: str | None = None,
    **config: object,
) -> Run:
    """Return a run that was evaluated every 10 documents, from 0 on."""
    steps = np.arange(float(len(values)))
    config = {"seed": seed, "trainer.max_steps": 9, **config}
    columns = {
        "step": steps,
        "documents_seen": 10 * steps,
        "tokens_seen": 30 * steps,
        "seconds": steps,
    }
    columns |= {"time": steps, PASS: np.array(values, float)}
    return Run(
        "/", f"{config.get('loss.name')}-{seed}", state, reason, len(values) - 1, config, columns
    )


def runs_of_losses(ends: dict[str, list[float]], **config: object) -> list[Run]:
    """Return runs that rise to these ends, a list for the seeds of each loss."""
    return [
        run_of([0.2, 0.3, end], seed, **{"loss.name": loss, **config})
        for loss, values in ends.items()
        for seed, end in enumerate(values)
    ]


def test_runs_are_compared_by_area_or_final_value_as_the_metric_says():
    runs = [
        run_of([0.0, 1.0, 0.4], 0, **{"loss.name": "a"}),
        run_of([0.0, 0.2, 0.8], 0, **{"loss.name": "b"}),
    ]
    area = compare(runs, f"area:{PASS}")
    final = compare(runs, f"final:{PASS}")
    assert [group.label for group in area.groups] == ["a", "b"]
    assert [group.label for group in final.groups] == ["a", "b"]
    assert next(iter(area.comparisons)).difference == pytest.approx(
        (0.1 + 0.5) / 2 - (0.5 + 0.7) / 2
    )
    assert next(iter(final.comparisons)).difference == pytest.approx(0.8 - 0.4)
    assert not area.by_documents
    assert compare(runs, PASS).goal.threshold is not None


def test_the_table_for_latex_names_the_base_of_each_difference_where_there_are_several():
    runs = [
        run_of([0.2, 0.3, end + seed / 50], seed, **{"loss.name": loss, "optimizer.lr": rate})
        for loss, rate, end in (
            *(("grpo", 0.1, 0.5), ("gspo", 0.1, 0.6)),
            *(("grpo", 0.2, 0.7), ("gspo", 0.2, 0.4)),
        )
        for seed in range(2)
    ]
    table = _latex(compare(runs, f"final:{PASS}", against="loss=grpo"), "").splitlines()
    rows = [[cell.strip() for cell in row.split("&")] for row in table if "&" in row]
    place = rows[0].index("against")
    assert len({len(row) for row in rows}) == 1
    by_words = {tuple(row[:2]): row[place : place + 2] for row in rows[1:]}
    assert by_words["gspo", "0.1"] == ["grpo, 0.1", "+0.100"]
    assert by_words["gspo", "0.2"] == ["grpo, 0.2", "$-$0.300"]
    one_base = [run for run in runs if run.config["optimizer.lr"] == 0.1]
    assert "against" not in _latex(compare(one_base, f"final:{PASS}", against="loss=grpo"), "")


def test_an_option_of_a_users_file_is_a_base_by_its_name_though_runs_differ_in_its_keys(tmp_path):
    """loss=clip_0.1 and loss=clip_0.3 are files with the same class, and another loss.low."""
    runs = []
    for low, rate, end in ((0.1, 1, 0.5), (0.3, 1, 0.6), (0.1, 2, 0.7), (0.3, 2, 0.4)):
        path = tmp_path / f"{low}-{rate}"
        with RunDirectory(path) as directory:
            directory.write_config({"seed": 0}, ["seed=0", f"loss=clip_{low}"])
        config = {"loss.name": "custom", "loss.options.low": low, "optimizer.lr": rate}
        runs.append(replace(run_of([0.2, 0.3, end], **config), path=path))
    compared = compare(runs, f"final:{PASS}", against="loss=clip_0.3")
    pairs = {
        (compared.groups[first].label, compared.groups[second].label)
        for first, second in compared.comparisons.primary or ()
    }
    assert pairs == {("0.3, 1", "0.1, 1"), ("0.3, 2", "0.1, 2")}
    labeled = compare(runs, f"final:{PASS}", labels=["loss=clip_0.3=wide"])
    labels = {group.label for group in labeled.groups}
    assert labels == {"wide, 1", "wide, 2", "0.1, 1", "0.1, 2"}
    with pytest.raises(ConfigError, match=r"^--against=loss=clip_0.2 needs .* --against=loss.low="):
        compare(runs, f"final:{PASS}", against="loss=clip_0.2")


def test_a_number_is_named_in_whichever_form_it_is_typed():
    runs = [
        run_of([0.2, 0.3, rate + seed / 50], seed, **{"optimizer.lr": rate})
        for rate in (0.001, 0.1, 1.0)
        for seed in range(2)
    ]
    for typed, base in (("1e-3", "0.001"), ("1.0", "1"), (".10", "0.1")):
        against = f"optimizer.lr={typed}"
        compared = compare(runs, f"final:{PASS}", against=against, labels=["optimizer.lr=1e0=one"])
        assert compared.groups[0].label == {"1": "one"}.get(base, base)
        assert {group.label for group in compared.groups} == {"0.001", "0.1", "one"}
    with pytest.raises(ConfigError, match=r"Use --against=optimizer\.lr=0\.001\.$"):
        compare(runs, f"final:{PASS}", against="1e-3")


def test_a_key_that_follows_the_axis_in_all_pairs_is_said_once():
    """As of sweep clip_range_optuna, whose upper bound is the lower one."""
    runs = [
        run_of([0.2, 0.3, bound + seed / 50], seed, **both)
        for bound in (0.1, 0.2, 0.3, 0.4)
        for both in ({"loss.epsilon_low": bound, "loss.epsilon_high": bound},)
        for seed in range(3)
    ]
    page = " ".join(render_comparison(compare(runs, f"final:{PASS}")).split())
    assert page.count("The verdict") == 1
    assert (
        "every pair differs in more than loss.epsilon_low, in loss.epsilon_high: in each "
        "configuration one goes with the other. The verdicts are on all of this together."
    ) in page


def test_what_a_pair_differs_in_beside_the_named_key_is_said_wherever_the_pair_is_shown():
    """As of experiment=grpo,dr_grpo,gspo_paper: of the last the loss and the KL penalty differ."""
    grpo = {"loss.name": "grpo", "loss.epsilon_low": 0.2, "aggregation.mode": "sample_mean"}
    k3 = {"kl.kind": "k3", "kl.coefficient": 0.04}
    none = {"kl.kind": "none", "kl.coefficient": None}
    runs = [
        run_of([0.2, 0.3, end + seed / 50], seed, **config)
        for end, config in (
            (0.5, {**grpo, **k3}),
            (0.4, {**grpo, **none, "aggregation.mode": "constant"}),
            (0.1, {**grpo, **none, "loss.name": "gspo", "loss.epsilon_low": 3e-4}),
        )
        for seed in range(3)
    ]
    compared = compare(runs, f"final:{PASS}", against="loss=grpo")
    page = " ".join(render_comparison(compared).split())
    assert (
        "which differ in loss, aggregation (and so in loss.epsilon_low), and together with these "
        "in kl, kl.coefficient"
    ) in page
    said = (
        "gspo, sample_mean against grpo, sample_mean: they differ in more than loss, in kl (none, "
        "not k3), kl.coefficient (null, not 0.04). The verdict is on all of this together."
    )
    assert said in page
    assert f"% {said}" in _latex(compared, "")
    assert said in " ".join(html_parts(compared)[1])
    of_pair = {
        (pair["first"], pair["second"]): pair["beside"]
        for pair in json.loads(as_json(compared))["pairs"]
    }
    expected = {"kl": ["k3", "none"], "kl.coefficient": ["0.04", "null"]}
    assert of_pair["grpo, sample_mean", "gspo, sample_mean"] == expected
    verdicts = {row.group.label: row.verdict for row in configurations(compared)}
    assert verdicts["grpo, sample_mean"] == "base"
    assert verdicts["grpo, constant"] == "not compared"  # nothing differs from it in loss alone
    # What an option of the named key brings with it is no further difference.
    alike = [run for run in runs if run.config["kl.kind"] == "none"]
    for run in alike:
        run.config["aggregation.mode"] = "constant"
    assert "more than" not in render_comparison(compare(alike, f"final:{PASS}"))


@pytest.mark.parametrize(("count", "taken"), [(3, 1), (8, 2), (9, 3), (11, 3), (60, 3)])
def test_final_is_the_mean_of_at_most_three_last_evaluations(count, taken):
    values = [n**2 / 4000 for n in range(count)]
    (group,) = compare([run_of(values)], f"final:{PASS}").groups
    assert group.final[0] == pytest.approx(np.mean(values[-taken:]))


def test_planned_pairs_are_with_the_base_that_differs_in_nothing_else():
    runs = [
        run
        for lag in (0, 8)
        for run in runs_of_losses(
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
    assert compared.comparisons.num_adjusted == 4
    assert all(pair.difference > 0 for pair in compared.comparisons if not pair.exploratory)


def test_a_base_with_nothing_to_compare_is_refused_with_one_that_has_something():
    """The first base has another metric, and the others differ from both in two keys."""
    runs = [
        *runs_of_losses({"grpo": [0.5, 0.6]}, **{"rollout.lag": 0}),
        *runs_of_losses({"gspo": [0.5, 0.7]}, **{"rollout.lag": 8}),
    ]
    for run in runs[:2]:
        run.columns[PASS] = np.full(3, np.nan)
    with pytest.raises(ConfigError, match=rf"a run that counts for {PASS}") as error:
        compare(runs, f"final:{PASS}", against="loss=grpo")
    assert f"(got loss=grpo, of which a run has no {PASS})" in str(error.value)
    (use,) = re.findall(r"Use --against=(\S*)\.$", str(error.value))
    assert compare(runs, f"final:{PASS}", against=use).groups[0].label == "gspo"
    runs = [
        *runs_of_losses({"grpo": [0.5, 0.6]}, **{"rollout.lag": 0}),
        *runs_of_losses({"grpo": [0.5, 0.6]}, **{"rollout.lag": 4}),
        *runs_of_losses({"gspo": [0.5, 0.7]}, **{"rollout.lag": 8}),
    ]
    with pytest.raises(ConfigError, match="There would be nothing to compare") as error:
        compare(runs, f"final:{PASS}", against="loss=grpo")
    (use,) = re.findall(r"Use --against=(\S*) for one base", str(error.value))
    assert compare(runs, f"final:{PASS}", against=use).comparisons.primary == {(0, 1), (0, 2)}


def test_the_base_is_the_first_of_the_sweep_s_values_where_none_is_typed(tmp_path):
    """The sweep's jobs begin with gspo at a lag of 8, which is neither the best nor the first by
    name."""
    jobs = []
    for loss in ("gspo", "cispo", "grpo"):
        for lag in (8, 0):
            for seed in range(2):
                run = run_of([0.0, 0.1, 0.2 + seed / 100], seed)
                run.config |= {"loss.name": loss, "rollout.lag": lag}
                run.path = tmp_path / f"{loss}-{lag}-{seed}"
                jobs.append(run)
    rows = [{"directory": run.path.name, "status": "done", "reason": None} for run in jobs]
    (tmp_path / "sweep.json").write_text(
        json.dumps({"name": "s", "command": [], "jobs": [row | {"name": "x"} for row in rows]})
    )

    def bases(against: str) -> list[str]:
        runs = sorted(jobs, key=lambda run: str(run.path))
        compared = compare(runs, f"final:{PASS}", against=against)
        places = sorted({first for first, _ in compared.comparisons.primary})
        return [compared.groups[place].label for place in places]

    assert bases("") == ["gspo, 8"]
    assert sorted(bases("loss")) == ["gspo, 0", "gspo, 8"]
    assert sorted(bases("rollout.lag")) == ["cispo, 8", "grpo, 8", "gspo, 8"]
    assert bases("rollout.lag=0,loss") == ["gspo, 0"]


def test_arms_that_differ_in_several_keys_are_compared_with_the_only_one_that_has_the_value():
    """No other arm has a lag of 0."""
    runs = [
        *runs_of_losses({"grpo": [0.5, 0.6, 0.7]}, **{"rollout.lag": 0}),
        *runs_of_losses({"gspo": [0.5, 0.7, 0.8]}, **{"rollout.lag": 8}),
        *runs_of_losses({"gspo": [0.9, 0.9, 0.8]}, **{"rollout.lag": 64}),
    ]
    compared = compare(runs, f"final:{PASS}", against="loss=grpo")
    assert compared.groups[0].label == "grpo, 0"
    assert compared.comparisons.primary == {(0, 1), (0, 2)}


def test_a_configuration_at_its_best_rate_is_compared_with_the_base_at_the_base_s_best():
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


ENDS = {
    ("a", "grpo"): [0.3, 0.34],
    ("a", "gspo"): [0.31, 0.35],
    ("b", "grpo"): [0.7, 0.72],
    ("b", "gspo"): [0.72, 0.74],
}
"""The final values of two seeds for each checkpoint and loss. The checkpoints differ by 0.4, the
losses by 0.01, 0.01, 0.02 and 0.02 within a block, which is a checkpoint with a seed."""


@pytest.fixture
def blocks() -> list[Run]:
    """Return the runs of ENDS, the last two of gspo from checkpoint b at the end."""
    return [
        run_of([0.0, 0.1, end], seed, **{"loss.name": loss, "model.path": path})
        for (path, loss), values in ENDS.items()
        for seed, end in enumerate(values)
    ]


def test_runs_are_paired_within_blocks_of_checkpoint_and_seed(blocks):
    compared = compare(
        blocks, f"final:{PASS}", over="model.path", against="loss=grpo", margin="0.03"
    )
    assert compared.keys == ["loss"]
    assert [group.label for group in compared.groups] == ["grpo", "gspo"]
    assert [len(group.counted) for group in compared.groups] == [4, 4]
    (pair,) = compared.comparisons
    assert (pair.paired, pair.counts, pair.difference) == (True, (4, 4), pytest.approx(0.015))
    # t = 0.015 / (0.00577 / 2) = 5.196 with 3 degrees of freedom
    assert pair.p == pytest.approx(0.0138, abs=1e-4)
    assert pair.improvement == pytest.approx((3 + 3.5) / 8)  # of 4 pairs of each checkpoint


def test_only_blocks_that_both_configurations_have_are_paired(blocks):
    blocks.pop()
    (pair,) = compare(blocks, f"final:{PASS}", over="model.path").comparisons
    assert (pair.paired, pair.counts, pair.difference) == (True, (3, 3), pytest.approx(0.04 / 3))
    # t = 0.01333 / (0.00577 / 3**0.5) = 4 with 2 degrees of freedom
    assert pair.p == pytest.approx(0.0572, abs=1e-4)


def test_every_number_of_a_row_is_of_the_pairs_that_it_compares(blocks, tmp_path):
    """Three runs of checkpoint a with grpo have no pair; their values would turn the sign of the
    difference of the means."""
    lone = (0.9, 0.8, 0.85)
    config = {"loss.name": "grpo", "model.path": "a"}
    blocks += [run_of([0.0, 0.1, end], seed, **config) for seed, end in enumerate(lone, 2)]
    for run in blocks:
        run.path = f"/{run.config['model.path']}-{run.name}"
    compared = compare(blocks, f"final:{PASS}", over="model.path", against="loss=grpo")
    grpo = [0.3, 0.34, 0.7, 0.72]
    gspo = [0.31, 0.35, 0.72, 0.74]
    p = scipy.stats.ttest_rel(gspo, grpo).pvalue
    base, row = configurations(compared)
    assert (base.mean, base.std) == pytest.approx((np.mean(grpo), np.std(grpo, ddof=1)))
    assert (row.mean, row.pair.difference, row.pair.p) == pytest.approx(
        (np.mean(gspo), np.mean(gspo) - np.mean(grpo), p)
    )
    assert row.pair.counts == (4, 4)
    assert row.pair.means == pytest.approx((np.mean(grpo), np.mean(gspo)))
    noise = noise_of(compared)
    assert noise.paired_spread == pytest.approx(np.std(np.subtract(gspo, grpo), ddof=1))
    assert noise.spread == pytest.approx(np.sqrt((2 * 0.04**2 + 2 * 0.02**2) / 2 / 4))

    text = " ".join(render_comparison(compared).split())
    assert "11 runs (8 counted) of 2 configurations" in text
    # IQM: of 0.34 and 0.7
    assert re.search(r"grpo 4 0\.520 [^g]* 0\.515 ± 0\.226 ", text)
    assert "against grpo (n = 4)" in text
    assert "gspo 4 +0.015 " in text
    assert "have the same model.path and seed" in text
    assert "grpo-4: not paired: gspo has no run with model.path=a and seed=4" in text
    assert f"t-test, paired by model.path and seed, level {LEVEL}" in text
    latex = _latex(compared, "pgtk compare")
    assert "% 3 runs excluded from averages:\n% grpo-2: not paired: gspo has no run" in latex
    assert r"grpo & 4 & 0.515 & -- & -- & -- & base \\" in latex
    assert r"gspo & 4 & 0.530 & +0.015 & [+0.010, +0.020] & 0.014 & better \\" in latex
    table = Comparison(compared).table.set_index("label")
    assert table.loc["gspo", ["n", "mean", "against_mean", "difference"]].tolist() == (
        pytest.approx([4, 0.53, 0.515, 0.015])
    )
    of_json = json.loads(as_json(compared))
    assert of_json["configurations"][0]["of_runs"] == pytest.approx(grpo)
    assert [excluded["run"] for excluded in of_json["excluded"]] == [
        f"/a-grpo-{n}" for n in (2, 3, 4)
    ]
    page = "".join(html_parts(compared)[1])
    assert "<td>gspo</td><td>4</td><td>+0.015</td>" in page
    assert "grpo-4: not paired" in page


def test_of_several_pairs_with_a_base_each_says_which_of_its_runs_it_is_of(blocks):
    """cispo has runs of checkpoint b alone."""
    more = {"loss.name": "cispo", "model.path": "b"}
    blocks += [run_of([0.0, 0.1, end], seed, **more) for seed, end in enumerate((0.73, 0.69))]
    for against in (None, "", "loss=grpo"):
        compared = compare(blocks, f"final:{PASS}", over="model.path", against=against)
        rows = {row.group.label: row for row in configurations(compared)}
        assert len(rows["grpo"].group.counted) == 4
        cispo = rows["cispo"]
        assert (cispo.mean, *cispo.pair.means) == pytest.approx((0.71, 0.71, 0.71))
        assert cispo.pair.difference == pytest.approx(0.0, abs=1e-12)
        assert compared.left_out == []
        assert compared.axis == ["loss"]
        expected = (
            "cispo against grpo: grpo has 4 runs, and the difference is of the 2 pairs with the "
            "same model.path and seed, whose means are 0.710 of grpo and 0.710 of cispo."
        )
        assert expected in " ".join(render_comparison(compared).split())
        assert expected in _latex(compared, "pgtk compare")
        assert "gspo against grpo: " not in render_comparison(compared)
    cispo_pair = next(pair for pair in compared.comparisons if pair.counts == (2, 2))
    told = of_shared_runs(compared, [cispo_pair] * 23)
    assert told[:20] == [expected] * 20
    assert told[20:] == ["3 further pairs: of fewer runs than a side has, as column n says."]
    planned = compare(blocks, f"final:{PASS}", over="model.path", against="loss=grpo")
    changes = {"gspo": [0.01, 0.01, 0.02, 0.02], "cispo": [0.03, -0.03]}
    pooled = sum(np.var(values) * len(values) for values in changes.values()) / (3 + 1)
    assert noise_of(planned).paired_spread == pytest.approx(np.sqrt(pooled))


def test_a_row_is_of_the_runs_paired_with_its_base_though_another_pair_has_more(blocks):
    """grpo has runs of checkpoint a alone, and cispo of b: gspo has both."""
    for run in blocks:
        if run.config["loss.name"] == "grpo" and run.config["model.path"] == "b":
            run.config["loss.name"] = "cispo"
    compared = compare(blocks, f"final:{PASS}", over="model.path")
    rows = {row.group.label: row for row in configurations(compared)}
    assert [len(group.counted) for group in compared.groups if group.label == "gspo"] == [4]
    gspo = rows["gspo"]
    assert [run.config["model.path"] for run in gspo.group.counted] == ["a", "a"]
    assert (gspo.mean, gspo.pair.difference) == pytest.approx((0.33, 0.33 - 0.32))
    assert gspo.interval == pytest.approx((0.31, 0.35))
    table = _latex(compared, "pgtk compare")
    assert r"gspo & 2 & 0.330 & +0.010 & " in table
    assert "gspo against grpo: gspo has 4 runs, and the difference is of the 2 pairs" in table
    # cispo has no block in common with the base, and Welch's test has all of its runs.
    assert (rows["cispo"].mean, rows["cispo"].pair.paired) == (pytest.approx(0.71), False)


def test_best_of_says_how_many_runs_each_value_has_and_where_they_are_others(blocks):
    """Of grpo at rate 2 there is one run, and its checkpoint is a. The rest is at rate 1."""
    for run in blocks:
        run.config["optimizer.lr"] = 1
    tried = {"loss.name": "grpo", "model.path": "a", "optimizer.lr": 2}
    runs = [*blocks[:-1], run_of([0.0, 0.1, 0.4], 0, **tried)]
    compared = compare(runs, f"final:{PASS}", "optimizer.lr", over="model.path")
    assert tried_rows(compared) == [
        ["loss", "1", "2"],
        ["grpo", "0.515 (4)", "0.400 (1)"],
        ["gspo", "0.460 (3)", "-"],
    ]
    base, row = configurations(compared)
    assert (base.mean, row.mean) == pytest.approx(((0.3 + 0.34 + 0.7) / 3, 0.46))
    assert compared.notes[1] == (
        "grpo, 1: the model.path and seeds are not the same at each optimizer.lr (4 with 1, 1 with "
        "2), so its choice compares means of different ones"
    )
    assert not any(note.startswith("gspo, 1: the model.path") for note in compared.notes)


def test_the_question_names_the_test_of_the_pairs_that_are_shown():
    """Seeds of gspo are those of grpo, cispo has one more."""
    ends = {"grpo": [0.4, 0.5, 0.6], "gspo": [0.5, 0.55, 0.7], "cispo": [0.1, 0.2, 0.3, 0.5]}
    runs = runs_of_losses(ends)
    for count, expected in (
        (6, "t-test, paired by seed, two-sided:"),
        (10, "t-test, paired by seed where both sides have the same, else Welch's, two-sided, p"),
    ):
        compared = compare(runs[:count], f"final:{PASS}")
        assert f"Final {PASS}, {expected}" in " ".join(render_comparison(compared).split())
        assert f"Final {PASS}, {expected}" in _latex(compared, "")
    without_gspo = compare([*runs[:3], *runs[6:]], f"final:{PASS}")
    assert "t-test, Welch's, two-sided:" in _latex(without_gspo, "")


@pytest.mark.parametrize(
    ("values", "words", "folder"),
    [
        (["/models/long/a", "/models/long/b"], ["a", "b"], "/models/long/"),
        (["/models/x/a", "/models/y/a"], ["x/a", "y/a"], "/models/"),
        (["/models/a", "/models/a/b"], ["/models/a", "/models/a/b"], None),
        (["/models/a", "/data/a"], ["/models/a", "/data/a"], None),
        (["org/a", "org/b"], ["org/a", "org/b"], None),
        (["/models/a", "org/b"], ["/models/a", "org/b"], None),
    ],
)
def test_paths_are_named_by_what_they_differ_in(values, words, folder):
    runs = [
        run_of([0.2, 0.3, 0.5 + seed / 50], seed, **{"model.path": path})
        for path in values
        for seed in range(2)
    ]
    compared = compare(runs, f"final:{PASS}")
    assert sorted(group.label for group in compared.groups) == sorted(words)
    below = f" (below {folder})" if folder else ""
    assert f"which differ in model.path{below}" in render_comparison(compared)
    table = Comparison(compared).table
    assert sorted(table["model.path"]) == sorted(values)
    named = compare(runs, f"final:{PASS}", labels=[f"model.path={values[0]}=ours"])
    assert sorted(group.label for group in named.groups) == sorted(["ours", words[1]])
    with pytest.raises(ConfigError, match="needs a name that no other value has"):
        compare(runs, f"final:{PASS}", labels=[f"model.path={values[0]}={words[1]}"])
    against = compare(runs, f"final:{PASS}", against=f"model.path={values[1]}")
    assert against.groups[0].label == words[1]


@pytest.mark.parametrize(("rise", "is_noted"), [(0.1, True), (0.18, True), (0.25, False)])
def test_a_threshold_within_the_noise_of_seeds_is_noted(rise, is_noted):
    """Runs start at 0.2 and end at 0.2 + rise, up to 0.1 lower or higher. The threshold is nine
    tenths of the way to the highest of the lowest ends."""
    ends = {"grpo": [-0.05, 0.0, 0.05], "gspo": [-0.1, 0.0, 0.1]}
    runs = [
        run_of([0.2] * 2 + [0.2 + rise + end] * 8, seed, **{"loss.name": loss})
        for loss, values in ends.items()
        for seed, end in enumerate(values)
    ]
    above = 0.9 * (rise - 0.05)
    spread = np.sqrt((0.05**2 + 0.1**2) / 2)  # 0.079, so the edge is a rise of 0.226
    notes = " ".join(compare(runs, PASS).notes)
    expected = (
        f"the threshold {0.2 + above:g} is {above:.2g} above the mean start, less than 2 standard "
        f"deviations of a run's end over seeds ({spread:.2g})"
    )
    assert (expected in notes) is is_noted
    assert ("above the mean start" in notes) is is_noted


def test_a_margin_in_percent_is_of_the_mean_of_the_paired_runs_of_the_base():
    """The base has a mean of 1 in the pairs, and another run of 100, without a pair."""
    base = [0.9, 1.1, 1.0]
    other = [0.91, 1.13, 1.02]
    first = {("a", seed): value for seed, value in enumerate([*base, 100.0])}
    second = {("a", seed): value for seed, value in enumerate(other)}
    (pair,) = Comparisons([Sample(first), Sample(second)], "3%")
    changes = np.subtract(other, base)
    low = scipy.stats.ttest_1samp(changes, -0.03, alternative="greater").pvalue
    high = scipy.stats.ttest_1samp(changes, 0.03, alternative="less").pvalue
    assert pair.equal_p == pytest.approx(max(low, high))
    assert pair.improvement == pytest.approx(6 / 9)


def test_a_single_common_block_is_not_tested(blocks):
    del blocks[-2:], blocks[1]  # (a, 1) of grpo and checkpoint b of gspo, so that (a, 0) is left
    (pair,) = compare(blocks, f"final:{PASS}", over="model.path").comparisons
    assert (pair.counts, pair.p) == ((1, 1), None)


def test_samples_without_a_common_block_are_not_paired():
    (pair,) = Comparisons(
        [Sample({("a", 0): 0.3, ("a", 1): 0.4}), Sample({("b", 0): 0.3, ("b", 1): 0.5})]
    )
    expected = scipy.stats.ttest_ind([0.3, 0.4], [0.3, 0.5], equal_var=False).pvalue
    assert (pair.paired, pair.counts, pair.p) == (False, (2, 2), pytest.approx(expected))


def test_blocks_of_other_prompts_are_not_paired(blocks):
    """The values of which p is 0.014 when paired. A key of the task that follows from the loss
    makes the prompts different."""
    for run in blocks:
        digits = 6 if run.config["loss.name"] == "grpo" else 4
        run.config |= {"task.name": "reverse", "task.num_digits": digits}
        run.config["evaluation.sets.held_out.num_digits"] = 5
    (pair,) = compare(blocks, f"final:{PASS}", over="model.path").comparisons
    grpo = [0.3, 0.34, 0.7, 0.72]
    gspo = [0.31, 0.35, 0.72, 0.74]
    expected = scipy.stats.ttest_ind(grpo, gspo, equal_var=False).pvalue
    assert (pair.paired, pair.counts) == (False, (4, 4))
    assert pair.p == pytest.approx(expected)
    assert expected == pytest.approx(0.93, abs=0.01)


@pytest.mark.parametrize("base", [-2.0, 2.0])
def test_a_margin_in_percent_is_of_the_absolute_value_of_the_mean(base):
    """Rewards may be penalties: 10 % of -2 is 0.2 on either side, as of 2."""
    assert margin_of("10%", base) == pytest.approx(0.2)
    assert margin_of("0.1", base) == 0.1
    first = base + np.array([-0.04, 0.0, 0.01, 0.03])
    second = base + np.array([-0.02, 0.03, 0.01, 0.05])
    samples = [
        Sample({(seed,): float(value) for seed, value in enumerate(values)})
        for values in (first, second)
    ]
    (pair,) = Comparisons(samples, "10%")
    bound = 0.1 * abs(first.mean())
    lower = scipy.stats.ttest_rel(second + bound, first, alternative="greater").pvalue
    upper = scipy.stats.ttest_rel(second - bound, first, alternative="less").pvalue
    assert pair.equal_p == pytest.approx(max(lower, upper))
    assert pair.equal_p < 0.01


COLLAPSE = "NumericalError: 3 steps in a row"


def test_a_collapsed_run_is_extended_by_the_mean_over_its_last_tenth_of_steps():
    """Of its 40 steps the last four have a mean of 0.3. This value fills documents 400 to 800, as
    far as the other run went, and is its final one."""
    steps = np.arange(1.0, 81)
    runs = []
    for seed, count, state, reason in ((0, 80, "done", None), (1, 40, "failed", COLLAPSE)):
        values = np.linspace(0.2, 0.6, count)
        values[-4:] = [0.7, 0.1, 0.2, 0.2]
        columns = {"step": steps[:count], "documents_seen": 10 * steps[:count], "reward": values}
        config = {"seed": seed, "trainer.max_steps": 80}
        runs.append(Run("/", f"run-{seed}", state, reason, count, config, columns))
    collapsed = runs[1].columns["reward"].copy()
    (group,) = compare(runs, "area:reward").groups
    area = sum((a + b) / 2 * 10 for a, b in pairwise(collapsed)) + 0.3 * 400
    assert group.reached[1].mean == pytest.approx(area / 790)
    assert group.reached[1].final == pytest.approx(0.3)
    assert group.reached[0].final == pytest.approx(np.mean(runs[0].columns["reward"][-8:]))


def test_a_collapsed_run_is_extended_by_its_last_evaluation_and_neither_dropped_nor_a_limit():
    collapsed = run_of([0.2, 0.4, 0.1], 1, state="failed", reason=COLLAPSE, **{"loss.name": "a"})
    broken = run_of([0.2, 0.9], 2, state="failed", reason="OSError: no space", **{"loss.name": "a"})
    runs = [run_of([0.2, 0.4, 0.6, 0.6, 0.6], 0, **{"loss.name": "a"}), collapsed, broken]
    compared = compare(runs, f"area:{PASS}")
    assert compared.goal.span == (0, 40)
    assert [reached.mean for reached in compared.groups[0].reached] == pytest.approx(
        [0.5, (0.3 + 0.25 + 0.1 + 0.1) / 4]
    )
    assert compared.groups[0].reached[1].final == pytest.approx(0.1)
    assert "collapsed, and not dropped: a-1" in compared.notes[0]
    assert [run.name for run, _ in compared.left_out] == ["a-2"]
    by_threshold = compare(runs, reach=f"{PASS}=0.5")
    assert by_threshold.spent(by_threshold.groups[0], "documents_seen") == [20, 50]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write four seeds of four losses; grpo is the base."""
    return four_losses(tmp_path_factory.mktemp("study"))


def test_page_of_a_planned_comparison_has_tests_of_difference_and_of_equality(
    study, tmp_path, capsys
):
    options = [f"--metric=final:{PASS}", "--against=loss=grpo", "--margin=0.02"]
    table = tmp_path / "runs.csv"
    assert main(["compare", str(study), *options, "--runs-csv", str(table)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Final evaluation/held_out/pass@1, t-test, paired by seed, two-sided, and two one-sided "
        "ones for equality"
    ) in printed
    assert "within 0.02, p adjusted for 3 planned pairs (Holm):" in printed
    assert "gspo 4 +0.002 [+0.001, +0.003] 0.033 4 0.69 <0.001 paired equal within 0.02" in printed
    assert "cispo 4 +0.100 [+0.092, +0.107] <0.001 2 1.00 1.000 paired better" in printed
    assert "3 other pairs: exploratory, p not adjusted" in printed
    assert "equal: p of the test that the difference is within 0.02, of two one-sided" in printed
    assert "IQM: of the final values" in printed
    assert "(of 3 or fewer: none, it is their mean)" in printed
    with table.open() as rows:
        assert len(list(csv.DictReader(rows))) == 16
    assert main(["compare", str(study), "--margin=900"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "ones for equality within 900 documents, p adjusted" in printed
    assert " equal within 900 documents " not in printed  # of gspo a seed never reaches it
    assert "A mean with ≥ is never shown to be equal to another." in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--against", "loss=gpro"],
            "--against=loss=gpro needs what a configuration has: KEY=VALUE, or KEY alone for the "
            "value of the first. These are loss=cispo, loss=grpo, loss=gspo, loss=reinforce. Use "
            "--against=loss=grpo.",
        ),
        (["--against", "grpo"], "Use --against=loss=grpo."),
        (["--against", "lag=1"], "--against=lag=1 needs what a configuration has: KEY=VALUE"),
        (["--over", "model.path"], "--over=model.path needs a key that tells the runs apart."),
        (
            ["--over", "los"],
            "--over=los needs a key that tells the runs apart. These are loss. Use",
        ),
        (["--margin", "-1"], "--margin=-1 needs a number > 0, or one with %"),
        (["--margin", "nan%"], "--margin=nan% needs a number > 0"),
        (
            ["--margin", "0.02"],
            "--margin=0.02 needs a number of documents, at least 1, or a share of the base such as "
            f"3% (got 0.02). What is compared is: Documents to {PASS} 0.612. Use "
            f"--metric=final:{PASS} for a margin of {PASS}, or --margin=8.",
        ),
        (
            ["--margin=2", f"--metric=final:{PASS}"],
            f"--margin=2 needs a number below 1, since {PASS} is a share (got 2). Every difference "
            "would be equal within it. Use --margin=0.02.",
        ),
        (["--metric", "area:rewrd"], "Use --metric=area:reward."),
        (["--over=seed"], "Runs are paired by their seed anyway. Use no --over."),
        (["--over=seed,loss"], "Runs are paired by their seed anyway. Use --over=loss."),
        (
            ["--metric", "final"],
            "--metric=final needs the name of a metric (got none). final says what of it is "
            "compared. Use --metric=final:reward.",
        ),
        (["--reach", "rewrd=0.5"], "Use --reach=reward=0.5."),
        (
            ["--reach", f"{PASS}=90"],
            f"--reach={PASS}=90 needs a number above 0 and at most 1 (got 90). {PASS} is a share. "
            f"Use --reach={PASS}=0.9.",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(study, capsys, arguments, expected):
    message = refusal(capsys, "compare", study, *arguments)
    assert expected in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--margin=x", "--reach=x", "--panels=no", "--csv=no_folder/a.csv"],
        ["--over=no", "--metric=no", "--best-of=no", "--against=loss=no", "--label=no=b=c"],
    ],
)
def test_wrong_flags_are_refused_together(study, capsys, flags):
    lines = refusal(capsys, "compare", study, *flags).splitlines()
    for flag in flags:
        option = flag.partition("=")[0]
        assert [line for line in lines if line.removeprefix("pgtk: error: ").startswith(option)]
    assert "--panels=no" not in flags or "--panels=no needs --figure or --html" in "\n".join(lines)


def test_html_report_has_the_exploratory_pairs(study, tmp_path):
    page = tmp_path / "page.html"
    options = [f"--metric=final:{PASS}", "--against=loss=grpo", f"--html={page}"]
    assert main(["compare", str(study), *options]) == 0
    assert page.read_text().count("exploratory: ") == 3


def test_documents_without_noise_are_answered_with_measures_that_have_some():
    """Both seeds of each loss come to 0.5 at the same evaluation."""
    curves = {"a": [0.2, 0.5, 0.5], "b": [0.2, 0.3, 0.5]}
    runs = [
        run_of([*curve, 0.5 + seed / 10], seed, **{"loss.name": loss})
        for loss, curve in curves.items()
        for seed in (0, 1)
    ]
    page = " ".join(render_comparison(compare(runs, reach=f"{PASS}=0.5")).split())
    assert f"--metric=area:{PASS} or --metric=final:{PASS} tells seeds apart." in page
    # The whole name would be broken over lines.
    assert figure_of(compare(runs, PASS)).axes[0].get_ylabel() == "held_out pass@1"
    assert "tells seeds apart" not in render_comparison(compare(runs, f"final:{PASS}"))
