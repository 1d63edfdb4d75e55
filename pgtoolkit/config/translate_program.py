"""Reads what a Python program gives to TRL's GRPO trainer."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from pgtoolkit.config.translate_code import (
    IN_PLACE,
    NO_LITERAL,
    Arguments,
    Code,
    Expression,
    Unread,
    is_plain_setattr,
)
from pgtoolkit.system.report import text

_LOADERS = {
    "load_dataset": ["path", "name", "data_dir", "data_files", "split"],
    "load_from_disk": ["path"],
}
PUNISHMENT = "get_soft_overlong_punishment"
"""What makes TRL's reward function that takes reward off long completions."""

_PUNISHMENTS = (f"trl.rewards.{PUNISHMENT}", f"trl.{PUNISHMENT}")

_IS_TAKEN = "GRPOTrainer has read this key when it was made"

_SIZES = ("gradient_accumulation_steps", "per_device_train_batch_size")
"""Keys of GRPOConfig that the size of a generated batch follows from when it is made."""

_LOADS_ADAPTERS = re.compile(r"(?:\w+\.)*(?:Auto)?PeftModel\w*\.from_pretrained").fullmatch
"""Matches the functions that load adapters, and not the whole of a model."""

_COPIES = ("replace", "copy", "deepcopy")
"""Functions that return an object like another one."""

_KEEPS_ROWS = ("shuffle", "remove_columns", "select_columns", "with_format")
"""Methods of a data set after which it has the same prompts, in whatever order."""


class Program(Code):
    """A program that makes and starts GRPOTrainer."""

    def config(self, args: ast.AST | None, taken: Sequence[str]) -> Arguments:
        """Return the arguments of the GRPOConfig that the trainer is given, and what is set on it.

        args: the trainer's argument; None for none. taken: the keys that the trainer reads when it
        is made, so that they are not set later.
        """
        self._name_unread_sets()
        trainers = self.calls.get("GRPOTrainer", [])
        calls = self.calls.get("GRPOConfig", [])
        arguments = None if args is None else self.made(args, "GRPOConfig")
        names = {ast.unparse(args)} if isinstance(args, ast.Name | ast.Attribute) else set()
        if arguments is None and args is None and trainers and not self._has_unread(trainers[0]):
            if calls:
                code = ast.unparse(calls[0])
                self.assumed.append(f"GRPOTrainer is not given {code}, and has TRL's defaults")
            arguments = {}
        elif arguments is None:  # a parser makes it, or it is not known which one is meant
            if len(calls) > 1:
                self.assumed.append(f"the first GRPOConfig of {len(calls)} is meant")
            arguments = self._arguments(calls[0], ["output_dir"]) if calls else {}
            made = {target for target, values in self._values.items() if {*values} & {*calls[:1]}}
            for name in sorted(made):
                if len(self._values[name]) > 1:
                    self.assumed.append(f"{name} is what GRPOConfig(...) makes, and nothing else")
            trainer = trainers[0] if trainers else None
            later = self._set_on(names | made, lambda value: not self._follows(value, trainer))
            arguments = self._with_later(arguments, later)
            if args is not None and calls:
                code = ast.unparse(args)
                self.assumed.append(f"{code} is what GRPOConfig(...) makes, and nothing else")
        if trainers:
            arguments |= self._set_after(names, trainers[0], taken)
        return arguments

    def _set_after(self, names: set[str], trainer: ast.Call, taken: Sequence[str]) -> Arguments:
        """Return what is set on the configuration of a trainer that exists, and say what does
        nothing there. names: those of the configuration."""
        later: Arguments = {}
        known = [*names, *(f"{name}.args" for name in self._names_bound_to(trainer))]
        for target in self._values:  # of another object, which may be the trainer
            owner, _, name = target.rpartition(".")
            if owner.endswith(".args") and owner not in known:
                later[name] = ast.Name(target)
        owners = dict.fromkeys(names, lambda value: self._follows(value, trainer))
        owners |= {f"{name}.args": lambda _: True for name in self._names_bound_to(trainer)}
        for owner, is_later in owners.items():
            for name, value in self._set_on({owner}, is_later).items():
                if name not in taken:
                    later[name] = value
                    continue
                self.assumed.append(f"{self._line(owner, name)} does nothing there: {_IS_TAKEN}")
        return later

    def set_on_trainer(self) -> dict[str, tuple[Expression, str]]:
        """Return what is set on the trainer after it is made: attribute -> (what, its code with
        its line); of an attribute that may have several values, its name."""
        trainers = self.calls.get("GRPOTrainer", [])[:1]
        settings = {}
        for owner in {name for node in trainers for name in self._names_bound_to(node)}:
            for name, value in self._set_on({owner}, lambda _: True).items():
                settings[name] = (value, self._line(owner, name))
        return settings

    def _line(self, owner: str, name: str) -> str:
        """Return the last line of code that sets an attribute."""
        value = self._values[f"{owner}.{name}"][-1]
        return f"{owner}.{name} = {ast.unparse(value)}{self._line_of(value)}"

    def made(self, node: ast.AST, call: str) -> Arguments | None:
        """Return the arguments of the call of a class whose object an expression stands for, and
        what is set on the object before this expression uses it; None where no such call is known.
        """
        names = set()
        used = node
        while isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
            values = self._values.get(ast.unparse(node), [])
            if isinstance(node, ast.Attribute):
                is_one = len(values) == 1 and values[0] not in self._in_branches
                followed: ast.AST = values[0] if is_one else node
            else:
                followed = self._followed(node)
            if followed is node or ast.unparse(followed) in names:
                made = [value for value in values if self._is_call_of(value, call)]
                if len(made) != 1:
                    return None
                code = ast.unparse(node)
                self.assumed.append(f"{code} is what {call}(...) makes, and nothing else")
                followed = made[0]
            node = followed
        if isinstance(node, ast.IfExp):
            is_body = self.value(node.test)
            if isinstance(is_body, Unread):
                return None
            return self.made(node.body if is_body else node.orelse, call)
        if not isinstance(node, ast.Call) or node in self._following:
            return None
        name = self._called(node)
        if name == call:
            arguments = self._arguments(node, ["output_dir"] if call == "GRPOConfig" else [])
        elif name in _COPIES and node.args:
            self._following.add(node)  # what is made of itself is not followed for ever
            copied = self.made(node.args[0], call)
            self._following.discard(node)
            if copied is None:
                return None
            changes = self._arguments(node)
            arguments = copied | changes
            if call == "GRPOConfig" and name == "replace":
                self._say_refused(node, changes)
        else:
            self._following.add(node)
            returned = self._returned(node)
            made_there = None if returned is None else self.made(returned, call)
            self._following.discard(node)
            return made_there
        call_of_it = node
        later = self._set_on(
            names,
            lambda value: not self._follows(call_of_it, value) and not self._follows(value, used),
        )
        return self._with_later(arguments, later)

    def _returned(self, call: ast.Call) -> ast.AST | None:
        """Return what an own function without parameters returns; None where that is not known."""
        function = self._own.get(ast.unparse(call.func))
        if function is None or call.args or call.keywords:
            return None
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        return returns[0].value if len(returns) == 1 else None

    def _with_later(self, arguments: Arguments, later: Arguments) -> Arguments:
        """Return the arguments of an object with what is set on it later.

        The size of a generated batch follows from those of GRPOConfig when it is made, and a switch
        of scale_rewards is a word from then on.
        """
        both = {**self.options, **arguments}
        is_derived = not {"generation_batch_size", "steps_per_generation"} & {*both, *later}
        sizes = [name for name in _SIZES if name in later]
        if is_derived and sizes and not self.imports("unsloth"):
            option = ast.parse(repr(self.options.get(_SIZES[0], 1)), mode="eval").body
            steps = arguments.get(_SIZES[0], option)
            arguments = arguments | {"steps_per_generation": steps}
        if is_derived and _SIZES[1] in later:
            self.unread.append(
                f"{_SIZES[1]} is set on a GRPOConfig that exists: its generation_batch_size stays "
                "what it was there, and follows from it here"
            )
        scaled = later.get("scale_rewards")
        if isinstance(scaled, ast.Constant) and isinstance(scaled.value, bool):
            later = later | {"scale_rewards": ast.Constant(str(scaled.value))}
        return arguments | later

    def loaded_adapters(self) -> Arguments:
        """Return the arguments of a model's `load_adapter`, the folder of the adapters first."""
        arguments = self.given("load_adapter", ["model_id"])
        folder = arguments.pop("peft_model_id", arguments.get("model_id"))
        return {"model_id": folder} | arguments if folder is not None else {}

    def adapters_of_model(self, of_trainer: Arguments, loads: bool) -> str:
        """Return what gives the model of a trainer its adapters; "" where it has none.

        of_trainer: the arguments of GRPOTrainer. loads: PeftModel.from_pretrained does.
        """
        made = self._followed(of_trainer.get("model", ast.Constant(None)))
        function = ast.unparse(made.func) if isinstance(made, ast.Call) else ""
        if loads or function.endswith("get_peft_model"):
            return "PeftModel"
        return "load_adapter" if "load_adapter" in self.calls else ""

    def _say_refused(self, node: ast.Call, changes: Arguments) -> None:
        """Say that TRL refuses a copy of its configuration, if it does: each has both sizes."""
        sizes = [changes.get(name) for name in ("generation_batch_size", "steps_per_generation")]
        if not any(isinstance(size, ast.Constant) and size.value is None for size in sizes):
            self.assumed.append(
                f"{ast.unparse(node)} is what is meant; TRL stops there, since a GRPOConfig that "
                "exists has both generation_batch_size and steps_per_generation: with "
                "generation_batch_size=None in it, too, it does not"
            )

    def _has_unread(self, node: ast.Call) -> bool:
        """Return whether a call may have arguments that are known when the program runs."""
        is_starred = any(isinstance(item, ast.Starred) for item in node.args)
        unnamed = [word.value for word in node.keywords if word.arg is None]
        return is_starred or any(self._unpacked(value) is None for value in unnamed)

    def _name_unread_sets(self) -> None:
        """Say which calls set something that is known when the program runs."""
        owners = self._owners()
        names = self._names_bound_to_calls_of("GRPOConfig")
        made = names | self._names_bound_to_calls_of("LoraConfig")
        made |= {name for name, owner in owners.items() if owner == "GRPOTrainer"}
        for node in self.calls.get("setattr", []):
            owner = ast.unparse(node.args[0]) if node.args else ""
            code = f"{ast.unparse(node)}{self._line_of(node)}"
            if not is_plain_setattr(node) and owner in names:
                self.unread.append(f"{code} is not read")
            elif not is_plain_setattr(node) and owner.partition(".")[0] not in owners:
                self.assumed.append(f"{code} sets no key of GRPOConfig")
        for node in [node for nodes in self.calls.values() for node in nodes]:
            owner, _, method = ast.unparse(node.func).rpartition(".")
            sets = method.startswith("set_") and owner in names
            sets |= method == "update" and owner in _dictionaries_of(names)
            sets |= method in IN_PLACE and owner.rpartition(".")[0] in made
            if sets:
                self.unread.append(f"{ast.unparse(node)}{self._line_of(node)} is not read")
        for target, values in self._values.items():
            if any(target.startswith(f"{owner}[") for owner in _dictionaries_of(names)):
                code = f"{target} = {ast.unparse(values[-1])}"
                self.unread.append(f"{code}{self._line_of(values[-1])} is not read")

    def _names_bound_to_calls_of(self, call: str) -> set[str]:
        """Return the names of what the calls of a class make, and of what a trainer is given."""
        names = {name for node in self.calls.get(call, []) for name in self._names_bound_to(node)}
        for node in self.calls.get("GRPOTrainer", []):
            names |= {ast.unparse(word.value) for word in node.keywords if word.arg == "args"}
            names |= {f"{name}.args" for name in self._names_bound_to(node)}
        return names

    def options_of_peft(self, node: ast.AST) -> ast.AST | None:
        """Return what TRL's get_peft_config is called with; None where an expression stands for no
        call of that."""
        call = self._followed(node)
        if not isinstance(call, ast.Call):
            return None
        name = ast.unparse(call.func)
        is_trls = self._imports.get(name.partition(".")[0], "trl").partition(".")[0] == "trl"
        is_own = name in self._own
        arguments = self._arguments(call, ["model_args"])
        if self._called(call) != "get_peft_config" or not is_trls or is_own:
            return None
        return arguments.get("model_args")

    def added_adapters(self) -> Expression | None:
        """Return the configuration of adapters that is added to a model by a method of it."""
        for call in self.calls.get("add_adapter", []):
            for node in [*call.args, *(word.value for word in call.keywords)]:
                if not isinstance(self._followed(node), ast.Constant):
                    return node
        return None

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
            if len(call.args) == 3 and not is_plain_setattr(call):
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
                elif maker == "ModelConfig":
                    continue
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
            elif _LOADS_ADAPTERS(function):
                named = ["model", "model_id"]
                if "Auto" in function:
                    named = ["pretrained_model_name_or_path", "adapter_name", "is_trainable"]
                arguments = self._arguments(loaded, named)
                folder = arguments.pop(named["Auto" not in function], None)
                arguments.pop("model", None)
                beside |= {f"peft_config.{name}": self.value(arguments[name]) for name in arguments}
                code = Unread(ast.unparse(loaded))
                return beside | {"peft_config.model_id": self.value(folder) if folder else code}
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

    def rewards(self, node: ast.AST) -> list[str]:
        """Return the dotted paths of reward functions, and the code of those without one."""
        if isinstance(node, ast.Name) and node.id in self._in_place:
            return [Unread(f"{node.id} after {self._in_place[node.id]}")]
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
        except NO_LITERAL:
            return Unread(ast.unparse(self._followed(node)))

    def _rows(self, node: ast.AST) -> dict[str, Any]:
        match node:
            case ast.Name() if node.id not in self._in_place:
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


def _dictionaries_of(names: set[str]) -> list[str]:
    """Return how a program writes the dictionaries of attributes of objects of these names."""
    return [code for name in names for code in (f"{name}.__dict__", f"vars({name})")]
