"""Held-out prompts completed and scored: avg and pass@k of a policy, with standard errors over
prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgtoolkit.completion import Prompt
from pgtoolkit.document import SampledDocument
from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.batch_counts import powers_of_two
from pgtoolkit.rollouts.group_rollouts import complete_all, requests_of, scored_groups
from pgtoolkit.rollouts.kept_completions import row_of
from pgtoolkit.rollouts.settings import (
    EvaluationSettings,
    OldLogProbs,
    PolicyRolloutSettings,
    RolloutSettings,
)
from pgtoolkit.runs.completion_files import FOLDER, CompletionRow, write_completions
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.sampling.trained_policy import TrainedPolicy
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.tasks.tasks import Score


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

    sampler: for these completions alone, or one that shares its servers with the sampler of
        training.
    trained: as in `SampledRollouts`.
    rollout: how completions are sampled; see `as_evaluated`.
    folder: the run directory, where the completions are written.
    every: steps between evaluations.
    watched: the set and the number by which the best checkpoint is kept; None: none is.
    """

    sets: list[PromptSet]
    sampler: Sampler
    trained: TrainedPolicy
    rollout: PolicyRolloutSettings
    layout: Layout
    folder: Path
    every: int
    watched: tuple[str, str] | None

    def evaluate(self, prompt_set: PromptSet, step: int) -> dict[str, str | float]:
        """Return the numbers of one set (see runs/records.py), the same on every rank. Called by
        every rank.

        Completions are drawn by seeds of the set, the step and each prompt. Raises DataError where
        every score failed.
        """
        started = time.perf_counter()
        rank = self.layout.rank
        size = self.layout.world_size
        with failing_together(self.layout):
            numbers = range(rank, prompt_set.count, size)
            prompts = [prompt_set.task.prompt(number) for number in numbers]
            answers = self._answers(prompt_set, prompts, step)
        shares = gather_objects(answers, self.layout.world_group)
        groups = [shares[i % size][i // size] for i in range(prompt_set.count)]
        with failing_together(self.layout):
            if rank == 0:
                rows = [row for group in groups for row, _ in group]
                file_name = f"evaluation_{prompt_set.name}_{step:06d}.parquet"
                write_completions(self.folder / FOLDER / file_name, rows)
        if all(score.failed for group in groups for _, score in group):
            raise DataError(
                f"the score of each of the {sum(map(len, groups))} completions of evaluation set "
                f"{prompt_set.name} failed, so there is nothing to measure; the notes above say "
                "why. Mend the verifier or environment, or give it more time: "
                "task.verifier_seconds, or task.environment_seconds."
            )
        if not any(map(_is_known, groups)):
            raise DataError(
                "the first of task.verifiers, which decides what is right, scored none of the "
                f"{sum(map(len, groups))} completions of evaluation set {prompt_set.name}, so "
                "there is no pass@k. Name a verifier first that scores them."
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
        """Return the completions of each prompt, as rows with their scores."""
        task = prompt_set.task
        policy = self.trained.policy
        seeds = [seed_of(prompt_set.seed, prompt.index + (step << 32)) for prompt in prompts]
        requests = requests_of(task, prompts, self.rollout.group_size, seeds)
        self.sampler.publish(policy.weights, self.trained.num_updates)
        completions = complete_all(task, self.sampler, requests, self.layout)
        groups = scored_groups(task, requests, completions, self.rollout)

        def answer(document: SampledDocument, prompt: Prompt) -> _Answer:
            score = Score(
                document.reward,
                document.exact_match,
                document.measures,
                document.score_failed,
            )
            return row_of(step, document, prompt, policy.tokenizer), score

        return [
            [answer(document, prompt) for document in group]
            for group, prompt in zip(groups, prompts, strict=True)
        ]


def _is_known(group: list[_Answer]) -> bool:
    """Return whether the first verifier has decided on an answer of a group."""
    return any(score.exact_match is not None for _, score in group)


def _numbers(groups: list[list[_Answer]]) -> dict[str, float]:
    """Return the numbers of a set. Each prompt has a group of answers, all groups of one size.

    An answer that nobody could score is not right. It has no part in the mean reward of its prompt,
    nor in means of measures that it lacks. A prompt of which the first verifier scores no answer
    has no part in pass@k.
    """
    size = len(groups[0])
    known = filter(_is_known, groups)
    right = [sum(bool(score.exact_match) for _, score in group) for group in known]
    with_errors = {"avg": _prompt_means(groups, lambda _, score: score.reward)}
    for k in powers_of_two(size):
        with_errors[f"pass@{k}"] = [pass_at_k(size, count, k) for count in right]
    numbers: dict[str, float] = {"prompts": len(groups), "completions_per_prompt": size}
    for name, values in with_errors.items():
        numbers[name], error = mean_and_error(values)
        if error is not None:
            numbers[f"{name}_error"] = error
    means = {
        "length": _prompt_means(groups, lambda row, _: row.tokens),
        "truncated": _prompt_means(groups, lambda row, _: row.finish_reason == "length"),
    }
    scores = [score for group in groups for _, score in group]
    if any(score.failed for score in scores):
        means["failed_score_fraction"] = _prompt_means(groups, lambda _, score: score.failed)
    # An answer whose environment did not reply lacks the measures of that environment.
    for name in dict.fromkeys(name for score in scores for name in score.measures):
        means[name] = _prompt_means(groups, lambda _, score, name=name: score.measures.get(name))
    return numbers | {name: mean_and_error(values)[0] for name, values in means.items()}


def _prompt_means(
    groups: list[list[_Answer]], value: Callable[[CompletionRow, Score], float | None]
) -> list[float]:
    """Return the mean value of each prompt's answers, for prompts with an answer that has one."""
    means = []
    for group in groups:
        values = [value(row, score) for row, score in group]
        known = [number for number in values if number is not None]
        if known:
            means.append(sum(known) / len(known))
    return means


def pass_at_k(completions: int, right: int, k: int) -> float:
    """Return the share of the subsets of k completions with a right one (arXiv 2107.03374)."""
    return 1 - math.comb(completions - right, k) / math.comb(completions, k)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and its standard error: the values' standard deviation (n - 1) / sqrt(n).

    The error of a single value is None.
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def as_evaluated(evaluation: EvaluationSettings, rollout: RolloutSettings) -> PolicyRolloutSettings:
    """Return the rollouts of an evaluation, which every evaluation samples in one way."""
    sampling = evaluation.sampling_of(rollout)
    assert sampling.max_completion_length is not None
    settings = PolicyRolloutSettings(
        prompts_per_batch=evaluation.prompts_per_set,
        group_size=evaluation.completions_per_prompt,
        old_log_probs=OldLogProbs.sampling,
        max_completion_length=sampling.max_completion_length,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop),
    )
    # Nothing is trained at this temperature: it may be 0.
    return settings.unchecked({**vars(settings), "temperature": sampling.temperature})
