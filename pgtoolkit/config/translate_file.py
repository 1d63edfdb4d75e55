"""Reads a configuration file of TRL or verl, and makes the overrides that both have in common."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pgtoolkit.config.elsewhere import rows_of_trainers
from pgtoolkit.config.files import options
from pgtoolkit.errors import ConfigError, as_storage_error
from pgtoolkit.system.report import refusal, text
from pgtoolkit.system.yaml_text import plain_yaml

_LARGEST = 1 << 20
"""Most bytes of a configuration file."""

_SECTIONS_OF_VERL = {"actor_rollout_ref", "algorithm", "data", "trainer"}

Value = str | int | float | bool | list | None
"""The value of a key in a YAML or JSON file."""


@dataclass(frozen=True)
class Setting:
    """An override here, and the keys of the other trainer from which it follows.

    names: those keys; empty for an override that every translation has.
    """

    key: str
    value: Value
    names: tuple[str, ...]

    @property
    def override(self) -> str:
        value = text(self.value)
        if re.fullmatch(r"[\w./:@+\[\]-]+", value):
            return f"{self.key}={value}"
        escaped = value.replace("'", "\\'")
        return f"{self.key}='{escaped}'"


@dataclass
class TheirConfig:
    """The configuration in a file of another trainer, with the defaults of that trainer.

    values: by dotted name. used: the keys of the file that are part of the translation.
    """

    trainer: str
    values: dict[str, Value]
    used: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Return whether the file has a key of this name, with or without sections before it."""
        return self._key(name) is not None

    def __getitem__(self, name: str) -> Value:
        """Return the value of a key, or the trainer's default, and count the key as used."""
        key = self._key(name)
        if key is None:
            return default_of(self.trainer, name)
        self.used.add(key)
        return self.values[key]

    def number(self, name: str) -> float:
        """Return the value of a key as a number; raises ConfigError if it is not a number."""
        value = self[name]
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise ConfigError(
            refusal(
                setting=f"{name}={text(value)}",
                needs="a number",
                got=value,
                reason="The translation computes with it.",
                use=f"{name}=NUMBER",
            )
        )

    def setting(self, key: str, name: str) -> Setting:
        """Return the override that gives our key the value of theirs."""
        return Setting(key, self[name], (name,))

    def leave(self, name: str) -> None:
        """Count a key as not used: it has to be set by hand."""
        self.used.discard(self._key(name) or name)

    def _key(self, name: str) -> str | None:
        """Return the key of the file that has this name."""
        keys = [key for key in self.values if key == name or key.endswith(f".{name}")]
        if "critic" not in name:
            # A critic has keys of the same names as the policy.
            keys = [key for key in keys if not key.startswith("critic.")]
        return keys[0] if keys else None


def default_of(trainer: str, name: str) -> Value:
    """Return a trainer's own default of a key, as docs/trl_and_verl.md has it; None without one."""
    for row in rows_of_trainers():
        if row.trainer == trainer and name in row.names and row.defaults:
            has_all = len(row.defaults) == len(row.names)
            default = row.defaults[row.names.index(name) if has_all else 0]
            return plain_yaml(f"value: {default}".encode())["value"]
    return None


def read(path: Path) -> TheirConfig:
    """Return the configuration in a YAML or JSON file of TRL or verl.

    Raises ConfigError for a path without a file, and for a file without keys.
    """
    if not path.is_file():
        raise ConfigError(
            refusal(
                setting=f"pgtk translate {path}",
                needs="a file",
                got=path,
                reason="It reads a configuration.",
                use="a YAML or JSON file, such as the one that trl grpo --config or verl's trainer "
                "takes",
            )
        )
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise as_storage_error(error) from error
    try:
        if len(data) > _LARGEST:
            raise ValueError(f"more than {_LARGEST} bytes")
        values = dict(_flat(plain_yaml(data)))
    except ValueError as error:
        raise ConfigError(
            refusal(
                setting=f"pgtk translate {path}",
                needs="YAML or JSON",
                got=error,
                reason="It cannot be read.",
                use="a file of keys with their values",
            )
        ) from None
    sections = {name.partition(".")[0] for name in values if "." in name}
    return TheirConfig("verl" if sections & _SECTIONS_OF_VERL else "TRL", values)


def _flat(values: object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yield (dotted name, value) of each key in nested dictionaries; raises ValueError if the
    outermost is no dictionary."""
    if not isinstance(values, dict):
        raise ValueError(f"no keys with values, but a {type(values).__name__}")
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


def model_and_prompts(
    theirs: TheirConfig, names_of_model: tuple[str, ...], names_of_prompts: tuple[str, ...]
) -> Iterator[Setting]:
    """Yield the model and the prompts that the file names, or capitals to be filled in."""
    groups = (("model", "huggingface", names_of_model), ("task", "prompts", names_of_prompts))
    for group, option, names in groups:
        present = [name for name in names if theirs.has(name)]
        path = theirs[present[0]] if present else group.upper()
        if isinstance(path, list) and len(path) == 1:
            path = path[0]
        yield Setting(group, option, ())
        yield Setting(f"{group}.path", path, ())


def optimizer(
    theirs: TheirConfig,
    learning_rate: str,
    schedule: str,
    warmup_steps: str,
    weight_decay: str,
    max_grad_norm: str,
) -> Iterator[Setting]:
    """Yield the keys of the optimizer, by their names there."""
    yield Setting("optimizer.learning_rate", theirs.number(learning_rate), (learning_rate,))
    yield theirs.setting("optimizer.weight_decay", weight_decay)
    # There, 0 means that gradients are not clipped.
    yield Setting("optimizer.max_grad_norm", theirs.number(max_grad_norm) or None, (max_grad_norm,))
    schedule_here = _SCHEDULES.get(str(theirs[schedule]))
    if schedule_here is None:
        theirs.leave(schedule)
    else:
        yield Setting("optimizer.schedule", schedule_here, (schedule,))
    warmup = theirs.number(warmup_steps)
    if 0 < warmup < 1:  # a share of the steps
        theirs.leave(warmup_steps)
    else:
        yield Setting("optimizer.warmup_steps", max(0, int(warmup)), (warmup_steps,))


def run_name_and_trackers(theirs: TheirConfig, run_name: str, trackers: str) -> Iterator[Setting]:
    """Yield the keys of tracking, by their names there."""
    if theirs.has(run_name) and re.fullmatch(r"[\w.-]{1,80}", str(theirs[run_name])):
        yield theirs.setting("tracking.run_name", run_name)
    if not theirs.has(trackers):
        return
    value = theirs[trackers]
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in options()["tracking"]]
    known.sort(key=lambda name: name != "mlflow")  # which tracking.also cannot name
    if known:
        yield Setting("tracking", known[0], (trackers,))
    if known[1:]:
        yield Setting("tracking.also", known[1:], (trackers,))
    if len(known) < len([name for name in names if name != "console"]):
        theirs.leave(trackers)
