"""Reads the expressions, names and calls of a Python program, without running anything of it.

Literals, arithmetic with them, and names that are bound once to them have a value. All else is left
as written.
"""

from __future__ import annotations

import ast
import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pgtoolkit.system.report import text


class Unread(str):
    """The text of a value that is made when a program runs."""


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
Expression = ast.expr | ast.stmt
Arguments = dict[str, Expression]
"""The names of arguments of a call -> what is given."""

_CONVERSIONS = {"float": float, "int": int, "str": str}
NO_LITERAL = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What is raised where an expression stands for no value that is known."""

_OF_FLAGS = {"store_true": False, "store_false": True}
"""The action of a flag of a program's own -> its value when a command leaves it out."""

IN_PLACE = (
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("reverse", "setdefault", "sort", "update", "__delitem__", "__setitem__"),
)
"""Methods that change a list, a set or a dictionary where it is."""

_READ_WHOLE = (
    "GRPOConfig",
    "GRPOTrainer",
    "LoraConfig",
    "ModelConfig",
    "get_peft_model",
    "replace",
)
"""Calls that make a run's settings: an argument of theirs that is not read may change what is
learned."""


class Code:
    """The code of a program.

    calls: the last name of the function that is called -> its calls. assumed: sentences on how it
    was read. unread: those on arguments that are not. options: the values of its command line,
    where these are known. placed: the names of those that code which is read takes. defaults: the
    values of further options that TRL's parser has.
    """

    def __init__(self, content: str, module: str):
        self.calls: dict[str, list[ast.Call]] = {}
        self.assumed: list[str] = []
        self.unread: list[str] = []
        self.options: dict[str, object] = {}
        self.placed: set[str] = set()
        self.defaults: dict[str, object] = {}
        self._module = module
        self._values: dict[str, list[Expression]] = {}  # of names and of attributes
        self._bound: Counter[str] = Counter()
        self._imports: dict[str, str] = {}
        self._fields: dict[str, ast.expr] = {}  # of its own classes, which parsers fill in
        self._changed: set[str] = set()  # names of lists and dictionaries that may change later
        self._in_place: dict[str, str] = {}  # a name -> the code that changes its object in place
        self._in_branches: set[ast.AST] = set()
        self._own: dict[str, ast.FunctionDef] = {}  # its own functions
        self._following: set[ast.AST] = set()  # calls whose objects are looked for
        self._functions_of: dict[ast.AST, ast.AST] = {}  # code inside a function -> the function
        tree = ast.parse(content)
        self.docstring = ast.get_docstring(tree) or ""
        for node in ast.walk(tree):
            self._note(node)
        self._name_changed()
        self._functions: list[str] = []  # those that can be imported without training
        if module.isidentifier() and any(map(_is_guard, tree.body)):
            self._functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]

    def _note(self, node: ast.AST) -> None:
        """Note what a node calls, binds and changes."""
        match node:
            case ast.Call():
                name = ast.unparse(node.func).rpartition(".")[2]
                name = self._imports.get(name, name).rpartition(".")[2]
                self.calls.setdefault(name, []).append(node)
                self._changed |= {item.id for item in node.args if isinstance(item, ast.Name)}
                if isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
                    for changed in (node.func.value, *node.args[:1]):  # the second: list.append(it)
                        is_first = changed is node.func.value
                        if is_first or ast.unparse(node.func.value) in ("list", "dict", "set"):
                            self._note_in_place(changed, node)
                if is_plain_setattr(node):
                    owner, attribute, value = node.args
                    target = f"{ast.unparse(owner)}.{ast.literal_eval(attribute)}"
                    self._values.setdefault(target, []).append(value)
            case ast.FunctionDef():
                self._own[node.name] = node
                self._functions_of |= dict.fromkeys(ast.walk(node), node)
            case ast.ClassDef():
                self._note_class(node)
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value)
                    self._note_in_place(target, node)
            case ast.Delete():
                for target in node.targets:
                    self._note_in_place(target, node)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node.target, value)
            case ast.AugAssign():
                self._assign(node.target, node)
                self._note_in_place(node.target, node)
            case ast.Import() | ast.ImportFrom():
                module = getattr(node, "module", None)
                for name in node.names:
                    path = f"{module}.{name.name}" if module else name.name
                    bound = name.asname or name.name.partition(".")[0]
                    self._imports[bound] = path if name.asname or module else bound
            case ast.Attribute(value=ast.Name(id=name)):
                self._changed.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                self._changed.add(name)
            case ast.If() | ast.For() | ast.While() if not _is_guard(node):
                self._in_branches |= {*ast.walk(node)}
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                self._bound[name] += 1

    def _note_in_place(self, target: ast.expr, node: ast.AST) -> None:
        """Note code that changes an object in place: by a method of it, or by an item."""
        name: ast.AST = target
        while isinstance(name, ast.Subscript):
            name = name.value
        is_changed = isinstance(node, ast.Call) or name is not target
        if isinstance(name, ast.Name) and is_changed:
            self._in_place.setdefault(name.id, ast.unparse(node))

    def _name_changed(self) -> None:
        """Take for changed what has another name that is, or that an own function changes."""
        same = [
            (name, value.id)
            for name, values in self._values.items()
            for value in values
            if isinstance(value, ast.Name)
        ]
        bound: list[tuple[str, str]] = []  # a parameter of an own function, and what it is given
        for name, function in self._own.items():
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            for call in self.calls.get(name, []):
                pairs = [*zip(parameters, call.args, strict=False)]
                pairs += [(str(word.arg), word.value) for word in call.keywords]
                bound += [(each, item.id) for each, item in pairs if isinstance(item, ast.Name)]
        known = -1
        while known < len(self._in_place):
            known = len(self._in_place)
            for first, second in [*same, *[(b, a) for a, b in same], *bound]:
                if first in self._in_place:
                    self._in_place.setdefault(second, self._in_place[first])
        self._changed |= {*self._in_place}

    def _note_class(self, node: ast.ClassDef) -> None:
        """Take a class that is derived from one of TRL's for that one, and say what it changes."""
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and each.value is not None:
                self._fields[ast.unparse(each.target)] = each.value
        for base in map(ast.unparse, node.bases):
            name = self._imports.get(base, base).rpartition(".")[2]
            if name not in ("GRPOConfig", "GRPOTrainer"):
                continue
            self._imports[node.name] = name
            members = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            members += [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
            changed = f", without its own {', '.join(members)}" if members else ""
            self.assumed.append(f"{node.name} is {name}{changed}")

    def _assign(self, target: ast.expr, value: Expression) -> None:
        """Note a value of a name or of an attribute, or one for each of several."""
        match target, value:
            case ast.Tuple(), ast.Tuple() if len(target.elts) == len(value.elts):
                for name, item in zip(target.elts, value.elts, strict=True):
                    self._assign(name, item)
            case ast.Tuple(), ast.Call() if ast.unparse(value.func).endswith("from_pretrained"):
                for name in target.elts:  # unsloth's has a model and its tokenizer
                    self._assign(name, value)
            case ast.Name(id=name), (ast.Name() | ast.Attribute()) if _is_of_trl(value):
                self._imports[name] = ast.unparse(value).rpartition(".")[2]
            case _:
                self._values.setdefault(ast.unparse(target), []).append(value)

    def imports(self, package: str) -> bool:
        """Return whether the program imports a package or something of it."""
        return any(path.partition(".")[0] == package for path in self._imports.values())

    def given(self, call: str, positional: Sequence[str]) -> Arguments:
        """Return the arguments of the first call of a function or a class. positional: the names of
        arguments without a name."""
        calls = self.calls.get(call, [])
        if len(calls) > 1:
            self.assumed.append(f"the first {call} of {len(calls)} is meant")
        return self._arguments(calls[0], positional) if calls else {}

    def _line_of(self, node: ast.AST) -> str:
        return f" (line {getattr(node, 'lineno', '?')})" if self._module else ""

    def _names_bound_to(self, node: ast.AST) -> set[str]:
        return {target for target, values in self._values.items() if node in values}

    def _is_call_of(self, node: ast.AST, call: str) -> bool:
        return isinstance(node, ast.Call) and self._called(node) == call

    def _called(self, node: ast.Call) -> str:
        """Return the last name of the function or class that is called, as it was imported."""
        name = ast.unparse(node.func).rpartition(".")[2]
        return self._imports.get(name, name).rpartition(".")[2]

    def _set_on(self, names: set[str], is_meant: Callable[[ast.AST], bool]) -> Arguments:
        """Return what is set on the object of these names, by attribute, by the code that is meant;
        of what several lines or a branch set, the name alone."""
        settings: Arguments = {}
        for target, values in self._values.items():
            owner, _, name = target.rpartition(".")
            meant = [value for value in values if owner in names and is_meant(value)]
            if meant:
                is_known = len(meant) == 1 and meant[0] not in self._in_branches
                settings[name] = meant[0] if is_known else ast.Name(target)
        return settings

    def _follows(self, node: ast.AST, first: ast.AST | None) -> bool:
        """Return whether code stands behind other code of the same function."""
        is_same = self._functions_of.get(node) is self._functions_of.get(first or node)
        lines = [getattr(each, "lineno", 0) for each in (first, node)]
        return first is not None and is_same and lines[0] < lines[1]

    def _arguments(self, node: ast.Call, positional: Sequence[str] = ()) -> Arguments:
        """Return the arguments of a call by their names, those of dictionaries included."""
        starred = [at for at, item in enumerate(node.args) if isinstance(item, ast.Starred)]
        plain = node.args[: starred[0]] if starred else node.args
        arguments: Arguments = dict(zip(positional, plain, strict=False))
        unread = [ast.unparse(item) for item in node.args[len(plain) :][:1]]
        for keyword in node.keywords:
            if keyword.arg:
                arguments[keyword.arg] = keyword.value
                continue
            values = self._unpacked(keyword.value)
            if values is None:
                unread.append(f"**{ast.unparse(keyword.value)}")
            else:
                arguments |= values
        code = ast.unparse(node.func)
        is_read = self._imports.get(code, code).rpartition(".")[2] in _READ_WHOLE
        sentences = self.unread if is_read else self.assumed
        sentences += [f"{code} gets nothing by {each}, known when it runs" for each in unread]
        return arguments

    def _unpacked(self, node: ast.AST) -> Arguments | None:
        """Return the code of each value of a dictionary whose names are known; None for another."""
        values = self.value(node)
        if isinstance(values, dict):
            return {str(name): ast.Constant(value) for name, value in values.items()}
        made = self._followed(node)
        if isinstance(node, ast.Name) and node.id in self._changed:
            return None
        if isinstance(made, ast.Dict):
            names = [self.value(name) if name else Unread("") for name in made.keys]
            if not any(isinstance(name, Unread) for name in names):
                return dict(zip(map(str, names), made.values, strict=True))
        if isinstance(made, ast.Call) and ast.unparse(made.func) == "dict":
            is_named = not made.args and all(word.arg for word in made.keywords)
            return {str(word.arg): word.value for word in made.keywords} if is_named else None
        return None

    def value(self, node: ast.AST) -> object:
        """Return what an expression stands for, else its code."""
        known = len(self.assumed)
        try:
            return self._literal(node)
        except NO_LITERAL:
            del self.assumed[known:]
            return Unread(ast.unparse(self._followed(node)))

    def _literal(self, node: ast.AST) -> Any:
        """Return what an expression stands for; raises one of NO_LITERAL where a literal is
        missing."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self._literal(item) for item in node.elts]
            case ast.Dict():
                items: dict[object, object] = {}
                for key, value in zip(node.keys, node.values, strict=True):
                    literal = self._literal(value)
                    items |= literal if key is None else {self._literal(key): literal}
                return items
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                return {key: self._literal(item) for key, item in self._arguments(node).items()}
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return _CONVERSIONS[name](self._literal(argument))
            case ast.UnaryOp(op=ast.USub()):
                return -self._literal(node.operand)
            case ast.IfExp():
                return self._literal(node.body if self._literal(node.test) else node.orelse)
            case ast.BinOp():
                return self._computed(node)
            case ast.JoinedStr():
                return "".join(str(self._literal(part)) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self._literal(node.value)
            case ast.Subscript():
                return self._literal(node.value)[self._literal(node.slice)]
            case ast.Name():
                value = self._literal(self._bound_once(node))
                if isinstance(value, list | dict) and node.id in self._changed:
                    raise ValueError(node.id)
                return value
            case ast.Attribute() if node.attr.isupper():
                return self._member(node)
            case ast.Attribute(value=ast.Name(id="torch")):
                return f"torch.{node.attr}"
            case ast.Attribute(value=ast.Name()):
                return self._option(node)
        raise ValueError(node)

    def _member(self, node: ast.Attribute) -> str:
        """Return the value of a member of an enumeration of peft or transformers, by its name."""
        first, _, rest = ast.unparse(node.value).partition(".")
        package, *_, kind = f"{self._imports[first]}.{rest}".rstrip(".").split(".")
        if package not in ("peft", "transformers") or not kind[0].isupper():
            raise LookupError(node.attr)
        return node.attr if package == "peft" else node.attr.lower()

    def _bound_once(self, node: ast.Name) -> Expression:
        """Return what a name is bound to; raises ValueError or LookupError where that is not always
        the same expression."""
        values = self._values[node.id]
        if self._bound[node.id] != len(values) or len({*map(ast.dump, values)}) > 1:
            raise ValueError(node.id)
        return values[0]

    def _computed(self, node: ast.BinOp) -> object:
        """Return a sum, a product and the like of two numbers, or the sum of two texts."""
        left = self._literal(node.left)
        right = self._literal(node.right)
        is_text = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if not is_text and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TypeError(node)
        if isinstance(node.op, ast.Pow):
            power = float(left) ** float(right)  # in integers it could take for ever
            return int(power) if isinstance(left, int) and power.is_integer() else power
        return _ARITHMETIC[type(node.op)](left, right)

    def _option(self, node: ast.Attribute) -> object:
        """Return an option of the program's own: as its command has it, else its default, which is
        then said."""
        code = ast.unparse(node)
        if code in self._values:
            raise LookupError(code)
        named = [(call, self._names_of(call)) for call in self.calls.get("add_argument", [])]
        defined = [(call, names) for call, names in named if node.attr in names]
        for name in dict.fromkeys([node.attr, *(name for _, names in defined for name in names)]):
            positive = name.removeprefix("no_")  # --no_kl is read as kl=False
            if name in self.options or self.options.get(positive) is False:
                option = name if name in self.options else positive
                self.placed.add(option)
                actions = [self._action(call) for call, _ in defined]
                flags = [action for action in actions if action in _OF_FLAGS]
                return not _OF_FLAGS[flags[0]] if flags else self.options[option]
        if node.attr in self._fields and self.defaults:
            value = self._fields[node.attr]
            if isinstance(value, ast.Call):
                value = self._arguments(value)["default"]
            return self._literal(value)
        if node.attr in self.defaults:
            return self.defaults[node.attr]
        ((call, _),) = defined
        option = {keyword.arg: keyword.value for keyword in call.keywords}
        if "required" in option or "set_defaults" in self.calls:
            raise LookupError(code)
        default: object = _OF_FLAGS.get(self._action(call))
        if "default" in option:
            default = self._literal(option["default"])
        if isinstance(default, str) and "type" in option:
            default = _CONVERSIONS[ast.unparse(option["type"])](default)
        self.assumed.append(f"{code}={text(default)}, the default of its option")
        return default

    def _names_of(self, call: ast.Call) -> list[str]:
        """Return the names of an option of the program's own, that of its value included."""
        words = [word.value for word in call.keywords if word.arg == "dest"]
        return [ast.unparse(name).strip("'-").replace("-", "_") for name in [*call.args, *words]]

    def _action(self, call: ast.Call) -> str:
        """Return the action of an option of the program's own; "" for none."""
        actions = [ast.unparse(word.value) for word in call.keywords if word.arg == "action"]
        return actions[0].strip("'") if actions else ""

    def _followed(self, node: ast.AST) -> ast.AST:
        """Return the expression that a name stands for, and others as they are."""
        if not isinstance(node, ast.Name):
            return node
        with contextlib.suppress(*NO_LITERAL):
            return self._bound_once(node)
        with contextlib.suppress(*NO_LITERAL):
            return self._bound_before(node)
        return node

    def _bound_before(self, node: ast.Name) -> Expression:
        """Return what a name is bound to last before its line; raises LookupError or ValueError
        where that is not known."""
        values = self._values[node.id]
        if self._bound[node.id] != len(values) or self._in_branches & {*values}:
            raise LookupError(node.id)
        before = [value for value in values if (value.end_lineno or 0) < node.lineno]
        return max(before, key=lambda value: value.lineno)


def _is_of_trl(node: ast.AST) -> bool:
    """Return whether a node is the name of the trainer or of its configuration."""
    return ast.unparse(node).rpartition(".")[2] in ("GRPOConfig", "GRPOTrainer")


def is_plain_setattr(node: ast.Call) -> bool:
    """Return whether a call is `setattr(owner, "name", value)`."""
    is_setattr = ast.unparse(node.func) == "setattr" and len(node.args) == 3
    return is_setattr and isinstance(node.args[1], ast.Constant) and not node.keywords


def _is_guard(node: ast.AST) -> bool:
    """Return whether a node is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
