"""Held-out prompts completed and scored: avg and pass@k of a policy, with standard errors over
prompts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgtoolkit.batch import Document
from pgtoolkit.completion import Prompt
from pgtoolkit.config.evaluation_sets import powers_of_two, sampling
from pgtoolkit.config.keys import option_values
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import OldLogProbs, PolicyRolloutConfig
from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.group_rollouts import completed, requests_of, scored_groups
from pgtoolkit.rollouts.kept_completions import row_of
from pgtoolkit.runs.completion_files import FOLDER, CompletionRow, write_completions
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.sampling.trained_policy import TrainedPolicy
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.tasks.tasks import Score, Task


@dataclass(frozen=True)
class PromptSet:
    """One set of prompts, as the model sees them: the first `count` of its task."""

    name: str
    task: TokenizedTask
    count: int
    seed: int


_Answer = tuple[CompletionRow, Score]


@dataclass
class Evaluator:
    """Completes and scores sets of prompts with the weights as they are, on all ranks together.

    sampler: of these completions alone, or one that shares its servers with the one of training.
        trained: as of
    `PolicyRollouts`. rollout: how they are sampled, as `as_evaluated` has it. folder: the run
        directory, where the
    completions are written.
    """

    sets: list[PromptSet]
    sampler: Sampler
    trained: TrainedPolicy
    rollout: PolicyRolloutConfig
    layout: Layout
    folder: Path

    def evaluate(self, prompt_set: PromptSet, step: int) -> dict[str, Any]:
        """The numbers of one set, the same on every rank; see runs/records.py. Called by every
        rank.

        Completions are drawn by seeds of the set, the step and each prompt.
        """
        started = time.perf_counter()
        rank, size = self.layout.rank, self.layout.world_size
        with failing_together(self.layout):
            prompts = [
                prompt_set.task.prompt(number) for number in range(rank, prompt_set.count, size)
            ]
            answers = self._answers(prompt_set, prompts, step)
        shares = gather_objects(answers, self.layout.world_group)
        groups = [shares[i % size][i // size] for i in range(prompt_set.count)]
        with failing_together(self.layout):
            if self.layout.rank == 0:
                rows = [row for group in groups for row, _ in group]
                write_completions(
                    self.folder / FOLDER / f"evaluation_{prompt_set.name}_{step:06d}.parquet", rows
                )
        if all(score.failed for group in groups for _, score in group):
            raise DataError(
                f"the score of each of the {sum(map(len, groups))} completions of evaluation set "
                f"{prompt_set.name} failed, so there is nothing to measure; the notes above say "
                "why. Mend what scores them, or give it more time: task.verifier_seconds, or "
                "task.environment_seconds."
            )
        return {
            "set": prompt_set.name,
            **_numbers(groups),
            "seconds": round(time.perf_counter() - started, 3),
        }

    def close(self) -> None:
        """End what sampling and scoring have started."""
        self.sampler.close()
        for prompt_set in self.sets:
            prompt_set.task.close()

    def _answers(
        self, prompt_set: PromptSet, prompts: list[Prompt], step: int
    ) -> list[list[_Answer]]:
        """Of each prompt its answers."""
        task, rollout, policy = prompt_set.task, self.rollout, self.trained.policy
        seeds = [seed_of(prompt_set.seed, prompt.index + (step << 32)) for prompt in prompts]
        requests = requests_of(task, prompts, rollout.group_size, seeds)
        self.sampler.publish(policy.weights, self.trained.num_updates)
        completions = completed(task, self.sampler, requests, self.layout)
        groups = scored_groups(task, requests, completions, rollout)

        def answer(document: Document, prompt: Prompt) -> _Answer:
            row = row_of(step, document, prompt, policy.tokenizer)
            return row, Score(
                document.reward,
                bool(document.exact_match),
                document.measures,
                document.score_failed,
            )

        return [
            [answer(document, prompt) for document in group]
            for group, prompt in zip(groups, prompts, strict=True)
        ]


def _numbers(groups: list[list[_Answer]]) -> dict[str, Any]:
    """The numbers of a set, whose prompts have one group of answers each, all of them equally many.

    An answer that nobody could score is not right. It has no part in the mean reward of its prompt,
    nor in means of measures that it lacks.
    """
    count = len(groups[0])

    def means(value: Callable[[CompletionRow, Score], float | None]) -> list[float]:
        """The mean of each prompt that knows any."""
        values = [
            [known for answer in group if (known := value(*answer)) is not None] for group in groups
        ]
        return [sum(of_prompt) / len(of_prompt) for of_prompt in values if of_prompt]

    right = [sum(score.exact_match for _, score in group) for group in groups]
    measured = {"avg": means(lambda _, score: score.reward)}
    measured |= {f"pass@{k}": [pass_at_k(count, c, k) for c in right] for k in powers_of_two(count)}
    numbers: dict[str, Any] = {"prompts": len(groups), "completions_per_prompt": count}
    for name, values in measured.items():
        numbers[name], error = mean_and_error(values)
        numbers |= {} if error is None else {f"{name}_error": error}
    others = {
        "length": means(lambda row, _: row.tokens),
        "truncated": means(lambda row, _: row.finish_reason == "length"),
    }
    if any(score.failed for group in groups for _, score in group):
        others["failed_score_fraction"] = means(lambda _, score: score.failed)
    # One whose environment gave no answer has no measures of it.
    for name in dict.fromkeys(
        name for group in groups for _, score in group for name in score.measures
    ):
        others[name] = means(lambda _, score, name=name: score.measures.get(name))
    return numbers | {name: mean_and_error(values)[0] for name, values in others.items()}


def pass_at_k(completions: int, right: int, k: int) -> float:
    """The share of the subsets of k completions that hold one of those that are right (arXiv
    2107.03374)."""
    return 1 - math.comb(completions - right, k) / math.comb(completions, k)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error: the values' standard deviation (n - 1) / sqrt(n); None of a
    single value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(
        math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values)
    )


def as_evaluated(config: Config) -> Config:
    """The configuration with the rollouts of an evaluation: sampled before any update, one way for
    all of them."""
    usual = option_values("rollout", "policy")
    measured = {
        "prompts_per_batch": config.evaluation.prompts_per_set,
        "group_size": config.evaluation.completions_per_prompt,
        "old_log_probs": OldLogProbs.sampling,
    }
    rollout = PolicyRolloutConfig(**(usual | measured | sampling(config)))
    return dataclasses.replace(config, rollout=rollout)


def asked_by_both(task: Task, other: Task, count: int) -> int:
    """How many of the first `count` prompts of `other` are among those of a task; 0 of one whose
    prompts never end."""
    if task.num_prompts is None:
        return 0
    known = different(task.rows())
    return sum(not known.isdisjoint(different([other.prompt(number)])) for number in range(count))


def different(prompts: Iterable[Prompt]) -> set[str]:
    """What tells prompts apart."""
    return {repr((prompt.text, prompt.messages)) for prompt in prompts}
