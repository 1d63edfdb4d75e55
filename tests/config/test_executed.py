"""Files of somebody else's run nothing: sweeps, options, runs. What is needed of the user's own has to be typed."""

import shlex
import sys
from pathlib import Path

import pytest
from builders.runs import SHORT, config_of
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.launch.check import check, problems
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.next_commands import resume_command
from pgtoolkit.training.train import train

EVIL = """
from pathlib import Path
Path(__file__).with_name("executed").touch()
def score(completion, answer):
    return 1.0
def weights(totals, *, mask, document_index, tokens_per_document, group_index):
    return mask / totals.num_tokens
class Callback:
    pass
"""


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """The current directory, with a module in it that leaves a mark when it is imported."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12=", "answer": "21"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not (tmp_path / "executed").exists()


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return said.err + said.out


HYDRA = {
    "callbacks: {a: {_target_: evil.Callback}}": "hydra.callbacks.a._target_ needs to be left out (got evil.Callback)",
    "job_logging: {version: 1, handlers: {a: {(): evil.Callback}}}": "hydra.job_logging.handlers.a.() needs to be",
    "job: {env_set: {LD_PRELOAD: evil.so}}": "hydra.job.env_set.LD_PRELOAD needs to be typed (got it from a file",
    "launcher: {_target_: evil.Callback}": "hydra.launcher._target_ needs to be left out (got evil.Callback)",
    "sweeper: {_target_: hydra_plugins.evil.S}": "hydra.sweeper._target_ needs to be typed",
    "sweeper: {params: {+hydra.callbacks.a: 1}}": "hydra.sweeper.params.+hydra.callbacks.a needs to be typed",
    "sweeper: {params: {seed: '${oc.create:1}'}}": "hydra.sweeper.params.seed needs to be typed",
    "searchpath: ['pkg://evil']": "hydra.searchpath needs to be left out",
}


@pytest.mark.parametrize("setting", HYDRA)
def test_a_sweep_file_has_hydra_run_nothing(evil, capsys, setting):
    (evil / "mine.yaml").write_text(f"defaults: [config, _self_]\nhydra:\n  {setting}\n")
    assert HYDRA[setting] in refused(capsys, "sweep", "mine.yaml", "seed=1,2", "debug=short")
    assert not (evil / "outputs").exists()


def test_options_of_ones_own_have_hydra_run_nothing(evil, capsys):
    (evil / "conf/experiment").mkdir(parents=True)
    callback = "hydra: {callbacks: {a: {_target_: evil.Callback}}}"
    (evil / "conf/experiment/mine.yaml").write_text(f"# @package _global_\n{callback}\n")
    for command in (["check"], ["-m"]):
        said = refused(capsys, *command, f"--config-dir={evil}/conf", "experiment=mine", "seed=1")
        assert "hydra.callbacks.a._target_ needs to be left out (got evil.Callback)" in said
    # Seen by the sweep alone: each of its runs chooses another loss than the one that brings it.
    (evil / "conf/loss").mkdir()
    (evil / "conf/experiment/second.yaml").write_text("# @package _global_\ndefaults: [override /loss: theirs]\n")
    (evil / "conf/loss/theirs.yaml").write_text(f"# @package _global_\ndefaults: [/loss/gspo@loss]\n{callback}\n")
    command = ["-m", f"--config-dir={evil}/conf", "experiment=second", "loss=gspo,grpo", "debug=short"]
    assert "hydra.callbacks.a._target_ needs to be left out" in refused(capsys, *command)
    assert not (evil / "outputs").exists()


def test_files_beside_a_sweep_stand_for_nothing_of_ours(evil, capsys):
    """Hydra looks for options beside the sweep first, and in --config-dir before conf/."""
    (evil / "mine.yaml").write_text("defaults: [config, _self_]\n")
    for folder, more in ((evil, []), (evil / "options", [f"--config-dir={evil}/options"])):
        (folder / "hydra").mkdir(parents=True)
        (folder / "hydra/pgtk.yaml").write_text("job: {name: pgtk, env_set: {LD_PRELOAD: evil.so}}\n")
        said = refused(capsys, "sweep", "mine.yaml", "seed=1,2", *more)
        assert "hydra.job.env_set.LD_PRELOAD needs to be typed" in said
        (folder / "hydra/pgtk.yaml").unlink()


def test_places_numbers_of_jobs_and_launchers_of_ours_may_stand_in_a_file(evil, monkeypatch):
    monkeypatch.setattr("pgtoolkit.config.rules.run._is_installed", lambda plugin: True)
    file = evil / "mine.yaml"
    file.write_text(
        "defaults: [config, override hydra/launcher: slurm, _self_]\n"
        "hydra: {launcher: {partition: gpu, nodes: 2}, sweep: {dir: mine}, sweeper: {params: {seed: '1,2'}}}\n"
    )
    checked = check(["hydra.launcher.setup=[module load cuda]"], True, sweep_file=file)
    assert problems(checked) == []
    assert checked.runs[0].config.hydra.launcher.partition == "gpu"
    for setting in ("setup: [./evil]", 'partition: "gpu\\n./evil"'):
        file = evil / f"{setting[:4]}.yaml"  # what was composed once is kept
        file.write_text(
            f"defaults: [config, override hydra/launcher: slurm, _self_]\nhydra: {{launcher: {{{setting}}}}}"
        )
        (problem,) = problems(check(["seed=1,2"], True, sweep_file=file))
        assert problem.startswith(f"hydra.launcher.{setting.partition(':')[0]}")
        assert "needs to be typed (got it from a file of a sweep or of --config-dir)" in problem
    (evil / "conf/hydra/launcher").mkdir(parents=True)
    (evil / "conf/hydra/launcher/ours.yaml").write_text("defaults: [slurm]\npartition: gpu\n")
    typed = ["hydra/launcher=ours", "seed=1,2"]
    assert problems(check(typed, True, config_dir=evil / "conf")) == []


def test_an_environment_variable_is_not_read_however_it_is_spelled(evil, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    for text in ("${${tracking.experiment}:SECRET}", "${oc.${metrics.level}:SECRET}", "${oc.decode:'${tracking.uri}'}"):
        found = problems(check([f"tracking.run_name={text}", "tracking.experiment=oc.env"]))
        assert "hunter2" not in str(found)
        assert any(problem.startswith("tracking.run_name") for problem in found), text


# Functions of the user's own


VERIFIER = ["task=prompts", "task.path=prompts.jsonl"]


def test_a_function_is_imported_by_the_word_of_who_types_not_of_a_file(evil, capsys):
    (evil / "conf/experiment").mkdir(parents=True)
    (evil / "conf/experiment/mine.yaml").write_text("# @package _global_\naggregation: {reducer: evil.weights}\n")
    (evil / "mine.yaml").write_text(
        "defaults: [config, override task: prompts, _self_]\ntask: {path: prompts.jsonl, verifier: evil.score}\n"
        "hydra: {sweeper: {params: {aggregation.reducer: 'evil.weights,evil.other'}}}\n"
    )
    said = refused(capsys, "sweep", "mine.yaml", "seed=1,2")
    assert "task.verifier=evil.score needs to be typed (got it from a file). To import it runs its code" in said
    assert "Use task.verifier=evil.score on the command line." in said
    assert "aggregation.reducer=evil.weights needs to be typed" in said
    said = refused(capsys, f"--config-dir={evil}/conf", "experiment=mine")
    assert "aggregation.reducer=evil.weights needs to be typed" in said
    typed = ["task.verifier=evil.score", "aggregation.reducer=evil.weights"]
    assert problems(check([*typed, "seed=1,2"], True, sweep_file=evil / "mine.yaml")) == []
    assert problems(check([*VERIFIER, "task.verifier=evil.score"])) == []
    # By its word it was tried, as a start would, before anything is made.
    (evil / "executed").unlink()
    sys.modules.pop("evil")
    hidden = ["task.verifier=${tracking.run_name}", "tracking.run_name=evil.score"]
    assert "needs to be typed" in str(problems(check([*VERIFIER, *hidden])))


def test_a_program_that_samples_is_run_by_the_word_of_who_types(evil, capsys):
    (evil / "conf/experiment").mkdir(parents=True)
    (evil / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults: [{override /sampler: vllm}]\n"
        "sampler: {executable: ./evil.sh, arguments: [--trust-remote-code]}\n"
    )
    mine = [f"--config-dir={evil}/conf", "experiment=mine"]
    said = refused(capsys, *mine)
    assert "sampler.executable=./evil.sh needs to be typed (got it from a file). It is run as a command" in said
    assert "sampler.arguments=[--trust-remote-code] needs to be typed" in said
    words = ["sampler.executable=./evil.sh", "sampler.arguments=['--trust-remote-code']"]
    (evil / "evil.sh").touch(0o755)
    assert problems(check(["sampler=vllm", *words])) == []
    hidden = ["sampler.executable=${tracking.run_name}", "tracking.run_name=evil"]
    assert "needs to be typed" in str(problems(check(["sampler=vllm", *hidden])))


def saved(folder, *overrides):
    """The directory of a run that has begun with these overrides."""
    short = [one for one in SHORT if not one.startswith("task.")]
    with RunDirectory(folder / "run") as run:
        run.write_config(OmegaConf.to_container(config_of(*short, *overrides), resolve=True), [])


def test_the_command_that_resumes_types_the_program_again(evil):
    words = ["sampler.executable=./a program --x", "sampler.arguments=['--y=1','--z']"]
    saved(evil, "sampler=vllm", *words)
    typed = ["sampler.executable='./a program --x'", words[1]]
    assert shlex.split(resume_command(evil / "run"))[-2:] == typed
    assert compose(words, run_dir=evil / "run").problems == []
    assert "needs to be typed" in str(compose([], run_dir=evil / "run").problems)


def test_one_of_several_verifiers_is_typed_too(evil, capsys):
    """However a file spells it; by its word a file may name those that come with pgtoolkit, and their weights."""
    named = "a: {verifier: exact_match}, b: {verifier: evil.score, weight: 2}"
    spelled = {
        "direct": f"verifiers: {{{named}}}",
        "entry": "verifiers: {b: '${loss.options}'}",
        "whole": "verifiers: '${loss.options}'",
    }
    for name, text in spelled.items():
        others = "{b: {verifier: evil.score}}" if name == "whole" else "{verifier: evil.score}"
        loss = f"loss: {{path: operator.eq, options: {others}}}\n" if name != "direct" else ""
        chosen = ", override loss: custom" if loss else ""
        (evil / f"{name}.yaml").write_text(
            f"defaults: [config, override task: prompts{chosen}, _self_]\n{loss}"
            f"task: {{path: prompts.jsonl, verifier: null, {text}}}\n"
        )
        said = refused(capsys, "check", "sweep", f"{name}.yaml", "seed=1,2")
        assert "task.verifiers.b.verifier=evil.score needs to be typed (got it from a file)" in said, name
    typed = ["task.verifiers.b.verifier=evil.score", "seed=1,2"]
    assert problems(check(typed, True, sweep_file=evil / "direct.yaml")) == []
    (evil / "executed").unlink()  # by its word it was tried, as a start would
    sys.modules.pop("evil")


@pytest.fixture
def theirs(evil):
    """A run that somebody else has made, whose configuration names functions of theirs that lie beside it."""
    short = [one for one in SHORT if not one.startswith("task.")]
    own = [*VERIFIER, "task.verifier=exact_match", "trainer.max_steps=1"]
    train(config_of(*short, *own), evil / "run", overrides=own)
    for name in ("config.yaml", "overrides.yaml"):
        text = (evil / "run" / name).read_text()
        text = text.replace("verifier: exact_match", "verifier: evil.score").replace("=exact_match", "=evil.score")
        (evil / "run" / name).write_text(text.replace("reducer: null", "reducer: evil.weights"))
    return evil / "run"


def test_a_run_of_several_verifiers_is_resumed_by_its_words(evil, capsys):
    several = "task.verifiers={a: {verifier: exact_match}, b: {verifier: operator.eq}}"
    saved(evil, *VERIFIER, "task.verifier=null", several)
    words = "task.verifiers.b.verifier=operator.eq"
    assert words in resume_command(evil / "run").split()
    assert f"{words} needs to be typed" in refused(capsys, "resume", "run", "trainer.max_steps=8")
    assert compose([words], run_dir=evil / "run").problems == []
    changed = ["task.verifier_processes=1", "task.verifier_seconds=9"]
    assert compose([words, *changed], run_dir=evil / "run").problems == []
    (problem,) = compose([words, "task.verifiers.b.weight=2"], run_dir=evil / "run").problems
    assert "task.verifiers.b.weight=2 needs to stay as the run began" in problem


def test_looking_at_a_run_imports_nothing_of_it(theirs, capsys):
    assert main(["export", "run", "model"]) == 0
    assert (Path("model") / "model.safetensors").exists()
    for command in (["compare", "run"], ["diff", "run", "run"]):
        assert main(command) == 0
    said = refused(capsys, "resume", "run", "trainer.max_steps=2")
    for word in ("task.verifier=evil.score", "aggregation.reducer=evil.weights"):
        assert f"{word} needs to be typed (got it from a file)" in said
    words = ["aggregation.reducer=evil.weights", "task.verifier=evil.score"]
    assert resume_command(theirs).endswith(f"resume run {' '.join(words)}")
    assert compose(words, run_dir=theirs).problems == []
