"""The number that a sweep shows of its runs: of held-out prompts where they are evaluated."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pgtoolkit import experiment
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.launch.check import check_sweep
from pgtoolkit.launch.final_number import final_value, number_of, points_of
from pgtoolkit.launch.sweep import Sweep
from pgtoolkit.launch.sweep_report import best, ended, rates_that_learn, table
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.next_commands import OF_PYTHON


def sweep_in(folder: Path, *overrides: str) -> Sweep:
    """Return a sweep whose jobs have a run each: rewards 0.1 and 0.3, pass@1 0.5, avg 0.7."""
    sweep = check_sweep([*overrides, "tracking=none", f"hydra.sweep.dir={folder}"])
    for job in sweep.jobs.values():
        with RunDirectory(folder / job.directory) as run:
            for step, reward in enumerate((0.1, 0.3), start=1):
                run.append_metrics(step, {"reward": reward})
        row = {"step": 2, "time": 1.0, "set": "held_out", "documents": 8, "prompts": 4}
        row |= {"completions_per_prompt": 2, "seconds": 1.0, "pass@1": 0.5, "avg": 0.7}
        (folder / job.directory / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    return sweep


@pytest.mark.parametrize(
    ("overrides", "metric", "value"),
    [
        ([], "reward", 0.3),
        (["evaluation.every=1"], "evaluation/held_out/pass@1", 0.5),
        (["evaluation.every=1", "evaluation.best=avg"], "evaluation/held_out/avg", 0.7),
        (["evaluation.every=1", "evaluation.best=null"], "evaluation/held_out/pass@1", 0.5),
    ],
)
def test_a_run_s_number_is_that_of_held_out_prompts_where_it_has_one(
    tmp_path, overrides, metric, value
):
    sweep = sweep_in(tmp_path, "loss=grpo,gspo", *overrides)
    job = next(iter(sweep.jobs.values()))
    assert number_of(job.config) == metric
    assert final_value(tmp_path / job.directory, metric) == value
    assert f"{value:.3f}  {job.directory}" in table(sweep)


def test_the_table_has_the_steps_that_a_failed_job_made_after_its_last_checkpoint(tmp_path):
    sweep = sweep_in(tmp_path, "loss=grpo,gspo")
    for job in sweep.jobs.values():
        job.status = "failed"
        job.step = 5
    first, second = sweep.jobs.values()
    status = {"state": "failed", "step": 8, "saved": 5}
    (tmp_path / first.directory / "status.json").write_text(json.dumps(status))
    (tmp_path / second.directory / "status.json").write_text("{")
    rows = [line.split()[:2] for line in table(sweep).splitlines() if "0.300" in line]
    assert rows == [["failed", "8"], ["failed", "5"]]


def test_the_table_of_a_sweep_says_which_of_its_keys_changes_the_number_itself(tmp_path):
    text = table(sweep_in(tmp_path / "a", "rollout.temperature=0.5,1"))
    assert (
        "reward does not mean the same in all of them: rollout.temperature decides how completions "
        "are drawn from the policy. To compare all, train with evaluation.every=20 "
        "evaluation.temperature=0.5."
    ) in text
    assert "does not mean the same" not in table(sweep_in(tmp_path / "b", "loss=grpo,gspo"))


def test_the_number_on_its_way_is_each_evaluation_or_the_mean_reward_of_each_tenth(tmp_path):
    with RunDirectory(tmp_path) as run:
        assert points_of(tmp_path, "reward", 40) == []
        for step in range(1, 11):
            run.append_metrics(step, {"reward": step / 8} if step != 6 else {"loss": 1.0})
        row = {"time": 1.0, "prompts": 4, "avg": 0.5}
        run.append_evaluations(
            [{**row, "step": step, "set": "held_out", "pass@1": step / 64} for step in (0, 8, 16)]
        )
    # Tenths of 40 steps end after steps 4, 8, 12 ..., and the third is not complete.
    assert points_of(tmp_path, "reward", 40) == [(4, 2.5 / 8), (8, (5 + 7 + 8) / 3 / 8)]
    assert points_of(tmp_path, "evaluation/held_out/pass@1", 40) == [(8, 0.125), (16, 0.25)]
    assert points_of(tmp_path, "evaluation/other/pass@1", 40) == []


def finished(folder: Path, rewards: dict[str, float], *overrides: str, file: str = "") -> Sweep:
    """Return a sweep whose jobs are done, with the rewards of those that have these overrides."""
    sweep_file = folder / file if file else None
    command = ["pgtk", "sweep", file] if file else ["pgtk", "-m"]
    typed = [*overrides, "tracking=none", f"hydra.sweep.dir={folder}/sweep"]
    sweep = check_sweep(typed, sweep_file, [*command, *typed])
    for job in sweep.jobs.values():
        job.status = "done"
        with RunDirectory(folder / "sweep" / job.directory) as run:
            run.append_metrics(1, {"reward": rewards[" ".join(job.overrides[:2])]})
    return sweep


def test_the_best_configuration_is_that_of_the_highest_mean_over_seeds(tmp_path):
    rewards = {
        "loss=grpo seed=0": 0.9,
        "loss=grpo seed=1": 0.1,
        "loss=gspo seed=0": 0.5,
        "loss=gspo seed=1": 0.75,
    }
    sweep = finished(tmp_path, rewards, "loss=grpo,gspo", "seed=0,1")
    assert best(sweep).startswith(
        "best: reward 0.625, the mean of 2 seeds; two seeds more, also of loss=grpo to compare it "
        "with: "
    )
    words = best(sweep).split("pgtk ")[-1].split()
    assert words[:-1] == ["-m", "loss=gspo,grpo", "tracking=none", "seed=2,3"]
    # In the folder of the runs, beside which the new ones come.
    further = check_sweep(words[1:])
    assert further.folder.resolve() == sweep.folder
    assert [job.status for job in further.jobs.values()] == ["pending"] * 4
    # After these, in a command of the first seeds, others are the next ones.
    sweep.earlier = {name: {"overrides": job.overrides} for name, job in further.jobs.items()}
    assert " seed=4,5 " in best(sweep)
    # What was stopped early is no result of equal length.
    next(
        job for job in sweep.jobs.values() if job.config.seed == 1 and "gspo" in job.directory
    ).status = "pruned"
    assert best(sweep) is None  # one configuration is left


@pytest.mark.parametrize("in_python", [False, True])
def test_the_best_is_compared_with_the_best_of_another_loss_by_the_same_new_seeds(
    in_python, tmp_path, monkeypatch
):
    rewards = {
        "loss=grpo optimizer.learning_rate=0.001": 0.25,
        "loss=grpo optimizer.learning_rate=0.002": 0.375,
        "loss=gspo optimizer.learning_rate=0.001": 0.75,
        "loss=gspo optimizer.learning_rate=0.002": 0.5,
    }
    sweep = finished(
        tmp_path, rewards, "loss=grpo,gspo", "optimizer.learning_rate=0.001,0.002",
        "hydra.launcher.n_jobs=2",
    )  # fmt: skip
    if in_python:
        monkeypatch.setenv(OF_PYTHON, "1")
    said, _, commands = (best(sweep) or "").partition(" to compare it with: ")
    assert said == (
        "best: reward 0.750, of one seed; two seeds more, also of loss=grpo "
        "optimizer.learning_rate=0.002"
    )
    if in_python:
        words = [eval(call, {"sweep": words_of_call}) for call in commands.split("; ")]
    else:
        words = [command.split("pgtk ")[-1].split() for command in commands.split(" && ")]
    trained = set()
    for arguments in words:
        further = check_sweep(arguments[1:])
        assert further.folder.resolve() == sweep.folder
        assert further.config.launcher is not None
        assert further.config.launcher.settings["n_jobs"] == 2
        trained |= {
            (job.config.loss.name, job.config.optimizer.learning_rate, job.config.seed)
            for job in further.jobs.values()
        }
    assert trained == {
        (loss, rate, seed) for loss, rate in (("gspo", 0.001), ("grpo", 0.002)) for seed in (1, 2)
    }


def words_of_call(grid: dict[str, list], *overrides: str) -> list[str]:
    """Return the words of the command that is the same as a call of `sweep`."""
    return ["-m", *experiment._sweep_words("sweep", grid, overrides)[0]]


def test_configurations_that_only_rounding_tells_apart_have_no_best_one(tmp_path):
    rewards = {"loss=grpo seed=0": 0.11830357142857148, "loss=gspo seed=0": 0.1183035714285715}
    said = "best: none, since all configurations end at reward 0.118"
    assert best(finished(tmp_path, rewards, "loss=grpo,gspo", "seed=0")) == said


def test_a_search_whose_number_is_the_same_in_all_runs_says_so_and_what_tells_them_apart(tmp_path):
    sweep = sweep_in(tmp_path, "loss=grpo,gspo", "evaluation.every=1")
    axes = ["hydra/sweeper=optuna_search", "loss.epsilon_low=interval(1e-4,1e-2)"]
    sweep.config = replace(sweep.config, search=compose_sweep(axes).search)
    said = (
        "best: none, since all configurations end at held_out pass@1 0.000, by which the search "
        "could neither choose values nor stop a job"
    )
    for ends, more in (((0.25, 0.25), ""), ((0.25, 0.5), "held_out/avg")):
        for end, job in zip(ends, sweep.jobs.values(), strict=True):
            job.status = "done"
            file = tmp_path / job.directory / "evaluations.jsonl"
            row = json.loads(file.read_text()) | {"pass@1": 0.0, "avg": end}
            file.write_text(json.dumps(row) + "\n")
        add = f". Their mean scores differ: add evaluation.best={more} to search by these"
        assert best(sweep) == said + (add if more else "")


def test_a_sweep_over_learning_rates_says_which_of_them_learn(tmp_path):
    key = "optimizer.learning_rate"
    ends = {0.0001: 0.15, 0.001: 0.375, 0.002: 0.625, 0.01: 0.06}
    typed = [f"{key}={','.join(map(str, ends))}", "seed=0,1", "tracking=none"]
    sweep = check_sweep([*typed, f"hydra.sweep.dir={tmp_path}"])
    assert rates_that_learn(sweep) == []  # nothing has ended
    for job in sweep.jobs.values():
        job.status = "done"
        with RunDirectory(tmp_path / job.directory) as run:
            for step, reward in ((1, 0.125), (2, ends[job.config.optimizer.learning_rate])):
                run.append_metrics(step, {"reward": reward})
    half = "reward rises there by at least half as much as with 0.002: 0.500"
    assert rates_that_learn(sweep) == [
        f"learns: {key} from 0.001 to 0.002, the largest that does. {half}"
    ]
    for job in sweep.jobs.values():
        if job.config.optimizer.learning_rate == 0.001:
            job.status = "failed"
        if job.config.optimizer.learning_rate == 0.01:
            sweep.jobs = {key: each for key, each in sweep.jobs.items() if each is not job}
    assert rates_that_learn(sweep) == [
        f"learns: {key} from 0.002 to 0.002, the largest tried. {half}"
    ]
    for job in sweep.jobs.values():
        job.status = "failed"
    assert rates_that_learn(sweep) == ["learns: reward rises with none of these rates"]


def test_the_best_of_a_sweep_file_is_trained_by_that_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\ntrainer: {max_steps: 7}\n"
        "hydra: {sweeper: {params: {optimizer.learning_rate: '1e-4,1e-3'}}}\n"
    )
    rewards = {
        "optimizer.learning_rate=0.0001 loss=gspo": 0.25,
        "optimizer.learning_rate=0.001 loss=gspo": 0.5,
    }
    words = best(finished(tmp_path, rewards, "loss=gspo", file="mine.yaml")).split("sweep ")[-1]
    file, *overrides = words.split()
    expected = ["optimizer.learning_rate=0.001,0.0001", "loss=gspo", "tracking=none", "seed=1,2"]
    assert overrides[:-1] == expected
    again = check_sweep(overrides, Path(file))
    assert again.folder.resolve() == tmp_path / "sweep"
    of_jobs = [
        (job.config.trainer.max_steps, job.config.optimizer.learning_rate, job.config.seed)
        for job in again.jobs.values()
    ]
    assert of_jobs == [(7, rate, seed) for rate in (0.001, 0.0001) for seed in (1, 2)]


def test_versions_of_code_are_several_configurations_of_which_one_may_be_best(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rewards = {"loss=grpo seed=0": 0.25, "loss=grpo seed=1": 0.5}
    rewards |= {"loss=gspo seed=0": 0.75, "loss=gspo seed=1": 0.125}
    sweep = finished(tmp_path, rewards, "loss=grpo,gspo", "seed=0,1")
    for job in sweep.jobs.values():
        version = "ab"[job.config.seed] if job.config.loss.name == "gspo" else "a"
        provenance = {"step": 0, "modules": {"mine": version * 8}}
        (tmp_path / "sweep" / job.directory / "provenance.json").write_text(json.dumps(provenance))
    assert (best(sweep) or "").startswith("best: reward 0.750, of one seed that not all have; two ")
    (tmp_path / "mine.py").write_text("code = 'of another digest'")
    assert best(sweep) == (
        "best: reward 0.750, of one seed that not all have: loss=gspo tracking=none, before mine "
        "changed. "
        "Further seeds would be of the new code."
    )
    (tmp_path / "sweep" / job.directory / "data.json").write_text("{")
    assert best(sweep) is not None


def test_the_best_of_configurations_with_other_seeds_is_that_of_the_seeds_that_all_have(tmp_path):
    """grpo has seed 1 alone, where gspo is better; gspo's mean of two seeds is lower."""
    rewards = {"loss=grpo seed=0": 0.5, "loss=grpo seed=1": 0.25}
    rewards |= {"loss=gspo seed=0": 0.0625, "loss=gspo seed=1": 0.375}
    sweep = finished(tmp_path, rewards, "loss=grpo,gspo", "seed=0,1")
    for job in list(sweep.jobs.values()):
        if (job.config.loss.name, job.config.seed) == ("grpo", 0):
            del sweep.jobs[job.directory]
    assert (best(sweep) or "").startswith("best: reward 0.375, of one seed that all have; two ")


def test_a_mean_of_several_evaluations_is_called_that_wherever_it_stands(tmp_path):
    sweep = sweep_in(tmp_path, "loss=grpo,gspo", "evaluation.every=1")
    for end, job in zip((0.4, 0.8), sweep.jobs.values(), strict=True):
        file = tmp_path / job.directory / "evaluations.jsonl"
        row = json.loads(file.read_text())
        values = [0.0, 0.0, 0.0, 0.1, 0.2, end]
        rows = [row | {"step": step, "pass@1": value} for step, value in enumerate(values)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        job.status = "done"
    job = [*sweep.jobs.values()][1]
    said = "held_out pass@1 0.500 (mean of the last 2 evaluations)"
    assert ended(job, tmp_path, 2, 2, 1.0).endswith(f"{job.directory}  {said}")
    assert (best(sweep) or "").startswith(f"best: {said}, of one seed; two seeds ")
    assert "held_out pass@1: the mean of the last 2 evaluations, as in pgtk compare" in table(sweep)
