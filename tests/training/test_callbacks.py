"""Callbacks, loggers and profilers of Lightning see a run as Lightning's users expect, and what
they must not do is refused."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders.commands import ENVIRONMENT
from builders.runs import copy_as_of
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import ConfigError
from pgtoolkit.training.callbacks import OwnParts, own_parts

MODULE = """
import json
import lightning

class Tell(lightning.Callback):
    def __init__(self, file):
        self.file = file
        self.epochs = 0

    def on_train_epoch_end(self, trainer, module):
        self.epochs += 1
        module.log("epochs_told", float(self.epochs))
        numbers = [self.epochs, trainer.current_epoch, trainer.global_step]
        with open(self.file, "a") as file:
            print(json.dumps(numbers), file=file)

    def state_dict(self):
        return {"epochs": self.epochs, "file": object()}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]

def one(completion, answer):
    return 1.0
"""
SMALL = (
    "tracking=none",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    "accumulation.docs_per_step=4",
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.num_heads=2",
)


SERVER = """
import json, os, sys
from pgtoolkit import cli
from builders.forked import become, forked_children
from builders.quickened import PICTURES, quicken_hydra

def run_here(folder, words):
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    return int(cli.main(words))

def run_in_fork(folder, words):
    from pgtoolkit.assembly import train

    quicken_hydra()
    train.plot_curves = PICTURES.plot_curves

    def run():
        with forked_children():
            cli.run()

    pid = os.fork()
    if pid == 0:
        sys.argv = ["pgtk", *words]
        become([-1, log, log], folder, None, "pgtk", run)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    folder, words = json.loads(line)
    log = os.open(f"{folder}/printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    run = run_in_fork if "lightning" in sys.modules else run_here
    print(run(folder, words), file=answers, flush=True)
    os.close(log)
"""
"""Runs the first command itself, which imports what a command with callbacks imports, and the
others in forks, which have those imports."""


@pytest.fixture(scope="module")
def pgtk() -> Iterator[Callable[..., str]]:
    """Return a function that runs a command in a folder, in the process of `SERVER`, and returns
    what it prints."""
    tests = Path(__file__).parents[1]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=ENVIRONMENT | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(folder: Path, *arguments: str) -> str:
        print(json.dumps([str(folder), arguments]), file=server.stdin, flush=True)
        status = server.stdout.readline()
        printed = (folder / "printed").read_text()
        assert status == "0\n", printed
        return printed

    yield run
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current directory with classes of the user's and prompts."""
    (tmp_path / "mine.py").write_text(MODULE)
    rows = [json.dumps({"prompt": f"{number}=", "answer": "1"}) for number in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_early_stopping_ends_a_run_of_constant_rewards_at_its_fourth_batch(folder, pgtk):
    early = "lightning.pytorch.callbacks.EarlyStopping"
    (folder / "conf" / "callbacks").mkdir(parents=True)
    (folder / "conf" / "callbacks" / "all.yaml").write_text(
        f"stop: {{_target_: {early}, monitor: reward, patience: 3}}\n"
        "rate: {_target_: lightning.pytorch.callbacks.LearningRateMonitor}\n"
        "summary: {_target_: lightning.pytorch.callbacks.ModelSummary}\n"
        "profile: {_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: ., "
        "filename: profile}\n"
        "csv: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: logs}\n"
    )
    printed = pgtk(
        folder,
        "--config-dir=conf",
        "callbacks=all",
        "hydra.run.dir=run",
        *SMALL,
        "task=prompts",
        "task.path=prompts.jsonl",
        "task.verifier=mine.one",
        "trainer.max_steps=400",
        "optimizer.warmup_steps=16",
    )
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["saved"]) == ("done", 16, 16)
    assert status["reason"] == "a callback of your own stopped the training after step 16"
    assert "callbacks.own={}" in printed
    with open(folder / "logs/lightning_logs/version_0/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    rewards = {int(row["step"]): float(row["reward"]) for row in rows if row["reward"]}
    assert rewards == dict.fromkeys(range(1, 17), 1.0)
    rates = [float(row["lr-LocalAdamW/pg1"]) for row in rows if row["lr-LocalAdamW/pg1"]]
    updates = [float(row["learning_rate"]) for row in rows if row["learning_rate"]]
    assert rates[1:] == updates[:-1]  # the monitor reads a rate before its step sets the next one
    assert updates[-1] == 1e-3
    assert "Total params" in printed
    assert "run_training_epoch" in (folder / "fit-profile.txt").read_text()


@pytest.mark.slow
def test_a_callback_of_the_users_own_sees_epochs_of_batches_and_keeps_its_state(folder, pgtk):
    tell = ("callbacks.tell._target_=mine.Tell", "callbacks.tell.file=told")
    saved = ("trainer.checkpoint_every=4", "trainer.keep_checkpoints=99")
    pgtk(folder, "hydra.run.dir=whole", *SMALL, *tell, *saved, "trainer.max_steps=12")
    whole = (folder / "told").read_text().splitlines()
    assert [json.loads(line) for line in whole] == [[1, 0, 4], [2, 1, 8], [3, 2, 12]]
    (folder / "told").unlink()
    copy_as_of(folder / "whole", 4, folder / "run")
    pgtk(folder, "resume", "run")
    assert (folder / "told").read_text().splitlines() == whole[1:]
    rows = [(folder / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "run")]
    losses = [[json.loads(row)["loss"] for row in of_run] for of_run in rows]
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_each_of_two_ranks_has_the_callbacks_and_the_first_the_loggers(folder, pgtk):
    pgtk(
        folder,
        "hydra.run.dir=run",
        *SMALL,
        "trainer.max_steps=4",
        "parallelism.data_parallel=2",
        "callbacks.tell.path=mine.Tell",
        "callbacks.tell.file=told",
        "callbacks.rate.path=lightning.pytorch.callbacks.LearningRateMonitor",
        "callbacks.csv.path=lightning.pytorch.loggers.CSVLogger",
        "callbacks.csv.save_dir=logs",
    )
    told = (folder / "told").read_text().splitlines()
    assert [json.loads(line) for line in told] == [[1, 0, 4]] * 2
    (file,) = (folder / "logs").glob("*/*/metrics.csv")
    with open(file) as opened:
        rows = list(csv.DictReader(opened))
    assert [int(row["step"]) for row in rows if row["reward"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("part", "use"),
    [
        (ModelCheckpoint(), "Use trainer.checkpoint_every, trainer.keep_checkpoints"),
        (GradientAccumulationScheduler({0: 2}), "Use accumulation.docs_per_step"),
        (object(), "Use a class that inherits from lightning.Callback"),
    ],
)
def test_what_the_run_does_itself_is_refused_with_what_to_use(part, use):
    with pytest.raises(ConfigError, match=use):
        OwnParts().add("mine", part)


def test_an_object_is_made_of_its_path_and_arguments():
    path = "lightning.pytorch.callbacks.EarlyStopping"
    parts = own_parts({"stop": {"path": path, "monitor": "reward", "patience": 7}})
    (callback,) = parts.callbacks
    assert isinstance(callback, EarlyStopping)
    assert callback.patience == 7
    with pytest.raises(ConfigError, match=r"callbacks\.stop\.path=.*unexpected keyword argument"):
        own_parts({"stop": {"path": path, "monitor": "reward", "patients": 7}})


def test_hydras_word_for_a_class_is_another_spelling_of_its_path(tmp_path, monkeypatch):
    for group in ("callbacks", "loss", "experiment", "task"):
        (tmp_path / group).mkdir()
    (tmp_path / "callbacks/early.yaml").write_text("stop: {_target_: a.Stop, monitor: reward}\n")
    (tmp_path / "loss/mine.yaml").write_text("_target_: mine.Squared\ntau: 0.3\n")
    (tmp_path / "task/mine.yaml").write_text(
        "defaults: [prompts, _self_]\npath: x.jsonl\nverifier: {_target_: mine.score}\n"
    )
    (tmp_path / "experiment/two.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /callbacks: early]\n"
        "callbacks: {csv: {_target_: a.Log, save_dir: logs}}\n"
    )
    (tmp_path / "experiment/wrong.yaml").write_text(
        "# @package _global_\nloss: {_target_: mine.Squared}\n"
    )

    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))

    def config(*overrides):
        composed = compose([*overrides])
        assert composed.problems == []
        return composed.config

    stop = {"path": "a.Stop", "monitor": "reward"}
    assert config("callbacks=early").callbacks.own == {"stop": stop}
    own = config("experiment=two", "callbacks.stop.monitor=loss").callbacks.own
    assert own == {"stop": stop | {"monitor": "loss"}, "csv": {"path": "a.Log", "save_dir": "logs"}}
    assert config("callbacks.stop._target_=a.Stop").callbacks.own == {"stop": {"path": "a.Stop"}}
    loss = config("loss=mine").loss
    assert (loss.path, loss.options) == ("mine.Squared", {"tau": 0.3})
    assert config("task=mine").task.verifier == "mine.score"
    (problem,) = compose(["experiment=wrong"]).problems
    assert problem.endswith("Use - override /loss: mine.Squared.")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("callbacks.stop.patience=3", "callbacks.stop needs the path of its class"),
        ("callbacks.stop.path=Stop", "callbacks.stop.path=Stop needs a dotted path to a class"),
        ("callbacks.own={a-b: {path: a.B}}", "callbacks.a-b needs a name of up to 40 letters"),
    ],
)
def test_an_entry_without_a_name_or_a_path_is_refused(override, problem):
    _, report = validated(compose([override]))
    (message,) = report.problems
    assert message.startswith(problem)


def test_callbacks_change_the_digest_of_a_job_and_their_absence_does_not():
    from pgtoolkit.config.names import digest, plain_config

    plain = plain_config(compose([]).config)
    with_callback = plain_config(compose(["callbacks.stop.path=a.Stop"]).config)
    assert digest(plain) != digest(with_callback)
    del plain["callbacks"]
    assert digest(plain) == digest(plain_config(compose([]).config))
