"""Follows a run directory by a thread, which delivers its rows to a tracker."""

from __future__ import annotations

import atexit
import logging
import textwrap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import shell_path
from pgtoolkit.tracking.description import Description, Point, RowFile
from pgtoolkit.tracking.progress import entry

_SECONDS_BETWEEN_DELIVERIES = 1.0
_LONGEST_PAUSE = 30.0

_log = logging.getLogger("pgtoolkit")


class Record:
    """A record of one run in a tracker, which follows the run directory.

    The directory is the only source: about once a second a thread delivers what is appended to its
    metrics.jsonl and evaluations.jsonl, in order. No failure of the tracker stops training, and the
    next `start` for the same directory delivers what is still missing.
    """

    title: ClassVar[str]
    """The name of the tracker in messages."""

    remedy: ClassVar[str]
    """What the user can do if the record cannot be opened."""

    tries_again: ClassVar[bool] = True
    """Whether delivery goes on after a failure: a call of `_send` delivers all or nothing."""

    shown_by: str
    """The command to type, or the address to open, to see the record."""

    def __init__(self):
        self.info: dict[str, str] = {}
        """What status.json keeps of the record, by which other commands find it."""
        self.rows_delivered = 0
        self.last_failure = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def start(self, run_dir: Path, description: Description, consequence: str = "") -> None:
        """Open the record of a directory, which has config.yaml and status.json, and deliver rows.

        On a resume it is called after `drop_metrics_after`. Raises StorageError, whose message ends
        with `consequence`, where the record cannot be opened.
        """
        self._run_dir = Path(run_dir)
        try:
            last_step, last_of_sets = self._open(description)
        except (StorageError, ConfigError):
            raise
        except Exception as error:  # each library raises errors of its own
            raise StorageError(f"{self._failure(error)}. {consequence}") from error
        self._metrics = RowFile(self._run_dir / "metrics.jsonl", {None: last_step})
        self._files = (
            self._metrics,
            RowFile(self._run_dir / "evaluations.jsonl", last_of_sets),
        )
        self._missing = ["metrics", *self._last_parts()]
        self._thread = threading.Thread(
            target=self._deliver_until_ended, name=self.title, daemon=True
        )
        self._thread.start()
        # The interpreter does not wait for a daemon thread, which may still have rows to deliver.
        atexit.register(self.finish, "failed")

    def finish(self, state: str, limited: bool = True) -> list[str]:
        """Deliver the rest and close the record; return the names of parts that did not arrive.

        After a call that has returned, another does nothing.
        state: done, failed or interrupted.
        limited: whether to give up after `_seconds_to_finish`.
        """
        thread = self._thread
        if thread is None:
            return []
        if not self._ended.is_set():
            self._state = state
            self._ended.set()
        thread.join(self._seconds_to_finish() if limited else None)
        # Where a signal has ended the wait, the interpreter's end waits again.
        self._thread = None
        atexit.unregister(self.finish)
        return list(self._missing)

    def entries(self) -> list[str]:
        """Return the lines that say how to see the record, for the start and the end of a run."""
        return [entry(self.title, self.shown_by)]

    def charts(self) -> str | None:
        """Return the address of a page that shows this run and others, if there is one."""
        return None

    def _open(self, description: Description) -> tuple[int, Mapping[str | None, int]]:
        """Open the record. Return the last step that it has, and that of each evaluated set."""
        raise NotImplementedError

    def _send(self, points: list[Point]) -> None:
        raise NotImplementedError

    def _after_rows(self) -> None:
        """Do what follows each delivery of rows."""

    def _close(self) -> None:
        """End the record with `_state`."""
        raise NotImplementedError

    def _last_parts(self) -> dict[str, Callable[[], None]]:
        """Return name -> call, for everything that is delivered after the last row."""
        return {"the end of the run": self._close}

    def _seconds_to_finish(self) -> float:
        raise NotImplementedError

    def _failure(self, error: Exception) -> str:
        """Return in one line what failed, without credentials and without a full stop."""
        message = " ".join(redact(str(error)).split()) or type(error).__name__
        short = textwrap.shorten(message, 300, placeholder=" …").rstrip(".")
        return f"{self.title} failed: {short}"

    def _deliver_until_ended(self) -> None:
        pause = _SECONDS_BETWEEN_DELIVERIES
        while True:
            is_last = self._ended.is_set()
            has_rows = self._succeeds(self._deliver)
            if has_rows and self._succeeds(self._after_rows):
                if self._has_failed:
                    _log.info(f"{self.title} answers again: metrics are complete")
                self._has_failed = False
                pause = _SECONDS_BETWEEN_DELIVERIES
            elif self.tries_again:
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._missing.clear()  # the warning has said it
                return
            if is_last:
                break
            self._ended.wait(pause)
        if has_rows:
            self._missing.remove("metrics")
        for name, deliver in self._last_parts().items():
            if self._succeeds(deliver):
                self._missing.remove(name)

    def _succeeds(self, deliver: Callable[[], None]) -> bool:
        """Call `deliver`, and return whether it raised no error. The first error is a warning."""
        try:
            deliver()
        except Exception as error:  # whatever the libraries raise, training continues
            self.last_failure = self._failure(error)
            if not self._has_failed:
                stops = "" if self.tries_again else "It gets no more rows of this run. "
                _log.warning(
                    f"{self.last_failure}. {stops}Nothing is lost: metrics are kept in "
                    f"{shell_path(self._run_dir / 'metrics.jsonl')}, and a resumed run delivers "
                    "what is missing."
                )
            self._has_failed = True
            return False
        return True

    def _deliver(self) -> None:
        """Send the rows that were appended since the last delivery."""
        for file in self._files:
            while True:
                num_rows, points, offset = file.next_batch()
                if points:
                    self._send(points)
                    self.rows_delivered += num_rows
                if offset == file.offset:
                    break
                file.offset = offset
