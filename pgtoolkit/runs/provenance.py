"""Provenance: the code, packages, hardware and command of a run, but no environment or secrets."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import pgtoolkit
from pgtoolkit.runs.modules import module_digests
from pgtoolkit.runs.records import TIME, known_provenance
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.redaction import SECRET_FILES, redact

DIFF_LIMIT = 256 * 1024
"""Characters of uncommitted changes that are kept of each repository."""

_MAX_UNTRACKED = 100


class Repository(TypedDict):
    """The state of a git repository at a run's start.

    diff: against the commit, at most DIFF_LIMIT characters, with secrets hidden.
    diff_left_out: changed files with names of secrets.
    untracked: names of files.
    """

    path: str
    commit: str | None
    branch: str | None
    diff: str
    diff_truncated: bool
    diff_left_out: list[str]
    untracked: list[str]


def collect(
    argv: list[str],
    step: int = 0,
    modules: Iterable[str] = (),
    evaluation_modules: Iterable[str] = (),
) -> JsonObject:
    """Return what is needed of this process to repeat its run, as plain JSON values.

    argv: the command line, usually sys.argv.
    step: after which the run continues.
    modules: names of the user's own modules that steps depend on.
    evaluation_modules: names of those that evaluations depend on.

    `modules` and `evaluation_modules` of the result have digests, by `module_digests`; a module
    that both import is in the first. `git` lists the repository from which the package runs (none
    for an installed package) and that of the current directory, if it is another, each as a
    `Repository`. `gpus` come from nvidia-smi.
    """
    digests = module_digests(modules)
    evaluation_digests = module_digests(evaluation_modules)
    return {
        "time": time.strftime(TIME),
        "command": [redact(argument) for argument in argv],
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "version": pgtoolkit.__version__,
        "git": _repositories(Path(pgtoolkit.__file__).parent, Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "cpus": {"machine": os.cpu_count(), "usable": len(os.sched_getaffinity(0))},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus(),
        "step": step,
        "modules": digests,
        "evaluation_modules": {
            name: digest for name, digest in evaluation_digests.items() if name not in digests
        },
    }


def last_start(provenance: dict) -> dict:
    """Return the part of provenance.json on a run's last start."""
    return (provenance.get("resumed") or [provenance])[-1]


def changed_modules(run_dir: Path) -> list[str]:
    """Return the user's own modules that are other code now than at the last start of a run."""
    return [*_changed(last_start(known_provenance(run_dir)).get("modules", {}))]


def changed_code(run_dir: Path) -> dict[str, list[str]]:
    """Return what `changed_modules` names, and modules of evaluations, with [old, new] digests."""
    start = last_start(known_provenance(run_dir))
    return _changed(start.get("modules", {}) | start.get("evaluation_modules", {}))


def _changed(started_with: dict[str, str]) -> dict[str, list[str]]:
    """Return the modules that are other code now than by these digests, with [old, new] ones."""
    now = module_digests(started_with)
    return {
        name: [digest, now[name]]
        for name, digest in started_with.items()
        if now.get(name, digest) != digest
    }


def code_of(provenance: dict) -> tuple[tuple[str | None, str], ...]:
    """Return (commit, uncommitted changes) of each repository at a run's last start."""
    return tuple(
        (repository.get("commit"), repository["diff"])
        for repository in last_start(provenance).get("git", [])
    )


def commit_text(commit: str | None, changes: str) -> str:
    """Return a short commit with a digest of uncommitted changes, equal for equal code only."""
    digest = f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return f"{(commit or 'none')[:12]}{digest}"


@functools.cache
def _packages() -> dict[str, str]:
    """Return the versions of installed packages, by their names in alphabetical order."""
    # A list, since each access to `metadata` parses the file again.
    all_metadata = [distribution.metadata for distribution in importlib.metadata.distributions()]
    versions = {
        metadata["Name"]: metadata["Version"] for metadata in all_metadata if metadata["Name"]
    }
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _repositories(package: Path, directory: Path) -> list[Repository]:
    folders = [directory]
    # A package that is installed below some repository, as in a .venv, is not tracked by it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        folders.insert(0, package)
    tops = [_git_line(folder, "rev-parse", "--show-toplevel") for folder in folders]
    return [_repository(top) for top in dict.fromkeys(tops) if top]


def _repository(top: str) -> Repository:
    command = (
        "diff",
        "HEAD",
        "--submodule=short",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--no-renames",
    )
    without_secrets = (f":(top,exclude,glob,icase)**/{name}" for name in SECRET_FILES)
    diff = _git(top, *command, "--", ":/", *without_secrets) or ""
    secrets = (f":(top,glob,icase)**/{name}" for name in SECRET_FILES)
    left_out = _git(top, *command, "--name-only", "--", *secrets) or ""
    untracked = (_git(top, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "path": top,
        "commit": _git_line(top, "rev-parse", "--verify", "HEAD"),
        "branch": _git_line(top, "symbolic-ref", "--short", "HEAD"),
        "diff": redact(diff[:DIFF_LIMIT]),
        "diff_truncated": len(diff) > DIFF_LIMIT,
        "diff_left_out": left_out.splitlines()[:_MAX_UNTRACKED],
        "untracked": untracked[:_MAX_UNTRACKED],
    }


def _git_line(directory: Path | str, *arguments: str) -> str | None:
    return (_git(directory, *arguments) or "").strip() or None


def _git(directory: Path | str, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails."""
    # Without optional locks, since many jobs may ask at once, and without programs that the
    # repository's configuration names.
    command = [
        "git",
        "--no-optional-locks",
        "-c",
        "core.fsmonitor=false",
        "-c",
        f"core.hooksPath={os.devnull}",
    ]
    try:
        output = subprocess.run(
            [*command, "-C", str(directory), *arguments], capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.decode("utf-8", errors="replace")


def gpus() -> list[dict[str, str]]:
    """Return name, memory (such as "143771 MiB") and driver of each GPU of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # without nvidia-smi there is no GPU
        return []
    rows = [map(str.strip, line.split(",")) for line in listing.splitlines()]
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows]


@functools.cache
def gpu_memory() -> float | None:
    """Return the bytes of memory of the smallest GPU; None where there is none."""
    return min((float(gpu["memory"].split()[0]) * 2**20 for gpu in gpus()), default=None)
