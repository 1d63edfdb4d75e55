"""What differs between two folders of records: failures, what is wanted, what is new, and texts."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from working_copy import HERE


def allowed() -> list[tuple[re.Pattern, str]]:
    """Patterns of allowed.txt: `PATTERN -- reason`, matched with `part/path: what differs`."""
    lines = (
        (HERE / "allowed.txt").read_text().splitlines() if (HERE / "allowed.txt").exists() else []
    )
    pairs = [line.rsplit(" -- ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(re.compile(pattern.strip()), reason) for pattern, reason in pairs]


def compare(base: Path, out: Path, texts: bool) -> int:
    failures, permitted, additions, changed_texts = [], [], [], []
    rules = allowed()

    def differs(path: str, what: str) -> None:
        line = f"{path}: {what}"
        for pattern, reason in rules:
            if pattern.search(line):
                permitted.append(f"{line}  ({reason})")
                return
        failures.append(line)

    def walk(path: str, before, now) -> None:
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
        if file.stem != "about":
            if not (out / file.name).exists():
                failures.append(f"{file.stem}: was not recorded")
            else:
                walk(
                    file.stem,
                    json.loads(file.read_text()),
                    json.loads((out / file.name).read_text()),
                )
    for path, before, now in changed_texts if texts else ():
        print(f"--- {path}")
        if not isinstance(before, str):
            before, now = json.dumps(before, indent=1), json.dumps(now, indent=1)
        print(
            "\n".join(
                list(difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0))[
                    2:
                ]
            )
        )
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


def collapse(additions: list[str]) -> list[str]:
    """A new key stands in every configuration: said once."""
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
