"""Records of a run in Weights & Biases and TensorBoard, by a thread that calls Lightning's
loggers."""

from __future__ import annotations

import logging
import os
import shutil
import textwrap
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import Row, read_evaluations
from pgtoolkit.runs.series import final, read_metrics, values
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import shell_path
from pgtoolkit.tracking.description import (
    Description,
    RowFile,
    by_documents_of,
    evaluation_values_of,
    values_of,
)
from pgtoolkit.tracking.wandb_settings import OFFLINE, settings_of_user

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, TensorBoardLogger

TENSORBOARD_FOLDER = "tensorboard"
"""The folder of TensorBoard's files in a run directory."""

Point = tuple[int, dict[str, float]]
"""A step, and the metrics at it."""

_SECONDS_BETWEEN_DELIVERIES = 1.0
_SECONDS_TO_START = 10.0
_SECONDS_TO_FINISH = 30.0
# wandb itself uses 255 for Ctrl-C.
_EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 255}
_IN_THE_SUMMARY = ("reward", "exact_match", "loss")

_log = logging.getLogger("pgtoolkit")


class LoggerRecord:
    """A record of one run by one of Lightning's loggers, which follows the run directory.

    The directory is the only source, as for `MlflowTracker`: about once a second a thread reads
    what is appended to its metrics.jsonl and evaluations.jsonl. When a run is resumed, a record in
    its directory is written again from the first step: so it has each step once, whatever a kill
    has left of it. A server does not get its rows again. A logger that raises an error ends its
    record with a note, but never the training.
    """

    title: ClassVar[str]
    """The name of the record in messages."""

    shown_by: str
    """The command to type, or the address to open, to see the record."""

    _logger: Logger

    def start(self, run_dir: Path, description: Description, consequence: str = "") -> None:
        """Open the record of a directory, which has config.yaml and status.json, and deliver rows.

        On a resume it is called after `drop_metrics_after`. Raises StorageError, whose message ends
        with `consequence`, where the logger cannot be opened.
        """
        self._run_dir = Path(run_dir)
        try:
            last_step = self._open(description)
        except Exception as error:  # each library raises errors of its own
            raise StorageError(
                f"{self.title} failed: {_in_one_line(error)}. {consequence}"
            ) from error
        delivered: dict[str | None, int] = {None: last_step}
        # The evaluation of a step comes after its metrics, so that of the last step may not have
        # arrived.
        sets = {row["set"] for row in read_evaluations(self._run_dir)}
        delivered_of_sets = dict.fromkeys(sets, last_step - 1)
        self._files = (
            RowFile(self._run_dir / "metrics.jsonl", delivered, self._points),
            RowFile(self._run_dir / "evaluations.jsonl", delivered_of_sets, _evaluation_points),
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._deliver_until_ended, name=self.title, daemon=True
        )
        self._thread.start()

    def finish(self, state: str) -> list[str]:
        """Deliver the rest and close the record; return the names of parts that came too late.

        state: done, failed or interrupted.
        """
        self._state = state
        self._ended.set()
        self._thread.join(2 * _SECONDS_TO_FINISH)
        return ["the end of the run"] if self._thread.is_alive() else []

    def _open(self, description: Description) -> int:
        """Make `_logger`, set `shown_by`, and return the last step that the record has."""
        raise NotImplementedError

    def _points(self, row: Row) -> list[Point]:
        """Return the points for a row of metrics.jsonl."""
        return [(row["step"], values_of(row, row))]

    def _log_points(self, points: Iterable[Point]) -> None:
        for step, metrics in points:
            self._logger.log_metrics(metrics, step)

    def _flush(self) -> None:
        """Write what was logged so that other processes can read it."""

    def _close(self) -> None:
        raise NotImplementedError

    def _deliver_until_ended(self) -> None:
        try:
            while True:
                is_last = self._ended.is_set()
                for file in self._files:
                    self._deliver(file)
                self._flush()
                if is_last:
                    self._log_points(_summary(self._run_dir))
                    self._close()
                    return
                self._ended.wait(_SECONDS_BETWEEN_DELIVERIES)
        except Exception as error:  # whatever the library raises, training continues
            _log.warning(
                f"note: {self.title} failed and gets no more rows of this run: "
                f"{_in_one_line(error)}. Nothing is lost: metrics are kept in "
                f"{shell_path(self._run_dir / 'metrics.jsonl')}, and a resumed run delivers them."
            )

    def _deliver(self, file: RowFile[Point]) -> None:
        while True:
            _, points, offset = file.next_batch()
            self._log_points(points)
            if offset == file.offset:
                return
            file.offset = offset


class WandbRecord(LoggerRecord):
    """A run of Weights & Biases, with the id of the run directory.

    wandb's own settings apply, such as WANDB_MODE, WANDB_ENTITY and WANDB_BASE_URL. It does not
    collect the command, which may have secrets, the code and the terminal: provenance.json has
    these, redacted.

    project: to which the run belongs. system_metrics: whether wandb measures the machine.
    """

    title = "wandb"

    def __init__(self, project: str, system_metrics: bool):
        self._project = project
        self._measures_system = system_metrics

    def _open(self, description: Description) -> int:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)
        from lightning.pytorch.loggers import WandbLogger

        of_user = settings_of_user()
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=not self._measures_system,
            silent=True,
            symlink=False,
            finish_timeout=_SECONDS_TO_FINISH,
        )
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings.init_timeout = _SECONDS_TO_START
        try:
            self._run = wandb.init(
                project=self._project,
                name=description.run_name,
                id=description.tags["pgtk.id"],
                group=description.tags.get("sweep"),
                resume="allow",
                dir=str(self._run_dir),
                settings=settings,
            )
        finally:
            # A log is a link into the user's cache, and a run directory with links is refused.
            for path in self._run_dir.glob("wandb/*/logs/*"):
                if path.is_symlink():
                    path.unlink()
        # WandbLogger logs over this axis of steps, and defines it so for runs that it opens.
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        self._logger = WandbLogger(experiment=self._run)
        run_directory = {"run_directory": description.tags["run_directory"]}
        self._logger.log_hyperparams(description.settings | run_directory)
        folder = Path(self._run.dir).parent
        if of_user.mode not in OFFLINE:
            self.shown_by = self._run.url or ""
            return int(self._run.summary.get("trainer/global_step") or 0)
        for earlier in folder.parent.glob(f"offline-run-*-{self._run.id}"):
            if earlier != folder:
                shutil.rmtree(earlier)
        self.shown_by = f"wandb sync {shell_path(folder)}"
        return 0

    def _close(self) -> None:
        self._run.finish(exit_code=_EXIT_CODES[self._state])


class TensorBoardRecord(LoggerRecord):
    """TensorBoard's files in the run directory."""

    title = "TensorBoard"
    _logger: TensorBoardLogger

    def _open(self, description: Description) -> int:
        from lightning.pytorch.loggers import TensorBoardLogger

        # TensorBoard drops what earlier processes have written, from the step `purge_step` on.
        self._logger = TensorBoardLogger(
            self._run_dir,
            name=None,
            version=TENSORBOARD_FOLDER,
            default_hp_metric=False,
            purge_step=0,
        )
        self._settings = description.settings
        self.shown_by = f"tensorboard --logdir {shell_path(self._run_dir / TENSORBOARD_FOLDER)}"
        self._logger.experiment.flush()  # so that an error is raised before training
        return 0

    def _points(self, row: Row) -> list[Point]:
        points = super()._points(row)
        if "documents_seen" in row:
            points.append((row["documents_seen"], by_documents_of(row)))
        return points

    def _log_points(self, points: Iterable[Point]) -> None:
        self._check_folder()
        for step, metrics in points:
            if self._settings:
                # TensorBoard shows hyperparameters together with the last values of the metrics
                # that are logged with them.
                self._logger.log_hyperparams(self._settings, metrics, step)
                self._settings = {}
            else:
                self._logger.log_metrics(metrics, step)

    def _flush(self) -> None:
        self._check_folder()
        self._logger.experiment.flush()

    def _check_folder(self) -> None:
        """Raise StorageError where the folder is gone.

        Otherwise a thread of TensorBoard's meets that, prints a traceback and stops.
        """
        folder = self._run_dir / TENSORBOARD_FOLDER
        if not folder.is_dir():
            raise StorageError(f"{folder} was removed")

    def _close(self) -> None:
        self._logger.finalize("success" if self._state == "done" else "failed")


def _evaluation_points(row: Row) -> list[Point]:
    return [(row["step"], evaluation_values_of(row))]


def _summary(run_dir: Path) -> list[Point]:
    """Return the means over the last tenth of a run's steps, at its last step."""
    metrics = read_metrics(run_dir / "metrics.jsonl", _IN_THE_SUMMARY)
    if not len(metrics["step"]):
        return []
    series = {name: values(metrics, name) for name in _IN_THE_SUMMARY}
    means = {f"final/{name}": final(column) for name, column in series.items() if column}
    return [(int(metrics["step"][-1]), means)]


def _in_one_line(error: Exception) -> str:
    message = " ".join(redact(str(error)).split()) or type(error).__name__
    return textwrap.shorten(message, 300, placeholder=" …").rstrip(".")
