"""The rules on evaluation and its sets, the plan of evaluations, and that evaluating a run does not
make it another configuration."""

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation_sets import held_out_sets
from pgtoolkit.config.names import digest, name_from, plain_config
from pgtoolkit.config.plan import evaluations
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validated
from pgtoolkit.launch.evaluate import _sets_on

ON = "evaluation.every=20"


def config_and_problems(*overrides: str) -> tuple[Config, list[str]]:
    config, report = validated(compose(list(overrides)))
    return config, report.problems


@pytest.mark.parametrize(
    ("seed", "overlaps"), [(599, True), (600, False), (401, True), (400, False)]
)
def test_rows_of_reasoning_gym_that_are_trained_and_held_out_are_refused(seed, overlaps):
    # Row n of a data set comes from seed + n; these are rows 500 to 599.
    training = ["task=reasoning_gym", "task.dataset=chain_sum", "task.options.size=100", "seed=500"]
    _, problems = config_and_problems(
        *training, ON, "rollout.max_completion_length=20", f"evaluation.seed={seed}"
    )
    assert any("overlap" in problem for problem in problems) is overlaps


def test_an_evaluation_set_is_the_task_with_the_keys_that_it_changes():
    config, problems = config_and_problems(
        ON,
        "evaluation.seed=5",
        "evaluation.sets.a.num_digits=2",
        "evaluation.sets.b.seed=7",
        "evaluation.sets.b.prompts=9",
    )
    assert problems == []
    first, second = held_out_sets(config)
    assert (first.name, first.task.num_digits, first.seed, first.prompts) == ("a", 2, 5, 128)
    assert (second.name, second.task.num_digits, second.seed, second.prompts) == ("b", 6, 7, 9)
    lines = list(evaluations(config))
    assert "in total at most 8768 completions, besides 19200 documents of training" in lines


@pytest.mark.parametrize(
    ("overrides", "use"),
    [
        (["task.num_digits=2"], "evaluation.prompts_per_set=50"),
        (["task.num_digits=2"], "task.num_digits=3"),
        (
            ["task.num_digits=1", "evaluation.sets={a: {prompts: 3}, b: {seed: 3, prompts: 3}}"],
            "evaluation.sets.a.prompts=2 evaluation.sets.b.prompts=2",
        ),
    ],
)
def test_held_out_numbers_leave_half_of_all_to_training(overrides, use):
    _, problems = config_and_problems(ON, *overrides)
    assert len(problems) == 1
    assert use in problems[0]
    kept = [item for item in overrides if item.split("=")[0] != use.split("=")[0]]
    assert config_and_problems(ON, *kept, *use.split())[1] == []
    assert config_and_problems(*overrides[:1])[1] == []


def test_the_plan_counts_the_evaluations_before_the_first_and_after_the_last_step():
    config, _ = config_and_problems("evaluation.every=7", "trainer.max_steps=8")
    assert (
        next(evaluations(config)) == "every 7 steps, before the first and after the last: 3 times"
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


@pytest.mark.parametrize(
    "task",
    [
        ["task=prompts", "task.verifier=exact_match"],
        ["task=conversation", "task.environment=my_module.Environment"],
    ],
)
def test_a_set_with_another_file_does_not_take_the_split_of_the_task(task):
    sets = "evaluation.sets={same: {prompts: 3}, other: {path: test.jsonl}}"
    config, _ = config_and_problems(*task, "task.path=data", "task.split=train", ON, sets)
    same, other = held_out_sets(config)
    assert (same.task.path, same.task.split) == ("data", "train")
    assert (other.task.path, other.task.split) == ("test.jsonl", None)


def test_evaluation_changes_neither_digest_nor_name_unless_it_may_end_the_run():
    evaluation = [ON, "evaluation.prompts_per_set=7"]

    def digest_of(*overrides: str) -> str:
        return digest(plain_config(compose(list(overrides)).config))

    assert digest_of(*evaluation) == digest_of()
    assert digest_of(*evaluation, "trainer.stop_at=0.5") != digest_of()
    assert name_from(evaluation, {}) == "default"


def test_sets_of_a_command_have_the_names_of_their_paths_with_what_follows_a_dot():
    config = compose(["task=prompts", "task.path=a"]).config
    paths = ["math-v0.1", "math-v0.3", "folder/test.jsonl"]
    sets = _sets_on(paths, config, None, ["task.verifier=math_verify"])
    assert {name: values["path"] for name, values in sets.items()} == dict(
        zip(["math_v0_1", "math_v0_3", "test"], paths, strict=True)
    )
