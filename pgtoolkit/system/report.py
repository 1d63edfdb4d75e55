"""Writes for the user: problems in one form, notes, errors, and paths that can be pasted."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from pgtoolkit.errors import Interrupted, PgtoolkitError
from pgtoolkit.losses.checks import is_whole
from pgtoolkit.ranks.environment import joined
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.safe_text import legible
from pgtoolkit.system.terminal import output, write_line


@dataclass
class Report:
    """The result of checking a configuration.

    problems: refusals, each as `refusal` writes it.
    notes: choices that are allowed but may surprise.
    lacking: the problems of files and packages that this machine lacks.
    default_of: returns the default of a key in this configuration.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    default_of: Callable[[str], object] = field(default=lambda key: None, compare=False, repr=False)

    def refuse(self, setting: str, needs: str, got: object, reason: str, use: str) -> None:
        """Add `setting needs X (got Y). Reason. Use override.`"""
        self.problems.append(refusal(setting, needs, got, reason, use))

    def refuse_value(
        self, key: str, value: object, needs: str, reason: str, better: object
    ) -> None:
        """Refuse the value of a key, and propose another value of it."""
        self.refuse(f"{key}={text(value)}", needs, value, reason, f"{key}={text(better)}")

    @property
    def is_refused(self) -> bool:
        """Return whether there are problems beside those that this machine lacks something."""
        return not {*self.problems} <= {*self.lacking}

    def concerns(self, *groups: str) -> bool:
        """Return whether a problem is with one of these keys, or with a key or an option of one of
        these groups. Any of a group's keys may be meant by one that it does not have."""
        beginning = re.compile(rf"(?:Unknown key ')?(?:{'|'.join(groups)})\b")
        return any(beginning.match(problem) for problem in self.problems)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def refusal(setting: str, needs: str, got: object, reason: str, use: str) -> str:
    """Return a problem in the form that all problems have."""
    value = "''" if got == "" else text(got)
    if use == setting and "=" in use and " " not in use:
        # The user has typed a word of the documentation, such as FOLDER, unchanged.
        use += ", which stands for a value of your own"
    return f"{setting} needs {needs} (got {value}). {reason} Use {use}."


def say(text: str, error: bool = False, is_redacted: bool = False) -> None:
    """Print for the user, on standard output or standard error.

    All that the user sees goes through here or through the log. Secrets are hidden, and characters
    that act on a terminal, as in a stranger's name of a run, are shown as codes.

    is_redacted: the secrets in it are hidden already, in each of its parts by itself: as a whole,
        `x=token: a reason` would look like one.
    """
    write_line(legible(text if is_redacted else redact(text)), output(2 if error else 1))


def print_error(error: PgtoolkitError) -> int:
    """Print the error and return its exit status; several processes print the same error once."""
    rank = joined()
    if rank is None or rank.number == 0:
        say(in_words(error), error=True)
    elif not error.on_all_ranks:
        say(f"pgtk: error: rank {rank.number}: {error}", error=True)
    return error.exit_status


def in_words(error: PgtoolkitError) -> str:
    """Return the message with which an error ends the command."""
    start = "pgtk" if isinstance(error, Interrupted) else "pgtk: error"
    return f"{start}: {error}"


def key_of(override: str) -> str:
    """Return the key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def text(value: object) -> str:
    """Return a value as the user types it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(text, value))}]"
    return str(value)


def identity(value: object) -> str:
    """Return a text that equal values have in common, such as 1 and 1.0 or a choice and its name,
    and others have not: true is not 1, nor is the text "1"."""
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {identity(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(identity, value))}]"
    return repr(value)


def override(key: str, value: object) -> str:
    """Return an override in Hydra's grammar."""
    return f"{key}={in_override(value)}"


def in_override(value: object) -> str:
    """Return a value in Hydra's grammar, a text in quotes where it needs them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {in_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_override, value))}]"
    content = text(value)
    is_plain = re.fullmatch(r"[\w./:@+\[\]-]+", content)
    return content if is_plain else '"' + content.replace('"', '\\"') + '"'


def plural(count: int, noun: str) -> str:
    """Return the count with its noun in the singular or plural."""
    if count == 1:
        return f"{count} {noun}"
    if noun.endswith("ry"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}s"


def listed(names: Sequence[str], limit: int) -> str:
    """Return the first `limit` names, and the number of the others."""
    words = ", ".join(names[:limit])
    if len(names) > limit:
        return f"{words} and {len(names) - limit} more"
    return words


def nearest(word: str, names: Iterable[str], at_least: float = 0.5) -> str | None:
    """Return the most similar name, if any is similar: the first of `all_nearest`."""
    return next(iter(all_nearest(word, names, at_least)), None)


def all_nearest(word: str, names: Iterable[str], at_least: float = 0.5) -> list[str]:
    """Return the names that are most similar, and equally so, if any is similar.

    Swapped letters and initials, such as lr, count as most similar.
    """
    word = word.lower()

    def similarity(name: str) -> float:
        initials = "".join(part[0] for part in name.rpartition(".")[2].split("_") if part)
        is_swapped = sorted(word) == sorted(name.lower())
        is_initials = len(word) > 1 and word == initials
        ratio = difflib.SequenceMatcher(None, word, name.lower()).ratio()
        return ratio + 0.5 if is_swapped or is_initials else ratio

    similar = [(similarity(name), name) for name in names]
    highest = max(similar, default=(0.0, ""))[0]
    return [name for value, name in similar if value == highest >= at_least]


def near_path(path: str | Path) -> str | None:
    """Return the path of a file or folder with a similar name, for one where there is nothing;
    None if nothing in its folder is similar.

    The same ending alone makes no names similar.
    """
    folder, name = os.path.split(os.path.expanduser(path).rstrip("/"))
    if folder and not os.path.isdir(folder):
        folder = near_path(folder) or ""
        if not os.path.isdir(folder):
            return None
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    with contextlib.suppress(OSError):
        others = [other for other in os.listdir(folder or ".") if other[0] != "."]
        stems = {other: without_ending(Path(other)).name for other in others}
        near = all_nearest(without_ending(Path(name)).name, {*stems.values()}, 0.7)
        same = nearest(name, [other for other in others if stems[other] in near], 0)
        return same and os.path.join(folder, same)
    return None


def is_number(value: object) -> TypeGuard[float]:
    """Return True if the value is a finite int or float; a bool is not."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def shell_path(path: str | Path) -> str:
    """Return the shortest path, quoted for a shell."""
    return shlex.quote(shortest_path(path))


def shortest_path(path: str | Path) -> str:
    """Return the path from the current directory if it lies inside, else the absolute one."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    return absolute if Path(relative).parts[:1] == (os.pardir,) else relative


def free_path(path: str, ending: str = "") -> str:
    """Return a path with an ending that does not exist, with a number before it if need be."""
    numbered = (f"{path}-{number}{ending}" for number in itertools.count(2))
    names = itertools.chain([path + ending], numbered)
    return next(name for name in names if not os.path.lexists(os.path.expanduser(name)))


def without_ending(path: Path) -> Path:
    """Return a path without the ending, of letters, that says a file's format.

    `loss_0.1` and `loss.v2` have none.
    """
    return path.with_suffix("") if re.fullmatch(r"\.[A-Za-z]+", path.suffix) else path


def with_ending(path: Path, ending: str) -> Path:
    """Return a path with another ending."""
    return path.parent / f"{without_ending(path).name}{ending}"


def beside(path: Path) -> Path:
    """Return a path whose name has `-2` before its ending."""
    stem = without_ending(path).name
    return path.parent / f"{stem}-2{path.name.removeprefix(stem)}"


def program(name: str) -> str:
    """Return the command for a program of this Python's environment.

    It is the bare name if the shell finds that program by it, or if the environment has none.
    """
    beside_python = Path(sys.executable).parent / name
    if not beside_python.exists():
        return name
    in_path = shutil.which(name)
    if in_path and Path(in_path).resolve() == beside_python.resolve():
        return name
    return shell_path(beside_python)
