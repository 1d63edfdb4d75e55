"""Experiments from Python are what the command makes of them, and leave the process as it is."""

import ast
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import hydra
import numpy as np
import pytest
from builders.runs import CLOCK_COLUMNS, SHORT, config_of, last_of_each_key, run
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase, getbase

import pgtoolkit
from pgtoolkit import experiment
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError, Interrupted, PgtoolkitError, StorageError
from pgtoolkit.launch import start
from pgtoolkit.launch.apart import call_apart
from pgtoolkit.launch.in_python import in_python
from pgtoolkit.launch.ranks import train_job
from pgtoolkit.runs.directory import RunDirectory, occupied
from pgtoolkit.runs.records import leaves, read_provenance, read_status
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.tracking.next_commands import OF_PYTHON, pgtk_command, python_call
from pgtoolkit.tracking.renewed_line import NotebookBar, ToldLine

SMALL = (*SHORT, "trainer.max_steps=3", "metrics=basic")
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """A folder of two short runs, of two losses, and a file that is none."""
    folder = tmp_path_factory.mktemp("runs")
    for loss in ("grpo", "gspo"):
        run(folder / loss, f"loss={loss}", "trainer.max_steps=3", "rollout.keep_completions=2")
    (folder / "notes.txt").write_text("of mine")
    return folder


def test_a_configuration_has_the_values_of_the_command_by_the_names_that_are_typed(
    tmp_path, monkeypatch
):
    config = experiment.compose(*last_of_each_key(*SMALL, "loss=grpo", "loss.epsilon_low=0.1"))
    assert config["loss"] == "grpo"
    assert config["loss.epsilon_low"] == 0.1
    assert config["trainer.max_steps"] == 3
    plain = dict(leaves(plain_config(config_of(*SMALL, "loss=grpo", "loss.epsilon_low=0.1"))))
    assert config["rollout.group_size"] == plain["rollout.group_size"] == 4
    assert len(config) == len([*config]) > 90
    assert "loss.epsilon_high = 0.2 (default 0.0004)" in config._repr_html_()
    own = experiment.compose("loss=my_losses.soft_clip", "loss.softness=0.2")
    assert (own["loss"], own["loss.softness"]) == ("my_losses.soft_clip", 0.2)
    assert "loss.epsilon" not in config
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_losses.py").write_text(
        "def soft_clip(log_ratio, rewards=None, *, softness=0.3, width=(1, 2)):\n    ..."
    )
    own = experiment.compose("loss=my_losses.soft_clip", "advantage=grpo")
    assert (own["loss.softness"], own["loss.width"]) == (0.3, [1, 2])
    assert "loss.rewards" not in own
    assert experiment.compose("loss=my_losses.soft_clip", "loss.softness=1")["loss.softness"] == 1
    assert config.get("loss.epsilon", 1) == 1
    for typed, meant in (("loss.epsilon", "loss.epsilon_low"), ("max_steps", "trainer.max_steps")):
        with pytest.raises(KeyError) as refused:
            config[typed]
        assert isinstance(refused.value, ConfigError)
        assert str(refused.value) == f"Unknown key {typed!r}. Use {meant!r}."
        assert refused.value._render_traceback_() == [f"pgtk: error: {refused.value}"]


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (("los=grpo", "trainer.max_steps=x"), ["Unknown key 'los'", "needs a whole number"]),
        (
            ("loss=grpo,gspo", "seed=0,1"),
            [
                "needs a sweep",
                'Use sweep({"loss": ["grpo", "gspo"]}).\n',
                'Use sweep({"seed": [0, 1]}).',
            ],
        ),
        (
            ("loss=gspo loss.epsilon_low=0.1",),
            ['are words of their own. Use "loss=gspo", "loss.epsilon_low=0.1".'],
        ),
        (
            ("loss=__main__.soft", "callbacks.mine.path=__main__.Mine"),
            [
                "loss=__main__.soft needs a function in a file (got one of a session). ",
                " Use loss=my_code.soft.",
                " Use callbacks.mine.path=my_code.Mine.",
            ],
        ),
        (("advantage=gae", "rollout=recorded"), ["advantage=gae needs"]),
        ((["loss=grpo"],), ["compose needs overrides, each a text", "compose(*overrides)"]),
    ],
)
def test_all_problems_are_refused_together_and_shown_as_the_command_shows_them(words, problems):
    with pytest.raises(ConfigError) as refused:
        experiment.compose(*words)
    (shown,) = refused.value._render_traceback_()
    assert shown == f"pgtk: error: {refused.value}"
    assert all(problem in shown for problem in problems)


def test_hydra_stays_as_the_owner_of_the_process_has_initialized_it(tmp_path):
    """And composes pgtk's options, beside files of another program with the same names."""
    before = VersionBase.instance().version_base
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "sgd.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.1\n")
    (tmp_path / "main.yaml").write_text("defaults:\n  - optimizer: sgd\n")
    try:
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
            experiment.compose("loss=grpo")
            theirs = hydra.compose("main")
            assert str(getbase()) == "1.2"
        with hydra.initialize_config_dir(experiment.CONFIG_DIRECTORY, version_base="1.3"):
            ours = hydra.compose("config", overrides=["loss=grpo", "loss.epsilon_low=0.1"])
            with pytest.raises(Exception, match="epsilon_low=much"):
                hydra.compose("config", overrides=["loss=grpo", "loss.epsilon_low=much"])
        assert not GlobalHydra.instance().is_initialized()
    finally:
        VersionBase.instance().version_base = before
    assert theirs.optimizer == {"_target_": "torch.optim.SGD", "lr": 0.1}
    assert (ours.loss.name, ours.loss.epsilon_low) == ("grpo", 0.1)
    assert ours.optimizer.learning_rate == 1e-3  # by pgtk's own resolver


def test_files_of_options_are_read_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    (tmp_path / "experiment").mkdir()
    for seed in (3, 4):
        text = f"# @package _global_\nseed: {seed}\n"
        (tmp_path / "experiment" / "mine.yaml").write_text(text)
        assert experiment.compose("experiment=mine")["seed"] == seed


def test_a_run_is_loaded_with_the_columns_of_its_files(two_runs):
    loaded = experiment.load(two_runs / "grpo")
    assert (loaded.name, loaded.status, loaded.step) == ("grpo", "done", 3)
    assert loaded.config["loss"] == "grpo"
    with pytest.raises(ConfigError, match=r"Unknown key 'loss.eps'. Use 'loss.epsilon_"):
        loaded.config["loss.eps"]
    for runs, options, problem in (
        ([], {}, "compare needs runs (got none)."),
        ([3], {}, "compare needs runs (got 3)."),
        ([two_runs], {"over": ["seed"]}, "over needs a text (got ['seed'])."),
        (
            [two_runs],
            {"labels": "loss=grpo=a"},
            "labels needs a list of texts (got 'loss=grpo=a').",
        ),
        ([two_runs], {"ignore_code": "code"}, "ignore_code needs True or False (got 'code')."),
        ([two_runs], {"margin": 0.02, "reach": "reward=0"}, 'margin="0.02" needs a number of doc'),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(problem)}"):
            experiment.compare(*runs, **options)
    rows = [json.loads(row) for row in (loaded.path / "metrics.jsonl").open()]
    assert {*loaded.metrics.columns} == {name for row in rows for name in row}
    assert loaded.metrics["reward"].tolist() == [row["reward"] for row in rows]
    assert [str(step) for step in loaded.metrics["step"]] == ["1", "2", "3"]
    assert len(loaded.evaluations) == 0
    assert {"step", "prompt", "completion", "reward", "set"} <= {*loaded.samples.columns}
    assert set(loaded.samples["set"]) == {"training"}
    assert loaded.figure()._repr_png_().startswith(b"\x89PNG")


def test_a_folder_is_a_sequence_of_runs_that_can_be_compared(two_runs):
    runs = experiment.load(two_runs)
    assert [loaded.name for loaded in runs] == ["grpo", "gspo"]
    assert runs._repr_html_().count("<tr>") == 3
    compared = experiment.compare(runs, metric="reward", against="loss=grpo")
    assert str(compared) == str(experiment.compare(two_runs, metric="reward", against="loss=grpo"))
    assert compared.table["label"].tolist() == ["grpo", "gspo"]
    assert compared.table["verdict"][0] == "base"
    assert "<table>" in compared._repr_html_()
    assert len(compared.figure().axes) == 3
    assert [len(runs.figure(panels).axes) for panels in (None, "steps,means")] == [3, 2]
    with pytest.raises(ConfigError, match=r"^panels=3 needs names of panels: documents, steps"):
        compared.figure(3)
    with pytest.raises(ConfigError, match="no such folder"):
        experiment.load(two_runs / "none")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda runs: experiment.check("loss=gspo"), r'Use check\(compose\("loss=gspo"\)\)\.$'),
        (lambda runs: experiment.sweep("loss=gspo"), r'Use train\(compose\("loss=gspo"\)\)\.$'),
        (
            lambda runs: experiment.check("loss=grpo,gspo"),
            r'Use check\(\{"loss": \["grpo", "gspo"\]\}\)\.$',
        ),
        (
            lambda runs: experiment.sweep("clip_rang"),
            r'^sweep needs a sweep .* Use sweep\("clip_range"\)\.$',
        ),
        (
            lambda runs: experiment.check("clip_rang"),
            r'^check needs .*Use check\("clip_range"\)\.$',
        ),
        (
            lambda runs: experiment.compare(runs, metric="rewrd"),
            r'^metric="rewrd" needs .* Use metric="reward"\.$',
        ),
        (
            lambda runs: experiment.compare(runs, metric="final:rewrd"),
            r'Use metric="final:reward"\.$',
        ),
        (
            lambda runs: experiment.compare(runs, metric="reward", against="grp"),
            r'^against="grp" needs .* Use against="loss=grpo"\.$',
        ),
        (
            lambda runs: experiment.compare(runs, metric="reward", best_of="seed"),
            r'^best_of="seed" needs .* Use best_of="loss"\.$',
        ),
        (
            lambda runs: experiment.compose("seed=1-3"),
            r'Use sweep\(\{"seed": range\(1, 4\)\}\)\.$',
        ),
        (
            lambda runs: experiment.compose("loss=mine.Loss", "loss.tau=0.1,0.2"),
            r'Use sweep\(\{"loss.tau": \[0.1, 0.2\]\}\)\.$',
        ),
        (
            lambda runs: experiment.compose("task.path=a,b.jsonl"),
            r'Use sweep\(\{"task.path": \["a", "b.jsonl"\]\}, "task=prompts"\), or '
            r""""task=prompts", "task.path='a,b.jsonl'" for one value\.$""",
        ),
        (
            lambda runs: experiment.train(experiment.compose("hydra.launcher.n_jobs=2")),
            r'Use sweep\(grid, "hydra.launcher.n_jobs=2"\), or leave it out\.$',
        ),
        (lambda runs: experiment.compare("none_here"), r'^compare\("none_here"\) needs'),
        (lambda runs: experiment.load("none_here"), r'^load\("none_here"\) needs'),
        (
            lambda runs: experiment.compare(runs, metric="reward").figure("foo"),
            r'^panels=foo needs .* Use panels="documents,means"\.$',
        ),
    ],
)
def test_messages_say_what_to_use_as_python_types_it(two_runs, call, message):
    with pytest.raises(ConfigError, match=message):
        call(two_runs)


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("-m loss=grpo,gspo seed=1 x.y=0.5,1e-6", "-m loss=grpo,gspo x.y=0.5,1e-06 seed=1"),
        ("-m seed=range(1,4) x=[1,2]", "-m seed=1,2,3 x=[1,2]"),
        ("-m y=1 x=[1,2],[3]", "-m x=[1,2],[3] y=1"),
        ("-m loss=grpo y=1", "-m loss=grpo y=1"),
        ("sweep sweeps/mine.yaml seed=3", "sweep sweeps/mine.yaml seed=3"),
        ("resume 'my runs/first'", "continue 'my runs/first' loss=gspo"),
        ("loss=grpo seed=1", "loss=grpo seed=1"),
        ("compare outputs/sweeps/mine", "compare outputs/sweeps/mine"),
    ],
)
def test_a_command_becomes_the_call_that_is_the_same(command, meant, monkeypatch):
    """The call is made, of functions that give the words of the command that they are."""
    words = shlex.split(command)
    call = python_call(*words)
    assert call is not None
    functions = {
        "config": ["loss=gspo"],
        "compose": lambda *overrides: [*overrides],
        "train": lambda words, folder=None: ["continue", folder, *words] if folder else words,
        "sweep": lambda grid, *more: experiment._sweep_words("sweep", grid, more)[2][1:],
        "compare": lambda folder: ["compare", folder],
    }
    monkeypatch.setattr(experiment, "sweep_file", Path)
    assert eval(call, functions) == shlex.split(meant)
    monkeypatch.setenv(OF_PYTHON, "1")
    assert pgtk_command(*words) == call
    monkeypatch.delenv(OF_PYTHON)
    assert pgtk_command(*words).endswith(f"pgtk {shlex.join(words)}")


def test_a_folder_of_options_is_set_before_the_call(monkeypatch):
    call = python_call("--config-dir=my options", "-m", "loss=soft,grpo")
    assert call is not None
    called = []
    environment = SimpleNamespace(environ={})

    def sweep(grid: dict) -> None:
        called.append((environment.environ["PGTK_CONFIG_DIR"], grid))

    exec(call, {"os": environment, "sweep": sweep})
    assert called == [("my options", {"loss": ["soft", "grpo"]})]


def test_notes_of_a_process_that_python_has_started_say_what_to_write_there(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(start, "run_sweep", lambda checked: 0)
    words = ["-m", "seed=3", "tracking=none", f"hydra.sweep.dir={tmp_path}/s"]
    for called_from, use in (("", "seed=0,1,2 for three, or pgtk"), ("1", '"seed": [0, 1, 2]')):
        if called_from:
            monkeypatch.setenv(OF_PYTHON, called_from)
        assert start.start(words, None, ["pgtk", *words]) == 0
        assert f"Use {use}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "resume outputs/first trainer.max_steps=6",
        "-m hydra.sweep.dir=x",
        "ui",
        "compare a --margin=0.02",
    ],
)
def test_a_command_without_the_same_call_stays_one(command):
    assert python_call(*command.split()) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda flag: experiment.compose(flag, "loss=grpo"),
        lambda flag: experiment.check({"seed": [7]}, flag),
        lambda flag: experiment.sweep({"seed": [7]}, "loss=grpo", flag),
    ],
)
def test_a_flag_of_the_command_is_refused_before_anything_is_trained(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"needs overrides without flags \(got '--config-dir=mine'"
    ):
        call("--config-dir=mine")
    assert not (tmp_path / "outputs").exists()


def test_an_option_of_one_s_own_is_found_by_what_the_refusal_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = tmp_path / "mine" / "loss" / "soft.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("defaults: [grpo]\nepsilon_low: 0.1\n")
    with pytest.raises(ConfigError, match=r"loss=soft ") as refused:
        experiment.compose("loss=soft")
    folder = re.search(r'Use os.environ\["PGTK_CONFIG_DIR"\] = "(\w+)", before', str(refused.value))
    assert folder is not None
    monkeypatch.setenv("PGTK_CONFIG_DIR", folder[1])
    assert experiment.compose("loss=soft")["loss.epsilon_low"] == 0.1


def test_a_directory_that_is_occupied_is_answered_with_the_call_that_goes_on(tmp_path):
    (tmp_path / "config.yaml").touch()
    message = in_python(occupied("hydra.run.dir=x", tmp_path, "config.yaml"))
    assert message.endswith(
        f'Use train(config, "{tmp_path}") to continue that run, or another directory.'
    )


def test_runs_that_failed_before_a_step_are_said_to_have_failed_and_runs_are_a_table(tmp_path):
    status = {"state": "failed", "step": 0, "reason": "DataError: my reward is NaN " * 9}
    for name in ("first", "second"):
        with RunDirectory(tmp_path / name) as directory:
            directory.write_config(plain_config(config_of(*SMALL)), [])
            (directory.path / "status.json").write_text(json.dumps(status))
    with pytest.raises(ConfigError, match=r"\(got none\)\. first failed: DataError: my reward is"):
        experiment.compare(tmp_path, metric="reward")
    header, first, second = repr(experiment.load(tmp_path)).splitlines()
    assert header.split() == ["run", "status", "steps", "folder", "reason"]
    assert first.split()[:3] == ["first", "failed", "0"]
    assert "my reward is NaN" in second
    assert "\n" not in second
    assert repr(experiment.Runs()) == "no runs"


def test_arguments_of_other_types_are_refused_with_what_to_type():
    config = experiment.compose()
    path, texts, keys = "a path, as a text", "overrides, each a text", "keys with their values, or"
    for call, problem in (
        (lambda wrong: experiment.load(wrong), f"load needs {path}"),
        (lambda wrong: experiment.train(config, wrong), f"directory needs {path}"),
        (lambda wrong: experiment.check(config, wrong), f"check needs {texts}"),
        (lambda wrong: experiment.check(wrong), f"check needs {keys}"),
        (lambda wrong: experiment.sweep(wrong), f"sweep needs {keys}"),
        (lambda wrong: experiment.sweep({"seed": 0}, wrong), f"sweep needs {texts}"),
        (lambda wrong: experiment.train(wrong), "train needs a configuration"),
    ):
        for wrong in (3, ["loss=grpo"], b"outputs"):
            with pytest.raises(ConfigError) as refused:
                call(wrong)
            assert str(refused.value).startswith(problem)
            assert f" (got {wrong!r})" in str(refused.value)
            assert " Use " in str(refused.value)
    with pytest.raises(ConfigError, match="for one configuration, train"):
        experiment.sweep(config)
    with pytest.raises(ConfigError, match=f"^directory needs {path}"):
        experiment.train(config, "")


def test_values_of_a_grid_become_the_words_of_the_command():
    words, file, command = experiment._sweep_words(
        "sweep",
        {"loss": ["grpo", "gspo"], "seed": range(2), "trainer.max_steps": 3},
        ["metrics=basic"],
    )
    assert words == ["loss=grpo,gspo", "seed=0,1", "trainer.max_steps=3", "metrics=basic"]
    assert (file, command[:2]) == (None, ["pgtk", "-m"])
    paths = {"model.path": [Path("a, b"), Path("c")], "task.path": Path("d"), "seed": np.int64(3)}
    words, _, _ = experiment._sweep_words("sweep", paths, [])
    assert words == ['model.path="a, b",c', "task.path=d", "seed=3"]
    words, file, command = experiment._sweep_words("sweep", "clip_range", ["seed=1"])
    assert (words, file.name) == (["seed=1"], "clip_range.yaml")
    assert command == ["pgtk", "sweep", "clip_range", "seed=1"]


def defined_here(log_ratio, advantages):
    return -log_ratio * advantages


def test_what_no_override_says_is_refused_in_a_grid_with_what_to_type(monkeypatch):
    needs = "loss needs values that are texts, numbers, paths"
    for grid, problem, use in (
        ({}, "check needs keys with their values (got {}).", "for one run, train(compose())."),
        ({"seed": []}, "seed needs one value or more (got [])", 'Use {"seed": [VALUE]}.'),
        ({3: [1]}, "check needs overrides, each a text (got 3)", 'Use check({"seed": [0, 1, 2]}).'),
        ({"loss": [json.dumps, "grpo"]}, needs, 'Use {"loss": ["json.dumps"]}.'),
        ({"loss": {"grpo"}}, f"{needs}, True, False, None or lists of these (got {{'grpo'}} ", ""),
        ({"loss": np.ones((2, 2))}, f"{needs}, True, False, None or lists of these (got array", ""),
    ):
        with pytest.raises(ConfigError) as refused:
            experiment.check(grid)
        assert str(refused.value).startswith(problem)
        assert str(refused.value).endswith(use)
    monkeypatch.setattr(defined_here, "__module__", "__main__")
    for value in (defined_here, [defined_here, "grpo"], [[defined_here]]):
        with pytest.raises(ConfigError, match=r"^loss=__main__.defined_here needs a function in a"):
            experiment.sweep({"loss": value})


class Display:
    """Stands for IPython's display of one output, whose text is replaced."""

    def __init__(self):
        self.texts: list[str] = []

    def __call__(self, data: dict[str, str], raw: bool, display_id: bool) -> "Display":
        assert raw
        assert display_id
        self.update(data, raw)
        return self

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.texts.append(data["text/plain"])


def test_progress_that_is_told_by_another_process_is_one_output_of_a_notebook(capsys, monkeypatch):
    told = ToldLine(total=4)
    told.show(1, ["step 1/4", "0:09 left"])
    told.show(4, ["step 4/4", "0:00 left"])
    told.close()
    first, last, end = capsys.readouterr().out.rstrip("\n").split("\n")
    display = Display()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    bar = NotebookBar()
    assert bar.take(first)
    assert re.fullmatch(r"step 1/4 \|█+.? +\|, 0:09 left", display.texts[-1])
    assert bar.take(last)
    assert bar.take(end)
    assert re.fullmatch(r"step 4/4 \|█+\|, 0:00 left", display.texts[-1])
    assert not bar.take("reward       0.058 -> 0.076")
    assert capsys.readouterr() == ("", "")
    assert bar.take(first)
    bar.close(leave=False)
    assert display.texts[-1] == ""


FAILING = """
import os, signal
from pgtoolkit.errors import StorageError

def fail(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"known": StorageError("a full disk"), "unknown": KeyError("x")}[kind]
"""


def test_a_call_in_a_process_of_its_own_has_its_result_and_its_errors(tmp_path, monkeypatch, capfd):
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    fail = importlib.import_module("failing").fail
    assert call_apart(os.path.join, ("a", "b"), ["pgtk"]) == "a/b"
    with pytest.raises(StorageError, match="a full disk"):
        call_apart(fail, ("known",), ["pgtk"])
    with pytest.raises(PgtoolkitError, match="KeyError: 'x'"):
        call_apart(fail, ("unknown",), ["pgtk"])
    assert 'raise {"known"' in capfd.readouterr().err
    with pytest.raises(PgtoolkitError, match="ended by SIGKILL"):
        call_apart(fail, ("kill",), ["pgtk"])


def numbers(folder: Path) -> dict[str, list[float]]:
    columns = read_metrics(folder / "metrics.jsonl")
    return {name: values.tolist() for name, values in columns.items() if name not in CLOCK_COLUMNS}


@pytest.mark.slow
@pytest.mark.starts_python
def test_a_training_is_that_of_the_command_whatever_torch_is_set_to(tmp_path):
    """And what the owner of the process has set stays; the record is the command's, too."""
    import torch

    words = last_of_each_key(*SMALL, "loss=grpo")
    os.chdir(tmp_path)
    train_job(config_of(*words), tmp_path / "command", words)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    state = torch.get_rng_state()
    environment = dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    try:
        config = experiment.compose(*words)
        trained = experiment.train(config)
        assert torch.get_default_dtype() == torch.float64
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.get_rng_state(), state)
    assert (os.environ, signal.getsignal(signal.SIGINT)) == (environment, handler)
    assert numbers(trained.path) == numbers(tmp_path / "command")
    assert trained.path.relative_to(tmp_path).parts[0] == "outputs"
    assert read_provenance(trained.path)["command"] == ["pgtk", *words]


@pytest.mark.slow
def test_an_interrupt_saves_a_checkpoint_and_the_same_call_goes_on(tmp_path):
    os.chdir(tmp_path)
    config = experiment.compose(*last_of_each_key(*SMALL, "trainer.max_steps=15"))

    def interrupt() -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or not metrics.stat().st_size:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted, match=r"^stopped as asked \(SIGINT\) after") as stopped:
        experiment.train(config, "run")
    assert str(stopped.value).endswith('. Continue with: train(config, "run")')
    status = read_status(tmp_path / "run")
    assert (status["state"], status["reason"]) == ("interrupted", "SIGINT")
    assert 0 < status["saved"] == status["step"] < 15
    other = experiment.compose(*last_of_each_key(*SMALL, "trainer.max_steps=5"))
    with pytest.raises(ConfigError, match=r"trainer.max_steps=15, not 5") as refused:
        experiment.train(other, "run")
    assert str(refused.value).endswith(' Use train(config, "outputs/OTHER").')
    assert experiment.train(config, "run").step == 15
    assert read_provenance(tmp_path / "run")["command"][:2] == ["pgtk", "continue"]
    assert experiment.train(config, "run").step == 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_comparison", "own_loss"])
def test_the_notebooks_run(name, tmp_path):
    os.chdir(tmp_path)
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
    namespace: dict = {}
    sys.path.insert(0, str(tmp_path))
    try:
        for cell in cells:
            assert cell.get("outputs", []) == []
            if cell["cell_type"] == "code":
                shown = run_cell("".join(cell["source"]), namespace)
                if hasattr(shown, "_repr_png_"):
                    assert shown._repr_png_()
                elif hasattr(shown, "_repr_html_"):
                    assert shown._repr_html_()
    finally:
        sys.path.remove(str(tmp_path))
    assert {found.status for found in namespace["runs"]} == {"done"}
    assert len(namespace["comparison"].table) == 2


def run_cell(source: str, namespace: dict) -> object:
    """Run a cell of a notebook, of fewer and smaller steps; return the value of its last line."""
    if source.startswith("%%writefile "):
        first, _, text = source.partition("\n")
        Path(first.split()[1]).write_text(text + "\n")
        return None
    source = source.replace("STEPS = 100", "STEPS = 2")
    small = '"rollout.prompts_per_batch=4", "rollout.group_size=4", "accumulation.docs_per_step=8"'
    source = source.replace('"aggregation=constant"', f'"aggregation=constant", {small}')
    source = source.replace('"seed": [0, 1, 2]', '"seed": [0, 1]')
    tree = ast.parse(source)
    if not isinstance(tree.body[-1], ast.Expr):
        exec(compile(tree, "cell", "exec"), namespace)
        return None
    last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, "cell", "exec"), namespace)
    return eval(compile(last, "cell", "eval"), namespace)


def test_importing_it_loads_no_large_library_and_the_package_is_the_command():
    code = """
import sys, pgtoolkit.experiment
large = {"torch", "lightning", "mlflow", "transformers", "pandas", "matplotlib"}
print(sorted(large & set(sys.modules)))
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout == "[]\n", loaded.stderr
    command = [sys.executable, "-m", "pgtoolkit", "--version"]
    version = subprocess.run(command, capture_output=True, text=True)
    assert version.stdout == f"pgtk {pgtoolkit.__version__}\n"
