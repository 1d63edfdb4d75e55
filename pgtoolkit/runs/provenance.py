"""Provenance: which code, packages, hardware and command made a run. Never the environment, never a
secret."""

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
from typing import Any

from pgtoolkit.runs.modules import module_digests
from pgtoolkit.runs.records import TIME
from pgtoolkit.system.redaction import SECRET_FILES, redact

DIFF_LIMIT = 256 * 1024
"""Most characters of uncommitted changes that are kept for each repository."""

_MAX_UNTRACKED = 100


def collect(
    argv: list[str],
    step: int = 0,
    modules: Iterable[str] = (),
    evaluation_modules: Iterable[str] = (),
) -> dict[str, Any]:
    """Return everything about this process that is needed to do its run again, as plain JSON
    values.

    argv: the command line, usually sys.argv. step: that the run goes on from. modules: the names of
    the user's own that a step depends on; evaluation_modules: that an evaluation depends on. Of
    them `modules` and `evaluation_modules` hold digests, by `module_digests`; a module that both
    import is in the first. `git` lists the repository the package runs from (none for an installed
    package) and the one of the current directory, where they differ; each with path, commit,
    branch, diff (against the commit, at most DIFF_LIMIT characters, with secrets hidden),
    diff_truncated, diff_left_out (changed files that are named as secrets are) and untracked (names
    only). `gpus` come from nvidia-smi.
    """
    import pgtoolkit

    digests = module_digests(modules)
    evaluated = module_digests(evaluation_modules)
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
            name: digest for name, digest in evaluated.items() if name not in digests
        },
    }


def last_start(provenance: dict) -> dict:
    """What provenance.json says of a run's last start."""
    return (provenance.get("resumed") or [provenance])[-1]


def code_of(provenance: dict) -> tuple:
    """(commit, uncommitted changes) of each repository behind the last start of a run."""
    return tuple(
        (repository.get("commit"), repository["diff"])
        for repository in last_start(provenance).get("git", [])
    )


def commit_text(commit: str | None, changes: str) -> str:
    """The commit in short, with a digest of what was not committed: equal exactly for equal
    code."""
    digest = f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return f"{(commit or 'none')[:12]}{digest}"


@functools.cache
def _packages():
    # Each access to `metadata` parses the file again.
    found = [dist.metadata for dist in importlib.metadata.distributions()]
    versions = {metadata["Name"]: metadata["Version"] for metadata in found if metadata["Name"]}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _repositories(package, directory):
    # A package installed below some repository (in a .venv, say) is not that repository's code: ask
    # for a tracked file.
    is_tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    tops = [
        _line(folder, "rev-parse", "--show-toplevel")
        for folder in (*[package] * is_tracked, directory)
    ]
    return [_repository(top) for top in dict.fromkeys(filter(None, tops))]


def _repository(top):
    command = (
        "diff",
        "HEAD",
        "--submodule=short",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--no-renames",
    )
    others = (f":(top,exclude,glob,icase)**/{name}" for name in SECRET_FILES)
    diff = _git(top, *command, "--", ":/", *others) or ""
    secret = (f":(top,glob,icase)**/{name}" for name in SECRET_FILES)
    left_out = _git(top, *command, "--name-only", "--", *secret) or ""
    untracked = (_git(top, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "path": top,
        "commit": _line(top, "rev-parse", "--verify", "HEAD"),
        "branch": _line(top, "symbolic-ref", "--short", "HEAD"),
        "diff": redact(diff[:DIFF_LIMIT]),
        "diff_truncated": len(diff) > DIFF_LIMIT,
        "diff_left_out": left_out.splitlines()[:_MAX_UNTRACKED],
        "untracked": untracked[:_MAX_UNTRACKED],
    }


def _line(directory, *arguments):
    return (_git(directory, *arguments) or "").strip() or None


def _git(directory, *arguments):
    """Output of a git command; None if it fails."""
    # Many jobs may ask at once: no optional locks. No programs that the repository's configuration
    #   names.
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
    """Name, memory (such as "143771 MiB") and driver of each of this machine's."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # there is none
        return []
    rows = [map(str.strip, line.split(",")) for line in listing.splitlines()]
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows]


@functools.cache
def gpu_memory() -> float | None:
    """Bytes of the smallest of them."""
    return min((float(gpu["memory"].split()[0]) * 2**20 for gpu in gpus()), default=None)
