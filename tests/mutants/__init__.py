"""Mutants: wrong functions in place of right ones, each of which must make some test fail.

    @mutant("ranks.gradients:sum_gradients")
    def gradients_are_averaged_over_ranks(right, parameters, group): ...

The name of a mutant is a sentence that says what is wrong. The wrong function gets the right one
before its arguments. A refactoring leaves a mutant alone as long as its target keeps its name. A
target that is not a function, or not part of pgtoolkit, is replaced by the value of `wrong(right)`.
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

VARIABLE = "PGTOOLKIT_MUTANT"
"""The variable that names the mutant of a process and of the processes that it starts."""

FOLDERS = {
    "losses": ("losses", "kernels"),
    "kernels": ("kernels", "losses"),
    "ranks": ("ranks", "model", "rollouts", "training"),
    "rollouts": ("rollouts", "tasks", "ranks", "losses", "training"),
    "checkpoints": ("training", "losses"),
}
"""The folders of tests that may notice the mutants of each file, in the order in which they run."""


@dataclass(frozen=True)
class Mutant:
    """A wrong function in place of its target.

    target: MODULE:NAME below pgtoolkit. file: the key of FOLDERS, the file that defines it.
    """

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
        files = []
        for folder in FOLDERS[self.file]:
            files += sorted((tests / folder).glob("test_*.py"))
        return [str(file.relative_to(tests.parent)) for file in files]

    def nearest_tests(self) -> list[str]:
        """Return the files of tests that its module's name is in, or that are named after it.

        If there is none, those of the folder of its package.
        """
        package = self.module.split(".")[1]
        module = self.module.rpartition(".")[2]
        root = Path(__file__).parents[2]
        naming = [file for file in self.tests() if self.module in (root / file).read_text()]
        named_after = [file for file in self.tests() if Path(file).name == f"test_{module}.py"]
        of_package = [file for file in self.tests() if Path(file).parent.name == package]
        return list(dict.fromkeys(named_after + naming)) or of_package

    def place(self) -> tuple[object, str, object]:
        """Return the module or class with the target, the target's name, and the target.

        Raises AttributeError if there is nothing of that name.
        """
        module = importlib.import_module(self.module)
        *outer, name = self.target.partition(":")[2].split(".")
        owner = functools.reduce(getattr, outer, module)
        return owner, name, vars(owner)[name] if name in vars(owner) else getattr(owner, name)

    def apply(self) -> None:
        """Replace the target in this process, also in modules that have imported it already."""
        owner, name, attribute = self.place()
        is_wrapped = isinstance(attribute, staticmethod | classmethod)
        right = attribute.__func__ if is_wrapped else attribute
        if isinstance(right, property):
            setattr(owner, name, property(functools.partial(self.wrong, right.fget)))
        elif (
            isinstance(right, types.FunctionType)
            and not right.__closure__
            and right.__module__ == self.module
        ):
            _replace_code(right, self.wrong)
        elif isinstance(right, types.FunctionType) and not isinstance(owner, types.ModuleType):
            kind = type(attribute) if is_wrapped else functools.partialmethod
            setattr(owner, name, kind(functools.partial(self.wrong, right)))
        else:
            if _takes_arguments(self.wrong):
                value = functools.partial(self.wrong, right)
            else:
                value = self.wrong(right)
            if hasattr(right, "rewriter"):
                # A function of Triton's interpreter, which keeps references to it in tables.
                vars(right).update(vars(value))
                return
            setattr(owner, name, value)
            if getattr(right, "__module__", None) == self.module:
                _replace_in_modules(right, value)


def _takes_arguments(wrong: Callable) -> bool:
    """Return whether `wrong` takes the target's arguments, and does not only give a value."""
    return len(inspect.signature(wrong).parameters) > 1


def _replace_in_modules(right: object, value: object) -> None:
    """Replace an object in all modules of pgtoolkit that have imported it."""
    for module in [module for module in sys.modules.values() if _is_ours(module)]:
        for name, attribute in list(vars(module).items()):
            if attribute is right:
                setattr(module, name, value)


def _is_ours(module: types.ModuleType) -> bool:
    return getattr(module, "__name__", "").partition(".")[0] == "pgtoolkit"


def _replace_code(function: types.FunctionType, wrong: Callable) -> None:
    """Replace the code of a function, which reaches everything that holds a reference to it."""
    right = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    right.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(function)
    name = f"_mutated_{function.__name__}"
    function.__globals__[name] = functools.partial(wrong, right)
    namespace: dict = {}
    exec(f"def replaced(*arguments, **keywords): return {name}(*arguments, **keywords)", namespace)
    function.__code__ = namespace["replaced"].__code__
    function.__defaults__ = None
    function.__kwdefaults__ = None


MUTANTS: list[Mutant] = []


def mutant(target: str) -> Callable:
    """Return a decorator that adds a function to MUTANTS, in place of the target."""

    def added(wrong: Callable) -> Callable:
        MUTANTS.append(Mutant(wrong.__name__, target, wrong, wrong.__module__.rpartition(".")[2]))
        return wrong

    return added


def all_mutants() -> list[Mutant]:
    for file in FOLDERS:
        importlib.import_module(f"mutants.{file}")
    return MUTANTS


def apply_named() -> None:
    """Apply the mutant that VARIABLE names, if it is set."""
    name = os.environ.get(VARIABLE)
    if name:
        next(mutant for mutant in all_mutants() if mutant.name == name).apply()
