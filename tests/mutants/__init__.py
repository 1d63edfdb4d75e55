"""Wrong functions in the place of right ones, by name. Some test of their file's folders must
notice each.

    @mutant("ranks.gradients:sum_gradients")
    def averages_gradients(right, parameters, group): ...

The wrong function gets the right one before its arguments. A refactoring leaves a mutant alone as
long as there is something of the name; what is no function, or no part of pgtoolkit, is replaced by
the value that `wrong(right)` gives.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PGTOOLKIT_MUTANT"
"""Names the mutant of a process and of those that it starts."""

FOLDERS = {
    "losses": ("losses", "kernels"),
    "kernels": ("kernels", "losses"),
    "ranks": ("ranks", "model", "rollouts", "training"),
    "rollouts": ("rollouts", "tasks", "ranks", "losses", "training"),
    "checkpoints": ("training", "losses"),
}
"""File of mutants -> folders of tests that may notice them, from the first on."""


@dataclass(frozen=True)
class Mutant:
    """wrong in the place of target, MODULE:NAME below pgtoolkit. file: of FOLDERS, where it
    stands."""

    name: str
    target: str
    wrong: Callable
    file: str

    @property
    def module(self) -> str:
        return f"pgtoolkit.{self.target.partition(':')[0]}"

    def tests(self) -> list[str]:
        """Return the files of tests that may notice it."""
        tests = Path(__file__).parents[1]
        files = [
            file
            for folder in FOLDERS[self.file]
            for file in sorted((tests / folder).glob("test_*.py"))
        ]
        return [str(file.relative_to(tests.parent)) for file in files]

    def nearest_tests(self) -> list[str]:
        """Return those that are named after its module or name it; without any, those of its
        module's package."""
        package = self.module.split(".")[1]
        module = self.module.rpartition(".")[2]
        root = Path(__file__).parents[2]
        naming = [file for file in self.tests() if self.module in (root / file).read_text()]
        named_after = [file for file in self.tests() if Path(file).name == f"test_{module}.py"]
        of_package = [file for file in self.tests() if Path(file).parent.name == package]
        return list(dict.fromkeys(named_after + naming)) or of_package

    def place(self) -> tuple[Any, str, Any]:
        """(what has the attribute, its name, what is there); AttributeError where nothing of that
        name is."""
        module, path = importlib.import_module(self.module), self.target.partition(":")[2]
        *outer, name = path.split(".")
        owner = functools.reduce(getattr, outer, module)
        return owner, name, vars(owner)[name] if name in vars(owner) else getattr(owner, name)

    def apply(self) -> None:
        """In this process, for whoever has imported it already as well."""
        owner, name, found = self.place()
        right = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if isinstance(right, property):
            setattr(owner, name, property(functools.partial(self.wrong, right.fget)))
        elif (
            isinstance(right, types.FunctionType)
            and not right.__closure__
            and right.__module__ == self.module
        ):
            _replace(right, self.wrong)
        elif isinstance(right, types.FunctionType) and not isinstance(owner, types.ModuleType):
            kind = type(found) if found is not right else functools.partialmethod
            setattr(owner, name, kind(functools.partial(self.wrong, right)))
        else:
            value = (
                functools.partial(self.wrong, right) if _takes(self.wrong) else self.wrong(right)
            )
            # one of Triton's interpreter, which others hold in tables
            if hasattr(right, "rewriter"):
                vars(right).update(vars(value))
                return
            everywhere = getattr(right, "__module__", None) == self.module
            for holder in [one for one in sys.modules.values() if everywhere and _is_ours(one)] or [
                owner
            ]:
                for key, held in list(vars(holder).items()):
                    if held is right:
                        setattr(holder, key, value)
            setattr(owner, name, value)


def _takes(wrong: Callable) -> bool:
    """Whether it is a wrong function, or gives one."""
    return len(inspect.signature(wrong).parameters) > 1


def _is_ours(module: types.ModuleType) -> bool:
    return getattr(module, "__name__", "").partition(".")[0] == "pgtoolkit"


def _replace(function: types.FunctionType, wrong: Callable) -> None:
    """Inside of the function, so that it does not matter who holds it."""
    right = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    right.__kwdefaults__, function.__signature__ = (
        function.__kwdefaults__,
        inspect.signature(function),
    )
    name = f"_mutated_{function.__name__}"
    function.__globals__[name] = functools.partial(wrong, right)
    made: dict = {}
    exec(f"def replaced(*arguments, **keywords): return {name}(*arguments, **keywords)", made)
    function.__code__, function.__defaults__, function.__kwdefaults__ = (
        made["replaced"].__code__,
        None,
        None,
    )


MUTANTS: list[Mutant] = []


def mutant(target: str) -> Callable:
    """The function that follows is wrong in the place of target."""

    def added(wrong: Callable) -> Callable:
        MUTANTS.append(Mutant(wrong.__name__, target, wrong, wrong.__module__.rpartition(".")[2]))
        return wrong

    return added


def all_mutants() -> list[Mutant]:
    for file in FOLDERS:
        importlib.import_module(f"mutants.{file}")
    return MUTANTS


def apply_named() -> None:
    """What a process does that was started by one with a mutant."""
    if name := os.environ.get(VARIABLE):
        next(one for one in all_mutants() if one.name == name).apply()
