"""Reads values that earlier versions of pgtoolkit wrote into a run directory by their meaning."""

from __future__ import annotations

import re
from pathlib import Path

from pgtoolkit.errors import refused_by_disk

_AUTO = "model.compile=auto"


def with_later_groups(config: dict) -> dict:
    """Return the configuration of a run, with the groups that came after it at their defaults."""
    return {"callbacks": {"own": {}}} | config


def without_auto_compile(config: dict, run_dir: Path) -> dict:
    """Return the configuration of a run, with whether it was compiled in place of `auto`."""
    model = config.get("model")
    if not isinstance(model, dict) or model.get("compile") != "auto":
        return config
    return config | {"model": model | {"compile": _was_compiled(run_dir)}}


def overrides_without_auto_compile(overrides: list[str], run_dir: Path) -> list[str]:
    """Return the overrides of a run, with whether it was compiled in place of `auto`."""
    if _AUTO not in overrides:
        return overrides
    value = f"model.compile={'true' if _was_compiled(run_dir) else 'false'}"
    return [value if override == _AUTO else override for override in overrides]


def _was_compiled(run_dir: Path) -> bool:
    """Return whether a run with model.compile=auto was compiled at its last start.

    run.log says so; where it says nothing, the run was not.
    """
    path = run_dir / "run.log"
    try:
        log = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise refused_by_disk(path, error) from error
    decisions = re.findall(rf"{_AUTO}: (on|off)\b", log)
    return decisions[-1:] == ["on"]
