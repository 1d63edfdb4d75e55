"""Compares two folders of records: failures, wanted differences, additions, and texts."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from working_copy import HERE


def allowed() -> list[tuple[re.Pattern, str]]:
    """Return the patterns of allowed.txt with their reasons.

    A line is `PATTERN -- reason`, and a pattern is matched with `part/path: difference`.
    """
    file = HERE / "allowed.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    pairs = [line.rsplit(" -- ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(re.compile(pattern.strip()), reason) for pattern, reason in pairs]


def compare(base: Path, out: Path, texts: bool) -> bool:
    """Print the differences of two folders of records; return True if some are failures.

    texts: True to print how texts differ.
    """
    failures: list[str] = []
    permitted: list[str] = []
    additions: list[str] = []
    changed_texts: list[tuple[str, object, object]] = []
    rules = allowed()

    def differs(path: str, difference: str) -> None:
        line = f"{path}: {difference}"
        for pattern, reason in rules:
            if pattern.search(line):
                permitted.append(f"{line}  ({reason})")
                return
        failures.append(line)

    def walk(path: str, before: object, now: object) -> None:
        name = path.rpartition("/")[2]
        if name.startswith("~"):
            if before != now:
                changed_texts.append((path, before, now))
        elif isinstance(before, dict) and isinstance(now, dict):
            for key in before:
                if key.startswith("~") and key not in now:
                    continue
                if key not in now:
                    differs(f"{path}/{key}", "is gone")
                else:
                    walk(f"{path}/{key}", before[key], now[key])
            additions.extend(f"{path}/{key}: {short(now[key])}" for key in now if key not in before)
        elif isinstance(before, list) and isinstance(now, list) and path.endswith(tuple(SETS)):
            for value in before:
                if value not in now:
                    differs(f"{path}/{short(value)}", "is gone")
            additions.extend(f"{path}/{short(value)}" for value in now if value not in before)
        elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            for number, (was, has) in enumerate(zip(before, now, strict=False)):
                walk(f"{path}/{number}", was, has)
        elif before != now or type(before) is not type(now):
            differs(path, f"{short(before)} -> {short(now)}")

    for file in sorted(base.glob("*.json")):
        if file.stem == "about":
            continue
        other = out / file.name
        if other.exists():
            walk(file.stem, json.loads(file.read_text()), json.loads(other.read_text()))
        else:
            failures.append(f"{file.stem}: was not recorded")
    if texts:
        for path, before, now in changed_texts:
            print(f"--- {path}")
            lines = difflib.unified_diff(lines_of(before), lines_of(now), lineterm="", n=0)
            print("\n".join(list(lines)[2:]))
    show(
        "Texts that differ (may change; --texts prints them)", [path for path, *_ in changed_texts]
    )
    show("New", collapse(additions))
    show("Allowed", permitted)
    show("FAILURES", failures)
    commits = [json.loads((folder / "about.json").read_text())["commit"] for folder in (base, out)]
    print(
        f"{commits[0]} -> {commits[1]}: {len(failures)} failures, {len(permitted)} allowed, "
        f"{len(additions)} new, {len(changed_texts)} texts differ"
    )
    return bool(failures)


SETS = (
    "public/in __all__",
    "public/metrics",
    "public/sweeps",
    *(
        f"public/commands/{n}"
        for n in (
            "compare",
            "check",
            "sweep",
            "resume",
            "continue",
            "evaluate",
            "explain",
            "export",
            "samples",
            "solutions",
            "sync",
            "tokens",
            "ui",
            "convert",
            "diff",
            "doctor",
            "plan",
        )
    ),
    *(
        f"public/groups/{n}"
        for n in (
            "loss",
            "aggregation",
            "correction",
            "kl",
            "entropy",
            "metrics",
            "advantage",
            "kernel",
            "parallelism",
            "accumulation",
            "model",
            "task",
            "rollout",
            "sampler",
            "optimizer",
            "evaluation",
            "trainer",
            "tracking",
            "experiment",
            "debug",
            "hydra/launcher",
            "hydra/sweeper",
        )
    ),
)
"""Lists to which something may be added."""


def lines_of(value: object) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value, indent=1)
    return text.splitlines()


def collapse(additions: list[str]) -> list[str]:
    """Return the additions, with a key that is new in every configuration only once."""
    counts: dict[str, int] = {}
    for line in additions:
        merged = re.sub(r"^configurations/[^/]*/", "configurations/*/", line)
        counts[merged] = counts.get(merged, 0) + 1
    return [
        f"{line}" + (f"  ({count} times)" if count > 1 else "") for line, count in counts.items()
    ]


def short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 160 else text[:150] + " ..."


def show(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title} ({len(lines)})")
        for line in lines[:200]:
            print(f"  {line}")
