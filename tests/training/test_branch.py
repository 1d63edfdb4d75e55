"""`pgtk resume RUN --step N hydra.run.dir=NEW`: a run of its own from a checkpoint of another,
which stays as it is."""

import hashlib
import json
import shutil

import pytest
from builders.runs import assert_equal, checkpoint_of, metrics_of, run

from pgtoolkit.cli import main
from pgtoolkit.runs.records import read_data, read_drift, read_resolved, read_status
from pgtoolkit.system.report import shell_path
from pgtoolkit.tracking.description import description_of
from pgtoolkit.training.export import branch


def files_of(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_it_goes_on_as_the_parent_did_and_leaves_it_alone(copied, tmp_path, capsys):
    before = files_of(copied)
    assert main(["resume", str(copied), "--step", "3", f"hydra.run.dir={tmp_path / 'new'}"]) == 0
    printed = capsys.readouterr().out
    assert f"continues    {copied}, step 3" in printed
    assert files_of(copied) == before
    assert metrics_of(tmp_path / "new") == metrics_of(copied)
    for step in (3, 4, 6):
        assert_equal(checkpoint_of(tmp_path / "new", step), checkpoint_of(copied, step))
    assert min(path.name for path in (tmp_path / "new/checkpoints").iterdir()) == "step-000003"
    parent, status = read_status(copied), read_status(tmp_path / "new")
    assert status["parent"] == f"{copied}, step 3"
    assert status["id"] != parent["id"]
    assert (status["state"], status["step"], status["saved"]) == ("done", 6, 6)
    assert description_of(tmp_path / "new").tags["parent"] == f"{copied}, step 3"
    assert description_of(tmp_path / "new").run_name == "new"
    assert "parent" not in description_of(copied).tags


def test_what_is_changed_holds_from_that_step_on_and_both_are_compared(copied, tmp_path, capsys):
    new = tmp_path / "new"
    assert (
        main(
            [
                "resume",
                str(copied),
                "--step=2",
                f"hydra.run.dir={new}",
                "optimizer.learning_rate=0.01",
            ]
        )
        == 0
    )
    assert metrics_of(new)[:2] == metrics_of(copied)[:2]
    # the batch was sampled by the same weights
    assert metrics_of(new)[2]["reward"] == metrics_of(copied)[2]["reward"]
    assert metrics_of(new)[5]["new_logprobs"] != metrics_of(copied)[5]["new_logprobs"]
    ((change,),) = [[*entry["changes"].items()] for entry in read_drift(new)]
    assert (read_drift(new)[0]["step"], change) == (2, ("optimizer.learning_rate", [0.001, 0.01]))
    assert read_drift(copied) == []
    capsys.readouterr()
    assert main(["compare", str(copied), str(new)]) == 0
    assert "2 runs" in capsys.readouterr().out


def test_changes_of_later_steps_are_made_at_the_step_that_is_continued(copied, tmp_path):
    """The parent's rate was changed at step 6: its configuration holds, and the new run says from
    where on."""
    assert main(["resume", str(copied), "optimizer.learning_rate=0.02", "trainer.max_steps=8"]) == 0
    assert main(["resume", str(copied), "--step", "4", f"hydra.run.dir={tmp_path / 'new'}"]) == 0
    (entry,) = read_drift(tmp_path / "new")
    assert (entry["step"], entry["changes"]["optimizer.learning_rate"]) == (4, [0.001, 0.02])
    assert read_resolved(tmp_path / "new")["optimizer"]["learning_rate"] == 0.02
    assert len(metrics_of(tmp_path / "new")) == 8


@pytest.fixture(scope="module")
def changed(short, tmp_path_factory):
    """The run, whose rate was changed at step 6 and again at step 7; 8 steps."""
    folder = shutil.copytree(short, tmp_path_factory.mktemp("changed") / "run")
    assert main(["resume", str(folder), "optimizer.learning_rate=0.02", "trainer.max_steps=7"]) == 0
    assert main(["resume", str(folder), "optimizer.learning_rate=0.03", "trainer.max_steps=8"]) == 0
    return folder


@pytest.mark.parametrize(
    ("step", "rate", "steps"),
    [(5, 0.001, []), (6, 0.02, [6]), (7, 0.03, [6, 7])],
)
def test_a_branch_has_the_configuration_of_its_step(changed, tmp_path, step, rate, steps):
    """A change at the very step holds for what follows, as in the parent; later ones are taken
    back, the last first."""
    new = tmp_path / "new"
    branch(changed, step, new)
    assert read_resolved(new)["optimizer"]["learning_rate"] == rate
    assert read_resolved(new)["trainer"]["max_steps"] == {5: 6, 6: 7, 7: 8}[step]
    assert [entry["step"] for entry in read_drift(new)] == steps
    rates = [entry["changes"]["optimizer.learning_rate"] for entry in read_drift(new)]
    assert rates == [[0.001, 0.02], [0.02, 0.03]][: len(steps)]


def test_a_branch_has_the_data_of_its_step(copied, tmp_path):
    a, b, c = ({"train.jsonl": {"bytes": 3, "sha256": letter * 64}} for letter in "abc")
    accepted = [{"step": step, "before": {"task.path": files}} for step, files in ((3, a), (5, b))]
    (copied / "data.json").write_text(json.dumps({"task.path": c, "accepted": accepted}))
    for step, files, kept in ((2, a, 0), (3, b, 1), (4, b, 1), (5, c, 2)):
        branch(copied, step, tmp_path / str(step))
        expected = {"task.path": files} | ({"accepted": accepted[:kept]} if kept else {})
        assert read_data(tmp_path / str(step)) == expected


def test_a_branch_is_named_as_its_folder_unless_a_name_is_typed(tmp_path):
    parent = run(tmp_path / "folder", "tracking.run_name=parent", "trainer.max_steps=2")
    assert description_of(parent).run_name == "parent"
    for name, typed in (("new", []), ("mine", ["tracking.run_name=mine"])):
        folder = tmp_path / ("new" if not typed else "other")
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
            ["--step", "3", "hydra.run.dir=there"],
            "hydra.run.dir=there needs a new or empty folder (got one with 1 entry)",
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
        (["--step", "3", "hydra.run.dir=a b("], "hydra.run.dir=a b( needs the form key=value"),
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
def test_what_is_refused_leaves_nothing(copied, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    before = files_of(copied)
    assert main(["resume", str(copied), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert files_of(copied) == before
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_recorded_batches_of_the_parent_are_not_written_over(tmp_path, capsys):
    folder = tmp_path / "rollouts"
    parent = run(tmp_path / "run", f"rollout.save_path={folder}", "trainer.max_steps=3")
    before = files_of(folder)
    words = ["resume", str(parent), "--step", "2", f"hydra.run.dir={tmp_path / 'new'}"]
    assert main(words) == 2
    assert f"rollout.save_path={folder} needs a new or empty folder" in capsys.readouterr().err
    assert main([*words, f"rollout.save_path={tmp_path / 'others'}"]) == 0
    assert files_of(folder) == before
    assert json.loads((tmp_path / "new/status.json").read_text())["state"] == "done"


@pytest.mark.parametrize("place", ["inner", "."])
def test_a_run_inside_its_parent_is_refused_and_leaves_it_alone(copied, capsys, place):
    before = files_of(copied)
    assert main(["resume", str(copied), "--step", "3", f"hydra.run.dir={copied / place}"]) == 2
    assert f"needs a folder outside {copied}" in capsys.readouterr().err
    assert files_of(copied) == before


def test_another_folder_without_a_step_is_refused(copied, tmp_path, capsys):
    assert main(["resume", str(copied), f"hydra.run.dir={tmp_path / 'new'}"]) == 2
    said = capsys.readouterr().err
    assert "needs --step N, which makes a run of its own (got none)" in said
    assert (
        f"Use pgtk resume {shell_path(copied)} --step N hydra.run.dir={tmp_path / 'new'}." in said
    )
