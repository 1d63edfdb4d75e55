"""`pgtk translate FILE`: a configuration of TRL or verl as a command here, with a list of the
differences and of keys without an equal."""

from __future__ import annotations

import shlex
from pathlib import Path

from pgtoolkit.config.compose import compose
from pgtoolkit.config.elsewhere import NONE, known_as
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import plain_value
from pgtoolkit.config.schema import default_options
from pgtoolkit.config.translate_file import Setting, TheirConfig, Value, default_of, read
from pgtoolkit.config.translate_trl import settings_of_trl
from pgtoolkit.config.translate_verl import settings_of_verl
from pgtoolkit.system.report import text


def translate(path: Path, processes: int) -> str:
    """Return the page on a file of TRL or verl.

    processes: how many TRL would train on, which its file does not say.
    """
    theirs = read(path)
    if theirs.trainer == "verl":
        settings = [*settings_of_verl(theirs)]
    else:
        settings = [*settings_of_trl(theirs, processes)]
    by_default = [setting for setting in settings if _is_by_default(setting, theirs)]
    values_here = _values_here(settings)
    differing = [
        setting for setting in by_default if not _are_equal(values_here[setting.key], setting.value)
    ]
    in_command = [
        setting for setting in settings if setting not in by_default or setting in differing
    ]
    command = shlex.join(["pgtk", *(setting.override for setting in in_command)])
    lines = [f"{path}, a configuration of {theirs.trainer}, is here", "", f"  {command}"]
    if differing:
        lines += [
            "",
            f"Some of it replaces defaults of {theirs.trainer} that the file does not change, and "
            "that differ here:",
        ]
    for setting in differing:
        name = setting.names[0]
        line = (
            f"  {setting.override}: {name}={text(theirs[name])} there, "
            f"{text(values_here[setting.key])} here"
        )
        if setting.key == "aggregation":
            line += "; gradients have another size under each"
        lines.append(line)
    lines += _differences(theirs)
    return "\n".join(lines)


def _is_by_default(setting: Setting, theirs: TheirConfig) -> bool:
    """Return whether an override follows from the other trainer's defaults alone."""
    return bool(setting.names) and not any(theirs.has(name) for name in setting.names)


def _values_here(settings: list[Setting]) -> dict[str, Value]:
    """Return the default of each key here, with the options that the settings choose; of a group,
    its default option."""
    choices = {setting.key: setting.override for setting in settings if setting.key in options()}
    config = compose([*choices.values()]).config
    values = {}
    for setting in settings:
        if setting.key in choices:
            values[setting.key] = default_options()[setting.key]
        else:
            values[setting.key] = plain_value(config, setting.key)
    return values


def _are_equal(ours: Value, theirs: Value) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours == theirs
    return text(ours) == text(theirs)


def _differences(theirs: TheirConfig) -> list[str]:
    """Return lines on the keys of the file: those that the command leaves out, with the reason, and
    those that mean something else here."""
    without_equal: list[str] = []
    by_hand: list[str] = []
    remarks: list[str] = []
    unknown: list[str] = []
    for key, value in theirs.values.items():
        rows = known_as(key, theirs.trainer)
        if not rows:
            unknown.append(key)
            continue
        row = rows[0][1]
        if key in theirs.used:
            if row.remark:
                remarks.append(f"{key}: {row.remark}")
        elif row.here == NONE:
            is_default = row.defaults and _are_equal(default_of(theirs.trainer, rows[0][0]), value)
            if not is_default:
                without_equal.append(f"{key}={text(value)}: {row.remark}")
        else:
            remark = f" ({row.remark})" if row.remark else ""
            by_hand.append(f"{key}={text(value)}: {row.here}{remark}")
    sections = {
        "What has no equal here:": without_equal,
        "What is to be set by hand:": by_hand,
        "What is not quite the same:": remarks,
        f"Keys that {theirs.trainer} is not known to have:": [", ".join(unknown)]
        if unknown
        else [],
    }
    lines = []
    for title, entries in sections.items():
        if entries:
            lines += ["", title, *(f"  {entry}".replace("`", "") for entry in entries)]
    return lines
