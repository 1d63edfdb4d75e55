"""`pgtk plan`: seeds that fit a budget, what they show, and the file for the predictions."""

import pytest

from pgtoolkit.cli import main
from pgtoolkit.launch import budget
from pgtoolkit.runs.directory import RunDirectory

SMALL = ["task.num_digits=1", "model.num_layers=1", "model.hidden_size=8", "rollout.max_completion_length=2"]
SMALL += ["rollout.prompts_per_batch=4", "rollout.group_size=2", "accumulation.docs_per_step=4", "trainer.max_steps=40"]


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """A run takes 100 s; the runs that are timed are those of the real thing in the last test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(budget, "_timed", lambda *_: ([], 100.0))
    return tmp_path


def said_by(capsys, *words):
    assert main(["plan", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_seeds_and_pairs_that_fit(timed, capsys):
    """8 configurations at 2 jobs of 100 s at a time: 36 rounds in an hour, 72 runs, 9 seeds."""
    arguments = ["loss_by_aggregation", "--budget=60m", "--margin=0.05", "--sd=0.04", "hydra.launcher.n_jobs=2"]
    said = said_by(capsys, *arguments)
    assert "60m: 72 runs, 9 seeds of each of 8 configurations." in said
    assert "9 pairs show a difference of 1.1 standard deviations of the paired differences, which is 0.0427" in said
    assert "Margin 0.05: 8 pairs find such a difference, 8 pairs call equal what is." in said
    assert not (timed / "predictions.yaml").exists()
    said = said_by(capsys, "clip_range", "--budget=400s", "--over=loss.epsilon_low")
    assert "400s: 4 runs, 1 seed of each of 4 configurations. 4 pairs show a difference of 2.1" in said
    said = said_by(capsys, "clip_range", "--budget=800s", "--over=task.num_digits")  # of which there is one
    assert "2 seeds of each of 4 configurations. 2 pairs show" in said


def test_predictions_are_written_for_the_contrasts_that_compare_will_name(timed, capsys):
    arguments = [
        "loss_by_aggregation",
        "--budget=1h",
        "--margin=3%",
        "--against=loss=grpo",
        "--metric=area:exact_match",
    ]
    assert main(["plan", *arguments]) == 2
    assert "--margin=3% needs --from=RUN" in capsys.readouterr().err
    said_by(capsys, *[word for word in arguments if "margin" not in word], "aggregation=constant,token_mean")
    lines = (timed / "predictions.yaml").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "metric: area:exact_match",
        "against: loss=grpo",
        "expected:",
        "  'gspo, constant': null",
        "  'gspo, token_mean': null",
    ]
    assert main(["plan", *arguments[:2]]) == 2
    assert "--predictions needs a new file" in capsys.readouterr().err


def test_the_deviation_is_that_of_paired_differences_of_earlier_runs(timed, capsys):
    """Differences 0.1, 0.2 and 0.3 by seed, of a mean of 0.6: the deviation is 0.1, and 50 % of it 0.3."""
    for loss, values in {"grpo": (0.3, 0.7, 0.5), "gspo": (0.4, 0.9, 0.8)}.items():
        for seed, value in enumerate(values):
            with RunDirectory(timed / "runs" / f"{loss}-{seed}") as run:
                run.write_config({"seed": seed, "loss": {"name": loss}, "trainer": {"max_steps": 1}}, [])
                run.append_metrics(1, {"reward": value, "documents_seen": 8})
                run.set_status("done", 1)
    said = said_by(capsys, "loss_by_aggregation", "--budget=1h", "--from=runs", "--margin=50%", "--metric=final:reward")
    assert "4 pairs show a difference of 2.1 standard deviations of the paired differences, which is 0.213" in said
    assert "Margin 0.3: 4 pairs find such a difference, 3 pairs call equal what is." in said
    assert main(["plan", "loss_by_aggregation", "--budget=1h", "--from=runs/grpo-0", "--metric=final:reward"]) == 2
    assert "--from needs configurations with the same seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["loss_by_aggregation", "--budget=60"], "--budget needs a time such as 60m (got 60)"),
        (["loss_by_aggregation", "--budget=0m"], "--budget needs a time such as 60m"),
        (["loss_by_aggregation", "--budget=1h", "--sd=nan"], "--sd needs a number > 0"),
        (["loss_by_aggregation", "--budget=1h", "loss=gpro"], "loss=gpro"),
        (["loss_by_aggregation", "--budget=1h", "--against=loss=gpro"], "No configuration has it"),
        (["loss_by_aggregation", "--budget=1h", "--over=model.path"], "--over=model.path needs a key that tells"),
        (
            ["loss_by_aggregation", "--budget=1h", "--metric=area:x", "hydra/launcher=slurm"],
            "a grid of runs on this machine",
        ),
        (["nothing", "--budget=1h"], "a sweep that exists"),
        (["loss_by_aggregation"], "--budget"),
    ],
)
def test_bad_input_is_refused(timed, capsys, arguments, expected):
    assert main(["plan", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_short_run_is_timed_as_the_launcher_would_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["evaluation.every=10", "evaluation.prompts_per_set=4", "hydra.launcher.n_jobs=2"]
    said = said_by(capsys, "loss_by_aggregation", "--budget=2h", "--margin=0.1", "--sd=0.2", *SMALL, *options)
    assert said.startswith("A run: ")
    assert "s to start + 40 steps x 0.0" in said
    assert "s + 5 evaluations x 0." in said
    assert "timed with 2 jobs at a time" in said
    assert [*tmp_path.iterdir()] == []
