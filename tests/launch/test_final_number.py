"""The number that a sweep shows of its runs: of held-out prompts where they are evaluated."""

import json
from pathlib import Path

import pytest

from pgtoolkit.launch.check import check_sweep
from pgtoolkit.launch.final_number import final_value, number_of
from pgtoolkit.launch.sweep import Sweep
from pgtoolkit.launch.sweep_report import table
from pgtoolkit.runs.directory import RunDirectory


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


def test_the_table_of_a_sweep_says_which_of_its_keys_changes_the_number_itself(tmp_path):
    text = table(sweep_in(tmp_path / "a", "rollout.temperature=0.5,1"))
    assert (
        "reward does not mean the same in all of them: rollout.temperature decides how completions "
        "are drawn from the policy. To compare all, train with evaluation.every=20 "
        "evaluation.temperature=0.5."
    ) in text
    assert "does not mean the same" not in table(sweep_in(tmp_path / "b", "loss=grpo,gspo"))
