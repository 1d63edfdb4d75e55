"""`pgtk translate FILE`: the command here for a configuration of TRL or verl, and what is apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from pgtoolkit.config.keys import has_effect, key_named
from pgtoolkit.config.their_values import TheirValues
from pgtoolkit.config.trainer_keys import Theirs
from pgtoolkit.config.translate import IDLE, Translation
from pgtoolkit.config.translate_file import TheirConfig, dating_keys, read
from pgtoolkit.config.translate_version import of_its_version, on_version
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import text

OF_TRY = " That it notes that the steps end in the warm-up is of the try alone."
"""What is said of two steps that end during warm-up."""

_NO_FILE = re.compile(r"(\S+=\S+) needs an existing file.* There is nothing at that path").match
"""Matches a problem with a path at which nothing lies."""


def translate(path: Path, processes: int | None) -> str:
    """Return the page on a file of TRL or verl, in which secrets are hidden. processes: how many
    train; None for as many as the file says."""
    theirs = read(path)
    if processes:
        launched = TheirValues(theirs).names.get("launched")
        if launched and launched != processes:
            theirs.assumed.append(f"--processes {processes} is meant, in place of its {launched}")
        theirs.values["launch.num_processes"] = processes
    translation = Translation(of_its_version(theirs) if theirs.version else theirs)
    translation.check()
    return "\n".join(_page(theirs, translation, path))


def _page(theirs: TheirConfig, translation: Translation, path: Path) -> Iterator[str]:
    """Yield the lines of the page. theirs: what the file sets."""
    table = translation.theirs.table
    name = f"{table.content['trainer']} {table.content['version']}"
    of = f"RLOO of {name}" if "launch.rloo" in translation.theirs.values else name
    subject = of if translation.trains else f"{of} that trains nothing"
    yield from (redact(f"{path}, a configuration of {subject}, is here"), "")
    on_defaults = on_version(theirs, translation)
    if on_defaults:
        yield from (redact(on_defaults), "")
    steps = [word for word in translation.overrides if word.startswith("trainer.max_steps=")]
    words = [word for word in translation.overrides if word not in steps]
    path_of_python = translation.python_path
    before = f"PYTHONPATH={shlex.quote(path_of_python)} " if path_of_python else ""
    command = ["pgtk"] if translation.trains else ["pgtk", "evaluate"]
    yield redact(f"  {before}{shlex.join([*command, *words, *steps])}")
    instead = "in place of its last word, as a key is typed once" if steps else "behind it"
    config = translation.composed.config
    of_try = OF_TRY if config and config.optimizer.warmup_steps >= 2 else ""
    try_of_two = f"For a try of two steps, type trainer.max_steps=2 {instead}.{of_try}"
    if translation.trains or translation.to_fill:
        yield ""
    if translation.trains:
        yield try_of_two
    if translation.to_fill:
        yield f"To be filled in: {', '.join(translation.to_fill)}."
        options = [key for key in translation.to_fill if "." not in key]
        if options:
            yield f"Keys of {' and '.join(options)} that are not typed have our defaults then."
    by_default = [
        redact(f"{key}={text(value)} (ours is {translation.ours(key)})")
        for key, (value, row) in translation.typed.items()
        if row is not None and not translation.behind[row.name]
        if text(value) != translation.ours(key)
    ]
    left: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    of_version = translation.theirs.values.keys() - theirs.values.keys()
    for shown, reason, row in translation.left:
        if reason == IDLE and shown.partition("=")[0] in of_version:
            continue
        learned = reason != IDLE and _is_learned(translation, row)
        instead = "" if reason == IDLE else _instead(translation, row)
        line = f"{reason}{instead}"
        left[learned].setdefault(line, []).append(shown)
    left_out = {
        learned: [_line(_listed(names), line) for line, names in left[learned].items()]
        for learned in left
    }
    lost = translation.theirs.lost
    if lost:
        reason = (
            "bash hands them to no command, since the one before them ends: at a comment, or at a "
            "backslash that is not the last of its line"
        )
        left_out[True].insert(0, _line(" ".join(lost), reason))
    left_out[True] = [*map(redact, translation.theirs.unread), *left_out[True]]
    left_out[True] += _joined(translation.apart)
    unknown = [
        f"{key} (is {near} meant?)" if near else key
        for key, near in ((key, table.near(key)) for key in translation.theirs.values)
        if table.row(key) is None
    ]
    set_rows = [table.rows[key] for key in theirs.values if key in table.rows]
    earlier = sorted(row.name for row in set_rows if row.gone_in)
    learned_or_measured = "learned" if translation.trains else "measured"
    sections = {
        f"What {name} does not start with:": [*map(redact, translation.refused)],
        f"What changes what is {learned_or_measured}, and is left out:": left_out[True],
        "Assumed:": [*map(redact, [*translation.theirs.assumed, *_on_no_version(translation)])],
        "What is not quite the same:": _joined(translation.differing),
        f"In the command by defaults of {name}:": [", ".join(by_default)] if by_default else [],
        "What else has no equal here, and is left out:": left_out[False],
        f"Keys that {name} is not known to have:": [redact(", ".join(unknown))] if unknown else [],
        f"Keys of earlier versions, which {name} does not have:": (
            [", ".join(earlier)] if earlier else []
        ),
        "What this machine lacks for it:": [*map(redact, _lacking(translation.lacking))],
    }
    for title, lines in sections.items():
        if lines:
            yield from ("", title, *(f"  {line}".replace("`", "") for line in lines))


def _listed(names: list[str]) -> str:
    """Return settings in a row; many defaults beside settings of the file are only counted."""
    of_file = [shown for shown in names if not shown.endswith("(their default)")]
    count = len(names) - len(of_file)
    if count < 5 or not of_file:
        return ", ".join(names)
    return f"{', '.join(of_file)} and {count} of their defaults"


def _on_no_version(translation: Translation) -> list[str]:
    """Return a sentence on TRL's version where a file that sets few keys names none."""
    theirs = translation.theirs
    is_dated = theirs.version or dating_keys(theirs) or len(theirs.values) > 100  # as a dump has
    if theirs.table.content["trainer"] != "TRL" or is_dated:
        return []
    version = theirs.table.content["version"]
    return [f"TRL {version} is meant: a comment such as # trl==0.15.2 in the file says another"]


def _joined(lines: Iterable[str]) -> list[str]:
    """Return lines with those on the same settings in one."""
    remarks: dict[str, list[str]] = {}
    for line in lines:
        settings, _, remark = line.partition(": ")
        remarks.setdefault(settings, []).append(remark)
    return [f"{settings}: {'; '.join(of)}" for settings, of in remarks.items()]


def _lacking(problems: list[str]) -> list[str]:
    """Return what a machine lacks, with the files in one sentence."""
    files = [match for match in map(_NO_FILE, problems) if match]
    others = [problem for problem in problems if not _NO_FILE(problem)]
    named = ", ".join(match[1] for match in files)
    return [*([f"{named}: nothing lies there"] if named else []), *others]


def _line(settings: str, remark: str) -> str:
    """Return a line on settings. Of each part the secrets are hidden by itself."""
    return f"{redact(settings)}: {redact(remark)}"


def _is_learned(translation: Translation, row: Theirs) -> bool:
    """Return whether what is learned depends on a key of theirs."""
    keys = [key_named(key, translation.composed.config) for key in row.typed_keys]
    return row.learns or any(key is None or key.learns is not False for key in keys)


def _instead(translation: Translation, row: Theirs) -> str:
    """Return our defaults of the keys that a row types and the command leaves out."""
    keys = [key for key in dict.fromkeys(row.typed_keys) if key not in translation.typed]
    filled = translation.to_fill
    keys = [key for key in keys if not any(by.startswith(key) for by in filled)]
    # Where an option is to be filled in its defaults are not known; a penalty is k3 meanwhile.
    keys = [key for key in keys if key.partition(".")[0] not in {*filled} - {"kl"}]
    config = translation.composed.config
    keys = [key for key in keys if key_named(key, config) and has_effect(key, config)]
    keys = [key for key in keys if not key.startswith("evaluation.sets.")]  # it has no such set
    instead = [f"{key}={translation.ours(key)}" for key in keys]
    defaults = "defaults here are" if len(instead) > 1 else "default here is"
    return f"; the {defaults} {' '.join(instead)}" if instead else ""
