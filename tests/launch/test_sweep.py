"""Sweeps without their processes: which job is which, where it may write, what is checked before
the first starts."""

import json
import re
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of
from builders.runs import run as train_short

from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import sweep_file
from pgtoolkit.config.names import digest, plain_config
from pgtoolkit.config.overrides import jobs
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.launch.check import check, problems, render_plan
from pgtoolkit.launch.ranks import train_job
from pgtoolkit.launch.sweep import Job, Sweep
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import read_resolved, read_status, read_sweep


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    out = capsys.readouterr()
    assert "Traceback" not in out.err + out.out
    return out.err or out.out


# Which job is which


def test_the_digest_is_that_of_the_saved_configuration(tmp_path):
    config = config_of("seed=3")
    with RunDirectory(tmp_path) as run:
        run.write_config(plain_config(config), [])
    assert digest(read_resolved(tmp_path)) == digest(plain_config(config))


def planned(*overrides):
    return Job("job", list(overrides), compose(list(overrides)).config)


def test_what_became_of_a_job_is_read_from_its_directory(tmp_path):
    job, folder = planned("seed=1"), tmp_path / "job"
    job.update_from(tmp_path)
    assert (job.status, job.step) == ("pending", 0)
    with RunDirectory(folder) as run:
        job.update_from(tmp_path)
        assert job.status == "running"
        run.write_config(plain_config(job.config), [])
        run.set_status("running", 3)
        job.update_from(tmp_path)
        assert job.status == "running"
    job.update_from(tmp_path)
    assert (job.status, job.reason, job.step) == ("interrupted", "its process was killed", 3)
    for state in ("failed", "done"):
        with RunDirectory(folder) as run:
            run.set_status(state, 5, "why")
        job.update_from(tmp_path)
        assert (job.status, job.reason, job.step) == (state, "why", 5)


def test_another_configuration_in_the_directory_is_refused(tmp_path):
    job = planned("seed=1")
    with RunDirectory(tmp_path / "job") as run:
        run.write_config(
            plain_config(planned("seed=1", "tracking=none", "trainer.checkpoint_every=3").config),
            [],
        )
    job.update_from(tmp_path)
    with RunDirectory(tmp_path / "job") as run:
        run.write_config(plain_config(planned("seed=1", "trainer.max_steps=900").config), [])
    with pytest.raises(ConfigError, match=r"got one with trainer\.max_steps=900, not 300"):
        job.update_from(tmp_path)
    (tmp_path / "job" / "config.yaml").write_text("seed: [")
    with pytest.raises(StorageError, match="damaged"):
        job.update_from(tmp_path)


def test_a_failed_job_goes_on_from_its_checkpoint_and_a_finished_one_is_left_alone(tmp_path):
    whole = train_short(tmp_path / "whole")
    failed = copy_as_of(whole, 4, tmp_path / "failed")
    with RunDirectory(failed) as run:
        run.set_status("failed", 4, "OSError: the disk was full")
    train_job(config_of(*SHORT), failed, [], "mine")
    status = read_status(failed)
    assert (status["state"], status["step"], status["sweep"]) == ("done", 6, "mine")
    assert metrics_of(failed) == metrics_of(whole)
    rows = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (failed, whole)]
    # with their times
    assert [ours == first for ours, first in zip(*rows, strict=True)] == [True] * 4 + [False] * 2
    assert_equal(checkpoint_of(failed, 6), checkpoint_of(whole, 6))
    before = {file: file.stat().st_mtime_ns for file in failed.rglob("*")}
    train_job(config_of(*SHORT), failed, [], "mine")
    assert {file: file.stat().st_mtime_ns for file in failed.rglob("*")} == before


def test_a_sweep_is_held_by_one_launcher(tmp_path):
    sweep = Sweep(tmp_path / "s", ["pgtk", "-m", "seed=1"], jobs={"job": planned("seed=1")})
    with sweep.held():
        sweep.save()
        with (
            pytest.raises(ConfigError, match="in use by process"),
            Sweep(tmp_path / "s", []).held(),
        ):
            pass
    saved = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert (saved["name"], saved["command"]) == ("s", ["pgtk", "-m", "seed=1"])
    assert {"name", "directory", "overrides", "status", "reason", "log", "seconds"} <= saved[
        "jobs"
    ][0].keys()
    (other := planned("seed=2")).directory = "other"
    again = Sweep(tmp_path / "s", [], jobs={"other": other})
    with again.held():
        again.save()  # jobs of an earlier command stay listed
        before = (tmp_path / "s" / "sweep.json").stat().st_mtime_ns
        other.status = "failed"
        again.add(other)
        other.status = "done"
        again.add(other)  # a line each: the whole file would be rewritten once a job
        assert (tmp_path / "s" / "sweep.json").stat().st_mtime_ns == before
        states = [(job["name"], job["status"]) for job in read_sweep(tmp_path / "s")["jobs"]]
        assert states == [("job", "pending"), ("other", "done")]
        again.save()
    assert not (tmp_path / "s" / "sweep.jsonl").exists()
    assert [(job["name"], job["status"]) for job in read_sweep(tmp_path / "s")["jobs"]] == states
    (tmp_path / "s" / "sweep.json").write_text('{"jobs": 3}')
    with pytest.raises(StorageError, match=r"sweep\.json is damaged"), again.held():
        pass


# What is checked before the first job starts


def test_the_same_command_finds_its_folder_again():
    def folder(*overrides):
        return str(check(list(overrides), multirun=True).sweep.folder)

    assert folder("seed=1,2", "loss=grpo,gspo") == "outputs/sweeps/seed-1-2_loss-grpo-gspo"
    assert folder("tracking=none", "loss=grpo", "seed=1,2") == "outputs/sweeps/seed-1-2_loss-grpo"
    assert folder("hydra.launcher.n_jobs=2", "seed=range(3)") == "outputs/sweeps/seed-range-3"
    assert folder("seed=1,2", "hydra.sweep.dir=mine/now") == "mine/now"
    file = sweep_file("metrics_cost")
    assert check([], True, sweep_file=file).sweep.folder == Path("outputs/sweeps/metrics_cost")
    assert check(["seed=1"], True, sweep_file=file).sweep.folder == Path(
        "outputs/sweeps/metrics_cost_seed-1"
    )


def test_directories_are_named_by_what_varies_and_do_not_depend_on_the_order():
    one = check(["aggregation=constant", "seed=1,2", "loss=grpo"], True).sweep.jobs
    assert [re.fullmatch(r"seed-\d-[0-9a-f]{8}", name) is not None for name in one] == [True, True]
    other = check(["loss=grpo", "aggregation=constant", "seed=2,1,3"], True).sweep.jobs
    assert set(one) < set(other)
    assert [job.config.tracking.run_name for job in one.values()] == ["seed-1", "seed-2"]


def test_a_job_is_found_again_where_something_else_varied(tmp_path):
    place = f"hydra.sweep.dir={tmp_path}"
    (first,) = check(
        ["seed=1", "loss=gspo", "trainer.max_steps=9", place], True
    ).sweep.jobs.values()
    with RunDirectory(tmp_path / first.directory) as run:
        run.write_config(plain_config(first.config), [])
        run.set_status("done", 9)
    jobs = check(["seed=1,2", "trainer.max_steps=9", place], True).sweep.jobs
    assert [(name == first.directory, job.status) for name, job in jobs.items()] == [
        (True, "done"),
        (False, "pending"),
    ]


def test_the_same_configuration_twice_is_one_job():
    checked = check(["loss.epsilon_low=3e-4,0.0003,1e-4"], True)
    assert len(checked.sweep.jobs) == 2
    assert "it is run once" in render_plan(checked)


def test_two_configurations_do_not_share_a_directory(capsys):
    assert "Two jobs would write to one directory" in refused(
        capsys, "check", "-m", "seed=1,2", "hydra.sweep.subdir=x"
    )


def test_all_problems_of_all_jobs_come_before_the_first_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\nhydra: {sweeper: {params: {loss: 'grpo,gspo', "
        "loss.num_splits: '1,2'}}}\n"
    )
    wrong = ["hydra.launcher.n_jobs=0", "seed=-1,x"]
    for command in (["sweep", "mine.yaml"], ["check", "sweep", "mine.yaml"]):
        said = refused(capsys, *command, *wrong)
        for expected in (
            "hydra.launcher.n_jobs=0 needs a whole number >= 1",
            "loss=gspo needs loss.num_splits=1",
            "seed=x",
        ):
            assert expected in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_jobs_on_gpus_are_refused_where_they_have_no_room(monkeypatch):
    def refusals(*overrides: str) -> str:
        return "\n".join(problems(check(["seed=1,2", *overrides], multirun=True)))

    monkeypatch.setattr("pgtoolkit.training.machine.visible_gpus", list)
    said = (
        "needs a GPU (got none). It counts jobs on each GPU of this machine. Use "
        "hydra.launcher.n_jobs=2."
    )
    assert refusals("hydra.launcher.jobs_per_gpu=2").endswith(said)
    monkeypatch.setattr("pgtoolkit.training.machine.visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr("pgtoolkit.training.machine.gpu_memory", lambda: 2.3e9)
    assert refusals("hydra.launcher.jobs_per_gpu=3") == ""
    said = "needs 4 times 0.734 GB of each GPU (got 2.3). Its jobs share this memory. Use "
    assert refusals("hydra.launcher.jobs_per_gpu=4").endswith(
        said + "hydra.launcher.jobs_per_gpu=3."
    )
    assert refusals("hydra.launcher.jobs_per_gpu=3", "model.hidden_size=512").endswith(
        "hydra.launcher.jobs_per_gpu=2."
    )
    larger = (
        "accumulation.docs_per_step=4096",
        "accumulation.max_tokens=65536",
        "rollout.prompts_per_batch=512",
    )
    said = "hydra.launcher.jobs_per_gpu=1, or accumulation.max_tokens=7936."
    assert refusals("hydra.launcher.jobs_per_gpu=2", *larger).endswith(said)
    for override, got in (
        ("trainer.device=cpu", "trainer.device=cpu"),
        ("parallelism=ddp", "2 processes"),
        ("sampler.gpus=[1]", "2 processes"),
        ("hydra.launcher.n_jobs=2", "2"),
    ):
        assert f"(got {got})" in refusals("hydra.launcher.jobs_per_gpu=2", override)


def test_the_page_shows_what_varies_and_what_is_done(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["check", "-m", "loss=grpo", "seed=1,2,3,4", "trainer.max_steps=10"]
    assert main(arguments) == 0
    capsys.readouterr()
    sweep = check(arguments[2:], True).sweep
    for (name, job), state in zip(sweep.jobs.items(), ("done", "failed", "running"), strict=False):
        with RunDirectory(sweep.folder / name) as run:
            run.write_config(plain_config(job.config), [])
            run.set_status(state, 10)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for expected in (
        "Sweep of 4 runs",
        "0  done         seed=1\n",
        "1  failed       seed=2\n",
        "2  interrupted  seed=3\n",
        "3  pending      seed=4\n",
        "varies: seed = 1, 2, 3, 4",
        "in all: loss=grpo trainer.max_steps=10",
        ": 4 jobs, 1 done, 1 failed, 1 interrupted, 1 pending",
    ):
        assert expected in shown


def test_values_that_a_search_draws_make_a_job_as_others_do():
    checked = check(
        ["seed=1,2", "loss=grpo", "hydra.sweep.subdir=x/${hydra.job.override_dirname}"], True
    )
    assert list(checked.sweep.jobs) == ["x/seed=1", "x/seed=2"]
    drawn = checked.plan(["seed=7", "loss=grpo"], 2)
    assert (drawn.config.seed, drawn.config.loss.name, drawn.job.directory) == (
        7,
        "grpo",
        "x/seed=7",
    )
    assert checked.plan(["seed=2", "loss=grpo"], 3).job is checked.runs[1].job
    (problem,) = checked.plan(["seed=x"], 3).report.problems
    assert problem.startswith("seed=x needs a whole number")


def test_jobs_that_differ_in_values_alone_are_those_that_hydra_composes(tmp_path):
    """Of each kind the first is composed: what follows from other keys, defaults and notes are of
    each job's own."""
    axes = [
        "loss=grpo,gspo",
        "accumulation.docs_per_step=16,32",
        "optimizer.warmup_steps=3,400",
        "seed=1,2",
    ]
    axes += [
        "trainer.max_steps='${pgtk.divide:320,${accumulation.docs_per_step}}'",
        "model.random_weights=true,false",
    ]
    save_with_tokenizer(small_llama(max_position_embeddings=1024), tmp_path / "model")
    axes += ["model=huggingface", f"model.path={tmp_path / 'model'}", "tracking.run_name=a-${seed}"]
    checked = check([*axes, f"hydra.sweep.dir={tmp_path}"], True)
    runs = checked.runs
    assert len(runs) == 32
    assert len({run.config.optimizer.learning_rate for run in runs}) == 2
    for run in runs:
        composed = compose(run.overrides)
        whole, report = validated(composed)
        assert run.config == whole
        assert (run.report.notes, run.report.problems) == (report.notes, report.problems)
        assert run.job.config.tracking.run_name == f"a-{whole.seed}"


def test_an_override_on_a_swept_key_replaces_its_values():
    file = sweep_file("loss_by_aggregation")
    assert len(check(["aggregation=constant", "seed=0,1"], True, sweep_file=file).runs) == 4
    assert jobs(["seed=1,2", "seed=3"]) == [["seed=3"]]


# Files of sweeps


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["sweep", "clip_rang"], "Use pgtk sweep clip_range."),
        (["sweep", "zzz"], "Use one of clip_range, "),
        (["sweep", "no/such.yaml"], "(got no/such.yaml)"),
        (["sweep"], "pgtk sweep needs a sweep that exists (got none)"),
        (["sweep", "metrics_cost", "sed=1"], "Use seed=1."),
    ],
)
def test_a_sweep_that_is_not_there(capsys, arguments, shows):
    assert shows in refused(capsys, *arguments)


def test_a_file_without_the_main_configuration_is_refused(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    said = refused(capsys, "sweep", str(tmp_path / "mine.yaml"))
    assert (
        "the configuration needs the keys of an option in every group (got none in loss, "
        "aggregation"
    ) in said
    assert said.endswith("Use defaults: [config, _self_] at the file's top.\n")


# Other launchers


@pytest.mark.parametrize(
    ("choice", "extra"),
    [
        ("hydra/launcher=slurm", "submitit"),
        ("hydra/launcher=ray_cluster", "ray"),
        ("hydra/sweeper=optuna_search", "optuna"),
    ],
)
def test_other_launchers_and_the_search_say_what_installs_them(capsys, monkeypatch, choice, extra):
    assert compose([choice]).problems == []
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda package: False)
    said = refused(capsys, "check", "-m", choice, "seed=1,2")
    assert f"{choice} needs the package" in said
    assert f'Use pip install "pgtk[{extra}]".' in said


def test_settings_of_the_launchers_are_typed(capsys):
    assert "n_jobs" in refused(capsys, "check", "-m", "hydra.launcher.n_jobs=many", "seed=1,2")
    assert "n_job" in refused(capsys, "check", "-m", "hydra.launcher.n_job=2", "seed=1,2")
    slurm = compose_sweep(
        ["hydra/launcher=slurm", "hydra.launcher.partition=gpu", "seed=1,2"]
    ).launcher
    assert slurm.kind == "slurm"
    assert [
        slurm.settings[name] for name in ("partition", "max_num_timeout", "tasks_per_node")
    ] == ["gpu", 3, 1]


# Paths


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (
            ["task=prompts", "task.path=../../x", "hydra.run.dir=outputs/${task.path}"],
            "without '..'",
        ),
        (["hydra.run.dir=${nothing}/x"], "a value that resolves"),
        (["tracking.run_name=../../x"], "tracking.run_name=../../x needs"),
        (["-m", "seed=1,2", "hydra.sweep.dir=a/../.."], "without '..'"),
        (["-m", "seed=1,2", "hydra.sweep.dir='a\nb'"], "a path of printable characters"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=../${seed}"], "a folder inside hydra.sweep.dir"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=."], "a folder inside hydra.sweep.dir"),
        (["-m", "tracking.run_name=../x,../y"], "tracking.run_name=../x needs"),
    ],
)
def test_nothing_is_written_outside_the_output_folder(capsys, arguments, shows):
    assert shows in refused(capsys, "check", *arguments)


def test_values_that_look_like_paths_make_plain_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x" / "etc").mkdir(parents=True)
    for place in ("there.jsonl", "x/etc/passwd.jsonl"):
        (tmp_path / place).write_text('{"prompt": "1", "answer": "1"}')
    values = f"task.path=../there.jsonl,{tmp_path}/x/etc/passwd.jsonl"
    monkeypatch.chdir(tmp_path / "x")
    sweep = check(["task=prompts", values, "trainer.max_steps=3"], True).sweep
    names = [name.rpartition("-")[0] for name in sweep.jobs]
    assert names == ["there.jsonl", "passwd.jsonl"]
    assert str(sweep.folder) == "outputs/sweeps/there.jsonl-passwd.jsonl_max-steps-3"
