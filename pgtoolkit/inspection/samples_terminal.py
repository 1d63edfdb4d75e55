"""Completions on the terminal: the best and the worst of a step, and prompts whose answers changed."""

from __future__ import annotations

import textwrap
from collections import Counter

from pgtoolkit.inspection.samples import Change, Kept, Samples, listed
from pgtoolkit.runs.completions import CompletionRow
from pgtoolkit.runs.series import mean
from pgtoolkit.system.legible import legible, lines_of
from pgtoolkit.system.report import plural
from pgtoolkit.tracking.progress import WIDTH


def page(found: Samples, kept: dict[str, Kept], run: str, count: int, lines: int) -> str:
    """For the terminal, at most WIDTH columns wide. run: as the user can paste it.

    count: completions of a kind. lines: of each text at most.
    """
    rewards = [row.reward for row in found.rows]
    prompts = plural(len({row.name for row in found.rows}), "prompt")
    shown = _folded(
        f"{legible(run)}: {found.set}, step {found.step}: {plural(len(rewards), 'completion')} kept of {prompts}, mean "
        f"reward of these {mean(rewards):.3f}"
    )
    others = [f"{name} ({listed(one.steps)})" for name, one in kept.items() if name != found.set]
    if others:
        shown += _folded(f"Other sets: {', '.join(others)}")
    times = Counter(map(_as_shown, found.rows))
    best, worst = best_and_worst(found.rows, count)
    title = "Best" if worst else f"All have reward {rewards[0]:.3f}; some of them"
    for name, rows in ((title, best), ("Worst", worst)):
        if rows:
            shown += ["", name, *(line for row in rows for line in _row(row, times[_as_shown(row)], lines))]
    shown += ["", *_folded(_changes(found))]
    return "\n".join([*shown, *(line for change in found.changes for line in _change(change, lines))])


def best_and_worst(rows: list[CompletionRow], count: int) -> tuple[list[CompletionRow], list[CompletionRow]]:
    """So many of either, each text of a prompt once; of equal rewards, several prompts come before one's second text.

    No reward is the lowest among the best, or the highest among the worst; where all are alike there is no worst.
    """
    unlike = list({_as_shown(row): row for row in reversed(rows)}.values())[::-1]
    low, high = min(row.reward for row in rows), max(row.reward for row in rows)
    seen: Counter[tuple] = Counter()
    places = {}  # of each among those of its prompt with this reward
    for row in unlike:
        places[_as_shown(row)] = seen[row.name, row.reward]
        seen[row.name, row.reward] += 1
    best = [row for row in unlike if row.reward > low or low == high]
    best = sorted(best, key=lambda row: (-row.reward, places[_as_shown(row)]))[:count]
    worst = [row for row in unlike if row.reward < high and row not in best]
    return best, sorted(worst, key=lambda row: (row.reward, places[_as_shown(row)]))[:count]


def _as_shown(row):
    return row.name, row.completion, row.reward


def facts(row: CompletionRow) -> str:
    """What is known of a completion besides its texts."""
    parts = [f"{legible(name)} {score:.3g}" for name, score in row.rewards.items()]
    advantage = [] if row.advantage is None else [f"advantage {row.advantage:+.3f}"]
    ends = "cut off at its longest" if row.finish_reason == "length" else "ended by itself"
    return ", ".join([*parts, *advantage, plural(row.tokens, "token"), ends, f"weights of update {row.version}"])


def _row(row, times, lines):
    again = f", {times} times" if times > 1 else ""
    shown = _folded(f"{row.reward:.3f}  {legible(row.name)}: {facts(row)}{again}", "  ", " " * 9)
    shown += _text("prompt", row.prompt, lines) + _text("completion", row.completion, lines)
    return shown + (_text("answer", row.answer, lines) if row.answer else [])


def _change(change: Change, lines):
    before, after = change.means
    shown = [f"  {before:.3f} -> {after:.3f}  {legible(change.name)}"[:WIDTH]]
    shown += _text("prompt", change.after.prompt, lines)
    for row in (change.before, change.after):
        shown += _text(f"step {row.step}", row.completion, lines)
    return shown + (_text("answer", change.after.answer, lines) if change.after.answer else [])


def _changes(found):
    rose, fell, stayed = found.counts
    if not any(found.counts):
        again = "evaluations ask the same prompts each time" if found.set == "training" else "there is one evaluation"
        return f"Changed since: no prompt has completions at two steps up to {found.step}; {again}."
    how = f"{rose} better, {fell} worse, {stayed} the same, by the mean reward of what was kept of a prompt"
    return f"Changed since step {found.since}: {how}"


def _text(label, text, lines):
    label = f"    {label:<10}  "
    own = lines_of(text, WIDTH - len(label), lines)
    return [(label if place == 0 else " " * len(label)) + line for place, line in enumerate(own)]


def _folded(sentence, indent="", further=""):
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=further)
