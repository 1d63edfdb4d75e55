"""DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): batches of prompts whose completions score differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pgtoolkit.batch import Document


def fill(
    groups: list[list[Document]], sample: Callable[[int], list[list[Document]]], rounds: int
) -> list[list[Document]]:
    """As many groups, those that teach nothing replaced by others as long as the rounds last.

    groups: of the first round, in the order of their prompts, as is what is returned. sample: (number) -> the groups
    of so many further prompts. rounds: how often is sampled at most, the first time included; with 1 nothing is
    dropped. Where they do not suffice, the earliest groups that teach nothing stay.

    Every decision follows from the groups alone, so that ranks that hold the same groups take the same.
    """
    if rounds == 1:
        return groups
    wanted, number = len(groups), 1
    while (missing := wanted - sum(map(teaches, groups))) and number < rounds:
        groups = groups + sample(missing)
        number += 1
    without = [place for place, group in enumerate(groups) if not teaches(group)]
    dropped = set(without[max(0, missing) :])
    share = len(dropped) / len(groups)
    kept = [group for place, group in enumerate(groups) if place not in dropped]
    return [[replace(document, dropped_prompt_fraction=share) for document in group] for group in kept]


def teaches(group: list[Document]) -> bool:
    """Whether the task scores the completions differently, whatever is taken off for their lengths."""
    return len({d.reward if d.task_reward is None else d.task_reward for d in group}) > 1
