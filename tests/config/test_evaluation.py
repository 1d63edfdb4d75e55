"""The rules on evaluation, its plan, and that it tells no two configurations apart."""

import json

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation import held_out_sets, times
from pgtoolkit.config.names import digest, name_of, plain_config
from pgtoolkit.config.plan import evaluations
from pgtoolkit.config.validate import resolve_and_validate

ON = "evaluation.every=20"


def checked(*overrides):
    composed = compose(list(overrides))
    values, report = resolve_and_validate(composed.config)
    return values, composed.problems + report.problems, report.notes


@pytest.mark.parametrize(
    ("overrides", "beginning", "use"),
    [
        (["evaluation.seed=3"], "evaluation.seed=3 needs evaluation.every > 0 (got 0)", "evaluation.every=20"),
        (["trainer.stop_at=0.9"], "trainer.stop_at=0.9 needs evaluation.every > 0", "trainer.stop_at=null"),
        ([ON, "evaluation.best=null", "trainer.stop_at=0.9"], "trainer.stop_at=0.9 needs evaluation.best", "pass@1"),
        ([ON, "trainer.stop_at=1.5"], "trainer.stop_at=1.5 needs a number above 0, at most 1", "trainer.stop_at=0.9"),
        ([ON, "evaluation.best=pass@8"], "evaluation.best=pass@8 needs one of avg, pass@1, pass@2, pass@4", "prompt=8"),
        ([ON, "evaluation.best=loss"], "evaluation.best=loss needs one of avg, pass@1", "evaluation.best=pass@1"),
        ([ON, "evaluation.best=x/avg"], "evaluation.best=x/avg needs one of the sets held_out", "held_out/pass@1"),
        ([ON, "evaluation.temperature=0"], "evaluation.temperature=0 needs evaluation.completions_per_prompt=1", "=1"),
        ([ON, "evaluation.seed=0"], f"{ON} needs prompts that training does not ask (got seed 0)", "evaluation.seed="),
        ([ON, "evaluation.sets.a.seed=0"], "evaluation.sets.a needs prompts that training", "evaluation.seed="),
        ([ON, "evaluation.sets.a.foo=0"], "evaluation.sets.a.foo=0 needs one of num_digits,", "evaluation.sets.a."),
        ([ON, "evaluation.sets.a.prompts=0"], "evaluation.sets.a.prompts=0 needs a whole number from 1", "NUMBER"),
        ([ON, "evaluation.sets.a=3"], "evaluation.sets.a needs keys with values", "'evaluation.sets={test:"),
        ([ON, "evaluation.sets.training.seed=3"], "evaluation.sets.training needs another name", "evaluation.sets."),
        ([ON, "evaluation.sets.a.task=x"], "evaluation.sets.a.task=x needs one of reverse,", "task=prompts"),
        ([ON, "evaluation.sets.a.task=prompts"], "evaluation.sets.a.path needs a value", "path=test.jsonl"),
        ([ON, "evaluation.sets.a.num_digits=9"], "evaluation.sets.a.num_digits=9 needs evaluation.max_compl", "=10"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_sentence(overrides, beginning, use):
    _, problems, _ = checked(*overrides)
    (problem,) = problems
    assert problem.startswith(beginning)
    assert use in problem.partition(" Use ")[2]
    assert "\n" not in problem


def test_the_file_of_training_is_refused_and_another_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1", "answer": "2"}) + "\n")
    task = ["task=prompts", "task.path=train.jsonl", ON, "rollout.max_completion_length=20"]
    (problem,) = checked(*task)[1]
    assert "are the prompts of training. Use evaluation.sets.NAME.path=FILE." in problem
    problems = checked(*task, f"evaluation.sets.test.path={tmp_path}/./train.jsonl")[1]
    assert [one.partition(" (got")[0] for one in problems] == [
        "evaluation.sets.test needs prompts that training does not ask"
    ]
    assert checked(*task, "evaluation.sets.test.path=test.jsonl")[1:] == ([], [])
    assert (
        "evaluation.sets.test.path=none.jsonl needs an existing file"
        in checked(*task, "evaluation.sets.test.path=none.jsonl")[1][0]
    )


def test_seeds_of_reasoning_gym_that_overlap_are_refused():
    """Row n of a data set comes from seed + n."""
    task = ["task=reasoning_gym", "task.dataset=chain_sum", "task.options.size=100", ON, "seed=500"]
    task.append("rollout.max_completion_length=20")
    for seed, refused in ((599, True), (600, False), (401, True), (400, False)):
        _, problems, _ = checked(*task, f"evaluation.seed={seed}")
        assert bool([one for one in problems if "overlap" in one]) is refused


def test_a_small_generator_asks_the_same_by_chance_and_a_note_says_so():
    (note,) = [one for one in checked(ON, "task.num_digits=3")[2] if "evaluation" in one]
    assert note.startswith("about 91% of the prompts of evaluation set held_out are asked in training, too")
    assert not [one for one in checked(ON)[2] if "evaluation" in one]


def test_sets_are_what_differs_from_the_task():
    values, problems, _ = checked(
        *(ON, "evaluation.sets.a.num_digits=2", "evaluation.sets.b.seed=7", "evaluation.sets.b.prompts=9"),
        "evaluation.seed=5",
    )
    assert problems == []
    found = [(one.name, one.task.num_digits, one.seed, one.prompts) for one in held_out_sets(values)]
    assert found == [("a", 2, 5, 128), ("b", 6, 7, 9)]
    assert times(values) == 16
    lines = list(evaluations(values))
    assert "in all at most 8768 completions, beside 19200 documents of training" in lines
    assert times(checked("evaluation.every=7", "trainer.max_steps=8")[0]) == 3


def test_runs_with_and_without_evaluation_are_of_one_configuration():
    on = [ON, "evaluation.prompts_per_set=7"]
    without, evaluated, goal = (plain_config(compose(one).config) for one in ([], on, [*on, "trainer.stop_at=0.5"]))
    assert digest(evaluated) == digest(without) != digest(goal)  # a goal may end it before
    assert name_of(None, on) == name_of(None, []) == "default"
