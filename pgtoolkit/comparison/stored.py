"""Runs as an MLflow store has them: by experiment or by sweep, also where their directories are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from pgtoolkit.comparison.runs import Run, add_seconds
from pgtoolkit.config.paths import absolute_uri
from pgtoolkit.config.schema import SCHEMAS, Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.delivered import SUPERSEDED
from pgtoolkit.tracking.store import client_of, quoted, refusals, refuse_missing

_STATES = {"FINISHED": "done", "FAILED": "failed", "KILLED": "interrupted"}
_RUNS_PER_CALL = 1000


def stored_runs(uri: str, names: Sequence[str], metric: str) -> list[Run]:
    """The runs of the experiments or sweeps of these names, in the order they were started.

    Of their metrics only `metric` and documents_seen are fetched. Raises ConfigError for a name without runs,
    StorageError if the store does not answer.
    """
    store = absolute_uri(uri)
    refuse_missing(store, f"--uri={uri}", "--uri=sqlite:///PATH/mlflow.db or --uri=http://HOST:PORT")
    with refusals(store, "Nothing was compared. Start the server or use another --uri."):
        client = client_of(store)
        experiments = {found.name: found.experiment_id for found in client.search_experiments()}
        found = {}
        for name in names:
            runs = _found(client, experiments, name)
            if not runs:
                raise _nothing(client, experiments, store, name)
            found |= {run.info.run_id: run for run in runs}
        ordered = sorted(found.values(), key=lambda run: (run.info.start_time, run.info.run_name))
        return [_read(client, run, metric) for run in ordered]


def sweeps_of(runs) -> list[str]:
    """The names of the sweeps that MLflow runs belong to, in their order, each once."""
    return list(dict.fromkeys(run.data.tags["sweep"] for run in runs if "sweep" in run.data.tags))


def _found(client, experiments, name):
    if name in experiments:
        runs = _search(client, [experiments[name]])
    else:
        runs = _search(client, list(experiments.values()), f"tags.sweep = {quoted(name)}")
    return [run for run in runs if not {"sweep_summary", SUPERSEDED} & run.data.tags.keys()]


def _search(client, ids, condition=""):
    found, token = [], None
    while ids:
        page = client.search_runs(ids, condition, max_results=_RUNS_PER_CALL, page_token=token)
        found += page
        token = page.token
        if not token:
            break
    return found


def _nothing(client, experiments, store, name):
    sweeps = sweeps_of(_search(client, list(experiments.values())))
    known = [
        f"{what} {', '.join(names)}" for what, names in (("sweeps", sweeps), ("experiments", experiments)) if names
    ]
    return ConfigError(
        f"pgtk compare {name} needs a sweep or an experiment of {redact(store)} (got no run of that name). "
        f"It has the {' and the '.join(known) or 'experiments of no run'}. Use one of them."
    )


def _read(client, run, metric):
    tags, info = run.data.tags, run.info
    own = [m for m in run.data.to_proto().metrics if "/" not in m.key]
    rows: dict[int, dict[str, float]] = {}
    for name in {metric, "documents_seen"} & {m.key for m in own}:
        for point in client.get_metric_history(info.run_id, name):
            row = rows.setdefault(point.step, {"step": point.step, "time": point.timestamp / 1000})
            row[name] = int(point.value) if name == "documents_seen" else point.value
    ordered = [rows[step] for step in sorted(rows)]
    add_seconds(ordered, tags.get("resumed", "").split())
    code = tags.get("git_commit")
    state = _STATES.get(info.status, "running")
    step = max((m.step for m in own), default=0)
    return Run(
        f"{info.run_name} ({info.run_id})",
        info.run_name,
        state,
        tags.get("reason"),
        step,
        _config(run),
        ordered,
        (code,) if code else (),
        tuple(m.key for m in own),
    )


def _config(run):
    """Dotted key to text, in the order of a run's config.yaml; what a resume changed has its newest value."""
    changed = {key.removeprefix("now."): value for key, value in run.data.tags.items() if key.startswith("now.")}
    values = run.data.params | {key: value for key, value in changed.items() if key in run.data.params}
    places = {key: place for place, key in enumerate(dict.fromkeys(_keys()))}
    return {key: values[key] for key in sorted(values, key=lambda key: (places.get(key, len(places)), key))}


def _keys():
    for group in (field.name for field in fields(Config)):
        own = [schema for schema in SCHEMAS if schema.partition("/")[0] == group]
        if not own:
            yield group
        for schema in own:
            yield from (f"{group}.{field.name}" for field in fields(SCHEMAS[schema]))
