"""What changed between two runs: configuration, code, packages, hardware."""

from __future__ import annotations

import hashlib
import sys
from itertools import zip_longest
from pathlib import Path

from pgtoolkit.comparison.terminal import aligned
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.provenance import last_start
from pgtoolkit.runs.records import known_provenance, read_config
from pgtoolkit.system.report import text
from pgtoolkit.system.shell import shell_path

_HARDWARE = ("host", "platform", "cpus", "memory", "gpus")


def render_diff(first: Path, second: Path) -> str:
    """The differences for the terminal; sections without any are named in the last line.

    Raises ConfigError for a folder that is no run.
    """
    for path in (first, second):
        if not is_run(path):
            raise not_a_run(f"pgtk diff {first} {second}", path, "two run directories")
    sections = {"configuration": config_drift(read_config(first)[0], read_config(second)[0])}
    known = {path: known_provenance(path) for path in (first, second)}
    notes = []
    if all(known.values()):
        before, after = map(last_start, (known[first], known[second]))
        sections["code"] = _code(before, after)
        packages = config_drift(_packages(before), _packages(after))
        sections["packages"] = {
            name: [version or "not installed" for version in pair] for name, pair in packages.items()
        }
        sections["hardware"] = config_drift(_hardware(before), _hardware(after))
        resumed = [shell_path(path) for path in known if known[path].get("resumed")]
        notes += [f"{path} was resumed: compared is its last start." for path in resumed]
    else:
        lacking = " and ".join(shell_path(path) for path in known if not known[path])
        notes.append(f"Code, packages and hardware are not known: no readable provenance.json in {lacking}.")
    lines = [f"A  {shell_path(first)}", f"B  {shell_path(second)}"]
    for title, changes in sections.items():
        if changes:
            rows = [[key, text(before), "->", text(after)] for key, (before, after) in changes.items()]
            lines += ["", title, *(f"  {line}" for line in aligned(rows, sys.maxsize))]
    same = [title for title, changes in sections.items() if not changes]
    if same:
        notes.insert(0, f"No difference in {', '.join(same)}.")
    return "\n".join([*lines, "", *notes]).rstrip()


def _code(one, other):
    changes = config_drift({"pgtoolkit": one.get("version")}, {"pgtoolkit": other.get("version")})
    # The same repository may lie in different places on two machines, so its place in the list says which it is.
    for a, b in zip_longest(one.get("git", []), other.get("git", [])):
        name = Path(str((a or b).get("path"))).name
        before, after = _commit(a), _commit(b)
        if before != after:
            changes[f"{name}: commit"] = [before, after]
        if (a or {}).get("diff") != (b or {}).get("diff"):
            changes[f"{name}: uncommitted"] = [_uncommitted(a), _uncommitted(b)]
    return changes


def _commit(repository):
    return (repository["commit"] or "none")[:12] if repository else "no repository"


def _uncommitted(repository):
    """How much was not committed, with a digest that tells other changes of the same size apart."""
    if not repository or not repository["diff"]:
        return "no changes"
    diff = repository["diff"]
    lines = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{added} -{removed} lines ({hashlib.sha256(diff.encode()).hexdigest()[:8]})"


def _packages(start):
    # Names that differ only in case or in - and _ are one package.
    packages = {name.lower().replace("_", "-"): version for name, version in start.get("packages", {}).items()}
    return {"python": start.get("python"), **packages}


def _hardware(start):
    known = {name: start.get(name) for name in _HARDWARE}
    known["memory"] = f"{start['memory_bytes'] / 2**30:.1f} GiB" if "memory_bytes" in start else None
    gpus = [" ".join(map(str, gpu.values())) for gpu in start.get("gpus", [])]
    known["gpus"] = ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or "none"
    return known
