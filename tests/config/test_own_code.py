"""Own code is chosen as an option is, `loss=my_module.MyFamily`, wherever an option can be
chosen."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from builders.runs import SHORT, metrics_of, run

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import digest, name_from, plain_config, run_name
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.config.plan import equation
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.launch.check import check, problems
from pgtoolkit.runs.find import find_runs
from pgtoolkit.tracking.description import description_of

MINE = """
import losses.families

class Squared(losses.families.Squared):
    pass

class NoFamily:
    pass

def shifted(rewards, *, lengths, measures):
    return [[reward - 0.5 for reward in group] for group in rewards]

def halves(totals, *, mask, document_index, tokens_per_document, group_index):
    return mask.double() / (2 * totals.num_tokens)
"""
LONG = ["loss=custom", "loss.path=mine.Squared"]
"""What `loss=mine.Squared` stands for, as earlier versions had it typed."""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The current directory, with a module in it that has a loss, advantages and weights."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["loss=mine.Squared"], LONG),
        (["loss=mine.Squared", "loss.tau=0.3"], [*LONG, "loss.options.tau=0.3"]),
        (["loss=mine.Squared", "loss={tau: 0.3}"], [*LONG, "loss.options={tau: 0.3}"]),
        (["loss=mine.Squared", "loss.num_splits=2"], [*LONG, "loss.num_splits=2"]),
        (["advantage=mine.shifted"], ["advantage=custom", "advantage.path=mine.shifted"]),
        (["aggregation=mine.halves"], ["aggregation.reducer=mine.halves"]),
    ],
)
def test_a_path_stands_for_the_keys_that_a_run_keeps(typed, meant):
    short, long = compose(typed), compose(meant)
    assert short.problems == long.problems == []
    assert short.config == long.config
    assert digest(plain_config(short.config)) == digest(plain_config(long.config))
    assert as_typed({"loss.name": "grpo", "advantage.path": None}) == {
        "loss.name": "grpo",
        "advantage.path": None,
    }


def test_files_choose_own_code_and_set_its_parameters(tmp_path):
    experiments = tmp_path / "mine" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "tried.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /loss: mine.Squared, override /aggregation: mine.halves, _self_]\n"
        "loss: {tau: 0.3, num_splits: 2}\n"
    )
    sweep = tmp_path / "asked.yaml"
    sweep.write_text(
        "defaults: [config, override loss: mine.Squared, _self_]\n"
        "loss: {tau: 0.3}\n"
        "hydra: {sweeper: {params: {advantage: 'dr_grpo,mine.shifted'}}}\n"
    )
    config = compose(["experiment=tried"], tmp_path / "mine").config
    assert (config.loss.path, dict(config.loss.options), config.loss.num_splits) == (
        "mine.Squared",
        {"tau": 0.3},
        2,
    )
    assert config.aggregation.reducer == "mine.halves"
    typed = compose(["experiment=tried", "loss.tau=0.5"], tmp_path / "mine").config
    assert dict(typed.loss.options) == {"tau": 0.5}
    asked = compose_sweep([], sweep_file=sweep)
    assert asked.varying == {"advantage": ["dr_grpo", "mine.shifted"]}
    jobs = [
        asked.compose(overrides, number).composed for number, overrides in enumerate(asked.jobs)
    ]
    assert [job.problems for job in jobs] == [[], []]
    assert [job.config.advantage.path for job in jobs] == [None, "mine.shifted"]
    assert [dict(job.config.loss.options) for job in jobs] == [{"tau": 0.3}] * 2
    acting = tmp_path / "acting.yaml"
    acting.write_text(
        "defaults: [config, override loss: mine.Squared, _self_]\nloss: {_target_: os.system}\n"
    )
    assert "loss.options._target_ needs to be left out" in " ".join(
        compose([], sweep_file=acting).problems
    )


def test_a_sweep_has_own_code_beside_other_options_and_refuses_a_key_that_one_of_them_lacks(mine):
    sweep = compose_sweep(["loss=grpo,mine.Squared", "loss.tau=0.3"])
    jobs = [
        sweep.compose(overrides, number).composed for number, overrides in enumerate(sweep.jobs)
    ]
    assert [
        "loss.tau=0.3 needs loss=kimi (got loss=grpo)" in " ".join(job.problems) for job in jobs
    ] == [True, False]
    assert jobs[1].problems == []
    others = compose_sweep(["loss=gspo,mine.Squared", "loss.epsilon_low=0.1", "tracking=none"])
    jobs = [
        others.compose(overrides, number).composed for number, overrides in enumerate(others.jobs)
    ]
    assert [job.problems for job in jobs] == [[], []]
    assert [job.name for job in jobs] == ["gspo", "Squared"]
    (wrong,) = problems(check(["loss=mine.Squared", "loss.epsilon_low=0.1", "tracking=none"]))
    assert "got an unexpected keyword argument 'epsilon_low'" in wrong


@pytest.mark.parametrize(
    ("typed", "message", "use"),
    [
        ("loss=gspoo.x", "No module named 'gspoo'", "loss=gspo"),
        ("loss=mien.Squared", "No module named 'mien'", "loss=mine.Squared"),
        ("loss=nowhere.near", "No module named 'nowhere'", "loss=package.module.class"),
        (
            "loss=mine.Sqared",
            "needs a class in the module mine (got no Sqared)",
            "loss=mine.Squared",
        ),
        ("loss=mine.NoFamily", "NoFamily does not inherit from Family", None),
        ("loss=grp", "or the dotted path of a class of your own (got 'grp')", "loss=grpo"),
        (
            "advantage=mine.shiftd",
            "needs a function in the module mine (got no shiftd)",
            "advantage=mine.shifted",
        ),
        ("aggregation=mine.shifted", "called as shifted(totals, *, mask", None),
        (
            "advantage.path=mine.shifted",
            "got dr_grpo",
            "advantage=mine.shifted or advantage.path=null",
        ),
        ("kl=mine.Squared", "needs one of full_forward", "kl=none"),
    ],
)
def test_a_wrong_path_is_refused_with_the_nearest(typed, message, use, mine):
    (problem,) = problems(check([typed, "tracking=none"]))
    assert problem.startswith(f"{typed} needs ")
    assert message in problem
    if use:
        assert problem.endswith(f"Use {use}.")


@pytest.mark.parametrize(
    ("typed", "twice"),
    [
        (
            ["loss=mine.Squared", "loss.path=mine.Other"],
            "loss.path=mine.Other needs to be the only value of loss.path",
        ),
        (
            ["loss=mine.Squared", "loss.tau=1", "loss.options.tau=2"],
            "needs to be the only value of loss.tau",
        ),
        (
            ["aggregation=mine.halves", "aggregation.reducer=mine.w"],
            "the only value of aggregation.reducer",
        ),
    ],
)
def test_two_paths_and_two_values_of_a_parameter_are_refused(typed, twice):
    assert twice in " ".join(compose(typed).problems)


def test_names_have_the_name_of_the_class():
    assert (
        name_from(["loss=mine.Squared", "loss.tau=0.3"], {"loss": "gspo"}) == "loss-Squared_tau-0.3"
    )
    assert name_from(["loss=grpo,mine.Squared"], {}) == "loss-grpo-Squared"
    words = ["loss=mine.Squared", "aggregation=mine.halves", "seed=1"]
    assert compose(words).name == run_name(words, {}, None, None) == "Squared_halves_seed-1"


def test_runs_of_either_spelling_are_one_configuration_with_the_name_of_the_class(mine, capsys):
    """`compare`, `check`, MLflow's parameters, the model's card and the plan call them by the
    path."""
    losses = [["loss=mine.Squared", "loss.tau=0.3"], [*LONG, "loss.options.tau=0.3"], ["loss=grpo"]]
    for number, loss in enumerate(losses):
        run(mine / "runs" / f"{number}", *loss, "trainer.max_steps=1", f"seed={number % 2}")
    compared = compare(find_runs(["runs"]), "reward", labels=["loss=mine.Squared=ours"])
    values = {group.label: (len(group.counted), group.values["loss"]) for group in compared.groups}
    assert values == {"ours": (2, "mine.Squared"), "grpo": (1, "grpo")}
    capsys.readouterr()
    assert main(["compare", "runs/0", "runs/2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loss.name", "mine.Squared", "->", "grpo"] in lines
    assert ["loss.tau", "0.3", "->", "null"] in lines
    described = description_of(mine / "runs" / "0")
    assert described.params["loss.name"] == described.tags["family"] == "mine.Squared"
    assert described.params["loss.tau"] == "0.3"
    assert "loss.path" not in described.params
    assert main(["export", "runs/0", "model"]) == 0
    assert "mine.Squared" in Path("model/README.md").read_text().partition("##")[0]
    saved = yaml.safe_load((mine / "runs" / "0" / "config.yaml").read_text())["loss"]
    assert saved == {
        "name": "custom",
        "num_splits": 1,
        "path": "mine.Squared",
        "options": {"tau": 0.3},
    }


def test_a_run_of_the_long_spelling_is_continued_by_either(mine):
    run(mine / "run", *LONG, "loss.options.tau=0.3", "trainer.max_steps=1")
    again = compose(
        ["loss=mine.Squared", "loss.tau=0.4", "trainer.max_steps=2"], run_dir=mine / "run"
    )
    assert again.problems == []
    assert (again.config.loss.path, dict(again.config.loss.options)) == (
        "mine.Squared",
        {"tau": 0.4},
    )
    run(mine / "run", "loss=mine.Squared", "loss.tau=0.3", "trainer.max_steps=2", resume=True)
    assert [row["step"] for row in metrics_of(mine / "run")] == [1, 2]
    assert (
        not (mine / "run" / "drift.jsonl").exists()
        or "loss" not in (mine / "run" / "drift.jsonl").read_text()
    )


def test_own_advantages_and_weights_are_what_a_run_trains_with(mine):
    run(mine / "own", "advantage=mine.shifted", "aggregation=mine.halves", "trainer.max_steps=1")
    run(mine / "usual", "aggregation=token_mean", "advantage=mine.shifted", "trainer.max_steps=1")
    (own,), (usual,) = metrics_of(mine / "own"), metrics_of(mine / "usual")
    assert own["loss"] == pytest.approx(usual["loss"] / 2)
    assert own["loss"] != 0


def test_what_is_said_before_a_run_and_in_its_plan(mine, capsys):
    words = ["loss=mine.Squared", "aggregation=mine.halves", "advantage=mine.shifted"]
    assert main(["check", *words, *SHORT[-3:], "tracking=none", "--json"]) == 0
    said = capsys.readouterr()
    assert (
        "imports mine.Squared (loss), mine.halves (aggregation), mine.shifted (advantage)"
        in said.err
    )
    assert json.loads(said.out)["problems"] == []
    first, second, *_ = equation(compose(words).config)
    assert first.startswith("mine.Squared, mine.halves: sum over")
    assert second == "l_t = as mine.Squared computes it"
    beside = compose(["aggregation=prompt_mean", "aggregation.reducer=mine.halves"]).config
    assert equation(beside)[0].startswith("gspo, prompt_mean: ")


def test_explain_says_that_a_group_takes_own_code(capsys):
    assert main(["explain", "loss"]) == 0
    assert "loss=package.module.class: A class of your own" in capsys.readouterr().out
