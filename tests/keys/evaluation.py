"""Tests of single keys (see `keys`): evaluation, by its prompts, its sampling and its times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from builders.runs import config_of

from keys import key_test
from keys.small_runs import module_and_steps, settings
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.completion_files import CompletionRow, read_completions
from pgtoolkit.training.evaluation import Evaluations
from pgtoolkit.training.settings import TrainerSettings

SMALL_EVALUATION = {
    "evaluation.every": 1,
    "evaluation.prompts_per_set": 3,
    "evaluation.completions_per_prompt": 2,
}


class Evaluated(NamedTuple):
    """Numbers and completions of an evaluation, each by the name of the set."""

    config: Config
    numbers: dict[str, dict]
    completions: dict[str, list[CompletionRow]]


def evaluated(folder: Path, *overrides: str) -> Evaluated:
    """Evaluate the model of a small run once, on all its sets."""
    replaced = {override.partition("=")[0] for override in overrides}
    small = [f"{key}={value}" for key, value in SMALL_EVALUATION.items() if key not in replaced]
    module, _ = module_and_steps(*small, *overrides)
    evaluator = module.evaluator
    evaluator.folder = folder
    numbers = {}
    completions = {}
    for prompt_set in evaluator.sets:
        numbers[prompt_set.name] = evaluator.evaluate(prompt_set, 0)
        file = folder / "completions" / f"evaluation_{prompt_set.name}_000000.parquet"
        completions[prompt_set.name] = read_completions(file)
    return Evaluated(config_of(*settings(*small, *overrides)), numbers, completions)


@key_test("evaluation.every")
def evaluations_are_due_before_the_first_step_at_every_nth_and_after_the_last():
    for every, expected in ((2, [0, 2, 4, 6]), (4, [0, 4, 6])):
        module, _ = module_and_steps(f"evaluation.every={every}", "trainer.max_steps=6")
        evaluations = Evaluations(None, module, TrainerSettings(max_steps=6))
        assert [step for step in range(7) if evaluations.is_due(step)] == expected
    module, _ = module_and_steps()
    assert module.evaluator is None


@key_test("evaluation.prompts_per_set", "evaluation.completions_per_prompt")
def a_set_has_as_many_prompts_and_completions_as_asked(tmp_path: Path):
    for num_prompts, num_completions in ((3, 2), (2, 5)):
        result = evaluated(
            tmp_path,
            f"evaluation.prompts_per_set={num_prompts}",
            f"evaluation.completions_per_prompt={num_completions}",
        )
        numbers = result.numbers["held_out"]
        assert numbers["prompts"] == num_prompts
        assert numbers["completions_per_prompt"] == num_completions
        assert [completion.name for completion in result.completions["held_out"]] == [
            f"prompt {i}" for i in range(num_prompts) for _ in range(num_completions)
        ]
        assert ("pass@4" in numbers) is (num_completions == 5)


@key_test("evaluation.temperature", "evaluation.top_p", "evaluation.top_k")
def a_low_temperature_or_top_p_or_top_k_leaves_only_the_likeliest_token(tmp_path: Path):
    """The default samples as training does, so others are sampled too."""

    def completions(*overrides: str) -> list[str]:
        # The likeliest tokens of these two prompts lead by far.
        few = ("evaluation.prompts_per_set=2", "evaluation.completions_per_prompt=1")
        result = evaluated(tmp_path, *few, *overrides)
        return [completion.completion for completion in result.completions["held_out"]]

    greedy = completions("evaluation.temperature=0")
    assert completions("evaluation.top_p=0.000001") == greedy
    assert completions("evaluation.top_k=1") == greedy
    assert completions("rollout.top_k=1") == greedy
    assert completions("rollout.top_k=1", "evaluation.top_k=12") == completions()
    assert completions("evaluation.temperature=0.01") == greedy
    assert completions() != greedy
    assert completions("rollout.temperature=0.01") == greedy
    assert completions("rollout.temperature=0.01", "evaluation.temperature=1") == completions()


@key_test("evaluation.max_completion_length")
def completions_of_an_evaluation_end_at_its_own_limit(tmp_path: Path):
    for limit in (4, 9):
        result = evaluated(
            tmp_path, f"evaluation.max_completion_length={limit}", "evaluation.prompts_per_set=9"
        )
        assert max(completion.tokens for completion in result.completions["held_out"]) == limit


@key_test("evaluation.seed")
def the_prompts_of_an_evaluation_are_those_of_its_seed(tmp_path: Path):
    for seed in (5, 6):
        result = evaluated(tmp_path, f"evaluation.seed={seed}")
        task = make_task(result.config.task, seed)
        prompts = [completion.prompt for completion in result.completions["held_out"][::2]]
        assert prompts == [task.prompt(i).text for i in range(3)]


@key_test("evaluation.sets")
def each_set_has_the_task_the_seed_and_the_size_of_its_own_keys(tmp_path: Path):
    path = tmp_path / "test.jsonl"
    rows = [json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(2)]
    path.write_text("".join(rows))
    result = evaluated(
        tmp_path,
        "evaluation.sets.shorter.num_digits=1",
        "evaluation.sets.seeded.prompts=5",
        "evaluation.sets.seeded.seed=9",
        "evaluation.sets.file.task=prompts",
        f"evaluation.sets.file.path={path}",
    )
    assert list(result.completions) == ["shorter", "seeded", "file"]
    assert {len(completion.prompt) for completion in result.completions["shorter"]} == {2}
    task = make_task(result.config.task, 9)
    prompts = [completion.prompt for completion in result.completions["seeded"][::2]]
    assert prompts == [task.prompt(i).text for i in range(5)]
    assert {completion.prompt for completion in result.completions["file"]} == {"0=", "1="}
    assert result.numbers["file"]["prompts"] == 2  # of the three that are asked for
