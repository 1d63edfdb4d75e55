"""The log of a run: plain lines on the terminal and in run.log, without those of the frameworks."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.runs.records import storage
from pgtoolkit.system.terminal import LegibleFormatter, Terminal
from pgtoolkit.training.frameworks import transformers

log = logging.getLogger("pgtoolkit")


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log plain lines to the terminal, and the same lines with their time to `path`.

    Inside the block Lightning and transformers print warnings only.
    """
    with storage(path):
        file = path.open("a+", encoding="utf-8")
    terminal_handler = Terminal()
    terminal_handler.setFormatter(LegibleFormatter())
    file_handler = logging.StreamHandler(file)
    file_handler.setFormatter(LegibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [terminal_handler, file_handler]
    log.propagate = False
    log.setLevel(logging.INFO)
    quieten()
    try:
        yield
    except PgtoolkitError as error:
        # To the file only: the caller prints it on the terminal.
        record = log.makeRecord(log.name, logging.ERROR, __file__, 0, str(error), (), None)
        file_handler.handle(record)
        raise
    finally:
        log.handlers = []
        log.propagate = True
        file.close()


def quieten() -> None:
    """Silence messages of Lightning, transformers and torch that the user cannot act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers warns of padding tokens without an attention mask. Causality hides them.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # progress bars would fill a file
        transformers.utils.logging.disable_progress_bar()
    unavoidable = (
        ".*LeafSpec.*",  # of torch about Lightning, at every fit
        ".*gradient_checkpointing_enable.*",  # its new name is missing in transformers 5.0
        ".*num_workers.*",  # of Lightning: the step loader has no workers
    )
    for message in unavoidable:
        warnings.filterwarnings("ignore", message=message)
