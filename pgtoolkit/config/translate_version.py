"""The defaults of the version of TRL that a file is written for, where these were others."""

from __future__ import annotations

import shlex
from dataclasses import replace

from pgtoolkit.config.their_values import FORMULA, TheirValues
from pgtoolkit.config.translate import IDLE, Translation
from pgtoolkit.config.translate_file import TheirConfig, dating_keys, is_older, is_same
from pgtoolkit.system.report import text


def on_version(theirs: TheirConfig, translation: Translation) -> str:
    """Return what has to be said of a file that names another version of TRL, or has keys of an
    earlier one: which defaults were others, and what they make here; "" for nothing.

    translation: of the file, with the defaults of the version that it names.
    """
    ours = theirs.table.content["version"]
    dating = dating_keys(theirs)
    if theirs.version:
        if is_same(theirs):
            return ""
        changed = _changed(theirs, translation)
        read = f"{theirs.named_by} names TRL {theirs.version}, and is read by TRL {ours}'s code"
        if not changed:
            return f"{read} and defaults."
        return f"{read}. In the command are the defaults of its own version: {', '.join(changed)}."
    if not dating:
        return ""
    until = theirs.table.content["until"][dating[0]]
    read = f"It has {dating[0]}, which TRL has before {until} alone"
    read += f", and is read by TRL {ours}'s code and defaults."
    then = Translation(of_its_version(theirs))
    then.check()
    changed = _changed(theirs, then)
    if changed:
        read += f" That version has other defaults: {', '.join(changed)}."
        typed = [word for word in then.overrides if word not in translation.overrides]
        dropped = [word for word in translation.overrides if word not in then.overrides]
        read += f" For these type {shlex.join(typed)}" if typed else ""
        read += f" in the place of {shlex.join(dropped)}" if typed and dropped else ""
        read += "." if typed else ""
    read += " A comment such as # trl==0.15.2 in the file says a version: the command then has its"
    return f"{read} defaults."


def _changed(theirs: TheirConfig, then: Translation) -> list[str]:
    """Return those values of an earlier version that act and are others now.

    then: the translation with these values.
    """
    idle = [shown for shown, reason, _ in then.left if reason == IDLE]
    earlier = then.theirs.values
    changed = [then.shown(name) for name in earlier if theirs.values.get(name) != earlier[name]]
    return [shown for shown in changed if shown not in idle]


def of_its_version(theirs: TheirConfig) -> TheirConfig:
    """Return a configuration with the defaults of its own version where it sets no value."""
    of_unsloth = TheirValues(theirs).own
    changes: dict[str, object] = {}
    for version in theirs.table.content["versions"]:  # from the newest on
        if not is_older(theirs, version["before"]):
            continue
        changes |= {
            name: of
            for name, of in version["keys"].items()
            if name in theirs.table.rows and name not in {*theirs.values, *of_unsloth}
        }
        meant = version.get("meant", {})
        changes |= {name: of for name, of in meant.items() if name in theirs.values}
    values = TheirValues(theirs)
    for name, value in changes.items():
        formula = FORMULA.fullmatch(value) if isinstance(value, str) else None
        changes[name] = values.evaluated(formula[1]) if formula else value
    rows = theirs.table.rows
    changes = {
        name: value
        for name, value in changes.items()
        if text(value) != text(theirs.values.get(name, rows[name].default))
    }
    return replace(theirs, values=theirs.values | changes, assumed=[*theirs.assumed])
