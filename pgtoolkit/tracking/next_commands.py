"""Paths, commands and addresses as the user can paste them."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from pgtoolkit.config.paths import absolute_uri
from pgtoolkit.config.rules.executed import folders_outside, is_server, named_commands
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.runs.records import known_provenance, read_config, read_resolved
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import program, shortest_path
from pgtoolkit.tracking.store import search_literal

UI_ADDRESS = "http://127.0.0.1:5000"
"""Where `mlflow server` listens unless told otherwise."""

_OF_TRAINING = "workflowType=machine_learning"
"""In an address, the mode of MLflow's pages that shows runs and their charts; it opens in that for
language models."""


def _pgtk(*arguments: str) -> str:
    """A line for the shell."""
    return " ".join([program("pgtk"), *map(shlex.quote, arguments)])


def ui_command(uri: str | None) -> str | None:
    """The shell command that shows a local store on UI_ADDRESS; None for a server, which shows
    itself."""
    uri = absolute_uri(uri)
    if uri.startswith("http"):
        return None
    if uri == absolute_uri(None):
        return _pgtk("ui")
    path = uri.removeprefix("sqlite:///")
    store = redact(uri) if path == uri else f"sqlite:///{shortest_path(path)}"
    return _pgtk("ui", f"--uri={store}")


def ui_url(
    uri: str | None, experiment_id: str, run_id: str | None = None, sweep: str | None = None
) -> str:
    """The address of a run's page, or without run_id of the page that charts all runs of the
    experiment or sweep."""
    page = f"/{run_id}?" if run_id else "?compareRunsMode=CHART&"
    page += _OF_TRAINING
    if sweep:
        # The summary run has no seed: it has no curves, and MLflow draws ten runs unless told
        #   otherwise.
        found = f"tags.sweep = {search_literal(sweep)} and tags.seed LIKE '%'"
        page += f"&searchFilter={quote(found, safe='')}"
    return f"{_server(uri)}/#/experiments/{experiment_id}/runs{page}"


def compare_url(uri: str | None, experiment_ids: Sequence[str], run_ids: Sequence[str]) -> str:
    """The address of the page that sets runs side by side, with their parameters and final
    metrics."""
    lists = {"runs": list(run_ids), "experiments": list(experiment_ids)}
    query = "&".join(
        f"{key}={quote(json.dumps(ids, separators=(',', ':')), safe='')}"
        for key, ids in lists.items()
    )
    return f"{_server(uri)}/#/compare-runs?{query}&{_OF_TRAINING}"


def start_url(uri: str | None) -> str:
    """The address of the page that lists all experiments."""
    return f"{_server(uri)}/#/experiments?{_OF_TRAINING}"


def _server(uri):
    return redact(uri).rstrip("/") if uri and uri.startswith("http") else UI_ADDRESS


def resume_command(run_dir: str | Path, overrides: Sequence[str] = ()) -> str:
    """The command that continues a run, with overrides if any; what no file may say is typed
    again."""
    return _pgtk("resume", shortest_path(run_dir), *_only_typed(run_dir), *overrides)


def sync_command(run_dir: str | Path, uri: str | None) -> str:
    """Return the command that delivers to MLflow what it lacks of a run; a server's address is
    typed."""
    return _pgtk(
        "sync",
        shortest_path(run_dir),
        *([f"--uri={redact(uri)}"] if uri is not None and is_server(uri) else []),
    )


def _only_typed(run_dir):
    """Return overrides with the programs, and the folders outside of the run, that its own file may
    not decide."""
    try:
        config = read_resolved(run_dir)
    except Exception:  # before the configuration is written, or where it is damaged
        return []
    named = named_commands(config) | folders_outside(config, Path(run_dir))
    return [f"{key}={_quoted(value)}" for key, value in named.items()]


def _quoted(value: str | list) -> str:
    """A text, or several, as Hydra reads them in an override."""
    if not isinstance(value, str):
        return f"[{','.join(map(repr, value))}]"
    return value if re.fullmatch(r"[\w./:~+@-]*", value) else repr(value)


def has_counterpart(run_dir: str | Path) -> bool:
    """Whether the other loss could train otherwise on the same documents: old log-probs may lack,
    or advantages."""
    config = read_config(run_dir)[0]
    family = FAMILIES.get(config["loss"]["name"])
    if config.get("advantage", {}).get("estimator") == "none":
        return False
    return (
        config.get("rollout", {}).get("name") != "recorded"
        or family is None
        or family.reads_old_log_probs
    )


def counterpart_command(run_dir: str | Path) -> str:
    """The command of the same run with the other loss; the first loss's own overrides are left out.

    So are its name, and the folder of its recorded rollouts, which is occupied now.
    """
    config, overrides = read_config(run_dir)
    other = next(name for name in FAMILIES if name != config["loss"]["name"])
    dropped = ("loss=", "loss.", "rollout.save_path=", "tracking.run_name=")
    kept = [override for override in overrides if not override.lstrip("+~").startswith(dropped)]
    folder = _config_dir(run_dir)
    return _pgtk(
        *([f"--config-dir={shortest_path(folder)}"] if folder else []), f"loss={other}", *kept
    )


def _config_dir(run_dir):
    """The folder with options of the user's own that the run was started with, or None."""
    provenance, parser = (
        known_provenance(Path(run_dir)),
        argparse.ArgumentParser(add_help=False, allow_abbrev=False),
    )
    parser.add_argument("--config-dir", "-cd", nargs="?")
    folder = parser.parse_known_args(provenance.get("command", [])[1:])[0].config_dir
    return folder and Path(provenance.get("directory", ""), folder)
