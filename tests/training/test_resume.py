"""Runs that are resumed: bit-equal at every step, killed early, with changed keys, beyond their
data."""

import json
import re
import shutil

import pytest
from builders.runs import (
    SHORT,
    assert_equal,
    change_state,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    run,
)

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import read_run
from pgtoolkit.runs.records import read_provenance
from pgtoolkit.training.train import train

SHORTER, LONGER = (
    ("trainer.max_steps=9", f"accumulation.docs_per_step={number}") for number in (5, 12)
)
PROXIMAL = ("rollout.old_log_probs=proximal", "correction=token_truncate", "correction.high=1.001")
OVERLAP = ("rollout.max_staleness=5", "rollout.old_log_probs=sampling")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), (2, 3, 5)),
        (("loss=grpo", "aggregation=prompt_mean", "accumulation.docs_per_step=4"), (2,)),
        # the reference is made again of the seed
        (("kl=k3", "kl.coefficient=0.3", "entropy.coefficient=0.02"), (3,)),
        (("kl=k3", "kl.reference_prompt='{prompt}{answer}='"), (3,)),
        (("kl=k3", "kl.coefficient=0.3", "kl.update_every=2", "kl.update_rate=0.5"), (3,)),
        (
            (
                "kl=k1",
                "kl.coefficient=0.3",
                "kl.place=reward",
                "kl.update_every=1",
                "rollout.lag=3",
            ),
            (3, 4),
        ),
        (("rollout.uninformative=drop",), (3,)),
        (("advantage=gae", "loss=grpo", "critic.steps_before_policy=1"), (1, 2)),
        (
            ("advantage=gae", "loss=grpo", "rollout.lag=5", "kl=k2", "kl.place=reward", *SHORTER),
            (1, 7),
        ),
        ((*OVERLAP, *SHORTER), (1, 7)),
        (("rollout.lag=5", *PROXIMAL, *SHORTER), (4,)),
        pytest.param(
            ("rollout.lag=3", *LONGER, "accumulation.last_step=carry"),
            (7,),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*OVERLAP, *SHORTER, "accumulation.last_step=drop"), (4,), marks=pytest.mark.slow
        ),
    ],
)
def test_resume_at_every_step_is_bit_equal(short, tmp_path, overrides, steps):
    """Weights, optimizer, rollouts, random state and every metric, from a checkpoint after any
    step."""
    uninterrupted = run(tmp_path / "whole", *overrides) if overrides else short
    for step in steps:  # in a batch of rollouts, and after it
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        run(resumed, *overrides, resume=True)
        assert metrics_of(resumed) == metrics_of(uninterrupted)
        for later in range(step + 1, len(metrics_of(uninterrupted)) + 1):
            assert_equal(checkpoint_of(resumed, later), checkpoint_of(uninterrupted, later))


@pytest.mark.slow
def test_resume_of_recorded_rollouts_is_bit_equal(tmp_path):
    run(tmp_path / "source", f"rollout.save_path={tmp_path / 'rollouts'}")
    overrides = (
        f"rollout.path={tmp_path / 'rollouts'}",
        "rollout.epochs=3",
        "rollout.shuffle=true",
    )
    settings = [s for s in SHORT if not s.startswith("rollout.")]
    settings = [
        "rollout=recorded",
        "aggregation.divisor=4",
        "trainer.max_steps=14",
        *settings[:-3],
        *settings[-2:],
    ]

    def train_recorded(folder, resume=False):
        train(config_of(*settings, *overrides), folder, resume=resume)
        return folder

    uninterrupted = train_recorded(tmp_path / "whole")
    assert metrics_of(uninterrupted)[-1]["step"] == 14
    for step in (6, 13):
        resumed = train_recorded(
            copy_as_of(uninterrupted, step, tmp_path / f"from {step}"), resume=True
        )
        assert metrics_of(resumed) == metrics_of(uninterrupted)
        assert_equal(checkpoint_of(resumed, 14), checkpoint_of(uninterrupted, 14))


def test_the_last_step_is_saved_also_where_the_data_ends_first(tmp_path):
    run(tmp_path / "source", f"rollout.save_path={tmp_path / 'rollouts'}")
    settings = [s for s in SHORT if not s.startswith(("rollout.", "trainer."))]
    settings += [
        "rollout=recorded",
        "aggregation.divisor=4",
        f"rollout.path={tmp_path / 'rollouts'}",
    ]
    train(config_of(*settings), tmp_path / "run")
    assert metrics_of(tmp_path / "run")[-1]["step"] == 6
    assert checkpoint_of(tmp_path / "run", 6)["step"] == 6


def test_a_run_killed_before_its_first_checkpoint_starts_again(short, tmp_path):
    killed = copy_as_of(short, 0, tmp_path / "killed")
    run(killed, resume=True)
    assert metrics_of(killed) == metrics_of(short)
    assert_equal(checkpoint_of(killed, 6), checkpoint_of(short, 6))


@pytest.mark.parametrize(
    ("deleted", "left"),
    [(("checkpoints",), "none"), (("step-000006",), "step 5")],
)
def test_a_run_whose_checkpoints_were_deleted_is_refused_and_its_record_stays(
    copied, tmp_path, capsys, deleted, left
):
    for name in deleted:
        path = next(copied.rglob(name))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {
        path: path.read_bytes()
        for path in copied.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }
    for command in (
        ["resume"],
        ["resume", "trainer.max_steps=8"],
        ["export", str(tmp_path / "model")],
    ):
        if command[0] == "export" and left != "none":
            continue
        assert main([command[0], str(copied), *command[1:]]) == 2
        error = capsys.readouterr().err
        assert f"needs the checkpoint of step 6, which the run has saved (got {left}" in error
    assert {path: path.read_bytes() for path in before} == before


def test_a_copy_without_its_status_goes_on_from_an_earlier_checkpoint(copied):
    shutil.rmtree(copied / "checkpoints" / "step-000006")
    (copied / "status.json").unlink()
    assert metrics_of(run(copied, "trainer.max_steps=7", resume=True))[-1]["step"] == 7


def test_a_finished_run_that_lacks_rows_of_its_metrics_is_not_counted(copied):
    assert read_run(copied).state == "done"
    rows = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    for left in (rows[1:], rows[:5], [rows[0], *rows[2:]]):
        (copied / "metrics.jsonl").write_text("".join(left))
        read = read_run(copied)
        assert (read.state, read.reason) == ("incomplete", "metrics.jsonl has 5 of its 6 steps")


def test_a_checkpoint_beyond_max_steps_is_refused_and_nothing_is_changed(copied):
    before = (copied / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="needs at least the steps already made"):
        run(copied, "trainer.max_steps=3", resume=True)
    assert (copied / "config.yaml").read_text() == before


def test_the_count_of_skipped_steps_goes_on_after_a_resume(short, tmp_path):
    folder = copy_as_of(short, 1, tmp_path / "run")
    assert checkpoint_of(folder, 1)["num_skipped_steps"] == 0
    change_state(folder / "checkpoints" / "step-000001", num_skipped_steps=7)
    run(folder, "trainer.max_steps=2", resume=True)
    assert metrics_of(folder)[-1]["num_skipped_steps"] == 7
    assert checkpoint_of(folder, 2)["num_skipped_steps"] == 7


def test_a_configuration_changed_by_hand_is_not_continued_as_another_run(copied, capsys):
    """The checkpoint holds what the configuration was; what a resume may change may be changed by
    hand, too."""
    text, rows = (copied / "config.yaml").read_text(), metrics_of(copied)
    for key, replacement in (("seed: 0", "seed: 1"), ("max_steps: 6", "max_steps: 7")):
        assert key in text
        (copied / "config.yaml").write_text(text.replace(key, replacement, 1))
        status = main(["resume", str(copied)])
        error = capsys.readouterr().err
        if "max_steps" in key:
            assert status == 0
            assert len(metrics_of(copied)) == 7
        else:
            assert status == 2
            assert "seed=1 needs to stay as the run began (got 1, was 0). " in error
            assert (
                "config.yaml has changed since the checkpoint of step 6: put the value back"
                in error
            )
            assert metrics_of(copied) == rows


def test_a_changed_key_acts_on_resume(short, tmp_path):
    """Nothing that the user sets is silently taken from the checkpoint instead."""
    folder = copy_as_of(short, 3, tmp_path / "run")
    run(
        folder,
        "optimizer.learning_rate=0.5",
        "optimizer.warmup_steps=0",
        "trainer.max_steps=5",
        resume=True,
    )
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["learning_rate"] for row in rows[3:]] == [0.5, 0.5]
    assert "optimizer.learning_rate" in (folder / "drift.jsonl").read_text()


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_resume_that_stretches_a_decaying_schedule_says_so(tmp_path, capsys, schedule):
    """At step 2 of 4 the rate is half of it; of 8 it is (1 + 1/sqrt 2) / 2."""
    decays = (
        f"optimizer.schedule={schedule}",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=0.01",
    )
    folder = run(tmp_path / "run", *decays, "trainer.max_steps=4", "trainer.checkpoint_every=2")
    folder = copy_as_of(folder, 2, tmp_path / "copy")
    assert main(["resume", str(folder), "trainer.max_steps=8"]) == 0
    output = capsys.readouterr().out
    expected = (
        f"optimizer.schedule={schedule} decays to 0 at trainer.max_steps, which is 8 now "
        "and was 4: the next update "
    )
    if schedule == "constant":
        assert "instead of" not in output
    else:
        rate = "0.00854 instead of 0.005"
        note = f"note: {expected}has the learning rate {rate}. pgtk compare does not count"
        assert note in output
    fresh = run(tmp_path / "fresh", *decays, "trainer.max_steps=8", "seed=1")
    compared = compare([read_run(folder), read_run(fresh)], "final:reward")
    assert len(compared.groups) == (1 if schedule == "constant" else 2)


def test_a_run_records_the_code_of_its_own_modules_and_of_its_evaluations(tmp_path, monkeypatch):
    """A resume whose module has changed adds the digest of then, with its step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "from of_seeds_helper import SCALE\n\n\ndef right(completion, answer):\n    return SCALE\n"
    )
    (tmp_path / "of_seeds_rewards.py").write_text(text)
    (tmp_path / "of_seeds_scores.py").write_text(text)
    (tmp_path / "of_seeds_helper.py").write_text("SCALE = 1.0\n")
    for name, numbers in (("train", (0, 1, 2, 3)), ("test", (10, 12, 13, 20))):
        rows = [{"prompt": f"{i}=", "answer": str(i)} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += [
        "task=prompts",
        "task.path=train.jsonl",
        "task.verifier=of_seeds_rewards.right",
        "evaluation.every=9",
    ]
    settings += [
        "evaluation.sets.test.path=test.jsonl",
        "evaluation.sets.test.verifier=of_seeds_scores.right",
    ]
    train(config_of(*settings, "trainer.max_steps=1"), tmp_path / "run")
    before = read_provenance(tmp_path / "run")
    assert [*before["modules"]] == ["of_seeds_helper", "of_seeds_rewards"]
    assert [*before["evaluation_modules"]] == ["of_seeds_scores"]
    assert before["step"] == 0
    (tmp_path / "of_seeds_helper.py").write_text("SCALE = 2.0\n")
    train(config_of(*settings, "trainer.max_steps=2"), tmp_path / "run", resume=True)
    (after,) = read_provenance(tmp_path / "run")["resumed"]
    assert after["step"] == 1
    changed = {
        name for name in after["modules"] if after["modules"][name] != before["modules"][name]
    }
    assert changed == {"of_seeds_helper"}
    assert after["evaluation_modules"] == before["evaluation_modules"]
    known = read_run(tmp_path / "run").trained_with
    first, second = before["modules"]["of_seeds_helper"], after["modules"]["of_seeds_helper"]
    assert known["code of of_seeds_helper"] == f"{first} to step 1, then {second}"
    assert known["code of of_seeds_rewards"] == before["modules"]["of_seeds_rewards"]
    assert re.fullmatch("[0-9a-f]{8}", known["contents of task.path"])
