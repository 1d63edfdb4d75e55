"""Sweeps without their processes: the directory and the state of each job, where it may write, and
the checks before the first job starts."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.refusals import refusal
from builders.runs import SHORT, assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of
from builders.runs import run as train_short

from pgtoolkit.assembly.continuing import training_on_command
from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import sweep_file
from pgtoolkit.config.launchers import Search
from pgtoolkit.config.names import digest, plain_config
from pgtoolkit.config.overrides import jobs
from pgtoolkit.config.sweeps import SweepConfig, compose_sweep
from pgtoolkit.config.validate import validated
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.launch.check import (
    check,
    check_job,
    check_run,
    check_sweep,
    notes,
    problems,
    render_plan,
)
from pgtoolkit.launch.ranks import train_job, trained_before
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.launch.sweep_report import notes_on_code
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.modules import module_digests
from pgtoolkit.runs.records import read_resolved, read_status, read_sweep
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.report import shortest_path

# The state of a job


def test_a_configuration_has_the_same_digest_after_it_was_saved_and_read(tmp_path):
    config = config_of("seed=3")
    with RunDirectory(tmp_path) as run:
        run.write_config(plain_config(config), [])
    assert digest(read_resolved(tmp_path)) == digest(plain_config(config))


def job_with(*overrides: str, directory: str = "job") -> PlannedRun:
    composed = replace(compose(list(overrides)), directory=directory)
    return check_run(composed, list(overrides))


def test_the_status_of_a_job_is_read_from_its_directory(tmp_path):
    job = job_with("seed=1")
    folder = tmp_path / "job"
    job.update_from(tmp_path)
    assert (job.status, job.step) == ("pending", 0)
    with RunDirectory(folder) as run:
        job.update_from(tmp_path)
        assert job.status == "running"
        run.write_config(plain_config(job.named_config), [])
        run.set_status("running", 3, saved=2)
        job.update_from(tmp_path)
        assert job.status == "running"
    job.update_from(tmp_path)
    assert (job.status, job.reason, job.step) == ("interrupted", "its process was killed", 2)
    for state in ("failed", "done"):
        with RunDirectory(folder) as run:
            run.set_status(state, 5, "why", saved=5)
        job.update_from(tmp_path)
        assert (job.status, job.reason, job.step) == (state, "why", 5)


def test_another_or_a_damaged_configuration_in_the_directory_of_a_job_is_refused(tmp_path):
    job = job_with("seed=1")
    with RunDirectory(tmp_path / "job") as run:
        run.write_config(
            plain_config(
                job_with("seed=1", "tracking=none", "trainer.checkpoint_every=3").named_config
            ),
            [],
        )
    job.update_from(tmp_path)
    with RunDirectory(tmp_path / "job") as run:
        run.write_config(plain_config(job_with("seed=1", "trainer.max_steps=900").named_config), [])
    with pytest.raises(ConfigError, match=r"got one with trainer\.max_steps=900, not 300"):
        job.update_from(tmp_path)
    (tmp_path / "job" / "config.yaml").write_text("seed: [")
    with pytest.raises(StorageError, match="damaged"):
        job.update_from(tmp_path)


def test_a_job_that_was_trained_on_is_refused_with_what_its_sweep_takes(tmp_path):
    words = ["loss=grpo,gspo", "tracking=none", "trainer.max_steps=60"]
    sweep = check_sweep([*words, f"hydra.sweep.dir={tmp_path}/sweep"])
    job = next(iter(sweep.jobs.values()))
    directory = sweep.folder / job.directory
    longer = with_values(job.named_config, {"trainer.max_steps": 64})
    with RunDirectory(directory) as run:
        run.write_config(plain_config(longer), [])
        run.set_status("done", 64, sweep=sweep.name)
    sweep.save()
    (problem,) = problems(check_sweep([*words, f"hydra.sweep.dir={tmp_path}/sweep"]))
    assert "trainer.max_steps=64, not 60" in problem
    assert "resume" not in problem
    other = re.findall(r"hydra\.sweep\.dir=\S+", problem)
    assert other == [f"hydra.sweep.dir={tmp_path}/sweep-2"]
    assert problems(check_sweep([*words, *other])) == []
    (directory / "checkpoints" / "step-00000064").mkdir(parents=True)
    on = shlex.split(training_on_command(directory, {"trainer.max_steps": 128}))
    assert on[-2:] == [f"hydra.run.dir={shortest_path(directory)}-64", "trainer.max_steps=128"]
    assert f"move {directory} to another folder" in problem
    directory.rename(tmp_path / "moved")
    assert problems(check_sweep([*words, f"hydra.sweep.dir={tmp_path}/sweep"])) == []


def test_a_failed_job_continues_from_its_checkpoint_and_a_finished_one_is_left_alone(tmp_path):
    uninterrupted = train_short(tmp_path / "uninterrupted")
    failed = copy_as_of(uninterrupted, 4, tmp_path / "failed")
    with RunDirectory(failed) as run:
        run.set_status("failed", 4, "OSError: the disk was full")
    train_job(config_of(*SHORT), failed, [], "mine")
    status = read_status(failed)
    assert (status["state"], status["step"], status["sweep"]) == ("done", 6, "mine")
    assert metrics_of(failed) == metrics_of(uninterrupted)
    # The rows of the first four steps are kept with their times; the others are new.
    rows = (failed / "metrics.jsonl").read_text().splitlines()
    first_rows = (uninterrupted / "metrics.jsonl").read_text().splitlines()
    kept = [row == first_row for row, first_row in zip(rows, first_rows, strict=True)]
    assert kept == [True] * 4 + [False] * 2
    assert_equal(checkpoint_of(failed, 6), checkpoint_of(uninterrupted, 6))
    before = {file: file.stat().st_mtime_ns for file in failed.rglob("*")}
    train_job(config_of(*SHORT), failed, [], "mine")
    assert {file: file.stat().st_mtime_ns for file in failed.rglob("*")} == before


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Save a sweep of one job."""
    sweep = Sweep(
        SweepConfig(folder=tmp_path / "s"),
        ["pgtk", "-m", "seed=1"],
        jobs={"job": job_with("seed=1")},
    )
    with sweep.held():
        sweep.save()
    return sweep


def states_of_jobs(folder: Path) -> list[tuple[str, str]]:
    return [(job["name"], job["status"]) for job in read_sweep(folder)["jobs"]]


def test_a_sweep_that_a_launcher_holds_is_refused_to_another(sweep):
    with (
        sweep.held(),
        pytest.raises(ConfigError, match="in use by process"),
        Sweep(sweep.config, []).held(),
    ):
        pass


def test_the_file_of_a_sweep_has_its_command_and_its_jobs(sweep):
    saved = json.loads((sweep.folder / "sweep.json").read_text())
    assert (saved["name"], saved["command"]) == ("s", ["pgtk", "-m", "seed=1"])
    (job,) = saved["jobs"]
    assert {"name", "directory", "overrides", "status", "reason", "log", "seconds"} <= job.keys()


def test_jobs_of_an_earlier_command_stay_in_the_file_and_each_new_state_is_one_line(sweep):
    other = job_with("seed=2", directory="other")
    later = Sweep(sweep.config, [], jobs={"other": other})
    expected = [("job", "pending"), ("other", "done")]
    with later.held():
        later.save()
        before = (sweep.folder / "sweep.json").stat().st_mtime_ns
        for status in ("failed", "done"):
            other.status = status
            later.add(other)
        assert (sweep.folder / "sweep.json").stat().st_mtime_ns == before
        assert states_of_jobs(sweep.folder) == expected
        later.save()
    assert not (sweep.folder / "sweep.jsonl").exists()
    assert states_of_jobs(sweep.folder) == expected


def test_jobs_that_were_trained_before_a_module_of_the_users_changed_are_noted(
    sweep, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n")
    job = sweep.jobs["job"]
    (sweep.folder / "job").mkdir()
    (sweep.folder / "job" / "provenance.json").write_text(
        json.dumps({"modules": module_digests(["mine", "math"])})
    )
    job.status = "done"
    assert notes_on_code(sweep) == []
    (tmp_path / "mine.py").write_text("x = 1  # of a comment nothing follows\n")
    assert trained_before(sweep.folder / "job") == ""
    (tmp_path / "mine.py").write_text("x = 2\n")
    since = "mine has changed since 1 job of this sweep trained with it: "
    use = ". Use hydra.sweep.dir=s-2 to train all with the new code."
    goes_on = (
        f"{since}1 goes on with the new code after steps with the old, which pgtk compare counts "
        f"as another configuration{use}"
    )
    assert notes_on_code(sweep) == [f"{since}1 is done and kept{use}"]
    expected = " It was trained before mine changed; use another directory to train anew."
    assert trained_before(sweep.folder / "job") == expected
    job.status = "pending"
    assert notes_on_code(sweep) == []
    for job.status in ("interrupted", "failed"):
        job.step = 0
        assert notes_on_code(sweep) == []  # it starts anew
        job.step = 2
        assert notes_on_code(sweep) == [goes_on]
    # A search makes its jobs as it goes, and draws again those that it has had.
    job.status = "pruned"
    sweep.save()
    sweep.jobs.clear()
    sweep.config = replace(sweep.config, search=Search({}, [], {}))
    status = sweep.folder / "job" / "status.json"
    for state, note in (("interrupted", goes_on), ("pruned", f"{since}1 is done and kept{use}")):
        status.write_text(json.dumps({"state": state, "step": 3, "saved": 2}))
        assert notes_on_code(sweep) == [note]


def test_check_and_the_start_note_a_module_that_changed_since_jobs_were_trained(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n")
    sweep = check_sweep(["seed=0,1,2,3", "tracking=none", f"hydra.sweep.dir={tmp_path}/s"])
    states = [("done", 4), ("done", 4), ("interrupted", 2), ("failed", 3)]
    for job, (status, step) in zip(sweep.jobs.values(), states, strict=True):
        run_dir = sweep.folder / job.directory
        run_dir.mkdir(parents=True)
        provenance = {"modules": module_digests(["mine"])}
        (run_dir / "provenance.json").write_text(json.dumps(provenance))
        job.status = status
        job.step = step
    assert "mine has changed" not in render_plan(sweep)
    (tmp_path / "mine.py").write_text("x = 2\n")
    note = (
        "mine has changed since 4 jobs of this sweep trained with it: 2 are done and kept, 2 go on "
    )
    assert note in render_plan(sweep)
    assert notes(sweep)[-1].startswith(note)  # which is what the start prints


def test_a_damaged_file_of_a_sweep_is_refused(sweep):
    (sweep.folder / "sweep.json").write_text('{"jobs": 3}')
    with pytest.raises(StorageError, match=r"sweep\.json is damaged"), sweep.held():
        pass


# The checks before the first job starts


@pytest.mark.parametrize(
    ("overrides", "file", "folder"),
    [
        (["seed=1,2", "loss=grpo,gspo"], None, "outputs/sweeps/seed-1-2_loss-grpo-gspo"),
        (["tracking=none", "loss=grpo", "seed=1,2"], None, "outputs/sweeps/seed-1-2_loss-grpo"),
        (["hydra.launcher.n_jobs=2", "seed=range(3)"], None, "outputs/sweeps/seed-range-3"),
        (
            ["loss.epsilon_low=0.1,0.3", "loss.epsilon_high=${loss.epsilon_low}"],
            None,
            "outputs/sweeps/epsilon-low-0.1-0.3_epsilon-high-loss.epsilon-low",
        ),
        (["seed=1,2", "hydra.sweep.dir=mine/now"], None, "mine/now"),
        ([], "metrics_cost", "outputs/sweeps/metrics_cost"),
        (["seed=1"], "metrics_cost", "outputs/sweeps/metrics_cost_seed-1"),
    ],
)
def test_the_folder_of_a_sweep_is_named_by_its_file_and_its_overrides(overrides, file, folder):
    sweep = check_sweep(overrides, file and sweep_file(file))
    assert str(sweep.folder) == folder


def test_directories_of_jobs_are_named_by_what_varies_whatever_the_order_of_overrides():
    jobs = check_sweep(["aggregation=constant", "seed=1,2", "loss=grpo"]).jobs
    assert all(re.fullmatch(r"seed-\d-[0-9a-f]{8}", name) for name in jobs)
    assert [job.composed.name for job in jobs.values()] == ["seed-1", "seed-2"]
    reordered = check_sweep(["loss=grpo", "aggregation=constant", "seed=2,1,3"]).jobs
    assert set(jobs) < set(reordered)


def test_a_job_of_a_sweep_in_which_another_key_varied_is_recognised(tmp_path):
    place = f"hydra.sweep.dir={tmp_path}"
    (first,) = check_sweep(["seed=1", "loss=gspo", "trainer.max_steps=9", place]).jobs.values()
    with RunDirectory(tmp_path / first.directory) as run:
        run.write_config(plain_config(first.named_config), [])
        run.set_status("done", 9)
    jobs = check_sweep(["seed=1,2", "trainer.max_steps=9", place]).jobs
    assert [(name == first.directory, job.status) for name, job in jobs.items()] == [
        (True, "done"),
        (False, "pending"),
    ]


def test_a_sweep_whose_folder_had_another_name_is_named_and_gone_on_with(tmp_path, monkeypatch):
    """As where another version named an option with a dot otherwise."""
    monkeypatch.chdir(tmp_path)
    typed = ["seed=1,2", "trainer.max_steps=9"]
    command = ["pgtk", "-m", *typed]
    old = "outputs/sweeps/an old name"
    jobs = check_sweep([*typed, f"hydra.sweep.dir={old}"]).jobs
    first = next(iter(jobs.values()))
    with RunDirectory(tmp_path / old / first.directory.replace("seed-1", "other")) as run:
        run.write_config(plain_config(first.named_config), [])
        run.set_status("done", 9)
    sweep = {"name": "old", "command": command, "jobs": []}
    (tmp_path / old / "sweep.json").write_text(json.dumps(sweep))
    said = "has a sweep of the same command, under a name that another version of pgtk"
    (note,) = [note for note in notes(check_sweep(typed, None, command)) if said in note]
    assert note.startswith(old)
    (used,) = re.findall(r"Use (.*) to go on there\.", note)
    again = check_sweep([*typed, *shlex.split(used)], None, [*command, *shlex.split(used)])
    assert [job.status for job in again.jobs.values()] == ["done", "pending"]
    assert said not in "".join(notes(again))
    assert said not in "".join(notes(check_sweep(typed, None, [*command, "seed=3"])))


def test_equal_configurations_are_one_job():
    sweep = check_sweep(["loss.epsilon_low=3e-4,0.0003,1e-4"])
    assert len(sweep.jobs) == 2
    page = render_plan(sweep)
    assert "it is run once" in page
    assert "1  the same as 0  loss.epsilon_low=0.0003\n" in page


def test_the_page_of_a_sweep_has_what_further_runs_compute_otherwise():
    def others(*words: str) -> str:
        return render_plan(check_sweep([*words])).partition("Other runs\n")[2].partition("\n\n")[0]

    assert others("seed=1,2") == ""
    assert others("loss=gspo,reinforce", "seed=1,2").split("\n") == [
        "  2  loss=reinforce seed=1, and 1 more:",
        "     reinforce, sample_mean: sum over trained tokens of w_t l_t",
        "     l_t = -A_t p_t,  p_t the new log-prob of token t",
    ]
    said = notes(check_sweep(["loss=grpo,gspo", "seed=1,2", "rollout.passes=1,2"]))
    (passes,) = [note for note in said if "ratios compare with" in note]
    assert passes.startswith("loss=grpo seed=1 rollout.passes=2, and 3 more: rollout.passes=2: ")
    many = others(f"trainer.max_steps={','.join(map(str, range(10, 30)))}").split("\n")
    assert many[:2] == ["  1  trainer.max_steps=11:", "     run: at most 11 steps, 704 documents"]
    assert many[2 * 12 :] == [
        "  7 more plans: pgtk check with the overrides of a run prints its own"
    ]


def test_a_sweep_of_one_job_is_noted_with_what_makes_several():
    def noted(*words: str) -> list[str]:
        return [note for note in notes(check_sweep([*words])) if "sweep has one job" in note]

    (note,) = noted()
    assert noted("seed=7") == [note]
    several = note.partition(" Use ")[2].partition(" ")[0]
    assert noted(several) == []
    assert len(check_sweep([several]).jobs) == 3
    assert noted("hydra/launcher=slurm") == []  # which is how one job gets to a cluster


def test_the_second_of_two_jobs_with_one_directory_is_refused():
    page = render_plan(check_sweep(["seed=1,2", "hydra.sweep.subdir=x"]))
    assert "Two jobs would write to one directory" in page
    assert "0  pending        seed=1\n" in page
    assert "1  with problems  seed=2\n" in page


@pytest.mark.slow
def test_all_problems_of_all_jobs_are_refused_before_the_first_starts(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\nhydra: {sweeper: {params: {loss: 'grpo,gspo', "
        "loss.num_splits: '1,2'}}}\n"
    )
    wrong = ["hydra.launcher.n_jobs=0", "seed=-1,x"]
    for command in (["sweep", "mine.yaml"], ["check", "sweep", "mine.yaml"]):
        message = refusal(capsys, *command, *wrong)
        for expected in (
            "hydra.launcher.n_jobs=0 needs a whole number >= 1",
            "loss=gspo needs loss.num_splits=1",
            "seed=x",
        ):
            assert expected in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def refusals_on_gpus(*overrides: str) -> str:
    """Return the problems of a sweep over two seeds."""
    return "\n".join(problems(check(["seed=1,2", *overrides], multirun=True)))


def test_jobs_on_gpus_are_refused_on_a_machine_without_one(monkeypatch):
    monkeypatch.setattr("pgtoolkit.launch.jobs_on_gpus.visible_gpus", list)
    assert refusals_on_gpus("hydra.launcher.jobs_per_gpu=2").endswith(
        "needs a GPU (got none). It counts jobs on each GPU of this machine. Use "
        "hydra.launcher.n_jobs=2."
    )


@pytest.fixture
def small_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have two GPUs of 2.3 GB."""
    for module in ("pgtoolkit.launch.jobs_on_gpus", "pgtoolkit.assembly.machine"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: ["0", "1"])
        monkeypatch.setattr(f"{module}.gpu_memory", lambda: 2.3e9)


def test_more_jobs_than_the_memory_of_a_gpu_holds_are_refused_with_what_fits(small_gpus):
    assert refusals_on_gpus("hydra.launcher.jobs_per_gpu=3") == ""
    assert refusals_on_gpus("hydra.launcher.jobs_per_gpu=4").endswith(
        "needs 4 times 0.734 GB of each GPU (got 2.3). Its jobs share this memory. Use "
        "hydra.launcher.jobs_per_gpu=3."
    )
    assert refusals_on_gpus("hydra.launcher.jobs_per_gpu=3", "model.hidden_size=512").endswith(
        "hydra.launcher.jobs_per_gpu=2."
    )
    larger = (
        "accumulation.docs_per_step=4096",
        "accumulation.max_tokens=65536",
        "rollout.prompts_per_batch=512",
    )
    assert refusals_on_gpus("hydra.launcher.jobs_per_gpu=2", *larger).endswith(
        "hydra.launcher.jobs_per_gpu=1, or accumulation.max_tokens=7936."
    )


def test_check_notes_jobs_that_only_a_written_default_of_own_code_tells_apart(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    code = (
        "def equal_jobs(log_ratio, advantages, low=1.0):\n    return -low * advantages * log_ratio"
    )
    (tmp_path / "equal_jobs_code.py").write_text(code)
    (tmp_path / "loss").mkdir()
    for name, low in (("same", 1), ("other", 3)):
        option = f"{{_target_: equal_jobs_code.equal_jobs, low: {low}}}"
        (tmp_path / f"loss/{name}.yaml").write_text(option)
    options = "loss=equal_jobs_code.equal_jobs,same,other"
    sweep = check_sweep([options, "seed=0,1", "aggregation=constant"])
    assert problems(sweep) == []
    assert len(sweep.jobs) == 6
    assert [note for note in notes(sweep) if "same configuration" in note] == [
        "loss=same seed=0, and 1 more: the same configuration as with "
        "loss=equal_jobs_code.equal_jobs, by the defaults of your code. Both are trained, with the "
        "same numbers: leave one out."
    ]


@pytest.mark.parametrize(
    ("override", "got"),
    [
        ("trainer.device=cpu", "trainer.device=cpu"),
        ("parallelism=ddp", "2 processes"),
        ("sampler.gpus=[1]", "2 processes"),
        ("hydra.launcher.n_jobs=2", "2"),
    ],
)
def test_jobs_per_gpu_is_refused_for_jobs_that_do_not_take_one_gpu_each(small_gpus, override, got):
    assert f"(got {got})" in refusals_on_gpus("hydra.launcher.jobs_per_gpu=2", override)


def test_the_page_of_check_shows_the_values_and_the_state_of_each_job(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = ["check", "-m", "loss=grpo", "seed=1,2,3,4", "trainer.max_steps=10"]
    assert main(arguments) == 0
    capsys.readouterr()
    sweep = check_sweep(arguments[2:])
    for (name, job), state in zip(sweep.jobs.items(), ("done", "failed", "running"), strict=False):
        with RunDirectory(sweep.folder / name) as run:
            run.write_config(plain_config(job.named_config), [])
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
        ": 4 jobs, 1 done, 1 failed, 1 interrupted, 1 pending\n",
    ):
        assert expected in shown
    assert main([*arguments[:3], "seed=5,6", "rollout.temperature=1,-1"]) == 2
    assert ": 2 jobs, 2 pending, beside 2 runs with problems\n" in capsys.readouterr().out


def test_a_job_of_a_search_is_planned_like_a_typed_one():
    sweep = check_sweep(
        ["seed=1,2", "loss=grpo", "hydra.sweep.subdir=x/${hydra.job.override_dirname}"]
    )
    assert list(sweep.jobs) == ["x/seed=1", "x/seed=2"]
    drawn = check_job(sweep, ["seed=7", "loss=grpo"], 2)
    assert (drawn.config.seed, drawn.config.loss.name, drawn.directory) == (
        7,
        "grpo",
        "x/seed=7",
    )
    assert sweep.job_of(check_job(sweep, ["seed=2", "loss=grpo"], 3)) is sweep.runs[1]
    (problem,) = check_job(sweep, ["seed=x"], 3).report.problems
    assert problem.startswith("seed=x needs a whole number")


@pytest.mark.slow
def test_each_job_of_a_sweep_has_the_configuration_that_hydra_composes(tmp_path):
    """Only the first job of each choice of options is composed, the others are made from it. Values
    that follow from other keys, defaults and notes must still be those of each job."""
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
        config, report = validated(compose(run.overrides))
        assert run.config == config
        # The check of the files notes the default rate of a small model, too.
        of_rate = [note for note in run.report.notes if "is for models of billions" in note]
        assert len(of_rate) == (config.optimizer.learning_rate == 1e-6)
        assert [note for note in run.report.notes if note not in of_rate] == report.notes
        assert run.report.problems == report.problems
        assert run.composed.name == f"a-{config.seed}"


def test_a_typed_value_replaces_the_swept_values_of_its_key():
    file = sweep_file("loss_by_aggregation")
    assert len(check(["aggregation=constant", "seed=0,1"], True, sweep_file=file).runs) == 4
    assert jobs(["seed=1,2", "seed=3"]) == [["seed=3"]]


# Files of sweeps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "clip_rang"], "Use pgtk sweep clip_range."),
        (["sweep", "zzz"], "There are clip_range, "),
        (["sweep", "no/such.yaml"], "(got no/such.yaml)"),
        (["sweep"], "pgtk sweep needs a sweep that exists (got none)"),
        (["sweep", "metrics_cost", "sed=1"], "Use seed=1."),
    ],
)
def test_a_sweep_that_does_not_exist_is_refused_with_the_nearest(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_a_sweep_in_a_folder_of_sweeps_is_proposed_by_its_path(tmp_path, monkeypatch, capsys):
    for name in (
        "sweeps/mine.yaml",
        "study/sweeps/study_loss.yaml",
        "study/sweeps/clip_range.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("defaults: [config, _self_]\n")
    monkeypatch.chdir(tmp_path)
    for typed, path in (
        ("study_loss", "study/sweeps/study_loss.yaml"),
        ("study_loss.yaml", "study/sweeps/study_loss.yaml"),
        ("mine", "sweeps/mine.yaml"),
        ("clip_rang", "clip_range"),
    ):
        assert refusal(capsys, "sweep", typed).endswith(f"Use pgtk sweep {path}.\n")


def test_a_file_without_the_main_configuration_is_refused(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    message = refusal(capsys, "sweep", str(tmp_path / "mine.yaml"))
    assert (
        "the configuration needs the keys of an option in every group (got none in loss, "
        "aggregation"
    ) in message
    assert message.endswith("Use defaults: [config, _self_] at the file's top.\n")


# Other launchers


@pytest.mark.parametrize(
    ("choice", "extra"),
    [
        ("hydra/launcher=slurm", "submitit"),
        ("hydra/launcher=ray_cluster", "ray"),
        ("hydra/sweeper=optuna_search", "optuna"),
    ],
)
def test_a_launcher_or_search_without_its_package_is_refused_with_the_command_that_installs_it(
    capsys, monkeypatch, choice, extra
):
    assert compose([choice]).problems == []
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda package: False)
    message = refusal(capsys, "check", "-m", choice, "seed=1,2")
    assert f"{choice} needs the package" in message
    assert f'Use pip install "pgtk[{extra}]".' in message


def test_a_setting_of_a_launcher_that_does_not_exist_or_has_another_type_is_refused(capsys):
    assert "n_jobs" in refusal(capsys, "check", "-m", "hydra.launcher.n_jobs=many", "seed=1,2")
    assert "n_job" in refusal(capsys, "check", "-m", "hydra.launcher.n_job=2", "seed=1,2")


def test_settings_of_a_launcher_that_are_not_typed_have_their_defaults():
    slurm = compose_sweep(
        ["hydra/launcher=slurm", "hydra.launcher.partition=gpu", "seed=1,2"]
    ).launcher
    assert slurm.kind == "slurm"
    assert [
        slurm.settings[name] for name in ("partition", "max_num_timeout", "tasks_per_node")
    ] == ["gpu", 3, 1]


# Paths


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_a_directory_outside_of_the_output_folder_is_refused(capsys, arguments, message):
    assert message in refusal(capsys, "check", *arguments)


def test_jobs_over_paths_are_named_by_the_names_of_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x" / "etc").mkdir(parents=True)
    for place in ("there.jsonl", "x/etc/passwd.jsonl"):
        (tmp_path / place).write_text('{"prompt": "1", "answer": "1"}')
    values = f"task.path=../there.jsonl,{tmp_path}/x/etc/passwd.jsonl"
    monkeypatch.chdir(tmp_path / "x")
    sweep = check_sweep(["task=prompts", values, "trainer.max_steps=3"])
    names = [name.rpartition("-")[0] for name in sweep.jobs]
    assert names == ["there.jsonl", "passwd.jsonl"]
    assert str(sweep.folder) == "outputs/sweeps/there.jsonl-passwd.jsonl_max-steps-3"
