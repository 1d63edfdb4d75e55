"""`pgtk doctor` finds nothing wrong with healthy runs, and each of its rules fires on a run that is
broken in that way: runs of the published study, runs trained here, and made-up metrics."""

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.refusals import refusal
from builders.runs import SHORT, config_of

from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.comparison.doctor import diagnose, examine
from pgtoolkit.comparison.failures import FEWEST_STEPS, RULES, Elsewhere, Rule
from pgtoolkit.completion import Completion, Request
from pgtoolkit.config.keys import key_named
from pgtoolkit.config.names import plain_config
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import Run, read_run, run_directories
from pgtoolkit.runs.records import leaves, read_leaves
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.system.conditions import parts
from pgtoolkit.system.report import text

REPOSITORY = Path(__file__).parents[2]
NAMES = [rule.name for rule in RULES]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a packed sweep of the study to its unpacked folder."""
    folder = tmp_path_factory.mktemp("study")

    def unpack(name: str) -> Path:
        sweep = folder / "outputs" / "sweeps" / name
        if not sweep.exists():
            with tarfile.open(REPOSITORY / f"study/data/from_scratch/{name}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
        return sweep

    return unpack


def test_scores_of_the_user_s_own_code_solve_a_task_by_their_mean():
    """A judge gives 0.9 to every answer in the end, and no answer counts as right."""
    steps = np.arange(1.0, 41)
    same = np.linspace(0, 1, 40)
    columns = {"step": steps, "reward": np.minimum(0.9, same), "exact_match": 0 * steps}
    columns["zero_advantage_group_fraction"] = np.where(steps > 10, 0.95, 0.1)
    for verifier, expected in (
        ("my_module.judge", set()),
        ("math_verify", {"groups without signal"}),
    ):
        config = {"seed": 0, "task.name": "prompts", "task.verifier": verifier}
        run = Run("/", "run", "done", None, 40, config, dict(columns))
        assert {rule.name for rule, _ in examine(run).failures} == expected
        run.columns["reward"] = 5 * columns["reward"]  # nobody knows how high it can be
        assert {rule.name for rule, _ in examine(run).failures} == {"groups without signal"}


@pytest.mark.parametrize("passes", [1, 3])
def test_a_reward_without_a_trend_is_not_lost_however_often_its_documents_are_trained(passes):
    """A batch is one step of each pass, so that rewards come three times in a row."""
    for seed in range(20):
        rewards = np.random.default_rng(seed).normal(size=60).repeat(passes)
        steps = np.arange(1.0, len(rewards) + 1)
        columns = {"step": steps, "documents_seen": 8 * ((steps - 1) // passes + 1)}
        run = Run("/", "run", "done", None, len(steps), {"seed": 0}, columns | {"reward": rewards})
        assert examine(run).failures == []


def failures(folder: Path, **config: object) -> list[set[str]]:
    """Return the names of the failures of each run below a folder whose configuration has these
    values.

    config: with `__` in the place of a dot.
    """
    chosen = {key.replace("__", "."): value for key, value in config.items()}
    names = []
    for path in run_directories("", [str(folder)]):
        saved = read_leaves(path)
        if all(saved.get(key) == value for key, value in chosen.items()):
            names.append({rule.name for rule, _ in examine(read_run(path, None)).failures})
    return names


def test_healthy_runs_of_the_study_have_no_failure(study):
    for name, count in (("study_starts", 28), ("study_loss", 48)):
        assert failures(study(name)) == [set()] * count


def test_runs_of_the_study_with_random_rewards_lose_their_reward(study):
    controls = failures(
        study("study_starts_controls"), advantage__path="study.controls.random_reward"
    )
    assert sorted(map(len, controls)) == [0, 0, 1, 1, 1, 1, 1]
    assert set().union(*controls) == {"reward lost"}


def test_runs_of_the_study_with_a_long_lag_fail_in_another_way_at_each_learning_rate(study):
    folder = study("study_lag")
    lagging = {"loss__name": "cispo", "rollout__lag": 128}
    assert failures(folder, **lagging, optimizer__learning_rate=0.0008) == [
        {"entropy gone", "reward lost"}
    ]
    assert failures(folder, **lagging, optimizer__learning_rate=0.0032) == [
        {"gradient spikes", "reward lost"}
    ]
    low_rate = {"optimizer__learning_rate": 5e-05}
    assert {"reward up while held-out falls"} in failures(folder, **lagging, **low_rate)
    assert failures(folder, loss__name="cispo", rollout__lag=0, **low_rate) == [set(), set()]
    # The first to be named is the one that began first, in whatever order the rules stand.
    paths = run_directories("", [str(folder)])
    lagging_paths = [path for path in paths if read_leaves(path)["rollout.lag"] == 128]
    of_runs = [examine(read_run(path, None)).failures for path in lagging_paths]
    steps = [[finding.step for _, finding in of_run] for of_run in of_runs]
    assert steps == [sorted(of_run) for of_run in steps]
    places = [[RULES.index(rule) for rule, _ in of_run] for of_run in of_runs]
    assert places != [sorted(of_run) for of_run in places]


def trained(folder: Path, *overrides: str) -> Run:
    """Train for 16 steps with the short settings, and `overrides` on top, which choose the task."""
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
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module of the user's and a file of prompts into a new current directory."""
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
        (("task=sums",), ("groups without signal",)),
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
            (*EIGHT_UPDATES, "loss=grpo", "optimizer.learning_rate=0.3"),
            ("effective sample size low", "completions cut off"),
        ),
        ((*EIGHT_UPDATES, "loss=reinforce", "optimizer.learning_rate=3"), ("log-ratios clamped",)),
    ],
)
def test_a_run_that_is_broken_in_this_way_has_these_failures(user_code, settings, names):
    failed = {rule.name for rule, _ in examine(trained(user_code / "run", *settings)).failures}
    assert set(names) <= failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("sampling", "ratios away from 1 at a batch's first update"),
        ("training", "sampler and trainer apart"),
    ],
)
def test_log_probs_of_the_sampler_that_are_not_the_trainer_s_are_noticed_at_the_first_step(
    tmp_path, monkeypatch, old, name
):
    complete = TransformersSampler.complete

    def complete_with_drift(
        self: TransformersSampler, requests: list[Request], more: bool = False
    ) -> list[Completion]:
        drift = 0.3 * torch.arange(99.0)
        return [
            replace(
                completion,
                log_probs=completion.log_probs - drift[: len(completion.log_probs)],
            )
            for completion in complete(self, requests, more)
        ]

    monkeypatch.setattr(TransformersSampler, "complete", complete_with_drift)
    examined = examine(trained(tmp_path / "run", REVERSE, f"rollout.old_log_probs={old}"))
    assert [(rule.name, place.step) for rule, place in examined.failures] == [(name, 1)]


def made_up(steps: int = 100, **columns: float | np.ndarray) -> Run:
    """Return a healthy run whose columns are replaced by these, each a number or one for each
    step."""
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


HALF = np.where(np.arange(100) < 60, 0.0, 1.0)
"""0 until step 60 and 1 after it. The rules smooth over a twentieth of the steps, and so see it
cross a bound some steps before or after."""
SPIKES = np.where(np.arange(100) % 20 == 19, 50.0, 1.0)


@pytest.mark.parametrize(
    ("columns", "name", "step"),
    [
        ({"ratio_new_old": 1 + 0.1 * HALF}, None, None),  # in less than half of the first updates
        ({"ratio_new_old": 1.1}, "ratios away from 1 at a batch's first update", 1),
        ({"kl_old_sampling": 0.1 * HALF}, "sampler and trainer apart", 58),
        ({"zero_advantage_group_fraction": HALF}, "groups without signal", 64),
        ({"zero_advantage_group_fraction": HALF, "exact_match": HALF}, None, None),  # it is solved
        ({"truncated_fraction": HALF}, "completions cut off", 63),
        ({"truncated_fraction": 1 - HALF}, None, None),  # in the beginning alone
        ({"truncated_fraction": HALF, "exact_match": HALF}, None, None),  # it is solved
        ({"clipped_ratio_fraction": HALF}, "everything clipped", 62),
        ({"clamped_log_ratio_fraction": 0.1 * HALF}, "log-ratios clamped", 61),
        ({"effective_sample_size": 1 - 0.9 * HALF}, "effective sample size low", 61),
        ({"entropy": 1 - HALF}, "entropy gone", None),
        ({"grad_norm": SPIKES}, "gradient spikes", 20),
        # where most groups have no signal, a step's gradient is that of a few documents
        ({"grad_norm": SPIKES, "zero_advantage_group_fraction": 0.75}, None, None),
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
def test_a_failure_is_named_with_the_step_since_which_it_holds(columns, name, step):
    failures = examine(made_up(**columns)).failures
    assert [rule.name for rule, _ in failures] == ([name] if name else [])
    if step:
        assert failures[0][1].step == step


def test_lost_scores_of_prompts_are_answered_with_the_keys_of_a_judge_behind_a_server():
    """Processes of their own change nothing for a function that is awaited."""
    run = made_up(failed_score_fraction=0.5 * HALF)
    for config, said in ({"task.name": "prompts"}, True), ({"task.name": "reverse"}, False):
        run.config = {**run.config, "task.verifier_processes": 0, **config}
        ((rule, _),) = examine(run).failures
        assert ("task.verifier_retries, task.verifier_retry_sec" in rule.change_in(run)) == said
        assert "verifier_processes" not in rule.change_in(run)


HALF_EMPTY = {"num_documents": 64, "num_empty_documents": 32}


@pytest.mark.parametrize(
    ("columns", "seen"),
    [
        ({"ratio_new_old": 0.5, "entropy": 0.008}, ""),  # 1 and 0.016
        ({"ratio_new_old": 1.0}, "ratio_new_old is up to 1 away from 1, kl_new_old up to 0"),
        ({"ratio_new_old": 0.5, "kl_old_sampling": 0.006}, "kl_old_sampling is 0.012 at the end"),
        ({"ratio_new_old": 0.5, "clipped_ratio_fraction": 0.3}, "60% is clipped at the end"),
        ({"ratio_new_old": 0.5, "effective_sample_size": 0.6, "truncated_fraction": 0.3}, ""),
        # steps without any trained token, whose means are 0
        ({"ratio_new_old": HALF, "entropy": HALF, "num_empty_documents": 64 - 64 * HALF}, ""),
    ],
)
def test_documents_without_a_trained_token_neither_make_nor_hide_a_failure(columns, seen):
    failures = examine(made_up(**HALF_EMPTY | columns)).failures
    assert len(failures) == bool(seen)
    for _, finding in failures:
        assert finding.seen.endswith(f"{seen}, over the documents with a trained token")


@pytest.mark.parametrize(("loss", "is_lost"), [("tpo", True), ("custom", True), ("grpo", False)])
def test_without_advantages_the_reward_is_lost_where_the_loss_reads_rewards(loss, is_lost):
    columns = {"reward": 1 - HALF, "grad_norm": SPIKES, "zero_advantage_group_fraction": 1.0}
    run = made_up(**columns)
    run.config.update({"loss.name": loss, "advantage.estimator": "none"})
    names = {failure.name for failure, _ in examine(run).failures}
    assert names == {"gradient spikes"} | ({"reward lost"} if is_lost else set())


WALK = np.random.default_rng(0).normal(size=100)


@pytest.mark.parametrize(
    ("rewards", "is_lost"),
    [
        (-0.2 - 4.8 * HALF + 0.05 * WALK, True),  # below 0, and worse
        (-1 - 0.05 * np.arange(100) + 0.05 * WALK, True),
        (-5 + 4 * np.interp(np.arange(100), [0, 50, 99], [0, 1, 0]) + 0.05 * WALK, True),
        (12 - 1.5 * HALF + 0.05 * WALK, True),  # far above 0
        (1000 * (1 - HALF) + WALK, True),
        (0.001 * (1 - HALF) + 1e-5 * abs(WALK), True),
        (-5 + 0.04 * np.arange(100) + 0.05 * WALK, False),  # below 0, and better
        (-0.2 + 0.1 * WALK, False),  # noise around a number
        (0.01 * abs(WALK), False),
        (np.full(100, -3.3), False),
        (0.9 - 0.05 * HALF + 0.05 * WALK, False),  # a little worse
    ],
)
@pytest.mark.parametrize("scale", [1, 100, 0.01])
def test_a_lost_reward_is_found_at_any_scale_and_wherever_its_0_is(rewards, is_lost, scale):
    failures = examine(made_up(reward=scale * rewards)).failures
    assert [rule.name for rule, _ in failures] == ["reward lost"] * is_lost


@pytest.mark.parametrize("scale", [1, 100, 0.01])
@pytest.mark.parametrize(("rise", "is_found"), [(1.0, True), (0.0, False)])
def test_a_reward_rises_by_more_than_its_noise_while_held_out_falls(scale, rise, is_found):
    run = made_up(
        reward=scale * (rise * np.arange(100) / 100 - 3 + 0.05 * WALK),
        **{
            "evaluation/held_out/pass@1": np.interp(np.arange(100), [0, 50, 99], [0.2, 0.6, 0.4]),
            "evaluation/held_out/pass@1_error": 0.01,
        },
    )
    names = [rule.name for rule, _ in examine(run).failures]
    assert names == ["reward up while held-out falls"] * is_found


BROKEN = {
    "ratios away from 1 at a batch's first update": {"ratio_new_old": 1.1},
    "sampler and trainer apart": {"kl_old_sampling": 0.1},
    "groups without signal": {"zero_advantage_group_fraction": 1.0},
    "completions cut off": {"truncated_fraction": 1.0},
    "everything clipped": {
        "clipped_ratio_fraction": 1.0,
        "clipped_low_fraction": 0.5,
        "clipped_high_fraction": 0.5,
    },
    "log-ratios clamped": {"clamped_log_ratio_fraction": 0.1},
    "effective sample size low": {"effective_sample_size": 0.1},
    "entropy gone": {"entropy": 0.0},
    "reward lost": {"reward": 1 - HALF},
    "reward up while held-out falls": {
        "evaluation/held_out/pass@1": np.interp(np.arange(100), [0, 50, 99], [0.2, 0.6, 0.4]),
        "evaluation/held_out/pass@1_error": 0.01,
    },
}
"""Metrics that a rule finds a failure in."""


@pytest.mark.parametrize(
    ("rule", "elsewhere"),
    [(rule, elsewhere) for rule in RULES for elsewhere in rule.elsewhere],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "condition", None),
)
def test_a_rule_is_silent_where_its_number_means_something_else(rule: Rule, elsewhere: Elsewhere):
    run = made_up(**BROKEN[rule.name])
    assert rule.name in [failure.name for failure, _ in examine(run).failures]
    for alternative in elsewhere.condition.split(" or "):
        values = {}
        for single in alternative.split(" and "):
            key, operator, value = parts(single)
            values[key] = {"=": value, "!=": 0.9, ">": 2}[operator]
        examined = examine(replace(run, config=run.config | values))
        assert rule.name not in [failure.name for failure, _ in examined.failures]
        assert (rule, elsewhere) in examined.elsewhere


@pytest.mark.parametrize(
    "overrides",
    [
        "loss=grpo",
        "loss=gspo rollout.lag=4 rollout.passes=2 kl=k1 entropy.coefficient=0.01",
        "loss=kimi optimizer.max_grad_norm=0.2 task=guess",
        "experiment=ppo task=prompts task.path=p.jsonl correction=token_mask",
        "experiment=sft rollout.path=r.parquet model=huggingface model.path=m",
        "loss=dppo rollout=recorded rollout.path=r.parquet",
        "task=sums model=huggingface model.path=m rollout.overlong_buffer=2 rollout.stop=[a]",
    ],
)
def test_what_a_rule_says_to_change_is_a_key_of_the_run_and_another_value(overrides):
    config = dict(leaves(plain_config(config_of(*overrides.split()))))
    run = replace(made_up(), config=config)
    for rule in RULES:
        if rule.elsewhere_in(run):
            continue
        changes = rule.change_in(run).replace("run.log", "").replace("hydra.run.dir=NEW", "")
        assert changes
        for name in re.findall(r"\b[a-z]+\.[a-z_]+\b", changes):
            assert key_named(name, config) is not None, (rule.name, name)
        for name, value in re.findall(r"\b([a-z]+\.[a-z_]+)=([a-z0-9.-]+)", changes):
            assert text(config[name]) != value, (rule.name, name)
        assert config["kl.kind"] == "none" or "kl=k3" not in changes
        assert config["correction.name"] == "none" or "correction=" not in changes


def test_what_does_not_fit_a_run_is_not_said_to_be_measurable():
    """Neither is said to need metrics=with_entropy: its entropy would not be looked at."""
    run = made_up()
    run.config["rollout.name"] = "recorded"
    del run.columns["entropy"]
    examined = examine(run)
    assert "entropy gone" in [rule.name for rule, _ in examined.elsewhere]
    assert "entropy gone" not in [rule.name for rule in examined.not_measured]


def test_the_page_says_what_was_not_looked_for_and_why(tmp_path):
    with RunDirectory(tmp_path / "run") as run:
        config = {"seed": 0, "trainer": {"max_steps": 20}, "advantage": {"estimator": "none"}}
        run.write_config(config, [])
        rows = [{"step": n, "time": n, "reward": float(n < 10)} for n in range(1, 21)]
        run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.set_status("done", 20)
    page = " ".join(diagnose([str(tmp_path / "run")]).split())
    assert "None of the 1 known failures that were looked for." in page
    assert (
        "Not looked for, with advantage=none, and a loss that reads no rewards: completions cut "
        "off, everything clipped, entropy gone, reward lost. A penalty alone trains, such as that "
        "of a teacher; rewards are only measured."
    ) in page
    (values,) = json.loads(diagnose([str(tmp_path / "run")], as_json=True))
    assert values["means_something_else"][-1]["failure"] == "reward lost"


def test_the_page_on_several_runs_says_once_what_several_of_them_have(tmp_path):
    for name, lost_after in (("a", 5), ("b", 8), ("c", 30)):
        with RunDirectory(tmp_path / name) as run:
            run.write_config({"seed": 0, "trainer": {"max_steps": 30}}, [])
            rows = [
                {"step": n, "time": n, "reward": n / 40 if n <= lost_after else 0.0}
                for n in range(1, 31)
            ]
            run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            run.set_status("done", 30)
    page = " ".join(diagnose([str(tmp_path)]).split())
    assert page.count("done, 30 steps") == 3
    (steps,) = re.findall(
        r"reward lost, in 2 of 3 runs a, since step (\d+): reward was .*? at the end\. "
        r"b, since step \d+: reward was .*? at the end\. Healthy: reward rises,",
        page,
    )
    assert 5 <= int(steps) <= 30
    assert page.count("reward lost") == 1
    assert page.count("Change: ") == 1
    assert page.count("Not looked for, since it was not measured: ") == 1
    assert "all 3 runs: Not looked for, since it was not measured: " in page
    assert "1 of 3 runs (c): None of the " in page


def test_every_rule_has_a_made_up_run_that_breaks_it():
    cases = Path(__file__).read_text().partition("def made_up")[2]
    assert [name for name in NAMES if f'"{name}"' not in cases] == []


def failing_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories below a folder that have a failure."""
    for path in run_directories("", [str(folder)]):
        if examine(read_run(path, None)).failures:
            yield path


def test_page_has_since_when_a_failure_holds_and_what_to_change(study, capsys, tmp_path):
    broken = str(next(failing_runs(study("study_starts_controls"))))
    assert "Not looked for, since it was not measured: " in diagnose([broken])
    assert main(["doctor", broken]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"reward lost, since step \d+ reward was 0\.\d+ and is 0\.\d+ at the end\. "
        r"Healthy: reward rises,",
        output,
    )
    assert "Change: optimizer.learning_rate, lower" in output
    assert main(["doctor", broken, "--json"]) == 0
    (page_as_json,) = json.loads(capsys.readouterr().out)
    assert [row["failure"] for row in page_as_json["found"]] == ["reward lost"]
    assert "needs a run directory" in refusal(capsys, "doctor", tmp_path)


def test_a_run_of_few_steps_is_not_judged():
    assert examine(made_up(FEWEST_STEPS - 1, truncated_fraction=1.0)).failures == []
    assert examine(made_up(FEWEST_STEPS, truncated_fraction=1.0)).failures != []


def test_table_of_the_docs_has_each_rule_with_its_metrics_and_no_other():
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    rows = [
        f"| {rule.name} | {', '.join(f'`{name}`' for name in rule.metrics)} |" for rule in RULES
    ]
    assert [row for row in rows if row not in page] == []
    assert page.partition("## What is wrong with a run")[2].count("\n| ") == len(rows) + 1
