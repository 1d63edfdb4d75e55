"""avg and pass@k against every subset of completions, standard errors against plain loops, and
greedy sampling."""

import itertools
import math

import pytest
import torch
from builders.runs import module_and_loader
from keys import SMALL

from pgtoolkit.config.evaluation_sets import powers_of_two
from pgtoolkit.rollouts.evaluator import _numbers, mean_and_error, pass_at_k
from pgtoolkit.runs.completion_files import CompletionRow, read_completions
from pgtoolkit.tasks.tasks import Score


def by_enumeration(completions, right, k):
    """The share of subsets of k completions, the first `right` of which are right, with a right
    one."""
    subsets = list(itertools.combinations(range(completions), k))
    return sum(any(i < right for i in subset) for subset in subsets) / len(subsets)


def test_pass_at_k_is_the_share_of_all_subsets():
    for completions in range(1, 8):
        for right, k in itertools.product(range(completions + 1), range(1, completions + 1)):
            assert pass_at_k(completions, right, k) == pytest.approx(
                by_enumeration(completions, right, k), abs=1e-12
            )


def test_the_ks_are_powers_of_two_up_to_the_completions():
    assert [powers_of_two(n) for n in (1, 2, 3, 4, 9)] == [
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 8],
    ]


def answers(*groups):
    """Of (reward, exact match, tokens, finish reason, other measures) of each completion."""
    return [
        [
            (
                CompletionRow(0, "p", "", "", reward, tokens=tokens, finish_reason=reason),
                Score(reward, exact, measures),
            )
            for reward, exact, tokens, reason, measures in group
        ]
        for group in groups
    ]


def test_errors_are_over_prompts_and_not_over_completions():
    one, two = {"reward/a": 1.0}, {"reward/a": 0.0}
    groups = answers(
        [(1.0, True, 3, "stop", one), (1.0, True, 5, "stop", one)],
        [(0.5, False, 7, "length", one), (0.0, False, 7, "length", two)],
        [(0.0, False, 2, "stop", two), (1.0, True, 4, "stop", two)],
    )
    found = _numbers(groups)
    assert (found["prompts"], found["completions_per_prompt"]) == (3, 2)
    for name, means in (("avg", [1, 0.25, 0.5]), ("pass@1", [1, 0, 0.5]), ("pass@2", [1, 0, 1])):
        mean, square = sum(means) / 3, 0.0
        for value in means:
            square += (value - mean) ** 2
        assert found[name] == pytest.approx(mean, rel=1e-12)
        assert found[f"{name}_error"] == pytest.approx(
            math.sqrt(square / 2) / math.sqrt(3), rel=1e-12
        )
    assert found["length"] == pytest.approx(28 / 6)
    assert found["truncated"] == pytest.approx(2 / 6)
    assert found["reward/a"] == pytest.approx(0.5)


def test_a_completion_without_a_measure_is_left_out_of_its_mean():
    """Of each prompt one of two completions was measured, with 1 and 0.5: the mean over prompts is
    0.75."""
    groups = answers(
        [(1.0, True, 3, "stop", {"reward/a": 1.0}), (1.0, True, 5, "stop", {})],
        [(0.0, False, 7, "stop", {}), (0.0, False, 7, "stop", {"reward/a": 0.5})],
    )
    assert _numbers(groups)["reward/a"] == pytest.approx(0.75)


def test_a_single_prompt_has_no_error():
    assert mean_and_error([0.25]) == (0.25, None)
    found = _numbers(answers([(1.0, True, 3, "stop", {}), (0.0, False, 3, "stop", {})]))
    assert found["pass@1"] == 0.5
    assert not [name for name in found if name.endswith("_error")]


def test_without_temperature_the_likeliest_token_is_taken(tmp_path):
    more = ("evaluation.every=1", "evaluation.temperature=0", "evaluation.completions_per_prompt=1")
    module, _ = module_and_loader(*SMALL, *more, "evaluation.prompts_per_set=5")
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)
    evaluator, tokenizer = module.evaluator, module.policy.tokenizer
    evaluator.folder = tmp_path
    evaluator.evaluate(evaluator.sets[0], 0)
    rows = read_completions(tmp_path / "completions" / "evaluation_held_out_000000.parquet")
    assert len(rows) == 5
    for row in rows:
        tokens = tokenizer(row.prompt)["input_ids"]
        for _ in range(row.tokens):
            tokens.append(
                int(module.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            )
        assert tokenizer.decode(tokens) == row.prompt + row.completion
    module.policy.head.weight.data.fill_(math.nan)
    with pytest.raises(Exception, match="probabilities are not finite"):
        evaluator.evaluate(evaluator.sets[0], 0)


def evaluator_with(folder, *overrides):
    module, _ = module_and_loader(*SMALL, "evaluation.every=1", *overrides)
    module.evaluator.folder = folder
    return module.evaluator


def test_a_stop_string_ends_the_completions_of_an_evaluation(tmp_path):
    evaluator = evaluator_with(tmp_path, "rollout.stop=['7','2']", "evaluation.prompts_per_set=12")
    torch.manual_seed(3)
    evaluator.evaluate(evaluator.sets[0], 0)
    rows = read_completions(tmp_path / "completions" / "evaluation_held_out_000000.parquet")
    stopped = [row for row in rows if "7" in row.completion or "2" in row.completion]
    assert 10 < len(stopped) < len(rows) == 48
    for row in stopped:
        assert not set("72") & set(row.completion[:-1])
        assert row.finish_reason == "stop"


class Listening:
    """A sampler, beside which the seeds are noted that it is given with each prompt."""

    def __init__(self, sampler):
        self.sampler, self.publish, self.seeds = sampler, sampler.publish, []

    def complete(self, requests):
        self.seeds.append([request.seed for request in requests])
        return self.sampler.complete(requests)


def test_each_prompt_of_each_set_at_each_step_has_a_seed_of_its_own(tmp_path):
    """Which samplers that take one draw from: equal ones would write the same completions again and
    again."""
    sets = ("evaluation.sets.a.seed=7", "evaluation.sets.b.seed=8", "evaluation.prompts_per_set=5")
    evaluator = evaluator_with(tmp_path, *sets)
    evaluator.sampler = Listening(evaluator.sampler)
    for prompts, step in itertools.product(evaluator.sets, (0, 1, 2, 2)):
        evaluator.evaluate(prompts, step)
    found = evaluator.sampler.seeds
    assert (found[2], found[6]) == (found[3], found[7])
    every = [seed for seeds in (*found[:3], *found[4:7]) for seed in seeds]
    assert len(set(every)) == len(every) == 30
    assert all(0 <= seed < 2**32 for seed in every)
