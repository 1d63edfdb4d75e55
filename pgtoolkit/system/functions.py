"""The user's functions and classes, imported by their dotted path in the configuration."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from pgtoolkit.errors import ConfigError, PgtoolkitError, first_line
from pgtoolkit.system.process_state import ProcessState
from pgtoolkit.system.report import nearest, refusal
from pgtoolkit.system.safe_text import shortened

_PACKAGE = Path(__file__).parents[1]

MAX_CHARACTERS = 10_000
"""Characters of a traceback of the user's code in an error."""

ADVANTAGE_KEYWORDS = ("lengths", "measures")
"""Keywords that a user's function of advantages may be called with, after the rewards."""


def is_dotted_path(name: str) -> bool:
    """Return whether a text could be `package.module.name`."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) is not None


def import_function(
    key: str,
    path: str,
    arguments: Sequence[str] | None = (),
    keywords: Sequence[str] = (),
    options: Sequence[str] = (),
    reads: Collection[str] = (),
) -> Callable:
    """Return the function or class at `package.module.name`; the module may be a file of the
    current directory.

    key: the configuration key that holds the path.
    arguments, keywords: names of the arguments that it will be called with; None: the caller checks
        its parameters.
    options: other values that the key may have.
    reads: names of parameters, of which a function for this key has one.
    Raises ConfigError if it cannot be imported, or not be called with these arguments.
    """
    if is_of_session(path):
        raise ConfigError(not_in_file(key, path))
    module = _import_or_refuse(key, path, options)
    function = getattr(module, path.rpartition(".")[2], None)
    if not callable(function):
        raise ConfigError(_not_in_module(key, path, module, arguments, keywords, reads))
    if arguments is not None:
        _check_call(key, path, function, arguments, keywords)
    return function


def is_of_session(path: str) -> bool:
    """Return whether a dotted path names what a session of Python has defined, in no file."""
    return path.startswith("__main__.")


def not_in_file(key: str, path: str) -> str:
    """Refuse, as the value of a key, a function or class that a session of Python has defined."""
    kind = kind_of(key)
    name = path.rpartition(".")[2]
    if not name.isidentifier():  # as of a lambda
        name = f"my_{kind}"
    return refusal(
        setting=f"{key}={path}",
        needs=f"a {kind} in a file",
        got="one of a session",
        reason="A run is a process of its own, and reads it there. The cell `%%writefile "
        "my_code.py` of a notebook writes such a file.",
        use=f"{key}=my_code.{name}",
    )


def documented(path: str) -> str | None:
    """Return the first line of the docstring of a function or class, as `_definition` finds it;
    None where there is no such line."""
    node = _definition(path)
    return (ast.get_docstring(node) or "").partition("\n")[0] or None if node else None


def lacks(path: str) -> bool:
    """Return whether the module of a dotted path is a file that does not have the name at all."""
    file = _file_of_module(path)
    if file is None:
        return False
    try:
        code = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    name = re.escape(path.rpartition(".")[2])
    return re.search(rf"\b{name}\b|import \*", code) is None


def parameters_in_file(path: str) -> list[str] | None:
    """Return the names of the parameters of a function, as `_definition` finds it; None where there
    is none, or a class."""
    node = _definition(path)
    return _parameters(node.args) if isinstance(node, ast.FunctionDef) else None


def defaults_in_file(path: str, file: Path | None = None) -> dict[str, object]:
    """Return the parameters of a function with their defaults, or the fields of a class and the
    parameters of its `__init__`; without those whose default is no literal.

    file: of the module, such as a copy of it; None for the one that `_definition` finds.
    """
    node = _definition(path, file)
    if isinstance(node, ast.FunctionDef):
        return _literals(_defaults(node.args))
    defaults: dict[str, ast.expr | None] = {}
    for member in node.body if node else []:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            if "ClassVar" not in ast.unparse(member.annotation):
                defaults[member.target.id] = member.value
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            defaults |= _defaults(member.args)
    return _literals(defaults)


def _parameters(listed: ast.arguments) -> list[str]:
    return [each.arg for each in (*listed.posonlyargs, *listed.args, *listed.kwonlyargs)]


def _defaults(listed: ast.arguments) -> dict[str, ast.expr | None]:
    """Return the parameters with their defaults, None where there is none."""
    values = [*listed.defaults, *listed.kw_defaults]
    missing = len(_parameters(listed)) - len(values)
    return dict(zip(_parameters(listed), [*[None] * missing, *values], strict=True))


def _literals(values: dict[str, ast.expr | None]) -> dict[str, object]:
    """Return the values of those expressions that are numbers, texts, lists and the like."""
    literals = {}
    for name, value in values.items():
        with contextlib.suppress(ValueError, TypeError):
            if value is not None:
                literals[name] = ast.literal_eval(value)
    return literals


def _definition(path: str, file: Path | None = None) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the definition of a function or class, read from its module's file.

    Nothing is imported, so that `pgtk check` may ask. path: `module.name`. None where there is no
    such file, or no definition of that name at its top.
    file: of the module; None to look for it.
    """
    file = file or _file_of_module(path)
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None  # importing it says what is wrong
    name = path.rpartition(".")[2]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    return None


def _file_of_module(path: str) -> Path | None:
    """Return the file of the module of `module.name`; None where there is no such file."""
    package = path.split(".")[:-1]
    if not package:
        return None
    module = Path(*package)
    files = [
        Path(folder, file)
        for folder in (os.getcwd(), *sys.path)
        for file in (module / "__init__.py", Path(f"{module}.py"))
    ]
    return next((file for file in files if file.is_file()), None)


def _import_or_refuse(key: str, path: str, options: Sequence[str]) -> ModuleType:
    """Import the module of a dotted path. Raises ConfigError with the exception of its code."""
    module_name = path.rpartition(".")[0]
    kind = kind_of(key)
    setting = f"{key}={path}"
    state = ProcessState()
    try:
        return _module(module_name)
    except BaseException as error:  # importing runs the user's code
        if is_interrupt(error):
            raise
        reason = (
            "It is looked for in the current directory and where Python finds its packages, which "
            "PYTHONPATH=FOLDER adds to."
        )
        got = f"{type(error).__name__}: {first_line(error)}"
        use = f"{key}=package.module.{kind}"
        place = _line_of_user(error)
        if place is not None:
            got += f", in {place}"
            reason = "Importing the module runs it."
            use = f"`python -c 'import {module_name}'`, which shows where it fails"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            use = _near_path(path, key, options) or use
        raise ConfigError(
            refusal(setting, f"a {kind} that can be imported", got, reason, use)
        ) from error
    finally:
        state.restore(setting)


def _line_of_user(error: BaseException) -> str | None:
    """Return the file and the line of the user's code that an import fails at; None where the
    module itself is not found."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.relpath(error.filename)}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
    of_user = [frame for frame in outside if "importlib" not in frame.filename]
    return (
        f"{os.path.relpath(of_user[-1].filename)}, line {of_user[-1].lineno}" if of_user else None
    )


def _not_in_module(
    key: str,
    path: str,
    module: ModuleType,
    arguments: Sequence[str] | None,
    keywords: Sequence[str],
    reads: Collection[str],
) -> str:
    """Return the refusal of a name that is no function or class of its module.

    The name of another one of the module is proposed: a similar one, else one that can be called
    with these arguments, or that has a parameter which is read.
    """
    module_name, _, name = path.rpartition(".")
    kind = kind_of(key)
    value = getattr(module, name, None)
    got = f"no {name}" if value is None else f"a value of type {type(value).__name__}"
    names = [
        other
        for other, member in vars(module).items()
        if callable(member)
        and getattr(member, "__module__", None) == module_name
        and not other.startswith("_")
    ]
    reason = f"{module_name} has {', '.join(names[:8]) or f'no {kind}'}."
    spec = _spec_here(module_name) if "." not in module_name else None
    if spec is not None and getattr(module, "__file__", None) != spec.origin:
        reason = (
            f"A library has a module {module_name}, which hides {spec.origin}: rename that file."
        )
    usable = [
        other
        for other in names
        if _may_be_called(getattr(module, other), arguments, keywords, reads)
    ]
    near = nearest(name, names, 0.6) or nearest(name, usable or names, 0) or kind
    needs = f"a {kind} in the module {module_name}"
    return refusal(f"{key}={path}", needs, got, reason, f"{key}={module_name}.{near}")


def _may_be_called(
    function: Callable,
    arguments: Sequence[str] | None,
    keywords: Sequence[str],
    reads: Collection[str],
) -> bool:
    """Return whether a function or class takes these arguments, and has a parameter that is read;
    a class may have any."""
    try:
        signature = inspect.signature(function)
        if arguments is not None:
            signature.bind(*arguments, **dict.fromkeys(keywords))
    except (TypeError, ValueError):
        return False
    return isinstance(function, type) or not reads or bool({*reads} & {*signature.parameters})


def lacked(function: Callable, keywords: Sequence[str] = ()) -> list[str]:
    """Return the parameters without a default of a function or class that are not among these."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [each for each in parameters if each.default is each.empty and each.kind in kinds]
    return [each.name for each in needed if each.name not in keywords]


def _check_call(
    key: str,
    path: str,
    function: Callable,
    arguments: Sequence[str],
    keywords: Sequence[str],
) -> None:
    """Raise ConfigError for a function or class that cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        name = path.rpartition(".")[2]
        kind = "class" if isinstance(function, type) else kind_of(key)
        call = ", ".join([*arguments, *(["*", *keywords] if keywords else [])])
        needs = f"a {kind} that can be called as {name}({call})"
        got = f"{name}{signature}"
        use = f"def {name}({call})"
        if kind == "class":
            parameters = "task.options" if key == "task.environment" else "parameters"
            use = f"{parameters} that fit {name}{signature}"
            missing = lacked(function, keywords)
            if key == "loss" and missing and {*keywords} <= signature.parameters.keys():
                use = " ".join([f"loss={path}", *(f"loss.{name}=X" for name in missing)])
        reason = f"Python says of that call: {error}."
        if kind == "class" and _lacks_dataclass(function, keywords):
            needs = "a class that is a dataclass"
            reason = (
                "Its parameters are the fields of a dataclass, which it does not declare to be."
            )
            use = f"@dataclass(frozen=True) in the line above `class {name}`"
        raise ConfigError(refusal(f"{key}={path}", needs, got, reason, use)) from error


def _lacks_dataclass(function: Callable, keywords: Sequence[str]) -> bool:
    """Return whether a class names these parameters as a dataclass does, without being one."""
    if not inspect.isclass(function) or "__dataclass_fields__" in vars(function):
        return False
    return {*keywords} <= {*inspect.get_annotations(function)}


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is the work of a signal, and not raised by code of the user's.

    Python raises it where it interrupts that code; pgtoolkit's own handlers raise it themselves.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    frames = error.__traceback__
    while frames is not None and frames.tb_next:
        frames = frames.tb_next
    return frames is None or Path(frames.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE)


def _near_path(path: str, key: str, options: Sequence[str]) -> str | None:
    """Return settings with a similar name, of a module of the current directory and of an option;
    None if no name is similar."""
    top, _, rest = path.partition(".")
    # A file has no modules inside.
    modules = [] if "." in rest else [file.stem for file in Path().glob("*.py")]
    uses = [f"{key}={near}.{rest}" for near in [nearest(top, modules, 0.6)] if near]
    uses += [f"{key}={near}" for near in [nearest(top, options, 0.6)] if near]
    return " or ".join(uses) or None


def _module(name: str) -> ModuleType:
    """Import a module of the user's, which may lie in the current directory.

    That directory is put at the end of Python's path, so that no file in it, such as profile.py,
    hides a module that a library imports. The named module itself is looked for there first.
    """
    importlib.invalidate_caches()
    folder = os.getcwd()
    top = name.partition(".")[0]
    if folder not in sys.path:
        sys.path.append(folder)
    spec = _spec_here(top)
    if spec is not None and top not in sys.modules and top not in sys.stdlib_module_names:
        module = importlib.util.module_from_spec(spec)
        sys.modules[top] = module
        assert spec.loader is not None
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(top, None)
            raise
    return importlib.import_module(name)


def _spec_here(name: str) -> ModuleSpec | None:
    """Return the import specification of a module of the current directory; None if there is no
    file of it."""
    spec = PathFinder.find_spec(name, [os.getcwd()])
    has_file = spec is not None and spec.loader is not None and spec.origin is not None
    return spec if has_file else None


def kind_of(key: str) -> str:
    """Return "class" or "function": what the dotted path in this key names."""
    names_class = key in ("task.environment", "optimizer") or key.startswith("callbacks.")
    return "class" if names_class else "function"


def place_of(error: BaseException) -> str:
    """Return where the user's function, which pgtoolkit called, raised an error, as " in line 3 of
    mine.py"; "" for another error."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        # Code that Python has written, as of a dataclass, is in no file: <string>.
        if not frame.filename.startswith("<") and not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    if not theirs:
        return ""
    # Below it are the frames of code that it calls, such as torch.
    last = [frame for frame in theirs if frame.filename == theirs[0].filename][-1]
    return f" in line {last.lineno} of {Path(last.filename).name}"


@contextlib.contextmanager
def blaming(function: str, kind: type[PgtoolkitError], on: str) -> Iterator[None]:
    """Turn an exception of the user's function, which the block calls, into an error of `kind` with
    its traceback.

    Changes to the working directory and the like are undone (`ProcessState`).
    function: its name, for the message.
    on: the arguments of the call, in words. They are added to an error of pgtoolkit's too.
    """
    state = ProcessState()
    try:
        yield
    except PgtoolkitError as error:
        raise type(error)(f"{str(error).removesuffix('.')}. It was called on {on}.") from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        frames = error.__traceback__
        # Leave out pgtoolkit's frames above the user's.
        while frames is not None and frames.tb_next:
            if not Path(frames.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
                break
            frames = frames.tb_next
        lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        text = shortened(lines, MAX_CHARACTERS)
        raise kind(f"{function} raised {type(error).__name__} on {on}:\n{text}") from error
    finally:
        state.restore(function)
