"""What a run scored on held-out prompts, as evaluations.jsonl has it, and which of its steps was the best.

A line is a JSON object: one set of prompts at one step. Those of a step are written together, before the checkpoint of
that step, and a resume takes away those of later steps than its own. Step 0 is before the first update.

    {"step": 20, "time": 1763800000.1, "documents": 1280, "set": "held_out", "prompts": 128,
     "completions_per_prompt": 4, "avg": 0.41, "avg_error": 0.02, "pass@1": 0.12, "pass@1_error": 0.02, "pass@2": 0.19,
     "pass@2_error": 0.03, "pass@4": 0.27, "pass@4_error": 0.04, "length": 6.9, "truncated": 0.01, "seconds": 1.3}

documents: seen in training by then. avg: mean reward, of a prompt over its completions, then over prompts. pass@k: the
unbiased estimate of the probability that one of k completions is an exact match: the mean over prompts of
1 - C(n - c, k) / C(n, k), where c of a prompt's n completions are (arXiv 2107.03374). NAME_error: the standard error of
that mean, over prompts; missing where there is one prompt. length: mean tokens of a completion. truncated: share that
did not end by itself. seconds: that it took, which lie between the times of this step's row of metrics.jsonl and of the
next one. Further numbers are means of what the verifiers measure, such as reward/NAME.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from pgtoolkit.runs.records import read_evaluations


def best_of(rows: list[dict[str, Any]], watched: tuple[str, str], steps: Container[int]) -> dict[str, Any] | None:
    """The row with the highest value among those of these steps; None without any.

    Of equal ones, such as a pass@1 of 0 while nothing succeeds, that with the highest avg; of these the latest.

    watched: the name of the set, and of the number.
    """
    name, number = watched
    found = [row for row in rows if row["set"] == name and number in row and row["step"] in steps]
    return max(found, key=lambda row: (row[number], row["avg"], row["step"]), default=None)


def best_checkpoint(run_dir: Path, watched: tuple[str, str] | None) -> dict[str, Any] | None:
    """The row of the best step that a run has a checkpoint of; None without any, or without a number to go by."""
    if watched is None:
        return None
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    steps = {int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name)}
    return best_of(read_evaluations(run_dir), watched, steps)
