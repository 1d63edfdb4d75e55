"""The commands to type after a run: to continue, deliver and compare it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.config.rules.addresses import named_addresses
from pgtoolkit.config.rules.executed import folders_outside, named_commands
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.runs.records import known_provenance, read_config, read_resolved
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import shortest_path
from pgtoolkit.tracking.next_commands import pgtk_command
from pgtoolkit.tracking.store_address import absolute_uri


def resume_command(run_dir: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return the command that continues a run, with overrides.

    It repeats the keys that have to be typed, since a run's own file may not decide them.
    """
    return pgtk_command("resume", shortest_path(run_dir), *_typed_overrides(run_dir), *overrides)


def sync_command(run_dir: str | Path, uri: str | None) -> str:
    """Return the command that delivers to MLflow what it lacks of a run.

    A store that is not the default one is part of it, since it has to be typed.
    """
    arguments = [shortest_path(run_dir)]
    if absolute_uri(uri) != absolute_uri(None):
        assert uri is not None
        arguments.append(f"--uri={redact(uri)}")
    return pgtk_command("sync", *arguments)


def _typed_overrides(run_dir: str | Path) -> list[str]:
    """Return overrides with the programs of a run, its addresses, and its folders outside of its
    directory."""
    try:
        config = read_resolved(run_dir)
    except Exception:  # before the configuration is written, or where it is damaged
        return []
    run_dir = Path(run_dir)
    values = named_commands(config) | folders_outside(config, run_dir)
    values |= named_addresses(config, run_dir)
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _quoted(value: str | list[str]) -> str:
    """Return a text, or a list of them, as Hydra reads it in an override."""
    if not isinstance(value, str):
        return f"[{','.join(map(repr, value))}]"
    return value if re.fullmatch(r"[\w./:~+@-]*", value) else repr(value)


def has_counterpart(run_dir: str | Path) -> bool:
    """Return whether another loss can be compared on the same documents.

    It cannot where these lack advantages, or old log-probs.
    """
    config, _ = read_config(run_dir)
    if config.get("advantage", {}).get("estimator") == "none":
        return False
    if config.get("rollout", {}).get("name") != "recorded":
        return True
    family = FAMILIES.get(config["loss"]["name"])
    return family is None or family.reads_old_log_probs


def counterpart_command(run_dir: str | Path) -> str:
    """Return the command of the same run with another loss.

    Overrides of the first loss are left out, and so are the run's name and the folder of its
    recorded rollouts, which is occupied now.
    """
    config, overrides = read_config(run_dir)
    other_loss = next(name for name in FAMILIES if name != config["loss"]["name"])
    left_out = ("loss=", "loss.", "rollout.save_path=", "tracking.run_name=")
    arguments = [f"loss={other_loss}"]
    arguments += [
        override for override in overrides if not override.lstrip("+~").startswith(left_out)
    ]
    folder = _config_dir(run_dir)
    if folder is not None:
        arguments.insert(0, f"--config-dir={shortest_path(folder)}")
    return pgtk_command(*arguments)


def _config_dir(run_dir: str | Path) -> Path | None:
    """Return the folder with the user's own options that the run was started with, if any."""
    provenance = known_provenance(Path(run_dir))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    arguments, _ = parser.parse_known_args(provenance.get("command", [])[1:])
    if not arguments.config_dir:
        return None
    return Path(provenance.get("directory", ""), arguments.config_dir)
