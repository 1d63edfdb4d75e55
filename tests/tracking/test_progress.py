"""Progress lines, the summary at a run's end, and the commands that it prints."""

import json
import shlex
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from builders.runs import config_of

from pgtoolkit.assembly.continuing import (
    counterpart_command,
    has_counterpart,
    left_out_of_counterpart,
)
from pgtoolkit.assembly.early_stop import stop_signals_recorded
from pgtoolkit.assembly.summary import run_summary
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import changed, plain_config
from pgtoolkit.config.new_run import new_run_command
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.errors import Interrupted
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.mlflow_run import MlflowRecord
from pgtoolkit.tracking.next_commands import program
from pgtoolkit.tracking.progress import ProgressLine, sparkline

METRICS = {
    "loss": -0.00123,
    "ratio_new_old": 1.00021,
    "kl_new_old": 1.2e-5,
    "clipped_ratio_fraction": 0.123,
    "reward": 0.512,
    "exact_match": 0.031,
    "tokens_per_second": 21_400,
    "num_tokens": 448,
}


def progress(max_steps: int, first: int = 1, seconds: float = 0.0) -> ProgressLine:
    """Return a ProgressLine whose line for step `first` was made `seconds` ago."""
    line = ProgressLine(max_steps)
    line._first = (first, time.monotonic() - seconds)
    return line


def test_a_line_has_all_metrics_and_the_time_left():
    line = progress(300, seconds=22.0).line(12, METRICS)
    expected = (
        "step  12/300 loss -1e-03 ratio 1.0002 kl 1e-05 clip  12% reward 0.51 exact   3% "
        "21k tok/s ETA  9:36"
    )
    assert line == expected


def test_the_fields_of_a_terminal_are_ordered_by_importance():
    fields = progress(300, seconds=22.0).renewed(12, METRICS)
    assert fields == [
        "step  12/300",
        "9:36 left",
        "loss -1.23e-03",
        "reward 0.51",
        "exact   3%",
        "21k tok/s",
    ]
    metrics = {"loss": 12.3456, "reward": 0.5, "reward/answer": 0.25}
    assert ProgressLine(9).renewed(2, metrics) == [
        "step 2/9",
        "loss  1.23e+01",
        "reward 0.50",
        "answer 0.25",
    ]


def test_a_line_has_the_mean_of_each_verifier():
    metrics = {"reward": 0.512, "exact_match": 0.5, "reward/answer": 0.5, "reward/format": 0.118}
    line = progress(9).line(2, metrics)
    assert line.startswith("step 2/9 reward 0.51 answer 0.50 format 0.12 exact  50% ETA")


def test_a_line_has_the_means_over_the_documents_with_a_trained_token():
    metrics = {"ratio_new_old": 0.125, "kl_new_old": 1e-4, "clipped_ratio_fraction": 0.0625}
    counts = {"num_documents": 8, "num_empty_documents": 7}
    line = ProgressLine(9).line(2, {"loss": 0.5, "reward": 0.5, **metrics, **counts})
    assert line.startswith("step 2/9 loss  5e-01 ratio 1.0000 kl 8e-04 clip  50% reward 0.50 ETA")
    nothing = ProgressLine(9).line(2, {**metrics, "num_documents": 8, "num_empty_documents": 8})
    assert nothing.startswith("step 2/9 ratio 0.1250")


def test_the_time_left_of_a_resumed_run_counts_its_own_steps():
    assert progress(300, first=200, seconds=10.0).line(210, METRICS).endswith("ETA  1:30")
    assert progress(30_000, seconds=59.0).line(60, METRICS).endswith("ETA  8h19")
    assert progress(300, seconds=60.0).line(300, METRICS).endswith("ETA  0:00")
    assert ProgressLine(300).line(201, METRICS).endswith("ETA     ?")
    assert ProgressLine(1).line(1, METRICS).endswith("ETA  0:00")


def test_sparkline_averages_and_spans_the_range():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 2.0, 7.0, 9.0], width=2) == "▁█"
    assert sparkline([0.11830357142857148, 0.1183035714285715]) == "▁▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.01], span=(0, 1)) == "▁▁"
    assert len(sparkline(list(range(1000)))) == 40


def save_config(run_dir: Path, loss: str, overrides: list[str]) -> None:
    config = plain_config(compose([f"loss={loss}"]).config)
    with RunDirectory(run_dir) as run:
        run.write_config(config, overrides)


def record_in_mlflow(info: dict[str, str]) -> MlflowRecord:
    """Return the record of a run that was made in a store, without a connection to it."""
    record = MlflowRecord(info["uri"], "tests")
    record.info = info
    return record


def columns() -> dict[str, np.ndarray]:
    """Return the metrics of 20 steps whose reward rises from 0.05 to 1."""
    steps = np.arange(1.0, 21)
    return {"step": steps, "loss": 0 * steps + 0.1, "reward": steps / 20, "exact_match": 0 * steps}


def test_the_summary_has_first_and_last_numbers_and_commands_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs" / "my run"
    run_dir.mkdir(parents=True)
    (run_dir / "curves.png").write_text("")
    save_config(run_dir, "gspo", ["aggregation=constant"])
    info = {"uri": f"sqlite:///{tmp_path}/outputs/mlflow.db", "experiment_id": "1", "run_id": "abc"}
    lines = run_summary(columns(), run_dir, [record_in_mlflow(info)]).splitlines()
    assert lines[0].startswith("reward       0.075 -> 0.975  ▁")
    assert lines[0].endswith("█  (first and last tenth of 20 steps)")
    assert lines[1].startswith("exact match  0.000 -> 0.000")
    assert lines[2:4] == [
        "run          'outputs/my run'",
        "curves       'outputs/my run/curves.png'",
    ]
    pgtk = program("pgtk")
    assert lines[4:] == [
        f"MLflow       {pgtk} ui",
        "             http://127.0.0.1:5000/#/experiments/1/runs/abc?workflowType=machine_learning",
        f"resume       {pgtk} resume 'outputs/my run' trainer.max_steps=40",
        f"compare      {pgtk} loss=grpo aggregation=constant",
        (
            "             "
            "http://127.0.0.1:5000/#/experiments/1/runs?compareRunsMode=CHART&workflowType=machine_learning"
        ),
    ]


def test_the_summary_of_a_run_without_reward_mlflow_and_curves_has_its_loss(tmp_path):
    save_config(tmp_path, "gspo", [])
    text = run_summary({"step": np.array([1.0]), "loss": np.array([0.5])}, tmp_path)
    assert text.startswith("loss         0.500 -> 0.500  ▁  (first and last tenth of 1 step)\n")
    assert "MLflow" not in text
    assert "curves" not in text


def test_the_summary_links_to_a_server_of_mlflow_and_its_charts(tmp_path):
    """Other losses cannot train on recorded rollouts of reinforce, so no command compares them."""
    with RunDirectory(tmp_path) as run:
        run.write_config({"loss": {"name": "reinforce"}, "rollout": {"name": "recorded"}}, [])
    server = {"uri": "http://h:1", "experiment_id": "2", "run_id": "abc"}
    lines = run_summary({"step": np.empty(0)}, tmp_path, [record_in_mlflow(server)]).splitlines()
    page = "http://h:1/#/experiments/2/runs"
    assert f"MLflow       {page}/abc?workflowType=machine_learning" in lines[:-1]
    assert lines[-1] == (f"compare      {page}?compareRunsMode=CHART&workflowType=machine_learning")


@pytest.mark.parametrize(
    ("overrides", "loss", "expected"),
    [
        (["loss=gspo", "aggregation=constant"], "gspo", ["loss=grpo", "aggregation=constant"]),
        (
            ["loss.epsilon_low=0.1", "rollout.save_path=x", "a='x y'"],
            "grpo",
            ["loss=gspo", "a='x y'"],
        ),
    ],
)
def test_the_counterpart_differs_in_the_loss_alone(tmp_path, overrides, loss, expected):
    save_config(tmp_path, loss, overrides)
    assert shlex.split(counterpart_command(tmp_path))[1:] == expected
    said = left_out_of_counterpart(tmp_path)
    of_loss = [override for override in overrides if override.startswith("loss.")]
    assert (said is None) == (not of_loss)
    if said:
        assert said == (
            "without loss.epsilon_low=0.1: loss=gspo has its own, see pgtk explain loss=gspo"
        )
        printed = run_summary({"step": np.empty(0)}, tmp_path).splitlines()
        assert printed[-2].startswith("compare      ")
        assert printed[-1] == f"{'':<12} {said}"


SWEEP = """defaults:
  - config
  - override aggregation: constant
  - _self_
task: {num_digits: 2}
trainer: {max_steps: 7}
hydra:
  sweeper:
    params: {loss: "gspo,cispo", seed: "0,1"}
"""


@pytest.mark.parametrize("is_branch", [False, True])
def test_the_counterpart_of_a_job_has_what_the_sweeps_file_sets(tmp_path, monkeypatch, is_branch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tune.yaml"
    file.write_text(SWEEP)
    (tmp_path / "mine").mkdir()
    config = compose_sweep([], file).compose_job(["loss=gspo", "seed=1"], 1).config
    assert config is not None
    job = tmp_path / "outputs/sweeps/tune/gspo"
    job.parent.mkdir(parents=True)
    (job.parent / "sweep.json").write_text("{}")
    with RunDirectory(job) as run:
        run.write_config(plain_config(config), ["loss=gspo", "seed=1"])
        command = ["pgtk", "sweep", "--config-dir", "mine", "tune.yaml", "trainer.max_steps=7"]
        run.write_provenance({"command": command, "directory": str(tmp_path)})
    if is_branch:  # its own start has another command, and no word of the sweep
        with RunDirectory(tmp_path / "branch") as run:
            run.write_config(plain_config(config), ["loss=gspo", "seed=1"])
            run.write_provenance({"command": ["pgtk", "resume"], "directory": str(tmp_path)})
        status = {"state": "done", "step": 7, "parent": f"{job}, step 4"}
        (tmp_path / "branch/status.json").write_text(json.dumps(status))
    command = new_run_command(tmp_path / "branch" if is_branch else job, ["loss=grpo"])
    words = shlex.split(command)[1:]
    assert words[:3] == ["sweep", "tune.yaml", "--config-dir=mine"]
    assert words[3:] == ["loss=grpo", "seed=1", "hydra.sweep.dir=outputs/sweeps/tune"]
    typed = compose_sweep(words[3:], file)
    assert tmp_path / (typed.folder or "") == job.parent
    assert [*map(len, typed.jobs)] == [2]
    other = typed.compose_job(typed.jobs[0], 0).config
    assert other is not None
    changes = changed(plain_config(config), plain_config(other))
    assert changes["loss.name"] == ["gspo", "grpo"]
    assert all(key.startswith("loss.") for key in changes)
    assert has_counterpart(job)
    with RunDirectory(job) as run:
        run.write_config(plain_config(config), ["loss=gspo", "loss.epsilon_low=0.1", "seed=1"])
    assert has_counterpart(job)
    file.write_text(SWEEP.replace('seed: "0,1"', 'seed: "0,1", loss.epsilon_low: "0.1,0.2"'))
    for command in (counterpart_command(job), new_run_command(job, ["loss=cispo"])):
        overrides = [word for word in shlex.split(command)[3:] if word != "--config-dir=mine"]
        typed = compose_sweep(overrides, file)
        assert [*map(len, typed.jobs)] == [2]  # of all that the file goes through, the one asked
        of_job = typed.compose_job(typed.jobs[0], 0)
        assert of_job.problems == []
        assert of_job.config is not None
        assert f"loss={of_job.config.loss.name}" in shlex.split(command)
        assert (of_job.config.seed, of_job.config.trainer.max_steps) == (1, 7)
    file.write_text(SWEEP.replace("  - _self_", "  - override hydra/sweeper: optuna_search"))
    assert "hydra/sweeper=basic" in new_run_command(job, ["loss=grpo"])
    (job / "status.json").write_text("{")
    assert " sweep tune.yaml " in new_run_command(job, ["loss=grpo"])


@pytest.mark.parametrize(
    ("group", "content", "expected"),
    [
        ("experiment", "defaults: [override /loss: grpo]\nloss: {epsilon_low: 0.1}", "gspo"),
        ("experiment", "defaults: [override /loss: mine.soft]\nloss: {softness: 0.1}", None),
        ("experiment", "defaults: [override /loss: mine.soft]\nseed: 3", "grpo"),
        ("loss", "_target_: mine.soft\nsoftness: 0.1", "grpo"),
    ],
)
def test_the_counterpart_takes_what_the_runs_files_set(
    tmp_path, monkeypatch, group, content, expected
):
    """A file's numbers of one loss are refused with another, unless it has them too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGTK_CONFIG_DIR", "options")
    monkeypatch.syspath_prepend(tmp_path)
    code = "def soft(log_ratio, advantages, softness=0.2): return softness * log_ratio * advantages"
    (tmp_path / "mine.py").write_text(code)
    file = tmp_path / "options" / group / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{content}\n" if group == "experiment" else content)
    config = compose([f"{group}=own", "seed=1"]).config
    assert config is not None
    with RunDirectory(tmp_path / "run") as run:
        run.write_config(plain_config(config), [f"{group}=own", "seed=1"])
    assert has_counterpart(run.path) == (expected is not None)
    if expected is not None:
        words = shlex.split(counterpart_command(run.path))[1:]
        other = compose(words)
        assert other.problems == []
        assert other.config is not None
        assert (other.config.loss.name, other.config.seed) == (expected, config.seed)
        # Numbers of another loss mean something else: it has its own.
        assert other.config.loss == compose([f"loss={expected}"]).config.loss


def test_a_program_is_named_by_its_path_unless_path_has_it(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert Path(shlex.split(program("mlflow"))[0]).is_file()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert program("mlflow") == "mlflow"


def test_a_signal_interrupts_a_run_unless_it_is_done(tmp_path, capsys):
    with stop_signals_recorded(plain_config(config_of()), tmp_path, []):
        with RunDirectory(tmp_path) as run:
            run.write_config({}, [])
            run.set_status("done", 3)
        signal.raise_signal(signal.SIGTERM)
    assert capsys.readouterr().out == "stopped as asked (SIGTERM) after the run was done\n"
    with RunDirectory(tmp_path) as run:
        run.set_status("running", 3)
    with (
        pytest.raises(Interrupted, match="is running at step 3"),
        stop_signals_recorded(plain_config(config_of()), tmp_path, []),
    ):
        signal.raise_signal(signal.SIGTERM)
