"""The rule on the user's credentials: they go to a server that was typed, not to one that a file names."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal

_VARIABLES = tuple(
    f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4", "CLIENT_CERT_PATH")
)
_FILE = "~/.mlflow/credentials"
"""What MLflow shows any server that it calls."""


def of_configuration(config: DictConfig, typed: dict[str, object]) -> list[str]:
    """The problem with a tracking.uri that nobody typed; typed: key to value, of all that was."""
    try:
        name, uri = (OmegaConf.select(config, f"tracking.{key}") for key in ("name", "uri"))
    except OmegaConfBaseException:  # `validate` says so
        return []
    if name == "none" or "${" not in str(typed.get("tracking.uri", "${")):
        return []
    problem = of_address(uri, f"tracking.uri={uri}")
    return [problem] if problem else []


def of_address(uri: str | None, use: str) -> str | None:
    """The problem with a server that a file names, where credentials are set; use: what to type to mean it."""
    if not str(uri).startswith(("http://", "https://")) or uri == os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    found = [name for name in _VARIABLES if os.environ.get(name)]
    found += [_FILE] if Path(_FILE).expanduser().is_file() else []
    if not found:
        return None
    reason, use = f"What {found[0]} holds would be sent there.", f"{redact(use)} if you trust it"
    return refusal(redact(f"tracking.uri={uri}"), "to be typed", "it from a file", reason, use)
