"""`pgtk samples`: the best and the worst completions, and how answers changed; as a page too, by
samples.html."""

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
from pgtoolkit.runs.series import mean, without_rounding
from pgtoolkit.system.report import plural
from pgtoolkit.system.safe_text import legible, lines_of, shortened
from pgtoolkit.tracking.progress import WIDTH

MOST_COMPLETIONS = 2000
"""Completions on the page. With more of them a browser becomes slow."""

MOST_LOGGED = 60
"""The most characters that are shown of a text that a reward function has logged."""

MAX_CHARACTERS = 8000
"""Characters of each text on the page."""


@dataclass(frozen=True)
class Kept:
    """The completions of one set that a run kept.

    entries: all of them, but with their step, name and reward only.
    """

    set: str
    files: list[CompletionFile]
    entries: list[CompletionRow]

    @property
    def steps(self) -> list[int]:
        """The steps that have completions, in order."""
        return sorted({entry.step for entry in self.entries})

    def rows(self, step: int) -> list[CompletionRow]:
        """Return a step's completions with all that was kept of them, in the file's order."""
        rows: list[CompletionRow] = []
        for file in self.files:
            if file.first <= step <= file.last:
                rows += completion_files.read_completions(file.path)
        return [row for row in rows if row.step == step]


class Change(NamedTuple):
    """A prompt whose completions were kept at two steps.

    means: of the rewards at the first and at the second step.
    before, after: of the step with the lower mean the worst completion, of the other the best.
    """

    means: tuple[float, float]
    before: CompletionRow
    after: CompletionRow


class Samples(NamedTuple):
    """One set at one step, and how rewards changed since an earlier step.

    counts: of the prompts that were sampled more than once between the steps `since` and `step`,
        how many have a mean reward that rose, fell and stayed the same.
    num_between: of these prompts, those that have no reward at one of the two steps, and are
        compared at the first and the last step between them that has some.
    changes: the largest changes, in falling order.
    """

    set: str
    step: int
    rows: list[CompletionRow]
    since: int
    counts: tuple[int, int, int]
    num_between: int
    changes: list[Change]


def kept_by(run_dir: Path) -> dict[str, Kept]:
    """Return the sets of completions that a run kept, by name.

    Raises ConfigError if there is no run, or it kept nothing.
    """
    if not is_run(run_dir):
        raise not_a_run(f"pgtk samples {run_dir}", run_dir, "a run directory")
    sets: dict[str, Kept] = {}
    for file in completion_files.completion_files(run_dir):
        entries = completion_files.read_completions(file.path, ("step", "name", "reward"))
        if entries:
            kept = sets.setdefault(file.set, Kept(file.set, [], []))
            kept.files.append(file)
            kept.entries.extend(entries)
    if not sets:
        raise ConfigError(
            f"pgtk samples {run_dir} needs a run that kept completions (got none in "
            f"{run_dir / 'completions'}). Runs keep some with rollout=policy and "
            "rollout.keep_completions above 0; those of rollout=recorded are in rollout.path. Use "
            "rollout.keep_completions=8 in a new run."
        )
    return sets


def chosen_set(kept: dict[str, Kept], name: str | None) -> Kept:
    """Return the set of this name.

    name: None for a set of an evaluation, whose prompts are the same each time, or for that of
        training if there is no other.
    """
    if not name:
        evaluated = [known for known in kept if known != completion_files.TRAINING]
        name = evaluated[0] if evaluated else completion_files.TRAINING
    if name not in kept:
        raise ConfigError(
            f"--set={name} needs one of {', '.join(kept)} (got {name}). Use "
            f"--set={next(iter(kept))}."
        )
    return kept[name]


def samples(
    kept: Kept, step: int | None = None, since: int | None = None, count: int = 3
) -> Samples:
    """Return a set at a step, and the prompts whose rewards changed most since another step.

    step: None for the last.
    since: None for the first.
    count: the largest number of changes to return.
    Raises ConfigError for a step without completions.
    """
    steps = kept.steps
    if step is None:
        step = steps[-1]
    _check_step("--step", step, steps, step, kept.set)
    if since is None:
        since = steps[0]
    else:
        earlier = [known for known in steps if known < step]
        _check_step("--since", since, earlier, step, kept.set)
    repeated = _rewards_of_repeated(kept.entries, since, step)
    means = {
        name: (mean(by_step[min(by_step)]), mean(by_step[max(by_step)]))
        for name, by_step in repeated.items()
    }
    rises = {
        name: float(without_rounding(last - first, max(abs(first), abs(last))))
        for name, (first, last) in means.items()
    }
    rising = sum(rise > 0 for rise in rises.values())
    falling = sum(rise < 0 for rise in rises.values())
    counts = (rising, falling, len(rises) - rising - falling)
    ends = [(min(by_step), max(by_step)) for by_step in repeated.values()]
    num_between = sum(pair != (since, step) for pair in ends)
    rows_at = functools.cache(kept.rows)
    changed = [name for name, rise in rises.items() if rise]
    changes = []
    for name in sorted(changed, key=lambda name: -abs(rises[name]))[:count]:
        # The mean itself is often the reward of no completion.
        is_better = rises[name] > 0
        before = _extreme(rows_at(min(repeated[name])), name, not is_better)
        after = _extreme(rows_at(max(repeated[name])), name, is_better)
        changes.append(Change(means[name], before, after))
    return Samples(kept.set, step, rows_at(step), since, counts, num_between, changes)


def _rewards_of_repeated(
    entries: list[CompletionRow], since: int, step: int
) -> dict[str, dict[int, list[float]]]:
    """Return {prompt: {step: rewards}} of the prompts with rewards at several steps.

    since, step: the first and the last step that count.
    """
    rewards: dict[str, dict[int, list[float]]] = {}
    for entry in entries:
        if since <= entry.step <= step and entry.reward is not None:
            rewards.setdefault(entry.name, {}).setdefault(entry.step, []).append(entry.reward)
    return {name: by_step for name, by_step in rewards.items() if len(by_step) > 1}


def _check_step(option: str, number: int, known: list[int], step: int, set_name: str) -> None:
    """Refuse a number of a step that is not among the known ones.

    step: the step to show, which --since must be before.
    """
    if number not in known:
        needs = f"a step before {step}, which is the first"
        use = f"a later --step, or no {option}"
        if known:
            needs = f"one of {_listed(known)}"
            use = f"{option}={min(known, key=lambda step: abs(step - number))}"
        raise ConfigError(
            f"{option}={number} needs {needs} of {set_name} (got {number}). Use {use}."
        )


def _extreme(rows: list[CompletionRow], name: str, best: bool) -> CompletionRow:
    """Return the row of a prompt with the highest reward, or with best=False with the lowest, the
    first of equal ones."""
    scored = [
        (row, row.reward if best else -row.reward)
        for row in rows
        if row.name == name and row.reward is not None
    ]
    return max(scored, key=lambda pair: pair[1])[0]


def render_samples(shown: Samples, kept: dict[str, Kept], run: str, count: int, lines: int) -> str:
    """Return the samples for the terminal, at most WIDTH columns wide.

    run: as the user can paste it. count: the largest number of completions of each kind. lines: the
        largest number of lines of each text.
    """
    page = _heading(shown, run)
    others = [
        f"{name} ({_listed(other.steps)})" for name, other in kept.items() if name != shown.set
    ]
    if others:
        page += folded(f"Other sets: {', '.join(others)}")
    scored = [row for row in shown.rows if row.reward is not None]
    not_scored = [row for row in shown.rows if row.reward is None]
    best, worst = best_and_worst(scored, count)
    title = "Best"
    if scored and not worst:
        title = f"All have reward {scored[0].reward:z.3f}; some of them"
    page += _section(title, best, lines)
    page += _section("Worst", worst, lines)
    page += _section("Not scored, since scoring failed", not_scored[:count], lines)
    page += _changes(shown, lines)
    return "\n".join(page)


def _section(title: str, rows: list[CompletionRow], lines: int) -> list[str]:
    """Return the lines of completions under a title; [] without completions."""
    if not rows:
        return []
    page = ["", title]
    for row in rows:
        reward = "  -  " if row.reward is None else f"{row.reward:z.3f}"
        page += folded(f"{reward}  {legible(row.name)}: {facts(row)}", "  ", " " * 9)
        page += _texts(row, {"completion": row}, lines)
    return page


def _changes(shown: Samples, lines: int) -> list[str]:
    """Return lines with how many prompts changed since the earlier step, and which most."""
    if any(shown.counts):
        rose, fell, stayed = shown.counts
        changed = (
            f"{rose} prompts better, {fell} worse, {stayed} the same "
            "(by mean reward of the kept completions)"
        )
        if shown.num_between:
            changed += (
                f". {shown.num_between} of these {sum(shown.counts)} have no reward at step "
                f"{shown.since} or {shown.step}, and are compared at the first and the last step "
                "between them that has some"
            )
    else:
        changed = (
            "unknown, no prompt was asked twice; an evaluation (evaluation.every=20) asks "
            "the same ones each time"
        )
    page = ["", *folded(f"Changed since step {shown.since}: {changed}")]
    for change in shown.changes:
        before, after = change.means
        rewards = " and ".join(f"{row.reward:z.3f}" for row in (change.before, change.after))
        line = f"{before:z.3f} -> {after:z.3f}  {legible(change.after.name)}"
        page += folded(f"{line}: mean rewards; these two have {rewards}", "  ", " " * 9)
        labelled = {f"step {row.step}": row for row in (change.before, change.after)}
        page += _texts(change.after, labelled, lines)
    return page


def _heading(shown: Samples, run: str) -> list[str]:
    """Return lines with the set, the step, how many completions it has, and their mean reward."""
    rewards = [row.reward for row in shown.rows if row.reward is not None]
    not_scored = len(shown.rows) - len(rewards)
    if not rewards:
        means = "none of these was scored"
    elif not_scored:
        means = f"{not_scored} of these not scored, mean reward of the others {mean(rewards):z.3f}"
    else:
        means = f"mean reward of these {mean(rewards):z.3f}"
    completions = plural(len(shown.rows), "completion")
    prompts = plural(len({row.name for row in shown.rows}), "prompt")
    return folded(
        f"{legible(run)}: {shown.set}, step {shown.step}: {completions} kept of {prompts}, {means}"
    )


def best_and_worst(
    rows: list[CompletionRow], count: int
) -> tuple[list[CompletionRow], list[CompletionRow]]:
    """Return at most `count` rows with the highest and with the lowest rewards. All have a reward.

    A text that a prompt has several times comes once. Among equal rewards the first texts of all
    prompts come before any prompt's second text. The lowest reward is not among the best, nor the
    highest among the worst; where all rewards are equal there is no worst.
    """
    rewards = [row.reward for row in rows if row.reward is not None]
    low = min(rewards, default=0.0)
    high = max(rewards, default=0.0)
    times: Counter[tuple] = Counter()
    # Each text with its place among the texts of its prompt that have the same reward.
    distinct = {}
    for row in rows:
        text = (row.name, row.completion, row.reward)
        if text not in distinct:
            distinct[text] = (times[row.name, row.reward], row)
            times[row.name, row.reward] += 1
    ordered = [row for _, row in sorted(distinct.values(), key=lambda pair: pair[0])]
    candidates = [row for row in ordered if row.reward > low or low == high]
    best = sorted(candidates, key=lambda row: -row.reward)[:count]
    others = [row for row in ordered if row.reward < high and row not in best]
    worst = sorted(others, key=lambda row: row.reward)[:count]
    return best, worst


def facts(row: CompletionRow) -> str:
    """Return a line about a completion: whether it is right or could not be scored, the parts of
    its reward, what was logged, its advantage, length and end, and the weights that wrote it."""
    # In files of earlier versions a completion without a reward counts as not right.
    score_failed = row.score_failed or row.reward is None
    parts = []
    if row.exact_match:
        parts.append("right")
    elif row.exact_match is False and not score_failed:
        parts.append("wrong")
    if score_failed:
        parts.append("scoring failed")
    parts += [f"{legible(name)} {score:.3g}" for name, score in row.rewards.items()]
    parts += [f"{legible(name)} {_cut(legible(text))}" for name, text in row.logged.items()]
    if row.advantage is not None:
        parts.append(f"advantage {row.advantage:+z.3f}")
    is_cut_off = row.finish_reason == "length"
    parts += [
        plural(row.tokens, "token"),
        "cut off at the length limit" if is_cut_off else "ended by itself",
        f"weights of update {row.version}",
    ]
    return ", ".join(parts)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LOGGED else text[:MOST_LOGGED] + " …"


def html(kept: list[Kept], step: int | None, run: str, command: str) -> str:
    """Return the page of these sets.

    step: the only step on it; None for all. command: shown as the one that made the page.
    """
    files_of_sets = [file for completions in kept for file in completions.files]
    chosen, total = completion_files.some_completions(files_of_sets, MOST_COMPLETIONS, step)
    rows = _merged(chosen)
    count = f"{total:,} completion{'s' * (total != 1)}"
    if len(chosen) < total:
        count = f"{len(chosen):,} of {count}: all of some prompts, spread evenly"
    data = {"about": legible(f"{run}: {count}"), "rows": rows}
    # Only "<" could end the script's element, whatever a model has written.
    script = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = files("pgtoolkit.comparison").joinpath("samples.html").read_text(encoding="utf-8")
    contents = {"COMMAND": escape(legible(command)), "DATA": script}
    # In one pass, since the texts of one may hold the mark of the other.
    return re.sub("@(COMMAND|DATA)@", lambda mark: contents[mark[1]], page)


def _merged(rows: list[tuple[str, CompletionRow]]) -> list[dict]:
    """Return the rows of the page from (set, row) pairs.

    Completions of a prompt at a step that are equal come once, with their number.
    """
    merged: dict[tuple, dict] = {}
    for set_name, row in rows:
        same = (
            set_name,
            row.step,
            row.name,
            row.prompt,
            row.completion,
            row.answer,
            row.reward,
            facts(row),
        )
        if same not in merged:
            merged[same] = _page_row(set_name, row) | {"times": 0}
        merged[same]["times"] += 1
    return list(merged.values())


def _page_row(set_name: str, row: CompletionRow) -> dict:
    """Return a row as the page's script reads it; a reward that JSON does not have is null."""
    texts = {"prompt": row.prompt, "completion": row.completion, "answer": row.answer}
    has_number = row.reward is not None and math.isfinite(row.reward)
    return {
        **{key: text and shortened(legible(text), MAX_CHARACTERS) for key, text in texts.items()},
        "set": set_name,
        "step": row.step,
        "name": legible(row.name),
        "tokens": row.tokens,
        "facts": facts(row),
        "reward": row.reward if has_number else None,
    }


def _texts(row: CompletionRow, labelled: dict[str, CompletionRow], lines: int) -> list[str]:
    """Return lines with the row's prompt, the labelled completions, and the row's answer if any."""
    texts = {"prompt": row.prompt}
    texts |= {label: other.completion for label, other in labelled.items()}
    if row.answer:
        texts["answer"] = row.answer
    page = []
    for label, text in texts.items():
        room = WIDTH - 4 - max(10, len(label)) - 2
        for place, line in enumerate(lines_of(text, room, lines)):
            page.append(f"    {label if place == 0 else '':<10}  {line}")
    return page


def _listed(steps: list[int]) -> str:
    """Return the steps in words: up to six by their numbers, more by their count with the first and
    the last."""
    if len(steps) <= 6:
        return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
