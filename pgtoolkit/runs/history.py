"""What a run was trained with beside its configuration: earlier values, the contents of its data,
the user's code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from pgtoolkit.runs.records import read_data, read_drift
from pgtoolkit.system.report import text

CONTENTS = "contents of "
"""Begins the name of a key whose files are meant: `contents of task.path`."""

CODE = "code of "
"""Begins the name of a module of the user's own: `code of my_rewards`."""

EVALUATION_CODE = "evaluation code of "
"""The same of modules that nothing but an evaluation imports."""


def trained_with(run_dir: Path, provenance: dict, steps: int) -> dict[str, Any]:
    """Return what a run was trained with, as far as its config.yaml does not say it, by name.

    These are the values of keys that resumes have changed, in words where steps were made with
    several ("0.1 to step 4, then 0.2"); the contents of the files that each key names; and the
    code of each module of the user's own. Contents and code are digests in eight digits.
    steps: that the run has made.
    """
    histories = {
        **_changed_keys(read_drift(run_dir)),
        **_contents(read_data(run_dir)),
        **_code(provenance),
    }
    return {name: in_words(spans(changes, steps)) for name, changes in histories.items()}


def spans(changes: Iterable[tuple[int, Any]], steps: int) -> list[tuple[int, Any]]:
    """Return the values that steps were made with, each with the step after which it began to hold.

    changes: (step, value) in the order in which they were made; the first one is of step 0. One
    that goes back before an earlier one takes its place, since the steps in between are made again.
    steps: that were made. A value that came after the last of them is left out.
    """
    found: list[tuple[int, Any]] = []
    for step, value in changes:
        found = [span for span in found if span[0] < step]
        if not found or found[-1][1] != value:
            found.append((step, value))
    used = [span for span in found if span[0] < steps]
    return used or found[-1:]


def in_words(values: list[tuple[int, Any]]) -> Any:
    """Return the value; of several: `0.1 to step 4, then 0.2`."""
    if len(values) == 1:
        return values[0][1]
    parts = [f"{text(value)} to step {end}" for (_, value), (end, _) in pairwise(values)]
    return ", then ".join([*parts, text(values[-1][1])])


def _changed_keys(drift: list[dict]) -> dict[str, list[tuple[int, Any]]]:
    histories: dict[str, list[tuple[int, Any]]] = {}
    for entry in drift:
        for key, (before, after) in entry["changes"].items():
            histories.setdefault(key, [(0, before)]).append((entry["step"], after))
    return histories


def _contents(data: dict) -> dict[str, list[tuple[int, Any]]]:
    accepted = data.get("accepted", [])
    histories = {}
    for key in data.keys() - {"accepted"}:
        # An entry has the files as they were before its step.
        changes = [entry for entry in accepted if key in entry["before"]]
        starts = [0, *(entry["step"] for entry in changes)]
        files = [*(entry["before"][key] for entry in changes), data[key]]
        histories[CONTENTS + key] = [*zip(starts, map(_digest, files), strict=True)]
    return histories


def _code(provenance: dict) -> dict[str, list[tuple[int, Any]]]:
    histories: dict[str, list[tuple[int, Any]]] = {}
    for start in [provenance, *provenance.get("resumed", [])]:
        for kind, prefix in (("modules", CODE), ("evaluation_modules", EVALUATION_CODE)):
            for module, digest in start.get(kind, {}).items():
                histories.setdefault(prefix + module, []).append((start.get("step", 0), digest))
    return histories


def _digest(files: dict[str, dict]) -> str:
    known = sorted((name, str(file.get("sha256"))) for name, file in files.items())
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:8]
