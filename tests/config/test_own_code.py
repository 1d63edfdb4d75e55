"""Code of the user is chosen like an option, `loss=my_module.MyFamily`, wherever an option can be
chosen. tests/system/test_functions.py trains with it."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from builders.runs import SHORT, metrics_of, run

from pgtoolkit.assembly.loss import loss_of
from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.config.compose import compose
from pgtoolkit.config.keys import OWN_CODE
from pgtoolkit.config.names import digest, name_from, plain_config, run_name
from pgtoolkit.config.own_code import as_typed
from pgtoolkit.config.plan import equation
from pgtoolkit.config.rules.loss_terms import notes_of_own_family
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.config.validate import validate
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.check import check, notes, problems
from pgtoolkit.launch.sweep import refuse_another
from pgtoolkit.losses.families import Gspo
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs
from pgtoolkit.system.report import Report

MINE = """
import losses.families

class _Sqared:
    pass

class Squared(losses.families.Squared):
    pass

class NoFamily:
    pass

def shifted(rewards, *, lengths, measures):
    return [[reward - 0.5 for reward in group] for group in rewards]

def soft_clip(log_ratio, advantages, ratio, *, softness=0.3):
    '''-softness tanh((r - 1) / softness) A

    Without a corner.
    '''
    return -softness * ((ratio(log_ratio) - 1) / softness).tanh() * advantages

def of_groups(log_probs, rewards, documents, groups):
    s = documents.sum(log_probs)
    return -(groups.softmax(documents.mean(rewards)) * (s - groups.spread(groups.logsumexp(s))))

def centred(log_probs, advantages):
    return -(advantages - advantages.mean()) * log_probs

def named_as_ours(log_probs, advantages):
    return -advantages * log_probs, {"reward": log_probs}

def best_of(log_probs, advantages, *, k=2, squares=False):
    return -advantages * log_probs * k

def step_norm(log_ratio, advantages, ratio, step):
    r = ratio(log_ratio)
    return -r * advantages / step.mean(r)

def rewarded(log_ratio, rewards, group_rewards, ratio):
    return -ratio(log_ratio) * (rewards - group_rewards)

def likelihood(log_probs):
    return -log_probs

def of_sampler(log_probs, sampling_log_probs, advantages, ratio):
    return -ratio(log_probs - sampling_log_probs) * advantages

def halves(totals, *, mask, document_index, tokens_per_document, group_index):
    return mask.double() / (2 * totals.num_tokens)
"""
LONG = ["loss=custom", "loss.path=mine.Squared"]
"""The longer spelling of `loss=mine.Squared`, and the only one of earlier versions."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a current directory with a module that has a loss, advantages and weights."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    yield tmp_path
    sys.modules.pop("mine", None)


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
def test_a_path_stands_for_the_keys_that_a_run_saves(typed, meant):
    short = compose(typed)
    long = compose(meant)
    assert short.problems == long.problems == []
    assert short.config == long.config
    assert digest(plain_config(short.config)) == digest(plain_config(long.config))


def test_a_configuration_without_code_of_the_user_is_shown_as_it_was_saved():
    saved = {"loss.name": "grpo", "advantage.path": None}
    assert as_typed(saved) == saved


def test_an_experiment_chooses_code_of_the_user_and_sets_its_parameters(tmp_path, monkeypatch):
    experiments = tmp_path / "mine" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "tried.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /loss: mine.Squared, override /aggregation: mine.halves, _self_]\n"
        "loss: {tau: 0.3, num_splits: 2}\n"
    )
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path / "mine"))
    config = compose(["experiment=tried"]).config
    assert (config.loss.path, dict(config.loss.options), config.loss.num_splits) == (
        "mine.Squared",
        {"tau": 0.3},
        2,
    )
    assert config.aggregation.reducer == "mine.halves"
    typed = compose(["experiment=tried", "loss.tau=0.5"]).config
    assert dict(typed.loss.options) == {"tau": 0.5}


OPTIONS = {
    "loss": ("mine.Squared", "tau: 0.3, num_splits: 2", {"tau": 0.3}, ("num_splits", 2)),
    "optimizer": ("mine.SGD", "nu: 0.9, warmup_steps: 3", {"nu": 0.9}, ("warmup_steps", 3)),
    "advantage": ("mine.shifted", "reward_scale: 2.0", None, ("reward_scale", 2.0)),
    "aggregation": ("mine.halves", "divisor: null", None, ("divisor", None)),
}
"""Group -> code of one's own, keys in a file, and what they are: the parameters of a class, and a
key of the group."""


@pytest.mark.parametrize("group", OPTIONS)
def test_a_file_sets_keys_of_the_group_beside_parameters_of_the_class(group, tmp_path, monkeypatch):
    path, keys, parameters, (leaf, value) = OPTIONS[group]
    key = OWN_CODE[group]
    files = {
        f"{group}/o.yaml": f"{{_target_: {path}, {keys}}}",
        f"{group}/on_path.yaml": f"{{defaults: [{path}, _self_], {keys}}}",
        f"{group}/on_option.yaml": (
            f"{{defaults: [{key.stands_for}, _self_], {key.leaf}: {path}, {keys}}}"
        ),
        f"{group}/on_file.yaml": f"{{defaults: [o, _self_], {keys}}}",
        "experiment/e.yaml": (
            f"# @package _global_\n{{defaults: [override /{group}: {path}], {group}: {{{keys}}}}}"
        ),
        "sweep.yaml": (
            f"{{defaults: [config, override {group}: {path}, _self_], {group}: {{{keys}}}}}"
        ),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    composed = [compose([f"{group}=o"])]
    if parameters is not None:
        composed += [compose([f"{group}={name}"]) for name in ("on_path", "on_option", "on_file")]
        composed += [compose(["experiment=e"]), compose([], sweep_file=tmp_path / "sweep.yaml")]
    for tried in composed:
        assert tried.problems == []
        settings = getattr(tried.config, group)
        assert (getattr(settings, key.leaf), getattr(settings, leaf)) == (path, value)
        assert getattr(settings, "options", None) == parameters


@pytest.mark.parametrize(
    ("group", "content", "problem"),
    [
        ("advantage", "_target_: mine.shifted\nscale: 2\n", "advantage.scale: 2 in "),
        ("aggregation", "_target_: mine.halves\npower: 2\n", "aggregation.power: 2 in "),
        (
            "optimizer",
            "_target_: torch.optim.SGD\nwarmup_steps: -1\n",
            "optimizer.warmup_steps: -1 in ",
        ),
        ("optimizer", "_target_: a.B\nname: muon\n", "optimizer: name beside _target_ needs to be"),
        ("loss", "_target_: a.B\npath: c.D\n", "loss: path beside _target_ needs to be left out"),
        ("loss", "_target_: a.B\ndefaults: [grpo]\n", "loss: defaults beside _target_ needs to be"),
    ],
)
def test_a_key_that_neither_the_group_nor_the_class_takes_is_refused(
    group, content, problem, tmp_path, monkeypatch
):
    (tmp_path / group).mkdir()
    (tmp_path / group / "o.yaml").write_text(content)
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    (told,) = compose([f"{group}=o"]).problems
    assert told.startswith(problem)


SQUARED = "_target_: mine.Squared\n"
OF_SQUARED = "# @package _global_\ndefaults: [override /loss: o, _self_]\n"


@pytest.mark.parametrize(
    ("files", "typed", "problem"),
    [
        (
            {"loss/o.yaml": f"{SQUARED}tau: 0.5\noptions: {{tau: 0.7}}\n"},
            ["loss=o"],
            r"loss.tau in \S+/o.yaml needs .* \(got 0.5, and 0.7 as loss.options.tau\)",
        ),
        (
            {"optimizer/o.yaml": "_target_: a.B\nnu: true\noptions: {nu: false}\n"},
            ["optimizer=o"],
            r"optimizer.nu in \S+ needs .* \(got true, and false as optimizer.options.nu\)",
        ),
        (
            {
                "loss/o.yaml": SQUARED,
                "experiment/e.yaml": f"{OF_SQUARED}loss: {{tau: 0.5, options: {{tau: 0.7}}}}\n",
            },
            ["experiment=e"],
            r"loss.tau in \S+/e.yaml needs .* \(got 0.5, and 0.7 as loss.options.tau\)",
        ),
        (
            {"callbacks/c.yaml": "stop: {path: a.B}\nown: {stop: {path: c.D}}\n"},
            ["callbacks=c"],
            r"callbacks.stop needs to be left out beside callbacks.own.stop",
        ),
        (
            {"callbacks/c.yaml": "stop: {path: a.B, _target_: c.D}\n"},
            ["callbacks=c"],
            r"callbacks.stop._target_ needs .* \(got c.D, and a.B as callbacks.stop.path\)",
        ),
        (
            {"loss/o.yaml": SQUARED},
            ["loss=o", "loss={tau: 0.5, options: {tau: 0.7}}"],
            r"loss={tau: .* needs one value for loss.tau \(got two\)",
        ),
        (
            {},
            ["callbacks.stop._target_=a.B", "callbacks.stop.path=c.D"],
            r"callbacks.stop.path=c.D needs to be the only value of callbacks.stop.path",
        ),
    ],
)
def test_a_parameter_with_a_value_under_each_of_its_two_names_is_refused(
    files, typed, problem, tmp_path, monkeypatch
):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    (told,) = compose(typed).problems
    assert re.match(problem, told)


@pytest.mark.parametrize("below", ["tau: 0.7", "options: {tau: 0.7}"])
@pytest.mark.parametrize("above", ["tau: 0.5", "options: {tau: 0.5}"])
def test_of_two_files_the_last_counts_whichever_name_a_parameter_has_in_it(
    below, above, tmp_path, monkeypatch
):
    (tmp_path / "loss").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "loss/o.yaml").write_text(f"{SQUARED}{below}\nnum_splits: 2\n")
    (tmp_path / "loss/on_o.yaml").write_text(f"defaults: [o, _self_]\n{above}\n")
    (tmp_path / "experiment/e.yaml").write_text(f"{OF_SQUARED}loss: {{{above}}}\n")
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    for typed in (["loss=on_o"], ["experiment=e"]):
        composed = compose(typed)
        assert composed.problems == []
        assert (composed.config.loss.options, composed.config.loss.num_splits) == ({"tau": 0.5}, 2)


def test_a_function_of_several_is_named_by_a_target_too(tmp_path, monkeypatch):
    (tmp_path / "task").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "task/two.yaml").write_text(
        "defaults: [prompts, _self_]\npath: x.jsonl\n"
        "verifiers: {form: {verifier: {_target_: mine.score}, weight: 2.0}}\n"
    )
    (tmp_path / "experiment/sets.yaml").write_text(
        "# @package _global_\n"
        "evaluation: {sets: {hard: {task: prompts, verifier: {_target_: mine.score}}}}\n"
    )
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    task = compose(["task=two"]).config.task
    assert task.verifiers == {"form": {"verifier": "mine.score", "weight": 2.0}}
    evaluation = compose(["experiment=sets"]).config.evaluation
    assert evaluation.sets == {"hard": {"task": "prompts", "verifier": "mine.score"}}


def test_the_files_of_the_page_are_a_sweep_and_an_experiment(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    section = page.read_text().partition("### Code of your own")[2].partition("\n### ")[0]
    sweep, experiment = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "sweep.yaml").write_text(sweep)
    (tmp_path / "experiment/mine.yaml").write_text(experiment)
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    for composed in (
        compose([], sweep_file=tmp_path / "sweep.yaml"),
        compose(["experiment=mine"]),
    ):
        assert composed.problems == []
        loss = composed.config.loss
        assert (loss.path, loss.options) == ("my_losses.Squared", {"tau": 0.3})


@pytest.mark.slow
def test_a_sweep_file_chooses_code_of_the_user_and_sweeps_over_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [config, override loss: mine.Squared, _self_]\n"
        "loss: {tau: 0.3}\n"
        "hydra: {sweeper: {params: {advantage: 'dr_grpo,mine.shifted'}}}\n"
    )
    sweep = compose_sweep([], sweep_file=file)
    assert sweep.varying == {"advantage": ["dr_grpo", "mine.shifted"]}
    jobs = [sweep.compose_job(overrides, number) for number, overrides in enumerate(sweep.jobs)]
    assert [job.problems for job in jobs] == [[], []]
    assert [job.config.advantage.path for job in jobs] == [None, "mine.shifted"]
    assert [dict(job.config.loss.options) for job in jobs] == [{"tau": 0.3}] * 2


def test_a_target_of_hydra_among_the_parameters_of_a_class_is_refused(tmp_path):
    acting = tmp_path / "acting.yaml"
    acting.write_text(
        "defaults: [config, override loss: mine.Squared, _self_]\nloss: {_target_: os.system}\n"
    )
    (problem,) = compose([], sweep_file=acting).problems
    assert problem.startswith("loss._target_ needs to stand in the list `defaults:`")
    acting.write_text(
        "defaults: [config, override loss: mine.Squared, _self_]\n"
        "loss: {tau: {_target_: os.system}}\n"
    )
    problems = compose([], sweep_file=acting).problems
    assert "loss.options.tau._target_ needs to be left out" in " ".join(problems)


def test_a_sweep_over_options_and_a_class_refuses_a_key_that_an_option_lacks(mine):
    sweep = compose_sweep(["loss=grpo,mine.Squared", "loss.tau=0.3"])
    jobs = [sweep.compose_job(overrides, number) for number, overrides in enumerate(sweep.jobs)]
    assert [
        "loss.tau=0.3 needs loss=kimi (got loss=grpo)" in " ".join(job.problems) for job in jobs
    ] == [True, False]
    assert jobs[1].problems == []


def test_a_parameter_that_a_class_does_not_take_is_refused_when_it_is_tried(mine):
    sweep = compose_sweep(["loss=gspo,mine.Squared", "loss.epsilon_low=0.1", "tracking=none"])
    jobs = [sweep.compose_job(overrides, number) for number, overrides in enumerate(sweep.jobs)]
    assert [job.problems for job in jobs] == [[], []]
    assert [job.name for job in jobs] == ["gspo", "Squared"]
    (wrong,) = problems(check(["loss=mine.Squared", "loss.epsilon_low=0.1", "tracking=none"]))
    assert "got an unexpected keyword argument 'epsilon_low'" in wrong


@pytest.mark.parametrize(
    ("typed", "message", "use"),
    [
        ("loss=gspoo.x", "No module named 'gspoo'", "loss=gspo"),
        ("loss=mien.Squared", "No module named 'mien'", "loss=mine.Squared"),
        ("loss=nowhere.near", "No module named 'nowhere'", "loss=package.module.function"),
        (
            "loss=mine.Sqared",
            "needs a function in the module mine (got no Sqared)",
            "loss=mine.Squared",
        ),
        ("loss=mine.NoFamily", "NoFamily does not inherit from Family", None),
        ("loss=gpo", "(got 'gpo')", "loss=gmpo or loss=grpo or loss=gspo"),
        ("loss=grp", "or the dotted path of a function of your own (got 'grp')", "loss=grpo"),
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
def test_a_wrong_path_is_refused_with_the_nearest_that_exists(typed, message, use, mine):
    (problem,) = problems(check([typed, "tracking=none"]))
    assert problem.startswith(f"{typed} needs ")
    assert message in problem
    if use:
        assert problem.endswith(f"Use {use}.")


@pytest.mark.parametrize(
    ("typed", "message"),
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
def test_two_paths_and_two_values_of_a_parameter_are_refused(typed, message):
    assert message in " ".join(compose(typed).problems)


def test_names_of_runs_and_folders_have_the_name_of_the_class():
    assert (
        name_from(["loss=mine.Squared", "loss.tau=0.3"], {"loss": "gspo"}) == "loss-Squared_tau-0.3"
    )
    assert name_from(["loss=grpo,mine.Squared"], {}) == "loss-grpo-Squared"
    words = ["loss=mine.Squared", "aggregation=mine.halves", "seed=1"]
    assert compose(words).name == run_name(words, {}, None, None) == "Squared_halves_seed-1"


@pytest.mark.slow
def test_runs_of_either_spelling_are_one_configuration_which_every_page_calls_by_the_path(
    mine, capsys
):
    losses = [["loss=mine.Squared", "loss.tau=0.3"], [*LONG, "loss.options.tau=0.3"], ["loss=grpo"]]
    for number, loss in enumerate(losses):
        run(mine / "runs" / f"{number}", *loss, "trainer.max_steps=1", f"seed={number % 2}")
    compared = compare(find_runs(["runs"]), "reward", labels=["loss=mine.Squared=ours"])
    values = {group.label: (len(group.counted), group.values["loss"]) for group in compared.groups}
    assert values == {"ours": (2, "mine.Squared"), "grpo": (1, "grpo")}
    capsys.readouterr()
    assert main(["compare", "runs/0", "runs/2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loss", "mine.Squared", "->", "grpo"] in lines
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


def test_a_run_of_the_long_spelling_is_resumed_by_either(mine):
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


def test_check_names_the_imports_and_puts_the_paths_into_the_equation(mine, capsys):
    words = ["loss=mine.Squared", "aggregation=mine.halves", "advantage=mine.shifted"]
    assert main(["check", *words, *SHORT[-3:], "tracking=none", "--json"]) == 0
    printed = capsys.readouterr()
    assert (
        "imports mine.Squared (loss), mine.halves (aggregation), mine.shifted (advantage)"
        in printed.err
    )
    assert json.loads(printed.out)["problems"] == []
    first, second, *_ = equation(compose(words).config)
    assert first.startswith("mine.Squared, mine.halves: sum over")
    assert second == "l_t = as mine.Squared computes it"
    beside = compose(["aggregation=prompt_mean", "aggregation.reducer=mine.halves"]).config
    assert equation(beside)[0].startswith("gspo, prompt_mean: ")


def test_prompt_mean_beside_a_reducer_keeps_groups_whole(mine):
    for mode, are_whole in (("prompt_mean", True), ("token_mean", False)):
        words = [f"aggregation={mode}", "aggregation.reducer=mine.halves"]
        assert loss_of(compose(words).config).needs_whole_groups == are_whole


@pytest.mark.parametrize(
    ("words", "is_read"),
    [
        (["loss=grpo"], True),
        (["loss=tpo", "advantage=none"], False),
        (["loss=lpo", "advantage=none"], False),
        (["loss=mine.of_groups"], False),
        (["loss=mine.of_groups", "aggregation=mine.halves"], False),
        (["loss=mine.of_groups", "aggregation=balanced"], True),
        (["loss=mine.soft_clip"], True),
        (["loss=mine.Squared"], True),  # a class, of which no file says what it reads
        (["loss=grpo", "aggregation=mine.halves"], True),
    ],
)
def test_check_shows_the_advantage_where_the_loss_or_its_weights_may_read_it(mine, words, is_read):
    lines = equation(compose(words).config)
    assert any(line.startswith("advantage (") for line in lines) == is_read


def test_a_path_of_the_documentation_typed_as_it_stands_is_answered_as_one():
    """What to type is the same words, which would be no answer."""
    (problem,) = problems(check(["loss=package.module.function"]))
    assert problem.endswith(
        "Use loss=package.module.function, which stands for a value of your own."
    )


def test_explain_says_that_a_group_takes_a_function_of_the_user(capsys):
    assert main(["explain", "loss"]) == 0
    assert "loss=package.module.function: A function of your own" in capsys.readouterr().out


def test_a_function_is_a_loss_with_keys_of_its_own(mine):
    loss = loss_of(compose(["loss=mine.soft_clip", "loss.softness=0.1"]).config)
    assert (loss.family.level, dict(loss.family.options)) == ("token", {"softness": 0.1})
    assert loss_of(compose(["loss=mine.of_groups"]).config).needs_whole_groups


def test_advantages_that_nothing_reads_are_noted(mine):
    def notes_of(*words):
        checked = check([*words, "tracking=none"])
        assert problems(checked) == []
        return notes(checked)

    (note,) = notes_of("loss=mine.of_groups", "rollout.prompts_per_batch=8")
    assert note == (
        "loss=mine.of_groups reads no advantages: advantage=dr_grpo decides only metrics, and "
        "which prompts count as uninformative. Use advantage=none."
    )
    for words in (
        ["loss=mine.of_groups", "advantage=none"],
        ["loss=mine.of_groups", "aggregation=balanced"],
        ["loss=mine.soft_clip"],
        ["loss=mine.Squared"],
    ):
        assert "reads no advantages" not in " ".join(notes_of(*words))


LEARNS_NOTHING = "advantage=none needs kl other than none and k1 or entropy.coefficient other than"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["loss=mine.soft_clip"], [LEARNS_NOTHING]),  # of tokens
        (["loss=mine.step_norm"], [LEARNS_NOTHING]),  # of the step
        (["loss=mine.Squared"], [LEARNS_NOTHING]),  # a class: as kimi, 0 where the policy sampled
        (["loss=mine.of_groups"], []),  # it compares rewards itself
        (["loss=mine.rewarded"], []),
        (["loss=mine.likelihood"], []),
        (["loss=mine.soft_clip", "kl=k1"], [LEARNS_NOTHING]),
        (["loss=mine.soft_clip", "entropy.coefficient=0.1"], []),
        (
            ["loss=mine.soft_clip", "kl=k3"],
            ["advantage=none needs kl.reference other than initial"],
        ),
        (["loss=mine.rewarded", "kl=k3"], []),
        (
            ["loss=mine.soft_clip", "entropy.coefficient=0.1", "correction=token_truncate"],
            ["advantage=none needs correction=none"],
        ),
        (["loss=mine.Squared", "entropy.coefficient=0.1", "correction=token_truncate"], []),
        (
            ["loss=mine.likelihood", "advantage.reward_scale=2", "rollout.uninformative=drop"],
            ["advantage=none needs advantage.reward_scale=1", "rollout.uninformative=drop needs"],
        ),
        (["loss=mine.rewarded", "advantage.reward_scale=2", "rollout.uninformative=drop"], []),
    ],
)
def test_without_advantages_a_loss_of_ones_own_needs_something_else_to_learn_from(
    mine, words, refused
):
    if any(word.startswith("kl=") for word in words):
        words = [*words, "kl.coefficient=0.1", "kl.reference=initial"]
    config = compose([*words, "advantage=none", "rollout.old_log_probs=training"]).config
    _, report = validate(config)
    assert report.problems == []  # what it reads is known only once it is imported
    if not refused:
        loss_of(config)
        return
    with pytest.raises(ConfigError) as error:
        loss_of(config)
    told = str(error.value).splitlines()
    assert [line.startswith(begin) for line, begin in zip(told, refused, strict=True)] == [
        True for _ in refused
    ]


def test_notes_on_losses_of_a_document_hold_for_a_function_of_ones_own(mine):
    words = ["loss=mine.of_groups", "advantage=none", "entropy.top_fraction=0.5"]
    said = " ".join(notes(check([*words, "tracking=none"])))
    assert "entropy.top_fraction with loss=mine.of_groups: a group has one loss" in said


OUTDATED = "has no ratio: nothing corrects for updates between sampling and a step"
OF_SAMPLING = "under a lag: ratios are to the weights that sampled"
OF_BATCH = "under a lag: ratios are to the weights with which training on a batch begins"
SEVERAL = "ratios compare with log-probs from before the first pass"
ON_POLICY = "of rollouts: every ratio is 1, nothing is clipped"
ROUNDED = "logits are rounded to bfloat16"


@pytest.mark.parametrize(
    ("loss", "setting", "said"),
    [
        ("soft_clip", "rollout.lag=1", [OF_SAMPLING]),
        ("likelihood", "rollout.lag=1", [OUTDATED]),
        ("of_sampler", "rollout.lag=1", []),  # it compares with the sampler's log-probs itself
        ("Squared", "rollout.lag=1", [OF_SAMPLING]),
        ("soft_clip", "rollout.passes=2", [SEVERAL]),
        ("likelihood", "rollout.passes=2", [OUTDATED]),
        ("soft_clip", "rollout.prompts_per_batch=8", [ON_POLICY]),
        ("Squared", "rollout.prompts_per_batch=8", [ON_POLICY]),
        ("likelihood", "rollout.prompts_per_batch=8", []),
    ],
)
def test_what_notes_say_of_ratios_holds_for_a_loss_of_ones_own(mine, loss, setting, said):
    words = [f"loss=mine.{loss}", "tracking=none", setting]
    assert [*validate(compose(words).config)[1].notes] == []  # it is not imported yet
    told = notes(check(words))
    of_ratios = (OUTDATED, OF_SAMPLING, OF_BATCH, SEVERAL, ON_POLICY, ROUNDED)
    assert [part for part in of_ratios if part in " ".join(told)] == said
    assert "differ only in their weights" not in " ".join(told)  # of this one nobody knows


def test_notes_on_anchors_and_rounding_read_what_a_loss_of_ones_own_declares(mine):
    def said_of(family, *words):
        report = Report()
        notes_of_own_family(compose(["loss=mine.soft_clip", *words]).config, family, report)
        return " ".join(report.notes)

    lag = ("rollout.lag=1", "rollout.old_log_probs=proximal")
    assert "and nothing corrects for the updates" in said_of(FunctionLoss(of_ratio), *lag)
    both = said_of(FunctionLoss(of_both), *lag)
    assert OF_BATCH in both
    assert "corrects for" not in both
    model = ("model=huggingface", "model.path=a/b", "model.fp32_lm_head=false")
    assert ROUNDED in said_of(Gspo(epsilon_low=3e-4), *model)
    assert ROUNDED not in said_of(FunctionLoss(of_ratio), *model)


def of_ratio(log_ratio, advantages):
    return -log_ratio.exp() * advantages


def of_both(log_probs, old_log_probs, sampling_log_probs, advantages):
    return -(log_probs - old_log_probs).exp() * advantages


def test_check_shows_the_first_line_of_a_functions_docstring_without_importing_it(mine):
    assert "l_t = -softness tanh((r - 1) / softness) A" in equation(
        compose(["loss=mine.soft_clip"]).config
    )
    assert "l_t = as mine.centred computes it" in equation(compose(["loss=mine.centred"]).config)
    (mine / "folder" / "inner").mkdir(parents=True)
    shutil.copy(mine / "mine.py", mine / "folder" / "inner")
    in_folders = compose(["loss=folder.inner.mine.soft_clip"]).config
    assert "l_t = -softness tanh((r - 1) / softness) A" in equation(in_folders)
    assert not {"mine", "folder"} & {*sys.modules}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loss=mine.soft_clip", "loss.hardness=0.1"],
            r"loss.hardness=0.1 needs a parameter of mine.soft_clip .* Its own are softness\. Use "
            r"loss.softness=0.1\.$",
        ),
        (
            ["loss=mine.soft_clip", "loss.softness=little"],
            r"loss.softness=little needs a number \(got little\).* Use loss.softness=0.3\.",
        ),
        (
            ["loss=mine.soft_clip", "loss.softness=true"],
            r"loss.softness=true needs a number \(got true\).* Use loss.softness=0.3\.",
        ),
        (
            ["loss=mine.best_of", "loss.k=2.5"],
            r"loss.k=2.5 needs a whole number \(got 2.5\).* has 2 there\. Use loss.k=2\.",
        ),
        (
            ["loss=mine.best_of", "loss.squares=1"],
            r"loss.squares=1 needs true or false \(got 1\).* Use loss.squares=false\.",
        ),
        (
            ["loss=mine.Squared", "loss.tau=little"],
            r"loss.tau=little needs a number \(got little\).* Use loss.tau=0.1\.",
        ),
        (["loss=mine.named_as_ours"], "returns a metric named reward, which each run has"),
        (["loss=mine.centred"], "it depends on other tokens. Ask for `documents`"),
        (
            ["loss=mine.of_groups", "accumulation.docs_per_step=12"],
            "multiple of the group size 8 .* Use accumulation.docs_per_step=16",
        ),
        (["loss=mine.of_groups", "accumulation=fixed"], "Use accumulation=dynamic"),
        (
            ["loss=mine.of_groups", "rollout.group_size=1"],
            r"^loss=mine.of_groups needs rollout.group_size other than 1 \(got 1\)\.",
        ),
        (
            ["loss=mine.rewarded", "rollout.group_size=1"],
            r"^loss=mine.rewarded needs rollout.group_size other than 1 \(got 1\)\.",
        ),
        (
            ["loss=mine.of_groups", "correction=token_mask", "rollout.old_log_probs=training"],
            "Use correction=none",
        ),
    ],
)
def test_a_loss_function_that_cannot_be_right_is_refused(mine, overrides, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(compose(overrides).config)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_parameter_of_one_loss_of_a_sweep_is_answered_with_sweeps_in_one_folder(
    mine, in_file, monkeypatch
):
    """What it says to type trains each loss with what it has; nothing is said of a key that none
    has."""
    typed = ["loss=grpo,mine.soft_clip,gspo", "loss.softness=0.1,0.2"]
    file = None
    if in_file:
        file = mine / "own.yaml"
        params = ", ".join(word.replace("=", ": '") + "'" for word in typed)
        file.write_text(
            f"defaults: [config, _self_]\nhydra: {{sweeper: {{params: {{{params}}}}}}}\n"
        )
        typed = []
    typed += ["seed=0,1", "tracking=none", "hydra.launcher.n_jobs=2"]
    refused = problems(check(typed, multirun=True, sweep_file=file))
    assert len(refused) == 2  # of grpo and gspo, which list their own keys
    commands = refused[0].partition(" use several sweeps in one folder: ")[2].split(" && ")
    trained = []
    folders = set()
    for command in commands:
        words = shlex.split(command)
        words = words[words.index("own.yaml" if in_file else "-m") + 1 :]
        sweep = check(words, multirun=True, sweep_file=file)
        assert problems(sweep) == []
        assert sweep.config.launcher.settings["n_jobs"] == 2
        folders.add(sweep.folder)
        for job in sweep.jobs.values():
            loss = job.config.loss
            softness = loss.options.get("softness") if loss.name == "custom" else None
            trained.append((loss.name, softness, job.config.seed))
    assert len(folders) == 1
    of_losses = [("grpo", None), ("gspo", None), ("custom", 0.1), ("custom", 0.2)]
    expected = {(loss, softness, seed) for loss, softness in of_losses for seed in (0, 1)}
    assert len(trained) == len(expected)
    assert {*trained} == expected
    for_one = ["loss=mine.likelihood,mine.soft_clip", "loss.softness=0.1", "tracking=none"]
    assert "in one folder: " in " ".join(problems(check(for_one, multirun=True)))
    for value in ("1", "1,2"):
        words = ["loss=grpo,mine.soft_clip", f"loss.hardness={value}", "tracking=none"]
        told = problems(check(words, multirun=True))
        assert told
        assert "one folder" not in " ".join(told)


def test_a_whole_number_is_a_value_where_the_default_is_any_number(mine):
    for words in (["loss=mine.soft_clip", "loss.softness=1"], ["loss=mine.Squared", "loss.tau=1"]):
        loss_of(compose(words).config)


def test_a_function_that_its_file_lacks_has_no_equation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lacking.py").write_text("import functools\nmade = functools.partial(print)\n")

    def lines(name: str) -> list[str]:
        return [line for line in equation(compose([f"loss={name}"]).config) if "l_t = " in line]

    assert lines("lacking.nope") == []
    for name in ("lacking.made", "nowhere.nope"):
        assert lines(name) == [f"l_t = as {name} computes it"]


def test_a_folder_of_another_run_is_refused_with_the_loss_that_was_typed(mine):
    def values(*words: str) -> dict:
        return plain_config(compose([*words]).config)

    with RunDirectory(mine / "run") as run:
        run.write_config(values("loss=mine.soft_clip", "loss.softness=0.1"), [])
    for words, message in (
        (["loss=grpo"], r"\(got one with loss=mine.soft_clip, not grpo\)"),
        (["loss=mine.centred"], r"\(got one with loss=mine.soft_clip, not mine.centred\)"),
        (["loss=mine.soft_clip", "loss.softness=0.2"], r"with loss.softness=0.1, not 0.2\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse_another(mine / "run", values(*words))
