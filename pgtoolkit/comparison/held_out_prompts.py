"""Tells where runs trained on other prompts, since their evaluations hold out other ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from math import ceil

from pgtoolkit.comparison.common_measure import nested
from pgtoolkit.config.evaluation_sets import DEFAULT_SET, values_of_set
from pgtoolkit.runs.find import Run
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.tasks.tasks import ReverseTask


def notes_on_other_prompts(runs: Collection[Run]) -> list[str]:
    """Return a note where runs of task=reverse with the same seed have asked other numbers.

    Training asks another number in place of one that its evaluation holds out. So the keys of the
    evaluation, which change nothing else that is learned, have decided that number.
    """
    by_numbers: dict[tuple[object, object], dict[str, Run]] = {}
    for run in runs:
        is_sampled = run.config.get("rollout.name") == "policy"
        if run.config.get("task.name") == "reverse" and is_sampled:
            numbers = (run.config["seed"], run.config["task.num_digits"])
            of_evaluation = repr(_sets(run.config))
            known = by_numbers.setdefault(numbers, {}).setdefault(of_evaluation, run)
            if _num_asked(run) > _num_asked(known):
                by_numbers[numbers][of_evaluation] = run
    for of_evaluations in by_numbers.values():
        if len(of_evaluations) < 2:
            continue
        replaced = [(run, _replaced(run)) for run in of_evaluations.values()]
        for (first, in_first), (second, in_second) in combinations(replaced, 2):
            both = min(_num_asked(first), _num_asked(second))
            differing = [number for number in in_first ^ in_second if number < both]
            if differing:
                return [
                    "task=reverse asks another number in place of one that the evaluation holds "
                    f"out, and the evaluations hold out different ones: {first.name} and "
                    f"{second.name} also differ in prompt {min(differing):,} of training. Runs "
                    "with the same evaluation keys have the same prompts"
                ]
    return []


def _num_asked(run: Run) -> int:
    """Return how many prompts training has asked."""
    group_size = run.config.get("rollout.group_size")
    assert isinstance(group_size, int)
    return ceil(run.last("documents_seen") / group_size)


def _sets(config: Mapping[str, object]) -> list[tuple[int, int]]:
    """Return (seed, number of prompts) of each evaluation set with numbers that training could ask,
    too."""
    if not config.get("evaluation.every"):
        return []
    task = nested(config, "task.")
    seed = config["evaluation.seed"]
    count = config["evaluation.prompts_per_set"]
    sets = nested(config, "evaluation.sets.") or {DEFAULT_SET: {}}
    return sorted(
        (settings.get("seed", seed), settings.get("prompts", count))
        for settings in sets.values()
        if values_of_set(task, settings) == task
    )


def _replaced(run: Run) -> set[int]:
    """Return the numbers of the prompts that training has replaced by others."""
    digits = run.config["task.num_digits"]
    seed = run.config["seed"]
    assert isinstance(digits, int)
    assert isinstance(seed, int)
    settings = ReverseTaskSettings(num_digits=digits)
    held_out = {
        ReverseTask(settings, seed_of_set).prompt(number).text
        for seed_of_set, count in _sets(run.config)
        for number in range(count)
    }
    if not held_out:
        return set()
    asked = ReverseTask(settings, seed)
    return {number for number in range(_num_asked(run)) if asked.prompt(number).text in held_out}
