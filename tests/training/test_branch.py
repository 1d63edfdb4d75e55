"""`pgtk resume RUN --step N hydra.run.dir=NEW` trains a branch of a run and leaves the run alone.

Files of the parent are compared by their hashes, metrics and checkpoints with the parent's own.
"""

import hashlib
import json
import shlex
import shutil
from pathlib import Path

import pytest
from builders.refusals import refusal
from builders.runs import assert_equal, checkpoint_of, metrics_of, run

from pgtoolkit.assembly.continuing import counterpart_command, has_counterpart
from pgtoolkit.assembly.export import branch, card
from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.cli import main
from pgtoolkit.config.saved import saved_config
from pgtoolkit.runs.records import read_data, read_drift, read_resolved, read_status
from pgtoolkit.system.report import shell_path


def hashes_of_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_branch_trains_as_its_parent_did_and_leaves_it_alone(copied, tmp_path, capsys):
    new = tmp_path / "new"
    before = hashes_of_files(copied)
    assert main(["resume", str(copied), "--step", "3", f"hydra.run.dir={new}"]) == 0
    assert f"continues    {copied}, step 3" in capsys.readouterr().out
    assert hashes_of_files(copied) == before
    assert metrics_of(new) == metrics_of(copied)
    for step in (3, 4, 6):
        assert_equal(checkpoint_of(new, step), checkpoint_of(copied, step))
    assert min(path.name for path in (new / "checkpoints").iterdir()) == "step-000003"
    status = read_status(new)
    assert status["parent"] == f"{copied}, step 3"
    assert status["id"] != read_status(copied)["id"]
    assert (status["state"], status["step"], status["saved"]) == ("done", 6, 6)
    assert description_of(new).tags["parent"] == f"{copied}, step 3"
    assert description_of(new).run_name == "new"
    assert "parent" not in description_of(copied).tags


def test_a_key_changed_for_a_branch_acts_and_is_recorded_from_its_step_on(copied, tmp_path, capsys):
    new = tmp_path / "new"
    words = ["--step=2", f"hydra.run.dir={new}", "optimizer.learning_rate=0.01"]
    assert main(["resume", str(copied), *words]) == 0
    assert metrics_of(new)[:2] == metrics_of(copied)[:2]
    # The documents of step 3 were sampled by the weights of step 2, which both runs share.
    assert metrics_of(new)[2]["reward"] == metrics_of(copied)[2]["reward"]
    assert metrics_of(new)[5]["new_logprobs"] != metrics_of(copied)[5]["new_logprobs"]
    (entry,) = read_drift(new)
    assert entry["step"] == 2
    # Another loss is compared from the same step on: steps 1 and 2 had the former rate.
    assert has_counterpart(new)
    words = shlex.split(counterpart_command(new))
    other = "loss=gspo" if read_resolved(new)["loss"]["name"] == "grpo" else "loss=grpo"
    assert words[1:4] == ["resume", str(copied), "--step=2"]
    assert words[4].startswith(f"hydra.run.dir={copied}-2")
    assert words[5:] == [other, "optimizer.learning_rate=0.01"]
    shutil.rmtree(copied / "checkpoints")
    assert not has_counterpart(new)
    assert entry["changes"] == {"optimizer.learning_rate": [0.001, 0.01]}
    assert read_drift(copied) == []
    capsys.readouterr()
    assert main(["compare", str(copied), str(new)]) == 0
    assert "optimizer.learning_rate" in capsys.readouterr().out


LEARNED = (
    ("loss=grpo",),
    ("loss=kimi", "loss.tau=0.2", "optimizer.learning_rate=0.5", "trainer.checkpoint_every=2"),
    ("optimizer.schedule=cosine", "trainer.max_steps=9"),
    ("kl=k3", "kl.coefficient=0.1"),
    ("rollout.temperature=0.5",),
    ("accumulation.docs_per_step=4",),
    ("advantage=rloo", "metrics=none"),
    ("seed=0", "model.fp32_lm_head=true"),
    ("callbacks.mine.path=lightning.pytorch.callbacks.Timer",),
)
"""Overrides of a resume, of which at least one changes what is learned."""

NOT_LEARNED = (
    (),
    ("trainer.checkpoint_every=2", "trainer.keep_checkpoints=1"),
    ("tracking=tensorboard", "trainer.device=cpu"),
    ("kernel=torch", "accumulation.max_tokens=48", "metrics=with_entropy"),
    ("evaluation.every=2",),
    ("trainer.max_steps=6", "loss=gspo"),
)
"""Overrides of a resume that leave what is learned as it is, and add no step."""


def test_no_resume_changes_a_file_of_a_finished_run_that_has_no_more_steps_to_make(copied, capsys):
    before = hashes_of_files(copied)
    times = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    for overrides in LEARNED:
        error = refusal(capsys, "resume", copied, *overrides)
        assert "It changes what is learned, and a run is the record of one training. Use" in error
    for overrides in NOT_LEARNED:
        assert main(["resume", str(copied), *overrides]) == 0
        note = capsys.readouterr().err.splitlines()[-1]
        assert note.startswith(f"note: {copied} is done, after 6 steps: nothing is left to train.")
        for override in overrides:
            # What the run has already is no change.
            is_new = override not in ("trainer.max_steps=6", "loss=gspo")
            assert (override in note) is is_new, override
    assert hashes_of_files(copied) == before
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == times


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (LEARNED[1], "loss=gspo to step 6, then kimi"),
        (LEARNED[2], "optimizer.schedule=constant to step 6, then cosine"),
    ],
    ids=["finished", "longer"],
)
def test_the_printed_command_trains_on_with_other_values_as_a_run_of_its_own(
    copied, capsys, overrides, expected
):
    before = hashes_of_files(copied)
    error = refusal(capsys, "resume", copied, *overrides)
    command = shlex.split(error.partition(" Use ")[2].removesuffix(".\n"))
    assert command[1:5] == ["resume", str(copied), "--step=6", f"hydra.run.dir={copied}-6"]
    assert main(command[1:]) == 0
    branch_of_run = Path(f"{copied}-6")
    config = read_resolved(branch_of_run)
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, leaf = key.partition(".")
        assert str(config[group][leaf or "name"]) == value
        assert f"{override}, was " in (branch_of_run / "run.log").read_text()
    text = card(saved_config(branch_of_run), branch_of_run, 7, None)
    assert f"changed on the way: {expected}" in text
    assert metrics_of(branch_of_run)[:6] == metrics_of(copied)
    assert len(metrics_of(branch_of_run)) == config["trainer"]["max_steps"]
    assert hashes_of_files(copied) == before
    second = refusal(capsys, "resume", copied, *overrides)  # the folder is taken now
    assert f"hydra.run.dir={copied}-6-2" in second


def test_a_finished_run_that_cannot_go_on_stays_as_it_was(copied, capsys):
    """MLflow's server does not answer, after the configuration was written."""
    before = hashes_of_files(copied)
    words = ["resume", str(copied), "trainer.max_steps=7"]
    assert main([*words, "tracking=mlflow", "tracking.uri=http://127.0.0.1:9"]) == 6
    printed = capsys.readouterr()
    assert "Training has not started." in printed.err
    assert f"note: {copied} made no step, and stays the finished run that it was" in printed.out
    now = hashes_of_files(copied)
    assert {name for name in now if now[name] != before.get(name)} <= {".lock", "run.log"}
    assert before.keys() == now.keys()
    assert main(words) == 0
    assert (read_status(copied)["state"], read_status(copied)["step"]) == ("done", 7)


@pytest.mark.slow
def test_a_later_change_of_the_parent_holds_for_a_branch_from_its_first_step(copied, tmp_path):
    """The parent's rate was changed at step 6; the branch of step 4 has it from step 4 on."""
    run(copied, "optimizer.learning_rate=0.02", "trainer.max_steps=8", resume=True)
    assert main(["resume", str(copied), "--step", "4", f"hydra.run.dir={tmp_path / 'new'}"]) == 0
    (entry,) = read_drift(tmp_path / "new")
    assert (entry["step"], entry["changes"]["optimizer.learning_rate"]) == (4, [0.001, 0.02])
    assert read_resolved(tmp_path / "new")["optimizer"]["learning_rate"] == 0.02
    assert len(metrics_of(tmp_path / "new")) == 8


@pytest.fixture(scope="module")
def changed(short, tmp_path_factory) -> Path:
    """Return a run of 8 steps whose rate was changed at step 6 and again at step 7."""
    folder = shutil.copytree(short, tmp_path_factory.mktemp("changed") / "run")
    run(folder, "optimizer.learning_rate=0.02", "trainer.max_steps=7", resume=True)
    run(folder, "optimizer.learning_rate=0.03", "trainer.max_steps=8", resume=True)
    return folder


@pytest.mark.parametrize(
    ("step", "rate", "steps"),
    [(5, 0.001, []), (6, 0.02, [6]), (7, 0.03, [6, 7])],
)
def test_a_branch_has_the_configuration_of_its_step(changed, tmp_path, step, rate, steps):
    """A change at its step holds, as in the parent; later changes are taken back."""
    new = tmp_path / "new"
    branch(changed, step, new)
    assert read_resolved(new)["optimizer"]["learning_rate"] == rate
    assert read_resolved(new)["trainer"]["max_steps"] == {5: 6, 6: 7, 7: 8}[step]
    assert [entry["step"] for entry in read_drift(new)] == steps
    rates = [entry["changes"]["optimizer.learning_rate"] for entry in read_drift(new)]
    assert rates == [[0.001, 0.02], [0.02, 0.03]][: len(steps)]


def test_a_branch_has_the_data_of_its_step(copied, tmp_path):
    """The file was a until step 3, then b until step 5, and is c now."""
    a, b, c = ({"train.jsonl": {"bytes": 3, "sha256": letter * 64}} for letter in "abc")
    until_3 = {"step": 3, "before": {"task.path": a}}
    until_5 = {"step": 5, "before": {"task.path": b}}
    recorded = {"task.path": c, "accepted": [until_3, until_5]}
    (copied / "data.json").write_text(json.dumps(recorded))
    for step, expected in (
        (2, {"task.path": a}),
        (3, {"task.path": b, "accepted": [until_3]}),
        (4, {"task.path": b, "accepted": [until_3]}),
        (5, {"task.path": c, "accepted": [until_3, until_5]}),
    ):
        branch(copied, step, tmp_path / str(step))
        assert read_data(tmp_path / str(step)) == expected


def test_a_branch_is_named_as_its_folder_unless_a_name_is_typed(tmp_path):
    parent = run(tmp_path / "folder", "tracking.run_name=parent", "trainer.max_steps=2")
    assert description_of(parent).run_name == "parent"
    for folder, typed, name in (
        (tmp_path / "new", [], "new"),
        (tmp_path / "other", ["tracking.run_name=mine"], "mine"),
    ):
        assert main(["resume", str(parent), "--step=1", f"hydra.run.dir={folder}", *typed]) == 0
        assert description_of(folder).run_name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--step", "7", "hydra.run.dir=new", "trainer.max_steps=9"],
            "needs one of the steps with a checkpoint, 1, 2, 3, 4, 5, 6 (got 7)",
        ),
        (
            ["--step", "3", "hydra.run.dir=full"],
            "hydra.run.dir=full needs a new or empty folder (got one with 1 entry)",
        ),
        (
            ["--step", "9", "hydra.run.dir=new"],
            "and the best. Use --step=6 trainer.max_steps=12.\n",
        ),
        (
            ["--step", "9", "hydra.run.dir=new", "loss=none"],
            "2 problems in the configuration:\n  pgtk resume",
        ),
        (["--step", "3"], "--step=3 needs hydra.run.dir=NEW (got none)"),
        (["--step", "3", "hydra.run.dir=a b("], "hydra.run.dir=a b( needs the form KEY=VALUE"),
        (
            ["--step", "3", "hydra.run.dir=${x}"],
            "hydra.run.dir needs a value that resolves (got Interpolation",
        ),
        (["--step", "x", "hydra.run.dir=new"], "argument --step: invalid int value: 'x'"),
        (["--step", "3", "hydra.run.dir=new", "loss=none"], "loss=none"),
        (
            ["--step", "3", "hydra.run.dir=new", "trainer.max_steps=2"],
            "--step=3 needs trainer.max_steps above 3 (got 2)",
        ),
    ],
)
def test_a_refused_branch_changes_neither_parent_nor_folder(
    copied, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    before = hashes_of_files(tmp_path)
    assert message in refusal(capsys, "resume", copied, *arguments)
    assert hashes_of_files(tmp_path) == before


@pytest.mark.slow
def test_recorded_batches_of_the_parent_are_not_overwritten(tmp_path, capsys):
    folder = tmp_path / "rollouts"
    parent = run(tmp_path / "run", f"rollout.save_path={folder}", "trainer.max_steps=3")
    before = hashes_of_files(folder)
    words = ["resume", str(parent), "--step", "2", f"hydra.run.dir={tmp_path / 'new'}"]
    assert f"rollout.save_path={folder} needs a new or empty folder" in refusal(capsys, *words)
    assert main([*words, f"rollout.save_path={tmp_path / 'others'}"]) == 0
    assert hashes_of_files(folder) == before
    assert json.loads((tmp_path / "new/status.json").read_text())["state"] == "done"


@pytest.mark.parametrize("folder", ["inner", "."])
def test_a_branch_inside_its_parent_is_refused_and_leaves_it_alone(copied, capsys, folder):
    before = hashes_of_files(copied)
    assert f"needs a folder outside {copied}" in refusal(
        capsys, "resume", copied, "--step", "3", f"hydra.run.dir={copied / folder}"
    )
    assert hashes_of_files(copied) == before


def test_a_branch_without_a_step_is_refused(copied, tmp_path, capsys):
    folder = f"hydra.run.dir={tmp_path / 'new'}"
    error = refusal(capsys, "resume", copied, folder, "trainer.max_steps=0")
    assert "trainer.max_steps=0 needs a whole number from 1" in error
    assert "needs --step N, which makes a run of its own (got none)" in error
    usage = f"pgtk resume {shell_path(copied)} --step N {folder}"
    assert f"Use {usage}." in error
