"""How far equal runs end apart and the seeds that find a difference, against simulated runs."""

import json
import shutil

import numpy as np
import pytest
from builders.refusals import refusal
from scipy import stats

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.seed_noise import noise_of, seed_noise
from pgtoolkit.comparison.statistics import LEVEL, Sample
from pgtoolkit.config.names import plain_config
from pgtoolkit.launch.check import check_sweep
from pgtoolkit.launch.seeds_to_find import lines_on_seeds
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs
from pgtoolkit.system.report import shell_path

SPREAD = 0.03
TRIALS = 2000


def samples(values: np.ndarray, prompts: object = None) -> list[Sample]:
    """values: (configurations, seeds)."""
    return [Sample({(seed,): v for seed, v in enumerate(row)}, prompts) for row in values]


def test_two_further_runs_end_less_than_the_band_apart_in_95_of_100_cases():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(TRIALS):
        means = np.array([[0.2], [0.5], [0.9]])
        noise = seed_noise(samples(means + SPREAD * random.standard_normal((3, 3))))
        first, second = SPREAD * random.standard_normal(2)
        held += abs(first - second) < noise.band
    assert held / TRIALS == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_that_many_seeds_find_the_difference_with_a_probability_of_80(shared):
    """shared: the part of the variance that both runs of a seed have in common."""
    random = np.random.default_rng(1)

    def runs(*shape):
        of_seed = random.standard_normal((*shape[:-2], 1, shape[-1]))
        of_run = random.standard_normal(shape)
        return SPREAD * (np.sqrt(shared) * of_seed + np.sqrt(1 - shared) * of_run)

    noise = seed_noise(samples(runs(40, 5000), "same"))
    assert noise.spread == pytest.approx(SPREAD, rel=0.05)
    assert noise.paired_spread == pytest.approx(SPREAD * np.sqrt(2 * (1 - shared)), rel=0.05)
    count = noise.seeds(0.02)
    x, y = np.moveaxis(runs(TRIALS, 2, count), 1, 0)
    found = stats.ttest_rel(x, y + 0.02, axis=1).pvalue < LEVEL
    assert 0.78 < found.mean() < 0.87
    fewer = stats.ttest_rel(x[:, 1:], y[:, 1:] + 0.02, axis=1).pvalue < LEVEL
    assert fewer.mean() < 0.82


def test_the_spread_is_pooled_and_pairs_need_the_same_seeds_and_prompts():
    noise = seed_noise(
        [*samples(np.array([[1.0, 3.0]])), Sample({(5,): 0.0, (6,): 4.0, (7,): 8.0})]
    )
    assert noise.spread**2 == pytest.approx((1 * 2 + 2 * 16) / 3)
    assert noise.freedom == 3
    assert noise.range == pytest.approx((np.sqrt(2), 4))
    assert noise.paired_spread is None
    one_each, other = samples(np.array([[1.0, 2.0], [1.5, 2.1]]))
    assert seed_noise([one_each, other]).paired_spread == pytest.approx(
        np.std([0.5, 0.1], ddof=1), rel=1e-12
    )
    assert seed_noise([one_each, Sample(other.values, "others")]).paired_spread is None
    assert seed_noise([one_each, one_each]).paired_spread is None
    assert seed_noise(samples(np.array([[1.0], [2.0]]))) is None
    assert seed_noise(samples(np.array([[0.11830357142857148, 0.1183035714285715]]))) is None
    # A configuration in two strata, as of two checkpoints: their difference is no noise.
    strata = Sample({("a", 0): 1.0, ("a", 1): 3.0, ("b", 0): 11.0, ("b", 1): 13.0})
    assert seed_noise([strata]).spread == pytest.approx(np.sqrt(2))


def write_run(folder, loss, seed, exact_match, rate=1e-3):
    config = {"seed": seed, "loss": {"name": loss}, "trainer": {"max_steps": 4}}
    config["optimizer"] = {"learning_rate": rate}
    write(folder, config, exact_match)


def write_jobs(sweep, finals):
    """Write the runs of a sweep's jobs. finals: loss -> exact_match by seed."""
    for job in sweep.jobs.values():
        value = finals[job.config.loss.name][job.config.seed]
        write(sweep.folder / job.directory, plain_config(job.named_config), value)
    sweep.save()


def write(folder, config, exact_match):
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        for step in range(1, 5):
            row = {"exact_match": exact_match, "documents_seen": 8 * step, "num_tokens": 5}
            run.append_metrics(step, row)
        run.set_status("done", 4)


def test_compare_says_the_noise_and_the_seeds_for_three_differences(tmp_path, capsys):
    for seed, (grpo, gspo) in enumerate([(0.50, 0.61), (0.56, 0.66), (0.53, 0.65)]):
        write_run(tmp_path / f"a{seed}", "grpo", seed, grpo)
        write_run(tmp_path / f"b{seed}", "gspo", seed, gspo)
    assert main(["compare", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    variance = (0.03**2 + np.var([0.61, 0.66, 0.65], ddof=1)) / 2
    band = stats.t.isf(0.025, 4) * np.sqrt(2 * variance)
    assert (
        f"Two runs that differ in the seed alone end less than {band:.2g} apart in 95 of 100 cases "
        f"(final exact_match; their spread is {np.sqrt(variance):.2g}, pooled over configurations, "
        "which have from 0.026 to 0.03)."
    ) in shown
    changes = np.array([0.11, 0.10, 0.12])
    assert main(["compare", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["seed_noise"]
    assert found["paired_spread"] == pytest.approx(changes.std(ddof=1))
    for size, count in found["seeds_to_find"].items():
        shift = float(size) / changes.std(ddof=1)
        powers = [
            stats.nct.sf(stats.t.isf(0.025, n - 1), n - 1, shift * np.sqrt(n))
            for n in (count - 1, count)
        ]
        assert powers[-1] >= 0.8
        assert count == 2 or powers[0] < 0.8
    seeds = found["seeds_to_find"]
    assert (
        f"each configuration needs {seeds['0.01']} seeds for 0.01, {seeds['0.02']} seeds for 0.02, "
        f"{seeds['0.05']} seeds for 0.05 (t-test, paired by seed, level 0.05, power 0.8"
    ) in shown


def test_two_versions_of_code_with_the_same_numbers_count_once_in_the_noise(tmp_path):
    for seed, (grpo, gspo) in enumerate([(0.50, 0.61), (0.56, 0.71)]):
        write_run(tmp_path / f"a{seed}", "grpo", seed, grpo)
        write_run(tmp_path / f"b{seed}", "gspo", seed, gspo)
        provenance = {"step": 0, "modules": {"mine": "a" * 8}}
        (tmp_path / f"a{seed}" / "provenance.json").write_text(json.dumps(provenance))
    for against in (None, "loss=gspo"):
        expected = noise_of(compare(find_runs([str(tmp_path)]), "final:exact_match"))
        for seed, grpo in enumerate((0.50, 0.56)):
            write_run(tmp_path / f"c{seed}", "grpo", seed, grpo)
            provenance = {"step": 0, "modules": {"mine": "b" * 8}}
            (tmp_path / f"c{seed}" / "provenance.json").write_text(json.dumps(provenance))
        compared = compare(find_runs([str(tmp_path)]), "final:exact_match", against=against)
        assert len(compared.groups) == 3
        noise = noise_of(compared)
        assert (noise.freedom, expected.freedom) == (2, 2)
        assert noise.spread == pytest.approx(expected.spread, rel=1e-9)
        assert noise.paired_spread == pytest.approx(expected.paired_spread, rel=1e-9)
        for seed in range(2):
            shutil.rmtree(tmp_path / f"c{seed}")


def test_with_over_the_noise_is_that_of_seeds_at_each_value_of_the_key(tmp_path, capsys):
    finals = {
        ("grpo", 1e-3): [0.50, 0.56],
        ("grpo", 1e-2): [0.80, 0.82],
        ("gspo", 1e-3): [0.61, 0.66],
        ("gspo", 1e-2): [0.85, 0.89],
    }
    for (loss, rate), values in finals.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / f"{loss}-{rate}-{seed}", loss, seed, value, rate)
    assert main(["compare", str(tmp_path), "--over", "optimizer.learning_rate"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    spreads = [np.std(values, ddof=1) for values in finals.values()]
    spread = np.sqrt(np.mean(np.square(spreads)))
    band = stats.t.isf(0.025, 4) * np.sqrt(2) * spread
    assert (
        f"Two runs that differ in the seed alone end less than {band:.2g} apart in 95 of 100 cases "
        f"(final exact_match; their spread is {spread:.2g}, pooled over configurations and "
        f"optimizer.learning_rate, which have from {min(spreads):.2g} to {max(spreads):.2g})."
    ) in shown
    changes = np.subtract(
        [*finals["gspo", 1e-3], *finals["gspo", 1e-2]],
        [*finals["grpo", 1e-3], *finals["grpo", 1e-2]],
    )
    counts = range(2, 100)
    powers = [
        stats.nct.sf(stats.t.isf(0.025, n - 1), n - 1, 0.05 / changes.std(ddof=1) * np.sqrt(n))
        for n in counts
    ]
    needed = next(n for n, power in zip(counts, powers, strict=True) if power >= 0.8)
    assert "loss runs mean final" in shown
    assert f"{needed} runs for 0.05 (t-test, paired by optimizer.learning_rate and seed" in shown


def test_check_finds_seeds_from_the_runs_of_a_sweep_or_from_the_study(tmp_path, capsys):
    sweep = ["-m", "loss=grpo,gspo", "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep"]
    assert main(["check", *sweep, "--find", "0.02"]) == 0
    before = " ".join(capsys.readouterr().out.split())
    assert "each configuration needs 9 or 50 seeds" in before  # 0.014 and 0.035, Welch's test
    assert "this sweep has 2 seeds of each" in before
    anew = "check anew once two seeds of a configuration have finished"
    assert anew in before
    write_jobs(check_sweep(sweep[1:]), {"grpo": (0.5, 0.5), "gspo": (0.5, 0.5)})
    assert main(["check", *sweep, "--find", "0.02"]) == 0
    alike = " ".join(capsys.readouterr().out.split())
    assert "as large: those in " in alike
    assert "/sweep end alike with every seed, with one exact_match." in alike
    assert anew not in alike
    shutil.rmtree(tmp_path / "sweep")
    write_jobs(check_sweep(sweep[1:]), {"grpo": (0.50, 0.56), "gspo": (0.61, 0.66)})
    assert main(["check", *sweep, "--find=0.02", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["seeds"]
    assert "from 4 finished runs in" in lines[1]
    assert "final exact_match spreads by 0.039 over seeds" in lines[1]
    assert main(["compare", f"{tmp_path}/sweep", "--json"]) == 0
    seeds = json.loads(capsys.readouterr().out)["seed_noise"]["seeds_to_find"]["0.02"]
    assert f"each configuration needs {seeds} seeds for 0.02" in lines[0]


def test_check_counts_seeds_from_finished_runs_of_its_configurations_alone(tmp_path):
    """Three seeds of each loss are trained. Pairs of losses have the seeds that their differences
    need, in the folder of the runs and beside it, and with other seeds than have been trained."""
    finals = {"grpo": (0.50, 0.56, 0.53), "gspo": (0.61, 0.66, 0.65), "sapo": (0.4, 0.6, 0.41)}
    folder = tmp_path / "three"
    losses = f"loss={','.join(finals)}"
    write_jobs(check_sweep([losses, "seed=0,1,2", f"hydra.sweep.dir={folder}"]), finals)
    found = {}
    for pair, seeds, name in [
        (("grpo", "gspo"), "seed=0,1,2", "three"),
        (("grpo", "gspo"), "seed=5,6", "three"),
        (("grpo", "sapo"), "seed=0,1,2,3", "beside"),
    ]:
        words = [f"loss={','.join(pair)}", seeds, f"hydra.sweep.dir={tmp_path / name}"]
        lines = lines_on_seeds(check_sweep(words), 0.05)
        change = np.std(np.subtract(finals[pair[1]], finals[pair[0]]), ddof=1)
        counts = range(2, 100)
        powers = [
            stats.nct.sf(stats.t.isf(0.025, n - 1), n - 1, 0.05 / change * np.sqrt(n))
            for n in counts
        ]
        needed = next(n for n, power in zip(counts, powers, strict=True) if power >= 0.8)
        found[pair] = needed
        spread = np.sqrt(np.mean([np.var(finals[loss], ddof=1) for loss in pair]))
        assert f"each configuration needs {needed} seeds for 0.05" in lines[0]
        assert lines[1] == (
            f"from 6 finished runs in {shell_path(folder)}: final exact_match spreads by "
            f"{spread:.2g} over seeds"
        )
        beside = f"hydra.sweep.dir={shell_path(folder)} trains beside these, and keeps what is done"
        assert (beside in lines) == (name == "beside")
    assert len({*found.values()}) == 2
    half = check_sweep(["loss=grpo,cispo", "seed=0,1", f"hydra.sweep.dir={folder}"])
    assert "from 3 finished runs of 1 of its 2 configurations" in lines_on_seeds(half, 0.05)[1]
    none = check_sweep(
        ["loss=grpo", "trainer.max_steps=7", "seed=0,1", f"hydra.sweep.dir={folder}"]
    )
    assert "of another model" in lines_on_seeds(none, 0.05)[1]


@pytest.mark.parametrize("size", ["x", "0", "-0.1", "inf", "nan"])
def test_a_difference_that_is_no_positive_number_is_refused(size, capsys):
    words = refusal(capsys, "check", "--find", size)
    assert f"--find {size} needs a number above 0" in words
