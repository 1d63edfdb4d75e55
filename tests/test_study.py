"""The study's controls act, its packed runs are the runs themselves, and its pages are written from
them."""

import json
import re
import tarfile
from datetime import datetime
from math import sqrt

import numpy as np
import pytest
from builders.studies import four_losses

from pgtoolkit.comparison.groups import compare
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs
from pgtoolkit.runs.records import TIME, read_resolved
from study import chains, check_predictions, pages, summary, warning
from study.archive import pack
from study.controls import half_shuffled, random_reward, right_alone
from study.pretrained import TASKS, best_value, write_problems

PASS = "evaluation/held_out/pass@1"

LISTS = ("grpo", "gspo", "cispo", "reinforce", "right_alone", "half_shuffled")
"""Arms of the second task."""


def test_the_controls_shuffle_toss_and_keep_advantages():
    """One right answer of four: its advantage is 1.5 standard deviations, that of the others a
    third of it, below."""
    groups, lengths = [[0.0, 1.0, 0.0, 0.0]] * 40, [[number, 5, 6, 7] for number in range(40)]
    shuffled = half_shuffled(groups, lengths=lengths)
    assert all(
        sorted(group) == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5) for group in shuffled
    )
    moved = sum(group[1] < 0 for group in shuffled)  # of the half that is drawn, three of four move
    assert moved == pytest.approx(40 * 3 / 8, abs=3 * sqrt(40 * 3 / 8 * 5 / 8))
    assert half_shuffled(groups[::-1], lengths=lengths[::-1]) == shuffled[::-1]
    tossed = random_reward(groups, lengths=lengths)
    assert sum(group[1] for group in tossed) == pytest.approx(0, abs=3 * sqrt(40))
    assert all(sum(group) == pytest.approx(0, abs=1e-5) for group in tossed)
    assert right_alone(groups, lengths=lengths) == groups


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Write a run that is done, one that ended by numbers that are not finite, and one that was
    interrupted."""
    monkeypatch.chdir(tmp_path)
    for seed, state in enumerate(("done", "failed", "interrupted")):
        with RunDirectory(tmp_path / "outputs" / "some" / f"seed-{seed}") as run:
            start = {"path": str(tmp_path / "outputs" / "start")}
            run.write_config(
                {
                    "seed": seed,
                    "loss": {"name": "grpo"},
                    "trainer": {"max_steps": 2},
                    "model": start,
                },
                [],
            )
            for step in (1, 2):
                row = {
                    "time": 1795444826.8312 + step,
                    "documents_seen": 8 * step,
                    "num_tokens": 5,
                    "reward": 1 / 3,
                }
                run.append_metrics(step, {**row, "grad_norm": 0.123456, "seconds_forward": 0.5})
            of_all = {
                "time": 1.0,
                "set": "held_out",
                "prompts": 4,
                "avg": 0.1,
                "documents": 0,
                "seconds": 1.0,
            }
            rows = [{"step": step, "pass@1": 0.25 * step, **of_all} for step in (0, 1, 2)]
            (run.path / "evaluations.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
            (run.path / "provenance.json").write_text(
                json.dumps(
                    {
                        "host": "mine",
                        "git": [{"path": "/home/me", "commit": "abc", "diff": "+a longer one"}],
                    }
                )
            )
            run.set_status(state, 2, reason="NumericalError: nan" if state == "failed" else None)
    return tmp_path


def test_packed_runs_are_compared_as_the_runs_themselves(sweep, monkeypatch):
    """The interrupted one is left out; the collapsed one counts."""
    pack(sweep / "all.tar.xz", [sweep.joinpath("outputs").relative_to(sweep)])
    there = sweep / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    with tarfile.open(sweep / "all.tar.xz") as packed:
        assert {entry.mtime for entry in packed} == {0}
        packed.extractall(filter="data")
    runs = find_runs(["outputs"])
    assert [run.name for run in runs] == ["seed-0", "seed-1"]
    [group] = compare(runs, f"area:{PASS}").groups
    assert [reached.mean for reached in group.reached] == [0.25, 0.25]
    assert runs[0].values("reward") == [0.3333, 0.3333]
    assert runs[0].last("seconds") == 0.0  # a second passed, and one was spent on the evaluation
    assert "seconds_forward" not in runs[0].columns
    assert runs[0].code[0][0] == "abc"
    assert len(runs[0].code[0][1]) == 8
    assert "mine" not in (there / "outputs/some/seed-0/provenance.json").read_text()
    config = {**read_resolved(runs[0].path), "model": {"path": str(there / "outputs" / "start")}}
    refuse_another(runs[0].path, config)  # the same, seen from this directory
    with pytest.raises(ConfigError, match=r"got one with model\.path=outputs/start"):
        refuse_another(runs[0].path, config | {"model": {"path": "elsewhere"}})
    pack(there / "again.tar.xz", [there.joinpath("outputs").relative_to(there)])
    assert (there / "again.tar.xz").read_bytes() == (sweep / "all.tar.xz").read_bytes()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Unpack all sweeps that are packed in this repository, and return their folder."""
    return pages.unpack(tmp_path_factory.mktemp("packed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "parts"),
    [
        (pages.README, 1),
        (pages.PAGE, 5),
        (pages.FROM_SCRATCH, 19),
        (pages.PRETRAINED, 51),
    ],
)
def test_the_pages_are_what_their_command_writes(unpacked, page, parts):
    content = page.read_text()
    assert pages.filled(page, unpacked, draw=False) == content
    kinds = re.findall(r"<!-- (?!end|which)(\w+) ?", content)
    of_tests = content.count("<!-- which GRPO -->")  # tests/config/test_readme.py
    assert content.count("<!-- end -->") - of_tests == len(kinds) == parts
    for picture in re.findall(r"\]\((\S*images/\S*)\)", content):
        assert (page.parent / picture).stat().st_size > 10_000


def test_a_row_of_the_arms_on_old_documents_is_that_of_their_files(unpacked):
    of_runs = []
    for run in sorted((unpacked / "pretrained_loss_old_tis").iterdir()):
        evaluations, steps = (
            [json.loads(line) for line in (run / name).read_text().splitlines()]
            for name in ("evaluations.jsonl", "metrics.jsonl")
        )
        solved = [row["pass@1"] for row in evaluations]
        sizes, distances = (
            np.mean([step[name] for step in steps])
            for name in ("effective_sample_size", "kl_new_old")
        )
        of_runs.append((np.mean(solved[-2:]), sizes, distances))
    assert len(of_runs) == 8
    solved, size, distance = np.mean(of_runs, axis=0)
    row = next(row for row in summary.old_rows(unpacked) if row[0] == "weights up to 2")
    assert row[1] == "1e-5"
    assert (row[2], *row[-2:]) == (f"{solved:.3f}", f"{size:.2f}", f"{distance:.3f}")


@pytest.mark.parametrize(
    ("rows", "name", "place", "sweeps"),
    [
        (summary.passes_rows, "`cispo`", 2, ("loss_cispo", "loss_passes_2_cispo")),
        (summary.passes_rows, "PPO", 5, ("loss_ppo", "loss_passes_4_ppo")),
        (summary.lora_rows, "`reinforce`", 1, ("loss_lora_low_grpo", "loss_lora_low_reinforce")),
        (summary.rate_rows, "`gspo`", 2, ("loss_gspo", "loss_rate_1e-6_gspo")),
    ],
)
def test_a_row_of_passes_lora_and_rates_is_that_of_its_files(unpacked, rows, name, place, sweeps):
    """The final value, and the mean of the differences of the eight seeds."""
    finals = []
    for sweep in sweeps:
        of_seeds = {}
        for file in sorted((unpacked / f"pretrained_{sweep}").glob("*/evaluations.jsonl")):
            rows_of_run = [json.loads(line) for line in file.read_text().splitlines()]
            seed = re.search(r"seed-(\d+)", str(file))[1]
            of_seeds[seed] = np.mean([row["pass@1"] for row in rows_of_run[-2:]])
        finals.append(of_seeds)
    first, second = finals
    assert first.keys() == second.keys()
    assert len(first) == 8
    row = next(row for row in rows(unpacked) if row[0] == name)
    assert row[place].rpartition(" ")[2] == f"{np.mean([*second.values()]):.3f}"
    difference = np.mean([second[seed] - first[seed] for seed in first])
    assert row[place + 1].partition(" ")[0] == f"{difference:+.3f}"


def test_the_picture_of_all_parts_is_drawn(unpacked, tmp_path):
    parts = {part.name: summary.contrasts(part, unpacked) for part in summary.PARTS}
    summary.draw(parts, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_the_smallest_difference_is_found_with_power_by_simulation():
    """Of eight pairs with a spread of 1 whose mean is the smallest difference, 4 of 5 t-tests
    find it."""
    smallest = summary.shift_found(7) / sqrt(8)
    pairs = np.random.default_rng(0).normal(smallest, 1, (20_000, 8))
    t_quantile = 2.3646  # of Student's t with 7 degrees of freedom, at 0.975
    is_significant = abs(pairs.mean(1)) / (pairs.std(1, ddof=1) / sqrt(8)) > t_quantile
    assert is_significant.mean() == pytest.approx(0.8, abs=0.01)


def test_the_run_of_a_pretrained_model_is_the_packed_one(unpacked):
    """What the README says of it: pass@1 before and after, and the seconds between its start and
    its end."""
    run = unpacked.parent / "sums"
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    status = json.loads((run / "status.json").read_text())
    started, ended = (datetime.strptime(status[name], TIME) for name in ("started", "updated"))
    readme = pages.README.read_text()
    assert f"held_out     {rows[0]['pass@1']:.3f} -> {rows[-1]['pass@1']:.3f}" in readme
    assert f"took {(ended - started).total_seconds():.0f} seconds" in readme
    assert len(readme.splitlines()) <= 140


def test_packed_runs_take_little_space():
    files = [file for data in pages.DATA for file in data.glob("*.tar.xz")]
    assert sum(file.stat().st_size for file in files) < 6e6
    of_the_first_part = {
        file.name.removesuffix(".tar.xz") for file in pages.DATA[0].glob("*.tar.xz")
    }
    assert of_the_first_part <= {*pages.SWEEPS}


def test_the_best_rate_is_that_of_the_tables(unpacked):
    """Of both aggregations 1e-5; none where a rate has one run, as in the tuning runs of the
    losses."""
    for sweep in ("pretrained_rates_constant", "pretrained_rates_sample_mean"):
        assert float(best_value(unpacked / sweep, "optimizer.learning_rate", 2)) == 1e-5
    with pytest.raises(RuntimeError, match="2 complete runs of each of three values"):
        best_value(unpacked / "pretrained_rates", "optimizer.learning_rate", 2)


def test_the_rates_that_the_program_chose_are_those_of_the_test_runs(unpacked):
    """Of the second task and LoRA the policy's, of PPO the critic's; and nothing else of the tuning
    runs' configuration is different but the seed."""
    chosen = {"ppo": "critic.learning_rate", "lists_half_shuffled": None}
    for name in ("lora_grpo", "lora_reinforce", "ppo", *(f"lists_{arm}" for arm in LISTS)):
        key = chosen.get(name, "optimizer.learning_rate")
        tuning = "lists_grpo" if key is None else name
        key = key or "optimizer.learning_rate"
        seeds = 2 if name.startswith("lists") else 1
        best = float(best_value(unpacked / f"pretrained_rates_{tuning}", key, seeds))
        runs = find_runs([str(unpacked / f"pretrained_loss_{name}")], {"reward"})
        assert {run.config[key] for run in runs} == {best}
        assert sorted(run.config["seed"] for run in runs) == [*range(100, 106 + 2 * (seeds == 1))]


def test_the_answers_of_the_second_task_are_right(tmp_path):
    """All four kinds are there, 64 of each held out, and none of those is trained."""
    write_problems(tmp_path, TASKS["lists"])
    prompts = {}
    kinds = []
    for name in ("train", "held_out"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        prompts[name] = [row["prompt"] for row in rows]
        kinds = []
        for row in rows:
            numbers = [int(word) for word in re.findall(r"\d+", row["prompt"])]
            ranked = sorted(numbers)
            place = re.search("(second|third|fourth|fifth) number of", row["prompt"])
            if place:
                kinds.append("place")
                right = numbers[["second", "third", "fourth", "fifth"].index(place[1]) + 1]
            elif "median" in row["prompt"]:
                kinds.append("median")
                right = ranked[2]
            else:
                kinds.append("largest" if "second largest" in row["prompt"] else "smallest")
                right = ranked[-2] if kinds[-1] == "largest" else ranked[1]
            assert row["answer"] == str(right)
    assert [kinds.count(kind) for kind in ("place", "largest", "smallest", "median")] == [64] * 4
    assert len({*prompts["held_out"]}) == 256
    assert not {*prompts["train"]} & {*prompts["held_out"]}


def test_a_collapse_is_warned_of_by_the_effective_sample_size(tmp_path, monkeypatch):
    """Of three runs one halves its pass@1 at step 40 after a warning at step 30, one without; the
    third is warned for nothing. The second has recorded KL alone: exp(-2 * 0.02) is 0.961."""
    monkeypatch.chdir(tmp_path)
    courses = {
        "announced": ({"effective_sample_size": 0.2}, 0.1),
        "silent": ({"kl_new_old": 0.02}, 0.1),
        "false-alarm": ({"effective_sample_size": 0.8}, 0.4),
    }
    for name, (late, last) in courses.items():
        with RunDirectory(tmp_path / "sweep" / name) as run:
            run.write_config(
                {"seed": 0, "rollout": {"lag": 8}, "trainer": {"max_steps": 40}, "name": name}, []
            )
            [metric] = late
            start = {"effective_sample_size": 1.0, "kl_new_old": 0.0}[metric]
            for step in range(1, 41):
                value = late[metric] if step > 26 else start
                run.append_metrics(step, {"time": 1.0, "documents_seen": step, metric: value})
            of_all = {"time": 1.0, "set": "held_out", "prompts": 4, "avg": 0.1}
            of_all |= {"documents": 0, "seconds": 1.0}
            rows = [
                {"step": step, "pass@1": share, **of_all} for step, share in ((0, 0.3), (40, last))
            ]
            (run.path / "evaluations.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
            run.set_status("done", 40)
    by_name = {
        run.name: warning.course(run)
        for run in find_runs(["sweep"], {"effective_sample_size", "kl_new_old"})
    }
    # The mean of 20 steps is below 0.9 with three of 0.2 or eleven of 0.8, below 0.5 with 13.
    assert by_name["announced"] == warning.Course(8, 40, (29, 39))
    assert by_name["silent"] == warning.Course(8, 40, (None, None))
    assert by_name["false-alarm"] == warning.Course(8, None, (37, None))
    assert warning.table_rows([tmp_path / "sweep"])[1:] == [["8", "2", "1", "1", "1", "1", "0"]]


def test_the_problems_of_the_pretrained_model_are_new_and_have_right_answers(tmp_path):
    """Answers are right, all four kinds are there, and no held-out problem is trained."""
    write_problems(tmp_path, TASKS["arithmetic"])
    problems = {}
    for name in ("train", "held_out"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        problems[name] = [row["prompt"] for row in rows]
        for row in rows:
            first, sign, second = re.fullmatch(
                r"What is (\d+) ([+x]) (\d+)\? .*", row["prompt"]
            ).groups()
            right = int(first) + int(second) if sign == "+" else int(first) * int(second)
            assert row["answer"] == str(right)
    assert len(problems["train"]) == 8000
    assert len({*problems["held_out"]}) == 256
    assert not {*problems["train"]} & {*problems["held_out"]}
    lengths = [len(re.search(r"\d+", problem)[0]) for problem in problems["held_out"]]
    products = [" x " in problem for problem in problems["held_out"]]
    assert (lengths.count(2), lengths.count(3), lengths.count(4), sum(products)) == (
        128,
        64,
        64,
        64,
    )


def test_the_worked_sums_are_right_and_only_what_follows_the_last_semicolon_counts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(chains, "NUM_TRAINING", 2000)
    chains.write_problems(tmp_path, 7)
    prompts = {}
    for name in ("train", "held_out"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        prompts[name] = {row["prompt"] for row in rows}
        for row in rows[:500]:
            terms = [int(term) for term in row["prompt"].removesuffix("=").split("+")]
            *steps, last = row["answer"].split(";")
            totals = [int(re.split("[+=]", step)[2]) for step in steps]
            assert totals == [sum(terms[:count]) % 100 for count in range(2, len(terms) + 1)]
            assert last == f"{sum(terms) % 100:02}"
            assert len(row["answer"]) <= 65
    assert not prompts["train"] & prompts["held_out"]
    answer = "57+68=25;25+21=46;46"
    for completion, right in ((answer, 1), ("46", 1), ("57+68=99;46", 1), (f"{answer};", 0)):
        assert chains.same_sum(completion, answer) == right
    assert chains.same_sum("57+68=25;25+21=46", answer) == 0


@pytest.mark.parametrize(
    ("page", "start", "end", "numbers"),
    [
        (pages.FROM_SCRATCH, "## Results", "## Controls", 30),
        (pages.PRETRAINED, "## What eight seeds show", "**After four", 26),
        (pages.PRETRAINED, "* **The control is found**: -0.248", "## P4", 22),
        (pages.PRETRAINED, "* **P4 is not answered**", "The effective sample size", 14),
        (pages.PRETRAINED, "**PPO is equal", "## S1", 3),
        (pages.PRETRAINED, "* **The control is found.** Half", "## S2", 7),
        (pages.PRETRAINED, "* **Two passes are better", "## S3", 22),
        (pages.PRETRAINED, "* **Not answered, though", "## S4", 17),
        (pages.PRETRAINED, "* **At 1e-6 this model", "## A second model", 9),
        (pages.PRETRAINED, "shuffled end 0.031 lower", "## What was run", 15),
        (pages.PAGE, "## What was found", "## What it could have seen", 21),
    ],
)
def test_the_numbers_in_the_text_of_the_study_are_those_of_its_tables(page, start, end, numbers):
    """All numbers with three digits behind the point that stand outside of tables."""
    tables = ""
    for journal in (pages.FROM_SCRATCH, pages.PRETRAINED):
        tables += " ".join(
            re.findall(r"(?s)<!-- (?:compare|curves|summary) .*?<!-- end -->", journal.read_text())
        )
    content = page.read_text()
    between = content[content.index(start) : content.index(end)]
    sentences = re.sub(r"(?s)<!-- .*?<!-- end -->", "", between)
    numbers_in_text = re.findall(r"\b\d\.\d{3}\b", sentences)
    assert len(numbers_in_text) == numbers
    assert [number for number in numbers_in_text if number not in tables] == []


def test_the_largest_stable_rates_are_those_of_the_table():
    page = pages.FROM_SCRATCH.read_text()
    section = page[page.index("## Q3") : page.index("## Q2")]
    rates = re.search(r"\| loss \| rollout\.lag \| ([\d.e|\- ]+) \|\n", section)[1].split(" | ")
    tried = re.findall(r"(?m)^\| (\w+) \| (\d+) \| ((?:\d\.\d{3} (?:\(\d\) )?\| ?)+)$", section)
    assert len(tried) == 12
    for loss, lag, finals in tried:
        stable = [
            rate
            for rate, final in zip(rates, finals.strip("| ").split("|"), strict=True)
            if float(final.split()[0]) >= 0.181
        ]
        shown = re.search(rf"(?m)^\| `{loss}`.*", section)[0].split(" | ")[1:]
        assert shown[["0", "8", "32", "128"].index(lag)].strip(" |") == stable[-1]


def predicted(folder, content):
    """Compare the small study with predictions, as the command does."""
    file = folder / "predictions.yaml"
    file.write_text(content)
    check_predictions.main(file, [str(four_losses(folder / "runs"))])


def test_predictions_are_printed_with_the_answers(tmp_path, capsys):
    """A prediction is of a loss that has not run. The key in `over` is a part of each block, and
    has a single value."""
    predicted(
        tmp_path,
        f"metric: final:{PASS}\nagainst: loss=grpo\nmargin: 0.02\nover: trainer.max_steps\n"
        "expected: {gspo: equal, cispo: 0.2, reinforce: worse, sapo: better}\n",
    )
    output = capsys.readouterr().out
    assert "paired by trainer.max_steps and seed" in " ".join(output.split())
    assert output.splitlines()[-4:] == [
        "Predicted: gspo equal: right (equal within 0.02)",
        "Predicted: cispo 0.2: wrong (better)",
        "Predicted: reinforce worse: undecided (unknown)",
        "Predicted: sapo better: undecided (no runs of it; there are cispo; gspo; reinforce)",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("against: loss=grpo\nexpected: {gspo: null}", "gspo: null"),
        ("expected: {gspo: better}", r"needs the key against \(got none\)"),
        (
            "against: loss=grpo\nexpected: {dppo: better}",
            r"need runs of dppo \(got contrasts cispo; gspo; reinforce\)",
        ),
        ("expected:", r"YAML with the key expected \(got something else\)"),
        ("folder: x\nagainst: loss=grpo\nexpected: {}", "no other keys than metric"),
    ],
)
def test_predictions_that_cannot_be_compared_are_refused(tmp_path, content, expected):
    with pytest.raises(ConfigError, match=expected):
        predicted(tmp_path, content)
