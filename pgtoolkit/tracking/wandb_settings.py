"""wandb's settings: whether it can record a run with them, and where they may come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import first_line
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import refusal

if TYPE_CHECKING:
    from wandb import Settings  # pyright: ignore[reportMissingImports]  (an extra)

OFFLINE = ("offline", "dryrun")
"""The modes in which wandb keeps the record in the run directory."""

_ONLINE = ("online", "run", "shared")

_OF_ANOTHER_RUN = {
    "WANDB_SWEEP_ID": "wandb's own sweeps name their runs themselves",
    "WANDB_LAUNCH": "wandb's launch agent names its runs itself",
    "WANDB_RESUME_FROM": "A run is continued from its own checkpoints",
    "WANDB_FORK_FROM": "A run is continued from its own checkpoints",
}
"""Variables that make the record one of another run than this directory's."""

_INSTEAD = "WANDB_MODE=offline to keep the record in the run directory, or tracking=none"


def settings_of_user() -> Settings:
    """Return wandb's settings for this process, from the environment and the user's own file.

    wandb reads wandb/settings in the current folder as well, where a cloned repository could name
    the server that gets the API key. Here it does not. Raises an error of wandb's for a value that
    it refuses.
    """
    # Its process then sends wandb no telemetry, whose failures it would print.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # pyright: ignore[reportMissingImports]  (an extra)
    from wandb.sdk.lib.settings_file import (  # pyright: ignore[reportMissingImports]
        SettingsFiles,
    )

    def without_folder(self: Settings) -> SettingsFiles:
        own_file = self.settings_system
        return SettingsFiles(
            global_settings=None if own_file is None else Path(own_file),
            local_settings=Path(os.devnull),
        )

    # Settings are read once in each process, and nothing but a method says from which files.
    original = wandb.Settings.read_system_settings
    wandb.Settings.read_system_settings = without_folder
    try:
        return wandb.setup(wandb.Settings(silent=True)).settings
    finally:
        wandb.Settings.read_system_settings = original


def ignored_files() -> list[Path]:
    """Return the files of the current folder that wandb would read, and that are not read here."""
    paths = (Path("wandb", "settings"), Path(".wandb", "settings"))
    return [path for path in paths if path.is_file()]


def problem_of_settings() -> str | None:
    """Return why wandb could not record a run with this machine's settings; None if it could.

    wandb itself would ask for a missing key on the terminal.
    """
    for variable, reason in _OF_ANOTHER_RUN.items():
        if os.environ.get(variable):
            return _problem(
                needs=f"no {variable} in the environment",
                got=os.environ[variable],
                reason=f"{reason}.",
                use=f"`unset {variable}`, or tracking=none",
            )
    try:
        settings = settings_of_user()
    except Exception as error:  # pydantic's, and several of wandb's own
        return _refused_value(error)
    if settings.mode not in (*OFFLINE, *_ONLINE):
        return _problem(
            needs="WANDB_MODE online or offline",
            got="disabled",
            reason="It would record nothing.",
            use="WANDB_MODE=offline, or tracking=none",
        )
    if settings.mode in OFFLINE:
        return None
    reason = f"The run is sent to {settings.base_url}."
    if not _has_key(settings):
        return _problem(
            needs="an API key", got="none", reason=reason, use=f"`wandb login`, or {_INSTEAD}"
        )
    wrong_key = _problem_of_key()
    if wrong_key:
        return _problem(
            needs="a whole API key",
            got=wrong_key,
            reason=reason,
            use=f"`wandb login`, or {_INSTEAD}",
        )
    return None


def _has_key(settings: Settings) -> bool:
    from requests.utils import get_netrc_auth

    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    is_given = any(os.environ.get(name) for name in variables) or bool(settings.api_key)
    return is_given or get_netrc_auth(settings.base_url) is not None


def _problem_of_key() -> str | None:
    """Return what is wrong with the form of the key in the environment, if there is one."""
    from wandb.sdk.lib.wbauth import check_api_key  # pyright: ignore[reportMissingImports]

    key = os.environ.get("WANDB_API_KEY")
    problem = check_api_key(key) if key else None
    return redact(problem) if problem else None


def _refused_value(error: Exception) -> str:
    """Return the problem with a value of wandb's settings that wandb itself refuses."""
    # Errors of pydantic have the name of the setting and its value; wandb's own have a sentence.
    details = getattr(error, "errors", list)()
    if not details or not details[0]["loc"]:
        return _problem(
            needs="other settings",
            got=first_line(error),
            reason="It takes them from variables that begin with WANDB_, and from its own file.",
            use="other values of them, or tracking=none",
        )
    name = f"WANDB_{str(details[0]['loc'][0]).upper()}"
    value = redact(f"{name}={details[0]['input']}").removeprefix(f"{name}=")
    return _problem(
        needs=f"another {name}",
        got=value,
        reason=f"{details[0]['msg'].rstrip('?.')}.",
        use=f"another value, `unset {name}`, or tracking=none",
    )


def _problem(needs: str, got: str, reason: str, use: str) -> str:
    return refusal(setting="wandb", needs=needs, got=got, reason=reason, use=use)
