"""The log of a run: plain lines on the terminal and in run.log, without those of the frameworks,
whatever code of the user's does to Python's logging."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.runs.records import storage
from pgtoolkit.system.terminal import LegibleFormatter, Terminal, output, write_line
from pgtoolkit.training.frameworks import transformers

log = logging.getLogger("pgtoolkit")

_handlers: list[logging.Handler] = []
"""Those of the run that is logged."""


class _RunLogger(logging.Logger):
    """A logger that is always on, and whose handlers nobody finds by its name.

    Code of the user's may disable all loggers that exist, as `logging.config.dictConfig` does by
    default, set their levels, remove their handlers, or change the records of Python's logging.
    """

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.INFO

    def _log(self, level, msg, args, exc_info=None, extra=None, *_, **__) -> None:
        record = logging.LogRecord(self.name, level, __file__, 0, msg, args, exc_info)
        record.__dict__.update(extra or {})
        for handler in _handlers:
            handler.handle(record)


class _FileOfLog(logging.Handler):
    """Writes the lines of a log to an open file, as long as its disk takes them.

    A line that cannot be written must not hide the error that follows from the same disk.
    """

    def __init__(self, file: TextIO):
        super().__init__()
        self._file = file
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write(self.format(record) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                text = f"pgtk: warning: {self._file.name} lacks lines: {error.strerror}"
                write_line(text, output(2))


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log plain lines to the terminal, and the same lines with their time to `path`.

    Inside the block Lightning and transformers print warnings only.
    """
    with storage(path):
        file = path.open("a+", encoding="utf-8")
    terminal_handler = Terminal()
    terminal_handler.setFormatter(LegibleFormatter())
    file_handler = _FileOfLog(file)
    file_handler.setFormatter(LegibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    _handlers[:] = terminal_handler, file_handler
    # Every module has this logger already, so it is changed in place.
    class_before = log.__class__
    log.__class__ = _RunLogger
    quieten()
    try:
        yield
    except PgtoolkitError as error:
        # To the file only: the caller prints it on the terminal.
        record = logging.LogRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None)
        file_handler.handle(record)
        raise
    finally:
        log.__class__ = class_before
        _handlers.clear()
        with contextlib.suppress(OSError):  # of lines that the disk did not take
            file.close()


def quieten() -> None:
    """Silence messages of Lightning, transformers and torch that the user cannot act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers warns of padding tokens without an attention mask. Causality hides them.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not output(2).isatty():  # progress bars would fill a file
        transformers.utils.logging.disable_progress_bar()
    unavoidable = (
        ".*LeafSpec.*",  # of torch about Lightning, at every fit
        ".*gradient_checkpointing_enable.*",  # its new name is missing in transformers 5.0
        ".*num_workers.*",  # of Lightning: the step loader has no workers
    )
    for message in unavoidable:
        warnings.filterwarnings("ignore", message=message)
