"""Rows of `config/test_keys.py`: which prompts a run is evaluated on, how, when, and what follows
from it."""

from __future__ import annotations

import json

from keys import key, module_and_steps
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.training.evaluation import Evaluations

FEW = ("evaluation.every=1", "evaluation.prompts_per_set=3", "evaluation.completions_per_prompt=2")


def evaluated(folder, *overrides):
    """The module, and by set the numbers and the completions of an evaluation."""
    chosen = [
        one for one in FEW if one.partition("=")[0] not in {o.partition("=")[0] for o in overrides}
    ]
    module, _ = module_and_steps(*chosen, *overrides)
    evaluator, found = module.evaluator, {}
    evaluator.folder = folder
    for one in evaluator.sets:
        numbers = evaluator.evaluate(one, 0)
        found[one.name] = (
            numbers,
            read_completions(folder / "completions" / f"evaluation_{one.name}_000000.parquet"),
        )
    return module, found


@key("evaluation.every")
def every():
    for number, expected in ((2, [0, 2, 4, 6]), (4, [0, 4, 6])):
        module, _ = module_and_steps(f"evaluation.every={number}", "trainer.max_steps=6")
        evaluations = Evaluations(None, module)
        assert [step for step in range(7) if evaluations.is_due(step)] == expected
    assert module_and_steps()[0].evaluator is None


@key("evaluation.prompts_per_set", "evaluation.completions_per_prompt")
def sizes(tmp_path):
    for prompts, each in ((3, 2), (2, 5)):
        chosen = [
            f"evaluation.prompts_per_set={prompts}",
            f"evaluation.completions_per_prompt={each}",
        ]
        _, found = evaluated(tmp_path, *chosen)
        numbers, completions = found["held_out"]
        assert (numbers["prompts"], numbers["completions_per_prompt"]) == (prompts, each)
        assert [one.name for one in completions] == [
            f"prompt {i}" for i in range(prompts) for _ in range(each)
        ]
        assert ("pass@4" in numbers) is (each == 5)


@key("evaluation.temperature", "evaluation.top_p")
def likeliest(tmp_path):
    """Both can leave the likeliest token alone; without them it is one among others."""

    def completions(*overrides):
        # whose likeliest lead by far
        few = ["evaluation.prompts_per_set=2", "evaluation.completions_per_prompt=1"]
        return [one.completion for one in evaluated(tmp_path, *few, *overrides)[1]["held_out"][1]]

    greedy = completions("evaluation.temperature=0")
    assert completions("evaluation.top_p=0.000001") == greedy
    assert completions("evaluation.temperature=0.01") == greedy
    assert completions() != greedy
    assert completions("rollout.temperature=0.01") == greedy  # as training samples
    assert completions("rollout.temperature=0.01", "evaluation.temperature=1") == completions()


@key("evaluation.max_completion_length")
def max_completion_length(tmp_path):
    for length in (4, 9):
        _, found = evaluated(
            tmp_path, f"evaluation.max_completion_length={length}", "evaluation.prompts_per_set=9"
        )
        assert max(one.tokens for one in found["held_out"][1]) == length


@key("evaluation.seed")
def seed(tmp_path):
    for number in (5, 6):
        module, found = evaluated(tmp_path, f"evaluation.seed={number}")
        task = make_task(module.config.task, number)
        assert [one.prompt for one in found["held_out"][1][::2]] == [
            task.prompt(i).text for i in range(3)
        ]


@key("evaluation.sets")
def sets(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(2))
    )
    more = [
        "evaluation.sets.own.prompts=5",
        "evaluation.sets.own.seed=9",
        "evaluation.sets.file.task=prompts",
    ]
    module, found = evaluated(
        tmp_path, "evaluation.sets.shorter.num_digits=1", *more, f"evaluation.sets.file.path={path}"
    )
    assert list(found) == ["shorter", "own", "file"]
    assert {len(one.prompt) for one in found["shorter"][1]} == {2}
    assert [one.prompt for one in found["own"][1][::2]] == [
        make_task(module.config.task, 9).prompt(i).text for i in range(5)
    ]
    assert sorted({one.prompt for one in found["file"][1]}) == ["0=", "1="]
    assert found["file"][0]["prompts"] == 2  # all that it has
