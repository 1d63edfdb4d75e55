"""The errors a user can mend, each with the exit status `pgtk` ends with."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from enum import IntEnum

MAX_CHARACTERS = 1000
"""Characters of another library's message that are shown."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, or the exception's type without one.

    A longer line is cut after MAX_CHARACTERS.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} …"


class ExitStatus(IntEnum):
    """The exit statuses of `pgtk`.

    meaning: what has happened. in_a_script: what a script does then.
    """

    meaning: str
    in_a_script: str

    def __new__(cls, number: int, meaning: str, in_a_script: str) -> ExitStatus:
        status = int.__new__(cls, number)
        status._value_ = number
        status.meaning = meaning
        status.in_a_script = in_a_script
        return status

    done = (0, "Done.", "Goes on.")
    failed = (
        1,
        "An internal error of pgtoolkit, with a traceback; of a sweep, that a job has failed.",
        "Stops. The same `pgtk sweep` trains the jobs again that are not done.",
    )
    refused = (
        2,
        "The configuration was refused; the message lists every problem found.",
        "Stops: the same command would be refused again.",
    )
    bad_data = (
        3,
        "A document cannot be trained on, a function of your own has a fault, or a judge is gone "
        "before this start made a step.",
        "Stops, until the data or the function is mended; then `pgtk resume`.",
    )
    not_finite = (
        4,
        "Too many steps with a non-finite loss or gradient.",
        "Stops: with the same settings it would happen again. `pgtk compare` counts the run as a "
        "result.",
    )
    lost = (
        5,
        "A process or a sampling server ended, did not answer in time, or differs from the others.",
        "May start the command again with `pgtk resume` or `pgtk continue`, which go on from the "
        "newest checkpoint.",
    )
    storage = (
        6,
        "A file or a store cannot be read or written.",
        "Stops, until there is room or the file is back; then `pgtk resume`.",
    )
    differs = (
        7,
        "`pgtk parity` has found a number that differs by more than its tolerance.",
        "Reads what it printed: the first number that differs, and what to type.",
    )
    interrupted = (
        75,
        "Stopped by a signal after saving a checkpoint, or since a judge is gone after this start "
        "made a step; it can be resumed.",
        "Starts it again with `pgtk resume` or `pgtk continue`; a queue puts the job back.",
    )
    stopped = (130, "Stopped by a keyboard interrupt.", "Stops, too.")
    unread = (
        141,
        "The program that reads the output, such as `head`, closed it early.",
        "Goes on: the reader has what it wanted.",
    )


class PgtoolkitError(Exception):
    """Base of every error that is reported as one message without a traceback.

    on_all_ranks: True where every rank raises the same error, and rank 0 prints it for all.
    agreed: True where every rank raises it at this place of its program.
    """

    exit_status = ExitStatus.failed
    on_all_ranks = False
    agreed = False


class ConfigError(PgtoolkitError):
    """The configuration was refused; the message lists every problem found."""

    exit_status = ExitStatus.refused


@contextlib.contextmanager
def kept(problems: list[str]) -> Iterator[None]:
    """Keep what a ConfigError says among the problems, so that others are looked for, too.

    `refuse_all` raises them together.
    """
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one ConfigError of all problems, if there are any."""
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


class DataError(PgtoolkitError, ValueError):
    """A document cannot be trained on; the message names it.

    documents: the numbers of documents in a call that knows no names of them.
    """

    exit_status = ExitStatus.bad_data

    def __init__(self, message: str, documents: Sequence[int] = ()):
        super().__init__(message)
        self.documents = tuple(documents)


class VerifierLost(DataError):
    """Nobody scores the completions any more; a run can be resumed once somebody does."""


class NumericalError(PgtoolkitError):
    """Too many steps with a non-finite loss or gradient."""

    exit_status = ExitStatus.not_finite
    on_all_ranks = True


class RankLost(PgtoolkitError):
    """One of several processes ended, did not answer in time, or differs from the others."""

    exit_status = ExitStatus.lost


class SamplerLost(PgtoolkitError):
    """A sampling server does not start, ended, did not answer in time, or gave wrong answers."""

    exit_status = ExitStatus.lost


class StorageError(PgtoolkitError):
    """A checkpoint, rollout file or tracking store could not be read or written."""

    exit_status = ExitStatus.storage


def as_storage_error(error: OSError) -> StorageError:
    """Return the StorageError for an error of the operating system, such as that of a full disk."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return StorageError(
            "the current directory was deleted. Use cd to go to a directory that exists."
        )
    return refused_by_disk(error.filename or "a file", error)


def refused_by_disk(path: object, error: OSError, action: str = "read or written") -> StorageError:
    """Return the StorageError for a file that the system does not let us read or write.

    action: what was tried.
    It says what shows the cause, as far as the number of the error tells.
    """
    message = f"{path} cannot be {action}: {error.strerror or error}"
    advice = _SHOWN_BY.get(error.errno or 0)
    if advice is None:
        return StorageError(message)
    place = shlex.quote(_existing(error.filename or path))
    return StorageError(f"{message}. {advice.format(place)}")


def _existing(path: object) -> str:
    """Return the path, or the nearest folder above it that exists."""
    place = os.path.abspath(str(path))
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    return place


_SHOWN_BY = {
    errno.EACCES: "Let this user read and write it: namei -l {} shows who may.",
    errno.EPERM: "Let this user change it: namei -l {0} shows who may, and lsattr -d {0} more.",
    errno.EROFS: "Its file system takes no writes: findmnt -T {} shows how it is mounted.",
    errno.ENOSPC: "Make room on its disk: df -h {} shows how much is free.",
    errno.EDQUOT: "Make room within the quota: quota -s shows how much is free.",
    errno.EISDIR: "A folder lies in its place: put the file back, from a backup.",
    errno.ENOTDIR: "A file lies in the place of its folder: put the folder back, from a backup.",
    errno.ENOENT: "It was deleted: put it back, from a backup.",
    errno.EIO: "Its disk, or the server of its files, fails: dmesg says more.",
    errno.ESTALE: "The server of its files has lost it: mount its file system again.",
}
"""What to do by the number of an error, where {} or {0} stands for the path."""


class Interrupted(PgtoolkitError):
    """The run was stopped by a signal after saving a checkpoint; it can be resumed."""

    exit_status = ExitStatus.interrupted
    on_all_ranks = True
