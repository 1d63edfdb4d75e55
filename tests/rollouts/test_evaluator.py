"""The numbers of an evaluation against every subset of completions and plain loops, greedy sampling
against the model's own logits, and the seeds and stop strings of its prompts."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from builders.parts import ROLLOUT, TASK, short_module

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Completion, Request
from pgtoolkit.errors import NumericalError
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.batch_counts import powers_of_two
from pgtoolkit.rollouts.evaluator import (
    Evaluator,
    PromptSet,
    _numbers,
    as_evaluated,
    mean_and_error,
    pass_at_k,
)
from pgtoolkit.rollouts.settings import EvaluationSettings, PolicyRolloutSettings
from pgtoolkit.runs.completion_files import CompletionRow, read_completions
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import TransformersSamplerSettings
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.tasks import Score


def share_of_subsets_with_a_right_completion(completions: int, right: int, k: int) -> float:
    """Count the subsets of k completions, of which the first `right` are right."""
    subsets = list(itertools.combinations(range(completions), k))
    return sum(any(place < right for place in subset) for subset in subsets) / len(subsets)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion():
    for completions in range(1, 8):
        for right, k in itertools.product(range(completions + 1), range(1, completions + 1)):
            expected = share_of_subsets_with_a_right_completion(completions, right, k)
            assert pass_at_k(completions, right, k) == pytest.approx(expected, abs=1e-12)


def test_the_ks_are_powers_of_two_up_to_the_number_of_completions():
    assert powers_of_two(1) == [1]
    assert powers_of_two(2) == [1, 2]
    assert powers_of_two(3) == [1, 2]
    assert powers_of_two(4) == [1, 2, 4]
    assert powers_of_two(9) == [1, 2, 4, 8]


def answer(
    reward: float, exact_match: bool, tokens: int, reason: str, measures: Mapping[str, float]
) -> tuple[CompletionRow, Score]:
    row = CompletionRow(0, "p", "", "", reward, tokens=tokens, finish_reason=reason)
    return row, Score(reward, exact_match, measures)


def standard_error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    squares = 0.0
    for value in values:
        squares += (value - mean) ** 2
    return math.sqrt(squares / (len(values) - 1)) / math.sqrt(len(values))


def test_means_and_errors_are_over_prompts_not_over_completions():
    good = {"reward/a": 1.0}
    bad = {"reward/a": 0.0}
    groups = [
        [answer(1.0, True, 3, "stop", good), answer(1.0, True, 5, "stop", good)],
        [answer(0.5, False, 7, "length", good), answer(0.0, False, 7, "length", bad)],
        [answer(0.0, False, 2, "stop", bad), answer(1.0, True, 4, "stop", bad)],
    ]
    numbers = _numbers(groups)
    assert numbers["prompts"] == 3
    assert numbers["completions_per_prompt"] == 2
    for name, of_prompts in (
        ("avg", [1, 0.25, 0.5]),
        ("pass@1", [1, 0, 0.5]),
        ("pass@2", [1, 0, 1]),
    ):
        assert numbers[name] == pytest.approx(sum(of_prompts) / 3, rel=1e-12)
        assert numbers[f"{name}_error"] == pytest.approx(standard_error(of_prompts), rel=1e-12)
    assert numbers["length"] == pytest.approx(28 / 6)
    assert numbers["truncated"] == pytest.approx(2 / 6)
    assert numbers["reward/a"] == pytest.approx(0.5)


def test_a_completion_without_a_measure_is_left_out_of_its_mean():
    """Each prompt has one completion with the measure, 1 and 0.5: the mean over prompts is 0.75."""
    groups = [
        [answer(1.0, True, 3, "stop", {"reward/a": 1.0}), answer(1.0, True, 5, "stop", {})],
        [answer(0.0, False, 7, "stop", {}), answer(0.0, False, 7, "stop", {"reward/a": 0.5})],
    ]
    assert _numbers(groups)["reward/a"] == pytest.approx(0.75)


def test_a_single_prompt_has_no_error():
    assert mean_and_error([0.25]) == (0.25, None)
    numbers = _numbers([[answer(1.0, True, 3, "stop", {}), answer(0.0, False, 3, "stop", {})]])
    assert numbers["pass@1"] == 0.5
    assert not [name for name in numbers if name.endswith("_error")]


COMPLETIONS = "completions/evaluation_held_out_000000.parquet"


def evaluator_of(
    folder: Path,
    rollout: PolicyRolloutSettings = ROLLOUT,
    sets: Mapping[str, int] = MappingProxyType({"held_out": 10**9}),
    **evaluation: object,
) -> Evaluator:
    """Return an evaluator of a small model.

    sets: names of sets of prompts -> their seeds. evaluation: settings in place of the defaults.
    """
    torch.manual_seed(0)
    model = TinyModelSettings(num_layers=1, hidden_size=8, num_heads=2)
    policy = build_policy(model, TASK.alphabet, on_gpu=False)
    settings = EvaluationSettings(every=1, **evaluation)
    asked = as_evaluated(settings, rollout)
    prompt_sets = []
    for name, seed in sets.items():
        ends = [policy.tokenizer.eos_token_id]
        task = TokenizedTask(make_task(TASK, seed), policy.tokenizer, ends, stop=asked.stop)
        prompt_sets.append(PromptSet(name, task, settings.prompts_per_set, seed))
    sampler = TransformersSampler(policy, asked.sampling, TransformersSamplerSettings())
    module = short_module(policy=policy)
    return Evaluator(prompt_sets, sampler, module, asked, ONE_PROCESS, folder, 1, watched=None)


def test_at_temperature_0_the_likeliest_token_is_taken(tmp_path):
    evaluator = evaluator_of(tmp_path, temperature=0.0, completions_per_prompt=1, prompts_per_set=5)
    module = evaluator.trained
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)

    evaluator.evaluate(evaluator.sets[0], 0)

    rows = read_completions(tmp_path / COMPLETIONS)
    assert len(rows) == 5
    tokenizer = module.policy.tokenizer
    for row in rows:
        tokens = tokenizer(row.prompt)["input_ids"]
        for _ in range(row.tokens):
            logits = module.model(input_ids=torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        assert tokenizer.decode(tokens) == row.prompt + row.completion


def test_at_temperature_0_logits_that_are_not_finite_end_the_evaluation(tmp_path):
    evaluator = evaluator_of(tmp_path, temperature=0.0, completions_per_prompt=1, prompts_per_set=1)
    evaluator.trained.policy.head.weight.data.fill_(math.nan)
    with pytest.raises(NumericalError, match="probabilities are not finite"):
        evaluator.evaluate(evaluator.sets[0], 0)


def test_a_stop_string_ends_the_completions_of_an_evaluation(tmp_path):
    evaluator = evaluator_of(tmp_path, replace(ROLLOUT, stop=["7", "2"]), prompts_per_set=12)
    torch.manual_seed(3)
    evaluator.evaluate(evaluator.sets[0], 0)
    rows = read_completions(tmp_path / COMPLETIONS)
    stopped = [row for row in rows if "7" in row.completion or "2" in row.completion]
    assert 10 < len(stopped) < len(rows) == 48
    for row in stopped:
        assert not set("72") & set(row.completion[:-1])
        assert row.finish_reason == "stop"


class SeedRecorder:
    """The sampler, with a list of the seeds that each call gives it with its prompts."""

    def __init__(self, sampler: TransformersSampler) -> None:
        self.sampler = sampler
        self.publish = sampler.publish
        self.seeds: list[list[int]] = []

    def complete(self, requests: list[Request]) -> list[Completion]:
        self.seeds.append([request.seed for request in requests])
        return self.sampler.complete(requests)


def test_each_prompt_of_each_set_at_each_step_has_its_own_seed(tmp_path):
    """A sampler that draws from the seed would write the same completions again for an equal one.
    An evaluation of the same step is repeated with the same seeds."""
    evaluator = evaluator_of(tmp_path, sets={"a": 7, "b": 8}, prompts_per_set=5)
    recorder = SeedRecorder(evaluator.sampler)
    evaluator.sampler = recorder
    for evaluation_set in evaluator.sets:
        for step in (0, 1, 2, 2):
            evaluator.evaluate(evaluation_set, step)
    calls = recorder.seeds
    assert calls[2] == calls[3]
    assert calls[6] == calls[7]
    seeds = [seed for call in (*calls[:3], *calls[4:7]) for seed in call]
    assert len(set(seeds)) == len(seeds) == 30
    assert all(0 <= seed < 2**32 for seed in seeds)
