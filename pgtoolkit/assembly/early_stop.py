"""Records a signal that comes before training handles signals, so that the run can be resumed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from pgtoolkit.assembly.continuing import resume_command
from pgtoolkit.errors import Interrupted
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.provenance import collect
from pgtoolkit.runs.records import read_status
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import say
from pgtoolkit.tracking.signals import StopSignal, answered_by, raise_stop, swallowed


@contextlib.contextmanager
def stop_signals_recorded(
    config: JsonObject, run_dir: Path, overrides: list[str], sweep: str | None = None
) -> Iterator[None]:
    """Record STOP_SIGNALS in a block that imports what training needs, and trains.

    config: the plain configuration of the run.
    The first signal raises StopSignal, unless training has set its own handlers by then. If that
    ends the block, the run directory records it, and Interrupted is raised with the command that
    resumes the run. A second signal ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with answered_by(raise_stop):
        try:
            yield
        except StopSignal as stop:
            if not read_status(run_dir):
                with RunDirectory(run_dir) as run:
                    run.write_config(config, list(overrides))
                    run.write_provenance(collect(sys.argv))
                    run.set_status("interrupted", 0, str(stop), sweep=sweep)
            status = read_status(run_dir)
            if status["state"] == "done":
                say(f"stopped as asked ({stop}) after the run was done")
                return
            raise Interrupted(
                f"stopped as asked ({stop}); the run is {status['state']} at step "
                f"{status['step']}. Continue with: {resume_command(run_dir)}"
            ) from None
        finally:
            swallowed.clear()
