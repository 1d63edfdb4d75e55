"""`pgtk compare`: its groups and pages. What runs reach is in test_measures.py, the tests are in
test_statistics.py."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.comparison.charts import mean_curve, picture
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.text_report import short_count, tried_rows
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs
from pgtoolkit.runs.series import best, final
from pgtoolkit.tracking.progress import WIDTH

STEPS = 20


def save(
    folder,
    loss,
    seed,
    end,
    state="done",
    steps=STEPS,
    rise=STEPS - 2,
    reason=None,
    grad_norm=1.0,
    **more,
):
    """A run whose reward is 0 for `rise` steps, and after them `end`."""
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
def sweep(tmp_path):
    """From a start of 0 to 0.9, where every seed of gspo ends: 0.81 is to be reached, which
    2-grpo-2 never does."""
    ends = {"grpo": ((0.9, 12), (0.92, 14), (0.4, 16)), "gspo": ((0.9, 8), (0.94, 10), (0.98, 12))}
    number = 0
    for loss, values in ends.items():
        for seed, (end, rise) in enumerate(values):
            save(tmp_path / f"{number}-{loss}-{seed}", loss, seed, end, rise=rise)
            number += 1
    return tmp_path


def page(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_run_with_half_a_configuration_is_left_out(sweep, capsys):
    for number, (run, keys) in enumerate((("0-grpo-0", ("trainer",)), ("3-gspo-0", ("seed",)))):
        path = sweep / run / "config.yaml"
        config = OmegaConf.load(path)
        for key in keys:
            del config[key]
        OmegaConf.save(config, path)
        with RunDirectory(sweep / run) as opened:
            opened.set_status("failed" if number else "done", 20)
    said = " ".join(page(capsys, sweep).split())
    assert "0-grpo-0/config.yaml is damaged (it lacks trainer.max_steps)" in said
    assert "3-gspo-0/config.yaml is damaged (it lacks seed)" in said
    assert "0.960" in said  # of the two that are left


def test_counts_are_short():
    counts = (0.4, 12345.6, 99_999.4, 99_999.6, 999_600, -1.234e6, None, float("nan"))
    assert [*map(short_count, counts)] == [
        "0",
        "12,346",
        "99,999",
        "100k",
        "1M",
        "-1.23M",
        "-",
        "-",
    ]


def test_runs_that_differ_in_the_seed_are_one_group(sweep):
    compared = compare(find_runs([str(sweep)]), "reward")
    assert compared.keys == ["loss"]
    assert compared.following == ["loss.epsilon_low"]
    assert compared.common == {"trainer.max_steps": STEPS}
    assert [group.label for group in compared.groups] == ["gspo", "grpo"]
    gspo, grpo = compared.groups
    assert gspo.final == (pytest.approx(0.94), pytest.approx(0.04))
    assert grpo.final == (pytest.approx(0.74), pytest.approx(0.29461839725))
    # Seed by seed 72, 88, 104 against 104, 120 and 160, as far as the run was that did not come to
    # it: 32, 32 and 56.
    assert [compared.spent(group, "documents_seen") for group in compared.groups] == [
        [72, 88, 104],
        [104, 120, 160],
    ]
    (found,) = compared.comparisons
    assert (found.paired, found.difference) == (True, 40)
    assert found.p == pytest.approx(1 - 5 / 27**0.5)  # t = 40 / 8 = 5 with 2 degrees of freedom


def test_the_page_says_it_all(sweep, capsys):
    text = page(capsys, sweep)
    lines = text.splitlines()
    assert lines[0].startswith(
        "6 runs (6 counted) of 2 configurations, which differ in loss (and so in loss.epsilon_low)"
    )
    assert lines[2].startswith(
        "loss  reached  documents  tokens  seconds  mean           final          curve"
    )
    assert lines[3].startswith("gspo  3 of 3   88 ± 16    550     ")
    assert "  0.467 ± 0.079  0.940 ± 0.040  ▁" in lines[3]
    assert lines[4].startswith("grpo  2 of 3   ≥128       ≥800    ")
    words = " ".join(text.split())
    assert "reward is measured on the prompts of training" in words
    assert (
        "nine tenths of the way from 0, the mean start, to 0.9, as high as a configuration ends "
        "with"
    ) in words
    assert "counts as the search limit (160 documents, 1,000 tokens, " in words
    assert "Documents to reward 0.81, t-test, paired by seed, two-sided:" in words
    assert (
        "against gspo (n = 3) n difference interval p seeds better test verdict grpo 3 +40" in words
    )
    # 104 and 104 of nine pairs are equal: half of one
    assert "+40 [+32, +56] 0.038 4 0.06 paired worse" in words
    assert "with 3 it holds the true difference in about 75 of 100 cases" in words
    assert max(map(len, lines)) <= WIDTH


def test_one_seed_says_nothing(tmp_path, capsys):
    save(tmp_path / "a", "grpo", 0, 0.5)
    save(tmp_path / "b", "gspo", 0, 0.6)
    text = page(capsys, tmp_path / "a", tmp_path / "b")
    assert "gspo  1 of 1   152" in text
    assert "needs 2 seeds" in text
    assert "±  " not in text
    assert "interval:" not in text
    alone = page(capsys, tmp_path / "a")
    assert "Nothing to compare: one configuration has finished runs." in alone


def test_without_a_threshold_the_ends_are_compared(sweep, capsys):
    said = " ".join(page(capsys, sweep, "--metric=kl").split())
    assert "loss seeds mean final" in said
    assert "More than seed noise? Final kl, t-test, paired by seed" in said
    assert "No threshold" not in said
    save(sweep / "flat" / "0", "grpo", 0, 0.0)
    assert "No threshold: no configuration ends higher" in page(capsys, sweep / "flat")
    lines = page(capsys, sweep, "--reach=reward=0.93").splitlines()
    assert lines[3].startswith("gspo  2 of 3   ≥117")  # (160 + 88 + 104) / 3
    assert lines[4].startswith("grpo  0 of 3   ≥160")


def test_runs_that_do_not_count_are_named(sweep, capsys):
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
    assert float(rows["5-gspo-2"]["final_reward"]) == pytest.approx(0.98)
    assert (rows["5-gspo-2"]["loss"], rows["5-gspo-2"]["seed"], rows["5-gspo-2"]["counted"]) == (
        "gspo",
        "2",
        "yes",
    )
    assert float(rows["5-gspo-2"]["documents_to_reward_0.81"]) == 104
    assert float(rows["5-gspo-2"]["tokens_to_reward_0.81"]) == 13 * 50
    assert (rows["2-grpo-2"]["documents_to_reward_0.81"], rows["2-grpo-2"]["documents_seen"]) == (
        "",
        "160",
    )
    assert rows["21-killed"]["mean_reward"] == ""  # which has not come as far as the others
    assert (rows["21-killed"]["state"], rows["21-killed"]["counted"]) == ("killed", "no")
    assert rows["24-broken"]["state"] == "unreadable"


def test_different_code_and_length_are_noted(sweep, capsys):
    assert "Note" not in page(capsys, sweep)
    (sweep / "0-grpo-0" / "provenance.json").write_text('{"git": [{"commit": "a", "diff": ""}]}')
    save(sweep / "9-longer", "grpo", 9, 0.5, steps=2 * STEPS)
    text = page(capsys, sweep)
    assert "Note: the runs come from different code" in text
    assert "Note: the runs are of different length (20, 40 steps)" in text


def test_curves_are_means_over_seeds_on_both_axes(sweep):
    runs = find_runs([str(sweep / "0-grpo-0"), str(sweep / "1-grpo-1")])
    for i, run in enumerate(runs):
        run.columns |= {
            axis: (i + 1) * run.columns[of]
            for axis, of in (("reward", "documents_seen"), ("seconds", "step"))
        }
    points = mean_curve(runs, "reward", "documents_seen").T
    assert (points[0][0], points[-1][0]) == (8, 160)
    for x, mean, low, high in points:
        assert (low, mean, high) == pytest.approx((x, 1.5 * x, 2 * x))
    by_time = mean_curve(runs, "reward", "seconds").T
    assert (by_time[0][0], by_time[-1][0]) == (2, 20)  # where both have been
    assert by_time[-1][2:] == pytest.approx((160.0, 160.0))


def test_pauses_before_a_resume_are_no_time(sweep):
    folder = sweep / "0-grpo-0"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["time"] = 1000.0 + row["step"] + (5000 if row["step"] > 10 else 0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_runs([str(folder)])[0].last("seconds") == pytest.approx(5019)
    (folder / "provenance.json").write_text('{"resumed": [{"time": "1970-01-01T01:40:05+0000"}]}')
    assert find_runs([str(folder)])[0].last("seconds") == pytest.approx(19)


def test_the_report_is_one_page_that_needs_nothing_else(sweep, capsys):
    save(sweep / "7-<b>&", "gspo", 9, 0.0, "interrupted", steps=9, reason="SIGTERM")
    page(capsys, sweep, "--html", sweep / "r.html", "--png", sweep / "r.png")
    text = (sweep / "r.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)|src=", text)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    for kind, count in (("mean", 4), ("band", 4), ("run", 2), ("threshold", 2)):
        assert text.count(f'<g id="{kind}-') == count
    assert "currentColor" in text  # readable on light and dark pages
    assert "#000000" not in text
    assert "7-&lt;b&gt;&amp;: interrupted at step 9 of 20" in text
    cells = re.findall("<td>(.*?)</td>", text)
    assert {"0.940 ± 0.040", "2 of 3", "≥128", "+40", "[+32, +56]", "0.038", "paired"} <= set(cells)
    assert (sweep / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


FINAL = "--metric=final:reward"


def test_a_row_for_each_configuration(sweep, capsys):
    """gspo ends at 0.9, 0.94 and 0.98, grpo at 0.9, 0.92 and 0.4."""
    page(capsys, sweep, FINAL, "--csv", sweep / "r.csv", "--latex", sweep / "r.tex")
    with (sweep / "r.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["label"], first["loss"], first["n"], first["verdict"]) == (
        "gspo",
        "gspo",
        "3",
        "base",
    )
    assert float(first["mean"]) == pytest.approx(0.94)
    assert float(first["std"]) == pytest.approx(0.04)
    # Of 27 draws of three seeds the lowest mean is 0.9 and the highest 0.98, each in one: more than
    # 2.5 %.
    assert [float(first[end]) for end in ("mean_low", "mean_high")] == pytest.approx([0.9, 0.98])
    assert first["difference"] == first["p"] == first["against"] == ""
    assert (second["against"], second["measured"], second["verdict"]) == (
        "gspo",
        "Final reward",
        "unknown",
    )
    assert float(second["difference"]) == pytest.approx(0.74 - 0.94)
    t = 0.2 / np.std([0, -0.02, -0.58], ddof=1) * np.sqrt(3)
    # Student's with two degrees of freedom
    assert float(second["p"]) == pytest.approx(1 - t / np.sqrt(2 + t**2))
    assert [float(second[end]) for end in ("difference_low", "difference_high")] == pytest.approx(
        [-0.58, 0.0]
    )

    lines = (sweep / "r.tex").read_text().splitlines()
    table = [line for line in lines if not line.startswith("%")]
    assert table == [
        r"\begin{tabular}{lrrrrl}",
        r"\toprule",
        r"configuration & n & Final reward & difference & p & verdict \\",
        r"\midrule",
        r"gspo & 3 & 0.940 [0.900, 0.980] & -- & -- & base \\",
        r"grpo & 3 & 0.740 [0.400, 0.920] & $-$0.200 [$-$0.580, 0.000] & 0.403 & unknown \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_json_says_what_the_page_says(sweep, capsys):
    save(sweep / "20-failed", "grpo", 7, 0.0, "failed", steps=5, reason="ValueError")
    found = json.loads(page(capsys, sweep, FINAL, "--json"))
    assert [(one["label"], one["n"], one["verdict"]) for one in found["configurations"]] == [
        ("gspo", 3, "base"),
        ("grpo", 3, "unknown"),
    ]
    assert found["configurations"][0]["of_runs"] == pytest.approx([0.9, 0.94, 0.98])
    (pair,) = found["pairs"]
    assert (pair["first"], pair["second"], pair["paired"]) == ("gspo", "grpo", True)
    assert pair["difference"] == pytest.approx(-0.2)
    assert found["keys"] == ["loss"]
    assert found["excluded"][0]["why"].startswith("failed at step 5 of 20")


def test_arms_have_the_names_that_the_user_gives_them(sweep, capsys):
    said = page(
        capsys,
        sweep,
        FINAL,
        "--label",
        "loss=gspo=ours",
        "--svg",
        sweep / "r.svg",
        "--json",
        "--pdf",
        sweep / "r.pdf",
    )
    assert [one["label"] for one in json.loads(said)["configurations"]] == ["ours", "grpo"]
    drawn = (sweep / "r.svg").read_text()
    assert "ours (n = 3)" in drawn
    assert "gspo" not in drawn
    assert (sweep / "r.pdf").read_bytes()[:5] == b"%PDF-"
    assert "against ours (n = 3)" in page(capsys, sweep, FINAL, "--label=loss=gspo=ours")
    assert "--label loss=gsop=ours needs KEY=VALUE=NAME" in refused(
        capsys, sweep, "--label=loss=gsop=ours"
    )
    assert "These are loss=grpo, loss=gspo." in refused(capsys, sweep, "--label=loss=gsop=ours")


def test_the_picture_has_the_mean_of_each_with_its_interval(sweep):
    compared = compare(find_runs([str(sweep)]), "final:reward")
    drawn = picture(compared, "svg")
    assert [
        name for name in ("interval-0", "interval-1", "interval-2") if name in drawn.decode()
    ] == [
        "interval-0",
        "interval-1",
    ]
    assert picture(compared, "svg") == drawn
    assert picture(compared, "pdf") == picture(compared, "pdf")


def test_a_legend_says_what_differs_alone(tmp_path):
    """A function of one's own by its path, which is the option of its group."""
    arms = [("grpo", None), ("custom", "mine.own_answers"), ("custom", "mine.shuffled")]
    for number, (name, path) in enumerate(arms):
        advantage = {"estimator": name} | ({"path": path} if path else {})
        for seed in range(2):
            save(
                tmp_path / f"{number}-{seed}", "grpo", seed, 0.5 + number / 10, advantage=advantage
            )
    groups = compare(find_runs([str(tmp_path)]), "reward").groups
    assert {group.label for group in groups} == {"grpo", "mine.own_answers", "mine.shuffled"}


def test_what_a_stranger_has_written_acts_on_no_terminal_and_no_page(tmp_path, capsys):
    """An escape sequence, a mark of direction and a formula, in every text of a run that commands
    show."""
    strange = "\x1b]0;x\x07 \u202egro.elpmaxe $\\frac$ <b>"
    for seed, loss in enumerate((strange, "grpo")):
        folder = save(
            tmp_path / f"run-{seed}-{strange if seed else ''}",
            loss,
            seed,
            0.5,
            "done",
            more={strange: loss},
        )
        save(tmp_path / f"failed-{seed}", loss, seed, 0.5, "failed", reason=strange)
        (folder / "provenance.json").write_text(
            json.dumps({"git": [], "packages": {strange: loss}})
        )
    pages = [tmp_path / f"page.{kind}" for kind in ("html", "png")]
    runs = [str(path) for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert main(["compare", *runs, "--html", str(pages[0]), "--png", str(pages[1])]) == 0
    assert main(["compare", *runs[-2:]]) == 0
    assert main(["compare", *runs, f"--metric={strange}"]) == 2
    assert main(["resume", str(tmp_path / strange)]) == 2
    assert main(["export", str(tmp_path / strange), str(tmp_path / "model")]) == 2
    said = capsys.readouterr()
    for text in (said.out, said.err, pages[0].read_text()):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "U+202E" in text
    assert "&lt;U+202E&gt;gro.elpmaxe $\\frac$ &lt;b&gt;" in pages[0].read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'\">" in pages[0].read_text()


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
def test_bad_input_is_one_message(
    sweep, tmp_path_factory, monkeypatch, capsys, arguments, expected
):
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    said = refused(capsys, *(argument.format(sweep=sweep) for argument in arguments))
    assert expected in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("norm", "noted"), [(0.0, True), (2.0, False), (2.1, True)])
def test_gradients_of_different_lengths_are_noted(tmp_path, capsys, norm, noted):
    """From a factor of more than 2 on."""
    for seed in range(2):
        save(tmp_path / f"a{seed}", "grpo", seed, 0.5)
        save(tmp_path / f"b{seed}", "gspo", seed, 0.5, grad_norm=norm)
    said = " ".join(page(capsys, tmp_path).split())
    low, high = sorted([(1.0, "grpo"), (norm, "gspo")])
    told = f"grad_norm is {low[0]:.3g} with {low[1]} and {high[0]:.3g} with {high[1]}"
    told += f", {high[0] / low[0]:.3g} times" if norm else ". Clipping"
    assert (told in said) == noted
    assert ("different lengths" in said) == noted


def with_rates(folder):
    """Two losses at two learning rates each, two seeds: grpo is better at the lower, gspo at the
    higher."""
    ends = {("grpo", 1e-4): 0.7, ("grpo", 1e-3): 0.2, ("gspo", 1e-4): 0.3, ("gspo", 1e-3): 0.6}
    for number, ((loss, rate), end) in enumerate(ends.items()):
        for seed in range(2):
            optimizer = {"learning_rate": rate}
            save(folder / f"{number}-{seed}", loss, seed, end + seed / 100, optimizer=optimizer)


def test_each_configuration_at_its_best(tmp_path, capsys):
    with_rates(tmp_path)
    compared = compare(find_runs([str(tmp_path)]), "reward", "optimizer.learning_rate")
    shown = [tuple(group.values.values()) for group in compared.groups]
    assert shown == [("grpo", 1e-4), ("gspo", 1e-3)]
    # and 0.63 is to be reached
    assert [group.final[0] for group in compared.groups] == pytest.approx([0.705, 0.605])
    assert len(compared.comparisons) == 1
    assert compared.left_out == []
    assert [group.tried["0.001"].final[0] for group in compared.groups] == pytest.approx(
        [0.205, 0.605]
    )
    said = " ".join(page(capsys, tmp_path, "--best-of=optimizer.learning_rate").split())
    assert (
        "Documents to reward 0.63 by optimizer.learning_rate, mean over seeds: loss 0.0001 0.001 "
        "grpo"
    ) in said
    assert (
        "gspo, 0.001: this is the highest optimizer.learning_rate tried, and one beyond may be "
        "better"
    ) in said
    assert "grpo, 0.0001: this is the lowest" in said
    assert "chosen by the same runs that are compared" in said
    assert said.startswith(
        "4 runs (4 counted) of 2 configurations, which differ in loss, optimizer.learning_rate "
        "(and so in loss.ep"
    )
    against = compare(
        find_runs([str(tmp_path)]), "final:reward", "optimizer.learning_rate", against="loss=gspo"
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
    # both times a loss and its rate
    said = " ".join(page(capsys, tmp_path, "--best-of=loss").split())
    assert said.startswith(
        "4 runs (4 counted) of 2 configurations, which differ in loss, optimizer.learning_rate "
        "(and so in loss.ep"
    )


def test_final_and_best():
    values = [0.0] * 10 + [1.0, 3.0] + [0.0] * 6 + [0.5, 0.7]
    assert final(values) == pytest.approx(0.6)
    assert best(values) == pytest.approx(2.0)
    assert (final([3.0]), best([3.0])) == (3.0, 3.0)


def test_the_legend_of_long_names_stays_within_the_picture(tmp_path):
    for number in range(4):
        more = {"advantage": {"path": f"a_module_with_a_long_name.of_functions.function_{number}"}}
        save(tmp_path / str(number), "grpo", 0, 0.5, **more)
    drawn = picture(compare(find_runs([str(tmp_path)]), "final:reward"), "svg").decode()
    names = re.findall(
        r'<text [^>]*x="([-\d.]+)"[^>]*>a_module|<text [^>]*translate\(([-\d.]+) [^>]*>a_module',
        drawn,
    )
    assert len(names) == 4
    assert min(float(one or other) for one, other in names) > 0
