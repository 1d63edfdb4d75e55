"""The rules on evaluation, its plan, and that it tells no two configurations apart."""

from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation_sets import held_out_sets
from pgtoolkit.config.names import digest, name_from, plain_config
from pgtoolkit.config.plan import evaluations
from pgtoolkit.config.validate import validated

ON = "evaluation.every=20"


def checked(*overrides):
    composed = compose(list(overrides))
    config, report = validated(composed)
    return config, report.problems, report.notes


def test_seeds_of_reasoning_gym_that_overlap_are_refused():
    """Row n of a data set comes from seed + n."""
    task = ["task=reasoning_gym", "task.dataset=chain_sum", "task.options.size=100", ON, "seed=500"]
    task.append("rollout.max_completion_length=20")
    for seed, refused in ((599, True), (600, False), (401, True), (400, False)):
        _, problems, _ = checked(*task, f"evaluation.seed={seed}")
        assert bool([one for one in problems if "overlap" in one]) is refused


def test_sets_are_what_differs_from_the_task():
    values, problems, _ = checked(
        *(
            ON,
            "evaluation.sets.a.num_digits=2",
            "evaluation.sets.b.seed=7",
            "evaluation.sets.b.prompts=9",
        ),
        "evaluation.seed=5",
    )
    assert problems == []
    found = [
        (one.name, one.task.num_digits, one.seed, one.prompts) for one in held_out_sets(values)
    ]
    assert found == [("a", 2, 5, 128), ("b", 6, 7, 9)]
    lines = list(evaluations(values))
    assert "in total at most 8768 completions, besides 19200 documents of training" in lines
    values, _, _ = checked("evaluation.every=7", "trainer.max_steps=8")
    assert (
        next(evaluations(values)) == "every 7 steps, before the first and after the last: 3 times"
    )


def test_an_empty_dictionary_removes_the_sets_of_a_sweep_file(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "defaults: [config, _self_]\nevaluation: {every: 5, sets: {other: {seed: 3}}}\n"
    )
    added = compose(["evaluation.sets={more: {seed: 4}}"], sweep_file=file).config
    assert added.evaluation.sets == {"other": {"seed": 3}, "more": {"seed": 4}}
    off = compose(["evaluation.every=0", "evaluation.sets={}"], sweep_file=file)
    config, report = validated(off)
    assert config.evaluation.sets == {}
    assert report.problems == []


def test_other_files_have_no_split_of_the_task():
    talk = "task=conversation task.environment=my_module.Environment"
    for task in ("task=prompts task.verifier=exact_match", talk):
        sets = "evaluation.sets={same: {prompts: 3}, other: {path: test.jsonl}}"
        values, _, _ = checked(*task.split(), "task.path=data", "task.split=train", ON, sets)
        found = held_out_sets(values)
        assert [(one.task.path, one.task.split) for one in found] == [
            ("data", "train"),
            ("test.jsonl", None),
        ]


def test_runs_with_and_without_evaluation_are_of_one_configuration():
    on = [ON, "evaluation.prompts_per_set=7"]
    without, evaluated, goal = (
        plain_config(compose(one).config) for one in ([], on, [*on, "trainer.stop_at=0.5"])
    )
    assert digest(evaluated) == digest(without) != digest(goal)  # a goal may end it before
    assert name_from(on, {}) == "default"
