"""Paths, commands, calls in Python and addresses as the user can paste them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import program, shortest_path
from pgtoolkit.tracking.store import VIEW, jobs_of_sweep, view_of
from pgtoolkit.tracking.store_address import DEFAULT_STORE, absolute_uri

UI_ADDRESS = "http://127.0.0.1:5000"
"""The default address of `mlflow server`."""

OF_PYTHON = "PGTK_CALLED_FROM_PYTHON"
"""A variable of the processes that `pgtoolkit.experiment` starts: what they say to type is Python,
where a call is the same as the command."""

_OF_TRAINING = "workflowType=machine_learning"
"""Chooses, in an address, MLflow's pages with runs and charts, not those for language models."""

_BEST_FIRST = f"&orderByKey={quote('metrics.`reward`', safe='')}&orderByAsc=false"
"""Sorts the jobs of a sweep. By their time they would be hidden below the sweep's run, without
curves. MLflow draws ten runs by default."""


def pgtk_command(*arguments: str) -> str:
    """Return a command for the shell, or in a process of OF_PYTHON a call."""
    call = python_call(*arguments) if OF_PYTHON in os.environ else None
    return call or " ".join([program("pgtk"), *map(shlex.quote, arguments)])


def pgtk_commands(commands: Sequence[Sequence[str]]) -> str:
    """Return commands for the shell in one line, of which each starts after the one before, or in a
    process of OF_PYTHON calls."""
    words = [pgtk_command(*arguments) for arguments in commands]
    in_python = all(python_call(*arguments) for arguments in commands)
    return ("; " if OF_PYTHON in os.environ and in_python else " && ").join(words)


def python_call(*arguments: str) -> str | None:
    """Return the call of `pgtoolkit.experiment` that is the same as `pgtk` with these arguments;
    None where there is none. A folder with options of the user's own is set before the call."""
    flag = "--config-dir="
    folders = [word.removeprefix(flag) for word in arguments if word.startswith(flag)]
    words = [word for word in arguments if not word.startswith(flag)]
    call = _call_of(words[0], words[1:]) if words else None
    if call is None or not folders:
        return call
    return f"{of_own_folder(folders[0])}; {call}"


def of_own_folder(folder: str) -> str:
    """Return the statement that is in Python what --config-dir is for the command."""
    return f'os.environ["PGTK_CONFIG_DIR"] = {json.dumps(folder)}'


def _call_of(first: str, rest: Sequence[str]) -> str | None:
    are_overrides = all(map(_is_override, rest))
    if first == "compare" and len(rest) == 1:
        return f"compare({json.dumps(rest[0])})"
    if first == "resume" and len(rest) == 1:
        return f"train(config, {json.dumps(rest[0])})"
    if first == "sweep" and rest and all(map(_is_override, rest[1:])):
        return f"sweep({', '.join(map(json.dumps, rest))})"
    if first == "-m" and are_overrides:
        return _sweep_call(rest)
    if _is_override(first) and are_overrides:
        return f"train(compose({', '.join(map(json.dumps, [first, *rest]))}))"
    return None


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _sweep_call(overrides: Sequence[str]) -> str | None:
    """Return the call that trains a sweep of these overrides; None without a key of its runs.

    Keys of several values stand before the others, by which the sweep's folder keeps its name.
    Values that are no list of words or range stand there as they are typed.
    """
    grid = []
    others = []
    for override in overrides:
        key, _, values = override.partition("=")
        numbers = re.fullmatch(r"range\((\d+),(\d+)\)", values)
        if numbers:
            grid.append(f"{json.dumps(key)}: range({numbers[1]}, {numbers[2]})")
        elif re.fullmatch(r"[\w./:@+-]+(,[\w./:@+-]+)+", values):
            grid.append(f"{json.dumps(key)}: [{', '.join(map(_literal, values.split(',')))}]")
        elif "," in re.sub(r"\[[^\]]*\]", "", values):
            grid.append(f"{json.dumps(key)}: {json.dumps(values)}")
        else:
            others.append(json.dumps(override))
    of_runs = [override for override in overrides if not override.startswith("hydra")]
    if not grid and of_runs:
        key, _, value = of_runs[0].partition("=")
        grid = [f"{json.dumps(key)}: {json.dumps(value)}"]
        others.remove(json.dumps(of_runs[0]))
    return f"sweep({', '.join(['{' + ', '.join(grid) + '}', *others])})" if grid else None


def _literal(value: str) -> str:
    """Return a value of an override as Python writes it."""
    return value if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value) else json.dumps(value)


def ui_command(uri: str | None) -> str | None:
    """Return the command that shows a local store on UI_ADDRESS; None for a server's store."""
    uri = absolute_uri(uri)
    if uri.startswith("http"):
        return None
    if uri == absolute_uri(None) == absolute_uri(DEFAULT_STORE):
        return pgtk_command("ui")
    path = uri.removeprefix("sqlite:///")
    store = redact(uri) if path == uri else f"sqlite:///{shortest_path(path)}"
    return pgtk_command("ui", f"--uri={store}")


def ui_url(
    uri: str | None, experiment_id: str, run_id: str | None = None, sweep: str | None = None
) -> str:
    """Return the address of a run's page, or of the page with charts of several runs.

    run_id: None for charts of all runs of the experiment, or of the sweep.
    """
    page = f"/{run_id}?" if run_id else "?compareRunsMode=CHART&"
    page += _OF_TRAINING
    if sweep:
        page += f"&searchFilter={quote(jobs_of_sweep(sweep), safe='')}{_BEST_FIRST}"
    return f"{_server(uri)}/#/experiments/{experiment_id}/runs{page}"


def table_url(uri: str | None, experiment_id: str, sweep: str | None = None) -> str:
    """Return the address of the table of an experiment's runs, or of a sweep's jobs, by the view
    that was kept for it, see `offer_view`."""
    # With a filter or an order beside it MLflow would not open the view, which has its own.
    view = VIEW if sweep is None else quote(view_of(sweep), safe="")
    page = f"/#/experiments/{experiment_id}/runs?{_OF_TRAINING}&viewStateShareKey={view}"
    return f"{_server(uri)}{page}"


def compare_url(uri: str | None, experiment_ids: Sequence[str], run_ids: Sequence[str]) -> str:
    """Return the address of the page with parameters and final metrics of runs side by side."""
    lists = {"runs": list(run_ids), "experiments": list(experiment_ids)}
    query = "&".join(
        f"{key}={quote(json.dumps(ids, separators=(',', ':')), safe='')}"
        for key, ids in lists.items()
    )
    return f"{_server(uri)}/#/compare-runs?{query}&{_OF_TRAINING}"


def start_url(uri: str | None) -> str:
    """Return the address of the page that lists all experiments."""
    return f"{_server(uri)}/#/experiments?{_OF_TRAINING}"


def _server(uri: str | None) -> str:
    return redact(uri).rstrip("/") if uri and uri.startswith("http") else UI_ADDRESS
