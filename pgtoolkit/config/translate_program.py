"""Reads what a Python program gives to TRL's GRPO trainer, without running anything of it.

Literals, arithmetic with them, and names that are bound once to them have a value. All else is left
as written.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections import Counter
from collections.abc import Sequence
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
_Code = ast.expr | ast.stmt
_CONVERSIONS = {"float": float, "int": int, "str": str}
_NO_LITERAL = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
_LOADERS = {
    "load_dataset": ["path", "name", "data_dir", "data_files", "split"],
    "load_from_disk": ["path"],
}
PUNISHMENT = "get_soft_overlong_punishment"
"""What makes TRL's reward function that takes reward off long completions."""

_PUNISHMENTS = (f"trl.rewards.{PUNISHMENT}", f"trl.{PUNISHMENT}")

_OF_FLAGS = {"store_true": False, "store_false": True}
"""The action of a flag of a program's own -> its value when a command leaves it out."""

_READ_WHOLE = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "get_peft_model")
"""Calls that make a run's settings: an argument of theirs that is not read may change what is
learned."""

_KEEPS_ROWS = ("shuffle", "remove_columns", "select_columns", "with_format")
"""Methods of a data set after which it has the same prompts, in whatever order."""


class Program:
    """A program.

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
        self._values: dict[str, list[_Code]] = {}  # of names and of attributes
        self._bound: Counter[str] = Counter()
        self._imports: dict[str, str] = {}
        self._fields: dict[str, ast.expr] = {}  # of its own classes, which parsers fill in
        self._changed: set[str] = set()  # names of lists and dictionaries that may change later
        self._in_branches: set[ast.AST] = set()
        tree = ast.parse(content)
        self.docstring = ast.get_docstring(tree) or ""
        for node in ast.walk(tree):
            self._note(node)
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
            case ast.ClassDef():
                self._note_class(node)
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node.target, value)
            case ast.AugAssign():
                self._assign(node.target, node)
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

    def _assign(self, target: ast.expr, value: _Code) -> None:
        """Note a value of a name or of an attribute, or one for each of several."""
        match target, value:
            case ast.Tuple(), ast.Tuple() if len(target.elts) == len(value.elts):
                for name, item in zip(target.elts, value.elts, strict=True):
                    self._assign(name, item)
            case ast.Tuple(), ast.Call() if ast.unparse(value.func).endswith("from_pretrained"):
                for name in target.elts:  # unsloth's has a model and its tokenizer
                    self._assign(name, value)
            case _:
                self._values.setdefault(ast.unparse(target), []).append(value)

    def imports(self, package: str) -> bool:
        """Return whether the program imports a package or something of it."""
        return any(path.partition(".")[0] == package for path in self._imports.values())

    def given(self, call: str, positional: Sequence[str]) -> dict[str, _Code]:
        """Return the arguments of the first call of a function or a class, and what is set on it
        after the call. positional: the names of arguments without a name."""
        calls = self.calls.get(call, [])
        made = calls[0] if calls else None
        arguments = self._arguments(made, positional) if made else {}
        if made and call != "GRPOTrainer" and self._sets_attributes():
            self.assumed.append(f"{call} has no other arguments")
        names = {target for target, values in self._values.items() if made in values}
        for name in sorted(names):
            if len(self._values[name]) > 1 and call != "get_peft_model":
                self.assumed.append(f"{name} is what {call}(...) makes, and nothing else")
        if call == "GRPOConfig":  # one that a parser makes is known by the trainer that takes it
            trainers = self.calls.get("GRPOTrainer", [])
            words = [word for node in trainers for word in node.keywords]
            names |= {ast.unparse(word.value) for word in words if word.arg == "args"}
            names |= {ast.unparse(third) for node in trainers for third in node.args[2:3]}
        for target, values in self._values.items():
            owner, _, name = target.rpartition(".")
            if owner in names:
                is_known = len(values) == 1 and values[0] not in self._in_branches
                arguments[name] = values[0] if is_known else ast.Name(target)
            elif owner.endswith(".args") and call == "GRPOConfig":
                arguments[name] = ast.Name(target)
        if len(calls) > 1:
            self.assumed.append(f"the first {call} of {len(calls)} is meant")
        return arguments

    def _sets_attributes(self) -> bool:
        """Return whether the program calls setattr on something that is no model and the like."""
        owners = self._owners()
        calls = self.calls.get("setattr", [])
        roots = [
            ast.unparse(argument).partition(".")[0] for node in calls for argument in node.args[:1]
        ]
        return any(root not in owners for root in roots)

    def _arguments(self, node: ast.Call, positional: Sequence[str] = ()) -> dict[str, _Code]:
        """Return the arguments of a call by their names, those of dictionaries included."""
        arguments: dict[str, _Code] = dict(zip(positional, node.args, strict=False))
        for keyword in node.keywords:
            if keyword.arg:
                arguments[keyword.arg] = keyword.value
                continue
            values = self.value(keyword.value)
            if isinstance(values, dict):
                arguments |= {name: ast.Constant(value) for name, value in values.items()}
            else:
                unread = ast.unparse(keyword.value)
                code = ast.unparse(node.func)
                is_read = self._imports.get(code, code).rpartition(".")[2] in _READ_WHOLE
                sentences = self.unread if is_read else self.assumed
                sentences.append(f"{code} gets nothing by **{unread}, known when it runs")
        return arguments

    def value(self, node: ast.AST) -> object:
        """Return what an expression stands for, else its code."""
        known = len(self.assumed)
        try:
            return self._literal(node)
        except _NO_LITERAL:
            del self.assumed[known:]
            return Unread(ast.unparse(self._followed(node)))

    def _literal(self, node: ast.AST) -> Any:
        """Return what an expression stands for; raises one of _NO_LITERAL where a literal is
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

    def _bound_once(self, node: ast.Name) -> _Code:
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

    def frozen(self) -> list[str]:
        """Return the code that turns weights' gradients on or off; none where it turns none off."""
        called = self.calls.get("requires_grad_", [])
        values = [
            argument
            for node in called
            for argument in [*node.args, *(word.value for word in node.keywords)]
        ]
        codes = [ast.unparse(node) for node in called]
        for target, bound in self._values.items():
            if target.endswith(".requires_grad"):
                values += bound
                codes += [f"{target} = {ast.unparse(value)}" for value in bound]
        is_on = all(self.value(value) is True for value in values)
        return [] if is_on else codes

    def set_later(self) -> dict[str, object]:
        """Return what is set on the model, its configuration, its tokenizer or the trainer after
        these are made, by the names of TRL's table, with its line."""
        owners = self._owners()
        codes = [(target, value) for target, values in self._values.items() for value in values]
        for call in self.calls.get("setattr", []):
            if len(call.args) == 3:
                attribute = self.value(call.args[1])
                codes.append((f"{ast.unparse(call.args[0])}.{attribute}", call.args[2]))
        for call in self.calls.get("update", []):
            codes.append((ast.unparse(call.func), call))
        later: dict[str, object] = {}
        for target, value in codes:
            first, dot, rest = target.partition(".")
            owner = owners.get(first, "")
            is_read = rest.endswith((".requires_grad", "requires_grad")) or rest == "chat_template"
            if not (owner and dot) or is_read or (owner == "GRPOTrainer" and rest[:5] == "args."):
                continue
            name = f"{owner}.{rest}".replace("GRPOTrainer.model.", "model.")
            line = f" (line {value.lineno})" if self._module else ""
            later[name] = Unread(f"{text(self.value(value))}{line}")
        return later

    def _owners(self) -> dict[str, str]:
        """Return which names a program gives to the trainer, and what it loads beside: a name ->
        what TRL's table calls it."""
        owners: dict[str, str] = {}
        for name, values in self._values.items():
            called = {ast.unparse(node.func) for node in values if isinstance(node, ast.Call)}
            for function in called if name.isidentifier() else ():
                maker = function.removesuffix(".from_pretrained").rpartition(".")[2]
                if maker == "GRPOTrainer" or self._imports.get(maker, "").endswith(".GRPOTrainer"):
                    owners[name] = "GRPOTrainer"
                elif maker == "GenerationConfig":
                    owners[name] = "model.generation_config"
                elif function.endswith("Config.from_pretrained"):
                    owners[name] = "model.config"
                elif "Model" in maker or maker == "get_peft_model":
                    owners[name] = "model"
        for call in self.calls.get("GRPOTrainer", [])[:1]:
            arguments = self._arguments(call, ["model"])
            for argument in ("model", "processing_class"):
                node = arguments.get(argument)
                if isinstance(node, ast.Name):
                    owners[node.id] = argument
        return owners

    def model(self, node: ast.AST) -> dict[str, object]:
        """Return the name or folder of a model, the other arguments of `from_pretrained`, and the
        adapters that are loaded on it."""
        beside: dict[str, object] = {}
        loaded = self._followed(node)
        followed: list[ast.AST] = []
        while isinstance(loaded, ast.Call) and loaded not in followed:
            followed.append(loaded)
            function = ast.unparse(loaded.func)
            arguments = self._arguments(loaded, ["model", "model_id"])
            if function.endswith((".to", ".cuda")):
                loaded = self._followed(getattr(loaded.func, "value", loaded))
            elif function.endswith("PeftModel.from_pretrained") and "model" in arguments:
                loaded = self._followed(arguments.pop("model"))
                beside |= {f"peft_config.{name}": self.value(arguments[name]) for name in arguments}
            elif function.endswith("get_peft_model") and "model" in arguments:
                loaded = self._followed(arguments["model"])
            else:
                break
        if not (isinstance(loaded, ast.Call) and ast.unparse(loaded.func).endswith("_pretrained")):
            return {"model": self.value(node)} | beside
        is_unsloth = ".Fast" in f".{ast.unparse(loaded.func)}"
        name = "model_name" if is_unsloth else "pretrained_model_name_or_path"
        arguments = self._arguments(loaded, [name])
        path = arguments.pop(name, loaded)
        dtype = arguments.pop("torch_dtype", ast.Constant("auto"))
        arguments = {"dtype": dtype} | arguments
        if is_unsloth:
            arguments = {"load_in_4bit": ast.Constant(True)} | arguments
        beside |= {f"model_init_kwargs.{name}": self.value(arguments[name]) for name in arguments}
        return {"model": self.value(path)} | beside

    def sampling(self, node: ast.AST) -> dict[str, object]:
        """Return the arguments of the parameters of vLLM's that a program makes."""
        made = self._followed(node)
        if not isinstance(made, ast.Call):
            return {"vllm_sampling_params": self.value(node)}
        arguments = self._arguments(made)
        return {f"vllm_sampling_params.{name}": self.value(arguments[name]) for name in arguments}

    def optimizer(self, node: ast.AST) -> Unread:
        """Return the code of an optimizer, and of its schedule, its names replaced by code."""
        node = self._followed(node)
        made = [self._followed(item) for item in getattr(node, "elts", [node])]
        return Unread(", ".join(map(ast.unparse, made)))

    def tokenizer(self, node: ast.AST) -> dict[str, object]:
        """Return the name or folder of a tokenizer, and the chat template that it is given."""
        made = {"processing_class": self.model(node)["model"]}
        templates = self._values.get(f"{ast.unparse(node)}.chat_template")
        if templates:
            made["processing_class.chat_template"] = self.value(templates[-1])
        return made

    def _followed(self, node: ast.AST) -> ast.AST:
        """Return the expression that a name stands for, and others as they are."""
        if not isinstance(node, ast.Name):
            return node
        with contextlib.suppress(*_NO_LITERAL):
            return self._bound_once(node)
        with contextlib.suppress(*_NO_LITERAL):
            return self._bound_before(node)
        return node

    def _bound_before(self, node: ast.Name) -> _Code:
        """Return what a name is bound to last before its line; raises LookupError or ValueError
        where that is not known."""
        values = self._values[node.id]
        if self._bound[node.id] != len(values) or self._in_branches & {*values}:
            raise LookupError(node.id)
        before = [value for value in values if (value.end_lineno or 0) < node.lineno]
        return max(before, key=lambda value: value.lineno)

    def rewards(self, node: ast.AST) -> list[str]:
        """Return the dotted paths of reward functions, and the code of those without one."""
        node = self._followed(node)
        return [self._path(item) for item in getattr(node, "elts", [node])]

    def _path(self, node: ast.AST) -> str:
        """Return the dotted path of a function that is imported, or that this program defines and
        another one can import."""
        code = ast.unparse(node)
        first, dot, rest = code.partition(".")
        if re.fullmatch(r"[\w.]+", code) and not self._bound[first]:
            if first in self._imports:
                return f"{self._imports[first]}{dot}{rest}"
            if code in self._functions:
                return f"{self._module}.{code}"
        call = self._followed(node)
        if isinstance(call, ast.Call) and self._path(call.func) in _PUNISHMENTS:
            sizes = self._arguments(call, ["max_completion_len", "soft_punish_cache"])
            written = [f"{name}={self.value(sizes[name])}" for name in sorted(sizes)]
            return Unread(f"{PUNISHMENT}({', '.join(written)})")
        return str(node.value) if isinstance(node, ast.Constant) else Unread(code)

    def rows(self, node: ast.AST) -> dict[str, object] | Unread | None:
        """Return how a data set is loaded, by the names of load_dataset's arguments; the code where
        that is not known.

        columns: those that the program renames, by their new names. changed: the methods that
        make other rows. None where the program gives none.
        """
        if self.value(node) is None:
            return None
        try:
            rows = self._rows(node)
            if isinstance(rows.get("data_files"), dict):
                rows["data_files"] = rows["data_files"][rows.get("split", "train")]
            return rows
        except _NO_LITERAL:
            return Unread(ast.unparse(self._followed(node)))

    def _rows(self, node: ast.AST) -> dict[str, Any]:
        match node:
            case ast.Name():
                return self._rows(self._bound_before(node))
            case ast.Subscript():
                return {"split": self._literal(node.slice)} | self._rows(node.value)
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method not in _LOADERS:
                rows = self._rows(inner)
                columns = dict(rows.get("columns", {}))
                if method == "rename_column":
                    old, new = map(self._literal, node.args)
                    return rows | {"columns": columns | {new: columns.get(old, old)}}
                kept = method in _KEEPS_ROWS
                return rows if kept else rows | {"changed": [*rows.get("changed", []), method]}
            case ast.Call():
                loader = ast.unparse(node.func).rpartition(".")[2]
                arguments = self._arguments(node, _LOADERS[loader])
                return {name: self._literal(item) for name, item in arguments.items()}
        raise ValueError(node)


def _is_guard(node: ast.AST) -> bool:
    """Return whether a node is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
