"""Files of the user's: where they are found, and what is refused in them."""

import shlex
from pathlib import Path

import pytest
from builders.quick import with_slow_between
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.config.files import config_directory
from pgtoolkit.config.hydra_files import forget_files
from pgtoolkit.launch.check import check, notes, problems

GLOBAL = "# @package _global_\n"


def write(files: dict[str, str]) -> None:
    """Write files in the current directory."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


@pytest.fixture(autouse=True)
def current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("check sweep mysweep", "pgtk sweep mysweep.yaml"),
        ("sweep mysweeep.yaml", "pgtk sweep mysweep.yaml"),
        ("check sweep clip_rnge", "pgtk sweep clip_range"),
        ("doctor outputs/frist", "outputs/first"),
        ("compare outptus/first", "outputs/first"),
        ("resume outputs/frist", "outputs/first"),
        ("translate mysweeep.yaml", "pgtk translate mysweep.yaml"),
        ("check --config-dir=outptus", "--config-dir=outputs"),
    ],
)
def test_a_path_where_nothing_is_is_answered_by_the_similar_one_that_exists(capsys, words, use):
    write({"mysweep.yaml": "", "outputs/first/status.txt": ""})
    assert refusal(capsys, *shlex.split(words)).strip().endswith(f" Use {use}.")


EVALUATED = """
defaults: [override /kl: k3]
kl: {coefficient: 0.05, reference: initial}
evaluation: {every: 5, sets: {longer: {num_digits: 8}}, completions_per_prompt: 8}
"""


def test_what_a_file_sets_and_a_typed_choice_switches_off_is_left_out_with_a_note(monkeypatch):
    write({"mine/experiment/long.yaml": GLOBAL + EVALUATED})
    monkeypatch.setenv("PGTK_CONFIG_DIR", "mine")
    checked = check(["experiment=long", "evaluation.every=0"])
    assert problems(checked) == []
    assert checked.config.evaluation.sets == {}
    assert checked.config.kl.coefficient == 0.05
    off = "evaluation.completions_per_prompt, evaluation.sets"
    assert f"{off}: a file's, without effect beside what was typed" in notes(checked)

    typed = ["experiment=long", "evaluation.max_completion_length=9", "kl=none"]
    checked = check(typed)
    assert problems(checked) == []
    assert checked.config.evaluation.sets == {"longer": {"num_digits": 8}}
    off = "kl.coefficient, kl.reference"
    assert f"{off}: a file's, without effect beside what was typed" in notes(checked)
    # What was typed itself is refused, as ever.
    (problem,) = problems(check([*typed, "kl.coefficient=0.1"]))
    assert problem.startswith("kl.coefficient=0.1 needs kl other than none")


@pytest.mark.parametrize("variable", [None, "mine"])
@pytest.mark.parametrize(
    "words",
    [
        "check experiment=long",
        "check sweep s.yaml seed=1",
        "--cfg job experiment=long",
        "--help",
    ],
)
def test_every_command_knows_the_folder_of_own_options_wherever_it_is_named(
    capsys, monkeypatch, words, variable
):
    write(
        {
            "mine/experiment/long.yaml": GLOBAL + "# Mine.\ntrainer: {max_steps: 1234}\n",
            "s.yaml": "defaults: [config, override experiment: long, _self_]\n",
        }
    )
    typed = shlex.split(words)
    lines = [
        ["--config-dir=mine", *typed],
        ["-cd", "mine", *typed],
        [*typed, "--config-dir", "mine"],
    ]
    if variable is not None:
        monkeypatch.setenv("PGTK_CONFIG_DIR", variable)
        lines = [typed]
    for line in lines:
        assert main(line) == 0
        printed = capsys.readouterr().out
        assert {"--help": "  long"}.get(typed[0], "1234") in printed


def test_the_folder_of_pgtoolkit_s_own_options_may_be_named(capsys):
    assert main(["check", "sweep", "clip_range", f"--config-dir={config_directory()}"]) == 0


def test_a_folder_of_own_options_that_is_none_is_refused(capsys, monkeypatch):
    message = refusal(capsys, "check", "--config-dir=nowhere")
    assert "--config-dir=nowhere needs a folder (got nowhere)." in message
    monkeypatch.setenv("PGTK_CONFIG_DIR", "nowhere")
    message = refusal(capsys, "check")
    assert "PGTK_CONFIG_DIR=nowhere needs a folder (got nowhere)." in message


WRONG = [
    # the file, its text, what the answer tells to write, and the text with it
    (
        "s",
        "defaults: [config, override experiment: dapoo, _self_]",
        "- override /experiment: dapo",
        "defaults: [config, override /experiment: dapo, _self_]",
    ),
    (
        "s",
        "defaults: [config, override debug: shrt, _self_]",
        "- override /debug: short",
        "defaults: [config, override /debug: short, _self_]",
    ),
    (
        "s",
        "defaults: [config, override optional loss: gropo, _self_]",
        "- override /loss: grpo",
        "defaults: [config, override /loss: grpo, _self_]",
    ),
    (
        "s",
        "defaults: [config, override experiment: [dapo, dapoo]]",
        "- override /experiment: dapo",
        "defaults: [config, override /experiment: dapo]",
    ),
    (
        "s",
        "defaults: [config, override los: grpo]",
        "- override /loss: grpo",
        "defaults: [config, override /loss: grpo]",
    ),
    (
        "s",
        "defaults: [config, experiment: dapo]",
        "- override /experiment: dapo",
        "defaults: [config, override /experiment: dapo]",
    ),
    (
        "s",
        "defaults: [config, overide experiment: dapo]",
        "- override /experiment: dapo",
        "defaults: [config, override /experiment: dapo]",
    ),
    (
        "s",
        "defaults: [config, override tracking: off]",
        "- override /tracking: none",
        "defaults: [config, override /tracking: none]",
    ),
    ("s", "defaults: [confg, _self_]", "- config", "defaults: [config, _self_]"),
    ("s", "default: [config, _self_]", "defaults: [config, _self_]", "defaults: [config, _self_]"),
    (
        "s",
        "defaults: [config, experiment/dapoo, _self_]",
        "- experiment/dapo",
        "defaults: [config, experiment/dapo, _self_]",
    ),
    (
        "s",
        "defaults: [config, _self_]\nseed: [1, 2]",
        "hydra: {sweeper: {params: {seed: '1,2'}}}",
        "defaults: [config, _self_]\nhydra: {sweeper: {params: {seed: '1,2'}}}",
    ),
    (
        "s",
        "defaults: [config, _self_]\nhydra: {sweeper: {param: {seed: '1,2'}}}",
        "hydra.sweeper.params.seed=1,2",
        "defaults: [config, _self_]\nhydra: {sweeper: {params: {seed: '1,2'}}}",
    ),
    (
        "s",
        "defaults: [config, _self_]\nloss.epsilon_high: 0.1",
        "loss: {epsilon_high: 0.1}",
        "defaults: [config, _self_]\nloss: {epsilon_high: 0.1}",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "defaults: [override /debug: shrt]",
        "- override /debug: short",
        None,
    ),
    (
        "mine/experiment/e",
        GLOBAL + "defaults: [optional dapoo, _self_]",
        "- dapo",
        GLOBAL + "defaults: [dapo, _self_]",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "defaults: [override loss: grpo]",
        "- override /loss: grpo",
        GLOBAL + "defaults: [override /loss: grpo]",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "defaults: [e]\nseed: 1",
        "- _self_",
        GLOBAL + "defaults: [_self_]\nseed: 1",
    ),
    ("mine/experiment/e", "seed: 3", "`# @package _global_` as the first line", GLOBAL + "seed: 3"),
    (
        "mine/experiment/e",
        GLOBAL + "model: {compile: auto}",
        "model: {compile: false}",
        GLOBAL + "model: {compile: false}",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "trainer: {max_steps: ten}",
        "trainer: {max_steps: 10}",
        GLOBAL + "trainer: {max_steps: 10}",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "trainer: {max_stepz: 9}",
        "trainer: {max_steps: 9}",
        GLOBAL + "trainer: {max_steps: 9}",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "loss: grpo",
        "- override /loss: grpo",
        GLOBAL + "defaults: [override /loss: grpo]",
    ),
    (
        "mine/experiment/e",
        GLOBAL + "rollout: {stop: END}",
        "rollout: {stop: [END]}",
        GLOBAL + "rollout: {stop: [END]}",
    ),
    (
        "mine/loss/e",
        "epsilon_high: 0.3",
        "defaults: [grpo, _self_]",
        "defaults: [grpo, _self_]\nepsilon_high: 0.3",
    ),
    ("mine/loss/e", "defaults: [grop, _self_]", "- grpo", "defaults: [grpo, _self_]"),
    (
        "mine/loss/e",
        "defaults: [grpo, _self_]\nloss: {epsilon_high: 0.3}",
        "epsilon_high: 0.3",
        "defaults: [grpo, _self_]\nepsilon_high: 0.3",
    ),
]


def problems_of(name: str) -> list[str]:
    """Return the problems of a file: of a sweep, or of an option in the folder of own options."""
    *_, group, option = f"./{name}".split("/")
    if group == ".":
        return problems(check([], True, sweep_file=Path(f"{name}.yaml").resolve()))
    return problems(check([f"{group}={option}"]))


@pytest.mark.parametrize(("name", "text", "use", "mended"), with_slow_between(WRONG, 3))
def test_what_does_not_exist_in_a_file_is_refused_with_its_name_and_what_to_write(
    monkeypatch, name, text, use, mended
):
    monkeypatch.setenv("PGTK_CONFIG_DIR", "mine")
    write({f"{name}.yaml": f"{text}\n"})
    problem, *others = problems_of(name)
    assert others == []
    assert f"{name}.yaml" in problem
    assert problem.endswith(f"Use {use}.")
    if mended is not None:
        forget_files()
        write({f"{name}.yaml": f"{mended}\n"})
        assert problems_of(name) == []


def test_all_that_is_wrong_in_several_files_is_refused_together(monkeypatch):
    monkeypatch.setenv("PGTK_CONFIG_DIR", "mine")
    write(
        {
            "s.yaml": "defaults: [config, override experiment: e, override /loss: grop, _self_]\n"
            "trainer: {max_steps: ten, devic: cpu}\nsead: 1\n",
            "mine/experiment/e.yaml": GLOBAL + "defaults: [override /debug: shrt]\nsede: 2\n",
        }
    )
    found = [problem.rpartition(" Use ")[2] for problem in problems_of("s")]
    assert sorted(found) == [
        "- override /debug: short.",
        "- override /loss: grpo.",
        "seed: 1.",
        "seed: 2.",
        "trainer: {device: cpu}.",
        "trainer: {max_steps: 10}.",
    ]


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("mine/experiment/e.yml", "mv mine/experiment/e.yml mine/experiment/e.yaml"),
        ("mine/experiments/e.yaml", "mkdir -p mine/experiment; mv mine/experiments/e.yaml mine/"),
        ("mine/e.yaml", "mkdir -p mine/experiment; mv mine/e.yaml mine/experiment/e.yaml"),
        ("other/experiment/e.yaml", "--config-dir=other experiment=e"),
    ],
)
def test_an_option_in_a_wrong_place_is_answered_with_its_place(monkeypatch, file, use):
    write({file: GLOBAL + "seed: 3\n"})
    if file.startswith("mine"):
        monkeypatch.setenv("PGTK_CONFIG_DIR", "mine")
    (problem,) = problems(check(["experiment=e"]))
    assert f"Use {use}" in problem
