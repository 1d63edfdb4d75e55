"""Addresses of MLflow stores."""

from __future__ import annotations

from pathlib import Path


def absolute_uri(uri: str | None) -> str:
    """Return the tracking URI, with the default store for None, and an absolute path of SQLite."""
    uri = uri or "sqlite:///outputs/mlflow.db"
    path = sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri


def sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of an sqlite URI's file; None for any other URI."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).resolve()
