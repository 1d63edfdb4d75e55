"""`pgtk sync`: delivers to MLflow what a run directory holds and the store lacks."""

from __future__ import annotations

from pathlib import Path

from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.directory import RunDirectory, read_config, read_status
from pgtoolkit.system.plain_files import refuse_links
from pgtoolkit.system.shell import shell_path
from pgtoolkit.tracking.mlflow_run import MlflowTracker

DEFAULT_EXPERIMENT = "pgtoolkit"


def sync(run_dir: Path, uri: str | None = None, experiment: str | None = None) -> str:
    """Deliver one run and say on one line what was missing; a second call finds nothing to do.

    uri: another store than the run's own, which gets the whole run; needed for a run with tracking=none.
    experiment: another one than the run's own. Raises ConfigError for a run that is still running or has no store,
    StorageError if the store does not answer or fails on the way.
    """
    refuse_links(run_dir)
    config, status = read_config(run_dir)[0], read_status(run_dir)
    tracking = config.get("tracking", {})
    if uri is None and tracking.get("name") == "none":
        raise ConfigError(
            f"pgtk sync {run_dir} needs a store (got tracking=none). The run was made without MLflow. "
            "Use --uri=sqlite:///outputs/mlflow.db, or the address of a server."
        )
    # A relative address was meant from where the run was started; its status has the absolute one.
    own = (status.get("mlflow") or {}).get("uri") or tracking.get("uri")
    name = experiment or tracking.get("experiment") or DEFAULT_EXPERIMENT
    with RunDirectory(run_dir) as run:
        run.read_metrics()  # raises StorageError where they are damaged
        state = status.get("state", "failed")
        tracker = MlflowTracker(uri or own, name)
        tracker.start(run.path, "Nothing was lost: the run directory keeps it. Try again when the store answers.")
        # A killed run says that it runs. However much is missing, it is delivered while the store answers.
        missing = tracker.finish("interrupted" if state == "running" else state, limited=False)
    if missing:
        raise StorageError(f"MLflow still lacks {', '.join(missing)} of {shell_path(run_dir)}. Try again later.")
    rows = tracker.rows_delivered
    what = f"{rows} row{'s' if rows != 1 else ''} delivered" if rows else "nothing was missing"
    return f"{shell_path(run_dir)}: {what} ({tracker.info['uri']}, run {tracker.info['run_id']})"
