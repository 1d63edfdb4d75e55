"""The values of a configuration of TRL or verl, and what the cases of a row are for them."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from pgtoolkit.config.trainer_keys import OVERRIDE, Theirs
from pgtoolkit.config.translate_code import Unread
from pgtoolkit.config.translate_file import TheirConfig, is_older, value_of
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.runs.completion_files import TRAINING
from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.system.model_folder import ADAPTER_SETTINGS
from pgtoolkit.system.report import text
from pgtoolkit.tasks.settings import is_data_set_name

NO_VALUE = (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError)
"""What is raised where a formula has no value."""

FORMULA = re.compile(r"\{([^}]*)\}")
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.]+)(?:,\s*(.*))?\}", re.S)


def _has_split(path: object, split: object) -> bool:
    """Return whether prompts on this machine have a split of this name."""
    from pgtoolkit.tasks.prompt_rows import prompt_files

    if not path or is_data_set_name(str(path)):
        return False
    with contextlib.suppress(ConfigError, DataError):
        return bool(prompt_files(str(path), str(split)))
    return False


def _files_of(path: object, split: object) -> list[Path]:
    """Return the files on this machine at a path: those of the split, where it has splits."""
    from pgtoolkit.tasks.prompt_rows import prompt_files

    if not path or is_data_set_name(str(path)):
        return []
    files: list[Path] = []
    with contextlib.suppress(ConfigError, DataError):
        files = prompt_files(str(path), str(split) if _has_split(path, split) else None)
    return files if all(file.suffix in (".jsonl", ".parquet") for file in files) else []


def _num_rows(path: object, split: object = None) -> int:
    """Return the number of prompts in files; 0 if it is not known."""
    from pgtoolkit.tasks.row_files import count_rows

    counts = [count_rows(str(file), "task.path") or 0 for file in _files_of(path, split)]
    return sum(counts) if all(counts) else 0


def _first_row(path: object, split: object = None) -> dict[str, object]:
    """Return the first prompt of files with its columns; empty if it is not known."""
    from pgtoolkit.tasks.row_files import open_files

    for file in _files_of(path, split):
        with contextlib.suppress(DataError):
            for _, _, row in open_files([file], None)[0].rows():
                return {} if isinstance(row, str) else row
    return {}


def _from_here(path: object) -> str:
    """Return a path as the current folder sees it, "" where none is set."""
    if not path:
        return ""
    place = Path(str(path).removeprefix("file://")).expanduser()
    return str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)


def _folder_of(path: object) -> str:
    """Return the folder of a file, "." for the current one."""
    return str(Path(str(path)).parent)


def _stem_of(path: object) -> str:
    """Return the name of a file without its folder and its last ending."""
    return Path(str(path)).stem


def _one_path(paths: object) -> str:
    """Return the path of a file, or a glob of several; empty where files of this machine that are
    none of them would fit it, too."""
    files = paths if isinstance(paths, list) else [str(paths or "").strip("[]'")]
    if len(files) == 1:
        return "" if "," in str(files[0]) else str(files[0])
    parts = [Path(file).parts if isinstance(file, str) else () for file in files]
    if (
        len({*parts}) < len(files)
        or len({*map(len, parts)}) > 1
        or re.search(r"[*?\[]", str(files)[1:])
    ):
        return ""
    pattern = str(Path(*map(_pattern, zip(*parts, strict=True))))
    named = {Path(file).expanduser() for file in files}
    matching = glob.glob(str(Path(pattern).expanduser()))
    return pattern if {*map(Path, matching)} <= named else ""


def _pattern(names: tuple[str, ...]) -> str:
    """Return a name, or what several have in common before and behind a star."""
    start = os.path.commonprefix(names)  # noqa: RUF071 (characters are meant)
    rests = [name.removeprefix(start)[::-1] for name in names]
    end = os.path.commonprefix(rests)[::-1]  # noqa: RUF071
    return f"{start}*{end}" if any(rests) else start


def _sets(paths: object) -> dict[str, dict[str, object]]:
    """Return `evaluation.sets` of several files, by the names of these, of their folders, or of
    both, whichever are the first to differ; empty where none do."""
    files = paths if isinstance(paths, list) and len(paths) > 1 else []
    if not all(isinstance(file, str) for file in files):
        return {}
    places = [Path(file) for file in files]
    for names in (
        [place.stem for place in places],
        [place.parent.name for place in places],
        [f"{place.parent.name}_{place.stem}" for place in places],
    ):
        names = [re.sub(r"[^A-Za-z0-9_]", "_", name)[:40] for name in names]
        is_valid = all(name[:1].isalpha() and name != TRAINING for name in names)
        if is_valid and len({*names}) == len(files):
            return {name: {"path": file} for name, file in zip(names, files, strict=True)}
    return {}


def _adapter_sizes(path: object) -> dict[str, object]:
    """Return what `model.lora_...` is of adapters in a folder on this machine; empty where there
    are none."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        settings = json.loads(Path(str(path), ADAPTER_SETTINGS).read_text())
        scale = settings["r"] ** 0.5 if settings.get("use_rslora") else 1
        named = settings["target_modules"]
        targets = sorted(named) if isinstance(named, list) else named
        return {"rank": settings["r"], "alpha": settings["lora_alpha"] * scale, "targets": targets}
    return {}


def _is_pattern(targets: object) -> bool:
    """Return whether peft, or the model, would take names of layers for a regular expression: a
    text by itself, or a list with a sign of one."""
    named = targets if isinstance(targets, list) else []
    return not named or any(re.search(r"[][(){}|*+?^$\\]", str(name)) for name in named)


VERIFIER = "VERIFIER"
"""What stands for a reward function that has no dotted path."""

_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""What `trl grpo` takes by these names."""


def _paths(functions: object) -> list[str]:
    """Return the dotted path of each reward function, or VERIFIER."""
    named = functions if isinstance(functions, list) else [functions or ""]
    paths = [f"trl.rewards.{name}" if name in _REWARDS else name for name in named]
    return [path if type(path) is str and is_dotted_path(path) else VERIFIER for path in paths]


def _unnamed(functions: object) -> str:
    """Return those reward functions that have no dotted path."""
    named = functions if isinstance(functions, list) else [functions]
    without = [text(function) for function in named if _paths([function]) == [VERIFIER]]
    return ", ".join(without) or "none, but two have one name, or weights do not fit"


def _verifiers(functions: object, weights: list[float] | None) -> dict[str, dict[str, object]]:
    """Return `task.verifiers`; raises ValueError where two have one name, or one no weight."""
    named = functions if isinstance(functions, list) else [functions]
    paths = _paths(named)
    lasts = [re.split(r"[./]", re.split(r"[( ]", str(function))[0])[-1] for function in named]
    names = [re.findall(r"[A-Za-z]\w{0,39}", last)[0] for last in lasts]
    verifiers = {
        name: {"verifier": path, "weight": weight}
        for name, path, weight in zip(names, paths, weights or [1] * len(paths), strict=True)
    }
    if len(verifiers) < len(paths):
        raise ValueError(paths)
    return verifiers


_STRATEGY = "actor_rollout_ref.actor.strategy"
"""Where a dump of verl's configuration names the engine of the model."""

_TRACKERS = ("mlflow", "wandb", "tensorboard")
"""Trackers that both have, with the one first that takes the most."""


def _trackers(named: object) -> list[str]:
    """Return the trackers of a list that are here, too, in our order."""
    names = {str(name) for name in named} if isinstance(named, list) else {str(named)}
    return [tracker for tracker in _TRACKERS if tracker in names]


def _untracked(named: object) -> bool:
    """Return whether a list names a tracker that is not here."""
    names = {str(name) for name in named} if isinstance(named, list) else {str(named)}
    return bool(names - {*_TRACKERS, "console", "none", "None"})


Overrides = dict[str, tuple[object, Theirs | None]]
"""Our key -> its value, and the row that it follows from."""

_FUNCTIONS = {"ceil": math.ceil, "int": int, "float": float, "max": max, "num_rows": _num_rows}
_FUNCTIONS |= {"first_row": _first_row, "has_split": _has_split}
_FUNCTIONS |= {"is_data_set_name": is_data_set_name, "is_dotted_path": is_dotted_path, "str": str}
_FUNCTIONS |= {"paths": _paths, "len": len, "unnamed": _unnamed}
_FUNCTIONS |= {"verifiers": _verifiers, "from_here": _from_here, "sets": _sets}
_FUNCTIONS |= {"one_path": _one_path, "trackers": _trackers, "untracked": _untracked}
_FUNCTIONS |= {"folder_of": _folder_of, "stem_of": _stem_of, "adapter_sizes": _adapter_sizes}
_FUNCTIONS |= {"is_pattern": _is_pattern}


@functools.cache
def _compiled(formula: str) -> CodeType:
    """Return the code of a formula of a table, in which names have __ for a dot."""
    return compile(re.sub(r"(?<=\w)\.(?=[a-z])", "__", formula.strip()), "<formula>", "eval")


def _names_in_sections(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the full names in each section, those of sections inside it too."""
    sections: dict[str, list[str]] = {}
    for name in names:
        for dot in re.finditer(r"\.", name):
            sections.setdefault(name[: dot.start()], []).append(name)
    return sections


class TheirValues:
    """The values of all keys of theirs: what a file sets, else their defaults.

    of: full name -> value. names: the same as formulas write them, and their words. own: keys that
    a program does not set and for which unsloth, which it imports, has a default of its own.
    """

    def __init__(self, theirs: TheirConfig):
        self.theirs = theirs
        table = theirs.table
        by_unsloth = table.content["unsloth"]["own"] if theirs.values.get("launch.unsloth") else []
        self.own = [name for name in by_unsloth if name in table.rows and name not in theirs.values]
        kinds = [theirs.values.get(name) for name in ("model_engine", _STRATEGY)]
        engines = table.content.get("engines", {})
        of_engine = next((engines[str(kind)] for kind in kinds if str(kind) in engines), {})
        self.of = {name: row.default for name, row in table.rows.items()} | of_engine
        self.of |= theirs.values
        self.of |= dict.fromkeys(self.own, Unread("not set"))
        self.of = {name: self.resolved(name, value) for name, value in self.of.items()}
        names = {key: value for key, value in self.of.items() if not isinstance(value, Unread)}
        self.names = {name.replace(".", "__"): value for name, value in names.items()}
        sections = _names_in_sections(names)
        for word, formula in table.content["words"].items():
            for name in sections.get(formula, ()):
                self.names[name.replace(formula, word).replace(".", "__")] = names[name]
            with contextlib.suppress(*NO_VALUE):
                self.names[word] = self.evaluated(formula)

    def resolved(self, name: str, value: object) -> object:
        """Return the value of a key, or what its interpolation in verl's files stands for; Unread
        where that is known when their program runs."""
        for _ in range(9):  # one may stand for another
            match = _INTERPOLATION.fullmatch(value) if type(value) is str else None
            if match is None:
                break
            section = name.rpartition(".")[0] if match[1].startswith(".") else ""
            name = f"{section}{match[1]}"
            if name not in self.of and "oc.select" not in str(value):
                break
            value = self.of.get(name, value_of(match[2] or "null"))
        return Unread(value) if type(value) is str and "${" in value else value

    def evaluated(self, formula: str) -> Any:
        """Return the value of a formula of a table, which is never what a user wrote."""

        def has_value(name: str) -> bool:
            return name in {key.replace(".", "__") for key in self.theirs.values}

        def is_known(name: str) -> bool:
            return name in self.names

        def before(version: str) -> bool:
            return is_older(self.theirs, version)

        scope = {**_FUNCTIONS, "given": has_value, "known": is_known, "before": before}
        scope["__builtins__"] = {}
        result = eval(_compiled(formula), scope, self.names)
        return float(f"{result:.12g}") if isinstance(result, float) else result

    def may_be(self, condition: str) -> bool:
        """Return whether a condition is true, or is not known."""
        try:
            return self.evaluated(condition)
        except NameError:
            return True

    def case(self, row: Theirs) -> str:
        """Return what is to be typed for a key; raises LookupError where its value has no equal."""
        for condition, here in row.cases:
            if not condition or self.evaluated(condition):
                typed = here if isinstance(here, str) else here.get(text(self.evaluated(row.name)))
                if typed is not None:
                    return typed
        raise LookupError(row.name)

    def reason(self, row: Theirs) -> str:
        """Return why a value has no equal, with the values of formulas, where these are known."""

        fitting = [
            reason
            for condition, reason in row.reasons.items()
            if not condition or self.may_be(condition)
        ]
        return self.filled_in("; ".join(fitting))

    def filled_in(self, sentence: str) -> str:
        """Return a sentence with the values of its formulas, where these are known."""

        def value(formula: re.Match[str]) -> str:
            try:
                return text(self.evaluated(formula[1]))
            except NO_VALUE:
                return formula[1]

        return FORMULA.sub(value, sentence)

    def overrides(self, typed: str, row: Theirs | None = None) -> Overrides:
        """Return what is to be typed; a key alone takes the value of the row's."""
        overrides = {}
        for key, written in OVERRIDE.findall(typed):
            formula = FORMULA.fullmatch(written)
            if formula is not None:
                value = self.evaluated(formula[1])
            elif row is not None and not written:
                value = self.evaluated(row.name)
            else:
                value = FORMULA.sub(lambda match: text(self.evaluated(match[1])), written)
            overrides[key] = (value, row)
        return overrides
