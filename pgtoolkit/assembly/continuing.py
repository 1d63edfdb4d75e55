"""The commands to type after a run: to continue, deliver and compare it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pgtoolkit.config.files import sweep_files
from pgtoolkit.config.keys import OPTION_KEYS, OWN_CODE, default, option_values, shown
from pgtoolkit.config.names import retrained
from pgtoolkit.config.new_run import new_run_command, new_run_overrides, sweep_of_file
from pgtoolkit.config.own_code import short_name
from pgtoolkit.config.rules.addresses import named_addresses
from pgtoolkit.config.rules.executed import folders_outside, named_commands
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.rollouts.recorded_folder import batches_in
from pgtoolkit.runs.records import (
    checkpoint_steps,
    leaves,
    read_config,
    read_data,
    read_resolved,
    read_status,
)
from pgtoolkit.system.functions import parameters_in_file
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import free_path, key_of, shell_path, shortest_path, text
from pgtoolkit.tracking.next_commands import OF_PYTHON, pgtk_command
from pgtoolkit.tracking.store_address import absolute_uri


def resume_command(run_dir: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return the command, or the call, that continues a run, with overrides.

    It repeats the keys that have to be typed, since a run's own file may not decide them.
    """
    typed = _typed_overrides(run_dir)
    if OF_PYTHON in os.environ and not overrides:
        typed = []  # A configuration of Python has them.
    return pgtk_command("resume", shortest_path(run_dir), *typed, *overrides)


def going_on_command(run_dir: Path, changes: JsonObject) -> str:
    """Return the command with which a run goes on with other values of keys: as the run it is, or
    as one of its own."""
    before = dict(leaves(read_resolved(run_dir)))
    overrides = [f"{shown(name)}={text(value)}" for name, value in changes.items()]
    if retrained(before, before | changes):
        return branch_command(run_dir, overrides)
    return resume_command(run_dir, overrides)


def training_on_command(run_dir: Path, changes: JsonObject) -> str:
    """Return the command with which a finished run goes on: a job of a sweep as a run of its own,
    since its sweep finds what it has trained by the values that it began with."""
    if read_status(run_dir).get("sweep") and changes:
        overrides = [f"{shown(name)}={text(value)}" for name, value in changes.items()]
        return branch_command(run_dir, overrides)
    return going_on_command(run_dir, changes)


def another_training(
    before: JsonObject, now: JsonObject, run_dir: Path, typed: list[str]
) -> str | None:
    """Return the problem with a run that would go on with other values of keys that change what is
    learned; None where they are the same.

    before, now: the plain configurations of the run and of its continuation.
    typed: the overrides of the continuation.
    """
    movable = read_data(run_dir)  # Their contents are compared.
    changes = retrained(before, now)
    changes = {key: values for key, values in changes.items() if key not in movable}
    if not changes:
        return None
    pairs = changes.items()
    needs = "need a run of their own" if len(changes) > 1 else "needs a run of its own"
    had = ", ".join(f"{key}={text(value)}" for key, (value, _) in pairs)
    return (
        f"{', '.join(f'{key}={text(value)}' for key, (_, value) in pairs)} {needs} (got "
        f"{shell_path(run_dir)}, which began with {had}). It changes what is learned, and a run is "
        f"the record of one training. Use {branch_command(run_dir, typed)}."
    )


def branch_command(run_dir: Path, overrides: Sequence[str]) -> str:
    """Return the command that goes on from the newest checkpoint of a run as a run of its own.

    It makes as many steps again where the run has made all of its own. Without a checkpoint it is
    the command of a new run.
    """
    steps = checkpoint_steps(run_dir)
    if not steps:
        return new_run_command(run_dir, overrides)
    return _branch_at(run_dir, steps[-1], overrides)


def _branch_at(run_dir: Path, step: int, overrides: Sequence[str]) -> str:
    """Return the command that goes on from a checkpoint of a run as a run of its own."""
    config = read_resolved(run_dir)
    folder = free_path(f"{shortest_path(run_dir)}-{step}")
    values = {key_of(item): item for item in _typed_overrides(run_dir)}
    own_folder = f"rollout.save_path={_quoted(free_path(f'{folder}-rollouts'))}"
    if config["rollout"].get("save_path"):
        values["rollout.save_path"] = own_folder
    values |= {key_of(item): item for item in overrides}
    typed_folder = values.get("rollout.save_path", "").partition("=")[2].strip("'\"")
    if typed_folder not in ("", "null") and batches_in(typed_folder):
        values["rollout.save_path"] = own_folder
    typed_steps = values.get("trainer.max_steps", "").partition("=")[2]
    max_steps = int(typed_steps) if typed_steps.isdecimal() else config["trainer"]["max_steps"]
    if max_steps <= step:
        values["trainer.max_steps"] = f"trainer.max_steps={2 * step}"
    return pgtk_command(
        "resume",
        shortest_path(run_dir),
        f"--step={step}",
        f"hydra.run.dir={_quoted(folder)}",
        *values.values(),
    )


def sync_command(run_dir: str | Path, uri: str | None) -> str:
    """Return the command that delivers to MLflow what it lacks of a run.

    A store that is not the default one is part of it, since it has to be typed.
    """
    arguments = [shortest_path(run_dir)]
    if absolute_uri(uri) != absolute_uri(None):
        assert uri is not None
        arguments.append(f"--uri={redact(uri)}")
    return pgtk_command("sync", *arguments)


def _typed_overrides(run_dir: str | Path) -> list[str]:
    """Return overrides with the programs of a run, its addresses, and its folders outside of its
    directory."""
    try:
        config = read_resolved(run_dir)
    except Exception:  # before the configuration is written, or where it is damaged
        return []
    run_dir = Path(run_dir)
    values = named_commands(config) | folders_outside(config, run_dir)
    values |= named_addresses(config, run_dir)
    return [f"{key}={_quoted(value)}" for key, value in values.items()]


def _quoted(value: str | list[str]) -> str:
    """Return a text, or a list of them, as Hydra reads it in an override."""
    if not isinstance(value, str):
        return f"[{','.join(map(repr, value))}]"
    return value if re.fullmatch(r"[\w./:~+@-]*", value) else repr(value)


def has_counterpart(run_dir: str | Path) -> bool:
    """Return whether another loss can be compared on the same documents.

    It cannot where these lack advantages, or old log-probs, nor where the run goes on from a
    checkpoint of another that is gone, nor where its files give values to keys that no other loss
    has.
    """
    config, _ = read_config(run_dir)
    if not _to_other_loss(Path(run_dir)):
        return False
    branched = _branched_from(run_dir)
    if branched is not None and branched[1] not in checkpoint_steps(branched[0]):
        return False
    if config.get("advantage", {}).get("estimator") == "none":
        return False
    if config.get("rollout", {}).get("name") != "recorded":
        return True
    loss = config["loss"]
    family = FAMILIES.get(loss["name"])
    if family is not None:
        return family.reads_old_log_probs
    # The documents of a function that reads no old log-probs may have none.
    parameters = parameters_in_file(loss.get("path") or "")
    return parameters is None or bool({"log_ratio", "old_log_probs"} & {*parameters})


def counterpart_command(run_dir: str | Path) -> str:
    """Return the command of the same run with another loss, whose parameters have its defaults.

    Of a run that goes on from a checkpoint of another it does so, too.
    """
    _, overrides = read_config(run_dir)
    changes = _to_other_loss(Path(run_dir))
    branched = _branched_from(run_dir)
    if branched is None:
        return new_run_command(run_dir, changes)
    parent, step = branched
    _, of_parent = read_config(parent)
    left_out = {"loss", "hydra.run.dir", "rollout.save_path", "tracking.run_name"}
    further = [
        override
        for override in overrides
        if override not in of_parent
        and key_of(override) not in left_out
        and not key_of(override).startswith("loss.")
    ]
    return _branch_at(parent, step, [*changes, *further])


def _branched_from(run_dir: str | Path) -> tuple[Path, int] | None:
    """Return the parent of a run and the step at which the run branched from it; None without a
    parent."""
    parent = read_status(Path(run_dir)).get("parent")
    if not parent:
        return None
    folder, _, step = parent.rpartition(", step ")
    return Path(folder), int(step)


def left_out_of_counterpart(run_dir: str | Path) -> str | None:
    """Return a sentence on the typed parameters that `counterpart_command` leaves out, since the
    same number means something else in another loss; None where there are none."""
    _, overrides = read_config(run_dir)
    typed = [override for override in overrides if key_of(override).startswith("loss.")]
    if not typed:
        return None
    other = _to_other_loss(Path(run_dir))[0]
    return f"without {', '.join(typed)}: {other} has its own, see pgtk explain {other}"


def _to_other_loss(run_dir: Path) -> list[str]:
    """Return the overrides that choose the first other loss which takes the keys that the run's
    files set, each with its default; none where there is no such loss."""
    config, overrides = read_config(run_dir)
    others = [other for other in FAMILIES if other != config["loss"]["name"]]
    keys = _set_by_files(config, overrides)
    if not keys:
        return [f"loss={others[0]}"]
    for other in others:
        defaults = option_values("loss", other)
        values = [defaults.get(key) for key in keys]
        if all(isinstance(value, bool | int | float | str) for value in values):
            typed = [f"loss.{key}={text(value)}" for key, value in zip(keys, values, strict=True)]
            return [f"loss={other}", *typed]
    # They may be of a file that is an option of the loss itself, in whose place the other comes.
    changes = [f"loss={others[0]}"]
    return changes if _is_composed(run_dir, changes) else []


def _set_by_files(config: JsonObject, overrides: Sequence[str]) -> list[str]:
    """Return the keys of the loss whose value is neither typed nor the default."""
    typed = {key_of(override) for override in overrides}
    return [
        name
        for name, value in leaves(config["loss"])
        if f"loss.{name}" not in (OPTION_KEYS["loss"], OWN_CODE["loss"].name)
        and short_name(f"loss.{name}") not in typed
        and value != default(config, f"loss.{name}")
    ]


def _is_composed(run_dir: Path, changes: list[str]) -> bool:
    """Return whether the command of a new run with these changes makes a configuration."""
    from pgtoolkit.config.compose import compose  # loads Hydra, which most runs do without

    sweep, _ = sweep_of_file(run_dir)
    file = None if not sweep else sweep_files().get(sweep[1], Path(sweep[1]))
    return not compose(new_run_overrides(run_dir, changes), file).problems
