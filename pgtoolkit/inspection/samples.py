"""`pgtk samples`: the best and the worst completions, how answers changed, and all as one page by samples.html."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from pgtoolkit.comparison.terminal import folded
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.completions import (
    TRAINING,
    CompletionFile,
    CompletionRow,
    completion_files,
    read_completions,
    some_completions,
)
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.series import mean
from pgtoolkit.system.legible import legible, lines_of, shortened
from pgtoolkit.system.report import plural
from pgtoolkit.tracking.progress import WIDTH

MOST_COMPLETIONS = 2000
MOST_CHARACTERS = 8000
"""Of each text. More completions, or longer ones, make a page that no browser likes."""


@dataclass(frozen=True)
class Kept:
    """What a run kept of one set: its files, and of each completion the step, the name and the reward."""

    set: str
    files: list[CompletionFile]
    entries: list[CompletionRow]

    @property
    def steps(self) -> list[int]:
        """Those that have completions, in order."""
        return sorted({entry.step for entry in self.entries})

    def rows(self, step: int) -> list[CompletionRow]:
        """All that was kept at the step, in the order of the file."""
        own = [file for file in self.files if file.first <= step <= file.last]
        return [row for file in own for row in read_completions(file.path) if row.step == step]


@dataclass(frozen=True)
class Change:
    """A prompt whose completions were kept at two steps.

    means: of their rewards at each. before, after: of each step the completion whose reward is nearest to the mean.
    """

    means: tuple[float, float]
    before: CompletionRow
    after: CompletionRow


@dataclass(frozen=True)
class Samples:
    """What there is to be seen of one set at one step.

    since: the step from which on prompts were looked for that came again up to `step`. counts: of those, how many have
    a mean reward that rose, fell and stayed. changes: of those whose mean changed the largest, in falling order.
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
        if entries := read_completions(file.path, ("step", "name", "reward")):
            kept = found.setdefault(file.set, Kept(file.set, [], []))
            kept.files.append(file)
            kept.entries.extend(entries)
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


def samples(kept: Kept, step: int | None = None, since: int | None = None, count: int = 3) -> Samples:
    """A set at a step, and so many of the prompts that changed since another.

    step: None for the last. since: None for the first. Raises ConfigError for one without completions.
    """
    for option, one in (("--step", step), ("--since", since)):
        if one not in (None, *kept.steps):
            near = min(kept.steps, key=lambda known: abs(known - one))
            raise ConfigError(
                f"{option}={one} needs a step that has completions of {kept.set} (got {one}). It has them of "
                f"{_listed(kept.steps)}. Use {option}={near}."
            )
    step = kept.steps[-1] if step is None else step
    if since is not None and since >= step:
        reason = f"Completions of step {step} are compared with earlier ones."
        raise ConfigError(
            f"--since={since} needs a step before {step} (got {since}). {reason} Use another --step or --since."
        )
    since = kept.steps[0] if since is None else since
    rewards: dict[str, dict[int, list[float]]] = {}  # of each prompt, by step
    for entry in kept.entries:
        if since <= entry.step <= step:
            rewards.setdefault(entry.name, {}).setdefault(entry.step, []).append(entry.reward)
    again = {name: steps for name, steps in rewards.items() if len(steps) > 1}
    rises = {name: mean(steps[max(steps)]) - mean(steps[min(steps)]) for name, steps in again.items()}
    counts = [sum((by > 0) - (by < 0) == sign for by in rises.values()) for sign in (1, -1, 0)]
    rows, changes = functools.cache(kept.rows), []
    for name in sorted((name for name in rises if rises[name]), key=lambda name: -abs(rises[name]))[:count]:
        ends = {at: mean(again[name][at]) for at in (min(again[name]), max(again[name]))}
        own = {at: [row for row in rows(at) if row.name == name] for at in ends}
        nearest = [min(own[at], key=lambda row: abs(row.reward - ends[row.step])) for at in ends]
        changes.append(Change(tuple(ends.values()), *nearest))
    return Samples(kept.set, step, rows(step), since, tuple(counts), changes)


def render_samples(found: Samples, kept: dict[str, Kept], run: str, count: int, lines: int) -> str:
    """For the terminal, at most WIDTH columns wide. run: as the user can paste it.

    count: completions of a kind. lines: of each text at most.
    """
    rewards = [row.reward for row in found.rows]
    prompts = plural(len({row.name for row in found.rows}), "prompt")
    shown = folded(
        f"{legible(run)}: {found.set}, step {found.step}: {plural(len(rewards), 'completion')} kept of {prompts}, mean "
        f"reward of these {mean(rewards):.3f}"
    )
    others = [f"{name} ({_listed(one.steps)})" for name, one in kept.items() if name != found.set]
    if others:
        shown += folded(f"Other sets: {', '.join(others)}")
    times = Counter(map(_as_shown, found.rows))
    best, worst = best_and_worst(found.rows, count)
    title = "Best" if worst else f"All have reward {rewards[0]:.3f}; some of them"
    for name, rows in ((title, best), ("Worst", worst)):
        shown += ["", name] if rows else []
        for row in rows:
            again = f", {times[_as_shown(row)]} times" if times[_as_shown(row)] > 1 else ""
            shown += folded(f"{row.reward:.3f}  {legible(row.name)}: {facts(row)}{again}", "  ", " " * 9)
            shown += _texts(row, {"completion": row}, lines)
    shown += ["", *folded(_changes(found))]
    for change in found.changes:
        before, after = change.means
        shown.append(f"  {before:.3f} -> {after:.3f}  {legible(change.after.name)}"[:WIDTH])
        shown += _texts(change.after, {f"step {row.step}": row for row in (change.before, change.after)}, lines)
    return "\n".join(shown)


def best_and_worst(rows: list[CompletionRow], count: int) -> tuple[list[CompletionRow], list[CompletionRow]]:
    """So many of either, each text of a prompt once; of equal rewards, several prompts come before one's second text.

    No reward is the lowest among the best, or the highest among the worst; where all are alike there is no worst.
    """
    low, high = min(row.reward for row in rows), max(row.reward for row in rows)
    seen: Counter[tuple] = Counter()
    unlike = {}  # each with its place among those of its prompt with this reward
    for row in rows:
        if _as_shown(row) not in unlike:
            unlike[_as_shown(row)] = seen[row.name, row.reward], row
            seen[row.name, row.reward] += 1
    ordered = [row for _, row in sorted(unlike.values(), key=lambda one: one[0])]
    best = sorted((row for row in ordered if row.reward > low or low == high), key=lambda row: -row.reward)[:count]
    worst = [row for row in ordered if row.reward < high and row not in best]
    return best, sorted(worst, key=lambda row: row.reward)[:count]


def facts(row: CompletionRow) -> str:
    """What is known of a completion besides its texts."""
    parts = [f"{legible(name)} {score:.3g}" for name, score in row.rewards.items()]
    advantage = [] if row.advantage is None else [f"advantage {row.advantage:+.3f}"]
    ends = "cut off at its longest" if row.finish_reason == "length" else "ended by itself"
    return ", ".join([*parts, *advantage, plural(row.tokens, "token"), ends, f"weights of update {row.version}"])


def html(kept: list[Kept], step: int | None, run: str, command: str) -> str:
    """The page of these sets. step: of this one alone. command: what has made the page."""
    found, total = some_completions([file for one in kept for file in one.files], MOST_COMPLETIONS, step)
    rows = [_plain(name, row) for name, row in found]
    count = f"{total:,} completion{'s' * (total != 1)}"
    if len(rows) < total:
        count = f"{len(rows):,} of {count}: some prompts, spread evenly, with all of theirs"
    data = {"about": legible(f"{run}: {count}"), "rows": rows}
    # Whatever a model has written, nothing in it ends the script's element.
    written = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = files(__package__).joinpath("samples.html").read_text(encoding="utf-8")
    return re.sub("@(COMMAND|DATA)@", lambda found: written if found[1] == "DATA" else escape(legible(command)), page)


def _plain(name: str, row: CompletionRow) -> dict:
    texts = {key: getattr(row, key) for key in ("prompt", "completion", "answer")}
    return {
        **{key: text and shortened(legible(text), MOST_CHARACTERS) for key, text in texts.items()},
        **{"set": name, "step": row.step, "name": legible(row.name), "tokens": row.tokens, "facts": facts(row)},
        "reward": row.reward if math.isfinite(row.reward) else None,
    }


def _as_shown(row):
    return row.name, row.completion, row.reward


def _changes(found):
    rose, fell, stayed = found.counts
    if not any(found.counts):
        again = "evaluations ask the same prompts each time" if found.set == TRAINING else "there is one evaluation"
        return f"Changed since: no prompt has completions at two steps up to {found.step}; {again}."
    how = f"{rose} better, {fell} worse, {stayed} the same, by the mean reward of what was kept of a prompt"
    return f"Changed since step {found.since}: {how}"


def _texts(row, completions, lines):
    """Its prompt, completions by their labels, and its answer, if it has one."""
    texts = {"prompt": row.prompt} | {label: one.completion for label, one in completions.items()}
    texts |= {"answer": row.answer} if row.answer else {}
    return [
        f"    {label if place == 0 else '':<10}  {line}"
        for label, text in texts.items()
        for place, line in enumerate(lines_of(text, WIDTH - 4 - max(10, len(label)) - 2, lines))
    ]


def _listed(steps):
    """The steps in words, however many."""
    if len(steps) <= 6:
        return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
