"""Tells what a run was trained with besides config.yaml: earlier values, data, user code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from pgtoolkit.runs.records import read_data, read_drift
from pgtoolkit.system.report import text

CONTENTS = "contents of "
"""Prefix of names for the files that a key names, as in `contents of task.path`."""

CODE = "code of "
"""Prefix of names for modules of the user's own, as in `code of my_rewards`."""

EVALUATION_CODE = "evaluation code of "
"""The same for modules that only evaluations import."""

Changes = list[tuple[int, object]]
"""Values in the order in which they were set, each with the step after which it was set."""


def trained_with(run_dir: Path, provenance: dict, steps: int) -> dict[str, object]:
    """Return, by name, what a run was trained with besides the values in its config.yaml.

    These are the values of keys that resumes have changed, in words where steps were made with
    several ("0.1 to step 4, then 0.2"), the contents of the files that keys name, and the code of
    modules of the user's own. Contents and code are digests of eight digits.
    steps: the number that the run has made.
    """
    histories = {
        **_changed_keys(read_drift(run_dir)),
        **_contents(read_data(run_dir)),
        **_code(provenance),
    }
    return {name: in_words(spans(changes, steps)) for name, changes in histories.items()}


def spans(changes: Iterable[tuple[int, object]], steps: int) -> Changes:
    """Return the values that steps were made with, each with the step after which it was used.

    changes: the first one is of step 0. A change at an earlier step than those before it replaces
        them, since the steps in between were made again.
    steps: the number that was made. A value that was set after them is left out.
    """
    result: Changes = []
    for step, value in changes:
        result = [span for span in result if span[0] < step]
        if not result or result[-1][1] != value:
            result.append((step, value))
    used = [span for span in result if span[0] < steps]
    return used or result[-1:]


def in_words(values: Changes) -> object:
    """Return the single value, or several in words: `0.1 to step 4, then 0.2`."""
    if len(values) == 1:
        return values[0][1]
    parts = [f"{text(value)} to step {end}" for (_, value), (end, _) in pairwise(values)]
    return ", then ".join([*parts, text(values[-1][1])])


def is_of_several(words: str) -> bool:
    """Return whether a text is that of `in_words` for steps with several values."""
    return re.search(r" to step \d+, then ", words) is not None


def values_of(words: str) -> Changes:
    """Return the values of texts without a space, such as digests, that `in_words` has described,
    each with the step after which it was used."""
    values: Changes = []
    start = 0
    for part in words.split(", then "):
        value, _, end = part.partition(" to step ")
        values.append((start, value))
        start = int(end or 0)
    return values


def _changed_keys(drift: list[dict]) -> dict[str, Changes]:
    histories: dict[str, Changes] = {}
    for entry in drift:
        for key, (before, after) in entry["changes"].items():
            histories.setdefault(key, [(0, before)]).append((entry["step"], after))
    return histories


def _contents(data: dict) -> dict[str, Changes]:
    accepted = data.get("accepted", [])
    histories = {}
    for key in data.keys() - {"accepted"}:
        # Each entry has the digests of the files before its step.
        changes = [entry for entry in accepted if key in entry["before"]]
        starts = [0, *(entry["step"] for entry in changes)]
        files = [*(entry["before"][key] for entry in changes), data[key]]
        histories[CONTENTS + key] = [*zip(starts, map(_digest, files), strict=True)]
    return histories


def _code(provenance: dict) -> dict[str, Changes]:
    histories: dict[str, Changes] = {}
    for start in [provenance, *provenance.get("resumed", [])]:
        step = start.get("step", 0)
        for kind, prefix in (("modules", CODE), ("evaluation_modules", EVALUATION_CODE)):
            for module, digest in start.get(kind, {}).items():
                histories.setdefault(prefix + module, []).append((step, digest))
    return histories


def _digest(files: dict[str, dict]) -> str:
    """Return a digest of the contents of files, in the order of their names but without these: data
    that was copied is the same data."""
    digests = [str(file.get("sha256")) for _, file in sorted(files.items())]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:8]
