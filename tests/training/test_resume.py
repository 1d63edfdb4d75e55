"""A resumed run equals an uninterrupted one bit for bit, and changed keys act from its step on."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from builders.quick import with_slow_rest
from builders.refusals import refusal
from builders.runs import (
    SHORT,
    assert_equal,
    change_state,
    checkpoint_of,
    config_of,
    copy_as_of,
    last_of_each_key,
    metrics_of,
    run,
)

from pgtoolkit.assembly.train import train
from pgtoolkit.batch import MicroBatch, StepTotals
from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.find import read_run
from pgtoolkit.runs.records import read_provenance
from pgtoolkit.training.module import PolicyGradientModule

STEPS_OF_5 = ("trainer.max_steps=8", "accumulation.docs_per_step=5")
STEPS_OF_12 = ("trainer.max_steps=9", "accumulation.docs_per_step=12")
PROXIMAL = ("rollout.old_log_probs=proximal", "correction=token_truncate", "correction.high=1.001")
PASSES = ("rollout.passes=3", "rollout.pass_order=shuffled", "trainer.max_steps=8")
"""A batch makes two steps in each of three passes."""
MOVING = ("kl.update_every=1", "kl.update_rate=0.5")
ADAPTIVE = ("kl=k2", "kl.coefficient=0.3", "kl.target=0.05", "kl.horizon=100")
OVERLAP = ("rollout.max_staleness=5", "rollout.old_log_probs=sampling")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    with_slow_rest(
        [
            ((), (2, 3)),
            # The reference is made again from the seed.
            (
                (
                    "kl=k3",
                    "kl.coefficient=0.3",
                    "kl.reference_prompt='{prompt}{answer}='",
                    "rollout.uninformative=drop",
                ),
                (3,),
            ),
            (
                (
                    "kl=k3",
                    "kl.coefficient=0.3",
                    "kl.update_every=2",
                    "kl.update_rate=0.5",
                    "optimizer=torch.optim.SGD",  # it keeps nothing
                ),
                (3,),
            ),
            ((*PASSES, *ADAPTIVE), (1, 6)),
            ((*PASSES, *ADAPTIVE, "kl.place=reward", "rollout.lag=2"), (4,)),
            (
                (*PASSES, "advantage=gae", "loss=grpo", "kl=k3", "kl.coefficient=0.3", *MOVING),
                (5,),
            ),
            (("rollout.passes=2", "rollout.max_staleness=9", OVERLAP[1], *STEPS_OF_5), (3, 6)),
            (
                (
                    "advantage=gae",
                    "loss=grpo",
                    "critic.steps_before_policy=1",
                    "optimizer=muon",
                    "trainer.max_steps=4",
                ),
                (1, 2),
            ),
            (
                (
                    "advantage=gae",
                    "loss=grpo",
                    "optimizer=torch.optim.RMSprop",
                    "optimizer.momentum=0.9",
                    "trainer.max_steps=4",
                ),
                (2,),
            ),
            (
                (
                    "advantage=gae",
                    "loss=grpo",
                    "rollout.lag=5",
                    "kl=k1",
                    "kl.place=reward",
                    "kl.update_every=1",
                    *STEPS_OF_5,
                ),
                (1, 7),
            ),
            ((*OVERLAP, *STEPS_OF_5, "accumulation.last_step=drop"), (1, 4)),
            (("rollout.lag=5", *PROXIMAL, *STEPS_OF_5), (4,)),
            (("rollout.lag=3", *STEPS_OF_12, "accumulation.last_step=carry"), (7,)),
        ],
        3,
    ),
)
def test_a_resume_after_any_step_is_bit_equal(short, tmp_path, overrides, steps):
    """Weights, optimizer, rollouts, random state and every metric, from within a batch of rollouts
    and after it."""
    uninterrupted = run(tmp_path / "uninterrupted", *overrides) if overrides else short
    for step in steps:
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        run(resumed, *overrides, resume=True)
        assert metrics_of(resumed) == metrics_of(uninterrupted)
        for later in range(step + 1, len(metrics_of(uninterrupted)) + 1):
            assert_equal(checkpoint_of(resumed, later), checkpoint_of(uninterrupted, later))


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    """Return the recorded rollouts of a short run: six steps of eight documents."""
    folder = tmp_path_factory.mktemp("source")
    run(folder / "run", f"rollout.save_path={folder / 'rollouts'}")
    return folder / "rollouts"


@pytest.mark.slow
def test_a_resume_of_recorded_rollouts_is_bit_equal(rollouts, tmp_path):
    settings = [
        setting for setting in SHORT if not setting.startswith(("rollout.", "trainer.max_steps"))
    ]
    config = config_of(
        *settings,
        "rollout=recorded",
        f"rollout.path={rollouts}",
        "rollout.epochs=3",
        "rollout.shuffle=true",
        "aggregation.divisor=4",
        "trainer.max_steps=14",
    )
    uninterrupted = tmp_path / "uninterrupted"
    train(config, uninterrupted)
    assert metrics_of(uninterrupted)[-1]["step"] == 14
    for step in (6, 13):
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        train(config, resumed, resume=True)
        assert metrics_of(resumed) == metrics_of(uninterrupted)
        assert_equal(checkpoint_of(resumed, 14), checkpoint_of(uninterrupted, 14))


def test_the_last_step_is_saved_where_the_data_ends_before_max_steps(rollouts, tmp_path):
    settings = [setting for setting in SHORT if not setting.startswith(("rollout.", "trainer."))]
    settings += ["rollout=recorded", "aggregation.divisor=4", f"rollout.path={rollouts}"]
    train(config_of(*settings), tmp_path / "run")
    assert metrics_of(tmp_path / "run")[-1]["step"] == 6
    assert checkpoint_of(tmp_path / "run", 6)["step"] == 6


def test_a_run_killed_before_its_first_checkpoint_starts_again(short, tmp_path):
    killed = copy_as_of(short, 0, tmp_path / "killed")
    run(killed, resume=True)
    assert metrics_of(killed) == metrics_of(short)
    assert_equal(checkpoint_of(killed, 6), checkpoint_of(short, 6))


@pytest.mark.parametrize(
    ("deleted", "newest", "commands"),
    [
        (
            "checkpoints",
            "none",
            [["resume"], ["resume", "trainer.max_steps=8"], ["export", "model"]],
        ),
        ("checkpoints/step-000006", "step 5", [["resume"], ["resume", "trainer.max_steps=8"]]),
    ],
    ids=["all", "the newest"],
)
def test_a_run_whose_checkpoints_were_deleted_is_refused_and_its_record_stays(
    copied, tmp_path, monkeypatch, capsys, deleted, newest, commands
):
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(copied / deleted)
    before = {
        path: path.read_bytes()
        for path in copied.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }
    for command, *words in commands:
        error = refusal(capsys, command, copied, *words)
        assert f"needs the checkpoint of step 6, which the run has saved (got {newest}" in error
    assert {path: path.read_bytes() for path in before} == before


def test_a_copy_without_its_status_continues_from_an_earlier_checkpoint(copied):
    shutil.rmtree(copied / "checkpoints" / "step-000006")
    (copied / "status.json").unlink()
    assert metrics_of(run(copied, "trainer.max_steps=7", resume=True))[-1]["step"] == 7


def test_a_finished_run_that_lacks_rows_of_its_metrics_is_incomplete(copied):
    assert read_run(copied).state == "done"
    rows = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    for remaining in (rows[1:], rows[:5], [rows[0], *rows[2:]]):
        (copied / "metrics.jsonl").write_text("".join(remaining))
        incomplete = read_run(copied)
        assert incomplete.state == "incomplete"
        assert incomplete.reason == "metrics.jsonl has 5 of its 6 steps"


def test_a_checkpoint_beyond_max_steps_is_refused_and_nothing_is_changed(copied):
    before = (copied / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="needs at least the steps already made"):
        run(copied, "trainer.max_steps=3", resume=True)
    assert (copied / "config.yaml").read_text() == before


def test_a_resume_continues_the_count_of_skipped_steps(short, tmp_path):
    folder = copy_as_of(short, 1, tmp_path / "run")
    assert checkpoint_of(folder, 1)["num_skipped_steps"] == 0
    change_state(folder / "checkpoints" / "step-000001", num_skipped_steps=7)
    run(folder, "trainer.max_steps=2", resume=True)
    assert metrics_of(folder)[-1]["num_skipped_steps"] == 7
    assert checkpoint_of(folder, 2)["num_skipped_steps"] == 7


def replace_in_config(folder: Path, old: str, new: str) -> None:
    text = (folder / "config.yaml").read_text()
    assert old in text
    (folder / "config.yaml").write_text(text.replace(old, new, 1))


def test_a_key_changed_by_hand_that_a_resume_cannot_change_is_refused(copied, capsys):
    """The checkpoint holds the configuration of before."""
    rows = metrics_of(copied)
    replace_in_config(copied, "seed: 0", "seed: 1")
    error = refusal(capsys, "resume", copied)
    assert "seed=1 needs to stay as the run began (got 1, was 0). " in error
    assert "config.yaml has changed since the checkpoint of step 6: put the value back" in error
    assert metrics_of(copied) == rows


def test_a_run_of_its_own_is_not_told_to_record_into_the_folder_of_another(copied, capsys):
    folder = copied.parent / "recorded"
    folder.mkdir()
    words = ["resume", copied, "optimizer.learning_rate=0.5", f"rollout.save_path={folder}"]
    assert f" rollout.save_path={folder} " in refusal(capsys, *words)
    (folder / "batch-000000.parquet").touch()
    error = refusal(capsys, *words)
    assert f"rollout.save_path={folder}" not in error
    assert re.search(r"hydra.run.dir=(\S+) .*rollout.save_path=\1-rollouts ", error)


def test_a_key_changed_by_hand_that_decides_what_is_learned_needs_a_run_of_its_own(
    copied, capsys, monkeypatch
):
    """As where it is typed; the command that is shown makes that run once the value is back."""
    monkeypatch.chdir(copied.parent)
    text = (copied / "config.yaml").read_text()
    edited = re.sub(r"(\noptimizer:\n(?:  .*\n)*?  learning_rate: ).*", r"\g<1>0.5", text)
    (copied / "config.yaml").write_text(edited)
    rows = metrics_of(copied)
    error = refusal(capsys, "resume", copied)
    assert "optimizer.learning_rate=0.5 needs a run of its own (got " in error
    assert metrics_of(copied) == rows
    (copied / "config.yaml").write_text(text)
    command = error.partition("config.yaml; then ")[2].partition(" goes on")[0]
    assert "trainer.max_steps=12" in command
    assert main(shlex.split(command.replace("max_steps=12", "max_steps=7"))[1:]) == 0
    branch = Path(f"{copied}-6")
    assert "learning_rate: 0.5" in (branch / "config.yaml").read_text()
    assert len(metrics_of(branch)) == 7


def test_a_key_changed_by_hand_that_a_resume_may_change_acts(copied):
    replace_in_config(copied, "max_steps: 6", "max_steps: 7")
    assert main(["resume", str(copied)]) == 0
    assert len(metrics_of(copied)) == 7


def test_a_changed_key_acts_on_resume(short, tmp_path):
    """A value that the user sets is not replaced by that of the checkpoint."""
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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_resume_that_stretches_a_decaying_schedule_is_noted(tmp_path, capsys, schedule):
    """At step 2 of 4 the rate is half of it; of 8 it is (1 + 1/sqrt 2) / 2."""
    decays = (
        f"optimizer.schedule={schedule}",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=0.01",
    )
    folder = run(tmp_path / "run", *decays, "trainer.max_steps=4", "trainer.checkpoint_every=2")
    parent = copy_as_of(folder, 2, tmp_path / "copy")
    folder = parent
    words = ["resume", str(parent)]
    if schedule == "cosine":
        error = refusal(capsys, *words, "trainer.max_steps=8")
        assert "trainer.max_steps=8 needs a run of its own" in error
        folder = tmp_path / "longer"
        words += ["--step=2", f"hydra.run.dir={folder}"]
    assert main([*words, "trainer.max_steps=8"]) == 0
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


@pytest.fixture
def settings_with_verifiers(tmp_path, monkeypatch) -> list[str]:
    """Enter a folder with the user's verifiers of training and of a set, which import a helper.

    Returns settings of a run that scores with them.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "from digests_helper import SCALE\n\n\ndef right(completion, answer):\n    return SCALE\n"
    )
    (tmp_path / "digests_rewards.py").write_text(text)
    (tmp_path / "digests_scores.py").write_text(text)
    (tmp_path / "digests_helper.py").write_text("SCALE = 1.0\n")
    for name, numbers in (("train", (0, 1, 2, 3)), ("test", (10, 12, 13, 20))):
        rows = [{"prompt": f"{i}=", "answer": str(i)} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [setting for setting in SHORT if not setting.startswith("task.")]
    settings += [
        "task=prompts",
        "task.path=train.jsonl",
        "task.verifier=digests_rewards.right",
        "evaluation.every=9",
    ]
    settings += [
        "evaluation.sets.test.path=test.jsonl",
        "evaluation.sets.test.verifier=digests_scores.right",
    ]
    return settings


def test_a_run_records_the_digests_of_the_modules_that_score_at_its_start_and_at_a_resume(
    settings_with_verifiers, tmp_path
):
    settings = settings_with_verifiers
    train(config_of(*settings, "trainer.max_steps=1"), tmp_path / "run")
    before = read_provenance(tmp_path / "run")
    assert [*before["modules"]] == ["digests_helper", "digests_rewards"]
    assert [*before["evaluation_modules"]] == ["digests_scores"]
    assert before["step"] == 0
    (tmp_path / "digests_helper.py").write_text("SCALE = 2.0\n")
    train(config_of(*settings, "trainer.max_steps=2"), tmp_path / "run", resume=True)
    (after,) = read_provenance(tmp_path / "run")["resumed"]
    assert after["step"] == 1
    changed = {
        name for name in after["modules"] if after["modules"][name] != before["modules"][name]
    }
    assert changed == {"digests_helper"}
    assert after["evaluation_modules"] == before["evaluation_modules"]
    trained_with = read_run(tmp_path / "run").trained_with
    first = before["modules"]["digests_helper"]
    second = after["modules"]["digests_helper"]
    assert trained_with["code of digests_helper"] == f"{first} to step 1, then {second}"
    assert trained_with["code of digests_rewards"] == before["modules"]["digests_rewards"]
    assert re.fullmatch("[0-9a-f]{8}", trained_with["contents of task.path"])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later."),
    ],
)
def test_a_gpu_without_memory_is_answered_by_the_command_that_goes_on(
    tmp_path, monkeypatch, capsys, error
):
    """The second step has no memory for its micro-batch, but for half of it."""
    loss_of = PolicyGradientModule.micro_batch_loss

    def within_memory(module: PolicyGradientModule, micro_batch: MicroBatch, totals: StepTotals):
        if module.num_updates == 1 and len(micro_batch.tokens) > 40:
            raise error
        return loss_of(module, micro_batch, totals)

    monkeypatch.setattr(PolicyGradientModule, "micro_batch_loss", within_memory)
    keys = ("accumulation.max_tokens=80", "trainer.max_steps=2", "trainer.device=cpu")
    typed = last_of_each_key(*SHORT, *keys)
    assert main([*typed, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    first_line = str(error).splitlines()[0].removesuffix(".")
    assert f"after step 1 the GPU has no memory left: {first_line}. Other" in printed
    assert "Use accumulation.max_tokens=40, which documents have to fit" in printed
    assert "Traceback" not in printed
    command = re.search("Saved up to step 1. Continue with: [^ ]*pgtk (.*)", printed)
    assert command is not None
    assert command[1].endswith(" accumulation.max_tokens=40")
    assert main(shlex.split(command[1])) == 0
    assert len(metrics_of(tmp_path / "run")) == 2
