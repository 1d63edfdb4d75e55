"""Held-out prompts completed and scored: avg and pass@k of a policy, with standard errors over prompts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgtoolkit.config.evaluation import powers_of_two, sampling
from pgtoolkit.config.schema import Config, OldLogProbs, PolicyRolloutConfig
from pgtoolkit.ranks.agreement import failing_together, gather
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.prompts import TokenizedTask
from pgtoolkit.rollouts.samplers import Completion, Request, Sampler
from pgtoolkit.rollouts.shuffle import seed_of
from pgtoolkit.rollouts.tasks import Prompt, Score, Task
from pgtoolkit.runs.completions import FOLDER, CompletionRow, write_completions


@dataclass(frozen=True)
class PromptSet:
    """One set of prompts, as the model sees them: the first `count` of its task."""

    name: str
    task: TokenizedTask
    count: int
    seed: int


@dataclass(frozen=True)
class _Answer:
    """One completion with its score. exact_match: whether it is right. measures: as `Score` has them."""

    row: CompletionRow
    exact_match: bool
    measures: dict[str, float]


class Evaluator:
    """Completes and scores sets of prompts with the weights as they are, on all data-parallel ranks together.

    sampler: of these completions alone, or one that shares its servers with the one of training. trained: a
    `PolicyInTraining`. folder: the run directory, where the completions are written.
    """

    def __init__(
        self, sets: list[PromptSet], sampler: Sampler, trained: Any, completions: int, layout: Layout, folder: Path
    ):
        self.sets = sets
        self._sampler, self._trained, self._completions = sampler, trained, completions
        self._layout, self._folder = layout, folder

    def evaluate(self, one: PromptSet, step: int) -> dict[str, Any]:
        """The numbers of one set, the same on every rank; see runs/evaluations.py. Called by every rank.

        Draws from torch's global random state, and where the sampler takes seeds, from those of set and step.
        """
        started = time.perf_counter()
        rank, size = self._layout.rank_in("data_parallel"), self._layout.size("data_parallel")
        with failing_together(self._layout):
            prompts = [one.task.prompt(number) for number in range(rank, one.count, size)]
            answers = self._answers(one, prompts, step)
        shares = gather(answers, self._layout.group("data_parallel"))
        groups = [shares[i % size][i // size] for i in range(one.count)]
        with failing_together(self._layout):
            if self._layout.rank == 0:
                rows = [answer.row for group in groups for answer in group]
                write_completions(self._folder / FOLDER / f"evaluation_{one.name}_{step:06d}.parquet", rows)
        return {"set": one.name, **_numbers(groups), "seconds": round(time.perf_counter() - started, 3)}

    def close(self) -> None:
        """End what sampling and scoring have started."""
        self._sampler.close()
        for one in self.sets:
            one.task.close()

    def _answers(self, one: PromptSet, prompts: list[Prompt], step: int) -> list[list[_Answer]]:
        """Of each prompt its answers."""
        count, tokens = self._completions, one.task.encode(prompts) if prompts else []
        seeds = [seed_of(one.seed, prompt.index + (step << 32)) for prompt in prompts]
        requests = [Request(own, count, seed) for own, seed in zip(tokens, seeds, strict=True)]
        self._sampler.publish(self._trained.policy.weights, self._trained.num_updates)
        completions = self._sampler.complete(requests)
        scores = one.task.scores([prompt for prompt in prompts for _ in range(count)], completions)
        decode, answers = self._trained.policy.tokenizer.decode, []
        for i, (prompt, own) in enumerate(zip(prompts, tokens, strict=True)):
            group = slice(i * count, (i + 1) * count)
            text = decode(own)
            answers.append(
                [
                    _Answer(_row(prompt, (text, decode(completion.tokens)), completion, score, step), *_judged(score))
                    for completion, score in zip(completions[group], scores[group], strict=True)
                ]
            )
        return answers


def _judged(score: Score) -> tuple[bool, dict[str, float]]:
    return score.exact_match, score.measures


def _row(prompt: Prompt, texts: tuple[str, str], completion: Completion, score: Score, step: int) -> CompletionRow:
    return CompletionRow(
        step=step,
        name=prompt.place,
        prompt=texts[0],
        completion=texts[1],
        reward=score.reward,
        rewards={name.removeprefix("reward/"): x for name, x in score.measures.items() if name.startswith("reward/")},
        tokens=len(completion.tokens),
        finish_reason=completion.finish_reason,
        version=completion.model_version,
        answer=prompt.answer,
    )


def _numbers(groups: list[list[_Answer]]) -> dict[str, Any]:
    """The numbers of a set, whose prompts have one group of answers each, all of them equally many."""
    count, everything = len(groups[0]), [answer for group in groups for answer in group]

    def means(value: Callable[[_Answer], float]) -> list[float]:
        return [sum(map(value, group)) / count for group in groups]

    right = [sum(answer.exact_match for answer in group) for group in groups]
    measured = {"avg": means(lambda answer: answer.row.reward)}
    measured |= {f"pass@{k}": [pass_at_k(count, c, k) for c in right] for k in powers_of_two(count)}
    numbers: dict[str, Any] = {"prompts": len(groups), "completions_per_prompt": count}
    for name, values in measured.items():
        numbers[name], error = mean_and_error(values)
        numbers |= {} if error is None else {f"{name}_error": error}
    others: dict[str, Callable[[_Answer], float]] = {
        "length": lambda answer: answer.row.tokens,
        "truncated": lambda answer: answer.row.finish_reason == "length",
        **{name: lambda answer, name=name: answer.measures[name] for name in everything[0].measures},
    }
    return numbers | {name: mean_and_error(means(value))[0] for name, value in others.items()}


def pass_at_k(completions: int, right: int, k: int) -> float:
    """The share of the subsets of k completions that hold one of those that are right (arXiv 2107.03374)."""
    return 1 - math.comb(completions - right, k) / math.comb(completions, k)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error: the values' standard deviation (n - 1) / sqrt(n); None of a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def as_evaluated(config: Config) -> Config:
    """The configuration with the rollouts of an evaluation: sampled before any update, one way for all of them."""
    own = PolicyRolloutConfig(
        name="policy",
        prompts_per_batch=config.evaluation.prompts_per_set,
        group_size=config.evaluation.completions_per_prompt,
        old_log_probs=OldLogProbs.sampling,
        overlong_buffer=None,
        overlong_penalty=1.0,
        max_sampling_rounds=1,
        lag=0,
        max_staleness=None,
        save_path=None,
        keep_completions=0,
        **sampling(config),
    )
    return dataclasses.replace(config, rollout=own)


def asked_by_both(task: Task, other: Task, count: int) -> int:
    """How many of the first `count` prompts of `other` are among those of a task; 0 of one whose prompts never end."""
    if task.num_prompts is None:
        return 0
    known = {repr((prompt.text, prompt.messages)) for prompt in task.rows()}
    prompts = [other.prompt(number) for number in range(count)]
    return sum(repr((prompt.text, prompt.messages)) in known for prompt in prompts)
