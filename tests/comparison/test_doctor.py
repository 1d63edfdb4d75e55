"""pgtk doctor: silent on runs that were fine, and each rule fires on a run that is broken in its
way."""

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.runs import SHORT, config_of

from pgtoolkit.cli import main
from pgtoolkit.comparison.doctor import FEWEST_STEPS, RULES, diagnose, examine
from pgtoolkit.runs.find import Run, read_run, run_directories
from pgtoolkit.runs.records import read_leaves
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.train import train

REPOSITORY = Path(__file__).parents[2]
NAMES = [rule.name for rule in RULES]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a packed sweep of the study, by its name."""
    folder = tmp_path_factory.mktemp("study")

    def unpacked(name):
        with tarfile.open(REPOSITORY / f"benchmarks/data/study/{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        return folder / "outputs" / "sweeps" / name

    return unpacked


def failures(folder: Path, **config) -> list[set[str]]:
    """What is found of each run below a folder whose configuration has these values; `__` is a
    dot."""
    chosen = {key.replace("__", "."): value for key, value in config.items()}
    names = []
    for path in run_directories("", [str(folder)]):
        saved = read_leaves(path)
        if all(saved.get(key) == value for key, value in chosen.items()):
            names.append({rule.name for rule, _ in examine(read_run(path, None)).failures})
    return names


def test_nothing_is_said_of_the_runs_of_the_study_that_were_fine(study):
    for name, count in (("study_starts", 28), ("study_loss", 48)):
        assert failures(study(name)) == [set()] * count


def test_runs_of_the_study_that_were_broken_are_told_apart(study):
    """Rewards tossed by a coin, learning rates far too high, and a lag of 128 updates."""
    controls = failures(
        study("study_starts_controls"), advantage__path="benchmarks.study.random_reward"
    )
    assert sorted(map(len, controls)) == [0, 0, 1, 1, 1, 1, 1]
    assert set().union(*controls) == {"reward lost"}
    lag = study("study_lag")
    rates = {"loss__name": "cispo", "rollout__lag": 128}
    assert failures(lag, **rates, optimizer__learning_rate=0.0008) == [
        {"entropy gone", "reward lost"}
    ]
    assert failures(lag, **rates, optimizer__learning_rate=0.0032) == [
        {"gradient spikes", "reward lost"}
    ]
    assert {"reward up while held-out falls"} in failures(
        lag, **rates, optimizer__learning_rate=5e-05
    )
    assert failures(lag, loss__name="cispo", rollout__lag=0, optimizer__learning_rate=5e-05) == [
        set(),
        set(),
    ]


def trained(folder: Path, *overrides: str) -> Run:
    """A real run of 16 steps; overrides: more settings than the short ones, and a task."""
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += [
        "trainer.max_steps=16",
        "trainer.checkpoint_every=100",
        "accumulation.max_tokens=64",
        *overrides,
    ]
    train(config_of(*settings), folder, resume=False, overrides=[])
    return read_run(folder, None)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Code of a user's own, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "patients.py").write_text(
        "def flaky(completion, answer):\n    return None if len(completion) % 2 else 1.0 * "
        "(completion[:1] == '1')\n"
        "def positive(rewards, **_):\n    return [[1.0 + reward for reward in group] for group in "
        "rewards]\n"
    )
    rows = [json.dumps({"prompt": f"{number}=", "answer": "123"}) + "\n" for number in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    return tmp_path


REVERSE = "task.num_digits=3"
EIGHT_UPDATES = (REVERSE, "rollout.prompts_per_batch=16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ((REVERSE,), ()),
        (("task=chain_sum", "task.max_terms=3"), ("groups without signal",)),
        (
            ("task=prompts", "task.path=prompts.jsonl", "task.verifier=patients.flaky"),
            ("verifiers failing",),
        ),
        (
            (
                *EIGHT_UPDATES,
                *("loss=grpo", "loss.epsilon_low=1e-9", "loss.epsilon_high=1e-9"),
                "advantage=patients.positive",
            ),
            ("everything clipped",),
        ),
        (
            (*EIGHT_UPDATES, "loss=reinforce", "optimizer.learning_rate=0.3"),
            ("effective sample size low", "completions cut off"),
        ),
        ((*EIGHT_UPDATES, "loss=reinforce", "optimizer.learning_rate=3"), ("log-ratios clamped",)),
    ],
)
def test_a_run_that_is_broken_in_this_way_shows_it(module, settings, names):
    shown = {rule.name for rule, _ in examine(trained(module / "run", *settings)).failures}
    assert set(names) <= shown if names else shown == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("sampling", "ratios away from 1 at a batch's first update"),
        ("training", "sampler and trainer apart"),
    ],
)
def test_a_sampler_that_gives_other_log_probs_is_seen(tmp_path, monkeypatch, old, name):
    complete = TransformersSampler.complete

    def wrong(self, requests, more=False):
        drift = 0.3 * torch.arange(99.0)
        return [
            replace(x, log_probs=x.log_probs - drift[: len(x.log_probs)])
            for x in complete(self, requests, more)
        ]

    monkeypatch.setattr(TransformersSampler, "complete", wrong)
    examined = examine(trained(tmp_path / "run", REVERSE, f"rollout.old_log_probs={old}"))
    assert [(rule.name, place.step) for rule, place in examined.failures] == [(name, 1)]


def made_up(steps=100, **columns) -> Run:
    """A run of these columns, each a number or one for each step, beside what a healthy one has."""
    number = np.arange(1.0, steps + 1)
    healthy = {
        **{
            "step": number,
            "reward": number / steps,
            "exact_match": number / (2 * steps),
            "grad_norm": 1.0,
        },
        **{"staleness": (number - 1) % 4, "ratio_new_old": 1.0, "kl_new_old": 0.0, "entropy": 1.0},
        **{
            "kl_old_sampling": 1e-6,
            "zero_advantage_group_fraction": 0.2,
            "truncated_fraction": 0.0,
        },
        **{
            "clipped_low_fraction": 0.02,
            "clipped_high_fraction": 0.02,
            "clipped_ratio_fraction": 0.05,
            "clamped_log_ratio_fraction": 0.0,
        },
        **{"effective_sample_size": 0.97, "num_skipped_steps": 0.0},
    }
    arrays = {
        name: np.broadcast_to(value, number.shape).astype(float)
        for name, value in (healthy | columns).items()
    }
    return Run(
        "run",
        "run",
        "done",
        step=steps,
        config={"loss.name": "grpo", "trainer.max_steps": steps},
        columns=arrays,
    )


# A twentieth of the steps is smoothed over, so that a bound is crossed some steps beside the jump.
HALF = np.where(np.arange(100) < 60, 0.0, 1.0)


@pytest.mark.parametrize(
    ("columns", "name", "step"),
    [
        ({"ratio_new_old": 1 + 0.1 * HALF}, None, None),  # of eight first updates of 25 only
        ({"ratio_new_old": 1.1}, "ratios away from 1 at a batch's first update", 1),
        ({"kl_old_sampling": 0.1 * HALF}, "sampler and trainer apart", 58),
        ({"zero_advantage_group_fraction": HALF}, "groups without signal", 64),
        ({"zero_advantage_group_fraction": HALF, "exact_match": HALF}, None, None),  # it is solved
        ({"truncated_fraction": HALF}, "completions cut off", 63),
        ({"truncated_fraction": 1 - HALF}, None, None),  # in the beginning alone
        ({"clipped_ratio_fraction": HALF}, "everything clipped", 62),
        ({"clamped_log_ratio_fraction": 0.1 * HALF}, "log-ratios clamped", 61),
        ({"effective_sample_size": 1 - 0.9 * HALF}, "effective sample size low", 61),
        ({"entropy": 1 - HALF}, "entropy gone", None),
        ({"grad_norm": np.where(np.arange(100) % 20 == 19, 50.0, 1.0)}, "gradient spikes", 20),
        ({"grad_norm": np.where(np.arange(100) == 50, 50.0, 1.0)}, None, None),  # one alone
        ({"num_skipped_steps": np.cumsum(HALF)}, "steps without an update", 61),
        ({"failed_score_fraction": 0.5 * HALF}, "verifiers failing", 61),
        ({"reward": 1 - HALF}, "reward lost", None),
        (
            {
                "evaluation/held_out/pass@1": np.interp(
                    np.arange(100), [0, 50, 99], [0.2, 0.6, 0.4]
                ),
                "evaluation/held_out/pass@1_error": 0.01,
            },
            "reward up while held-out falls",
            51,
        ),
    ],
)
def test_numbers_of_a_failure_and_of_none(columns, name, step):
    failures_found = examine(made_up(**columns)).failures
    assert [rule.name for rule, _ in failures_found] == ([name] if name else [])
    if step:
        assert failures_found[0][1].step == step


def test_every_rule_has_a_case():
    cases = Path(__file__).read_text().partition("def made_up")[2]
    assert [name for name in NAMES if f'"{name}"' not in cases] == []


def test_the_page_says_since_when_and_what_to_change(study, capsys, tmp_path):
    (run, *_) = run_directories("", [str(study("study_starts_controls"))])
    page = diagnose([str(run)])
    assert "Not looked for, since it was not measured: " in page
    broken = [
        path
        for path in run_directories("", [str(run.parent)])
        if examine(read_run(path, None)).failures
    ]
    assert main(["doctor", str(broken[0])]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"reward lost, since step \d+ reward was 0\.\d+ and is 0\.\d+ at the end\. Healthy: rises,",
        output,
    )
    assert "Change: optimizer.learning_rate, lower" in output
    assert main(["doctor", str(broken[0]), "--json"]) == 0
    (page_as_json,) = json.loads(capsys.readouterr().out)
    assert [row["failure"] for row in page_as_json["found"]] == ["reward lost"]
    assert main(["doctor", str(tmp_path)]) == 2
    assert "needs a run directory" in capsys.readouterr().err


def test_a_run_of_a_few_steps_tells_nothing():
    assert examine(made_up(FEWEST_STEPS - 1, truncated_fraction=1.0)).failures == []
    assert examine(made_up(FEWEST_STEPS, truncated_fraction=1.0)).failures != []


def test_the_table_of_the_docs_is_that_of_the_rules():
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    rows = [
        f"| {rule.name} | {', '.join(f'`{name}`' for name in rule.metrics)} | {rule.healthy} |"
        for rule in RULES
    ]
    assert [row for row in rows if row not in page] == []
    assert page.partition("## What is wrong with a run")[2].count("\n| ") == len(RULES) + 1
