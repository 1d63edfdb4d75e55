"""Reads what people have of TRL and verl: YAML and JSON, scripts that start them, and Python."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pgtoolkit.config.elsewhere import Table, flat, tables
from pgtoolkit.config.translate_shell import Script
from pgtoolkit.errors import ConfigError, as_storage_error
from pgtoolkit.system.report import refusal
from pgtoolkit.system.yaml_text import plain_yaml

_LARGEST = 1 << 20
"""Most bytes of a file."""


class Unread(str):
    """The text of a value that is made when a program runs."""


@dataclass
class TheirConfig:
    """What a file sets. values: by full dotted name. processes: how many train, where the file says
    so. assumed: sentences on what was assumed in reading it."""

    table: Table
    values: dict[str, Any]
    processes: int | None = None
    assumed: list[str] = field(default_factory=list)


def read(path: Path) -> TheirConfig:
    """Return what a file of TRL or verl sets; raises ConfigError that says what another file is."""
    if not path.is_file():
        raise _refused(path, "a file", "There is none at this path.")
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"more than {_LARGEST} bytes")
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
            content = "\n".join("".join(cell["source"]) for cell in cells)
            content = re.sub(r"^\s*[%!].*", "", content, flags=re.M)
        if path.suffix in (".py", ".ipynb"):
            return _python(content, path)
        if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or content.startswith("#!"):
            return _shell(content, path)
        return _keys(plain_yaml(content.encode()), path)
    except OSError as error:
        raise as_storage_error(error) from error
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        raise _refused(path, "text that can be read", f"It is no such text: {error}.") from None


def _refused(path: Path, needs: str, reason: str) -> ConfigError:
    use = "a configuration of TRL's GRPOTrainer or of verl's PPO trainer: YAML, JSON, .sh or .py"
    return ConfigError(refusal(f"pgtk translate {path}", needs, path, reason, use))


def _not_theirs(path: Path, what: str) -> ConfigError:
    return _refused(path, "a configuration of TRL's GRPO or of verl's PPO", f"It is {what}.")


def _keys(values: Any, path: Path) -> TheirConfig:
    """Return the configuration in the keys of a YAML or JSON file."""
    if not isinstance(values, dict) or not values:
        raise _not_theirs(path, "a list" if values else "empty")
    logged = {name: value for name, value in values.items() if "wandb" not in name}
    if all(isinstance(value, dict) and "value" in value for value in logged.values()):
        values = {name: value["value"] for name, value in logged.items()}  # Weights & Biases' form
    if any(name.partition(".")[0] == "actor_rollout_ref" for name in values):
        return _config("verl", values)
    for what, names in tables()["TRL"].content["others"].items():
        if {*names} & {*values}:
            raise _not_theirs(path, what)
    if not {*tables()["TRL"].content["signs"]} & {*values}:
        raise _not_theirs(path, "one without any key of GRPO, such as num_generations")
    return _config("TRL", values)


def _config(trainer: str, values: dict[str, Any], processes: object = None) -> TheirConfig:
    table = tables()[trainer]
    dictionaries = [row.name for row in table.rows.values() if row.keys]
    values = {
        name: value
        for name, value in flat(values, dictionaries)
        if not (name.endswith("_target_") and str(value).startswith("verl."))  # their own classes
    }
    sizes = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation")
    numbers = [values[name] for name in sizes if isinstance(values.get(name), int)]
    if processes is None and len(numbers) == 3:  # as to_dict() has them
        processes = numbers[0] // (numbers[1] * numbers[2])
    return TheirConfig(table, values, processes if isinstance(processes, int) else None)


def _shell(content: str, path: Path) -> TheirConfig:
    """Return the configuration of the first command in a script that starts verl or TRL."""
    configurations = []
    what = "a script that starts neither"
    signs = {f"--{name}" for name in tables()["TRL"].content["signs"]}
    for words in Script(content).commands:
        modules = [after for word, after in pairwise(words) if word == "-m"]
        is_script = any(re.search(r"(grpo|gspo)\w*\.py$", word) for word in words)
        theirs = [name for name in modules if name in tables()["verl"].content["modules"]]
        if theirs:
            given = words[words.index(theirs[0]) :]
            matches = [re.fullmatch(r"[+-]*([\w.@/-]+)=(.*)", word, re.S) for word in given]
            values = {match[1].replace("-", "_"): _value(match[2]) for match in matches if match}
            configurations.append(_config("verl", values))
        elif is_script or signs & {*words} or words[:2] == ["trl", "grpo"]:
            configurations.append(_options(words, path))
        elif modules or words[:1] == ["trl"]:
            what = f"a script that starts {' '.join(modules[:1] or words[:2])}"
    if not configurations:
        raise _not_theirs(path, what)
    if len(configurations) > 1:
        configurations[0].assumed.append(
            f"the first of its {len(configurations)} commands is meant"
        )
    return configurations[0]


def _value(content: str) -> Any:
    """Return a value of a command line."""
    if "$" in content or "`" in content:
        return Unread(content)
    try:
        return plain_yaml(f"value: {content}".encode())["value"]
    except (ValueError, KeyError):
        return content


def _options(words: list[str], path: Path) -> TheirConfig:
    """Return the configuration of a command line with `--key value`, and of its file."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        match = re.fullmatch(r"--?([A-Za-z]\w*)(?:=(.*))?", word, re.S)
        if match is not None:
            name = match[1]
            given[name] = [match[2]] if match[2] else []
        elif name and not word.endswith(".py"):
            given[name].append(word.strip(","))
    values: dict[str, Any] = {}
    for name, items in given.items():
        written = f"[{','.join(items)}]" if len(items) > 1 else "".join(items)
        values[name.removeprefix("no_")] = _value(written) if items else name[:3] != "no_"
    files: dict[str, Any] = {"config": {}, "config_file": {}}
    for name in files:
        file = path.parent / str(values.get(name, ""))
        if file.is_file():
            files[name] = plain_yaml(file.read_bytes())
            del values[name]
    processes = values.pop("num_processes", values.pop("nproc_per_node", None))
    processes = processes or files["config_file"].get("num_processes")
    return _config("TRL", files["config"] | values, processes)


def _python(content: str, path: Path) -> TheirConfig:
    """Return the configuration of the calls of GRPOConfig and GRPOTrainer in a program, or of the
    command in its docstring where it takes its arguments from there."""
    tree = ast.parse(content)
    names: dict[str, list[ast.expr]] = {}
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func).rpartition(".")[2], []).append(node)
    if "GRPOConfig" not in calls:
        if "TrlParser" in content and "GRPOConfig" in content:
            return _shell((ast.get_docstring(tree) or "").replace("`", ""), path)
        others = [name for name in calls if re.fullmatch(r"[A-Z]\w*(Config|Trainer)", name)]
        raise _not_theirs(path, f"a program with {', '.join(sorted(others)) or 'no GRPOConfig'}")

    def value(node: Any) -> Any:
        named = names.get(node.id, []) if isinstance(node, ast.Name) else []
        if len(named) == 1:
            return value(named[0])
        if isinstance(node, ast.Dict) and None not in node.keys:
            return dict(zip(map(value, node.keys), map(value, node.values), strict=True))
        try:
            return ast.literal_eval(node)
        except ValueError:
            return Unread(ast.unparse(node))

    values: dict[str, Any] = {"peft_config": True} if "LoraConfig" in calls else {}
    assumed = []
    for call, positional in tables()["TRL"].content["calls"].items():
        section = "peft_config." if call == "LoraConfig" else ""
        for node in calls.get(call, [])[:1]:
            given = dict(zip(positional, node.args, strict=False))
            given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
            if given.pop("**", None):
                assumed.append(f"{call} has no other arguments")
            values |= {
                f"{section}{name}": value(item)
                for name, item in given.items()
                if name not in ("args", "peft_config")
            }
        if len(calls.get(call, [])) > 1:
            assumed.append(f"the first {call} of {len(calls[call])} is meant")
    config = _config("TRL", values)
    config.assumed += assumed
    return config
