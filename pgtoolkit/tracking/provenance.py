"""Provenance: which code, packages, hardware and command made a run. Never the environment, never a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

DIFF_LIMIT = 256 * 1024
"""Most bytes of uncommitted changes that are kept for each repository."""

_MAX_UNTRACKED = 100

_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_VALUE = re.compile(r"(?i)((?:token|secret|password|passwd|api_?key|credential)\b[\w.-]*\s*[=:]\s*)\S+")


def collect(argv: list[str]) -> dict[str, Any]:
    """Everything about this process that is needed to do its run again, as plain JSON values.

    argv: the command line, usually sys.argv. `git` lists the repository the package runs from (none for an installed
    package) and the one of the current directory, where they differ; each with path, commit, branch, diff (against
    the commit, at most DIFF_LIMIT bytes), diff_truncated and untracked (names only). `gpus` come from nvidia-smi.
    """
    import pgtoolkit

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
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
        "gpus": _gpus(),
    }


def redact(text: str) -> str:
    """The text without credentials in URLs and without the values of keys such as `token=` or `api_key:`."""
    return _SECRET_VALUE.sub(r"\1***", _URL_CREDENTIALS.sub("***@", text))


def _packages():
    versions = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _repositories(package, directory):
    found = []
    # A package installed below some repository (in a .venv, say) is not that repository's code: ask for a tracked file.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        found.append(_line(package, "rev-parse", "--show-toplevel"))
    top = _line(directory, "rev-parse", "--show-toplevel")
    if top and top not in found:
        found.append(top)
    return [_repository(Path(path)) for path in found]


def _repository(top):
    diff = _git(top, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", limit=DIFF_LIMIT + 1) or ""
    untracked = (_git(top, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "path": str(top),
        "commit": _line(top, "rev-parse", "--verify", "HEAD"),
        "branch": _line(top, "symbolic-ref", "--short", "HEAD"),
        "diff": diff[:DIFF_LIMIT],
        "diff_truncated": len(diff.encode()) > DIFF_LIMIT,
        "untracked": untracked[:_MAX_UNTRACKED],
    }


def _line(directory, *arguments):
    return (_git(directory, *arguments) or "").strip() or None


def _git(directory, *arguments, limit=1 << 20):
    """Output of a git command, cut at `limit` bytes; None if it fails."""
    # No optional locks: many jobs may ask at once. No fsmonitor: a repository's configuration must not run programs.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            output = process.stdout.read(limit)
            if len(output) == limit:
                process.kill()
    except OSError:
        return None
    if process.returncode != 0 and len(output) < limit:
        return None
    return output.decode("utf-8", errors="replace")


def _gpus():
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        dict(zip(("name", "memory", "driver"), (field.strip() for field in line.split(",")), strict=True))
        for line in listing.splitlines()
    ]
