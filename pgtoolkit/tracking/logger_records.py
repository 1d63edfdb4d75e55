"""Records of a run in Weights & Biases and TensorBoard, by Lightning's loggers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import read_config, read_evaluations
from pgtoolkit.runs.series import final, read_metrics, values
from pgtoolkit.system.report import key_of, shell_path
from pgtoolkit.tracking.description import Description, Point
from pgtoolkit.tracking.record import Record
from pgtoolkit.tracking.wandb_settings import OFFLINE, settings_of_user

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, TensorBoardLogger

TENSORBOARD_FOLDER = "tensorboard"
"""The folder of TensorBoard's files in a run directory."""

_SECONDS_TO_START = 10.0
_SECONDS_TO_FINISH = 30.0
# wandb itself uses 255 for Ctrl-C.
_EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 255, "pruned": 255}
_IN_THE_SUMMARY = ("reward", "exact_match", "loss")


class LoggerRecord(Record):
    """A record of one run by one of Lightning's loggers.

    When a run is resumed, a record in its directory is written again from the first step: so it has
    each step once, whatever a kill has left of it. A server does not get its rows again.
    """

    tries_again = False

    _logger: Logger

    def _send(self, points: list[Point]) -> None:
        for point in points:
            self._logger.log_metrics(point.metrics, point.position)

    def _last_parts(self) -> dict[str, Callable[[], None]]:
        return {"the summary": self._send_summary, **super()._last_parts()}

    def _send_summary(self) -> None:
        """Send the means over the last tenth of a run's steps, at its last step."""
        metrics = read_metrics(self._run_dir / "metrics.jsonl", _IN_THE_SUMMARY)
        if not len(metrics["step"]):
            return
        series = {name: values(metrics, name) for name in _IN_THE_SUMMARY}
        means = {f"final/{name}": final(column) for name, column in series.items() if column}
        self._send([Point(int(metrics["step"][-1]), 0, means)])

    def _seconds_to_finish(self) -> float:
        return 2 * _SECONDS_TO_FINISH


class WandbRecord(LoggerRecord):
    """A run of Weights & Biases, with the id of the run directory.

    wandb's own settings apply, such as WANDB_MODE, WANDB_NAME and WANDB_BASE_URL. It does not
    collect the command, which may have secrets, the code and the terminal: provenance.json has
    these, redacted.

    project: to which the run belongs. system_metrics: whether wandb measures the machine.
    """

    title = "wandb"
    remedy = "Use WANDB_MODE=offline"

    def __init__(self, project: str, system_metrics: bool):
        super().__init__()
        self._project = project
        self._measures_system = system_metrics

    def _open(self, description: Description) -> tuple[int, Mapping[str | None, int]]:
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
                name=self._name(description),
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
            last_step = int(self._run.summary.get("trainer/global_step") or 0)
            # The evaluation of a step comes after its metrics, so that of the last step may not
            # have arrived.
            sets = {row["set"] for row in read_evaluations(self._run_dir)}
            return last_step, dict.fromkeys(sets, last_step - 1)
        for earlier in folder.parent.glob(f"offline-run-*-{self._run.id}"):
            if earlier != folder:
                shutil.rmtree(earlier)
        self.shown_by = f"wandb sync {shell_path(folder)}"
        return 0, {}

    def _name(self, description: Description) -> str:
        """Return the run's name: as typed, else that of WANDB_NAME."""
        _, overrides = read_config(self._run_dir)
        is_typed = any(key_of(override) == "tracking.run_name" for override in overrides)
        of_environment = None if is_typed else os.environ.get("WANDB_NAME")
        return of_environment or description.run_name

    def _send(self, points: list[Point]) -> None:
        # Steps are wandb's only axis.
        super()._send([point for point in points if not point.over_documents])

    def _close(self) -> None:
        self._run.finish(exit_code=_EXIT_CODES[self._state])


class TensorBoardRecord(LoggerRecord):
    """TensorBoard's files in the run directory."""

    title = "TensorBoard"
    remedy = "Mend that"

    _logger: TensorBoardLogger

    def _open(self, description: Description) -> tuple[int, Mapping[str | None, int]]:
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
        return 0, {}

    def _after_rows(self) -> None:
        # So that other processes can read it.
        self._check_folder()
        self._logger.experiment.flush()

    def _send(self, points: list[Point]) -> None:
        self._check_folder()
        if self._settings:
            # TensorBoard shows hyperparameters together with the last values of the metrics that
            # are logged with them.
            first, *points = points
            self._logger.log_hyperparams(self._settings, first.metrics, first.position)
            self._settings = {}
        super()._send(points)

    def _check_folder(self) -> None:
        """Raise StorageError where the folder is gone.

        Otherwise a thread of TensorBoard's meets that, prints a traceback and stops.
        """
        folder = self._run_dir / TENSORBOARD_FOLDER
        if not folder.is_dir():
            raise StorageError(f"{folder} was removed")

    def _close(self) -> None:
        self._logger.finalize("success" if self._state == "done" else "failed")
