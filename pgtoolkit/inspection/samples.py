"""What a run's model wrote: the completions of a step, and how the answers to the same prompts changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pgtoolkit.comparison.runs import is_run, not_a_run
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.completions import (
    TRAINING,
    CompletionFile,
    CompletionRow,
    Entry,
    completion_files,
    read_completions,
    read_entries,
)
from pgtoolkit.runs.series import mean


@dataclass(frozen=True)
class Kept:
    """What a run kept of one set, without the texts: each completion's entry, and its file."""

    set: str
    entries: list[tuple[Entry, CompletionFile]]

    @property
    def steps(self) -> list[int]:
        """Those that have completions, in order."""
        return sorted({entry.step for entry, _ in self.entries})


@dataclass(frozen=True)
class Change:
    """A prompt whose completions were kept at two steps.

    means: of their rewards at each. before, after: of each step the completion whose reward is nearest to the mean.
    """

    name: str
    means: tuple[float, float]
    before: CompletionRow
    after: CompletionRow


@dataclass(frozen=True)
class Samples:
    """What there is to be seen of one set at one step.

    rows: all that was kept at the step, in the order of the file. since: the step from which on prompts were looked
    for that came again up to `step`. counts: of those, how many have a mean reward that rose, fell and stayed.
    changes: of those whose mean changed the largest, in falling order.
    """

    set: str
    step: int
    rows: list[CompletionRow]
    since: int
    counts: tuple[int, int, int]
    changes: list[Change]


def kept_by(run_dir: Path) -> dict[str, Kept]:
    """Each set that a run kept, by its name. Raises ConfigError where there is no run, or nothing was kept."""
    if not is_run(run_dir):
        raise not_a_run(f"pgtk samples {run_dir}", run_dir, "a run directory")
    found: dict[str, Kept] = {}
    for file in completion_files(run_dir):
        if entries := read_entries(file.path):
            found.setdefault(file.set, Kept(file.set, [])).entries.extend((entry, file) for entry in entries)
    if not found:
        raise ConfigError(
            f"pgtk samples {run_dir} needs a run that kept completions (got none). Runs keep some with rollout=policy "
            "and rollout.keep_completions above 0; those of rollout=recorded are in rollout.path. Use "
            "rollout.keep_completions=8 in a new run."
        )
    return found


def chosen_set(kept: dict[str, Kept], name: str | None) -> Kept:
    """The set of this name; None: that of an evaluation, whose prompts are the same each time, or else of training."""
    name = name or next((one for one in kept if one != TRAINING), TRAINING)
    if name not in kept:
        raise ConfigError(
            f"--set={name} needs a set that the run kept completions of (got {name}). It has {', '.join(kept)}. "
            f"Use --set={next(iter(kept))}."
        )
    return kept[name]


def chosen_step(kept: Kept, option: str, step: int) -> int:
    """The step, if it has completions. option: what it was typed as."""
    steps = kept.steps
    if step not in steps:
        near = min(steps, key=lambda one: abs(one - step))
        raise ConfigError(
            f"{option}={step} needs a step that has completions of {kept.set} (got {step}). It has them of "
            f"{listed(steps)}. Use {option}={near}."
        )
    return step


def samples(kept: Kept, step: int | None = None, since: int | None = None, count: int = 3) -> Samples:
    """A set at a step, and so many of the prompts that changed since another.

    step: None for the last. since: None for the first. Raises ConfigError for one without completions.
    """
    step = kept.steps[-1] if step is None else chosen_step(kept, "--step", step)
    if since is not None and chosen_step(kept, "--since", since) >= step:
        reason = f"Completions of step {step} are compared with earlier ones."
        raise ConfigError(
            f"--since={since} needs a step before {step} (got {since}). {reason} Use another --step or --since."
        )
    since = kept.steps[0] if since is None else since
    rows = functools.cache(functools.partial(_rows, kept))
    again = _again(kept, since, step)
    rises = {name: mean(steps[max(steps)]) - mean(steps[min(steps)]) for name, steps in again.items()}
    largest = sorted((name for name in rises if rises[name]), key=lambda name: -abs(rises[name]))[:count]
    changes = [_change(name, again[name], rows) for name in largest]
    counts = [sum((by > 0) - (by < 0) == sign for by in rises.values()) for sign in (1, -1, 0)]
    return Samples(kept.set, step, rows(step), since, tuple(counts), changes)


def _change(name: str, rewards: dict[int, list[float]], rows: Callable[[int], list[CompletionRow]]) -> Change:
    """rewards: of the prompt, by step."""

    def nearest(step):
        own = [row for row in rows(step) if row.name == name]
        distances = [abs(row.reward - mean(rewards[step])) for row in own]
        return own[distances.index(min(distances))]

    first, last = min(rewards), max(rewards)
    return Change(name, (mean(rewards[first]), mean(rewards[last])), nearest(first), nearest(last))


def _again(kept: Kept, since: int, step: int) -> dict[str, dict[int, list[float]]]:
    """Of the prompts that have completions at several of these steps, the rewards at each."""
    rewards: dict[str, dict[int, list[float]]] = {}
    for entry, _ in kept.entries:
        if since <= entry.step <= step:
            rewards.setdefault(entry.name, {}).setdefault(entry.step, []).append(entry.reward)
    return {name: steps for name, steps in rewards.items() if len(steps) > 1}


def _rows(kept: Kept, step: int) -> list[CompletionRow]:
    paths = dict.fromkeys(file.path for entry, file in kept.entries if entry.step == step)
    return [row for path in paths for row in read_completions(path) if row.step == step]


def listed(steps: list[int]) -> str:
    """The steps in words, however many."""
    if len(steps) <= 6:
        return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
