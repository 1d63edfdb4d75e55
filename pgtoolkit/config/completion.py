"""Tab completion: pgtk's own words, before Hydra completes the overrides after them."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable

from pgtoolkit.config.files import sweep_files
from pgtoolkit.errors import ConfigError


def complete(argv: list[str], commands: list[str], hydra: Callable[[list[str]], int]) -> int:
    """Answer `pgtk -sc ...`. A half-typed line is no error: what cannot be completed gives no words.

    hydra: runs Hydra with a command line.
    """
    if not any(word.startswith("query=") for word in argv):
        return hydra(argv)
    if "COMP_LINE" not in os.environ:
        reason, use = "A shell sets it at a Tab.", 'eval "$(pgtk -sc install=bash)"'
        raise ConfigError(f"pgtk -sc query=... needs COMP_LINE in the environment (got none). {reason} Use {use}.")
    words, line = split(os.environ["COMP_LINE"], commands)
    print("\n".join(words), flush=True)
    if line is not None:
        os.environ["COMP_LINE"] = line
        found, quiet = io.StringIO(), contextlib.suppress(Exception, SystemExit)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(found), quiet:
            hydra(argv)
        # Hydra takes the types of the keys, and what options share, for options, which nobody means.
        print(" ".join(word for word in found.getvalue().split() if not re.search("=(schema|_)", word)), flush=True)
    return 0


def split(line: str, commands: list[str]) -> tuple[list[str], str | None]:
    """(words that fit here, the line as Hydra is to complete it); None where no override belongs.

    line: as far as it is typed, the program first. commands: the first words that pgtk knows.
    """
    program, *words = line.split() or [""]
    being_typed = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        return [word for word in commands if word.startswith(being_typed)], line
    if words[0] == "check":
        rest = " ".join([program, *words[1:], being_typed])
        return split(rest, ["sweep"])
    if words[0] == "sweep" and len(words) == 1:
        return [name for name in sweep_files() if name.startswith(being_typed)], None
    if words[0] in ("sweep", "resume") and len(words) > 1:
        return [], " ".join([program, *words[2:], being_typed])
    return [], None if words[0] in commands else line
