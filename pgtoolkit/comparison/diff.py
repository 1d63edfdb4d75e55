"""Finds what changed between two runs: configuration, code, packages, hardware."""

from __future__ import annotations

from pathlib import Path

from pgtoolkit.config.keys import shown
from pgtoolkit.config.own_code import with_defaults
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.history import CODE
from pgtoolkit.runs.modules import COPIES
from pgtoolkit.runs.provenance import code_of, commit_text, last_start
from pgtoolkit.runs.records import known_provenance, leaves, read_data, read_resolved
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.report import shell_path, text


def render_diff(first: Path, second: Path) -> str:
    """Return the differences for the terminal; sections without any are named below the others."""
    configs = [_config(path) for path in (first, second)]
    sections = {"configuration": config_drift(*configs)}
    contents = [read_data(path) for path in (first, second)]
    known = {path: known_provenance(path) for path in (first, second)}
    notes = []
    if all(known.values()):
        facts_before = _facts(known[first])
        facts_after = _facts(known[second])
        for title in facts_before:
            sections[title] = config_drift(facts_before[title], facts_after[title])
        resumed = [shell_path(path) for path in known if known[path].get("resumed")]
        notes += [f"{path} was resumed: compared is its last start." for path in resumed]
    else:
        missing = " and ".join(shell_path(path) for path in known if not known[path])
        notes.append(
            f"Code, packages and hardware are not known: no readable provenance.json in {missing}."
        )
    lines = [f"A  {shell_path(first)}", f"B  {shell_path(second)}"]
    for title, changes in sections.items():
        if changes:
            rows = [
                [shown(key), text(before), "->", text(after) + _remark(key, contents)]
                for key, (before, after) in changes.items()
            ]
            lines += ["", title, *(f"  {line}" for line in aligned(rows))]
    same = [title for title, changes in sections.items() if not changes]
    if same:
        notes.insert(0, f"No difference in {', '.join(same)}.")
    return "\n".join([*lines, "", *notes]).rstrip()


def _config(path: Path) -> dict[str, object]:
    values = dict(leaves(read_resolved(path)))
    modules = last_start(known_provenance(path)).get("modules", {})
    digests = {f"{CODE}{module}": digest for module, digest in modules.items()}
    return with_defaults(values, path / COPIES, digests)


def _remark(key: str, contents: list[dict]) -> str:
    """Return a remark on a path under which both runs read the same data. contents: data.json."""
    digests = [
        [file["sha256"] for _, file in sorted(data.get(key, {}).items())] for data in contents
    ]
    return "  (the same contents)" if digests[0] and digests[0] == digests[1] else ""


def _facts(provenance: dict) -> dict[str, dict]:
    """Return {section: {name: value}} of a run's last start. Uncommitted changes are shown as a
    digest beside the commit."""
    start = last_start(provenance)
    # Names that differ only in case or in - and _ are one package.
    packages = {
        name.lower().replace("_", "-"): version
        for name, version in start.get("packages", {}).items()
    }
    gpus = [" ".join(map(str, gpu.values())) for gpu in start.get("gpus", [])]
    hardware = {name: start.get(name) for name in ("host", "platform", "cpus", "memory_bytes")}
    hardware["gpus"] = (
        ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or "none"
    )
    commits = " ".join(commit_text(*pair) for pair in code_of(provenance))
    modules = {**start.get("modules", {}), **start.get("evaluation_modules", {})}
    return {
        "code": {
            "pgtoolkit": start.get("version"),
            "commit": commits or "no repository",
            **modules,
        },
        "packages": {"python": start.get("python"), **packages},
        "hardware": hardware,
    }
