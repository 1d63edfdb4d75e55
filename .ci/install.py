"""Installs something into this environment, with the versions of constraints.txt.

    .venv/bin/python .ci/install.py -e .

By uv where that is on the machine, which takes a part of the time, else by pip. uv reads no setting
of pip's, so that it is told of indexes, folders of wheels and limits.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = ["-c", str(Path(__file__).parent.parent / "constraints.txt")]
HANDED_ON = ("constraint", "index-url", "extra-index-url", "find-links")
PLACES = ("global", "install", ":env:")
"""Sections of pip's settings; a later one wins."""


def settings_of_pip() -> dict[str, str]:
    """Return the values of pip's settings by name."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    by_place: dict[str, dict[str, str]] = {place: {} for place in PLACES}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        place, _, key = name.partition(".")
        if place in by_place:
            by_place[place][key] = ast.literal_eval(value)
    return by_place["global"] | by_place["install"] | by_place[":env:"]


def command(what: list[str]) -> list[str]:
    """Return the command that installs it."""
    uv = shutil.which("uv")
    if uv is None:
        return [*PIP, "install", *CONSTRAINTS, *what]
    settings = settings_of_pip()
    # Of several indexes pip takes the highest version of all, and so does uv with this strategy.
    words = [uv, "pip", "install", "--index-strategy", "unsafe-best-match"]
    words += ["--python", sys.executable, *CONSTRAINTS]
    for name in HANDED_ON:
        for value in settings.get(name, "").split():
            words += [f"--{name}", value]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        words.append("--no-index")
    return words + what


if __name__ == "__main__":
    words = command(sys.argv[1:])
    os.execv(words[0], words)
