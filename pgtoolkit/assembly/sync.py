"""Delivers to MLflow what it lacks of a run."""

from __future__ import annotations

import os
from pathlib import Path

from pgtoolkit.assembly.run_description import description_of
from pgtoolkit.config.plan import equation
from pgtoolkit.config.rules.addresses import may_be_used
from pgtoolkit.config.saved import saved_config
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import read_config, read_status
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.plain_files import refuse_links
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import plural, refusal, shell_path
from pgtoolkit.tracking.mlflow_run import MlflowRecord
from pgtoolkit.tracking.store_address import STORE_VARIABLE, experiment_of


def sync(run_dir: Path, uri: str | None = None, experiment: str | None = None) -> str:
    """Deliver to MLflow what it lacks of a run, and return a line that says so.

    uri: of another store than the run's, which gets the whole run; a run with tracking=none needs
        one.
    experiment: another name than the run's.
    Raises ConfigError for a run that is still running or has no store, StorageError if the store
    does not answer or fails on the way.
    """
    refuse_links(run_dir)
    uri, experiment = place_of(run_dir, uri, experiment)
    status = read_status(run_dir)
    with RunDirectory(run_dir) as run:
        read_metrics(run.metrics_path, ())  # raises StorageError if they are damaged
        check_rows(run.path)
        state = status.get("state", "failed")
        record = MlflowRecord(uri, experiment)
        record.start(
            run.path,
            description_of(run.path, _equation(run.path)),
            "Nothing was lost: the run directory keeps it. Try again when the store answers.",
        )
        # The status of a killed run is still `running`. Without a limit, the rest is delivered as
        # long as the store answers.
        missing = record.finish("interrupted" if state == "running" else state, limited=False)
    if missing:
        raise StorageError(
            f"MLflow still lacks {', '.join(missing)} of {shell_path(run_dir)}: "
            f"{record.last_failure or 'it took too long'}. Repeat pgtk sync after that."
        )
    rows = record.rows_delivered
    delivered = f"{plural(rows, 'row')} delivered" if rows else "nothing was missing"
    return f"{shell_path(run_dir)}: {delivered} ({record.info['uri']}, run {record.info['run_id']})"


def _equation(run_dir: Path) -> list[str]:
    """Return the lines that define a run's loss; none for a configuration that is not known now."""
    try:
        return equation(saved_config(run_dir))
    except ConfigError:
        return []


def place_of(run_dir: Path, uri: str | None, experiment: str | None) -> tuple[str | None, str]:
    """Return the address of the store that gets a run, and the name of the experiment.

    uri, experiment: what was typed. Raises ConfigError for a run without a store.
    """
    config, _ = read_config(run_dir)
    status = read_status(run_dir)
    tracking = config.get("tracking", {})
    if uri is None and tracking.get("name", "mlflow") != "mlflow":
        uri = os.environ.get(STORE_VARIABLE)
    if uri is None and tracking.get("name", "mlflow") != "mlflow":
        raise ConfigError(
            f"pgtk sync {run_dir} needs a store (got tracking={tracking['name']}). The run was "
            "made without MLflow. Use --uri=sqlite:///outputs/mlflow.db, or the address of a "
            "server."
        )
    if uri is None:
        # The status has the absolute address: a relative one was meant from where the run started.
        uri = (status.get("mlflow") or {}).get("uri") or tracking.get("uri")
        if uri is not None and not may_be_used(uri, run_dir):
            raise ConfigError(
                refusal(
                    setting=f"pgtk sync {shell_path(run_dir)}",
                    needs="its store to be typed",
                    got=f"{redact(uri)} from the run's file",
                    reason="The run would be sent there, which its file does not decide.",
                    use="--uri=ADDRESS, or MLFLOW_TRACKING_URI=ADDRESS in the environment",
                )
            )
    return uri, experiment_of("mlflow", experiment or tracking.get("experiment"))
