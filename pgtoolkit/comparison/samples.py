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
from typing import NamedTuple

from pgtoolkit.comparison.text_report import folded
from pgtoolkit.errors import ConfigError
from pgtoolkit.runs import completion_files
from pgtoolkit.runs.completion_files import CompletionFile, CompletionRow
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
        paths = [file.path for file in self.files if file.first <= step <= file.last]
        return [row for path in paths for row in completion_files.read_completions(path) if row.step == step]


class Change(NamedTuple):
    """A prompt whose completions were kept at two steps.

    means: of their rewards at each. before, after: of each step the completion whose reward is nearest to the mean.
    """

    means: tuple[float, float]
    before: CompletionRow
    after: CompletionRow


class Samples(NamedTuple):
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
    sets: dict[str, Kept] = {}
    for file in completion_files.completion_files(run_dir):
        if entries := completion_files.read_completions(file.path, ("step", "name", "reward")):
            kept = sets.setdefault(file.set, Kept(file.set, [], []))
            kept.files.append(file)
            kept.entries.extend(entries)
    if not sets:
        raise ConfigError(
            f"pgtk samples {run_dir} needs a run that kept completions (got none). Runs keep some with rollout=policy "
            "and rollout.keep_completions above 0; those of rollout=recorded are in rollout.path. Use "
            "rollout.keep_completions=8 in a new run."
        )
    return sets


def chosen_set(kept: dict[str, Kept], name: str | None) -> Kept:
    """The set of this name; None: that of an evaluation, whose prompts are the same each time, or else of training."""
    name = name or next((known for known in kept if known != completion_files.TRAINING), completion_files.TRAINING)
    if name not in kept:
        raise ConfigError(f"--set={name} needs one of {', '.join(kept)} (got {name}). Use --set={next(iter(kept))}.")
    return kept[name]


def samples(kept: Kept, step: int | None = None, since: int | None = None, count: int = 3) -> Samples:
    """A set at a step, and so many of the prompts that changed since another.

    step: None for the last. since: None for the first. Raises ConfigError for one without completions.
    """
    step = kept.steps[-1] if step is None else step
    for option, given in (("--step", step), ("--since", since)):
        known = kept.steps if option == "--step" else [known for known in kept.steps if known < step]
        if given not in (None, *known):
            needs = f"one of {_listed(known)}" if known else f"a step before {step}, which is the first"
            raise ConfigError(f"{option}={given} needs {needs} of {kept.set} (got {given}).")
    since = kept.steps[0] if since is None else since
    rewards: dict[str, dict[int, list[float]]] = {}  # of each prompt, by step
    for entry in kept.entries:
        if since <= entry.step <= step and entry.reward is not None:
            rewards.setdefault(entry.name, {}).setdefault(entry.step, []).append(entry.reward)
    again = {name: steps for name, steps in rewards.items() if len(steps) > 1}
    rises = {name: mean(steps[max(steps)]) - mean(steps[min(steps)]) for name, steps in again.items()}
    rising = sum(rise > 0 for rise in rises.values())
    falling = sum(rise < 0 for rise in rises.values())
    counts = (rising, falling, len(rises) - rising - falling)
    rows, changes = functools.cache(kept.rows), []
    for name in sorted(filter(rises.get, rises), key=lambda name: -abs(rises[name]))[:count]:
        first, last = min(again[name]), max(again[name])
        before, after = mean(again[name][first]), mean(again[name][last])
        changes.append(
            Change((before, after), _nearest(rows(first), name, before), _nearest(rows(last), name, after)),
        )
    return Samples(kept.set, step, rows(step), since, counts, changes)


def _nearest(rows: list[CompletionRow], name: str, reward: float) -> CompletionRow:
    """Return the row of a prompt whose reward is nearest to a number; of equal ones the first."""
    distances = [(row, abs(row.reward - reward)) for row in rows if row.name == name and row.reward is not None]
    return min(distances, key=lambda pair: pair[1])[0]


def render_samples(shown: Samples, kept: dict[str, Kept], run: str, count: int, lines: int) -> str:
    """For the terminal, at most WIDTH columns wide. run: as the user can paste it.

    count: completions of a kind. lines: of each text at most.
    """
    rewards = [row.reward for row in shown.rows if row.reward is not None]
    not_scored = [row for row in shown.rows if row.reward is None]
    means = f"mean reward of these {mean(rewards):.3f}" if rewards else "none of these was scored"
    if rewards and not_scored:
        means = f"{len(not_scored)} of these not scored, mean reward of the others {mean(rewards):.3f}"
    prompts = plural(len({row.name for row in shown.rows}), "prompt")
    page = folded(
        f"{legible(run)}: {shown.set}, step {shown.step}: {plural(len(shown.rows), 'completion')} kept of {prompts}, "
        f"{means}"
    )
    others = [f"{name} ({_listed(other.steps)})" for name, other in kept.items() if name != shown.set]
    if others:
        page += folded(f"Other sets: {', '.join(others)}")
    best, worst = best_and_worst([row for row in shown.rows if row.reward is not None], count)
    title = "Best" if worst or not rewards else f"All have reward {rewards[0]:.3f}; some of them"
    for name, rows in ((title, best), ("Worst", worst), ("Not scored, since scoring failed", not_scored[:count])):
        page += ["", name] if rows else []
        for row in rows:
            reward = "  -  " if row.reward is None else f"{row.reward:.3f}"
            page += folded(f"{reward}  {legible(row.name)}: {facts(row)}", "  ", " " * 9)
            page += _texts(row, {"completion": row}, lines)
    rose, fell, stayed = shown.counts
    changed = f"{rose} prompts better, {fell} worse, {stayed} the same (by mean reward of what was kept)"
    if not any(shown.counts):
        changed = "unknown, no prompt was asked twice; an evaluation (evaluation.every=20) asks the same ones each time"
    page += ["", *folded(f"Changed since step {shown.since}: {changed}")]
    for change in shown.changes:
        before, after = change.means
        page.append(f"  {before:.3f} -> {after:.3f}  {legible(change.after.name)}"[:WIDTH])
        page += _texts(change.after, {f"step {row.step}": row for row in (change.before, change.after)}, lines)
    return "\n".join(page)


def best_and_worst(rows: list[CompletionRow], count: int) -> tuple[list[CompletionRow], list[CompletionRow]]:
    """So many of either, each text of a prompt once; of equal rewards, several prompts come before one's second text.

    No reward is the lowest among the best, or the highest among the worst; where all are alike there is no worst.
    """
    rewards = [row.reward for row in rows if row.reward is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    times: Counter[tuple] = Counter()
    unlike = {}  # each with its place among those of its prompt with this reward
    for row in rows:
        if (text := (row.name, row.completion, row.reward)) not in unlike:
            unlike[text] = times[row.name, row.reward], row
            times[row.name, row.reward] += 1
    ordered = [row for _, row in sorted(unlike.values(), key=lambda pair: pair[0])]
    best = sorted((row for row in ordered if row.reward > low or low == high), key=lambda row: -row.reward)[:count]
    worst = [row for row in ordered if row.reward < high and row not in best]
    return best, sorted(worst, key=lambda row: row.reward)[:count]


def facts(row: CompletionRow) -> str:
    """What is known of a completion besides its texts."""
    parts = [f"{legible(name)} {score:.3g}" for name, score in row.rewards.items()]
    advantage = [] if row.advantage is None else [f"advantage {row.advantage:+.3f}"]
    ends = "cut off at the length limit" if row.finish_reason == "length" else "ended by itself"
    return ", ".join([*parts, *advantage, plural(row.tokens, "token"), ends, f"weights of update {row.version}"])


def html(kept: list[Kept], step: int | None, run: str, command: str) -> str:
    """The page of these sets. step: of this one alone. command: what has made the page."""
    files_of_sets = [file for completions in kept for file in completions.files]
    chosen, total = completion_files.some_completions(files_of_sets, MOST_COMPLETIONS, step)
    rows = _merged(chosen)
    count = f"{total:,} completion{'s' * (total != 1)}"
    if len(chosen) < total:
        count = f"{len(chosen):,} of {count}: all of some prompts, spread evenly"
    data = {"about": legible(f"{run}: {count}"), "rows": rows}
    # Whatever a model has written, nothing in it ends the script's element.
    written = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = files("pgtoolkit.comparison").joinpath("samples.html").read_text(encoding="utf-8")
    return re.sub("@(COMMAND|DATA)@", lambda mark: written if mark[1] == "DATA" else escape(legible(command)), page)


def _merged(rows: list[tuple[str, CompletionRow]]) -> list[dict]:
    """Return (set, row) for the page: equal completions of a prompt at a step once, with how many there are."""
    merged: dict[tuple, dict] = {}
    for name, row in rows:
        same = (name, row.step, row.name, row.prompt, row.completion, row.answer, row.reward, facts(row))
        if same not in merged:
            merged[same] = _plain(name, row) | {"times": 0}
        merged[same]["times"] += 1
    return list(merged.values())


def _plain(name: str, row: CompletionRow) -> dict:
    texts = {key: getattr(row, key) for key in ("prompt", "completion", "answer")}
    return {
        **{key: text and shortened(legible(text), MOST_CHARACTERS) for key, text in texts.items()},
        **{"set": name, "step": row.step, "name": legible(row.name), "tokens": row.tokens, "facts": facts(row)},
        "reward": row.reward if row.reward is not None and math.isfinite(row.reward) else None,
    }


def _texts(row, labelled, lines):
    """Its prompt, completions by their labels, and its answer, if it has one."""
    texts = {"prompt": row.prompt} | {label: other.completion for label, other in labelled.items()}
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
