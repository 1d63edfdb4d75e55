"""A verdict comes only from a number that means the same in both runs: frozen, identical policies
that differ in a key which changes the number itself get none."""

import csv
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders.runs import config_of

from pgtoolkit.cli import main
from pgtoolkit.comparison.bases import refuse_other_measures
from pgtoolkit.comparison.common_measure import (
    asked_differently,
    differences,
    kinds_of,
    why_unlike,
)
from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.reports import as_json, write
from pgtoolkit.comparison.text_report import planned, render_comparison, verdict
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import Run, find_runs
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.declared import Alters

PASS = "evaluation/held_out/pass@1"
AVG = "evaluation/held_out/avg"
STEPS = 12


def run_of(seed: int, level: float, more: Mapping[str, object], **ends: float) -> Run:
    """Return a finished run whose numbers stay at a level, but for a noise of its seed.

    more: keys of its configuration. ends: further columns with their levels.
    """
    noise = np.random.default_rng(seed).normal(0, 1e-3, STEPS)
    steps = np.arange(1.0, STEPS + 1)
    config = {"seed": seed, "trainer.max_steps": STEPS, "task.name": "reverse", **more}
    columns = {"step": steps, "documents_seen": 64 * steps}
    for name, value in {"exact_match": level, "reward": level, **ends}.items():
        columns[name] = value + noise
    return Run("/", f"run-{seed}", "done", None, STEPS, config, columns)


def two_arms(
    first: Mapping[str, object], second: Mapping[str, object], **ends: tuple[float, float]
) -> list[Run]:
    """Return three seeds of two configurations, whose training numbers differ by 0.1."""
    arms = ((first, 0.5, 0), (second, 0.4, 1))
    return [
        run_of(seed + 10 * place, level, more, **{name: pair[place] for name, pair in ends.items()})
        for more, level, place in arms
        for seed in range(3)
    ]


def by_final(runs: list[Run]) -> Compared:
    """Return the comparison of final values of the metric that is chosen for the runs."""
    return compare(runs, f"final:{compare(runs).metric}")


def verdicts(compared: Compared) -> list[str]:
    return [verdict(pair, compared.sign) for pairs in planned(compared) for pair in pairs]


TRAINING = [
    # A frozen policy scores otherwise in training by each of these.
    ("rollout.max_sampling_rounds", 1, 4, "leaves out prompts by how the policy itself does"),
    ("rollout.uninformative", "train", "drop", "leaves out prompts by how"),
    ("rollout.retire_at", None, 0.9, "leaves out prompts by how"),
    ("rollout.temperature", 1.0, 0.5, "decides how completions are drawn"),
    ("rollout.top_p", None, 0.9, "decides how completions are drawn"),
    ("rollout.max_completion_length", 7, 9, "decides how completions are drawn"),
    ("rollout.lag", 0, 16, "decides how old the weights are"),
    ("rollout.prompts_per_batch", 32, 256, "decides how old the weights are"),
    ("task.num_digits", 6, 4, "decides which prompts are asked"),
    ("task.verifier", "exact_match", "math_verify", "decides what a completion scores"),
    ("task.system_prompt", None, "Think.", "decides which prompts are asked"),
    ("task.verifiers.judge.weight", 1.0, 0.5, "decides what a completion scores"),
    ("trainer.stop_at", None, 0.5, "ends a run by a number that is measured"),
]


@pytest.mark.parametrize(("key", "first", "second", "why"), TRAINING)
def test_no_verdict_from_a_number_of_training_that_the_key_itself_changes(key, first, second, why):
    compared = by_final(two_arms({key: first}, {key: second}))
    assert verdicts(compared) == ["no common measure"]
    (pair,) = compared.comparisons
    assert (pair.p, pair.interval, pair.improvement) == (None, None, None)
    page = " ".join(render_comparison(compared).split())
    assert f"would differ for one and the same policy, since {key}" in page
    assert why in page
    # The same difference is a verdict where the runs differ in a key that changes what is learned.
    other = {"optimizer.learning_rate": 1e-3}, {"optimizer.learning_rate": 1e-4}
    assert verdicts(by_final(two_arms(*other))) == ["worse"]


def test_a_length_punishment_is_compared_by_exact_answers_and_not_by_the_reward_it_changes():
    runs = two_arms({"rollout.overlong_buffer": None}, {"rollout.overlong_buffer": 2})
    assert compare(runs).metric == "exact_match"
    assert verdicts(by_final(runs)) == ["worse"]
    by_reward = compare(runs, "final:reward")
    assert verdicts(by_reward) == ["no common measure"]
    assert "Use --metric=exact_match." in " ".join(render_comparison(by_reward).split())


def test_of_two_options_with_keys_of_their_own_the_option_alone_is_a_reason():
    runs = two_arms({"task.num_digits": 6}, {"task.name": "sums", "task.num_terms": 3})
    reasons = differences(runs[0], runs[-1], "exact_match", ignore_code=False)
    assert [why.name for why in reasons] == ["task"]


@pytest.mark.parametrize(
    ("key", "metric", "expected"),
    [
        ("loss.name", "kl_new_old", "no common measure"),
        ("aggregation.mode", "grad_norm", "no common measure"),
        ("loss.name", "metric_of_own_loss", "no common measure"),
        ("loss.leak", "metric_of_own_loss", "no common measure"),
        ("loss.leak", "loss", "no common measure"),
        ("loss.leak", "completion_length", "lower"),
        ("loss.name", "kl_ref", "lower"),
        ("loss.name", "entropy", "lower"),
        ("loss.name", "completion_length", "lower"),
        ("rollout.temperature", "entropy", "no common measure"),
        ("rollout.temperature", "tokens_per_second", "lower"),
    ],
)
def test_numbers_of_the_loss_are_compared_within_one_formula_and_times_always(
    key, metric, expected
):
    runs = two_arms({key: "a"}, {key: "b"}, **{metric: (0.5, 0.4)})
    assert verdicts(compare(runs, f"final:{metric}")) == [expected]


def test_a_number_has_those_keys_in_its_formula_that_its_metric_declares():
    keys = (
        *("loss.name", "loss.path", "aggregation.mode", "advantage.estimator"),
        *("kl.coefficient", "kl.reference", "kl.kind", "rollout.old_log_probs"),
    )
    in_formula = {
        "kl_ref": {"kl.reference", "kl.kind"},
        "kl_new_old": {"loss.name", "loss.path", "rollout.old_log_probs"},
        "clipped_low_fraction": {*keys} - {"aggregation.mode"},
        "metric_of_own_loss": {*keys} - {"aggregation.mode"},
        "reward/NAME": set(),
        "advantage": {"advantage.estimator", "kl.coefficient", "kl.reference", "kl.kind"},
        "grad_norm": {*keys},
        "new_logprobs": set(),
        "completion_length": set(),
        "tokens_per_second": set(),
    }
    for metric, expected in in_formula.items():
        runs = {key: [run_of(0, 0.5, {key: value}) for value in ("a", "b")] for key in keys}
        measured = {key for key in keys if differences(*runs[key], metric, ignore_code=False)}
        assert measured == expected, metric


def test_of_prompts_that_the_policy_itself_selects_no_number_of_training_gives_a_verdict():
    """Each policy has retired other prompts, though the key is the same in both runs."""
    retired = {"rollout.retire_at": 0.9}
    runs = two_arms({**retired, "loss.name": "grpo"}, {**retired, "loss.name": "gspo"})
    compared = compare(runs)
    assert verdicts(compared) == ["no common measure"]
    assert "since rollout.retire_at=0.9 leaves out" in " ".join(render_comparison(compared).split())
    for run in runs:
        run.columns[PASS] = run.columns["exact_match"]
    held_out = by_final(runs)
    assert (held_out.metric, verdicts(held_out)) == (PASS, ["worse"])


def test_keys_of_selection_at_their_defaults_select_nothing():
    select_nothing = {"rollout.uninformative": "train", "rollout.max_sampling_rounds": 1}
    runs = two_arms({**select_nothing, "loss.name": "a"}, {**select_nothing, "loss.name": "b"})
    assert verdicts(by_final(runs)) == ["worse"]


def test_a_key_of_the_blocks_is_a_reason_only_where_there_is_no_other():
    first = [run_of(0, 0.5, {"task.num_digits": 4, "rollout.temperature": 1.0})]
    second = [run_of(1, 0.4, {"task.num_digits": 6, "rollout.temperature": 0.5})]
    over = ["task.num_digits"]
    reasons = why_unlike(first, second, "exact_match", without=over)
    assert [why.name for why in reasons] == ["rollout.temperature"]
    second[0].config["rollout.temperature"] = 1.0
    reasons = why_unlike(first, second, "exact_match", without=over)
    assert [why.name for why in reasons] == over


def test_recorded_completions_say_nothing_of_the_policies_that_train_on_them():
    recorded = {"rollout.name": "recorded", "rollout.path": "rows.jsonl"}
    runs = two_arms({**recorded, "loss.name": "grpo"}, {**recorded, "loss.name": "gspo"})
    assert verdicts(compare(runs, "final:reward")) == ["no common measure"]


HELD_OUT = [
    ("rollout.temperature", 1.0, 0.5, "evaluation.temperature", "pgtk evaluate / evaluation.temp"),
    ("rollout.max_completion_length", 7, 9, "evaluation.max_completion_length", "evaluation.max"),
    ("task.num_digits", 6, 4, "evaluation.sets.held_out.num_digits", "task.num_digits="),
]


@pytest.mark.parametrize(("key", "first", "second", "of_evaluation", "use"), HELD_OUT)
def test_held_out_numbers_are_taken_where_the_evaluation_means_the_same(
    key, first, second, of_evaluation, use
):
    ends = {PASS: (0.3, 0.4)}
    inherited = by_final(two_arms({key: first}, {key: second}, **ends))
    assert inherited.metric == PASS
    assert verdicts(inherited) == ["no common measure"]
    page = " ".join(render_comparison(inherited).split())
    assert f"since {key} decides" in page
    assert use in page
    common = {of_evaluation: first}
    own = by_final(two_arms({key: first, **common}, {key: second, **common}, **ends))
    assert (own.metric, verdicts(own)) == (PASS, ["better"])  # than the first


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("evaluation.temperature", 0.5, 1.0),
        ("evaluation.seed", 1, 2),
        ("evaluation.prompts_per_set", 128, 64),
        ("evaluation.every", 10, 50),
        ("evaluation.sets.held_out.seed", 1, 2),
        ("trainer.stop_at", None, 0.5),
    ],
)
def test_no_verdict_from_held_out_numbers_of_other_evaluations(key, first, second):
    arms = ({key: first, "loss.name": "grpo"}, {key: second, "loss.name": "gspo"})
    compared = compare(two_arms(*arms, **{PASS: (0.3, 0.4)}), f"final:{PASS}")
    assert verdicts(compared) == ["no common measure"]
    name = "evaluation.seed" if key.endswith("held_out.seed") else key
    assert f"since {name} " in " ".join(render_comparison(compared).split())


@pytest.mark.parametrize(
    ("every", "passes", "word"),
    [
        (40, 4, "better"),
        (20, 4, "no common measure"),
        (10, 4, "better"),
        (40, 1, "no common measure"),
    ],
)
def test_runs_are_evaluated_alike_after_as_many_batches_whatever_their_passes(every, passes, word):
    """The first are evaluated every 10 updates and train each batch once, which they are too old
    to say."""
    policy = {"rollout.name": "policy", "task.name": "sums"}
    second = policy | {"evaluation.every": every, "rollout.passes": passes, "loss.name": "gspo"}
    runs = two_arms(
        policy | {"evaluation.every": 10, "loss.name": "grpo"}, second, **{PASS: (0.3, 0.4)}
    )
    compared = compare(runs, f"final:{PASS}", against="loss=grpo")
    assert verdicts(compared) == [word]
    if passes == 4:
        by_passes = compare(runs, f"final:{PASS}", against="rollout.passes=1")
        assert [group.values["rollout.passes"] for group in by_passes.groups] == [1, 4]
        assert "differ in more than rollout.passes, in loss (gspo, not grpo)" in " ".join(
            render_comparison(by_passes).split()
        )


def test_pairs_that_share_a_measure_keep_their_verdict_and_each_measure_has_a_base():
    runs = [
        run_of(seed + 10 * place, level, {"loss.name": loss, "rollout.temperature": temperature})
        for place, (loss, temperature, level) in enumerate(
            [("grpo", 0.5, 0.7), ("gspo", 0.5, 0.6), ("grpo", 1.0, 0.5), ("gspo", 1.0, 0.4)]
        )
        for seed in range(3)
    ]
    compared = by_final(runs)
    shown = {
        (compared.groups[pair.first].label, compared.groups[pair.second].label): verdict(
            pair, compared.sign
        )
        for pairs in planned(compared)
        for pair in pairs
    }
    assert shown == {
        ("grpo, 0.5", "gspo, 0.5"): "worse",
        ("grpo, 0.5", "grpo, 1"): "no common measure",
        ("grpo, 0.5", "gspo, 1"): "no common measure",
        ("grpo, 1", "gspo, 1"): "worse",
    }
    assert compared.comparisons.num_adjusted == 2
    with pytest.raises(ConfigError, match=r"--best-of=rollout\.temperature needs a metric that"):
        refuse_other_measures(compare(runs, best_of="rollout.temperature"))
    refuse_other_measures(compare(runs, best_of="loss"))


def test_a_key_of_the_blocks_may_change_the_number_where_runs_share_a_block():
    """Two losses on tasks of four and of six digits, then each loss on another task."""
    runs = [
        run_of(seed, level + 0.2 * (digits == 4), {"loss.name": loss, "task.num_digits": digits})
        for loss, level in (("grpo", 0.5), ("gspo", 0.4))
        for digits in (4, 6)
        for seed in range(2)
    ]
    for place, run in enumerate(runs):
        run.columns["exact_match"] = run.columns["exact_match"] + 1e-4 * place**2
    both = compare(runs, "final:exact_match", over="task.num_digits")
    assert [(pair.paired, pair.counts) for pair in both.comparisons] == [(True, (4, 4))]
    assert verdicts(both) == ["worse"]
    # The first loss on one task and the last on the other: they have no block in common.
    third = [run_of(seed, 0.3, {"loss.name": "cispo", "task.num_digits": 6}) for seed in range(2)]
    compared = compare([*runs[:2], *runs[4:], *third], "final:exact_match", over="task.num_digits")
    labels = [group.label for group in compared.groups]
    is_common = {
        frozenset((labels[pair.first], labels[pair.second])): pair.is_common
        for pair in compared.comparisons
    }
    assert is_common == {
        frozenset(("grpo", "gspo")): True,
        frozenset(("gspo", "cispo")): True,
        frozenset(("grpo", "cispo")): False,
    }
    page = " ".join(render_comparison(compared).split())
    assert "no common measure: exact_match would differ" in page
    assert (
        "since task.num_digits decides which prompts are asked, and how they are written. cispo "
        "has no run with task.num_digits=4, and grpo has no run with task.num_digits=6. Train it "
        "so, with the same seeds."
    ) in page
    six = {"loss.name": "cispo", "task.num_digits": 6}
    other_seeds = [run_of(seed, 0.3, six) for seed in (7, 8)]
    compared = compare([*runs[2:], *other_seeds], "final:exact_match", over="task.num_digits")
    page = " ".join(render_comparison(compared).split())
    assert (
        "no common measure: exact_match is compared within a block, and no run of cispo has the "
        "task.num_digits and seed of one of grpo. Train it so, with the same seeds."
    ) in page


def test_the_default_of_a_choice_is_the_same_as_its_name():
    runs = [
        run_of(seed, 0.5, {"task.name": "prompts", **chat}, **{PASS: 0.5})
        for seed, chat in enumerate(({"task.chat": "auto"}, {}, {"task.chat": "false"}))
    ]
    assert asked_differently([runs[:2]], PASS) == [{}, {}]
    assert [of_run["task.chat"] for of_run in asked_differently([runs[1:]], PASS)] == [
        "auto",
        "false",
    ]


SUMS = {"task.name": "sums", "task.num_digits": 2, "task.num_terms": 2, "task.chat": "auto"}
REVERSE = {"task.name": "reverse", "task.num_digits": 6}


@pytest.mark.parametrize("metric", [PASS, "exact_match"])
def test_tasks_with_keys_of_their_own_are_blocks_and_those_of_one_side_are_left_out(metric):
    runs = [
        run_of(seed, level, {"loss.name": loss, **task}, **{PASS: level})
        for loss, level in (("grpo", 0.5), ("gspo", 0.4))
        for task in (SUMS, REVERSE)
        for seed in range(2)
    ]
    for place, run in enumerate(runs):
        run.columns[metric] = run.columns[metric] + 1e-4 * place**2
    whole = compare(runs, f"final:{metric}", over="task")
    assert [(pair.paired, pair.counts) for pair in whole.comparisons] == [(True, (4, 4))]
    assert verdicts(whole) == ["worse"]
    assert "which differ in loss\n" in render_comparison(whole)
    assert whole.notes == []
    lacking = compare([*runs[:4], *runs[6:]], f"final:{metric}", over="task")
    assert [(pair.paired, pair.counts) for pair in lacking.comparisons] == [(True, (2, 2))]
    assert [why for _, why in lacking.left_out] == [
        f"not paired: gspo has no run with task=sums and seed={seed}" for seed in range(2)
    ]
    assert lacking.notes == [
        "gspo has no run with task=sums, so 2 runs of others cannot be paired. Train it so, with "
        "the same seeds"
    ]
    # Each loss on a task of its own.
    page = render_comparison(compare([*runs[:2], *runs[6:]], f"final:{metric}", over="task"))
    assert "configuration: task decides loss here, so that nothing else tells them\napart." in page


def test_files_of_a_comparison_without_a_common_measure_say_why_and_give_no_difference(tmp_path):
    compared = by_final(two_arms({"rollout.temperature": 1.0}, {"rollout.temperature": 0.5}))
    for kind in ("html", "csv", "latex"):
        write(compared, kind, tmp_path / kind, "pgtk compare a b")
        assert "no common measure" in (tmp_path / kind).read_text()
    assert "since rollout.temperature decides" in (tmp_path / "html").read_text()
    with (tmp_path / "csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert (rows[1]["difference"], rows[1]["p"]) == ("", "")
    report = json.loads(as_json(compared))
    assert (report["pairs"][0]["difference"], report["pairs"][0]["p"]) == (None, None)
    assert len(report["without_verdict"]) == 1


def test_scores_of_the_user_s_own_code_are_compared_by_their_mean():
    """A judge that gives 0.7 for a good answer and seldom 1 has no right answers."""
    own = {"task.name": "prompts", "task.verifier": "my_module.judge"}
    ends = {PASS: (0.1, 0.1), AVG: (0.7, 0.6)}
    arms = ({**own, "loss.name": "grpo"}, {**own, "loss.name": "gspo"})
    assert compare(two_arms(*arms, **ends)).metric == AVG
    assert compare(two_arms(*arms)).metric == "reward"
    shipped = [{**arm, "task.verifier": "math_verify"} for arm in arms]
    assert compare(two_arms(*shipped, **ends)).metric == PASS
    # The first of several verifiers decides what is right.
    several = [
        {
            **arm,
            "task.verifiers.answer.verifier": "math_verify",
            "task.verifiers.judge.verifier": "my_module.judge",
        }
        for arm in arms
    ]
    assert compare(two_arms(*several, **ends)).metric == PASS


def test_held_out_scores_without_a_right_answer_come_before_those_of_training():
    arms = ({"loss.name": "grpo"}, {"loss.name": "gspo"})
    runs = two_arms(*arms, **{AVG: (0.7, 0.6)})
    for run in runs:
        run.columns[PASS] = 0 * run.columns["step"]
    compared = compare(runs)
    assert compared.metric == AVG
    assert f"{PASS} is 0 in every run: the runs are compared by {AVG}" in compared.notes


def test_parameters_of_own_code_that_were_not_typed_have_their_defaults(tmp_path):
    code = (
        "def my_grpo(log_ratio, advantages, *, epsilon_low=0.2, epsilon_high={}):\n"
        "    return -log_ratio * advantages\n"
    )
    copies = tmp_path / "code"
    copies.mkdir()
    (copies / "mine-00000001.py").write_text(code.format("0.2"))
    (copies / "mine-00000002.py").write_text(code.format("0.3"))
    grpo = dict(leaves(plain_config(config_of("loss=grpo"))))
    own = dict(leaves(plain_config(config_of("loss=mine.my_grpo"))))

    def compared(*digests: str | None) -> Compared:
        runs = []
        for config, digest in zip((grpo, own, own), (None, *digests), strict=False):
            run = run_of(len(runs), 0.5, config | {"seed": 0, "trainer.max_steps": STEPS})
            known = {"code of mine": digest} if digest else {}
            runs.append(replace(run, path=tmp_path, trained_with=known))
        return compare(runs, "final:reward")

    alike = compared("00000001")
    assert alike.keys == ["loss"]
    assert "loss.epsilon_low" not in alike.following
    assert alike.common["loss.epsilon_low"] == alike.common["loss.epsilon_high"] == 0.2
    assert "loss.dual_clip" not in alike.common
    # The code of each run is that which it was trained with.
    other = compared("00000001", "00000002")
    assert "loss.epsilon_high" in [*other.keys, *other.following]
    assert "loss.epsilon_low" not in [*other.keys, *other.following]


def test_code_that_scores_changes_the_number_and_code_of_the_loss_its_own_metrics_alone():
    own = {"task.name": "prompts", "task.verifier": "rewards.judge", "loss.path": "losses.Mine"}
    for module, metric, expected in (
        ("rewards", "reward", "no common measure"),
        ("losses", "reward", "worse"),
        ("losses", "metric_of_own_loss", "no common measure"),
    ):
        runs = two_arms(own, own, metric_of_own_loss=(0.5, 0.4))
        for place, run in enumerate(runs):
            run.trained_with = {f"code of {module}": "a" if place < 3 else "b"}
        assert verdicts(compare(runs, f"final:{metric}")) == [expected]


def with_contents(run: Run, key: str, path: str, contents: str) -> Run:
    run.config[key] = path
    run.trained_with[f"contents of {key}"] = contents
    return run


@pytest.mark.parametrize("key", ["task.path", "model.path", "kl.reference", "critic.path"])
def test_equal_data_under_another_path_is_the_same_data(key):
    arms = ({"advantage.estimator": "gae"},) * 2
    runs = two_arms(*arms)
    for place, run in enumerate(runs):
        with_contents(run, key, f"/disk{place % 2}/data", "1234abcd")
    compared = compare(runs, "reward")
    assert compared.keys == []
    assert compared.notes[0] == (
        f"{key}=/disk1/data has the contents of /disk0/data, and counts as the same"
    )
    for place, run in enumerate(runs):
        with_contents(run, key, "/disk0/data", "1234abcd" if place < 3 else "other")
    assert compare(runs, "reward").keys == [f"contents of {key}"]


def test_evaluation_sets_of_the_same_contents_are_one_measure():
    name = "evaluation.sets.test.path"
    metric = "evaluation/test/pass@1"
    for contents, expected in (("same", "worse"), ("other", "no common measure")):
        runs = two_arms({"loss.name": "a"}, {"loss.name": "b"}, **{metric: (0.5, 0.4)})
        for place, run in enumerate(runs):
            with_contents(run, name, f"/{place}/test.jsonl", contents if place < 3 else "same")
        assert verdicts(compare(runs, f"final:{metric}")) == [expected]


def test_runs_that_are_equal_to_the_bit_are_said_to_be_so():
    arms = ({"kernel.logits_memory_mb": 1}, {"kernel.logits_memory_mb": 2})
    runs = [run_of(seed, 0.5, more) for more in arms for seed in range(3)]
    compared = compare(runs)
    assert verdicts(compared) == ["equal to the bit"]
    runs[0].columns["reward"][3] += 1e-15
    assert verdicts(compare(runs)) == ["unknown"]


def save(folder: Path, seed: int, **metrics: float) -> Path:
    """Write a run of two steps with these metrics."""
    config = {"seed": seed, "loss": {"name": "grpo"}, "trainer": {"max_steps": 2}}
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        for step in (1, 2):
            run.append_metrics(step, {"reward": 0.5, "documents_seen": 8 * step, **metrics})
        run.set_status("done", 2)
    return folder


def test_a_repetition_with_the_same_numbers_is_said_to_be_one(tmp_path):
    for name, other in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save(tmp_path / name, 0, other=other)
    reasons = [why for _, why in compare(find_runs([str(tmp_path)]), "reward").left_out]
    assert sum("has the same numbers to the last bit" in why for why in reasons) == 1


def test_documents_to_a_threshold_are_those_that_were_sampled(tmp_path):
    """Of each batch half of the prompts were dropped, of the second three quarters."""
    folder = tmp_path / "run"
    config = {"seed": 0, "loss": {"name": "grpo"}, "trainer": {"max_steps": 2}}
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        for step, dropped in ((1, 0.5), (2, 0.75)):
            row = {"reward": 0.5 * step, "documents_seen": 8 * step, "num_tokens": 40}
            run.append_metrics(step, {**row, "dropped_group_fraction": dropped})
        run.set_status("done", 2)
    (run_read,) = find_runs([str(folder)], {"reward"})
    assert run_read.columns["documents_seen"].tolist() == [16, 48]
    assert run_read.columns["tokens_seen"].tolist() == [40, 80]
    compared = compare([run_read], reach="reward=0.9")
    assert compared.spent(compared.groups[0], "documents_seen") == [48]
    page = " ".join(render_comparison(compared).split())
    assert "documents that were sampled, those that were dropped too, and trained tokens" in page


def test_what_the_page_says_to_run_measures_both_alike(tmp_path, capsys, monkeypatch):
    """Two short runs of a frozen policy, at other temperatures."""
    monkeypatch.chdir(tmp_path)
    short = [
        *("tracking=none", "trainer.max_steps=2", "optimizer.learning_rate=1e-9"),
        *("rollout.prompts_per_batch=2", "rollout.group_size=2", "accumulation.docs_per_step=4"),
        *("model.hidden_size=16", "model.num_layers=1", "task.num_digits=2"),
    ]
    for temperature in (0.5, 1):
        run = f"hydra.run.dir=run{temperature}"
        assert main([*short, f"rollout.temperature={temperature}", run]) == 0
    capsys.readouterr()
    assert main(["compare", "run0.5", "run1", "--metric=final:reward"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    command = page.partition("such as by pgtk ")[2].partition(", or train with")[0]
    assert command.startswith("evaluate run")
    assert "evaluation.temperature=" in command
    for run in ("run0.5", "run1"):
        words = shlex.split(command)
        assert main([words[0], run, *words[2:]]) == 0
    results = sorted(Path("outputs/evaluations").glob("*/evaluations.jsonl"))
    rows = [json.loads(file.read_text().splitlines()[0]) for file in results]
    assert rows[0]["avg"] == rows[1]["avg"]


def test_every_kind_of_change_is_declared_by_a_key_and_concerns_a_number():
    declared = {key.alters for key in KEYS}
    assert declared == {*Alters}
    concerned = kinds_of("reward") | kinds_of("loss")
    assert declared - concerned == {Alters.nothing, Alters.evaluation}
