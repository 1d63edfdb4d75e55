"""Hydra's own keys: which of them act, who may set them, and the folders and launchers that they
name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config.keys import is_inside
from pgtoolkit.config.launchers import LAUNCHERS, Launcher
from pgtoolkit.config.names import run_name
from pgtoolkit.config.overrides import parse
from pgtoolkit.config.schema import default_options
from pgtoolkit.errors import first_line
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.declared import Dictionary
from pgtoolkit.system.report import key_of, nearest, refusal, text

_ACTING = (
    "hydra.mode",
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.job.name",
    "hydra.job.config.override_dirname",
    "hydra.launcher",
    "hydra.sweeper",
    "hydra/launcher",
    "hydra/sweeper",
)
"""Keys of Hydra that change what pgtk does, with the keys inside them."""

_OF_SWEEPS = ("hydra.sweep", "hydra.launcher", "hydra.sweeper")
"""Keys of Hydra that only a sweep reads, with the keys inside them."""

_PARAMS = "hydra.sweeper.params"
"""The key whose value is a dictionary: key of a job -> its values."""

_COMPUTED = (
    "hydra.runtime",
    "hydra.overrides",
    "hydra.searchpath",
    "hydra.job.override_dirname",
    "hydra.job.config_name",
)
"""Keys that Hydra or pgtk itself sets, whatever a file says."""

INSTEAD = {
    "hydra.output_subdir": (
        "A run directory has its configuration in config.yaml; Hydra's copies are not written.",
        "config.yaml and overrides.yaml in the run directory",
    ),
    "hydra.job.env_set": (
        "pgtk sets no environment variables.",
        "NAME=VALUE in front of the command",
    ),
    "hydra.job.chdir": (
        "Relative paths, also those that are printed, are seen from where pgtk is started.",
        "cd FOLDER before the command",
    ),
    "hydra.sweeper.max_batch_size": (
        "A job starts as soon as another ends.",
        "hydra.launcher.n_jobs=N",
    ),
    "hydra.callbacks": ("A configuration never names code to be run.", "a script that calls pgtk"),
    **dict.fromkeys(
        (
            "hydra.verbose",
            "hydra.job_logging",
            "hydra.hydra_logging",
            "hydra/job_logging",
            "hydra/hydra_logging",
        ),
        ("Hydra logs nothing here.", "run.log in the run directory"),
    ),
}
"""Key of Hydra that has no effect here -> the reason, and what to use instead."""

_FIXED = {
    f"hydra.{node}.{leaf}"
    for node in ("launcher", "sweeper")
    for leaf in ("kind", "_target_", "max_batch_size")
}
"""Keys of launchers and sweepers that no one may set."""

_NO_CODE = (
    "A configuration never names code to be run.",
    "the options of hydra/launcher, hydra/sweeper",
)
_NAMES_A_FOLDER = "It names a folder; a value in it could otherwise write anywhere."


def without_effect(override: Override) -> Iterator[str]:
    """Yield a problem for each key of Hydra in an override that has no effect here."""
    for key, value in leaves({override.key_or_group: override.value()}):
        if not any(is_inside(key, acting) for acting in _ACTING) or key in _FIXED:
            yield _does_nothing(key, value)


def _does_nothing(key: str, value: object) -> str:
    """Refuse a key of Hydra that has no effect here."""
    reason = "pgtk does not read it."
    near = nearest(key, _ACTING, 0.8)
    use = f"{near}={text(value)}" if near else "pgtk --cfg hydra, which prints Hydra's keys"
    if key.endswith("._target_"):
        reason, use = _NO_CODE
    elif key in ("hydra.launcher.kind", "hydra.sweeper.kind"):
        group = key.removesuffix(".kind").replace(".", "/")
        reason = "It comes with its option."
        use = f"{group}={value}"
    else:
        for name, instead in INSTEAD.items():
            if is_inside(key, name):
                reason, use = instead
    return refusal(f"{key}={text(value)}", "to be left out", value, reason, use)


_NUMBERS = {"n_jobs": 1, "jobs_per_gpu": 1, "prune_after": 100}
"""Keys of numbers that are null by default -> a value that works."""


def set_typed(config: DictConfig, name: str, value: object) -> str | None:
    """Set one of Hydra's own keys in a composed configuration; return what is wrong with it, None
    where nothing is.

    name: of a key that has an effect here.
    """
    if is_inside(name, _PARAMS):
        key = name.removeprefix(_PARAMS).removeprefix(".")
        before = OmegaConf.select(config, _PARAMS) or {}
        with open_dict(config):
            config.hydra.sweeper.params = {**before, key: text(value)} if key else value
        return None
    if isinstance(OmegaConf.select(config, name), DictConfig) and not isinstance(value, dict):
        return refusal(
            setting=f"{name}={text(value)}",
            needs="its keys one by one",
            got=text(value),
            reason="It is a group of keys.",
            use="pgtk --cfg hydra, which prints them",
        )
    with contextlib.suppress(OmegaConfBaseException):
        OmegaConf.update(config, name, value)
        return None
    parent, _, leaf = name.rpartition(".")
    rest = ""
    siblings = OmegaConf.select(config, parent)
    while not isinstance(siblings, DictConfig):
        rest = f".{leaf}{rest}"
        parent, _, leaf = parent.rpartition(".")
        siblings = OmegaConf.select(config, parent)
    names = [str(sibling) for sibling in siblings]
    if leaf not in names:
        near = nearest(leaf, names)
        use = "pgtk --cfg hydra, which prints them"
        if near is not None:
            default = OmegaConf.to_container(siblings, resolve=False)[near]  # type: ignore[index,call-overload]
            number = _NUMBERS.get(near, default)
            takes_it = isinstance(value, int) or not isinstance(number, int)
            use = f"{parent}.{near}{rest}={text(value if takes_it else number)}"
        return f"Unknown key {name!r}. Use {use}."
    default = OmegaConf.to_container(siblings, resolve=False)[leaf]  # type: ignore[index,call-overload]
    if default is None:  # of hydra.mode, and of keys that take any value
        default = RunMode.MULTIRUN.name
    needs = {int: "a whole number", bool: "true or false"}.get(type(default), "another value")
    return refusal(
        setting=f"{name}={text(value)}",
        needs=needs,
        got=text(value),
        reason="It has another type.",
        use=f"{name}={text(default)}",
    )


def wrong_in_file(config: DictConfig, name: str, value: object) -> str | None:
    """Return what is wrong with one of Hydra's own keys in a file of the user's, before Hydra reads
    it; None where nothing is.

    config: a composed one, which is changed.
    """
    if "_target_" in name.split("."):
        return refusal(name, "to be left out", value, *_NO_CODE)
    problem = set_typed(config, name, value)
    if problem is not None and not any(is_inside(name, acting) for acting in _ACTING):
        return _does_nothing(name, value)
    return problem


def keys_of_sweeps(overrides: Sequence[str]) -> list[str]:
    """Refuse keys of sweeps that are typed for a single run, where they would have no effect."""
    problems = []
    for override in overrides:
        key = key_of(override).replace("/", ".")
        if not any(is_inside(key, name) for name in _OF_SWEEPS):
            continue
        use = f"pgtk -m {override}, or leave it out"
        if key == "hydra.sweep.dir":
            use = f"hydra.run.dir={override.partition('=')[2]}, or pgtk -m {override}"
        problems.append(
            refusal(
                setting=override,
                needs="a sweep",
                got="a single run",
                reason="It says how the jobs of a sweep are made.",
                use=use,
            )
        )
    return problems


def key_of_single_run(overrides: Sequence[str]) -> list[str]:
    """Refuse hydra.run.dir for a sweep, whose jobs have folders in hydra.sweep.dir."""
    return [
        refusal(
            setting=override,
            needs="a single run",
            got="a sweep",
            reason="The jobs of a sweep have folders of their own in that of the sweep.",
            use=f"hydra.sweep.dir={override.partition('=')[2]}",
        )
        for override in overrides
        if key_of(override) == "hydra.run.dir"
    ]


def set_by_files(hydra: DictConfig, without_files: DictConfig) -> list[str]:
    """Return the problems with the keys of the node `hydra` that the user's files set: code that
    they name, and keys that have no effect here.

    without_files: the same node without the user's files.
    """
    problems = []
    known = dict(_leaves(without_files))
    for path, value in _leaves(hydra):
        setting = ".".join(("hydra", *path))
        is_computed = any(is_inside(setting, computed) for computed in _COMPUTED)
        is_of_files = not is_computed and known.get(path) != value
        if path in (("launcher",), ("sweeper",)):
            problems.append(
                refusal(
                    setting=setting,
                    needs=f"one of the options of hydra/{path[0]}",
                    got=value,
                    reason="The option runs the jobs, by its settings.",
                    use=f"hydra/{path[0]}=OPTION",
                )
            )
        elif "_target_" in path and (is_of_files or setting not in _FIXED):
            problems.append(refusal(setting, "to be left out", value, *_NO_CODE))
        elif is_of_files and not _acts(path, setting):
            problems.append(_does_nothing(setting, value))
        elif is_of_files and _is_read_early(path, value):
            problems.append(
                refusal(
                    setting=f"{setting}={value}",
                    needs="a plain value",
                    got="an interpolation",
                    reason="pgtk reads it before other keys have values.",
                    use=f"{setting}: VALUE",
                )
            )
    return problems


def _acts(path: tuple[str, ...], setting: str) -> bool:
    """Return whether a key of Hydra in a file has an effect here."""
    if path[:2] == ("sweeper", "params"):
        return not path[2].lstrip("+~").startswith("hydra")
    return setting not in _FIXED and any(is_inside(setting, acting) for acting in _ACTING)


def _is_read_early(path: tuple[str, ...], value: object) -> bool:
    return path[0] in ("launcher", "sweeper", "job", "mode") and "${" in str(value)


def _leaves(node: object, path: tuple = ()) -> list[tuple[tuple, object]]:
    """Return (path, value) of everything in nested dictionaries and lists, empty ones included."""
    node = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if isinstance(node, dict | list) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, value in items for leaf in _leaves(value, (*path, str(key)))]
    return [(path, node)]


def name_in(config: DictConfig) -> str:
    """Return a run's name: tracking.run_name, or its loss, its aggregation and what its overrides
    change.

    The name of a sweep's job has what varies, default options included, so that jobs compare.
    """
    chosen = _value(config, "tracking.run_name")
    if chosen:
        return chosen
    hydra = config.hydra
    unnamed = hydra.job.config.override_dirname.exclude_keys
    overrides = [override for override in typed_in(hydra) if key_of(override) not in unnamed]
    if not OmegaConf.is_missing(hydra.job, "num"):
        return run_name(overrides, {}, None, None)
    loss = _value(config, "loss.path") or _value(config, "loss.name")
    aggregation = _value(config, "aggregation.reducer") or _value(config, "aggregation.mode")
    return run_name(overrides, default_options(), loss, aggregation)


def _value(config: DictConfig, key: str) -> str | None:
    """Return the value of a key as text; None if it is missing or does not resolve."""
    try:
        value = OmegaConf.select(config, key)
    except OmegaConfBaseException:  # `resolve` reports it
        return None
    return None if value is None else str(value)


def name_directories(hydra: DictConfig, unnamed: list[str]) -> None:
    """Set the part of directories' names that lists the overrides, without the keys `unnamed`."""
    form = hydra.job.config.override_dirname
    form.exclude_keys = list(unnamed)
    overrides = parse(typed_in(hydra))[0]
    hydra.job.override_dirname = get_overrides_dirname(
        overrides, form.exclude_keys, form.item_sep, form.kv_sep
    )


def recorded(hydra: DictConfig) -> list[str]:
    """Return the overrides of a run as its directory records them, with interpolations resolved
    where they resolve."""
    try:
        return list(hydra.overrides.task)
    except OmegaConfBaseException:
        return typed_in(hydra)


def typed_in(hydra: DictConfig) -> list[str]:
    """Return the overrides of a run as they were typed: a ${KEY} need not resolve."""
    overrides = OmegaConf.to_container(hydra.overrides.task)
    assert isinstance(overrides, list)
    return overrides


def is_sweep(hydra: DictConfig) -> bool:
    """Return whether the configuration itself asks for a sweep."""
    return hydra.mode == RunMode.MULTIRUN


def folder_in(config: DictConfig, key: str) -> tuple[str | None, list[str]]:
    """Return the folder that a key names, or None with the problem of its name.

    key: hydra.run.dir or hydra.sweep.dir.
    """
    path, problems = _name_of_folder(config, key)
    if path is None:
        return None, problems
    if not path.strip():
        return None, [
            refusal(
                setting=f"{key}={path}",
                needs="the path of a folder",
                got=repr(path),
                reason="A run would write into the current directory.",
                use=f"{key}=outputs/NAME",
            )
        ]
    # The path is also written into the scripts of SLURM's jobs.
    if ".." in PurePath(path).parts or not path.isprintable():
        return None, [
            refusal(
                setting=key,
                needs="a path of printable characters without '..'",
                got=repr(path),
                reason=_NAMES_A_FOLDER,
                use=f"{key}=FOLDER",
            )
        ]
    return path, []


def _name_of_folder(config: DictConfig, key: str) -> tuple[str | None, list[str]]:
    try:
        return str(OmegaConf.select(config, key, throw_on_missing=True)), []
    except OmegaConfBaseException as error:
        return None, [
            refusal(
                setting=key,
                needs="a value that resolves",
                got=first_line(error),
                reason=_NAMES_A_FOLDER,
                use=f"{key}=FOLDER",
            )
        ]


def directory_of_job(
    config: DictConfig, name: str, digest: str, unnamed: list[str]
) -> tuple[str | None, list[str]]:
    """Return the directory of a job within the folder of its sweep, or None with the problem of its
    name.

    name, digest: of the job. unnamed: keys that are the same in all jobs, and so in no job's name.
    """
    hydra = config.hydra
    directory = hydra.sweep._get_node("subdir")._value()
    for resolver, value in (("${pgtk.run_name:}", name), ("${pgtk.digest:}", digest)):
        directory = directory.replace(resolver, value)
    if "${" in directory:
        hydra.mode = RunMode.MULTIRUN
        name_directories(hydra, unnamed)
        directory, problems = _name_of_folder(config, "hydra.sweep.subdir")
        if directory is None:
            return None, problems
    directory = os.path.normpath(directory)
    if (
        PurePath(directory).parts
        and ".." not in PurePath(directory).parts
        and not os.path.isabs(directory)
    ):
        return directory, []
    return None, [
        refusal(
            setting=f"hydra.sweep.subdir={directory}",
            needs="a folder inside hydra.sweep.dir",
            got=directory,
            reason=_NAMES_A_FOLDER,
            use="the default",
        )
    ]


def launcher_of(hydra: DictConfig) -> Launcher:
    """Return the launcher of a sweep."""
    choice = str(hydra.runtime.choices.get("hydra/launcher"))
    kind = hydra.launcher.get("kind")
    return Launcher(
        kind if kind in LAUNCHERS else None, choice, settings_in(hydra.launcher, resolve=True)
    )


def settings_in(node: DictConfig, resolve: bool = False) -> Dictionary:
    """Return the keys of a launcher or a sweeper in plain types."""
    settings = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(settings, dict)
    return {str(name): value for name, value in settings.items()}
