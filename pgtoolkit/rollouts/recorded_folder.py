"""The folder in which a run records its rollouts."""

from __future__ import annotations

import os

from pgtoolkit.system.report import free_path, refusal


def occupied_by_rollouts(save_path: str | None) -> str | None:
    """Refuse a folder in which another run has recorded its rollouts; None for any other."""
    batches = batches_in(save_path) if save_path else None
    if not batches:
        return None
    return refusal(
        setting=f"rollout.save_path={save_path}",
        needs="a new or empty folder",
        got=f"one with {batches} batches of rollouts",
        reason="The rollouts of two runs would mix.",
        use=f"rollout.save_path={free_path(str(save_path).rstrip(os.sep))}",
    )


def batches_in(save_path: str) -> int | None:
    """Return how many batches of rollouts a folder holds, 0 if there is no such folder; None if it
    is no folder, or one with other files."""
    try:
        names = os.listdir(os.path.expanduser(save_path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):  # a file, unreadable, or no possible path
        return None
    if not all(name.startswith(("batch-", ".batch-")) for name in names):
        return None
    return sum(name.startswith("batch-") for name in names)
